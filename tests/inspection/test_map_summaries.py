"""Two small maps of an activation, compared with NumPy's of the whole activation, kept as feature maps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hookscope.errors import UnfitInputError
from hookscope.inspection import forward
from hookscope.inspection.map_summaries import MapRecorder
from hookscope.results.activations import Activations, FeatureMaps, MapSummary
from tests.inspection.test_forward import batches_of
from tests.inspections import inspect
from tests.networks import Apply


class Tokens(nn.Module):
    """A patch convolution, and tokens on its grid behind a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 4, 4)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)  # (N, T, D)
        apart = torch.full((len(x), 1, 6), 50.0) * torch.arange(6)
        return self.norm(torch.cat([apart, tokens], 1))


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, 2)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x).movedim(1, -1))


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(inplace=True), nn.Conv2d(5, 7, 3, stride=2), nn.BatchNorm2d(7))


def clip() -> nn.Module:
    return nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.ReLU())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "maps": (convolutions, (2, 3, 12, 17)),
    "tokens": (Tokens, (2, 3, 16, 24)),
    "channels last": (ChannelsLast, (2, 3, 12, 10)),
    "frames": (clip, (2, 3, 5, 6, 7)),
}


def summaries_of(model: nn.Module, x: Tensor) -> Activations:
    torch.manual_seed(0)
    return inspect(model, x, grids_for=3, summaries=True)


def whole(maps: FeatureMaps) -> NDArray[np.float32]:
    """Return the maps of an activation, (C, H, W); of a clip the frame in the middle."""
    return maps.values[:, maps.values.shape[1] // 2] if maps.values.ndim == 4 else maps.values


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float32) for kind in NETWORKS), ("maps", torch.float64), ("maps", torch.bfloat16)],
)
def test_all_channels_are_combined_as_numpy_does_and_the_strongest_channel_is_that_channel(
    kind: str, dtype: torch.dtype
) -> None:
    build, shape = NETWORKS[kind]
    torch.manual_seed(1)
    model = build().to(dtype)
    run = summaries_of(model, torch.randn(shape, dtype=dtype))
    assert len(run.map_summaries) == len(run.feature_maps) == 2 * len(run.rows)
    for summary, kept in zip(run.map_summaries, run.feature_maps, strict=True):
        values = whole(kept).astype(np.float64)  # (C, H, W)
        assert (summary.row, summary.label, summary.input_index) == (kept.row, kept.label, kept.input_index)
        assert (summary.channel_count, *summary.size) == values.shape
        is_last = run.rows[summary.row].activation.channel_axis == values.ndim
        of_tokens = is_last or (kind == "tokens" and summary.label == "norm")
        assert summary.over_channels == ("RMS" if of_tokens else "mean")
        combined = np.sqrt((values**2).mean(axis=0)) if of_tokens else values.mean(axis=0)
        np.testing.assert_allclose(summary.combined, combined, rtol=1e-5, atol=1e-6)
        strengths = np.sqrt((values**2).mean(axis=(1, 2)))
        assert strengths[summary.channel] == pytest.approx(strengths.max(), rel=1e-5)
        np.testing.assert_array_equal(summary.strongest, whole(kept)[summary.channel])


@pytest.mark.parametrize("shape", [(2, 3, 16, 24), (2, 96, 8)])
def test_float8_outputs_have_the_maps_and_token_norms_of_their_values(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    exact, expected = (
        inspect(Apply(function), x, summaries=True, tokens=True)
        for function in (lambda x: x.to(torch.float8_e5m2), lambda x: x.to(torch.float8_e5m2).float())
    )
    assert [row.tokens for row in exact.rows] == [row.tokens for row in expected.rows]
    assert len(exact.map_summaries) == 2
    for first, second in zip(exact.map_summaries, expected.map_summaries, strict=True):
        np.testing.assert_array_equal(first.combined, second.combined)
        np.testing.assert_array_equal(first.strongest, second.strongest)


@pytest.mark.parametrize(
    "unreadable", [lambda x: x.to("meta"), lambda x: x.byte().view(torch.float4_e2m1fn_x2)], ids=["meta", "float4"]
)
def test_outputs_that_cannot_be_measured_have_no_maps(unreadable: Callable[[Tensor], Tensor]) -> None:
    run = summaries_of(Apply(unreadable), torch.ones(2, 3, 8, 8))
    assert run.rows[0].flags == ("unmeasured",)
    assert run.map_summaries == run.feature_maps == ()


class Heads(Tokens):
    """Attends with three heads, whose modules see (N, heads, T, T) and (N, heads, T, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.softmax, self.head_norm = nn.Softmax(-1), nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = super().forward(x).unflatten(2, (3, 2)).transpose(1, 2)
        return (self.softmax(tokens @ tokens.mT) @ self.head_norm(tokens)).transpose(1, 2).flatten(2)


def test_heads_of_attention_are_no_maps_of_the_picture() -> None:
    run = summaries_of(Heads(), torch.randn(2, 3, 16, 24))
    assert {summary.label for summary in run.map_summaries} == {"patches", "norm"}
    assert {summary.size for summary in run.map_summaries} == {(4, 6)}


def test_large_maps_are_averaged_over_blocks_those_at_the_end_smaller() -> None:
    x = torch.randn(1, 2, 165, 330)
    [summary] = summaries_of(nn.Identity(), x).map_summaries
    assert summary.size == (165, 330)
    assert summary.combined.shape == (55, 110)  # blocks of 3 x 3
    means = x[0].numpy().mean(axis=0)
    np.testing.assert_allclose(summary.combined, means.reshape(55, 3, 110, 3).mean(axis=(1, 3)), rtol=1e-4, atol=1e-6)
    [uneven] = summaries_of(nn.Identity(), torch.arange(161.0).expand(1, 1, 161, 161)).map_summaries
    assert uneven.combined.shape == (81, 81)
    assert uneven.combined[0, -1] == 160  # the last block has one column
    assert uneven.combined[0, 0] == 0.5
    [loud] = summaries_of(nn.Identity(), torch.full((1, 2, 200, 200), 3e38)).map_summaries  # float32 cannot add two
    assert (loud.combined == loud.strongest).all()
    assert (loud.combined == np.float32(3e38)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_channel_with_nan_comes_before_one_with_inf_and_that_before_the_strongest(dtype: torch.dtype) -> None:
    x = torch.ones(1, 4, 4, 4, dtype=dtype)
    x[0, 3] = 1e30  # its square is no float32
    assert shown_channel(x) == 3
    x[0, 2, 0, 0] = -torch.inf
    assert shown_channel(x) == 2
    x[0, 1, 2, 3] = torch.nan
    assert shown_channel(x) == 1
    [summary] = summaries_of(nn.Identity(), x).map_summaries
    for values in (summary.combined, summary.strongest):
        assert np.argwhere(np.isnan(values)).tolist() == [[2, 3]]
    [summary] = summaries_of(nn.Identity(), torch.full((1, 3, 4, 4), torch.nan, dtype=dtype)).map_summaries
    assert summary.channel == 0


def test_the_magnitude_of_a_step_is_finite_where_float32_cannot_add_the_squares_of_its_channels() -> None:
    x = torch.zeros(1, 5, 8)  # words
    x[0, 2] = 1e19
    [summary] = summaries_of(nn.Identity(), x).map_summaries
    np.testing.assert_allclose(summary.combined[0], [0, 0, 1e19, 0, 0], rtol=1e-6)


def shown_channel(x: Tensor) -> int:
    [summary] = summaries_of(nn.Identity(), x).map_summaries
    return summary.channel


@pytest.mark.parametrize("layer", [nn.Conv1d(3, 5, 4), nn.Linear(7, 5)], ids=["a signal", "words"])
def test_sequences_have_magnitudes_at_each_step(layer: nn.Module) -> None:
    x = torch.randn(2, 3, 7)
    inputs, summary = layer(x).detach().numpy(), summaries_of(layer, x).map_summaries[0]
    steps = inputs[0] if isinstance(layer, nn.Conv1d) else inputs[0].T  # (C, L)
    assert summary.size == (1, steps.shape[1])
    np.testing.assert_allclose(summary.combined[0], np.sqrt((steps.astype(np.float64) ** 2).mean(0)), rtol=1e-5)
    assert summary.channel == (steps**2).sum(1).argmax()
    np.testing.assert_allclose(summary.strongest[0], abs(steps[summary.channel]), rtol=1e-6)


class LargestMade(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most elements that a tensor has which does not share the memory of the given one."""

    def __init__(self, of: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements, self.apart_from = 0, of.untyped_storage()._cdata

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(output, Tensor) and output.untyped_storage()._cdata != self.apart_from:
            self.elements = max(self.elements, output.numel())
        return output


@pytest.mark.parametrize("length", [999, 10_000])
def test_a_long_recording_is_averaged_over_blocks_and_never_copied(length: int) -> None:
    x, step = torch.randn(1, 1, length), -(-length // 160)
    recorder = MapRecorder()
    recorder.start((0,))
    with LargestMade(x) as made:
        recorder.see(("", 0, ""), x, 1, ())
    [summary] = recorder.saved
    magnitudes = x.abs().numpy().reshape(-1)
    blocks = [magnitudes[begin : begin + step].mean() for begin in range(0, length, step)]
    for values in (summary.combined, summary.strongest):
        np.testing.assert_allclose(values.reshape(-1), blocks, rtol=1e-5)
    assert made.elements <= max(4 * step, 160)


def test_the_first_three_inputs_have_summaries_whatever_the_batches_and_those_left_out() -> None:
    class Fragile(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if (x == 1).all(dim=(1, 2, 3)).any():
                raise ValueError("no ones")
            return x

    inputs = torch.arange(6.0)[:, None, None, None].expand(6, 1, 2, 2)
    refused: list[UnfitInputError] = []
    for size in (1, 2, 6):
        run = inspect(Fragile(), batches_of(inputs, size), summaries=True, on_error=refused.append)
        shown = [(summary.input_index, float(summary.combined[0, 0])) for summary in run.map_summaries]
        assert shown == [(0, 0.0), (1, 2.0), (2, 3.0)]
    assert len(refused) == 3


def test_a_mean_that_is_zero_up_to_rounding_is_zero_and_other_small_means_are_not() -> None:
    torch.manual_seed(3)
    [centred] = summaries_of(Centred(), torch.randn(1, 8, 12, 10)).map_summaries
    assert not centred.combined.any()
    x = torch.tensor([1.0, -1.0]).view(1, 2, 1, 1).expand(1, 2, 3, 3).clone()
    x[0, 0, 1, 1] += 1e-4
    [summary] = summaries_of(nn.Identity(), x).map_summaries
    assert np.argwhere(summary.combined).tolist() == [[1, 1]]
    assert summary.combined[1, 1] == pytest.approx(5e-5, rel=1e-2)


@pytest.mark.parametrize("broken", [torch.inf, -torch.inf, torch.nan])
def test_one_value_that_is_not_finite_leaves_the_means_at_other_positions(broken: float) -> None:
    x = torch.ones(1, 2, 3, 3)
    x[0, 0, 1, 2] = broken
    [summary] = summaries_of(nn.Identity(), x).map_summaries
    assert np.array_equal(summary.combined, x.mean(1)[0].numpy(), equal_nan=True)


class Stages(nn.Module):
    """Three sizes of maps, forty layers in the second, and a way back to the first size."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.stem = nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(3)))
        self.halve = nn.Conv2d(3, 4, 2, 2)
        self.body = nn.Sequential(*(nn.Conv2d(4, 4, 1) for _ in range(40)))
        self.end = nn.Conv2d(4, 4, 2, 2)
        self.back = nn.Upsample(scale_factor=4)

    def forward(self, x: Tensor) -> Tensor:
        for part in (*self.stem, self.halve, *self.body, self.end):
            x = self.act(part(x))
        return self.back(x)


def every_summary(network: nn.Module, x: Tensor) -> tuple[MapSummary, ...]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forward, "FEW_ROWS", 1000)
        return inspect(network, x, summaries=True).map_summaries


def test_an_overview_has_the_first_row_the_last_of_each_size_and_some_between_as_every_row_has_them() -> None:
    torch.manual_seed(4)
    network, x = Stages(torch.sigmoid), torch.randn(2, 3, 8, 12)
    every = {(row.label, row.input_index): row for row in every_summary(network, x)}
    shown = inspect(network, x, summaries=True).map_summaries
    assert len(every) == 2 * 46
    # Of the 41 rows of the second size, row 16 is body.15 and row 32 is body.31.
    labels = ["stem.0", "stem.2", "body.15", "body.31", "body.39", "end", "back"]
    assert [(row.label, row.input_index) for row in shown] == [(label, at) for label in labels for at in (0, 1)]
    for row in shown:
        same = every[row.label, row.input_index]
        np.testing.assert_array_equal(row.combined, same.combined)
        np.testing.assert_array_equal(row.strongest, same.strongest)


def test_outputs_that_a_function_overwrites_are_summarised_before_it_does() -> None:
    torch.manual_seed(5)
    network, x = Stages(torch.relu_), torch.randn(1, 3, 8, 12)
    every = {row.label: row for row in every_summary(network, x)}
    shown = inspect(network, x, summaries=True).map_summaries
    # stem.2 is lost, as it was overwritten before it was known to be the last; from then on no row is.
    assert [row.label for row in shown] == ["stem.0", *(label for label in every if not label.startswith("stem"))]
    for row in shown:
        np.testing.assert_array_equal(row.strongest, every[row.label].strongest)

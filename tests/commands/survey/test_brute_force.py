"""Every figure of a survey equals that of all activations kept, over several chunks and batches."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import ConvNeXt, VisionTransformer
from torchvision.models.convnext import CNBlockConfig

import hookscope
from hookscope.commands.survey.channel_rows import ChannelRows, reduce_channels
from hookscope.commands.survey.describe import answer
from hookscope.errors import InputError
from tests.commands.survey.kept import check_row, kept_outputs
from tests.networks import Network

TOP = 4


class Odd(nn.Module):
    """Channels that are dead, far from zero, constant, NaN or Inf, and a ReLU in place that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.far = nn.Conv2d(8, 5, 1)
        self.broken = nn.Conv2d(8, 3, 1)
        self.head = nn.Linear(5, 4)
        with torch.no_grad():
            self.conv.bias[0] = -1e3  # dead behind the ReLU
            self.far.weight.mul_(1e-3)
            self.far.bias[:] = torch.tensor([1000.0, -300.0, 1.0, 0.0, 50.0])
            self.far.weight[4] = 0  # constant
            self.broken.weight[0] = 0
            self.broken.bias[0] = torch.nan
            self.broken.weight[1] *= 1e38

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv(x))
        self.broken(x)
        return self.head(self.relu(self.far(x).amax((2, 3))))


def pictures(count: int, *shape: int) -> Tensor:
    """Return random inputs, some of them equal, so that there are ties."""
    made = torch.rand(count, *shape)
    made[count // 2] = made[1]
    made[count - 1] = made[2]
    return made


def convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=5)


def of_videos() -> nn.Module:
    convolutions = [nn.Conv3d(3, 6, 3, padding=1), nn.BatchNorm3d(6), nn.ReLU(inplace=True), nn.Conv3d(6, 4, 3)]
    return nn.Sequential(*convolutions, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3))


BUILDERS: dict[str, Callable[[], Network]] = {
    "odd": lambda: Network(Odd, lambda: (pictures(45, 3, 9, 7),)),
    "convnext": lambda: Network(convnext, lambda: (pictures(11, 3, 32, 64),)),
    "vit": lambda: Network(
        lambda: VisionTransformer(32, 8, 2, 3, 24, 48, num_classes=5), lambda: (pictures(11, 3, 32, 32),)
    ),
    "videos": lambda: Network(of_videos, lambda: (pictures(11, 3, 4, 8, 8),)),
    "double": lambda: Network(lambda: Odd().double(), lambda: (pictures(21, 3, 8, 8).double(),)),
}


@pytest.mark.sample("odd")
@pytest.mark.parametrize("name", BUILDERS)
def test_every_figure_equals_that_of_all_values(name: str) -> None:
    torch.manual_seed(0)
    network, (inputs,) = BUILDERS[name]().build(), BUILDERS[name]().args()
    kept = kept_outputs(network, inputs, 3)
    survey = hookscope.survey(network, inputs, batch_size=3, chunk_size=9, top=TOP)
    names = [f"tensor[{number}]" for number in range(len(inputs))]
    assert survey.input_count == len(inputs)
    checked = 0
    for row in survey:
        if row.label in kept and row.channels and kept[row.label].shape[0] == len(inputs):
            check_row(row, kept[row.label], names, TOP)
            checked += 1
    assert checked >= 0.9 * sum(1 for row in survey if row.slot == "" and row.channels)
    assert checked > 4


class Functional(nn.Module):
    """Activation functions without modules; the second kills all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3)
        nn.init.constant_(self.second.bias, -100.0)

    def forward(self, image: Tensor, shift: Tensor) -> Tensor:
        x = functional.relu(self.first(image) + shift[:, :, None, None])
        return self.second(x).clamp_(min=0).mean((2, 3))


def test_activation_functions_are_measured_without_modules(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, inputs = Functional(), {"image": torch.rand(13, 3, 9, 9), "shift": torch.randn(13, 6)}
    torch.save(inputs, tmp_path / "inputs.pt")
    survey = hookscope.survey(network, tmp_path / "inputs.pt", batch_size=4, chunk_size=8, top=TOP)
    assert [row.label for row in survey] == ["first", "(model):relu", "second", "(model):clamp"]
    with torch.no_grad():  # in the same batches: others may be rounded differently
        parts = [network.first(word) for word in inputs["image"].split(4)]
        rectified = (torch.cat(parts) + inputs["shift"][:, :, None, None]).clamp(min=0)
    names = [f"{tmp_path}/inputs.pt[{number}]" for number in range(13)]
    check_row(survey["(model):relu"], rectified.double().numpy(), names, TOP)
    assert [row.label for row in survey if row.dead_channels] == ["(model):clamp"]
    words = " ".join(str(survey).split())
    assert "6 of 24 channels are 0 on 13 inputs, too few inputs to call a channel dead." in words
    alone = hookscope.survey(network, tmp_path / "inputs.pt", layer=["first", "second"])
    assert [row.label for row in alone] == ["first", "second"]


def test_inputs_in_another_order_give_the_same_counts_and_bins() -> None:
    torch.manual_seed(0)
    network, inputs = Odd(), pictures(37, 3, 9, 7)
    first = hookscope.survey(network, inputs, batch_size=1, chunk_size=8)
    second = hookscope.survey(network, inputs[torch.randperm(37)], batch_size=1, chunk_size=8)
    for one, other in zip(first, second, strict=True):
        a, b = one.activation.distribution, other.activation.distribution
        assert a is not None
        assert b is not None
        assert (a.keys == b.keys).all()
        assert (a.counts == b.counts).all()
        counted = [
            (channel.firing_inputs, channel.firing_positions, channel.min, channel.max) for channel in one.channels
        ]
        assert counted == [
            (channel.firing_inputs, channel.firing_positions, channel.min, channel.max) for channel in other.channels
        ]


def test_classes_explain_a_channel_as_the_formula_says(tmp_path: Path) -> None:
    torch.manual_seed(1)
    for label, mean in (("a", 0.0), ("b", 1.0), ("c", 0.0)):
        (tmp_path / label).mkdir()
        for number in range(7):
            np.save(tmp_path / label / f"{number}.npy", (torch.randn(3, 6, 6) + mean).numpy())
    network = nn.Conv2d(3, 6, 3)
    survey = hookscope.survey(network, tmp_path, by_class=True, batch_size=4, chunk_size=5)
    assert survey.classes == {"a": 7, "b": 7, "c": 7}
    files = sorted(tmp_path.glob("*/*.npy"))
    with torch.no_grad():
        pooled = network(torch.from_numpy(np.stack([np.load(file) for file in files]))).mean((2, 3)).double().numpy()
    groups = np.array([file.parent.name for file in files])
    for channel in survey[survey.rows[0].label].channels:
        x = pooled[:, channel.channel]
        whole = ((x - x.mean()) ** 2).sum()
        within = sum(((x[groups == label] - x[groups == label].mean()) ** 2).sum() for label in "abc")
        expected = (whole - within - 2 * within / (21 - 3)) / whole
        assert channel.selectivity == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert channel.best_class == max("abc", key=lambda label: x[groups == label].mean())


def test_what_is_no_labelled_picture_is_told_in_the_words_of_a_survey(tmp_path: Path) -> None:
    for label in "ab":
        (tmp_path / label).mkdir()
        np.save(tmp_path / label / "0.npy", np.ones((3, 6, 6), np.float32))
    np.save(tmp_path / "1.npy", np.ones((3, 6, 6), np.float32))
    (tmp_path / "a" / "read.me").touch()
    survey = hookscope.survey(nn.Conv2d(3, 6, 3), tmp_path, by_class=True)
    assert f"{tmp_path}: 1 picture outside the class folders left out." in survey.notes
    assert f"{tmp_path}: 1 file skipped: 1 .me." in survey.notes
    for name, content in (("l.csv", "0.png,a,b\n"), ("l.json", '{"0.png": ["a", "b"]}')):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match=f"^`by_class` .*{name}") as caught:
            hookscope.survey(nn.Conv2d(3, 6, 3), tmp_path / name, by_class=True)
        assert "multi" not in str(caught.value)  # which a survey does not take


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 6])
def test_a_shape_varies_whatever_the_chunks(tmp_path: Path, chunk_size: int) -> None:
    for number in range(6):
        np.save(tmp_path / f"{number}.npy", np.ones((3, 6, 6 if number < 4 else 7), np.float32))
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1))
    survey = hookscope.survey(network, tmp_path, chunk_size=chunk_size)
    assert ["shape varies" in row.flags for row in survey] == [True, False]


class Sometimes(nn.Module):
    """Half of the inputs pass its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.mean() > 0 else x[:, :2]


@pytest.mark.parametrize("chunk_size", [1, 4, 12])
def test_a_shape_counts_the_inputs_that_pass_the_layer(chunk_size: int) -> None:
    inputs = torch.ones(12, 3) * torch.tensor([1.0, -1.0]).repeat(6)[:, None]
    survey = hookscope.survey(Sometimes(), inputs, batch_size=1, chunk_size=chunk_size)
    assert survey["layer"].activation.shape == (6, 2)


class Divides(nn.Module):
    """Divides by zero after its last layer where the first value is above 2."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) / (x[:, :1] < 2)


def test_nan_that_no_layer_returns_comes_first_in_the_answer() -> None:
    values = torch.arange(12.0).reshape(4, 3) / 3  # 0, 1, 2 and 3 come first
    survey = hookscope.survey(Divides(), values, batch_size=1, chunk_size=2)
    message = (
        "The network returns NaN or Inf, though none of the layers that were measured does: operations between them"
        " were not looked at (`ops`)."
    )
    assert survey.warnings == (message,)
    assert answer(survey)[0] == "NaN or Inf in what the network returns."
    shown = hookscope.survey(Divides(), values, ops=True)
    assert shown.warnings == ()
    assert answer(shown)[0] == "NaN or Inf in (model):div."
    assert hookscope.survey(Divides(), values[:2]).warnings == ()


class WithoutNaN(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.nan_to_num(nan=1.0)


def test_channels_with_nan_on_an_input_are_not_called_alive() -> None:
    images = pictures(40, 3, 8, 8)
    images[5] = math.nan
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    everywhere = answer(hookscope.survey(network, images))
    assert "Dead channels were not looked for: every channel has NaN or Inf on some input." in everywhere
    behind = answer(hookscope.survey(nn.Sequential(network, WithoutNaN()), images))
    assert "None of 4 channels without NaN or Inf is dead on 40 inputs." in behind


def test_a_copied_channel_is_found() -> None:
    torch.manual_seed(0)
    network = nn.Conv2d(3, 5, 3)
    with torch.no_grad():
        network.weight[4] = -2 * network.weight[1]
    survey = hookscope.survey(network, torch.randn(40, 3, 8, 8))
    twins = [
        (duplicate_channel.channel, duplicate_channel.of) for duplicate_channel in survey.rows[0].duplicate_channels
    ]
    assert twins == [(4, 1)]
    assert survey.rows[0].channels[4].correlation == pytest.approx(-1, abs=1e-6)


def test_channels_that_agree_on_the_first_inputs_alone_are_no_copies(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=(1000, 3)).astype(np.float32)
    values[:600, 1], values[:, 2] = values[:600, 0], -values[:, 0]
    assert abs(np.corrcoef(values.T)[0, 1]) < 0.7
    np.save(tmp_path / "values.npy", values)
    network = nn.Linear(3, 3, bias=False)
    network.weight.data = torch.eye(3)
    for inputs in (torch.from_numpy(values), tmp_path / "values.npy"):
        survey = hookscope.survey(network, inputs, batch_size=100)
        assert [(twin.channel, twin.of) for twin in survey.rows[0].duplicate_channels] == [(2, 0)]


class Passes(nn.Module):
    """Returns what its layer does where that is small, else -5."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return y if x.sum() < 50 else 0 * y - 5


def test_a_place_is_known_in_each_of_two_rows_that_share_some_tensors() -> None:
    inputs = torch.zeros(4, 1, 4, 4)
    inputs[:2] = 10  # above what the container returns for the others
    inputs[2, 0, 2, 3], inputs[3, 0, 3, 1] = 3, 4
    survey = hookscope.survey(nn.Sequential(Passes()), inputs, batch_size=1, layer=["name:0", "name:0.inner"], top=1)
    assert [(top.value, top.position) for (top,) in survey["0"].channels[0].halves] == [(3, (2, 3)), (4, (3, 1))]
    assert [(top.value, top.position) for (top,) in survey["0.inner"].channels[0].halves] == [(10, (0, 0))] * 2


@pytest.mark.parametrize("chunk_size", [1, 2, 4])
def test_a_row_that_repeats_another_in_some_chunks_alone_has_all_of_its_inputs(chunk_size: int) -> None:
    inputs = torch.zeros(4, 1, 4, 4)
    inputs[:2] = 10
    network, names = nn.Sequential(nn.Sequential(Passes())), ("name:0", "name:0.0", "name:0.0.inner")
    survey = hookscope.survey(network, inputs, batch_size=1, chunk_size=chunk_size, layer=names)
    rows = {row.label: (row.activation.shape, row.activation.mean, row.duplicates) for row in survey}
    shape = (4, 1, 4, 4)
    ends = (shape, -2.5, ())  # -5 for two, 0 for two
    assert rows == {"0.0.inner": (shape, 5, ()), "0.0": ends, "0": ends}


@pytest.mark.parametrize("sizes", [(2,), (2, 3, 2), (2, 3, 2, 2)])
def test_a_place_is_whole_or_not_given(sizes: tuple[int, ...]) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    survey = hookscope.survey(network, torch.randn(6, *sizes, 4))
    assert survey is not None
    places = {len(top.position) for channel in survey["1"].channels for top in channel.top}
    assert places == ({0} if len(sizes) > 3 else {len(sizes)})


def test_places_are_told_of_batches_with_any_number_of_channels() -> None:
    values = torch.rand(2, 3000, 2)
    rows = reduce_channels(values, 1, np.full(3, np.inf))  # of an earlier batch with three channels
    assert isinstance(rows, ChannelRows)
    np.testing.assert_array_equal(rows.positions, values.argmax(2).numpy())


@pytest.mark.parametrize(
    ("value", "size"), [(torch.complex(*[torch.tensor(3e38)] * 2), 3e38 * 2**0.5), (torch.tensor(2**24 + 1), 2**24 + 1)]
)
def test_channels_of_complex_and_whole_numbers_are_as_exact_as_the_whole_output(value: Tensor, size: float) -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones_like(x, dtype=value.dtype) * value

    row = hookscope.survey(nn.Sequential(Constant()), torch.rand(3, 2, 4, 4), layer="0", batch_size=2)["0"]
    assert row.activation.max == pytest.approx(size, rel=1e-7)
    assert [(channel.max, channel.nonfinite_count) for channel in row.channels] == [(row.activation.max, 0)] * 2


def test_values_beyond_float32_are_measured_without_a_warning() -> None:
    values = torch.tensor([[1e200, 3e38, 1.0], [3e200, -3e38, 2.0]], dtype=torch.float64).repeat(20, 1)
    network = nn.Linear(3, 3, bias=False).double()
    network.weight.data = torch.eye(3).double()
    survey = hookscope.survey(network, values, layer="type:linear", batch_size=4)
    assert survey is not None
    first, _, last = survey.rows[0].channels
    assert (first.min, first.max, last.mean, last.std) == (1e200, 3e200, 1.5, 0.5)
    wide = values.flatten().tolist()
    mean = math.fsum(each / 1e200 for each in wide) / len(wide)
    std = math.sqrt(math.fsum((each / 1e200 - mean) ** 2 for each in wide) / len(wide))
    assert survey.rows[0].activation.mean == pytest.approx(mean * 1e200)
    assert survey.rows[0].activation.std == pytest.approx(std * 1e200)


@pytest.mark.parametrize("stored", [tuple, dict])
def test_arguments_in_one_file_are_surveyed_together(stored: type, tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def forward(self, image: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
            return self.head(image.mean((2, 3)) * meta)

    network, image, meta = Both(), torch.rand(7, 3, 4, 4), torch.randn(7, 3)
    arguments = (image, meta) if stored is tuple else {"image": image, "meta": meta}
    torch.save(arguments, tmp_path / "data.pt")
    expected = network(image, meta).detach()
    for inputs in (arguments, tmp_path / "data.pt"):
        survey = hookscope.survey(network, inputs, layer="head", batch_size=3, chunk_size=4)
        assert survey.input_count == 7
        assert survey["head"].activation.mean == pytest.approx(expected.mean().item(), rel=1e-5)
        assert [channel.max for channel in survey["head"].channels] == pytest.approx(
            expected.amax(0).tolist(), rel=1e-5
        )

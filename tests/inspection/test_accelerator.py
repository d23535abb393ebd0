"""On an accelerator: the same numbers as on the CPU, and nobody waits for the device while a pass runs."""

import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hookscope.hooks.pytree import tensors_in
from hookscope.inputs.batches import Batch
from hookscope.inspection.backward import PassError
from hookscope.inspection.forward import ForwardError
from hookscope.results.activations import Activations
from hookscope.results.gradients import Gradients
from hookscope.results.statistics import TensorStatistics
from hookscope.statistics.reducer import Reducer, collect, summarise
from tests import far_device
from tests.inspections import inspect, inspect_gradients
from tests.networks import NETWORKS, batch_of

_CHOSEN = (
    *("vit", "language model", "transformer encoder", "functional in-place", "complex spectrum", "bfloat16"),
    *("dtypes and odd values", "part that raises", "dict input", "changing buffers"),
)
_COMPARED = ("mean", "std", "min", "max", "mean_abs", "l2")
_COUNTED = ("shape", "dtype", "element_count", "nan_count", "inf_count", "channel_axis", "channel_count")


def weighted_sum(output: object, _batch: Batch) -> Tensor:
    """A loss that no normalisation is blind to."""
    terms = []
    for _, tensor in tensors_in(output):
        if tensor.is_floating_point() and tensor.numel():
            weights = torch.arange(1.0, tensor.numel() + 1, device=tensor.device).sin().reshape(tensor.shape)
            terms.append((tensor.float() * weights).sum())
    return torch.stack(terms).sum()


def made(name: str) -> tuple[Any, Any]:
    network = NETWORKS[name]
    torch.manual_seed(0)
    return network.build(), network.args()


def activations(model: Any, args: Any, **options: Any) -> Activations:
    try:
        return inspect(model, batch_of(*args), ["*"], **options)
    except ForwardError as error:
        return error.inspection


def gradients(model: Any, args: Any, **options: Any) -> Gradients | str:
    try:
        return inspect_gradients(model, batch_of(*args), weighted_sum, ["*"], **options)
    except PassError as error:
        return str(error)


def differences(label: str, here: TensorStatistics, there: TensorStatistics, rounding: float = 0.0) -> list[str]:
    """List what is not the same; sums are taken in another order there, and single values differ by `rounding`."""
    actual = [name for name in _COUNTED if getattr(here, name) != getattr(there, name)]
    if here.unmeasured or there.unmeasured:
        actual += ["unmeasured"] * (here.unmeasured != there.unmeasured)
        return [f"{label}: {name}" for name in actual]
    largest = max(abs(here.min or 0), abs(here.max or 0))
    for name in _COMPARED:
        ours, theirs = getattr(here, name), getattr(there, name)
        slack = 1e-5 * largest + rounding * (math.sqrt(here.element_count) if name == "l2" else 1)
        same = ours == theirs or (
            None not in (ours, theirs) and math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=slack)
        )
        actual += [] if same else [f"{name} {ours} {theirs}"]
    if (here.kept_values is None) != (there.kept_values is None):
        actual.append("kept values")
    elif here.kept_values is not None and there.kept_values is not None:
        far = np.nan_to_num(here.kept_values - there.kept_values, posinf=0, neginf=0)
        slack = 1e-3 * (here.l2 or 0) / math.sqrt(here.element_count or 1) + 1e-5 * largest + rounding
        actual += [] if np.abs(far).max(initial=0) <= 3 * slack else [f"kept values {np.abs(far).max()}"]
    pairs = zip(here.quantiles or (), there.quantiles or (), strict=True)
    same = all(
        math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=1e-3 * (here.std or 0) + rounding) for ours, theirs in pairs
    )
    actual += [] if same else [f"quantiles {here.quantiles} {there.quantiles}"]
    return [f"{label}: {name}" for name in actual]


def compare_activations(name: str) -> tuple[int, list[str], list[str]]:
    """Return how many rows there are, what differs, and what the statistics made somebody wait for."""
    model, args = made(name)
    here = activations(model, args, distributions=True, keeps_values=True)
    models_own = looks_of_the_model(far_device.network_sent(model), far_device.sent(args))
    far_device.looks.clear()
    there = activations(far_device.network_sent(model), far_device.sent(args), distributions=True, keeps_values=True)
    looks = [look for look in far_device.looks if look != "equal"]  # the buffers, before and after the passes
    actual = [] if [row.label for row in here.rows] == [row.label for row in there.rows] else ["rows"]
    for ours, theirs in zip(here.rows, there.rows, strict=False):
        actual += differences(ours.label, ours.activation, theirs.activation)
        actual += [f"{ours.label}: flags"] * (ours.flags != theirs.flags)
    for look in models_own:
        looks.remove(look)
    return len(here.rows), actual, looks


def token_norms_there() -> tuple[list[str], Any, Any]:
    """Return what token norms had made somebody wait for when the pass ended, and the norms here and there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    with torch.no_grad():
        model[2].bias[3] = 900.0  # massive in every token
    tokens = torch.randn(2, 12, 8)
    tokens[1, 5] *= 20  # of high norm behind the first layer
    here = inspect(model, batch_of(tokens, count=2), ["*"], tokens=True)
    far_model, far_tokens = far_device.network_sent(model), far_device.sent(tokens)
    looks: dict[bool, list[str]] = {}
    for with_tokens in (False, True):
        far_device.looks.clear()

        def seen(*_: object, with_tokens: bool = with_tokens) -> None:
            looks[with_tokens] = list(far_device.looks)

        there = inspect(far_model, batch_of(far_tokens, count=2), ["*"], tokens=with_tokens, on_output=seen)
    norms = ([row.tokens for row in run.rows if row.tokens] for run in (here, there))
    return looks[True][len(looks[False]) :], *norms


def looks_of_the_model(model: Any, args: Any) -> list[str]:
    """Return what the model itself waits for."""
    far_device.looks.clear()
    with torch.no_grad():
        model.eval()(*args)
    return list(far_device.looks)


def compare_gradients(name: str, with_inputs: bool) -> list[str]:
    """Return what differs."""
    model, args = made(name)
    options = {"include_inputs": with_inputs, "distributions": True, "keeps_values": True}
    here = gradients(model, args, **options)
    there = gradients(far_device.network_sent(model), far_device.sent(args), **options)
    if isinstance(here, str) or isinstance(there, str):
        return [] if here == there else [str(here), str(there)]
    same = math.isclose(here.loss.value, there.loss.value, rel_tol=1e-3, abs_tol=1e-3)
    actual = [] if same or (math.isnan(here.loss.value) and math.isnan(there.loss.value)) else ["loss"]
    for ours, theirs in zip(here.gradients, there.gradients, strict=True):
        actual += [f"{ours.label}: {ours.status} {theirs.status}"] * (ours.status != theirs.status)
        actual += differences(ours.label, ours.gradient, theirs.gradient)
    for mine, other in zip(here.parameters, there.parameters, strict=True):
        actual += differences(mine.name, mine.gradient, other.gradient)
        actual += [f"{mine.name}: norm"] * (not math.isclose(mine.weight_l2 or 0, other.weight_l2 or 0, rel_tol=1e-5))
    return actual


def looks_by_moment() -> dict[str, list[str]]:
    """Return what has been waited for until the loss, until the last gradient and until the end of a run."""
    model, args = made("plain convolutions")
    model, args = far_device.network_sent(model.eval()), far_device.sent(args)
    moments: dict[str, list[str]] = {}

    def loss(output: object, batch: Batch) -> Tensor:
        moments["forward"] = list(far_device.looks)
        return weighted_sum(output, batch)

    def seen(label: str, *_: object) -> None:
        if label.endswith("grad_output"):
            moments["backward"] = list(far_device.looks)

    far_device.looks.clear()
    inspect_gradients(model, batch_of(*args), loss, ["*"], on_tensor=seen)
    return moments | {"end": list(far_device.looks)}


def operations_per_call() -> tuple[float, float]:
    """Return how many operations a module call takes with statistics: in a run of activations, and of gradients too."""
    model, args = made("resnet18")
    far_model, far_args = far_device.network_sent(model.eval()), far_device.sent(args)

    def counted(run: Callable[[], Any]) -> int:
        far_device.launches.clear()
        run()
        return len(
            [launch for launch in far_device.launches if launch not in ("equal", "clone")]
        )  # of buffers, samples

    with torch.no_grad():
        plain = counted(lambda: far_model(*far_args))
    both = counted(lambda: weighted_sum(far_model(*far_args), batch_of(*far_args)).backward())
    far_model.zero_grad()
    rows = len(activations(far_model, far_args).rows)
    with_statistics = counted(lambda: activations(far_model, far_args))
    with_gradients = counted(lambda: gradients(far_model, far_args))
    return (with_statistics - plain) / rows, (with_gradients - both) / rows


@pytest.mark.parametrize("name", _CHOSEN)
def test_activations_are_those_of_the_cpu_and_come_in_a_single_transfer(
    elsewhere: ProcessPoolExecutor, name: str
) -> None:
    rows, actual, looks = elsewhere.submit(compare_activations, name).result()
    assert rows > 0
    assert actual == []
    assert looks == [far_device.TRANSFER]


@pytest.mark.parametrize(
    ("name", "with_inputs"),
    [
        *(("language model", True), ("functional in-place", True), ("dtypes and odd values", True)),
        *(("inference mode inside", False), ("part that raises", False)),
    ],
)
def test_gradients_are_those_of_the_cpu(elsewhere: ProcessPoolExecutor, name: str, with_inputs: bool) -> None:
    assert elsewhere.submit(compare_gradients, name, with_inputs).result() == []


def test_nobody_waits_for_the_device_while_a_pass_runs(elsewhere: ProcessPoolExecutor) -> None:
    moments = elsewhere.submit(looks_by_moment).result()
    assert moments["forward"] == []
    assert moments["backward"] == ["_local_scalar_dense"]  # the loss, once, between the passes
    # Activations, gradients of outputs, gradients of parameters and their sizes come over one by one.
    assert moments["end"].count(far_device.TRANSFER) == 4


@pytest.mark.exhaustive
def test_a_module_call_takes_few_operations(elsewhere: ProcessPoolExecutor) -> None:
    activations_alone, with_gradients = elsewhere.submit(operations_per_call).result()
    assert activations_alone < 3
    assert with_gradients < 20


def launches_and_looks(dtype: torch.dtype) -> tuple[list[str], list[str], list[str]]:
    tensors = [far_device.sent(torch.ones(1, 2, size).to(dtype)) for size in (4, 6, 600, 70_000)]
    reducer = Reducer(distributions=True, keeps_values=True)
    far_device.launches.clear()
    far_device.looks.clear()
    measured = [reducer.reduce(tensor, 1) for tensor in tensors]
    launches, looks = list(far_device.launches), list(far_device.looks)
    collect(measured)
    return launches, looks, list(far_device.looks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.float8_e4m3fn])
def test_without_the_kernel_a_tensor_is_copied_in_one_operation(
    elsewhere: ProcessPoolExecutor, dtype: torch.dtype
) -> None:
    launches, before, after = elsewhere.submit(launches_and_looks, dtype).result()
    assert launches == ["clone"] * 4
    assert (before, after) == ([], [far_device.TRANSFER])


def reduced_a_few_at_a_time() -> tuple[list[tuple[float | None, ...]], list[str]]:
    parts = [far_device.sent(part) for part in _PARTS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hookscope.statistics.reducer._MOST_COPIED", 1000)
        reducer = Reducer()
        far_device.looks.clear()
        reductions = [reducer.reduce(part, 1) for part in parts]
        looks = list(far_device.looks)
    return [(tensor.min, tensor.max, tensor.mean, tensor.std) for tensor in summarise(collect(reductions))], looks


_PARTS = [torch.randn(1, 3, 10, 10, generator=torch.Generator().manual_seed(seed)) + seed for seed in range(25)]


def test_more_copies_than_may_wait_are_fetched_together(elsewhere: ProcessPoolExecutor) -> None:
    actual, looks = elsewhere.submit(reduced_a_few_at_a_time).result()
    assert looks == [far_device.TRANSFER] * 6  # of 25 parts, after every fourth
    for part, numbers in zip(_PARTS, actual, strict=True):
        values = part.double().numpy()
        assert numbers == pytest.approx((values.min(), values.max(), values.mean(), values.std()), rel=1e-5, abs=1e-5)


def copies_after_steps() -> int:
    reducer = Reducer()
    for _ in range(5):
        collect([reducer.reduce(far_device.sent(torch.ones(size))) for size in (2, 3)])
    return len(reducer._copies)


def test_copies_that_were_fetched_are_forgotten(elsewhere: ProcessPoolExecutor) -> None:
    assert elsewhere.submit(copies_after_steps).result() == 2


def reasons_of_a_failure() -> list[str | None]:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory\nmore about it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(far_device.FarTensor, "clone", fail)
        reducer = Reducer()
        reductions = [reducer.reduce(far_device.sent(torch.ones(size))) for size in (2, 2, 3)]
    return [statistics.unmeasured for statistics in summarise(collect(reductions))]


def test_what_cannot_be_copied_says_why(elsewhere: ProcessPoolExecutor) -> None:
    assert elsewhere.submit(reasons_of_a_failure).result() == ["RuntimeError: out of memory"] * 3


def test_token_norms_are_those_of_the_cpu_and_nobody_waits_for_them(elsewhere: ProcessPoolExecutor) -> None:
    looks, here, there = elsewhere.submit(token_norms_there).result()
    assert looks == []
    assert [norms.high_count for norms in here] == [norms.high_count for norms in there] == [1, 0, 0, 0]
    assert [norms.massive_count for norms in here] == [norms.massive_count for norms in there] == [0, 0, 24, 24]
    for ours, theirs in zip(here, there, strict=True):
        assert [theirs.median, theirs.max] == pytest.approx([ours.median, ours.max], rel=1e-4)
        assert [token.channel for token in ours.massive] == [token.channel for token in theirs.massive]

"""The engine over whole networks: outputs unchanged, statistics right, nothing left behind."""

import dataclasses
import random
import traceback
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.hooks.forward_hooks import capture
from hookscope.hooks.observed import ModuleCall
from hookscope.hooks.selection import unwrap
from hookscope.inspection.forward import ForwardError
from hookscope.results.activations import Activations
from hookscope.statistics.reducer import Reducer, collect
from tests.hooks.test_operations import everything
from tests.inspections import inspect
from tests.networks import BY_HAND, KINDS, MECHANISMS, NETWORKS, Apply, batch_of, conv_net
from tests.statistics.test_statistics import check

SEED = 3
# All by hand, and one of torchvision's for each mechanism.
INSPECTED = [name for name in KINDS if name in BY_HAND or name in MECHANISMS]

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed every global generator for the block."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@dataclasses.dataclass(frozen=True)
class Case:
    """One network, ready to run.

    Attributes:
        name: Its name in `NETWORKS`.
        model: As a user has it: wrapped perhaps, partly in train mode, with some gradients.
        network: The model without its wrappers.
        args: What it is called with; `fresh_args` gives copies, for networks that overwrite their inputs.
    """

    name: str
    model: nn.Module
    network: nn.Module
    args: tuple[Any, ...]

    def fresh_args(self) -> tuple[Any, ...]:
        return tuple(copied(arg) for arg in self.args)

    def inspect(self) -> Activations:
        return inspect(self.model, batch_of(*self.fresh_args()), ["*"], ops=True, seed=SEED, distributions=True)


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone(memory_format=torch.preserve_format).requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {key: copied(part) for key, part in value.items()}
    return [copied(part) for part in value] if isinstance(value, list) else value


@pytest.fixture(scope="module", params=INSPECTED)
def case(request: pytest.FixtureRequest) -> Case:
    """Build the network once for all tests of this file, in a state that is easily disturbed."""
    with seeded(0):
        model = NETWORKS[request.param].build()
        args = NETWORKS[request.param].args()
    network = unwrap(model)
    model.train()
    for index, module in enumerate(network.modules()):
        if index % 3 == 2:
            module.training = False
    for index, parameter in enumerate(network.parameters()):
        if index % 4 == 1 and parameter.is_floating_point():
            parameter.grad = torch.full_like(parameter, 0.5)
        if index % 5 == 4:
            parameter.requires_grad_(False)
    return Case(request.param, model, network, args)


# --- an independent look ---


def places(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """List the tensors of an input or output of any network here, in order, with the path to each."""
    if isinstance(value, Tensor):
        return [(path, value)]
    return [place for step, part in parts(value) for place in places(part, path + step)]


def parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", getattr(value, name)) for name in value._fields]
    if isinstance(value, list | tuple | deque | frozenset):
        left, right = "{}" if isinstance(value, frozenset) else "[]"
        return [(f"{left}{index}{right}", part) for index, part in enumerate(value)]
    names = ATTRIBUTES.get(type(value).__name__, ())
    if dataclasses.is_dataclass(value):
        names = tuple(item.name for item in dataclasses.fields(value))
    return [(f".{name}", getattr(value, name)) for name in names]


ATTRIBUTES = {"ImageList": ("tensors",), "Cache": ("layers",), "Entry": ("keys", "values")}  # that hold tensors


def tensors_of(value: Any) -> list[Tensor]:
    return [tensor for _, tensor in places(value)]


def clone(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


@dataclasses.dataclass
class Witness:
    """A plain forward hook on every module, none of it hookscope's: clones every output at once.

    Attributes:
        outputs: Name and output tensors of every call, in the order in which they finish.
        begun: How many had finished when a module began its first call.
    """

    outputs: list[tuple[str, list[Tensor]]] = dataclasses.field(default_factory=list)
    begun: dict[str, int] = dataclasses.field(default_factory=dict)

    @contextmanager
    def watching(self, network: nn.Module) -> Iterator[None]:
        def before(name: str) -> Any:
            def hook(_module: nn.Module, _args: object) -> None:
                self.begun.setdefault(name, len(self.outputs))

            return hook

        def after(name: str) -> Any:
            return lambda _module, _args, output: self.outputs.append((name, [clone(t) for t in tensors_of(output)]))

        with hooked(network, before, after):
            yield


@contextmanager
def hooked(network: nn.Module, before: Any, after: Any, **options: Any) -> Iterator[None]:
    """Put on each module the hooks that these functions make for its name, for the length of the block."""
    handles = []
    for name, module in network.named_modules():
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=bool(options)))
        handles.append(module.register_forward_hook(after(name), **options))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def values_of(tensor: Tensor) -> NDArray[np.float64]:
    """Return the values in float64: dense, dequantised, moduli of complex numbers."""
    if tensor.is_nested:
        return np.concatenate([values_of(part).reshape(-1) for part in tensor.unbind()])
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.is_complex():
        return np.abs(tensor.numpy().astype(np.complex128))
    return tensor.double().numpy()


def same_bits(first: Tensor, second: Tensor) -> bool:
    if first.is_nested:
        return len(first.unbind()) == len(second.unbind()) and all(map(same_bits, first.unbind(), second.unbind()))
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_quantized:
        return torch.equal(first.int_repr(), second.int_repr())
    first, second = first.contiguous().reshape(-1), second.contiguous().reshape(-1)
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def snapshot(network: nn.Module) -> SimpleNamespace:
    """Return everything about a network and the generators that running it might disturb."""
    hooks = {
        layer: {name: dict(kept) for name, kept in vars(module).items() if "hook" in name and isinstance(kept, dict)}
        for layer, module in network.named_modules()
    }
    buffers = {
        f"{layer}.{name}": buffer
        for layer, module in network.named_modules()
        for name, buffer in module._buffers.items()
    }
    parameters: dict[str, Tensor] = dict(network.named_parameters(remove_duplicate=False))
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return SimpleNamespace(
        hooks=hooks,
        modes=[module.training for module in network.modules()],
        buffers=buffers,
        values=[None if each is None else clone(each) for each in (*buffers.values(), *gradients.values())],
        parameters=parameters,
        sums={name: parameter.detach().sum(dtype=torch.float64).item() for name, parameter in parameters.items()},
        versions=[0 if parameter.is_inference() else parameter._version for parameter in parameters.values()],
        gradients=gradients,
        requires_grad={name: parameter.requires_grad for name, parameter in parameters.items()},
        torch_state=torch.get_rng_state(),
        python_state=random.getstate(),
        numpy_state=np.random.get_state(),
        fast_path=torch.backends.mha.get_fastpath_enabled(),
    )


def assert_unchanged(network: nn.Module, before: SimpleNamespace) -> None:
    after = snapshot(network)
    for name in ("hooks", "modes", "sums", "versions", "requires_grad", "python_state", "fast_path"):
        assert getattr(after, name) == getattr(before, name), name
    for kind in ("buffers", "parameters", "gradients"):
        now = getattr(after, kind)
        assert now.keys() == getattr(before, kind).keys()
        for name, tensor in getattr(before, kind).items():
            assert now[name] is tensor, name
    for name, values, now in zip([*before.buffers, *before.gradients], before.values, after.values, strict=True):
        assert (values is None) == (now is None), name
        assert values is None or same_bits(values, now), name
    assert torch.equal(after.torch_state, before.torch_state)
    assert all(map(np.array_equal, after.numpy_state, before.numpy_state))


@contextmanager
def put_back_by_hand(network: nn.Module) -> Iterator[None]:
    """Put modes, gradients and buffers back after the block."""
    modes = [(module, module.training) for module in network.modules()]
    gradients = [(parameter, parameter.grad, parameter.requires_grad) for parameter in network.parameters()]
    buffers = [
        (module, name, buffer, None if buffer is None else clone(buffer))
        for module in network.modules()
        for name, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, gradient, required in gradients:
            parameter.requires_grad_(required)
            parameter.grad = gradient
        for module, name, buffer, values in buffers:
            module._buffers[name] = buffer
            if buffer is not None and values is not None:
                buffer.data.copy_(values)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Run the block in eval mode without gradients, seeded; put everything back by hand."""
    with put_back_by_hand(network), torch.no_grad(), seeded(SEED):
        network.eval()
        yield


def plain_output(case: Case) -> list[Tensor]:
    with evaluating(case.network):
        return [clone(tensor) for tensor in tensors_of(case.model(*case.fresh_args()))]


# --- what is promised; that nothing is left comes first, as one network serves all of these in turn ---


@dataclasses.dataclass(frozen=True)
class Watched:
    """An inspection with plain hooks beside it, and what the network was before."""

    before: SimpleNamespace
    witness: Witness
    inspection: Activations


@pytest.fixture(scope="module")
def watched(case: Case) -> Watched:
    before, witness = snapshot(case.network), Witness()
    with witness.watching(case.network):
        return Watched(before, witness, case.inspect())


@pytest.mark.sample(*MECHANISMS)
def test_nothing_is_left_after_an_inspection(case: Case, watched: Watched) -> None:
    # Seeded and restored, a second inspection shows the same to the last bit. Flags may miss what other hooks hide.
    again = case.inspect().rows
    assert [dataclasses.replace(row, flags=()) for row in again] == [
        dataclasses.replace(row, flags=()) for row in watched.inspection.rows
    ]
    assert_unchanged(case.network, watched.before)


@pytest.mark.parametrize("kind", [ArithmeticError, KeyboardInterrupt])
@pytest.mark.sample(*MECHANISMS)
def test_nothing_is_left_after_an_interrupted_inspection(
    case: Case, watched: Watched, kind: type[BaseException]
) -> None:
    error, witness = kind("in the middle"), watched.witness
    middle = witness.outputs[len(witness.outputs) // 2][0]

    def explode(*_: Any) -> None:
        raise error

    bomb = case.network.get_submodule(middle).register_forward_pre_hook(explode)
    try:
        before = snapshot(case.network)
        with pytest.raises(ForwardError if isinstance(error, Exception) else KeyboardInterrupt) as caught:
            case.inspect()
        assert_unchanged(case.network, before)
    finally:
        bomb.remove()
    if isinstance(caught.value, ForwardError):
        assert caught.value.__cause__ is error
        failure = caught.value.inspection.failure
        assert failure.layer == middle
        assert failure.error == "ArithmeticError: in the middle"
        reached = [row.layer for row in caught.value.inspection.rows if row.owner is None]
        finished = [layer for layer, _ in witness.outputs[: witness.begun[middle]]]
        assert list(dict.fromkeys(reached)) == list(dict.fromkeys(finished))
    else:
        assert caught.value is error
    traceback.clear_frames(error.__traceback__)  # they hold the network


@pytest.mark.sample(*MECHANISMS)
def test_the_output_with_every_module_hooked_is_the_plain_one(case: Case) -> None:
    if case.name == "transformer encoder":
        # Torch itself leaves its fused kernels where there are hooks, and those differ in the last digits.
        fused, hooked = plain_output(case), hooked_output(case)
        for first, second in zip(fused, hooked, strict=True):
            torch.testing.assert_close(first, second)
        torch.backends.mha.set_fastpath_enabled(False)
    try:
        expected, output = plain_output(case), hooked_output(case)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert output
    assert len(output) == len(expected)
    assert all(map(same_bits, output, expected))


def hooked_output(case: Case) -> list[Tensor]:
    def observe(_call: ModuleCall, _slot: str, tensor: Tensor) -> object:
        axis = tensor.dim() - 1 if tensor.dim() and not tensor.is_nested else None
        return collect([Reducer(distributions=True).reduce(tensor, axis)])[0]

    with (
        evaluating(case.network),
        capture(case.model, dict(case.network.named_modules()), observe, operations=everything()) as captured,
    ):
        output = [clone(tensor) for tensor in tensors_of(case.model(*case.fresh_args()))]
    assert captured.observations
    return output


@pytest.mark.sample(*MECHANISMS)
def test_statistics_are_those_of_the_output_at_the_time_of_the_call(case: Case, watched: Watched) -> None:
    witness, inspection = watched.witness, watched.inspection
    rows = [row for row in inspection.rows if row.owner is None]
    calls: dict[str, int] = {}
    expected: list[tuple[str, int, Tensor | None]] = []
    for layer, outputs in witness.outputs:
        call = calls.get(layer, 0)
        calls[layer] = call + 1
        expected += [(layer, call, tensor) for tensor in outputs] or [(layer, call, None)]
    if case.name != "part that raises":  # a call that raised counts as one, though nothing came of it
        assert [(row.layer, row.call) for row in rows] == [key[:2] for key in expected]
    assert len({(row.layer, row.call, row.slot) for row in inspection.rows}) == len(inspection.rows)
    for row, (_, _, tensor) in zip(rows, expected, strict=True):
        statistics = row.activation
        if tensor is None:
            assert row.flags == ("not a tensor",)
            continue
        assert statistics.unmeasured is None, (row.label, statistics.unmeasured)
        assert statistics.dtype == str(tensor.dtype).removeprefix("torch.")
        if not tensor.is_nested:
            assert statistics.shape == tuple(tensor.shape)
        if statistics.element_count:
            # NumPy's modulus of a complex number and torch's may differ by the last bit.
            check(statistics, values_of(tensor), statistics.channel_axis, 1e-15 if tensor.is_complex() else 0.0)
        else:
            assert tensor.numel() == 0
        assert ("non-finite" in row.flags) == (not np.isfinite(values_of(tensor)).all())
    names = {name for name, _ in case.network.named_modules()}
    assert {layer.layer for layer in inspection.uncalled} == names - witness.begun.keys()
    assert all(layer.reason for layer in inspection.uncalled)


# --- single promises ---


def test_hooking_a_fused_encoder_is_said_to_unfuse_it() -> None:
    model = nn.Sequential(NETWORKS["transformer encoder"].build(), nn.Linear(16, 2))
    x = torch.randn(2, 5, 16)
    (warning,) = inspect(model, x, ["0"]).warnings
    assert "nn.TransformerEncoderLayer runs unfused while hooked" in warning
    assert inspect(model, x, ["/^1$/"]).warnings == ()


def test_a_network_built_in_inference_mode_comes_out_as_it_went_in() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    before = snapshot(model)
    rows = inspect(model, torch.ones(2, 3), ["*"]).rows
    assert [row.layer for row in rows] == ["0", "1", ""]
    assert_unchanged(model, before)


def test_an_inspection_may_run_in_inference_mode() -> None:
    model = conv_net()
    expected = inspect(model, torch.ones(1, 3, 8, 8), ["*"]).rows
    before = snapshot(model)
    with torch.inference_mode():
        rows = inspect(model, torch.ones(1, 3, 8, 8), ["*"]).rows
    assert_unchanged(model, before)
    assert [row.activation for row in rows] == [row.activation for row in expected]


def test_looking_up_positions_does_not_disturb_the_input() -> None:
    model = nn.Sequential(OrderedDict(first=Apply(lambda x: x.mul_(0.5)), head=nn.Identity()))
    (row,) = inspect(model, torch.full((1, 2), 8.0), ["@-1"]).rows
    assert (row.layer, row.activation.max) == ("head", 4)

"""Gradients over whole networks: those `torch.autograd.grad` gives on copies kept at each call; nothing left behind."""

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tests.networks
from hookscope.hooks.selection import unwrap
from hookscope.inputs.batches import Batch
from hookscope.inspection.backward import PassError
from hookscope.results.gradients import Gradients
from tests.inspection.test_networks import (
    INSPECTED,
    assert_unchanged,
    copied,
    hooked,
    parts,
    places,
    put_back_by_hand,
    seeded,
    snapshot,
)
from tests.inspections import inspect_gradients
from tests.networks import MECHANISMS, NETWORKS, TRAINED, Cache, batch_of

SEED = 3
# Where gradients of several uses are added in another order than on copies: three digits of the largest element.
CLOSE = 1e-3
WITHOUT_GRADIENTS = "quantized resnet18"  # of int8

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One network in one mode, and what it is called with."""

    name: str
    mode: str
    model: nn.Module
    network: nn.Module
    args: tuple[Any, ...]

    @property
    def batch(self) -> Batch:
        return batch_of(*map(copied, self.args))

    def inspect(self, **options: Any) -> Gradients:
        options = {"loss": projection, "layers": ["*"], "mode": self.mode, "seed": SEED} | options
        return inspect_gradients(self.model, self.batch, **options)


@functools.cache
def built(name: str, mode: str) -> Case:
    network = NETWORKS[name]
    with seeded(0):
        model = network.build()
        args = (TRAINED.get(name, network.args) if mode == "train" else network.args)()
    model.train(mode == "train")
    for index, parameter in enumerate(unwrap(model).parameters()):
        if index % 4 == 1:
            parameter.grad = torch.full_like(parameter, 0.5)
    return Case(name, mode, model, unwrap(model), args)


@pytest.fixture(
    scope="module",
    params=[(name, mode) for name in INSPECTED for mode in ("eval", "train") if name != WITHOUT_GRADIENTS],
    ids="-".join,
)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    yield built(*request.param)
    built.cache_clear()


# --- the same without hookscope ---


def projection(output: object, _batch: object = None) -> Tensor:
    """Return the sum of all floating outputs, each element times a seeded random number."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros((), dtype=torch.float64)
    for _, tensor in places(output):
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)  # noqa: PLW2901
        if tensor.is_floating_point():
            if tensor.is_nested:
                tensor = tensor.values()  # noqa: PLW2901
            total = total + (tensor.double() * torch.randn(tensor.shape, generator=generator)).sum()
    return total


def mapped(
    value: Any, function: Callable[[str, Tensor], Tensor], path: str = "", *, kept: tuple[type, ...] = ()
) -> Any:
    """Return the value with each tensor replaced, except in objects that are `kept`."""
    if isinstance(value, Tensor):
        return function(path, value)
    if isinstance(value, kept):
        return value
    new = [mapped(part, function, path + step, kept=kept) for step, part in parts(value)]
    if isinstance(value, tuple | deque | frozenset):
        return value._make(new) if hasattr(value, "_make") else type(value)(new)
    if isinstance(value, list):
        return new
    changed = copy.copy(value)
    for (step, _), part in zip(parts(value), new, strict=True):
        if step.startswith("["):
            changed[next(key for key in value if f"[{key!r}]" == step)] = part
        else:
            setattr(changed, step[1:], part)
    return changed


@contextmanager
def as_built(case: Case) -> Iterator[None]:
    """Run the block seeded and without earlier gradients; put everything back by hand."""
    eager = torch.compiler.set_stance("force_eager") if "compiled" in case.name else nullcontext()
    with put_back_by_hand(case.network), seeded(SEED), eager:
        for parameter in case.network.parameters():
            parameter.grad = None
        if case.mode == "eval":
            case.network.eval()
        yield


def given(case: Case, of_inputs: bool) -> tuple[Any, ...]:
    """Return arguments as hookscope hands them on: tracked if there is nothing else to differentiate, or asked for."""
    trainable = [parameter.requires_grad for parameter in case.network.parameters()]
    track = not any(trainable) or (of_inputs and all(trainable))

    def tracked(_path: str, tensor: Tensor) -> Tensor:
        if (track and (tensor.is_floating_point() or tensor.is_complex())) or tensor.requires_grad:
            return tensor.detach().requires_grad_().clone()
        return tensor.detach().clone()

    return tuple(mapped(case.args, tracked))


def plain_run(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients of parameters without any hook."""
    with as_built(case):
        loss = projection(case.network(*given(case, of_inputs=False)))
        if loss.requires_grad:
            loss.backward()
        return loss.detach(), {
            name: parameter.grad.clone()
            for name, parameter in case.network.named_parameters()
            if parameter.grad is not None
        }


@dataclasses.dataclass
class Copies:
    """Copies of what passes between modules: one is kept, which nobody can overwrite, and a copy of it is handed on.

    Attributes:
        of_inputs: Of what modules are given, instead of what they return.
        kept: By label, with the path of the tensor.
    """

    of_inputs: bool
    kept: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    calls: dict[str, int] = dataclasses.field(default_factory=dict)
    running: list[str] = dataclasses.field(default_factory=list)

    def hand_on(self, label: str, value: Any, begin: int = 0) -> Any:
        """Copy the tensors of a value; paths count from `begin`. A tensor given or returned twice stays one."""
        copies: dict[int, Tensor] = {}
        first: dict[int, str] = {}

        def copied_twice(path: str, tensor: Tensor) -> Tensor:
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            place = f"{label}{path[begin:]}"
            if id(tensor) in copies:
                self.kept[place] = self.kept[first[id(tensor)]]
            else:
                first[id(tensor)] = place
                self.kept[place] = tensor.clone()
                copies[id(tensor)] = self.kept[place].clone()
            return copies[id(tensor)]

        return mapped(value, copied_twice, kept=(Cache,) if self.of_inputs else ())  # which a module adds to

    @contextmanager
    def hooked(self, network: nn.Module) -> Iterator[None]:
        def before(layer: str) -> Any:
            def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
                call = self.calls[layer] = self.calls.get(layer, -1) + 1
                self.running.append(f"{layer or '(model)'}{f'#{call}' if call else ''}")
                return self.hand_on(self.running[-1], (args, kwargs), len("[0]")) if self.of_inputs else None

            return hook

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            label = self.running.pop()
            return None if self.of_inputs else self.hand_on(label, output)

        with hooked(network, before, lambda _name: after, always_call=True):
            yield


def true_gradients(
    case: Case, monkeypatch: pytest.MonkeyPatch, *, of_inputs: bool
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the loss, and the gradient of every output, or every input, of every call by `torch.autograd.grad`."""
    copies = Copies(of_inputs)
    monkeypatch.setattr(tests.networks, "checkpoint", lambda function, *args, **_: function(*args))
    with as_built(case), copies.hooked(case.network):
        loss = projection(case.network(*given(case, of_inputs)))
        tensors = list(copies.kept.values())
        gradients: Any = [None] * len(tensors)
        if loss.requires_grad and tensors:
            gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
    monkeypatch.undo()
    return loss.detach(), dict(zip(copies.kept, gradients, strict=True))


# --- comparing ---


def same_bits(first: Tensor, second: Tensor) -> bool:
    if first.is_nested:
        first, second = first.values(), second.values()
    return (
        first.shape == second.shape
        and first.dtype == second.dtype
        and torch.equal(first.nan_to_num(9e9), second.nan_to_num(9e9))
    )


def close(first: Tensor, second: Tensor) -> bool:
    if first.is_nested:
        first, second = first.values(), second.values()
    scale = second.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if second.numel() else 0.0
    return bool(torch.allclose(first, second, rtol=CLOSE, atol=CLOSE * scale + 1e-30, equal_nan=True))


@dataclasses.dataclass
class Tally:
    """How gradients compare: to the last bit, closely, and those that differ or are on one side only."""

    exact: int = 0
    close: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)


def compared(seen: Mapping[str, Tensor], expected: Mapping[str, Tensor | None]) -> Tally:
    tally = Tally()
    for label, gradient in expected.items():
        if gradient is None:
            if label in seen and seen[label].any():
                tally.wrong.append(f"{label}: not reached")
        elif label not in seen:
            tally.missing.append(label)
        elif same_bits(seen[label], gradient):
            tally.exact += 1
        elif close(seen[label], gradient):
            tally.close += 1
        else:
            tally.wrong.append(label)
    tally.wrong += [f"{label}: unexpected" for label in seen if label not in expected]
    return tally


def seen_by_hookscope(case: Case, **options: Any) -> tuple[Gradients, dict[str, dict[str, Tensor]]]:
    """Inspect; return what was seen, and clones of every gradient by kind."""
    seen: dict[str, dict[str, Tensor]] = {"grad_output": {}, "grad_input": {}, "grad": {}}

    def keep(label: str, gradient: Tensor, _axis: int | None) -> None:
        name, _, kind = label.rpartition(" ")
        assert name not in seen[kind]
        if ":" not in name:  # those of operations are looked at in test_operations.py
            seen[kind][name] = gradient.detach().clone()

    try:
        return case.inspect(on_tensor=keep, ops=True, **options), seen
    except PassError as error:
        if "leads to the loss" not in str(error):  # a network without any gradient path still shows its rows
            raise
        return error.inspection, seen


# --- what is promised ---

TALLIES: dict[str, dict[str, Tally]] = {"grad_output": {}, "grad_input": {}}


@pytest.mark.sample(*MECHANISMS)
def test_gradients_of_outputs_are_the_true_ones_and_the_model_is_left_as_it_was(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(case.network)
    inspection, seen = seen_by_hookscope(case)
    assert_unchanged(case.network, before)

    loss, gradients = plain_run(case)
    assert inspection.loss is None or same_bits(torch.tensor(inspection.loss.value, dtype=torch.float64), loss)
    assert seen["grad"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert same_bits(seen["grad"][name], gradient), name

    true_loss, expected = true_gradients(case, monkeypatch, of_inputs=False)
    assert same_bits(true_loss, loss)
    tally = TALLIES["grad_output"][f"{case.name}-{case.mode}"] = compared(seen["grad_output"], expected)
    assert not tally.missing
    assert tally.wrong == []

    rows = [row for row in inspection.gradients if row.owner is None]
    with_gradient = {row.label for row in rows if row.status in ("gradient", "zero")}
    assert with_gradient == seen["grad_output"].keys()
    untracked = {row.label for row in rows if row.status == "no gradient path"}
    assert untracked.isdisjoint(expected)
    assert len(inspection.gradients) == len(inspection.rows)


@pytest.mark.sample(*MECHANISMS)
def test_gradients_of_inputs_are_the_true_ones_along_each_module(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(case.network)
    inspection, seen = seen_by_hookscope(case, include_inputs=True)
    assert_unchanged(case.network, before)
    loss, expected = true_gradients(case, monkeypatch, of_inputs=True)
    assert inspection.loss is None or same_bits(torch.tensor(inspection.loss.value, dtype=torch.float64), loss)
    tally = TALLIES["grad_input"][f"{case.name}-{case.mode}"] = compared(seen["grad_input"], expected)
    assert not tally.missing
    assert tally.wrong == []


@pytest.mark.sample(*MECHANISMS)
def test_nothing_is_left_after_an_exception_in_the_backward_pass(case: Case) -> None:
    kind = {"eval": ArithmeticError, "train": KeyboardInterrupt}[case.mode]
    parameters = [parameter for parameter in case.network.parameters() if parameter.requires_grad]
    error = kind("in the middle")

    def explode(_: object) -> None:
        raise error

    def explode_at_outputs(output: object, batch: object) -> Tensor:
        loss = projection(output, batch)
        if loss.requires_grad:
            loss.register_hook(explode)
        return loss

    bombs = [parameter.register_hook(explode) for parameter in parameters[len(parameters) // 2 :]]
    try:
        before = snapshot(case.network)
        with pytest.raises((PassError, KeyboardInterrupt)) as caught:
            case.inspect(**{} if parameters else {"loss": explode_at_outputs})
        assert_unchanged(case.network, before)
    finally:
        for bomb in bombs:
            bomb.remove()
    if isinstance(caught.value, PassError) and caught.value.inspection.failure:
        assert caught.value.__cause__ is error
        assert caught.value.inspection.failure.error == "ArithmeticError: in the middle"


def test_most_gradients_agree_to_the_last_bit() -> None:
    if len(TALLIES["grad_input"]) < 2 * 27:
        pytest.skip("only a part of the networks ran")
    assert len({name.rpartition("-")[0] for name in TALLIES["grad_output"]}) >= 27
    for tallies in TALLIES.values():
        exact, close = (sum(getattr(tally, kind) for tally in tallies.values()) for kind in ("exact", "close"))
        # The rest differs in the order of addition, which the copies change.
        assert exact > 5 * close

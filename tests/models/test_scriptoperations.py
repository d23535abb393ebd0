"""Operations of TorchScript: those of the eager network, and nothing that the archive computes is changed."""

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookscope.hooks.forward_hooks import Capture, capture
from hookscope.hooks.observed import Observation
from hookscope.hooks.operations import OperationChoice
from hookscope.hooks.patterns import parse_operation_pattern
from hookscope.inspection.forward import ForwardError, inspect
from hookscope.models import scriptoperations
from hookscope.models.exported import load_torchscript
from tests.hooks.test_operations import ONE_OPERATION, Written
from tests.models.saved import SAVERS, SEVEN, build, quiet, random_numbers_untouched, tensors_of
from tests.models.scripts import BY_HAND, Doubling, Failing, Forking
from tests.networks import TORCHVISION, batch_of

EVERYTHING = (parse_operation_pattern("op:*"),)
TEN = {**SEVEN, **{name: TORCHVISION[name] for name in ("googlenet", "shufflenet_v2_x0_5", "fcn")}}
# A trace holds the scale of attention in single precision; Swin computes its masks at once.
ROUNDED = ("vit", "swin")


def observed(network: nn.Module, args: tuple[Any, ...]) -> tuple[list[Observation[Tensor]], Any]:
    with torch.no_grad(), capture(network, {}, clone, operations=OperationChoice(EVERYTHING)) as captured:
        output = network(*args)
    return captured.observations, output


def plain(path: Path) -> Any:
    """Load an archive as torch does."""
    with quiet():
        return torch.jit.load(path)  # type: ignore[no-untyped-call]


def clone(_call: object, _slot: str, tensor: Tensor) -> Tensor:
    return tensor.clone()


def places(seen: list[Observation[Tensor]]) -> list[Any]:
    """Return what is known of each operation but its values."""
    return [(each.layer, each.call, each.slot, each.operation, each.in_place) for each in seen]


@pytest.mark.filterwarnings("ignore:Scripted GoogleNet")
@pytest.mark.parametrize("form", ["scripted", "traced"])
@pytest.mark.parametrize("name", TEN)
def test_operations_are_those_of_the_eager_network(name: str, form: str, tmp_path: Path) -> None:
    eager, args = build(TEN[name])
    SAVERS[form](eager, args, tmp_path / "net.pt")
    network = load_torchscript(tmp_path / "net.pt", 0).module
    expected, _ = observed(eager, args)
    seen, output = observed(network, args)
    assert len(expected) > 4
    assert places(seen) == places(expected)
    rounded = form == "traced" and name in ROUNDED
    for ours, theirs in zip(seen, expected, strict=True):
        assert ours.value is not None
        assert theirs.value is not None
        torch.testing.assert_close(ours.value, theirs.value, rtol=1e-4 if rounded else 0, atol=1e-6 if rounded else 0)
    if not rounded:
        assert [each.sources for each in seen] == [each.sources for each in expected]
    with torch.no_grad():
        expected_output = plain(tmp_path / "net.pt")(*args)
    assert all(torch.equal(*pair) for pair in zip(tensors_of(output), tensors_of(expected_output), strict=True))
    assert not network.unseen_operations


def labels(seen: list[Observation[Tensor]]) -> list[Any]:
    return [(each.layer, each.call, each.slot) for each in seen]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", BY_HAND)
def test_conditions_loops_and_random_numbers_are_those_of_the_plain_archive(
    name: str, train: bool, tmp_path: Path
) -> None:
    eager, args = build(BY_HAND[name])
    SAVERS["scripted"](eager, args, tmp_path / "net.pt")
    network = load_torchscript(tmp_path / "net.pt", 0).module.train(train)
    script = plain(tmp_path / "net.pt").train(train)
    results, states = [], []
    for each in (script, network):
        torch.manual_seed(3)
        given = copies(args)
        if each is network:
            _, output = observed(network, given)
        else:
            with torch.no_grad():
                output = each(*given)
        results.append(tensors_of(output))
        states.append(torch.get_rng_state())
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(*states)
    for key, value in script.state_dict().items():
        assert torch.equal(value, network.state_dict()[key])


def test_a_script_with_conditions_shows_the_operations_that_ran(tmp_path: Path) -> None:
    for name in ("recurrent", "mixed"):
        eager, args = build(BY_HAND[name])
        SAVERS["scripted"](eager, args, tmp_path / "net.pt")
        network = load_torchscript(tmp_path / "net.pt", 0).module
        assert places(observed(network, args)[0]) == places(observed(eager, args)[0])
    eager, args = build(BY_HAND["branching"])
    SAVERS["scripted"](eager, args, tmp_path / "net.pt")
    network = load_torchscript(tmp_path / "net.pt", 0).module
    seen = labels(observed(network, copies(args))[0])
    theirs = labels(observed(eager, copies(args))[0])
    # What is added to a part of a tensor is not assigned to it a second time.
    assert [each for each in seen if "item" not in each[0]] == [each for each in theirs if "item" not in each[0]]
    assert ("(model):setitem", 0, "") in seen


def gradients(network: nn.Module, args: tuple[Any, ...], captured: Capture[Any] | None = None) -> list[Tensor | None]:
    """Differentiate a fixed projection of the outputs; return the gradients of the parameters."""
    network.zero_grad()
    generator = torch.Generator().manual_seed(1)
    outputs = [each for each in tensors_of(network(*args)) if each.requires_grad]
    loss = torch.stack([(each * torch.randn(each.shape, generator=generator)).sum() for each in outputs]).sum()
    assert captured is None or not captured.must_repeat(loss)
    loss.backward()  # type: ignore[no-untyped-call]
    return [parameter.grad for _, parameter in sorted(network.named_parameters())]


@pytest.mark.filterwarnings("ignore:Scripted GoogleNet")
@pytest.mark.parametrize("form", ["scripted", "traced"])
@pytest.mark.parametrize("name", ["resnet", "densenet", "mobilenet_v3", "googlenet", "swin", "vit"])
def test_gradients_are_those_of_the_plain_archive_and_of_the_eager_operations(
    name: str, form: str, tmp_path: Path
) -> None:
    eager, args = build(TEN[name])
    SAVERS[form](eager, args, tmp_path / "net.pt")
    network = load_torchscript(tmp_path / "net.pt", 0).module
    found: dict[nn.Module, dict[Any, Tensor]] = {eager: {}, network: {}}
    results = {}
    for each, seen in found.items():

        def arrived(site: Any, gradient: Tensor, seen: dict[Any, Tensor] = seen) -> None:
            seen[site.layer, site.call, site.slot] = gradient.clone()

        choice = OperationChoice(EVERYTHING)
        with capture(each, {}, lambda *_: None, gradients=arrived, operations=choice) as captured:
            results[each] = gradients(each, args, captured)
    expected = gradients(plain(tmp_path / "net.pt"), args)
    for ours, theirs in zip(results[network], expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (theirs is not None and torch.equal(ours, theirs))
    assert found[network].keys() == found[eager].keys()
    for place, gradient in found[network].items():
        scale = float(found[eager][place].abs().max())
        assert torch.allclose(gradient, found[eager][place], rtol=1e-4, atol=1e-5 * scale), place


@pytest.mark.parametrize("name", BY_HAND)
def test_gradients_through_writes_in_place_are_those_of_the_plain_archive(name: str, tmp_path: Path) -> None:
    eager, args = build(BY_HAND[name])
    SAVERS["scripted"](eager, args, tmp_path / "net.pt")
    network = load_torchscript(tmp_path / "net.pt", 0).module
    seen: list[str] = []
    with capture(
        network,
        {},
        lambda *_: None,
        gradients=lambda site, _: seen.append(site.layer),
        operations=OperationChoice(EVERYTHING),
    ) as captured:
        ours = gradients(network, copies(args), captured)
    assert len(seen) > 5
    for gradient, expected in zip(ours, gradients(plain(tmp_path / "net.pt"), copies(args)), strict=True):
        assert (gradient is None) == (expected is None)
        assert gradient is None or (expected is not None and torch.equal(gradient, expected))


def copies(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(each.clone() if isinstance(each, Tensor) else each for each in args)


@pytest.mark.parametrize("name", ONE_OPERATION)
def test_a_traced_operation_has_the_name_that_torch_gives_it(name: str, tmp_path: Path) -> None:
    function, operation, expected = ONE_OPERATION[name]
    x = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
    SAVERS["traced"](Written(lambda _, given: function(given)), (x.clone(),), tmp_path / "net.pt")
    seen, _ = observed(load_torchscript(tmp_path / "net.pt", 0).module, (x.clone(),))
    (found,) = [each for each in seen if each.layer == f"(model):{operation}"]
    torch.testing.assert_close(found.value, expected, rtol=0, atol=0)
    assert found.operation is not None
    assert "operations.py:" in found.operation.source


@pytest.mark.parametrize("form", ["scripted", "traced"])
def test_a_frozen_script_shows_the_operations_of_its_layers_too(form: str, tmp_path: Path) -> None:
    eager, args = build(SEVEN["resnet"])
    with quiet():
        script = torch.jit.script(eager) if form == "scripted" else torch.jit.trace(eager, args)
        torch.jit.save(torch.jit.freeze(script), tmp_path / "net.pt")
    network = load_torchscript(tmp_path / "net.pt", 0).module
    seen, output = observed(network, args)
    with torch.no_grad():
        assert torch.equal(output, plain(tmp_path / "net.pt")(*args))
    convolutions = [each.value for each in seen if each.operation and each.operation.name == "conv2d"]
    kept: list[Tensor] = []
    handles = [
        module.register_forward_hook(lambda _module, _args, out: kept.append(out.clone()))
        for module in eager.modules()
        if isinstance(module, nn.BatchNorm2d)  # freezing has put it into the convolution before it
    ]
    with torch.no_grad():
        eager(*args)
    assert len(convolutions) == len(handles) == len(kept)
    for ours, theirs in zip(convolutions, kept, strict=True):
        assert ours is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:SSD always returns")
def test_a_detector_shows_the_operations_also_of_layers_that_no_hook_reaches(tmp_path: Path) -> None:
    eager, (images,) = build(TORCHVISION["ssdlite320_mobilenet_v3_large"])
    SAVERS["scripted"](eager, (), tmp_path / "net.pt")
    network = load_torchscript(tmp_path / "net.pt", 0).module
    seen, output = observed(network, ([each.clone() for each in images],))
    with torch.no_grad():
        expected = plain(tmp_path / "net.pt")([each.clone() for each in images])
    for ours, theirs in zip(output[1], expected[1], strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    expected_rows = observed(eager, ([each.clone() for each in images],))[0]
    known = {(each.layer, each.call, each.slot): each.value for each in expected_rows}
    owners = ("anchor_generator:meshgrid", "anchor_generator:stack", "(model):softmax", "transform:interpolate")
    for owner in owners:
        compared = [each for each in seen if each.layer == owner]
        assert compared
        for each in compared:
            value = known[each.layer, each.call, each.slot]
            assert each.value is not None
            assert value is not None
            assert torch.equal(each.value, value)
    assert not network.unseen_operations


def test_without_the_archives_notes_on_its_sources_there_are_no_lines(tmp_path: Path) -> None:
    eager, args = build(SEVEN["resnet"])
    for form in ("scripted", "traced"):
        SAVERS[form](eager, args, tmp_path / "net.pt")
        with zipfile.ZipFile(tmp_path / "net.pt") as full, zipfile.ZipFile(tmp_path / "bare.pt", "w") as bare:
            for name in full.namelist():
                if not name.endswith(".debug_pkl"):
                    bare.writestr(name, full.read(name))
        seen, _ = observed(load_torchscript(tmp_path / "bare.pt", 0).module, args)
        assert labels(seen) == labels(observed(eager, args)[0])
        assert {each.operation.source for each in seen if each.operation} == {""}


def test_each_call_of_a_traced_layer_counts(tmp_path: Path) -> None:
    block = Doubling()
    eager = nn.Sequential(block, nn.Tanh(), block).eval()
    args = (torch.randn(2, 3),)
    SAVERS["traced"](eager, args, tmp_path / "net.pt")
    seen, _ = observed(load_torchscript(tmp_path / "net.pt", 0).module, args)
    assert places(seen) == places(observed(eager, args)[0])
    assert [each.call for each in seen] == [0, 1]


def test_an_operation_that_fails_is_reported_as_without_operations_and_leaves_nothing(tmp_path: Path) -> None:
    eager = Failing().eval()
    SAVERS["scripted"](eager, (), tmp_path / "net.pt")
    network = load_torchscript(tmp_path / "net.pt", 0).module
    x = torch.rand(2, 3)
    messages = []
    for ops in (False, True):
        with pytest.raises(ForwardError) as caught, random_numbers_untouched():
            inspect(network, [batch_of(x, torch.rand(4, 2))], ops=ops)
        messages.append(str(caught.value))
        assert torch._C._len_torch_function_stack() == 0
    assert messages[0] == messages[1]
    y = torch.rand(3, 2)
    assert torch.equal(network(x, y), eager(x, y))
    assert [each.layer for each in observed(network, (x, y))[0]] == ["(model):matmul"]


def test_what_a_hook_of_an_operation_raises_comes_out_as_it_is(tmp_path: Path) -> None:
    eager, args = build(SEVEN["resnet"])
    SAVERS["scripted"](eager, args, tmp_path / "net.pt")
    network = load_torchscript(tmp_path / "net.pt", 0).module
    error = KeyboardInterrupt()

    def explode(*_: object) -> None:
        raise error

    with pytest.raises(KeyboardInterrupt) as caught:  # noqa: SIM117 - the capture must be over
        with capture(network, {}, explode, operations=OperationChoice(EVERYTHING)):
            network(*args)
    assert caught.value is error
    assert torch._C._len_torch_function_stack() == 0
    with torch.no_grad():
        assert torch.equal(network(*args), eager(*args))


def test_arguments_by_name_and_defaults_reach_the_script(tmp_path: Path) -> None:
    eager, _ = build(BY_HAND["branching"])
    SAVERS["scripted"](eager, (), tmp_path / "net.pt")
    network = load_torchscript(tmp_path / "net.pt", 0).module
    x = torch.randn(4, 4)
    with torch.no_grad(), capture(network, {}, clone, operations=OperationChoice(EVERYTHING)) as captured:
        output = network(count=1, x=x.clone())
        assert len([each for each in captured.observations if each.layer == "(model):relu"]) == 1
        with pytest.raises(RuntimeError, match="missing value for argument 'x'"):
            network()
        with pytest.raises(RuntimeError, match="Unknown keyword argument 'other'"):
            network(x, other=1)
    with torch.no_grad():
        expected = plain(tmp_path / "net.pt")(x.clone(), count=1)
    assert all(torch.equal(*pair) for pair in zip(tensors_of(output), tensors_of(expected), strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_what_shows_no_operations_is_named(tmp_path: Path) -> None:
    SAVERS["scripted"](Forking(), (), tmp_path / "net.pt")
    loaded = load_torchscript(tmp_path / "net.pt", 0)
    run = inspect(loaded, torch.ones(2, 3), ops=True)
    assert [row.label for row in run.rows if row.owner is not None] == []
    assert run.notes[-1] == "What TorchScript computes inside (model), aside is not seen as operations."
    assert not any("TorchScript" in note for note in inspect(loaded, torch.ones(2, 3)).notes)


def test_a_torch_with_other_graphs_shows_no_operations_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AttributeError("createClone")

    monkeypatch.setattr(scriptoperations, "_cut_out", fail)
    eager, args = build(SEVEN["densenet"])
    SAVERS["scripted"](eager, args, tmp_path / "net.pt")
    loaded = load_torchscript(tmp_path / "net.pt", 0)
    seen, output = observed(loaded.module, args)
    assert seen == []
    with torch.no_grad():
        assert torch.equal(output, plain(tmp_path / "net.pt")(*args))
    note = inspect(loaded, args[0], ops=True).notes[-1]
    assert note.startswith("What TorchScript computes inside ")
    assert note.endswith(", … is not seen as operations.")

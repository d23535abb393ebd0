"""Edits while it trains: what the same loop with hooks by hand gives, bit for bit, and nothing left behind."""

import copy
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import hookscope
from hookscope.commands.watch.describe import answer
from hookscope.commands.watch.training_log import read_training


def network_of_a_training() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 4)),
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda network: torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adamw": lambda network: torch.optim.AdamW(network.parameters(), lr=1e-2),
}


def nothing(_network: nn.Sequential) -> None:
    return None


@dataclass(frozen=True)
class ByHand:
    """What somebody would write for an edit: once before the loop, before each step, and after it."""

    begin: Callable[[nn.Sequential], object] = nothing
    before_step: Callable[[nn.Sequential], object] = nothing
    after_step: Callable[[nn.Sequential], object] = nothing


def on_gradient_of_output(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Sequential], object]:
    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(change)  # type: ignore[no-untyped-call]

    return lambda network: network[index].register_forward_hook(hook)


def on_output(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Sequential], object]:
    return lambda network: network[index].register_forward_hook(lambda _module, _args, output: change(output))


def on_gradients(index: int, change: Callable[[Tensor], Tensor]) -> Callable[[nn.Sequential], object]:
    return lambda network: [parameter.register_hook(change) for parameter in network[index].parameters()]  # type: ignore[no-untyped-call]


def to_norm(largest: float) -> Callable[[Tensor], Tensor]:
    """Return g · largest / max(‖g‖, largest), with the norm in float64."""
    return lambda gradient: gradient * (largest / gradient.double().norm().clamp_min(largest)).float()


def without_channel_3(output: Tensor) -> Tensor:
    kept = torch.ones(output.shape[1])
    kept[3] = 0
    return output * kept.view(1, -1, 1, 1)


@torch.no_grad()
def clamped(network: nn.Sequential) -> None:
    network[5].weight.clamp_(-0.03, 0.03)


@torch.no_grad()
def pruned(network: nn.Sequential) -> None:
    weight = network[5].weight
    weight.mul_(prune.L1Unstructured(0.5).compute_mask(weight, torch.ones_like(weight)))  # type: ignore[no-untyped-call]


CASES: dict[str, tuple[str, ByHand]] = {
    "output-gradient-clamped": (
        "/^0$/:grad:clamp(min=-1e-3, max=1e-3)",
        ByHand(begin=on_gradient_of_output(0, lambda gradient: gradient.clamp(-1e-3, 1e-3))),
    ),
    "output-gradient-clipped": ("/^5$/:grad:clip-norm(0.1)", ByHand(begin=on_gradient_of_output(5, to_norm(0.1)))),
    "output-gradient-zero": ("/^0$/:grad:zero", ByHand(begin=on_gradient_of_output(0, torch.zeros_like))),
    "channel-dead": ("/^0$/:output:zero(channels=3)", ByHand(begin=on_output(0, without_channel_3))),
    "gradients-clamped": (
        "param:*:grad:clamp(-0.01, 0.01)",
        ByHand(before_step=lambda network: nn.utils.clip_grad_value_(network.parameters(), 0.01)),
    ),
    "gradients-clipped": ("param:5.*:grad:clip-norm(0.1)", ByHand(begin=on_gradients(5, to_norm(0.1)))),
    "gradients-zero": ("param:0.*:grad:zero", ByHand(begin=on_gradients(0, torch.zeros_like))),
    "frozen": ("param:0.*:freeze", ByHand(begin=lambda network: network[0].requires_grad_(False))),
    "weights-clamped": ("param:5.weight:value:clamp(-0.03, 0.03)", ByHand(begin=clamped, after_step=clamped)),
    "weights-pruned": ("param:5.weight:value:prune(0.5)", ByHand(begin=pruned, after_step=pruned)),
}


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        pictures = torch.randn(8, 3, 8, 8, generator=generator)
        yield pictures, torch.randint(0, 4, (8,), generator=generator)


def trained(optimizer: str, by_hand: ByHand, edits: list[str] | None, *, turns_per_step: int = 1) -> list[Tensor]:
    """Return weights and buffers after six steps of a loop with edits, or with hooks by hand where there are none."""
    network = network_of_a_training()
    stepping = OPTIMIZERS[optimizer](network)
    with ExitStack() as block:
        if edits is not None:
            block.enter_context(hookscope.watch(network, stepping, every=2, edits=edits, on_line=lambda _line: None))
        by_hand.begin(network)
        for turn, (pictures, labels) in enumerate(batches(6 * turns_per_step), start=1):
            (F.cross_entropy(network(pictures), labels) / turns_per_step).backward()
            if turn % turns_per_step == 0:
                by_hand.before_step(network)
                stepping.step()
                stepping.zero_grad()
                by_hand.after_step(network)
    return [*network.state_dict().values()]


@pytest.mark.parametrize("case", CASES)
def test_an_edited_training_is_that_with_hooks_by_hand(case: str) -> None:
    edit, by_hand = CASES[case]
    optimizer = "adamw" if case in ("frozen", "gradients-zero") else "sgd"
    expected = trained(optimizer, by_hand, None)
    assert all(map(torch.equal, trained(optimizer, ByHand(), [edit]), expected))
    assert not all(map(torch.equal, trained(optimizer, ByHand(), None), expected))


def test_gradients_are_clipped_once_they_are_accumulated() -> None:
    edit, by_hand = CASES["gradients-clamped"]
    expected = trained("sgd", by_hand, None, turns_per_step=3)
    assert all(map(torch.equal, trained("sgd", ByHand(), [edit], turns_per_step=3), expected))


def test_clipping_is_that_of_torch_but_for_its_epsilon() -> None:
    clipping = ByHand(before_step=lambda network: nn.utils.clip_grad_norm_([network[5].weight], 0.1))
    edited = trained("sgd", ByHand(), ["param:5.weight:grad:clip-norm(0.1)"])
    for ours, theirs in zip(edited, trained("sgd", clipping, None), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_limits_hold_for_unscaled_gradients(fused: bool) -> None:
    def scaled(edits: list[str] | None) -> tuple[list[Tensor], list[str]]:
        network = network_of_a_training()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        lines: list[str] = []
        with ExitStack() as block:
            if edits is not None:
                block.enter_context(hookscope.watch(network, optimizer, edits=edits, on_line=lines.append))
            for pictures, labels in batches(4):
                scaler.scale(F.cross_entropy(network(pictures), labels)).backward()
                if edits is None:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_value_(network.parameters(), 0.01)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return [*network.state_dict().values()], lines

    expected, _ = scaled(None)
    edited, lines = scaled(["param:*:grad:clamp(-0.01, 0.01)", "/^5$/:grad:clamp(-1, 1)"])
    [line] = [line for line in lines if "scale" in line]
    assert line.startswith("Edit '/^5$/:grad:clamp(-1, 1)' gets gradients that the GradScaler has multiplied")
    # A scale of a power of two changes no bit; the clamp of the layer's, to 1 of 4,096, changes them all.
    assert not all(map(torch.equal, edited, expected))
    edited, _ = scaled(["param:*:grad:clamp(-0.01, 0.01)"])
    assert all(map(torch.equal, edited, expected))


def test_every_evaluation_of_a_closure_is_edited() -> None:
    def stepped(edits: list[str] | None) -> list[Tensor]:
        torch.manual_seed(0)
        network = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(network.parameters(), lr=0.1, max_iter=5)
        inputs, wanted = torch.randn(16, 3), torch.randn(16, 1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(network(inputs), wanted)
            loss.backward()
            if edits is None:
                nn.utils.clip_grad_value_(network.parameters(), 0.05)
            return loss

        with ExitStack() as block:
            if edits is not None:
                block.enter_context(hookscope.watch(network, optimizer, edits=edits, on_line=lambda _line: None))
            for _ in range(3):
                optimizer.step(closure)  # type: ignore[arg-type]
        return [*network.state_dict().values()]

    assert all(map(torch.equal, stepped(["param:*:grad:clamp(-0.05, 0.05)"]), stepped(None)))


def steps(network: nn.Module, optimizer: torch.optim.Optimizer, watch: hookscope.Watch, count: int) -> None:
    for pictures, labels in batches(count):
        loss = F.cross_entropy(network(pictures), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)


def hooks_of(network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    places = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    for module in network.modules():
        places += [module._forward_hooks, module._forward_pre_hooks]  # type: ignore[list-item]
    return sum(map(len, places)) + sum(len(parameter._backward_hooks or ()) for parameter in network.parameters())


ALL_PLACES = [
    *("/^0$/:input:add(0.1)", "/^0$/:output:scale(0.9)", "/^5$/:grad:clip-norm(0.1)"),
    *("param:5.*:grad:clamp(-1, 1)", "param:5.weight:value:clamp(-1, 1)", "param:0.*:freeze"),
]


def test_edits_change_in_the_loop_and_each_step_says_which(tmp_path: Path) -> None:
    network = network_of_a_training()
    network[1].requires_grad_(False)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    lines: list[str] = []
    with hookscope.watch(network, optimizer, every=1, out=tmp_path, edits=ALL_PLACES, on_line=lines.append) as watch:
        steps(network, optimizer, watch, 2)
        watch.edits = ["param:5.*:freeze"]
        assert [parameter.requires_grad for parameter in network.parameters()] == [
            True,
            True,
            False,
            False,
            False,
            False,
        ]
        steps(network, optimizer, watch, 2)
        watch.edits = []
        assert watch.edits == ()
        steps(network, optimizer, watch, 1)
        watch.edits = "/^0$/:output:zero"
        steps(network, optimizer, watch, 1)
        assert watch.log.watched[-1].layers[0].zero_fraction == 1  # it is measured as it was edited
    assert hooks_of(network, optimizer) == 0
    assert [parameter.requires_grad for parameter in network.parameters()] == [True, True, False, False, True, True]
    log = read_training(tmp_path)
    first = dict(zip(ALL_PLACES, (1, 1, 1, 2, 1, 2), strict=True))
    last = {"/^0$/:output:zero": 1}
    assert [dict(step.edits) for step in log.steps] == [first, first, *[{"param:5.*:freeze": 2}] * 2, {}, last]
    assert "Edited by /^0$/:input:add(0.1) in steps 1 to 2." in answer(log)
    assert "3 other edits are in watch.jsonl." in answer(log)
    assert lines[:2] == [
        "Edit 'param:5.*:grad:clamp(-1, 1)' changes 2 parameters: 5.weight, 5.bias.",
        "Edit 'param:0.*:freeze' changes 2 parameters: 0.weight, 0.bias.",
    ]
    with pytest.raises(hookscope.HookscopeError, match="The watch is closed"):
        watch.edits = []


def test_steps_that_a_loop_counts_by_tens_are_one_range() -> None:
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with hookscope.watch(network, optimizer, edits=["param:weight:grad:zero"], on_line=lambda _: None) as watch:
        for number in range(10, 60, 10):
            network(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            watch.step(step=number)
            watch.edits = ["param:weight:grad:zero"] if number != 30 else []
    assert "Edited by param:weight:grad:zero in steps 10 to 30, step 50." in answer(watch.log)


def test_copies_of_an_edited_network_are_not_edited() -> None:
    network = network_of_a_training()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    pictures, _ = next(batches(1))
    expected = network.eval()(pictures)
    with hookscope.watch(network, optimizer, edits=ALL_PLACES[:3], on_line=lambda _line: None):
        assert not torch.equal(network(pictures), expected)
        for made in (copy.deepcopy(network), pickle.loads(pickle.dumps(network))):
            made(pictures)
            assert torch.equal(made(pictures), expected)


def test_what_was_asked_for_is_no_verdict() -> None:
    network = network_of_a_training()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    lines: list[str] = []
    with hookscope.watch(network, optimizer, every=10, on_line=lines.append) as watch:
        steps(network, optimizer, watch, 2)
        watch.edits = ["param:5.weight:freeze", "param:0.weight:grad:zero"]
        steps(network, optimizer, watch, 25)
        watch.edits = []
        steps(network, optimizer, watch, 5)
    assert lines == []


def test_noise_is_another_in_each_step_and_draws_from_no_generator_of_the_training() -> None:
    network = network_of_a_training()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    pictures, _ = next(batches(1))
    seen: list[Tensor] = []
    state = torch.get_rng_state()
    with hookscope.watch(network, optimizer, edits=["/^0$/:output:noise(1)"], on_line=lambda _line: None) as watch:
        for _ in range(2):
            seen += [network(pictures), network(pictures)]
            optimizer.step()
            watch.step()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])
    assert torch.equal(torch.get_rng_state(), state)


class Headed(nn.Module):
    """A trunk that another network may share, and a head."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(3, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.trunk(inputs))


@pytest.mark.parametrize("edit", ["trunk:output:scale(0.5)", "trunk:grad:scale(0.5)", "param:trunk.*:grad:scale(0.5)"])
def test_a_layer_that_two_networks_share_is_edited_once_and_measured_once(edit: str) -> None:
    torch.manual_seed(0)
    trunk, inputs = nn.Linear(4, 3, bias=False), torch.randn(8, 4)
    networks = {"actor": Headed(trunk), "critic": Headed(trunk)}
    parameters = dict.fromkeys(parameter for network in networks.values() for parameter in network.parameters())
    optimizer = torch.optim.SGD([*parameters], lr=1.0)

    def loss() -> Tensor:
        return networks["actor"](inputs).sum() + networks["critic"](inputs).sum()

    before, (gradient,) = trunk.weight.detach().clone(), torch.autograd.grad(loss(), trunk.weight)
    with hookscope.watch(networks, optimizer, every=1, edits=[edit], on_line=lambda _: None) as watch:
        loss().backward()
        optimizer.step()
        watch.step()
    torch.testing.assert_close(before - trunk.weight, 0.5 * gradient)
    assert watch.log.steps[0].edits == ((edit, 1 if edit.startswith("param") else 2),)  # tensors: two calls
    status = {row.name: row.status for row in watch.log.watched[0].parameters}
    names = ("actor.trunk.weight", "actor.head.weight", "actor.head.bias", "critic.head.weight", "critic.head.bias")
    assert status == dict.fromkeys(names, "gradient")


@pytest.mark.parametrize("edit", ["type:Linear:output:scale(0.5)", "param:*weight:grad:scale(0.5)"])
def test_layers_whose_names_are_quoted_are_edited(edit: str) -> None:
    network = nn.Sequential(OrderedDict({"r": nn.Linear(2, 2), "r:1": nn.Linear(2, 2)}))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with hookscope.watch(network, optimizer, every=1, edits=[edit], on_line=lambda _: None) as watch:
        network(torch.randn(3, 2)).sum().backward()
        optimizer.step()
        watch.step()
    assert watch.log.steps[0].edits == ((edit, 2),)


def test_an_edit_that_changed_nothing_is_said_once() -> None:
    network = nn.ModuleDict(
        {"table": nn.Embedding(3, 2, sparse=True), "idle": nn.Linear(2, 2), "fixed": nn.Linear(2, 2)}
    )
    optimizer = torch.optim.SGD([*network["table"].parameters(), *network["idle"].parameters()], lr=0.1)
    edits = ["idle:output:zero", "param:table.weight:grad:zero", "param:fixed.weight:value:zero"]
    lines: list[str] = []
    with hookscope.watch(network, optimizer, edits=edits, on_line=lines.append) as watch:
        for _ in range(3):
            network["fixed"](network["table"](torch.arange(3))).sum().backward()
            optimizer.step()
            watch.step()
    assert not network["fixed"].weight.any()  # in no optimizer: zero once, and nothing changes it
    reason = (
        "what it selects did not run, got no gradient, is in no optimizer, or holds no dense floating-point numbers"
    )
    assert lines[:2] == [f"Edit '{edit}' changed nothing at step 1: {reason}." for edit in edits[:2]]
    assert not any("changed nothing" in line for line in lines[2:])


REFUSED = {
    "op:relu:output:zero": "only layers and parameters can be edited",
    "Conv2d@0:output:zero": "not known before the training starts",
    "nosuch:output:zero": "No layer matches",
    "param:nosuch:freeze": "matches no parameter",
    "0.weight:freeze": "before the operation a place is missing",
    "param::freeze": "the pattern of layers or parameters is missing",
    "param:5.weight:value:zero(channels=4)": "names channel 4",
    "param:5.weight:grad:zero(channels=4)": "names channel 4",
}


@pytest.mark.parametrize("edit", REFUSED)
def test_what_cannot_be_edited_is_refused_and_nothing_has_changed(edit: str, tmp_path: Path) -> None:
    network = network_of_a_training()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    before = copy.deepcopy(network.state_dict())
    with pytest.raises(hookscope.HookscopeError, match=REFUSED[edit]):
        hookscope.watch(network, optimizer, out=tmp_path / "run", edits=["param:5.*:value:zero", edit])
    assert hooks_of(network, optimizer) == 0
    assert not (tmp_path / "run").exists()
    with hookscope.watch(network, optimizer, edits="param:0.*:freeze", on_line=lambda _line: None) as watch:
        with pytest.raises(hookscope.HookscopeError, match=REFUSED[edit]):
            watch.edits = ["param:5.*:value:zero", edit]
        assert watch.edits == ("param:0.*:freeze",)
        assert not network[0].weight.requires_grad
    assert all(map(torch.equal, network.state_dict().values(), before.values()))


def test_an_edit_that_cannot_be_made_ends_the_training() -> None:
    network = network_of_a_training()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with (
        pytest.raises(hookscope.HookscopeError, match="names channel 9, but a tensor of shape 8x8x8x8"),
        hookscope.watch(network, optimizer, edits="/^0$/:output:zero(channels=9)", on_line=lambda _line: None) as watch,
    ):
        steps(network, optimizer, watch, 1)
    assert hooks_of(network, optimizer) == 0


def test_edits_stay_where_watching_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    network = network_of_a_training()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    lines: list[str] = []
    watch = hookscope.watch(network, optimizer, edits="param:5.weight:value:zero", on_line=lines.append)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("hookscope.commands.watch.watch.read_gradients", broken)
    steps(network, optimizer, watch, 2)
    assert lines == [
        "Watching ends, because hookscope failed: RuntimeError: a bug. The training goes on. Its edits stay."
    ]
    assert not network[5].weight.any()
    watch.close()
    assert hooks_of(network, optimizer) == 0
    steps(network, optimizer, watch, 1)
    assert network[5].weight.any()


def test_only_parameters_of_a_compiled_network_are_edited() -> None:
    network = torch.compile(network_of_a_training(), backend="eager")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    reason = "Sequential is compiled, where hooks do not fire"
    with pytest.raises(hookscope.HookscopeError, match=reason):
        hookscope.watch(network, optimizer, edits="/^0$/:output:zero")
    edit, _ = CASES["gradients-clamped"]
    with hookscope.watch(network, optimizer, edits=[edit, "param:0.*:freeze"], on_line=lambda _line: None) as watch:
        steps(network, optimizer, watch, 2)
        assert dict(watch.log.steps[-1].edits) == {edit: 4, "param:0.*:freeze": 2}


@pytest.mark.exhaustive
def test_what_data_parallel_training_waits_for_is_not_frozen(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ddp", rank=0, world_size=1)
    try:
        for finds_unused in (False, True):
            network = nn.parallel.DistributedDataParallel(
                nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), find_unused_parameters=finds_unused
            )
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            if not finds_unused:
                with pytest.raises(hookscope.HookscopeError, match="waits for the gradient of every parameter"):
                    hookscope.watch(network, optimizer, edits="param:0.*:freeze")
                continue
            before = network.module[0].weight.detach().clone()
            with hookscope.watch(network, optimizer, edits="param:0.*:freeze", on_line=lambda _line: None):
                for _ in range(3):
                    network(torch.randn(2, 3)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            assert torch.equal(network.module[0].weight, before)
    finally:
        torch.distributed.destroy_process_group()


def test_only_a_training_is_frozen() -> None:
    with pytest.raises(hookscope.HookscopeError, match="only a training can be frozen"):
        hookscope.activations(nn.Linear(2, 2), torch.ones(1, 2), edit="param:weight:freeze")

"""The figures of a watch against hooks by hand, arithmetic and torch's own functions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

import hookscope
from hookscope.results.training import WatchedLayer, WatchedParameter, WatchedStep


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.Sigmoid(), nn.Linear(40, 3))


def batch(seed: int, count: int = 50) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 6, generator=generator), torch.randint(0, 3, (count,), generator=generator)


def watch_of(network: Any, optimizer: Any, every: int = 1, **options: Any) -> hookscope.Watch:
    return hookscope.watch(network, optimizer, every=every, on_line=lambda _: None, **options)


def parameter(step: WatchedStep, name: str) -> WatchedParameter:
    return next(weight for weight in step.parameters if weight.name == name)


def layer(step: WatchedStep, label: str) -> WatchedLayer:
    return next(row for row in step.layers if row.label == label)


def norm(tensors: list[Tensor]) -> float:
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors]).norm().item()


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.sample("None")
def test_every_figure_equals_hooks_by_hand(fused: bool | None) -> None:
    network = build()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01, fused=fused)
    watch = watch_of(network, optimizer)
    for number in range(1, 4):
        inputs, labels = batch(number)
        seen: dict[str, Tensor] = {}
        handles = [
            module.register_forward_hook(
                lambda _module, _inputs, output, name=name, seen=seen: seen.update({name: output.detach().clone()})
            )
            for name, module in network.named_children()
        ]
        loss = F.cross_entropy(network(inputs), labels)
        for handle in handles:
            handle.remove()
        loss.backward()
        named = dict(network.named_parameters())
        gradients = {name: weight.grad.clone() for name, weight in named.items() if weight.grad is not None}
        before = {name: tensor.detach().clone() for name, tensor in named.items()}
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
        step, watched = watch.log.steps[-1], watch.log.watched[-1]
        assert step.loss == loss.item()
        assert step.gradient_norm == pytest.approx(norm([*gradients.values()]), rel=1e-6)
        assert step.norm_before_clipping is None
        by_size = sorted(gradients, key=lambda name: -gradients[name].norm().item())
        assert [name for name, _ in step.largest] == by_size
        assert [value for _, value in step.largest] == pytest.approx([norm([gradients[name]]) for name in by_size])
        for name, after in named.items():
            row, gradient = parameter(watched, name), gradients[name]
            assert row.status == "gradient"
            assert row.weight_norm == pytest.approx(norm([before[name]]), rel=1e-6)
            assert row.gradient_norm == pytest.approx(norm([gradient]), rel=1e-6)
            assert row.gradient_max == gradient.abs().max().item()
            assert row.gradient_zero_fraction == pytest.approx((gradient == 0).double().mean().item())
            assert row.gradient_nonfinite_count == 0
            assert row.update_norm == pytest.approx(norm([after.detach() - before[name]]), rel=1e-5)
        if number == 1:  # without activations, for what is compiled at its first call
            assert watched.layers == ()
            continue
        assert [row.label for row in watched.layers] == ["0", "1", "2", "3", "4"]
        for name, output in seen.items():
            measured, values = layer(watched, name), output.double()
            assert measured.mean == pytest.approx(values.mean().item(), abs=1e-6)
            assert measured.std == pytest.approx(values.std(correction=0).item(), rel=1e-5)
            assert (measured.min, measured.max) == (output.min().item(), output.max().item())
            assert measured.zero_fraction == pytest.approx((output == 0).double().mean().item())
            dead = (output == 0).all(0).double().mean().item()
            assert measured.dead_channel_fraction == pytest.approx(dead)
            assert measured.nonfinite_count == 0
        gates = seen["3"]
        saturated = ((gates <= 1 / 64) | (gates >= 63 / 64)).double().mean().item()
        assert layer(watched, "3").saturated_fraction == pytest.approx(saturated)
        assert layer(watched, "1").saturated_fraction is None
    watch.close()


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        *[(dtype, size) for dtype in (torch.float32, torch.bfloat16, torch.complex64) for size in (2.0**66, 2.0**-90)],
        *[(dtype, size) for dtype in (torch.float64, torch.complex128) for size in (2.0**600, 2.0**-600)],
    ],
)
def test_norms_whose_squares_overflow_or_vanish_are_known(dtype: torch.dtype, size: float) -> None:
    network = nn.Linear(3, 4, dtype=dtype)
    nn.init.constant_(network.weight, size)
    nn.init.zeros_(network.bias)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    with watch_of(network, optimizer) as watch:
        network.weight.grad = torch.full_like(network.weight, size)
        network.bias.grad = torch.full_like(network.bias, 1.0)
        optimizer.step()
        watch.step()
    row, bias = (parameter(watch.log.watched[0], name) for name in ("weight", "bias"))
    norms = [row.weight_norm, row.gradient_norm, row.update_norm]
    assert norms == pytest.approx([factor * size * 12**0.5 for factor in (1, 1, 0.5)], rel=1e-6, abs=0)
    assert dict(watch.log.steps[0].largest) == pytest.approx({"weight": size * 12**0.5, "bias": 2}, rel=1e-6, abs=0)
    assert [bias.weight_norm, bias.gradient_norm, bias.update_norm] == [0, 2, 1]
    assert watch.verdicts == ()


def test_a_parameter_of_whole_numbers_has_no_norm() -> None:
    network = nn.Linear(2, 1)
    network.register_parameter("indices", nn.Parameter(torch.tensor([1, 2]), requires_grad=False))
    lines: list[str] = []
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    watch = hookscope.watch(network, optimizer, every=1, on_line=lines.append)
    for _ in range(2):
        loss = network(torch.ones(1, 2)).sum()
        loss.backward()
        optimizer.step()
        watch.step(loss)
    watch.close()
    row = parameter(watch.log.watched[1], "indices")
    assert (row.status, row.weight_norm, row.gradient_norm, row.update_norm) == ("frozen", None, None, None)
    assert lines == []


def test_a_network_without_a_key_has_the_same_names_for_layers_and_parameters() -> None:
    network = nn.Sequential(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    with watch_of({"": network}, optimizer) as watch:
        for _ in range(2):
            loss = network(torch.ones(1, 2)).sum()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    (step,) = watch.log.watched[1:]
    assert [row.label for row in step.layers] == ["0"]
    assert [row.name for row in step.parameters] == ["0.weight", "0.bias"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("nesterov", [False, True])
def test_gradients_are_read_before_the_optimiser_edits_them(nesterov: bool) -> None:
    weight = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov, foreach=True)
    watch = watch_of(weight, optimizer)
    for _ in range(3):
        weight(torch.tensor([[3.0, 4.0]])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
    watch.close()
    assert [step.gradient_norm for step in watch.log.steps] == [5.0] * 3
    assert [step.loss for step in watch.log.steps] == [None] * 3


CLIPS: dict[str, Callable[[nn.Module], Any]] = {
    "norm": lambda network: clip_grad_norm_(network.parameters(), 1.0),
    "largest": lambda network: clip_grad_norm_(network.parameters(), 1e-3, norm_type=float("inf")),
    "value": lambda network: clip_grad_value_(network.parameters(), 1e-3),
    "by a norm from elsewhere": lambda network: nn.utils.clip_grads_with_norm_(
        network.parameters(), 1.0, torch.tensor(8.0)
    ),
    "a list": lambda network: nn.utils.clip_grad_norm_([*network.parameters()], 0.5),
    "some": lambda network: clip_grad_norm_(network[0].parameters(), 0.5),
    "in parts": lambda network: [clip_grad_norm_(part.parameters(), 0.5) for part in (network[0], network[2])],
    "twice": lambda network: [clip_grad_norm_(network.parameters(), limit) for limit in (0.5, 0.1)],
    "without effect": lambda network: clip_grad_norm_(network.parameters(), 1e9),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # torch rounds norms to the dtype
@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_norms_are_known_before_and_after_clipping(clip: Callable[[nn.Module], Any], dtype: torch.dtype) -> None:
    network = build().to(dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    watch = watch_of(network, optimizer, every=100)
    for number in range(3):
        inputs, labels = batch(number)
        (100 * F.cross_entropy(network(inputs.to(dtype)), labels)).backward()
        before = norm([weight.grad for weight in network.parameters() if weight.grad is not None])
        clip(network)
        after = norm([weight.grad for weight in network.parameters() if weight.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
        assert watch.log.steps[-1].norm_before_clipping == pytest.approx(before, rel=1e-6)
        assert watch.log.steps[-1].gradient_norm == pytest.approx(after, rel=1e-6)
    watch.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_scaled_gradients_are_divided_and_skipped_steps_are_known(fused: bool, unscaled: bool) -> None:
    network = build()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch = watch_of(network, optimizer)
    for number in range(1, 4):
        inputs, labels = batch(number)
        loss = F.cross_entropy(network(inputs), labels)
        alone = torch.autograd.grad(loss, [*network.parameters()], retain_graph=True)
        scaler.scale(loss).backward()
        if number == 2:
            network[0].weight.grad[0, 0] = torch.inf
        if unscaled:
            scaler.unscale_(optimizer)
        if number == 3:
            clip_grad_norm_(network.parameters(), 1e9)
        kept = [tensor.detach().clone() for tensor in network.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        watch.step(loss)
        step = watch.log.steps[-1]
        assert step.step == number
        assert step.skipped == (number == 2)
        assert all(map(torch.equal, kept, network.parameters())) == (number == 2)
        if number != 2:
            assert step.gradient_norm == pytest.approx(norm([*alone]), rel=1e-5)
        if number == 3:
            assert step.norm_before_clipping == pytest.approx(norm([*alone]), rel=1e-5)
        assert parameter(watch.log.watched[-1], "2.weight").weight_norm == pytest.approx(norm([kept[2]]), rel=1e-6)
        assert parameter(watch.log.watched[-1], "2.weight").gradient_norm == pytest.approx(norm([alone[2]]), rel=1e-5)
        broken = parameter(watch.log.watched[-1], "0.weight")
        assert (broken.status, broken.gradient_nonfinite_count) == ("gradient", number == 2)
    watch.close()


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_one_of_two_optimisers_leaves_the_norms_of_the_other(fused: bool) -> None:
    network = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01, fused=fused) for layer in network]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    watch = watch_of(network, optimizers)
    for number in range(1, 13):
        hidden = network[0](torch.randn(16, 4))
        if number > 1:
            hidden.register_hook(lambda gradient: gradient * torch.inf)
        loss = network[1](hidden).square().mean()
        alone = torch.autograd.grad(loss, [*network[1].parameters()], retain_graph=True)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        network.zero_grad()
        watch.step(loss)
        step = watch.log.steps[-1]
        if number > 1:
            assert not step.skipped
            assert step.gradient_norm == pytest.approx(norm([*alone]), rel=1e-5)
            assert {name for name, _ in step.largest} == {"1.weight", "1.bias"}
    watch.close()
    assert [(verdict.rule, verdict.step, verdict.where) for verdict in watch.verdicts] == [
        ("skipped-steps", 11, "0.bias")
    ]


def test_the_learning_rate_is_that_of_the_step_though_a_schedule_overwrites_the_tensor() -> None:
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=torch.tensor(0.5))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    with watch_of(layer, optimizer) as watch:
        for _ in range(3):
            layer(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            schedule.step()
            watch.step()
    assert [step.learning_rates for step in watch.log.steps] == [(0.5,), (0.25,), (0.125,)]


@pytest.mark.exhaustive
def test_accumulated_gradients_are_one_step_with_the_mean_loss_and_all_batches() -> None:
    network = build()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    watch = watch_of(network, optimizer)
    for number in (1, 2):
        losses, outputs = [], []
        for part in range(4):
            inputs, labels = batch(10 * number + part)
            output = network(inputs)
            outputs.append(output.detach())
            loss = F.cross_entropy(output, labels) / 4
            loss.backward()
            losses.append(loss.item())
            if part < 3:
                watch.step(loss)
        gradient = norm([weight.grad for weight in network.parameters() if weight.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
        assert len(watch.log.steps) == number
        assert watch.log.steps[-1].loss == pytest.approx(sum(losses) / 4)
        assert watch.log.steps[-1].gradient_norm == pytest.approx(gradient, rel=1e-6)
    together = torch.cat(outputs)
    measured = layer(watch.log.watched[-1], "4")
    assert measured.mean == pytest.approx(together.mean().item(), abs=1e-6)
    assert measured.max == together.max().item()
    watch.close()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("batches", [1, 3])
def test_a_step_that_is_ended_before_the_optimiser_steps_has_its_own_loss_gradients_and_outputs(
    batches: int, scaled: bool
) -> None:
    network = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    lines: list[str] = []
    watch = hookscope.watch(network, optimizer, every=batches, on_line=lines.append)
    losses, norms, means_of_outputs = [], [], list[float]()
    for number in range(6 * batches):
        inputs, labels = batch(number)
        outputs = network(inputs)
        loss = F.cross_entropy(outputs, labels)
        scaler.scale(loss / batches).backward()
        losses.append(loss.item())
        means_of_outputs.append(outputs.mean().item())
        watch.step(loss.item(), step=number)
        if number % batches == batches - 1:
            scaler.unscale_(optimizer)
            norms.append(norm([weight.grad for weight in network.parameters() if weight.grad is not None]))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    watch.close()
    steps = watch.log.steps
    assert [step.step for step in steps] == [*range(batches - 1, 6 * batches, batches)]
    means = torch.tensor(losses).reshape(-1, batches).mean(1)
    assert [step.loss for step in steps] == pytest.approx(means.tolist())
    assert [step.gradient_norm for step in steps] == pytest.approx(norms)
    measured = {step.step: row.mean for step in watch.log.watched for row in step.layers}
    expected = torch.tensor(means_of_outputs).reshape(-1, batches).mean(1).tolist()
    assert len(measured) == 5  # not at the first step
    assert measured == pytest.approx(
        {step.step: mean for step, mean in zip(steps, expected, strict=True) if step is not steps[0]}
    )
    assert not lines


@pytest.mark.exhaustive
@pytest.mark.parametrize("in_eval_mode", [False, True])
def test_validation_between_steps_is_not_taken_for_training(in_eval_mode: bool) -> None:
    network = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    watch = watch_of(network, optimizer)
    for number in (1, 2):
        network.eval()
        if in_eval_mode:  # and without no_grad
            network(1e6 * batch(5)[0])
        else:
            with torch.no_grad():
                network(1e6 * batch(5)[0])
        network.train()
        inputs, labels = batch(number)
        output = network(inputs)
        F.cross_entropy(output, labels).backward()
        optimizer.step()
        watch.step()
    watch.close()
    assert layer(watch.log.watched[-1], "2").max == output.max().item()
    assert [row.label for row in watch.log.watched[-1].layers] == ["0", "1", "2"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_inside_checkpoints_are_measured_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
            self.head = nn.Linear(8, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(checkpoint(self.inner, inputs, use_reentrant=reentrant))

    network = Checkpointed()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    watch = watch_of(network, optimizer)
    for number in (1, 2):
        inputs, labels = batch(number)
        expected = network.inner(inputs.detach())
        F.cross_entropy(network(inputs.requires_grad_()), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step()
    watch.close()
    labels_seen = [row.label for row in watch.log.watched[-1].layers]
    assert "inner.0" in labels_seen
    assert labels_seen.count("inner.1") == 1
    assert layer(watch.log.watched[-1], "inner.1").max == pytest.approx(expected.max().item())


@pytest.mark.exhaustive
def test_a_closure_is_read_after_its_first_call() -> None:
    network = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(network.parameters(), lr=0.1, max_iter=3)
    watch = watch_of(network, optimizer)
    inputs, wanted = torch.randn(20, 3), torch.randn(20, 1)
    for _ in range(3):
        norms: list[float] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(network(inputs), wanted)
            loss.backward()
            norms.append(norm([weight.grad for weight in network.parameters() if weight.grad is not None]))  # noqa: B023
            return loss

        before = network.weight.detach().clone()
        watch.step(optimizer.step(closure))
        assert watch.log.steps[-1].gradient_norm == pytest.approx(norms[0], rel=1e-6)
        moved = parameter(watch.log.watched[-1], "weight").update_norm
        assert moved == pytest.approx((network.weight.detach() - before).norm().item(), rel=1e-5)
    watch.close()
    assert len(watch.log.steps) == 3


@pytest.mark.exhaustive
def test_several_networks_and_optimisers_are_one_watch_with_their_names() -> None:
    networks = [build(), build()]
    optimizers = [
        torch.optim.SGD(network.parameters(), lr=rate) for network, rate in zip(networks, (0.1, 0.2), strict=True)
    ]
    for inputs in (networks, {"a": networks[0], "b": networks[1]}):
        with watch_of(inputs, optimizers) as watch:
            for number in (1, 2):
                pictures, labels = batch(number)
                for network in networks:
                    F.cross_entropy(network(pictures), labels).backward()
                gradients = [
                    weight.grad.clone() for net in networks for weight in net.parameters() if weight.grad is not None
                ]
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                watch.step()
        step, watched = watch.log.steps[-1], watch.log.watched[-1]
        assert step.gradient_norm == pytest.approx(norm(gradients), rel=1e-6)
        assert step.learning_rates == (0.1, 0.2)
        first, second = ("a.", "b.") if isinstance(inputs, dict) else ("Sequential[0].", "Sequential[1].")
        assert [weight.name for weight in watched.parameters][:1] == [f"{first}0.weight"]
        assert parameter(watched, f"{second}4.bias").update_norm is not None
        assert layer(watched, f"{second}4").kind == "Linear"


@pytest.mark.exhaustive
def test_layers_that_were_asked_for_are_listed_alone() -> None:
    network = build()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    with watch_of(network, optimizer, layer=["2", "type:Sigmoid"]) as watch:
        for number in (1, 2):
            inputs, labels = batch(number)
            F.cross_entropy(network(inputs), labels).backward()
            gradients = [weight.grad.clone() for weight in network.parameters() if weight.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
    watched = watch.log.watched[-1]
    assert [row.label for row in watched.layers] == ["2", "3"]
    assert [weight.name for weight in watched.parameters] == ["2.weight", "2.bias"]
    assert watch.log.steps[-1].gradient_norm == pytest.approx(norm(gradients), rel=1e-6)
    with pytest.raises(hookscope.LayerNotFoundError):
        watch_of(network, optimizer, layer="conv")


@pytest.mark.parametrize("patterns", [["*"], ["type:Scaled"]])
def test_a_network_that_was_asked_for_is_listed_with_its_own_parameters(patterns: list[str]) -> None:
    class Scaled(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(4, 2))
            self.scale = nn.Parameter(torch.ones(2))

    network = Scaled()
    with watch_of({"a": network}, torch.optim.SGD(network.parameters(), lr=0.1), layer=patterns) as watch:
        network(torch.ones(3, 4)).sum().backward()
        watch._optimizers[0].step()
        watch.step()
    assert [row.name for row in watch.log.watched[0].parameters] == ["a.scale", "a.0.weight", "a.0.bias"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_sparse_gradients_have_norms(dtype: torch.dtype) -> None:
    network = nn.ModuleList([nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2).to(dtype)])
    sparse, dense = (torch.optim.SGD(each.parameters(), lr=0.1) for each in network)
    with watch_of(network, [sparse, dense], activations=False) as watch:
        actual = network[0](torch.tensor([1, 1, 3]))
        network[1](actual.to(dtype)).sum().backward()
        gradients = [weight.grad.to_dense() for weight in network.parameters() if weight.grad is not None]
        for optimizer in (sparse, dense):
            optimizer.step()
        watch.step()
    assert watch.log.ends[0].reason == "closed"
    assert watch.log.steps[0].gradient_norm == pytest.approx(norm(gradients), rel=1e-3)


def test_every_change_of_what_is_trained_is_in_the_norms_of_the_next_step() -> None:
    network = build().double()
    first, second, head = network[0], network[2], network[4]
    optimizer = torch.optim.SGD(second.parameters(), lr=0.01)
    watch = watch_of(network, optimizer, every=1_000)

    def unfreeze() -> None:
        second.weight.requires_grad_(True)

    def narrow() -> None:  # other shapes in the same parameters
        first.weight.data, first.bias.data = torch.randn(8, 6), torch.randn(8)
        second.weight.data, head.weight.data = torch.randn(40, 8), torch.randn(3, 40)
        second.bias.data, head.bias.data = torch.randn(40), torch.randn(3)

    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: optimizer.add_param_group({"params": [*head.parameters()], "lr": 0.1}),
        lambda: second.weight.requires_grad_(False),
        unfreeze,
        lambda: optimizer.add_param_group({"params": [*first.parameters()], "lr": 0.2}),
        network.float,
        narrow,
        lambda: optimizer.param_groups[0].update(params=[second.bias], lr=0.5),
    ]
    for number, change in enumerate(changes, start=1):
        optimizer.zero_grad()
        change()
        inputs, labels = batch(number)
        loss = F.cross_entropy(network(inputs.to(first.weight.dtype)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        held = [param for group in optimizer.param_groups for param in group["params"]]
        gradients = {id(weight): weight.grad.clone() for weight in held if weight.grad is not None}
        names = {id(weight): name for name, weight in network.named_parameters()}
        rates = tuple(group["lr"] for group in optimizer.param_groups)
        optimizer.step()
        watch.step(loss)
        step = watch.log.steps[-1]
        assert step.gradient_norm == pytest.approx(norm([*gradients.values()]), rel=1e-6)
        assert dict(step.largest) == pytest.approx(
            {names[key]: norm([gradient]) for key, gradient in gradients.items()}
        )
        assert step.learning_rates == rates
        del loss  # its graph has the shapes of before
    watch.close()

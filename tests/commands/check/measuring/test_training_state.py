"""What stands beside the weights in a training checkpoint: what torch itself saves is sound."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookscope.checkpoints.locate_state_dict import weights_in
from hookscope.checkpoints.training_entries import TrainingEntries, training_entries
from hookscope.commands.check.measuring.training_state import copy_values, optimiser_values, scaler_values
from hookscope.results.training_state import OptimiserValues
from tests.commands.check.checkpoints.gratings import trained_on_gratings

Optimiser = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Schedule = Callable[[Any], lr_scheduler.LRScheduler]


def saved(folder: Path, **parts: Any) -> TrainingEntries:
    """Write a training checkpoint, read it, and return what stands beside the weights below "model"."""
    torch.save(parts, folder / "training.pt")
    content = torch.load(folder / "training.pt")
    return training_entries(content, weights_in(content, "model.pt", "model"), "model")


def in_bursts(parameters: list[nn.Parameter], optimiser: torch.optim.Optimizer, schedule: Any, steps: int) -> None:
    """Step with gradients over eight decades, many of them zero: so first moments come near their bound."""
    chance = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for parameter in parameters:
            scale = 10 ** (8 * torch.rand(parameter.shape, generator=chance) - 6)
            is_there = torch.rand(parameter.shape, generator=chance) < 0.3
            parameter.grad = (torch.randn(parameter.shape, generator=chance) * scale * is_there).to(parameter.dtype)
        optimiser.step()
        if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
            schedule.step(1.0)
        elif schedule is not None:
            schedule.step()


def assert_sound(values: OptimiserValues, steps: float | None) -> None:
    assert (values.non_finite, values.negative, values.wrong_settings, values.other_rates) == ((), (), (), ())
    assert max(values.excess_moments.values(), default=0) < 1.02  # rounding of bfloat16 alone
    assert values.steps == ({} if steps is None else {steps: 2})


OPTIMISERS: dict[str, Optimiser] = {
    "SGD with momentum": lambda each: torch.optim.SGD(each, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda each: torch.optim.Adam(each, 1e-3),
    "Adam without first moments": lambda each: torch.optim.Adam(each, 1e-3, betas=(0.0, 0.999)),
    "Adam of as short moments": lambda each: torch.optim.Adam(each, 1e-3, betas=(0.5, 0.5)),
    "AdamW with the greatest of its moments": lambda each: torch.optim.AdamW(each, 1e-3, amsgrad=True),
    "Adamax": lambda each: torch.optim.Adamax(each, 1e-3),
    "RMSprop": lambda each: torch.optim.RMSprop(each, 1e-3, centered=True, momentum=0.9),
    "Adagrad": lambda each: torch.optim.Adagrad(each, 1e-3),
    "Adafactor": lambda each: torch.optim.Adafactor(each, 1e-3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_states_of_torchs_optimisers_are_sound(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.ones(40, 30, dtype=dtype)), nn.Parameter(torch.ones(30, dtype=dtype))]
    optimiser = OPTIMISERS[name](parameters)
    in_bursts(parameters, optimiser, None, 20)
    model = {str(at): parameter.detach() for at, parameter in enumerate(parameters)}
    (values,) = optimiser_values(saved(tmp_path, model=model, optimizer=optimiser.state_dict()))
    assert_sound(values, None if name.startswith("SGD") else 20)


SCHEDULES: dict[str, Schedule] = {
    "OneCycleLR": lambda each: lr_scheduler.OneCycleLR(each, 0.1, total_steps=40),  # moves beta1 as well
    "CyclicLR": lambda each: lr_scheduler.CyclicLR(each, 1e-4, 0.1, 7, base_momentum=0.5),
    "CosineAnnealingWarmRestarts": lambda each: lr_scheduler.CosineAnnealingWarmRestarts(each, 6),
    "a warm-up, then steps": lambda each: lr_scheduler.SequentialLR(
        each, [lr_scheduler.LinearLR(each), lr_scheduler.StepLR(each, 5)], [8]
    ),
    "two at once": lambda each: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(each), lr_scheduler.ExponentialLR(each, 0.9)]
    ),
    "ReduceLROnPlateau": lambda each: lr_scheduler.ReduceLROnPlateau(each, patience=3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SCHEDULES)
def test_states_under_torchs_schedules_are_sound(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.ones(40, 30, dtype=dtype)), nn.Parameter(torch.ones(30, dtype=dtype))]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 1e-4, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, 1e-3)
    schedule = SCHEDULES[name](optimiser)
    in_bursts(parameters, optimiser, schedule, 30)
    model = {str(at): parameter.detach() for at, parameter in enumerate(parameters)}
    parts = {"optimizer": optimiser.state_dict(), "lr_scheduler": schedule.state_dict()}
    (values,) = optimiser_values(saved(tmp_path, model=model, **parts))
    assert_sound(values, 30)


def test_first_moments_are_not_judged_where_their_second_forget_too_fast_to_bound_them(tmp_path: Path) -> None:
    """With decays a = 0.7 and b = 0.5, and gradients that shrink by a / b at each step, m is 2.1 sqrt(v / (1 - b))."""
    weight = nn.Parameter(torch.ones(3))
    optimiser = torch.optim.Adam([weight], 0.0, betas=(0.7, 0.5))
    for step in range(150):
        weight.grad = torch.full((3,), 1.4 ** (75 - step))
        optimiser.step()
    (state,) = optimiser.state_dict()["state"].values()
    ratio = state["exp_avg"] / (state["exp_avg_sq"] / 0.5).sqrt()
    assert ratio.tolist() == pytest.approx([math.sqrt(0.09 * (1 - 0.98**150) / (1 - 0.98))] * 3)
    assert (ratio > 2).all()
    beside = saved(tmp_path, model={"weight": weight.detach()}, optimizer=optimiser.state_dict())
    (values,) = optimiser_values(beside)
    assert values.excess_moments == {}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_sparse_moments_are_not_judged(convert: Callable[[Tensor], Tensor]) -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    optimiser = torch.optim.Adam([weight])
    weight.grad = torch.ones(3, 3)
    optimiser.step()
    state = optimiser.state_dict()
    state["state"][0]["exp_avg_sq"] = convert(state["state"][0]["exp_avg_sq"])
    (values,) = optimiser_values(TrainingEntries(optimisers=(("optimizer", state),)))
    assert values.excess_moments == {}
    assert values.tensor_count == 3


def test_a_scaler_is_read_as_torch_saves_it(tmp_path: Path) -> None:
    sound = torch.amp.GradScaler("cpu").state_dict()
    (values,) = scaler_values(saved(tmp_path, model={"weight": torch.ones(3)}, scaler=sound))
    numbers = (values.scale, values.growth_factor, values.backoff_factor, values.growth_interval, values.growth_tracker)
    assert (values.key, *numbers) == ("scaler", 65536, 2, 0.5, 2000, 0)
    broken = sound | {"scale": torch.tensor(3.0), "growth_factor": "2", "backoff_factor": None}
    (values,) = scaler_values(saved(tmp_path, model={"weight": torch.ones(3)}, scaler=broken))
    assert values.scale == 3
    assert math.isnan(values.growth_factor)
    assert math.isnan(values.backoff_factor)


def average_of(network: nn.Module, beside: nn.Module, steps: int) -> dict[str, Tensor]:
    """Return an average that began with a network, after so many updates with another one."""
    averaged = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    averaged.update_parameters(network)
    for _ in range(steps):
        averaged.update_parameters(beside)
    return averaged.state_dict()


def test_an_average_that_was_hardly_updated_looks_as_initialised(tmp_path: Path) -> None:
    network, start = trained_on_gratings(), trained_on_gratings()
    for module in start.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for each in start.modules():
            if isinstance(each, nn.Conv2d):
                each.reset_parameters()
    stale = saved(tmp_path, model=network.state_dict(), ema=average_of(start, network, 0))
    (values,) = copy_values(stale)
    assert set(values.untrained) == {f"module.{at}.weight" for at in (3, 6, 9, 12)}
    assert set(values.reset) == {f"module.{at}" for at in (1, 4, 7, 10, 13)}
    (values,) = copy_values(saved(tmp_path, model=network.state_dict(), ema=average_of(start, network, 60)))
    assert (values.untrained, values.reset) == ((), ())


@pytest.mark.parametrize("value", [0.0, 1.0, -0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_weights_of_an_average_that_hold_one_value_are_listed(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(3, 4), "b.weight": torch.randn(4, 2, 3), "a.bias": torch.randn(3)}
    weights["gate.weight"] = torch.zeros(3, 4)  # as it started, like its average
    everywhere = {name: torch.full_like(weight, value).to(dtype) for name, weight in weights.items()}
    (values,) = copy_values(saved(tmp_path, model=weights, ema=everywhere))
    assert (values.single_valued, values.matrix_count) == (("a.weight", "b.weight"), 2)
    one = {**weights, "b.weight": everywhere["b.weight"]}
    (values,) = copy_values(saved(tmp_path, model=weights, ema=one))
    assert (values.single_valued, values.matrix_count) == (("b.weight",), 2)
    (values,) = copy_values(
        saved(tmp_path, model=weights, ema={name: weight * 0.5 for name, weight in weights.items()})
    )
    assert (values.single_valued, values.matrix_count) == ((), 2)


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_an_average_that_is_a_list_of_the_parameters_is_read(factor: float, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    shadow = [parameter.detach() * factor for parameter in network.parameters()]
    averages = {"decay": 0.999, "num_updates": 7, "shadow_params": shadow, "collected_params": None}  # torch_ema's
    (values,) = copy_values(saved(tmp_path, model=network.state_dict(), ema=averages))
    assert values.key == "ema.shadow_params"
    assert values.single_valued == (() if factor else ("0.weight", "3.weight"))
    assert (values.tensor_count, values.missing, values.unknown, values.reshaped) == (6, (), (), ())
    other = {**averages, "shadow_params": [*shadow[1:], shadow[0]]}  # not in the parameters' order
    assert [*copy_values(saved(tmp_path, model=network.state_dict(), ema=other))] == []


def test_step_counts_of_nan_are_counted_together() -> None:
    entries = {at: {"step": torch.tensor(math.nan)} for at in range(3)} | {3: {"step": 7}}
    (values,) = optimiser_values(TrainingEntries(optimisers=(("optimizer", {"state": entries, "param_groups": []}),)))
    assert sorted(values.steps.values()) == [1, 3]

"""The rules over whole networks, through the engine: silent on sound ones, right about what breaks and where."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN, RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.ssd import SSD
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool, LastLevelP6P7

from hookscope.inputs.noise import noise_batch
from hookscope.inspection.detection import with_default_targets
from hookscope.results.findings import Finding
from hookscope.results.gradients import Gradients
from hookscope.rules.judging import judge_gradients
from tests.inspections import inspect_gradients
from tests.networks import Written


def judged(network: nn.Module, inputs: Tensor, **options: object) -> list[tuple[str, str, str]]:
    """Return the verdicts as (level, rule, where)."""
    inspection = inspect_gradients(network, inputs, distributions=True, **options)  # type: ignore[arg-type]
    return [(verdict.level, verdict.rule, verdict.where) for verdict in judge_gradients(inspection)]


def small_transformer() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 12, 3, 48, 96, num_classes=10)


SOUND = ("resnet18", "efficientnet_b0")


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.sample("resnet18-eval", "resnet18-train", "efficientnet_b0-train")
def test_sound_networks_get_no_verdict(name: str, mode: str) -> None:
    torch.manual_seed(0)
    network = torchvision.models.get_model(name, num_classes=10)
    assert judged(network, torch.randn(4, 3, 64, 64), mode=mode) == []


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_transformer_whose_head_starts_at_zero_is_told_so_and_sound_without_it(mode: str) -> None:
    torch.manual_seed(0)
    network, inputs = small_transformer(), torch.randn(4, 3, 32, 32)
    assert judged(network, inputs, mode=mode) == [("warn", "dead-gradient", "heads.head.weight")]
    nn.init.normal_(network.heads.head.weight, std=0.02)  # type: ignore[union-attr,arg-type]
    assert judged(network, inputs, mode=mode) == []


def verdicts(network: nn.Module, inputs: Tensor, layers: Sequence[str] = (), **options: object) -> list[Finding]:
    torch.manual_seed(0)
    return list(judge_gradients(inspect_gradients(network, inputs, layers=layers, **options)))  # type: ignore[arg-type]


def linear(bias: float | None = None) -> nn.Linear:
    torch.manual_seed(1)
    layer = nn.Linear(4, 4)
    if bias is not None:
        nn.init.constant_(layer.bias, bias)
    return layer


X = torch.linspace(-1, 1, 8).reshape(2, 4)

# --- what is lost is found, and where ---


def test_the_rectifier_that_is_dead_is_named_whatever_runs_next() -> None:
    # The other branch runs between the dead layer and its rectifier.
    def branches(m: nn.Module, x: Tensor) -> Tensor:
        left = m.a(x)
        right = m.other(x)
        return m.out(m.act(left) + right)

    network = Written(branches, a=linear(-100), other=linear(), act=nn.ReLU(), out=linear())
    (verdict,) = verdicts(network, X)
    assert (verdict.level, verdict.where) == ("fail", "a")
    assert verdict.message.endswith(": every output of 'act' (ReLU) is 0.")


def test_layers_in_a_list_that_follow_each_other_do_not_excuse_each_other() -> None:
    def chain(m: nn.Module, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = layer(x).relu()
        return x

    network = Written(chain, layers=nn.ModuleList([linear(1.0), linear(-100), linear(1.0)]))
    (verdict,) = verdicts(network, X)
    assert (verdict.level, verdict.where) == ("fail", "layers.1")
    assert "'layers.1' and 1 output before it" in verdict.message
    assert "lost in 'layers.2' (Linear)" in verdict.message


def test_a_shared_module_does_not_excuse_the_layers_before_it() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.act(m.a(x)) * 0 + x
        return m.act(m.b(x))

    (verdict,) = verdicts(Written(forward, a=linear(), b=linear(), act=nn.Sigmoid()), X)
    assert (verdict.level, verdict.where) == ("fail", "act")
    assert "'act' and 1 output before it" in verdict.message
    assert "lost in 'b' (Linear) or on the way" in verdict.message


def test_a_module_called_often_that_never_gets_a_gradient_is_dead() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.out(m.b(x) + sum(m.a(x + at) for at in range(3)) * 0)

    (verdict,) = verdicts(Written(forward, a=linear(), b=linear(), out=linear()), X)
    assert (verdict.level, verdict.where) == ("fail", "a#2")
    assert "'a#2' and 2 outputs before it" in verdict.message


def test_an_output_that_the_loss_alone_gives_no_gradient_is_a_warning() -> None:
    def forward(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        x = m.body(x)
        return m.left(x), m.right(x) * 0

    actual = verdicts(Written(forward, body=linear(), left=linear(), right=linear()), X)
    assert [(finding.level, finding.rule, finding.where) for finding in actual] == [("warn", "dead-gradient", "right")]
    assert "the loss does not change with it" in actual[0].message


def test_a_parallel_branch_whose_rectifier_is_dead_is_not_excused_by_the_others() -> None:
    towers = nn.ModuleList(nn.Sequential(linear(bias), nn.ReLU(), linear()) for bias in (1.0, -100.0, 1.0))
    network = Written(lambda m, x: m.out(sum(tower(x) for tower in m.towers)), towers=towers, out=linear())
    (verdict,) = verdicts(network, X)
    assert (verdict.level, verdict.where) == ("fail", "towers.1.0")
    assert "every output of 'towers.1.1' (ReLU) is 0" in verdict.message


def test_inside_a_reentrant_checkpoint_the_next_layer_is_taken_for_the_next() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.c(torch.utils.checkpoint.checkpoint(lambda y: m.b(m.a(y).relu()), m.start(x), use_reentrant=True))

    network = Written(forward, start=linear(), a=linear(-100), b=linear(), c=linear())
    (verdict,) = verdicts(network, X)
    assert verdict.where == "a"
    assert "'a' and 1 output before it" in verdict.message
    assert "nothing gets through 'b' (Linear)" in verdict.message


# --- what is sound is left alone ---


def test_a_level_of_a_shared_head_without_an_object_is_sound() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        levels = [m.head(m.act(m.body(x) * scale)) for scale in (1.0, 2.0, 3.0)]
        return levels[0] + levels[2] + levels[1] * 0

    assert verdicts(Written(forward, body=linear(), act=nn.Tanh(), head=linear()), X) == []


def test_an_expert_without_a_token_is_sound() -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.body(x)
        chosen = torch.tensor([0, 2])
        return m.out(sum(expert(x) * (chosen == at).float()[:, None] for at, expert in enumerate(m.experts)))

    experts = nn.ModuleList(nn.Sequential(linear(), nn.Tanh(), linear()) for _ in range(3))
    assert verdicts(Written(forward, body=linear(), experts=experts, out=linear()), X) == []


@pytest.mark.parametrize("ops", [False, True])
def test_tokens_beside_the_one_that_the_loss_depends_on_are_sound_with_operations_shown_too(ops: bool) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.body(x)
        return m.out(torch.cat([m.pool(x).unsqueeze(1), x.view(2, 1, 4)], 1))[:, 0]

    assert verdicts(Written(forward, body=linear(), pool=linear(), out=linear()), X, ops=ops) == []


def pyramid(extra: nn.Module) -> nn.Module:
    """Return a body of three stages and a feature pyramid over it."""

    def stage(inputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    body = nn.Sequential(OrderedDict(a=stage(3), b=stage(4), c=stage(4)))
    names = {"a": "0", "b": "1", "c": "2"}
    return torchvision.models.detection.backbone_utils.BackboneWithFPN(body, names, [4, 4, 4], 32, extra)


class Levels(nn.Module):
    """A body that returns six maps, each half as wide as the one before."""

    out_channels = [4] * 6

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv2d(4 if at else 3, 4, 3, stride=2, padding=1) for at in range(6))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        levels = {}
        for at, stage in enumerate(self.stages):
            levels[str(at)] = x = stage(x).relu()
        return levels


def anchors(levels: int) -> AnchorGenerator:
    return AnchorGenerator(tuple((4 * 2**at,) for at in range(levels)), ((1.0,),) * levels)


SIZE = {"min_size": 64, "max_size": 64}

DETECTORS: dict[str, Callable[[], nn.Module]] = {
    "retinanet": lambda: RetinaNet(pyramid(LastLevelP6P7(32, 32)), 3, anchor_generator=anchors(5), **SIZE),
    "fcos": lambda: FCOS(pyramid(LastLevelP6P7(32, 32)), 3, anchor_generator=anchors(5), **SIZE),
    "faster rcnn": lambda: FasterRCNN(pyramid(LastLevelMaxPool()), 3, rpn_anchor_generator=anchors(4), **SIZE),
    "ssd": lambda: SSD(Levels(), DefaultBoxGenerator([[2]] * 6), (64, 64), 3),
}


@pytest.mark.parametrize(("name", "seed"), [("retinanet", 0), ("faster rcnn", 0), ("ssd", 0)])
@pytest.mark.sample("retinanet-0", "faster rcnn-0")
def test_detectors_with_levels_without_an_object_are_sound(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    network = DETECTORS[name]()
    batch = with_default_targets(network, noise_batch((2, 3, 64, 64), seed, "detection"))
    inspection: Gradients = inspect_gradients(network, batch, mode="train", seed=seed)
    assert any(row.status == "zero" for row in inspection.gradients)
    assert [
        judge_gradient for judge_gradient in judge_gradients(inspection) if judge_gradient.rule == "dead-gradient"
    ] == []

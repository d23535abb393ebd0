"""Networks written with functions are judged as those written with modules."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hookscope
from hookscope.results.findings import Finding
from hookscope.rules.judging import judge_gradients
from hookscope.text import figure


class Twin(nn.Module):
    """A network with modules `a` and `b`, and whatever is between them as modules or as functions."""

    def __init__(self, a: nn.Module, b: nn.Module, between: Callable[[Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.a, self.b = a, b
        if isinstance(between, nn.Module):
            self.between = between
        else:
            object.__setattr__(self, "between", between)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))


def conv_and_head(bias: float = 0.0, scale: float = 1.0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3, padding=1)
    with torch.no_grad():
        conv.weight *= scale
        conv.bias.fill_(bias)
    return conv, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def linears(scale: float = 1.0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first = nn.Linear(16, 16)
    with torch.no_grad():
        first.weight *= scale
    return first, nn.Linear(16, 4)


# What is planted, the module in between and the function in its place: (parts, module, function, input).
PAIRS: dict[str, tuple[Callable[[], tuple[nn.Module, nn.Module]], nn.Module, Callable[[Tensor], Tensor], Any]] = {
    "a healthy ReLU": (conv_and_head, nn.ReLU(), F.relu, (2, 3, 8, 8)),
    "a dead ReLU": (lambda: conv_and_head(-100.0), nn.ReLU(), torch.relu, (2, 3, 8, 8)),
    "a dead ReLU in place": (lambda: conv_and_head(-100.0), nn.ReLU(inplace=True), Tensor.relu_, (2, 3, 8, 8)),
    "a saturated sigmoid": (lambda: linears(200.0), nn.Sigmoid(), torch.sigmoid, (2, 16)),
    "quiet GELUs": (lambda: conv_and_head(-100.0), nn.GELU(), F.gelu, (2, 3, 8, 8)),
    "max pooling": (conv_and_head, nn.MaxPool2d(2), lambda x: F.max_pool2d(x, 2), (2, 3, 8, 8)),
    "nothing in between": (lambda: linears(0.0), nn.Identity(), lambda x: x * 1, (2, 16)),
}

# The place is the module, or the function with its line.
_PLACE = re.compile(r"'(between|\(model\):\w+)' \([\w.:]+\)")


def placeless(findings: tuple[Finding, ...] | list[Finding]) -> list[tuple[str, str, str, str]]:
    """Return the findings without the name of what is between."""
    where = {finding.where: re.sub(r"between|\(model\):\w+", "BETWEEN", finding.where) for finding in findings}
    return [
        (
            finding.rule,
            finding.level,
            where[finding.where],
            _PLACE.sub("BETWEEN", finding.message).replace("'between'", "BETWEEN"),
        )
        for finding in findings
    ]


@pytest.mark.parametrize("name", PAIRS)
def test_a_function_gets_the_verdicts_and_the_report_of_the_module(name: str) -> None:
    parts, module, function, shape = PAIRS[name]
    torch.manual_seed(1)
    x = torch.randn(shape)
    verdicts, reports = [], []
    for between in (module, function):
        result = hookscope.grads(Twin(*parts(), between), x, loss="sum")
        verdicts.append(placeless(result.verdicts))
        report = hookscope.check(Twin(*parts(), between))
        reports.append(placeless([finding for outcome in report.outcomes for finding in outcome.findings]))
    assert verdicts[0] == verdicts[1]
    assert reports[0] == reports[1]
    if "dead" in name:
        assert ("dead-channels", "warn", "BETWEEN") in [verdict[:3] for verdict in verdicts[1]]
    if "saturated" in name:
        assert ("saturated-activation", "warn", "BETWEEN") in [verdict[:3] for verdict in verdicts[1]]


class Dead(nn.Module):
    """A convolution whose bias is -100 before `F.relu`: nothing gets to `fc`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.fc = nn.Linear(8, 2)
        nn.init.constant_(self.conv1.bias, -100.0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def test_the_dead_relu_is_named_with_its_line_though_no_operation_was_asked_for() -> None:
    torch.manual_seed(0)
    result = hookscope.grads(Dead(), torch.rand(1, 3, 8, 8), loss="sum")
    line = Dead.forward.__code__.co_firstlineno + 1
    dead = next(verdict for verdict in result.verdicts if verdict.rule == "dead-gradient")
    assert dead.where == "conv1"
    assert dead.message.endswith(f"every output of '(model):relu' (test_functional_twins.py:{line}) is 0.")
    assert "dead-channels" in [verdict.rule for verdict in result.verdicts if verdict.where == "(model):relu"]
    assert [row.label for row in result.rows] == ["conv1", "fc"]
    report = hookscope.check(Dead())
    assert [finding.rule for finding in report.findings] == ["constant-output", "dead-layer"]


def test_what_is_measured_for_verdicts_alone_is_not_in_the_result() -> None:
    torch.manual_seed(0)
    network, x = Dead(), torch.rand(1, 3, 8, 8)
    plain, with_all = hookscope.grads(network, x, loss="sum"), hookscope.grads(network, x, loss="sum", ops=True)
    assert plain.verdicts == with_all.verdicts == judge_gradients(with_all)
    assert plain.hidden == ()
    assert {row.label for row in with_all.rows} - {row.label for row in plain.rows} == {
        *("(model):relu", "(model):adaptive_avg_pool2d", "(model):flatten")
    }
    assert [row.taken_by for row in plain.gradients] == [("fc",), ("",)]


class Scoring(nn.Module):
    """Scores of attention that `scale` enlarges, made by modules' code; `masked` hides the first from all others."""

    def __init__(self, scale: float, masked: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 64), nn.Linear(8, 64)
        self.scale, self.masked = scale, masked

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.a(x) * self.scale) @ self.b(x).transpose(-1, -2)
        return (scores + torch.arange(x.shape[1]).sub(1).clamp(max=0) * -self.masked).softmax(-1)


@pytest.mark.parametrize(
    ("scale", "masked", "rules"),
    [
        (1.0, 0.0, []),
        (1.0, -torch.finfo().max, []),
        (1e4, 0.0, ["fp16-headroom"]),
        (1e21, 0.0, ["fp16-headroom", "overflowing-activation"]),
    ],
)
def test_scores_that_overflow_between_modules_are_found_and_masks_are_none(
    scale: float, masked: float, rules: list[str]
) -> None:
    network, x = Scoring(scale, masked).eval(), torch.randn(2, 5, 8)
    report = hookscope.check(network, images=x, select=["fp16-headroom", "overflowing-activation"])
    assert sorted(finding.rule for finding in report.findings) == rules
    with torch.no_grad():
        scores = (network.a(x) * scale) @ network.b(x).transpose(-1, -2)
    line = Scoring.forward.__code__.co_firstlineno + 1
    for finding in report.findings:
        assert finding.level == "warn"
        if scale == 1e4:
            assert f"(test_functional_twins.py:{line}) reaches {figure(float(scores.max()), 3)}," in finding.message


class Times(nn.Module):
    """A module whose own code multiplies."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize(("factor", "level"), [(1e6, "warn"), (1e20, "fail")])
def test_a_layer_is_named_rather_than_the_operation_whose_output_it_returns(factor: float, level: str) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), Times(factor), nn.Linear(8, 2))
    report = hookscope.check(network, images=torch.randn(2, 8), select=["fp16-headroom", "overflowing-activation"])
    worst = report.findings[0]
    assert worst.level == level
    assert worst.where in ("1", "2")
    assert {finding.where for finding in report.findings} <= {"1", "2"}


class Attending(nn.Module):
    """A softmax over scores, of which those of negative inputs are masked; all of the second input are."""

    def __init__(self, mask: Callable[[Tensor, Tensor], Tensor], softmax: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.mask = mask
        if isinstance(softmax, nn.Module):
            self.softmax = softmax
        else:
            object.__setattr__(self, "softmax", softmax)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.softmax(self.mask(self.scores(x), x > 0)))


@pytest.mark.parametrize("softmax", [F.softmax, nn.Softmax(1)])
def test_the_softmax_over_a_masked_row_is_blamed_and_not_the_mask(softmax: Any) -> None:
    function = (lambda x: softmax(x, dim=1)) if softmax is F.softmax else softmax
    network = Attending(lambda scores, keep: scores.masked_fill(~keep, float("-inf")), function).eval()
    x = torch.tensor([[1.0, 1.0, -1.0, -1.0], [-1.0, -1.0, -1.0, -1.0]])
    place = "(model):softmax" if softmax is F.softmax else "softmax"
    for run in (hookscope.activations(network, x), hookscope.grads(network, x)):
        (actual,) = [verdict for verdict in run.verdicts if verdict.rule == "non-finite-activation"]
        assert actual.where == place
        assert "4 NaN and 0 Inf in 8 values" in actual.message  # the second input's row
    report = hookscope.check(network, images=x, select="non-finite-activation")
    assert "only input 1 leads to it" in report.findings[0].message
    assert report.findings[0].where == ("(model)" if softmax is F.softmax else "softmax")


class CallsTorchs(nn.TransformerEncoderLayer):
    def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(src, *args, **kwargs)


class CallsItself(nn.TransformerEncoderLayer):
    def forward(self, src: Tensor) -> Tensor:  # type: ignore[override]
        return self.norm2(src + self.linear2(self.activation(self.linear1(src))))


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, CallsTorchs, CallsItself, nn.TransformerDecoderLayer])
@pytest.mark.parametrize("activation", ["relu", nn.ReLU()])
def test_no_dead_relu_inside_torchs_own_layers_gets_an_all_clear(kind: Any, activation: Any) -> None:
    torch.manual_seed(0)
    layer = kind(8, 2, 16, activation=activation)
    with torch.no_grad():
        layer.linear1.bias[:15] = -1000.0  # 15 of 16 channels are below 0 whatever a normalised input is
    images: Any = torch.randn(4, 16, 8)  # 64 values a channel
    if kind is nn.TransformerDecoderLayer:
        images = (images, images)
    for run in (hookscope.activations(layer, images), hookscope.grads(layer, images)):
        found = any(finding.rule == "dead-channels" for finding in run.verdicts)
        unseen = any("inside torch's own layers are not seen: (model)." in note for note in run.notes)
        assert found != unseen
        assert found == (activation != "relu" or kind is CallsItself)
        assert "No problems found in what was seen" in str(run) or found

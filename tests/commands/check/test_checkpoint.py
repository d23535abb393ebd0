"""Checking a checkpoint in process: the verdict, its evidence, and what a test shows of it."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from hookscope.api import check
from hookscope.commands.check.checkpoint import check_checkpoint
from hookscope.errors import UsageError
from hookscope.models.spec import load_model
from hookscope.results.check import CheckReport, Finding, RuleOutcome
from hookscope.rules.settings import CheckSettings, Expectation

CAT = Path(__file__).parents[3] / "sample_images" / "cat.jpg"


class Block(nn.Module):
    def __init__(self, *, raises: type[Exception] | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.raises = raises

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise self.raises("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return self.norm(self.conv(x))


class Network(nn.Module):
    def __init__(self, **options: type[Exception]) -> None:
        super().__init__()
        self.first = Block()
        self.inner = nn.Sequential(Block(**options) if options else nn.Identity())
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.first(x)).mean((2, 3))) * self.scale


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder whose configuration says what noise to use."""
    monkeypatch.chdir(tmp_path)
    Path("hookscope.toml").write_text("[input]\nshape = [2, 3, 16, 16]\n", encoding="utf-8")


@pytest.fixture
def network() -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().eval()


def broken(network: Network) -> Network:
    """Return the network with a negative variance, whose square root is NaN, in `first.norm`."""
    with torch.no_grad():
        network.first.norm.running_var[1] = -1.0
    return network


def failing(report: CheckReport) -> dict[str, set[str]]:
    return {
        outcome.rule: {finding.where for finding in outcome.findings if finding.level == "fail"}
        for outcome in report.outcomes
        if outcome.status == "fail"
    }


def test_a_sound_network_passes_and_comes_out_as_it_went_in(network: Network) -> None:
    report = check(network)
    assert report.passed
    assert report.checkpoint == "Network"
    assert report.seconds["total"] >= report.seconds["forward"]
    report.raise_for_failure()
    network.train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    check(network)
    assert all(module.training for module in network.modules())
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_it_is_measured_without_tf32_which_is_switched_on_again(network: Network) -> None:
    kinds, seen = (torch.backends.cudnn.conv, torch.backends.cudnn.rnn), set()
    before = [kind.fp32_precision for kind in kinds]
    network.register_forward_hook(lambda *_: seen.update(kind.fp32_precision for kind in kinds))
    check(network, input_shape=(2, 3, 16, 16))
    assert seen == {"ieee"}
    assert [kind.fp32_precision for kind in kinds] == before


def test_a_broken_network_fails_where_it_is_broken_and_raises_with_all_that_failed(network: Network) -> None:
    report = check(broken(network))
    assert failing(report)["batchnorm-variance"] == {"first.norm.running_var"}
    assert failing(report)["non-finite-activation"] == {"first.norm"}
    assert report.exit_code == 1
    with pytest.raises(AssertionError) as caught:
        report.raise_for_failure()
    lines = str(caught.value).splitlines()
    assert lines[0] == "Network did not pass."
    assert any(line.startswith("batchnorm-variance first.norm.running_var: ") for line in lines)
    assert len(lines) == 1 + sum(finding.level == "fail" for finding in report.findings)


def test_an_error_raises_with_its_reason() -> None:
    report = check("missing.pt")
    assert report.error_code == 3
    with pytest.raises(AssertionError, match=r"^missing.pt did not pass.\nmissing.pt does not exist"):
        report.raise_for_failure()


def test_what_a_failure_says_cannot_steer_a_terminal_or_a_runner() -> None:
    finding = Finding("dead-filter", "fail", "x\n::error::y", "it is \x1b[31mred")
    report = CheckReport("a\nb", (RuleOutcome("dead-filter", "fail", (finding,)),))
    with pytest.raises(AssertionError) as caught:
        report.raise_for_failure()
    assert str(caught.value).splitlines() == ["a\\nb did not pass.", "dead-filter x\\n::error::y: it is \\x1b[31mred"]


def test_a_file_and_its_network_are_told_apart_from_what_fits(network: Network) -> None:
    torch.save(network.state_dict(), "network.pt")
    Path("net.py").write_text("from tests.commands.check.test_checkpoint import Network\n", encoding="utf-8")
    assert check(Path("network.pt"), arch="net.py:Network").passed
    assert failing(check("network.pt", arch="resnet18")).keys() == {"architecture"}


def test_rules_are_selected_and_ignored(network: Network) -> None:
    report = check(broken(network), select=["batchnorm-variance", "non-finite-*"], ignore=["non-finite-activation"])
    judged = {outcome.rule for outcome in report.outcomes if outcome.status not in ("off", "skipped")}
    assert "batchnorm-variance" in judged
    assert "non-finite-activation" not in failing(report)


def test_a_network_out_of_memory_is_an_error_and_no_failed_check() -> None:
    report = check(Network(raises=RuntimeError))
    assert (report.exit_code, report.error_code) == (3, 3)
    assert "memory" in report.error
    assert "inner.0" in report.error
    assert not failing(report)


def test_a_network_that_cannot_be_built_for_want_of_memory_is_an_error_too() -> None:
    Path("net.py").write_text(
        'def build():\n    raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried")\n',
        encoding="utf-8",
    )
    report = check("net.py:build")
    assert (report.exit_code, report.error_code) == (3, 3)
    assert report.error == (
        "net.py:build could not be checked: it needs more memory than allowed. Give it more, or smaller inputs."
    )


MASKS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "a module": lambda net, x: net.gate(x),
    "a function": lambda _net, x: torch.sigmoid(x),
    "without its channel axis": lambda net, x: net.gate(x).squeeze(1),
    "in a row": lambda _net, x: torch.sigmoid(x).flatten(1),
    "resized": lambda net, x: nn.functional.interpolate(net.gate(x), scale_factor=0.5, mode="bilinear"),
    "cropped": lambda net, x: (x.softmax(1), net.gate(x)[..., 2:14, 2:14]),
    "by name, beside its logits": lambda net, x: {"mask": net.gate(x), "logits": x},
}
GATES: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "a gate": lambda net, x: x * net.gate(x),
    "a tanh": lambda _net, x: torch.tanh(x),
    "scaled": lambda net, x: net.gate(x) * 5,
    "resized, and then a gate": lambda net, x: x * nn.functional.interpolate(net.gate(x), scale_factor=1.0),
}


@pytest.mark.parametrize("case", [*MASKS, *GATES])
def test_only_a_sigmoid_that_is_returned_may_be_saturated(case: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Masking((MASKS | GATES)[case])
    report = check_checkpoint(network, CheckSettings(input_shape=(2, 3, 16, 16)), {"saturated-activation"})
    assert [finding.rule for finding in report.findings] == ["saturated-activation"] * (case in GATES)


class Masking(nn.Module):
    """Its mask is background nearly everywhere."""

    def __init__(self, returns: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.conv, self.gate, self.returns = nn.Conv2d(3, 1, 3, padding=1), nn.Sigmoid(), returns
        nn.init.constant_(self.conv.bias, -9.0)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> object:
        return self.returns(self, self.conv(x))


def test_evidence_holds_what_failed_and_nothing_else(network: Network) -> None:
    report = check(broken(network), select=["batchnorm-variance"], evidence="kept")
    assert report.evidence == "kept"
    kept = Path("kept")
    names = {path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()}
    assert {name for name in names if not name.startswith("grids/")} == {
        "overview.png",
        "report.json",
        "rows.csv",
        "run.json",
    }
    with (kept / "rows.csv").open(encoding="utf-8", newline="") as file:
        [row] = csv.DictReader(file)
    assert (row["layer"], row["kind"]) == ("first.norm", "BatchNorm2d")
    # One of four channels of 14x14 is NaN, for both inputs.
    assert row["nan_count"] == str(2 * 14 * 14)
    [grid] = (kept / "grids").iterdir()
    for picture in (grid, kept / "overview.png"):
        with Image.open(picture) as image:
            image.verify()
    [written] = json.loads((kept / "report.json").read_bytes())["checkpoints"]
    assert written["evidence"] == "kept"


def test_evidence_of_what_could_not_be_loaded_is_the_report_and_replaces_earlier_evidence(network: Network) -> None:
    check(broken(network), evidence="kept")
    check("missing.pt", evidence="kept")
    assert {path.name for path in Path("kept").iterdir()} == {"overview.png", "report.json", "run.json"}


def test_evidence_does_not_change_the_verdict_of_rules_that_need_no_pass(network: Network) -> None:
    network.first.raises = ValueError
    options: dict[str, Any] = {"select": ["non-finite-parameter"], "evidence": "kept"}
    assert check(network, **options).passed
    network.head.weight.data[0, 0] = math.nan
    report = check(network, **options)
    assert (report.exit_code, report.error, report.evidence) == (1, "", "kept")


def test_an_input_that_goes_before_the_pass_for_evidence_is_an_error_beside_the_findings(network: Network) -> None:
    Image.new("RGB", (16, 16)).save("gone.png")
    network.register_forward_hook(lambda *_: Path("gone.png").unlink())
    with torch.no_grad():
        network.first.conv.weight.fill_(1e10)
    Path("hookscope.toml").write_text("[input]\nimages = ['gone.png']\n[rules]\nfp16-headroom = 'fail'\n", "utf-8")
    report = check(network, select=["fp16-headroom"], resize="none", crop="none", evidence="kept")
    assert (report.exit_code, report.error_code, report.evidence) == (3, 3, "")
    assert "gone.png" in report.error
    assert report.findings
    assert not Path("kept").exists()


def test_evidence_that_cannot_be_written_is_an_error_beside_the_findings(network: Network) -> None:
    Path("kept").mkdir()
    Path("kept", "mine.txt").touch()
    report = check(broken(network), evidence="kept")
    assert (report.exit_code, report.error_code, report.evidence) == (3, 3, "")
    assert "kept" in report.error
    assert "batchnorm-variance" in failing(report)
    assert [path.name for path in Path("kept").iterdir()] == ["mine.txt"]


STORED = {"non-finite-parameter", "zero-parameter", "constant-parameter", "duplicate-parameter"}
STORED |= {"batchnorm-variance", "dead-filter", "outlier-weight", "duplicate-filter", "constant-block"}
STORED |= {"untrained-weight", "untrained-norm", "optimizer-state", "scaler-state", "averaged-weights", "float8-weight"}
STORED |= {"integer-weight", "unsigned-weight"}


def judged(report: CheckReport) -> set[str]:
    return {outcome.rule for outcome in report.outcomes if outcome.status not in ("off", "skipped")}


def test_a_file_alone_is_judged_by_what_it_stores_and_says_why_the_rest_is_skipped(network: Network) -> None:
    torch.save(network.state_dict(), "good.pt")
    report = check("good.pt", arch="none")
    assert report.exit_code == 0
    assert judged(report) == STORED | {"integrity"}
    reasons = {outcome.reason for outcome in report.outcomes if outcome.status == "skipped"}
    assert reasons == {"there is no network: --arch none"}
    torch.save(broken(network).state_dict(), "broken.pt")
    assert failing(check("broken.pt", arch="none")) == {"batchnorm-variance": {"first.norm.running_var"}}
    Path("cut.pt").write_bytes(Path("good.pt").read_bytes()[:-400])
    assert failing(check("cut.pt", arch="none")).keys() == {"integrity"}


def test_a_file_that_no_network_fits_never_passes_but_what_it_stores_is_judged(network: Network) -> None:
    torch.save(network.state_dict(), "good.pt")
    report = check("good.pt")
    assert (report.exit_code, report.error_code) == (5, 5)
    assert "fits no network" in report.error
    assert judged(report) == STORED | {"integrity"}
    torch.save(broken(network).state_dict(), "broken.pt")
    report = check("broken.pt")
    assert report.exit_code == 5
    assert failing(report).keys() == {"batchnorm-variance"}
    for arch, reason in (("resnet19", "--arch names none"), (None, "none fits the weights")):
        skipped = {outcome.reason for outcome in check("broken.pt", arch=arch).outcomes if outcome.status == "skipped"}
        assert skipped == {f"there is no network: {reason}"}
    misfit = check("broken.pt", arch="resnet18")
    assert misfit.exit_code == 1
    assert failing(misfit).keys() == {"architecture", "batchnorm-variance"}


@pytest.mark.parametrize("arch", ["none", "resnet18", None])
def test_a_file_without_values_fails_whether_it_is_judged_with_a_network_or_without(
    network: Network, arch: str | None
) -> None:
    torch.save({name: torch.empty(0) for name in network.state_dict()}, "empty.pt")
    report = check("empty.pt", arch=arch)
    assert failing(report).keys() == {"integrity"}
    assert report.exit_code == 3
    assert "have no values" in report.error


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"data": "val"}, "--data"),
        ({"images": ["cat.jpg"]}, "--images"),
        ({"input_shape": "1x3x8x8"}, "--input-shape"),
        ({"input": {"size": 3}}, "--input"),
        ({"baseline": "baseline.json"}, "--baseline"),
    ],
)
def test_what_only_a_network_can_be_given_is_refused_where_there_is_to_be_none(
    network: Network, options: dict[str, Any], named: str
) -> None:
    torch.save(network.state_dict(), "good.pt")
    with pytest.raises(UsageError, match=f"{named} needs a network, but arch is 'none'"):
        check("good.pt", arch="none", **options)
    Path("hookscope.toml").write_text("[model]\narch = 'none'\n", encoding="utf-8")
    with pytest.raises(UsageError, match=f"{named} needs a network"):
        check("good.pt", **options)


def test_a_configuration_without_a_network_gives_it_no_pictures_and_one_with_pictures_may_be_overruled(
    network: Network,
) -> None:
    torch.save(network.state_dict(), "good.pt")
    Path("hookscope.toml").write_text("[model]\narch = 'none'\n[input]\ndata = 'val'\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"\[input\] data of hookscope.toml needs a network"):
        check("good.pt")
    Path("hookscope.toml").write_text("[input]\ndata = 'val'\n", encoding="utf-8")
    report = check("good.pt", arch="none")
    assert report.exit_code == 0
    skipped = {outcome.rule: outcome.reason for outcome in report.outcomes if outcome.status == "skipped"}
    assert skipped["accuracy"] == "there is no network: --arch none"


def test_without_a_network_there_must_be_a_rule_left_to_judge_by(network: Network) -> None:
    torch.save(network.state_dict(), "good.pt")
    report = check("good.pt", arch="none", select=["forward", "non-finite-activation"])
    assert report.exit_code == 2
    assert "all selected rules need a network" in report.error
    with pytest.raises(UsageError, match="as a name or a file"):
        check(network, arch="none")
    # Rules about gradients that a configuration turns on are skipped as well: --arch none was asked for.
    Path("hookscope.toml").write_text("[rules]\nzero-gradient = 'fail'\n", encoding="utf-8")
    assert check("good.pt", arch="none").exit_code == 0


TWO_SETS = """
import torch
from torch import nn


class Wide(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.head = nn.Linear(width, 5)

    def forward(self, x, factor=1.0):
        scores = self.head(self.conv(x).mean((2, 3))) * factor
        return {"scores": scores, "other": scores + 1}
"""


@pytest.fixture
def training() -> Path:
    """A training checkpoint with two sets of weights, one of them broken, that need an argument and have surplus."""
    Path("net.py").write_text(TWO_SETS, encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        convolution, head = nn.Conv2d(3, 6, 3), nn.Linear(6, 5)
    good = {f"conv.{name}": tensor for name, tensor in convolution.state_dict().items()}
    good |= {"head.weight": head.weight.detach(), "queue": torch.ones(2)}
    torch.save({"model": good | {"head.weight": torch.full((5, 6), torch.nan)}, "ema": good}, "training.ckpt")
    return Path("training.ckpt")


def test_options_say_how_weights_are_loaded_and_what_they_are_run_on(training: Path) -> None:
    Image.new("RGB", (40, 30), "red").save("red.png")
    loading = {"arch": "net.py:Wide", "model_arg": "width=6", "key": "ema"}
    loading |= {"allow_missing": "head.bias", "allow_unexpected": ["queue"]}
    report = check(training, **loading, input_shape="3,3,8,8")  # type: ignore[arg-type]
    report.raise_for_failure()
    assert [record.shape for record in report.inputs] == [(3, 8, 8)] * 3
    report = check(
        training,
        **loading,  # type: ignore[arg-type]
        images="red.png",
        resize=(12, 10),
        crop="none",
        mean=0.5,
        std="none",
        input={"factor": 0.0},
        output_key="scores",
    )
    assert [(Path(record.name).name, record.shape) for record in report.inputs] == [("red.png", (3, 12, 10))]
    assert failing(report).keys() == {"constant-output"}  # as a factor of 0 makes it
    broken_set = check(training, **{**loading, "key": "model"})  # type: ignore[arg-type]
    assert failing(broken_set)["non-finite-parameter"] == {"head.weight"}


def test_options_go_over_the_configuration(training: Path) -> None:
    Image.new("RGB", (20, 20)).save("black.png")
    Path("hookscope.toml").write_text(
        '[model]\narch = "net.py:Wide"\narguments = { width = 3 }\nkey = "model"\nallow-missing = ["head.bias"]\n'
        'allow-unexpected = ["queue"]\n[input]\nimages = ["black.png"]\nresize = 8\ncrop = 8\n',
        encoding="utf-8",
    )
    report = check(training, model_arg={"width": 6}, key="ema")
    assert (report.passed, report.inputs[0].shape) == (True, (3, 8, 8))
    assert check(training, model_arg={"width": 6}, key="ema", input_shape=(2, 3, 9, 9)).inputs[0].shape == (3, 9, 9)
    with pytest.raises(UsageError, match="Give pictures or --input-shape, not both"):
        check(training, input_shape=(2, 3, 9, 9), images="black.png")
    with Path("hookscope.toml").open("a", encoding="utf-8") as file:
        file.write('[[expect]]\nimage = "black.png"\ntop1 = 0\n')
    with pytest.raises(UsageError, match=r"but .*hookscope\.toml expects classes for pictures"):
        check(training, input_shape=(2, 3, 9, 9))


def test_expectations_name_classes_of_a_state_dict_that_is_recognised() -> None:
    Path("hookscope.toml").write_text(
        f'[rules]\nexpectation = "fail"\n[[expect]]\nimage = "{CAT.as_posix()}"\ntop1 = "Egyptian cat"\n',
        encoding="utf-8",
    )
    torch.save(load_model("demo").module.state_dict(), "demo.pt")
    check("demo.pt", select=["expectation"]).raise_for_failure()


def test_expectations_take_class_names_from_a_file_that_must_fit_the_output(training: Path) -> None:
    Image.new("RGB", (20, 20), "red").save("red.png")
    Path("names.txt").write_text("ant\nbee\ncrane\ndove\nelk\n", encoding="utf-8")
    Path("few.txt").write_text("ant\nbee\n", encoding="utf-8")
    Path("hookscope.toml").write_text(
        '[model]\narch = "net.py:Wide"\narguments = { width = 6 }\nkey = "ema"\nallow-missing = ["head.bias"]\n'
        'allow-unexpected = ["queue"]\nclasses = "names.txt"\n[output]\nkey = "scores"\n'
        '[[expect]]\nimage = "red.png"\ncontains = ["elk", "dove"]\n',
        encoding="utf-8",
    )
    assert "expectation" not in failing(check(training))
    with_names = check(training, classes={0: "fox", 1: "gnu", 2: "hen", 3: "ibis", 4: "jay"})
    assert with_names.error_code == 2
    assert "'elk', which the network does not have" in with_names.error
    assert check(training, classes="missing.txt").error_code == 3


def test_a_module_takes_no_options_that_load_one(network: Network) -> None:
    with pytest.raises(UsageError, match="as a name or a file"):
        check(network, key="ema")
    assert check(network, input_shape=(2, 3, 12, 12)).inputs[0].shape == (3, 12, 12)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_torchscript_file_is_judged_by_its_names_of_classes_and_the_kinds_of_its_layers(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    with torch.no_grad():
        network[0].bias.fill_(-100)
        network[4].bias.copy_(torch.tensor([0.0, 1.0, 2.0]))
    script = torch.jit.script(network.eval())
    torch.jit.save(script, tmp_path / "model.pt", _extra_files={"labels.txt": "cat\ndog\nnewt\n"})  # type: ignore[no-untyped-call]
    expectations = (Expectation(CAT, "dog"),)
    settings = CheckSettings(expectations=expectations, resize="32", crop="32")
    report = check_checkpoint(str(tmp_path / "model.pt"), settings, {"expectation", "dead-layer"}, trust=True)
    said = {finding.rule: finding.message for finding in report.findings}
    assert "'newt'" in said["expectation"]
    assert said["dead-layer"].startswith("'1' (ReLU): all 3,600 outputs of its 4 channels are 0")


def broken_state(network: Network) -> dict[str, Any]:
    state = network.state_dict()
    state["head.weight"] = state["head.weight"].clone()
    state["head.weight"][1, 2] = float("nan")
    state["first.conv.weight"] = torch.zeros_like(state["first.conv.weight"])
    return state


@pytest.mark.parametrize(
    ("wrap", "key"),
    [
        (lambda state: state, None),
        (lambda state: {"state_dict": state, "epoch": 3}, None),
        (lambda state: {"model": state, "ema": {name: 2 * value for name, value in state.items()}}, "model"),
        (lambda state: MappingProxyType(dict(state)), None),
    ],
)
def test_a_state_dict_is_judged_as_its_file_is_without_a_network(
    network: Network, wrap: Callable[[Any], Any], key: str | None
) -> None:
    for state, is_sound in ((network.state_dict(), True), (broken_state(network), False)):
        content = wrap(state)
        torch.save(content if isinstance(content, dict) else dict(content), "model.pt")
        of_file = check("model.pt", arch="none", key=key)
        of_state = check(content, key=key)
        assert of_state.passed == of_file.passed == is_sound
        expected, actual = (
            [(outcome.rule, outcome.status, outcome.findings) for outcome in r.outcomes] for r in (of_file, of_state)
        )
        assert actual == expected
        assert of_state.checkpoint == "state dict"
        assert of_state.model is not None
        assert of_state.model.sha256 is None


def test_what_is_no_state_dict_fails_and_several_are_a_question(network: Network) -> None:
    report = check({"epoch": 3})
    assert report.error == "state dict holds no tensors by name: only epoch."
    assert not report.passed
    state = network.state_dict()
    report = check({"student": state, "teacher": {name: 2 * value for name, value in state.items()}})
    assert "state dict holds several sets of weights" in report.error
    assert report.exit_code == UsageError.exit_code
    empty = check({name: torch.empty(0) for name in state})
    assert "state dict does not hold its weights" in empty.error


@pytest.mark.parametrize(
    "options",
    [
        {"arch": "resnet18"},
        {"model_arg": {"width": 2}},
        {"allow_missing": "head.*"},
        {"images": torch.ones(2, 3, 16, 16)},
        {"input_shape": (2, 3, 16, 16)},
    ],
)
def test_a_state_dict_takes_no_option_that_needs_a_network(network: Network, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="A state dict is checked without a network"):
        check(network.state_dict(), **options)
    assert check(network.state_dict(), arch="none").passed


@pytest.mark.parametrize("inputs", [[1], 3, Network])
def test_what_is_neither_a_network_nor_a_state_dict_is_refused(inputs: Any) -> None:
    with pytest.raises(UsageError, match="Give a"):
        check(inputs)


def test_limits_are_taken_by_name_and_refused_where_nothing_is_judged_by_them(network: Network) -> None:
    with torch.no_grad():
        network.head.weight[[0, 2]] = 0  # 2 of 5 filters: 40%, above the default limit of 25%
    assert [finding.rule for finding in check(network).findings] == ["dead-filter"]
    assert check(network, limit={"dead-filter.max-fraction": 0.4}).findings == ()
    assert check(network, limit="dead-filter.max-fraction=0.4").findings == ()
    assert [finding.rule for finding in check(network, limit=["dead-filter.max-fraction=0.39"]).findings] == [
        "dead-filter"
    ]
    for options, says in (
        ({"limit": {"accuracy.min-fraction": 0.9}}, "needs labelled pictures"),
        ({"limit": {"dead-filter.max-fraction": 0.1}, "ignore": "dead-filter"}, "is off or left out"),
        ({"limit": {"dead-filters.max-fraction": 0.1}}, "Nearest: 'dead-filter.max-fraction'"),
    ):
        with pytest.raises(UsageError, match=says):
            check(network, **options)


@pytest.mark.parametrize(
    ("pattern", "rule", "nearest"),
    [
        ("haed", "zero-parameter", "'head'"),
        ("inner.conv*", "dead-channels", "'first.conv'"),
        ("!/^fist/", "dead-gradient", "'first'"),
        ("head", "dead-channels", ""),
        ("head.bias", "zero-parameter", ""),
        ("(model):mean", "dead-channels", ""),  # an operation
    ],
)
def test_a_pattern_over_layers_that_matches_none_is_refused_with_the_nearest(
    network: Network, tmp_path: Path, pattern: str, rule: str, nearest: str
) -> None:
    with Path("hookscope.toml").open("a", encoding="utf-8") as file:
        file.write(f"[[layers]]\npattern = '{pattern}'\n{rule} = 'warn'\n")
    report = check(network)
    assert report.exit_code == (5 if nearest else 0)
    if nearest:
        assert f"pattern '{pattern}' in [[layers]] of hookscope.toml matches no layer. Nearest: " in report.error
        assert nearest in report.error
        assert check(network, ignore=[rule]).exit_code == 0
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    assert check(tmp_path / "weights.pt", arch="none").exit_code == 0

"""Files of low-rank adapters (LoRA) alone: judged by what they store, in every layout that programs write."""

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from hookscope.commands.check.checkpoint import check_checkpoint
from hookscope.models.spec import load_model
from hookscope.results.check import CheckReport
from hookscope.rules.judging import wanted_rules
from hookscope.rules.settings import CheckSettings, RuleSettings

State = dict[str, Tensor]

LAYOUTS = {
    "ComfyUI": "diffusion_model.blocks.{}.attn.q.lora_{{A,B}}.weight",
    "peft": "base_model.model.layers.{}.q_proj.lora_{{A,B}}.weight",
    "peft in memory": "base_model.model.layers.{}.q_proj.lora_{{A,B}}.default.weight",
    "kohya": "lora_unet_down_blocks_{}_to_q.lora_{{down,up}}.weight",
    "diffusers": "unet.down_blocks.{}.attentions.0.to_q.lora.{{down,up}}.weight",
    "processors of diffusers": "down_blocks.{}.attn1.processor.to_q_lora.{{down,up}}.weight",
    "loralib": "layers.{}.q.lora_{{A,B}}",
}


def names(layout: str, at: int) -> tuple[str, str]:
    """Return the names of the halves of an adapter."""
    before, halves, after = LAYOUTS[layout].format(at).replace("{", "|").replace("}", "|").split("|")
    down, up = halves.split(",")
    return f"{before}{down}{after}", f"{before}{up}{after}"


def adapters(layout: str, count: int = 3) -> State:
    generator = torch.Generator().manual_seed(0)
    state: State = {}
    for at in range(count):
        down, up = names(layout, at)
        state[down] = torch.randn(4, 16, generator=generator)
        state[up] = torch.randn(16, 4, generator=generator) / 10
        if layout == "kohya":
            state[f"{down.partition('.')[0]}.alpha"] = torch.tensor(4.0)
    return state


def checked(path: Path, state: State, **settings: object) -> CheckReport:
    safetensors.torch.save_file(state, path)
    chosen = CheckSettings(**settings)  # type: ignore[arg-type]
    return check_checkpoint(str(path), chosen, wanted_rules(chosen))


def found(report: CheckReport) -> list[tuple[str, str, str]]:
    return [(finding.rule, finding.level, finding.where) for finding in report.findings]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sound_file_passes_in_every_layout(tmp_path: Path, layout: str) -> None:
    report = checked(tmp_path / "lora.safetensors", adapters(layout))
    assert (report.exit_code, report.error, report.findings) == (0, "", ())
    (reason,) = {outcome.reason for outcome in report.outcomes if outcome.status == "skipped"}
    assert "lora.safetensors holds LoRA adapters, which " in reason
    is_mergeable = layout in ("ComfyUI", "peft", "loralib")
    assert ("name it with --arch" in reason) == is_mergeable
    assert ("alpha" in reason) == (layout != "kohya")  # which holds its own


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_that_change_nothing_fail_in_every_layout(tmp_path: Path, layout: str) -> None:
    state = adapters(layout)
    ups = sorted(names(layout, at)[1] for at in range(3))
    for up in ups:
        state[up].zero_()
    report = checked(tmp_path / "lora.safetensors", state)
    ((rule, level, _),) = found(report)
    assert (rule, level, report.exit_code) == ("zero-parameter", "fail", 1)
    shown = ", ".join(f"'{up}'" for up in ups)
    expected = f"The adapters change nothing: each has a tensor of zeros, as before training ({shown})."
    assert report.findings[0].message == expected


def _nan(state: State) -> None:
    state[names("ComfyUI", 1)[1]][0, 0] = torch.nan


def _one_zero(state: State) -> None:
    state[names("ComfyUI", 1)[1]].zero_()


def _downs_zero(state: State) -> None:
    for at in range(3):
        state[names("ComfyUI", at)[0]].zero_()


def _half_lost(state: State) -> None:
    del state[names("ComfyUI", 2)[1]]


FAULTS: dict[str, tuple[Callable[[State], None], tuple[str, str, str], int]] = {
    "NaN": (_nan, ("non-finite-parameter", "fail", names("ComfyUI", 1)[1]), 1),
    "one of zeros": (_one_zero, ("zero-parameter", "warn", names("ComfyUI", 1)[1]), 0),
    "the first halves of zeros": (_downs_zero, ("zero-parameter", "fail", ""), 1),
    "a lost half": (_half_lost, ("integrity", "fail", ""), 3),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_file_of_adapters_is_named(tmp_path: Path, fault: str) -> None:
    change, finding, code = FAULTS[fault]
    state = adapters("ComfyUI")
    change(state)
    report = checked(tmp_path / "lora.safetensors", state)
    assert (found(report), report.exit_code) == ([finding], code)
    if fault == "a lost half":
        assert f"lacks the other half of '{names('ComfyUI', 2)[0]}'" in report.error


def test_scales_of_zero_change_nothing_either(tmp_path: Path) -> None:
    state = {
        name: torch.zeros(()) if name.endswith(".alpha") else adapter for name, adapter in adapters("kohya").items()
    }
    assert found(checked(tmp_path / "lora.safetensors", state)) == [("zero-parameter", "fail", "")]


def test_a_level_that_was_set_holds_for_adapters_too(tmp_path: Path) -> None:
    state = adapters("peft", 1)
    state[names("peft", 0)[1]].zero_()
    report = checked(tmp_path / "lora.safetensors", state, rules={"zero-parameter": RuleSettings("warn")})
    assert (found(report), report.exit_code) == ([("zero-parameter", "warn", "")], 0)


def test_merging_without_alpha_is_refused_and_the_file_is_judged_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from torch import nn\ndef build():\n    return nn.Linear(16, 16)\n", "utf-8")
    state = adapters("peft")
    state[names("peft", 1)[1]][0, 0] = torch.nan
    report = checked(tmp_path / "lora.safetensors", state, arch=f"{tmp_path / 'net.py'}:build")
    assert report.error == "lora.safetensors holds adapters, but no adapter_config.json with their alpha is next to it."
    assert (found(report), report.exit_code) == ([("non-finite-parameter", "fail", names("peft", 1)[1])], 3)
    report = checked(tmp_path / "lora.safetensors", adapters("diffusers"), arch=f"{tmp_path / 'net.py'}:build")
    assert "merge them into their network with the program that trained them, given their alpha" in report.error
    assert (found(report), report.exit_code) == ([], 3)


def test_adapters_of_another_method_are_judged_alone(tmp_path: Path) -> None:
    state = adapters("peft")
    for at in range(3):
        state[names("peft", at)[0].replace("lora_A.weight", "lora_magnitude_vector")] = torch.rand(16)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true, "lora_alpha": 8}', "utf-8")
    report = checked(tmp_path / "lora.safetensors", state)
    assert (report.exit_code, report.findings) == (0, ())
    assert "describes adapters of kind DoRA; only LoRA of layers can be merged" in next(
        outcome.reason for outcome in report.outcomes if outcome.status == "skipped"
    )


NET = """
import torch
from torch import nn
class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(16, 4))
    def forward(self, x):
        return self.linear(x) + x @ self.lora_A.T @ self.lora_B.T
def build(): return nn.Sequential(Adapted(), nn.ReLU(), Adapted())
"""


def test_a_network_that_holds_its_own_adapters_is_no_file_of_adapters(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET, "utf-8")
    arch = f"{tmp_path / 'net.py'}:build"
    state = load_model(arch).module.state_dict()
    report = checked(tmp_path / "net.safetensors", state, arch=arch, input_shape=(2, 16))
    assert (report.exit_code, report.error) == (0, "")
    assert report.model is not None
    assert report.model.kind == "Sequential"

"""Adapters are merged into their network as peft merges them."""

import copy
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from hookscope.errors import CheckpointError, MisfitError, UnmergedError, UsageError
from hookscope.models.contents import list_contents
from hookscope.models.spec import load_model

NETWORK = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 12)
        self.conv = nn.Conv2d(3, 8, 3)
        self.pointwise = nn.Conv2d(8, 12, 1)
        self.q = nn.Linear(12, 6)
        self.inner = nn.ModuleDict({"q": nn.Linear(12, 6, bias=False)})
        self.head = nn.Linear(12, 2)


def build():
    torch.manual_seed(1)
    return Net()
"""

CASES: dict[str, dict[str, Any]] = {
    "linear": {"r": 4, "lora_alpha": 6, "target_modules": ["q"]},
    "rank-stabilised": {"r": 4, "lora_alpha": 6, "target_modules": ["q"], "use_rslora": True},
    "convolutions": {"r": 2, "lora_alpha": 3, "target_modules": ["conv", "pointwise"]},
    "embedding": {"r": 3, "lora_alpha": 3, "target_modules": ["embed", "q"]},
    "of several ranks": {"r": 4, "lora_alpha": 8, "target_modules": ["q", "conv"], "rank_pattern": {"inner.q": 2}},
    "of several alphas": {"r": 4, "lora_alpha": 8, "target_modules": ["q", "conv"], "alpha_pattern": {"inner.q": 3}},
    "with a new head": {"r": 2, "lora_alpha": 2, "target_modules": ["q"], "modules_to_save": ["head"]},
    "with biases": {"r": 2, "lora_alpha": 2, "target_modules": ["q"], "bias": "lora_only"},
}


Q = "base_model.model.q.lora_"


def adapted(
    tmp_path: Path, settings: dict[str, Any], *, trained: bool = True, safe: bool = True, network: str = NETWORK
) -> nn.Module:
    """Write net.py, and what peft saves of adapters for its network; return what peft merges."""
    import peft

    (tmp_path / "net.py").write_text(network, encoding="utf-8")
    base = load_model(f"{tmp_path / 'net.py'}:build").module
    wrapped = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(**settings))
    if trained:
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for _, parameter in sorted(wrapped.named_parameters()):
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
    wrapped.save_pretrained(tmp_path / "adapter", safe_serialization=safe)
    merged: nn.Module = wrapped.merge_and_unload()
    return merged


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample("convolutions")
def test_the_network_is_what_peft_merges(tmp_path: Path, name: str) -> None:
    expected = adapted(tmp_path, CASES[name]).state_dict()
    for source in ("adapter", "adapter/adapter_model.safetensors"):
        loaded = load_model(str(tmp_path / source), arch=f"{tmp_path / 'net.py'}:build")
        actual = loaded.module.state_dict()
        assert list(actual) == list(expected)
        for each, tensor in actual.items():
            torch.testing.assert_close(tensor, expected[each], rtol=1e-6, atol=1e-6)
        assert "LoRA adapter" in loaded.notes[-1]
        assert loaded.info.weights.endswith("with adapter_model.safetensors merged")
    base = load_model(f"{tmp_path / 'net.py'}:build").module.state_dict()
    assert any(not torch.equal(base[each], expected[each]) for each in base)


@pytest.mark.exhaustive
def test_an_adapter_that_has_learnt_nothing_is_said_to(tmp_path: Path) -> None:
    expected = adapted(tmp_path, CASES["linear"], trained=False).state_dict()
    loaded = load_model(str(tmp_path / "adapter"), arch=f"{tmp_path / 'net.py'}:build")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.module.state_dict().items())
    assert "every lora_B is 0 (untrained)" in loaded.warnings[-1]
    assert "every lora_B is 0 (untrained)" in list_contents(tmp_path / "adapter").warnings[0]


@pytest.mark.exhaustive
def test_without_a_network_it_says_that_it_needs_one(tmp_path: Path) -> None:
    adapted(tmp_path, CASES["linear"])
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": "a/b"}))
    with pytest.raises(UsageError, match=r"names 'a/b'\): name it with --arch"):
        load_model(str(tmp_path / "adapter"))


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("kind", ["gaussian", "orthogonal", "pissa", "olora"])
def test_initialisations_that_change_the_network_are_refused_and_others_merged(tmp_path: Path, kind: str) -> None:
    import peft

    adapted(tmp_path, CASES["linear"] | {"init_lora_weights": kind})
    base = load_model(f"{tmp_path / 'net.py'}:build").module
    merged: nn.Module = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "adapter").merge_and_unload()
    tensors = safetensors.torch.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    expected = base.q.weight + 6 / 4 * tensors[f"{Q}B.weight"] @ tensors[f"{Q}A.weight"]
    changes = not torch.allclose(merged.q.weight, expected, atol=1e-5)
    assert changes == (kind in ("pissa", "olora"))
    refusal = pytest.raises(CheckpointError, match=f"of kind {kind}") if changes else nullcontext()
    with refusal:
        loaded = load_model(str(tmp_path / "adapter"), arch=f"{tmp_path / 'net.py'}:build")
        torch.testing.assert_close(loaded.module.q.weight, expected)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_a_square_weight_is_turned_if_its_layer_keeps_it_so(tmp_path: Path) -> None:
    # The setting is of the last layer that peft wrapped, here the linear one.
    network = NETWORK.replace("nn.Linear(12, 6)", "Conv1D(12, 12)").replace("nn.Linear(12, 2)", "nn.Linear(12, 12)")
    network = f"from transformers.pytorch_utils import Conv1D\n{network}"
    expected = adapted(tmp_path, CASES["linear"] | {"target_modules": ["q", "head"]}, network=network).state_dict()
    actual = load_model(str(tmp_path / "adapter"), arch=f"{tmp_path / 'net.py'}:build").module.state_dict()
    assert not json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["fan_in_fan_out"]
    for name in ("q.weight", "head.weight"):
        torch.testing.assert_close(actual[name], expected[name])


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_an_adapter_changes_its_own_layer_and_none_that_is_tied_to_it(tmp_path: Path) -> None:
    network = NETWORK.replace("nn.Linear(12, 2)", "nn.Linear(12, 10)")
    network = network.replace("return Net()", "net = Net()\n    net.head.weight = net.embed.weight\n    return net")
    for adapted_layer, other in (("embed", "head"), ("head", "embed")):
        folder = tmp_path / adapted_layer
        folder.mkdir()
        adapted(folder, CASES["linear"] | {"target_modules": [adapted_layer]}, network=network)
        base = load_model(f"{folder / 'net.py'}:build").module
        loaded = load_model(str(folder / "adapter"), arch=f"{folder / 'net.py'}:build")
        module, tensors = loaded.module, safetensors.torch.load_file(folder / "adapter" / "adapter_model.safetensors")
        down, up = (tensors[name] for name in sorted(tensors))
        change = 6 / 4 * (up @ down).T if adapted_layer == "embed" else 6 / 4 * up @ down
        torch.testing.assert_close(getattr(module, adapted_layer).weight, base.embed.weight + change)
        assert torch.equal(getattr(module, other).weight, base.embed.weight)
        assert loaded.info.parameter_count == sum(map(torch.numel, base.parameters())) + 120


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_an_adapter_of_a_lazy_layer_says_that_there_is_no_weight(tmp_path: Path) -> None:
    adapted(tmp_path, CASES["linear"])
    (tmp_path / "net.py").write_text(NETWORK.replace("self.q = nn.Linear(12, 6)", "self.q = nn.LazyLinear(6)"))
    with pytest.raises(MisfitError, match="is for 'q', but Net has no weight of that layer"):
        load_model(str(tmp_path / "adapter"), arch=f"{tmp_path / 'net.py'}:build")


def _settings(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        state = safetensors.torch.load_file(path)
        change(state)
        safetensors.torch.save_file(state, path)

    return changed


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "no settings": (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json with"),
    "settings that are no JSON": (
        lambda folder: (folder / "adapter_config.json").write_text("[1") and None,
        "not the JSON that peft writes",
    ),
    "another method": (_settings(peft_type="LOHA"), "of kind LOHA; only LoRA"),
    # What peft itself makes of these: test_initialisations_that_change_the_network.
    "PiSSA": (_settings(init_lora_weights="pissa_niter_4"), "of kind pissa_niter_4; only LoRA"),
    "aLoRA": (_settings(alora_invocation_tokens=[1, 2]), "of kind aLoRA; only LoRA"),
    "LoRA with biases": (_settings(lora_bias=True), "of kind LoRA with biases; only LoRA"),
    "DoRA": (_settings(use_dora=True), "of kind DoRA; only LoRA"),
    "no alpha": (_settings(lora_alpha=None), "no number for lora_alpha"),
    "an alpha that is no number": (_settings(lora_alpha=float("inf")), "no number for lora_alpha"),
    "an alpha that no float holds": (_settings(lora_alpha=10**400), "no number for lora_alpha"),
    "a pattern that takes for ever": (_settings(alpha_pattern={"(a+)+$": 1}), "layer patterns that are not names"),
    "a layer that is not there": (
        _tensors(lambda state: state.update({"base_model.model.x.lora_A.weight": torch.ones(4, 12)})),
        "lacks lora_A or lora_B for 'x'",
    ),
    "a pair for no layer": (
        _tensors(
            lambda state: state.update({f"base_model.model.x.lora_{part}.weight": torch.ones(4, 4) for part in "AB"})
        ),
        "is for 'x', but Net has no weight of that layer",
    ),
    "another shape": (_tensors(lambda state: state.update({f"{Q}A.weight": torch.ones(4, 13)})), "for a weight of"),
    "magnitudes": (
        _tensors(lambda state: state.update({f"{Q}magnitude_vector": torch.ones(4)})),
        "not plain LoRA; merge it with peft",
    ),
    "an adapter inside another, as for MultiheadAttention": (
        _tensors(
            lambda state: state.update(
                {f"base_model.model.q.base_layer.out_proj.lora_{part}.weight": torch.ones(4, 4) for part in "AB"}
            )
        ),
        "out_proj.lora_A.weight', which is not plain LoRA; merge it with peft",
    ),
    "a rank of 0": (
        _tensors(lambda state: state.update({f"{Q}A.weight": torch.ones(0, 12), f"{Q}B.weight": torch.ones(6, 0)})),
        "A.weight', which is not plain LoRA",
    ),
    "a number for a matrix": (
        _tensors(lambda state: state.update({f"{Q}A.weight": torch.tensor(1.0)})),
        "A.weight', which is not plain LoRA",
    ),
    "complex numbers": (
        _tensors(lambda state: state.update({f"{Q}B.weight": torch.ones(6, 4, dtype=torch.complex64)})),
        "B.weight', which is not plain LoRA",
    ),
    "a complex bias": (
        _tensors(lambda state: state.update({"base_model.model.q.bias": torch.ones(6, dtype=torch.complex64)})),
        "lacks, or has in another shape or type",
    ),
    "a tensor of no layer": (_tensors(lambda state: state.update(x=torch.ones(4))), "has a 'x'"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.sample("no settings")
def test_what_cannot_be_merged_is_refused(tmp_path: Path, name: str) -> None:
    adapted(tmp_path, CASES["linear"])
    change, phrase = WRONG[name]
    change(tmp_path / "adapter")
    expected = UnmergedError if name == "no settings" else (CheckpointError, MisfitError)
    with pytest.raises(expected, match=phrase.replace("(", r"\(")):
        load_model(str(tmp_path / "adapter" / "adapter_model.safetensors"), arch=f"{tmp_path / 'net.py'}:build")

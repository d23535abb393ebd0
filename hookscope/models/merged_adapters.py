"""Merge low-rank adapters (LoRA) into the network that they were trained on: W + (alpha / r) B A.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, section 4.1; as peft 0.21 lays out its
files and merges them (`peft/tuners/lora/layer.py`). With rsLoRA the factor is alpha / sqrt(r): Kalajdzievski, "A Rank
Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023.
"""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.checkpoints.checkpoint import Checkpoint
from hookscope.checkpoints.fileformat import json_object
from hookscope.errors import CheckpointError, MisfitError, NetworkNeededError, UnmergedError
from hookscope.models.construction import LoadedModel, parameter_count
from hookscope.models.statedict import copyable
from hookscope.parameters import arg
from hookscope.text import counted, printable

_CONFIG_BYTES_LIMIT = 2**20  # ours: a pattern for each layer of a large network

_WRAPPER = "base_model.model."
_PART = re.compile(r"(?P<layer>.+)\.lora_(embedding_)?(?P<half>[AB])(\.weight)?")
_PATTERN = re.compile(r"[\w.\-]+")  # matching anything else could take for ever
_UNSUPPORTED = ("lora_magnitude_vector", "lora_E", "lora_ranknum")  # DoRA and AdaLoRA

# Settings of adapters that are not merged so, with the names of the methods; and initialisations that change W, too.
_OTHER_METHODS = {
    "use_dora": "DoRA",
    "alora_invocation_tokens": "aLoRA",
    "lora_bias": "LoRA with biases",
    "target_parameters": "LoRA of target_parameters",  # in halves for all experts of a layer
}
_CHANGES_WEIGHTS = ("pissa", "corda", "olora", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """How adapters are merged, from an `adapter_config.json`; `base` is the name of their network, or ""."""

    alpha: float
    alphas: Mapping[str, float]
    by_root: bool
    base: str

    def scale(self, layer: str, rank: int) -> float:
        """Return the factor of B A for a layer."""
        fitting = (alpha for name, alpha in self.alphas.items() if f".{layer}".endswith(f".{name}"))
        return next(fitting, self.alpha) / (math.sqrt(rank) if self.by_root else rank)


def adapter_settings(checkpoint: Checkpoint, config: Path | None, *, has_network: bool) -> AdapterSettings:
    """Return how the adapters in a file are merged, by the `adapter_config.json` next to it.

    Raises NetworkNeededError without a network to merge them into; UnmergedError if they have unknown names or no
    settings, CheckpointError if the settings are damaged or of another method.
    """
    name, names = checkpoint.name, [*checkpoint.state]
    if not any(map(_PART.fullmatch, names)):
        odd = next(key for key in names if "lora" in key and not key.endswith(".alpha"))
        alpha = "" if any(key.endswith(".alpha") for key in names) else ", given their alpha"
        raise (UnmergedError if has_network else NetworkNeededError)(
            f"{name} holds LoRA adapters, which are only merged here as peft's save_pretrained names them, "
            f"unlike '{printable(odd, 80)}': merge them into their network with the program that trained them{alpha}."
        )
    try:
        settings = None if config is None else _read_settings(config)
    except CheckpointError as error:  # the settings, not the weights, are damaged or of another method
        if has_network:
            raise
        raise NetworkNeededError(f"{name} holds adapters that cannot be merged: {error}") from error
    if not has_network:
        named = f" (adapter_config.json names '{printable(settings.base, 80)}')" if settings and settings.base else ""
        alpha = "" if settings else " Merging also takes their alpha, in an adapter_config.json next to the file."
        raise NetworkNeededError(
            f"{name} holds LoRA adapters, which need the network that they were trained on{named}: "
            f"name it with {arg('arch')}, such as {arg('arch')} net.py:build.{alpha}"
        )
    if settings is None:
        raise UnmergedError(f"{name} holds adapters, but no adapter_config.json with their alpha is next to it.")
    return settings


def _read_settings(config: Path) -> AdapterSettings:
    settings, shown = json_object(config, _CONFIG_BYTES_LIMIT), printable(str(config))
    if settings is None:
        raise CheckpointError(f"{shown} is not the JSON that peft writes; download it again.")
    kind, alpha = settings.get("peft_type", "LORA"), settings.get("lora_alpha")
    alphas = settings.get("alpha_pattern") or {}
    begun = str(settings.get("init_lora_weights"))
    methods = [name for setting, name in _OTHER_METHODS.items() if settings.get(setting)]
    methods += [begun] * begun.lower().startswith(_CHANGES_WEIGHTS) + [str(kind)] * (kind != "LORA")
    if methods:
        raise CheckpointError(
            f"{shown} describes adapters of kind {printable(methods[0], 40)}; only LoRA of layers can be merged."
        )
    if not isinstance(alphas, dict) or not all(
        type(value) in (int, float) and abs(value) <= sys.float_info.max for value in (alpha, *alphas.values())
    ):
        raise CheckpointError(f"{shown} has no number for lora_alpha; download it again.")
    if not all(_PATTERN.fullmatch(name) for name in alphas):
        raise CheckpointError(f"{shown} has layer patterns that are not names; merge it with peft.")
    base = settings.get("base_model_name_or_path")
    by_root = settings.get("use_rslora") is True
    return AdapterSettings(float(alpha or 0), alphas, by_root, base if isinstance(base, str) else "")


def merged(loaded: LoadedModel, checkpoint: Checkpoint, settings: AdapterSettings) -> LoadedModel:
    """Add the adapters of a file to the weights of a network.

    Other tensors of the file, which peft trained whole, replace the network's. A layer whose weight is tied to another
    layer's gets a weight of its own, since an adapter changes its layer alone. On the meta device only shapes are
    compared. Raises MisfitError if a layer or a shape does not fit, CheckpointError for adapters that are no plain
    LoRA.
    """
    module, state, name = loaded.module, checkpoint.state, checkpoint.name
    if odd := next((key for key, value in state.items() if _is_odd(key, value)), None):
        raise CheckpointError(f"{name} holds '{printable(odd, 80)}', which is not plain LoRA; merge it with peft.")
    held = (*module.named_parameters(remove_duplicate=False), *module.named_buffers())
    tensors = {key: tensor for key, tensor in held if not nn.parameter.is_lazy(tensor)}
    pairs, whole = _pairs_and_whole(state)
    for layer, halves in pairs.items():
        weight = tensors.get(f"{layer}.weight")
        if halves.keys() != {"A", "B"}:
            raise MisfitError(f"{name} lacks lora_A or lora_B for '{printable(layer, 80)}'.")
        if weight is None:
            shown, kind = printable(layer, 80), type(module).__name__
            raise MisfitError(f"{name} is for '{shown}', but {kind} has no weight of that layer.")
        # peft goes by the class as well: Conv1D of transformers keeps its weight as (inputs, outputs).
        owner = module.get_submodule(layer)
        is_transposed = isinstance(owner, nn.Embedding) or type(owner).__name__ == "Conv1D"
        delta = _product(halves["A"], halves["B"], is_transposed)
        if delta.shape != weight.shape:
            shapes = f"{tuple(delta.shape)} for a weight of {tuple(weight.shape)}"
            raise MisfitError(f"{name} does not fit '{printable(layer, 80)}': {shapes}.")
        change = (delta * settings.scale(layer, halves["A"].shape[0])).to(weight.dtype)
        _put(module, f"{layer}.weight", weight if weight.is_meta else weight.detach() + change)
    _replace(module, tensors, whole, name)
    ranks = ", ".join(map(str, sorted({halves["A"].shape[0] for halves in pairs.values()})))
    also = f"; {counted(len(whole), 'other tensor')} of the file took the place of the network's" if whole else ""
    note = f"{name}: {counted(len(pairs), 'LoRA adapter')} of rank {ranks} merged into the network{also}."
    warnings = (*checkpoint.warnings, *loaded.warnings)
    if not any(bool(halves["B"].any()) for halves in pairs.values()):
        warnings += (f"{name}: every lora_B is 0 (untrained), so the network is unchanged.",)
    weights, merged_name = f"{loaded.info.weights}, with {name} merged", f"{name} ({loaded.info.name})"
    count = parameter_count(module)  # a tied weight may have been parted
    info = replace(loaded.info, name=merged_name, weights=weights, sha256=checkpoint.sha256, parameter_count=count)
    return replace(loaded, info=info, warnings=warnings, notes=(*checkpoint.notes, *loaded.notes, note))


def _is_odd(key: str, value: object) -> bool:
    """Return whether a part of an adapter is another method's, or no matrix or kernel of floating-point numbers."""
    if not (isinstance(value, Tensor) and _PART.fullmatch(key)):
        return any(part in key for part in _UNSUPPORTED)
    is_dense = value.layout is torch.strided and value.is_floating_point()
    return not is_dense or value.dim() < 2 or not value.numel() or ".base_layer." in key  # inside another adapter


def _replace(module: nn.Module, tensors: Mapping[str, Tensor], whole: Mapping[str, Tensor], name: str) -> None:
    for key, value in whole.items():
        own = tensors.get(key)
        if own is None or not copyable(value, own, key):
            raise MisfitError(
                f"{name} has a '{printable(key, 80)}' that {type(module).__name__} lacks, or has in another shape or "
                "type."
            )
        _put(module, key, torch.empty_like(own).copy_(value))


def _put(module: nn.Module, key: str, value: Tensor) -> None:
    """Set a parameter or buffer of one layer; a layer that it was tied to keeps the former."""
    path, _, name = key.rpartition(".")
    owner = module.get_submodule(path)
    own = getattr(owner, name)
    setattr(owner, name, nn.Parameter(value.detach(), own.requires_grad) if isinstance(own, nn.Parameter) else value)


def _pairs_and_whole(state: Mapping[str, Any]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    pairs: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for full, value in state.items():
        name = full.removeprefix(_WRAPPER)
        if not isinstance(value, Tensor):
            continue
        if match := _PART.fullmatch(name):
            pairs.setdefault(match["layer"], {})[match["half"]] = value
        else:
            whole[name.replace(".base_layer.", ".")] = value
    return pairs, whole


def _product(down: Tensor, up: Tensor, transposed: bool) -> Tensor:
    dtype = torch.float64 if down.dtype is torch.float64 else torch.float32
    flat = down.to(dtype).reshape(down.shape[0], -1)
    rows = up.to(dtype).reshape(up.shape[0], -1)
    if rows.shape[1] != flat.shape[0]:
        return torch.empty(0)
    product = (rows @ flat).reshape(up.shape[0], *down.shape[1:])
    return product.T if transposed and product.dim() == 2 else product

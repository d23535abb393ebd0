"""Grad-CAM by `hookscope.attribute` over forward and backward, beside the peers, and whose maps are right."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hookscope
from benchmarks.comparing import Ready, over_first, ready, timeable
from benchmarks.findings import Measurement, Section, Work
from benchmarks.networks import seeded
from benchmarks.timing import CLOCKS, Run, interleaved

Map = NDArray[np.float32]
Maps = Callable[[], Map]

_TIMED = ("resnet34", "layer4")
_AT_MOST = 0.60
_ROUNDS = 40
_CHECKED = "hookscope, with checks of the map"
_CHECKED_ROUNDS = 5
# Layers that people take: the last blocks, the last normalisations, one with a function behind it, and tokens.
_CASES = (
    _TIMED,
    ("resnet34", "layer4.2.bn1"),
    ("vgg11_bn", "features.26"),
    ("vgg11_bn", "features.27"),
    ("densenet121", "features"),
    ("mobilenet_v2", "features.18"),
    ("mobilenet_v2", "features.18.1"),
    ("efficientnet_b0", "features.8.1"),
    ("convnext_tiny", "features"),
    ("swin_t", "features"),
    ("timm vit_tiny_patch16_224", "blocks.11.norm1"),
)
# Of the largest value: another order of float32 sums stays far below, another activation far above.
_TOLERANCE = 1e-3

_NOTE = """\
The map of one class at a given layer for one picture, over forward and backward down to the picture and all parameters.
Every tool is compared with a computation by hand, for {count} layers of {networks} networks: the output as returned,
its gradient by torch.autograd.grad, weights as means over space, no negative sums. Peers get layer and class, else
their defaults, without normalisation where they offer that. hookscope is timed without its tests of the map, which the
peers don't have, and with them, its default."""


def measure() -> Section:
    """Time Grad-CAM on the CPU, and count wrong maps."""
    networks = len({network for network, _ in _CASES})
    note = _NOTE.format(count=len(_CASES), networks=networks)
    return Section("hookscope.attribute, over forward and backward", note, (*_timed(), *map(_counted, _WAYS)))


def _timed() -> list[Measurement]:
    network, layer = _TIMED
    model, picture = seeded(network)
    plain = deepcopy(model)
    expected, index = _by_hand(model, layer, picture)

    def passes() -> None:
        plain.zero_grad()
        plain(picture.clone().requires_grad_())[0, index].backward()

    def prepare(way: str) -> tuple[Run, Work]:
        make = partial(_hookscope, sanity="quick") if way == _CHECKED else _WAYS[way]
        run = make(deepcopy(model), layer, picture, index)
        return run, _judged([(run(), expected, way)])

    ways = {"plain forward and backward": Ready(None, passes, _ROUNDS)}
    ways |= {way: ready(_ROUNDS, partial(prepare, way)) for way in _WAYS}
    ways[_CHECKED] = ready(_CHECKED_ROUNDS, partial(prepare, _CHECKED))
    seconds = interleaved(*timeable(ways), CLOCKS["cpu"], passes, warm=True)
    return over_first(network, ways, seconds, {"hookscope": _AT_MOST})


def _counted(way: str) -> Measurement:
    """Count the maps that are right."""
    actual: list[tuple[Map, Map, str]] = []
    missing = 0
    for network, layer in _CASES:
        model, picture = seeded(network)
        expected, index = _by_hand(model, layer, picture)
        try:
            actual.append((_WAYS[way](model, layer, picture, index)(), expected, way))
        except Exception:  # noqa: BLE001 - a peer may raise anything
            missing += 1
    wrong = _judged(actual).wrong
    work = Work("differs" if wrong or missing else "same", len(_CASES), wrong, missing)
    return Measurement(f"{len(_CASES)} layers", way, None, "×", None, work)


def _judged(actual: list[tuple[Map, Map, str]]) -> Work:
    wrong = sum(not _same(values, expected, way) for values, expected, way in actual)
    return Work("differs" if wrong else "same", len(actual), wrong)


def _same(actual: Map, expected: Map, way: str) -> bool:
    if way == "grad-cam":  # it gives maps that are scaled and resized: so is what they are compared with
        scaled = import_module("pytorch_grad_cam.utils.image").scale_cam_image
        expected = scaled(scaled(expected[None], actual.shape[::-1]))[0]
    if actual.shape != expected.shape:
        return False
    return bool(np.abs(actual - expected).max() <= _TOLERANCE * np.abs(expected).max())


def _by_hand(model: nn.Module, layer: str, picture: Tensor) -> tuple[Map, int]:
    """Return Grad-CAM's map, (h, w), of the best class that has one, and that class."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        kept.append(output)
        return output.clone()  # what the network overwrites

    handle = model.get_submodule(layer).register_forward_hook(keep)
    scores = model(picture)[0]
    handle.remove()
    (output,) = kept
    for index in scores.argsort(descending=True).tolist():
        (gradient,) = torch.autograd.grad(scores[index], output, retain_graph=True)
        values, slopes = (_as_maps(tensor.detach()[0]) for tensor in (output, gradient))
        values = (slopes.mean((1, 2), keepdim=True) * values).sum(0).relu()
        if values.any():
            return values.numpy(), index
    raise ValueError(f"no class has a map at {layer}")


def _as_maps(values: Tensor) -> Tensor:
    """Return as (C, h, w) what is that, (h, w, C), or tokens (1 + h · w, C) behind the class token."""
    if values.dim() == 2:
        side = round((len(values) - 1) ** 0.5)
        values = values[1:].reshape(side, side, -1)
    return values if values.shape[1] == values.shape[2] else values.permute(2, 0, 1)


def _hookscope(
    model: nn.Module, layer: str, picture: Tensor, index: int, *, sanity: Literal["none", "quick"] = "none"
) -> Maps:
    pattern = f"/^{layer.replace('.', '[.]')}$/"

    def run() -> Map:
        result = hookscope.attribute(model, picture, layer=pattern, target=str(index), sanity=sanity)
        return result.maps[0].values

    return run


def _captum(model: nn.Module, layer: str, picture: Tensor, index: int) -> Maps:
    attribution = import_module("captum.attr").LayerGradCam(model, model.get_submodule(layer))

    def run() -> Map:
        values: Tensor = attribution.attribute(picture, target=index, relu_attributions=True)
        return values.detach().squeeze().numpy()

    return run


def _grad_cam(model: nn.Module, layer: str, picture: Tensor, index: int) -> Maps:
    package = import_module("pytorch_grad_cam")
    targets = [import_module("pytorch_grad_cam.utils.model_targets").ClassifierOutputTarget(index)]
    cam: Any = package.GradCAM(model=model, target_layers=[model.get_submodule(layer)])

    def run() -> Map:
        values: Map = cam(input_tensor=picture, targets=targets)[0]
        return values

    return run


def _torch_cam(model: nn.Module, layer: str, picture: Tensor, index: int) -> Maps:
    extractor = import_module("torchcam.methods").GradCAM(model, layer)

    def run() -> Map:
        (values,) = extractor(index, model(picture), normalized=False)
        actual: Map = values[0].detach().numpy()
        return actual

    return run


_WAYS: dict[str, Callable[[nn.Module, str, Tensor, int], Maps]] = {
    "hookscope": _hookscope,
    "captum": _captum,
    "grad-cam": _grad_cam,
    "torchcam": _torch_cam,
}

"""Methods that look at the picture itself: one number for each value that the network was given.

The gradient, and what rules for ReLUs make of it, is computed here; integrated gradients, SmoothGrad and occlusion come
from captum, always with as many inputs at a time as the batch holds, so that memory does not grow with their steps.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.attribution.guided import ADVICE, ActivationCalls, Rule, ruled
from hookscope.errors import ModelError, UsageError
from hookscope.inputs import Batch, copy_of
from hookscope.inspection.verification import difference, outcome_of
from hookscope.results.attributions import Method
from hookscope.text import shape_text

# Integrated gradients begin with so many steps, and double them until the gap is below `COMPLETENESS_LIMIT`.
FIRST_STEPS, MOST_STEPS = 32, 512
COMPLETENESS_LIMIT = 0.01
"""Share of the score's difference that integrated gradients may miss. Our choice."""
# Smilkov et al. 2017, SmoothGrad, section 3.1: noise of 10 to 20 % of the picture's range, 50 samples.
_NOISE, _SAMPLES = 0.15, 50
# The patch that occlusion slides over the picture, and its step, as parts of a side. Our choice: Zeiler and Fergus 2014
# do not state theirs; 32 and 16 pixels of 224 take 169 passes.
_PATCH_PARTS, _STRIDE_PARTS = 7, 14


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """Inputs, and one number for each of them that is to be explained.

    Attributes:
        network: In eval mode.
        batch: N inputs, on the network's device.
        score: Takes what the network returned for the batch and returns the numbers, (N,), still attached to autograd's
            graph. Each depends on its own input alone.
    """

    network: nn.Module
    batch: Batch
    score: Callable[[object], Tensor]


@dataclass(frozen=True, slots=True)
class Pixels:
    """What a method gives for each value of the pictures of a batch.

    Attributes:
        values: (N, C, H, W), detached, on the network's device.
        unchanged: Activations that a guided rule left alone, by label, each with the reason.
        gap: (N,), how far integrated gradients fall short of the score's difference, as a share of it; else None.
        notes: Sentences about how they were made.
    """

    values: Tensor
    unchanged: Mapping[str, str] = field(default_factory=dict)
    gap: Tensor | None = None
    notes: tuple[str, ...] = ()


def map_of(method: Method, pixels: Tensor) -> Tensor:
    """Return one number for each place of pictures: (N, C, H, W) to (N, H, W).

    Gradients give the greatest magnitude over the channels (Simonyan et al. 2013, Deep inside convolutional networks,
    section 3.1), as their signs depend on how the picture is lit. Methods whose values are shares of the score give the
    sum over channels; occlusion, which covers all channels at once, their mean.
    """
    if method in {"input-x-gradient", "integrated-gradients"}:
        return pixels.sum(1)
    return pixels.mean(1) if method == "occlusion" else pixels.abs().amax(1)


def gradient(scored: ScoredBatch) -> Pixels:
    """Return the gradient of the score with respect to the pictures (Simonyan et al. 2013).

    Raises:
        UsageError: If the network's input is no batch of pictures, or no gradient reaches it.
    """
    with _frozen(scored.network):
        pixels = _pictures(scored.batch)
        return Pixels(_gradient(_score(scored, pixels), pixels))


def input_x_gradient(scored: ScoredBatch) -> Pixels:
    """Return the gradient times the pictures as the network is given them (Shrikumar et al. 2016).

    Raises:
        UsageError: As in `gradient`.
    """
    return Pixels(_pictures(scored.batch).detach() * gradient(scored).values)


def guided(rule: Rule, scored: ScoredBatch) -> Pixels:
    """Return what a rule for ReLUs makes of the gradient, see `hookscope.attribution.guided.ruled`.

    The network is run once more without observing its activations, and must give the same output.

    Raises:
        UsageError: As in `gradient`, or if the rule cannot be put on this network.
        ModelError: If the network's two outputs are not equal, bit for bit.
    """
    if any(isinstance(module, torch.jit.ScriptModule) for module in scored.network.modules()):
        raise UsageError(f"{rule} cannot be put on a ReLU inside TorchScript, which hides it. {ADVICE}")
    calls = ActivationCalls(scored.network)
    with _frozen(scored.network):
        pixels = _pictures(scored.batch)
        with torch.random.fork_rng(_cuda(pixels)):
            plain = outcome_of(_output(scored, pixels))
        with calls:
            output = _output(scored, pixels)
        if differs := difference(outcome_of(output), plain):
            raise ModelError(f"{rule}: the network gives different results in two passes: {differs}. {ADVICE}")
        score = scored.score(output)
        with ruled(rule, score, calls) as rules:
            return Pixels(_gradient(score, pixels), rules.unchanged)


def integrated_gradients(scored: ScoredBatch) -> Pixels:
    """Integrate the gradient along the way from a picture of zeros to the pictures (Sundararajan et al. 2017).

    Where inputs are normalised, zeros are the mean colour of the training data. Each picture has the fewest steps, of
    32, 64, … 512, with which its values add up to the score's difference within 1 %, or the best of them.

    Raises:
        UsageError: As in `gradient`, or if captum is not installed.
    """
    method = _captum().IntegratedGradients(partial(_score, scored))
    pixels = _pictures(scored.batch)
    values = torch.zeros_like(pixels, requires_grad=False)
    with _frozen(scored.network):
        with torch.no_grad():
            span = _score(scored, pixels) - _score(scored, values)
        gap, steps = torch.full_like(span, torch.inf), FIRST_STEPS
        while True:
            found = method.attribute(pixels, n_steps=steps, internal_batch_size=len(pixels)).detach()
            missing = ((found.sum((1, 2, 3)) - span) / span).abs().nan_to_num(0.0, posinf=torch.inf)
            better = (gap >= COMPLETENESS_LIMIT) & (missing < gap) | (steps == FIRST_STEPS)
            values[better], gap[better] = found[better].to(values.dtype), missing[better]
            if steps == MOST_STEPS or bool((gap < COMPLETENESS_LIMIT).all()):
                break
            steps *= 2
    return Pixels(values, gap=gap, notes=(f"Integrated from a picture of zeros, in {steps} steps at most.",))


def smoothgrad(scored: ScoredBatch) -> Pixels:
    """Return the mean gradient over noisy copies of the pictures (Smilkov et al. 2017).

    Noise is drawn from torch's global generator.

    Raises:
        UsageError: As in `integrated_gradients`.
    """
    captum = _captum()
    pixels = _pictures(scored.batch).detach()
    # captum takes one deviation for all pictures: each is divided by its own.
    deviation = _NOISE * (pixels.amax((1, 2, 3), keepdim=True) - pixels.amin((1, 2, 3), keepdim=True))
    deviation = deviation.where(deviation > 0, torch.ones_like(deviation))
    tunnel = captum.NoiseTunnel(captum.Saliency(lambda scaled: _score(scored, scaled * deviation)))
    with _frozen(scored.network):
        found = tunnel.attribute(
            (pixels / deviation).requires_grad_(), nt_samples=_SAMPLES, nt_samples_batch_size=1, stdevs=1.0, abs=False
        )
    notes = (f"Mean over {_SAMPLES} copies with noise of {_NOISE:.0%} of each picture's range.",)
    return Pixels((found / deviation).detach(), notes=notes)


def occlusion(scored: ScoredBatch) -> Pixels:
    """Return how far the score falls, as a mean over the patches of zeros that cover a place (Zeiler and Fergus 2014).

    Raises:
        UsageError: As in `integrated_gradients`.
    """
    pixels = _pictures(scored.batch).detach()
    channels, *sides = pixels.shape[1:]
    patch = tuple(max(side // _PATCH_PARTS, 1) for side in sides)
    stride = tuple(max(side // _STRIDE_PARTS, 1) for side in sides)
    with torch.no_grad():
        found = (
            _captum()
            .Occlusion(partial(_score, scored))
            .attribute(pixels, sliding_window_shapes=(channels, *patch), strides=(channels, *stride))
        )
    return Pixels(found.detach(), notes=(f"Patches of {patch[0]}x{patch[1]} in steps of {stride[0]}x{stride[1]}.",))


PIXEL_METHODS: Mapping[Method, Callable[[ScoredBatch], Pixels]] = {
    "gradient": gradient,
    "input-x-gradient": input_x_gradient,
    "guided-backprop": partial(guided, "guided-backprop"),
    "deconvnet": partial(guided, "deconvnet"),
    "integrated-gradients": integrated_gradients,
    "smoothgrad": smoothgrad,
    "occlusion": occlusion,
}


def _captum() -> Any:
    try:
        from captum import attr  # noqa: PLC0415 - an extra, and a second to load
    except ImportError as error:
        raise UsageError(
            "--method integrated-gradients, smoothgrad and occlusion need one more package: "
            "pip install 'hookscope[attribute]'"
        ) from error
    return attr


def _pictures(batch: Batch) -> Tensor:
    """Return a copy of the pictures, (N, C, H, W), that requires a gradient."""
    given = batch.args[0] if batch.args else None
    if isinstance(given, list) and given and all(isinstance(each, Tensor) for each in given):
        given = torch.stack(given)
    if not isinstance(given, Tensor) or given.dim() != 4 or not given.is_floating_point():
        shape = f"a tensor {shape_text(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise UsageError(f"Maps of pixels need a batch of pictures, (N, C, H, W): the network is given {shape}.")
    with torch.inference_mode(mode=False):
        return given.detach().clone().requires_grad_()


def _output(scored: ScoredBatch, pixels: Tensor) -> Any:
    """Run the network on pictures, of which it gets a copy, as it may overwrite them."""
    rest = copy_of(replace(scored.batch, args=scored.batch.args[1:]))
    given = scored.batch.args[0]
    is_list = isinstance(given, list)
    first: Any = pixels.to((given[0] if is_list else given).dtype, copy=True)  # captum's are float32
    if is_list:
        first = list(first.unbind())
    return scored.network(first, *rest.args, **rest.kwargs)


def _score(scored: ScoredBatch, pixels: Tensor) -> Tensor:
    return scored.score(_output(scored, pixels))


def _gradient(score: Tensor, pixels: Tensor) -> Tensor:
    """Return the gradient of each picture's score with respect to it."""
    found = torch.autograd.grad(score.sum(), pixels, allow_unused=True)[0] if score.requires_grad else None
    if found is None:
        raise UsageError(
            "No gradient reaches the picture: the network cuts it off (no_grad, detach). Use --method occlusion."
        )
    return found


def _cuda(tensor: Tensor) -> list[torch.device]:
    return [tensor.device] if tensor.is_cuda else []


@contextmanager
def _frozen(network: nn.Module) -> Iterator[None]:
    """Track gradients for a `with` block, but not of parameters: what only they need is not kept in memory."""
    trainable = [each for each in network.parameters() if each.requires_grad and each.is_leaf]
    try:
        for each in trainable:
            each.requires_grad_(False)
        with torch.inference_mode(mode=False), torch.enable_grad():
            yield
    finally:
        for each in trainable:
            each.requires_grad_()

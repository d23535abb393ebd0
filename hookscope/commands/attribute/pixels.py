"""Methods that look at the input itself: one number for each value that the network was given.

Integrated gradients and occlusion come from captum. Each method runs as many inputs at a time as the batch holds, so
that memory does not grow with its steps.

Each method raises a UsageError if the network's input is no batch of floating numbers, if no gradient reaches it, or if
captum is needed and not installed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hookscope.commands.attribute.cams import channel_sum
from hookscope.commands.attribute.guided import ActivationCalls, advice, ruled
from hookscope.commands.attribute.input_places import (
    InputPlaces,
    main_input,
    places_of,
    require_floating_point,
    with_argument,
)
from hookscope.errors import ModelError, UsageError
from hookscope.inputs.batches import Batch, copy_of
from hookscope.inspection.verification import difference, outcome_of
from hookscope.parameters import arg
from hookscope.results.attributions import SANITY_LIMITS, Method, input_word
from hookscope.text import shape_text

# Integrated gradients begin with so many steps, and double them until the gap is below `COMPLETENESS_LIMIT`.
FIRST_STEPS, MOST_STEPS = 32, 512
COMPLETENESS_LIMIT = SANITY_LIMITS["completeness"]
"""Share of the score's difference that integrated gradients may miss."""
# Smilkov et al. 2017, SmoothGrad, section 3.1: noise of 10 to 20% of the picture's range, 50 samples.
_NOISE, _SAMPLES = 0.15, 50
# The patch that occlusion slides over a signal, a picture or a volume, and its step, as parts of a side. Zeiler and
# Fergus 2014 do not state theirs; 32 and 16 pixels of 224 take 169 passes, the others 99 and 343.
_PATCH_AND_STRIDE_PARTS = {1: (50, 100), 2: (7, 14), 3: (4, 8)}


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

    @property
    def places(self) -> InputPlaces:
        """How the axes of the argument whose values are explained are to be read.

        Raises:
            UsageError: If it is no batch of floating numbers.
        """
        values = _as_tensor(_explained(self.batch))
        if isinstance(values, Tensor) and 2 <= values.dim() <= 5 and values.is_floating_point():
            return places_of(self.network, values)
        kind = type(values).__name__
        if isinstance(values, Tensor):
            require_floating_point(self.network, values)
            kind = f"a tensor {shape_text(values.shape)}"
        raise UsageError(
            "Maps of the input itself need one tensor as an argument: signals (N, C, L), pictures (N, C, H, W) or "
            f"volumes (N, C, D, H, W). The network is given {kind}."
        )


@dataclass(frozen=True, slots=True)
class Pixels:
    """What a method gives for each value of the inputs of a batch.

    Attributes:
        values: (N, C, *size), detached, on the network's device.
        unchanged: Activations that guided backpropagation left alone, by label, each with the reason.
        gap: (N,), how far integrated gradients fall short of the score's difference, as a share of it, NaN where a
            score or a value is not finite; None for other methods.
        notes: Sentences about how they were made.
    """

    values: Tensor
    unchanged: Mapping[str, str] = field(default_factory=dict)
    gap: Tensor | None = None
    notes: tuple[str, ...] = ()


def map_of(method: Method, pixels: Tensor) -> Tensor:
    """Return one number for each place of inputs: (N, C, *size) to (N, *size).

    Gradients give the greatest magnitude over the channels (Simonyan et al. 2013, Deep inside convolutional networks,
    section 3.1), as their signs depend on how the picture is lit. Methods whose values are shares of the score give the
    sum over channels; occlusion, which covers all channels at once, their mean.
    """
    if method in {"input-x-gradient", "integrated-gradients"}:
        return channel_sum(pixels)
    return pixels.mean(1) if method == "occlusion" else pixels.abs().amax(1)


def gradient(scored: ScoredBatch) -> Pixels:
    """Return the gradient of the score with respect to the pictures (Simonyan et al. 2013)."""
    pixels = _input_leaf(scored)
    return Pixels(_gradient(_score(scored, pixels), pixels))


def input_x_gradient(scored: ScoredBatch) -> Pixels:
    """Return the gradient times the pictures as the network is given them (Shrikumar et al. 2016)."""
    return Pixels(_input_leaf(scored).detach() * gradient(scored).values)


def guided_backprop(scored: ScoredBatch) -> Pixels:
    """Return the gradient that ReLUs pass on only where it is positive, see `guided.ruled`.

    The network is run once more without observing its activations, and must give the same output.

    Raises:
        UsageError: If the network's activations do not go with it, or as all methods.
        ModelError: If the network's two outputs are not equal, bit for bit.
    """
    calls = ActivationCalls(scored.network)
    pixels = _input_leaf(scored)
    with torch.random.fork_rng([pixels.device] if pixels.is_cuda else []):
        plain = outcome_of(_output(scored, pixels))
    with calls:
        output = _output(scored, pixels)
    if differs := difference(outcome_of(output), plain):
        raise ModelError(f"guided-backprop: the network gives different results in two passes: {differs}. {advice()}")
    score = scored.score(output)
    with ruled(score, calls) as unchanged:
        return Pixels(_gradient(score, pixels), unchanged)


def integrated_gradients(scored: ScoredBatch) -> Pixels:
    """Integrate the gradient along the way from a picture of zeros to the pictures (Sundararajan et al. 2017).

    Where inputs are normalised, zeros are the mean colour of the training data. Each picture has the fewest steps, of
    32, 64, … 512, with which its values add up to the score's difference within 1%, or the best of them.
    """
    method = _captum().IntegratedGradients(partial(_score, scored))
    gradient(scored)  # raises our error if no gradient reaches the input; captum's would be blamed on the network
    pixels = _input_leaf(scored)
    values = torch.zeros_like(pixels, requires_grad=False)
    with torch.no_grad():
        span = _score(scored, pixels) - _score(scored, values)
    gap, steps = torch.full_like(span, torch.inf), FIRST_STEPS
    while True:
        estimate = method.attribute(pixels, n_steps=steps, internal_batch_size=len(pixels)).detach()
        short = estimate.flatten(1).sum(1) - span
        missing = (short / span).abs().where(short != 0, 0.0)
        better = (gap >= COMPLETENESS_LIMIT) & (missing < gap) | (steps == FIRST_STEPS)
        values[better], gap[better] = estimate[better].to(values.dtype), missing[better]
        if steps == MOST_STEPS or not bool((gap >= COMPLETENESS_LIMIT).any()):  # more steps do not help NaN
            break
        steps *= 2
    return Pixels(
        values,
        gap=gap,
        notes=(f"Integrated from a {input_word(len(scored.places.size))} of zeros, in {steps} steps at most.",),
    )


def smoothgrad(scored: ScoredBatch) -> Pixels:
    """Return the mean gradient over noisy copies of the pictures (Smilkov et al. 2017).

    Noise is drawn from torch's global generator.
    """
    pixels = _input_leaf(scored).detach()
    axes = tuple(range(1, pixels.dim()))
    deviation = _NOISE * (pixels.amax(axes, keepdim=True) - pixels.amin(axes, keepdim=True))
    total = torch.zeros_like(pixels, dtype=torch.promote_types(pixels.dtype, torch.float32))
    for _ in range(_SAMPLES):
        noisy = (pixels + deviation * torch.randn_like(pixels)).requires_grad_()
        total += _gradient(_score(scored, noisy), noisy)
    noun = input_word(len(scored.places.size))
    notes = (f"Mean over {_SAMPLES} copies with noise of {_NOISE:.0%} of each {noun}'s range.",)
    return Pixels(total / _SAMPLES, notes=notes)


def occlusion(scored: ScoredBatch) -> Pixels:
    """Return the mean fall of the score over the patches of zeros that cover a place (Zeiler and Fergus 2014)."""
    pixels = _input_leaf(scored).detach()
    channels, *sides = pixels.shape[1:]
    patch, stride = (tuple(max(side // parts, 1) for side in sides) for parts in _PATCH_AND_STRIDE_PARTS[len(sides)])
    method = _captum().Occlusion(partial(_score, scored))
    with torch.no_grad():
        drops = method.attribute(pixels, sliding_window_shapes=(channels, *patch), strides=(channels, *stride))
    patches, steps = ("x".join(map(str, shape)) for shape in (patch, stride))
    return Pixels(drops.detach(), notes=(f"Patches of {patches} in steps of {steps}.",))


PIXEL_METHODS: Mapping[Method, Callable[[ScoredBatch], Pixels]] = {
    "gradient": gradient,
    "input-x-gradient": input_x_gradient,
    "guided-backprop": guided_backprop,
    "integrated-gradients": integrated_gradients,
    "smoothgrad": smoothgrad,
    "occlusion": occlusion,
}


def _captum() -> Any:
    try:
        from captum import attr  # noqa: PLC0415 - an extra, and a second to load
    except ImportError as error:
        raise UsageError(
            f"{arg('method')} integrated-gradients and occlusion need one more package: pip install "
            "'hookscope[attribute]'"
        ) from error
    return attr


def _explained(batch: Batch) -> Any:
    """Return the argument whose values are explained: the main input, or a list of pictures in first place."""
    first = next(iter((*batch.args, *batch.kwargs.values())), None)
    main = None if isinstance(first, list) else main_input(batch)
    return first if main is None else main


def _as_tensor(value: Any) -> Any:
    if isinstance(value, list) and value and all(isinstance(tensor, Tensor) for tensor in value):
        return torch.stack(value)
    return value


def _input_leaf(scored: ScoredBatch) -> Tensor:
    """Return a copy of the inputs, (N, C, *size), that requires a gradient."""
    with torch.inference_mode(mode=False):
        values = _as_tensor(_explained(scored.batch))
        return scored.places.by_channel(values.detach()).clone().requires_grad_()


def _output(scored: ScoredBatch, pixels: Tensor) -> Any:
    """Run the network on a copy of the inputs, because it may overwrite them."""
    original = _explained(scored.batch)
    dtype = _as_tensor(original).dtype  # captum's are float32
    values: Any = scored.places.as_given(pixels).to(dtype, copy=True)
    placeholder = object()  # copying cuts the graph
    rest = copy_of(with_argument(scored.batch, original, placeholder))
    batch = with_argument(rest, placeholder, [*values.unbind()] if isinstance(original, list) else values)
    return scored.network(*batch.args, **batch.kwargs)


def _score(scored: ScoredBatch, pixels: Tensor) -> Tensor:
    return scored.score(_output(scored, pixels))


def _gradient(score: Tensor, pixels: Tensor) -> Tensor:
    grad = torch.autograd.grad(score.sum(), pixels, allow_unused=True)[0] if score.requires_grad else None
    if grad is None:
        raise UsageError(
            f"No gradient reaches the input: the network cuts it off (no_grad, detach). Use {arg('method')} occlusion."
        )
    return grad

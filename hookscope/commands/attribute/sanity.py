"""Whether maps say something about the network, the target and the picture.

A map can look right and be an edge detector. Each check takes away one thing that a map must depend on, and asks
whether it notices. Limits were fitted on EfficientNet-Lite0, 1 and 2 with ImageNet weights over seven photographs, and
on six small networks that were trained to tell shapes apart. Grad-CAM, LayerCAM, the gradient and input times gradient
stood for methods to be trusted; an edge detector, noise, guided backpropagation and deconvolution for the others.

`Checking` gathers what the checks need, batch by batch, from copies of the network, and judges it at the end.
"""

import copy
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name it has everywhere
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.commands.attribute.batch_maps import Explained, explain_again
from hookscope.commands.attribute.forward_backward import ForwardBackward, ModelRaisedError, model_errors
from hookscope.commands.attribute.input_places import main_input, places_of, with_argument
from hookscope.commands.attribute.scores import BatchTarget, probabilities, runner_up
from hookscope.errors import HookscopeError, ModelError
from hookscope.inputs.batches import Batch, copy_of
from hookscope.inspection.state.preservation import preserved
from hookscope.models.construction import copied_results
from hookscope.parameters import arg
from hookscope.results.attributions import SANITY_LIMITS, Method, SanityCheck, input_word
from hookscope.results.concentration import Extent
from hookscope.text import exception_line, told_apart

Map = NDArray[np.float32]
Numbers = NDArray[np.float64]
Sanity = Literal["none", "quick", "full"]

_DEPTHS = (0.1, 0.5, 1.0)  # shares of the layers that are randomised, from the output down
_MOST_SHUFFLED = 2**20
_FEWEST_LAYERS = 3  # in a shallow network, 10% would be the last layer alone
_DRAWS = 2  # at each depth: a single draw may correlate by 0.90 if maps have 49 values
# The largest correlation of maps that look different. Ours.
_CLASS_DIFFERS = 0.9
_DELETED_SHARE = 0.1
_PLACINGS = 10
# Share of random places that must do less harm. On single photographs Grad-CAM came to 0.77 in the mean, the gradient
# to 0.62 and noise to 0.45: one picture decides little. Over eight pictures Grad-CAM and gradients passed on all small
# networks, noise in 1 of 12 cases.
_HARM_LIMIT = 0.6
# Share of the probability that blurring must take away, or random places change, for the check to say anything.
_LEAST_EFFECT = 0.05
# Standard deviation of the blur, as a part of the picture's larger side: 28 pixels of 224.
_BLUR_PARTS = 8
# Below it blurring can take so little away that the check is inconclusive.
_LEAST_PROBABILITY = 0.05
# One map of these methods takes dozens of passes or more, and the first two checks need seven maps.
_SLOW: frozenset[Method] = frozenset({"integrated-gradients", "smoothgrad", "occlusion"})
_NO_ORDER = "Sanity: no tests of maps that are the same everywhere, hold NaN or Inf, or have fewer than 4 cells."


def rank_correlation(first: Map, second: Map) -> float:
    """Return Spearman's correlation of two maps: Pearson's of their ranks, where equal values share the mean rank.

    0 if only the second map ranks no places; NaN if the first ranks none.
    """
    if not (puts_places_in_order(first) and puts_places_in_order(second)):
        return 0.0 if puts_places_in_order(first) else math.nan
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def puts_places_in_order(values: Map) -> bool:
    """Tell whether a map ranks places: not if it is the same everywhere, or not finite, or has too few cells."""
    # The ranks of two or three cells correlate by 1 too often by chance.
    return values.size > 3 and bool(np.isfinite(values).all()) and bool((values != values.flat[0]).any())


def _ranks(values: Map) -> NDArray[np.float64]:
    _, places, counts = np.unique(values.ravel(), return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (counts.cumsum() - (counts - 1) / 2)[places]
    return ranks


def copy_of_network(network: nn.Module) -> nn.Module:
    """Return a copy of a network; raise a ModelError if it cannot be copied."""
    try:
        return copy.deepcopy(network, copied_results(network))
    except Exception as error:
        raise ModelError(f"{type(network).__name__} cannot be copied: {exception_line(error)}.") from error


def randomised(network: nn.Module, share: float, seed: int) -> nn.Module:
    """Return a copy of a network with the values of its last layers in random order (Adebayo et al. 2018, section 3).

    Each parameter keeps its values, and with them their mean and deviation, but they change places. That suits every
    kind of layer, where fresh draws of one size would make some overflow and others vanish. More than a million values
    take long to shuffle: values with the same mean and deviation are drawn instead. Buffers stay.

    `share` is of the modules that hold parameters, counted from the last one that is registered; three at least.
    """
    copied = copy_of_network(network)
    holding = [layer for layer in copied.modules() if next(layer.parameters(recurse=False), None) is not None]
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for module in holding[-max(math.ceil(share * len(holding)), _FEWEST_LAYERS) :]:
            for parameter in module.parameters(recurse=False):
                parameter.copy_(_in_random_order(parameter, generator))
    return copied


def _in_random_order(values: Tensor, generator: torch.Generator) -> Tensor:
    if values.numel() > _MOST_SHUFFLED and values.is_floating_point() and bool(values.isfinite().all()):
        deviation, mean = (float(scalar) for scalar in torch.std_mean(values.float()))
        return torch.empty(values.shape, device="cpu").normal_(mean, deviation, generator=generator).to(values.device)
    order = torch.randperm(values.numel(), generator=generator, device="cpu").to(values.device)
    return values.reshape(-1)[order].view(values.shape)


def weights_correlations(
    network: nn.Module, explain: Callable[[nn.Module], Sequence[Map]], maps: Sequence[Map], seed: int
) -> Numbers:
    """Correlate the magnitudes of maps with those that `explain` makes once the weights are randomised.

    Returns:
        Rank correlations, (depths, draws x maps); NaN of maps without an order.
    """
    by_depth = [
        [correlations(maps, explain(randomised(network, share, seed + draw))) for draw in range(_DRAWS)]
        for share in _DEPTHS
    ]
    return np.reshape(by_depth, (len(_DEPTHS), -1))


def correlations(maps: Sequence[Map], others: Sequence[Map]) -> Numbers:
    """Return the rank correlation of the magnitudes of each map with another, (maps,); NaN of maps without an order."""
    pairs = zip(maps, others, strict=True)
    return np.array([rank_correlation(np.abs(ours), np.abs(theirs)) for ours, theirs in pairs])


def weights_check(correlation: Numbers) -> SanityCheck:
    """Judge `weights_correlations` by the depth whose mean is greatest."""
    by_depth = correlation.mean(1)
    value = float(by_depth.max())
    limit = SANITY_LIMITS["weights"]
    passed = value <= limit
    shown = ", ".join(f"{mean:.2f}" for mean in by_depth)
    meaning = "With the weights shuffled in the last 10%, 50% and 100% of layers (at least three), maps correlate by "
    meaning += shown + (
        ": they depend on what the network has learnt."
        if passed
        else f" (limit {limit}): they hardly depend on what the network has learnt, like those of an edge "
        f"detector. Guided backpropagation is known for that. Try another {arg('method')}."
    )
    return SanityCheck("weights", value, passed, (), meaning)


def class_check(correlation: Numbers) -> SanityCheck:
    """Judge by their mean the `correlations` of maps with the runner-up class's maps of the same inputs."""
    value = float(correlation.mean())
    limit = SANITY_LIMITS["class"]
    passed = value <= limit
    meaning = f"Maps of the target and of the runner-up class correlate by {value:.3g}"
    if value <= _CLASS_DIFFERS:
        meaning += ": they tell the two apart."
    elif passed:
        meaning += f" (limit {limit}): they differ little. Compare two classes with {arg('target')} 'a-b'."
    else:
        meaning += (
            f" (limit {limit}): they show what the network sees, but not why it chose this class. Compare "
            f"two classes with {arg('target')} 'a-b', or try another {arg('method')}."
        )
    return SanityCheck("class", value, passed, (), meaning)


def completeness_check(gap: float, noun: str = "picture") -> SanityCheck:
    """Judge how far integrated gradients fall short of the score's difference, as a share of it."""
    limit = SANITY_LIMITS["completeness"]
    passed = gap < limit
    meaning = f"The values add up to the difference that the {noun} makes to the score, but for {gap:.2%}"
    meaning += (
        "." if passed else f" (limit {limit:.0%}): take {arg('method')} gradient or occlusion, or another target."
    )
    return SanityCheck("completeness", gap, passed, (), meaning)


def resized(maps: Tensor, size: Sequence[int], extents: Sequence[Extent]) -> Tensor:
    """Return maps (N, *grid) as (N, *size) over the whole input, interpolated linearly between their cells' places.

    Beyond the outermost places, which there is nothing to interpolate between, their values are repeated.
    """
    axes, parts = len(size), []
    for grid, extent in zip(maps, extents, strict=True):
        sides = zip(size, extent[:axes], extent[axes:], strict=True)
        shares = [
            ((torch.arange(length, dtype=maps.dtype, device=maps.device) + 0.5) / length - begin) / (end - begin)
            for length, begin, end in sides
        ]
        if axes == 1:  # torch samples in pictures and volumes
            shares.insert(0, maps.new_tensor([0.5]))
        mesh = torch.stack(torch.meshgrid(*shares, indexing="ij")[::-1], -1) * 2 - 1
        cells = grid.reshape(1, 1, *(1,) * (axes == 1), *grid.shape)
        parts.append(F.grid_sample(cells, mesh[None], padding_mode="border", align_corners=False).reshape(size))
    return torch.stack(parts)


def deletions(pictures: Tensor, maps: Tensor, probability: Callable[[Tensor], Tensor], seed: int) -> Numbers:
    """Blur the tenth of each input that its map ranks highest, and as much of the same shape in random places.

    Args:
        pictures: (N, C, *size), what the network is given: signals, pictures or volumes.
        maps: (N, *size); signed ones rank what speaks for the target highest.
        probability: Takes inputs of the same shape and returns the target's probability for each, (N,).
        seed: Of the places.

    Returns:
        The probability before, after, and after blurring in each of the random places, (2 + places, N).
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        top = torch.stack([_top_tenth(heat_map)[None] for heat_map in maps]).to(pictures.device)
        blurred = _blurred(pictures)
        probs = [probability(pictures), probability(torch.where(top, blurred, pictures))]
        for _ in range(_PLACINGS):
            shifts = [int(torch.randint(size, (), generator=generator, device="cpu")) for size in pictures.shape[2:]]
            moved = top.roll(shifts, [*range(2, pictures.dim())])
            probs.append(probability(torch.where(moved, blurred, pictures)))
    return np.asarray(torch.stack(probs).double().cpu().numpy())


def deletion_check(probs: Numbers, noun: str = "picture") -> SanityCheck:
    """Judge `deletions` by the share of random places that do less harm than the place which the map ranks highest.

    The check holds if that share is large enough and blurring the place takes some of the probability away. It fails if
    the share is too small. It is inconclusive where blurring changes too little, or raises the probability
    everywhere.
    """
    after, others = probs[1], probs[2:]
    harm = float(((others > after) + (others == after) / 2).mean())
    before, value, at_random = float(probs[0].mean()), float(after.mean()), float(others.mean())
    least = _LEAST_EFFECT * before
    passed: bool | None = None
    if harm >= _HARM_LIMIT and before - value >= least:
        passed = True
    elif harm < _HARM_LIMIT and max(abs(before - value), abs(before - at_random)) >= least:
        passed = False
    texts = told_apart((before, value, at_random))
    meaning = (
        f"Blurring the tenth of the {noun} that the map ranks highest takes the target's probability from {texts[0]} "
        f"to {texts[1]}, blurring as much in random places to {texts[2]}: "
    )
    if passed is None:
        effect = "fall" if harm >= _HARM_LIMIT else "change"
        meaning += f"only a {effect} by {_LEAST_EFFECT:.0%} or more would say something about the map."
    else:
        meaning += f"it does more harm than {harm:.0%} of the random places"
        meaning += (
            "."
            if passed
            else f" (at least {_HARM_LIMIT:.0%} is required). The map may not show what the target depends on; with "
            f"few {noun}s that happens by chance, so give more of them."
        )
    return SanityCheck("deletion", value, passed, (before, at_random), meaning)


def _top_tenth(values: Tensor) -> Tensor:
    """Return a mask of the tenth of an input that its map ranks highest; of equal values the first ones."""
    chosen = torch.zeros(values.numel(), dtype=torch.bool, device="cpu")
    chosen[values.flatten().argsort(descending=True, stable=True)[: round(_DELETED_SHARE * len(chosen))]] = True
    return chosen.view(values.shape)


def _blurred(pictures: Tensor) -> Tensor:
    """Blur inputs with a Gaussian along every axis of place; edges are repeated.

    With Fourier transforms: direct sums take minutes for long signals.
    """
    deviation = max(pictures.shape[2:]) / _BLUR_PARTS
    reach = math.ceil(2 * deviation)
    blurred = pictures.to(torch.promote_types(pictures.dtype, torch.float32))
    steps = torch.arange(-reach, reach + 1, device=pictures.device, dtype=blurred.dtype)
    weights = torch.exp(-(steps**2) / (2 * deviation**2))
    weights /= weights.sum()
    for axis in range(2, pictures.dim()):
        lines = blurred.movedim(axis, -1)
        padded = F.pad(lines.reshape(-1, 1, lines.shape[-1]), (reach, reach), mode="replicate")
        length = padded.shape[-1]
        product = torch.fft.rfft(padded) * torch.fft.rfft(weights, n=length)
        blurred = torch.fft.irfft(product, n=length)[..., 2 * reach :].reshape(lines.shape).movedim(-1, axis)
    return blurred.to(pictures.dtype)


# --- Gathering ---


@dataclass(slots=True, kw_only=True)
class Checking:
    """What the checks of a run have found so far.

    Attributes:
        sanity: "quick" checks the first target of the first batch; "full" all targets of all batches.
        output_key: Which of several outputs holds the scores.
        notes: Sentences about checks that were left out.
        seconds: Time spent on checks.
    """

    sanity: Sanity
    method: Method
    output_key: str | None
    seed: int
    notes: dict[str, None] = field(default_factory=dict)
    seconds: float = 0.0
    _measured: defaultdict[str, list[Numbers]] = field(default_factory=lambda: defaultdict(list))
    _began: bool = False
    _noun: str = "picture"

    def add(self, passes: ForwardBackward, batch: Batch, explained: Explained) -> None:
        """Check the maps of a batch. The network itself is not run."""
        self._noun = input_word(explained.maps[0][0].dim() - 1)
        gaps = [part.gap[~part.gap.isnan()] for part in explained.pixels if part.gap is not None]
        self._measured["completeness"] += [gap.cpu().double().numpy() for gap in gaps if gap.numel()]
        if self.sanity == "none" or (self.sanity == "quick" and self._began):
            return
        self._began = True
        began = time.perf_counter()
        for at in range(1 if self.sanity == "quick" else len(explained.targets)):
            try:
                self._check(passes, batch, explained, at)
            except (HookscopeError, ModelRaisedError) as error:
                self.notes[f"Sanity was not checked for some maps: {error}"] = None
        self.seconds += time.perf_counter() - began

    def judged(self) -> tuple[SanityCheck, ...]:
        """Return the checks for which anything was measured."""
        judges: dict[str, Callable[[Numbers], SanityCheck]] = {
            "weights": weights_check,
            "class": class_check,
            "deletion": partial(deletion_check, noun=self._noun),
            "completeness": lambda gaps: completeness_check(float(gaps.max()), self._noun),
        }
        measured = {name: self._measured[name] for name in judges if self._measured[name]}
        return tuple(judges[name](np.concatenate(parts, -1)) for name, parts in measured.items())

    def _check(self, passes: ForwardBackward, batch: Batch, explained: Explained, at: int) -> None:
        target, network = explained.targets[at], passes.inspected.network
        places = [place for place, share in enumerate(target.targets) if share is not None]
        if not places:
            return
        maps = _arrays(explained.maps[at], places)

        def again(other: nn.Module, its_target: BatchTarget) -> list[Map]:
            with preserved(nn.Identity(), self.seed) as state:  # only of random numbers, because `other` is dropped
                of_other = replace(passes, state=state)
                repeated = explain_again(of_other, other, batch, explained.layers, self.method, its_target)
            return _arrays(repeated, places)

        is_slow = self.method in _SLOW and self.sanity == "quick"
        if is_slow:
            self.notes[
                f"Sanity: no weights and class tests, because {self.method} takes many passes; {arg('sanity')} full "
                "runs them."
            ] = None
        elif next(network.parameters(), None) is None:
            self.notes["Sanity: no weights test, because the network has no parameters to shuffle."] = None
        else:
            scores = weights_correlations(network, lambda other: again(other, target), maps, self.seed)
            self._keep(scores, "weights")
        copied = copy_of_network(network)
        output = self._output(passes, copied, batch)
        other = runner_up(output, target, self.output_key)
        if other is None:
            self.notes["Sanity: no class and deletion tests, because the target is not a single class."] = None
            return
        if not is_slow:
            self._keep(correlations(maps, again(copied, other)), "class")
        self._delete(passes, batch, explained, at, places, copied)

    def _keep(self, scores: Numbers, check: str) -> None:
        """Keep the correlations of a check, (..., maps), except for maps that rank no places."""
        ranked = scores[..., ~np.isnan(scores).reshape(-1, scores.shape[-1]).any(0)]
        if ranked.size < scores.size:
            self.notes[_NO_ORDER] = None
        if ranked.size:
            self._measured[check].append(ranked)

    def _delete(
        self, passes: ForwardBackward, batch: Batch, explained: Explained, at: int, places: list[int], copied: nn.Module
    ) -> None:
        """Blur what the maps of one target rank highest, and keep the target's probabilities."""
        target = explained.targets[at]
        if reason := _why_not_deleted(batch, target):
            self.notes[f"Sanity: no deletion test, because {reason}."] = None
            return
        argument = main_input(batch)
        assert argument is not None  # noqa: S101 - `_why_not_deleted` has looked
        layout = places_of(copied, argument)

        def probability(changed: Tensor) -> Tensor:
            output = self._output(passes, copied, with_argument(batch, argument, layout.as_given(changed)))
            return probabilities(output, target, self.output_key)

        elsewhere = {layer.label for layer in explained.layers if not layer.leads_to_input}
        for (label, extents), maps in zip(explained.extents, explained.maps[at], strict=True):
            ranking = [place for place in places if puts_places_in_order(maps[place].numpy())]
            if len(ranking) < len(places):
                self.notes[_NO_ORDER] = None
            if label in elsewhere:
                self.notes["Sanity: no deletion test of layers from which no gradient leads to the input."] = None
            elif maps[0].dim() < len(layout.size):  # inputs are words
                self.notes["Sanity: no deletion test of maps that rank no places of the input."] = None
            elif ranking:
                whole = resized(maps, layout.size, extents)
                deleted = deletions(layout.by_channel(argument), whole, probability, self.seed)[:, ranking]
                likely = deleted[0] >= _LEAST_PROBABILITY
                for share in deleted[0, ~likely]:
                    low = "NaN" if np.isnan(share) else f"below {_LEAST_PROBABILITY}: blurring could hardly lower it"
                    self.notes[f"Sanity: no deletion test where the target's probability is {low}."] = None
                if likely.any():
                    self._measured["deletion"].append(deleted[:, likely])

    def _output(self, passes: ForwardBackward, network: nn.Module, batch: Batch) -> object:
        copied = copy_of(batch)
        with preserved(nn.Identity(), self.seed), torch.no_grad(), model_errors(passes.inspected, "forward"):
            return network(*copied.args, **copied.kwargs)


def _why_not_deleted(batch: Batch, target: BatchTarget) -> str:
    argument = main_input(batch)
    if argument is None:
        return "the network is given no input as one tensor"
    if target.is_dense:
        return "the target has a score at each place, and no single probability"
    return "" if argument.is_floating_point() else "only floating-point numbers can be blurred"


def _arrays(maps: Sequence[Tensor], places: Sequence[int]) -> list[Map]:
    return [heat_map[place].numpy() for heat_map in maps for place in places]

"""Gather what the sanity checks need, batch by batch, from copies of the network, and judge it at the end."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from hookscope.commands.attribute.batch_maps import Explained, explain_again
from hookscope.commands.attribute.forward_backward import ForwardBackward, ModelRaisedError, model_errors
from hookscope.commands.attribute.input_places import main_input, places_of
from hookscope.commands.attribute.map_layers import MapLayers
from hookscope.commands.attribute.pixels import COMPLETENESS_LIMIT
from hookscope.commands.attribute.sanity import (
    Map,
    Numbers,
    class_check,
    completeness_check,
    copy_of_network,
    correlations,
    deletion_check,
    deletions,
    puts_places_in_order,
    resized,
    weights_check,
    weights_correlations,
)
from hookscope.commands.attribute.scores import BatchTarget, probabilities, runner_up
from hookscope.errors import HookscopeError
from hookscope.inputs import Batch
from hookscope.inputs.batches import copy_of
from hookscope.inspection.state.preservation import preserved
from hookscope.parameters import arg
from hookscope.results.attributions import Method, SanityCheck, input_word

Sanity = Literal["none", "quick", "full"]

# Below it blurring can take so little away that the check is inconclusive.
_LEAST_PROBABILITY = 0.05
# Of these one map takes dozens of passes or more, and the first two checks need seven.
_SLOW: frozenset[Method] = frozenset({"integrated-gradients", "smoothgrad", "occlusion"})

_NO_ORDER = "Sanity: no tests of maps that are the same everywhere, or hold NaN or Inf."


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
    _weights: list[Numbers] = field(default_factory=list)
    _classes: list[Numbers] = field(default_factory=list)
    _deleted: list[Numbers] = field(default_factory=list)
    _gap: float | None = None
    _began: bool = False
    _what: str = "picture"

    def add(self, map_layers: MapLayers, batch: Batch, explained: Explained) -> None:
        """Check the maps of a batch. The network itself is not run."""
        self._what = input_word(explained.maps[0][0].dim() - 1)
        if explained.gap is not None:
            self._gap = max(explained.gap, self._gap or 0.0)
        if self.sanity == "none" or (self.sanity == "quick" and self._began):
            return
        self._began = True
        began = time.perf_counter()
        for at in range(1 if self.sanity == "quick" else len(explained.targets)):
            try:
                self._check(map_layers.passes, batch, explained, at)
            except (HookscopeError, ModelRaisedError) as error:
                self.notes[f"Sanity was not checked for some maps: {error}"] = None
        self.seconds += time.perf_counter() - began

    def judged(self) -> tuple[SanityCheck, ...]:
        """Judge everything that was found."""
        checks = []
        if self._weights:
            checks.append(weights_check(np.concatenate(self._weights, 1)))
        if self._classes:
            checks.append(class_check(np.concatenate(self._classes)))
        if self._deleted:
            checks.append(deletion_check(np.concatenate(self._deleted, 1), self._what))
        if self._gap is not None:
            checks.append(completeness_check(self._gap, COMPLETENESS_LIMIT, self._what))
        return tuple(checks)

    def _check(self, passes: ForwardBackward, batch: Batch, explained: Explained, at: int) -> None:
        """Check the maps of one target: of all its layers, of the inputs that have it."""
        target, network = explained.targets[at], passes.inspected.network
        places = [place for place, share in enumerate(target.targets) if share is not None]
        if not places:
            return
        maps = _numbers(explained.maps[at], places)

        def again(other: nn.Module, its_target: BatchTarget) -> list[Map]:
            with preserved(nn.Identity(), self.seed) as state:  # of random numbers alone: `other` is thrown away
                of_other = replace(passes, state=state)
                repeated = explain_again(of_other, other, batch, explained.layers, self.method, its_target)
            return _numbers(repeated, places)

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
            self._keep(scores, self._weights)
        copied = copy_of_network(network)
        output = self._output(passes, copied, batch, batch.args)
        other = runner_up(output, target, self.output_key)
        if other is None:
            self.notes["Sanity: no class and deletion tests, because the target is not a single class."] = None
            return
        if not is_slow:
            self._keep(correlations(maps, again(copied, other)), self._classes)
        self._delete(passes, batch, explained, at, places, copied)

    def _keep(self, scores: Numbers, kept: list[Numbers]) -> None:
        """Keep the correlations, (..., maps), of maps that rank places."""
        ranked = scores[..., ~np.isnan(scores).reshape(-1, scores.shape[-1]).any(0)]
        if ranked.size < scores.size:
            self.notes[_NO_ORDER] = None
        if ranked.size:
            kept.append(ranked)

    def _delete(
        self, passes: ForwardBackward, batch: Batch, explained: Explained, at: int, places: list[int], copied: nn.Module
    ) -> None:
        """Blur what the maps of one target mark, and note what becomes of the target's probability."""
        target = explained.targets[at]
        argument = batch.args[0] if batch.args else None
        has_shares = all(share is None or share.probability is not None for share in target.targets)
        if not isinstance(argument, Tensor) or argument is not main_input(batch) or not has_shares:
            return
        if not argument.is_floating_point():
            self.notes["Sanity: no deletion test, because whole numbers cannot be blurred."] = None
            return
        layout = places_of(copied, argument)
        inputs = layout.by_channel(argument)

        def probability(changed: Tensor) -> Tensor:
            output = self._output(passes, copied, batch, (layout.as_given(changed), *batch.args[1:]))
            return probabilities(output, target, self.output_key)

        for layer, maps in zip_longest(explained.layers, explained.maps[at]):
            ranking = [place for place in places if puts_places_in_order(maps[place].numpy())]
            if len(ranking) < len(places):
                self.notes[_NO_ORDER] = None
            if not ranking or maps[0].dim() < len(layout.size):  # of words: the picture is not what it ranks
                continue
            whole = maps if layer is None else resized(maps, layout.size, layer.extents)
            deleted = deletions(inputs, whole, probability, self.seed)[:, ranking]
            likely = deleted[0] >= _LEAST_PROBABILITY
            if not likely.all():
                self.notes[
                    f"Sanity: no deletion test where the target's probability is below {_LEAST_PROBABILITY}: blurring "
                    "could hardly lower it."
                ] = None
            if likely.any():
                self._deleted.append(deleted[:, likely])

    def _output(self, passes: ForwardBackward, network: nn.Module, batch: Batch, args: tuple[Any, ...]) -> object:
        copied = copy_of(replace(batch, args=args))
        with preserved(nn.Identity(), self.seed), torch.no_grad(), model_errors(passes.inspected, "forward"):
            return network(*copied.args, **copied.kwargs)


def _numbers(maps: Sequence[Tensor], places: Sequence[int]) -> list[Map]:
    """Return maps by layer, then by input, of these inputs."""
    return [heat_map[place].numpy() for heat_map in maps for place in places]

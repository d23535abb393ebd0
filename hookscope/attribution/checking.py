"""Gather what the sanity checks need, batch by batch, from copies of the network, and judge it at the end."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from torch import Tensor, nn

from hookscope.attribution.explaining import Explained, explain, looks_at_layers, of_pixels
from hookscope.attribution.layers import survey_of
from hookscope.attribution.looking import LayerLook, NotReachedError, given_layers
from hookscope.attribution.passes import ModelRaisedError, Passes, model_errors
from hookscope.attribution.pixels import COMPLETENESS_LIMIT
from hookscope.attribution.sanity import (
    Map,
    Numbers,
    class_check,
    completeness_check,
    correlations,
    deletion_check,
    deletions,
    weights_check,
    weights_correlations,
)
from hookscope.attribution.scores import BatchTarget
from hookscope.attribution.tokens import Tokens
from hookscope.errors import HookscopeError, ModelError
from hookscope.hooks.forward_hooks import capture
from hookscope.inputs import Batch, copy_of
from hookscope.inspection.network import inspected_network
from hookscope.inspection.state.preservation import preserved
from hookscope.results.attributions import Method, SanityCheck
from hookscope.text import exception_line

Sanity = Literal["none", "quick", "full"]

# Of these one map takes dozens of passes or more, and the first two checks need seven.
_SLOW: frozenset[Method] = frozenset({"integrated-gradients", "smoothgrad", "occlusion"})


@dataclass(slots=True, kw_only=True)
class Checking:
    """What the checks of a run have found so far.

    Attributes:
        sanity: "quick" checks the first target of the first batch; "full" all targets of all batches.
        tokens: As the user gave them.
        notes: Sentences about checks that were left out.
    """

    sanity: Sanity
    method: Method
    tokens: Tokens | None
    seed: int
    notes: dict[str, None] = field(default_factory=dict)
    _weights: list[Numbers] = field(default_factory=list)
    _classes: list[Numbers] = field(default_factory=list)
    _deleted: list[Numbers] = field(default_factory=list)
    _gap: float | None = None
    _began: bool = False

    def add(self, looking: LayerLook, batch: Batch, explained: Explained) -> None:
        """Check the maps of a batch. The network itself is not run."""
        if explained.gap is not None:
            self._gap = max(explained.gap, self._gap or 0.0)
        if self.sanity == "none" or (self.sanity == "quick" and self._began):
            return
        self._began = True
        for at, target in enumerate(explained.targets[: 1 if self.sanity == "quick" else None]):
            try:
                self._check(looking, batch, explained, target, at)
            except ModelRaisedError as error:
                self.notes[f"Sanity was not checked for some maps: {error}"] = None
            except HookscopeError as error:
                self.notes[f"Sanity was not checked for some maps: {error}"] = None

    def judged(self) -> tuple[SanityCheck, ...]:
        """Judge everything that was found."""
        checks = []
        if self._weights:
            checks.append(weights_check(np.concatenate(self._weights, 1)))
        if self._classes:
            checks.append(class_check(np.concatenate(self._classes)))
        if self._deleted:
            checks.append(deletion_check(np.concatenate(self._deleted, 1)))
        if self._gap is not None:
            checks.append(completeness_check(self._gap, COMPLETENESS_LIMIT))
        return tuple(checks)

    def _check(self, looking: LayerLook, batch: Batch, explained: Explained, target: BatchTarget, at: int) -> None:
        """Check the maps of one target: of all its layers, of the inputs that have it."""
        network = looking.passes.inspected.network
        places = [place for place, each in enumerate(target.targets) if each is not None]
        labels = [each.label for each in explained.looked]
        maps = _numbers(explained.maps[at], places)
        is_slow = self.method in _SLOW and self.sanity == "quick"
        if is_slow:
            self.notes[
                f"Sanity: weights and class are left out, as {self.method} takes many passes (--sanity full has them)."
            ] = None
        else:
            self._weights.append(
                weights_correlations(
                    network, lambda other: self._again(other, labels, batch, target, maps, places), maps, self.seed
                )
            )
        if target.probability is None or target.runner_up is None:
            self.notes["Sanity: class and deletion are left out, as the target is no single class."] = None
            return
        copied = _copy(network)
        if not is_slow:
            others = self._again(copied, labels, batch, target.runner_up(), maps, places)
            self._classes.append(correlations(maps, others))
        pictures = batch.args[0] if batch.args else None
        if isinstance(pictures, Tensor) and pictures.dim() == 4:
            for layer in range(0, len(maps), len(places)):
                found = self._deletions(
                    looking.passes, copied, batch, target, maps[layer : layer + len(places)], places
                )
                self._deleted.append(found)

    def _again(
        self,
        network: nn.Module,
        labels: Sequence[str],
        batch: Batch,
        target: BatchTarget,
        maps: Sequence[Map],
        places: Sequence[int],
    ) -> Sequence[Map]:
        """Make maps of a target on another network of the same form; zeros where no gradient reaches a layer."""
        inspected, layered = inspected_network(network), looks_at_layers(self.method)
        survey = survey_of(network, self.tokens)
        with (
            preserved(network, self.seed) as state,
            capture(network, inspected.modules if layered else {}, survey.observe) as surveying,
        ):
            state.mark_hooks()
            passes = Passes(
                inspected=inspected,
                targets_of=lambda _output, _batch: [target],
                state=state,
                survey=survey,
                surveying=surveying,
            )
            if not layered:
                return _numbers(of_pixels(passes, network, batch, self.method, [target]).maps[0], places)
            looking = LayerLook(passes=passes, given=given_layers(inspected, labels, list))
            try:
                found = explain(looking, batch, self.method)
            except NotReachedError:
                return [np.zeros_like(each) for each in maps]
            finally:
                looking.close()
        by_label = dict(zip([each.label for each in found.looked], found.maps[0], strict=True))
        return _numbers([by_label[label] for label in labels], places)

    def _deletions(
        self,
        passes: Passes,
        network: nn.Module,
        batch: Batch,
        target: BatchTarget,
        maps: Sequence[Map],
        places: Sequence[int],
    ) -> Numbers:
        """Blur what maps rank highest, on all pictures of a batch, and return the numbers of those that have a map."""
        pictures: Tensor = batch.args[0]
        by_place = dict(zip(places, maps, strict=True))
        nothing = np.zeros((1, 1), np.float32)

        def probability(changed: Tensor) -> Tensor:
            given = copy_of(batch)
            with preserved(network, self.seed), model_errors(passes.inspected, "forward"):
                output = network(changed.clone(), *given.args[1:], **given.kwargs)
            if target.probability is None:
                raise ValueError("the target is no single class")
            return target.probability(output)

        all_maps = [by_place.get(place, nothing) for place in range(len(pictures))]
        return deletions(pictures, all_maps, probability, self.seed)[:, list(places)]


def _numbers(maps: Sequence[Tensor], places: Sequence[int]) -> list[Map]:
    """Return maps by layer, then by input, of these inputs."""
    return [each[place].numpy() for each in maps for place in places]


def _copy(network: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(network)
    except Exception as error:
        raise ModelError(f"{type(network).__name__} cannot be copied: {exception_line(error)}.") from error

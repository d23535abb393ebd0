"""Check the maps of a batch: what `hookscope.attribution.sanity` asks of them, on the layers and targets of the run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hookscope.attribution.explaining import Explained, explain_again
from hookscope.attribution.looking import LayerLook
from hookscope.attribution.passes import ModelRaisedError, Passes, model_errors, run_output
from hookscope.attribution.pixels import COMPLETENESS_LIMIT
from hookscope.attribution.sanity import class_check, completeness_check, deletion_check, weights_check
from hookscope.attribution.scores import BatchTarget, probabilities, runner_up
from hookscope.errors import HookscopeError
from hookscope.inputs import Batch, copy_of
from hookscope.results.attributions import Method, SanityCheck

_PICTURE_AXES = 4  # (N, C, H, W)


def check_maps(
    looking: LayerLook, batch: Batch, explained: Explained, method: Method, seed: int, output_key: str | None
) -> tuple[list[SanityCheck], list[str]]:
    """Check the maps of one batch.

    Checks that need what a network does not have, a runner-up or a probability, are left out.

    Returns:
        The checks, and sentences about those that could not be made.
    """
    about = _About(looking.passes, batch, explained, method, seed, output_key)
    checks: list[SanityCheck] = []
    remarks: list[str] = []
    with looking.paused():
        for name, make in _MAKERS.items():
            try:
                check = make(about)
            except (HookscopeError, ModelRaisedError) as error:
                remarks.append(f"The sanity check '{name}' could not be made: {error}")
            else:
                checks += [] if check is None else [check]
    return checks, remarks


class _About(NamedTuple):
    """What is checked."""

    passes: Passes
    batch: Batch
    explained: Explained
    method: Method
    seed: int
    output_key: str | None

    def again(self, network: nn.Module, targets: Sequence[BatchTarget]) -> Explained:
        """Make maps of the same layers."""
        return explain_again(self.passes, network, self.batch, self.explained.looked, self.method, targets)


def _weights(about: _About) -> SanityCheck:
    targets = about.explained.targets

    def on_another(network: nn.Module) -> list[NDArray[np.float32]]:
        return _arrays(about.again(network, targets), targets)

    network = about.passes.inspected.network
    return weights_check(network, on_another, _arrays(about.explained, targets), about.seed)


def _class(about: _About) -> SanityCheck | None:
    explained = about.explained
    with torch.no_grad():
        output = run_output(about.passes, about.batch)
    others = [runner_up(output, target, about.output_key) for target in explained.targets]
    chosen = [at for at, other in enumerate(others) if other is not None]
    if not chosen:
        return None
    again = about.again(about.passes.inspected.network, [other for other in others if other is not None])
    ours = replace(explained, maps=[explained.maps[at] for at in chosen])
    targets = [explained.targets[at] for at in chosen]
    return class_check(_arrays(ours, targets), _arrays(again, targets))


def _deletion(about: _About) -> SanityCheck | None:
    """Look at the first target and the first layer."""
    batch, first = about.batch, about.explained.targets[0]
    pictures = batch.args[0] if batch.args else None
    if not isinstance(pictures, Tensor) or pictures.dim() != _PICTURE_AXES or not pictures.is_floating_point():
        return None
    if any(each is None or each.probability is None for each in first.targets):
        return None

    def probability(changed: Tensor) -> Tensor:
        given = copy_of(replace(batch, args=(changed, *batch.args[1:])))
        with model_errors(about.passes.inspected, "forward"):
            output = about.passes.inspected.network(*given.args, **given.kwargs)
        return probabilities(output, first, about.output_key)

    values = [each.numpy() for each in about.explained.maps[0][0]]
    return deletion_check(pictures, values, probability, about.seed)


def _completeness(about: _About) -> SanityCheck | None:
    gap = about.explained.gap
    return None if gap is None else completeness_check(gap, COMPLETENESS_LIMIT)


_MAKERS: Mapping[str, Callable[[_About], SanityCheck | None]] = {
    "weights": _weights,
    "class": _class,
    "deletion": _deletion,
    "completeness": _completeness,
}


def worst_of(checks: Iterable[SanityCheck]) -> tuple[SanityCheck, ...]:
    """Return one check of each name: of several batches the worst, one that failed before others."""
    worst: dict[str, SanityCheck] = {}
    for each in checks:
        worst[each.name] = max(worst.get(each.name, each), each, key=_badness)
    return tuple(worst.values())


def _badness(check: SanityCheck) -> tuple[bool, float]:
    return not check.passed, check.value - (check.compared_with[-1] if check.compared_with else 0)


def _arrays(explained: Explained, targets: Sequence[BatchTarget]) -> list[NDArray[np.float32]]:
    """Return all maps of inputs that have the target."""
    return [
        one.numpy()
        for by_layer, target in zip(explained.maps, targets, strict=True)
        for maps in by_layer
        for one, each in zip(maps, target.targets, strict=True)
        if each is not None
    ]

"""What `check` does, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hookscope import options
from hookscope.errors import UsageError
from hookscope.hooks.interrupts import interrupts_between_blocks
from hookscope.options import any_given

if TYPE_CHECKING:
    from hookscope.commands.opening import Model
    from hookscope.results.check import CheckReport


@interrupts_between_blocks()
def check(checkpoint: Model | Mapping[str, Any], *, option: options.Check) -> CheckReport:
    """Check one checkpoint by the rules of `hookscope check`; the network runs in this process.

        >>> import hookscope
        >>> def test_the_checkpoint_is_sound():
        ...     hookscope.check("model.pt").raise_for_failure()

    Arguments override the configuration.

    Args:
        checkpoint: A weights file or any other form of MODEL; a module, which stays on its device; or a state dict,
            also inside the dict that a training script saves. A state dict is judged by its values alone, without a
            network.

    Returns:
        The report. Its `error` says why the checkpoint could not be read or run, or its evidence not written.

    Raises:
        UsageError: If the configuration, the baseline, the device or the name of a rule is wrong.
    """
    from hookscope.commands.check.checkpoint import check_checkpoint
    from hookscope.commands.check.configuration.reading import read_settings
    from hookscope.inspection.device import choose_device
    from hookscope.inspection.given_inputs import as_sources, by_position_and_name
    from hookscope.models.spec import load_model, needs_a_name
    from hookscope.rules.baseline import read_baseline
    from hookscope.rules.judging import judged_by, refuse_unmatched
    from hookscope.rules.settings import NO_NETWORK, needing_a_run, with_options

    images, named = by_position_and_name(option.images, option.input)
    inputs = as_sources(images)
    option = replace(option, images=inputs, input=named)
    if isinstance(checkpoint, Mapping):
        loading = replace(option, key=None, arch=None if option.arch == NO_NETWORK else option.arch)
        if any_given(loading, options.PickleOptions) or needing_a_run(option):
            raise UsageError(
                "A state dict is checked without a network, so options that load or run one do not apply. Load it into "
                "the network and give that, or save it and give the file."
            )
        option = replace(option, arch=NO_NETWORK)
    elif not isinstance(checkpoint, str | Path):
        loaded = load_model(checkpoint)  # it refuses other objects
        if any_given(option, options.PickleOptions):
            raise UsageError(needs_a_name())
        if loaded.module is not checkpoint:  # TorchScript and exported programs, as modules
            checkpoint = loaded
    settings = with_options(read_settings(option.config, Path()), option)
    baseline = None if settings.baseline is None else read_baseline(settings.baseline)
    settings, wanted = judged_by(settings, option, baseline)
    report = check_checkpoint(
        str(checkpoint) if isinstance(checkpoint, Path) else checkpoint,
        settings,
        wanted,
        trust=option.trust,
        device=choose_device(option.device) if isinstance(checkpoint, str | Path) and option.device != "cpu" else None,
        baseline=baseline,
        evidence=None if option.evidence is None else Path(option.evidence),
    )
    return refuse_unmatched([report], wanted)[0]

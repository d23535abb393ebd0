"""What `history` does, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hookscope import options
from hookscope.commands.opening import several
from hookscope.hooks.interrupts import interrupts_between_blocks

if TYPE_CHECKING:
    from hookscope.inspection.given_inputs import Images
    from hookscope.inspection.session import OnProgress
    from hookscope.results.history import History


@interrupts_between_blocks()
def history(
    files: options.Texts | Sequence[Path] | Path,
    images: Images = (),
    *,
    option: options.History,
    on_progress: OnProgress | None = None,
) -> History:
    """Follow a training by its checkpoints: how the weights moved, and which file is the first to break a rule.

        run = hookscope.history("ckpt/epoch_*.pt")
        print(run)
        [row.drift for row in run["layer3.1.conv2.weight"]]

    Files are read without running code from them. A file that cannot be read is reported, and the others are finished.

    Args:
        files: Weights files, folders of them or globs; at least two files. They are taken in the order of the epochs or
            steps that they store, else in natural order of names: "epoch_2.pt" before "epoch_10.pt".
        images: Run the network over these with the weights of each file, and judge by all rules.

    Returns:
        The weights over the files, and the verdicts, each with the first file that breaks the rule.
        `run.save("runs/a")` writes the command's run directory.

    Raises:
        UsageError: If an option is wrong, or there are fewer than two files.
        NothingMatchedError: If a folder or a glob holds no weights file.
    """
    from hookscope.checkpoints.find_checkpoints import find_checkpoints
    from hookscope.commands.check.configuration.reading import read_settings
    from hookscope.commands.history.follow import follow
    from hookscope.inspection.device import choose_device
    from hookscope.inspection.given_inputs import as_sources, by_position_and_name
    from hookscope.rules.judging import judged_by
    from hookscope.rules.settings import NO_NETWORK, with_options

    images, named = by_position_and_name(images, option.input)
    inputs = as_sources(images)
    configured = read_settings(option.config, Path())
    has_inputs = bool(named) or option.input_shape is not None or not isinstance(inputs, list) or bool(inputs)
    arch = option.arch or configured.arch or (None if has_inputs else NO_NETWORK)
    checked = options.taken(options.Check, option, images=inputs, input=named, arch=arch)
    settings = replace(with_options(configured, checked), baseline=None, survey=None)
    settings, wanted = judged_by(settings, option, None)
    return follow(
        find_checkpoints([str(options.of_kind("files", options.File, file)) for file in several(files)]),
        settings,
        wanted,
        searches=option.bisect,
        device=choose_device(option.device) if option.device != "cpu" else None,
        on_progress=on_progress,
    )

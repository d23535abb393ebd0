"""The settings of a check: the inputs, the rules to judge by, and their limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hookscope.errors import UsageError
from hookscope.options import Check, InputOptions, PickleOptions, ScoreOptions, is_given
from hookscope.parameters import arg
from hookscope.results.findings import Level
from hookscope.results.noise_shapes import noise_beside_pictures, parse_noise_shapes

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from hookscope.inputs.batches import Batch


@dataclass(frozen=True, slots=True)
class RuleSettings:
    """A user's changes to a rule: the level (None for the rule's own), and limits by name."""

    level: Level | None = None
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """A user's changes to rules, by identifier, for the layers of a pattern; patterns have no position (@3)."""

    pattern: str
    rules: Mapping[str, RuleSettings]


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expected prediction for a named picture, which becomes one of the inputs.

    Attributes:
        top1: The class that must come first, by name or index; None for any.
        contains: Classes that must be among the first `k`.
        min_probability: Least probability of the first class, 0-1.
    """

    image: Path
    top1: str | int | None = None
    contains: tuple[str | int, ...] = ()
    k: int = 5
    min_probability: float | None = None


@dataclass(frozen=True)
class CheckSettings(InputOptions, ScoreOptions, PickleOptions):
    """All settings of a check: options of the same names, and settings that only a configuration has.

    Attributes:
        images: Pictures, tensor files and folders to run it on, or tensors; none means noise.
        input_shape: The noise; None for two inputs of the network's known input shape.
        seed: Seed of noise and of all random numbers.
        output_shape: Required shape of the output: sizes, "N" for the number of inputs, "*" for any; None for any.
        output_dtype: Required dtype of the output, "float32"; None for any.
        rules, layers: Changes to rules by identifier; changes for some layers, where later ones override earlier ones.
        source: Origin of the settings, for people: "configs/smoke.toml", "pyproject.toml", "defaults".
    """

    images: "tuple[Path | Image, ...] | Tensor | Batch" = ()
    data: Path | None = None
    survey: Path | None = None
    batch_size: int = 8
    seed: int = 0
    output_shape: tuple[int | str, ...] | None = None
    output_dtype: str | None = None
    loss: str = "projection"
    target: str | None = None
    mode: Literal["eval", "train"] = "eval"
    rules: Mapping[str, RuleSettings] = field(default_factory=dict)
    layers: tuple[LayerSettings, ...] = ()
    expectations: tuple[Expectation, ...] = ()
    baseline: Path | None = None
    source: str = "defaults"


def needing_a_run(option: Check) -> list[str]:
    """Return the given options that need a network to run, as the caller writes them."""
    return [arg(name) for name in _RUN_SETTINGS if name != "expectations" and is_given(option, name)]


RENEW = "Write a new one with `hookscope check --update-baseline`."
"""The remedy for a baseline that does not fit."""

NO_NETWORK = "none"
"""The value of `--arch` for checking a weights file without a network."""

# Settings that need a network to run, with their names in the configuration; all but the last are also options.
_RUN_SETTINGS = {
    "images": "[input] images",
    "data": "[input] data",
    "survey": "[input] survey",
    "input_shape": "[input] shape",
    "input": "[input] named",
    "baseline": "[baseline] file",
    "expectations": "[[expect]]",
}


def with_options(settings: CheckSettings, option: Check) -> CheckSettings:
    """Return the settings, overridden by the options that are given.

    Pictures replace the pictures or the noise of the configuration; the shape of noise replaces pictures.

    Raises:
        UsageError: If pictures and a shape of noise are given, if noise or a tensor replaces pictures with expected
            classes, or if an option needs a network but `arch` is none.
    """
    _refuse_without_network(settings, option)
    names = {setting.name for setting in fields(Check) if is_given(option, setting.name)}
    settable = {setting.name for setting in fields(CheckSettings)}
    changes: dict[str, Any] = {name: getattr(option, name) for name in names & settable}
    has_shape, has_images = "input_shape" in names, "images" in names
    shape = changes.get("input_shape", settings.input_shape)
    shapes = None if shape is None else parse_noise_shapes(shape)
    by_position = any(not shape.name for shape in shapes or ())
    changes["input_shape"] = shapes
    if by_position and has_shape:
        if has_images:
            raise UsageError(noise_beside_pictures())
        if settings.expectations:
            raise UsageError(f"{arg('input_shape')} gives noise, but {settings.source} expects classes for pictures.")
        changes["images"] = ()
    elif by_position and has_images:
        changes["input_shape"] = tuple(shape for shape in shapes or () if shape.name) or None
    if has_images:
        if isinstance(option.images, list | tuple):
            changes["images"] = tuple(Path(image) if isinstance(image, str) else image for image in option.images)
        elif settings.expectations:
            raise UsageError(f"{settings.source} expects classes for pictures: give these, not a tensor.")
    changes |= {name: Path(changes[name]) for name in ("data", "survey", "baseline") if name in changes}
    return replace(settings, **changes)


def _refuse_without_network(settings: CheckSettings, option: Check) -> None:
    """Raise UsageError if `arch` is none but an option, or a setting of the configuration, needs a network."""
    if (option.arch or settings.arch) != NO_NETWORK:
        return
    asked = needing_a_run(option)
    if not asked and not option.arch:
        asked = [f"{name} of {settings.source}" for field, name in _RUN_SETTINGS.items() if getattr(settings, field)]
    if asked:
        raise UsageError(
            f"{asked[0]} needs a network, but arch is 'none': name a network, or leave one of the two out."
        )

"""The settings of a check: the inputs, the rules to judge by, and their limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hookscope.errors import UsageError
from hookscope.results.findings import Level
from hookscope.results.noise_shapes import NOISE_BESIDE_PICTURES, NoiseShape, NoiseShapes, parse_noise_shapes

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class RuleSettings:
    """What the user has changed about a rule: its level, None for its own, and limits by name."""

    level: Level | None = None
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """What the user has changed about rules, by identifier, for the layers whose name or class name matches `pattern`.

    It is a pattern as for `--layer`, but without a position.
    """

    pattern: str
    rules: Mapping[str, RuleSettings]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a network must predict for a named picture, which becomes one of the inputs.

    Attributes:
        top1: The class that must come first, by name or index; None for any.
        contains: Classes that must be among the first `k`, by name or index.
        min_probability: Least probability of `top1`, or of the first class if that is None; 0-1. A softmax, or with
            `multi_label` a sigmoid.
    """

    image: Path
    top1: str | int | None = None
    contains: tuple[str | int, ...] = ()
    k: int = 5
    min_probability: float | None = None


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """All settings of a check.

    Those not listed are the text of the options of these names; None leaves them to the weights or the default.

    Attributes:
        arch: The network, in any form of MODEL but a weights file; None to recognise it.
        model_arguments: "NAME=VALUE" each, for the function that builds it.
        key: Where in the file the weights are; None to find them.
        allow_missing, allow_unexpected: Globs over names that the file, or the network, may lack.
        allow_global: Globs over classes and functions that a pickle may name beside plain data; none is imported.
        images: Pictures, tensor files and folders to run it on; none means noise, where no batch is given beside.
        data: Labelled pictures: a folder of class folders, a CSV or a JSON file; None for none.
        survey: Folder of a survey of the network, which rules about activations look at; None for none.
        shape: The noise, as `parse_noise_shapes` takes it; None for two inputs of the network's known input shape.
        named: "NAME=VALUE" each, as `--input`, or values by name, as the Python functions take them.
        batch_size: Inputs per forward pass.
        seed: Of noise and of everything else random.
        output_key: Which of several outputs holds the class scores; None for the only one.
        classes: Names of the classes: a file, a list, or names by index; None for those that come with the weights.
        multi_label: Whether each class is a label by itself, so that scores are read as sigmoids.
        output_shape: What the output must be: sizes, "N" for the number of inputs, "*" for any; None asks nothing.
        output_dtype: "float32" and so on; None asks nothing.
        rules, layers: Changes by identifier, and those for some layers, where a later one overrides an earlier one.
        source: Where this was read from, for people: "configs/smoke.toml", "pyproject.toml", "defaults".
    """

    arch: str | None = None
    model_arguments: tuple[str, ...] = ()
    key: str | None = None
    allow_missing: tuple[str, ...] = ()
    allow_unexpected: tuple[str, ...] = ()
    allow_global: tuple[str, ...] = ()
    images: "tuple[Path | Image, ...]" = ()
    data: Path | None = None
    survey: Path | None = None
    shape: NoiseShapes | tuple[NoiseShape, ...] | None = None
    resize: str | None = None
    crop: str | None = None
    mean: str | None = None
    std: str | None = None
    max_pixels: int | None = None
    batch_axis: str | None = None
    named: tuple[str, ...] | Mapping[str, Any] = ()
    batch_size: int = 8
    seed: int = 0
    output_key: str | None = None
    classes: str | Path | Sequence[str] | Mapping[int, str] | None = None
    multi_label: bool = False
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


# By the names of options, those of settings: how to load a network, and all of them.
_LOADING = {
    "arch": "arch",
    "model_arg": "model_arguments",
    "key": "key",
    "allow_missing": "allow_missing",
    "allow_unexpected": "allow_unexpected",
    "allow_global": "allow_global",
}
_SETTINGS = {
    **_LOADING,
    "images": "images",
    "data": "data",
    "survey": "survey",
    "input_shape": "shape",
    "input": "named",
    "output_key": "output_key",
    "classes": "classes",
    "multi_label": "multi_label",
    **{name: name for name in ("resize", "crop", "mean", "std", "max_pixels", "batch_axis")},
}


def loads_as_told(given: Mapping[str, Any]) -> bool:
    """Tell whether any of the options affects how a network is loaded."""
    return any(given.get(name) for name in _LOADING)


def runs_as_told(given: Mapping[str, Any]) -> bool:
    """Tell whether any of the options needs a network to run."""
    return any(_is_given(given.get(name)) for name in _RUN_OPTIONS)


NO_NETWORK = "none"
"""The value of `--arch` with which a weights file is judged by itself."""

# What asks for rules that need a network to run: options, and settings with what the configuration calls them.
_RUN_OPTIONS = ("images", "data", "survey", "input_shape", "input", "baseline")
_RUN_SETTINGS = {
    "images": "[input] images",
    "data": "[input] data",
    "survey": "[input] survey",
    "shape": "[input] shape",
    "named": "[input] named",
    "baseline": "[baseline] file",
    "expectations": "[[expect]]",
}


def with_options(settings: CheckSettings, given: Mapping[str, Any]) -> CheckSettings:
    """Return settings with options put over them, by the names of the command line; None and an empty list are none.

    Pictures take the place of those in the configuration and of noise, and so does a batch of tensors, which settings
    do not hold; the shape of noise takes that of pictures. Settings of the configuration that need a network are
    ignored where the options ask for none.

    Raises:
        UsageError: If pictures and a shape of noise are given, noise or a batch where the configuration has the class
        of a
            picture, pictures with one label each where each may have several, or an option that needs a network
            where there is to be none.
    """
    _refuse_without_network(settings, given)
    told = {name: given[name] for name in _SETTINGS if _is_given(given.get(name))}
    is_told = "input_shape" in told
    given_shape = told.pop("input_shape") if is_told else settings.shape
    shapes = None if given_shape is None else parse_noise_shapes(given_shape)
    by_position = any(not each.name for each in shapes or ())
    changes: dict[str, Any] = {"shape": shapes}
    if by_position and is_told:
        if "images" in told:
            raise UsageError(NOISE_BESIDE_PICTURES)
        if settings.expectations:
            raise UsageError(f"--input-shape gives noise, but {settings.source} expects classes for pictures.")
        changes["images"] = ()
    elif by_position and "images" in told:
        changes["shape"] = tuple(each for each in shapes or () if each.name) or None
    for name, value in told.items():
        changes[_SETTINGS[name]] = tuple(value) if isinstance(value, list | tuple) else value
    if "images" in told:
        are_files = isinstance(told["images"], list | tuple)
        if settings.expectations and not are_files:
            raise UsageError(f"{settings.source} expects classes for pictures: give these, not a tensor.")
        files = told["images"] if are_files else ()
        changes["images"] = tuple(Path(each) if isinstance(each, str) else each for each in files)
    changes |= {name: Path(told[name]) for name in ("data", "survey") if name in told}
    return replace(settings, **changes)


def _refuse_without_network(settings: CheckSettings, given: Mapping[str, Any]) -> None:
    """Raise UsageError for options that ask for a network, or such settings, if the same place sets `arch` to none."""
    if (given.get("arch") or settings.arch) != NO_NETWORK:
        return
    asked = [f"--{name.replace('_', '-')}" for name in _RUN_OPTIONS if _is_given(given.get(name))]
    if not asked and not given.get("arch"):
        asked = [f"{name} of {settings.source}" for field, name in _RUN_SETTINGS.items() if getattr(settings, field)]
    if asked:
        raise UsageError(
            f"{asked[0]} needs a network, but arch is 'none': name a network, or leave one of the two out."
        )


def _is_given(value: object) -> bool:
    return value is not None and not (isinstance(value, list | tuple) and not value)

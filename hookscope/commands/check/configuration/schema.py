"""The tables of a configuration file as pydantic models, and each mistake in one as a message with its line."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from hookscope.commands.check.configuration.document import Entry, inside, key_of, shown_value
from hookscope.errors import UsageError, nearest
from hookscope.hooks.patterns import parse_pattern
from hookscope.parameters import arg
from hookscope.results.noise_shapes import NoiseShape, parse_noise_shapes
from hookscope.rules import RULES
from hookscope.rules.rule import Rule
from hookscope.rules.settings import CheckSettings, Expectation, LayerSettings, RuleSettings
from hookscope.text import printable

_TENSOR_SUFFIXES = (".npy", ".pt", ".pth", ".safetensors")

# Rules that need these cannot be changed for some layers only.
_ABOUT_ALL = ("file", "network", "outputs", "expectations", "labels")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Replaces pydantic's message about a value by a description of right values."""

    text: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(
            handler(source), custom_error_type="wanted", custom_error_message=self.text
        )


def _literal(value: object) -> object:
    if isinstance(value, list):
        return [*map(_literal, value)]
    fits = abs(value) < 2**63 if isinstance(value, int) else isinstance(value, float) and math.isfinite(value)
    if not fits and not isinstance(value, str):
        raise ValueError
    return value


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise ValueError("cannot be the name of an argument.")
    return name


def _from_folder(text: str, info: ValidationInfo) -> Path:
    folder: Any = info.context
    return Path(folder, text)


def _dotted(text: str, info: ValidationInfo) -> str:
    source, colon, name = text.rpartition(":")
    return f"{_from_folder(source, info)}:{name}" if colon and source.endswith(".py") else text


def _target(value: str | int, info: ValidationInfo) -> str:
    is_file = isinstance(value, str) and value.lower().endswith(_TENSOR_SUFFIXES)
    return str(_from_folder(str(value), info) if is_file else value)


def _named_inputs(values: Mapping[str, Any], info: ValidationInfo) -> dict[str, Any]:
    return {name: _from_folder(value, info) if isinstance(value, str) else value for name, value in values.items()}


def _noise(value: Any) -> tuple[NoiseShape, ...]:
    try:
        return parse_noise_shapes(value)
    except UsageError as error:
        raise ValueError(f"is wrong: {str(error).removeprefix(arg('input_shape')).lstrip()}") from error


def _positive(value: Any) -> Any:
    if value != "none" and min(value if isinstance(value, tuple) else (value,)) <= 0:
        raise ValueError("must be above 0: it is the standard deviation of each channel.")
    return value


def _pattern(written: str) -> str:
    try:
        parsed = parse_pattern(written)
    except UsageError as error:
        raise ValueError(f"is wrong: {printable(str(error).removeprefix(arg('layer')).lstrip())}") from error
    if parsed.position is not None:
        raise ValueError(f"is '{printable(parsed.text)}', which picks by position. Name the layers instead.")
    return parsed.text


Text = Annotated[str, Field(pattern=r"^[^\x00]+$"), _Wanted("a string that is not empty")]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]  # TOML has lists
File = Annotated[Text, AfterValidator(_from_folder)]
Files = Annotated[tuple[File, ...], Field(strict=False)]
Dotted = Annotated[Text, AfterValidator(_dotted)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# An integer of any length compares with a float, but converts only up to its greatest.
Number = Annotated[float, Field(ge=-1e300, le=1e300)]
PositiveNumber = Annotated[float, Field(ge=0, le=1e300)]
ClassName = Annotated[Text | Natural, _Wanted("a class, by name or index")]
Arguments = dict[
    Annotated[str, AfterValidator(_identifier)],
    Annotated[Any, AfterValidator(_literal), _Wanted("a string, finite number, true, false, or a list of these")],
]
Pixels = Annotated[
    Count | Annotated[str, Field(pattern="^([1-9][0-9]{0,8}(x[1-9][0-9]{0,8})?|none)$")],
    _Wanted("pixels like 224, 'HEIGHTxWIDTH' like '192x256', or 'none'"),
]
ChannelValues = Number | Annotated[tuple[Number, ...], Field(strict=False, min_length=1)] | Literal["none"]
BatchAxis = Annotated[
    Annotated[int, Field(gt=-100, lt=100)] | Literal["auto", "none"], _Wanted("an axis, 'auto' or 'none'")
]
OutputSize = Annotated[
    Literal["N", "*"] | Natural, _Wanted("a size, 'N' for the number of inputs, or '*' for any size")
]
Floating = Literal["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
Whole = Literal["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
Dtype = Literal[Floating, Whole, "complex32", "complex64", "complex128"]


class _Table(BaseModel):
    """A table. Keys that it does not have are mistakes, and no value is converted to another type.

    Fields are named as the settings; None stands for what a file leaves out, for TOML has no null.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, alias_generator=key_of)

    @classmethod
    def keys(cls) -> list[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]

    def present(self) -> dict[str, Any]:
        """Return the values that are in the file, by the names of the settings."""
        return {name: value for name, value in self if name in self.model_fields_set}


class _Model(_Table):
    arch: Dotted | None = None
    model_arg: Arguments | None = Field(None, alias="arguments")
    key: Text | None = None
    allow_missing: Texts | None = None
    allow_unexpected: Texts | None = None
    allow_global: Texts | None = None
    classes: File | None = None


class _Input(_Table):
    images: Files | None = None
    data: File | None = None
    survey: File | None = None
    input_shape: Annotated[Any, AfterValidator(_noise)] | None = Field(None, alias="shape")
    resize: Pixels | None = None
    crop: Pixels | None = None
    mean: ChannelValues | None = None
    std: Annotated[ChannelValues, AfterValidator(_positive)] | None = None
    max_pixels: Count | None = None
    batch_axis: BatchAxis | None = None
    input: Annotated[Arguments, AfterValidator(_named_inputs)] | None = Field(None, alias="named")
    batch_size: Count | None = None
    seed: Natural | None = None


class _Output(_Table):
    output_shape: Annotated[tuple[OutputSize, ...], Field(strict=False)] | None = Field(None, alias="shape")
    output_dtype: Dtype | None = Field(None, alias="dtype")
    output_key: Text | None = Field(None, alias="key")
    multi_label: bool | None = None


class _Gradients(_Table):
    loss: Dotted | None = None
    target: Annotated[ClassName, AfterValidator(_target)] | None = None
    mode: Literal["eval", "train"] | None = None


class _Baseline(_Table):
    baseline: File | None = Field(None, alias="file")


class _Expect(_Table):
    image: File | None = None
    top1: ClassName | None = None
    k: Count = 5
    contains: Annotated[tuple[ClassName, ...], Field(strict=False)] = ()
    min_probability: Fraction | None = None

    @field_validator("contains")
    @classmethod
    def _fit_into_k(cls, names: tuple[str | int, ...], info: ValidationInfo) -> tuple[str | int, ...]:
        k = info.data.get("k", math.inf)
        if len(names) > k:
            raise ValueError(f"names {len(names)} classes, more than the first {k} can hold. Raise k.")
        return names

    @model_validator(mode="after")
    def _expects_something(self) -> "_Expect":
        if self.image is None:
            raise ValueError("lacks an image. Name the picture, for example image = 'cat.jpg'.")
        if self.top1 is None and self.min_probability is None and not self.contains:
            raise ValueError("expects nothing. Add top1, contains or min-probability.")
        if "k" in self.model_fields_set and not self.contains:
            raise ValueError("has k, which is how many places 'contains' looks at, but no contains. Add it.")
        return self


class _Rule(_Table):
    """The base of tables for rules: `_rule_table` adds fields for the level and the limits, with their defaults."""

    @model_validator(mode="before")
    @classmethod
    def _level_alone(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"level": value}
        if not isinstance(value, dict):
            raise PydanticCustomError("wanted", "a level ('fail', 'warn' or 'off') or a table of level and limits")
        return value


class _Layers(_Table):
    pattern: Annotated[Text, AfterValidator(_pattern)] | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> "_Layers":
        if self.pattern is None:
            raise ValueError("lacks a pattern. Name the layers, for example pattern = 'layer4.*'.")
        if self.model_fields_set == {"pattern"}:
            raise ValueError("changes no rule. Add one, for example dead-channels = 'off'.")
        return self


SECTIONS: Mapping[str, type[_Table]] = {
    "model": _Model,
    "input": _Input,
    "output": _Output,
    "gradients": _Gradients,
    "baseline": _Baseline,
}
"""The tables that hold settings one by one."""


def settings_in(top: Entry) -> CheckSettings:
    """Return the settings that the topmost table of a configuration holds.

    Raises:
        UsageError: If it holds an unknown key or a value that cannot be right.
    """
    rules = {name: _rule_table(rule) for name, rule in RULES.items()}
    tables: dict[str, Any] = {
        **SECTIONS,
        "rules": _with_rules(_Table, rules),
        "layers": list[_with_rules(_Layers, rules)],  # type: ignore[misc] # it is made here
        "expect": list[_Expect],
    }
    fields: dict[str, Any] = {name: (table, None) for name, table in tables.items()}
    model = create_model("configuration", __base__=_Table, **fields)
    try:
        sections = model.model_validate(top.value, context=top.folder).present()
    except ValidationError as error:
        raise _mistake(model, top, error.errors(include_url=False)) from None
    flat = {key: value for name in SECTIONS if name in sections for key, value in sections[name].present().items()}
    settings = CheckSettings(
        **flat,
        rules=_by_rule(sections["rules"]) if "rules" in sections else {},
        layers=tuple(LayerSettings(layer.pattern, _by_rule(layer)) for layer in sections.get("layers", ())),
        expectations=tuple(Expectation(**expected.present()) for expected in sections.get("expect", ())),
        source=top.name,
    )
    is_input = any(not shape.name for shape in flat.get("input_shape", ()))
    if is_input and (settings.images or settings.expectations):
        raise top.at("input").at("shape").wrong("shape in [input] is for noise, but pictures are named. Drop one.")
    return settings


def _with_rules(base: type[_Table], tables: Mapping[str, type[_Rule]]) -> type[_Table]:
    """Return a table with a key for each rule, whose value becomes `RuleSettings`."""
    read = _settings_for_layers if base is _Layers else _settings_of
    fields: dict[str, Any] = {
        name.replace("-", "_"): (Annotated[table, AfterValidator(read)], None) for name, table in tables.items()
    }
    return create_model(base.__name__, __base__=base, **fields)


def _rule_table(rule: Rule) -> type[_Rule]:
    fields: dict[str, Any] = {"level": (Literal["fail", "warn", "off"], rule.level)}
    for name, limit in rule.limits.items():
        fields[name] = (Fraction if "fraction" in name.split("_") else PositiveNumber, limit.default)
    return create_model(rule.identifier, __base__=_Rule, **fields)


def _settings_of(table: _Rule) -> RuleSettings:
    fields = type(table).model_fields
    limits = {name: value for name, value in table if value != fields[name].default}
    return RuleSettings(limits.pop("level", None), limits)


def _settings_for_layers(table: _Rule) -> RuleSettings:
    rule, limits = RULES[type(table).__name__], table.present()  # a default, if written, overrides [rules] too
    settings = RuleSettings(limits.pop("level", None), limits)
    if rule.needs in _ABOUT_ALL:
        raise ValueError("is about the whole checkpoint, not about layers. Set it in [rules].")
    about_all = [name for name in settings.limits if rule.needs == "gradients" or name == "min_trained_fraction"]
    if about_all:
        raise ValueError(f"has {key_of(about_all[0])}, a limit for the whole network. Set it in [rules].")
    return settings


def _by_rule(table: _Table) -> dict[str, RuleSettings]:
    settings = table.present().items()
    return {key_of(name): value for name, value in settings if name != "pattern" and value != RuleSettings()}


# Words for the errors in which pydantic names types of Python.
_CALLED = {"model_type": "a table", "dict_type": "a table", "list_type": "a list", "tuple_type": "a list"}


def _mistake(model: type[_Table], top: Entry, errors: Sequence[ErrorDetails]) -> UsageError:
    """Return the error for an unknown key, else for the innermost value that is wrong.

    For a union pydantic reports every branch, and appends the branch to the location.
    """
    for error in errors:
        if error["type"] == "extra_forbidden":
            *above, key = error["loc"]
            table, hint = _entry(top, above), _hint(str(key), _keys_at(model, above))
            return table.at(key).wrong(f"unknown key '{printable(str(key))}' {inside(table.path)}.{hint}")
    located = [(_entry(top, error["loc"]), error) for error in errors]
    entry, error = max(located, key=lambda pair: len(pair[0].path))
    if error["type"] == "value_error":
        return entry.unfit(str(error["ctx"]["error"]))
    *others, last = dict.fromkeys(_wanted(detail) for other, detail in located if other.path == entry.path)
    wanted = f"{', '.join(others)} or {last}" if others else last
    return entry.unfit(f"must be {wanted}, not {shown_value(entry.value)}.")


def _entry(top: Entry, location: Iterable[str | int]) -> Entry:
    """Return the entry at pydantic's location, which names branches of unions among the keys."""
    entry = top
    for step in location:
        is_there = step in entry.value if isinstance(entry.value, dict) else isinstance(entry.value, list)
        if is_there and (isinstance(entry.value, dict) or isinstance(step, int)):
            entry = entry.at(step)
    return entry


def _wanted(error: ErrorDetails) -> str:
    if error["type"] == "too_short":
        return "a list that is not empty"
    return _CALLED.get(error["type"]) or error["msg"].removeprefix("Input should be ")


def _keys_at(table: type[_Table], location: Sequence[str | int]) -> Sequence[str]:
    for step in (step for step in location if isinstance(step, str)):
        annotation: Any = table.model_fields[step.replace("-", "_")].annotation
        (table,) = get_args(annotation) or (annotation,)  # the type of a list's tables
    return table.keys()


def _hint(key: str, names: Sequence[str]) -> str:
    keys = {name: table.keys() for name, table in SECTIONS.items()}
    tables: Mapping[str, Iterable[str]] = {**keys, "rules": RULES, "[expect]": _Expect.keys()}
    homes = [f"[{table}]" for table, keys in tables.items() if key in keys]
    if homes:
        return f" It belongs in {' or '.join(homes)}."
    if close := nearest(key, names, count=1):
        return close
    if "forward" in names:
        return " `hookscope check --rules` lists the rules."
    return f" Known: {', '.join(map(repr, names))}."

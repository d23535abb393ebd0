"""The network and the inputs of a run in words, as every document has them: lines, facts, what reproduces it."""

from collections import Counter
from pathlib import PurePath

from hookscope.reporting.document import Level
from hookscope.reporting.terminal import inputs_words, model_words
from hookscope.results.activations import Activations, Verification
from hookscope.results.attention import Attention
from hookscope.results.attributions import Attributions, input_word
from hookscope.results.concentration import Box, Concentration
from hookscope.results.gradients import Gradients
from hookscope.results.inputs import InputRecord
from hookscope.results.network import ModelInfo
from hookscope.results.survey import Survey
from hookscope.text import counted, input_shape_text, percent_text, share_in_words, some_of

Inspected = Activations | Gradients | Attributions | Attention


def short_name(record: InputRecord) -> str:
    """Return the name of an input without its folders."""
    return PurePath(record.name).name or record.name


def input_names(inputs: tuple[InputRecord, ...]) -> list[str]:
    """Return names that differ: with the last folder where names are equal, and the index where that is not enough."""
    counts = Counter(map(short_name, inputs))
    paths = [PurePath(record.name) for record in inputs]
    names = ["/".join(path.parts[-2:]) if counts[path.name] > 1 else path.name or str(path) for path in paths]
    counts = Counter(names)
    return [f"{name}[{index}]" if counts[name] > 1 else name for index, name in enumerate(names)]


def size_words(record: InputRecord, *steps: str) -> str:
    """Return the size of an input, upright, steps of its preprocessing, and the shape that the network gets."""
    sides = (record.region.width, record.region.height) if record.size and record.region else record.size
    size = [f"{' × '.join(map(str, sides))} pixels"] if sides else []
    return ", ".join([*size, *steps, f"to the network as {input_shape_text(record.shape)}"])


def first_name(result: Inspected) -> str:
    """Return the name of the first input, and how many more there are."""
    return some_of([*dict.fromkeys(map(short_name, result.inputs))], 1)


def subject_of(result: Inspected | Survey) -> list[tuple[str, Level]]:
    """Return the network and its inputs in one line, a warning about random weights, and the self-check."""
    model = result.model
    inputs = counted(result.input_count, "input") if isinstance(result, Survey) else inputs_words(result.inputs)
    placed = ((result.dtype, ("float32", "none")), (result.device, ("cpu",)))
    unusual = [name for name, usual in placed if name not in usual]
    lines: list[tuple[str, Level]] = [
        (" · ".join((model_words(model), f"weights: {model.weights}", inputs, *unusual)), "")
    ]
    if model.random:
        lines.append(("RANDOM WEIGHTS: this network is untrained, nothing here was learned", "fail"))
    if isinstance(result, Activations | Gradients):
        compared = "output, loss and parameter gradients" if isinstance(result, Gradients) else "output"
        lines += _verified(result.verification, compared, is_edited=result.comparison is not None)
    elif isinstance(result, Survey):
        lines += _verified(result.verification, "output")
    return lines


def _verified(verification: Verification | None, compared: str, *, is_edited: bool = False) -> list[tuple[str, Level]]:
    """Return a line on whether hooks changed what the network computes, with its level; none if not looked at."""
    if verification is None:
        return []
    if verification.status == "same":
        return [(f"verified: the same {compared} as without hooks{', before the edits' * is_edited}", "good")]
    if verification.status == "not repeatable":
        return [(f"not verified: two passes without hooks differ as well ({verification.difference})", "warn")]
    return [("not the same as without hooks: see the warning", "fail")]


def model_facts(model: ModelInfo) -> list[tuple[str, str, bool]]:
    """Return which network it is: term, words, and whether they call for a look."""
    return [
        ("Model", model_words(model, *(f"{name}={value}" for name, value in model.arguments.items())), False),
        ("Parameters", f"{model.parameter_count:,}", False),
        ("Weights", model.weights, model.random),
    ]


def all_facts(result: Inspected | Survey, *more: tuple[str, str, bool]) -> list[tuple[str, str, bool]]:
    """Return which network it is, `more`, where it ran, and how long in each phase."""
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.timings.items())
    return [
        *model_facts(result.model),
        *more,
        ("Device", f"{result.device}, {result.dtype}", False),
        *([("Time", f"{sum(result.timings.values()):.2f} s ({phases})", False)] if phases else []),
    ]


def making_of(result: Inspected) -> list[tuple[str, str]]:
    """Return the checksums and the seed that reproduce a run."""
    weights = [("Weights SHA-256", result.model.sha256)] if result.model.sha256 else []
    named = [*zip(input_names(result.inputs), result.inputs, strict=True)][:8]
    inputs = [(f"SHA-256 of {name}", record.sha256) for name, record in named if record.sha256]
    return [*weights, *inputs, ("Seed", str(result.seed))]


def where_words(box: Concentration, record: InputRecord) -> str:
    """Return where half of a map lies: "in the central 33% of the crop", "in 6% of the picture, at the upper left"."""
    share, seen = share_in_words(percent_text(box.share, 0)), record.region
    if isinstance(box.region, Box):
        noun = input_word(len(box.region.size))
        return f"spread over {share} of the {noun}" if box.words == "spread out" else f"in {box.words} ({share})"
    is_cropped = seen is not None and (seen.bottom - seen.top < seen.height or seen.right - seen.left < seen.width)
    noun = "crop" if is_cropped else "picture"
    match box.words:
        case "spread out":
            return f"spread over {share} of the {noun}"
        case "centre":
            return f"in the central {share} of the {noun}"
        case words:
            return f"in {share} of the {noun}, at the {words}"

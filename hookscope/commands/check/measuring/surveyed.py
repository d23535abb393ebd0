"""The survey that rules about activations look at in place of a few inputs."""

from collections.abc import Sequence
from pathlib import Path

from hookscope.errors import UsageError
from hookscope.inspection.network import InspectedNetwork, model_digest
from hookscope.parameters import arg
from hookscope.results.activations import LayerRow
from hookscope.results.runs.reading import read_run, refusal
from hookscope.results.survey import Survey
from hookscope.text import counted, safe_text


def read_survey_of(folder: Path, subject: InspectedNetwork) -> Survey:
    """Return the survey of a network.

    Raises:
        InputError: If it cannot be read.
        UsageError: If it is of another network, or of other weights.
    """
    survey = read_run(folder).result
    if not isinstance(survey, Survey):
        raise refusal(folder, "it is not a run of `hookscope survey`", "Give the folder of one.")
    where, dtype = safe_text(str(folder)), subject.placed[1]
    if survey.dtype != dtype:
        raise UsageError(
            f"{arg('survey')} '{where}' does not fit: the network ran in {survey.dtype}, here it is {dtype}."
        )
    if survey.model_digest != model_digest(subject.network):
        of = safe_text(f"{survey.model.name}, {survey.model.weights}")
        raise UsageError(
            f"{arg('survey')} '{where}' does not fit: it was made with a different network or different weights "
            f"({of}). Survey this one first."
        )
    return survey


def survey_words(folder: Path, survey: Survey, rows: Sequence[LayerRow]) -> str:
    """Return how many rows rules judge by the survey, in a sentence."""
    surveyed = survey.by_label()
    covered = sum(row.label in surveyed for row in rows)
    others = "" if covered == len(rows) else ", the others by the inputs given"
    return (
        f"Rules about activations judge {covered:,} of {counted(len(rows), 'output')} by the survey "
        f"'{safe_text(str(folder))}' of {counted(survey.input_count, 'input')}{others}."
    )

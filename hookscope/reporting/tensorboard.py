"""Write a run for TensorBoard: one event file, everything at step 0; of a watched training everything at its step.

Tags are a metric and a label, "activation mean/layer1.0.conv1": TensorBoard groups tags by the text before the
slash.

The events are written one after the other, not through `SummaryWriter`: that writes from a separate thread, which
prints a traceback where the disk is full and keeps a last failure to itself, and it encodes every picture again.

Importing this imports tensorboard, which is an optional package.
"""

import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, count, starmap
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from hookscope.reporting.columns import NUMBERS
from hookscope.reporting.steps import LARGEST
from hookscope.results.activations import Activations
from hookscope.results.distribution import edges_of
from hookscope.results.gradients import Gradients
from hookscope.results.runs.atomic import new_token, reported, whole_file
from hookscope.results.statistics import TensorStatistics
from hookscope.results.survey import Survey
from hookscope.results.training import TrainingLog
from hookscope.text import printable

# This many neighbouring bins of a distribution are merged into one: each is then some 10% wide, like those
# of torch's own `SummaryWriter`.
_TOGETHER = 4
_RGB = 3
_MOST_SCALAR = float(np.finfo(np.float32).max)  # a larger number would be written as Inf
_MOST_LABEL = 200

# The measures of each row at a watched step.
_WATCHED_PARAMETER = ("gradient_norm", "weight_norm", "update_norm", "update_ratio")
_WATCHED_LAYER = ("mean", "std", "zero_fraction", "dead_channel_fraction", "saturated_fraction")

# A tag, and its content: a number, statistics for a histogram, a picture, or nothing.
Entry = tuple[str, float | TensorStatistics | Path | None]


def write_run(folder: Path, result: Activations | Gradients | Survey, pictures: Sequence[Path]) -> None:
    """Write scalars and histograms of every activation, gradient and parameter's gradient, the loss, and the grids.

    For a survey also dead channels and the accuracy. `folder` is made if need be. Its files stay; TensorBoard takes
    all files of one folder for one run. `pictures` are PNG files of the feature maps, or of the gradient maps. Raises
    OutputError if something cannot be written.
    """
    entries = _survey(result) if isinstance(result, Survey) else _inspection(result, pictures)
    _write_events(folder, ((0, [entry]) for entry in entries))


def write_training(folder: Path, log: TrainingLog) -> None:
    """Write the scalars of a watched training: of every step, and at watched steps of each row.

    The record has no times of steps, so all have the time of writing. Raises as `write_run`.
    """
    _write_events(folder, _steps(log))


def _write_events(folder: Path, events: Iterable[tuple[int, Sequence[Entry]]]) -> None:
    now = time.time()
    target = Path(os.path.realpath(folder), f"events.out.tfevents.{now:.0f}.{new_token()}")
    with reported(folder, "--tensorboard", "folder"), whole_file(target) as file:
        records = RecordWriter(file)
        records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        for step, entries in events:
            if values := [value for value in starmap(_value, entries) if value is not None]:
                records.write(Event(wall_time=now, step=step, summary=Summary(value=values)).SerializeToString())


def _steps(log: TrainingLog) -> Iterator[tuple[int, list[Entry]]]:
    for step in log.steps:
        yield (
            step.step,
            [
                ("training/loss", step.loss),
                ("training/gradient norm", step.gradient_norm),
                ("training/gradient norm before clipping", step.norm_before_clipping),
                ("training/skipped", float(step.skipped)),
                *((f"learning rate/group {group}", rate) for group, rate in enumerate(step.learning_rates)),
                *((f"loss/{place}", loss) for place, loss in step.losses),
            ],
        )
    names = dict.fromkeys(row.name for watched in log.watched for row in watched.parameters)
    labels = dict.fromkeys(row.label for watched in log.watched for row in watched.layers)
    parameters, layers = (dict(zip(texts, _tags(texts), strict=True)) for texts in (names, labels))
    for watched in log.watched:
        rows: list[tuple[str, Any, Sequence[str]]] = [
            *((parameters[row.name], row, _WATCHED_PARAMETER) for row in watched.parameters),
            *((layers[row.label], row, _WATCHED_LAYER) for row in watched.layers),
        ]
        yield (
            watched.step,
            [(f"{name.replace('_', ' ')}/{tag}", getattr(row, name)) for tag, row, names in rows for name in names],
        )


def _survey(result: Survey) -> Iterator[Entry]:
    for tag, row in zip(_tags(row.label for row in result.rows), result.rows, strict=True):
        yield from _statistics("activation", tag, row.activation)
        yield f"float16 headroom/{tag}", row.float16.factor if row.float16 else None
        yield f"dead channels/{tag}", float(len(row.dead_channels))
    if result.accuracy is not None:
        yield "accuracy", result.accuracy.share


def _inspection(inspection: Activations | Gradients, pictures: Sequence[Path]) -> Iterator[Entry]:
    for tag, row in zip(_tags(row.label for row in inspection.rows), inspection.rows, strict=True):
        yield from _statistics("activation", tag, row.activation)
        if row.tokens is not None:
            yield f"token norm median/{tag}", row.tokens.median
            yield f"token norm max/{tag}", row.tokens.max
    if isinstance(inspection, Gradients):
        yield from _gradients(inspection)
        group, maps = "gradient grids", inspection.gradient_maps
    else:
        group, maps = "activation grids", inspection.feature_maps
    labels = (f"{grid.label} input {grid.input_index}" for grid in maps)
    for tag, picture in zip(_tags(labels), pictures, strict=True):
        yield f"{group}/{tag}", picture


def _gradients(inspection: Gradients) -> Iterator[Entry]:
    if inspection.loss is not None:
        yield "loss", inspection.loss.value
    for group, role in (("gradient", "output"), ("input gradient", "input")):
        rows = [row for row in inspection.gradients if row.role == role]
        for tag, row in zip(_tags(row.label for row in rows), rows, strict=True):
            yield from _statistics(group, tag, row.gradient)
    for tag, parameter in zip(_tags(row.name for row in inspection.parameters), inspection.parameters, strict=True):
        yield from _statistics("parameter gradient", tag, parameter.gradient)
        yield f"parameter weight_l2/{tag}", parameter.weight_l2
        yield f"parameter ratio/{tag}", parameter.ratio


def _statistics(group: str, tag: str, statistics: TensorStatistics) -> Iterator[Entry]:
    for name in NUMBERS:
        yield f"{group} {name}/{tag}", getattr(statistics, name)
    yield f"{group}/{tag}", statistics


def _value(tag: str, content: float | TensorStatistics | Path | None) -> Summary.Value | None:
    if isinstance(content, TensorStatistics):
        histogram = _histogram(content)
        return histogram and Summary.Value(tag=tag, histo=histogram)
    if isinstance(content, Path):
        with Image.open(content) as picture:
            width, height = picture.size
        image = Summary.Image(height=height, width=width, colorspace=_RGB, encoded_image_string=content.read_bytes())
        return Summary.Value(tag=tag, image=image)
    if content is None or _MOST_SCALAR < abs(content) < math.inf:
        return None
    return Summary.Value(tag=tag, simple_value=content)


def _histogram(statistics: TensorStatistics) -> HistogramProto | None:
    """Return the finite values in bins with exact counts; None without a distribution."""
    distribution = statistics.distribution
    if distribution is None or statistics.mean is None or statistics.l2 is None:
        return None
    low, high, count = distribution.low, distribution.high, distribution.count
    if max(-low, high) > LARGEST:
        return None
    keys, _ = distribution.binned()
    nearest = np.sign(keys) * ((np.abs(keys) - 1) // _TOGETHER * _TOGETHER + 1)  # to zero, of the bins that are merged
    farthest = nearest + np.sign(keys) * (_TOGETHER - 1)
    lows, highs = zip(edges_of(nearest), edges_of(farthest), strict=True)
    edges = np.unique(np.concatenate([np.minimum(*lows), np.maximum(*highs)]).clip(low, high))
    counts = distribution.histogram(edges) if edges.size > 1 else np.array([count])  # one value: a bin of no width
    return HistogramProto(
        min=low,
        max=high,
        num=count,
        sum=statistics.mean * count,
        sum_squares=statistics.l2 * statistics.l2,
        bucket_limit=edges[1:] if edges.size > 1 else edges,
        bucket=counts,
    )


def _tags(labels: Iterable[str]) -> Iterator[str]:
    """Yield a different tag for each label, on one line and without a slash.

    A slash in a layer's name would make a separate group, and TensorBoard puts tags into addresses.
    """
    taken: set[str] = set()
    for label in labels:
        wanted = printable(label.replace("/", "∕"), _MOST_LABEL)  # noqa: RUF001 - the division slash
        further = (f"{wanted} ({number})" for number in count(2))
        name = next(name for name in chain([wanted], further) if name not in taken)
        taken.add(name)
        yield name

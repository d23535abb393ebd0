"""Write a run for TensorBoard: one event file, everything at step 0; of a watched training everything at its step.

Tags are a metric and a label, "activation mean/layer1.0.conv1": TensorBoard makes a group of what stands before the
slash.

The events are written one after the other, not through `SummaryWriter`: that writes from a separate thread, which
prints a traceback where the disk is full and keeps a last failure to itself, and it encodes every picture again.

Importing this imports torch and tensorboard, which is an optional package.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from torch.utils.tensorboard import RecordWriter

from hookscope.errors import OutputError
from hookscope.reporting.columns import NUMBERS
from hookscope.results.activations import Activations, FeatureMaps
from hookscope.results.distribution import edges_of
from hookscope.results.gradients import Gradients
from hookscope.results.runs.atomic import new_token, reason_of, whole_file
from hookscope.results.statistics import TensorStatistics
from hookscope.results.survey import Survey
from hookscope.results.training import TrainingLog
from hookscope.text import printable, safe_text

# This many neighbouring bins of a distribution are merged into one: each is then some 10% wide, like those
# of torch's own `SummaryWriter`.
_TOGETHER = 4
_STEP = 0
_RGB = 3
_MOST_LABEL = 200

# The measures of each row at a watched step.
_WATCHED_PARAMETER = ("gradient_norm", "weight_norm", "update_norm", "update_ratio")
_WATCHED_LAYER = ("mean", "std", "zero_fraction", "dead_channel_fraction", "saturated_fraction")

_LARGEST = 1e150  # beyond it a square overflows


def write_run(folder: Path, result: Activations | Gradients | Survey, pictures: Sequence[Path]) -> None:
    """Write scalars and histograms of every activation, gradient and parameter's gradient, the loss, and the grids.

    Of a survey also dead channels and the accuracy. `folder` is made if need be. What is there stays; TensorBoard takes
    all files of one folder for one run. `pictures` are PNG files of the feature maps, or of the gradient maps. Raises
    OutputError if something cannot be written.
    """
    values = _survey(result) if isinstance(result, Survey) else _values(result, pictures)
    _write_events(folder, ((_STEP, [value]) for value in values))


def _survey(result: Survey) -> Iterator[Summary.Value]:
    labels = [row.label for row in result.rows]
    yield from _statistics("activation", labels, [row.activation for row in result.rows])
    factors = [{headroom.format: headroom.factor for headroom in row.headroom}.get("float16") for row in result.rows]
    yield from _scalars("float16 headroom", labels, factors)
    yield from _scalars("dead channels", labels, [float(len(row.dead_channels)) for row in result.rows])
    if result.accuracy is not None:
        yield _scalar("accuracy", result.accuracy.share)


def write_training(folder: Path, log: TrainingLog) -> None:
    """Write the scalars of a watched training: those of every step, and at watched steps those of each row.

    Steps have no time of their own in the record, so all have that of writing. Raises as `write_run`.
    """
    _write_events(folder, _steps(log))


def _write_events(folder: Path, events: Iterable[tuple[int, Sequence[Summary.Value]]]) -> None:
    now = time.time()
    target = Path(os.path.realpath(folder))
    try:
        target.mkdir(parents=True, exist_ok=True)
        with whole_file(target / f"events.out.tfevents.{now:.0f}.{new_token()}") as file:
            records = RecordWriter(file)
            records.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
            for step, values in events:
                records.write(Event(wall_time=now, step=step, summary=Summary(value=values)).SerializeToString())
    except OSError as error:
        raise OutputError(
            f"Cannot write '{safe_text(str(folder))}': {reason_of(error)}. Name another folder with --tensorboard."
        ) from error


def _steps(log: TrainingLog) -> Iterator[tuple[int, list[Summary.Value]]]:
    for step in log.steps:
        rates = {f"learning rate/group {group}": rate for group, rate in enumerate(step.learning_rates)}
        scalars = {
            "training/loss": step.loss,
            "training/gradient norm": step.gradient_norm,
            "training/gradient norm before clipping": step.norm_before_clipping,
            "training/skipped": float(step.skipped),
            **rates,
            **{f"loss/{place}": loss for place, loss in step.losses},
        }
        yield step.step, [_scalar(tag, value) for tag, value in scalars.items() if value is not None]
    parameters = _tag_names(row.name for watched_step in log.watched for row in watched_step.parameters)
    layers = _tag_names(row.label for watched_step in log.watched for row in watched_step.layers)
    for watched in log.watched:
        values = []
        for group in _WATCHED_PARAMETER:
            values += [(group, parameters[row.name], getattr(row, group)) for row in watched.parameters]
        for group in _WATCHED_LAYER:
            values += [(group, layers[row.label], getattr(row, group)) for row in watched.layers]
        summary = [
            _scalar(f"{group.replace('_', ' ')}/{tag}", value) for group, tag, value in values if value is not None
        ]
        yield watched.step, summary


def _scalar(tag: str, value: float) -> Summary.Value:
    return Summary.Value(tag=tag, simple_value=value)


def _tag_names(names: Iterable[str]) -> dict[str, str]:
    different = list(dict.fromkeys(names))
    tags = (tag.removeprefix("/") for tag in _tags("", different))
    return dict(zip(different, tags, strict=True))


def _values(inspection: Activations | Gradients, pictures: Sequence[Path]) -> Iterator[Summary.Value]:
    rows = inspection.rows
    yield from _statistics("activation", [row.label for row in rows], [row.activation for row in rows])
    tokens = [(row.label, row.tokens) for row in rows if row.tokens is not None]
    labels = [label for label, _ in tokens]
    yield from _scalars("token norm median", labels, [norms.median for _, norms in tokens])
    yield from _scalars("token norm max", labels, [norms.max for _, norms in tokens])
    if isinstance(inspection, Gradients):
        yield from _gradients(inspection)
        yield from _grids("gradient grids", inspection.gradient_maps, pictures)
    else:
        yield from _grids("activation grids", inspection.feature_maps, pictures)


def _gradients(inspection: Gradients) -> Iterator[Summary.Value]:
    if inspection.loss is not None:
        yield _scalar("loss", inspection.loss.value)
    for group, role in (("gradient", "output"), ("input gradient", "input")):
        rows = [row for row in inspection.gradients if row.role == role]
        yield from _statistics(group, [row.label for row in rows], [row.gradient for row in rows])
    names = [row.name for row in inspection.parameters]
    yield from _statistics("parameter gradient", names, [row.gradient for row in inspection.parameters])
    yield from _scalars("parameter weight_l2", names, [row.weight_l2 for row in inspection.parameters])
    yield from _scalars("parameter ratio", names, [row.ratio for row in inspection.parameters])


def _statistics(group: str, labels: Sequence[str], rows: Sequence[TensorStatistics]) -> Iterator[Summary.Value]:
    for name in NUMBERS:
        yield from _scalars(f"{group} {name}", labels, [getattr(row, name) for row in rows])
    for tag, row in zip(_tags(group, labels), rows, strict=True):
        yield from _histogram(tag, row)


def _scalars(group: str, labels: Sequence[str], values: Sequence[float | None]) -> Iterator[Summary.Value]:
    for tag, value in zip(_tags(group, labels), values, strict=True):
        if value is not None:
            yield _scalar(tag, value)


def _histogram(tag: str, statistics: TensorStatistics) -> Iterator[Summary.Value]:
    """Yield how the finite values are distributed, in bins whose counts are exact; nothing without a distribution."""
    distribution = statistics.distribution
    if distribution is None or statistics.mean is None or statistics.l2 is None:
        return
    low, high, count = distribution.low, distribution.high, distribution.count
    if max(-low, high) > _LARGEST:
        return
    keys, _ = distribution.binned()
    nearest = np.sign(keys) * ((np.abs(keys) - 1) // _TOGETHER * _TOGETHER + 1)  # to zero, of those that make one
    farthest = nearest + np.sign(keys) * (_TOGETHER - 1)
    lows, highs = zip(edges_of(nearest), edges_of(farthest), strict=True)
    edges = np.unique(np.concatenate([np.minimum(*lows), np.maximum(*highs)]).clip(low, high))
    counts = distribution.histogram(edges) if edges.size > 1 else np.array([count])  # one value: a bin of no width
    drawn = HistogramProto(
        min=low,
        max=high,
        num=count,
        sum=statistics.mean * count,
        sum_squares=statistics.l2 * statistics.l2,
        bucket_limit=edges[1:] if edges.size > 1 else edges,
        bucket=counts,
    )
    yield Summary.Value(tag=tag, histo=drawn)


def _grids(group: str, maps: Sequence[FeatureMaps], pictures: Sequence[Path]) -> Iterator[Summary.Value]:
    labels = [f"{grid.label} input {grid.input_index}" for grid in maps]
    for tag, path in zip(_tags(group, labels), pictures, strict=True):
        with Image.open(path) as picture:
            width, height = picture.size
        image = Summary.Image(height=height, width=width, colorspace=_RGB, encoded_image_string=path.read_bytes())
        yield Summary.Value(tag=tag, image=image)


def _tags(group: str, labels: Sequence[str]) -> Iterator[str]:
    """Yield a tag for each label, no two alike, on one line, without another slash.

    A slash in a layer's name would make a separate group, and TensorBoard puts tags into addresses.
    """
    taken: set[str] = set()
    for label in labels:
        name = wanted = printable(label.replace("/", "∕"), _MOST_LABEL)  # noqa: RUF001 - the division slash
        number = 1
        while name in taken:
            number += 1
            name = f"{wanted} ({number})"
        taken.add(name)
        yield f"{group}/{name}"

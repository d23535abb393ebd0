"""Merge chunks in their order into the survey of all inputs, one in memory at a time."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hookscope.commands.check.measuring.labelled_pictures import VARYING_CLASSES
from hookscope.commands.survey.channel_totals import channel_arrays, massive
from hookscope.commands.survey.chunk_files import ChunkFiles, Sidecar, inputs_of, read_chunk
from hookscope.commands.survey.classified_inputs import ClassifiedInputs
from hookscope.commands.survey.failures import Again, explained
from hookscope.commands.survey.feature_files import FeatureParts
from hookscope.commands.survey.measure_chunk import RIGHT_UNKNOWN, ChunkRow, MeasuredChunk
from hookscope.commands.survey.pictures import input_pictures
from hookscope.commands.survey.plan import Plan
from hookscope.errors import InputError, ModelError
from hookscope.hooks.embedding_rows import merge_rows
from hookscope.hooks.patterns import CONSTANTS
from hookscope.inputs.pipeline import InputPipeline
from hookscope.inspection.batch_shapes import BatchShapes
from hookscope.inspection.rows import value_flags, with_whole_shape
from hookscope.results.activations import UncalledLayer, Verification
from hookscope.results.headroom import headroom_of
from hookscope.results.inputs import Provenance
from hookscope.results.statistics import TensorStatistics
from hookscope.results.survey import Channels, Survey, SurveyRow, Unusable, channel_counts
from hookscope.results.table_rows import TableRows
from hookscope.statistics.reducer import summarise
from hookscope.statistics.reduction import merge
from hookscope.text import plain, some_of

_OF_VALUES = ("unmeasured", "non-finite", "constant", "all zero", "dead channels")


@dataclass(slots=True)
class _MergedRow(ChunkRow):
    shapes: BatchShapes = field(default_factory=BatchShapes)


@dataclass(slots=True)
class Merging:
    """Chunks merged so far, in their order.

    Attributes:
        chunks: The number of each chunk's first input, and its files.
    """

    plan: Plan
    features: FeatureParts | None
    rows: dict[str, _MergedRow] = field(default_factory=dict)
    input_count: int = 0
    place_count: int = 0
    class_counts: Counter[int] = field(default_factory=Counter)
    nonfinite_inputs: list[str] = field(default_factory=list)
    rows_used: dict[str, NDArray[np.bool_]] = field(default_factory=dict)
    unusable: list[Unusable] = field(default_factory=list)
    uncalled: dict[str, UncalledLayer] | None = None
    warnings: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    verification: Verification | None = None
    chunks: list[tuple[int, ChunkFiles]] = field(default_factory=list)
    classified: ClassifiedInputs | None = None

    def add(self, chunk: MeasuredChunk, files: ChunkFiles, sidecar: Sidecar) -> None:
        """Add the next chunk."""
        for row in chunk.rows:
            self._add_row(row, len(chunk.inputs))
        self.class_counts.update(measured.label for measured in chunk.inputs if measured.label is not None)
        if chunk.judged is not None:
            plan = self.plan
            self.classified = self.classified or ClassifiedInputs.empty(
                plan.classes, plan.categories, plan.labels_source, chunk.judged
            )
            if chunk.judged.class_count == self.classified.class_count:
                self.classified.add(chunk.inputs, chunk.judged, self.place_count)
            else:
                self.notes[f"{RIGHT_UNKNOWN} {VARYING_CLASSES}"] = None
        self.nonfinite_inputs += [sample.name_in(self.place_count) for sample in chunk.inputs if sample.is_nonfinite]
        merge_rows(self.rows_used, chunk.rows_used)
        if self.features is not None:
            self.features.add(files, sidecar, self.place_count)
        self.chunks.append((self.place_count, files))
        self.input_count += len(chunk.inputs)
        self.place_count += chunk.place_count
        self.unusable += chunk.unusable
        if chunk.inputs:
            silent = {layer.layer: layer for layer in chunk.uncalled}
            before = silent if self.uncalled is None else self.uncalled
            self.uncalled = {name: layer for name, layer in before.items() if name in silent}
        self.warnings |= dict.fromkeys(chunk.warnings)
        self.notes |= dict.fromkeys(chunk.notes)
        self.verification = self.verification or chunk.verification

    def _add_row(self, row: ChunkRow, input_count: int) -> None:
        if row.totals is not None:
            row.totals.top.renumber(self.place_count)
            input_count = row.totals.input_count if row.totals.is_by_input else input_count  # inputs of this layer
        merged = self.rows.get(row.row.label)
        if merged is None:
            merged = self.rows[row.row.label] = _MergedRow(row.row, row.reduction, row.totals)
        else:
            flags = dict.fromkeys((*merged.row.flags, *row.row.flags))
            repeated = merged.row.duplicate_of if merged.row.duplicate_of == row.row.duplicate_of else ""
            merged.row = replace(merged.row, flags=tuple(flags), duplicate_of=repeated)
            merged.reduction = merge(merged.reduction, row.reduction)
            if merged.totals is None or row.totals is None or merged.totals.high.size != row.totals.high.size:
                merged.totals = None
            else:
                merged.totals.merge(row.totals)
        merged.shapes.add(input_count, row.reduction.shape)

    def result(self, source: InputPipeline | None = None, again: Again | None = None) -> Survey:
        """Return the survey of all chunks, and write the features.

        `source` has the inputs in memory, to draw them; `again` is None where there is no network.

        Raises:
            InputError: If none of the files could be read; ModelError: if no input could be measured.
            OutputError: If features cannot be written.
        """
        if not self.input_count:
            first = self.unusable[0].message if self.unusable else "there are none"
            unread = {unusable.exit_code for unusable in self.unusable} == {InputError.exit_code}
            raise (InputError if unread else ModelError)(f"None of the inputs could be measured: {first}")
        self._fold()
        plan = self.plan
        names = self._names()
        summaries = summarise([row.reduction for row in self.rows.values()])
        rows = tuple(
            self._row(index, row, statistics, names)
            for index, (row, statistics) in enumerate(zip(self.rows.values(), summaries, strict=True))
        )
        accuracy = failures = None
        if self.classified is not None and (whole := self.classified.accuracy()).count == self.input_count:
            accuracy = whole
            chunks = (read_chunk(files, len(plan.classes)) for _, files in self.chunks)
            judged = (chunk.judged for chunk in chunks if chunk is not None and chunk.judged is not None)
            failures = explained(self.classified, accuracy.worst, judged, again, channel_counts(rows))
        features = None if self.features is None else self.features.write(plan.model.name, plain(plan.classes))
        return Survey(
            model=plan.model,
            input_count=self.input_count,
            rows=rows,
            classes={name: self.class_counts[number] for number, name in enumerate(plan.classes)},
            accuracy=accuracy,
            failures=failures,
            uncalled=tuple((self.uncalled or {}).values()),
            unusable=tuple(self.unusable),
            nonfinite_inputs=tuple(self.nonfinite_inputs),
            tables=tuple(TableRows(name, mask.size, int(mask.sum())) for name, mask in self.rows_used.items()),
            model_digest=plan.signature.get("model", ""),
            warnings=tuple(self.warnings),
            notes=(*self.notes, *self._remarks()),
            seed=plan.seed,
            device=plan.device,
            dtype=plan.dtype,
            batch_size=plan.batch_size,
            chunk_size=plan.chunk_size,
            chunk_count=len(plan.chunk_sizes),
            features=features,
            verification=self.verification,
            provenance=Provenance(
                plan.patterns,
                plan.preprocessing,
                unusable_inputs=tuple(unusable.message for unusable in self.unusable),
                versions=plan.versions,
                threads=plan.threads,
            ),
            names=names,
            pictures=partial(input_pictures, plan.preprocessing, source),
        )

    def _fold(self) -> None:
        """Remove rows that repeat another row in all chunks, and list them in that row's `duplicates`."""
        for label, merged in [*self.rows.items()]:
            stays = self.rows.get(merged.row.duplicate_of)
            if stays is not None and stays.reduction.element_count == merged.reduction.element_count:
                stays.row = replace(stays.row, duplicates=(*stays.row.duplicates, label))
                del self.rows[label]

    def _remarks(self) -> Iterator[str]:
        apart = [row.row.label for row in self.rows.values() if row.totals is not None and not row.totals.is_by_input]
        if apart:
            rows = some_of(apart, 1)
            yield f"Axis 0 of {rows} does not count inputs: which inputs excite these channels is not known."

    def _names(self) -> dict[int, str]:
        listed = [row.totals.top.inputs.ravel() for row in self.rows.values() if row.totals is not None]
        wanted = {*np.unique(np.concatenate(listed)).tolist()} if listed else set()
        return {
            offset + sample.number: sample.name_in(offset)
            for offset, files in self.chunks
            for sample in inputs_of(files)
            if offset + sample.number in wanted
        }

    def _row(self, index: int, merged: _MergedRow, statistics: TensorStatistics, names: Mapping[int, str]) -> SurveyRow:
        row = merged.row
        fields = {(layer, call): receptive_field for layer, call, receptive_field in self.plan.fields}
        statistics = with_whole_shape(statistics, merged.shapes)
        nonzero = merged.reduction.channel_nonzero
        channels = Channels()
        is_constant = row.owner is not None and row.kind in CONSTANTS  # initial zeros are not dead channels
        totals = None if is_constant else merged.totals
        if totals is not None and nonzero is not None and nonzero.size == totals.high.size:
            arrays = channel_arrays(totals, nonzero)
            channels = Channels(arrays, names, self.plan.classes)
        flags = dict.fromkeys((*value_flags(statistics), *(flag for flag in row.flags if flag not in _OF_VALUES)))
        flags |= {"shape varies": None} if merged.shapes.varies else {}
        return SurveyRow(
            index=index,
            layer=row.layer,
            kind=row.kind,
            call=row.call,
            slot=row.slot,
            parameter_count=row.parameter_count,
            activation=statistics,
            flags=tuple(flags),
            aliases=row.aliases,
            duplicates=row.duplicates,
            source=row.source,
            channels=channels,
            headroom=headroom_of(statistics),
            massive=massive(channels.arrays, statistics.distribution),
            receptive_field=None if row.owner is not None or row.slot else fields.get((row.layer, row.call)),
        )

"""Features of all inputs as Parquet: a row for each input, a group of rows for each chunk, from NumPy."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from hookscope.commands.survey.features import FeatureDtype, FeaturePart
from hookscope.regular_files import open_regular

INPUT, CLASS = "input", "class"


class ParquetPart(NamedTuple):
    """The features of a chunk, the names of its inputs, and their classes; () without classes."""

    features: FeaturePart
    names: Sequence[str]
    classes: Sequence[str]


def write_parquet(
    file: BinaryIO, parts: Iterable[ParquetPart], shapes: Mapping[str, tuple[int, ...]], dtype: FeatureDtype
) -> None:
    """Write columns "input", "class" where there are classes, and for each output one of lists of equal length.

    Args:
        file: Open for writing.
        parts: Chunk by chunk.
        shapes: Of all features by label, inputs on axis 0.
        dtype: Of the features.
    """
    import pyarrow as pa  # noqa: PLC0415 - an optional package
    import pyarrow.parquet as pq  # noqa: PLC0415

    writer: pq.ParquetWriter | None = None
    try:
        for part in parts:
            columns = {INPUT: pa.array(part.names, pa.string())}
            columns |= {CLASS: pa.array(part.classes, pa.string())} if part.classes else {}
            with open_regular(part.features.path, follow_links=False) as source:
                for label, (begin, end) in part.features.offsets.items():
                    source.seek(begin)
                    values = np.frombuffer(source.read(end - begin), "<f4" if dtype == "float32" else "<f2")
                    size = math.prod(shapes[label][1:])
                    columns[label] = pa.FixedSizeListArray.from_arrays(pa.array(values), size)
            table = pa.table(columns)
            writer = writer or pq.ParquetWriter(file, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()

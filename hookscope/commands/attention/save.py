"""The files of `attention`: overviews, overlays on the photographs, and tables of numbers."""

from dataclasses import replace
from pathlib import Path

from hookscope.commands.attention.describe import HEADS, describe_attention
from hookscope.commands.attribute.map_files import write_maps
from hookscope.reporting.tables import csv_text, write_tables
from hookscope.results.attention import Attention
from hookscope.results.runs.directory import RunFiles


def write_attention(folder: Path, result: Attention) -> RunFiles:
    """Write the files of `hookscope attention`."""
    files = write_maps(folder, result, describe=describe_attention)
    names = write_tables(folder, {"heads.csv": csv_text(HEADS, result.rows)} if result.rows else {})
    return replace(files, listed=[*files.listed, *names])

"""The files of `attribute`: overviews, and overlays on the photographs."""

from pathlib import Path

from hookscope.commands.attribute.describe import describe_attributions
from hookscope.commands.attribute.map_files import write_maps
from hookscope.results.attributions import AttributionMap, Attributions
from hookscope.results.runs.directory import RunFiles
from hookscope.text import slug


def write_attributions(folder: Path, result: Attributions) -> RunFiles:
    """Write the files of `hookscope attribute`."""
    return write_maps(folder, result, title=_title, describe=describe_attributions)


def _title(shown: AttributionMap) -> str:
    """Return what a map's files are named after: "Egyptian-cat-layer4"."""
    return "-".join((slug(shown.target.label, 60), *([slug(shown.layer, 60)] * bool(shown.layer))))

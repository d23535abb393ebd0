"""The parts of a document. A command describes its result with them; the printers draw them and know no command.

`document_text` prints a document in a terminal, `html.document` as a page, `overviews.document` as a picture. A printer
leaves out the parts that it has no form for: tables are not drawn in a picture, nor heat maps in a terminal.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hookscope.reporting.columns import Column
from hookscope.reporting.steps import Floats, HeatMap
from hookscope.results.activations import MapSummary
from hookscope.results.attention import PatchWeights
from hookscope.results.concentration import PlacedMap
from hookscope.results.findings import Finding
from hookscope.results.grids import Grid
from hookscope.results.inputs import InputRecord, Photograph
from hookscope.results.survey import CropSheet, SurveyRow

Level = Literal["", "good", "warn", "fail", "dim"]
Colour = Literal["blue", "grey", "orange", "red"]

Facts = Sequence[tuple[str, str, bool]]
"""Term, words, and whether they call for a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingLine:
    """A finding, or the findings of one rule that began together.

    Attributes:
        where: The places in a few words.
        places: The name of each place.
        when: When the finding held: "from step 38 on".
        spans: Starts and lengths of the times at which it held, in thousandths of the time line.
    """

    level: Literal["fail", "warn"]
    rule: str
    message: str
    where: str = ""
    places: Sequence[str] = ()
    when: str = ""
    spans: Sequence[tuple[float, float]] = ()


def line_of(finding: Finding, **more: Any) -> FindingLine:
    """Return a finding with its places; `more` are further fields of the line."""
    places = [*filter(None, finding.places)]
    return FindingLine(level=finding.level, rule=finding.rule, message=finding.message, places=places, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings, the most important first.

    Attributes:
        ends: Names of the two ends of the time line that `spans` of the findings lie on; empty for none.
        all_in: The file that has all findings.
        shown_by: How a terminal shows all findings, in words; "" for `--full`.
    """

    findings: Sequence[FindingLine]
    ends: tuple[str, str] | tuple[()] = ()
    all_in: str = "result.json"
    shown_by: str = ""

    def first(self, most: int) -> Sequence[FindingLine]:
        """Return at most `most` findings, in their order: the first of each rule and level before the second of any."""
        counts: Counter[tuple[str, str]] = Counter()
        turns = []
        for place, finding in enumerate(self.findings):
            turns.append((counts[finding.rule, finding.level], place))
            counts[finding.rule, finding.level] += 1
        return [self.findings[place] for place in sorted(place for _, place in sorted(turns)[:most])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows with their declared columns.

    Attributes:
        levels: The level of each row; empty for none.
        kept: Whether each row is of interest; empty for all. A terminal prints other rows in full only, a page never.
        notable: Whether folding in a terminal keeps each row; empty to keep rows with a level.
        legends: By title of a column, the sentence below the table if a terminal has room for the column.
        is_extra: Whether a terminal shows it in full only.
        all_in: The file that has all rows.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    levels: Sequence[Level] = ()
    kept: Sequence[bool] = ()
    notable: Sequence[bool] = ()
    legends: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    is_extra: bool = False
    all_in: str = "result.json"

    def of_interest(self) -> "Table":
        """Return the table with the rows that are kept."""
        if not self.kept:
            return self
        rows, levels, notable = ([*compress(column, self.kept)] for column in (self.rows, self.levels, self.notable))
        return replace(self, rows=rows, levels=levels, notable=notable, kept=())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChart:
    """Numbers over steps.

    Attributes:
        lines: The meaning of at most three lines, with a value for each step as `as_floats` returns them; the main line
            is the last.
        marks: A meaning, and whether each step has the mark.
        is_extra: Whether it is on the page only.
    """

    title: str
    lines: Sequence[tuple[str, Floats]]
    marks: Sequence[tuple[str, NDArray[np.bool_]]] = ()
    is_extra: bool = False


@dataclass(frozen=True, slots=True)
class StepCharts:
    """Charts under each other over the same steps, which ascend, on an axis from `low` to `high`.

    `unit` is what a step is: "step", "block".
    """

    steps: NDArray[np.int64]
    low: int
    high: int
    charts: Sequence[StepChart]
    unit: str = "step"


@dataclass(frozen=True, slots=True)
class Series:
    """Values by layer, None where there is none."""

    name: str
    values: Sequence[float | None]
    colour: Colour = "blue"
    shape: Literal["line", "area", "dots"] = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthChart:
    """Values over the depth of a network.

    Attributes:
        labels: The names of the layers, or of the tensors, in order.
        series: From back to front. On a logarithmic axis, 0 is left out.
        axis: "percent" for shares, 0-1.
        marks: A meaning, its level, and whether each layer has the mark, at the foot.
        ground: A highlight's meaning, and whether each layer has it.
        letters: Text above a layer in a picture, and the layer's position.
        is_extra: Whether it is on the page only.
    """

    title: str
    labels: Sequence[str]
    series: Sequence[Series]
    axis: Literal["log", "percent"] = "log"
    marks: Sequence[tuple[str, Level, Sequence[bool]]] = ()
    ground: tuple[str, Sequence[bool]] = ("", ())
    letters: Sequence[tuple[str, int]] = ()
    is_extra: bool = False

    @property
    def has_values(self) -> bool:
        """Whether a value is neither 0 nor NaN nor Inf."""
        return any(value and math.isfinite(value) for series in self.series for value in series.values)


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars on one scale, in a picture only: the name of each, its level, its share of the scale 0-1, and words."""

    title: str
    legend: str
    bars: Sequence[tuple[str, Level, float, str]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DetailedRow:
    """A row of heat maps or of a detailed table, with what the page shows of it besides its values.

    Attributes:
        kind: Words below its name.
        type: The type that a filter finds it by.
        other_names: Further names by which a search finds it.
        flags: What is remarkable, and whether it calls for a look.
        status: Text for a row without values.
        facts: Term and words, under `facts_title`.
        grids: Grids of the run, next to the tables.
        row: What the columns of a detailed table read.
    """

    name: str
    kind: str
    type: str = ""
    other_names: Sequence[str] = ()
    flags: Sequence[tuple[str, bool]] = ()
    status: str = ""
    findings: Sequence[FindingLine] = ()
    facts_title: str = ""
    facts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    grids: Sequence[Grid] = ()
    row: Any = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DetailedTable:
    """Rows that a page filters, sorts and opens, in the place of the tables that a terminal prints.

    Attributes:
        columns: Columns other than name and flags, and whether each is visible at first.
        rows: Returns the rows.
        tables: The tables that a terminal prints.
        strips: Title of the first channels of a few grids; "" to show none.
    """

    columns: Sequence[tuple[Column, bool]]
    rows: Callable[[], Sequence[DetailedRow]]
    tables: Sequence[Table]
    strips: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeatMaps:
    """Rows of a network over steps or files, as colours.

    Attributes:
        maps: Returns the heat maps with at most so many rows and columns.
        details: Returns a row by its name.
        legend: What columns and colours mean.
        empty: Text in the place of no maps.
        all_in: The file that has all rows.
        drawn: The keys of the maps in a picture; empty for all.
    """

    maps: Callable[[int, int], Sequence[HeatMap]]
    details: Callable[[str], DetailedRow]
    legend: str
    empty: str
    all_in: str
    drawn: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputMap:
    """A map of an input.

    Attributes:
        title: What it is of: "Egyptian cat (softmax 0.40)".
        where: The layer or block that it is from; "" for none.
        facts: Term and words.
        map: Its values, and where they lie.
        number: Its number in the result.
        draw: Draws it with its input, of a width in pixels; None if it lies over a photograph.
    """

    title: str
    where: str
    facts: Sequence[tuple[str, str]]
    map: PlacedMap
    number: int
    draw: Callable[[int], Image.Image] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedInput:
    """An input with its maps.

    Attributes:
        number: Its number in the result.
        maps: Returns the maps.
        photograph: What a picture draws them over; None on a page, which reads it from the run.
        patches: The maps of every patch, by block: the page shows the map of the patch that is picked.
        remark: Why it has no map; "" if it has.
    """

    number: int
    record: InputRecord
    maps: Callable[[], Sequence[InputMap]]
    photograph: Photograph | None = None
    patches: Sequence[PatchWeights] = ()
    remark: str = ""


@dataclass(frozen=True, slots=True)
class PhotographMaps:
    """Inputs with maps over their photographs; the page shows one map at a time. A picture has one input."""

    inputs: Sequence[MappedInput]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapRow:
    """Small maps of heads, each from 0 to its own largest value: values (h, w), and whether it is marked."""

    name: str
    where: str
    maps: Sequence[NDArray[np.float32]]
    marked: Sequence[bool]


@dataclass(frozen=True, slots=True)
class SmallMaps:
    """Small maps in rows, in a picture only; `legend` is what columns and marks mean."""

    title: str
    legend: str
    rows: Sequence[MapRow]


MAP_LEGEND = "Each map has its own scale, shown below it; 0 is the darkest colour. NaN and Inf are magenta."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Maps:
    """Maps of a few layers side by side, in a picture only: the page of a run has its grids.

    Attributes:
        maps: The maps, two of each layer.
        legend: What they show, and what colours mean.
        letters: Text before the name, by `MapSummary.row`.
        names: Text above the two maps: the first takes how channels are combined, the second takes the channel and
            why it is shown.
        sequences: The `MapSummary.row` of maps of A-B that show a sequence, a channel in each row.
        with_strongest: Whether the second maps are shown.
    """

    maps: Sequence[MapSummary]
    legend: str = MAP_LEGEND
    letters: Mapping[int, str] = field(default_factory=dict)
    names: tuple[str, str] = ("{} over channels", "channel {}, {}")
    sequences: Collection[int] = ()
    with_strongest: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture of the run.

    Attributes:
        name: The layer or the input that it shows.
        caption: What it shows, in words.
        file: The file in the run directory; "" for none.
        lines: Sentences on it, which a terminal prints too.
        is_open: Whether it is visible at first.
    """

    name: str
    remark: str = ""
    caption: str
    file: str
    lines: Sequence[str] = ()
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures of the run.

    Attributes:
        legend: What they show; "" if that is clear.
        across: How many stand side by side.
        side: How wide and high they are on a page at most, in pixels.
    """

    title: str
    legend: str
    pictures: Sequence[Picture]
    across: int = 1
    side: int = 1100


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSearch:
    """Every channel of rows, to search on the page, with crops of the inputs that excite it; a picture shows three.

    Attributes:
        columns: Columns of pairs of a row and a channel.
        sheets: The crops.
        all_in: The file that has all channels.
    """

    rows: Sequence[SurveyRow]
    columns: Sequence[Column]
    sheets: Sequence[CropSheet]
    has_classes: bool
    all_in: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Lines of one kind; most readers need only the first few."""

    title: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Text:
    """Sentences, each a paragraph; `is_extra` if on the page only."""

    sentences: Sequence[str]
    is_extra: bool = False


Part = (
    Findings
    | Table
    | StepCharts
    | DepthChart
    | Bars
    | HeatMaps
    | DetailedTable
    | PhotographMaps
    | SmallMaps
    | Maps
    | Pictures
    | ChannelSearch
    | Listing
    | Text
)


@dataclass(frozen=True, slots=True)
class Section:
    """Parts under a title.

    Attributes:
        key: Its anchor on the page.
        name: Its title in the list of sections; "" for the title.
    """

    key: str
    title: str
    parts: Sequence[Part]
    name: str = ""

    @property
    def is_extra(self) -> bool:
        """Whether all parts are extra."""
        return all(getattr(part, "is_extra", False) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A result as people read it; parts and sections with nothing to show are left out.

    Attributes:
        title: What it is about; the picture has `subtitle` below it, a page has `page_title`.
        about: Lines on what was looked at, each with its level, in a terminal and a picture; a page has `facts`.
        answer: The answer in sentences, the headline first; `level` is the headline's level.
        input: Returns an input at most so many pixels wide and high, to show next to the answer in a picture; None if
            it cannot be shown.
        facts: What was looked at, and how.
        making: Terms and words that are needed to reproduce it, besides the entries of `RunRecord`.
        main: Key of the section that a keyboard user skips to; the answer if that section is left out.
        documents: Documents of the parts of a result: a terminal prints them before the whole, a page after it. On a
            page, a table's cell with the title of a document links to it.
    """

    title: str
    subtitle: str = ""
    page_title: str = ""
    about: Sequence[tuple[str, Level]] = ()
    answer: Sequence[str]
    level: Level = ""
    input: Callable[[int, int], Image.Image | None] | None = None
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    facts: Facts = ()
    sections: Sequence[Section]
    making: Sequence[tuple[str, str]] = ()
    main: str = ""
    documents: Sequence["Document"] = ()

    def __post_init__(self) -> None:
        parts = [[part for part in section.parts if _has_content(part)] for section in self.sections]
        kept = [replace(section, parts=shown) for section, shown in zip(self.sections, parts, strict=True) if shown]
        object.__setattr__(self, "sections", kept)
        if self.main not in [section.key for section in kept]:
            object.__setattr__(self, "main", "answer")

    @property
    def parts(self) -> list[Part]:
        """The parts of all sections."""
        return [part for section in self.sections for part in section.parts]

    @property
    def lines(self) -> list[Part]:
        """The parts as a terminal prints them: tables in the place of a detailed one."""
        return [line for part in self.parts for line in (part.tables if isinstance(part, DetailedTable) else [part])]


# What each part shows; other parts always have something to show.
_CONTENT: Mapping[type, str] = {
    Findings: "findings",
    Table: "rows",
    Listing: "lines",
    Text: "sentences",
    Pictures: "pictures",
    Maps: "maps",
    DepthChart: "has_values",
    Bars: "bars",
}


def _has_content(part: Part) -> bool:
    return type(part) not in _CONTENT or bool(getattr(part, _CONTENT[type(part)]))

"""The parts of a document. A command describes its result with them; the printers draw them and know no command.

`document_text` prints a document in a terminal, `html.document` as a page, `overviews.document` as a picture. A printer
leaves out the parts that it has no form for: tables are not drawn in a picture, nor heat maps in a terminal.
"""

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

Facts = Sequence[tuple[str, str, bool]]
"""Term, words, and whether they call for a look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingLine:
    """A finding, or the findings of one rule that began together.

    Attributes:
        where: The places in a few words.
        places: The name of each place, with when it ended there, in words; "" if it did not.
        when: When the finding held: "from step 38 on".
        spans: Starts and lengths of the times at which it held, of 1,000.
    """

    level: Literal["fail", "warn"]
    rule: str
    message: str
    where: str = ""
    places: Sequence[tuple[str, str]] = ()
    when: str = ""
    spans: Sequence[tuple[float, float]] = ()


def line_of(finding: Finding, **more: Any) -> FindingLine:
    """Return a finding with its places; `more` are further fields of the line."""
    places = [(place, "") for place in finding.places if place]
    return FindingLine(level=finding.level, rule=finding.rule, message=finding.message, places=places, **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings, the most important first.

    Attributes:
        ends: Names of the two ends of the time line that `spans` of the findings lie on; empty for none.
        all_in: What has all findings.
        shown_by: What shows them all in a terminal.
    """

    findings: Sequence[FindingLine]
    ends: tuple[str, str] | tuple[()] = ()
    all_in: str = "result.json"
    shown_by: str = "--full shows all"

    def first(self, most: int) -> Sequence[FindingLine]:
        """Return at most so many findings in their order, of each rule and level the first before the second of any."""
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
        kept: Whether each row is of interest; empty for all. A terminal prints the others in full only, a page never.
        notable: Whether folding in a terminal keeps each row; empty for those with a level.
        legends: By title of a column, the sentence below the table if a terminal has room for it.
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
        lines: The meaning of each line, with a value for each step as `as_floats` returns them; the main line last.
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
    colour: Literal["blue", "grey", "orange", "red"] = "blue"
    shape: Literal["line", "area", "dots"] = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthChart:
    """Values over the depth of a network.

    Attributes:
        labels: The names of the layers, or of the tensors, in order.
        series: From back to front. On a logarithmic axis, 0 is left out.
        axis: "percent" for shares, 0-1.
        marks: A meaning, its level, and whether each layer has the mark, at the foot.
        ground: A meaning, and whether each layer is pointed at.
        letters: What stands above a layer in a picture, with its position.
    """

    title: str
    labels: Sequence[str]
    series: Sequence[Series]
    axis: Literal["log", "percent"] = "log"
    marks: Sequence[tuple[str, Level, Sequence[bool]]] = ()
    ground: tuple[str, Sequence[bool]] = ("", ())
    letters: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDetails:
    """What the page shows of one row of heat maps or of a detailed table, beside its values.

    Attributes:
        status: What stands for a row without values.
        facts: Term and words, under `facts_title`.
        grids: Of the run, beside the tables.
    """

    kind: str
    status: str = ""
    findings: Sequence[FindingLine] = ()
    facts_title: str = ""
    facts: Sequence[tuple[str, str]] = ()
    tables: Sequence[Table] = ()
    grids: Sequence[Grid] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DetailedRow:
    """A row of a detailed table.

    Attributes:
        type: What a filter finds it by.
        other_names: Further names by which a search finds it.
        flags: What is remarkable, and whether it calls for a look.
        row: What the columns read.
    """

    name: str
    type: str
    other_names: Sequence[str] = ()
    flags: Sequence[tuple[str, bool]]
    row: Any
    details: RowDetails


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DetailedTable:
    """Rows that a page filters, sorts and opens, in the place of the tables that a terminal prints.

    Attributes:
        columns: Those beside name and flags, and whether each is seen at first.
        rows: Returns the rows.
        tables: Of the terminal.
        example: A search that finds rows.
        strips: What the first channels of a few grids are called; "" to show none.
    """

    columns: Sequence[tuple[Column, bool]]
    rows: Callable[[], Sequence[DetailedRow]]
    tables: Sequence[Table]
    example: str
    strips: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeatMaps:
    """Rows of a network over steps or files, as colours.

    Attributes:
        maps: Returns the heat maps with at most so many rows and columns.
        details: Returns the details of the row of a name.
        legend: What columns and colours mean.
        empty: What stands in their place if there are none.
        all_in: The file that has all rows.
        example: A search that finds rows.
        drawn: The keys of the maps in a picture; empty for all.
    """

    maps: Callable[[int, int], Sequence[HeatMap]]
    details: Callable[[str], RowDetails]
    legend: str
    empty: str
    all_in: str
    example: str
    drawn: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class InputMap:
    """A map of an input.

    Attributes:
        title: What it is of: "Egyptian cat (softmax 0.40)".
        where: The layer or block that it is from; "" for none.
        facts: Term and words.
        map: Its values, and where they lie.
        number: Of the map in its result.
        draw: Draws it with its input, so many pixels wide; None if it lies over a photograph.
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
        number: Of the input in its result.
        maps: Returns the maps.
        photograph: What a picture draws them over; None on a page, which reads it from the run.
        patches: Of blocks, the maps of every patch: on the page, a patch that is picked shows its own.
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
    """Inputs with maps over their photographs, one of which is seen at a time on the page. A picture has one input."""

    inputs: Sequence[MappedInput]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapRow:
    """Small maps side by side, each with its own scale: values (h, w), and whether it is marked."""

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
        maps: Returns the maps, two of each layer.
        legend: What they show, and what colours mean.
        letters: By `MapSummary.row`, what stands before the name.
        names: What stands above the two maps: of the first, with what all channels are combined; of the second, the
            channel and why it is shown.
        sequences: By `MapSummary.row`, those of A-B that show a sequence, a channel in each row.
        with_strongest: Whether the second maps are shown.
    """

    maps: Callable[[], Sequence[MapSummary]]
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
        lines: Sentences on it, which stand in a terminal too.
        is_open: Whether it is seen at once.
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
    """Every channel of rows, to be searched on the page, with crops of the inputs that excite it; a picture has three.

    Attributes:
        columns: Of a row with one of its channels.
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
    """Lines of one kind, of which most readers need the first few.

    Attributes:
        all_in: The file that has all lines.
    """

    title: str
    lines: Sequence[str]
    all_in: str = "result.json"


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
        name: Its title in the list of sections.
    """

    key: str
    name: str
    title: str
    parts: Sequence[Part]

    @property
    def is_extra(self) -> bool:
        """Whether a terminal shows none of it, or in full only."""
        return all(getattr(part, "is_extra", False) for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A result as people read it.

    Attributes:
        title: What it is about; the picture has `subtitle` below it.
        about: Lines on what was looked at, each with its level, in a terminal and a picture; a page has `facts`.
        answer: The answer in sentences, the headline first; `level` is that of the headline.
        took: How long it took: the end of the headline, but small in a picture.
        input: Returns an input at most so many pixels wide and high, beside the answer of a picture; None for no
            picture.
        warnings: Sentences, each with a name in front or "".
        facts: What was looked at, and how.
        making: Term and words of what is needed to reproduce it, beside what `RunRecord` holds.
        main: Key of the section that a keyboard user skips to.
        documents: Of the parts of a result of several, before what they say together in a terminal, after it on a page,
            where a table's cell with the title of one leads to it.
    """

    title: str
    subtitle: str = ""
    page_title: str
    about: Sequence[tuple[str, Level]] = ()
    answer: Sequence[str]
    took: str = ""
    level: Level
    input: Callable[[int, int], Image.Image | None] | None = None
    warnings: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    facts: Facts = ()
    sections: Sequence[Section]
    making: Sequence[tuple[str, str]] = ()
    main: str
    documents: Sequence["Document"] = ()

    @property
    def headline(self) -> str:
        """The first sentence of the answer, and how long it took."""
        return f"{self.answer[0]} · {self.took}" if self.took else self.answer[0]

    @property
    def parts(self) -> list[Part]:
        """The parts of all sections."""
        return [part for section in self.sections for part in section.parts]

    @property
    def lines(self) -> list[Part]:
        """The parts as a terminal prints them: tables in the place of a detailed one."""
        return [line for part in self.parts for line in (part.tables if isinstance(part, DetailedTable) else [part])]

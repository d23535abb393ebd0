"""The data flow of a network's blocks: which are drawn, which rows take whose tensors, and how the page shows it."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hookscope.cli.app import run
from hookscope.render.html import report_html
from hookscope.render.html.blocks import Blocks, blocks_of
from hookscope.render.html.flow import Flow, Flows, Place, flows_of
from hookscope.render.html.layers import layers_of
from hookscope.results.network import row_label
from hookscope.results.runs.reading import read_run
from hookscope.text import safe_text
from tests.render.html_page import Page
from tests.render.stored import HOSTILE_NAMES, hostile_rows, operation, row, write_run

DEEP = ".".join("x" * 24)

NETWORK = """
import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = F.relu(self.conv1(x))
        return F.relu(x + self.conv2(y))


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x):
        return x * torch.sigmoid(x.mean((2, 3), keepdim=True) * self.scale)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1)
        self.body = nn.Sequential(Residual(), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), Residual())
        self.gate = Gate()
        self.fc = nn.Linear(8, 2)

    def forward(self, x):
        x = self.stem(x)
        y = self.gate(self.body(x))
        return self.fc(torch.cat([x, y], 1).mean((2, 3)))


def build():
    torch.manual_seed(0)
    return Net().eval()
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of the network above, with operations."""
    folder = tmp_path_factory.mktemp("flow")
    (folder / "net.py").write_text(NETWORK, "utf-8")
    np.save(folder / "x.npy", np.random.default_rng(0).normal(size=(1, 3, 6, 6)).astype(np.float32))
    command = ["activations", f"{folder / 'net.py'}:build", str(folder / "x.npy"), "--ops", "--no-grids", "--quiet"]
    assert run([*command, "--out", str(folder / "run")]) == 0
    return folder / "run"


def flows_in(folder: Path) -> Flows:
    return flows_of(layers_of(read_run(folder)))


def stored(folder: Path, *rows: dict[str, Any]) -> Flows:
    return flows_in(write_run(folder / "run", rows))


def told(flow: Flow) -> list[tuple[str, str, list[str]]]:
    """Return role, name and the names of what is taken, of each place."""
    names = [", ".join(name.text for name in place.names) for place in flow.places]
    return [(p.role, name, [names[each] for each in p.sources]) for p, name in zip(flow.places, names, strict=True)]


# --- blocks and places


def test_a_residual_block_shows_both_arms_of_its_sum(network: Path) -> None:
    flows = flows_in(network)
    assert list(flows.blocks) == ["", "gate", "body.0", "body.2"]
    assert told(flows.blocks["body.0"]) == [
        ("input", "stem", []),
        ("module", "conv1", ["stem"]),
        ("operation", "relu", ["conv1"]),
        ("module", "conv2", ["relu"]),
        ("operation", "add", ["stem", "conv2"]),
        ("operation", "relu#1", ["add"]),
        ("output", "body.1.0", ["relu#1"]),
    ]
    assert [(wire.source, wire.takers) for wire in flows.blocks["body.0"].wiring.wires] == [(0, (4,))]
    assert told(flows.blocks["body.2"])[-1] == ("output", "gate", ["relu#1"])


def test_the_network_shows_its_blocks_as_places_and_opens_other_modules(network: Path) -> None:
    root = flows_in(network).blocks[""]
    assert told(root) == [
        ("input", "input", []),
        ("module", "stem", ["input"]),
        ("block", "body.0", ["stem"]),
        ("module", "body.1.0", ["body.0"]),
        ("module", "body.1.1", ["body.1.0"]),
        ("block", "body.2", ["body.1.1"]),
        ("block", "gate", ["body.2"]),
        ("operation", "cat", ["stem", "gate"]),
        ("operation", "mean", ["cat"]),
        ("module", "fc", ["mean"]),
    ]
    block, name = root.places[2], root.places[2].names[0]
    assert (name.href, block.about, block.shape) == ("#flow-2", "5 rows", "1x4x6x6")
    assert root.places[7].about == "net.py:38"
    assert root.description.startswith("stem takes input; body.0 takes stem; body.1.0 takes body.0; ")
    assert "; cat takes stem, gate; mean takes cat; " in root.description


def test_parameters_are_words_and_a_modules_row_does_not_repeat_what_is_inside_it(network: Path) -> None:
    gate = flows_in(network).blocks["gate"]
    assert told(gate) == [
        ("input", "body.2:relu#1", []),
        ("operation", "mean", ["body.2:relu#1"]),
        ("operation", "mul", ["mean"]),
        ("operation", "sigmoid", ["mul"]),
        ("operation", "mul#1", ["body.2:relu#1", "sigmoid"]),
        ("output", "(model):cat", ["mul#1"]),
    ]
    assert gate.places[2].about == "net.py:24 · with scale"


def test_each_row_has_one_place_and_each_layer_its_drawing(network: Path) -> None:
    layers = layers_of(read_run(network))
    flows = flows_of(layers)
    rows = [place for flow in flows.blocks.values() for place in flow.places if place.role in ("module", "operation")]
    labels = [place.names[0].label for place in rows]
    assert sorted(labels) == sorted(layer.label for layer in layers if layer.label not in ("gate", "(model)"))
    of = {layer.label: flow.block for layer, flow in zip(layers, flows.of_layers, strict=True) if flow}
    assert of["body.0:add"] == "body.0"
    assert of["body.1.0"] == of["stem"] == of["(model):cat"] == ""
    assert of["gate"] == of["gate:mul"] == "gate"


def test_a_dense_block_takes_all_outputs_before(tmp_path: Path) -> None:
    names = ["stem", *(f"dense.{number}.conv" for number in range(3))]
    rows = [row(0, "stem", inputs=["input"])]
    for number in range(3):
        rows.append(operation(len(rows), f"dense.{number}", "cat", inputs=names[: number + 1]))
        rows.append(row(len(rows), names[number + 1], inputs=[f"dense.{number}:cat"]))
    rows.append(operation(len(rows), "dense", "cat", inputs=names))
    flows = stored(tmp_path, *rows)
    assert told(flows.blocks["dense"]) == [
        ("input", "stem", []),
        ("block", "0", ["stem"]),
        ("block", "1", ["stem", "0"]),
        ("block", "2", ["stem", "0", "1"]),
        ("operation", "cat", ["stem", "0", "1", "2"]),
    ]
    assert told(flows.blocks["dense.1"]) == [
        ("input", "stem", []),
        ("input", "0.conv", []),
        ("operation", "cat", ["stem", "0.conv"]),
        ("module", "conv", ["cat"]),
        ("output", "2, dense:cat", ["conv"]),
    ]


def test_a_sum_that_has_no_row_is_seen_where_its_arms_arrive(tmp_path: Path) -> None:
    rows = [
        row(0, "stem", inputs=["input"]),
        row(1, "block.conv", inputs=["stem"]),
        row(2, "block.relu", "ReLU", inputs=["block.conv", "stem"]),
        row(3, "fc", inputs=["block.relu"]),
    ]
    assert told(stored(tmp_path, *rows).blocks["block"]) == [
        ("input", "stem", []),
        ("module", "conv", ["stem"]),
        ("module", "relu", ["stem", "conv"]),
        ("output", "fc", ["relu"]),
    ]


def test_a_block_that_is_called_again_later_is_two_places_of_one_drawing(tmp_path: Path) -> None:
    rows = []
    for call, source in enumerate(("input", "other")):
        after = "#1" if call else ""
        rows += [
            row(len(rows), "block.conv", call=call, inputs=[source]),
            operation(len(rows) + 1, "block", "add", call=call, inputs=[source, f"block.conv{after}"]),
        ]
        rows += [] if call else [row(2, "other", inputs=["block:add"])]
    flows = stored(tmp_path, *rows)
    assert told(flows.blocks[""]) == [
        ("input", "input", []),
        ("block", "block", ["input"]),
        ("module", "other", ["block"]),
        ("block", "block", ["other"]),
    ]
    assert told(flows.blocks["block"]) == [
        ("input", "input", []),
        ("input", "other", []),
        ("module", "conv", ["input"]),
        ("operation", "add", ["input", "conv"]),
        ("module", "conv#1", ["other"]),
        ("operation", "add#1", ["other", "conv#1"]),
        ("output", "other", ["add"]),
    ]


def test_outputs_name_a_few_takers_and_count_the_others(tmp_path: Path) -> None:
    rows = [row(0, "block.conv", inputs=["input"]), operation(1, "block", "add", inputs=["input", "block.conv"])]
    rows += [row(2 + number, f"head{number}", inputs=["block:add"]) for number in range(5)]
    last = stored(tmp_path, *rows).blocks["block"].places[-1]
    assert ([name.text for name in last.names], last.about) == (["head0", "head1", "head2"], "and 2 others")
    assert [name.href for name in last.names] == ["#layer=head0", "#layer=head1", "#layer=head2"]


def test_flags_are_counted_where_their_rows_are(tmp_path: Path) -> None:
    rows = [
        row(0, "block.conv", inputs=["input"], flags=["dead channels"]),
        operation(1, "block", "add", inputs=["input", "block.conv"], flags=["non-finite", "in-place"]),
        row(2, "fc", inputs=["block:add"]),
    ]
    flows = stored(tmp_path, *rows)
    assert [place.flagged for place in flows.blocks["block"].places] == [0, 1, 1, 0]
    assert [place.flagged for place in flows.blocks[""].places] == [0, 2, 0]
    assert [(role, flagged) for role, flagged, _ in flows.blocks[""].marks] == [
        ("input", False),
        ("block", True),
        ("module", False),
    ]


def test_rows_that_were_folded_into_another_are_that_other(tmp_path: Path) -> None:
    rows = [row(0, "conv", inputs=["input"], also=["dropout"]), row(1, "fc", inputs=["dropout", "conv"])]
    assert told(stored(tmp_path, *rows).blocks[""])[-1] == ("module", "fc", ["conv"])


def test_without_known_inputs_there_is_no_drawing(tmp_path: Path) -> None:
    assert stored(tmp_path / "a", row(0, "a.conv"), row(1, "a.relu")) == Flows({}, [None, None])
    assert stored(tmp_path / "b", row(0, "a.conv", inputs=[""])).blocks == {}
    page = report_html(read_run(tmp_path / "a" / "run"))
    assert 'class="flow"' not in page
    assert "<div data-flow" not in page


@pytest.mark.parametrize(
    "rows",
    [
        [row(0, "a", inputs=["a", "b"]), row(1, "b", inputs=["a", "b", "a"])],
        [row(0, "a", inputs=["input"]), row(1, "a", inputs=["a", "input"])],
        [row(0, "..b", inputs=["input"]), row(1, "..c", inputs=["..b", "input"]), row(2, "", inputs=["..c"])],
        [row(0, ".".join("x" * 5000), inputs=["input"]), row(1, ".".join("x" * 4999), inputs=["input", "x"])],
        [
            operation(0, ".", "add", inputs=["input", "input[1]"]),
            operation(1, ".", "add", call=1, inputs=[".:add", "input"]),
        ],
        [operation(0, "a", "cat", inputs=[""]), row(1, "a.b", inputs=[""]), row(2, "c", inputs=["input"])],
        [
            row(0, f"{DEEP}.{DEEP}.conv", inputs=["input"]),
            row(1, f"{DEEP}.bn", inputs=["input", f"{DEEP}.{DEEP}.conv"]),
            row(2, f"{DEEP}.relu", inputs=["input", f"{DEEP}.{DEEP}.conv"]),
        ],
        [
            row(0, "a.:add.conv", inputs=["input"]),
            operation(1, "a", "add", inputs=["a.:add.conv", "input"]),
            operation(2, "a.:add", "add", inputs=["a.:add.conv", "a:add"]),
            row(3, "a.:add.relu", inputs=["a.:add:add"]),
        ],
        [
            operation(0, "a", "add", inputs=["input", "b"]),
            row(1, "a", inputs=["a:add"]),
            row(2, "b", inputs=["a", "a:add"]),
        ],
    ],
)
@pytest.mark.sample("rows0", "rows5", "rows8")
def test_what_no_network_does_is_drawn_from_the_top_down_all_the_same(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    flows = stored(tmp_path, *rows)
    for flow in flows.blocks.values():
        assert all(source < number for number, place in enumerate(flow.places) for source in place.sources)
    page = report_html(read_run(tmp_path / "run"))
    assert led_to(page) <= drawings(page)


@st.composite
def runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Draw rows in nested modules, each taking tensors of rows before it."""
    rows: list[dict[str, Any]] = []
    labels = ["input"]
    calls: dict[str, int] = defaultdict(int)
    for index in range(draw(st.integers(1, 12))):
        module = ".".join(draw(st.lists(st.sampled_from("abc"), max_size=3)))
        inputs = draw(st.lists(st.sampled_from(labels), min_size=1, max_size=3))
        made = operation(index, module, "add", inputs=inputs)
        if module and draw(st.booleans()):
            made = row(index, module, inputs=inputs)
        made["call"] = calls[made["layer"]]
        calls[made["layer"]] += 1
        labels.append(row_label(made["layer"], made["call"], ""))
        rows.append(made)
    return rows


def belongs(label: str, place: Place) -> bool:
    """Tell whether a row is one of a place's."""
    name = place.names[0].label
    return name == label or (
        place.role == "block" and re.match(rf"{re.escape(name)}[.:#]|{re.escape(name)}$", label) is not None
    )


def block_has(blocks: Blocks, block: str, number: int, source: int | str) -> bool:
    """Tell whether both ends of a line are inside a block; the network's inputs are in none of those inside it."""
    return number in blocks.inside[block] and (source in blocks.inside[block] if isinstance(source, int) else not block)


@given(runs())
def test_every_tensor_that_a_row_takes_is_a_line_in_the_innermost_block_around_both(rows: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        layers = layers_of(read_run(write_run(Path(folder) / "run", rows)))
    flows = flows_of(layers).blocks
    blocks = blocks_of([layer.row for layer in layers])
    for number in blocks.inside[""]:
        for source in blocks.sources[number]:
            both = [each for each in blocks.inside if block_has(blocks, each, number, source)]
            inner = blocks.next_inwards(number, both[-1])
            if inner and isinstance(source, int) and blocks.next_inwards(source, both[-1]) == inner:
                continue  # the output of a block, computed from what is inside it
            label = layers[source].label if isinstance(source, int) else source
            places = flows[both[-1]].places
            takers = [place for place in places if belongs(layers[number].label, place)]
            assert any(belongs(label, places[each]) for place in takers for each in place.sources)


# --- the page


def led_to(page: str) -> set[str]:
    """Return the numbers of the drawings that the page shows beside layers or leads to."""
    return set(re.findall(r'(?:<div data-flow="|href="#flow-)(\d+)"', page))


def drawings(page: str) -> set[str]:
    """Return the numbers of the drawings in the tree, where each is once."""
    found = re.findall(r'<figure class="flow" id="flow-(\d+)"', page)
    assert len(set(found)) == len(found)
    return set(found)


def shown(page: str) -> Iterable[Sequence[str]]:
    """Return the text of each figure's places."""
    for figure in re.findall(r'<figure class="flow".*?</figure>', page, re.DOTALL):
        yield [element.text for element in Page(figure).elements if element.tag == "li"]


def test_the_page_draws_each_block_in_the_tree_and_names_it_beside_its_layers(network: Path) -> None:
    page = report_html(read_run(network))
    root, *_ = shown(page)
    assert root[2] == "body.0 5 rows 1x4x6x6"
    elements = Page(page).elements
    assert sorted(each.attributes["id"] or "" for each in elements if each.attributes.get("class") == "flow") == [
        f"flow-{number}" for number in range(4)
    ]
    assert "<title>Data flow of body.0</title><desc>conv1 takes stem; relu takes conv1; conv2 takes relu; " in page
    assert page.count('data-flow="2"') == 5


def test_hostile_names_are_text_in_a_drawing(tmp_path: Path) -> None:
    page = report_html(read_run(write_run(tmp_path / "run", hostile_rows())))
    Page(page).assert_self_contained()
    assert led_to(page) == drawings(page)
    texts = [text for figure in shown(page) for text in figure]
    for name in HOSTILE_NAMES:
        assert any(" ".join(safe_text(name).split()) in text for text in texts)

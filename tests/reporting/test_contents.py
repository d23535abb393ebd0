import json
from dataclasses import asdict

import pytest

from hookscope.commands.conversion import summary
from hookscope.results.contents import CheckpointContents, StoredEntry, StoredPart, StoredTensor
from tests.reporting.conftest import printed


def contents(*tensors: StoredTensor, part: StoredPart | None = None, **values: object) -> CheckpointContents:
    expected: dict[str, object] = {
        "name": "w.pt",
        "kind": "torch",
        "producer": "torch.save, zip format 3",
        "byte_count": 5_000,
        "parts": (part or StoredPart("", is_weights=True, tensors=tensors),),
    }
    return CheckpointContents(**{**expected, **values})  # type: ignore[arg-type]


def stored(key: str, byte_count: int = 16, nans: int | None = 0, infs: int | None = 0, tied: str = "") -> StoredTensor:
    return StoredTensor(key, (2, 2), "float32", byte_count, nans, infs, tied, 1, -0.5, 1234567.0, 0.25, 1e-6)


def lines(of: CheckpointContents, *, width: int = 80, full: bool = False) -> list[str]:
    return [line.rstrip() for line in printed(summary(of, width=width, full=full), width).splitlines()]


def test_the_answer_comes_first_then_what_the_file_is_and_only_facts_that_there_are() -> None:
    assert lines(contents(stored("a")), width=160)[:5] == [
        "1 tensor · 16 B · float32 · all values are finite",
        "w.pt · 5.00 kB",
        "  torch · torch.save, zip format 3",
        "Weights",
        "  fits no network known to hookscope; other commands load it into your network with --arch net.py:build",
    ]
    near = StoredPart("", True, (stored("a"),), nearest="one: 2 of 3")
    assert (
        "  fits no network known to hookscope; nearest: one: 2 of 3; other" in lines(contents(part=near), width=160)[4]
    )
    part = StoredPart("ema", True, (stored("a"),), prefix="module", architectures=("one: …", "two: …"))
    more = contents(part=part, metadata={"format": "pt"})
    assert lines(more)[3:8] == [
        "  metadata format: pt",
        "Weights at ema",
        "  prefix of every name: module",
        "  fits one: …",
        "  fits two: …",
    ]


def test_what_is_not_finite_or_tied_or_not_counted_is_said_beside_the_tensor() -> None:
    tensors = [
        stored("plain"),
        stored("bad", nans=2, infs=1),
        stored("tied", tied="plain"),
        stored("far", 16, None, None),
    ]
    shown = {line.split()[0]: line for line in lines(contents(*tensors), width=140) if "2x2" in line}
    assert {name: line.partition("25.0%")[2].strip() for name, line in shown.items()} == {
        "plain": "",
        "bad": "2 NaN, 1 Inf",
        "tied": "shares storage with plain",
        "far": "not counted",
    }


def test_statistics_stand_in_columns_whole_numbers_as_they_are() -> None:
    count = StoredTensor("steps", (), "int64", 8, 0, 0, "", 0, 123456, 123456, 123456.0, 0.0)
    empty = StoredTensor("empty", (0, 3), "float32", 0, 0, 0, "", 0)
    text = [line.split() for line in lines(contents(stored("a"), count, empty), width=120)]
    table = text[next(at for at, words in enumerate(text) if words[0] == "tensor") :]
    assert table[0] == ["tensor", "shape", "dtype", "size", "mean", "std", "min", "max", "zeros"]
    assert table[2] == ["a", "2x2", "float32", "16", "B", "0.2500", "1.000e-6", "-0.5000", "1.235e6", "25.0%"]
    assert table[3] == ["steps", "scalar", "int64", "8", "B", "1.235e5", "0", "123456", "123456", "0%"]
    assert table[4] == ["empty", "0x3", "float32", "0", "-", "-", "-", "-", "-"]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_long_names_leave_room_for_what_is_known_of_the_values(width: int) -> None:
    names = [f"encoder.layers.{at}.self_attention.output_projection.weight" for at in range(3)]
    text = lines(contents(*map(stored, names), stored(names[0] + "x", nans=7)), width=width)
    assert max(map(len, text)) <= width
    header = next(line.split() for line in text if line.startswith("tensor"))
    wanted = {60: {"min", "max"}, 80: {"min", "max", "std", "zeros"}, 100: {"min", "max", "std", "zeros"}}
    assert set(header) >= wanted.get(width, {"mean", "std", "min", "max", "zeros", "size", "dtype"}) | {"shape"}
    assert sum("7 NaN" in line for line in text) == 1


def test_several_sets_of_weights_have_a_table_each_and_of_the_rest_only_what_is_not_finite() -> None:
    model = StoredPart("model", True, (stored("w", 8),), architectures=("one: fits",))
    ema = StoredPart("ema", True, (stored("w", 8), stored("b", 8, tied="model.w")))
    state = tuple(stored(f"state.{at}", 8, nans=at == 3) for at in range(5))
    of = contents(
        parts=(model, ema, StoredPart("optimizer", False, state), StoredPart("", False, (stored("best", 8),)))
    )
    text = lines(of, width=100)
    assert [line for line in text if line.startswith("Weights at")] == ["Weights at model", "Weights at ema"]
    assert sum(line.startswith("tensor ") for line in text) == 3
    assert [line.split()[0] for line in text if line.startswith("state.")] == ["state.3"]
    assert "optimizer: 5 tensors · 40 B · float32 · NaN or Inf: 1 value" in text
    assert "beside these: 1 tensor · 8 B · float32 · all values are finite" in text
    assert text[0] == "9 tensors · 64 B · float32 · NaN or Inf: 1 value"
    full = lines(of, width=100, full=True)
    assert sum(line.startswith("state.") for line in full) == 5


@pytest.mark.parametrize(
    ("tensors", "total"),
    [
        ([stored("a")], "1 tensor · 16 B · float32 · all values are finite"),
        ([stored("a"), stored("b", tied="a")], "2 tensors · 16 B · float32 · all values are finite"),
        # the first of those that share a storage may be the smaller part of it
        (
            [stored("a", 8), stored("b", 24, tied="a"), stored("c")],
            "3 tensors · 40 B · float32 · all values are finite",
        ),
        ([stored("a", nans=3, infs=4)], "1 tensor · 16 B · float32 · NaN or Inf: 7 values"),
        ([stored("a", nans=None, infs=None)], "1 tensor · 16 B · float32 · values of 1 tensor not counted"),
        (
            [stored("a", nans=None, infs=None), stored("b", nans=1)],
            "2 tensors · 32 B · float32 · NaN or Inf: 1 value; values of 1 tensor not counted",
        ),
    ],
)
def test_the_first_line_sums_up(tensors: list[StoredTensor], total: str) -> None:
    assert lines(contents(*tensors), width=200)[0] == total


def test_other_entries_are_listed_the_first_ten_unless_asked_for() -> None:
    entries = tuple(StoredEntry(f"entry{number}", "int", str(number)) for number in range(25))
    folded, full = (lines(contents(stored("a"), entries=entries), full=full) for full in (False, True))
    assert sum("entry" in line for line in full) == 25
    assert sum(": int, " in line for line in folded) == 10
    assert "  … 15 more, --full shows all" in folded


def test_no_tensors_at_all_is_said() -> None:
    assert "No tensors." in lines(contents())


def test_long_text_is_cut() -> None:
    entry = StoredEntry("x" * 500, "dict", "y" * 500)
    text = "".join(lines(contents(stored("a"), entries=(entry,), metadata={"z" * 500: "z" * 500})))
    assert not [letter for letter in "xyz" if letter * 201 in text.replace(" ", "")]


def test_json_holds_everything_in_full() -> None:
    part = StoredPart("ema", True, (stored("a", nans=1, infs=2),), "", ("one",))
    whole = contents(part=part, metadata={"k": "v" * 5000})
    document, expected = json.loads(whole.to_json()), json.loads(json.dumps(asdict(whole)))
    expected["parts"][0]["nonfinite_count"] = 3
    assert document == {**expected, "schema_version": 3, "nonfinite_count": 3}

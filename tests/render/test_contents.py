import json

import pytest

from hookscope.render.contents import bytes_text, contents_report, contents_to_json
from hookscope.results import CheckpointContents, StoredEntry, StoredTensor
from tests.render.conftest import HOSTILE_NAME, printed


def contents(*tensors: StoredTensor, **values: object) -> CheckpointContents:
    known: dict[str, object] = {
        "name": "w.pt",
        "kind": "torch",
        "producer": "torch.save, zip format 3",
        "byte_count": 5_000,
        "weights_key": "",
    }
    return CheckpointContents(tensors=tensors, **{**known, **values})  # type: ignore[arg-type]


def stored(key: str, byte_count: int = 16, nans: int | None = 0, infs: int | None = 0, tied: str = "") -> StoredTensor:
    return StoredTensor(key, (2, 2), "float32", byte_count, nans, infs, tied)


def lines(of: CheckpointContents, *, width: int = 80, full: bool = False) -> list[str]:
    return [line.rstrip() for line in printed(contents_report(of, width=width, full=full), width).splitlines()]


def test_facts_come_first_and_only_those_that_there_are() -> None:
    assert lines(contents(stored("a")))[:3] == [
        "file w.pt · 4.9 KiB",
        "kind torch · torch.save, zip format 3",
        "fits none that hookscope knows",
    ]
    more = contents(
        stored("a"), weights_key="ema", prefix="module", metadata={"format": "pt"}, architectures=("one: …", "two: …")
    )
    assert [line.split() for line in lines(more)[2:7]] == [
        ["weights", "at", "ema"],
        ["prefix", "module"],
        ["metadata", "format", "pt"],
        ["fits", "one:", "…"],
        ["two:", "…"],
    ]


def test_what_is_not_finite_or_tied_or_not_counted_is_said_beside_the_tensor() -> None:
    tensors = [
        stored("plain"),
        stored("bad", nans=2, infs=1),
        stored("tied", tied="plain"),
        stored("far", 16, None, None),
    ]
    shown = {line.split()[0]: line.split()[5:] for line in lines(contents(*tensors)) if "2x2" in line}
    assert shown == {
        "plain": [],
        "bad": ["2", "NaN,", "1", "Inf"],
        "tied": ["shares", "storage", "with", "plain"],
        "far": ["not", "counted"],
    }


@pytest.mark.parametrize(
    ("tensors", "summary"),
    [
        ([stored("a")], "1 tensor · 16 bytes · float32 · all values are finite"),
        ([stored("a"), stored("b", tied="a")], "2 tensors · 16 bytes · float32 · all values are finite"),
        # the first of those that share a storage may be the smaller part of it
        (
            [stored("a", 8), stored("b", 24, tied="a"), stored("c")],
            "3 tensors · 40 bytes · float32 · all values are finite",
        ),
        ([stored("a", nans=3, infs=4)], "1 tensor · 16 bytes · float32 · NaN or Inf: 7 values"),
        ([stored("a", nans=None, infs=None)], "1 tensor · 16 bytes · float32 · values of 1 tensor not counted"),
        (
            [stored("a", nans=None, infs=None), stored("b", nans=1)],
            "2 tensors · 32 bytes · float32 · NaN or Inf: 1 value; values of 1 tensor not counted",
        ),
    ],
)
def test_the_last_line_sums_up(tensors: list[StoredTensor], summary: str) -> None:
    assert " ".join(lines(contents(*tensors), width=200)[-1:]) == summary


def test_other_entries_are_listed_the_first_twenty_unless_asked_for() -> None:
    entries = tuple(StoredEntry(f"entry{number}", "int", str(number)) for number in range(25))
    folded, full = (lines(contents(stored("a"), entries=entries), full=full) for full in (False, True))
    assert sum("entry" in line for line in full) == 25
    assert sum(" int " in line for line in folded) == 20
    assert "  … 5 more entries, --full shows all" in folded


def test_no_tensors_at_all_is_said() -> None:
    assert "No tensors." in lines(contents())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_hostile_text_stays_harmless_and_inside_the_terminal(width: int) -> None:
    hostile = contents(
        stored(HOSTILE_NAME, nans=1, tied=HOSTILE_NAME + "x" * 100),
        name=HOSTILE_NAME,
        entries=(StoredEntry(HOSTILE_NAME, HOSTILE_NAME, "y" * 500),),
        metadata={HOSTILE_NAME: "z" * 5000},
        prefix=HOSTILE_NAME,
    )
    text = "\n".join(lines(hostile, width=width))
    assert max(map(len, text.splitlines())) <= width
    assert not {"\x1b", "\u202e", "\ud800"} & set(text)
    assert "z" * 300 not in text.replace("\n", "").replace(" ", "")


def test_json_holds_everything_in_full() -> None:
    document = json.loads(contents_to_json(contents(stored("a", nans=1, infs=2), metadata={"k": "v" * 5000})))
    assert document["tensors"] == [
        {
            "key": "a",
            "shape": [2, 2],
            "dtype": "float32",
            "byte_count": 16,
            "nan_count": 1,
            "inf_count": 2,
            "tied_to": "",
        }
    ]
    assert (document["schema_version"], document["nonfinite_count"]) == (1, 3)
    assert document["metadata"] == {"k": "v" * 5000}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**30, "1.0 GiB"),
        (2**52, "4,096.0 TiB"),
    ],
)
def test_bytes_are_shown_in_powers_of_1024(count: int, text: str) -> None:
    assert bytes_text(count) == text

"""`hookscope attention` from the outside: what it prints, refuses and leaves on the disk."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import hookscope
from hookscope.results.runs.reading import read_run
from hookscope.results.runs.store import ARRAYS
from tests.cli.conftest import CAT, Run, assert_refused, table

NETWORK = """
from tests.commands.attention.small_networks import HalfSeen, SmallTransformer, Words


small, half, words = SmallTransformer, HalfSeen, Words
"""
SIZES = ("--resize", "32", "--crop", "32")


@pytest.fixture(autouse=True)
def _network(tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(NETWORK, encoding="utf-8")


def test_the_first_line_is_the_census_and_the_run_can_be_read_back(run: Run, tmp_path: Path) -> None:
    asked = ("--query", "cls", "--query", "200,150", "--rollout", "--save-tensors")
    ended = run("attention", "seen.py:small", CAT, *SIZES, *asked, "--out", "a", "--report", "a.html")
    assert ended.code == 0, ended.stderr
    assert "2 of 2 blocks seen." in ended.stdout
    rows = table(tmp_path / "a" / "heads.csv")
    heads = [(str(block), str(head)) for block in (0, 1) for head in range(3)]
    assert [(row["index"], row["head"]) for row in rows] == heads
    stored = read_run(tmp_path / "a")
    assert [heat_map.block for heat_map in stored.result.maps] == ["rollout", "layers.1.self_attn"] * 2
    assert stored.result.rows[3].entropy == pytest.approx(float(rows[3]["entropy"]))
    weights = stored.result.patches[0].values
    assert weights.shape == (16, 4, 4)
    assert weights.sum((1, 2)).max() < 1
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert 'data-rows="4" data-columns="4"' in page
    weights = load_file(tmp_path / "a" / "attention.safetensors")["layers.1.self_attn"]
    assert weights.shape == (1, 3, 17, 17)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


def test_without_numbers_there_is_no_table_of_heads(run: Run, tmp_path: Path) -> None:
    ended = run("attention", "seen.py:small", CAT, *SIZES, "--no-numbers", "--full", "--out", "a", "--report", "a.html")
    assert ended.code == 0, ended.stderr
    assert "note: Heads were not measured" in ended.stdout
    assert "entropy" not in ended.stdout
    assert not (tmp_path / "a" / "heads.csv").exists()
    stored = read_run(tmp_path / "a")
    assert (stored.result.rows, stored.result.patches) == ((), ())
    assert [heat_map.query for heat_map in stored.result.maps] == ["class token"]
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Heads were not measured" in page
    assert "entropy, nats" not in page


def test_a_text_has_numbers_of_every_head_and_in_words_no_map(run: Run) -> None:
    ended = run("attention", "seen.py:words", "--input-shape", "2,6:int64<50", "--json")
    assert ended.code == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["census"] == "1 of 1 block seen"
    assert [each["shape"] for each in document["inputs"]] == [[6], [6]]
    # Word n looks at n words alike, which is an entropy of ln n: the mean of ln 1 to ln 6.
    assert [row["entropy"] for row in document["rows"]] == [pytest.approx(math.log(math.factorial(6)) / 6)] * 2
    assert document["maps"] == []
    assert any("has no map: its 6 keys are words, which have no place" in note for note in document["notes"])


def test_maps_of_noise_are_drawn_on_the_noise(run: Run, tmp_path: Path) -> None:
    ended = run("attention", "seen.py:small", "--input-shape", "2,3,32,32", "--out", "a")
    assert ended.code == 0, ended.stderr
    assert "without a picture" not in ended.stdout
    with Image.open(tmp_path / "a" / "inputs" / "001.jpg") as picture:
        assert np.asarray(picture).std() > 20
    assert len([*(tmp_path / "a" / "overlays").iterdir()]) == 2
    assert_refused(run("attention", "seen.py:small", CAT, "--input-shape", "2,3,32,32"), 2)


@pytest.mark.exhaustive
def test_partly_seen_is_0_and_nothing_seen_is_5(run: Run) -> None:
    ended = run("attention", "seen.py:half", CAT, *SIZES, "--json")
    assert ended.code == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["census"].startswith("1 of 2 blocks seen; not seen: linear")
    assert document["unseen"][0]["kind"] == "LinearAttention"
    refused = {
        ("net.py:tiny", CAT, *SIZES): (5, "No attention found in"),
        ("seen.py:small", CAT, *SIZES, "--query", "5,5"): (2, "--query 5,5 lies outside of what the network sees of"),
        ("seen.py:half", CAT, *SIZES, "--rollout"): (2, "--rollout is undefined here"),
        ("seen.py:smal",): (5, "seen.py has no 'smal'"),  # MODEL comes first
        ("seen.py:small",): (2, "Missing IMAGE: name a picture, a tensor file or a folder, or give --input-shape for"),
    }
    for arguments, (code, words) in refused.items():
        assert_refused(run("attention", *arguments), code, words)


def test_a_run_whose_maps_are_others_is_refused(run: Run, tmp_path: Path) -> None:
    assert run("attention", "seen.py:small", CAT, *SIZES, "--out", "a").code == 0
    path = tmp_path / "a" / ARRAYS
    save_file({**load_file(path), "patches.0.values": np.zeros((3, 4, 4), np.float32)}, path)
    with pytest.raises(hookscope.InputError, match=r"is not the one listed in result\.json"):
        read_run(tmp_path / "a")

"""Checkpoints of a run in their order: what they hold, how the weights moved, and since when a rule fails."""

import gc
import math
import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import hookscope
from hookscope.commands.history import follow
from hookscope.commands.history.columns import file_columns, verdicts_on
from hookscope.commands.history.describe import answer, describe_history
from hookscope.commands.history.drift import drifts
from hookscope.commands.history.first_finding import ByKey, by_key, searched, verdicts
from hookscope.commands.history.follow import labels_of, order_of
from hookscope.commands.history.measure_file import Weights
from hookscope.errors import UsageError
from hookscope.results.comparison import Prediction
from hookscope.results.findings import Finding
from hookscope.results.history import History, HistoryFile, by_layer
from hookscope.results.inputs import InputRecord
from hookscope.results.json_form import to_document
from hookscope.results.runs.reading import read_run
from tests.commands.history.runs import write_run

State = dict[str, Tensor]


def a_state(value: float = 1.0) -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        "conv.weight": torch.randn(8, 4, 3, 3, generator=generator) * value,
        "conv.bias": torch.randn(8, generator=generator),
        "norm.running_mean": torch.randn(8, generator=generator),
        "norm.running_var": torch.rand(8, generator=generator) + 0.5,
        "norm.num_batches_tracked": torch.tensor(10),
    }


def save(folder: Path, states: Mapping[str, Any]) -> str:
    for name, state in states.items():
        torch.save(state, folder / name)
    return str(folder / "*.pt")


def test_integers_and_sparse_weights_are_said_to_be_left_out(tmp_path: Path) -> None:
    states = {
        f"{at}.pt": {
            "packed": torch.randint(-8, 8, (4, 4), dtype=torch.int8),
            "sparse.weight": torch.eye(4).to_sparse() * at,
            "dense.weight": torch.randn(4, 4),
            "dense.index": torch.arange(16).view(4, 4),
        }
        for at in (1, 2)
    }
    words = answer(hookscope.history(save(tmp_path, states)))
    assert words[:2] == [
        "No problems in what could be checked of 2 files.",
        "Changes were not looked for in 2 tensors of integers or sparse values: 'packed', 'sparse.weight'.",
    ]


@pytest.mark.exhaustive
def test_drift_and_norms_are_those_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    states = [
        {name: tensor.double() + torch.rand(tensor.shape) for name, tensor in a_state().items()} for _ in range(4)
    ]
    history = hookscope.history(save(tmp_path, {f"step-{at}.pt": state for at, state in enumerate(states)}))
    rows = history["conv.weight"]
    weights = [state["conv.weight"] for state in states]
    norm = torch.linalg.vector_norm
    assert [row.norm for row in rows] == pytest.approx([float(norm(weight)) for weight in weights])
    expected = [float(norm(now - was) / norm(was)) for was, now in pairwise(weights)]
    assert rows[0].drift is None
    assert [row.drift for row in rows[1:]] == pytest.approx(expected)
    first = [float(norm(weight - weights[0]) / norm(weights[0])) for weight in weights[1:]]
    assert [row.drift_from_first for row in rows[1:]] == pytest.approx(first)

    both = [torch.cat([state["conv.weight"].flatten(), state["conv.bias"]]) for state in states]
    joined = [float(norm(now - was) / norm(was)) for was, now in pairwise(both)]
    assert [by_layer(history)["conv"][at].drift for at in (1, 2, 3)] == pytest.approx(joined)
    assert by_layer(history)["conv"][3].norm == pytest.approx(float(norm(both[3])))


def test_files_whose_names_have_the_prefix_of_a_wrapper_are_compared_with_the_others(tmp_path: Path) -> None:
    states = {f"{at}.pt": a_state(1 + at / 10) for at in range(4)}
    for at, prefix in ((2, "module."), (3, "_orig_mod.module.")):
        states[f"{at}.pt"] = {f"{prefix}{name}": tensor for name, tensor in states[f"{at}.pt"].items()}
    states["3.pt"]["_orig_mod.module.conv.bias"] = torch.full((8,), torch.nan)
    history = hookscope.history(save(tmp_path, states))
    assert [row.drift for row in history["conv.weight"][1:]] == pytest.approx([0.1 / 1, 0.1 / 1.1, 0.1 / 1.2], rel=1e-5)
    assert [row.drift_from_first for row in history["conv.weight"][1:]] == pytest.approx([0.1, 0.2, 0.3], rel=1e-5)
    assert [
        (verdict.rule, verdict.places, verdict.first) for verdict in history.verdicts if verdict.level == "fail"
    ] == [("non-finite-parameter", ("conv.bias",), 3)]
    assert not history.warnings
    (note,) = (note for note in history.notes if "prefixes" in note)
    assert note.startswith("2.pt: names have other prefixes than in the first file")
    assert note.endswith("The same holds for 1 more file.")


def test_files_of_several_networks_are_told_apart_once(tmp_path: Path) -> None:
    files = {f"{name}_{at}.pt": {f"{name}.weight": torch.ones(2, 2)} for name in ("a", "b", "c") for at in range(4)}
    warnings = hookscope.history(save(tmp_path, files)).warnings
    assert warnings[0] == (
        "The files hold 3 networks that share no tensor: a_0.pt, a_1.pt, a_2.pt and 1 more; b_0.pt, b_1.pt, b_2.pt "
        "and 1 more; c_0.pt, c_1.pt, c_2.pt and 1 more. Name the files of one, as a glob."
    )
    assert not any("cannot be compared" in warning for warning in warnings)


def test_files_with_the_same_parameters_are_named(tmp_path: Path) -> None:
    same, other = a_state(), a_state(2.0)
    counted = {**same, "norm.num_batches_tracked": torch.tensor(20)}
    names = {"a.pt": other, "b.pt": same, "c.pt": counted, "d.pt": same, "e.pt": other}
    history = hookscope.history(save(tmp_path, names))
    assert "\nc.pt, d.pt have the same parameters as b.pt.\n" in str(history)
    assert str(history).count("same parameters") == 1
    fewer = {name: tensor for name, tensor in same.items() if name != "conv.bias"}
    history = hookscope.history(save(tmp_path, {**names, "c.pt": fewer}))
    assert "same parameters" not in str(history)


@pytest.mark.parametrize(
    ("steps", "moves", "said"),
    [
        ((20, 40, 60), True, None),
        ((20, 40, 10), True, "The state of 'optimizer' was reset: it counts 10 steps in 2.pt, and 40 before."),
        (
            (0, 0, 0),
            True,
            "stays at 0 from 0.pt to 1.pt, and in 1 more file, although weights move: its state was reset, or belongs",
        ),
        ((20, 20, 20), False, None),
    ],
)
def test_steps_of_an_optimizer_that_fall_or_stay_are_said(
    steps: tuple[int, ...], moves: bool, said: str | None, tmp_path: Path
) -> None:
    network = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam([{"params": network.weight, "lr": 0.1}, {"params": network.bias, "lr": 0.01}])
    for at, step in enumerate(steps):
        for parameter in network.parameters():
            parameter.grad = torch.randn(parameter.shape)
        if moves or not at:
            optimizer.step()
        state = optimizer.state_dict()
        for values in state["state"].values():
            values["step"] = torch.tensor(float(step))
        weights = {name: value.clone() for name, value in network.state_dict().items()}
        save(tmp_path, {f"{at}.pt": {"model": weights, "optimizer": state}})
    history = hookscope.history(str(tmp_path / "*.pt"))
    assert ("Optimiser", "at optimizer: lr 0.1, 0.01 to 0.1, 0.01", False) in describe_history(history).facts
    text = " ".join(str(history).split())
    assert said is None or said in text
    assert not any(verdicts_on("", history))  # the root owns the parameters, and not the optimizer's state
    assert ("was reset" in text) == (said is not None)


@pytest.mark.exhaustive
def test_files_are_in_the_order_that_they_store(tmp_path: Path) -> None:
    state = a_state()
    pattern = save(
        tmp_path,
        {
            "a-last.pt": {"epoch": 9, "model": {**state, "conv.bias": state["conv.bias"] + 3}},
            "b.pt": {"epoch": torch.tensor(2), "model": state},
            "c-best.pt": {"epoch": 5, "model": {**state, "conv.bias": state["conv.bias"] + 1}},
        },
    )
    history = hookscope.history(pattern)
    assert [file.label for file in history.files] == ["b.pt", "c-best.pt", "a-last.pt"]
    assert [file.compared_with for file in history.files] == [None, 0, 1]
    moved = float(torch.linalg.vector_norm(torch.full((8,), 2.0)) / torch.linalg.vector_norm(state["conv.bias"] + 1))
    assert history["conv.bias"][2].drift == pytest.approx(moved)
    assert "epoch" in history.order
    assert "not in the order of their names" in history.notes[0]


def test_the_order_is_by_what_tells_the_files_apart() -> None:
    by_step = [{"epoch": 1, "global_step": 200}, {"epoch": 1, "global_step": 100}, {"epoch": 2, "global_step": 300}]
    assert order_of(by_step)[0] == [1, 0, 2]
    assert "global_step" in order_of(by_step)[1]
    assert order_of([{"epoch": 3}, {}, {"epoch": 1}])[0] == [0, 1, 2]  # one does not say
    assert order_of([{"epoch": 3}, None, {"epoch": 1}])[0] == [2, 0, 1]  # one cannot be read: behind the one before it
    assert order_of([None, {"step": 2}, {"step": 1}])[0] == [0, 2, 1]
    assert order_of([{"epoch": 3}] * 2) == ([0, 1], "their names, as no stored epoch or step tells them apart")
    assert labels_of(["runs/a/x.pt", "runs/b/x.pt"]) == ["a/x.pt", "b/x.pt"]


@pytest.mark.exhaustive
def test_without_numbers_inside_names_are_in_natural_order(tmp_path: Path) -> None:
    history = hookscope.history(save(tmp_path, {f"epoch_{at}.pt": a_state() for at in (1, 2, 10)}))
    assert [file.label for file in history.files] == ["epoch_1.pt", "epoch_2.pt", "epoch_10.pt"]
    assert history.order == "their names, as no stored epoch or step tells them apart"
    assert not history.verdicts
    assert str(history).startswith("No problems in any of 3 files.")
    assert "Ran the 18 rules that need only the file; add" in " ".join(str(history).split())


def test_a_file_that_cannot_be_read_is_finished_past(tmp_path: Path) -> None:
    pattern = save(tmp_path, {f"epoch_{at}.pt": a_state() for at in range(1, 6)})
    broken = tmp_path / "epoch_3.pt"
    broken.write_bytes(broken.read_bytes()[:1000])
    dead = {name: tensor.clone() for name, tensor in a_state().items()}
    dead["conv.weight"][2] = 0
    for at in (4, 5):
        torch.save(dead, tmp_path / f"epoch_{at}.pt")
    history = hookscope.history(pattern)
    assert [file.status for file in history.files] == ["read", "read", "unreadable", "read", "read"]
    assert history.exit_code == 3
    assert history.files[3].compared_with == 1
    text = " ".join(str(history).split())
    assert text.startswith("conv has dead filters from epoch_4.pt on (1 file before it could not be read).")
    assert "1 of 5 files could not be read: epoch_3.pt." in text
    with pytest.raises(AssertionError, match="epoch_3"):
        history.raise_for_failure()


def test_a_failure_shows_no_control_characters_of_names() -> None:
    file = HistoryFile(0, "a\x1b[31m.pt", "a\x1b[31m.pt", status="unreadable", exit_code=3, error="It is cut short.")
    with pytest.raises(AssertionError, match=re.escape(r"a\x1b[31m.pt: It is cut short.")):
        History(files=(file,), order="their names", verdicts=(), rows=()).raise_for_failure()


@pytest.mark.exhaustive
def test_pickles_that_would_run_code_are_not_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return exec, ("raise SystemExit",)

    pattern = save(tmp_path, {f"{at}.pt": a_state() for at in (1, 2, 3)})
    torch.save({"conv.weight": torch.ones(2, 2), "other": Runs()}, tmp_path / "2.pt")
    history = hookscope.history(pattern)
    assert (history.exit_code, history.files[1].status) == (4, "unreadable")
    assert len(history.read) == 2


def test_one_file_is_no_history(tmp_path: Path) -> None:
    torch.save(a_state(), tmp_path / "a.pt")
    with pytest.raises(UsageError, match="at least two files, not 1"):
        hookscope.history(str(tmp_path))
    with pytest.raises(UsageError, match="There is no 'runs/none': name a folder"):
        hookscope.history("runs/none")


def test_a_search_finds_where_it_began_in_few_files() -> None:
    finding = Finding("rule", "warn", "place", "It is so.")
    for count in (2, 3, 12, 100):
        for first in range(count):
            looked: set[int] = set()

            def look(at: int, first: int = first, looked: set[int] = looked) -> ByKey:
                looked.add(at)
                return by_key([finding] if at >= first else [])

            [actual] = searched(count, look)
            assert (actual.first, actual.before) == (first, first - 1 if first else None)
            assert len(looked) <= 2 + math.ceil(math.log2(count))
            every = verdicts({at: look(at) for at in range(count)})
            assert [(each.first, each.before, each.lasts) for each in every] == [(first, actual.before, True)]


def test_a_search_goes_around_files_that_cannot_be_read() -> None:
    finding = Finding("rule", "fail", "place", "It is so.")
    unreadable = {0, 5, 6, 7, 11}
    [actual] = searched(12, lambda at: None if at in unreadable else by_key([finding] if at >= 7 else []))
    assert (actual.before, actual.first) == (4, 8)
    assert not searched(3, lambda _at: None)


def test_a_search_among_files_of_which_one_can_be_read_lists_it_once(tmp_path: Path) -> None:
    pattern = save(tmp_path, {"a.pt": a_state(torch.nan)})
    (tmp_path / "b.pt").write_bytes(b"no weights")
    verdicts = hookscope.history(pattern, bisect=True).verdicts
    assert verdicts
    assert {verdict.files for verdict in verdicts} == {(0,)}


def test_a_verdict_that_ends_is_not_said_to_last() -> None:
    finding = Finding("rule", "warn", "a", "So.", ("b",))
    looks = {at: by_key([finding] if at in (2, 3) else []) for at in range(6)}
    [actual] = verdicts(looks)
    assert (actual.places, actual.files, actual.lasts) == (("a", "b"), (2, 3), False)


@pytest.mark.exhaustive
def test_a_search_reads_few_files_and_says_what_reading_all_says(tmp_path: Path) -> None:
    def fault(state: State) -> None:
        state["second.weight"][[1, 4]] = 0
        state["head.bias"][0] = torch.inf

    pattern = write_run(tmp_path, "convolutions", fault=fault, at=range(9, 13))
    every, few = hookscope.history(pattern), hookscope.history(pattern, bisect=True)
    assert len(few.read) <= 6
    message = [
        [(verdict.rule, verdict.places, verdict.first, verdict.before) for verdict in run.verdicts]
        for run in (every, few)
    ]
    assert sorted(message[0]) == sorted(message[1])
    assert few.searched
    assert "assuming that a problem stays once it begins" in few.scope


@pytest.mark.exhaustive
def test_where_epochs_are_not_in_order_of_names_a_search_reads_all(tmp_path: Path) -> None:
    names = {f"{name}.pt": {"epoch": epoch, "model": a_state()} for name, epoch in (("a", 3), ("b", 2), ("c", 1))}
    history = hookscope.history(save(tmp_path, names), bisect=True)
    assert [file.label for file in history.files] == ["c.pt", "b.pt", "a.pt"]
    assert not history.searched
    assert "`bisect` had no effect" in history.notes[0]


def test_the_parts_of_a_tensor_are_told_apart_by_their_best_classes(tmp_path: Path) -> None:
    """The weights are a permutation: each of three one-hot inputs goes from its own class to the next."""
    network = tmp_path / "net.py"
    network.write_text("from torch import nn\n\n\ndef build():\n    return nn.Linear(3, 3, bias=False)\n")
    classes = torch.eye(3)
    files = save(tmp_path, {"1.pt": {"weight": classes}, "2.pt": {"weight": classes.roll(1, 0)}})
    history = hookscope.history(files, classes, arch=f"{network}:build")
    for at in range(3):
        went = f"from class {at} to class {(at + 1) % 3}; it changes once in 2.pt."
        assert f"The best class of tensor[{at}] goes {went}" in answer(history)


@pytest.mark.exhaustive
def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    states = {f"{at}.pt": {"step": at, "model": a_state()} for at in (1, 2, 3)}
    states["3.pt"]["model"]["conv.bias"] = torch.full((8,), torch.nan)  # type: ignore[index]
    states["1.pt"]["model"]["conv.weight"] = torch.zeros(8, 4, 3, 3)  # type: ignore[index]
    (tmp_path / "ckpt").mkdir()
    history = hookscope.history(save(tmp_path / "ckpt", states))
    assert history["conv.weight"][1].drift == math.inf
    folder = history.save(tmp_path / "run")
    stored = read_run(folder).result
    assert to_document(stored) == to_document(history)
    page = hookscope.report(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "conv.bias holds NaN or Inf in 3.pt, the last file." in page
    assert {path.name for path in folder.iterdir()} == {
        *("overview.png", "files.csv", "weights.csv", "verdicts.csv", "result.json", "run.json"),
    }


@pytest.mark.exhaustive
def test_a_page_draws_each_run_of_files_with_a_verdict(tmp_path: Path) -> None:
    states: dict[str, Any] = {f"{at}.pt": {"step": at, "model": a_state()} for at in range(1, 11)}
    for at in (2, 5, 7, 10):
        states[f"{at}.pt"]["model"]["conv.bias"] = torch.full((8,), torch.nan)
    (tmp_path / "ckpt").mkdir()
    pattern = save(tmp_path / "ckpt", states)
    (tmp_path / "ckpt/6.pt").write_bytes(b"no checkpoint")
    folder = hookscope.history(pattern).save(tmp_path / "run")
    page = hookscope.report(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    bars = re.search(r'<rect class="ground"[^>]*>(.*?)</svg>', page)
    assert bars is not None
    drawn = re.findall(r'x="([\d.]+)" width="([\d.]+)"', bars[1])
    # 6.pt cannot be read: nothing tells where between 5.pt and 7.pt it would end.
    assert drawn == [("100.0", "100.0"), ("400.0", "300.0"), ("900.0", "100.0")]


@pytest.mark.exhaustive
def test_the_weights_of_two_files_are_in_memory_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    def counting(before: State, now: State) -> dict[str, float | None]:
        opened = [thing for thing in gc.get_objects() if type(thing) is Weights]
        held.append(sum(bool(each.read.state) for each in opened))
        return drifts(before, now)

    monkeypatch.setattr(follow, "drifts", counting)
    hookscope.history(save(tmp_path, {f"{at}.pt": {"epoch": 9 - at, "model": a_state()} for at in range(6)}))
    assert max(held) == 2


@pytest.mark.exhaustive
def test_safetensors_and_names_from_strangers(tmp_path: Path) -> None:
    for at in (1, 2, 3):
        state = {"<script>alert(1)</script>\x1b[2J.weight": torch.randn(4, 4) + at, "=1+1.bias": torch.ones(4)}
        save_file(state, tmp_path / f"<b>{at}.safetensors".replace("/", ""))
    history = hookscope.history(str(tmp_path))
    folder = history.save(tmp_path / "run")
    page = hookscope.report(folder, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "\x1b" not in page + str(history)
    assert not any(
        line.startswith("=") for line in (folder / "weights.csv").read_text().replace(",", "\n").splitlines()
    )


def test_a_parameter_without_axes_is_followed(tmp_path: Path) -> None:
    states = {f"step-{at}.pt": {"temperature": torch.tensor(float(at + 2)), **a_state()} for at in range(3)}
    rows = hookscope.history(save(tmp_path, states))["temperature"]
    assert [row.norm for row in rows] == [2, 3, 4]


@pytest.mark.parametrize("at", [2, 4])
def test_a_weight_whose_sign_is_flipped_in_one_file_jumps_there_though_it_comes_back(at: int, tmp_path: Path) -> None:
    """It moves by 1 % a file, and by 1.99 of its norm to the flipped one: from w to -0.99 w."""
    states = {f"epoch-{number}.pt": a_state() for number in range(6)}
    for each, state in enumerate(states.values()):
        state["conv.weight"] *= 0.99**each * (-1 if each == at else 1)
        state["conv2.weight"] = a_state()["conv.weight"].flip(0) * 0.99**each
    history = hookscope.history(save(tmp_path, states))
    actual = [(verdict.rule, verdict.places, history.files[verdict.first].label) for verdict in history.verdicts]
    assert actual == [("weight-jump", ("conv.weight",), f"epoch-{at}.pt")]
    assert "'conv.weight' moved by 1.99 times its norm (0.01 is usual)" in history.verdicts[0].message


def test_a_weight_that_came_later_jumps_as_others_do(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    trunk, head = (torch.randn(16, 16, generator=generator) for _ in range(2))
    files = {}
    for at in range(9):
        trunk = trunk + 0.01 * torch.randn(16, 16, generator=generator)
        head = head + (2.0 if at == 7 else 0.01) * torch.randn(16, 16, generator=generator)
        files[f"{at}.pt"] = {"trunk.weight": trunk} | ({"head.weight": head} if at >= 3 else {})
    jumps = [verdict for verdict in hookscope.history(save(tmp_path, files)).verdicts if verdict.rule == "weight-jump"]
    assert [(verdict.where, verdict.first) for verdict in jumps] == [("head.weight", 7)]


def test_a_file_of_nothing_but_nan_has_no_norm_and_none_grows_from_it(tmp_path: Path) -> None:
    """The norms are sqrt(4 * 3²) = 6 and sqrt(2 * 50²) = 70.7; in the second file neither is 0."""
    state = {"head.weight": torch.tensor([[3.0, -3.0], [3.0, 3.0]]), "head.bias": torch.full((2,), 50.0)}
    states = [state, {name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()}, state]
    history = hookscope.history(save(tmp_path, {f"{at}.pt": state for at, state in enumerate(states)}))
    assert [row.norm for row in history["head.weight"]] == [6, None, 6]
    norms = [point.norm for point in by_layer(history)["head"].values()]
    assert norms == [pytest.approx(math.sqrt(36 + 5000)), None, pytest.approx(math.sqrt(36 + 5000))]
    assert {verdict.rule for verdict in history.verdicts} == {"non-finite-parameter"}
    nan = hookscope.history(save(tmp_path, {"0.pt": states[1], "2.pt": states[1]}))
    assert [re.split(" +", line)[1] for line in str(nan).splitlines() if re.match(r"\d.pt +.* 1 failure", line)] == [
        "-"
    ] * 3


def test_the_drift_of_a_layer_is_not_that_of_its_finite_tensors_alone(tmp_path: Path) -> None:
    states = [a_state() for _ in range(4)]
    for at, state in enumerate(states):
        state["conv.bias"] *= 1 + at / 10
    states[1]["conv.weight"][0] = torch.nan
    history = hookscope.history(save(tmp_path, {f"{at}.pt": state for at, state in enumerate(states)}))
    points = [by_layer(history)["conv"][at] for at in (1, 2, 3)]
    assert [point.drift is None for point in points] == [True, True, False]
    assert [point.drift_from_first is None for point in points] == [True, False, False]


def test_probabilities_that_are_nan_have_no_best_class() -> None:
    read = {"status": "read", "judged": ("non-finite-parameter",)}
    files = tuple(
        HistoryFile(at, name, name, predictions=(Prediction(0, (3,), ("cat",), (probability,)),), **read)
        for at, (name, probability) in enumerate({"a.pt": 0.9, "b.pt": math.nan}.items())
    )
    inputs = (InputRecord("cat.jpg", None, None, (3, 8, 8), ()),)
    history = History(files=files, order="the names", verdicts=(), rows=(), inputs=inputs)
    assert "The best class of cat.jpg goes from cat to NaN; it changes once in b.pt." in answer(history)
    (column,) = (column for column in file_columns(history) if column.key == "best_class")
    assert [*map(column.cell, files)] == ["cat 0.90", "NaN"]


def test_what_moved_from_zero_is_not_said_to_have_moved_by_a_share_of_its_norm(tmp_path: Path) -> None:
    def state(stopped: float, scale: float, step: int) -> State:
        moving = {f"{name}.weight": torch.eye(3) * 1.01**step for name in "ab"}
        return moving | {"stopped.weight": torch.full((2, 2), stopped), "norm.weight": torch.full((4,), scale)}

    values = [(0.0, 0.0), (1.0, 0.0), (1.0, 2.0)]
    history = hookscope.history(save(tmp_path, {f"{at}.pt": state(*pair, at) for at, pair in enumerate(values)}))
    messages = [verdict.message for verdict in history.verdicts if verdict.first == 2 and verdict.is_change]
    assert "'stopped.weight' did not move (it moved from 0 before) between 1.pt and 2.pt." in messages
    assert "'norm.weight' moved away from 0 between 1.pt and 2.pt." in messages


def test_norms_whose_squares_overflow_float64_are_known(tmp_path: Path) -> None:
    states = {f"epoch-{at}.pt": {"conv.weight": torch.full((4, 4), 1e200 * at, dtype=torch.float64)} for at in (1, 2)}
    history = hookscope.history(save(tmp_path, states))
    assert "norm-jump" not in [verdict.rule for verdict in history.verdicts]
    first, second = history["conv.weight"]
    assert (first.norm, first.drift) == (pytest.approx(4e200), None)
    assert (second.norm, second.drift) == (pytest.approx(8e200), pytest.approx(1.0))


def test_a_weight_that_starts_from_zeros_does_not_jump(tmp_path: Path) -> None:
    """As the last layer of an adapter, frozen at first."""
    states = {f"epoch-{number}.pt": a_state() for number in range(5)}
    for each, state in enumerate(states.values()):
        state["up.weight"] = a_state()["conv.weight"] * 0.01 * max(0, each - 2)
        state["conv.weight"] *= 0.99**each
    history = hookscope.history(save(tmp_path, states))
    assert "weight-jump" not in [verdict.rule for verdict in history.verdicts]


def test_a_verdict_has_the_message_about_its_own_place() -> None:
    files = [[Finding("nan", "fail", "a", "About a.", ("b",))], [Finding("nan", "fail", "b", "About b.")]]
    made = verdicts({at: by_key(findings) for at, findings in enumerate(files)})
    assert {verdict.places: (verdict.files, verdict.message) for verdict in made} == {
        ("a",): ((0,), "About a."),
        ("b",): ((0, 1), "About b."),
    }

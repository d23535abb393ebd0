"""How many rows of embeddings and codebooks a step watched in full looks up, from the indices that were planted."""

import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import hookscope
from hookscope.commands.watch.describe import answer
from hookscope.commands.watch.training_log import read_training
from hookscope.results.table_rows import TableRows
from hookscope.results.training import TrainingLog

ROWS, ENTRIES, WIDTH = 16, 8, 4


class Quantised(nn.Module):
    """Looks up words, and replaces each by the nearest entry of a codebook; word k lies nearest to entry k // 2."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.codebook = nn.Embedding(ROWS, WIDTH), nn.Parameter(torch.zeros(ENTRIES, WIDTH))
        with torch.no_grad():
            self.words.weight[:, 0] = torch.arange(ROWS) + 0.1
            self.codebook[:, 0] = 2 * torch.arange(ENTRIES) + 0.5
        self.head = nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        words = self.words(x)
        nearest = (words[..., :1] - self.codebook[:, 0]).abs().argmin(-1)
        return self.head(words + self.codebook[nearest])


@pytest.fixture(autouse=True)
def nothing_was_compiled() -> None:
    torch._dynamo.reset()


def train(
    network: nn.Module,
    steps: Sequence[Sequence[Sequence[int]]],
    *,
    watched: bool = True,
    rate: float = 1e-4,
    **how: object,
) -> TrainingLog | None:
    """Train with the batches of each step, accumulating; every batch has a validation of all words behind it."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD([parameter for parameter in network.parameters() if parameter.requires_grad], lr=rate)
    options = {"every": 2, "on_line": lambda _: None, **how}
    watch = hookscope.watch(network, optimizer, **options) if watched else None
    for batches in steps:
        for batch in batches:
            network(torch.tensor([batch])).square().mean().backward()
            assert _get_current_function_mode_stack() == []
            with torch.no_grad():
                network(torch.arange(ROWS)[None])
        optimizer.step()
        optimizer.zero_grad()
        if watch is not None:
            watch.step()
    if watch is None:
        return None
    watch.close()
    assert watch.log.ends[-1].reason == "closed"
    return watch.log


def tables(words: set[int]) -> tuple[TableRows, ...]:
    return TableRows("words", ROWS, len(words)), TableRows("codebook", ENTRIES, len({word // 2 for word in words}))


STEPS = [[[0, 1]], [[3, 3, 5]], [[9]], [[0, 1, 4], [1, 15, 15]]]  # the last accumulates two batches


def test_the_rows_of_full_steps_are_counted_written_and_told(tmp_path: Path) -> None:
    log = train(Quantised(), STEPS, out=tmp_path / "run")
    assert log is not None
    assert [watched_step.tables for watched_step in log.watched] == [tables({3, 5}), tables({0, 1, 4, 15})]
    assert [watched_step.tables for watched_step in read_training(tmp_path / "run").watched] == [
        watched_step.tables for watched_step in log.watched
    ]
    assert {"4 of 16 rows of words are used at step 4.", "3 of 8 rows of codebook are used at step 4."} < {*answer(log)}
    hookscope.report(log, tmp_path / "page.html")
    assert "3 of 8 rows of codebook are used at step 4." in (tmp_path / "page.html").read_text(encoding="utf-8")


def assert_no_bit_changes(build: Callable[[], nn.Module], *, rate: float, **how: object) -> TrainingLog:
    """Train watched and unwatched; return the log."""
    watched, plain = build(), build()
    plain.load_state_dict(watched.state_dict())
    log = train(watched, STEPS, rate=rate, **how)
    state = torch.get_rng_state()
    train(plain, STEPS, watched=False, rate=rate)
    assert all(map(torch.equal, watched.state_dict().values(), plain.state_dict().values()))
    assert torch.equal(state, torch.get_rng_state())
    assert log is not None
    return log


def test_counting_changes_no_bit() -> None:
    log = assert_no_bit_changes(Quantised, rate=1e-4)
    assert all(watched_step.tables for watched_step in log.watched)


def test_only_chosen_layers_and_watched_activations_are_counted() -> None:
    chosen, without = train(Quantised(), STEPS, layer="words"), train(Quantised(), STEPS, activations=False)
    assert chosen is not None
    assert without is not None
    assert [watched_step.tables for watched_step in chosen.watched] == [tables({3, 5})[:1], tables({0, 1, 4, 15})[:1]]
    assert [watched_step.tables for watched_step in without.watched] == [(), ()]


def test_a_network_without_look_ups_has_no_line() -> None:
    class Linear(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()[:, :1])

    log = train(Linear(1, 1), STEPS)
    assert log is not None
    assert [watched_step.tables for watched_step in log.watched] == [(), ()]
    assert not any("rows" in sentence for sentence in answer(log))


class Plain(TorchFunctionMode):
    """A mode of the network's own."""

    def __torch_function__(
        self, func: Callable[..., object], _: object, args: tuple = (), kwargs: object = None
    ) -> object:  # type: ignore[type-arg]
        return func(*args, **(kwargs or {}))


class Moded(Quantised):
    """Runs a mode of its own, and leaves it on up to a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[Plain] = []
        self.register_forward_hook(lambda *_: self.own.pop().__exit__(None, None, None))

    def forward(self, x: Tensor) -> Tensor:
        self.own.append(Plain())
        self.own[-1].__enter__()
        return self.head(self.words(x))


def test_a_mode_of_the_network_is_no_hindrance() -> None:
    log = train(Moded(), STEPS)
    assert log is not None
    assert [watched_step.tables for watched_step in log.watched] == [tables({3, 5})[:1], tables({0, 1, 4, 15})[:1]]


def test_a_forward_pass_that_raises_leaves_no_mode_behind() -> None:
    network = Quantised()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4)
    with hookscope.watch(network, optimizer, every=1, on_line=lambda _: None) as watch:
        for words in ([0, 1], [2, ROWS], [4, 5]):
            try:
                network(torch.tensor([words])).mean().backward()
            except IndexError:
                assert _get_current_function_mode_stack() == []
                continue
            optimizer.step()
            watch.step()
    assert watch.log.watched[-1].step == 2


class Frozen(Quantised):
    """Puts a frozen encoder in eval mode in front: torch then runs a fused kernel, but not while a mode is on."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1).requires_grad_(False).eval()
        self.words.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.words(x)))


def test_a_forward_pass_that_is_interrupted_is_no_part_of_the_next() -> None:
    network = nn.Sequential(Quantised(), nn.Identity())
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-4)
    inputs = torch.zeros(2, 3, dtype=torch.long)
    with hookscope.watch(network, optimizer, every=2) as watch:
        for step in (1, 2):
            if step == 2:
                handle = network[1].register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
                with pytest.raises(KeyboardInterrupt):
                    network(inputs)
                handle.remove()
            loss = network(inputs).square().mean()
            assert not _get_current_function_mode_stack()
            loss.backward()
            optimizer.step()
            watch.step(loss)
    labels = [row.label for row in watch.log.watched[0].layers]
    assert "1" in labels
    assert not [label for label in labels if "#" in label]


def test_nothing_is_counted_where_a_mode_would_change_kernels() -> None:
    log = assert_no_bit_changes(Frozen, rate=0.1, layer=["words", "head"])
    assert [watched_step.tables for watched_step in log.watched] == [(), ()]


@pytest.fixture
def compiled() -> Iterator[list[int]]:
    """Give a list that grows with each graph that is compiled."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_compiled_parts_are_not_compiled_again_and_an_eager_pass_is_counted(compiled: list[int]) -> None:
    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        compiled.append(1)
        return graph.forward

    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    fast = torch.compile(doubled, backend=backend, dynamic=False)

    class Partly(Quantised):
        def forward(self, x: Tensor) -> Tensor:
            return fast(super().forward(x))

    steps = [[[0, 1]], [[3, 5]], [[9, 9]], [[4, 15]]]
    train(Partly(), steps, watched=False)
    count = len(compiled)
    torch._dynamo.reset()
    log = train(Partly(), steps)
    assert log is not None
    assert len(compiled) == 2 * count
    assert [watched_step.tables for watched_step in log.watched] == [(), ()]

    log = train(torch.compile(Quantised(), backend=backend), steps, eager_forward=True)
    assert log is not None
    assert [watched_step.tables for watched_step in log.watched] == [tables({3, 5}), tables({4, 15})]

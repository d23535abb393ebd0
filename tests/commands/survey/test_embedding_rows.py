"""How many rows of embeddings and codebooks the inputs look up, counted from the indices that were planted."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hookscope
from hookscope.commands.survey.describe import answer
from hookscope.commands.survey.plan import ChunkFolder
from hookscope.commands.survey.run_survey import merge_survey
from hookscope.results.json_form import to_document
from hookscope.results.runs.reading import read_run
from hookscope.results.survey import Survey
from hookscope.results.table_rows import TableRows

ROWS, WIDTH = 16, 4
PLANTED = [[0, 3, 3], [3, 7, 7], [7, 7, 0], [12, 3, 0], [0, 0, 0], [3, 3, 15]]
USED = len({row for rows in PLANTED for row in rows})  # 0, 3, 7, 12 and 15


class Codebook(nn.Module):
    """Replaces each position by the nearest entry, as VQ-VAE does; entry k lies at k along the first axis."""

    def __init__(self, look_up: Callable[[Tensor, Tensor], Tensor], *, transposed: bool = False) -> None:
        super().__init__()
        entries = torch.zeros(ROWS, WIDTH)
        entries[:, 0] = torch.arange(ROWS)
        if transposed:
            self.register_buffer("codebook", entries.T.contiguous())
        else:
            self.codebook = nn.Parameter(entries)
        self.transposed, self.look_up, self.last = transposed, look_up, nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        entries = self.codebook.T if self.transposed else self.codebook
        distances = (x[:, :, :1] - entries[:, 0]).square()
        return self.last(self.look_up(distances.argmin(-1), entries))


LOOK_UPS: dict[str, Callable[[], nn.Module]] = {
    "indexed": lambda: Codebook(lambda index, entries: entries[index]),
    "indexed with a slice": lambda: Codebook(lambda index, entries: entries[index, :]),
    "F.embedding by name": lambda: Codebook(lambda index, entries: functional.embedding(weight=entries, input=index)),
    "index_select": lambda: Codebook(
        lambda index, entries: entries.index_select(0, index.flatten()).view(*index.shape, -1)
    ),
    "a list": lambda: Codebook(lambda index, entries: entries[index.flatten().tolist()].view(*index.shape, -1)),
    "an array": lambda: Codebook(lambda index, entries: entries[index.numpy(), :]),
    "a transposed buffer": lambda: Codebook(functional.embedding, transposed=True),
}


def save_inputs(path: Path, planted: Sequence[Sequence[int]] = PLANTED) -> Path:
    """Write inputs whose positions lie next to the planted entries."""
    inputs = torch.zeros(len(planted), len(planted[0]), WIDTH)
    inputs[:, :, 0] = torch.tensor(planted) + 0.2
    torch.save(inputs, path)
    return path


@pytest.mark.parametrize("name", LOOK_UPS)
def test_the_rows_of_a_codebook_that_were_used_are_counted(tmp_path: Path, name: str) -> None:
    result = hookscope.survey(LOOK_UPS[name](), save_inputs(tmp_path / "x.pth"), chunk_size=2, verify=True)
    assert result.tables == (TableRows("codebook", ROWS, USED),)
    assert f"{USED} of {ROWS} rows of codebook are used on 6 inputs." in answer(result)
    assert result.verification is not None
    assert result.verification.status == "same"


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.unused, self.head = nn.Embedding(ROWS, WIDTH), nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x))


def test_indices_of_an_embedding_are_counted_and_written(tmp_path: Path) -> None:
    torch.save(torch.tensor(PLANTED), tmp_path / "x.pth")
    result = hookscope.survey(Words(), tmp_path / "x.pth")
    assert result.tables == (TableRows("words", ROWS, USED),)
    assert to_document(result)["tables"] == [{"name": "words", "row_count": ROWS, "used_count": USED}]
    folder = result.save(tmp_path / "run")
    assert read_run(folder).result.tables == result.tables
    with (folder / "embeddings.csv").open(encoding="utf-8") as file:
        assert [*csv.reader(file)] == [["name", "row_count", "used_count"], ["words", str(ROWS), str(USED)]]


def test_shards_and_resumed_chunks_count_the_same_rows(tmp_path: Path) -> None:
    inputs, network = save_inputs(tmp_path / "x.pth"), LOOK_UPS["indexed"]()
    how = {"batch_size": 1, "chunk_size": 2, "chunks": tmp_path / "chunks"}
    for share in ("1/2", "2/2"):
        assert hookscope.survey(network, inputs, shard=share, **how) is None
    merged = merge_survey(ChunkFolder(tmp_path / "chunks"))
    resumed = hookscope.survey(network, inputs, resume=True, **how)
    assert isinstance(resumed, Survey)
    assert merged.tables == resumed.tables == (TableRows("codebook", ROWS, USED),)


class Places(nn.Module):
    """Adds a bias for each pair of positions by a fixed table of places, as Swin does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.register_buffer("places", torch.tensor([0, 5, 2]))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.table[self.places.view(-1)])


def test_fixed_tables_of_places_and_networks_without_look_ups_count_nothing(tmp_path: Path) -> None:
    inputs = save_inputs(tmp_path / "x.pth")
    assert hookscope.survey(Places(), inputs).tables == ()
    result = hookscope.survey(nn.Sequential(nn.Linear(WIDTH, 3)), inputs)
    assert result.tables == ()
    assert not any("rows of" in sentence for sentence in answer(result))


class Neighbours(Words):
    """Mixes the words by a sparse matrix, which has no memory of its own, and looks them up by `torch.func.vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("neighbours", torch.eye(3).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        words = torch.func.vmap(self.words)(x)
        return self.head(torch.stack([torch.sparse.mm(self.neighbours, word) for word in words]))


def test_sparse_buffers_and_transforms_are_no_hindrance(tmp_path: Path) -> None:
    torch.save(torch.tensor(PLANTED), tmp_path / "x.pth")
    assert hookscope.survey(Neighbours(), tmp_path / "x.pth").tables == (TableRows("words", ROWS, USED),)


def test_an_input_that_the_network_raises_on_uses_no_rows(tmp_path: Path) -> None:
    torch.save(torch.tensor([[0, 1, 2], [3, 4, ROWS], [0, 1, 5]]), tmp_path / "x.pth")
    result = hookscope.survey(Words(), tmp_path / "x.pth")
    assert (result.input_count, result.tables) == (2, (TableRows("words", ROWS, 4),))


class OwnCode(nn.Module):
    """Calls an activation function in its own code, beside a matrix that may be a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(functional.linear(x, self.matrix))


def test_counting_rows_hides_no_operation_of_the_batches_after_the_self_check(tmp_path: Path) -> None:
    torch.save(torch.ones(6, 3, WIDTH), tmp_path / "inputs.pt")
    result = hookscope.survey(OwnCode(), tmp_path / "inputs.pt", batch_size=2)
    [activation] = [row for row in result.rows if row.label == "(model):relu"]
    assert activation.statistics.shape == (6, 3, 2)

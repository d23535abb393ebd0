"""Norms of tokens against NumPy; planted outliers are named, and healthy random networks have none."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import hookscope
from hookscope.commands.activations.describe import describe_token_norms
from hookscope.errors import InputError
from hookscope.results.runs.reading import read_run
from hookscope.results.token_norms import TokenNorms
from hookscope.statistics.layouts import prefix_names
from tests.inspections import inspect
from tests.reporting.stored import report_html

GRID, PREFIX, WIDTH = 6, 1, 32


class Planted(nn.Module):
    """Adds a number to one channel of one token."""

    def __init__(self, token: int, channel: int, value: float) -> None:
        super().__init__()
        self.token, self.channel, self.value = token, channel, value

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, self.token, self.channel] += self.value
        return x


class Vision(nn.Module):
    """A patch embedding, a class token, and what is planted behind it."""

    num_prefix_tokens, has_class_token = PREFIX, True

    def __init__(self, *planted: nn.Module) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.norm, self.planted, self.head = nn.LayerNorm(WIDTH), nn.Sequential(*planted), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.cls.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.planted(self.norm(tokens))[:, 0])


@pytest.fixture
def pictures() -> Tensor:
    return torch.randn(3, 3, 4 * GRID, 4 * GRID, generator=torch.Generator().manual_seed(0))


def vision(*planted: nn.Module) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Vision(*planted).eval()


def tokens_of(network: nn.Module, x: Tensor, layer: str, batch_size: int = 8) -> TokenNorms:
    return hookscope.activations(network, x, layer=["*"], batch_size=batch_size)[layer].tokens


class Graded(nn.Module):
    """Makes the norms of tokens spread so far that their spread sets the limit, not twice the median."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(0.5, 1.5, x.shape[1])[:, None]


@pytest.mark.parametrize(
    ("batch_size", "middle"), [(1, nn.Linear(WIDTH, WIDTH)), (8, nn.Linear(WIDTH, WIDTH)), (2, Graded())], ids=str
)
def test_norms_are_those_of_numpy(pictures: Tensor, batch_size: int, middle: nn.Module) -> None:
    network = vision(middle, Planted(9, 3, 40.0))
    with torch.no_grad():
        values = network.planted(
            network.norm(torch.cat([network.cls.expand(3, -1, -1), _patches(network, pictures)], 1))
        )
    norms = np.linalg.norm(values.double().numpy(), axis=2)  # (N, T)
    medians = np.median(norms, axis=1)
    spreads = 1.4826 * np.median(np.abs(norms - medians[:, None]), axis=1)
    limits = np.maximum(2 * medians, medians + 6 * spreads)
    assert (limits > 2 * medians).all() == isinstance(middle, Graded)
    tokens = tokens_of(network, pictures, "planted.1", batch_size)
    assert (tokens.token_count, tokens.prefix, tokens.grid) == (GRID * GRID + 1, 1, (GRID, GRID))
    assert tokens.median == pytest.approx(np.median(medians), rel=1e-6)
    assert tokens.max == pytest.approx(norms.max(), rel=1e-6)
    assert tokens.high_count == int((norms > limits[:, None]).sum()) == 3
    for row in tokens.high:
        assert row.norm == pytest.approx(norms[row.input_index, row.token], rel=1e-6)
        assert row.limit == pytest.approx(limits[row.input_index], rel=1e-5)
    assert sorted(row.input_index for row in tokens.high) == [0, 1, 2]


def _patches(network: nn.Module, pictures: Tensor) -> Tensor:
    return network.patches(pictures).flatten(2).transpose(1, 2)


def test_planted_tokens_are_named_with_their_place(pictures: Tensor) -> None:
    network = vision(Planted(PREFIX + 2 * GRID + 4, 7, 30.0), Planted(0, 5, 60.0))
    tokens = tokens_of(network, pictures[:1], "planted.1")
    assert [tokens.place(row.token) for row in tokens.high] == ["token 0 (prefix)", "token 17 (row 2, column 4)"]
    assert not tokens.massive
    assert not tokens_of(network, pictures[:1], "norm").high


@pytest.mark.parametrize(("value", "is_massive"), [(0.0, False), (99.0, False), (900.0, True), (-900.0, True)])
def test_massive_activations_are_those_of_sun_et_al(pictures: Tensor, value: float, is_massive: bool) -> None:
    network = vision(Planted(5, 11, value))
    row = hookscope.activations(network, pictures[:2], layer="planted.0")["planted.0"]
    assert ("massive activations" in row.flags) == is_massive == bool(row.tokens.massive)
    for token in row.tokens.massive:
        assert (token.token, token.channel) == (5, 11)
        with torch.no_grad():
            whole = network.planted(
                network.norm(torch.cat([network.cls.expand(3, -1, -1), _patches(network, pictures)], 1))
            )
        values = whole[token.input_index].numpy()
        assert token.value == pytest.approx(float(values[5, 11]))
        assert token.median == pytest.approx(float(np.median(np.abs(values))), rel=1e-6)
        assert abs(token.value) >= 1000 * token.median


@pytest.mark.parametrize(("ratio", "is_massive"), [(999.9, False), (1000.1, True)])
@pytest.mark.parametrize("shape", [(1, 1024, 512), (1, 1023, 513)])
def test_the_median_is_that_of_all_values(shape: tuple[int, ...], ratio: float, is_massive: bool) -> None:
    """Every sixteenth channel is smaller by far: the median of a few channels may be 0.01."""
    values = torch.linspace(0.5, 1.5, shape[1])[:, None].repeat(shape[0], 1, shape[2])
    values[:, :, ::16] = 0.01
    median = float(np.median(values.numpy()))
    values[:, 3, 5] = -ratio * median
    (row,) = hookscope.activations(nn.Sequential(nn.Identity()), values, layer="0", batch_axis=0)
    assert [(token.token, token.channel) for token in row.tokens.massive] == [(3, 5)] * is_massive
    assert [token.median for token in row.tokens.massive] == [pytest.approx(median, rel=1e-6)] * is_massive


def test_the_rule_is_a_warning_and_off_until_it_is_selected(pictures: Tensor) -> None:
    network = vision(Planted(5, 11, 2000.0), nn.Identity())
    (finding,) = hookscope.check(network, images=pictures, select="massive-activation").findings
    assert (finding.level, finding.where) == ("warn", "planted.0:setitem")
    assert "in channel 11 of token 5 (row 0, column 4)" in finding.message
    assert "3 tokens with such a value" in finding.message
    assert "massive-activation" not in {finding.rule for finding in hookscope.check(network, images=pictures).findings}


def test_only_batches_of_tokens_are_measured(pictures: Tensor) -> None:
    class Others(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.few = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8)
            self.whole, self.square = nn.Linear(8, 5), nn.Linear(8, 36)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.patches(x).flatten(2).transpose(1, 2)
            self.square(tokens)  # (N, T, T), as attention weights are
            self.few(tokens[:, :7])
            return self.whole(tokens.reshape(-1, 8)).view(len(x), -1)

    run = hookscope.activations(Others(), pictures)
    assert [row.label for row in run if row.tokens is not None] == []


def test_inputs_that_are_not_finite_are_left_out(pictures: Tensor) -> None:
    pictures[1] = float("nan")
    tokens = tokens_of(vision(Planted(9, 3, 40.0)), pictures, "planted.0")
    assert sorted(row.input_index for row in tokens.high) == [0, 2]
    assert np.isfinite([tokens.median, tokens.max]).all()


SMALL = {
    "vit_small_patch14_reg4_dinov2": {"img_size": 70, "depth": 4},
    "beit_base_patch16_224": {"img_size": 64, "depth": 2, "embed_dim": 192, "num_heads": 3},
    "eva02_tiny_patch14_224": {"img_size": 70, "depth": 4},
}


@pytest.mark.parametrize("name", SMALL)
def test_healthy_random_networks_are_silent(name: str) -> None:
    """All modules of each, on two inputs of noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = timm.create_model(name, **SMALL[name]).eval()
        side = SMALL[name]["img_size"]
        run = inspect(network, torch.randn(2, 3, side, side), ["*"], tokens=True)
    norms = [row.tokens for row in run.rows if row.tokens is not None]
    assert len(norms) > 15
    assert {(norm.high_count, norm.massive_count) for norm in norms} == {(0, 0)}
    assert all(norm.grid is not None for norm in norms)


def test_files_have_the_numbers_and_the_places(pictures: Tensor, tmp_path: Path) -> None:
    network = vision(Planted(9, 3, 900.0))
    hookscope.activations(network, pictures, layer="planted.0").save(tmp_path / "run")
    with (tmp_path / "run" / "tokens.csv").open(newline="", encoding="utf-8") as file:
        listed = list(csv.DictReader(file))
    assert [each["what"] for each in listed] == ["high norm"] * 3 + ["massive activation"] * 3
    assert {each["place"] for each in listed} == {"token 9 (row 1, column 2)"}
    with (tmp_path / "run" / "layers.csv").open(newline="", encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["high_norm_tokens"], row["massive_activations"]) == ("3", "3")
    stored = json.loads((tmp_path / "run" / "result.json").read_text())["rows"][0]["tokens"]
    assert stored["massive"][0]["channel"] == 3
    assert float(row["token_norm_max"]) == stored["max"]
    quiet = vision(nn.Identity())
    hookscope.activations(quiet, pictures, layer="norm").save(tmp_path / "quiet")
    assert not (tmp_path / "quiet" / "tokens.csv").exists()


def test_maps_have_the_norms_of_numpy_where_the_patches_lie(pictures: Tensor) -> None:
    network = vision(nn.Identity(), Planted(9, 3, 900.0))
    run = hookscope.activations(network, pictures, layer=["norm", "planted.*"])
    assert [(token_map.label, token_map.input_index) for token_map in run.token_maps] == [
        ("planted.1", at) for at in range(3)
    ]
    with torch.no_grad():
        tokens = network.patches(pictures).flatten(2).transpose(1, 2)
        tokens = torch.cat([network.cls.expand(3, -1, -1), tokens], 1)
        tokens = network.planted(network.norm(tokens))
    norms = np.linalg.norm(tokens.double().numpy(), axis=2)
    for token_map in run.token_maps:
        expected = norms[token_map.input_index]
        assert token_map.values == pytest.approx(expected[1:].reshape(GRID, GRID), rel=1e-4)
        assert token_map.prefix == ("class token",)
        assert token_map.norms[0] == pytest.approx(expected[0], rel=1e-4)
        assert token_map.high == ["row 1, column 2"]


@pytest.mark.parametrize("name", ["dist_token", "distillation_token"])
def test_a_distillation_token_is_named_behind_the_class_token(name: str) -> None:
    """As timm and transformers call it."""
    network = vision()
    assert prefix_names(network, 2) == ("class token", "register 1")
    network.register_parameter(name, nn.Parameter(torch.zeros(1, 1, WIDTH)))
    assert prefix_names(network, 2) == ("class token", "distillation token")


def test_without_high_tokens_the_last_block_is_drawn_and_one_that_ends_in_a_norm_is_not(pictures: Tensor) -> None:
    run = hookscope.activations(vision(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)), pictures[:1], layer="*")
    assert [token_map.label for token_map in run.token_maps] == ["planted.0"]
    assert run.token_maps[0].high == []


def test_a_layer_whose_high_token_is_in_an_undrawn_input_is_not_called_the_last_block(pictures: Tensor) -> None:
    class InFourthInput(Planted):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x[:3], super().forward(x[3:])])

    network = vision(InFourthInput(9, 3, 40.0), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
    run = hookscope.activations(network, torch.cat([pictures, pictures[:1]]), layer=["planted.*"])
    assert {(token_map.label, *token_map.high) for token_map in run.token_maps} == {("planted.0",)}
    assert ", in layers with high tokens. " in describe_token_norms(run, []).answer[0]


def test_tokens_have_a_picture_and_a_place_on_the_page(pictures: Tensor, tmp_path: Path) -> None:
    run = hookscope.activations(vision(Planted(9, 3, 900.0)), pictures, layer="planted.0")
    massive = str(run).partition("massive activations in ")[2].partition(", median")[0]
    at = run["planted.0"].tokens.massive[0].input_index
    assert "".join(massive.split()).endswith(f"token9(row1,column2)oftensor[{at}]")
    folder = run.save(tmp_path / "run")
    with Image.open(folder / "tokens.png") as drawn:
        assert drawn.width == 1200
    page = report_html(read_run(folder))
    assert "in layers with high tokens" in page
    assert page.count("row 1, column 2</dd>") == 3
    assert page.count("massive activation</td>") == 3
    record = json.loads((folder / "result.json").read_text())
    record["token_maps"][0]["norms"].pop()
    (folder / "result.json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"norms of tokens of 'planted\.0' are of no row"):
        read_run(folder)

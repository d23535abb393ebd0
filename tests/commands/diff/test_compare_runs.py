"""Two runs, compared by what they stored, against the tensors that they had."""

import json
import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import hookscope
from hookscope.commands.diff.compare_runs import compare_runs
from hookscope.commands.diff.describe import answer
from hookscope.errors import HookscopeError, InputError, LayerNotFoundError, NothingMatchedError, UsageError
from hookscope.results.differences import DifferenceRow, Measures, NonFinite
from hookscope.results.runs.store import ARRAYS
from hookscope.statistics.kept_values import kept_values


def network(**changes: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layers = OrderedDict[str, nn.Module](
        stem=nn.Conv2d(3, 12, 3, padding=1),
        norm=nn.BatchNorm2d(12),
        act=nn.ReLU(),
        body=nn.Conv2d(12, 16, 3),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        head=nn.Linear(16, 7),
    )
    return nn.Sequential(layers | changes).eval()


def shaken(module: nn.Module, name: str) -> nn.Module:
    with torch.no_grad():
        weight = module.get_parameter(name)
        weight.add_(
            0.2
            * weight.norm()
            / weight.numel() ** 0.5
            * torch.randn(weight.shape, generator=torch.Generator().manual_seed(9))
        )
    return module


def inputs() -> Tensor:
    return torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 255, (20, 20, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def ran(path: Path, module: nn.Module, images: Any = None, **options: Any) -> Path:
    x = inputs() if images is None else images
    return hookscope.activations(module, x, **options).save(path)


def differentiated(path: Path, module: nn.Module, **options: Any) -> Path:
    return hookscope.grads(module, inputs(), loss="sum", **options).save(path)


def measures(row: DifferenceRow) -> Measures:
    assert row.measures is not None
    return row.measures


@pytest.mark.parametrize("layer", ["norm", "head"])
def test_the_first_layer_that_differs_is_named_by_kept_values_alone(tmp_path: Path, layer: str) -> None:
    a = hookscope.activations(network(), inputs(), save_tensors=True)
    b = hookscope.activations(shaken(network(), f"{layer}.weight"), inputs(), save_tensors=True)
    for name, result in (("a", a), ("b", b)):
        (result.save(tmp_path / name) / "activations.safetensors").unlink()
    differences = compare_runs(tmp_path / "a", tmp_path / "b")
    assert differences.way == "values"
    assert [difference.layer for difference in differences.first_differences] == [layer]
    assert "measured on up to 256 values per input" in differences.notes[0]
    for row in differences.rows:
        tensors = [case.tensors[row.label] for case in (a, b)]
        whole, other = (tensor.double() for tensor in tensors)
        exact = float((whole - other).norm() / whole.norm())
        one, two = (kept_values(tensor, a[row.label].statistics.channel_axis, 2).astype(float) for tensor in tensors)  # type: ignore[union-attr]
        expected = float(np.linalg.norm(one - two) / np.linalg.norm(one))
        assert measures(row).value_count == one.size == min(whole.numel(), 512)
        if expected > 0.9 * exact:  # else statistics may show that it is more
            assert measures(row).relative_l2 == pytest.approx(expected, rel=1e-6)
            cosine = float((one * two).sum() / np.linalg.norm(one) / np.linalg.norm(two))
            assert measures(row).cosine == pytest.approx(cosine, rel=1e-6)
        assert measures(row).relative_l2 == pytest.approx(exact, rel=0.25)


def places_that_are_not_kept(shape: tuple[int, ...], axis: int) -> Tensor:
    """Return which places of a tensor of two inputs no run keeps, as indices of the flattened tensor."""
    kept = {*np.ravel(kept_values(torch.arange(math.prod(shape)).view(shape), axis, 2)).tolist()}  # type: ignore[arg-type]
    return torch.tensor([number for number in range(math.prod(shape)) if number not in kept])


class Changed(nn.Module):
    """Changes values at places that no run keeps."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        at = places_that_are_not_kept(tuple(x.shape), 1)
        flat = x.flatten().index_copy(0, at, self.change(x.flatten()[at]))
        return flat.view(x.shape)


def test_what_only_statistics_show_is_a_difference_of_at_least_as_much(tmp_path: Path) -> None:
    """One value that is not kept becomes 50: the norm and the maximum tell, and no difference could be smaller."""

    def raised(values: Tensor) -> Tensor:
        return torch.cat([torch.full((1,), 50.0), values[1:]])

    a, b = (
        hookscope.activations(network(act=Changed(change)), inputs(), layer="act") for change in (lambda x: x, raised)
    )
    differences = compare_runs(a.save(tmp_path / "a"), b.save(tmp_path / "b"))
    (row,) = differences.rows
    true = (50 - a["act"].max) / a["act"].l2  # type: ignore[operator]
    assert true * 0.95 < measures(row).relative_l2 < true * 1.2
    assert [difference.layer for difference in differences.first_differences] == ["act"]
    same = compare_runs(tmp_path / "a", tmp_path / "a")
    assert [measures(row).relative_l2 for row in same.rows] == [0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_or_inf_on_one_side_is_counted_over_all_values(tmp_path: Path, value: float) -> None:
    def broken(values: Tensor) -> Tensor:
        return torch.cat([torch.full((3,), value), values[3:]])

    a, b = (
        hookscope.activations(network(act=Changed(change)), inputs(), layer="act") for change in (lambda x: x, broken)
    )
    (row,) = compare_runs(a.save(tmp_path / "a"), b.save(tmp_path / "b")).rows
    assert math.isnan(measures(row).relative_l2)
    counts = (0, 0, 3, 0) if math.isnan(value) else (0, 0, 0, 3)
    assert measures(row).nonfinite == NonFinite(*counts, 2 * 12 * 20 * 20)
    (same,) = compare_runs(tmp_path / "b", tmp_path / "b").rows
    assert measures(same).relative_l2 == 0


def test_saved_tensors_make_the_measures_exact(tmp_path: Path) -> None:
    a = hookscope.activations(network(), inputs(), save_tensors=True)
    b = hookscope.activations(shaken(network(), "stem.weight"), inputs(), save_tensors=True)
    differences = compare_runs(a.save(tmp_path / "a"), b.save(tmp_path / "b"))
    assert differences.way == "tensors"
    assert differences.notes == ()
    for row in differences.rows:
        one, other = a.tensors[row.label].double().numpy(), b.tensors[row.label].double().numpy()
        expected = measures(row)
        assert expected.relative_l2 == pytest.approx(np.linalg.norm(one - other) / np.linalg.norm(one), rel=1e-9)
        assert expected.max_abs == np.abs(one - other).max()
        assert expected.max_at == np.unravel_index(np.abs(one - other).argmax(), one.shape)
        assert expected.value_count is None


def test_saved_tensors_are_drawn_as_those_of_networks_that_run(tmp_path: Path, pictures: Path) -> None:
    one, other = network(), shaken(network(), "norm.weight")
    options = {"resize": "none", "crop": "none"}
    folders = [
        ran(tmp_path / name, each, pictures, save_tensors=True, **options)
        for name, each in zip("ab", (one, other), strict=True)
    ]
    differences = compare_runs(*folders)
    live = hookscope.diff(one, other, pictures, **options)
    assert [(heat_map.label, heat_map.arrangement) for heat_map in differences.maps] == [
        (heat_map.label, heat_map.arrangement) for heat_map in live.maps
    ]
    for stored, drawn in zip(differences.maps, live.maps, strict=True):
        np.testing.assert_array_equal(stored.values, drawn.values)
    assert differences.maps[0].label == "norm"
    record = json.loads((differences.save(tmp_path / "found") / "run.json").read_text("utf-8"))
    assert record["grids"][0]["path"] == "grids/001-norm.png"
    for folder in folders:
        (folder / "activations.safetensors").unlink()
    assert compare_runs(*folders).maps == ()


def test_equal_networks_show_no_difference(tmp_path: Path, pictures: Path) -> None:
    prepared = {"resize": "none", "crop": "none"}
    a = ran(tmp_path / "a", network(), str(pictures), **prepared)
    others = {
        "again": ran(tmp_path / "again", network(), str(pictures), **prepared),
        "one at a time": ran(tmp_path / "b1", network(), str(pictures), batch_size=1, **prepared),
        "channels last": ran(
            tmp_path / "cl", network().to(memory_format=torch.channels_last), str(pictures), **prepared
        ),
    }
    for name, other in others.items():
        differences = compare_runs(a, other)
        assert differences.first_differences == (), name
        assert {row.origin for row in differences.rows} <= {"equal", "rounding"}, name
        assert len(differences.rows) == 7, name
        assert (differences.unmatched, differences.warnings) == ((), ()), name
    assert {measures(row).relative_l2 for row in compare_runs(a, others["again"]).rows} == {0.0}


def test_gradients_are_compared_too(tmp_path: Path) -> None:
    results = [
        hookscope.grads(case, inputs(), loss="sum", save_tensors=True)
        for case in (network(), shaken(network(), "body.weight"))
    ]
    paths = [result.save(tmp_path / name) for name, result in zip("ab", results, strict=True)]
    exact = compare_runs(paths[0], paths[1])
    for path in paths:
        (path / "gradients.safetensors").unlink()
    partly = compare_runs(paths[0], paths[1])
    labels = {row.label for row in partly.gradients}
    assert {"stem grad_output", "head grad_output", "stem.weight grad", "norm.bias grad"} <= labels
    tensors = [result.tensors for result in results]
    assert {row.origin for row in partly.gradients if row.relative_l2 == 0} == {"equal"}
    for row, expected in zip(partly.gradients, exact.gradients, strict=True):
        one, other = (tensor[row.label].double() for tensor in tensors)
        true = float((one - other).norm() / one.norm())
        assert measures(expected).relative_l2 == pytest.approx(true, rel=1e-6, abs=1e-12)
        assert measures(expected).value_count is None
        is_whole = measures(row).value_count == one.numel()
        assert measures(row).relative_l2 == pytest.approx(true, rel=1e-6 if is_whole else 0.4, abs=1e-6)


class Detached(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.parametrize("saves", [False, True])
def test_gradients_that_one_run_alone_has_are_no_agreement(tmp_path: Path, saves: bool) -> None:
    a, b = (
        differentiated(tmp_path / name, case, save_tensors=saves)
        for name, case in (("a", network()), ("b", network(act=Detached())))
    )
    differences = compare_runs(a, b)
    notes = {row.label: row.note for row in differences.gradients}
    lost = [label for label in notes if label.startswith(("stem", "norm", "act"))]
    assert {notes[label] for label in lost} == {"B has no gradient here"}
    assert {note for label, note in notes.items() if label not in lost} == {""}
    first, second, *_ = answer(differences)
    agree = f"No difference shows in {len(notes) - len(lost)} gradients."
    alone = f"{len(lost)} of {len(notes)} gradients cannot be compared, as at {lost[0]}: B has no gradient here."
    assert first == f"{agree} {alone}"
    assert second.startswith("A and B are equal")


def test_gradients_are_left_out_where_one_run_has_none(tmp_path: Path) -> None:
    differences = compare_runs(ran(tmp_path / "a", network()), differentiated(tmp_path / "b", network()))
    assert differences.gradients == ()
    assert any("gradients are not compared" in note for note in differences.notes)
    assert {row.origin for row in differences.rows} == {"equal"}


def test_renamed_layers_find_their_partners_and_others_are_listed(tmp_path: Path) -> None:
    a = ran(tmp_path / "a", network())
    wrapped = ran(tmp_path / "wrapped", nn.Sequential(OrderedDict(module=network())).eval())
    assert {row.matched for row in compare_runs(a, wrapped).rows} == {"prefix"}
    layers = OrderedDict((name.replace("body", "trunk"), child) for name, child in network().named_children())
    renamed = ran(tmp_path / "renamed", nn.Sequential(layers).eval())
    by_order = {row.label: (row.label_b, row.matched) for row in compare_runs(a, renamed).rows}
    assert by_order["body"] == ("trunk", "order")
    by_map = {row.label: (row.label_b, row.matched) for row in compare_runs(a, renamed, maps=["body=trunk"]).rows}
    assert by_map["body"] == ("trunk", "map")
    with pytest.raises(LayerNotFoundError, match="matches no layer"):
        compare_runs(a, renamed, maps=["bodi=trunk"])
    less = nn.Sequential(OrderedDict((name, child) for name, child in network().named_children() if name != "act"))
    differences = compare_runs(a, ran(tmp_path / "less", less.eval()))
    assert [(row.side, row.label, row.reason) for row in differences.unmatched] == [("A", "act", "B has no such layer")]
    with pytest.raises(NothingMatchedError, match=r"No row of A .* has a partner in B"):
        compare_runs(a, ran(tmp_path / "other", nn.Sequential(OrderedDict(q=nn.Conv2d(3, 2, 1)))))


def test_a_layer_that_the_other_run_folds_or_does_not_list_is_not_called_on_one_side_alone(tmp_path: Path) -> None:
    a = ran(tmp_path / "a", network())
    unchanged = network(act=nn.Identity())
    differences = compare_runs(a, ran(tmp_path / "unchanged", unchanged))
    (alone,) = differences.unmatched
    assert (alone.side, alone.label, alone.reason) == ("A", "act", "its output is that of norm in B")
    assert "alls act" not in answer(differences)[0]
    differences = compare_runs(a, ran(tmp_path / "chosen", shaken(network(), "head.weight"), layer="head"))
    assert {row.reason for row in differences.unmatched} == {"B's run does not list it"}
    assert answer(differences)[0].startswith("The difference first shows at head (Linear): ")
    assert "alls" not in answer(differences)[0]


def test_another_shape_and_what_is_not_finite_are_said(tmp_path: Path) -> None:
    a = ran(tmp_path / "a", network())
    wide = ran(tmp_path / "wide", network(head=nn.Linear(16, 9)))
    notes = {row.label: (row.note, row.measures) for row in compare_runs(a, wide).rows}
    assert notes["head"] == ("shapes differ", None)
    broken = network()
    with torch.no_grad():
        broken.get_parameter("body.bias")[2] = math.nan
    actual = {row.label: row for row in compare_runs(a, ran(tmp_path / "nan", broken)).rows}
    assert math.isnan(measures(actual["body"]).relative_l2)
    assert measures(actual["body"]).nonfinite == NonFinite(0, 0, 2 * 18 * 18, 0, 2 * 16 * 18 * 18)
    assert measures(actual["act"]).relative_l2 == 0


def test_conditions_are_held_against_rows_and_best_classes(tmp_path: Path) -> None:
    a, b = ran(tmp_path / "a", network()), ran(tmp_path / "b", shaken(network(), "body.weight"))
    differences = compare_runs(a, b, fail_over=["rel>1e-3", "stem:rel>1e-3"])
    assert {each.where for each in differences.exceeded} == {"body", "pool", "flat", "head"}
    assert compare_runs(a, a, fail_over=["rel>1e-3"]).exceeded == ()


def test_best_classes_are_compared_where_both_runs_have_them(tmp_path: Path, pictures: Path) -> None:
    prepared = {"resize": "none", "crop": "none", "classes": [f"class {number}" for number in range(7)]}
    a = ran(tmp_path / "a", network(), str(pictures), **prepared)
    turned = network()
    with torch.no_grad():
        turned.get_submodule("head").weight.neg_()  # type: ignore[union-attr]
        turned.get_submodule("head").bias.neg_()  # type: ignore[union-attr]
    b = ran(tmp_path / "b", turned, str(pictures), **prepared)
    (same,), (other,) = compare_runs(a, a).outputs, compare_runs(a, b).outputs
    assert (same.input_count, same.top1, same.top5) == (2, 2, 1.0)
    assert (other.input_count, other.top1) == (2, 0)
    assert other.top5 == pytest.approx(3 / 5)  # of seven classes in the opposite order
    steep, broken = network(), network()
    with torch.no_grad():  # of NaN, torch calls the same class the best
        steep.get_parameter("head.bias")[torch.full((7,), math.nan).argmax()] = 100.0
        broken.get_parameter("head.bias").fill_(math.nan)
    a, b = (
        ran(tmp_path / "steep", steep, str(pictures), **prepared),
        ran(tmp_path / "nan", broken, str(pictures), **prepared),
    )
    (changed,), (same,) = compare_runs(a, b).outputs, compare_runs(b, b).outputs
    assert (changed.top1, str(changed.top5), same.top1, same.top5) == (0, "nan", 2, 1.0)


class Two(nn.Module):
    def __init__(self, factor: float, name: str = "scaled") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.factor, self.name = nn.Linear(20, 4), factor, name

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.fc(x)
        return {"plain": y, self.name: self.factor * y}


def test_every_output_of_the_networks_is_compared(tmp_path: Path) -> None:
    a, b = (ran(tmp_path / str(factor), Two(factor), layer=["*"]) for factor in (1.0, 3.0))
    actual = {output.slot: output.measures.relative_l2 for output in compare_runs(a, b).outputs if output.measures}
    assert actual == {"['plain']": 0.0, "['scaled']": pytest.approx(2.0)}


def test_an_output_of_another_name_is_paired_as_in_networks_that_run(tmp_path: Path) -> None:
    networks = Two(1.0), Two(3.0, "larger")
    runs = [ran(tmp_path / letter, network, layer=["*"]) for letter, network in zip("ab", networks, strict=True)]
    for result in (compare_runs(runs[0], runs[1]), hookscope.diff(*networks, inputs(), layer="*")):
        assert result["(model)['scaled']"].label_b == "(model)['larger']"
        assert result["(model)['scaled']"].relative_l2 == pytest.approx(2.0)
        assert result.unmatched == ()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 4), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class Several(nn.Module):
    """Calls a layer several times, and returns several tensors."""

    def __init__(self, calls: int, names: str) -> None:
        super().__init__()
        self.layer, self.calls, self.names = nn.Linear(4, 4), calls, names

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for _ in range(self.calls):
            x = self.layer(x)
        return {name: x + place for place, name in enumerate(self.names)}


class Summed(nn.Module):
    def __init__(self, calls: int = 2, names: str = "ab") -> None:
        super().__init__()
        self.several, self.last = Several(calls, names), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(sum(self.several(x).values()))
        return result


@pytest.mark.parametrize(
    ("other", "label", "reason"),
    [
        (Summed(names="a"), "several['b']", "B returns fewer tensors there"),
        (Summed(calls=1), "several.layer#1", "called twice here, once by B"),
    ],
)
def test_runs_say_as_networks_do_why_an_output_is_alone(
    tmp_path: Path, other: nn.Module, label: str, reason: str
) -> None:
    x, layers = torch.ones(2, 4), ["several", "several.layer", "last"]
    other.load_state_dict(Summed().state_dict())
    saved = ran(tmp_path / "a", Summed(), x, layer=layers), ran(tmp_path / "b", other, x, layer=layers)
    for result in (compare_runs(*saved), hookscope.diff(Summed(), other, x, layer=layers)):
        assert [(row.side, row.label, row.reason) for row in result.unmatched] == [("A", label, reason)]
        assert "calls several['b']" not in " ".join(answer(result))


def test_where_inputs_are_not_known_no_difference_is_said_to_be_gone(tmp_path: Path) -> None:
    a = ran(tmp_path / "a", TwoHeads())
    b = ran(tmp_path / "b", shaken(TwoHeads(), "first.weight"))
    said = answer(compare_runs(a, b))[0]
    assert said.startswith("first (Linear) differs, ")
    assert said.endswith(", but the rows agree again at second.")


def refused(error: type[HookscopeError], *paths: Path) -> str:
    with pytest.raises(error) as caught:
        compare_runs(*paths)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_runs_of_different_inputs_are_refused_in_a_line(tmp_path: Path, pictures: Path) -> None:
    prepared = {"resize": "none", "crop": "none"}
    one = ran(tmp_path / "one", network(), str(pictures / "0.png"), **prepared)
    other = ran(tmp_path / "other", network(), str(pictures / "1.png"), **prepared)
    both = ran(tmp_path / "both", network(), str(pictures), **prepared)
    message = refused(UsageError, one, other)
    assert "input 1 is '0.png' (sha256 " in message
    assert "'1.png' (sha256 " in message
    assert "A has 1, B has 2" in refused(UsageError, one, both)
    assert "input 1 is '0.png'" in refused(UsageError, one, ran(tmp_path / "tensor", network()))
    resized = ran(tmp_path / "resized", network(), str(pictures / "0.png"), resize=24, crop="none")
    assert any("preprocessed differently" in text for text in compare_runs(one, resized).warnings)
    assert any("came from Python" in text for text in compare_runs(*[ran(tmp_path / "t", network())] * 2).warnings)


def changed(path: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((path / name).read_bytes())
    change(document)
    (path / name).write_text(json.dumps(document), encoding="utf-8")


def test_what_is_no_run_or_of_an_earlier_version_is_refused_in_a_line(tmp_path: Path) -> None:
    a = ran(tmp_path / "a", network(), save_tensors=True)
    assert "there is no such folder" in refused(InputError, a, tmp_path / "nothing")
    (a / "activations.safetensors").write_bytes(b"\x00" * 9)
    assert "its activations.safetensors is cut short or damaged" in refused(InputError, a, a)
    (a / "activations.safetensors").unlink()
    (a / "activations.safetensors").symlink_to("/etc/passwd")
    assert "is not a regular file" in refused(InputError, a, a)
    (a / "activations.safetensors").unlink()
    (a / ARRAYS).unlink()
    assert "its result.json is not as hookscope writes it: rows.0." in refused(InputError, a, a)
    changed(a, "run.json", lambda document: document.update(verb="attribute"))
    assert "a run of attribute has no rows to compare" in refused(InputError, a, a)

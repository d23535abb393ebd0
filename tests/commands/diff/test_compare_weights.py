"""Weights against NumPy in float64, over networks, files and what was done to them."""

import copy
import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import hookscope
from hookscope.commands.diff.compare_weights import Weights, compare_weights, read_weights, weights_of
from hookscope.commands.diff.describe import answer, describe_differences
from hookscope.errors import CheckpointError, LayerNotFoundError, NothingMatchedError, UntrustedFileError
from hookscope.models.construction import loaded_module
from hookscope.reporting.document import Table
from hookscope.results.differences import Differences, Measures, WeightDifference
from tests.models.hostile import Call


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        OrderedDict(conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), act=nn.ReLU(), head=nn.Linear(8, 5))
    )


def of(module: nn.Module) -> Weights:
    return weights_of(loaded_module(module))


def held(tensors: Mapping[str, Tensor]) -> Weights:
    return Weights(of(nn.Identity()).info, tensors)


def row(actual: Differences, name: str) -> WeightDifference:
    (only,) = [weight for weight in actual.weights if weight.name == name]
    return only


def measures(actual: Differences, name: str) -> Measures:
    expected = row(actual, name).measures
    assert expected is not None
    return expected


def distances(actual: Differences) -> set[float | None]:
    return {None if weight.measures is None else weight.measures.relative_l2 for weight in actual.weights}


def test_equal_networks_have_no_difference_and_no_warning() -> None:
    differences = compare_weights(of(network()), of(network()))
    assert [weight.name for weight in differences.weights] == list(network().state_dict())
    assert distances(differences) == {0.0}
    assert {weight.sign_flips for weight in differences.weights} == {0.0}
    assert {weight.matched for weight in differences.weights} == {"name"}
    assert (differences.unmatched, differences.warnings, differences.rows, differences.way) == ((), (), (), "weights")


def test_measures_are_those_of_numpy_in_float64() -> None:
    a = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    b = a + 0.3 * torch.randn(40, 30, generator=torch.Generator().manual_seed(2))
    differences = compare_weights(held({"w": a}), held({"w": b}))
    one, other = a.double().numpy(), b.double().numpy()
    expected = measures(differences, "w")
    assert expected.relative_l2 == pytest.approx(np.linalg.norm(one - other) / np.linalg.norm(one), rel=1e-12)
    cosine = (one * other).sum() / np.linalg.norm(one) / np.linalg.norm(other)
    assert expected.cosine == pytest.approx(cosine, rel=1e-9)
    assert expected.max_abs == np.abs(one - other).max()
    assert expected.max_at == np.unravel_index(np.abs(one - other).argmax(), one.shape)
    assert expected.unequal_fraction == (one != other).mean()
    assert row(differences, "w").sign_flips == (one * other < 0).mean()
    assert expected.value_count is None


def test_a_negated_tensor_flips_every_sign_but_that_of_zeros() -> None:
    a = torch.tensor([1.0, -2.0, 0.0, 4.0])
    differences = compare_weights(held({"w": a}), held({"w": -a}))
    assert row(differences, "w").sign_flips == 0.75
    assert (measures(differences, "w").relative_l2, measures(differences, "w").cosine) == (2.0, -1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_another_dtype_is_said_and_its_rounding_measured(dtype: torch.dtype) -> None:
    a = torch.randn(300, generator=torch.Generator().manual_seed(3))
    differences = compare_weights(held({"w": a}), held({"w": a.to(dtype)}))
    assert (row(differences, "w").dtype, row(differences, "w").dtype_b) == (
        "float32",
        str(dtype).removeprefix("torch."),
    )
    one = a.double().numpy()
    exact = np.linalg.norm(one - a.to(dtype).double().numpy()) / np.linalg.norm(one)
    assert measures(differences, "w").relative_l2 == pytest.approx(exact, rel=1e-9)
    assert row(differences, "w").sign_flips == 0


def test_equal_values_of_other_bits_are_equal_values() -> None:
    zero, negative = held({"w": torch.zeros(3)}), held({"w": -torch.zeros(3)})
    assert answer(compare_weights(zero, negative)) == ["A and B hold the same values in 1 tensor."]
    a, b = held({"w": torch.ones(3)}), held({"w": torch.ones(3, dtype=torch.bfloat16)})
    assert answer(compare_weights(a, b)) == [
        "A and B hold the same values in 1 tensor.",
        "1 tensor is float32 in A, bfloat16 in B.",
    ]


def test_integers_differ_though_float64_rounds_them_to_one_number() -> None:
    a, b = [2**53, 2**63 - 1, 7], [2**53 + 1, -(2**63), 7]
    for at, max_abs in ((slice(0, 1), 1), (slice(3), 2**64)):
        differences = compare_weights(held({"w": torch.tensor(a[at])}), held({"w": torch.tensor(b[at])}))
        assert measures(differences, "w").max_abs == max_abs
        assert measures(differences, "w").unequal_fraction == len(a[at][:2]) / len(a[at])


@pytest.mark.parametrize(("dtype", "bits"), [(torch.uint16, 16), (torch.uint32, 32), (torch.uint64, 64)])
def test_unsigned_integers_differ_by_their_exact_values(dtype: torch.dtype, bits: int) -> None:
    a, b = (torch.tensor([value, 2**bits - 1], dtype=dtype) for value in (2 ** (bits - 1) + 5, 2 ** (bits - 1) + 4))
    differences = compare_weights(held({"w": a}), held({"w": b}))
    measured = measures(differences, "w")
    assert (measured.max_abs, measured.max_at, measured.unequal_fraction) == (1, (0,), 0.5)
    assert row(differences, "w").sign_flips == 0


def test_tensors_that_cannot_be_compared_are_neither_equal_nor_different() -> None:
    weights = held({"w": torch.eye(3).to_sparse(), "v": torch.ones(3)})
    assert answer(compare_weights(weights, weights)) == ["A and B hold the same values in 1 tensor."]
    alone = held({"w": torch.eye(3).to_sparse()})
    differences = compare_weights(alone, alone)
    assert differences.warnings == ("1 pair of tensors cannot be compared.",)
    assert "No pair of tensors can be compared." in str(differences)


def test_tensors_that_cannot_be_compared_are_not_listed_as_different() -> None:
    module = network()
    tables = describe_differences(hookscope.diff(module, copy.deepcopy(module).to("meta"))).sections[-1].parts
    titles = [part.title for part in tables if isinstance(part, Table) and part.rows]
    assert titles == ["Tensors that differ or cannot be compared"]
    tables = describe_differences(hookscope.diff(module, network())).sections[-1].parts
    assert "Tensors that differ" in [part.title for part in tables if isinstance(part, Table)]


def test_what_is_not_finite_is_counted_and_values_whose_squares_overflow_are_measured() -> None:
    large = torch.full((2,), 1e200, dtype=torch.float64)
    a = held({"odd": torch.ones(2), "large": large})
    b = held({"odd": torch.tensor([1.0, math.nan]), "large": large * 2})
    assert answer(compare_weights(a, b)) == [
        "2 of 2 tensors differ: ‖Δ‖/‖w‖ at most 1.00, at large.",
        "1 tensor holds NaN or Inf on one side only.",
    ]


def test_what_was_added_and_removed_is_listed_with_its_side() -> None:
    a = {"kept": torch.ones(3), "gone": torch.ones(4, 5)}
    b = {"kept": torch.ones(3), "new": torch.zeros(7, dtype=torch.int64)}
    differences = compare_weights(held(a), held(b))
    assert [(each.side, each.label, each.kind, each.shape, each.reason) for each in differences.unmatched] == [
        ("A", "gone", "float32", (4, 5), "B has no such tensor"),
        ("B", "new", "int64", (7,), "A has no such tensor"),
    ]


def test_another_shape_is_a_row_without_measures_and_a_warning() -> None:
    one = torch.ones(1)
    a, b = held({"w": torch.ones(3), "v": one}), held({"w": torch.ones(4), "v": one})
    differences = compare_weights(a, b, fail_over=["rel>1e-3", "v:rel>1e-3"])
    assert [finding.message for finding in differences.exceeded] == ["w is beyond 'rel>1e-3': it cannot be compared."]
    assert (row(differences, "w").measures, row(differences, "w").shape, row(differences, "w").shape_b) == (
        None,
        (3,),
        (4,),
    )
    assert differences.warnings == ("1 pair of tensors cannot be compared.",)


def test_wrapped_renamed_and_mapped_tensors_find_their_partners() -> None:
    state = network().state_dict()
    wrapped = compare_weights(held(state), held({f"module.{name}": tensor for name, tensor in state.items()}))
    assert {weight.matched for weight in wrapped.weights} == {"prefix"}
    renamed = {name.replace("conv", "stem").replace("head", "fc"): tensor for name, tensor in state.items()}
    ordered = compare_weights(held(state), held(renamed))
    assert (row(ordered, "conv.weight").name_b, row(ordered, "conv.weight").matched) == ("stem.weight", "order")
    assert (row(ordered, "head.bias").name_b, row(ordered, "norm.bias").matched) == ("fc.bias", "name")
    mapped = compare_weights(held(state), held(renamed), maps=["conv.*=stem.*", "head.*=fc.*"])
    assert (row(mapped, "head.bias").name_b, row(mapped, "head.bias").matched) == ("fc.bias", "map")
    for actual in (wrapped, ordered, mapped):
        assert len(actual.weights) == len(state)
        assert distances(actual) == {0.0}
        assert actual.unmatched == ()


def test_nothing_in_common_is_an_error_and_so_is_a_map_of_nothing() -> None:
    with pytest.raises(NothingMatchedError, match=r"No tensor of A .* has a partner in B"):
        compare_weights(held({"a": torch.ones(3)}), held({"b": torch.ones(4)}))
    with pytest.raises(LayerNotFoundError, match="matches no layer of A"):
        compare_weights(held({"a": torch.ones(3)}), held({"b": torch.ones(3)}), maps=["q*=b*"])


def test_values_that_are_not_finite_show() -> None:
    a, b = torch.ones(4), torch.ones(4)
    b[2] = math.nan
    assert math.isnan(measures(compare_weights(held({"w": a}), held({"w": b})), "w").relative_l2)
    assert measures(compare_weights(held({"w": b}), held({"w": b.clone()})), "w").relative_l2 == 0


def test_files_need_no_network_and_a_converted_file_equals_its_original(tmp_path: Path) -> None:
    state = network().state_dict()
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "a.pt")
    save_file(state, tmp_path / "a.safetensors")
    b = read_weights(tmp_path / "a.safetensors")
    differences = compare_weights(read_weights(tmp_path / "a.pt"), b)
    assert distances(differences) == {0.0}
    assert len(differences.weights) == len(state)
    assert differences.a.model.parameter_count == sum(parameter.numel() for parameter in network().parameters())
    assert (differences.a.dtype, differences.a.model.name, differences.b.model.name) == (
        "float32",
        "a.pt",
        "a.safetensors",
    )
    assert compare_weights(of(network()), b).unmatched == ()


def test_hostile_and_missing_files_are_refused(tmp_path: Path) -> None:
    torch.save({"w": Call(exec, "1")}, tmp_path / "pickled.pt")
    with pytest.raises(UntrustedFileError):
        read_weights(tmp_path / "pickled.pt")
    with pytest.raises(CheckpointError, match="does not exist"):
        read_weights(tmp_path / "nothing.pt")


def test_sparse_tensors_are_said_not_to_be_compared() -> None:
    inputs = held({"s": torch.eye(3).to_sparse(), "w": torch.ones(2)})
    differences = compare_weights(inputs, inputs)
    assert row(differences, "s").measures is None
    assert len(differences.warnings) == 1


def test_packed_tensors_of_int8_modules_are_named_by_their_place() -> None:
    class Packed(nn.Module):
        def state_dict(self, *_args: object, **_options: object) -> dict[str, object]:  # type: ignore[override]
            return {"packed": (torch.ones(2), None), "scale": torch.ones(1), "dtype": torch.qint8}

    assert [weight.name for weight in compare_weights(of(Packed()), of(Packed())).weights] == ["packed[0]", "scale"]


@pytest.mark.parametrize("passes", [False, True], ids=["weights", "passes"])
def test_networks_that_have_little_in_common_are_said_to_be_different(passes: bool) -> None:
    one = network().eval()
    one.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    other = nn.Sequential(
        nn.Flatten(), *(nn.Sequential(nn.Linear(192, 192), nn.Tanh()) for _ in range(3)), nn.Linear(192, 5)
    )
    x = (torch.randn(1, 3, 8, 8),) if passes else ()
    first = hookscope.diff(one, other.eval(), *x)
    (sentence, *_) = answer(first)
    pairs = "6 rows in A and 8 in B make 1 pair." if passes else "9 tensors in A and 8 in B make 1 pair, 1 of them by"
    assert sentence.startswith(f"A and B are different networks: {pairs}")
    (sentence, *_) = answer(hookscope.diff(one, copy.deepcopy(one)))
    assert sentence.startswith("A and B hold the same values")

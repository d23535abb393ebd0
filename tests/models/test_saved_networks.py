"""TorchScript and exported programs under hooks: what they see is what they see of the eager network."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from hookscope.checkpoints.weights_files import WeightsFiles
from hookscope.models.construction import LoadedModel
from hookscope.models.exported import load_program
from hookscope.models.input_spec import example_shape, infer_input_shape, picture_size
from tests.inspections import inspect
from tests.models.saved import SAVERS, SEVEN, assert_near, build, witness

# Networks are compared in double precision; a trace holds the scale of attention in single.
TOLERANCES = {"scripted": 1e-6, "traced": 1e-6, "exported": 1e-9}


@dataclass(frozen=True)
class Case:
    """A network, and the same out of a file."""

    form: str
    eager: nn.Module
    args: tuple[Any, ...]
    loaded: LoadedModel

    @property
    def may_lack(self) -> bool:
        """Whether the file need not hold calls that changed nothing."""
        return self.form != "scripted"


# One network in every form, each other one in the form that meets it in a way of its own.
CASES = [
    *(f"{form} vit" for form in TOLERANCES),
    *("scripted resnet", "scripted mobilenet_v3", "exported convnext", "exported swin"),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    form, name = request.param.split()
    eager, args = build(SEVEN[name])
    eager, args = eager.double(), (args[0].double(),)  # what differs then is not rounding
    path = tmp_path_factory.mktemp(form) / "model.pt"
    SAVERS[form](eager, args, path)
    return Case(form, eager, args, load_program(WeightsFiles.at(path)))


@pytest.mark.sample("scripted resnet", "traced vit", "exported vit")
def test_names_and_classes_of_modules_and_tensors_are_the_original_ones(case: Case) -> None:
    module = case.loaded.module
    kinds = {name: type(module).__name__ for name, module in case.eager.named_modules()}
    if case.form == "exported":  # layers that are in no graph have no class
        assert dict(module.named_modules()).keys() <= kinds.keys()
        assert not any(each.training for each in module.modules())
    else:
        assert {name: type(each).__name__ for name, each in module.named_modules()} == kinds
        assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in module.parameters())
    assert [name for name, _ in module.named_parameters()] == [name for name, _ in case.eager.named_parameters()]
    assert module.state_dict().keys() == case.eager.state_dict().keys()
    for name, tensor in case.eager.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor)


@pytest.mark.sample("scripted resnet", "traced vit", "exported vit")
def test_every_call_has_the_activation_and_the_gradient_that_the_eager_one_has(case: Case) -> None:
    tolerance = TOLERANCES[case.form]
    expected, outputs = witness(case.eager, case.args)
    seen, again = witness(case.loaded.module, case.args)
    missing = expected.activations.keys() - seen.activations.keys()
    assert missing <= (expected.passed_through if case.may_lack else set())
    assert seen.activations.keys() <= expected.activations.keys()
    assert seen.kinds.items() <= expected.kinds.items()
    assert seen.gradients.keys() == expected.gradients.keys() - missing
    assert sum(bool(gradient.any()) for gradient in seen.gradients.values()) > 20
    for key, tensor in seen.activations.items():
        assert_near(tensor, expected.activations[key], tolerance)
    for key, tensor in seen.gradients.items():
        assert_near(tensor, expected.gradients[key], tolerance)
    for first, second in zip(again, outputs, strict=True):
        assert_near(first, second, tolerance)
    parameters = dict(case.loaded.module.named_parameters())
    for name, parameter in case.eager.named_parameters():
        assert_near(parameters[name].grad, parameter.grad, tolerance)


@pytest.mark.sample("scripted resnet", "traced vit", "exported vit")
def test_an_inspection_shows_the_rows_of_the_eager_network(case: Case) -> None:
    expected = {row.label: row for row in inspect(case.eager, case.args[0], ["*"]).rows}
    rows = inspect(case.loaded, case.args[0], ["*"]).rows
    passed = {label for label, row in expected.items() if "pass-through" in row.flags}
    # Attention in a graph returns one tensor, without the None beside it.
    labels = {f"{row.label}[0]" if f"{row.label}[0]" in expected else row.label: row for row in rows}
    assert labels.keys() <= expected.keys()
    assert expected.keys() - labels.keys() <= (passed if case.may_lack else set())
    for label, row in labels.items():
        wanted = expected[label]
        assert (row.kind, row.parameter_count, row.flags) == (wanted.kind, wanted.parameter_count, wanted.flags)
        for name in ("shape", "dtype", "element_count", "channel_axis", "channel_count"):
            assert getattr(row.activation, name) == getattr(wanted.activation, name), (label, name)
        assert row.activation.l2 == pytest.approx(wanted.activation.l2, rel=1e-6)


@pytest.mark.sample("scripted resnet", "traced vit", "exported vit")
def test_the_expected_input_is_the_eager_networks_and_the_exports(case: Case) -> None:
    shape = infer_input_shape(case.eager)
    if shape is not None and picture_size(case.eager):
        shape = (*shape[:2], 224, 224)  # a graph lacks the attribute
    assert infer_input_shape(case.loaded.module) == shape
    if case.form != "exported":
        return
    count, *sizes = case.args[0].shape
    assert example_shape(case.loaded.module, case.loaded.preprocessing) == (1, *sizes)
    text = f"({', '.join(map(str, (count, *sizes)))})"
    said = f"model.pt: exported for inputs of shape {text}, so it takes batches of exactly {count}."
    assert [warning for warning in case.loaded.warnings if "batches" in warning] == ([] if count == 1 else [said])

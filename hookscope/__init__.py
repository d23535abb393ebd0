"""hookscope: see what happens inside a PyTorch network.

The command line is `hookscope`; this is the same as a library. Names are loaded on first use, so that importing
hookscope does not import torch.

    >>> import hookscope
    >>> model = hookscope.load_model("demo")
    >>> batches = hookscope.load_batches(["sample_images/cat.jpg"], model.preprocessing)
    >>> inspection = hookscope.inspect(model, batches, ["type:conv"], grids_for=1)
    >>> hookscope.draw_grid(inspection.feature_maps[0]).save("first.png")
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hookscope.results.showing import RENDERERS

if TYPE_CHECKING:
    from hookscope.checks.checkpoint import check
    from hookscope.errors import (
        CheckpointError,
        HookscopeError,
        ImageError,
        InputError,
        LayerNotFoundError,
        MisfitError,
        ModelError,
        ModelNotFoundError,
        NothingMatchedError,
        OutputError,
        UnfitInputError,
        UntrustedFileError,
        UsageError,
    )
    from hookscope.hooks.forward_hooks import ModuleCall, Observation, capture
    from hookscope.hooks.gradient_hooks import GradientSite
    from hookscope.hooks.interventions import Intervention
    from hookscope.hooks.selection import select_layers
    from hookscope.hooks.tensor_gradients import TensorGradients, tensor_gradients
    from hookscope.inputs import Batch, load_batches, load_input, noise_batch
    from hookscope.inspection.backward import PassError, inspect_gradients
    from hookscope.inspection.forward import ForwardError, inspect, list_modules
    from hookscope.models import LoadedModel, load_model, model_names
    from hookscope.render.grids import draw_grid
    from hookscope.render.plots import gradient_flow, gradient_histograms, parameter_ratios
    from hookscope.render.tables import rows_to_csv
    from hookscope.render.terminal import layer_table
    from hookscope.results.activations import Activations, FeatureMaps, LayerRow
    from hookscope.results.check import CheckReport, Finding, RuleOutcome
    from hookscope.results.gradients import GradientRow, Gradients, LossRecord, ParameterRow
    from hookscope.results.inputs import Preprocessing
    from hookscope.results.statistics import TensorStatistics
    from hookscope.runs.serialize import inspection_to_json
    from hookscope.statistics import tensor_statistics

__all__ = [
    "Activations",
    "Batch",
    "CheckReport",
    "CheckpointError",
    "FeatureMaps",
    "Finding",
    "ForwardError",
    "GradientRow",
    "GradientSite",
    "Gradients",
    "HookscopeError",
    "ImageError",
    "InputError",
    "Intervention",
    "LayerNotFoundError",
    "LayerRow",
    "LoadedModel",
    "LossRecord",
    "MisfitError",
    "ModelError",
    "ModelNotFoundError",
    "ModuleCall",
    "NothingMatchedError",
    "Observation",
    "OutputError",
    "ParameterRow",
    "PassError",
    "Preprocessing",
    "RuleOutcome",
    "TensorGradients",
    "TensorStatistics",
    "UnfitInputError",
    "UntrustedFileError",
    "UsageError",
    "capture",
    "check",
    "draw_grid",
    "gradient_flow",
    "gradient_histograms",
    "inspect",
    "inspect_gradients",
    "inspection_to_json",
    "layer_table",
    "list_modules",
    "load_batches",
    "load_input",
    "load_model",
    "model_names",
    "noise_batch",
    "parameter_ratios",
    "rows_to_csv",
    "select_layers",
    "tensor_gradients",
    "tensor_statistics",
]

# Where each name lives.
_HOMES = {
    "results.check": ("CheckReport", "Finding", "RuleOutcome"),
    "checks.checkpoint": ("check",),
    "errors": (
        "CheckpointError",
        "HookscopeError",
        "ImageError",
        "InputError",
        "LayerNotFoundError",
        "MisfitError",
        "ModelError",
        "ModelNotFoundError",
        "NothingMatchedError",
        "OutputError",
        "UnfitInputError",
        "UntrustedFileError",
        "UsageError",
    ),
    "hooks.gradient_hooks": ("GradientSite",),
    "inspection.backward": ("PassError", "inspect_gradients"),
    "hooks.forward_hooks": ("ModuleCall", "Observation", "capture"),
    "inputs": ("Batch", "load_batches", "load_input", "noise_batch"),
    "inspection.forward": ("ForwardError", "inspect", "list_modules"),
    "hooks.interventions": ("Intervention",),
    "hooks.selection": ("select_layers",),
    "statistics": ("tensor_statistics",),
    "models": ("LoadedModel", "load_model", "model_names"),
    "render.grids": ("draw_grid",),
    "render.plots": ("gradient_flow", "gradient_histograms", "parameter_ratios"),
    "render.tables": ("rows_to_csv",),
    "render.terminal": ("layer_table",),
    "results.activations": ("Activations", "FeatureMaps", "LayerRow"),
    "results.gradients": ("GradientRow", "Gradients", "LossRecord", "ParameterRow"),
    "results.inputs": ("Preprocessing",),
    "results.statistics": ("TensorStatistics",),
    "runs.serialize": ("inspection_to_json",),
    "hooks.tensor_gradients": ("TensorGradients", "tensor_gradients"),
}
_HOME_BY_NAME = {name: home for home, names in _HOMES.items() for name in names}


def _html_of(result: object) -> str:
    from hookscope.render.notebook import result_html  # noqa: PLC0415 - loads Rich and Matplotlib, for notebooks alone

    return result_html(result)


RENDERERS["html"] = _html_of


def __getattr__(name: str) -> object:
    home = _HOME_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module 'hookscope' has no attribute {name!r}")
    value: object = getattr(import_module(f"hookscope.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_BY_NAME})

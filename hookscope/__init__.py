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

if TYPE_CHECKING:
    from hookscope.check_results import CheckReport, Finding, RuleOutcome
    from hookscope.checking import check
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
    from hookscope.gradient_watch import GradientSite
    from hookscope.gradients import PassError, inspect_gradients
    from hookscope.hooks import ModuleCall, Observation, capture
    from hookscope.inputs import Batch, load_batches, load_input, noise_batch
    from hookscope.inspection import ForwardError, inspect, list_modules
    from hookscope.interventions import Intervention
    from hookscope.layers import select_layers
    from hookscope.measure import tensor_statistics
    from hookscope.models import LoadedModel, load_model, model_names
    from hookscope.render.grids import draw_grid
    from hookscope.render.plots import gradient_flow, gradient_histograms, parameter_ratios
    from hookscope.render.tables import inspection_to_json, rows_to_csv
    from hookscope.render.terminal import layer_table
    from hookscope.results import (
        FeatureMaps,
        GradientInspection,
        GradientRow,
        Inspection,
        LayerRow,
        LossRecord,
        ParameterRow,
        Preprocessing,
        TensorStatistics,
    )
    from hookscope.tensor_hooks import TensorGradients, tensor_gradients

__all__ = [
    "Batch",
    "CheckReport",
    "CheckpointError",
    "FeatureMaps",
    "Finding",
    "ForwardError",
    "GradientInspection",
    "GradientRow",
    "GradientSite",
    "HookscopeError",
    "ImageError",
    "InputError",
    "Inspection",
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
    "check_results": ("CheckReport", "Finding", "RuleOutcome"),
    "checking": ("check",),
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
    "gradient_watch": ("GradientSite",),
    "gradients": ("PassError", "inspect_gradients"),
    "hooks": ("ModuleCall", "Observation", "capture"),
    "inputs": ("Batch", "load_batches", "load_input", "noise_batch"),
    "inspection": ("ForwardError", "inspect", "list_modules"),
    "interventions": ("Intervention",),
    "layers": ("select_layers",),
    "measure": ("tensor_statistics",),
    "models": ("LoadedModel", "load_model", "model_names"),
    "render.grids": ("draw_grid",),
    "render.plots": ("gradient_flow", "gradient_histograms", "parameter_ratios"),
    "render.tables": ("inspection_to_json", "rows_to_csv"),
    "render.terminal": ("layer_table",),
    "results": (
        "FeatureMaps",
        "GradientInspection",
        "GradientRow",
        "Inspection",
        "LayerRow",
        "LossRecord",
        "ParameterRow",
        "Preprocessing",
        "TensorStatistics",
    ),
    "tensor_hooks": ("TensorGradients", "tensor_gradients"),
}
_HOME_BY_NAME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    home = _HOME_BY_NAME.get(name)
    if home is None:
        raise AttributeError(f"module 'hookscope' has no attribute {name!r}")
    value: object = getattr(import_module(f"hookscope.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_BY_NAME})

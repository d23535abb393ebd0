"""hookscope: see what happens inside a PyTorch network.

One function for each command of `hookscope`, under the same name and with the same options. Names are loaded on first
use, so that importing hookscope does not import torch.

    >>> import hookscope
    >>> run = hookscope.activations("demo", "sample_images/cat.jpg", layer="conv_head", grids_for=1)
    >>> run["_conv_head"].shape
    (1, 1280, 7, 7)
    >>> hookscope.draw_grid(run.feature_maps[0]).save("features.png")
"""

from importlib import import_module
from inspect import isfunction
from typing import TYPE_CHECKING

from hookscope.results.renderers import RENDERERS

if TYPE_CHECKING:
    from hookscope.api import (
        activations,
        attention,
        attribute,
        check,
        checkpoint,
        diff,
        features,
        grads,
        history,
        layers,
        report,
        survey,
        watch,
    )
    from hookscope.commands.watch.watch import Watch
    from hookscope.errors import (
        CheckpointError,
        HookscopeError,
        InputError,
        LayerNotFoundError,
        ModelError,
        UntrustedFileError,
        UsageError,
    )
    from hookscope.hooks.forward_hooks import capture
    from hookscope.hooks.selection import select_layers
    from hookscope.hooks.tensor_gradients import tensor_gradients
    from hookscope.inspection.backward import PassError
    from hookscope.inspection.forward import ForwardError
    from hookscope.models.construction import LoadedModel
    from hookscope.models.spec import load_model
    from hookscope.reporting.grids import draw_grid
    from hookscope.results.activations import Activations
    from hookscope.results.attention import Attention
    from hookscope.results.attributions import Attributions
    from hookscope.results.check import CheckReport
    from hookscope.results.contents import CheckpointContents
    from hookscope.results.differences import Differences
    from hookscope.results.gradients import Gradients
    from hookscope.results.history import History
    from hookscope.results.network import ModuleTable
    from hookscope.results.survey import Survey
    from hookscope.results.training import TrainingLog
    from hookscope.statistics.reducer import tensor_statistics

__all__ = [
    "Activations",
    "Attention",
    "Attributions",
    "CheckReport",
    "CheckpointContents",
    "CheckpointError",
    "Differences",
    "ForwardError",
    "Gradients",
    "History",
    "HookscopeError",
    "InputError",
    "LayerNotFoundError",
    "LoadedModel",
    "ModelError",
    "ModuleTable",
    "PassError",
    "Survey",
    "TrainingLog",
    "UntrustedFileError",
    "UsageError",
    "Watch",
    "activations",
    "attention",
    "attribute",
    "capture",
    "check",
    "checkpoint",
    "diff",
    "draw_grid",
    "features",
    "grads",
    "history",
    "layers",
    "load_model",
    "report",
    "select_layers",
    "survey",
    "tensor_gradients",
    "tensor_statistics",
    "watch",
]

# Where each name lives: the functions in `api`, but for these.
_HOMES = {
    **dict.fromkeys(__all__, "api"),
    **{name: "errors" for name in __all__ if name.endswith("Error")},
    "Activations": "results.activations",
    "Attention": "results.attention",
    "Attributions": "results.attributions",
    "CheckReport": "results.check",
    "CheckpointContents": "results.contents",
    "Differences": "results.differences",
    "ForwardError": "inspection.forward",
    "Gradients": "results.gradients",
    "History": "results.history",
    "LoadedModel": "models.construction",
    "ModuleTable": "results.network",
    "PassError": "inspection.backward",
    "Survey": "results.survey",
    "TrainingLog": "results.training",
    "Watch": "commands.watch.watch",
    "capture": "hooks.forward_hooks",
    "draw_grid": "reporting.grids",
    "load_model": "models.spec",
    "select_layers": "hooks.selection",
    "tensor_gradients": "hooks.tensor_gradients",
    "tensor_statistics": "statistics.reducer",
}

# How results print, convert, save and show themselves.
RENDERERS.update(
    {
        "text": "hookscope.commands.conversion:result_text",
        "html": "hookscope.commands.notebook:result_html",
        "dict": "hookscope.commands.conversion:result_dict",
        "frame": "hookscope.commands.conversion:result_frame",
        "picture": "hookscope.commands.run_files:result_picture",
        "save": "hookscope.commands.run_files:save_result",
    }
)


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'hookscope' has no attribute {name!r}")
    value: object = getattr(import_module(f"hookscope.{home}"), name)
    if isfunction(value):
        from hookscope.parameters import called_from_python  # noqa: PLC0415 - nor does this import torch

        value = called_from_python(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

"""Call a function before the first forward pass of a training, so that edits miss nothing."""

import functools
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def before_first_forward(call: Callable[[], None]) -> None:
    """Call `call` before the first forward pass with gradients after an optimiser has been made.

    By then networks are wrapped and moved, and weights are loaded. A forward pass inside compiled code is not seen.
    """
    handles: list[RemovableHandle] = []
    ignored = ("ignore", re.compile("Using `torch.compile.* when there are global hooks"), UserWarning, None, 0)

    def forward_begins(_module: nn.Module, _args: object) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        while handles:
            handles.pop().remove()
            with suppress(ValueError):  # the script has set other filters
                warnings.filters.remove(ignored)  # type: ignore[attr-defined]
        call()

    made = Optimizer.__init__

    @functools.wraps(made)
    def observed(optimizer: Optimizer, *args: Any, **keywords: Any) -> None:
        made(optimizer, *args, **keywords)
        if not handles:
            handles.append(register_module_forward_pre_hook(forward_begins))
            warnings.filters.insert(0, ignored)  # type: ignore[attr-defined]  # of `torch.compile`, about our hook

    Optimizer.__init__ = observed  # type: ignore[method-assign, assignment]

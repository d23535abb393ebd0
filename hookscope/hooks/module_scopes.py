"""Follow which modules run: a callback before and after each call, and nothing else that takes time.

`capture` observes tensors; these hooks are for counting and timing.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from hookscope.hooks.calls import Hook
from hookscope.hooks.tracing import eager


@contextmanager
def module_scopes(
    modules: Mapping[str, nn.Module], enter: Callable[[str], None], leave: Callable[[str, object], None]
) -> Iterator[None]:
    """Call `enter` before and `leave` after each call of each module, for the length of a `with` block.

    Args:
        modules: By name, each once.
        enter: Given the name, after all pre-hooks that the module has.
        leave: Given the name and what the module returns, after all of its hooks; None where it raised.
    """

    def begin(name: str, *_called_with: object) -> None:
        enter(name)

    def end(name: str, _module: nn.Module, _args: object, output: object) -> None:
        leave(name, output)

    key: Any = object()
    attached: list[MutableMapping[Any, Any]] = []
    try:
        with eager():
            for name, module in modules.items():
                # Without handles, which modules of TorchScript refuse.
                attached += (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called)
                module._forward_pre_hooks[key] = Hook(begin, name)
                module._forward_hooks[key] = Hook(end, name)
                module._forward_hooks_always_called[key] = True
            yield
    finally:
        for hooks in attached:
            hooks.pop(key, None)

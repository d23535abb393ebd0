"""The activations of a compiled network, from one additional forward pass that is not compiled.

Hooks do not fire in compiled code. So before the first forward pass of a watched step the network runs once more,
eagerly and without gradients, on a copy of its inputs. Random states, buffers and everything else that this changes are
restored.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hookscope.commands.watch.activations import ForwardPasses
from hookscope.hooks.calls import Hook
from hookscope.inspection.state.preservation import preserved


@dataclass(slots=True)
class EagerForward(ForwardPasses):
    """One forward pass of a compiled network at a watched step."""

    counts_without_gradients: bool = True
    _waiting: ExitStack = field(default_factory=ExitStack)

    def begin(self) -> None:
        """Wait for the first forward pass with gradients; `end` stops waiting."""
        self._passes = []
        self._waiting = ExitStack()
        module = self.watched.given
        compiled = module._compiled_call_impl
        if compiled is None:
            key = object()
            module._forward_pre_hooks[key] = Hook(lambda _module, args, keywords: self._run(args, keywords))  # type: ignore[index]
            module._forward_pre_hooks_with_kwargs[key] = True  # type: ignore[index]
            self._waiting.callback(module._forward_pre_hooks.pop, key, None)  # type: ignore[arg-type]
            self._waiting.callback(module._forward_pre_hooks_with_kwargs.pop, key, None)  # type: ignore[arg-type]
        else:  # compiled in place by `compile()`: the network's own hooks would be compiled too
            module._compiled_call_impl = torch._disable_dynamo(_before(compiled, self._run))  # type: ignore[attr-defined]
            self._waiting.callback(setattr, module, "_compiled_call_impl", compiled)

    def end(self) -> None:
        """Stop waiting. A second call does nothing."""
        self._waiting.close()

    def _may_enter_mode(self) -> bool:
        return True  # nothing runs compiled, and what it computes is not trained on

    def _run(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._waiting.close()
        try:
            self._run_eagerly(args, keywords)
        except Exception as error:  # noqa: BLE001 - never into a training
            self.failed(error)

    def _run_eagerly(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        network = self.watched.network
        if _process_count() > 1 and any(isinstance(module, nn.SyncBatchNorm) for module in network.modules()):
            raise RuntimeError("SyncBatchNorm waits for the other processes, which do not run eagerly")
        copies = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, keywords))
        mode: Any = "train" if network.training else "eval"
        eagerly = torch.compiler.set_stance("force_eager")
        with eagerly, preserved(network, 0, mode, differentiates=False), torch.no_grad():
            try:
                ForwardPasses.begin(self)
                network(*copies[0], **copies[1])
            finally:
                ForwardPasses.end(self)


def _process_count() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def _before(call: Callable[..., Any], run: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Callable[..., Any]:
    def observed(*args: Any, **keywords: Any) -> Any:
        run(args, keywords)
        return call(*args, **keywords)

    return observed

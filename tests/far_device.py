"""A device made of Python, for what hookscope does on an accelerator: no machine of the tests needs to have one.

A tensor there says that it lies on "far:0" and is of no dense kind that compiled code or NumPy could read, but what is
computed with it is computed on the CPU. Like a GPU, the device refuses to compute with tensors that lie elsewhere, and
whoever wants to know a value has to wait for it: these moments are noted.

Registering a device changes the process for good, so tests use it in a process of their own.
"""

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

TRANSFER = "transfer"

looks: list[str] = []
"""What has made somebody wait since it was cleared: `TRANSFER`, or an operation whose result depends on values."""

launches: list[str] = []
"""The operations that have been started there since it was cleared; views are none."""

_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# What a GPU, too, takes together with tensors of the CPU: copies, and lists of indices.
_BETWEEN_DEVICES = {"copy_", "index", "index_put", "index_put_", "_index_put_impl_"}

_registered: list[torch.library.Library] = []


class FarTensor(Tensor):
    """A tensor on the device; `near` holds its values on the CPU."""

    near: Tensor

    @staticmethod
    def __new__(cls, near: Tensor) -> Self:
        with torch.inference_mode(near.is_inference()):  # a view made in inference mode need not be of that kind
            made = Tensor._make_wrapper_subclass(
                cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device="far:0"
            )
        made.near = near
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, *args, **(kwargs or {}))


def register() -> None:
    """Make the device known to torch."""
    _setup_privateuseone_for_python_backend("far")
    library = torch.library.Library("_", "IMPL")
    library.fallback(_compute, "PrivateUse1")  # what makes tensors there of nothing, and so comes with no FarTensor
    _registered.append(library)


def _compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    name = func.overloadpacket.__name__
    inputs = [tree_leave for tree_leave in pytree.tree_leaves((args, kwargs)) if isinstance(tree_leave, Tensor)]
    far = [tensor for tensor in inputs if isinstance(tensor, FarTensor)]
    if far and any(tensor.dim() and not isinstance(tensor, FarTensor) for tensor in inputs):
        if name not in _BETWEEN_DEVICES:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        if name == "copy_":
            looks.append(TRANSFER)
    fetched = bool(far) and "device" in kwargs and torch.device(kwargs["device"]).type == "cpu"
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    near_args, near_kwargs = pytree.tree_map_only(FarTensor, lambda tensor: tensor.near, (args, kwargs))
    result = func(*near_args, **near_kwargs)
    if fetched:
        looks.append(TRANSFER)
        return result
    memory = {tensor.near.untyped_storage().data_ptr() for tensor in far}
    made = [tree_leave for tree_leave in pytree.tree_leaves(result) if isinstance(tree_leave, Tensor)]
    if func._schema.is_mutable or any(tensor.untyped_storage().data_ptr() not in memory for tensor in made):
        launches.append(name)
    if _DEPENDENT & set(func.tags):
        looks.append(name)
    expected = {id(tensor.near): tensor for tensor in far}  # what works in place returns what it was given
    return pytree.tree_map_only(
        Tensor, lambda tensor: expected[id(tensor)] if id(tensor) in expected else FarTensor(tensor), result
    )


def sent(value: Any) -> Any:
    """Return copies of the tensors in a nested value, on the device."""
    return pytree.tree_map_only(
        Tensor, lambda tensor: FarTensor(tensor.detach().clone()).requires_grad_(tensor.requires_grad), value
    )


def network_sent(network: nn.Module) -> nn.Module:
    """Return a copy of a network on the device; what is tied stays tied."""
    network = copy.deepcopy(network)
    parameters = {
        id(parameter): nn.Parameter(sent(parameter.detach()), parameter.requires_grad)
        for parameter in network.parameters()
    }
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = parameters[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = sent(buffer)
    return network

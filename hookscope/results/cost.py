"""The cost of modules in one forward pass (multiply-adds, bytes, time), and their receptive fields."""

from dataclasses import dataclass, fields, replace

from hookscope.errors import LayerNotFoundError, nearest


@dataclass(frozen=True, slots=True)
class ReceptiveField:
    """The part of the input that a cell of a map can depend on, in closed form, along each axis of the picture.

    Attributes:
        size: Pixels that one cell depends on, (height, width), not cut off at the border; for a sequence (length,), for
            a clip (frames, height, width). Cells differ after an upsampling layer, where this is their mean, and after
            a transposed convolution, where it is the widest.
        stride: Pixels from one cell to the next.
        centre: Centre of the first cell's window, in pixels; the middle of the first pixel is 0.
        at_least: Whether values from other places enter too, so that the size is a lower bound: through a
            squeeze-and-excitation gate, attention, or a normalisation over the whole map.
    """

    size: tuple[float, ...]
    stride: tuple[float, ...]
    centre: tuple[float, ...]
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class CostSums:
    """The costs that add up.

    Attributes:
        multiply_adds: Products that are summed, in matrix products, convolutions, attention and recurrent layers: half
            of the FLOPs that `torch.utils.flop_counter` counts.
        parameter_count: Elements; a tied parameter counts once, where it comes first.
        parameter_bytes: Bytes of the parameters.
        trainable_count: Elements of parameters that require a gradient.
        saved_bytes: Bytes that autograd keeps for the backward pass, without parameters and buffers, in eval mode.
            Memory that several tensors share counts once, where it is saved first.
    """

    multiply_adds: int = 0
    parameter_count: int = 0
    parameter_bytes: int = 0
    trainable_count: int = 0
    saved_bytes: int = 0

    def __add__(self, other: "CostSums") -> "CostSums":
        """Return the sum of both."""
        return CostSums(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """The cost of one module, over all of its calls in one forward pass.

    Attributes:
        layer: Dotted name; "" is the whole model.
        total: Cost of the module with its submodules.
        own: Cost without its submodules: what its own forward computes and holds. Summed over all modules, it is the
            cost of the network.
        output_bytes: Bytes of the tensors that it returns; None if it was not called.
        receptive_field: Receptive field of the output of its first call; None if it is unknown, or if the output is not
            a map of the input.
        seconds: Time from call to return, with its submodules; median of the passes. Times do not add up. None if it
            was not timed.
    """

    layer: str
    total: CostSums
    own: CostSums
    output_bytes: int | None = None
    receptive_field: ReceptiveField | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class UncountedOperation:
    """An operation with an unknown number of multiply-adds: none were counted.

    Attributes:
        name: Torch's name: "aten._fft_r2c".
        layer: The innermost module that ran at the first call.
    """

    name: str
    call_count: int
    layer: str


@dataclass(frozen=True, slots=True)
class NetworkCost:
    """The cost of one forward pass of a network.

    Attributes:
        input_shapes: Shapes of the input tensors.
        modules: In the order of `named_modules()`, the whole model first.
        leaves: Sum over the modules without submodules.
        outside: Sum over what the other modules compute and hold in their own code.
        uncounted: Operations whose multiply-adds are not known.
        pass_count: Number of passes whose median the times are; 0 if there are no times.
        device: Device of the timed passes: "cpu", "cuda:0".
        thread_count: Number of torch's CPU threads.
        notes: Missing numbers, with the reason.
    """

    input_shapes: tuple[tuple[int, ...], ...]
    modules: tuple[ModuleCost, ...]
    leaves: CostSums
    outside: CostSums
    uncounted: tuple[UncountedOperation, ...] = ()
    pass_count: int = 0
    device: str = "cpu"
    thread_count: int = 1
    notes: tuple[str, ...] = ()

    @property
    def whole(self) -> ModuleCost:
        """The cost of the whole model."""
        return self.modules[0]

    def __getitem__(self, layer: str) -> ModuleCost:
        """Return the cost of a module by its dotted name.

        Raises:
            LayerNotFoundError: If there is none; with the nearest names.
        """
        costs = {module.layer: module for module in self.modules}
        if layer not in costs:
            raise LayerNotFoundError(f"No module is called {layer!r}.{nearest(layer, costs)}")
        return costs[layer]

    def down_to(self, depth: int) -> "NetworkCost":
        """Return the costs of the modules down to a depth; 0 is the whole model alone. Sums still cover all modules."""
        return replace(self, modules=tuple(module for module in self.modules if depth_of(module.layer) <= depth))


def depth_of(layer: str) -> int:
    """Return how deep a module lies in the network: 0 for the whole, 1 for "layer1", 2 for "layer1.0"."""
    return layer.count(".") + 1 if layer else 0

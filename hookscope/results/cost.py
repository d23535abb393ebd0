"""What the modules of a network cost in one forward pass: multiply-adds, bytes, time, and what their cells see."""

from dataclasses import dataclass, replace

from hookscope.errors import LayerNotFoundError, nearest


@dataclass(frozen=True, slots=True)
class ReceptiveField:
    """The part of the input that a cell of a map can depend on, in closed form, along each axis of the picture.

    Attributes:
        size: Pixels that one cell sees, (height, width), not cut off at the border; of a sequence (length,), of a clip
            (frames, height, width). Behind an upsampling layer, where windows differ, their mean.
        stride: Pixels from one cell to the next.
        centre: Of the first cell's window, in pixels counted from 0 at the middle of the first pixel.
        at_least: Whether values of other places enter too, so that the size is a lower bound: through a
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
        parameter_bytes: Bytes of these.
        trainable_count: Elements of those that require a gradient.
        saved_bytes: What autograd keeps for the backward pass besides parameters and buffers, in eval mode. Memory that
            several tensors share counts once, where it is saved first.
    """

    multiply_adds: int = 0
    parameter_count: int = 0
    parameter_bytes: int = 0
    trainable_count: int = 0
    saved_bytes: int = 0

    def __add__(self, other: "CostSums") -> "CostSums":
        """Return the sum of both."""
        return CostSums(
            self.multiply_adds + other.multiply_adds,
            self.parameter_count + other.parameter_count,
            self.parameter_bytes + other.parameter_bytes,
            self.trainable_count + other.trainable_count,
            self.saved_bytes + other.saved_bytes,
        )


@dataclass(frozen=True, slots=True)
class ModuleCost:
    """The cost of one module, over all of its calls in one forward pass.

    Attributes:
        layer: Dotted name; "" is the whole model.
        total: With the modules inside it.
        own: Without them: what its own forward computes and holds. Over all modules these add up to the whole.
        output_bytes: Of the tensors that it returns; None if it was not called.
        receptive_field: Of its output in its first call; None if that is not a map of the input, or unknown.
        seconds: From call to return, with the modules inside it; median of the passes. These do not add up. None if it
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
        name: Torch's name of it: "aten._fft_r2c".
        layer: The innermost module that ran, the first time.
    """

    name: str
    call_count: int
    layer: str


@dataclass(frozen=True, slots=True)
class NetworkCost:
    """The cost of one forward pass of a network.

    Attributes:
        input_shapes: Of the tensors that it was given.
        modules: In the order of `named_modules()`, the whole model first.
        leaves: Sum over the modules without modules in them.
        outside: Sum over what the other modules compute and hold themselves.
        uncounted: Operations whose multiply-adds are not known.
        pass_count: Number of passes whose median the times are; 0 if there are no times.
        device: Where the times were taken: "cpu", "cuda:0".
        thread_count: Threads that torch had.
        notes: What numbers are missing, and why.
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
        known = {each.layer: each for each in self.modules}
        if layer not in known:
            raise LayerNotFoundError(f"No module is called {layer!r}.{nearest(layer, known)}")
        return known[layer]

    def down_to(self, depth: int) -> "NetworkCost":
        """Return the costs of the modules down to a depth; 0 is the whole model alone. Sums stay those of all."""
        return replace(self, modules=tuple(each for each in self.modules if depth_of(each.layer) <= depth))


def depth_of(layer: str) -> int:
    """Return how deep a module lies in the network: 0 for the whole, 1 for "layer1", 2 for "layer1.0"."""
    return layer.count(".") + 1 if layer else 0

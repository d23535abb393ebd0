"""The results of one forward and backward pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from hookscope.results.activations import FeatureMaps, Run
from hookscope.results.json_form import UNSTORED
from hookscope.results.network import row_label
from hookscope.results.statistics import MeasuredTensor, TensorStatistics

GradientStatus = Literal["gradient", "zero", "no gradient path", "not reached", "unknown"]
"""The status of a tensor in the backward pass.

"gradient": a gradient with a value other than zero (NaN and Inf included) arrived. "zero": a gradient arrived that is
exactly zero everywhere. "no gradient path": autograd does not track the tensor (frozen, integer, computed under
`no_grad`). "not reached": autograd tracks it, but the loss does not depend on it, or the path from the loss is cut
(detach, no_grad). "unknown": the pass raised before the gradient could arrive.
"""


@dataclass(frozen=True, slots=True, repr=False)
class GradientRow(MeasuredTensor):
    """The gradient of the loss with respect to one output, or one input, of one call of one module.

    Attributes:
        index: Position in forward execution order, from 0; other fields without an entry are as in `LayerRow`.
        backward_index: Position in the order in which gradients arrived in the backward pass, from 0; None without one.
        slot: Path inside a nested output or input: "" for a plain tensor output, "[0]" for the first positional input.
        gradient: Statistics; without a gradient, shape and dtype are the tensor's and all else is empty.
        remark: Why there is no gradient, or what the gradient means in unusual cases; "" otherwise.
        duplicate_of: As `LayerRow.duplicate_of`, if the gradient is the same too. It may differ: the gradient of a
            pass-through output counts the uses of this output alone, the repeated tensor's counts all uses. Rows of
            inputs likewise.
        taken_by: Labels of the outputs computed directly from this one, "" for the loss: their gradients add up to its
            gradient. None inside reentrant checkpoints, and in runs where no gradient is zero.
    """

    index: int
    backward_index: int | None
    layer: str
    kind: str
    call: int
    slot: str
    role: Literal["output", "input"]
    status: GradientStatus
    gradient: TensorStatistics
    remark: str = ""
    aliases: tuple[str, ...] = ()
    duplicate_of: str = ""
    duplicates: tuple[str, ...] = ()
    taken_by: tuple[str, ...] | None = None
    owner: str | None = None
    source: str = ""

    @property
    def label(self) -> str:
        """Name for people, see `row_label`."""
        return row_label(self.layer, self.call, self.slot)

    @property
    def statistics(self) -> TensorStatistics:
        """The statistics of the gradient."""
        return self.gradient


# Modules that hold parameters for the module around them, which has the rows.
_HOLDERS = frozenset({"ParameterList", "ParameterDict", "NonDynamicallyQuantizableLinear"})


@dataclass(frozen=True, slots=True, repr=False)
class ParameterRow(MeasuredTensor):
    """The gradient of the loss with respect to one parameter.

    Attributes:
        index: Position in `named_parameters()`, from 0.
        kind: Class name of the module that owns it.
        gradient: Statistics; without a gradient, shape and dtype are the parameter's and all else is empty.
        weight_l2: L2 norm of the parameter itself.
        ratio: L2 norm of the gradient over `weight_l2`; None if either is missing or the weight is zero.
        aliases: Other names of the same (tied) parameter.
    """

    index: int
    name: str
    kind: str
    trainable: bool
    status: GradientStatus
    gradient: TensorStatistics
    weight_l2: float | None
    ratio: float | None
    aliases: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Its name."""
        return self.name

    @property
    def layer(self) -> str:
        """Dotted name of the module whose row it belongs to, which may be around the module that registers it."""
        around, parametrised, _ = f".{self.name}".rpartition(".parametrizations.")
        if parametrised:
            return around.removeprefix(".")
        owner = self.name.rpartition(".")[0]
        return owner.rpartition(".")[0] if self.kind in _HOLDERS else owner

    @property
    def is_matrix(self) -> bool:
        """Whether at least two axes are longer than 1: a weight, not a bias or scale, even of shape (C, 1, 1)."""
        return sum(size > 1 for size in self.gradient.shape) >= 2

    @property
    def duplicates(self) -> tuple[str, ...]:
        """Its aliases."""
        return self.aliases

    @property
    def statistics(self) -> TensorStatistics:
        """The statistics of the gradient."""
        return self.gradient


@dataclass(frozen=True, slots=True)
class LossRecord:
    """The scalar that was differentiated.

    Attributes:
        target: The loss's target, for people: "noise (seed 0)", "class 281, tabby"; "" without one.
        value: Its value over the whole batch; may be NaN or Inf.
        outputs: Labels of the outputs that it depends on: "(model)", "(model)['logits']".
    """

    name: str
    target: str
    value: float
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InputGradients:
    """Gradient norms of one input alone.

    Attributes:
        parameters_l2: L2 norm over the gradients of all parameters; None if no parameter has one.
        rows_l2: L2 norm of each output's gradient, by label; None without one.
    """

    name: str
    loss: float
    parameters_l2: float | None
    rows_l2: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class StepsRow:
    """The gradient over time at the input of a recurrent layer or attention, along paths through that layer alone.

    Attributes:
        kind: Class name of the module.
        dtype: Dtype of the gradient.
        largest: Greatest magnitude at each step, over all inputs and features. Several calls of a layer are joined in
            order, such as the calls of a cell. For attention it is the gradient at keys and values.
    """

    layer: str
    kind: str
    dtype: str
    largest: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Gradients(Run[GradientRow | ParameterRow]):
    """The gradients of one run, with the loss that was differentiated.

    Attributes:
        loss: The loss; None if the forward pass raised.
        gradients: One per output in `rows`, in execution order; with `inputs=True` also one per input.
        parameters: One per parameter of the whole network, in the order of `named_parameters()`.
        gradient_maps: Gradients of outputs, for drawing; empty without `grids_for`. `row` is the index in `gradients`.
        inputs_alone: Gradient norms of each input alone; empty without `per_image=True`.
        over_time: One per recurrent layer or attention with at least two steps, and per input length.
    """

    loss: LossRecord | None
    gradients: tuple[GradientRow, ...]
    parameters: tuple[ParameterRow, ...]
    gradient_maps: tuple[FeatureMaps, ...] = field(default=(), metadata=UNSTORED)
    mode: Literal["eval", "train"] = "eval"
    inputs_alone: tuple[InputGradients, ...] = ()
    over_time: tuple[StepsRow, ...] = ()

    def _items(self) -> tuple[GradientRow | ParameterRow, ...]:
        return (*(row for row in self.gradients if row.role == "output"), *self.parameters)

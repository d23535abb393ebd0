"""Edits during training: of layers, of gradients at the optimiser, of weights after each step, and freezing.

Layers are edited by hooks, in every forward and backward pass. The gradient of a parameter is edited just before its
optimiser steps, after accumulation, unscaling and clipping: a limit would have a different meaning for the gradient of
a part of the batch, or for a scaled gradient.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hookscope.commands.watch.gradients import parameters_of
from hookscope.commands.watch.networks import WatchedNetwork, in_any
from hookscope.errors import UsageError
from hookscope.hooks.interventions import hook_edits
from hookscope.hooks.patterns import is_operation_pattern, parse_pattern
from hookscope.hooks.selection import module_index, parameters_by_name
from hookscope.inspection.edit_placement import (
    BoundEdit,
    PlacedEdits,
    bound_to_parameters,
    note_of_several,
    place_edits,
)
from hookscope.inspection.edits import Edit, bind_edits, parse_edit
from hookscope.statistics.channel_axis import AxisReader
from hookscope.text import safe_text

_OF_LAYERS = ("input", "output", "grad")

# Operations whose arguments are in the unit of the edited values.
_WITH_UNITS = ("add", "clamp", "clip-norm", "noise")


@dataclass(frozen=True, slots=True)
class FittedEdits:
    """All edits of a training, and the edits by kind, matched to the layers or parameters that they change."""

    edits: tuple[Edit, ...] = ()
    layers: tuple[tuple[nn.Module, PlacedEdits], ...] = ()
    gradients: tuple[BoundEdit, ...] = ()
    values: tuple[BoundEdit, ...] = ()
    frozen: tuple[BoundEdit, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """The expressions of the edits."""
        return tuple(edit.text for edit in self.edits)

    def notes(self) -> list[str]:
        """Return a sentence for each edit that selects several layers or parameters."""
        names: dict[str, list[str]] = {}
        for gradient in (*self.gradients, *self.values, *self.frozen):
            names.setdefault(gradient.edit.text, []).append(gradient.name)
        notes = [note for _, placed in self.layers for note in placed.notes()]
        return notes + [
            note_of_several(text, matched, "parameters") for text, matched in names.items() if len(matched) > 1
        ]

    def of_scaled_gradients(self) -> list[str]:
        """Return the edits of layers' gradients whose arguments a GradScaler would have to scale too."""
        of_layers = {text for _, placed in self.layers for text in placed.layers}
        return [
            edit.text
            for edit in self.edits
            if edit.place == "grad" and edit.text in of_layers and edit.operation in _WITH_UNITS
        ]


@dataclass(slots=True)
class TrainingEdits:
    """The edits of a training; `fitted` has the edits in force."""

    networks: Sequence[WatchedNetwork]
    fitted: FittedEdits = field(default_factory=FittedEdits)
    step: int = 0  # in progress; noise is drawn anew at every step
    _handles: list[RemovableHandle] = field(default_factory=list)
    _frozen_here: list[nn.Parameter] = field(default_factory=list)
    _axes: AxisReader = field(default_factory=AxisReader)
    _applications: Counter[str] = field(default_factory=Counter)
    _in_steps_before: Counter[str] = field(default_factory=Counter)

    def fit(self, texts: Sequence[str]) -> FittedEdits:
        """Match edits to the networks, without applying them yet.

        Raises:
            LayerNotFoundError: If an edit selects nothing in any network.
            UsageError: If an expression is malformed, or cannot be used in a training.
        """
        edits = tuple(map(parse_training_edit, dict.fromkeys(texts)))
        layers: list[tuple[nn.Module, PlacedEdits]] = []
        of_parameters: list[BoundEdit] = []
        bare = [network.network for network in self.networks]
        by_edit = [in_any(bare, partial(bind_edits, [edit])) for edit in edits]
        done: set[tuple[str, int]] = set()  # text of an edit, `id` of what it changes: networks may share layers
        for number, network in enumerate(self.networks):
            parts: dict[str, object] = {**module_index(network.network)[0]}
            parts |= {name: parameter for name, (parameter, _) in parameters_by_name(network.network).items()}
            pairs = [pair for selected in by_edit for pair in selected[number]]
            bound = [(name, edit) for name, edit in pairs if (edit.text, id(parts[name])) not in done]
            of_layers = {edit.text for _, edit in bound if edit.place in _OF_LAYERS}
            wanted = [edit for edit in edits if edit.text in of_layers]
            if wanted and network.compiled:
                raise UsageError(
                    f"Edit '{safe_text(wanted[0].text)}' cannot be made: {network.name} is compiled, where hooks do "
                    "not fire. Train it uncompiled, or edit parameters, with param:."
                )
            if wanted:
                placed = place_edits(wanted, network.network, None, self._axes, lambda: (self.step,), done)
                layers.append((network.network, placed))
            if (freeze := next((edit for _, edit in bound if edit.place == "freeze"), None)) is not None:
                _refuse_if_waited_for(freeze, network.wrapped)
            others = [(name, edit) for name, edit in bound if edit.place not in _OF_LAYERS]
            edits_here = bound_to_parameters(network.network, others)
            of_parameters += [replace(edit, name=f"{network.prefix}{edit.name}") for edit in edits_here]
            done.update((edit.text, id(parts[name])) for name, edit in bound)
        gradients, values, frozen = (
            tuple(bound_edit for bound_edit in of_parameters if bound_edit.edit.place == place)
            for place in ("parameter grad", "value", "freeze")
        )
        for gradient in (*gradients, *values):
            gradient.edited(gradient.parameter.detach())  # raises for channels that the parameter does not have
        return FittedEdits(edits, tuple(layers), gradients, values, frozen)

    def put_in_force(self, fitted: FittedEdits) -> set[str]:
        """Replace the edits in force; return the new ones that changed no weight at once.

        Parameters that only the old edits froze are trained again.
        """
        before, self.fitted = self.fitted, fitted
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for network, placed in fitted.layers:
            hook_edits(network, placed.by_name, self._handles)
        kept = {id(bound.parameter) for bound in fitted.frozen}
        for parameter in self._frozen_here:
            if id(parameter) not in kept:
                parameter.requires_grad_(True)
        fresh = [bound.parameter for bound in fitted.frozen if bound.parameter.requires_grad]
        for parameter in fresh:
            parameter.requires_grad_(False)
            parameter.grad = None  # else the optimiser would step with it once more
        self._frozen_here = [frozen for frozen in self._frozen_here if id(frozen) in kept] + fresh
        self._applications.clear()
        self._in_steps_before.clear()
        fresh_texts = {*fitted.texts} - {*before.texts}
        written = _write([value for value in fitted.values if value.edit.text in fresh_texts], self.step)
        return fresh_texts - written.keys()

    def edit_gradients(self, optimizer: Optimizer) -> None:
        """Edit the gradients with which an optimiser is about to step."""
        if not self.fitted.gradients:
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused optimiser unscales by itself
        with torch.no_grad():
            for bound in _held_by(optimizer, self.fitted.gradients):
                gradient = bound.parameter.grad
                if gradient is None:
                    continue
                unscaled = gradient if scale is None else gradient / scale.to(gradient.device)
                edited = bound.edited(unscaled, self.step)
                if edited is not unscaled:
                    gradient.copy_(edited if scale is None else edited * scale.to(gradient.device))
                    self._applications[bound.edit.text] += 1

    def edit_values(self, optimizer: Optimizer) -> None:
        """Edit the parameters after their optimiser has stepped."""
        if self.fitted.values:
            self._applications.update(_write(_held_by(optimizer, self.fitted.values), self.step))

    def end_step(self) -> tuple[tuple[str, int], ...]:
        """Return the edits, each with the number of tensors that it changed or kept frozen in the step that ends."""
        if not self.fitted.edits:
            return ()
        self._axes.restart()
        counts = Counter(self._applications)
        for _, placed in self.fitted.layers:
            counts.update(placed.applications)
        counts, self._in_steps_before = counts - self._in_steps_before, counts
        counts.update(bound.edit.text for bound in self.fitted.frozen)
        return tuple((text, counts[text]) for text in self.fitted.texts)


def parse_training_edit(text: str) -> Edit:
    """Return an edit of a training.

    Raises:
        UsageError: If the expression is malformed, or cannot be used during training.
    """
    edit = parse_edit(text, training=True)
    shown = safe_text(edit.text)
    if not edit.parameters_only and is_operation_pattern(edit.pattern):
        raise UsageError(f"Edit '{shown}' cannot be made: during training, only layers and parameters can be edited.")
    if not edit.parameters_only and parse_pattern(edit.pattern).position is not None:
        raise UsageError(f"Edit '{shown}' selects by execution order, which is not known before the training starts.")
    return edit


def _refuse_if_waited_for(freeze: Edit, network: nn.Module) -> None:
    if isinstance(network, DistributedDataParallel) and not network.find_unused_parameters:
        raise UsageError(
            f"Edit '{safe_text(freeze.text)}' cannot be made: DistributedDataParallel waits for the gradient of every "
            "parameter. Give it find_unused_parameters=True, or freeze before it wraps the network."
        )


def _held_by(optimizer: Optimizer, edits: Sequence[BoundEdit]) -> list[BoundEdit]:
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    return [edit for edit in edits if id(edit.parameter) in held]


def _write(edits: Sequence[BoundEdit], step: int) -> Counter[str]:
    """Edit parameters in place, as an optimiser does; return the number of tensors that each edit has changed."""
    changed: Counter[str] = Counter()
    with torch.no_grad():
        for edit in edits:
            values = edit.parameter.detach()
            edited = edit.edited(values, step)
            if edited is not values:
                edit.parameter.copy_(edited)
                changed[edit.edit.text] += 1
    return changed

"""Watch the gradients of module inputs and outputs by tensor hooks.

Full backward hooks fail for in-place modules, so the tensors are hooked. A view that is modified in place later loses
its hook: its gradient is taken from the graph node of the modification. An output that is the input object would show
the gradient of all its uses: it is replaced by an alias. Checkpointing replays a forward inside the backward pass. No
hook may stay on a tensor that outlives the pass.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hookscope.hooks.autograd import (
    Alias,
    Aliased,
    View,
    can_require_grad,
    graph_nodes,
    is_leaf,
    is_transformed,
    observed_plainly,
    strided_copy,
    used_beside,
    version_counter,
    view_of,
    why_untracked,
)
from hookscope.hooks.memory import missing_memory
from hookscope.hooks.observed import GradientSite, ModuleCall, Role, SiteKey, physical_shape, shape_of
from hookscope.hooks.pytree import replaceable_inputs, with_tensors
from hookscope.hooks.recognition import Replays
from hookscope.hooks.step_gradients import STEPPED, StepWatch

T = TypeVar("T")

_OVERWRITTEN = "it is overwritten through another view of its memory, and no copy can take its place"


@dataclass(slots=True)
class GradientWatch(Generic[T]):
    """Hooks the inputs and outputs of module calls, and remembers for the next forward pass which need copies or views.

    Attributes:
        observe: Called with the site and its gradient, under `no_grad` and without autocast, when it arrives.
        track: Whether floating outputs that autograd does not track are made to require a gradient.
        listening: Whether gradients are observed: models and losses may differentiate in the forward pass.
        steps: Watches inputs over time; None for no such watch, as at first.
        sites: In the order in which tensors were met in the forward pass.
        replays: Calls that ran without gradients, which activation checkpointing may replay.
        arrivals: How many sites have received a gradient.
        aliases_meet: Whether a module was called with a tensor and its alias, which would be one object without hooks.
    """

    observe: Callable[[GradientSite[T], Tensor], T]
    with_inputs: bool
    track: bool
    lock: AbstractContextManager[object]
    steps: StepWatch | None = None
    listening: bool = True
    sites: dict[SiteKey, GradientSite[T]] = field(default_factory=dict)
    replays: Replays = field(default_factory=Replays)
    arrivals: int = 0
    _clone_at: set[SiteKey] = field(default_factory=set)
    _hopeless: set[SiteKey] = field(default_factory=set)
    aliases_meet: bool = False
    _no_aliases_because: str = ""
    _view_at: set[SiteKey] = field(default_factory=set)
    _aliases: dict[int, tuple[weakref.ref[Tensor], object]] = field(default_factory=dict)  # an alias and its token
    _made_aliases: list[Alias] = field(default_factory=list)
    _views: list[View] = field(default_factory=list)
    _parts: dict[SiteKey, list[Tensor | None]] = field(default_factory=dict)
    _attached: list[tuple[dict[Any, Any], Any]] = field(default_factory=list)
    _handles: list[RemovableHandle] = field(default_factory=list)
    _latest: tuple[weakref.ref[Tensor], int, int, list[GradientSite[T]]] | None = None

    def finished_sites(self) -> list[GradientSite[T]]:
        """Return the sites; those whose tensor was overwritten, so that the gradient is incomplete, are untracked."""
        for key, parts in self._parts.items():
            if len(parts) == 1 and self.sites[key].arrival is None:
                self.sites[key].untracked = _OVERWRITTEN
        return list(self.sites.values())

    def values_of_pass(self) -> dict[SiteKey, T]:
        """Return and forget the values of a backward pass, before another one through the same graph."""
        for key, parts in self._parts.items():
            if len(parts) == 1:  # the pass led through one of two uses
                self._note([self.sites[key]], parts[0])
            parts.clear()
        values = {key: site.value for key, site in self.sites.items() if site.value is not None}
        for site in self.sites.values():
            site.value = None
        return values

    def restart(self) -> None:
        """Forget the sites and their hooks, but not which outputs need copies or views."""
        self.close()
        self.sites = {}
        if self.steps is not None:
            self.steps.gradients.clear()
        self.arrivals = 0
        self.replays = Replays()

    def close(self) -> None:
        """Remove every hook from its tensor, which the model may keep."""
        for hooks, hook in self._attached:
            hooks.pop(hook, None)
        for handle in self._handles:
            handle.remove()
        self._latest = None
        for container in (self._attached, self._handles, self._views, self._made_aliases, self._parts, self._aliases):
            container.clear()

    def must_repeat(self, loss: Tensor) -> bool:
        """Prepare for the backward pass; tell whether the forward pass must be repeated first.

        A view that was modified in place after its module returned it has lost its hook: its gradient is that of its
        base before the modification, taken from the node of the modification. If the base itself was modified, that is
        not possible: the next forward pass returns a copy. If an alias that is not a view was modified, and its
        original used later, the next forward pass returns a view.
        """
        with torch._C.DisableTorchFunction():
            overwritten = [alias for alias in self._made_aliases if alias.counter._version != alias.version]
            lost = [view for view in self._views if view.counter._version != view.version]
        self._made_aliases.clear()
        self._views.clear()
        if not (overwritten or lost):
            return False
        nodes = graph_nodes(loss)
        wrong = used_beside(overwritten, nodes) - self._view_at if overwritten else set()
        self._view_at |= wrong
        return self._repair(lost, nodes) or bool(wrong)

    def _repair(self, lost: Sequence[View], nodes: Mapping[Node, None]) -> bool:
        """Hook graph nodes in place of views that have lost their hooks; return whether other views need copies."""
        slices = {(*node.next_functions[0],): node for node in nodes if type(node).__name__ == "CopySlices"}
        unseen = set()
        for view in lost:
            node = None if view.base is None else slices.get(view.base)
            if node is not None:
                self._hook_modification(view, node, also_direct=view.node in nodes)
            elif view.site.role == "input":  # used within the call, and so before the modification
                if view.node not in nodes:
                    view.site.untracked = _OVERWRITTEN
            elif view.site.operation is not None:  # a copy would lose writes through the view
                view.site.untracked = view.site.untracked or _OVERWRITTEN
            elif view.base is None or view.base[0] in nodes:  # otherwise the loss does not depend on it
                unseen.add(view.site.key)
        new = unseen - self._clone_at - self._hopeless
        self._clone_at |= new
        return bool(new)

    def _hook_modification(self, view: View, node: Node, *, also_direct: bool) -> None:
        """Take the gradient of a view from the graph node of its modification in place.

        Its first edge leads to the gradient of the base. `also_direct`: the loss also depends on the view directly.
        """
        if also_direct:
            self._parts[view.site.key] = []

        def after(gradients: tuple[Tensor | None, ...], _: object) -> None:
            of_base = gradients[0]  # has the strides of the base
            self._arrive([view.site], None if of_base is None else view.part_of(of_base))

        self._handles.append(node.register_hook(after))

    def give_up_copies(self) -> None:
        """Stop returning copies, which change the result of this model; mark their sites untracked."""
        self._hopeless |= self._clone_at
        self._clone_at.clear()

    @property
    def gave_aliases(self) -> bool:
        """Whether a tensor of the latest forward pass was replaced by an alias, which a check by identity would see."""
        return bool(self._aliases)

    @property
    def replaced_tensors(self) -> bool:
        """Whether aliases or copies took the place of tensors: gradients are then summed in another order."""
        return bool(self._aliases or self._clone_at or (self.steps is not None and self.steps.gradients))

    def give_up_aliases(self, reason: str) -> None:
        """Stop replacing inputs, and outputs that are inputs, by aliases; their gradients then include all uses."""
        self._no_aliases_because = reason

    def note_inputs(self, inputs: Sequence[tuple[str, Tensor]]) -> None:
        """Detect inputs of one call that would be one object without our aliases: attention tests whether q is k."""
        if len(inputs) > 1 and self._aliases:
            tensors = {id(tensor) for _, tensor in inputs}
            self.aliases_meet |= len({id(self._token(tensor) or tensor) for _, tensor in inputs}) < len(tensors)

    def _token(self, tensor: Tensor) -> object:
        """Return the token that an alias shares with its original; None if the tensor has no alias."""
        alias = self._aliases.get(id(tensor))
        return None if alias is None or alias[0]() is not tensor else alias[1]

    def _alias(self, key: SiteKey, tensor: Tensor) -> Tensor:
        """Return an alias with the same strides, by which kernels are chosen; the tensor itself if it refuses."""
        try:
            is_plain = type(tensor) is Tensor and not (tensor.is_leaf or tensor._is_view() or tensor.is_nested)
            if is_plain and key not in self._view_at:
                alias: Tensor = Aliased.apply(tensor)
                made_by: Any = tensor.grad_fn  # neither is a leaf
                node: Any = alias.grad_fn
                of = (made_by, tensor.output_nr)
                made = Alias(key, version_counter(alias), alias._version, node, node._sequence_nr(), of)
                self._made_aliases.append(made)
            else:
                with torch._C._EnableTorchFunction():  # a subclass chooses the class of its views
                    alias = tensor.view_as(tensor) if tensor.is_nested else tensor[...]
        except Exception:  # noqa: BLE001 - a subclass may refuse in any way
            return tensor
        token = self._token(tensor)
        if token is None:
            token = object()
            self._aliases[id(tensor)] = weakref.ref(tensor), token
        self._aliases[id(alias)] = weakref.ref(alias), token
        return alias

    def replaces_inputs(self, kind: type[nn.Module]) -> bool:
        """Tell whether modules of a class may be called with other tensors than their caller gave."""
        return self.with_inputs or kind in STEPPED

    def inputs(
        self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_replay: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook the inputs of a call; return the arguments to call the module with instead.

        `is_replay`: checkpointing repeats a call that is watched already, which must save the same tensors as before. A
        layer saves fewer for an input that requires no gradient.
        """
        if self.with_inputs and not is_replay:
            args, kwargs = self._inputs(call, args, kwargs)
        if self.steps is None or type(call.module) not in STEPPED:
            return args, kwargs
        return self.steps.with_aliases(
            call.layer, call.call, call.module, (args, kwargs), lambda: self.listening and not is_replay
        )

    def _inputs(
        self, call: ModuleCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pairs, replacements = self._sites_of(
            call, "input", replaceable_inputs(args, kwargs), (), self._input_replacement
        )
        inputs: Any = (args, kwargs)
        if replacements:
            try:
                inputs = (with_tensors(args, replacements), with_tensors(kwargs, replacements))
            except TypeError as error:
                for site, _ in pairs:
                    site.untracked = site.untracked or f"its container cannot be copied: {error}"
        for site, tensor in pairs:
            self._watch(site.key, site, tensor)
        return inputs  # type: ignore[no-any-return]  # rebuilt containers have no type to know

    def _sites_of(
        self,
        call: ModuleCall,
        role: Role,
        tensors: Sequence[tuple[str, Tensor]],
        sources: Sequence[tuple[str, Tensor]],
        replacement: Callable[[GradientSite[T], Tensor], Tensor],
    ) -> tuple[list[tuple[GradientSite[T], Tensor]], dict[str, Tensor]]:
        layer, module, index, _, operation, *_ = call
        sites: list[tuple[GradientSite[T], Tensor]] = []
        replacements: dict[str, Tensor] = {}
        # One replacement per object, with the reason if there is none: attention tests whether q is k.
        replaced: dict[int, tuple[Tensor, str]] = {}
        for path, tensor in tensors:
            why = why_untracked(tensor, sources, None if role == "input" else call.maker)
            shape, dtype = physical_shape(tensor), tensor.dtype
            site: GradientSite[T] = GradientSite(
                layer, module, index, path, role, shape, dtype, why, operation=operation
            )
            if id(tensor) not in replaced:
                replaced[id(tensor)] = replacement(site, tensor), site.untracked
            stand_in, site.untracked = replaced[id(tensor)]
            sites.append((site, stand_in))
            if stand_in is not tensor:
                replacements[path] = stand_in
        return sites, replacements

    def _input_replacement(self, site: GradientSite[T], tensor: Tensor) -> Tensor:
        site.untracked = site.untracked or self._no_aliases_because
        if site.untracked:
            return tensor
        alias = self._alias(site.key, tensor)
        if alias is tensor:
            site.untracked = "it cannot be replaced by an alias here, so its gradient would include other uses"
        return alias

    def outputs(
        self,
        call: ModuleCall,
        output: object,
        tensors: Sequence[tuple[str, Tensor]],
        sources: Sequence[tuple[str, Tensor]],
    ) -> object:
        """Hook the tensors in the output; return the output's replacement, or None to keep it.

        `sources` are the original inputs of the call; empty if it overwrote one.
        """
        if len(tensors) == 1:  # nearly always
            slot, tensor = tensors[0]
            layer, module, index, _, operation, *_ = call
            key: SiteKey = (layer, index, slot, "output")
            passed = False
            for _, source in sources:
                passed |= source is tensor
            if (not passed or tensor is output) and self._is_followed(key, tensor):
                watched = self._alias(key, tensor) if passed and not self._no_aliases_because else tensor
                shape, dtype = shape_of(tensor), tensor.dtype
                site: GradientSite[T] = GradientSite(
                    layer, module, index, slot, "output", shape, dtype, "", None, None, operation
                )
                self._watch(key, site, watched)
                return None if watched is tensor else watched
        return self._unusual_outputs(call, output, tensors, sources)

    def _unusual_outputs(
        self,
        call: ModuleCall,
        output: object,
        tensors: Sequence[tuple[str, Tensor]],
        sources: Sequence[tuple[str, Tensor]],
    ) -> object:
        """Handle the rare cases of `outputs`: no tensor, several tensors, or one that may have to be replaced."""
        if not tensors:
            layer, module, index, *_ = call
            site: GradientSite[T] = GradientSite(layer, module, index, "", "output", (), None, "it is no tensor")
            self.sites.setdefault(site.key, site)
        # One output may be used inside the module to compute another: an alias shows only the uses outside.
        several = call.operation is None and sum(tensor.requires_grad for _, tensor in tensors) > 1

        def replacement(site: GradientSite[T], tensor: Tensor) -> Tensor:
            passed = several or is_leaf(tensor) or any(tensor is source for _, source in sources)
            return self._output_replacement(site, tensor, passed)

        pairs, replacements = self._sites_of(call, "output", tensors, sources, replacement)
        result = None
        if replacements:
            try:
                result = with_tensors(output, replacements)
            except TypeError:
                # The output cannot be rebuilt with aliases. Its own tensors are watched instead, so their gradients
                # include uses inside the module.
                pairs = [
                    (site, tensor) for (site, _), (_, tensor) in zip(pairs, tensors, strict=True) if not is_leaf(tensor)
                ]
        for site, watched in pairs:
            self._watch(site.key, site, watched)
        return result

    def _is_followed(self, key: SiteKey, tensor: Tensor) -> bool:
        """Tell whether a module's only output is tracked by autograd and needs no replacement."""
        try:
            tracked = torch.is_grad_enabled() and tensor.requires_grad and not tensor.is_leaf
        except RuntimeError:  # its history is lost
            return False
        return tracked and not is_transformed(tensor) and key not in self._clone_at and key not in self._hopeless

    def _output_replacement(self, site: GradientSite[T], tensor: Tensor, passed: bool) -> Tensor:
        if site.untracked:
            if not self.track or not can_require_grad(tensor) or missing_memory(tensor):
                return tensor
            site.untracked = ""
            return strided_copy(tensor.detach().requires_grad_())  # not a leaf: later operations may be in place
        if site.key in self._hopeless:
            site.untracked = _OVERWRITTEN
            return tensor
        if site.key in self._clone_at and (missing := missing_memory(tensor)):
            site.untracked = missing
            return tensor
        if site.key in self._clone_at:
            return strided_copy(tensor)
        return self._alias(site.key, tensor) if passed and not self._no_aliases_because else tensor

    def _watch(self, key: SiteKey, site: GradientSite[T], tensor: Tensor) -> None:
        """Put a hook on the tensor, if autograd tracks it and the site has none yet."""
        existing = self.sites.get(key)
        if existing is None:
            self.sites[key] = site
        elif site.untracked or not existing.untracked:  # replayed: hooked before, or untracked again
            return
        else:
            existing.untracked = site.untracked
            site = existing
            if not site.untracked:
                self.replays.watched(site.layer, site.call)
        if site.untracked:
            return
        if tensor._is_view():
            self._views.append(view_of(site, tensor))
        if self._latest is not None:
            reference, version, hook_count, sites = self._latest
            # A container usually returns the tensor that its last child has just returned.
            if reference() is tensor and tensor._version == version and len(tensor._backward_hooks or ()) == hook_count:
                sites.append(site)
                return
        sites = [site]
        self._hook(tensor, partial(GradientWatch._arrive, self, sites))  # avoids a bound method per tensor
        self._latest = (weakref.ref(tensor), tensor._version, len(tensor._backward_hooks or ()), sites)

    def _hook(self, tensor: Tensor, hook: Callable[[Tensor | None], None]) -> None:
        """Register a tensor hook without a handle, which would cost as much as all the rest."""
        if type(tensor) is not Tensor:
            self._handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]
            return
        hooks: dict[Any, Any] | None = tensor._backward_hooks
        if hooks is None:
            tensor._backward_hooks = hooks = OrderedDict()
            if tensor.grad_fn is not None:
                tensor.grad_fn._register_hook_dict(tensor)
        hooks[hook] = hook  # its own key, because others use numbers
        self._attached.append((hooks, hook))

    def _arrive(self, sites: Sequence[GradientSite[T]], gradient: Tensor | None) -> None:
        if not self.listening:
            return
        with self.lock, torch._C.DisableTorchFunction():  # each device runs its part of the backward pass in a thread
            if self._parts:
                for site in sites:
                    self._note([site], self._sum_of_parts(site, gradient))
            else:
                self._note(sites, gradient)

    def _sum_of_parts(self, site: GradientSite[T], gradient: Tensor | None) -> Tensor | None:
        """Return the sum of both gradients of a site that receives two; None until the second arrives."""
        parts = self._parts.get(site.key)
        if parts is None:
            return gradient
        parts.append(None if gradient is None else gradient.detach().clone())
        arrived = [part for part in parts if part is not None]
        return sum(arrived[1:], arrived[0]) if len(parts) == 2 and arrived else None

    def _note(self, sites: Sequence[GradientSite[T]], gradient: Tensor | None) -> None:
        if gradient is None:  # autograd calls the hook if another output of the same operation gets a gradient
            return
        for site in sites:
            if site.arrival is None:
                site.arrival = self.arrivals
                self.arrivals += 1
            site.value = observed_plainly(self.observe, site, gradient)

"""Watch the gradients of what passes between modules, by hooks on the tensors.

What it hides: full backward hooks fail where a module works in place, so gradients are taken by hooks on the tensors
themselves; a view that is modified in place later loses its hook without a word, so its gradient is taken from the
graph node of the modification; an output that is the input object would show the gradient of all its uses, so an alias
stands for it; checkpointing replays a forward inside the backward; and a hook on a tensor that outlives the pass must
not stay on it.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hookscope.hooks.pytree import replaceable_inputs, with_tensors

T = TypeVar("T")

Role = Literal["output", "input"]

SiteKey = tuple[str, int, str, Role]
"""(layer, call, slot, role)."""


_NOTHING = nullcontext()
_new = tuple.__new__  # for named tuples in hooks: to call their class is a Python call more
_OVERWRITTEN = "it is overwritten through another view of its memory, and no copy can take its place"


@dataclass(slots=True)
class GradientSite(Generic[T]):
    """One output, or one input, of one call of one module, and what became of its gradient.

    Attributes:
        layer: Name of the module.
        module: The module.
        call: 0 for its first call in the forward pass, 1 for its second.
        slot: Path inside a nested output, "" for a plain tensor; inside the arguments, "[0]" for the first.
        role: "output" for grad_output, "input" for grad_input.
        shape: The tensor's; -1 for a ragged axis; () if there is none.
        dtype: The tensor's; None if there is none.
        untracked: Why autograd does not track the tensor; "" if it does.
        arrival: Position in the order in which gradients arrived, from 0; None if none has.
        value: What the observer returned for the gradient; None if none has arrived.
    """

    layer: str
    module: nn.Module
    call: int
    slot: str
    role: Role
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    untracked: str
    arrival: int | None = None
    value: T | None = None

    @property
    def key(self) -> SiteKey:
        """What names the site within one pass."""
        return (self.layer, self.call, self.slot, self.role)


class _Aliased(torch.autograd.Function):
    """The same memory with the same version counter, as another tensor with a graph node of its own.

    A view would be that, too, but if it is modified in place, autograd copies its gradient three times.
    """

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient

    @staticmethod
    def jvp(_: Any, tangent: Tensor) -> Tensor:
        return tangent.view_as(tangent)


class _Alias(NamedTuple):
    """An alias that is no view. If it is modified in place, autograd does not know that its original is, too.

    Attributes:
        key: What it was made for.
        counter: Shares its version counter, but none of its memory.
        version: When it was made.
        node: Its graph node.
        original: The node and output number that computed the original.
    """

    key: SiteKey
    counter: Tensor
    version: int
    node: Node
    original: tuple[Node, int]


class _View(NamedTuple):
    """A hooked view. If it is modified in place, the graph goes around the hook.

    Attributes:
        site: What is watched.
        counter: Shares the view's version counter, but none of its memory.
        version: When the hook was put on the view.
        node: The graph node that has the hook; None for a leaf.
        base: The node and output number that the gradient of the view's base goes to; None if it has no gradient.
        strides: Of the view.
        offset: Of the view's first element in the base.
    """

    site: GradientSite[Any]
    counter: Tensor
    version: int
    node: Node | None
    base: tuple[Node, int] | None
    strides: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class _Parts:
    """A gradient that arrives by several ways: how many are to come, and the sum of those that came."""

    expected: int
    total: Tensor | None = None


@dataclass(slots=True)
class _Replayable:
    """A call that ran without gradients, which reentrant checkpointing may run again in the backward pass."""

    layer: str
    call: int
    addresses: list[int]
    replayed: bool = False


@dataclass(slots=True)
class GradientWatch(Generic[T]):
    """Hooks the tensors that pass through module calls, and keeps what is learned for the next forward pass.

    Attributes:
        observe: Called with the site and its gradient, under `no_grad` and without autocast, when it arrives.
        with_inputs: Whether gradients of inputs are wanted as well.
        track: Whether floating outputs that autograd does not track are made to require a gradient.
        lock: Held while a gradient is observed.
        listening: Whether gradients that arrive are observed.
        sites: In the order in which tensors were met in the forward pass.
        arrivals: How many sites have got a gradient.
        aliases_meet: Whether a module was called with two tensors, one of them an alias, that are one without us.
    """

    observe: Callable[[GradientSite[T], Tensor], T]
    with_inputs: bool
    track: bool
    lock: AbstractContextManager[object]
    listening: bool = True
    sites: dict[SiteKey, GradientSite[T]] = field(default_factory=dict)
    arrivals: int = 0
    _clone_at: set[SiteKey] = field(default_factory=set)
    _hopeless: set[SiteKey] = field(default_factory=set)
    aliases_meet: bool = False
    _aliasing: bool = True
    _view_at: set[SiteKey] = field(default_factory=set)
    _aliases: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = field(default_factory=dict)
    _made_aliases: list[_Alias] = field(default_factory=list)
    _views: list[_View] = field(default_factory=list)
    _parts: dict[SiteKey, _Parts] = field(default_factory=dict)
    _attached: list[tuple[dict[Any, Any], Any]] = field(default_factory=list)
    _handles: list[RemovableHandle] = field(default_factory=list)
    _latest: tuple[weakref.ref[Tensor], int, int, list[GradientSite[T]]] | None = None
    _replayable: list[_Replayable] = field(default_factory=list)
    _next_replay: int | None = None

    def restart(self) -> None:
        """Forget the sites and their hooks, but not what was learned about the model."""
        self.close()
        self.sites = {}
        self.arrivals = 0
        self._replayable.clear()
        self._next_replay = None

    def close(self) -> None:
        """Take every hook off its tensor: a model may keep one."""
        for hooks, hook in self._attached:
            hooks.pop(hook, None)
        for handle in self._handles:
            handle.remove()
        self._attached.clear()
        self._handles.clear()
        self._latest = None
        self._views.clear()
        self._made_aliases.clear()
        self._parts.clear()
        self._aliases.clear()

    def must_repeat(self, loss: Tensor) -> bool:
        """Prepare for the backward pass; tell whether the forward pass has to be run again first.

        A view that was modified in place after its module returned it has lost its hook. Its gradient is that of the
        view's base before the modification, which the node of the modification gives. Where the base itself was
        modified there is no such node: the next forward pass returns a copy there. If an alias that is no view was
        modified, and its original used later, the next forward pass returns a view there.
        """
        overwritten = [alias for alias in self._made_aliases if alias.counter._version != alias.version]
        lost = [view for view in self._views if view.counter._version != view.version]
        self._made_aliases.clear()
        self._views.clear()
        if not (overwritten or lost):
            return False
        nodes = graph_nodes(loss)
        wrong = self._used_beside(overwritten, nodes) if overwritten else set()
        self._view_at |= wrong
        return self._repair(lost, nodes) or bool(wrong)

    def _used_beside(self, aliases: Sequence[_Alias], nodes: Mapping[Node, None]) -> set[SiteKey]:
        """Return for which aliases the original was used, or is the loss, after the alias was made."""
        originals = {alias.original: alias for alias in aliases}
        wrong = {alias.key for alias in aliases if next(iter(nodes), None) is alias.original[0]}
        for node in nodes:
            for edge in node.next_functions:
                alias = originals.get((edge[0], edge[1])) if edge[0] is not None else None
                if alias is not None and node is not alias.node and node._sequence_nr() > alias.node._sequence_nr():
                    wrong.add(alias.key)
        return wrong - self._view_at

    def _repair(self, lost: Sequence[_View], nodes: Mapping[Node, None]) -> bool:
        """Take the gradients of views that have lost their hooks from the graph; tell whether some need copies."""
        slices = {(*node.next_functions[0],): node for node in nodes if type(node).__name__ == "CopySlices"}
        unseen = set()
        for view in lost:
            node = None if view.base is None else slices.get(view.base)
            if node is not None:
                self._hook_modification(view, node, also_direct=view.node in nodes)
            elif view.site.role == "input":  # used within the call, and so before
                if view.node not in nodes:
                    view.site.untracked = _OVERWRITTEN
            elif view.base is None or view.base[0] in nodes:  # else the loss does not depend on it
                unseen.add(view.site.key)
        new = unseen - self._clone_at - self._hopeless
        self._clone_at |= new
        return bool(new)

    def _hook_modification(self, view: _View, node: Node, *, also_direct: bool) -> None:
        """Take the gradient of a view from the graph node of its modification in place.

        Args:
            view: The view.
            node: Its first edge leads to where the gradient of the view's base goes.
            also_direct: The loss depends on the view in another way, too, from before the modification.
        """
        if also_direct:
            self._parts[view.site.key] = _Parts(expected=2)

        def after(gradients: tuple[Tensor | None, ...], _: object) -> None:
            of_base = gradients[0]  # with the strides of the base
            part = None if of_base is None else of_base.as_strided(view.site.shape, view.strides, view.offset)
            self._arrive([view.site], part)

        self._handles.append(node.register_hook(after))

    def give_up_copies(self) -> None:
        """Return no more copies: this model computes something else with them. Those sites will say so."""
        self._hopeless |= self._clone_at
        self._clone_at.clear()

    @property
    def gave_aliases(self) -> bool:
        """Whether any tensor of the latest forward pass was replaced by an alias."""
        return bool(self._aliases)

    def give_up_aliases(self) -> None:
        """Leave inputs, and outputs that are inputs, the objects they are: this model asks whether they are."""
        self._aliasing = False

    def note_inputs(self, inputs: Sequence[tuple[str, Tensor]]) -> None:
        """Notice inputs of one call that would be one tensor without our aliases: attention asks whether q is k."""
        if len(inputs) > 1 and self._aliases:
            tensors = {id(tensor) for _, tensor in inputs}
            self.aliases_meet |= len({id(self.original(tensor)) for _, tensor in inputs}) < len(tensors)

    def original(self, tensor: Tensor) -> Tensor | None:
        """Return the model's tensor that an alias stands for; the tensor itself if it is none."""
        known = self._aliases.get(id(tensor))
        return tensor if known is None or known[0]() is not tensor else known[1]()

    def _alias(self, key: SiteKey, tensor: Tensor) -> Tensor:
        """Return another tensor of the same memory, with the very strides: kernels choose by them."""
        original = self.original(tensor)
        is_plain = type(tensor) is Tensor and not (tensor.is_leaf or tensor._is_view() or tensor.is_nested)
        try:
            if is_plain and key not in self._view_at:
                alias: Tensor = _Aliased.apply(tensor)
                of = (tensor.grad_fn, tensor.output_nr)
                node: Any = alias.grad_fn
                self._made_aliases.append(_new(_Alias, (key, _counter(alias), alias._version, node, of)))
            else:
                with torch._C._EnableTorchFunction():  # a subclass decides on the class of its views
                    alias = tensor.view_as(tensor) if tensor.is_nested else tensor[...]
        except Exception:  # noqa: BLE001 - a subclass may refuse in any way
            return tensor
        if original is not None:
            self._aliases[id(alias)] = weakref.ref(alias), weakref.ref(original)
        return alias

    def note_without_gradients(self, layer: str, call: int, inputs: Sequence[tuple[str, Tensor]]) -> None:
        """Remember a call that begins while gradients are off: it may be replayed with them."""
        self._replayable.append(_Replayable(layer, call, _addresses(inputs)))

    def replayed_call(self, layer: str, inputs: Sequence[tuple[str, Tensor]]) -> int | None:
        """Return which call of the forward pass is being replayed; None if it was watched when it first ran.

        Within one checkpoint the calls come in their first order; a checkpoint begins with the input it has kept in
        memory; and checkpoints are replayed from the last to the first.
        """
        following = self._next_replay
        if following is not None and following < len(self._replayable):
            expected = self._replayable[following]
            if expected.layer == layer and not expected.replayed:
                self._next_replay = following + 1
                return expected.call
        waiting = [at for at, each in enumerate(self._replayable) if each.layer == layer and not each.replayed]
        if not waiting:
            return None
        addresses = _addresses(inputs)
        same = [at for at in waiting if self._replayable[at].addresses == addresses]
        found = (same or waiting)[-1]
        self._next_replay = found + 1
        return self._replayable[found].call

    def inputs(
        self, module: nn.Module, layer: str, call: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Hook the inputs of a call; return the arguments to give the module in their place."""
        replacements: dict[str, Tensor] = {}
        given_as: dict[int, Tensor] = {}  # one tensor given twice stays one: attention asks whether q is k
        met: list[tuple[GradientSite[T], Tensor]] = []
        for path, tensor in replaceable_inputs(args, kwargs):
            why = _why_untracked(tensor, ())
            site: GradientSite[T] = GradientSite(layer, module, call, path, "input", _shape(tensor), tensor.dtype, why)
            if id(tensor) not in given_as:
                given_as[id(tensor)] = self._given(site, tensor)
            met.append((site, given_as[id(tensor)]))
            if met[-1][1] is not tensor:
                replacements[path] = met[-1][1]
        given: Any = (args, kwargs)
        if replacements:
            try:
                given = (with_tensors(args, replacements), with_tensors(kwargs, replacements))
            except TypeError as error:
                for site, _ in met:
                    site.untracked = site.untracked or f"its container cannot be copied: {error}"
        for site, tensor in met:
            self._watch(site.key, site, tensor)
        return given  # type: ignore[no-any-return]  # rebuilt containers have no type to know

    def _given(self, site: GradientSite[T], tensor: Tensor) -> Tensor:
        """Return what to give instead of an input, so that its gradient along this module can be seen."""
        if not site.untracked and not self._aliasing:
            site.untracked = "the network computes something else if its inputs are replaced by aliases"
        return tensor if site.untracked else self._alias(site.key, tensor)

    def outputs(
        self,
        module: nn.Module,
        layer: str,
        call: int,
        output: object,
        found: Sequence[tuple[str, Tensor]],
        sources: Sequence[tuple[str, Tensor]],
    ) -> object:
        """Hook the outputs of a call; return what to hand on in their place, or None to leave them.

        Args:
            module: The module.
            layer: Its name.
            call: Which of its calls.
            output: What it returned.
            found: The tensors in it.
            sources: The inputs of the call, as they were given; empty if it overwrote one.
        """
        if len(found) == 1:  # nearly always
            slot, tensor = found[0]
            key: SiteKey = (layer, call, slot, "output")
            passed = False
            for _, given in sources:
                passed |= given is tensor
            if (not passed or tensor is output) and self._is_followed(key, tensor):
                handed_on = self._alias(key, tensor) if passed and self._aliasing else tensor
                shape, dtype = _shape(tensor), tensor.dtype
                self._watch(key, GradientSite(layer, module, call, slot, "output", shape, dtype, ""), handed_on)
                return None if handed_on is tensor else handed_on
        return self._unusual_outputs(module, layer, call, output, found, sources)

    def _unusual_outputs(
        self,
        module: nn.Module,
        layer: str,
        call: int,
        output: object,
        found: Sequence[tuple[str, Tensor]],
        sources: Sequence[tuple[str, Tensor]],
    ) -> object:
        """Do what `outputs` does where there is no tensor or several, or where autograd does not go on from it."""
        if not found:
            site: GradientSite[T] = GradientSite(layer, module, call, "", "output", (), None, "it is no tensor")
            self.sites.setdefault(site.key, site)
        # One of several may be used inside the module, too, to compute another: an alias shows the way out alone.
        several = sum(tensor.requires_grad for _, tensor in found) > 1
        replacements: dict[str, Tensor] = {}
        handed_on_as: dict[int, Tensor] = {}  # a tensor returned twice stays one
        met: list[tuple[GradientSite[T], Tensor]] = []
        for slot, tensor in found:
            why = _why_untracked(tensor, sources, module)
            site = GradientSite(layer, module, call, slot, "output", _shape(tensor), tensor.dtype, why)
            if id(tensor) not in handed_on_as:
                passed = several or tensor.is_leaf or any(tensor is given for _, given in sources)
                handed_on_as[id(tensor)] = self._handed_on(site, tensor, passed)
            met.append((site, handed_on_as[id(tensor)]))
            if met[-1][1] is not tensor:
                replacements[slot] = met[-1][1]
        result = None
        if replacements:
            try:
                result = with_tensors(output, replacements)
            except TypeError:  # then the tensors themselves are watched: their gradients count all their uses
                met = [(site, tensor) for (site, _), (_, tensor) in zip(met, found, strict=True) if not tensor.is_leaf]
        for site, handed_on in met:
            self._watch(site.key, site, handed_on)
        return result

    def _is_followed(self, key: SiteKey, tensor: Tensor) -> bool:
        """Tell whether autograd goes on from a module's only output, and nothing of ours has to take its place."""
        if not tensor.requires_grad or tensor.is_leaf or not torch.is_grad_enabled() or _is_transformed(tensor):
            return False
        return key not in self._clone_at and key not in self._hopeless

    def _handed_on(self, site: GradientSite[T], tensor: Tensor, passed: bool) -> Tensor:
        """Return what to hand on instead of an output, so that its gradient can be seen."""
        if site.untracked:
            if not self.track or not _can_require_grad(tensor):
                return tensor
            site.untracked = ""
            return strided_copy(tensor.detach().requires_grad_())  # no leaf: what follows may work in place
        if site.key in self._hopeless:
            site.untracked = _OVERWRITTEN
            return tensor
        if site.key in self._clone_at:
            return strided_copy(tensor)
        return self._alias(site.key, tensor) if passed and self._aliasing else tensor

    def _watch(self, key: SiteKey, site: GradientSite[T], tensor: Tensor) -> None:
        """Put a hook on the tensor, if autograd tracks it and the site has none yet."""
        known = self.sites.get(key)
        if known is None:
            self.sites[key] = site
        elif site.untracked or not known.untracked:  # a replay shows what was hooked before, or nothing again
            return
        else:
            known.untracked = site.untracked
            site = known
            for each in self._replayable:
                each.replayed |= not site.untracked and (each.layer, each.call) == (site.layer, site.call)
        if site.untracked:
            return
        if tensor._is_view():
            self._views.append(_view_of(site, tensor))
        if self._latest is not None:
            reference, version, hook_count, sites = self._latest
            # A container usually returns the very tensor that its last child has just returned.
            if reference() is tensor and tensor._version == version and len(tensor._backward_hooks or ()) == hook_count:
                sites.append(site)
                return
        sites = [site]
        self._hook(tensor, partial(GradientWatch._arrive, self, sites))  # no bound method for each
        self._latest = (weakref.ref(tensor), tensor._version, len(tensor._backward_hooks or ()), sites)

    def _hook(self, tensor: Tensor, hook: Callable[[Tensor | None], None]) -> None:
        """Do what `Tensor.register_hook` does; a handle for each would cost as much as the rest."""
        if type(tensor) is not Tensor:
            self._handles.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]
            return
        hooks: dict[Any, Any] | None = tensor._backward_hooks
        if hooks is None:
            tensor._backward_hooks = hooks = OrderedDict()
            if tensor.grad_fn is not None:
                tensor.grad_fn._register_hook_dict(tensor)
        hooks[hook] = hook  # under itself: others' keys are numbers
        self._attached.append((hooks, hook))

    def _arrive(self, sites: Sequence[GradientSite[T]], gradient: Tensor | None) -> None:
        """Observe the gradient of the sites that are one tensor: the hook on it."""
        if not self.listening:
            return
        with self.lock:  # each device has a thread for its part of the backward pass
            if self._parts:
                for site in sites:
                    self._note([site], self._in_all(site, gradient))
            else:
                self._note(sites, gradient)

    def _in_all(self, site: GradientSite[T], gradient: Tensor | None) -> Tensor | None:
        """Return the sum of a site's gradients once the last has come; None before."""
        parts = self._parts.get(site.key)
        if parts is None:
            return gradient
        if gradient is not None:
            part = gradient.detach()
            parts.total = part.clone() if parts.total is None else parts.total + part
        parts.expected -= 1
        return None if parts.expected else parts.total

    def _note(self, sites: Sequence[GradientSite[T]], gradient: Tensor | None) -> None:
        if gradient is None:  # another output of the same operation got one
            return
        plain = not (torch.is_grad_enabled() or torch._C._is_any_autocast_enabled())
        with _NOTHING if plain else plain_arithmetic():
            for site in sites:
                if site.arrival is None:
                    site.arrival = self.arrivals
                    self.arrivals += 1
                site.value = self.observe(site, gradient)


def graph_nodes(loss: Tensor) -> dict[Node, None]:
    """Return the nodes of the graph that a backward pass from a tensor would run, the tensor's own first."""
    if loss.grad_fn is None:
        return {}
    nodes: dict[Node, None] = {loss.grad_fn: None}
    waiting = [loss.grad_fn]
    while waiting:
        for following, _ in waiting.pop().next_functions:
            if following is not None and following not in nodes:
                nodes[following] = None
                waiting.append(following)
    return nodes


def graph_leaves(nodes: Iterable[Node]) -> list[Tensor]:
    """List the leaves that a backward pass through these nodes would give a gradient to."""
    ends = [node for node in nodes if not node.next_functions]
    return [leaf for node in ends if (leaf := getattr(node, "variable", None)) is not None]


def _counter(tensor: Tensor) -> Tensor:
    """Return a tensor with another's version counter alone: holding the other would hold its memory."""
    counter = tensor.detach()
    with suppress(RuntimeError):  # of some subclasses and devices a tensor takes no other's data
        counter.data = torch.empty(0)
    return counter


def _view_of(site: GradientSite[Any], tensor: Tensor) -> _View:
    counter, node, base = _counter(tensor), tensor.grad_fn, tensor._base
    if node is None or base is None or base.grad_fn is None or tensor.layout != torch.strided or tensor.is_nested:
        return _View(site, counter, tensor._version, node, None, (), 0)
    edge, offset = (base.grad_fn, base.output_nr), int(tensor.storage_offset() - base.storage_offset())
    return _View(site, counter, tensor._version, node, edge, tensor.stride(), offset)


def strided_copy(tensor: Tensor) -> Tensor:
    """Return a copy with the very strides, which `clone` may change along axes of size one."""
    copied = tensor.clone()
    if tensor.layout == torch.strided and not tensor.is_nested and copied.stride() != tensor.stride():
        steps = zip(copied.stride(), tensor.stride(), tensor.shape, strict=True)
        if all(ours == theirs for ours, theirs, size in steps if size > 1):
            strided = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            return strided.copy_(tensor)
    return copied


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.size(0), -1) if tensor.is_nested else tensor.shape


def _addresses(inputs: Sequence[tuple[str, Tensor]]) -> list[int]:
    return [tensor.data_ptr() if tensor.layout == torch.strided else 0 for _, tensor in inputs]


def _is_transformed(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _can_require_grad(tensor: Tensor) -> bool:
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return differentiable and torch.is_grad_enabled() and not tensor.is_inference()


def _why_untracked(tensor: Tensor, inputs: Sequence[tuple[str, Tensor]], module: nn.Module | None = None) -> str:
    """Return why autograd does not track a tensor that a module returned or was given; "" if it does."""
    reason = ""
    if _is_transformed(tensor):
        return "it was computed inside a torch.func transform (vmap, grad, jvp)"
    if tensor.requires_grad and torch.is_grad_enabled():
        return reason
    if not (tensor.is_floating_point() or tensor.is_complex()):
        reason = f"{str(tensor.dtype).removeprefix('torch.')} values have no gradient"
    elif tensor.is_inference():
        reason = "it was computed in inference mode"
    elif not torch.is_grad_enabled():
        reason = "it was computed without gradients (no_grad)"
    elif module is None:
        reason = "nothing before it requires a gradient"
    elif any(given.requires_grad for _, given in inputs) or any(each.requires_grad for each in module.parameters()):
        reason = "it was cut off inside the module (no_grad or detach)"
    else:
        reason = "no parameter before it is trainable"
    return reason


@contextmanager
def plain_arithmetic() -> Iterator[None]:
    """Switch off gradients and autocast, on all devices."""
    with torch.no_grad(), torch._C._DisableAutocast():
        yield

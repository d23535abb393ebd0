"""Read autograd's graph: its nodes and leaves, and which outputs of modules are computed from which others."""

from collections.abc import Iterable, Mapping

from torch import Tensor
from torch.autograd.graph import Node

from hookscope.hooks.observed import SiteKey


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


def consumers(loss: Tensor, nodes: Mapping[SiteKey, Node]) -> dict[SiteKey, list[SiteKey | None]]:
    """Return for each output what is computed from it directly: outputs with no other output between, and the loss.

    Args:
        loss: As it was differentiated.
        nodes: By site, the node that computed its tensor. Sites of inputs are passed over. A container that returned
            its last child's tensor has the child's node, and stands beside it.

    Returns:
        Sites in the order of `nodes`, None for the loss, last. What the graph does not hold, such as the inside of a
        reentrant checkpoint, is left out.
    """
    users = _users(loss)
    sites: dict[Node, list[SiteKey]] = {}
    for key, node in nodes.items():
        if key[3] == "output":
            sites.setdefault(node, []).append(key)
    places = {key: place for place, key in enumerate(nodes)}
    found: dict[SiteKey, list[SiteKey | None]] = {}
    for node, keys in sites.items():
        if node is loss.grad_fn or node in users:
            met = _first_met(node, users, sites)
            direct = sorted([key for each in met for key in sites.get(each, ())], key=lambda key: places[key])
            by_loss = node is loss.grad_fn or any(each not in sites for each in met)
            found |= dict.fromkeys(keys, [*direct, None] if by_loss else [*direct])
    return found


def _users(loss: Tensor) -> dict[Node, list[Node]]:
    """Return by node those that use what it computed."""
    users: dict[Node, list[Node]] = {}
    for node in graph_nodes(loss):
        for used, _ in node.next_functions:
            if used is not None:
                users.setdefault(used, []).append(node)
    return users


def _first_met(node: Node, users: Mapping[Node, Iterable[Node]], stops: Mapping[Node, object]) -> list[Node]:
    """Return the first nodes of `stops` on every way from a node to the loss, and the loss where there is none."""
    met, seen, waiting = [], {node}, list(users.get(node, ()))
    while waiting:
        user = waiting.pop()
        if user in seen:
            continue
        seen.add(user)
        if user in stops or user not in users:
            met.append(user)
        else:
            waiting += users[user]
    return met

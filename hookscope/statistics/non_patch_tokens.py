"""Recognise tokens that are no patches even if they are as many: words, decoders' tokens and learned queries."""

import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hookscope.hooks.running import ModuleInput
from hookscope.statistics.storage import has_memory

WORDS = "words, which have no place on a picture"
_AS_MANY_AS_WORDS = "as many as the words that the network was given, which have no place on a picture"
_AS_MANY_AS_GIVEN = "as many as the tokens that the network was given beside the picture, which have no place on it"
_WITH_WORDS = "patches and words together, in an order that is not known"
DECODER = "tokens of a decoder, which have no place on the picture"
OTHERS = "tokens other than the patches, which have no place on the picture"
LEARNED = "tokens that the network has learned, which have no place on the picture"

# Names of forward's parameters for the tokens that a decoder attends to.
_MEMORY = re.compile(r"memory|context|encoder|media|image|vision|visual", re.IGNORECASE)
_NO_MEMORY = re.compile(r"pos$|pos_|position|mask|rope|freq|rotary|cos$|sin$|bias|skip|residual", re.IGNORECASE)
# Names of integer tensors (N, T) that are no words.
_NO_WORDS = re.compile(
    r"mask|position|pos$|type|size|shape|grid|thw|label|target|coord|index|indices|step|time", re.IGNORECASE
)
# Names of tensors with four axes that are no pictures.
_NO_PICTURE = re.compile(r"mask|bias|position|pos$|past|cache", re.IGNORECASE)
# Names of the positions of a decoder's own tokens.
_QUERY_POSITIONS = re.compile(r"quer(y|ies)\w*_(pos|emb)", re.IGNORECASE)
# Names of tokens that are parameters of the network.
_LEARNED = re.compile(r"quer(y|ies)|latent|slot|inducing|seed", re.IGNORECASE)
_NOT_LEARNED = re.compile(r"pos$|position|bias|proj", re.IGNORECASE)
# A layer that mixes tokens, or attends to others, is searched for among this many innermost modules that run.
LAYERS_OUT = 4


@dataclass
class NonPatchTokens:
    """Finds, along one forward pass, the reasons why tokens have no place on the picture.

    Attributes:
        network: The network, whose parameters may be tokens.
    """

    network: nn.Module
    _own: dict[int, str] = field(default_factory=dict)
    _memories: "dict[int, weakref.ref[Tensor]]" = field(default_factory=dict)

    @cached_property
    def _learned(self) -> frozenset[int]:
        return frozenset(_learned_counts(self.network))

    def restart(self, *, keeps_counts: bool) -> None:
        """Begin another forward pass; `keeps_counts` keeps the known counts of tokens without a place."""
        self._memories.clear()
        if not keeps_counts:
            self._own.clear()

    def reason(self, running: Sequence[ModuleInput], count: int, grids: Sequence[tuple[int, ...]]) -> str:
        """Return why `count` tokens in the output of a running module are not patches; "" if they may be patches.

        Args:
            running: The modules that run, innermost first: the first returned the tokens.
            count: The number of tokens.
            grids: Sizes of maps that convolutions have returned.
        """
        decoder = self._decoder(running, grids)
        if decoder is not None and count == decoder.own_tokens:
            sequences = [tensor for _, tensor in running[0].sequences]
            return "" if sequences and decoder.holds(sequences[0]) else decoder.reason
        return self._own_or_words(running, count, grids)

    def of_attention(
        self, running: Sequence[ModuleInput], queries: int, keys: int, grids: Sequence[tuple[int, ...]]
    ) -> tuple[str, str]:
        """Return the reasons, see `reason`, for the queries and for the keys of an attention."""
        decoder = self._decoder(running, grids)
        if decoder is None:
            return self._own_or_words(running, queries, grids), self._own_or_words(running, keys, grids)
        token_count, is_named = decoder.own_tokens, decoder.reason == DECODER
        tensors = [tensor for _, tensor in running[0].sequences]
        of_queries, of_keys = _words(running, queries, grids), _words(running, keys, grids)
        if queries == token_count:
            of_queries = of_queries or decoder.reason
        if keys == token_count and (is_named if queries != token_count else not any(map(decoder.holds, tensors))):
            of_keys = of_keys or decoder.reason
        elif keys != token_count and not is_named and not self._has_looked_at(decoder, keys):
            of_keys = of_keys or OTHERS  # tokens of its own that further queries attend to (Perceiver's decoder)
        elif any(tensor is decoder.memories[0] for tensor in tensors):
            of_keys = ""
        return of_queries, of_keys

    @staticmethod
    def are_words_in_front(running: Sequence[ModuleInput], prefix: int) -> bool:
        """Tell whether the `prefix` tokens may hold words: a module was given words and a picture (ViLT)."""
        source = next((call for call in running if _has_picture(call) and not call.sequences), None)
        return source is not None and any(prefix >= tensor.shape[1] for tensor in _texts(source))

    def _decoder(self, running: Sequence[ModuleInput], grids: Sequence[tuple[int, ...]]) -> "_Decoder | None":
        for module in running[:LAYERS_OUT]:
            decoder = _decoder(module, grids)
            inputs = [tensor for _, tensor in running[-1].sequences] if decoder and _has_picture(running[-1]) else []
            if decoder is not None and not any(map(decoder.holds, inputs)):  # else a text that the network was given
                self._own[decoder.own_tokens] = decoder.reason
                self._memories.setdefault(decoder.own_tokens, weakref.ref(decoder.memories[0]))
                return decoder
        return None

    def _has_looked_at(self, decoder: "_Decoder", count: int) -> bool:
        """Tell whether an earlier decoder of `count` tokens attended to the same tokens; True if there was none."""
        return count not in self._memories or decoder.holds(self._memories[count]())

    def _own_or_words(self, running: Sequence[ModuleInput], count: int, grids: Sequence[tuple[int, ...]]) -> str:
        if count in self._own:
            return self._own[count]
        if not _on_grid(count, grids):
            if any(_is_parameter(tensor, count) for call in running[:LAYERS_OUT] for _, tensor in call.sequences):
                self._own[count] = LEARNED
                return LEARNED
            if count in self._learned:
                return WORDS if _words(running, count, grids) == WORDS else LEARNED
        elif len(running) <= 2 and count in self._learned:  # in the network's own forward: a decoder's head
            return LEARNED
        return _words(running, count, grids)


class _Decoder(NamedTuple):
    """The number of a decoder layer's own tokens, and the tokens that they attend to, the picture's first."""

    own_tokens: int
    memories: tuple[Tensor, ...]
    reason: str

    def holds(self, tokens: Tensor | None) -> bool:
        """Tell whether the decoder's own tokens attend to `tokens`."""
        return any(memory is tokens for memory in self.memories)


def _decoder(call: ModuleInput, grids: Sequence[tuple[int, ...]]) -> _Decoder | None:
    """Return the decoder behind a call in which other tokens attend to the picture's patches; None for other calls.

    One of these shows it: an argument is named like a memory or like positions of queries; the memory fits a grid and
    the call's own tokens do not; the call's first sequence is learned.
    """
    if len(call.sequences) < 2:
        return None
    asking = [tensor.shape for name, tensor in call.sequences if _QUERY_POSITIONS.search(name)]
    sequences = [(name, tensor) for name, tensor in call.sequences if not _NO_MEMORY.search(name)]
    for name, memory in sequences:
        for other_name, tokens in sequences:
            if tokens is memory or tokens.dim() != memory.dim():
                continue
            is_named = _MEMORY.search(name) and not _MEMORY.search(other_name)
            is_named = is_named or (tokens.shape in asking and tokens.shape != memory.shape)
            for axis in (1, 0):  # (N, T, D), or (T, N, D) as torch's own layers take it
                if tokens.shape[1 - axis] != memory.shape[1 - axis] or not _are_patches(memory.shape[axis], grids):
                    continue
                is_first = tokens is sequences[0][1]
                if (
                    is_named
                    or not _are_patches(tokens.shape[axis], grids)
                    or (is_first and _are_learned(tokens, memory))
                ):
                    argument = name.partition("[")[0]
                    others = (
                        tensor for named, tensor in sequences if named.startswith(argument) or _MEMORY.search(named)
                    )
                    memories = (memory, *(tensor for tensor in others if tensor is not tokens))
                    return _Decoder(tokens.shape[axis], memories, DECODER if is_named else OTHERS)
    return None


def _are_patches(count: int, grids: Sequence[tuple[int, ...]]) -> bool:
    """Tell whether a count fits an earlier grid, or the sum of several grids of a pyramid."""
    if _on_grid(count, grids):
        return True
    levels = sorted({prod(grid) for grid in grids})
    sums = (sum(levels[first:end]) for first in range(len(levels)) for end in range(first + 2, len(levels) + 1))
    return any(count == total for total in sums)


def _on_grid(count: int, grids: Sequence[tuple[int, ...]]) -> bool:
    """Tell whether a count is the size of an earlier grid, or one more."""
    for grid in grids:
        places = prod(grid)
        if places > 1 and count - places in (0, 1):
            return True
    return False


def _words(running: Sequence[ModuleInput], count: int, grids: Sequence[tuple[int, ...]]) -> str:
    """Return why `count` tokens are, or may be, words from an integer input (N, T) of a running module; "" if not.

    Modules that were given tokens are skipped: their integers are positions and masks.
    """
    for call in running:
        if isinstance(call.module, nn.Embedding):  # it may embed positions
            continue
        sizes = {tensor.shape[1] for name, tensor in call.sequences if not _NO_WORDS.search(name)}
        if sizes and call is not running[-1]:
            continue
        has_picture = _has_picture(call)
        if call is running[-1] and has_picture and any(count - length in (0, 1) for length in sizes):
            return _AS_MANY_AS_GIVEN
        if sizes and not has_picture:
            continue
        lengths = {tensor.shape[1] for tensor in _texts(call)}
        if lengths and not has_picture:
            return WORDS
        if any(count - length in (0, 1) for length in lengths):
            return _AS_MANY_AS_WORDS
        areas = [grid[-2] * grid[-1] for grid in grids if len(grid) > 1]
        if lengths and not _are_patches(count, grids) and any(count - area >= min(lengths) for area in areas):
            return _WITH_WORDS
        if has_picture:
            return ""
    return ""


def _learned_counts(network: nn.Module) -> Iterator[int]:
    """Yield T of each parameter (T, D) or (1, T, D) that is named like queries or latents."""
    for name, module in network.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding):
            if _LEARNED.search(last) and not _NOT_LEARNED.search(last.replace("position", "")):
                yield module.num_embeddings
        elif not type(module).__module__.startswith("torch.nn"):
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.dim() in (2, 3) and _LEARNED.search(key) and not _NOT_LEARNED.search(key):
                    yield parameter.shape[-2]


def _are_learned(tokens: Tensor, memory: Tensor) -> bool:
    """Tell whether `tokens` are equal for all inputs, but `memory`, which they attend to, is not."""
    if _is_parameter(tokens, tokens.shape[1]):
        return not _is_parameter(memory, memory.shape[1])
    if len(tokens) < 2 or not (has_memory(tokens) and has_memory(memory)):
        return False
    return torch.equal(tokens[0], tokens[1]) and not torch.equal(memory[0], memory[1])


def _is_parameter(tensor: Tensor, count: int) -> bool:
    """Tell whether `count` tokens are a parameter, repeated for each input."""
    return tensor.shape[1] == count and not tensor.is_inference() and isinstance(tensor._base, nn.Parameter)  # noqa: SLF001


def _has_picture(call: ModuleInput) -> bool:
    named = [tensor for name, tensor in call.tensors if not _NO_PICTURE.search(name)]
    return any(tensor.is_floating_point() and tensor.dim() >= 4 for tensor in named)


def _texts(call: ModuleInput) -> list[Tensor]:
    """Return the words that a module was given: integer tensors (N, T)."""
    named = [(name, tensor) for name, tensor in call.tensors if tensor.dim() == 2 and not _NO_WORDS.search(name)]
    wide = [tensor for _, tensor in named if not tensor.is_complex() and tensor.element_size() > 1]
    return [tensor for tensor in wide if not tensor.is_floating_point()]

"""How many multiply-adds an operation of torch takes: multiplications whose products are summed.

Counted are matrix products, convolutions, attention and recurrent layers, by the shapes they were given, dense and
without regard to masks: half of what `torch.utils.flop_counter` calls FLOPs. Elementwise arithmetic, normalisation,
pooling and resampling count as 0, as is usual. For all other operations the number is not known.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

Formula = Callable[[Sequence[Any], Any], int]
"""Computes multiply-adds from an operation's arguments and what it returned."""


def formula_of(operation: Any) -> Formula | None:
    """Return the formula of an operation that torch has dispatched; None if its multiply-adds are not known.

    Formulas that were registered with `torch.utils.flop_counter.register_flop_formula` count too.
    """
    formula = _FORMULAS.get(name_of(operation))
    if formula is not None:
        return formula
    if _takes_none(operation):
        return lambda _args, _output: 0
    from torch.utils.flop_counter import flop_registry  # noqa: PLC0415 - rarely needed

    registered = flop_registry.get(getattr(operation, "_overloadpacket", operation))
    return registered and (lambda args, output: int(registered(*args, out_val=output)) // 2)


def name_of(operation: Any) -> str:
    """Return the name of an operation without overload and in-place underscore: "aten.add"."""
    packet = getattr(operation, "_overloadpacket", operation)
    return str(packet).rstrip("_")


def _takes_none(operation: Any) -> bool:
    """Tell, by its name and torch's tags, whether an operation sums no products."""
    tags = getattr(operation, "tags", ())
    if getattr(operation, "is_view", False) or any(tag in _TAGS_OF_NONE for tag in tags):
        return True
    space, _, name = name_of(operation).rpartition(".")
    return space in _NONE and _NONE[space].fullmatch(name) is not None


def _first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple | list) else output
    return tensor


def _convolution(args: Sequence[Any], output: Any) -> int:
    """Output (N, O, ...), weight (O, I / groups, ...)."""
    return int(_first(output).numel() * prod(args[1].shape[1:]))


def _either_convolution(args: Sequence[Any], output: Any) -> int:
    """As `_convolution`; with argument 6, `transposed`, set: input (N, I, ...), weight (I, O / groups, ...)."""
    return _convolution(args, args[0] if args[6] else output)


def _product(at: int) -> Formula:
    """Return the formula of a matrix product whose left matrix (..., k) is the argument at a position."""
    return lambda args, output: int(_first(output).numel() * args[at].shape[-1])


def _attention(args: Sequence[Any], _output: object) -> int:
    """Scores of queries (..., H, S, E) and keys (..., T, E), and means of values (..., T, V)."""
    query, key, value = (argument.shape for argument in args[:3])
    return int(prod(query[:-1]) * key[-2] * (query[-1] + value[-1]))


def _recurrent(args: Sequence[Any], matrices: Iterable[Tensor]) -> int:
    """An input (T, N, I), or packed (steps, I): each matrix is used once a step."""
    return int(prod(args[0].shape[:-1]) * sum(matrix.numel() for matrix in matrices))


_FORMULAS: Mapping[str, Formula] = {
    **dict.fromkeys(("aten.convolution", "aten._convolution", "aten.convolution_overrideable"), _either_convolution),
    **dict.fromkeys(
        (
            *("aten.cudnn_convolution", "aten.mkldnn_convolution", "aten.miopen_convolution"),
            *("aten._slow_conv2d_forward", "aten.slow_conv3d_forward"),
            *("aten._conv_depthwise2d", "aten.conv_depthwise3d", "torchvision.deform_conv2d"),
        ),
        _convolution,
    ),
    # An output (T, N, O), a weight (K, I, O).
    "aten.conv_tbc": lambda args, output: int(_first(output).numel() * prod(args[1].shape[:2])),
    **dict.fromkeys(("aten.mm", "aten.bmm", "aten.mv", "aten._scaled_mm", "aten._int_mm", "aten.linear"), _product(0)),
    **dict.fromkeys(("aten.addmm", "aten.baddbmm", "aten.addmv", "aten._addmm_activation"), _product(1)),
    # Matrices (b, m, k) and (b, k, n), summed over b.
    "aten.addbmm": lambda args, _output: int(args[1].numel() * args[2].shape[-1]),
    **dict.fromkeys(("aten.dot", "aten.vdot"), lambda args, _output: int(args[0].numel())),
    **{
        f"aten._scaled_dot_product_{kind}": _attention
        for kind in (
            *("efficient_attention", "flash_attention", "flash_attention_for_cpu", "cudnn_attention"),
            *("fused_attention_overrideable", "attention_math_for_mps"),
        )
    },
    # One layer in one direction; all layers with their biases.
    "aten.mkldnn_rnn_layer": lambda args, _output: _recurrent(args, args[1:3]),
    **dict.fromkeys(
        ("aten._cudnn_rnn", "aten.miopen_rnn"),
        lambda args, _output: _recurrent(args, (weight for weight in args[1] if weight.dim() > 1)),
    ),
}

_TAGS_OF_NONE = frozenset(
    {
        *(torch.Tag.pointwise, torch.Tag.reduction, torch.Tag.view_copy, torch.Tag.inplace_view),
        *(torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output),
    }
)

# Names that torch's tags leave open. What is missing here is reported as not known, so a new operation is never
# silently counted as free.
_NONE: Mapping[str, re.Pattern[str]] = {
    "aten": re.compile(
        # New tensors, copies, and other views of the same memory.
        r"(new_)?(empty|zeros|ones|full|eye|arange|linspace|range|scalar_tensor|tri[lu]_indices)(_\w+)?|"
        r"(rand|randn|randint|randperm|normal|uniform|bernoulli|multinomial|exponential|native_dropout|poisson)\w*|"
        r"_?to_copy|_copy_from\w*|copy|clone|_reshape_\w+|_unsafe_view|lift\w*|set|resize\w*|fill|zero|contiguous|"
        r"_conj\w*|_neg_view|view_as_\w+|real|imag|_fw_primal|_local_scalar_dense|item|is_\w+|_has_\w+|_sparse_\w*_unsafe|"
        r"_?(assert|functional_assert)_\w+|sym_\w+|_nested_\w+|detach\w*|data|record_stream|_pin_memory|"
        # Values moved.
        r"cat|stack|_?(unsafe_)?(split|chunk|unbind)\w*|(un)?fold|(im2col|col2im)|index\w*|_?unsafe_index\w*|_index_put\w*|"
        r"gather|scatter\w*|put|take\w*|masked_\w+|where|flip|roll|rot90|repeat\w*|tile|pixel_(un)?shuffle|"
        r"channel_shuffle|constant_pad_nd|_?pad_\w+|_padded_\w+|_pack_padded_sequence\w*|\w*(reflection|replication)_pad\w+|tri[lu]|diag\w*|"
        r"slice_scatter|select_scatter|as_strided\w*|embedding|_embedding_bag\w*|one_hot|block_diag|"
        # Compared, sorted, counted and summed without products.
        r"sort|argsort|topk|kthvalue|median|mode|unique\w*|_unique\w*|searchsorted|bucketize|histc|bincount|nonzero\w*|"
        r"_linalg_check_errors|equal|isin\w*|max|min|aminmax|cum\w+|_cum\w+|logcumsumexp|diff|_?log_?softmax\w*|_?(safe_)?softmax\w*|"
        r"_masked_softmax|sum\w*|mean\w*|var\w*|std\w*|norm\w*|_weight_norm\w*|linalg_vector_norm|renorm|"
        # Statistics, windows and resampling.
        r"\w*(batch|layer|group|instance|rms)_?norm\w*|\w*(max|avg)_pool\w*|_?upsample\w*|grid_sampler\w*|"
        r"\w*affine_grid\w*|_thnn_fused_\w+_cell|_fused_dropout|hardswish\w*|hardsigmoid\w*|prelu\w*|_prelu\w*|rrelu\w*|glu|\w*_loss\w*|"
        # Rounded, and packed.
        r"quantize_\w+|_?fake_quantize\w*|dequantize\w*|q_\w+|_make_per_\w+|choose_qparams\w*|_fused_moving_avg\w*|"
        r"_weight_int4pack_\w*convert\w*|_convert_weight\w+|_cudnn_rnn_flatten_weight"
    ),
    "prim": re.compile(r"\w+"),
    "torchvision": re.compile(r"nms|roi_\w+|ps_roi_\w+"),
    "quantized": re.compile(r"(add|mul|cat|max_pool|batch_norm|layer_norm|group_norm|relu)\w*|\w*(hardswish|sigmoid)"),
    "inductor": re.compile(r"\w+"),
}

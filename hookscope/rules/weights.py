"""Rules about weights: outliers among values, untrained weights among trained ones, and weights in float8."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hookscope.results.headroom import FORMATS
from hookscope.rules.rule import WHOLE_NETWORK, RuleFinding, RuleTerms, limit, rule, stored_in
from hookscope.rules.stored import (
    about,
    batch_norm_is_untrained,
    is_weight,
    leaf_of,
    weights_are_random,
    weights_look_random,
    worst_weight,
)
from hookscope.text import counted, figure, percent_text, some_of

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements, StoredValues

# Running variances may be 10^4 times the variances of dead channels, and a weight below this does not dominate.
_LEAST_THAT_FAILS = 1000.0

# From this many standard errors, a weight counts as trained. Nine in ten weights of EfficientNet-Lite0 to 2 with 2,048
# values or more exceed it, by up to 10^3.
TRAINED_SPREAD = 10.0
_FEWEST_TRAINED = 3  # with fewer trained weights, an untrained one does not stand out
_FEWEST_INTEGERS = 1024  # a fixed kernel, such as an edge detector, may have fewer
_FEWEST_SIGNS = 2048  # this many equal signs are not chance; a bank of fixed filters is mostly zeros


@rule("outlier-weight", "fail", "stored")
@limit(
    "max_ratio",
    100.0,
    "greatest magnitude of a weight over the 99.9% quantile of its magnitudes; above it the rule warns",
    "the largest of 21 trained networks and 65 pruned or rounded copies is 48 (Silero VAD), of 199 random networks 31",
)
@limit(
    "fail_ratio",
    1e4,
    "the same ratio; above it a value of at least 1,000 fails",
    "a flipped exponent bit multiplies by 2**16 in float16, by 2**128 in float32 and bfloat16",
)
def outlier_weight(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A value of a weight is far greater than all others.

    A single value that is thousands of times the others, or whose square overflows its type, comes from a damaged file
    (a flipped exponent bit multiplies by up to 2**128) or from a diverging step. The greatest number of the type itself
    is a clipped overflow. Such a value hides all other values of its layer, so the rule fails. Values hundreds of times
    the others also occur in sound networks, so the rule warns. The rule checks parameters and BatchNorm's statistics;
    with fewer than 2,000 values, the greatest is compared with the next. Go back to an earlier checkpoint, or download
    again.
    """
    for values in measured.stored:
        if values.max_abs is None or not (values.role == "parameter" or leaf_of(values).startswith("running_")):
            continue
        target, ratio = stored_in(values), values.outlier_ratio or 0.0
        is_scaled = "float8" in values.dtype  # its scale makes it reach the greatest number
        greatest = math.inf if is_scaled or values.dtype not in FORMATS else FORMATS[values.dtype].greatest
        named = f"'{values.name}' ({values.kind}) reaches {figure(values.max_abs, 5)}"
        times = f"{figure(ratio, 3)} times the 99.9% quantile of its magnitudes"
        if values.max_abs == greatest:
            yield RuleFinding(target, f"{named}, the greatest number of {values.dtype}: an overflow was cut off there.")
        elif values.dtype != "float16" and values.max_abs > math.sqrt(greatest):
            relative = f"; it is {times}" if ratio > terms.limit("max_ratio", target) else ""
            yield RuleFinding(target, f"{named}, whose square overflows {values.dtype}{relative}.")
        elif values.max_abs >= _LEAST_THAT_FAILS and ratio > (most := terms.limit("fail_ratio", target)):
            yield RuleFinding(target, f"{named}, {times} (limit {most:g}).")
        elif ratio > (most := terms.limit("max_ratio", target)):
            yield RuleFinding(target, f"{named}, {times} (limit {most:g}).", "warn")


@rule("duplicate-filter", "warn", "stored", followers="weight")
def duplicate_filter(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """Output channels of one weight are equal to the last bit.

    Two filters that start different never become equal in training. A faulty conversion, or a tensor assembled from
    overlapping pieces, copies them: convert the file again. A network that was widened by copying and not trained since
    has copies on purpose. Filters of zeros do not count, nor do filters with fewer than 8 non-zero values (32 in a
    weight rounded to 8 bits), nor a depthwise weight that repeats one kernel, as a blur does.
    """
    for values in measured.stored:
        if values.repeated_filters and values.filter_count:
            equal = f"{len(values.repeated_filters)} of {counted(values.filter_count, 'output channel')} equal"
            yield about(values, f": {equal} one before them: {some_of(values.repeated_filters, 8)}")


@rule("constant-block", "warn", "stored")
@limit(
    "min_length",
    64,
    "number of equal values in a row from which a run is checked",
    "none of 21 trained networks and 35 rounded or structurally pruned copies has a run of 32",
)
@limit(
    "max_over_chance",
    16.0,
    "length of a run over the longest length expected by chance, given the share of the value elsewhere",
    "the largest of 30 copies of trained networks pruned value by value, 50% to 98%, is 6.5",
)
def constant_block(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A block of a weight has a single value, mostly zero, unlike the rest.

    An unwritten page of a file reads as zeros, and a faulty conversion leaves a block as it was allocated. Convert or
    download the file again. The longest run of one value in a weight's memory is compared with the longest run expected
    by chance, given the share of that value elsewhere, so a network pruned value by value passes. Filters and inputs
    that are zero everywhere are left out: structured pruning and dead channels cause them, and dead-filter reports such
    filters.
    """
    for values in measured.stored:
        run = values.constant_run
        if run is None or run.length < terms.limit("min_length", stored_in(values)):
            continue
        limit = terms.limit("max_over_chance", stored_in(values))
        if run.length > limit * run.chance:
            block = f"{run.length:,} values in a row are {run.value:.6g}"
            yield about(values, f": {block}, where chance explains {run.chance:.0f} (limit {limit:g} times that)")


@rule("integer-weight", "fail", "stored", followers="weight")
@limit(
    "min_magnitude",
    4.0,
    "greatest magnitude from which a weight of whole numbers is reported",
    "binary and ternary networks reach 1, int4 reaches 7 or 8, int8 127",
)
def integer_weight(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """All values of a floating-point weight are whole numbers: integers that lack their scale.

    A quantised weight is an integer times a scale. Without the scale, the integers make every output of a
    floating-point network tens to thousands of times too large; a normalisation may hide that. The rule checks kernels
    and matrices of 1,024 values or more whose module stores nothing called "scale". Convert the file again, and
    multiply each weight by its scale.
    """
    scaled = {_owner(values) for values in measured.stored if _is_scale(values)}
    for values in measured.stored:
        is_scaled = bool({_owner(values), values.name} & scaled)
        if values.is_whole and values.element_count >= _FEWEST_INTEGERS and not is_scaled:
            least, reached = terms.limit("min_magnitude", stored_in(values)), values.max_abs or 0.0
            if reached >= least:
                whole = f"all of its {values.element_count:,} values are whole numbers, up to {reached:g} in magnitude"
                yield about(values, f": {whole} (limit {least:g}), and no scale is stored beside it")


@rule("unsigned-weight", "fail", "stored", followers="weight")
@limit(
    "fail_fraction",
    0.75,
    "share of the network's weights that have only one sign, from which the rule fails, 0-1",
    "in all weights of 11 trained and 265 random networks, the rarer sign has at least 27% of the values",
)
def unsigned_weight(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """All values of a weight have the same sign.

    Initialisation draws both signs, and training keeps both. A weight of magnitudes alone has lost its signs: in a
    conversion, by reading signed integers as unsigned, or in a step that stored absolute values. If most weights have
    one sign, the rule fails: convert the file again. A few such weights are a warning, because some layers are kept
    positive on purpose, such as those that mix energies of frequencies. The rule checks kernels and matrices with at
    least 2,048 non-zero values, unless they are constant, break integer-weight, or are named "scale" (GPTQ, AWQ, FP8).
    """
    large = [values for values in measured.stored if is_weight(values) and _nonzero(values) >= _FEWEST_SIGNS]
    weights = [values for values in large if not _is_scale(values)]
    unsigned = [
        weight for weight in weights if _has_one_sign(weight) and weight.min != weight.max and not weight.is_whole
    ]
    for values in unsigned:
        wrong = "negative" if (values.max or 0.0) > 0 else "positive"
        message = f"'{values.name}' ({values.kind}): none of its {_nonzero(values):,} values other than 0 is {wrong}"
        fails = len(unsigned) >= max(_FEWEST_TRAINED, terms.limit("fail_fraction", stored_in(values)) * len(weights))
        have = "has" if len(unsigned) == 1 else "have"
        share = f"{len(unsigned)} of {counted(len(weights), 'weight')} {have} values of one sign only"
        yield RuleFinding(stored_in(values), f"{message}; {share}.", "fail" if fails else "warn")


@rule("untrained-weight", "warn", "stored", followers="weight")
@limit(
    "max_spread",
    3.0,
    "spread of a weight's rows, columns and kernel positions beyond that of independent values, in standard errors",
    "the smallest of 21 trained networks and 65 pruned or rounded copies is 4.7, of 11 networks trained for seconds "
    "3.3, of two of them with half of their values pruned 2.4; 98% of the 8,566 weights of 112 random networks stay "
    "below",
)
@limit(
    "min_trained_fraction",
    0.75,
    "share of the weights that must be trained before an untrained one is reported, 0-1",
    "two networks trained for seconds have 57% and 11%, EfficientNet-Lite0 to 2 at least 91%",
)
def untrained_weight(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A weight looks drawn at random, while nearly all others are trained.

    Initialisation draws the values of a weight independently, from whatever distribution. Training makes rows, columns
    and kernel positions differ from one another far more than chance does. A weight without such structure among
    trained weights was never loaded, was initialised again, or is not used. Compare its name with those in the file.
    The rule checks kernels and matrices of 2,048 values or more. Weights after the last trained one pass, because a new
    head on a trained body is on purpose. A network with fewer trained weights than the limit passes too.

    A transposed square weight is not found: it looks as trained as before. In some layers the norms of its columns
    follow the magnitudes of its inputs (rank correlation up to 0.91), but in half of the 119 layers of
    EfficientNet-Lite0 to 2 they hardly do (below 0.3, down to -0.18). If a BatchNorm follows, batchnorm-statistics
    finds it with pictures; otherwise a baseline (drift) or labelled pictures do.
    """
    last = _last_trained(measured.stored, terms.limit("min_trained_fraction"))
    for values in measured.stored[:last]:
        spread, most = values.spread_beyond_chance, terms.limit("max_spread", stored_in(values))
        if spread is not None and spread < most:
            reason = "its rows, columns and kernel places differ by no more than independent random values do"
            yield about(values, f" looks untrained: {reason} ({spread:.1f} standard errors beyond, limit {most:g})")


@rule("untrained-norm", "fail", "stored", followers="layer")
@limit(
    "min_trained_fraction",
    0.75,
    "share of the normalisation layers that must have moved before an unmoved one is reported, 0-1",
    "as for untrained-weight; none of 21 trained networks has such a layer",
)
def untrained_norm(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A normalisation layer has its initial values, while nearly all others, or its own weight and bias, have moved.

    Training always moves a normalisation layer, so an unmoved one was reset, never loaded, or is not used: load it
    again. A layer has not moved if its mean is exactly 0 and its variance exactly 1, if only one of them is but the
    other differs between channels, or if its weight is exactly 1 and its bias exactly 0. A weight and a bias of 0 count
    too: the last layer of a residual branch may start so, and passes nothing on.

    A BatchNorm that has counted batches but has not moved is impossible, unless its momentum is 0, and fails;
    everything else warns. The rule also warns if no statistics have moved although the weights are trained, and about
    any layer whose statistics have not moved although its own weight and bias are trained: they were never updated (an
    average of parameters without buffers, training in eval mode), never loaded, or folded into weight and bias;
    batchnorm-statistics fails if pictures contradict them. For a file it warns if the weights look random too: the
    network is untrained. Layers after the last trained one pass, because a new head on a trained body is on purpose.
    """
    norms = _norms(measured.stored)
    looks_random = weights_look_random(measured.stored)
    never_updated = {at for at, norm in norms if _is_never_updated(norm, looks_random=looks_random)}
    is_new = batch_norm_is_untrained(measured) and looks_random and not never_updated
    if measured.model.sha256 and is_new and not any(_batches(norm) for _, norm in norms):
        statistics = "BatchNorm statistics are at their initial values (mean 0, variance 1)"
        message = f"Looks untrained: {statistics}, and the weights look randomly drawn."
        yield RuleFinding(WHOLE_NETWORK, message, "warn")
        return
    trained = [at for at, norm in norms for starts in _STARTS.values() if _is_at_start(norm, starts) is False]
    last = max([_last_trained(measured.stored, 0.0), *trained])
    weights_are_trained = _last_trained(measured.stored, terms.limit("min_trained_fraction")) > 0
    if not looks_random:  # RepVGG starts with random scales
        scaled = sum(_is_at_start(norm, _STARTS["affine"]) is False for _, norm in norms)
        weights_are_trained |= scaled >= _FEWEST_TRAINED
    seen: set[int] = set()
    for kind, starts in _STARTS.items():
        states = [(at, norm, _is_at_start(norm, starts)) for at, norm in norms if _varies(norm, _COUNTERPART.get(kind))]
        moved = sum(state is False for _, _, state in states)
        unmoved = [(at, norm) for at, norm, state in states if state and at not in seen]
        in_vain = any(_batches(norm) for _, norm in unmoved)
        none_moved = kind == "statistics" and not moved and (weights_are_trained or in_vain)
        enough = max(_FEWEST_TRAINED, terms.limit("min_trained_fraction") * (moved + len(unmoved)))
        if moved < enough and not none_moved:
            unmoved = [(at, norm) for at, norm in unmoved if at in never_updated]
        for at, norm in unmoved:
            batches = 0.0 if kind in ("affine", "zeros") else _batches(norm)
            counted_in_vain = batches > 0
            if not (at <= last or counted_in_vain):
                continue
            seen.add(at)
            first = norm[next(iter(starts))]
            start = " and ".join(f"'{norm[leaf].name}' is {value:g}" for leaf, value in starts.items())
            after = f", after {counted(round(batches), 'batch', 'batches')}" if counted_in_vain else ""
            unmoved_too = "the weights are trained" if weights_are_trained else "so are those of all layers"
            others = f"{moved} other layers have moved" if moved else unmoved_too
            if at in never_updated:
                others = "though weight and bias of the same layer are trained"
            message = f"{start} everywhere{after}, as in a new layer{',' if at in never_updated else ';'} {others}."
            yield RuleFinding(stored_in(first), message, "fail" if counted_in_vain else "warn")


# Initial values of a normalisation layer's parts: "zeros" in the last layer of a residual branch.
_STARTS: Mapping[str, Mapping[str, float]] = {
    "statistics": {"running_mean": 0.0, "running_var": 1.0},
    "means": {"running_mean": 0.0},
    "variances": {"running_var": 1.0},
    "affine": {"weight": 1.0, "bias": 0.0},
    "zeros": {"weight": 0.0, "bias": 0.0},
}

# In a training of seconds, scales stay this close to 1; RepVGG's initial scales are 0.1 on average, +-0.1.
_NEAR_START = 0.5

# If only mean or only variance has its initial value, the other must differ between channels: in a layer with zero
# inputs, means stay 0, and all variances decay equally.
_COUNTERPART = {"means": "running_var", "variances": "running_mean"}


def _norms(stored: Sequence[StoredValues]) -> list[tuple[int, Mapping[str, StoredValues]]]:
    """Return modules that hold only vectors, like normalisation layers: their positions, and tensors by leaf name."""
    layers: dict[str, dict[str, StoredValues]] = {}
    positions: dict[str, int] = {}
    for at, values in enumerate(stored):
        layer, _, leaf = values.name.rpartition(".")
        layers.setdefault(layer, {})[leaf] = values
        positions[layer] = at
    return [
        (positions[name], tensors)
        for name, tensors in layers.items()
        if all(len(tensor.shape) < 2 for tensor in tensors.values())
    ]


def looks_untrained(measured: CheckMeasurements) -> bool:
    """Tell whether weights look random, or BatchNorm has its initial statistics and no weight looks trained."""
    is_new = batch_norm_is_untrained(measured) and statistics_are_new(measured.stored)
    spreads = (values.spread_beyond_chance or 0.0 for values in measured.stored)
    return weights_are_random(measured) or (is_new and max(spreads, default=0.0) < TRAINED_SPREAD)


def statistics_are_new(stored: Sequence[StoredValues]) -> bool:
    """Tell whether no layer with initial statistics has a trained weight and bias."""
    looks_random = weights_look_random(stored)
    return not any(_is_never_updated(norm, looks_random=looks_random) for _, norm in _norms(stored))


def _is_never_updated(norm: Mapping[str, StoredValues], *, looks_random: bool) -> bool:
    """Tell whether statistics have their initial values, while the layer's weight and bias differ between channels.

    If the network's weights look random, this layer's weight must also be near 1, because RepVGG draws it around 0.1.
    """
    if not _is_at_start(norm, _STARTS["statistics"]) or not {"weight", "bias"} <= norm.keys():
        return False
    weight, bias = norm["weight"], norm["bias"]
    low, high = weight.min, weight.max
    if low is None or high is None or low == high or bias.min == bias.max:
        return False
    return not looks_random or (low > 1 - _NEAR_START and high < 1 + _NEAR_START)


def _batches(norm: Mapping[str, StoredValues]) -> float:
    count = norm["num_batches_tracked"].max if "num_batches_tracked" in norm else None
    return max(count or 0.0, 0.0)  # the rule batchnorm-variance reports a negative count


def _varies(norm: Mapping[str, StoredValues], leaf: str | None) -> bool:
    """Tell whether part `leaf` of a layer differs between channels; True for None."""
    return leaf is None or (leaf in norm and norm[leaf].min != norm[leaf].max)


def _is_at_start(norm: Mapping[str, StoredValues], starts: Mapping[str, float]) -> bool | None:
    """Tell whether parts of a layer have their initial values; None if one is missing or constant at another value."""
    if not starts.keys() <= norm.keys():
        return None
    parts = {leaf: norm[leaf] for leaf in starts}
    if any(part.min != part.max for part in parts.values()):
        return False
    return True if all(part.min == starts[leaf] for leaf, part in parts.items()) else None


def _owner(values: StoredValues) -> str:
    return values.name.rpartition(".")[0]


def _is_scale(values: StoredValues) -> bool:
    return "scale" in leaf_of(values).lower()


def _nonzero(values: StoredValues) -> int:
    return values.element_count - values.zero_count


def _has_one_sign(values: StoredValues) -> bool:
    """Tell whether no values are negative, or none are positive; False for NaN and infinities."""
    low, high = values.min, values.max
    return low is not None and high is not None and not values.nan_count + values.inf_count and not low < 0 < high


def _last_trained(stored: Sequence[StoredValues], fraction: float) -> int:
    """Return the position of the last trained weight; 0 if fewer than three, or than `fraction`, are trained."""
    spreads = [(at, weight.spread_beyond_chance) for at, weight in enumerate(stored)]
    judged = [(at, spread) for at, spread in spreads if spread is not None]
    trained = [at for at, spread in judged if spread >= TRAINED_SPREAD]
    return trained[-1] if len(trained) >= max(_FEWEST_TRAINED, fraction * len(judged)) else 0


_SHORTEST_ROW = 8  # a scale per row saturates one value in each row, which is a large share of a shorter row


@rule("float8-weight", "warn", "stored", followers="weight")
@limit(
    "max_saturated_fraction",
    0.5,
    "share of a weight's values that may be the greatest number of its float8 type, 0-1",
    "EfficientNet-Lite0 to 2, scaled by tensor, by row, or by blocks of 128 and 32, have up to 0.22",
)
@limit(
    "max_rounding_error",
    0.1,
    "rounding error of values near zero, in units of the weight's root mean square",
    "step / (sqrt(12) * RMS), as for any uniform rounding; EfficientNet-Lite0 to 2, scaled by tensor, by row, or by "
    "blocks of 128 and 32, have up to 2e-5, and 0.012 without a scale",
)
def float8_weight(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A weight in float8 lacks its scale, or was rounded or cut off too far.

    Eight bits hold a weight well only if the weight is first scaled to reach the greatest number of the type (448 in
    float8_e4m3fn, 57344 in float8_e5m2), and the scale is stored with it. The rule finds three mistakes. A weight that
    reaches this number without anything called "scale" in the same module is used hundreds of times too large. If half
    of the values are that number, the scale was applied twice, or belongs to a different weight. A weight without a
    scale that is about as small as the steps of float8 (2**-9 in float8_e4m3fn) has lost most of its precision.

    The rule checks weights in float8, and wider ones whose values are all float8 numbers, as after loading a float8
    file into a float32 network. An overflow becomes NaN, which non-finite-parameter reports. Convert the network again,
    from the file with the full weights.
    """
    scaled = {_owner(values) for values in measured.stored if _is_scale(values)}
    for values in measured.stored:
        if (float8 := values.float8) is None:
            continue
        greatest, step = FORMATS[float8.dtype]
        target = stored_in(values)
        share = float8.saturated_count / values.element_count
        long_enough = math.prod(values.shape[1:]) >= _SHORTEST_ROW
        error = step / (math.sqrt(12) * float8.rms)
        if long_enough and share > (most := terms.limit("max_saturated_fraction", target)):
            cut = f"{percent_text(share)} of its values are ±{greatest:g}, the greatest of {float8.dtype}"
            yield about(values, f": {cut} (limit {most * 100:.6g}%)")
        elif float8.saturated_count and not {_owner(values), values.name} & scaled:
            reaches = f"reaches {greatest:g}, the greatest of {float8.dtype}, as weights that are scaled for it do"
            yield about(values, f" {reaches}, and no scale is stored beside it")
        elif error > (most := terms.limit("max_rounding_error", target)):
            coarse = f"steps of {float8.dtype} next to zero, {figure(step, 3)}, round it by about {error:.1%}"
            of = f"of its root mean square, {figure(float8.rms, 3)} (limit {most * 100:.6g}%)"
            yield about(values, f": {coarse} {of}")


@rule("float8-range", "off", "stored")
@limit(
    "max_overflowing_fraction",
    0.0,
    "share of a weight's values that may lie beyond 448, the greatest of float8_e4m3fn, 0-1",
    "OCP 8-bit Floating Point Specification, 2023",
)
@limit(
    "max_vanishing_fraction",
    0.2,
    "share of a weight's non-zero values that may become zero in float8_e4m3fn (those of at most 2**-10), 0-1",
    "the same; the weights of EfficientNet-Lite0 to 2 have up to 0.0996",
)
def float8_range(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A weight does not fit into float8_e4m3fn as it is.

    float8_e4m3fn has no numbers beyond 448: greater values are cut off, or become NaN. Values of at most 2**-10 become
    zero. The rule names the worst weight of either kind, with its share. Such a weight needs a scale (for a tensor, a
    row or a block), or a different type: float8_e5m2 reaches 57344 and 2**-17 with two bits of precision, and is meant
    for gradients. The rule checks weights with at least two axes longer than 1 as they are, without a scale. Off until
    --select or the configuration turns it on, because few networks are meant for float8.
    """
    weights = [weight for weight in measured.stored if is_weight(weight) and "float" in weight.dtype]
    beyond = [
        (weight.float8_overflow_count / weight.element_count, weight) for weight in weights if weight.element_count
    ]
    vanishing = [(weight.float8_zero_count / _nonzero(weight), weight) for weight in weights if _nonzero(weight)]
    flaw = "its values lie beyond 448, the greatest of float8_e4m3fn"
    yield from worst_weight(terms, "max_overflowing_fraction", beyond, flaw)
    flaw = "its values other than 0 become 0 in float8_e4m3fn"
    yield from worst_weight(terms, "max_vanishing_fraction", vanishing, flaw)

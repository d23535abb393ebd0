"""Rules about the file and its parameters and buffers, as they were loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from hookscope.rules.rule import WHOLE_NETWORK, RuleFinding, RuleTerms, limit, listed, rule, stored_in
from hookscope.text import are, counted, figure, percent_text, some_of

if TYPE_CHECKING:
    from hookscope.results.check import CheckMeasurements, StoredValues


# A network with at least `_FEWEST_SPREADS` weights counts as random if `_RANDOM_FRACTION` of them spread by less than
# `RANDOM_SPREAD` standard errors beyond chance. The smallest share in 289 random networks is 0.88. A small trained ViT
# has 0.94, and only its LayerNorms show the training: no scale varies in 90 random networks without BatchNorm.
_FEWEST_SPREADS = 3
RANDOM_SPREAD = 3.0
_RANDOM_FRACTION = 0.8


@rule("integrity", "fail", "file")
def integrity(_measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """The file is incomplete, of an unknown kind, or not safe to read.

    The file is read to its end without running anything in it. Truncated downloads, damaged archives, unknown formats,
    and pickles that name classes other than plain data are refused. Nothing else can be checked after that, so the
    check fails at any level. Download or save the file again. --allow-global skips a class that you name, without
    running it; --trust unpickles the file, which can run code: use it only for files of your own.
    """
    return iter(())  # a file that breaks it leaves nothing to measure: `judging.refused` reports it


@rule("architecture", "fail", "network")
def architecture(_measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """The names and shapes in the file do not match the network.

    The file must have every name and shape of the network, and no others. Causes: half a checkpoint, a different
    version of the code, the weights of a different network. Only the stored values can then be checked, and the check
    fails at any level. Name the network with --arch, or allow differences with --allow-missing and --allow-unexpected;
    --arch none checks the file without a network.
    """
    return iter(())  # like `integrity`


@rule("non-finite-parameter", "fail", "stored", followers="tensor")
def non_finite_parameter(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """A parameter or buffer has NaN or Inf.

    One NaN in a weight makes every output NaN. Causes: a step with too large a learning rate, an overflow in half
    precision, a damaged file. A buffer of only zeros and infinities is a mask, and passes. A minimum or maximum (by its
    name) that is infinite everywhere passes too: quantisation observers start that way. Go back to an earlier
    checkpoint.
    """
    for values in measured.stored:
        if (values.nan_count or values.inf_count) and not (_is_mask(values) or _is_empty_range(values)):
            counts = f"{values.nan_count:,} NaN and {values.inf_count:,} Inf"
            yield about(values, f" has {counts} in {counted(values.element_count, 'value')} (limit 0)")


@rule("zero-parameter", "warn", "stored")
def zero_parameter(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """A weight matrix or kernel is zero everywhere.

    A layer whose weight is zero passes nothing on. The weight was never loaded, was pruned, or starts at zero by
    design: untrained heads and last layers of residual branches do. Load it, or ignore the rule where zero is meant.
    The rule checks weights with at least two axes longer than 1, weights of known layers with one input or output, and
    the scale of a normalisation layer whose bias varies, because training moves both. It does not check other scales,
    nor biases, including attention's tables of biases. Tables of positions ("pos" in the name) are not checked while
    weights are random or BatchNorm is untrained, because some start at zero.

    A file of low-rank adapters (LoRA) fails if each of them has a half or a scale that is zero everywhere, as every
    lora_B is before training: the adapters then change nothing in their network.
    """
    passing = ("bias", "pos") if is_untrained(measured) else ("bias",)
    varied = {values.name: values.shape for values in measured.stored if values.min != values.max}
    masks = pruning_masks(measured.stored)
    if idle := measured.idle_adapters:
        message = f"The adapters change nothing: each has a tensor of zeros, as before training ({listed(idle)})."
        yield RuleFinding(WHOLE_NETWORK, message, at_least="fail")
    for values in measured.stored:
        if values.name in idle:
            continue
        bias = f"{values.name.removesuffix('weight')}bias"
        is_checked = is_weight(values) or values.filter_count or varied.get(bias) == values.shape
        zeros = values if is_zero(values) else masks.get(values.name, values)
        if is_checked and is_zero(zeros) and not any(word in leaf_of(values) for word in passing):
            all_values = f"all of its {values.element_count:,} values" if values.element_count > 1 else "its only value"
            yield about(zeros, f" is 0 in {all_values}")


@rule("constant-parameter", "warn", "stored")
def constant_parameter(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """A weight matrix or kernel has one value everywhere, other than zero.

    A weight with a single value makes all its outputs the same. It was allocated, but never initialised or loaded: load
    it. Only weights with at least two axes longer than 1 are checked; not biases and scales. Tables of scales, which
    may start with one value, are not checked either: they are neither the weight of a known layer nor named "weight".
    """
    for values in measured.stored:
        finite = not (values.nan_count or values.inf_count)
        is_scale = values.filter_count is None and "weight" not in leaf_of(values)
        if is_weight(values) and not is_scale and finite and values.min == values.max and values.min not in (None, 0):
            yield about(values, f" is {values.min:.6g} in all of its {values.element_count:,} values")


@rule("duplicate-parameter", "warn", "stored", followers="weight")
def duplicate_parameter(measured: CheckMeasurements, _terms: RuleTerms) -> Iterator[RuleFinding]:
    """Two weights that are not tied have the same values.

    Two equal weights that do not share memory are usually a mistake: one weight was loaded twice, or layers were copied
    and never trained apart. Compare their names with those in the original checkpoint. Tied weights, constant weights
    and tables of equal rows, such as A_log of an untrained Mamba, do not count.
    """
    for values in measured.stored:
        if values.twin_of:
            claim = f" equals '{values.twin_of}' in all of its {values.element_count:,} values"
            yield about(values, f"{claim}, though the two are not tied")


@rule("batchnorm-variance", "fail", "stored", followers="buffer")
@limit(
    "max_zero_fraction",
    0.5,
    "share of a layer's channels whose mean and variance may both be zero, 0-1; if all means are zero, none may",
    "3 of 8 trained networks, EfficientNet-Lite0 to 2, have such channels: up to 7 of 32, harmlessly",
)
def batchnorm_variance(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """A running variance of BatchNorm is negative or zero, or a count of its batches is negative.

    A running variance is a mean of squares. A negative one is damaged, and its root is NaN. Zeros in a few channels
    mean that these channels are dead. Zeros in many mean that the buffer was zeroed instead of loaded: eval mode then
    divides by the root of eps, which magnifies every deviation. A single channel that is zero, or below 1.18e-38, the
    least normal number of float32, fails if its running mean is not zero, because a dead channel has a mean of zero. A
    single zero also fails if all running means are zero, because no training leaves that. A negative count of
    batches is damaged, too. Load the buffers again, or compute them anew by forward passes in train mode.
    """
    # In a dying channel, mean and variance decay towards zero together. If all means are exactly zero, training cannot
    # explain a variance of zero.
    named = [(*stored.name.rpartition("."), stored) for stored in measured.stored]
    untrained = {module for module, _, name, values in named if name == "running_mean" and is_zero(values)}
    for module, _, name, values in named:
        if name == "num_batches_tracked" and (values.min or 0) < 0:
            origin = ", which NaN and Inf become as whole numbers" if values.min == -(2.0**63) else ""
            yield about(values, f" counts {values.min:,.0f} batches (limit 0){origin}")
        if name != "running_var" or values.min is None:
            continue
        limit = 0.0 if module in untrained else terms.limit("max_zero_fraction", stored_in(values))
        share = values.zero_count / values.element_count
        if values.min < 0:
            yield about(values, f" goes down to {figure(values.min, 3)} (limit 0)")
        elif stuck := values.means_without_variance:
            channels = f"{counted(len(stuck), 'channel')} whose running mean is not: {some_of(stuck, 8)}"
            yield about(values, f" is 0 or subnormal (limit: 1.18e-38) in {channels}")
        elif share > limit:
            channels = f"{values.zero_count:,} of {counted(values.element_count, 'channel')}"
            yield about(values, f" is 0 in {channels}, {percent_text(share)} (limit {limit * 100:.6g}%)")


@rule("dead-filter", "warn", "stored", followers="weight")
@limit(
    "max_fraction",
    0.25,
    "share of a weight's output channels that may be zero, 0-1",
    "3 of 8 trained networks, EfficientNet-Lite0 to 2, have any: up to 4 of 32",
)
@limit(
    "min_chance",
    1e-6,
    "least probability that a run of zero channels is there by chance, given the share of zero channels elsewhere",
    "four zero channels at the end of 64, with no others, have 7e-8; three have 4e-6",
)
def dead_filter(measured: CheckMeasurements, terms: RuleTerms) -> Iterator[RuleFinding]:
    """Output channels of a weight are zero everywhere, while others are not.

    A row or kernel of zeros makes a constant output channel. Structured pruning does this on purpose, and weight decay
    does it to a channel without a gradient. Neither prefers channels in a row: if such channels are zero and few
    others are, this part of the tensor was never written, or channels were padded. Load the weight again if it was not
    pruned. Weights under a mask of torch.nn.utils.prune are judged with the mask. A weight that is zero everywhere is
    left to zero-parameter. Rows of embeddings do not count as filters: the padding row is zero by design.
    """
    masks = pruning_masks(measured.stored)
    for values in measured.stored:
        is_left = is_zero(values) or is_zero(masks.get(values.name, values)) or "Embedding" in values.kind
        if not values.zero_filters or not values.filter_count or is_left:
            continue
        zeros = "all 0 under the mask of pruning" if values.name in masks else "all 0"
        limit = terms.limit("max_fraction", stored_in(values))
        share = len(values.zero_filters) / values.filter_count
        if share > limit:
            channels = f"{len(values.zero_filters)} of {counted(values.filter_count, 'output channel')}"
            claim = f"{channels} are {zeros}, {percent_text(share)} (limit {limit * 100:.6g}%)"
            yield about(values, f": {claim}: {some_of(values.zero_filters, 8)}")
            continue
        first, run, chance = _least_likely_run(values.zero_filters, values.filter_count)
        if chance < (least := terms.limit("min_chance", stored_in(values))):
            at_end = first + run == values.filter_count
            which = f"the last {run}" if at_end else f"{run} in a row, from {first} to {first + run - 1},"
            claim = f"{which} of {counted(values.filter_count, 'output channel')} are {zeros}"
            rare = f"by chance has a probability of {figure(chance, 1)} (limit {least:g})"
            yield about(values, f": {claim}, which {rare}")


def _least_likely_run(zeros: tuple[int, ...], count: int) -> tuple[int, int, float]:
    """Return the first index, the length and the probability by chance of the least likely run of zero filters.

    Laplace's rule estimates the share of zeros from the other filters: it adds one zero filter and one other filter. A
    run that is not at the end may begin at several places, whose probabilities add up.
    """
    likely = []
    for _, group in groupby(enumerate(zeros), lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        length = len(run)
        places = 1 if run[-1] == count - 1 else count - length
        chance = places * ((len(zeros) - length + 1) / (count - length + 2)) ** length
        likely.append((run[0], length, chance))
    return min(likely, key=lambda run: run[2])


def about(values: StoredValues, claim: str) -> RuleFinding:
    """Return a finding on a parameter or buffer: a sentence of its name and a claim."""
    return RuleFinding(stored_in(values), f"'{values.name}' ({values.kind}){claim}.")


def leaf_of(values: StoredValues) -> str:
    """Return the last part of the name: "weight", "running_var"."""
    return values.name.rpartition(".")[2]


def is_weight(values: StoredValues) -> bool:
    """Tell whether it is a learnt matrix or kernel: a parameter with at least two axes longer than 1."""
    return values.role == "parameter" and sum(size > 1 for size in values.shape) >= 2


def is_zero(values: StoredValues) -> bool:
    """Tell whether there are values, and all are zero."""
    return 0 < values.element_count == values.zero_count


def pruning_masks(stored: Sequence[StoredValues]) -> dict[str, StoredValues]:
    """Return the masks of torch.nn.utils.prune ("weight_mask") by the names of the full weights ("weight_orig")."""
    return {f"{values.name[:-5]}_orig": values for values in stored if values.name.endswith("_mask")}


def batch_norm_is_untrained(measured: CheckMeasurements) -> bool:
    """Tell whether there is BatchNorm, and all its statistics have their initial values: mean 0, variance 1."""
    starts = {"running_mean": 0.0, "running_var": 1.0}
    running = [values for values in measured.stored if leaf_of(values) in starts]
    return bool(running) and all(values.min == values.max == starts[leaf_of(values)] for values in running)


def is_untrained(measured: CheckMeasurements) -> bool:
    """Tell whether weights are random, or BatchNorm is untrained."""
    return weights_are_random(measured) or batch_norm_is_untrained(measured)


def untrained_remark(measured: CheckMeasurements) -> str:
    """Return a sentence, after a space, on the untrained part; "" for a trained network."""
    if batch_norm_is_untrained(measured):
        return " BatchNorm is untrained and does not normalise yet."
    if not weights_are_random(measured):
        return ""
    return " Its weights are random." if measured.model.random else " Nearly all of its weights look random."


def weights_are_random(measured: CheckMeasurements) -> bool:
    """Tell whether hookscope drew the weights, or nearly all look random and no normalisation layer is trained."""
    return measured.model.random or (
        weights_look_random(measured.stored) and not any(map(_shows_training, measured.stored))
    )


def _shows_training(values: StoredValues) -> bool:
    """Tell whether values show training better than weights do: a running variance that moved, a scale that varies."""
    is_scale = leaf_of(values) == "weight" and values.role == "parameter" and len(values.shape) == 1
    has_moved = leaf_of(values) == "running_var" and (values.min, values.max) != (1, 1)
    return has_moved or (is_scale and values.min != values.max)


def weights_look_random(stored: Sequence[StoredValues]) -> bool:
    """Tell whether nearly all weights that are large enough to judge look random."""
    spreads = [values.spread_beyond_chance for values in stored if values.spread_beyond_chance is not None]
    random = sum(spread < RANDOM_SPREAD for spread in spreads)
    return len(spreads) >= _FEWEST_SPREADS and random >= _RANDOM_FRACTION * len(spreads)


def _is_mask(values: StoredValues) -> bool:
    finite = values.element_count - values.inf_count
    return values.role == "buffer" and not values.nan_count and finite == values.zero_count > 0


def _is_empty_range(values: StoredValues) -> bool:
    """Tell whether a buffer is the initial minimum or maximum of an observer: infinite everywhere."""
    is_bound = any(word in leaf_of(values) for word in ("min", "max"))
    return values.role == "buffer" and is_bound and 0 < values.inf_count == values.element_count


def worst_weight(
    terms: RuleTerms, name: str, shares: Sequence[tuple[float, StoredValues]], flaw: str
) -> Iterator[RuleFinding]:
    """Report the weight with the greatest share above its limit, with the number of weights above their limits."""
    judged = [(share, values) for share, values in shares if terms.is_on(stored_in(values))]
    broken = [(share, values) for share, values in judged if share > terms.limit(name, stored_in(values))]
    if broken:
        share, worst = max(broken, key=lambda pair: pair[0])
        limit = terms.limit(name, stored_in(worst))
        above = f"{len(broken)} of {counted(len(judged), 'weight')} {are(len(broken))} above it"
        message = f"'{worst.name}' ({worst.kind}): {percent_text(share)} of {flaw} (limit {limit * 100:.6g}%); {above}."
        yield RuleFinding(stored_in(worst), message)

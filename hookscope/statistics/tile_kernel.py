"""The Triton kernel that reduces a tensor on a GPU: tiles.py launches it and merges what it finds."""

import triton
import triton.language as tl


# One compiled variant for a dtype, whatever the sizes and addresses.
@triton.jit(
    do_not_specialize=["count", "channels", "after", "kept_count", "bin_count"],
    do_not_specialize_on_alignment=["values", "words", "counters", "kept_at"],
)
def reduce_tile(
    values, words, counters, kept_at, count, channels, after, kept_count, bin_count,
    TILE: tl.constexpr, FRACTION: tl.constexpr,
):  # fmt: skip
    """Reduce TILE values, one tile for each program.

    Args:
        values: In memory order, (before, channels, after), `count` of them.
        words: float64: the words of each tile, (9, tiles), see `tiles.merged`; then the kept values, (kept_count,).
        counters: int32, zero at the start: values in each bin, (bin_count,); values that are not zero by channel,
            (channels,). They are counted by atomic additions of integers, whose order does not matter.
        kept_at: int32, where the values lie that are kept, (kept_count,).
        bin_count: 0 to count in no bins.
        FRACTION: Bits of the fraction of the floats in which values are summed: 23 of float32, 52 of float64.
    """
    wide: tl.constexpr = FRACTION == 52
    float_type: tl.constexpr = tl.float64 if wide else tl.float32
    int_type: tl.constexpr = tl.int64 if wide else tl.int32
    sign_bit: tl.constexpr = 63 if wide else 31
    bias: tl.constexpr = 1023 if wide else 127
    magnitude_bits: tl.constexpr = 0x7FFFFFFFFFFFFFFF if wide else 0x7FFFFFFF
    infinity: tl.constexpr = (2 * bias + 1) << FRACTION

    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    lane = tl.arange(0, TILE)
    at = tile * TILE + lane
    inside = at < count
    loaded = tl.load(values + at, mask=inside, other=0.0)
    if values.dtype.element_ty == tl.bfloat16:  # the first half of a float32; Triton's interpreter drops subnormal ones
        bits = loaded.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        bits = loaded.to(float_type).to(int_type, bitcast=True)
    x = bits.to(float_type, bitcast=True)
    magnitude = bits & magnitude_bits
    finite = inside & (magnitude < infinity)
    finite_count = tl.sum(finite.to(tl.int32))

    # As integers, floats are in order once the magnitudes of negative ones are inverted.
    ordered = bits ^ ((bits >> sign_bit) & magnitude_bits)
    low = tl.min(tl.where(finite, ordered, infinity))
    high = tl.max(tl.where(finite, ordered, -infinity - 1))

    # Divided by the power of two below the largest magnitude, no square overflows or vanishes.
    largest = tl.max(tl.where(finite, magnitude, 0))
    exponent = tl.minimum(tl.maximum(largest >> FRACTION, 1), 2 * bias - 1)
    scaled = tl.where(finite, x, 0.0) * ((2 * bias - exponent) << FRACTION).to(float_type, bitcast=True)
    centre = tl.sum(scaled) / tl.maximum(finite_count, 1)
    deviations = tl.where(finite, scaled - centre, 0.0)

    tl.store(words + tile, finite_count)
    tl.store(words + tiles + tile, tl.sum((magnitude > infinity).to(tl.int32)))
    tl.store(words + 2 * tiles + tile, (low ^ ((low >> sign_bit) & magnitude_bits)).to(float_type, bitcast=True))
    tl.store(words + 3 * tiles + tile, (high ^ ((high >> sign_bit) & magnitude_bits)).to(float_type, bitcast=True))
    tl.store(words + 4 * tiles + tile, exponent - bias)
    tl.store(words + 5 * tiles + tile, centre)
    tl.store(words + 6 * tiles + tile, tl.sum(deviations))
    tl.store(words + 7 * tiles + tile, tl.sum(deviations * deviations))
    tl.store(words + 8 * tiles + tile, tl.sum(tl.abs(scaled)))

    # An addition where a stretch of one channel ends, and one where it begins: differences of running counts.
    nonzero = (magnitude != 0).to(tl.int32)
    running = tl.cumsum(nonzero, 0)
    along = at % after
    begins = (lane == 0) | (along == 0)
    ends = (lane == TILE - 1) | (along == after - 1) | (at == count - 1)
    change = tl.where(ends, running, 0) - tl.where(begins, running - nonzero, 0)
    place = counters + bin_count + at // after % channels
    tl.atomic_add(place, change, mask=inside & (change != 0), sem="relaxed")

    if bin_count > 0:  # bins ascend: of negative values, of zero in the middle, of positive values
        subnormal = magnitude < (1 << FRACTION)
        # As a normal number, the fraction of a subnormal one says which power of two it is nearest.
        normal = tl.where(subnormal, magnitude.to(float_type).to(int_type, bitcast=True), magnitude)
        key = (normal >> (FRACTION - 5)) + tl.where(subnormal, 1 - 32 * bias, 1 + 32 * (FRACTION - 1))
        middle = counters + bin_count // 2
        tl.atomic_add(middle + tl.where(bits < 0, -key, key), 1, mask=finite & (magnitude != 0), sem="relaxed")
        tl.atomic_add(middle, tl.minimum(count - tile * TILE, TILE) - tl.sum(nonzero), sem="relaxed")

    if tile * TILE < kept_count:
        is_kept = at < kept_count
        taken = tl.load(values + tl.load(kept_at + at, mask=is_kept, other=0), mask=is_kept, other=0.0)
        tl.store(words + 9 * tiles + at, taken.to(float_type), mask=is_kept)

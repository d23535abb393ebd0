/* How far two float32 tensors are from each other, summed in float64, in one pass over both. */

#include "native.h"

/* Elements whose largest difference is searched for again where it is the largest so far. */
#define CHUNK 4096

typedef struct {
    const float *a, *b;
    i64 before, channels, after; /* as they lie in memory, outermost first */
    double *squares; /* A-B squared by channel, (channels,); added to; NULL if nobody wants it */
    double *sums;    /* SUMS values: A squared, B squared, A times B, A-B squared, the largest magnitude of A-B; written */
    i64 *counts; /* COUNTS values: unequal elements, mismatched ones, the place of the largest A-B, -1 for none; written */
} Pair;

INLINE double magnitude(double value) { return value < 0 ? -value : value; }

INLINE i32 is_finite(double value) { return value - value == 0; }

/* Sums of a chunk. */
typedef struct {
    double a, b, product, difference, largest;
    i64 unequal, mismatched;
} Sums;

INLINE void take_one(Sums *sums, double a, double b) {
    double difference = a - b;
    sums->a += a * a;
    sums->b += b * b;
    sums->product += a * b;
    sums->difference += difference * difference;
    sums->unequal += difference != 0;
    sums->largest = magnitude(difference) > sums->largest ? magnitude(difference) : sums->largest;
}

INLINE Sums of_finite(const float *a, const float *b, i64 count) {
    const places sign = (places){0} + (i64)(~0ull >> 1);
    wide of_a = {0}, of_b = {0}, product = {0}, of_difference = {0}, largest = {0};
    places unequal = {0};
    i64 at = 0;
    for (; at + WIDTH <= count; at += WIDTH) {
        wide x = widened(a + at), y = widened(b + at), difference = x - y;
        of_a += x * x;
        of_b += y * y;
        product += x * y;
        of_difference += difference * difference;
        unequal -= difference != 0;
        wide size = (wide)((places)difference & sign);
        places more = size > largest;
        largest = (wide)((more & (places)size) | (~more & (places)largest));
    }
    Sums sums = {total(of_a), total(of_b), total(product), total(of_difference), 0, 0, 0};
    for (i64 lane = 0; lane < WIDTH; lane++) {
        sums.unequal += unequal[lane];
        sums.largest = largest[lane] > sums.largest ? largest[lane] : sums.largest;
    }
    for (; at < count; at++) take_one(&sums, a[at], b[at]);
    return sums;
}

/* Leave out elements that are not finite on either side; they match if they are the same on both. */
INLINE Sums of_any(const float *a, const float *b, i64 count) {
    Sums sums = {0, 0, 0, 0, 0, 0, 0};
    for (i64 at = 0; at < count; at++) {
        double x = a[at], y = b[at];
        if (is_finite(x) && is_finite(y))
            take_one(&sums, x, y);
        else
            sums.mismatched += !(x == y || (x != x && y != y));
    }
    return sums;
}

/* Return the first place of a difference among `length` elements; -1 if another thread has written to them meanwhile. */
INLINE i64 place_of(const Pair *pair, i64 begin, i64 length, double largest) {
    for (i64 at = begin; at < begin + length; at++)
        if (magnitude((double)pair->a[at] - pair->b[at]) == largest) return at;
    return -1;
}

/* Squares by channel where the elements of all channels alternate. */
INLINE void add_alternating(const Pair *pair) {
    const float *a = pair->a, *b = pair->b;
    for (i64 before = 0; before < pair->before; before++, a += pair->channels, b += pair->channels) {
        i64 channel = 0;
        for (; channel + WIDTH <= pair->channels; channel += WIDTH) {
            wide difference = widened(a + channel) - widened(b + channel);
            store(pair->squares + channel, loaded(pair->squares + channel) + difference * difference);
        }
        for (; channel < pair->channels; channel++) {
            double difference = (double)a[channel] - b[channel];
            pair->squares[channel] += difference * difference;
        }
    }
}

INLINE void compare(const Pair *pair) {
    const i64 count = pair->before * pair->channels * pair->after;
    const i32 by_channel = pair->squares && pair->after > 1;
    const i64 run = by_channel ? pair->after : count; /* elements of one channel, or all */
    Sums all = {0, 0, 0, 0, 0, 0, 0};
    i64 place = -1, channel = 0;
    for (i64 start = 0; start < count; start += run) {
        for (i64 begin = start; begin < start + run; begin += CHUNK) {
            i64 length = start + run - begin < CHUNK ? start + run - begin : CHUNK;
            Sums sums = of_finite(pair->a + begin, pair->b + begin, length);
            if (by_channel) pair->squares[channel] += sums.difference;
            if (!is_finite(sums.difference)) sums = of_any(pair->a + begin, pair->b + begin, length);
            all.a += sums.a;
            all.b += sums.b;
            all.product += sums.product;
            all.difference += sums.difference;
            all.unequal += sums.unequal;
            all.mismatched += sums.mismatched;
            if (sums.largest > all.largest) {
                all.largest = sums.largest;
                place = place_of(pair, begin, length, sums.largest);
            }
        }
        channel = channel + 1 < pair->channels ? channel + 1 : 0;
    }
    if (pair->squares && !by_channel) add_alternating(pair);
    const double written[] = {all.a, all.b, all.product, all.difference, all.largest};
    const i64 counts[] = {all.unequal, all.mismatched, place};
    __builtin_memcpy(pair->sums, written, sizeof written);
    __builtin_memcpy(pair->counts, counts, sizeof counts);
}

#define VARIANT(name, target) \
    target EXPORT void sum_differences_##name(const Pair *pair) { compare(pair); }

VARIANTS

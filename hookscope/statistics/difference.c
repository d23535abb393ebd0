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
} Found;

INLINE void take_one(Found *found, double a, double b) {
    double difference = a - b;
    found->a += a * a;
    found->b += b * b;
    found->product += a * b;
    found->difference += difference * difference;
    found->unequal += difference != 0;
    found->largest = magnitude(difference) > found->largest ? magnitude(difference) : found->largest;
}

INLINE Found of_finite(const float *a, const float *b, i64 count) {
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
    Found found = {total(of_a), total(of_b), total(product), total(of_difference), 0, 0, 0};
    for (i64 lane = 0; lane < WIDTH; lane++) {
        found.unequal += unequal[lane];
        found.largest = largest[lane] > found.largest ? largest[lane] : found.largest;
    }
    for (; at < count; at++) take_one(&found, a[at], b[at]);
    return found;
}

/* Leave out elements that are not finite on either side; they match if they are the same on both. */
INLINE Found of_any(const float *a, const float *b, i64 count) {
    Found found = {0, 0, 0, 0, 0, 0, 0};
    for (i64 at = 0; at < count; at++) {
        double x = a[at], y = b[at];
        if (is_finite(x) && is_finite(y))
            take_one(&found, x, y);
        else
            found.mismatched += !(x == y || (x != x && y != y));
    }
    return found;
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
    Found all = {0, 0, 0, 0, 0, 0, 0};
    i64 place = -1, channel = 0;
    for (i64 start = 0; start < count; start += run) {
        for (i64 begin = start; begin < start + run; begin += CHUNK) {
            i64 length = start + run - begin < CHUNK ? start + run - begin : CHUNK;
            Found found = of_finite(pair->a + begin, pair->b + begin, length);
            if (by_channel) pair->squares[channel] += found.difference;
            if (!is_finite(found.difference)) found = of_any(pair->a + begin, pair->b + begin, length);
            all.a += found.a;
            all.b += found.b;
            all.product += found.product;
            all.difference += found.difference;
            all.unequal += found.unequal;
            all.mismatched += found.mismatched;
            if (found.largest > all.largest) {
                all.largest = found.largest;
                place = place_of(pair, begin, length, found.largest);
            }
        }
        channel = channel + 1 < pair->channels ? channel + 1 : 0;
    }
    if (pair->squares && !by_channel) add_alternating(pair);
    const double sums[] = {all.a, all.b, all.product, all.difference, all.largest};
    const i64 counts[] = {all.unequal, all.mismatched, place};
    __builtin_memcpy(pair->sums, sums, sizeof sums);
    __builtin_memcpy(pair->counts, counts, sizeof counts);
}

#define VARIANT(name, target) \
    target EXPORT void sum_differences_##name(const Pair *given) { compare(given); }

VARIANTS

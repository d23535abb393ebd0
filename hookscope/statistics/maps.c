/* Two maps of one input's activation, in one pass over its float32 values: all channels as one, and the strongest. */

#include "native.h"

/* Positions whose sums over channels are kept at hand, and channels that are added to them together. */
#define BLOCK 1024
#define ROWS 4

/* As `_Maps` in library.py. */
typedef struct {
    const float *values;
    i64 channels, positions;
    i64 channel_step, position_step; /* in memory, one of them 1 */
    i64 squared;      /* whether the mean is that of squares */
    double rounding;  /* a mean is 0 where its magnitude is no more than so much of the root mean square of all values */
    double *room;     /* for a sum of each position and each channel */
    float *means;     /* over channels, (positions,); written */
    float *strongest; /* (positions,); written */
} Maps;

/* Add rows of values to one sum for each position, and their squares to one for each row. */
INLINE void add_rows(const float *values, i64 step, i64 rows, i64 count, double *sums, double *squares, int squared) {
    wide of_row[ROWS] = {0};
    i64 at = 0;
    for (; at + WIDTH <= count; at += WIDTH) {
        wide sum = loaded(sums + at);
        for (i64 row = 0; row < rows; row++) {
            wide x = widened(values + row * step + at), square = x * x;
            of_row[row] += square;
            sum += squared ? square : x;
        }
        store(sums + at, sum);
    }
    for (i64 row = 0; row < rows; row++) {
        squares[row] += total(of_row[row]);
        for (i64 rest = at; rest < count; rest++) {
            double x = values[row * step + rest];
            squares[row] += x * x;
            sums[rest] += squared ? x * x : x;
        }
    }
}

/* Return the sum of the channels of one position, and add their squares to one sum for each channel. */
INLINE double add_position(const float *values, i64 count, double *squares, int squared) {
    wide sum = {0};
    double rest = 0;
    i64 at = 0;
    for (; at + WIDTH <= count; at += WIDTH) {
        wide x = widened(values + at), square = x * x;
        store(squares + at, loaded(squares + at) + square);
        sum += squared ? square : x;
    }
    for (; at < count; at++) {
        double x = values[at];
        squares[at] += x * x;
        rest += squared ? x * x : x;
    }
    return total(sum) + rest;
}

INLINE void add_all(const Maps *maps, double *sums, double *squares, int squared) {
    i64 channels = maps->channels, positions = maps->positions, step = maps->channel_step;
    if (maps->position_step != 1) {
        for (i64 at = 0; at < positions; at++)
            sums[at] = add_position(maps->values + at * maps->position_step, channels, squares, squared);
        return;
    }
    for (i64 begin = 0; begin < positions; begin += BLOCK) {
        const float *values = maps->values + begin;
        i64 count = positions - begin < BLOCK ? positions - begin : BLOCK, c = 0;
        for (; c + ROWS <= channels; c += ROWS)
            add_rows(values + c * step, step, ROWS, count, sums + begin, squares + c, squared);
        for (; c < channels; c++) add_rows(values + c * step, step, 1, count, sums + begin, squares + c, squared);
    }
}

/* Return the channel with the largest sum of squares, the first of several; NaN is larger than any. */
INLINE i64 strongest_of(const double *squares, i64 channels) {
    i64 found = 0;
    for (i64 c = 1; c < channels; c++)
        if (squares[c] > squares[found] || (squares[c] != squares[c] && squares[found] == squares[found])) found = c;
    return found;
}

INLINE i64 combine(const Maps *maps) {
    i64 channels = maps->channels, positions = maps->positions;
    double *sums = maps->room, *squares = maps->room + positions, all = 0;
    for (i64 at = 0; at < positions + channels; at++) maps->room[at] = 0;
    if (maps->squared)
        add_all(maps, sums, squares, 1);
    else
        add_all(maps, sums, squares, 0);
    for (i64 c = 0; c < channels; c++) all += squares[c];
    double count = (double)channels, least = maps->rounding * maps->rounding * all / (count * (double)positions);
    i64 channel = strongest_of(squares, channels);
    const float *values = maps->values + channel * maps->channel_step;
    for (i64 at = 0; at < positions; at++) {
        double mean = sums[at] / count;
        maps->means[at] = mean * mean <= least ? 0 : (float)mean;
        maps->strongest[at] = values[at * maps->position_step];
    }
    return channel;
}

#define VARIANT(name, target)                                                                                          \
    target EXPORT i64 combine_maps_##name(const Maps *maps) { return combine(maps); }

VARIANTS

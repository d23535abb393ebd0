/* What each channel of each input does, in one pass over float32 values: mean, deviations, extremes, and where the greatest
 * value is. Summed in float64. */

#include "native.h"

/* As `_Channels` in library.py. Results are (inputs, channels). */
typedef struct {
    const float *values;
    i64 inputs, channels, positions;
    i64 input_step, channel_step, position_step; /* in memory, one of the last two 1 */
    const double *thresholds; /* values above which a position is wanted, (channels,); null for all */
    double *mean, *deviations, *high, *low;
    i64 *at;             /* position of the first greatest value, or -1 */
    i64 threads;
    const Runtime *runtime; /* null for one thread */
    i64 rare;               /* set where a value is not finite: results then mean nothing */
} Channels;

/* As CANCELLATION in native.c, for sums in float64, which has 16 digits. */
#define CANCELLATION 1e6

INLINE wide choose(places mask, wide yes, wide no) { return (wide)((mask & (places)yes) | (~mask & (places)no)); }

/* Make sums and sums of squares of a channel its mean and deviations. */
INLINE void finish(Channels *job, const float *values, i64 step, i64 result) {
    i64 count = job->positions;
    double sum = job->mean[result], squares = job->deviations[result], mean = sum / (double)count;
    double deviations = squares - sum * mean;
    if (sum - sum != 0) {
        __atomic_store_n(&job->rare, 1, __ATOMIC_RELAXED);
        return;
    }
    if (job->high[result] == job->low[result]) { /* summing equal values would only add rounding */
        mean = job->high[result];
        deviations = 0;
    } else if (squares > CANCELLATION * deviations) {
        double about = 0;
        deviations = 0;
        for (i64 at = 0; at < count; at++) {
            double deviation = values[at * step] - mean;
            about += deviation;
            deviations += deviation * deviation;
        }
        mean += about / (double)count;
        deviations -= about / (double)count * about;
    }
    job->mean[result] = mean;
    job->deviations[result] = deviations > 0 ? deviations : 0;
}

/* Reduce a channel whose values lie beside each other. */
INLINE void reduce_row(Channels *job, const float *values, i64 result, int is_wanted, double threshold) {
    i64 count = job->positions, at = 0;
    wide sum = {0}, squares = {0}, high = (wide){0} - __builtin_inf(), low = -high;
    for (; at + WIDTH <= count; at += WIDTH) {
        wide x = widened(values + at);
        sum += x;
        squares += x * x;
        high = choose(x > high, x, high);
        low = choose(x < low, x, low);
    }
    double of_sum = total(sum), of_squares = total(squares), highest = high[0], lowest = low[0];
    for (int lane = 1; lane < WIDTH; lane++) {
        highest = high[lane] > highest ? high[lane] : highest;
        lowest = low[lane] < lowest ? low[lane] : lowest;
    }
    for (; at < count; at++) {
        double x = values[at];
        of_sum += x;
        of_squares += x * x;
        highest = x > highest ? x : highest;
        lowest = x < lowest ? x : lowest;
    }
    job->mean[result] = of_sum;
    job->deviations[result] = of_squares;
    job->high[result] = highest;
    job->low[result] = lowest;
    job->at[result] = -1;
    finish(job, values, 1, result);
    if (!is_wanted && !(highest > threshold)) return;
    for (at = 0; at < count; at++) {
        if (values[at] != highest) continue;
        job->at[result] = at;
        return;
    }
}

/* Reduce the channels of an input whose values at one position lie beside each other. */
INLINE void reduce_positions(Channels *job, const float *values, i64 first) {
    i64 channels = job->channels;
    double *sum = job->mean + first, *squares = job->deviations + first;
    double *high = job->high + first, *low = job->low + first;
    i64 *at = job->at + first;
    for (i64 c = 0; c < channels; c++) {
        sum[c] = squares[c] = 0;
        high[c] = -__builtin_inf();
        low[c] = __builtin_inf();
        at[c] = -1;
    }
    for (i64 position = 0; position < job->positions; position++) {
        const float *row = values + position * job->position_step;
        i64 c = 0;
        for (; c + WIDTH <= channels; c += WIDTH) {
            wide x = widened(row + c), highest = loaded(high + c), lowest = loaded(low + c);
            places higher = x > highest, where;
            __builtin_memcpy(&where, at + c, sizeof where);
            where = (higher & position) | (~higher & where);
            store(sum + c, loaded(sum + c) + x);
            store(squares + c, loaded(squares + c) + x * x);
            store(high + c, choose(higher, x, highest));
            store(low + c, choose(x < lowest, x, lowest));
            __builtin_memcpy(at + c, &where, sizeof where);
        }
        for (; c < channels; c++) {
            double x = row[c];
            sum[c] += x;
            squares[c] += x * x;
            if (x > high[c]) at[c] = position;
            high[c] = x > high[c] ? x : high[c];
            low[c] = x < low[c] ? x : low[c];
        }
    }
    for (i64 c = 0; c < channels; c++) {
        finish(job, values + c, job->position_step, first + c);
        if (job->thresholds && !(high[c] > job->thresholds[c])) at[c] = -1;
    }
}

/* Reduce this thread's share. */
INLINE void reduce_share(Channels *job) {
    i64 threads = job->threads > 1 ? job->runtime->thread_count() : 1;
    i64 number = job->threads > 1 ? job->runtime->thread_number() : 0;
    i64 is_by_row = job->position_step == 1, channels = job->channels;
    i64 count = is_by_row ? job->inputs * channels : job->inputs;
    for (i64 at = count * number / threads; at < count * (number + 1) / threads; at++) {
        if (!is_by_row) {
            reduce_positions(job, job->values + at * job->input_step, at * channels);
            continue;
        }
        i64 input = at / channels, channel = at % channels;
        const float *values = job->values + input * job->input_step + channel * job->channel_step;
        reduce_row(job, values, at, !job->thresholds, job->thresholds ? job->thresholds[channel] : 0);
    }
}

#define VARIANT(name, target)                                                                                          \
    target static void share_##name(void *job) { reduce_share((Channels *)job); }                                      \
    target EXPORT i32 reduce_channels_##name(Channels *job) {                                                          \
        over(job->runtime, job->threads, share_##name, job);                                                           \
        return !job->rare;                                                                                             \
    }

VARIANTS

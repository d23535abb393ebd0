/* One pass over float32 values for everything their statistics need.
 *
 * Compiled without a C library, so that one file serves every system of a kind; the caller chooses among the VARIANTS by
 * what the processor has. Threads are the caller's too: it passes the entry points of the OpenMP runtime that already
 * runs the network, because a second set of threads would fight the first one for the cores.
 */

#include "native.h"

/* Of the sources that this is compiled from: see library.py. */
#define TEXT_OF(token) #token
#define EXPANDED_TEXT_OF(token) TEXT_OF(token)
EXPORT const char sources_hash[] = EXPANDED_TEXT_OF(SOURCES_HASH);

/* Sums run in float32 over so many values per lane before they are carried over into float64: a lane's sum of n terms
 * is off by n * 6e-8 at most. */
#define TERMS 32
#define STRETCH (TERMS * LANES)

/* Sums of squares of values outside this range lose digits at one end or overflow at the other, with up to 1e8 of them
 * (float32: 1e-38..3e38). */
#define SMALLEST_SQUARABLE 1e-15f
#define LARGEST_SQUARABLE 1e15f
/* var = E[x^2] - mean^2 loses a digit for each factor of ten in mean^2 over var; from here on, deviations are summed. */
#define CANCELLATION 10

/* How values are distributed: counts over bins, each of one sign, one power of two and one of PARTS equal parts of the way
 * to the next. The first 14 bits of a normal float32 say which. Each bin has a few counters, used in turns: equal values in
 * a row, as after a ReLU, would wait for one. */
#define PARTS 32
#define COUNTERS 8
#define BY_FIRST_BITS 16384
#define NEGATIVE (BY_FIRST_BITS / 2)     /* the first of those with the sign bit */
#define SUBNORMAL_OCTAVES 23             /* powers of two below the smallest normal number */
#define SUBNORMALS (SUBNORMAL_OCTAVES * PARTS) /* bins of one sign for them, behind all others */
#define BINS (BY_FIRST_BITS + 2 * SUBNORMALS)
/* What names a bin outside: 0 for zero; else, with the sign, 1 + PARTS * (binary exponent + 1074) + part, which holds for
 * float64 as well. `octave` is an exponent with the bias of float32, below 1 for subnormal values. */
#define KEY(octave, part) (1 + PARTS * ((octave) + 947) + (part))

/* All zero between two tensors. */
typedef struct Table {
    u32 counters[BINS][COUNTERS];
} Table;

/* One counter holds as many. */
#define MOST_BINNED 0xffffffffll

/* The sums of one thread; as large as two cache lines so that no two threads write to one. */
typedef struct {
    double sum, square_sum, abs_sum;
    float low, high;
    i64 zeros;
    char padding[128 - 40];
} Part;

typedef struct {
    const float *values;
    const Layout *layout;
    float scale; /* what values are multiplied by before they are summed */
    double centre; /* what deviations are from */
    double *nonzero;
    Table *tables; /* null where nothing is to be binned */
    Part *parts;
    const Runtime *runtime;
    unsigned threads;
} Job;

INLINE floats choose(ints mask, floats yes, floats no) {
    return (floats)((mask & (ints)yes) | (~mask & (ints)no));
}

INLINE floats load(const float *values) {
    floats loaded;
    __builtin_memcpy(&loaded, values, sizeof loaded);
    return loaded;
}

/* What a stretch of values comes to, lane by lane. */
typedef struct {
    floats sum, square_sum, abs_sum, low, high;
    ints zeros;
} Lanes;

INLINE void take(Lanes *lanes, const float *values, float scale) {
    const ints magnitude = (ints){0} + 0x7fffffff;
    floats x = load(values), y = x * scale;
    lanes->sum += y;
    lanes->square_sum += y * y;
    lanes->abs_sum += (floats)((ints)y & magnitude);
    lanes->zeros -= (x == 0);
    lanes->low = choose(x < lanes->low, x, lanes->low);
    lanes->high = choose(x > lanes->high, x, lanes->high);
}

/* Count values in their bins. Measured on AVX-512: 0.3 ns a value, hardly more where all are alike. */
INLINE void bin(Table *table, const float *values, i64 count) {
    i64 at = 0;
    for (; at + COUNTERS <= count; at += COUNTERS) {
        for (int counter = 0; counter < COUNTERS; counter += 2) {
            u64 both; /* values */
            __builtin_memcpy(&both, values + at + counter, sizeof both);
            table->counters[both >> 18 & (BY_FIRST_BITS - 1)][counter]++;
            table->counters[both >> 50][counter + 1]++;
        }
    }
    for (; at < count; at++) {
        u32 bits;
        __builtin_memcpy(&bits, values + at, sizeof bits);
        table->counters[bits >> 18][0]++;
    }
}

/* Sums are those of the values times `scale`; the extremes are the values' own. With a table, the values are binned in
 * the same loop: vectors and counters keep different parts of a processor busy. */
INLINE Part scan(const float *values, i64 count, float scale, Table *table) {
    const float inf = __builtin_inff();
    floats low = (floats){0} + inf, high = -low;
    doubles sum = {0}, square_sum = {0}, abs_sum = {0};
    i64 whole = count / LANES * LANES, at = 0, zero_count = 0;
    while (at < whole) {
        i64 end = whole - at < STRETCH ? whole : at + STRETCH;
        Lanes lanes = {{0}, {0}, {0}, low, high, {0}};
        for (; at < end; at += LANES) {
            take(&lanes, values + at, scale);
            if (table) bin(table, values + at, LANES);
        }
        sum += __builtin_convertvector(lanes.sum, doubles);
        square_sum += __builtin_convertvector(lanes.square_sum, doubles);
        abs_sum += __builtin_convertvector(lanes.abs_sum, doubles);
        low = lanes.low;
        high = lanes.high;
        for (int lane = 0; lane < LANES; lane++) zero_count += lanes.zeros[lane];
    }
    if (table) bin(table, values + whole, count - whole);
    Part part = {0, 0, 0, inf, -inf, zero_count, {0}};
    for (int lane = 0; lane < LANES; lane++) {
        part.sum += sum[lane];
        part.square_sum += square_sum[lane];
        part.abs_sum += abs_sum[lane];
        if (low[lane] < part.low) part.low = low[lane];
        if (high[lane] > part.high) part.high = high[lane];
    }
    for (; at < count; at++) {
        double y = (double)values[at] * scale;
        part.sum += y;
        part.square_sum += y * y;
        part.abs_sum += y < 0 ? -y : y;
        part.zeros += values[at] == 0;
        if (values[at] < part.low) part.low = values[at];
        if (values[at] > part.high) part.high = values[at];
    }
    return part;
}

/* Sum deviations from a centre, and their squares. */
INLINE Part deviations(const float *values, i64 count, double centre) {
    doubles sum = {0}, square_sum = {0};
    i64 at = 0;
    for (; at + LANES <= count; at += LANES) {
        doubles deviation = __builtin_convertvector(load(values + at), doubles) - centre;
        sum += deviation;
        square_sum += deviation * deviation;
    }
    Part part = {0, 0, 0, 0, 0, 0, {0}};
    for (int lane = 0; lane < LANES; lane++) {
        part.sum += sum[lane];
        part.square_sum += square_sum[lane];
    }
    for (; at < count; at++) {
        double deviation = values[at] - centre;
        part.sum += deviation;
        part.square_sum += deviation * deviation;
    }
    return part;
}

/* Count what is not zero in channels begin..end. */
INLINE void count_nonzero(const Job *job, i64 begin, i64 end) {
    i64 before = job->layout->before, channels = job->layout->channels, after = job->layout->after;
    for (i64 c = begin; c < end; c++) job->nonzero[c] = (double)(before * after);
    for (i64 b = 0; b < before; b++) {
        const float *slice = job->values + b * channels * after;
        if (after == 1) {
            for (i64 c = begin; c < end; c++) job->nonzero[c] -= slice[c] == 0;
            continue;
        }
        for (i64 c = begin; c < end; c++) {
            const float *row = slice + c * after;
            for (i64 from = 0; from < after; from += 1 << 30) {
                i64 to = after - from < 1 << 30 ? after : from + (1 << 30);
                i32 zeros = 0;
                for (i64 at = from; at < to; at++) zeros += row[at] == 0;
                job->nonzero[c] -= zeros;
            }
        }
    }
}

/* Which share of `whole` is this thread's? Shares are multiples of `grain`. */
INLINE unsigned share(const Job *job, i64 whole, i64 grain, i64 *begin, i64 *end) {
    i64 count = job->threads > 1 ? job->runtime->thread_count() : 1;
    i64 number = job->threads > 1 ? job->runtime->thread_number() : 0;
    i64 size = ((whole + count - 1) / count + grain - 1) / grain * grain;
    *begin = size * number < whole ? size * number : whole;
    *end = *begin + size < whole ? *begin + size : whole;
    return (unsigned)number;
}

INLINE i64 value_count(const Layout *layout) { return layout->before * layout->channels * layout->after; }

INLINE void scan_share(Job *job) {
    i64 begin, end;
    unsigned number = share(job, value_count(job->layout), STRETCH, &begin, &end);
    const float *values = job->values + begin;
    i64 size = end - begin;
    job->parts[number] = job->scale != 1 ? scan(values, size, job->scale, 0)
                         : job->tables   ? scan(values, size, 1, job->tables + number)
                                         : scan(values, size, 1, 0);
}

INLINE void deviate_share(Job *job) {
    i64 begin, end;
    unsigned number = share(job, value_count(job->layout), STRETCH, &begin, &end);
    job->parts[number] = deviations(job->values + begin, end - begin, job->centre);
}

INLINE void count_share(Job *job) {
    i64 begin, end;
    share(job, job->layout->channels, 1, &begin, &end);
    count_nonzero(job, begin, end);
}

/* What threads do together. */
typedef struct {
    void (*scan)(void *), (*deviate)(void *), (*count)(void *);
} Tasks;

/* Return the sums of a task over all values. */
INLINE Part over_all(Job *job, void (*task)(void *)) {
    Part parts[MAX_THREADS], all = {0, 0, 0, __builtin_inff(), -__builtin_inff(), 0, {0}};
    job->parts = parts;
    for (unsigned thread = 0; thread < job->threads; thread++) parts[thread] = all;
    over(job->runtime, job->threads, task, job);
    for (unsigned thread = 0; thread < job->threads; thread++) {
        all.sum += parts[thread].sum;
        all.square_sum += parts[thread].square_sum;
        all.abs_sum += parts[thread].abs_sum;
        all.zeros += parts[thread].zeros;
        if (parts[thread].low < all.low) all.low = parts[thread].low;
        if (parts[thread].high > all.high) all.high = parts[thread].high;
    }
    return all;
}

/* Return the largest magnitude. */
INLINE float largest_of(const Part *all) { return all->high > -all->low ? all->high : -all->low; }

/* Is a value NaN or Inf? With a NaN, the sum of magnitudes is one; with Inf, the largest magnitude is. */
INLINE int is_rare(const Part *all) { return all->abs_sum != all->abs_sum || largest_of(all) == __builtin_inff(); }

/* Return the power of two that brings a magnitude to 1..2, or as near to it as float32 allows. */
INLINE float scale_for(float magnitude) {
    i32 bits;
    __builtin_memcpy(&bits, &magnitude, sizeof bits);
    i32 exponent = 254 - (bits >> 23 & 255); /* with its bias of 127 */
    bits = (exponent > 253 ? 253 : exponent < 1 ? 1 : exponent) << 23;
    __builtin_memcpy(&magnitude, &bits, sizeof magnitude);
    return magnitude;
}

/* Return what all threads have counted in a bin, and empty it. */
INLINE i64 emptied(Table *tables, unsigned threads, i64 at) {
    i64 count = 0;
    for (unsigned thread = 0; thread < threads; thread++) {
        u32 *counters = tables[thread].counters[at];
        u64 pairs[COUNTERS / 2], any = 0;
        __builtin_memcpy(pairs, counters, sizeof pairs);
        for (int pair = 0; pair < COUNTERS / 2; pair++) any |= pairs[pair];
        if (!any) continue;
        for (int counter = 0; counter < COUNTERS; counter++) {
            count += counters[counter];
            counters[counter] = 0;
        }
    }
    return count;
}

/* Count subnormal values, whose first bits do not say which power of two they are nearest; return how many there are. */
INLINE i64 bin_subnormals(Table *table, const float *values, i64 count) {
    i64 binned = 0;
    for (i64 at = 0; at < count; at++) {
        u32 bits, magnitude;
        __builtin_memcpy(&bits, values + at, sizeof bits);
        magnitude = bits & 0x7fffffff;
        if (magnitude - 1 >= 0x7fffff) continue;
        u32 octave = 31 - (u32)__builtin_clz(magnitude);
        u32 part = (magnitude << (23 - octave) >> 18) & (PARTS - 1);
        table->counters[BY_FIRST_BITS + (bits >> 31) * SUBNORMALS + octave * PARTS + part][0]++;
        binned++;
    }
    return binned;
}

/* List the bins that hold any value, and empty them; return how many there are, -1 if another thread has written to the
 * values meanwhile, so that not all bins are empty. */
INLINE i64 list_bins(const Job *job, const Part *all, const Results *results) {
    i64 count = value_count(job->layout), zeros = 0;
    for (i64 at = 0; at < PARTS; at++) {
        zeros += emptied(job->tables, job->threads, at);
        zeros += emptied(job->tables, job->threads, NEGATIVE + at);
    }
    if (zeros > all->zeros) zeros -= bin_subnormals(job->tables, job->values, count);
    float largest = largest_of(all);
    u32 bits;
    __builtin_memcpy(&bits, &largest, sizeof bits);
    /* From the largest magnitudes down until no value is left: negative bins then ascend. The positive ones, which
     * descend, wait at the end of the room. */
    i64 listed = 0, waiting = BINS, left = count - zeros;
    for (i32 octave = (i32)(bits >> 23 & 255); left && octave > -SUBNORMAL_OCTAVES; octave--) {
        i64 positive = octave > 0 ? octave * PARTS : BY_FIRST_BITS + (octave + SUBNORMAL_OCTAVES - 1) * PARTS;
        i64 negative = positive + (octave > 0 ? NEGATIVE : SUBNORMALS);
        for (i32 part = PARTS - 1; part >= 0; part--) {
            i64 above = emptied(job->tables, job->threads, positive + part);
            i64 below = emptied(job->tables, job->threads, negative + part);
            if (above) {
                waiting--;
                results->keys[waiting] = KEY(octave, part);
                results->counts[waiting] = above;
            }
            if (below) {
                results->keys[listed] = -KEY(octave, part);
                results->counts[listed++] = below;
            }
            left -= above + below;
        }
    }
    if (left || zeros != all->zeros) return -1;
    if (zeros) {
        results->keys[listed] = 0;
        results->counts[listed++] = zeros;
    }
    for (; waiting < BINS; waiting++, listed++) {
        results->keys[listed] = results->keys[waiting];
        results->counts[listed] = results->counts[waiting];
    }
    return listed;
}

/* Find the numbers of one tensor. */
INLINE i32 find(Job *job, const Results *results, Part *all, Tasks tasks) {
    i64 count = value_count(job->layout);
    *all = over_all(job, tasks.scan);
    if (is_rare(all)) return RARE;
    float largest = largest_of(all);
    if (all->low != all->high && !(largest > SMALLEST_SQUARABLE && largest < LARGEST_SQUARABLE)) {
        job->scale = scale_for(largest);
        *all = over_all(job, tasks.scan);
        if (is_rare(all)) return RARE; /* another thread may have written to the values */
    }
    double scale = 1 / (double)job->scale; /* to multiply sums by */
    double mean = all->sum / (double)count, squared_deviations = all->square_sum - mean * all->sum;
    double abs_sum = all->abs_sum * scale, square_sum = all->square_sum * scale * scale;
    i32 outcome = 0;
    if (all->low == all->high) { /* summing equal values would only add rounding */
        mean = all->low;
        squared_deviations = 0;
        abs_sum = (double)largest * (double)count;
        square_sum = mean * mean * (double)count;
    } else if (mean * all->sum > CANCELLATION * squared_deviations) {
        job->centre = mean * scale;
        Part about = over_all(job, tasks.deviate);
        mean = job->centre + about.sum / (double)count;
        squared_deviations = about.square_sum - about.sum / (double)count * about.sum;
    } else {
        mean *= scale;
        squared_deviations *= scale * scale;
    }
    if (all->zeros && job->layout->by_channel) {
        over(job->runtime, job->threads, tasks.count, job);
        outcome |= WITH_ZEROS;
    }
    const double numbers[NUMBERS] = {mean,      squared_deviations > 0 ? squared_deviations : 0,
                                     all->low,  all->high,
                                     abs_sum,   square_sum,
                                     (double)(count - all->zeros)};
    __builtin_memcpy(results->numbers, numbers, sizeof numbers);
    return outcome;
}

/* Reduce one tensor. */
INLINE i32 reduce(Job *job, const Results *results, Tasks tasks) {
    const Layout *layout = job->layout;
    i64 count = value_count(layout);
    int exact = count <= results->exact_limit;
    job->threads = !job->runtime ? 1 : layout->threads > MAX_THREADS ? MAX_THREADS : (unsigned)layout->threads;
    job->scale = 1;
    job->tables = exact ? 0 : results->tables;
    if (job->tables && count > MOST_BINNED) return RARE;
    Part all;
    i32 outcome = find(job, results, &all, tasks);
    if (job->tables) {
        i64 bins = outcome == RARE ? -1 : list_bins(job, &all, results);
        if (bins < 0) {
            for (i64 at = 0; at < BINS; at++) emptied(job->tables, job->threads, at);
            return RARE;
        }
        outcome |= (i32)bins << BIN_COUNT_SHIFT;
    } else if (results->tables && outcome != RARE) {
        for (i64 at = 0; at < count; at++) results->values[at] = job->values[at];
    }
    for (i64 at = 0; at < layout->kept_count; at++) results->kept[at] = job->values[layout->kept[at]];
    return outcome;
}

#define VARIANT(name, target)                                                                                          \
    target static void scan_##name(void *job) { scan_share((Job *)job); }                                              \
    target static void deviate_##name(void *job) { deviate_share((Job *)job); }                                        \
    target static void count_##name(void *job) { count_share((Job *)job); }                                            \
    target EXPORT i32 reduce_tensor_##name(const float *values, const Layout *layout, const Results *results) {        \
        Job job = {values, layout, 1, 0, results->nonzero, 0, 0, results->runtime, 1};                                 \
        return reduce(&job, results, (Tasks){scan_##name, deviate_##name, count_##name});                              \
    }

VARIANTS

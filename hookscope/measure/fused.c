/* One pass over float32 values for everything their statistics need.
 *
 * Compiled without a C library, so that one file serves every system of a kind; the caller chooses among the variants
 * at the end by what the processor has. Threads are the caller's too: it passes the entry points of the OpenMP runtime
 * that already runs the network, because a second set of threads would fight the first one for the cores.
 */

typedef int i32;
typedef long long i64;

#define LANES 16
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef i32 ints __attribute__((vector_size(4 * LANES)));
typedef double doubles __attribute__((vector_size(8 * LANES)));

#define INLINE static inline __attribute__((always_inline))

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* Sums run in float32 over so many values per lane before they are carried over into float64: a lane's sum of n terms
 * is off by n * 6e-8 at most. */
#define TERMS 32
#define STRETCH (TERMS * LANES)

/* More threads than this are not used. */
#define MAX_THREADS 16

/* What one thread found; as large as two cache lines so that no two threads write to one. */
typedef struct {
    double sum, square_sum, abs_sum;
    float low, high;
    i64 zeros;
    char padding[128 - 40];
} Part;

typedef void (*Run)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*Ask)(void);

/* Entry points of the OpenMP runtime: GOMP_parallel, omp_get_thread_num, omp_get_num_threads. */
typedef struct {
    Run run;
    Ask thread_number, thread_count;
} Runtime;

typedef struct {
    const float *values;
    i64 count, before, channels, after;
    i64 *zeros; /* per channel */
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

INLINE Part scan(const float *values, i64 count) {
    const float inf = __builtin_inff();
    floats low = (floats){0} + inf, high = -low;
    doubles sum = {0}, square_sum = {0}, abs_sum = {0};
    const ints magnitude = (ints){0} + 0x7fffffff;
    i64 at = 0, zero_count = 0;
    while (at + LANES <= count) {
        i64 whole = count - at - (count - at) % LANES;
        i64 end = at + (whole < STRETCH ? whole : STRETCH);
        floats s = {0}, q = {0}, a = {0};
        ints zeros = {0};
        for (; at < end; at += LANES) {
            floats x = load(values + at);
            s += x;
            q += x * x;
            a += (floats)((ints)x & magnitude);
            zeros -= (x == 0);
            low = choose(x < low, x, low);
            high = choose(x > high, x, high);
        }
        sum += __builtin_convertvector(s, doubles);
        square_sum += __builtin_convertvector(q, doubles);
        abs_sum += __builtin_convertvector(a, doubles);
        for (int lane = 0; lane < LANES; lane++) zero_count += zeros[lane];
    }
    Part part = {0, 0, 0, inf, -inf, zero_count, {0}};
    for (int lane = 0; lane < LANES; lane++) {
        part.sum += sum[lane];
        part.square_sum += square_sum[lane];
        part.abs_sum += abs_sum[lane];
        if (low[lane] < part.low) part.low = low[lane];
        if (high[lane] > part.high) part.high = high[lane];
    }
    for (; at < count; at++) {
        double x = values[at];
        part.sum += x;
        part.square_sum += x * x;
        part.abs_sum += x < 0 ? -x : x;
        part.zeros += x == 0;
        if (values[at] < part.low) part.low = values[at];
        if (values[at] > part.high) part.high = values[at];
    }
    return part;
}

/* Count zeros in channels begin..end. */
INLINE void count_zeros(const Job *job, i64 begin, i64 end) {
    i64 channels = job->channels, after = job->after;
    for (i64 c = begin; c < end; c++) job->zeros[c] = 0;
    for (i64 b = 0; b < job->before; b++) {
        const float *slice = job->values + b * channels * after;
        if (after == 1) {
            for (i64 c = begin; c < end; c++) job->zeros[c] += slice[c] == 0;
            continue;
        }
        for (i64 c = begin; c < end; c++) {
            const float *row = slice + c * after;
            for (i64 from = 0; from < after; from += 1 << 30) {
                i64 to = after - from < 1 << 30 ? after : from + (1 << 30);
                i32 found = 0;
                for (i64 at = from; at < to; at++) found += row[at] == 0;
                job->zeros[c] += found;
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

INLINE void scan_share(Job *job) {
    i64 begin, end;
    unsigned number = share(job, job->count, STRETCH, &begin, &end);
    job->parts[number] = scan(job->values + begin, end - begin);
}

INLINE void count_share(Job *job) {
    i64 begin, end;
    share(job, job->channels, 1, &begin, &end);
    count_zeros(job, begin, end);
}

INLINE void over(Job *job, void (*task)(void *)) {
    if (job->threads > 1)
        job->runtime->run(task, job, job->threads, 0);
    else
        task(job);
}

/* Reduce values that lie in memory as (before, channels, after).
 *
 * found: sum, sum of squares, sum of magnitudes, min, max, number of zeros. With NaN or Inf among the values, the sum
 *        of magnitudes is not finite, and the rest means nothing.
 * zeros: per channel, (C,); written only if there are any zeros. Null for no such count.
 * sample: every stride-th value.
 * runtime: may be null for one thread.
 */
INLINE void reduce(Job *job, i64 stride, double *found, float *sample, void (*scan_task)(void *),
                   void (*count_task)(void *)) {
    Part parts[MAX_THREADS], all = {0, 0, 0, __builtin_inff(), -__builtin_inff(), 0, {0}};
    job->parts = parts;
    if (job->threads > MAX_THREADS) job->threads = MAX_THREADS;
    for (unsigned each = 0; each < job->threads; each++) parts[each] = all;
    over(job, scan_task);
    for (unsigned each = 0; each < job->threads; each++) {
        all.sum += parts[each].sum;
        all.square_sum += parts[each].square_sum;
        all.abs_sum += parts[each].abs_sum;
        all.zeros += parts[each].zeros;
        if (parts[each].low < all.low) all.low = parts[each].low;
        if (parts[each].high > all.high) all.high = parts[each].high;
    }
    found[0] = all.sum;
    found[1] = all.square_sum;
    found[2] = all.abs_sum;
    found[3] = all.low;
    found[4] = all.high;
    found[5] = (double)all.zeros;
    if (all.zeros && job->zeros) over(job, count_task);
    for (i64 at = 0; at < job->count; at += stride) *sample++ = job->values[at];
}

#define VARIANT(name, target)                                                                                        \
    target static void scan_##name(void *job) { scan_share((Job *)job); }                                            \
    target static void count_##name(void *job) { count_share((Job *)job); }                                          \
    target EXPORT void reduce_##name(const float *values, i64 before, i64 channels, i64 after, i64 stride,           \
                                     double *found, i64 *zeros, float *sample, const Runtime *runtime,               \
                                     i32 threads) {                                                                  \
        i64 count = before * channels * after;                                                                       \
        Job job = {values, count, before, channels, after, zeros, 0, runtime, (unsigned)threads};                    \
        reduce(&job, stride, found, sample, scan_##name, count_##name);                                              \
    }

VARIANT(default, )
#if defined(__x86_64__)
VARIANT(avx2, __attribute__((target("avx2,fma"))))
VARIANT(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))
#endif

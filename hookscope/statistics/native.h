/* What the C files here have in common. */

typedef int i32;
typedef unsigned u32;
typedef long long i64;
typedef unsigned long long u64;

#define INLINE static inline __attribute__((always_inline))

#define EXPORT __attribute__((visibility("default")))

/* The same code for several kinds of processor; the caller chooses by what it has. VARIANT(name, target) is the file's. */
#if defined(__x86_64__)
#define VARIANTS                                                                                                       \
    VARIANT(default, )                                                                                                 \
    VARIANT(avx2, __attribute__((target("avx2,fma"))))                                                                 \
    VARIANT(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))
#else
#define VARIANTS VARIANT(default, )
#endif

#define LANES 16
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef i32 ints __attribute__((vector_size(4 * LANES)));
typedef double doubles __attribute__((vector_size(8 * LANES)));

/* Values summed in float64, so many at a time. */
#define WIDTH 8
typedef double wide __attribute__((vector_size(8 * WIDTH)));
typedef i64 places __attribute__((vector_size(8 * WIDTH)));
typedef float narrow __attribute__((vector_size(4 * WIDTH)));

INLINE wide widened(const float *values) {
    narrow loaded;
    __builtin_memcpy(&loaded, values, sizeof loaded);
    return __builtin_convertvector(loaded, wide);
}

INLINE wide loaded(const double *from) {
    wide values;
    __builtin_memcpy(&values, from, sizeof values);
    return values;
}

INLINE void store(double *to, wide values) { __builtin_memcpy(to, &values, sizeof values); }

INLINE double total(wide sums) {
    double sum = 0;
    for (int lane = 0; lane < WIDTH; lane++) sum += sums[lane];
    return sum;
}


/* More threads than this are not used. */
#define MAX_THREADS 16

typedef void (*Run)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*Ask)(void);

/* Entry points of the OpenMP runtime: GOMP_parallel, omp_get_thread_num, omp_get_num_threads. */
typedef struct {
    Run run;
    Ask thread_number, thread_count;
} Runtime;

/* Run a task in so many threads, or in this one. */
INLINE void over(const Runtime *runtime, i64 threads, void (*task)(void *), void *job) {
    if (runtime && threads > 1)
        runtime->run(task, job, (unsigned)threads, 0);
    else
        task(job);
}

/* How a tensor lies in memory: as (before, channels, after). */
typedef struct {
    i64 before, channels, after;
    i64 by_channel;  /* whether zeros are counted per channel */
    i64 threads;     /* at most, 1 or more */
    i64 kept_count;  /* values that are kept */
    const i64 *kept; /* where they lie, (kept_count,) */
} Layout;

/* Where the results of a tensor go. */
typedef struct {
    double *numbers; /* NUMBERS values: mean, sum of squared deviations, min, max, sum of magnitudes, sum of squares,
                        number of values that are not zero */
    double *nonzero; /* values that are not zero per channel, (C,); written if any value is zero */
    struct Table *tables; /* one for each thread; null where no distribution is asked for */
    float *values;   /* of a tensor of exact_limit values at most: these, and no bins */
    i64 exact_limit;
    i32 *keys;       /* of the bins that hold any value, ascending, with room for BINS */
    i64 *counts;     /* how many values they hold */
    const Runtime *runtime; /* null for one thread */
    float *kept;     /* the values that are kept, (kept_count,) */
} Results;

#define NUMBERS 7

/* What `reduce` returns: RARE alone if values are not finite or too many for the bins, where what is written means nothing;
 * else any of the others. */
#define RARE 1
#define WITH_ZEROS 2 /* `nonzero` is written */
#define BIN_COUNT_SHIFT 2 /* the bits from here on: how many bins are written */

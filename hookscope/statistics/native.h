/* What the C files here have in common. */

typedef int i32;
typedef unsigned u32;
typedef long long i64;
typedef unsigned long long u64;

#define LANES 16
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef i32 ints __attribute__((vector_size(4 * LANES)));
typedef double doubles __attribute__((vector_size(8 * LANES)));

#define INLINE static inline __attribute__((always_inline))

#define EXPORT __attribute__((visibility("default")))

/* More threads than this are not used. */
#define MAX_THREADS 16

typedef void (*Run)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*Ask)(void);

/* Entry points of the OpenMP runtime: GOMP_parallel, omp_get_thread_num, omp_get_num_threads. */
typedef struct {
    Run run;
    Ask thread_number, thread_count;
} Runtime;

/* Sums of squares of many float32 tensors, in float64: one after the other, shared among threads. */

#include "native.h"

#define WIDTH 8
typedef double wide __attribute__((vector_size(8 * WIDTH)));
typedef float narrow __attribute__((vector_size(4 * WIDTH)));

/* As `_Squares` in squares.py. */
typedef struct {
    const float *const *values; /* of `count` tensors */
    const i64 *sizes;
    double *sums; /* written */
    i64 count, threads;
    const Runtime *runtime; /* null for one thread */
    i64 taken;              /* how many tensors threads have begun with, all together; 0 at first */
} Squares;

INLINE double sum_of(const float *values, i64 size) {
    wide first = {0}, second = {0};
    i64 at = 0;
    for (; at + 2 * WIDTH <= size; at += 2 * WIDTH) {
        narrow one, other;
        __builtin_memcpy(&one, values + at, sizeof one);
        __builtin_memcpy(&other, values + at + WIDTH, sizeof other);
        wide x = __builtin_convertvector(one, wide), y = __builtin_convertvector(other, wide);
        first += x * x;
        second += y * y;
    }
    first += second;
    double sum = 0;
    for (int lane = 0; lane < WIDTH; lane++) sum += first[lane];
    for (; at < size; at++) sum += (double)values[at] * values[at];
    return sum;
}

/* Sum one tensor after the other, up to the last that no other thread has begun with. */
INLINE void sum_all(Squares *squares) {
    i64 at;
    while ((at = __atomic_fetch_add(&squares->taken, 1, __ATOMIC_RELAXED)) < squares->count)
        squares->sums[at] = sum_of(squares->values[at], squares->sizes[at]);
}

#define VARIANT(name, target)                                                                                          \
    target static void sum_##name(void *squares) { sum_all((Squares *)squares); }                                      \
    target EXPORT void sum_squares_##name(Squares *squares) {                                                          \
        if (squares->runtime && squares->threads > 1)                                                                  \
            squares->runtime->run(sum_##name, squares, (unsigned)squares->threads, 0);                                 \
        else                                                                                                           \
            sum_all(squares);                                                                                          \
    }

VARIANT(default, )
#if defined(__x86_64__)
VARIANT(avx2, __attribute__((target("avx2,fma"))))
VARIANT(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))
#endif

/* Sums of squares of many float32 tensors, in float64: one after the other, shared among threads. */

#include "native.h"

/* As `_Squares` in library.py. */
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
        wide x = widened(values + at), y = widened(values + at + WIDTH);
        first += x * x;
        second += y * y;
    }
    double sum = total(first + second);
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
        over(squares->runtime, squares->threads, sum_##name, squares);                                                 \
    }

VARIANTS

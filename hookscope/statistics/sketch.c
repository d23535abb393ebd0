/* The count sketch that sketch.py describes, of float32 values: each is added, with a sign, to one of WIDTH sums.
 *
 * A block of WIDTH values fills every sum once, from a different place on: adding it is adding vectors, where a place for
 * each value would take a store for each. */

#include "native.h"

#define WIDTH 256
#define WORDS 8 /* hashed words for a block: its signs, its place, and some that are not used */
#define SIGNS 64 /* in a word */

/* Sums run in float32 over so many blocks before they are carried over into float64. */
#define BLOCKS 32
#define GROUP (BLOCKS * WIDTH)

/* The output function of SplitMix64 (Steele, Lea, Flood 2014) at a place of its sequence. */
INLINE u64 word(u64 key, u64 at) {
    u64 mixed = key + (at + 1) * 0x9e3779b97f4a7c15ull;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9ull;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebull;
    return mixed ^ mixed >> 31;
}

typedef u32 unsigneds __attribute__((vector_size(4 * LANES)));

/* Return the sign bits of LANES values: bit n of `bits` is that of lane n. */
INLINE unsigneds signs_of(u64 bits) {
    const unsigneds shift = {31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16};
    return ((unsigneds){0} + (u32)bits) << shift & 0x80000000u;
}

/* Add a block to sums of twice its width. */
INLINE void add_block(float *sums, const float *values, i64 count, u64 key, u64 block) {
    float *to = sums + (word(key, block * WORDS + WIDTH / SIGNS) >> 56);
    for (i64 part = 0; part < WIDTH / SIGNS; part++) {
        u64 bits = word(key, block * WORDS + (u64)part);
        if ((part + 1) * SIGNS > count) { /* the last block of an item */
            for (i64 at = part * SIGNS; at < count; at++, bits >>= 1) to[at] += bits & 1 ? -values[at] : values[at];
            return;
        }
        for (i64 at = part * SIGNS; at < (part + 1) * SIGNS; at += LANES, bits >>= LANES) {
            floats x, sum;
            __builtin_memcpy(&x, values + at, sizeof x);
            __builtin_memcpy(&sum, to + at, sizeof sum);
            sum += (floats)((unsigneds)x ^ signs_of(bits));
            __builtin_memcpy(to + at, &sum, sizeof sum);
        }
    }
}

/* Add this thread's share, which is whole groups: their sums do not depend on the number of threads. */
INLINE void add_share(const Sketch *sketch) {
    i64 count = sketch->threads > 1 ? sketch->runtime->thread_count() : 1;
    i64 number = sketch->threads > 1 ? sketch->runtime->thread_number() : 0;
    i64 per_item = (sketch->size + GROUP - 1) / GROUP, groups = per_item * sketch->items;
    double *sums = sketch->sums + number * WIDTH;
    float near[2 * WIDTH];
    for (i64 at = 0; at < WIDTH; at++) sums[at] = 0;
    for (i64 group = groups * number / count; group < groups * (number + 1) / count; group++) {
        i64 item = group / per_item, begin = group % per_item * GROUP;
        i64 end = sketch->size - begin < GROUP ? sketch->size : begin + GROUP;
        for (i64 at = 0; at < 2 * WIDTH; at++) near[at] = 0;
        for (i64 at = begin; at < end; at += WIDTH)
            add_block(near, sketch->values + item * sketch->size + at, end - at < WIDTH ? end - at : WIDTH,
                      sketch->keys[item], (u64)(at / WIDTH));
        for (i64 at = 0; at < WIDTH; at++) sums[at] += (double)near[at] + near[WIDTH + at];
    }
}

/* Sum up; the result is in the first WIDTH of `sums`. Return whether it is finite. */
INLINE i32 sketch(const Sketch *sketch, void (*task)(void *)) {
    i64 threads = sketch->threads > 1 ? sketch->threads : 1;
    for (i64 at = WIDTH; at < threads * WIDTH; at++) sketch->sums[at] = 0; /* fewer threads may come */
    if (threads > 1)
        sketch->runtime->run(task, (void *)sketch, (unsigned)threads, 0);
    else
        task((void *)sketch);
    for (i64 at = WIDTH; at < threads * WIDTH; at++) sketch->sums[at % WIDTH] += sketch->sums[at];
    double sum = 0; /* of what is 0, or NaN */
    for (i64 at = 0; at < WIDTH; at++) sum += sketch->sums[at] * 0;
    return sum == 0;
}

#define VARIANT(name, target)                                                                                          \
    target static void add_##name(void *given) { add_share((const Sketch *)given); }                                   \
    target EXPORT i32 sketch_tensor_##name(const Sketch *given) { return sketch(given, add_##name); }

VARIANT(default, )
#if defined(__x86_64__)
VARIANT(avx2, __attribute__((target("avx2,fma"))))
VARIANT(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))
#endif

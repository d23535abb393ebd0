/* How far two float32 tensors are from each other, summed in float64, in one pass over both.
 *
 * Large tensors are compared in PARTS parts, which threads share; the sums do not depend on the number of threads. */

#include "native.h"

#define WIDTH 8
typedef double wide __attribute__((vector_size(8 * WIDTH)));
typedef i64 places __attribute__((vector_size(8 * WIDTH)));
typedef float narrow __attribute__((vector_size(4 * WIDTH)));

/* Elements that are read again if the largest difference is among them: for its place. */
#define CHUNK 4096
#define PARTS 16
/* Tensors of fewer elements are one part. */
#define SHARED (1 << 15)

typedef struct {
    const float *a, *b;
    i64 before, channels, after; /* as they lie in memory, outermost first */
    double *squares; /* A-B squared by channel, (channels,); added to; NULL if nobody wants it */
    double *sums;    /* SUMS values: A squared, B squared, A times B, A-B squared, the largest magnitude of A-B; written */
    i64 *counts; /* COUNTS values: unequal elements, mismatched ones, the place of the largest A-B, -1 for none; written */
    i64 threads;
    const Runtime *runtime; /* null for one thread */
} Pair;

INLINE wide widened(const float *values) {
    narrow loaded;
    __builtin_memcpy(&loaded, values, sizeof loaded);
    return __builtin_convertvector(loaded, wide);
}

INLINE double magnitude(double value) { return value < 0 ? -value : value; }

INLINE i32 is_finite(double value) { return value - value == 0; }

/* Sums of a chunk or a part; `place` is where the chunk with the largest difference begins, -1 without one. */
typedef struct {
    double a, b, product, difference, largest;
    i64 unequal, mismatched, place;
} Found;

#define NOTHING ((Found){.place = -1})

/* What threads do together. */
typedef struct {
    const Pair *pair;
    i64 parts;
    i32 alternates; /* whether squares by channel are summed, where the elements of all channels alternate */
    Found found[PARTS];
} Job;

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
        places more = (places)size > (places)largest;
        largest = (wide)((more & (places)size) | (~more & (places)largest));
    }
    Found found = NOTHING;
    for (i64 lane = 0; lane < WIDTH; lane++) {
        found.a += of_a[lane];
        found.b += of_b[lane];
        found.product += product[lane];
        found.difference += of_difference[lane];
        found.unequal += unequal[lane];
        found.largest = largest[lane] > found.largest ? largest[lane] : found.largest;
    }
    for (; at < count; at++) take_one(&found, a[at], b[at]);
    return found;
}

/* Leave out elements that are not finite on either side; they match if they are the same on both. */
INLINE Found of_any(const float *a, const float *b, i64 count) {
    Found found = NOTHING;
    for (i64 at = 0; at < count; at++) {
        double x = a[at], y = b[at];
        if (is_finite(x) && is_finite(y))
            take_one(&found, x, y);
        else
            found.mismatched += !(x == y || (x != x && y != y));
    }
    return found;
}

/* Return the first place of a difference from `begin` on; -1 if another thread has written to the tensors meanwhile. */
INLINE i64 place_of(const Pair *pair, i64 begin, i64 count, double largest) {
    for (i64 at = begin; at < count; at++)
        if (magnitude((double)pair->a[at] - pair->b[at]) == largest) return at;
    return -1;
}

INLINE void add(Found *all, const Found *found) {
    all->a += found->a;
    all->b += found->b;
    all->product += found->product;
    all->difference += found->difference;
    all->unequal += found->unequal;
    all->mismatched += found->mismatched;
}

/* Add elements that lie together to the sums of a part, and to those of their channel. */
INLINE void compare_run(const Pair *pair, i64 begin, i64 end, double *squares, Found *all) {
    for (; begin < end; begin += CHUNK) {
        i64 length = end - begin < CHUNK ? end - begin : CHUNK;
        Found found = of_finite(pair->a + begin, pair->b + begin, length);
        if (squares) *squares += found.difference;
        if (!is_finite(found.difference)) found = of_any(pair->a + begin, pair->b + begin, length);
        add(all, &found);
        if (found.largest > all->largest) {
            all->largest = found.largest;
            all->place = begin;
        }
    }
}

/* Compare some of the channels, if these are asked for and do not alternate, or some of the chunks. */
INLINE void compare_part(const Pair *pair, i64 part, i64 parts, Found *all) {
    const i64 count = pair->before * pair->channels * pair->after, chunks = (count + CHUNK - 1) / CHUNK;
    if (!pair->squares || pair->after == 1) {
        i64 begin = CHUNK * (chunks * part / parts), end = CHUNK * (chunks * (part + 1) / parts);
        compare_run(pair, begin, end < count ? end : count, 0, all);
        return;
    }
    const i64 first = pair->channels * part / parts, last = pair->channels * (part + 1) / parts;
    for (i64 before = 0; before < pair->before; before++)
        for (i64 channel = first; channel < last; channel++) {
            i64 begin = (before * pair->channels + channel) * pair->after;
            compare_run(pair, begin, begin + pair->after, pair->squares + channel, all);
        }
}

/* Squares of some channels where the elements of all alternate. */
INLINE void add_alternating(const Pair *pair, i64 first, i64 last) {
    const float *a = pair->a, *b = pair->b;
    for (i64 before = 0; before < pair->before; before++, a += pair->channels, b += pair->channels) {
        i64 channel = first;
        for (; channel + WIDTH <= last; channel += WIDTH) {
            wide difference = widened(a + channel) - widened(b + channel), sum;
            __builtin_memcpy(&sum, pair->squares + channel, sizeof sum);
            sum += difference * difference;
            __builtin_memcpy(pair->squares + channel, &sum, sizeof sum);
        }
        for (; channel < last; channel++) {
            double difference = (double)a[channel] - b[channel];
            pair->squares[channel] += difference * difference;
        }
    }
}

INLINE void share(Job *job, i64 thread, i64 threads) {
    const i64 parts = job->parts, channels = job->pair->channels;
    if (job->alternates) {
        add_alternating(job->pair, channels * thread / threads, channels * (thread + 1) / threads);
        return;
    }
    for (i64 part = parts * thread / threads; part < parts * (thread + 1) / threads; part++)
        compare_part(job->pair, part, parts, job->found + part);
}

INLINE void run(Job *job, void (*task)(void *)) {
    const Pair *pair = job->pair;
    if (pair->runtime && pair->threads > 1 && job->parts > 1)
        pair->runtime->run(task, job, (unsigned)pair->threads, 0);
    else
        share(job, 0, 1);
}

INLINE void compare(const Pair *pair, void (*task)(void *)) {
    const i64 count = pair->before * pair->channels * pair->after;
    Job job = {.pair = pair, .parts = count < SHARED ? 1 : PARTS};
    for (i64 part = 0; part < job.parts; part++) job.found[part] = NOTHING;
    run(&job, task);
    Found all = NOTHING;
    for (i64 part = 0; part < job.parts; part++) {
        const Found *found = job.found + part;
        add(&all, found);
        if (found->largest > all.largest || (found->largest == all.largest && found->place < all.place)) {
            all.largest = found->largest;
            all.place = found->place;
        }
    }
    if (pair->squares && pair->after == 1 && (all.unequal || all.mismatched)) {
        job.alternates = 1;
        run(&job, task);
    }
    const double sums[] = {all.a, all.b, all.product, all.difference, all.largest};
    const i64 place = all.place < 0 ? -1 : place_of(pair, all.place, count, all.largest);
    const i64 counts[] = {all.unequal, all.mismatched, place};
    __builtin_memcpy(pair->sums, sums, sizeof sums);
    __builtin_memcpy(pair->counts, counts, sizeof counts);
}

#define VARIANT(name, target)                                                                                          \
    target static void share_##name(void *given) {                                                                     \
        Job *job = (Job *)given;                                                                                       \
        share(job, job->pair->runtime->thread_number(), job->pair->runtime->thread_count());                           \
    }                                                                                                                  \
    target EXPORT void sum_differences_##name(const Pair *given) { compare(given, share_##name); }

VARIANT(default, )
#if defined(__x86_64__)
VARIANT(avx2, __attribute__((target("avx2,fma"))))
VARIANT(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))
#endif

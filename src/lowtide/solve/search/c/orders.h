/* Whole orders of runs, judged and cleaned without a tape: the other methods offer hundreds, and few are kept. */
#ifndef LOWTIDE_ORDERS_H
#define LOWTIDE_ORDERS_H

#include "tape.h"

/* Bytes at each run that no value of the tape stands for: what is fixed, what ops hold for good from after
 * their first run on, and random states between the first and the last run of an op. */
static i64 *order_base(Pool *pool, const Facts *f, const i32 *order, i32 count) {
    i64 *base = pool_zeros(pool, (size_t)count + 2, sizeof(i64));
    i32 *first = pool_get(pool, 2 * ((size_t)f->ops + 1), sizeof(i32)), *last = first + f->ops + 1;
    memset(first, -1, ((size_t)f->ops + 1) * sizeof(i32));
    for (i32 i = 0; i < count; i++) {
        i32 op = order[i];
        last[op] = i;
        if (first[op] >= 0) continue;
        first[op] = i;
        base[i + 1] += f->held[op];
    }
    for (i32 op = 0; op < f->ops; op++) {
        if (first[op] < 0 || first[op] == last[op] || !f->state[op]) continue;
        base[first[op]] += f->state[op];
        base[last[op] + 1] -= f->state[op];
    }
    base[0] += f->fixed;
    for (i32 i = 0; i < count; i++) base[i + 1] += base[i];
    pool_give(first);
    return base;
}

/* The peak of an order, as a tape of it has it, and its seconds. From the end: a value is there if it is read
 * before it is next written. */
static i64 order_judge(Pool *pool, const Facts *f, const i32 *order, i32 count, double *seconds) {
    if (setjmp(pool->back)) return NO_MEMORY;
    i64 peak = 0, across = 0, *base = order_base(pool, f, order, count);
    uint8_t *waits = pool_zeros(pool, (size_t)f->values + 1, 1);
    for (i32 i = count - 1; i >= 0; i--) {
        i32 op = order[i];
        i64 saved = 0;
        for (i32 k = f->take_at[op]; k < f->take_at[op + 1] && !saved; k++)
            if (!waits[f->takes[k]]) saved = f->saves[op];
        for (i32 w = f->write_at[op]; w < f->write_at[op + 1]; w++) {
            i32 value = f->writes[w];
            if (waits[value]) across -= f->size[value];
            waits[value] = 0;
        }
        for (i32 r = f->read_at[op]; r < f->read_at[op + 1]; r++) {
            i32 value = f->reads[r];
            if (waits[value]) across -= f->size[value]; /* what a run reads and writes is in its own bytes */
            waits[value] = 0;
        }
        i64 level = base[i] + f->own[op] + across - saved;
        if (level > peak) peak = level;
        for (i32 r = f->read_at[op]; r < f->read_at[op + 1]; r++) {
            i32 value = f->reads[r];
            if (!waits[value]) across += f->size[value];
            waits[value] = 1;
        }
    }
    *seconds = 0;
    for (i32 i = 0; i < count; i++) *seconds += f->seconds[order[i]];
    return peak;
}

i64 lowtide_judge(const Facts *f, const i32 *order, i32 count, double *seconds) {
    Pool pool;
    pool_open(&pool);
    i64 peak = order_judge(&pool, f, order, count, seconds);
    pool_close(&pool);
    return peak;
}

/* The runs that write something that is read before it is next written, and first runs; see `without_waste` of
 * `plans/order.py`. Gives how many, and their places in the order. */
static i32 order_needed(
    Pool *pool, i32 ops, i32 values, const i32 *read_at, const i32 *reads, const i32 *write_at, const i32 *writes,
    const i32 *order, i32 count, i32 *kept) {
    if (setjmp(pool->back)) return NO_MEMORY;
    uint8_t *wanted = pool_zeros(pool, (size_t)values + 1, 1);
    i32 *first = pool_get(pool, (size_t)ops + 1, sizeof(i32)), left = count;
    for (i32 i = count - 1; i >= 0; i--) first[order[i]] = i;
    for (i32 i = count - 1; i >= 0; i--) {
        i32 op = order[i], need = first[op] == i;
        for (i32 w = write_at[op]; w < write_at[op + 1] && !need; w++) need = wanted[writes[w]];
        if (!need) continue;
        kept[--left] = i;
        for (i32 w = write_at[op]; w < write_at[op + 1]; w++) wanted[writes[w]] = 0;
        for (i32 r = read_at[op]; r < read_at[op + 1]; r++) wanted[reads[r]] = 1;
    }
    memmove(kept, kept + left, (size_t)(count - left) * sizeof(i32));
    return count - left;
}

i32 lowtide_needed(
    i32 ops, i32 values, const i32 *read_at, const i32 *reads, const i32 *write_at, const i32 *writes,
    const i32 *order, i32 count, i32 *kept) {
    Pool pool;
    pool_open(&pool);
    i32 found = order_needed(&pool, ops, values, read_at, reads, write_at, writes, order, count, kept);
    pool_close(&pool);
    return found;
}

#endif

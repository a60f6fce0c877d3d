/* The fastest order of runs under a budget, of all orders there are. See `exact/any_order.py`, which calls it.
 *
 * A state is the ops that have run and the values that are there, as bits. From a state every op may run that
 * finds what it reads, after as few values as possible were dropped to make space. States are taken by what they
 * have spent plus what they owe: the seconds of all that must certainly run again.
 */
#ifndef LOWTIDE_ANY_ORDER_H
#define LOWTIDE_ANY_ORDER_H

#include <math.h>

#include "tape.h"

typedef uint64_t Bits;

#define MOST_BITS 64
#define BIT(i) ((Bits)1 << (i))
#define EACH(i, set) /* the bits of a set, one after the other */ \
    for (Bits left_##i = (set), i = 0; left_##i && (i = (Bits)__builtin_ctzll(left_##i), 1); left_##i &= left_##i - 1)

typedef struct {
    Bits ran, there;
    double spent;
    i32 from;
    i32 op; /* what ran last; the first state has none */
} State;

typedef struct {
    double owed, spent; /* `owed`: spent, and certainly still to be spent */
    i32 state, ops;
} Candidate;

typedef struct {
    const Facts *facts;
    i32 ops, values;
    i64 budget, work, most, size[MOST_BITS], own[MOST_BITS]; /* `own` is without what an op reads */
    double limit, seconds[MOST_BITS];
    Bits reads[MOST_BITS], writes[MOST_BITS], takes[MOST_BITS], before[MOST_BITS], until[MOST_BITS], state[MOST_BITS];
    i32 writer[MOST_BITS]; /* -1 for a saved random state: nothing makes it again */
    Bits must;
    State *states;
    Candidate *heap;
    i32 *table; /* open addressing; a state's number plus one, or 0 */
    i32 count, capacity, entries, heaped, slots;
    int cut; /* not all ways to make space for a run were looked at */
    Pool pool; /* of states, heap and table */
} Orders;

static void orders_prepare(Orders *o, const Facts *f, const uint8_t *must) {
    o->facts = f, o->ops = f->ops, o->values = f->values;
    for (i32 v = 0; v < f->values; v++) o->size[v] = f->size[v], o->writer[v] = f->writer[v];
    for (i32 op = 0; op < f->ops; op++) {
        o->own[op] = f->own[op], o->seconds[op] = f->seconds[op];
        if (must[op]) o->must |= BIT(op);
        for (i32 k = f->read_at[op]; k < f->read_at[op + 1]; k++) {
            o->reads[op] |= BIT(f->reads[k]);
            o->own[op] -= f->size[f->reads[k]];
        }
        for (i32 k = f->write_at[op]; k < f->write_at[op + 1]; k++) o->writes[op] |= BIT(f->writes[k]);
        for (i32 k = f->take_at[op]; k < f->take_at[op + 1]; k++) o->takes[op] |= BIT(f->takes[k]);
        for (i32 k = f->until_at[op]; k < f->until_at[op + 1]; k++) o->until[op] |= BIT(f->untils[k]);
        for (i32 k = f->before_at[op]; k < f->before_at[op + 1]; k++) o->before[op] |= BIT(f->befores[k]);
        if (f->state[op]) {
            o->size[o->values] = f->state[op], o->writer[o->values] = -1;
            o->state[op] = BIT(o->values++);
        }
    }
}

static int orders_may_repeat(const Orders *o, i32 op, Bits ran) {
    return o->facts->recomputable[op] && !(o->until[op] & ran);
}

/* The values that may still be read, by ops that have not run or that may have to run again for such a value. */
static Bits orders_useful(const Orders *o, Bits ran) {
    Bits useful = 0;
    EACH(late, o->must & ~ran) useful |= o->reads[late];
    for (i32 op = o->ops - 2; op >= 0; op--)
        if (ran >> op & 1 && o->writes[op] & useful && orders_may_repeat(o, op, ran))
            useful |= o->reads[op] | o->state[op];
    return useful;
}

/* The seconds of the ops that must run again: what is still to be read and is gone. */
static double orders_owed(const Orders *o, Bits ran, Bits there) {
    Bits missing = 0, again = 0, made = 0;
    EACH(done, ran) made |= o->writes[done];
    EACH(late, o->must & ~ran) missing |= o->reads[late];
    missing &= made & ~there;
    double seconds = 0;
    while (missing) {
        i32 value = __builtin_ctzll(missing), op = o->writer[value];
        missing &= missing - 1;
        if (op < 0 || !orders_may_repeat(o, op, ran)) return HUGE_VAL;
        if (again >> op & 1) continue;
        again |= BIT(op);
        seconds += o->seconds[op];
        missing |= (o->reads[op] | o->state[op]) & ~there;
    }
    return seconds;
}

static int sooner(const Candidate *a, const Candidate *b) {
    if (a->owed != b->owed) return a->owed < b->owed;
    if (a->ops != b->ops) return a->ops > b->ops;
    return a->state > b->state;
}

static void orders_push(Orders *o, Candidate c) {
    if (o->entries == o->heaped) {
        o->heaped = o->heaped ? 2 * o->heaped : 1024;
        o->heap = pool_more(&o->pool, o->heap, (size_t)o->heaped, sizeof(Candidate));
    }
    i32 at = o->entries++;
    while (at && sooner(&c, &o->heap[(at - 1) / 2])) {
        o->heap[at] = o->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    o->heap[at] = c;
}

static Candidate orders_pop(Orders *o) {
    Candidate top = o->heap[0], last = o->heap[--o->entries];
    i32 at = 0, child;
    while ((child = 2 * at + 1) < o->entries) {
        if (child + 1 < o->entries && sooner(&o->heap[child + 1], &o->heap[child])) child++;
        if (!sooner(&o->heap[child], &last)) break;
        o->heap[at] = o->heap[child];
        at = child;
    }
    o->heap[at] = last;
    return top;
}

/* Where a state is kept, or would be. */
static i32 *orders_place(const Orders *o, Bits ran, Bits there) {
    uint64_t x = ran * 0x9E3779B97F4A7C15u ^ (there + 0x94D049BB133111EBu) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 29)) * 0x94D049BB133111EBu;
    uint64_t mask = (uint64_t)(o->slots - 1), slot = (x ^ (x >> 32)) & mask;
    for (; o->table[slot]; slot = (slot + 1) & mask) {
        const State *known = &o->states[o->table[slot] - 1];
        if (known->ran == ran && known->there == there) break;
    }
    return &o->table[slot];
}

static void orders_grow(Orders *o) {
    o->capacity = o->capacity ? 2 * o->capacity : 1024;
    o->states = pool_more(&o->pool, o->states, (size_t)o->capacity, sizeof(State));
    o->slots = 2 * o->capacity;
    pool_give(o->table);
    o->table = pool_zeros(&o->pool, (size_t)o->slots, sizeof(i32));
    for (i32 s = 0; s < o->count; s++) *orders_place(o, o->states[s].ran, o->states[s].there) = s + 1;
}

/* Remember a state, unless it was reached as cheaply before or leads beyond the limit. */
static void orders_reach(Orders *o, Bits ran, Bits there, double spent, i32 from, i32 op) {
    there &= orders_useful(o, ran);
    double owed = spent + orders_owed(o, ran, there);
    if (!(owed < o->limit)) return;
    if (o->count == o->capacity) orders_grow(o);
    i32 *place = orders_place(o, ran, there), number = *place - 1;
    if (number >= 0 && o->states[number].spent <= spent) return;
    if (number < 0) *place = ++o->count, number = o->count - 1;
    o->states[number] = (State){ran, there, spent, from, op};
    orders_push(o, (Candidate){owed, spent, number, __builtin_popcountll(ran)});
}

typedef struct { /* a run about to be made from a state, and what it writes and frees */
    State at;
    i32 number, op;
    Bits added, freed;
    double seconds;
} Run;

/* Make a run after every smallest set of values was dropped that leaves enough space for it. `least` is the
 * smallest of those that are dropped: without it there is too little. */
static void orders_drop(Orders *o, const Run *run, Bits may, i64 lack, i64 least, Bits dropped) {
    if (o->work >= o->most) o->cut = 1;
    if (o->cut) return;
    o->work++;
    if (lack <= 0) {
        if (dropped && lack + least <= 0) return;
        Bits there = ((run->at.there & ~dropped) | run->added) & ~run->freed;
        orders_reach(o, run->at.ran | BIT(run->op), there, run->at.spent + run->seconds, run->number, run->op);
        return;
    }
    i64 most = 0;
    EACH(any, may) most += o->size[any];
    for (; most >= lack; may &= may - 1) { /* as long as all that may still be dropped would do */
        i32 value = __builtin_ctzll(may);
        i64 size = o->size[value];
        if (size) orders_drop(o, run, may & (may - 1), lack - size, size < least ? size : least, dropped | BIT(value));
        most -= size;
    }
}

/* The bytes between two runs. */
static i64 orders_level(const Orders *o, const State *at) {
    i64 level = o->facts->fixed;
    EACH(op, at->ran) level += o->facts->held[op];
    EACH(value, at->there) level += o->size[value];
    return level;
}

/* Run an op: plainly, in the place of a value that it takes, and with its random state saved for later runs. */
static void orders_run(Orders *o, const State *at, i32 number, i32 op, i64 level) {
    int again = at->ran >> op & 1;
    Bits reads = o->reads[op] | (again ? o->state[op] : 0);
    i64 lack = level + o->own[op] - o->budget;
    Run run = {*at, number, op, o->writes[op], 0, again ? o->seconds[op] : 0};
    for (int saves = 0; saves <= (o->state[op] && !again); saves++) {
        i64 more = saves ? o->facts->state[op] : 0;
        run.added = o->writes[op] | (saves ? o->state[op] : 0), run.freed = 0;
        orders_drop(o, &run, at->there & ~reads, lack + more, INT64_MAX / 4, 0);
        EACH(taken, o->takes[op]) {
            run.freed = BIT(taken);
            orders_drop(o, &run, at->there & ~reads, lack + more - o->facts->saves[op], INT64_MAX / 4, 0);
        }
    }
}

static int orders_may_run(const Orders *o, const State *at, Bits useful, i32 op) {
    Bits boundary = BIT(o->ops - 1);
    if (o->facts->returning >= 0 && at->ran >> o->facts->returning & 1 && !(at->ran & boundary))
        return BIT(op) == boundary;
    if (!(at->ran >> op & 1)) return !(o->before[op] & ~at->ran) && !(o->reads[op] & ~at->there);
    if (!orders_may_repeat(o, op, at->ran) || !(o->writes[op] & useful & ~at->there)) return 0;
    return !((o->reads[op] | o->state[op]) & ~at->there);
}

static void orders_expand(Orders *o, i32 number) {
    State at = o->states[number];
    Bits useful = orders_useful(o, at.ran);
    i64 level = orders_level(o, &at);
    EACH(op, o->must) if (orders_may_run(o, &at, useful, (i32)op)) orders_run(o, &at, number, (i32)op, level);
}

/* Write the order that led to a state; how many runs it has. */
static i32 orders_trace(const Orders *o, i32 state, i32 *order, i32 most) {
    i32 count = 0;
    for (i32 s = state; o->states[s].op >= 0; s = o->states[s].from) count++;
    if (count > most) return -1;
    for (i32 s = state, at = count; o->states[s].op >= 0; s = o->states[s].from) order[--at] = o->states[s].op;
    return count;
}

/* The number of runs of a fastest order below the limit, 0 when there is none, -1 when `most` drops and runs did not do;
 * `owed` is then what no order is below. */
static i32 orders_search(Orders *o, i64 most, i32 *order, i32 longest, double *owed) {
    orders_reach(o, 0, 0, 0, -1, -1);
    *owed = o->limit;
    while (o->entries) {
        Candidate best = orders_pop(o);
        State at = o->states[best.state];
        if (at.spent < best.spent) continue; /* it was reached for less since */
        *owed = best.owed;
        if (!(o->must & ~at.ran)) return orders_trace(o, best.state, order, longest);
        if (o->work >= most) return -1;
        *owed = o->limit;
        orders_expand(o, best.state);
        if (o->cut) {
            *owed = best.owed;
            return -1;
        }
    }
    return 0;
}

#define NO_MEMORY_FOR_ORDERS (-2)

/* The ways to make space that one state may take above the work that was asked for: of many equal values there are
 * as many as subsets, in time and in memory. Chosen: few states have a hundredth of them. */
#define WAYS 65536

/* Look for an order that runs less than `limit` seconds again; see above. `work` is how many drops and runs there
 * were. With `free_of_charge`, seconds are not counted: any order under the budget will do. */
i32 lowtide_any_order(
    const Facts *f, const uint8_t *must, i64 budget, double limit, int free_of_charge, i64 most,
    i32 *order, i32 longest, double *owed, i64 *work) {
    Orders *o = LOWTIDE_ALLOCATE(sizeof(Orders));
    if (!o) return NO_MEMORY_FOR_ORDERS;
    *o = (Orders){.budget = budget, .limit = limit, .most = most + WAYS};
    pool_open(&o->pool);
    orders_prepare(o, f, must);
    if (free_of_charge) memset(o->seconds, 0, sizeof(o->seconds));
    volatile i32 found = NO_MEMORY_FOR_ORDERS;
    if (!setjmp(o->pool.back)) found = orders_search(o, most, order, longest, owed);
    *work = o->work;
    pool_close(&o->pool);
    LOWTIDE_RELEASE(o);
    return found;
}

#endif

/* The order of runs that a search edits, with its resident bytes kept up to date. See `tape.py`, its slower twin. */
#ifndef LOWTIDE_TAPE_H
#define LOWTIDE_TAPE_H

#include <math.h>
#include <time.h>

#include "profile.h"

#define SPACING 32 /* slots: four times `tape.py`, since empty ones cost nothing here and laying out anew does */

typedef struct { /* a graph by numbers; the arrays belong to the caller. The last op is the boundary. */
    i32 ops, values, returning; /* `returning`: the op after which the forward ends, or -1 */
    i64 fixed;
    const i32 *read_at, *reads, *write_at, *writes, *take_at, *takes, *until_at, *untils, *before_at, *befores,
        *after_at, *afters, *writer;
    const i64 *size, *own, *held, *state, *saves;
    const double *seconds;
    const uint8_t *recomputable, *can_wait;
} Facts;

typedef struct { /* sorted slots */
    i32 *at, count, capacity;
} Slots;

typedef struct {
    Pool pool;
    const Facts *facts;
    i32 length, low, high; /* `low` and `high` bound the slots that edits have changed */
    i32 *at;               /* the op that runs at each slot, or -1 */
    i64 *saved;            /* what the run at each slot saves by writing in place; NULL when none ever does */
    Profile mem;
    Slots *events, *runs; /* of each value, of each op */
    double seconds;
    i64 edits; /* how many there were so far: a measure of time that does not depend on the machine */
    double until; /* the moment at which planning has to end, whatever the edits */
    i32 turns;
} Tape;

/* Whether it is too late; the clock is asked at one turn in 64. */
static int tape_is_late(Tape *t) {
    struct timespec now;
    if (++t->turns % 64 || t->until == HUGE_VAL) return 0;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec > t->until;
}

static i32 slots_find(const Slots *s, i32 slot) {
    i32 low = 0, high = s->count;
    while (low < high) {
        i32 mid = (low + high) / 2;
        if (s->at[mid] < slot) low = mid + 1;
        else high = mid;
    }
    return low;
}

static void slots_insert(Pool *pool, Slots *s, i32 index, i32 slot) {
    if (s->count == s->capacity) {
        i32 capacity = s->capacity ? 2 * s->capacity : 4;
        s->at = pool_more(pool, s->at, (size_t)capacity, sizeof(i32));
        s->capacity = capacity;
    }
    memmove(s->at + index + 1, s->at + index, (size_t)(s->count - index) * sizeof(i32));
    s->at[index] = slot;
    s->count++;
}

static void slots_remove(Slots *s, i32 index) {
    memmove(s->at + index, s->at + index + 1, (size_t)(s->count - index - 1) * sizeof(i32));
    s->count--;
}

static void slots_free(Slots *s, i32 count) {
    for (i32 i = 0; i < count; i++) pool_give(s[i].at);
    pool_give(s);
}

static Slots *slots_copy(Pool *pool, const Slots *from, i32 count) {
    Slots *to = pool_zeros(pool, (size_t)count + 1, sizeof(Slots));
    for (i32 i = 0; i < count; i++) {
        if (!from[i].count) continue;
        to[i].count = to[i].capacity = from[i].count;
        to[i].at = pool_get(pool, (size_t)from[i].count, sizeof(i32));
        memcpy(to[i].at, from[i].at, (size_t)from[i].count * sizeof(i32));
    }
    return to;
}

/* Whether a value is dropped after one of its events. */
static int tape_dies(const Tape *t, i32 value, i32 slot) {
    const Slots *e = &t->events[value];
    i32 next = slots_find(e, slot) + 1;
    return next == e->count || t->at[e->at[next]] == t->facts->writer[value];
}

/* What the run at a slot saves by writing in place. */
static i64 tape_saves(const Tape *t, i32 slot) {
    const Facts *f = t->facts;
    i32 op = t->at[slot];
    if (op < 0) return 0;
    for (i32 k = f->take_at[op]; k < f->take_at[op + 1]; k++)
        if (tape_dies(t, f->takes[k], slot)) return f->saves[op];
    return 0;
}

/* Put an order of runs on slots, `SPACING` apart; the run at index `wide` gets `slots` more free slots before it. */
static void tape_lay(Tape *t, const i32 *order, i32 count, i32 wide, i32 slots) {
    const Facts *f = t->facts;
    t->length = SPACING * (count + 1) + slots;
    profile_init(&t->pool, &t->mem, t->length);
    t->at = pool_get(&t->pool, (size_t)t->mem.length, sizeof(i32));
    memset(t->at, -1, (size_t)t->mem.length * sizeof(i32));
    t->events = pool_zeros(&t->pool, (size_t)f->values + 1, sizeof(Slots));
    t->runs = pool_zeros(&t->pool, (size_t)f->ops + 1, sizeof(Slots));
    i64 *change = pool_zeros(&t->pool, (size_t)t->mem.length + 2, sizeof(i64));
    t->seconds = 0;
    for (i32 i = 0; i < count; i++) {
        i32 op = order[i], slot = SPACING * (i + 1) + (i >= wide ? slots : 0);
        t->at[slot] = op;
        t->seconds += f->seconds[op];
        change[slot] += f->own[op];
        change[slot + 1] += (t->runs[op].count ? 0 : f->held[op]) - f->own[op];
        slots_insert(&t->pool, &t->runs[op], t->runs[op].count, slot);
        for (i32 r = f->read_at[op]; r < f->read_at[op + 1]; r++) {
            Slots *e = &t->events[f->reads[r]];
            i64 size = f->size[f->reads[r]];
            change[e->at[e->count - 1] + 1] += size;
            change[slot] -= size;
            slots_insert(&t->pool, e, e->count, slot);
        }
        for (i32 w = f->write_at[op]; w < f->write_at[op + 1]; w++) {
            Slots *e = &t->events[f->writes[w]];
            slots_insert(&t->pool, e, e->count, slot);
        }
    }
    for (i32 op = 0; op < f->ops; op++) {
        Slots *r = &t->runs[op];
        if (r->count < 2 || !f->state[op]) continue;
        change[r->at[0]] += f->state[op];
        change[r->at[r->count - 1] + 1] -= f->state[op];
    }
    t->saved = f->take_at[f->ops] ? pool_zeros(&t->pool, (size_t)t->mem.length, sizeof(i64)) : NULL;
    i64 level = f->fixed;
    for (i32 s = 0; s < t->mem.length; s++) {
        level += change[s];
        if (t->saved) t->saved[s] = tape_saves(t, s);
        t->mem.level[s] = level - (t->saved ? t->saved[s] : 0);
        profile_use(&t->mem, s, t->at[s] >= 0);
    }
    profile_build(&t->mem);
    pool_give(change);
    t->low = t->length, t->high = 0;
}

static void tape_clear(Tape *t) {
    profile_free(&t->mem);
    pool_give(t->at);
    pool_give(t->saved);
    slots_free(t->events, t->facts->values);
    slots_free(t->runs, t->facts->ops);
}

static void tape_touch(Tape *t, i32 low, i32 high) {
    if (low < t->low) t->low = low;
    if (high > t->high) t->high = high;
}

/* The last event of a value before a slot, and whether the value is there on the way across that slot. */
static i32 tape_around(const Tape *t, i32 value, i32 slot, int *there) {
    const Slots *e = &t->events[value];
    i32 index = slots_find(e, slot);
    *there = index < e->count && t->at[e->at[index]] != t->facts->writer[value];
    return index ? e->at[index - 1] : -1;
}

/* Whether an op may run once more right before a slot: nothing has changed what it reads by then. */
static int tape_may_run(const Tape *t, i32 op, i32 slot) {
    const Facts *f = t->facts;
    if (!f->recomputable[op]) return 0;
    for (i32 k = f->until_at[op]; k < f->until_at[op + 1]; k++)
        if (t->runs[f->untils[k]].at[0] < slot) return 0;
    return 1;
}

/* Whether the step has returned before a slot of the forward: nothing may run there. */
static int tape_returned(const Tape *t, i32 slot) {
    const Facts *f = t->facts;
    return f->returning >= 0 && slot > t->runs[f->returning].at[0] && slot < t->runs[f->ops - 1].at[0];
}

/* The slots between which the first run of an op may stand, whatever else runs where it does. */
static void tape_window(const Tape *t, i32 op, i32 *from, i32 *to) {
    const Facts *f = t->facts;
    *from = 0, *to = t->length;
    for (i32 k = f->before_at[op]; k < f->before_at[op + 1]; k++) {
        i32 other = f->befores[k];
        const Slots *runs = &t->runs[other];
        if (!runs->count) continue;
        i32 slot = runs->at[0];
        for (i32 u = f->until_at[other]; u < f->until_at[other + 1]; u++)
            if (f->untils[u] == op) slot = runs->at[runs->count - 1]; /* an update waits for the last reader */
        if (slot > *from) *from = slot;
    }
    for (i32 k = f->after_at[op]; k < f->after_at[op + 1]; k++) {
        const Slots *runs = &t->runs[f->afters[k]];
        if (runs->count && runs->at[0] < *to) *to = runs->at[0];
    }
}

/* The first slot that is relieved when a value is dropped right after one of its events. */
static i32 tape_waits_from(const Tape *t, i32 value, i32 event) {
    const Facts *f = t->facts;
    if (!t->saved || event < 0) return event + 1;
    i32 op = t->at[event];
    for (i32 k = f->take_at[op]; k < f->take_at[op + 1]; k++)
        if (f->takes[k] == value) return event;
    return event + 1;
}

/* Take what a run saves by writing in place off its level. */
static void tape_save(Tape *t, i32 slot) {
    i64 saved = tape_saves(t, slot);
    if (saved == t->saved[slot]) return;
    profile_add(&t->mem, slot, slot + 1, t->saved[slot] - saved);
    t->saved[slot] = saved;
    tape_touch(t, slot, slot);
}

/* An edit may have changed what is dropped after its slot, and after the last event before it of a value. */
static void tape_save_before(Tape *t, i32 value, i32 slot) {
    const Slots *e = &t->events[value];
    i32 index = slots_find(e, slot);
    if (index) tape_save(t, e->at[index - 1]);
}

static void tape_save_around(Tape *t, i32 op, i32 slot) {
    const Facts *f = t->facts;
    if (!t->saved) return;
    tape_save(t, slot);
    for (i32 r = f->read_at[op]; r < f->read_at[op + 1]; r++) tape_save_before(t, f->reads[r], slot);
    for (i32 w = f->write_at[op]; w < f->write_at[op + 1]; w++) tape_save_before(t, f->writes[w], slot);
}

static void tape_state(Tape *t, i32 op, i64 sign) {
    const Slots *r = &t->runs[op];
    if (r->count < 2 || !t->facts->state[op]) return;
    profile_add(&t->mem, r->at[0], r->at[r->count - 1] + 1, sign * t->facts->state[op]);
    tape_touch(t, r->at[0], r->at[r->count - 1]);
}

/* What an op holds for good is there from its first run on. */
static void tape_hold(Tape *t, i32 op, i32 was, i32 is) {
    i64 held = t->facts->held[op];
    if (!held || was == is) return;
    if (is > was) profile_add(&t->mem, was + 1, is + 1, -held);
    else profile_add(&t->mem, is + 1, was + 1, held);
    tape_touch(t, is < was ? is : was, is > was ? is : was);
}

/* Run an op once more at a free slot (sign 1), or take one of several runs away (sign -1). */
static void tape_edit(Tape *t, i32 op, i32 slot, i64 sign) {
    const Facts *f = t->facts;
    t->edits++;
    i64 here = sign * f->own[op];
    i32 low = slot, last = slot / BLOCK;
    for (i32 r = f->read_at[op]; r < f->read_at[op + 1]; r++) {
        i32 value = f->reads[r];
        Slots *e = &t->events[value];
        i32 index = slots_find(e, slot);
        if (sign < 0) slots_remove(e, index);
        if (index < e->count && t->at[e->at[index]] != f->writer[value]) {
            here -= sign * f->size[value];
        } else {
            i32 before = e->at[index - 1] + 1;
            profile_add_until(&t->mem, before, slot, last, sign * f->size[value]);
            if (before < low) low = before;
        }
        if (sign > 0) slots_insert(&t->pool, e, index, slot);
    }
    for (i32 w = f->write_at[op]; w < f->write_at[op + 1]; w++) {
        i32 value = f->writes[w];
        Slots *e = &t->events[value];
        i32 index = slots_find(e, slot);
        if (sign < 0) slots_remove(e, index);
        if (index < e->count && t->at[e->at[index]] != op) {
            i32 before = e->at[index - 1] + 1;
            profile_add_until(&t->mem, before, slot + 1, last, -sign * f->size[value]);
            if (before < low) low = before;
        }
        if (sign > 0) slots_insert(&t->pool, e, index, slot);
    }
    t->mem.level[slot] += here;
    t->at[slot] = sign > 0 ? op : -1;
    profile_use(&t->mem, slot, sign > 0);
    profile_settle(&t->mem, last);
    t->seconds += (double)sign * f->seconds[op];
    tape_state(t, op, -1);
    Slots *runs = &t->runs[op];
    i32 first = runs->at[0];
    if (sign > 0) slots_insert(&t->pool, runs, slots_find(runs, slot), slot);
    else slots_remove(runs, slots_find(runs, slot));
    tape_hold(t, op, first, runs->at[0]);
    tape_state(t, op, 1);
    tape_touch(t, low, slot);
    tape_save_around(t, op, slot);
}

static void tape_insert(Tape *t, i32 op, i32 slot) { tape_edit(t, op, slot, 1); }

static void tape_remove(Tape *t, i32 slot) { tape_edit(t, t->at[slot], slot, -1); }

/* Whether an op's first run is for nothing: the next, in the same phase, comes before any read. */
static int tape_vain(const Tape *t, i32 op) {
    const Facts *f = t->facts;
    const Slots *runs = &t->runs[op];
    if (!f->can_wait[op] || runs->count < 2) return 0;
    i32 boundary = t->runs[f->ops - 1].at[0];
    if ((runs->at[0] < boundary) != (runs->at[1] < boundary)) return 0;
    for (i32 w = f->write_at[op]; w < f->write_at[op + 1]; w++)
        if (t->events[f->writes[w]].at[1] != runs->at[1]) return 0;
    return 1;
}

/* How many free slots are right before the run at `slot`. */
static i32 tape_gap(const Tape *t, i32 slot) {
    i32 before = slot - 1;
    while (before > 0 && t->at[before] < 0) before--;
    return slot - before - 1;
}

/* Lay the runs out afresh with `slots` more free slots before the run at `wide`, and say where each is then. */
static void tape_spread(Tape *t, i32 wide, i32 slots, i32 *moved) {
    i32 count = 0, at = 0, *order = pool_get(&t->pool, (size_t)t->length, sizeof(i32));
    for (i32 s = 0; s < t->length; s++) {
        moved[s] = 0;
        if (t->at[s] < 0) continue;
        if (s == wide) at = count;
        moved[s] = SPACING * (count + 1) + (s >= wide ? slots : 0);
        order[count++] = t->at[s];
    }
    double seconds = t->seconds;
    tape_clear(t);
    tape_lay(t, order, count, at, slots);
    t->seconds = seconds;
    pool_give(order);
}

#endif

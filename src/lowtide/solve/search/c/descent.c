/* The greedy descent and the clean-up of `greedy.py` and `moves.py`, move for move, at native speed.
 *
 * Both take the same moves in the same order; the Python files say what is done and why. Only `ruin` and
 * `anneal`, which the search can do without, are here alone. Built by `native.py`.
 */
#include <math.h>

#include "any_order.h"
#include "orders.h"

#define REACH 8 /* these three as in `greedy.py`, which says where they come from */
#define LONGEST 32 /* REACH times a power of four, or a move outgrows its arrays */
#define LEAST_PROGRESS 0.95
#define LATER 64 /* inputs per run of a move that the stack has places for */

enum { KEEP, MIXED, RECOMPUTE, POLICIES };

typedef struct {
    double score;
    i32 value, after;
} Entry;

typedef struct { /* runs right before a slot, and later runs that are superfluous then */
    double seconds;
    i64 gain;
    i32 runs[LONGEST], later[LONGEST], count, laters;
} Move;

typedef struct {
    Tape *tape;
    i64 budget;
    double exponent, tolerance, noise;
    uint64_t seed;
    i64 limit; /* of edits, after which it gives up */
    i32 reach, entries, capacity;
    Entry *heap;
    i32 *seen, mark;   /* ops that the present walk has seen carry its mark */
    i32 *fresh, marks; /* values that the present move has put on the heap carry its mark */
    i32 added[LONGEST], removed_op[LONGEST], removed_slot[LONGEST], adds, removes;
} Descent;

/* A number from 0 to 1 that looks random, from two others. */
static double shuffled(uint64_t seed, uint64_t number) {
    uint64_t x = seed * 0x9E3779B97F4A7C15u + number * 0xBF58476D1CE4E5B9u + 0x94D049BB133111EBu;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (double)((x ^ (x >> 31)) >> 11) / 9007199254740992.0;
}

/* Less is better. With noise a gap's seconds count for up to so much more. */
static double score(const Descent *d, i32 value, double seconds, i64 gain) {
    if (seconds <= 0) return -(double)gain;
    if (d->noise > 0) seconds *= 1 + d->noise * shuffled(d->seed, (uint64_t)value);
    return seconds / pow((double)gain, d->exponent);
}

/* ---- the heap: least score first, then least value, then earliest slot ---- */

static int before(const Entry *a, const Entry *b) {
    if (a->score != b->score) return a->score < b->score;
    if (a->value != b->value) return a->value < b->value;
    return a->after < b->after;
}

static void push(Descent *d, i32 value, i32 after, double rank) {
    if (d->entries == d->capacity) {
        i32 capacity = d->capacity ? 2 * d->capacity : 256;
        d->heap = pool_more(&d->tape->pool, d->heap, (size_t)capacity, sizeof(Entry));
        d->capacity = capacity;
    }
    Entry entry = {rank, value, after};
    i32 at = d->entries++;
    while (at && before(&entry, &d->heap[(at - 1) / 2])) {
        d->heap[at] = d->heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    d->heap[at] = entry;
}

static Entry pop(Descent *d) {
    Entry top = d->heap[0], last = d->heap[--d->entries];
    i32 at = 0, child;
    while ((child = 2 * at + 1) < d->entries) {
        if (child + 1 < d->entries && before(&d->heap[child + 1], &d->heap[child])) child++;
        if (!before(&d->heap[child], &last)) break;
        d->heap[at] = d->heap[child];
        at = child;
    }
    d->heap[at] = last;
    return top;
}

/* ---- moves ---- */

/* Whether an input has to be recomputed, rather than wait until `after`. */
static int fetches(const Descent *d, i32 value, i32 after, int policy) {
    const Tape *t = d->tape;
    int there;
    i32 last = tape_around(t, value, after, &there);
    if (there || !tape_may_run(t, t->facts->writer[value], after)) return 0;
    if (policy == RECOMPUTE) return 1;
    i32 start = tape_waits_from(t, value, last);
    return profile_most(&t->mem, start, after) + t->facts->size[value] > d->budget;
}

/* The ops that would close a gap, in order; none when they are more than `reach`. */
static i32 collect(Descent *d, i32 value, i32 after, int policy, i32 *runs) {
    const Facts *f = d->tape->facts;
    i32 todo[LONGEST * LATER], ready[LONGEST * LATER], depth = 0, count = 0, seen = 0;
    if (!tape_may_run(d->tape, f->writer[value], after)) return 0;
    d->mark++;
    todo[depth] = f->writer[value], ready[depth++] = 0;
    while (depth) {
        i32 op = todo[--depth];
        if (ready[depth]) {
            runs[count++] = op;
            continue;
        }
        if (d->seen[op] == d->mark) continue;
        d->seen[op] = d->mark;
        if (++seen > d->reach) return 0;
        todo[depth] = op, ready[depth++] = 1;
        if (policy == KEEP) continue;
        for (i32 r = f->read_at[op]; r < f->read_at[op + 1]; r++) {
            i32 other = f->reads[r];
            if (d->seen[f->writer[other]] == d->mark || !fetches(d, other, after, policy)) continue;
            /* More inputs than any real op of a move has; a move that would need them is not looked at. */
            if (depth >= LONGEST * LATER) return 0;
            todo[depth] = f->writer[other], ready[depth++] = 0;
        }
    }
    return count;
}

static void apply(Descent *d, const Move *m, i32 after) {
    Tape *t = d->tape;
    i32 gap = tape_gap(t, after), start = after - gap - 1;
    t->low = t->length, t->high = 0;
    d->adds = m->count, d->removes = m->laters;
    for (i32 i = 0; i < m->laters; i++) d->removed_slot[i] = m->later[i], d->removed_op[i] = t->at[m->later[i]];
    for (i32 i = 0; i < m->count; i++) {
        d->added[i] = start + (gap + 1) * (i + 1) / (m->count + 1);
        tape_insert(t, m->runs[i], d->added[i]);
    }
    for (i32 i = 0; i < m->laters; i++) tape_remove(t, m->later[i]);
}

static void undo(Descent *d) {
    for (i32 i = d->removes - 1; i >= 0; i--) tape_insert(d->tape, d->removed_op[i], d->removed_slot[i]);
    for (i32 i = d->adds - 1; i >= 0; i--) tape_remove(d->tape, d->added[i]);
}

/* Apply a move, see what it does, and take it back. */
static void measure(Descent *d, Move *m, i32 after) {
    Tape *t = d->tape;
    double again = 0, less = 0;
    for (i32 i = 0; i < m->count; i++) again += t->facts->seconds[m->runs[i]];
    for (i32 i = 0; i < m->laters; i++) less += t->facts->seconds[t->at[m->later[i]]];
    m->seconds = again - less;
    double seconds = t->seconds;
    apply(d, m, after);
    i32 low = t->low, high = t->high + 1;
    i64 now = profile_excess(&t->mem, low, high, d->budget, INT64_MAX);
    undo(d);
    t->seconds = seconds;
    m->gain = profile_excess(&t->mem, low, high, d->budget, INT64_MAX) - now;
}

/* Later runs that are not needed when what the move recomputes is kept until there. */
static void find_later(const Tape *t, Move *m, i32 after) {
    m->laters = 0;
    for (i32 i = 0; i + 1 < m->count; i++) {
        const Slots *runs = &t->runs[m->runs[i]];
        i32 index = slots_find(runs, after);
        if (index < runs->count) m->later[m->laters++] = runs->at[index];
    }
}

static void consider(Descent *d, i32 value, Move *m, i32 after, Move *best) {
    measure(d, m, after);
    if (m->gain <= 0) return;
    if (best->count && score(d, value, m->seconds, m->gain) >= score(d, value, best->seconds, best->gain)) return;
    *best = *m;
}

/* The ways to close a gap, without those that are the same; none when it is closed already. */
static i32 find_ways(Descent *d, i32 value, i32 after, Move *ways) {
    const Tape *t = d->tape;
    const Facts *f = t->facts;
    i32 op = t->at[after], count = 0, reads = 0;
    int there;
    if (op < 0) return 0;
    for (i32 r = f->read_at[op]; r < f->read_at[op + 1]; r++) reads |= f->reads[r] == value;
    if (!reads) return 0;
    i32 last = tape_around(t, value, after, &there);
    if (profile_most(&t->mem, tape_waits_from(t, value, last), after) <= d->budget) return 0;
    for (int policy = KEEP; policy < POLICIES; policy++) {
        Move *m = &ways[count];
        m->count = collect(d, value, after, policy, m->runs);
        int known = !m->count;
        for (i32 i = 0; i < count && !known; i++)
            known = ways[i].count == m->count && !memcmp(ways[i].runs, m->runs, (size_t)m->count * sizeof(i32));
        count += !known;
    }
    return count;
}

/* See to it that there are free slots before a run; returns where that run is then. */
static i32 make_slots(Descent *d, i32 after, i32 count) {
    Tape *t = d->tape;
    if (!count || tape_gap(t, after) >= count) return after;
    i32 *moved = pool_get(&t->pool, (size_t)t->length, sizeof(i32));
    tape_spread(t, after, 2 * count + 4, moved);
    for (i32 i = 0; i < d->entries; i++) {
        i32 slot = d->heap[i].after;
        d->heap[i].after = moved[slot];
    }
    after = moved[after];
    pool_give(moved);
    return after;
}

/* ---- the descent ---- */

/* Where a value begins to wait for a run at a slot or after it; the slot itself where it does not. */
static i32 waits_for(const Tape *t, i32 value, i32 slot) {
    int there;
    i32 last = tape_around(t, value, slot, &there);
    return there ? tape_waits_from(t, value, last) : slot;
}

/* The most that one more run right before a slot saves by all outputs of its op that wait then, from the excess and
 * the number of runs above the budget up to each slot. */
static i64 most_saved(const Tape *t, i32 op, i32 after, const i64 *area, const i32 *count) {
    const Facts *f = t->facts;
    i64 bytes = 0;
    i32 first = after;
    for (i32 w = f->write_at[op]; w < f->write_at[op + 1]; w++) {
        i32 start = waits_for(t, f->writes[w], after);
        bytes += f->size[f->writes[w]] * (count[after] - count[start]);
        if (start < first) first = start;
    }
    i64 over = area[after] - area[first];
    return bytes < over ? bytes : over;
}

/* The same from the profile as it is. */
static i64 most_saved_now(const Descent *d, i32 op, i32 after) {
    const Tape *t = d->tape;
    const Facts *f = t->facts;
    i64 bytes = 0;
    for (i32 w = f->write_at[op]; w < f->write_at[op + 1]; w++) {
        i32 value = f->writes[w];
        bytes += profile_excess(&t->mem, waits_for(t, value, after), after, d->budget, f->size[value]);
    }
    return bytes;
}

/* Put every gap that covers a run above the budget on the heap, with an optimistic score. */
static void fill(Descent *d) {
    Tape *t = d->tape;
    const Facts *f = t->facts;
    i64 *area = pool_get(&t->pool, (size_t)t->length + 1, sizeof(i64));
    i32 *count = pool_get(&t->pool, (size_t)t->length + 1, sizeof(i32));
    area[0] = 0, count[0] = 0;
    for (i32 s = 0; s < t->length; s++) {
        i64 over = t->at[s] >= 0 ? profile_at(&t->mem, s) - d->budget : 0;
        area[s + 1] = area[s] + (over > 0 ? over : 0);
        count[s + 1] = count[s] + (over > 0);
    }
    d->entries = 0;
    for (i32 value = 0; value < f->values; value++) {
        i32 writer = f->writer[value];
        if (!f->recomputable[writer] || !f->size[value]) continue;
        const Slots *e = &t->events[value];
        for (i32 i = 1; i < e->count; i++) {
            i32 start = tape_waits_from(t, value, e->at[i - 1]), after = e->at[i], hot = count[after] - count[start];
            if (!hot || t->at[after] == writer) continue;
            push(d, value, after, score(d, value, f->seconds[writer], most_saved(t, writer, after, area, count)));
        }
    }
    pool_give(area);
    pool_give(count);
}

/* Put the gaps of a value around a new run on the heap. */
static void push_new(Descent *d, i32 value, i32 slot) {
    const Tape *t = d->tape;
    const Facts *f = t->facts;
    const Slots *e = &t->events[value];
    i32 op = f->writer[value], index = slots_find(e, slot), last = index + 3 < e->count ? index + 3 : e->count;
    for (i32 i = index - 1 > 1 ? index - 1 : 1; i < last; i++) {
        if (t->at[e->at[i]] == op) continue;
        i64 gain = most_saved_now(d, op, e->at[i]);
        if (gain > 0) push(d, value, e->at[i], score(d, value, f->seconds[op], gain));
    }
}

/* Apply a move for good, and put the gaps it made on the heap. */
static void take(Descent *d, const Move *m, i32 after) {
    const Facts *f = d->tape->facts;
    apply(d, m, after);
    d->marks++;
    for (i32 i = 0; i < d->adds; i++) {
        i32 op = d->tape->at[d->added[i]], slot = d->added[i];
        for (i32 r = f->read_at[op]; r < f->read_at[op + 1]; r++) {
            i32 value = f->reads[r];
            if (d->fresh[value] == d->marks || !f->recomputable[f->writer[value]]) continue;
            d->fresh[value] = d->marks;
            push_new(d, value, slot);
        }
        for (i32 w = f->write_at[op]; w < f->write_at[op + 1]; w++) {
            i32 value = f->writes[w];
            if (d->fresh[value] == d->marks || !f->recomputable[f->writer[value]]) continue;
            d->fresh[value] = d->marks;
            push_new(d, value, slot);
        }
    }
}

/* Take moves until the heap is empty or the budget holds. */
static void drain(Descent *d) {
    Tape *t = d->tape;
    Move ways[POLICIES];
    while (d->entries && t->edits < d->limit) {
        if (tape_is_late(t)) d->limit = t->edits;
        Entry entry = pop(d);
        i32 count = find_ways(d, entry.value, entry.after, ways), longest = 0;
        for (i32 i = 0; i < count; i++) longest = ways[i].count > longest ? ways[i].count : longest;
        i32 after = make_slots(d, entry.after, longest);
        Move best = {.count = 0};
        for (i32 i = 0; i < count; i++) {
            find_later(t, &ways[i], after);
            if (ways[i].laters) consider(d, entry.value, &ways[i], after, &best);
            ways[i].laters = 0;
            consider(d, entry.value, &ways[i], after, &best);
        }
        if (!best.count) continue;
        double rank = score(d, entry.value, best.seconds, best.gain);
        if (d->entries && rank > d->heap[0].score + d->tolerance * fabs(d->heap[0].score)) {
            push(d, entry.value, after, rank);
            continue;
        }
        take(d, &best, after);
        if (profile_most(&t->mem, 0, t->length) <= d->budget) return;
    }
}

static i64 whole_excess(const Descent *d) {
    return profile_excess(&d->tape->mem, 0, d->tape->length, d->budget, INT64_MAX);
}

static int descend(
    Tape *t, i64 budget, double exponent, double tolerance, i64 limit, double noise, uint64_t seed) {
    Descent d = {.tape = t, .budget = budget, .exponent = exponent, .tolerance = tolerance, .reach = REACH};
    d.noise = noise, d.seed = seed, d.limit = limit < 0 ? INT64_MAX : t->edits + limit;
    d.seen = pool_zeros(&t->pool, (size_t)t->facts->ops + 1, sizeof(i32));
    d.fresh = pool_zeros(&t->pool, (size_t)t->facts->values + 1, sizeof(i32));
    i64 excess = whole_excess(&d);
    int fits = 1;
    while (excess) {
        fill(&d);
        drain(&d);
        i64 last = excess;
        excess = whole_excess(&d);
        if ((double)excess <= LEAST_PROGRESS * (double)last && t->edits < d.limit) continue;
        if (d.reach >= LONGEST || t->edits >= d.limit) {
            fits = 0;
            break;
        }
        d.reach *= 4;
    }
    pool_give(d.seen);
    pool_give(d.fresh);
    pool_give(d.heap);
    return fits;
}

int lowtide_descend(
    Tape *t, i64 budget, double exponent, double tolerance, i64 limit, double noise, uint64_t seed) {
    if (setjmp(t->pool.back)) return NO_MEMORY;
    return descend(t, budget, exponent, tolerance, limit, noise, seed);
}

/* ---- the clean-up ---- */

typedef struct {
    double seconds;
    i32 slot;
} Again;

static int dearest(const void *a, const void *b) {
    const Again *x = a, *y = b;
    if (x->seconds != y->seconds) return x->seconds > y->seconds ? -1 : 1;
    return x->slot > y->slot ? -1 : x->slot < y->slot;
}

static void prune(Tape *t, i64 budget, i64 limit) {
    const Facts *f = t->facts;
    i64 last = limit < 0 ? INT64_MAX : t->edits + limit;
    Again *again = pool_get(&t->pool, (size_t)t->length + 1, sizeof(Again));
    for (i32 removed = 1; removed;) {
        i32 count = 0;
        removed = 0;
        for (i32 op = 0; op < f->ops; op++)
            for (i32 i = tape_vain(t, op) ? 0 : 1; i < t->runs[op].count; i++)
                again[count++] = (Again){f->seconds[op], t->runs[op].at[i]};
        qsort(again, (size_t)count, sizeof(Again), dearest);
        for (i32 i = 0; i < count && t->edits < last; i++) {
            if (tape_is_late(t)) last = t->edits;
            i32 op = t->at[again[i].slot];
            if (t->runs[op].at[0] == again[i].slot && !tape_vain(t, op)) continue;
            double seconds = t->seconds;
            t->low = t->length, t->high = 0;
            tape_remove(t, again[i].slot);
            if (profile_most(&t->mem, t->low, t->high + 1) > budget) {
                tape_insert(t, op, again[i].slot);
                t->seconds = seconds;
            } else {
                removed++;
            }
        }
    }
    pool_give(again);
}

int lowtide_prune(Tape *t, i64 budget, i64 limit) {
    if (setjmp(t->pool.back)) return NO_MEMORY;
    prune(t, budget, limit);
    return 0;
}

/* Take a share of the repeated runs between two places of the order away, whatever that does. */
int lowtide_ruin(Tape *t, double from, double to, double share, uint64_t seed) {
    if (setjmp(t->pool.back)) return NO_MEMORY;
    i32 low = (i32)(from * t->length), high = (i32)(to * t->length);
    for (i32 s = low; s < high && s < t->length; s++) {
        i32 op = t->at[s];
        if (op >= 0 && t->runs[op].at[0] != s && shuffled(seed, (uint64_t)s) < share) tape_remove(t, s);
    }
    return 0;
}

i32 lowtide_order(const Tape *t, i32 *order) {
    i32 count = 0;
    for (i32 s = 0; s < t->length; s++) {
        if (t->at[s] < 0) continue;
        if (order) order[count] = t->at[s];
        count++;
    }
    return count;
}

/* ---- annealing: single runs put in and taken out at random, for small graphs ---- */

#define EDITS 8

typedef struct {
    Tape *tape;
    i64 budget;
    uint64_t seed, drawn;
    i32 op[EDITS], slot[EDITS], sign[EDITS], edits; /* those of the last step */
} Annealing;

static double draw(Annealing *a) { return shuffled(a->seed, ++a->drawn); }

static i32 pick(Annealing *a, i32 count) { return (i32)(draw(a) * count); }

static void edit(Annealing *a, i32 op, i32 slot, i32 sign) {
    tape_edit(a->tape, op, slot, sign);
    a->op[a->edits] = op, a->slot[a->edits] = slot, a->sign[a->edits++] = sign;
}

static void take_back(Annealing *a) {
    while (a->edits) {
        a->edits--;
        tape_edit(a->tape, a->op[a->edits], a->slot[a->edits], -a->sign[a->edits]);
    }
}

/* Take some run away that is not the only one. */
static void take_out(Annealing *a) {
    Tape *t = a->tape;
    for (i32 tries = 0; tries < 32; tries++) {
        i32 op = pick(a, t->facts->ops);
        const Slots *runs = &t->runs[op];
        if (runs->count < 2) continue;
        i32 index = tape_vain(t, op) ? pick(a, runs->count) : 1 + pick(a, runs->count - 1);
        edit(a, op, runs->at[index], -1);
        return;
    }
}

static int may_put(const Tape *t, i32 op, i32 slot) {
    return tape_may_run(t, op, slot) && t->runs[op].at[0] < slot && !tape_returned(t, slot);
}

/* Recompute at a slot, and right before it now and then what the op reads. */
static void put_in(Annealing *a, i32 op, i32 slot) {
    Tape *t = a->tape;
    const Facts *f = t->facts;
    while (slot > 0 && t->at[slot] < 0 && may_put(t, op, slot)) {
        edit(a, op, slot, 1);
        i32 reads = f->read_at[op + 1] - f->read_at[op];
        if (!reads || a->edits == EDITS || draw(a) < 0.6) return;
        op = f->writer[f->reads[f->read_at[op] + pick(a, reads)]];
        slot--;
    }
}

/* Close some gap: recompute its value, right before its end or anywhere inside. */
static void close_gap(Annealing *a) {
    Tape *t = a->tape;
    const Facts *f = t->facts;
    for (i32 tries = 0; tries < 32 && !a->edits; tries++) {
        i32 value = pick(a, f->values), writer = f->writer[value];
        const Slots *e = &t->events[value];
        if (!f->recomputable[writer] || e->count < 2) continue;
        i32 index = 1 + pick(a, e->count - 1), from = e->at[index - 1], to = e->at[index];
        if (t->at[to] == writer) continue;
        i32 slot = draw(a) < 0.5 ? to - 1 : from + 1 + pick(a, to - from - 1);
        if (slot > from) put_in(a, writer, slot);
    }
}

/* Move some run to another place: a first one as far as the order of the step allows, a later one anywhere. */
static void shift(Annealing *a) {
    Tape *t = a->tape;
    const Facts *f = t->facts;
    i32 op = pick(a, f->ops - 1), from, to;
    const Slots *runs = &t->runs[op];
    if (!runs->count || op == f->returning) return;
    i32 index = draw(a) < 0.5 ? 0 : pick(a, runs->count), slot = runs->at[index];
    tape_window(t, op, &from, &to);
    if (index) from = runs->at[0], to = t->length;
    /* Near places as often as far ones: the order is good as it is, but for some runs. */
    i32 reach = (i32)(SPACING * pow((double)t->length / SPACING, draw(a))), low = slot - reach > from ? slot - reach : from;
    i32 high = slot + reach < to ? slot + reach : to;
    if (high - low < 2) return;
    i32 target = low + 1 + pick(a, high - low - 1);
    while (target < high && t->at[target] >= 0) target++;
    if (target >= high || tape_returned(t, target) || (index && !tape_may_run(t, op, target))) return;
    edit(a, op, target, 1);
    edit(a, op, slot, -1);
}

/* Look for fewer seconds under the budget, cooling from `hot` to `cold`. A byte above the budget during a run
 * costs `price` seconds. Of the steps a share `shifts` moves runs, the others put some in and take some out. The
 * tape becomes the fastest that was found to fit; where none fits, about the one with the least above the budget. */
static void anneal(
    Tape *t, i64 budget, i64 steps, double price, double hot, double cold, double shifts, uint64_t seed) {
    Annealing a = {.tape = t, .budget = budget, .seed = seed};
    if (!t->facts->values || t->facts->ops < 2) return; /* nothing to change */
    i32 count = 0, *best = pool_get(&t->pool, (size_t)t->length, sizeof(i32));
    for (i32 s = 0; s < t->length; s++)
        if (t->at[s] >= 0) best[count++] = t->at[s];
    i64 excess = profile_excess(&t->mem, 0, t->length, budget, INT64_MAX);
    i64 nearest = excess; /* of the best order so far */
    double least = t->seconds, seconds = t->seconds;
    for (i64 step = 0; step < steps && !tape_is_late(t); step++) {
        a.edits = 0;
        double kind = draw(&a);
        if (kind < shifts) shift(&a);
        else if (kind < (1 + shifts) / 2) take_out(&a);
        else close_gap(&a);
        if (!a.edits) continue;
        i64 now = profile_excess(&t->mem, 0, t->length, budget, INT64_MAX);
        double more = t->seconds - seconds + price * (double)(now - excess);
        double cooled = (double)step / (double)steps;
        if (more > 0 && draw(&a) >= exp(-more / (hot * pow(cold / hot, cooled)))) {
            take_back(&a);
            t->seconds = seconds;
            continue;
        }
        excess = now, seconds = t->seconds;
        if (excess > nearest - nearest / 1024 || (excess == nearest && seconds >= least - 1e-9 * least)) continue;
        nearest = excess, least = seconds;
        i32 slots = lowtide_order(t, NULL);
        best = pool_more(&t->pool, best, (size_t)slots + 1, sizeof(i32));
        count = lowtide_order(t, best);
    }
    tape_clear(t);
    tape_lay(t, best, count, 0, 0);
    pool_give(best);
}

int lowtide_anneal(
    Tape *t, i64 budget, i64 steps, double price, double hot, double cold, double shifts, uint64_t seed) {
    if (setjmp(t->pool.back)) return NO_MEMORY;
    anneal(t, budget, steps, price, hot, cold, shifts, seed);
    return 0;
}

/* ---- what Python calls ---- */

#define MOST_RUNS (INT32_MAX / SPACING / 4) /* the slots of more could not be numbered */

static int tape_begin(Tape *t, const i32 *order, i32 count) {
    if (setjmp(t->pool.back)) return NO_MEMORY;
    tape_lay(t, order, count, 0, 0);
    return 0;
}

static int tape_follow(Tape *t, const Tape *from) {
    if (setjmp(t->pool.back)) return NO_MEMORY;
    t->facts = from->facts, t->seconds = from->seconds, t->edits = from->edits, t->until = from->until;
    t->length = from->length, t->low = from->low, t->high = from->high;
    size_t length = (size_t)from->mem.length;
    profile_copy(&t->pool, &t->mem, &from->mem);
    t->at = memcpy(pool_get(&t->pool, length, sizeof(i32)), from->at, length * sizeof(i32));
    if (from->saved) t->saved = memcpy(pool_get(&t->pool, length, sizeof(i64)), from->saved, length * sizeof(i64));
    t->events = slots_copy(&t->pool, from->events, t->facts->values);
    t->runs = slots_copy(&t->pool, from->runs, t->facts->ops);
    return 0;
}

static Tape *tape_new(void) {
    Tape *t = LOWTIDE_ALLOCATE(sizeof(Tape));
    if (!t) return NULL;
    memset(t, 0, sizeof(Tape));
    pool_open(&t->pool);
    t->until = HUGE_VAL;
    return t;
}

void lowtide_free(Tape *t) {
    if (!t) return;
    pool_close(&t->pool);
    LOWTIDE_RELEASE(t);
}

/* A tape, or NULL where there is no memory for it. After a call that gave `NO_MEMORY` it may only be freed. */
Tape *lowtide_tape(const Facts *facts, const i32 *order, i32 count) {
    Tape *t = count < MOST_RUNS ? tape_new() : NULL;
    if (t) t->facts = facts;
    if (!t || !tape_begin(t, order, count)) return t;
    lowtide_free(t);
    return NULL;
}

Tape *lowtide_copy(const Tape *from) {
    Tape *t = tape_new();
    if (!t || !tape_follow(t, from)) return t;
    lowtide_free(t);
    return NULL;
}

void lowtide_until(Tape *t, double until) { t->until = until; }

i64 lowtide_edits(const Tape *t) { return t->edits; }

i64 lowtide_peak(const Tape *t) { return profile_most(&t->mem, 0, t->length); }

double lowtide_seconds(const Tape *t) { return t->seconds; }


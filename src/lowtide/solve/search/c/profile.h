/* The bytes that are resident at each slot of a tape, with range updates and the excess above a budget.
 *
 * Slots are grouped in blocks, and the blocks are the leaves of a binary tree. A node knows the least, the
 * largest and the sum of its used slots, and what has to be added to all of them: an update of a range touches
 * O(log slots) nodes and two blocks, and the excess need not look into nodes that lie wholly above or wholly
 * below the budget.
 */
#ifndef LOWTIDE_PROFILE_H
#define LOWTIDE_PROFILE_H

#include "pool.h"

#define BLOCK 32
#define FAR (INT64_MAX / 4) /* beyond all bytes, and far from where sums wrap around: `coarse.py` sees to that */

typedef int64_t i64;
typedef int32_t i32;

typedef struct { /* of the used slots below it; `add` is included here, but not in what lies below */
    i64 add, least, most, sum;
    i32 used; /* how many; without one, `least` and `most` are about FAR above and below */
} Node;

typedef struct {
    i32 length, leaves; /* the slots, BLOCK to a leaf; `leaves` is a power of two */
    i64 *level;         /* bytes at each slot, less what the nodes above it add */
    uint32_t *used;     /* of each leaf: a bit for each slot */
    Node *nodes;        /* 1 is the root, 2i and 2i+1 are below i */
} Profile;

static void profile_init(Pool *pool, Profile *p, i32 length) {
    p->leaves = 1;
    while (p->leaves * BLOCK < length) p->leaves *= 2;
    p->length = p->leaves * BLOCK;
    p->level = pool_zeros(pool, (size_t)p->length, sizeof(i64));
    p->used = pool_zeros(pool, (size_t)p->leaves, sizeof(uint32_t));
    p->nodes = pool_zeros(pool, 2 * (size_t)p->leaves, sizeof(Node));
}

static void profile_free(Profile *p) {
    pool_give(p->level);
    pool_give(p->used);
    pool_give(p->nodes);
}

static void profile_copy(Pool *pool, Profile *to, const Profile *from) {
    profile_init(pool, to, from->length);
    memcpy(to->level, from->level, (size_t)from->length * sizeof(i64));
    memcpy(to->used, from->used, (size_t)from->leaves * sizeof(uint32_t));
    memcpy(to->nodes, from->nodes, 2 * (size_t)from->leaves * sizeof(Node));
}

/* Say whether a slot counts; its leaf has to be settled afterwards. */
static void profile_use(Profile *p, i32 slot, int used) {
    uint32_t bit = (uint32_t)1 << slot % BLOCK;
    if (used) p->used[slot / BLOCK] |= bit;
    else p->used[slot / BLOCK] &= ~bit;
}

/* The used slots of a leaf that lie from `low` up to `high`, as bits. */
static uint32_t profile_used(const Profile *p, i32 leaf, i32 low, i32 high) {
    uint32_t used = p->used[leaf];
    i32 from = low - leaf * BLOCK, to = high - leaf * BLOCK;
    if (from > 0) used &= ~(uint32_t)0 << from;
    if (to < BLOCK) used &= ~(~(uint32_t)0 << to);
    return used;
}

/* A leaf from its slots. */
static void profile_gather(Profile *p, i32 leaf) {
    Node *n = &p->nodes[p->leaves + leaf];
    i64 least = FAR, most = -FAR, sum = 0;
    i32 used = 0;
    for (uint32_t left = p->used[leaf]; left; left &= left - 1) {
        i64 level = p->level[leaf * BLOCK + __builtin_ctz(left)] + n->add;
        if (level < least) least = level;
        if (level > most) most = level;
        sum += level;
        used++;
    }
    n->least = least, n->most = most, n->sum = sum, n->used = used;
}

/* A node from the two below it. */
static void profile_join(Profile *p, i32 node) {
    Node *n = &p->nodes[node];
    const Node *a = &p->nodes[2 * node], *b = a + 1;
    n->used = a->used + b->used;
    n->sum = a->sum + b->sum + n->add * n->used;
    n->least = (a->least < b->least ? a->least : b->least) + n->add;
    n->most = (a->most > b->most ? a->most : b->most) + n->add;
}

static void profile_build(Profile *p) {
    for (i32 leaf = 0; leaf < p->leaves; leaf++) profile_gather(p, leaf);
    for (i32 node = p->leaves - 1; node > 0; node--) profile_join(p, node);
}

/* Bring a leaf and all above it up to date. */
static void profile_settle(Profile *p, i32 leaf) {
    profile_gather(p, leaf);
    for (i32 node = (p->leaves + leaf) / 2; node > 0; node /= 2) profile_join(p, node);
}

static void profile_add_all(Profile *p, i32 node, i64 bytes) {
    Node *n = &p->nodes[node];
    n->add += bytes, n->least += bytes, n->most += bytes, n->sum += bytes * n->used;
}

/* Add bytes to the slots from `low` up to, not including, `high`, which is in the leaf `last` or at its end.
 * That leaf has to be settled afterwards: once for all the ranges that end in it. */
static void profile_add_until(Profile *p, i32 low, i32 high, i32 last, i64 bytes) {
    i32 first = low / BLOCK;
    if (first >= last) {
        for (i32 s = low; s < high; s++) p->level[s] += bytes;
        return;
    }
    for (i32 s = low; s < (first + 1) * BLOCK; s++) p->level[s] += bytes;
    for (i32 s = last * BLOCK; s < high; s++) p->level[s] += bytes;
    profile_gather(p, first);
    i32 left = p->leaves + first, right = p->leaves + last;
    while ((left ^ right) != 1) { /* until they are neighbours below one node */
        if (!(left & 1)) profile_add_all(p, left + 1, bytes);
        if (right & 1) profile_add_all(p, right - 1, bytes);
        left /= 2, right /= 2;
        profile_join(p, left);
    }
}

/* Add bytes to the slots from `low` up to, not including, `high`. */
static void profile_add(Profile *p, i32 low, i32 high, i64 bytes) {
    if (low >= high || !bytes) return;
    i32 last = (high - 1) / BLOCK;
    profile_add_until(p, low, high, last, bytes);
    profile_settle(p, last);
}

static i64 profile_at(const Profile *p, i32 slot) {
    i64 level = p->level[slot];
    for (i32 node = p->leaves + slot / BLOCK; node > 0; node /= 2) level += p->nodes[node].add;
    return level;
}

static i64 profile_most_below(const Profile *p, i32 node, i32 start, i32 span, i32 low, i32 high, i64 add, i64 most) {
    const Node *n = &p->nodes[node];
    if (!n->used || n->most + add <= most) return most;
    if (low <= start && start + span <= high) return n->most + add;
    add += n->add;
    if (node >= p->leaves) {
        for (uint32_t left = profile_used(p, node - p->leaves, low, high); left; left &= left - 1) {
            i64 level = p->level[start + __builtin_ctz(left)] + add;
            if (level > most) most = level;
        }
        return most;
    }
    i32 half = span / 2;
    if (low < start + half) most = profile_most_below(p, 2 * node, start, half, low, high, add, most);
    if (high > start + half) most = profile_most_below(p, 2 * node + 1, start + half, half, low, high, add, most);
    return most;
}

/* The largest bytes of the used slots from `low` up to `high`; 0 when there are none. */
static i64 profile_most(const Profile *p, i32 low, i32 high) {
    return low < high ? profile_most_below(p, 1, 0, p->length, low, high, 0, 0) : 0;
}

static i64 profile_excess_below(
    const Profile *p, i32 node, i32 start, i32 span, i32 low, i32 high, i64 budget, i64 cap) {
    const Node *n = &p->nodes[node];
    if (!n->used || n->most <= budget) return 0;
    if (low <= start && start + span <= high) {
        if (n->least >= budget && n->most - budget <= cap) return n->sum - budget * n->used;
        if (n->least - budget >= cap) return cap * n->used;
    }
    budget -= n->add;
    i64 excess = 0;
    if (node >= p->leaves) {
        for (uint32_t left = profile_used(p, node - p->leaves, low, high); left; left &= left - 1) {
            i64 over = p->level[start + __builtin_ctz(left)] - budget;
            if (over > 0) excess += over < cap ? over : cap;
        }
        return excess;
    }
    i32 half = span / 2;
    if (low < start + half) excess += profile_excess_below(p, 2 * node, start, half, low, high, budget, cap);
    if (high > start + half)
        excess += profile_excess_below(p, 2 * node + 1, start + half, half, low, high, budget, cap);
    return excess;
}

/* The bytes above the budget, at most `cap` per slot, summed over the used slots from `low` up to `high`. */
static i64 profile_excess(const Profile *p, i32 low, i32 high, i64 budget, i64 cap) {
    return low < high ? profile_excess_below(p, 1, 0, p->length, low, high, budget, cap) : 0;
}

#endif

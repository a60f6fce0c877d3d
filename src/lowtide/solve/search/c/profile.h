/* The bytes that are resident at each slot of a tape, with range updates and the excess above a budget.
 *
 * Slots are grouped in blocks, and the blocks are the leaves of a binary tree. A node knows the least, the
 * largest and the sum of its used slots, and what has to be added to all of them: an update of a range touches
 * O(log slots) nodes and two blocks, and the excess need not look into nodes that lie wholly above or wholly
 * below the budget.
 */
#ifndef LOWTIDE_PROFILE_H
#define LOWTIDE_PROFILE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 16

typedef int64_t i64;
typedef int32_t i32;

typedef struct { /* of the used slots below it; `add` is included here, but not in what lies below */
    i64 add, least, most, sum;
    i32 used;
} Node;

typedef struct {
    i32 length, leaves; /* the slots, BLOCK to a leaf; `leaves` is a power of two */
    i64 *level;         /* bytes at each slot, less what the nodes above it add */
    uint8_t *used;
    Node *nodes; /* 1 is the root, 2i and 2i+1 are below i */
} Profile;

static void profile_init(Profile *p, i32 length) {
    p->leaves = 1;
    while (p->leaves * BLOCK < length) p->leaves *= 2;
    p->length = p->leaves * BLOCK;
    p->level = calloc((size_t)p->length, sizeof(i64));
    p->used = calloc((size_t)p->length, 1);
    p->nodes = calloc(2 * (size_t)p->leaves, sizeof(Node));
}

static void profile_free(Profile *p) {
    free(p->level);
    free(p->used);
    free(p->nodes);
}

static void profile_copy(Profile *to, const Profile *from) {
    profile_init(to, from->length);
    memcpy(to->level, from->level, (size_t)from->length * sizeof(i64));
    memcpy(to->used, from->used, (size_t)from->length);
    memcpy(to->nodes, from->nodes, 2 * (size_t)from->leaves * sizeof(Node));
}

/* A leaf from its slots. */
static void profile_gather(Profile *p, i32 leaf) {
    Node *n = &p->nodes[p->leaves + leaf];
    i64 least = INT64_MAX, most = INT64_MIN, sum = 0;
    i32 used = 0;
    for (i32 s = leaf * BLOCK; s < (leaf + 1) * BLOCK; s++) {
        if (!p->used[s]) continue;
        i64 level = p->level[s] + n->add;
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
    n->least = INT64_MAX, n->most = INT64_MIN;
    if (a->used) n->least = a->least + n->add, n->most = a->most + n->add;
    if (b->used && b->least + n->add < n->least) n->least = b->least + n->add;
    if (b->used && b->most + n->add > n->most) n->most = b->most + n->add;
}

static void profile_build(Profile *p) {
    for (i32 leaf = 0; leaf < p->leaves; leaf++) profile_gather(p, leaf);
    for (i32 node = p->leaves - 1; node > 0; node--) profile_join(p, node);
}

static void profile_settle(Profile *p, i32 slot) {
    profile_gather(p, slot / BLOCK);
    for (i32 node = (p->leaves + slot / BLOCK) / 2; node > 0; node /= 2) profile_join(p, node);
}

static void profile_add_below(Profile *p, i32 node, i32 start, i32 span, i32 low, i32 high, i64 bytes) {
    Node *n = &p->nodes[node];
    if (low <= start && start + span <= high) {
        n->add += bytes;
        if (n->used) n->least += bytes, n->most += bytes, n->sum += bytes * n->used;
        return;
    }
    if (node >= p->leaves) {
        i32 from = low > start ? low : start, to = high < start + span ? high : start + span;
        for (i32 s = from; s < to; s++) p->level[s] += bytes;
        profile_gather(p, node - p->leaves);
        return;
    }
    i32 half = span / 2;
    if (low < start + half) profile_add_below(p, 2 * node, start, half, low, high, bytes);
    if (high > start + half) profile_add_below(p, 2 * node + 1, start + half, half, low, high, bytes);
    profile_join(p, node);
}

/* Add bytes to the slots from `low` up to, not including, `high`. */
static void profile_add(Profile *p, i32 low, i32 high, i64 bytes) {
    if (low < high && bytes) profile_add_below(p, 1, 0, p->length, low, high, bytes);
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
        i32 from = low > start ? low : start, to = high < start + span ? high : start + span;
        for (i32 s = from; s < to; s++)
            if (p->used[s] && p->level[s] + add > most) most = p->level[s] + add;
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
        i32 from = low > start ? low : start, to = high < start + span ? high : start + span;
        for (i32 s = from; s < to; s++) {
            i64 over = p->level[s] - budget;
            if (p->used[s] && over > 0) excess += over < cap ? over : cap;
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

/* Memory for a tape and for the work on it. A search makes thousands of small allocations, at any depth: where one
 * fails the call ends right there, with a jump back to its start. What it has left half done may only be freed, and
 * that is why each block is linked to its pool. Python hears of it and goes on without this library. */
#ifndef LOWTIDE_POOL_H
#define LOWTIDE_POOL_H

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define NO_MEMORY (-1) /* what a call returns that could not end */

#ifndef LOWTIDE_ALLOCATE /* the tests have others, which fail when they are told to */
#define LOWTIDE_ALLOCATE malloc
#define LOWTIDE_REALLOCATE realloc
#define LOWTIDE_RELEASE free
#endif

typedef struct Block {
    struct Block *before, *after;
} Block;

#define HEAD ((sizeof(Block) + _Alignof(max_align_t) - 1) / _Alignof(max_align_t) * _Alignof(max_align_t))

typedef struct { /* it may not be moved: the blocks lead back to it */
    Block ends;
    jmp_buf back;
} Pool;

static void pool_open(Pool *p) { p->ends.before = p->ends.after = &p->ends; }

/* A block, not zeroed; or a jump back. */
static void *pool_get(Pool *p, size_t count, size_t size) {
    Block *b = count < (SIZE_MAX - HEAD) / size ? LOWTIDE_ALLOCATE(HEAD + count * size) : NULL;
    if (!b) longjmp(p->back, 1);
    b->before = &p->ends, b->after = p->ends.after;
    b->before->after = b->after->before = b;
    return (char *)b + HEAD;
}

static void *pool_zeros(Pool *p, size_t count, size_t size) {
    return memset(pool_get(p, count, size), 0, count * size);
}

/* A block with room for more; the old one stays where there is no memory for it. */
static void *pool_more(Pool *p, void *old, size_t count, size_t size) {
    if (!old) return pool_get(p, count, size);
    Block *b = (Block *)(void *)((char *)old - HEAD);
    b = count < (SIZE_MAX - HEAD) / size ? LOWTIDE_REALLOCATE(b, HEAD + count * size) : NULL;
    if (!b) longjmp(p->back, 1);
    b->before->after = b->after->before = b; /* it may lie elsewhere now */
    return (char *)b + HEAD;
}

static void pool_give(void *old) {
    if (!old) return;
    Block *b = (Block *)(void *)((char *)old - HEAD);
    b->before->after = b->after, b->after->before = b->before;
    LOWTIDE_RELEASE(b);
}

static void pool_close(Pool *p) {
    while (p->ends.after != &p->ends) pool_give((char *)p->ends.after + HEAD);
}

#endif

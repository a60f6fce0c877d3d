/* Allocations of which the n-th and all later ones fail, and a count of the blocks that are there. */
#include <stdlib.h>

static long failing_after = -1, failing_live = 0;

static int failing(void) { return failing_after >= 0 && failing_after-- == 0 ? (failing_after = 0, 1) : 0; }

static void *failing_allocate(size_t size) {
    void *made = failing() ? NULL : malloc(size);
    failing_live += made != NULL;
    return made;
}

static void *failing_reallocate(void *old, size_t size) { return failing() ? NULL : realloc(old, size); }

static void failing_release(void *old) {
    failing_live -= old != NULL;
    free(old);
}

void fail_after(long count) { failing_after = count; }

long live_blocks(void) { return failing_live; }

#define LOWTIDE_ALLOCATE failing_allocate
#define LOWTIDE_REALLOCATE failing_reallocate
#define LOWTIDE_RELEASE failing_release

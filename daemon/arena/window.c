/* Windows: extents of the arena that are lent to one tenant each. No arena has any yet. */
#include "daemon/arena/arena.h"
#include "daemon/arena/internal.h"

#include <assert.h>
#include <errno.h>

int arena_group_open(struct arena *a, const char *tenant, struct arena_group **out)
{
    (void)a;
    (void)tenant;
    (void)out;
    return -EOPNOTSUPP;
}

/* The rest needs a group, or a slot in a window. */

void arena_group_close(struct arena *a, struct arena_group *g)
{
    (void)a;
    assert(!g);
    (void)g;
}

const char *arena_group_tenant(const struct arena_group *g)
{
    (void)g;
    return "";
}

int arena_group_table(const struct arena_group *g, struct ucm_window_header *out)
{
    (void)g;
    (void)out;
    return -EOPNOTSUPP;
}

int arena_alloc_window(struct arena *a, struct arena_group *g, uint64_t bytes, uint64_t owner,
                       slot_ref *out)
{
    (void)a;
    (void)g;
    (void)bytes;
    (void)owner;
    (void)out;
    return -ENOSPC;
}

bool arena_slot_in_window(const struct arena *a, slot_ref slot)
{
    (void)a;
    (void)slot;
    return false;
}

struct arena_group *arena_slot_group(struct arena *a, slot_ref slot)
{
    (void)a;
    (void)slot;
    return NULL;
}

void arena_slot_publish(struct arena *a, slot_ref slot)
{
    (void)a;
    (void)slot;
}

void arena_slot_retract(struct arena *a, slot_ref slot)
{
    (void)a;
    (void)slot;
}

bool arena_slot_place(struct arena *a, slot_ref slot, struct arena_place *out)
{
    (void)a;
    (void)slot;
    (void)out;
    return false;
}

int arena_window_fd(struct arena *a, uint32_t window)
{
    (void)a;
    (void)window;
    return -1;
}

void arena_window_map(struct arena *a, uint32_t window)
{
    (void)a;
    (void)window;
}

void arena_window_release(struct arena *a, uint32_t window)
{
    (void)a;
    (void)window;
}

void arena_window_watch(struct arena *a,
                        void (*revoke_cb)(void *ctx, struct arena_group *g, uint32_t window),
                        void *ctx)
{
    (void)a;
    (void)revoke_cb;
    (void)ctx;
}

bool arena_window_revoked(const struct arena *a, uint32_t window)
{
    (void)a;
    (void)window;
    return false;
}

uint64_t arena_window_budget(const struct arena *a)
{
    (void)a;
    return 0;
}

uint64_t arena_window_lent(const struct arena *a, const struct arena_group *g)
{
    (void)a;
    (void)g;
    return 0;
}

/* An arena on a loop of its own, which the suite begins and ends. */
#ifndef UCMD_TESTS_ARENA_RIG_H
#define UCMD_TESTS_ARENA_RIG_H

#include "daemon/arena/arena.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

#define MIB (1ull << 20)

static uv_loop_t loop;
static struct arena *arena;

static inline void begin(void)
{
    cr_assert_eq(uv_loop_init(&loop), 0);
}

static inline void ready_cb(void *ctx, uint32_t slab, void *base, uint64_t bytes)
{
    (void)ctx, (void)slab, (void)base, (void)bytes;
}

/* Opens an arena with slabs of 1 MiB. */
static inline void open_arena_as(struct arena_config c)
{
    c.slab = MIB;
    c.slab_ready_cb = c.slab_ready_cb ? c.slab_ready_cb : ready_cb;
    cr_assert_eq(arena_new(&loop, &c, &arena), 0);
}

static inline void close_arena(void)
{
    arena_free(arena);
    arena = NULL;
    uv_run(&loop, UV_RUN_DEFAULT);
}

static inline void end(void)
{
    close_arena();
    cr_expect_eq(uv_loop_close(&loop), 0);
}

/* Iterations of the event loop while the arena's threads work: its handle keeps no loop alive. */
static inline void await_ready(uint64_t bytes)
{
    uv_async_t awake;

    cr_assert_eq(uv_async_init(&loop, &awake, NULL), 0);
    for (int i = 0; i < 5000 && arena_bytes_ready(arena) < bytes; i++) {
        uv_run(&loop, UV_RUN_NOWAIT);
        uv_sleep(1);
    }
    cr_assert_eq(arena_bytes_ready(arena), bytes);
    uv_close((uv_handle_t *)&awake, NULL);
    uv_run(&loop, UV_RUN_NOWAIT);
}

#endif

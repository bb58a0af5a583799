#include "tests/gate/place.h"

#include "client/bench/figure.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BATCH 32u
#define IN_FLIGHT 4u

int gate_fail(const char *format, ...)
{
    va_list ap;

    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fputc('\n', stderr);
    return -1;
}

void gate_keys(uint8_t *keys, uint32_t n)
{
    static uint64_t seed;

    if (seed == 0)
        seed = clock_ns() ^ ((uint64_t)getpid() << 40);
    for (size_t i = 0; i < (size_t)n * RIG_KEY_BYTES; i += 8) {
        uint64_t x = seed += UINT64_C(0x9e3779b97f4a7c15);

        x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
        x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
        x ^= x >> 31;
        memcpy(keys + i, &x, 8);
    }
}

/* ---- places ---- */

int place_open(struct place *p, const struct daemon *d, const char *model, uint32_t n,
               uint32_t block, uint32_t fragment)
{
    struct rig_options o = {.socket = d->socket,
                            .name = "gate_worker",
                            .model = model,
                            .parts = 1,
                            .block_bytes = block,
                            .fragment = fragment,
                            .blocks = n,
                            .timeout_ms = GATE_TIMEOUT_MS};

    p->n = n;
    p->keys = malloc((size_t)n * RIG_KEY_BYTES);
    p->fresh = malloc((size_t)n * RIG_KEY_BYTES);
    if (p->keys == NULL || p->fresh == NULL)
        return gate_fail("memory ran out");
    gate_keys(p->keys, n);
    return rig_open(&p->rig, &o) < 0 ? gate_fail("%s", p->rig.error) : 0;
}

void place_close(struct place *p)
{
    rig_close(&p->rig);
    free(p->keys);
    free(p->fresh);
    *p = (struct place){0};
}

int place_store(struct place *p, bool nvme)
{
    uint64_t before = 0;

    if (nvme && rig_written(&p->rig, &before) < 0)
        return gate_fail("%s", p->rig.error);
    for (uint32_t i = 0; i < p->n; i++)
        rig_fill(&p->rig, i, p->keys + (size_t)i * RIG_KEY_BYTES);
    if (place_move(p, RIG_DUMP, p->keys, p->n) < 0)
        return -1;
    return nvme && rig_wait_written(&p->rig, before + p->n) < 0 ? gate_fail("%s", p->rig.error) : 0;
}

int place_move(struct place *p, enum rig_op op, const uint8_t *keys, uint32_t n)
{
    struct rig_move order = {.keys = keys,
                             .n = n,
                             .batch = n < BATCH ? n : BATCH,
                             .in_flight = n < BATCH ? 1 : IN_FLIGHT};
    struct rig_moved moved;

    if (rig_move(&p->rig, op, &order, NULL, &moved) < 0)
        return gate_fail("%s", p->rig.error);
    return moved.ok + moved.exists == n ? 0 : gate_fail("%u blocks were not moved", n - moved.ok);
}

/* The module's life. */
#include "daemon/base/text_file.h"
#include "daemon/request/internal.h"
#include "daemon/request/request.h"
#include "daemon/shared/shared.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

/* The daemon keeps half of the address space (128 TiB on most processors) for itself. */
#define MAPPED_BYTES_MAX (UINT64_C(1) << 46)
#define MAPPINGS_USUAL 65530u

/* How many mappings the kernel lets a process have. */
static uint64_t mappings_max(void)
{
    char text[32];

    if (text_file_read(AT_FDCWD, "/proc/sys/vm/max_map_count", 0, text, sizeof(text)) > 0)
        return strtoull(text, NULL, 10);
    return MAPPINGS_USUAL;
}

/* Page tables of host memory are charged to the daemon, 8 bytes for 4096. Each registration has its
 * own, and they stay until it ends, even where the client has taken the pages away. So they take a
 * 64th of the host's memory at most. */
static uint64_t touched_max(void)
{
    return 8 * (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void limits_init(struct requests *rq)
{
    struct limits *l = rq->modules.limits;
    uint64_t memory = rq->modules.config->max_frame_memory;

    limits_set(l, LIMIT_REQUESTS, CONFIG_MAX_REQUESTS);
    limits_set(l, LIMIT_MEMORY, memory);
    limits_set(l, LIMIT_KEPT, (64u << 20) + rq->dram_bytes / 16);
    limits_set(l, LIMIT_MAPPINGS, mappings_max() / 2);
    limits_set(l, LIMIT_MAPPED, MAPPED_BYTES_MAX);
    limits_set(l, LIMIT_TOUCHED, touched_max());
    limits_set(l, LIMIT_MOVES, CACHE_MOVES_MAX);
    limits_set(l, LIMIT_SHARED_LOOKUPS, SHARED_LOOKUPS_MAX);
}

static const struct feature *feature_of(const struct requests *rq, unsigned id)
{
    return rq->modules.features[id];
}

/* In the order of their numbers, up to the first that fails. */
static int features_open(struct requests *rq)
{
    int rc = 0;

    for (unsigned id = 0; id < FEATURES && rc == 0; id++) {
        const struct feature *f = feature_of(rq, id);

        rq->ext[id] = calloc(1, f->requests_bytes + 1);
        rc = !rq->ext[id] ? -ENOMEM : f->open_cb ? f->open_cb(rq) : 0;
    }
    return rc;
}

/* The last one first. */
static void features_close(struct requests *rq)
{
    for (unsigned id = FEATURES; id-- > 0;) {
        if (rq->ext[id] && feature_of(rq, id)->close_cb)
            feature_of(rq, id)->close_cb(rq);
        free(rq->ext[id]);
    }
}

static void features_drain(struct requests *rq)
{
    for (unsigned id = FEATURES; id-- > 0;)
        if (feature_of(rq, id)->drain_cb)
            feature_of(rq, id)->drain_cb(rq);
}

static void features_stop(struct requests *rq)
{
    for (unsigned id = FEATURES; id-- > 0;)
        if (feature_of(rq, id)->stop_cb)
            feature_of(rq, id)->stop_cb(rq);
}

void requests_reloaded(struct requests *rq)
{
    for (unsigned id = 0; id < FEATURES; id++)
        if (feature_of(rq, id)->reload_cb)
            feature_of(rq, id)->reload_cb(rq);
}

void requests_arena_ended(struct requests *rq)
{
    rq->dram_bytes = arena_bytes_configured(rq->modules.arena);
}

int requests_new(const struct request_modules *modules, struct requests **out)
{
    struct requests *rq = calloc(1, sizeof(*rq));
    int rc;

    if (!rq)
        return -ENOMEM;
    if (getrandom(rq->secret, sizeof(rq->secret), 0) != sizeof(rq->secret)) {
        free(rq);
        return -EIO;
    }
    rq->modules = *modules;
    rq->started_ms = uv_now(modules->loop);
    requests_arena_ended(rq);
    rq->index_bytes = index_bytes_max(modules->index);
    list_init(&rq->sessions);
    list_init(&rq->active);
    list_init(&rq->shared_queries);
    transfers_init(rq);
    limits_init(rq);
    rc = features_open(rq);
    if (rc != 0) {
        features_close(rq);
        free(rq);
        return rc;
    }
    proto_buf_init(&rq->out, UCM_MAX_FRAME_BYTES + PROTO_HEADER_BYTES);
    *out = rq;
    return 0;
}

void requests_free(struct requests *rq)
{
    assert(rq->n_sessions == 0 && rq->n_active == 0);
    features_close(rq);
    proto_buf_free(&rq->out);
    free(rq);
}

void requests_drain(struct requests *rq)
{
    rq->draining = true;
    features_drain(rq);
}

uint32_t requests_active(const struct requests *rq)
{
    uint32_t n = rq->n_active;

    for (unsigned id = 0; id < FEATURES; id++)
        n += feature_of(rq, id)->active_cb ? feature_of(rq, id)->active_cb(rq) : 0;
    return n;
}

uint32_t requests_sessions(const struct requests *rq)
{
    return rq->n_sessions;
}

void requests_stop_all(struct requests *rq)
{
    struct list *node, *next;

    features_stop(rq);
    for (node = rq->active.next; node != &rq->active; node = next) {
        struct request *r = LIST_ENTRY(node, struct request, link_all);

        next = node->next;
        r->stop_cb(r);
    }
}

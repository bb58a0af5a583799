#include "daemon/events/events.h"

#include "daemon/base/list.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <xxhash.h>

/* A ring takes this part of all memory, so that several tenants can have one each, and metadata of
 * their blocks. */
#define RING_FRACTION 16
#define RING_BYTES_MAX (16u << 20)
#define RING_BYTES_MIN (16u << 10)
/* Bytes of metadata memory for each bucket of the table. */
#define BUCKET_FRACTION 256
#define IDLE_MS 3600000u

struct metadata {
    struct list age; /* of its tenant */
    struct metadata *chain;
    const struct tenant_events *te;
    uint32_t ns, bytes;
    uint32_t tokens_n;
    uint16_t lora_n;
    uint8_t parent_n;
    uint8_t key[UCM_MAX_KEY_BYTES];
    uint8_t rest[]; /* parent, tokens, lora */
};

struct events {
    struct events_config config;
    struct list tenants; /* struct tenant_events */
    uint64_t seed;
    struct metadata **bucket;
    uint64_t buckets; /* a power of two */
    uint64_t ring_cap;
    uint64_t begin; /* numbers of the next ring come after it */
    bool woken;
};

static uint64_t power_below(uint64_t n)
{
    uint64_t p = 1;

    while (p <= n / 2)
        p *= 2;
    return p;
}

/* ---- metadata ---- */

static struct metadata **place_of(const struct events *es, const struct tenant_events *te,
                                  uint32_t ns, const uint8_t *key)
{
    uint64_t hash = XXH3_64bits_withSeed(key, UCM_MAX_KEY_BYTES, es->seed ^ ns);
    struct metadata **at = &es->bucket[hash & (es->buckets - 1)];

    while (*at &&
           ((*at)->ns != ns || (*at)->te != te || memcmp((*at)->key, key, UCM_MAX_KEY_BYTES) != 0))
        at = &(*at)->chain;
    return at;
}

static void metadata_free(struct events *es, struct metadata *d)
{
    struct metadata **at = place_of(es, d->te, d->ns, d->key);

    assert(*at == d);
    *at = d->chain;
    list_remove(&d->age);
    limit_give(d->te->owner, LIMIT_EVENTS, d->bytes);
    es->config.metrics->events_metadata--;
    free(d);
}

/* Room for one more of the tenant's: its oldest give way. One that has more than it may, since
 * others came, gives two for one until it is within the rule. */
static bool make_room(struct events *es, struct tenant_events *te, uint64_t bytes)
{
    uint64_t freed = 0;

    while (limit_take(te->owner, LIMIT_EVENTS, bytes, NULL) != 0) {
        struct metadata *oldest = LIST_ENTRY(te->metadata.next, struct metadata, age);

        if (freed >= 2 * bytes) {
            limit_add(te->owner, LIMIT_EVENTS, bytes);
            return true;
        }
        if (list_empty(&te->metadata))
            return false;
        freed += oldest->bytes;
        metadata_free(es, oldest);
        es->config.metrics->events_metadata_dropped++;
    }
    return true;
}

static void fill(struct metadata *d, const struct block_metadata *from)
{
    d->parent_n = (uint8_t)from->parent.n;
    d->tokens_n = from->tokens.n;
    d->lora_n = (uint16_t)from->lora.n;
    if (from->parent.n > 0)
        memcpy(d->rest, from->parent.p, from->parent.n);
    if (from->tokens.n > 0)
        memcpy(d->rest + d->parent_n, from->tokens.p, from->tokens.n);
    if (from->lora.n > 0)
        memcpy(d->rest + d->parent_n + d->tokens_n, from->lora.p, from->lora.n);
}

static void key_pad(uint8_t out[UCM_MAX_KEY_BYTES], const struct ns *ns, const uint8_t *key)
{
    memset(out, 0, UCM_MAX_KEY_BYTES);
    memcpy(out, key, ns->identity.key_bytes);
}

static void record(struct events *es, struct tenant_events *te, const struct event *e)
{
    te->ring[++te->last & (te->cap - 1)] = *e;
    if (te->waiting > 0 && !es->woken) {
        es->woken = true;
        es->config.wake_cb(es->config.ctx);
    }
}

bool events_metadata_set(struct events *es, struct tenant_events *te, const struct ns *ns,
                         const uint8_t *key, uint8_t is, const struct block_metadata *from)
{
    uint64_t bytes = sizeof(struct metadata) + from->parent.n + from->tokens.n + from->lora.n;
    struct event e = {.ns = ns->id, .was = is, .is = is};
    struct metadata **at, *d;
    bool before;

    key_pad(e.key, ns, key);
    at = place_of(es, te, ns->id, e.key);
    before = *at != NULL;
    if (before)
        metadata_free(es, *at);
    d = make_room(es, te, bytes) ? malloc(bytes) : NULL;
    if (!d) {
        es->config.metrics->events_metadata_dropped++;
        return false;
    }
    *d = (struct metadata){.te = te, .ns = ns->id, .bytes = (uint32_t)bytes};
    memcpy(d->key, e.key, sizeof(d->key));
    fill(d, from);
    at = place_of(es, te, ns->id, e.key); /* making room may have moved it */
    d->chain = *at;
    *at = d;
    list_push_back(&te->metadata, &d->age);
    es->config.metrics->events_metadata++;
    if (is != UCM_LOOKUP_MISS && !before)
        record(es, te, &e);
    return true;
}

bool events_metadata_get(const struct events *es, const struct tenant_events *te, uint32_t ns,
                         const uint8_t *key, struct block_metadata *out)
{
    const struct metadata *d = *place_of(es, te, ns, key);

    if (!d)
        return false;
    *out = (struct block_metadata){
        .parent = {d->rest, d->parent_n},
        .tokens = {d->rest + d->parent_n, d->tokens_n},
        .lora = {(const char *)d->rest + d->parent_n + d->tokens_n, d->lora_n},
    };
    return true;
}

/* ---- events ---- */

void events_changed(struct events *es, const struct ns *ns, const uint8_t *key, uint8_t was,
                    uint8_t is)
{
    struct tenant_events *te = ns->tenant->follower;
    struct event e = {.ns = ns->id, .was = was, .is = is};

    key_pad(e.key, ns, key);
    record(es, te, &e);
    if (is == UCM_LOOKUP_MISS && *place_of(es, te, ns->id, e.key))
        metadata_free(es, *place_of(es, te, ns->id, e.key));
}

void events_awake(struct events *es)
{
    es->woken = false;
}

/* ---- tenants ---- */

static void tenant_close(struct events *es, struct tenant_events *te)
{
    assert(te->waiting == 0);
    while (!list_empty(&te->metadata))
        metadata_free(es, LIST_ENTRY(te->metadata.next, struct metadata, age));
    limit_give(te->owner, LIMIT_EVENTS, te->cap * sizeof(*te->ring));
    limit_owner_unref(te->owner);
    te->tenant->follower = NULL;
    /* A tenant whose ring comes back has missed events: no number of before is one of now. */
    if (te->last >= es->begin)
        es->begin = te->last + 1;
    tenant_unref(es->config.tenants, te->tenant);
    list_remove(&te->link);
    free(te->ring);
    free(te);
}

static void idle_close(struct events *es, uint64_t now_ms)
{
    struct list *node, *next;

    for (node = es->tenants.next; node != &es->tenants; node = next) {
        struct tenant_events *te = LIST_ENTRY(node, struct tenant_events, link);

        next = node->next;
        if (te->waiting == 0 && now_ms - te->used_ms > IDLE_MS)
            tenant_close(es, te);
    }
}

/* Everything but the memory that the limit counts. */
static struct tenant_events *tenant_alloc(struct events *es, const char *name)
{
    struct tenant_events *te = calloc(1, sizeof(*te));

    if (!te)
        return NULL;
    te->cap = es->ring_cap;
    te->ring = calloc(te->cap, sizeof(*te->ring));
    te->owner = te->ring ? limits_tenant(es->config.limits, name) : NULL;
    te->tenant = te->owner ? tenant_ref(es->config.tenants, name) : NULL;
    if (te->tenant)
        return te;
    if (te->owner)
        limit_owner_unref(te->owner);
    free(te->ring);
    free(te);
    return NULL;
}

static int tenant_open(struct events *es, const char *name, uint64_t now_ms,
                       struct tenant_events **out, struct ucm_error *e)
{
    struct tenant_events *te = tenant_alloc(es, name);
    uint64_t bytes = es->ring_cap * sizeof(*te->ring);

    if (!te)
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for events");
    if (limit_ask(te->owner, LIMIT_EVENTS, bytes, NULL) != 0)
        idle_close(es, now_ms);
    if (limit_take(te->owner, LIMIT_EVENTS, bytes, e) != 0) {
        limit_owner_unref(te->owner);
        tenant_unref(es->config.tenants, te->tenant);
        free(te->ring);
        free(te);
        return -UCM_WIRE_BUSY;
    }
    list_init(&te->metadata);
    list_push_back(&es->tenants, &te->link);
    te->began = te->last = es->begin;
    te->tenant->follower = te;
    *out = te;
    return 0;
}

int events_open(struct events *es, const char *tenant, uint64_t now_ms, struct tenant_events **out,
                struct ucm_error *e)
{
    const struct tenant *t = tenant_find(es->config.tenants, tenant);
    int rc = 0;

    if (t && t->follower)
        *out = t->follower;
    else
        rc = tenant_open(es, tenant, now_ms, out, e);
    if (rc == 0)
        (*out)->used_ms = now_ms;
    return rc;
}

/* ---- life ---- */

int events_new(const struct events_config *config, struct events **out)
{
    struct events *es = calloc(1, sizeof(*es));
    uint64_t ring_bytes = config->memory / RING_FRACTION;

    if (!es)
        return -ENOMEM;
    es->config = *config;
    list_init(&es->tenants);
    if (ring_bytes > RING_BYTES_MAX)
        ring_bytes = RING_BYTES_MAX;
    if (ring_bytes < RING_BYTES_MIN)
        ring_bytes = RING_BYTES_MIN;
    es->ring_cap = power_below(ring_bytes / sizeof(struct event));
    es->buckets = power_below(config->memory / BUCKET_FRACTION);
    es->bucket = calloc(es->buckets, sizeof(struct metadata *));
    if (!es->bucket || getrandom(&es->seed, sizeof(es->seed), 0) != sizeof(es->seed)) {
        free(es->bucket);
        free(es);
        return -ENOMEM;
    }
    limits_set(config->limits, LIMIT_EVENTS, config->memory);
    *out = es;
    return 0;
}

void events_free(struct events *es)
{
    if (!es)
        return;
    while (!list_empty(&es->tenants))
        tenant_close(es, LIST_ENTRY(es->tenants.next, struct tenant_events, link));
    free(es->bucket);
    free(es);
}

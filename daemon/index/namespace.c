/* The namespaces of the index: found by identity, numbered, bounded in all and a tenant. */
#include "daemon/index/index.h"

#include "daemon/index/internal.h"
#include "proto/errors.h"

#include <errno.h>
#include <stdlib.h>

#define TABLE_BYTES 32u /* of a block, at most, in a table that is not nearly empty */

/* ---- one allocation a namespace ---- */

struct ns_memory {
    struct ns ns;
    struct ns_table table;
    size_t size_bytes;
    max_align_t rest[]; /* the forms, then layers, the canonical identity, and the strings */
};

static const char *copy_text(uint8_t **at, const char *text)
{
    size_t n = strlen(text) + 1;
    char *copy = memcpy(*at, text, n);

    *at += n;
    return copy;
}

static struct ns *ns_new(const struct ns_identity *from, const uint8_t *canonical, uint32_t n)
{
    /* No string is longer here than in the canonical form, which has 4 bytes for each length. */
    size_t layers = from->parts * sizeof(uint32_t), forms = ns_forms_bytes(from),
           size_bytes = sizeof(struct ns_memory) + forms + layers + 2 * (size_t)n;
    struct ns_memory *m = calloc(1, size_bytes);
    struct ns_identity *to;
    uint8_t *at;

    if (!m)
        return NULL;
    m->ns.part_forms = ns_forms_fill(m->rest, from);
    at = (uint8_t *)m->rest + forms;
    m->table.key_bytes = from->key_bytes;
    m->size_bytes = size_bytes;
    m->ns.table = &m->table;
    m->ns.admits = &m->ns.admission;
    to = &m->ns.identity;
    *to = *from;
    to->layers = memcpy(at, from->layers, layers);
    at += layers;
    m->ns.canonical = memcpy(at, canonical, n);
    m->ns.canonical_bytes = n;
    for (uint32_t part = 0; part < from->parts; part++)
        m->ns.block_bytes += ns_part_bytes(&m->ns, part);
    m->ns.index_bytes = record_bytes(from->parts) + TABLE_BYTES;
    to->salt = at + n - from->salt_bytes; /* ends it */
    at += n;
    to->tenant = copy_text(&at, from->tenant);
    to->model = copy_text(&at, from->model);
    to->revision = copy_text(&at, from->revision);
    to->dtype = copy_text(&at, from->dtype);
    to->layout = copy_text(&at, from->layout);
    return &m->ns;
}

/* ns is the first member of its struct ns_memory. */
static size_t ns_size_bytes(const struct ns *ns)
{
    return ((const struct ns_memory *)ns)->size_bytes;
}

static void owner_drop(struct ns *ns)
{
    if (!ns->owner)
        return;
    limit_give(ns->owner, LIMIT_NAMESPACES, 1);
    limit_owner_unref(ns->owner);
}

static void ns_free(struct ns *ns)
{
    ns_table_close(ns->table);
    free(ns);
}

/* ---- the set ---- */

int ns_set_init(struct index *ix, uint32_t max)
{
    uint32_t places = 1;

    max = max ? max : 1;
    while (places < max)
        places *= 2;
    ix->ns = (struct ns_set){.max = max};
    ix->head.ns_mask = places - 1;
    ix->head.ns = calloc(places, sizeof(struct ns *));
    ix->ns.chain = calloc(places, sizeof(struct ns *));
    if (ix->head.ns && ix->ns.chain)
        return 0;
    ns_set_close(ix);
    return -ENOMEM;
}

void ns_set_close(struct index *ix)
{
    struct ns *ns;

    for (uint32_t i = 0; ix->head.ns && i <= ix->head.ns_mask; i++)
        if ((ns = ix->head.ns[i]) != NULL) {
            owner_drop(ns);
            ns_free(ns);
        }
    free(ix->head.ns);
    free(ix->ns.chain);
}

uint64_t ns_set_bytes(const struct index *ix)
{
    uint64_t sum = ix->ns.bytes + (ix->head.ns_mask + UINT64_C(1)) * 2 * sizeof(struct ns *);

    for (uint32_t i = 0; i <= ix->head.ns_mask; i++)
        if (ix->head.ns[i])
            sum += ix->head.ns[i]->table->size_bytes;
    return sum;
}

static struct ns **chain_of(const struct index *ix, const uint8_t *fingerprint)
{
    uint32_t hash;

    memcpy(&hash, fingerprint, sizeof(hash));
    return &ix->ns.chain[hash & ix->head.ns_mask];
}

/* There is a free place. Ids grow, until they run out, so that one is not given again soon. */
static void set_add(struct index *ix, struct ns *ns)
{
    struct ns **chain = chain_of(ix, ns->fingerprint);
    struct ns_set *set = &ix->ns;

    do
        ns->id = ++set->last_id;
    while (ns->id == 0 || ix->head.ns[index_ns_place(ix, ns)]);
    ns->used = ++set->clock;
    ns->chain = *chain;
    *chain = ns;
    ix->head.ns[index_ns_place(ix, ns)] = ns;
    set->count++;
    set->bytes += ns_size_bytes(ns);
}

static void set_remove(struct index *ix, struct ns *ns)
{
    struct ns **link = chain_of(ix, ns->fingerprint);

    while (*link != ns)
        link = &(*link)->chain;
    *link = ns->chain;
    ix->head.ns[index_ns_place(ix, ns)] = NULL;
    ix->ns.count--;
    ix->ns.bytes -= ns_size_bytes(ns);
    if (ns->base)
        ns->base->refs--;
    ns->tenant->namespaces--;
    tenant_unref(&ix->tenants, ns->tenant);
    owner_drop(ns);
    ns_free(ns);
}

/* The least recently used namespace without blocks and references; of this tenant, or (NULL) of
 * any; of these owners, or (NULL) of any. */
static struct ns *set_idle(const struct index *ix, const struct tenant *tenant,
                           const struct limit_owner *owners)
{
    struct ns *oldest = NULL;

    for (uint32_t i = 0; i <= ix->head.ns_mask; i++) {
        struct ns *ns = ix->head.ns[i];

        if (ns && ns->blocks == 0 && ns->refs == 0 && (!oldest || ns->used < oldest->used) &&
            (!tenant || ns->tenant == tenant) && (!owners || limit_within(ns->owner, owners)))
            oldest = ns;
    }
    return oldest;
}

/* Removes an idle namespace when there are as many as there may be. 0, or -code with *e. */
static int set_make_space(struct index *ix, const struct tenant *tenant, bool bound_tenant,
                          struct ucm_error *e)
{
    bool tenant_full = bound_tenant && tenant->namespaces >= tenant->settings.namespaces;
    struct ns *idle;

    if (!tenant_full && ix->ns.count < ix->ns.max)
        return 0;
    idle = set_idle(ix, tenant_full ? tenant : NULL, NULL);
    if (idle) {
        set_remove(ix, idle);
        return 0;
    }
    if (tenant_full)
        return ucm_error_set(e, UCM_WIRE_BUSY,
                             "tenant \"%.64s\" has %u namespaces, as many as "
                             "limits.namespaces_per_tenant or its own settings allow, and all of "
                             "them are open or hold blocks: purge one",
                             tenant->name, tenant->namespaces);
    return ucm_error_set(e, UCM_WIRE_BUSY,
                         "there are %u namespaces, as many as limits.namespaces allows, and all "
                         "of them are open or hold blocks",
                         ix->ns.max);
}

/* Removes idle namespaces of the owner, its tenant or all, until nobody refuses it one more. 0, or
 * -code with *e. */
static int owner_make_space(struct index *ix, const struct limit_owner *owner, struct ucm_error *e)
{
    const struct limit_owner *refuser;
    struct ns *idle;

    while (owner && (refuser = limit_refuser(owner, LIMIT_NAMESPACES, 1))) {
        idle = set_idle(ix, NULL, refuser);
        if (!idle)
            return limit_ask(owner, LIMIT_NAMESPACES, 1, e);
        set_remove(ix, idle);
    }
    return 0;
}

/* ---- for others ---- */

static int identity_check(const struct ns_identity *id, struct ucm_error *e)
{
    if (id->key_bytes < UCM_MIN_KEY_BYTES || id->key_bytes > UCM_MAX_KEY_BYTES)
        return ucm_error_set(e, UCM_WIRE_INVALID, "a key has %u bytes; %d to %d are possible",
                             id->key_bytes, UCM_MIN_KEY_BYTES, UCM_MAX_KEY_BYTES);
    if (id->parts < 1 || id->parts > UCM_MAX_PARTS)
        return ucm_error_set(e, UCM_WIRE_INVALID, "a block has %u parts; 1 to %d are possible",
                             id->parts, UCM_MAX_PARTS);
    return 0;
}

static int ns_add(struct index *ix, const struct ns_identity *identity, const uint8_t *canonical,
                  size_t n, const uint8_t *fingerprint, struct limit_owner *owner, bool restored,
                  struct ns **out, struct ucm_error *e)
{
    struct tenant *tenant = tenant_ref(&ix->tenants, identity->tenant);
    struct ns *ns = NULL;
    int rc = 0;

    if (!tenant)
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a tenant");
    if (!restored)
        rc = owner_make_space(ix, owner, e);
    if (rc == 0)
        rc = set_make_space(ix, tenant, !restored, e);
    if (rc == 0)
        ns = ns_new(identity, canonical, (uint32_t)n);
    if (!ns) {
        tenant_unref(&ix->tenants, tenant);
        return rc ? rc : ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a namespace");
    }
    memcpy(ns->fingerprint, fingerprint, sizeof(ns->fingerprint));
    ns->tenant = tenant;
    tenant->namespaces++;
    if (owner) {
        ns->owner = limit_owner_ref(owner);
        limit_add(owner, LIMIT_NAMESPACES, 1);
    }
    if (!tenant->metrics) {
        tenant->metrics = tenants_find(&ix->tenants.metrics, tenant->name);
        tenant->times = tenants_times(&ix->tenants.metrics, tenant->metrics);
    }
    set_add(ix, ns);
    *out = ns;
    return 0;
}

void index_limits(struct index *ix, struct limits *l)
{
    ix->limits = l;
    limits_set(l, LIMIT_NAMESPACES, ix->ns.max);
}

int index_ns_open(struct index *ix, const struct ns_identity *identity, struct limit_owner *owner,
                  struct ns **out, struct ucm_error *e)
{
    uint8_t canonical[NS_CANONICAL_MAX], fingerprint[UCM_FINGERPRINT_BYTES];
    struct ns *ns;
    int rc = identity_check(identity, e), n;

    if (rc != 0)
        return rc;
    n = ns_identity_encode(identity, canonical, sizeof(canonical));
    if (n < 0)
        return ucm_error_set(e, UCM_WIRE_INVALID, "the namespace's identity has over %u bytes",
                             NS_CANONICAL_MAX);
    if (ns_fingerprint(canonical, (size_t)n, fingerprint) != 0)
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a fingerprint");
    ns = index_ns_find(ix, fingerprint);
    if (!ns)
        return ns_add(ix, identity, canonical, (size_t)n, fingerprint, owner, false, out, e);
    *out = ns;
    return 0;
}

int index_ns_restore(struct index *ix, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                     const uint8_t *canonical, size_t n, struct ns **out, struct ucm_error *e)
{
    uint8_t own[UCM_FINGERPRINT_BYTES];
    struct ns_identity_memory memory;
    struct ns_identity identity;
    struct ns *ns = index_ns_find(ix, fingerprint);
    struct limit_owner *owner;
    int rc;

    /* What a disk says of it decided whether the part may be in the clear. */
    if (ns && (n != ns->canonical_bytes || memcmp(canonical, ns->canonical, n) != 0))
        return ucm_error_set(e, UCM_WIRE_INVALID, "its identity is another one's");
    if (ns) {
        *out = ns;
        return 0;
    }
    if (n > NS_CANONICAL_MAX || ns_identity_decode(canonical, n, &memory, &identity) != 0)
        return ucm_error_set(e, UCM_WIRE_INVALID, "its bytes are no identity");
    if (ns_fingerprint(canonical, n, own) != 0)
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for a fingerprint");
    if (memcmp(own, fingerprint, sizeof(own)) != 0)
        return ucm_error_set(e, UCM_WIRE_INVALID, "its identity has another fingerprint");
    owner = ix->limits ? limits_tenant(ix->limits, identity.tenant) : NULL;
    rc = ns_add(ix, &identity, canonical, n, fingerprint, owner, true, out, e);
    if (owner)
        limit_owner_unref(owner);
    return rc;
}

struct tenant_set *index_tenants(struct index *ix)
{
    return &ix->tenants;
}

void index_ns_ref(struct index *ix, struct ns *ns)
{
    ns->refs++;
    ns->used = ++ix->ns.clock;
}

void index_ns_unref(struct index *ix, struct ns *ns)
{
    assert(ns->refs > 0);
    ns->refs--;
    ns->used = ++ix->ns.clock;
}

void index_ns_derive(struct index *ix, struct ns *ns, struct ns *base)
{
    assert(!ns->base);
    ns->base = base;
    ns->admits = base->admits;
    index_ns_ref(ix, base);
}

struct ns *index_ns_find(struct index *ix, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES])
{
    struct ns *ns = *chain_of(ix, fingerprint);

    while (ns && memcmp(ns->fingerprint, fingerprint, UCM_FINGERPRINT_BYTES) != 0)
        ns = ns->chain;
    return ns;
}

struct ns *index_ns_at(struct index *ix, uint32_t place)
{
    return place <= ix->head.ns_mask ? ix->head.ns[place] : NULL;
}

uint32_t index_ns_places(const struct index *ix)
{
    return ix->head.ns_mask + 1;
}

/* Tenants: one object each, found by name, with what it is given (config/tenants.h) and what is
 * counted for it. Namespaces and connections refer to their tenant; it lives while something refers
 * to it, or it has settings of its own.
 *
 * So their number needs no bound but those of namespaces, connections and settings.
 * Thread: the event loop only. */
#ifndef UCMD_TENANT_TENANT_H
#define UCMD_TENANT_TENANT_H

#include "daemon/base/fair.h"
#include "daemon/base/limit.h"
#include "daemon/base/table.h"
#include "daemon/config/tenants.h"
#include "daemon/observe/tenants.h"

/* The position of a scan of its namespaces: one of them, and index_scan's cursor in it. */
struct tenant_cursor {
    uint32_t place;
    uint64_t cursor;
};

struct tenant {
    uint32_t id; /* from 1; it is given again when the tenant is gone */
    uint32_t refs;
    uint32_t namespaces;
    uint64_t blocks, index_bytes;    /* the index's: how many, and what they count as there */
    struct tenant_settings settings; /* in force; every field holds */
    /* Its own settings: configured, and set while the daemon ran (these win). */
    struct tenant_settings configured, kept;
    /* What its namespaces count; NULL before the first one. They live as long as the daemon. */
    struct metrics_tenant *metrics;
    struct tenant_times *times;
    /* The cache's own: cache/quota.c. */
    /* Bytes of its blocks' slots, also while they are being filled, but not in shared mappings. */
    uint64_t dram_bytes;
    uint64_t nvme_bytes, shared_bytes; /* of its parts there */
    uint64_t nvme_writing_bytes;       /* of its parts on their way there */
    struct tenant_cursor below;        /* where the search for a block of it on NVMe goes on */
    struct tenant_cursor give;         /* the same in a full index */
    uint64_t block_max_bytes;          /* slots of its largest block, so far */
    struct policy_group *group;        /* from malloc; NULL: none */
    /* State of the feature that follows its blocks; NULL: none does. */
    void *follower;
    struct tenant *chain;
    char name[];
};

struct tenant_set {
    struct table all;
    struct tenant **chain;           /* hash table by name */
    struct tenant_settings defaults; /* of one without settings of its own: from these three */
    struct tenant_settings initial, configured, kept;
    uint32_t n_kept; /* tenants with such settings, all of them as one */
    struct tenants metrics;
};

/* For queues in which several tenants' work waits. */
static inline struct fair_who tenant_who(const struct tenant *t)
{
    return (struct fair_who){.tenant = t->id, .weight = (uint32_t)t->settings.weight};
}

/* 0 or -ENOMEM. */
int tenant_set_init(struct tenant_set *set);
void tenant_set_close(struct tenant_set *set);
/* Takes over what a configuration gives, which config_check has passed. 0, or -ENOMEM: some tenants
 * have settings of before. */
int tenant_set_configure(struct tenant_set *set, const struct config *c);

/* What tenant_give_check has passed (daemon/admin/kept.h); NULL: takes back all that was given. 0
 * or -ENOMEM. */
int tenant_give(struct tenant_set *set, const char *name, const struct tenant_settings *s);

/* Sequences hold summaries in this fraction of what a tenant gets of DRAM at most, and of the
 * arena. */
#define TENANT_HELD_FRACTION 4u
/* For limits_settings; ctx: the set. */
uint64_t tenant_limit(void *ctx, const char *tenant, enum limit what);
/* For shared_quotas: what the tenant has by its settings, or would; ctx: the set. False: nobody has
 * any. */
bool tenant_shared_quota(void *ctx, const char *tenant, uint64_t *guaranteed, uint64_t *most);

/* NULL: there is none. */
struct tenant *tenant_find(const struct tenant_set *set, const char *name);
/* Finds the tenant, or makes it, and refers to it. NULL: no memory. */
struct tenant *tenant_ref(struct tenant_set *set, const char *name);
void tenant_unref(struct tenant_set *set, struct tenant *t);

/* for (t = tenant_next(set, NULL); t; t = tenant_next(set, t)): all of them. */
struct tenant *tenant_from(const struct tenant_set *set,
                           uint64_t id); /* the first with this id or a higher one */
struct tenant *tenant_next(const struct tenant_set *set, const struct tenant *t);

#endif

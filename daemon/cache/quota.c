/* Tenants' minimum and maximum of DRAM, and their minimum of NVMe.
 *
 * A tenant with a minimum or a maximum of DRAM has its own group in the policy. Its bytes are
 * counted when it gets a slot, or gives one back. Up to its minimum its group is closed: searches
 * for space skip it. Above, its group is open: the coldest blocks of the open groups and the common
 * one are evicted. A tenant at its maximum evicts its own blocks. */
#include "daemon/cache/internal.h"

#include "daemon/base/log.h"

#include <stdlib.h>

/* Blocks that come over to their groups in one iteration of the event loop, when settings have
 * changed. */
#define REGROUP_TURN 256u

/* Whether it has more than its guarantee even without its largest block. A block counts at most as
 * the guarantee: a tenant with huge blocks keeps twice its guarantee, not all of DRAM. */
static bool may_lose(const struct tenant *t)
{
    uint64_t guaranteed = t->settings.dram_min,
             block = t->block_max_bytes < guaranteed ? t->block_max_bytes : guaranteed;

    return guaranteed == 0 || t->dram_bytes >= guaranteed + block;
}

void cache_quota_update(struct cache *c, struct tenant *t)
{
    bool open;

    c->quotas.guaranteed = c->quotas.guaranteed || t->settings.dram_min > 0;
    if (!t->group && (t->settings.dram_min > 0 || t->settings.dram_max > 0)) {
        t->group = calloc(1, sizeof(*t->group));
        if (!t->group) {
            log_warn("cache", "quota-skipped", "tenant=%s reason=\"no memory\"", t->name);
            return;
        }
        t->group->tenant = t;
        list_init(&t->group->open);
        policy_group_made(c->config.policy);
    }
    if (!t->group)
        return;
    open = t->dram_bytes > 0 && may_lose(t);
    if (open == !list_empty(&t->group->open))
        return;
    if (open)
        list_push_back(&c->quotas.open, &t->group->open);
    else
        list_remove(&t->group->open);
}

/* ---- whose blocks may leave ---- */

bool cache_quota_keeps(const struct tenant *t)
{
    return !may_lose(t);
}

bool cache_quota_keeps_below(const struct tenant *t)
{
    return t->settings.nvme_min > 0 && t->nvme_bytes < t->settings.nvme_min + t->block_max_bytes;
}

uint32_t cache_quota_groups(struct cache *c, struct policy_group *out[QUOTA_GROUPS])
{
    struct list *node = c->quotas.open.next;
    uint32_t n = 1;

    out[0] = policy_common(c->config.policy);
    for (; node != &c->quotas.open && n < QUOTA_GROUPS; node = node->next)
        out[n++] = LIST_ENTRY(node, struct policy_group, open);
    /* If there are more, the others have their turn next. */
    for (uint32_t i = 1; node != &c->quotas.open && i < n; i++) {
        list_remove(&out[i]->open);
        list_push_back(&c->quotas.open, &out[i]->open);
    }
    if (n > 1) {
        int coldest = policy_coldest_group(c->config.policy, out, n);
        uint32_t best = coldest > 0 ? (uint32_t)coldest : 0;
        struct policy_group *first = out[best];

        out[best] = out[0];
        out[0] = first;
    }
    return n;
}

/* ---- settings that change ---- */

void cache_tenants_changed(struct cache *c)
{
    struct tenant_set *tenants = index_tenants(c->config.index);

    for (struct tenant *t = tenant_next(tenants, NULL); t; t = tenant_next(tenants, t)) {
        cache_quota_update(c, t);
        /* For a tenant with only a guarantee, searches move the blocks that they meet, in order. */
        if (t->group && t->settings.dram_max > 0 && !t->group->whole) {
            t->group->whole = true;
            c->quotas.place = 0;
            c->quotas.cursor = 0;
            cache_wake(c, CHORE_REGROUP);
        }
    }
    cache_wake(c, CHORE_TRIM);
    cache_released(c);
}

/* Where the walk goes on: a namespace of a tenant with a group. NULL: it is over. */
static struct ns *regroup_ns(struct cache *c)
{
    for (; c->quotas.place < index_ns_places(c->config.index); c->quotas.place++) {
        struct ns *ns = index_ns_at(c->config.index, c->quotas.place);

        if (ns && ns->tenant->group && ns->tenant->settings.dram_max > 0 && ns->dram_bytes > 0)
            return ns;
        c->quotas.cursor = 0;
    }
    return NULL;
}

bool cache_quota_regroup_run(void *ctx)
{
    struct cache *c = ctx;
    block_ref refs[REGROUP_TURN];
    struct ns *ns = regroup_ns(c);
    uint32_t n = 0;

    if (!ns)
        return false;
    c->quotas.cursor = index_scan(c->config.index, ns, c->quotas.cursor, REGROUP_TURN, refs, &n);
    c->quotas.place += c->quotas.cursor == 0;
    for (uint32_t i = 0; i < n; i++)
        policy_come_over(c->config.policy, refs[i]);
    return true;
}

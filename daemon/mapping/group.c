/* Groups: tenants that mapping slabs are granted to, and the tables that tell their workers whether
 * a slot still has the announced part. */
#include "daemon/base/memfd.h"
#include "daemon/mapping/grant_internal.h"
#include "proto/memory/mapping.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* After a loan failed, the group's next one waits. */
#define LOAN_RETRY_MIN_MS 100u
#define LOAN_RETRY_MAX_MS 10000u

/* ---- life ---- */

static void table_close(struct arena *a, struct arena_group *g)
{
    if (g->header)
        munmap(g->header,
               ucm_mapping_table_bytes(a->granted, (uint32_t)(a->config.slab / ARENA_ALIGN)));
    if (g->read_fd >= 0)
        close(g->read_fd);
    if (g->fd >= 0)
        close(g->fd);
}

void grant_group_free(struct arena *a, struct arena_group *g)
{
    struct list *node;

    while ((node = list_pop_front(&g->classes)) != NULL)
        free(LIST_ENTRY(node, struct mapping_class, link));
    list_remove(&g->link);
    loan_cancel(&g->loan);
    table_close(a, g);
    free(g->tenant);
    free(g);
}

static int table_open(struct arena *a, struct arena_group *g)
{
    uint32_t slots = (uint32_t)(a->config.slab / ARENA_ALIGN);
    uint64_t bytes = ucm_mapping_table_bytes(a->granted, slots);
    void *p;
    int rc = memfd_new("ucmd-mapping-table", bytes, &g->fd);

    if (rc < 0)
        return rc;
    p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, g->fd, 0);
    if (p == MAP_FAILED)
        return -errno;
    g->header = p;
    g->seq = (_Atomic uint64_t *)((char *)p + UCM_MAPPING_HEADER_BYTES);
    (void)madvise(p, bytes, MADV_DONTDUMP);
    memcpy(g->header->magic, UCM_MAPPING_MAGIC, sizeof(g->header->magic));
    g->header->version = UCM_MAPPING_VERSION;
    g->header->slot_align = UCM_MAPPING_ALIGN;
    g->header->slab_bytes = a->config.slab;
    g->header->slabs = a->granted;
    g->header->slots_per_slab = slots;
    g->read_fd = memfd_share(g->fd);
    return g->read_fd < 0 ? g->read_fd : 0;
}

static int group_new(struct arena *a, const char *tenant, struct arena_group **out)
{
    struct arena_group *g = calloc(1, sizeof(*g));
    int rc = -ENOMEM;

    if (!g)
        return rc;
    g->fd = g->read_fd = -1;
    list_init(&g->link);
    list_init(&g->mappings);
    list_init(&g->classes);
    list_init(&g->empty);
    backoff_init(&g->failed, LOAN_RETRY_MIN_MS, LOAN_RETRY_MAX_MS, 0);
    g->tenant = strdup(tenant);
    if (g->tenant)
        rc = table_open(a, g);
    if (rc < 0) {
        grant_group_free(a, g);
        return rc;
    }
    list_push_back(&a->granter->groups, &g->link);
    *out = g;
    return 0;
}

static struct arena_group *group_find(const struct arena *a, const char *tenant)
{
    const struct list *groups = &a->granter->groups;

    for (struct list *node = groups->next; node != groups; node = node->next) {
        struct arena_group *g = LIST_ENTRY(node, struct arena_group, link);

        if (strcmp(g->tenant, tenant) == 0)
            return g;
    }
    return NULL;
}

int grant_group_open(struct arena *a, const char *tenant, struct arena_group **out)
{
    struct arena_group *g;
    int rc = 0;

    if (a->granted == 0)
        return -EOPNOTSUPP;
    g = group_find(a, tenant);
    if (!g)
        rc = group_new(a, tenant, &g);
    if (rc < 0)
        return rc;
    loan_cancel(&g->loan);
    g->opens++;
    *out = g;
    return 0;
}

void grant_group_ref(struct arena_group *g)
{
    g->opens++;
}

static void ungranted_cb(struct loan *l)
{
    grant_group_free(l->ctx, LIST_ENTRY(l, struct arena_group, loan));
}

static const struct loan_calls loan_calls = {ungranted_cb, NULL};

void grant_group_settle(struct arena *a, struct arena_group *g)
{
    if (g->opens == 0 && g->granted == 0 && g->kept == 0)
        loan_end(&g->loan, a->config.deadlines, g->read_fd, &loan_calls, a);
}

const char *grant_group_tenant(const struct arena_group *g)
{
    return g->tenant;
}

int grant_group_table(const struct arena_group *g, struct ucm_mapping_header *out)
{
    memcpy(out->magic, g->header->magic, sizeof(out->magic));
    out->version = g->header->version;
    out->slot_align = g->header->slot_align;
    out->slab_bytes = g->header->slab_bytes;
    out->slabs = g->header->slabs;
    out->slots_per_slab = g->header->slots_per_slab;
    atomic_init(&out->epoch, atomic_load_explicit(&g->header->epoch, memory_order_relaxed));
    return g->read_fd;
}

/* ---- looking for slots to free ---- */

static struct mapping *mapping_behind(struct arena_group *g, struct mapping *w)
{
    struct list *next = w ? w->link.next : g->mappings.next;

    if (next == &g->mappings)
        next = next->next;
    return next == &g->mappings ? NULL : LIST_ENTRY(next, struct mapping, link);
}

slot_ref grant_group_next(struct arena *a, struct arena_group *g, uint64_t bytes, uint64_t *owner)
{
    uint64_t slot_bytes = arena_padded(bytes);

    /* Once more than there are, as the hand may stand in the middle of its slab. */
    for (uint32_t looks = 0; looks <= g->granted; looks++) {
        struct mapping *w = g->hand ? g->hand : mapping_behind(g, NULL);
        struct slab *e;

        if (!w)
            return 0;
        e = grant_slab(a, w);
        g->hand = w;
        while (e->slot_bytes == slot_bytes && g->hand_slot < e->slots) {
            uint32_t slot = g->hand_slot++;

            if (!arena_slot_used(e, slot))
                continue;
            *owner = e->owner[slot];
            return 1 + ((uint32_t)(e - a->slab) << a->slot_bits | slot);
        }
        g->hand = mapping_behind(g, w);
        g->hand_slot = 0;
    }
    return 0;
}

struct grant_round *grant_group_round(const struct arena *a, struct arena_group *g, uint64_t bytes)
{
    uint64_t slot_bytes = arena_padded(bytes);

    for (struct list *node = g->classes.next; node != &g->classes; node = node->next) {
        struct mapping_class *k = LIST_ENTRY(node, struct mapping_class, link);

        if (k->slot_bytes != slot_bytes)
            continue;
        k->round.slots = k->slabs * (a->config.slab / slot_bytes);
        return &k->round;
    }
    return NULL;
}

struct arena_group *grant_group_most(struct arena *a, const struct arena_group *but,
                                     const struct arena_group *behind)
{
    struct list *groups = &a->granter->groups;
    struct arena_group *most = NULL;
    bool passed = false;

    for (struct list *node = groups->next; node != groups; node = node->next) {
        struct arena_group *g = LIST_ENTRY(node, struct arena_group, link);

        if (g != but && g->granted > 0 && (!most || g->granted > most->granted) &&
            (!behind || g->granted < behind->granted || (passed && g->granted == behind->granted)))
            most = g;
        passed = passed || g == behind;
    }
    return most;
}

uint32_t grant_group_slab(struct arena *a, const struct arena_group *g, uint32_t i)
{
    const struct list *node = g->mappings.next;
    const struct slab *e;

    if (g->granted == 0)
        return UINT32_MAX;
    for (i %= g->granted; i > 0; i--)
        node = node->next;
    e = grant_slab(a, LIST_ENTRY(node, struct mapping, link));
    return e->slots > 0 && !e->closed ? (uint32_t)(e - a->slab) : UINT32_MAX;
}

uint32_t grant_groups(const struct arena *a)
{
    uint32_t n = 0;

    for (const struct list *node = a->granter->groups.next; node != &a->granter->groups;
         node = node->next)
        n++;
    return n;
}

/* ---- sequence numbers ---- */

/* The entry of a slot in a mapping; NULL: it lies elsewhere. */
static _Atomic uint64_t *entry_of(struct arena *a, slot_ref ref, struct grant_place *place)
{
    const struct arena_group *g = arena_slot_group(a, ref);
    uint32_t slab, slot;

    if (!g)
        return NULL;
    arena_slot_position(a, ref, &slab, &slot);
    *place = (struct grant_place){.mapping = slab - a->slabs, .slot = slot};
    return &g->seq[ucm_mapping_entry((uint32_t)(a->config.slab / ARENA_ALIGN), place->mapping,
                                     slot)];
}

void arena_slot_publish(struct arena *a, slot_ref slot)
{
    struct grant_place place;
    _Atomic uint64_t *entry = entry_of(a, slot, &place);

    if (entry)
        ucm_mapping_publish(entry, a->granter->seq += 2);
}

void arena_slot_retract(struct arena *a, slot_ref slot)
{
    struct grant_place place;
    _Atomic uint64_t *entry = entry_of(a, slot, &place);

    if (entry)
        ucm_mapping_retract(entry);
}

bool grant_place(struct arena *a, slot_ref slot, struct grant_place *out)
{
    _Atomic uint64_t *entry = entry_of(a, slot, out);

    out->seq = entry ? atomic_load_explicit(entry, memory_order_relaxed) : 0;
    return out->seq != 0 && !(out->seq & 1);
}

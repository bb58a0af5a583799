#include "daemon/tenant/tenant.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* Some thousand tenants are many: then a chain has a few. */
#define CHAINS 4096u
/* More than namespaces, connections and settings can refer to. */
#define NUMBERS_MAX (1u << 18)

static void tenant_free(struct tenant *t)
{
    free(t->group); /* it is empty: no namespace refers to the tenant */
    free(t);
}

int tenant_set_init(struct tenant_set *set)
{
    *set = (struct tenant_set){.chain = calloc(CHAINS, sizeof(set->chain[0])),
                               .defaults = tenant_settings_initial(NULL)};
    table_init(&set->all, NUMBERS_MAX);
    return set->chain ? 0 : -ENOMEM;
}

void tenant_set_close(struct tenant_set *set)
{
    for (uint32_t i = table_next(&set->all, 0); i; i = table_next(&set->all, i))
        tenant_free(table_remove(&set->all, i));
    table_close(&set->all);
    free(set->chain);
}

static struct tenant **chain_of(const struct tenant_set *set, const char *name)
{
    return &set->chain[XXH3_64bits(name, strlen(name)) % CHAINS];
}

struct tenant *tenant_find(const struct tenant_set *set, const char *name)
{
    struct tenant *t = *chain_of(set, name);

    while (t && strcmp(t->name, name) != 0)
        t = t->chain;
    return t;
}

static void settings_apply(const struct tenant_set *set, struct tenant *t)
{
    t->settings = set->defaults;
    tenant_settings_over(&t->settings, &t->configured);
    tenant_settings_over(&t->settings, &t->kept);
}

/* What a tenant of that name has, or would. */
static const struct tenant_settings *settings_of(const struct tenant_set *set, const char *name)
{
    const struct tenant *t = tenant_find(set, name);

    return t ? &t->settings : &set->defaults;
}

static struct tenant *tenant_make(struct tenant_set *set, const char *name)
{
    struct tenant *t = tenant_find(set, name), **chain = chain_of(set, name);
    size_t n = strlen(name) + 1;

    if (t)
        return t;
    t = calloc(1, sizeof(*t) + n);
    if (!t)
        return NULL;
    memcpy(t->name, name, n);
    t->id = table_add(&set->all, t);
    if (t->id == 0) {
        free(t);
        return NULL;
    }
    settings_apply(set, t);
    t->chain = *chain;
    *chain = t;
    return t;
}

static void tenant_drop_idle(struct tenant_set *set, struct tenant *t)
{
    struct tenant **link = chain_of(set, t->name);

    if (t->refs > 0 || t->configured.given || t->kept.given)
        return;
    while (*link != t)
        link = &(*link)->chain;
    *link = t->chain;
    (void)table_remove(&set->all, t->id);
    tenant_free(t);
}

struct tenant *tenant_ref(struct tenant_set *set, const char *name)
{
    struct tenant *t = tenant_make(set, name);

    if (t)
        t->refs++;
    return t;
}

void tenant_unref(struct tenant_set *set, struct tenant *t)
{
    t->refs--;
    tenant_drop_idle(set, t);
}

struct tenant *tenant_from(const struct tenant_set *set, uint64_t id)
{
    uint32_t next = id > UINT32_MAX ? 0 : table_next(&set->all, id > 0 ? (uint32_t)id - 1 : 0);

    return next ? table_get(&set->all, next) : NULL;
}

struct tenant *tenant_next(const struct tenant_set *set, const struct tenant *t)
{
    uint32_t next = table_next(&set->all, t ? t->id : 0);

    return next ? table_get(&set->all, next) : NULL;
}

/* ---- settings ---- */

/* What they come from has changed. */
static void settings_renew(struct tenant_set *set)
{
    set->defaults = set->initial;
    tenant_settings_over(&set->defaults, &set->configured);
    tenant_settings_over(&set->defaults, &set->kept);
    for (uint32_t i = table_next(&set->all, 0); i; i = table_next(&set->all, i)) {
        struct tenant *t = table_get(&set->all, i);

        settings_apply(set, t);
        tenant_drop_idle(set, t);
    }
}

static int configured_take(struct tenant_set *set, const char *item)
{
    char name[UCM_MAX_NAME_BYTES + 1], why[TENANT_WHY_BYTES];
    struct tenant_settings s = {.given = 0};
    struct tenant *t;

    if (config_tenant(item, name, &s, why) != 0) {
        log_error("tenant", "settings-refused", "reason=\"%s\"", why);
        return 0;
    }
    if (strcmp(name, TENANT_ALL) == 0) {
        set->configured = s;
        return 0;
    }
    t = tenant_make(set, name);
    if (!t)
        return -ENOMEM;
    t->configured = s;
    return 0;
}

int tenant_set_configure(struct tenant_set *set, const struct config *c)
{
    int rc = 0;

    set->initial = tenant_settings_initial(c);
    set->configured = (struct tenant_settings){.given = 0};
    for (struct tenant *t = tenant_next(set, NULL); t; t = tenant_next(set, t))
        t->configured = (struct tenant_settings){.given = 0};
    for (size_t i = 0; rc == 0 && i < c->tenant_settings.n; i++)
        rc = configured_take(set, c->tenant_settings.item[i]);
    settings_renew(set);
    return rc;
}

int tenant_give(struct tenant_set *set, const char *name, const struct tenant_settings *s)
{
    bool all = strcmp(name, TENANT_ALL) == 0;
    struct tenant *t = all ? NULL : s ? tenant_make(set, name) : tenant_find(set, name);
    struct tenant_settings *kept = all ? &set->kept : t ? &t->kept : NULL;

    if (!kept)
        return s ? -ENOMEM : 0;
    set->n_kept -= kept->given != 0;
    if (s)
        tenant_settings_over(kept, s);
    else
        kept->given = 0;
    set->n_kept += kept->given != 0;
    settings_renew(set);
    return 0;
}

/* ---- bounds ---- */

static uint64_t bound_of(uint64_t setting)
{
    return setting > 0 ? setting : UINT64_MAX;
}

/* What settings bound, besides namespaces, which the index bounds. */
uint64_t tenant_limit(void *ctx, const char *tenant, enum limit what)
{
    const struct tenant_set *set = ctx;
    const struct tenant *t = tenant_find(set, tenant);
    const struct tenant_settings *given = t ? &t->settings : &set->defaults;

    switch (what) {
    case LIMIT_CONNECTIONS:
        return bound_of(given->connections);
    case LIMIT_REQUESTS:
        return bound_of(given->requests);
    case LIMIT_MEMORY:
        return bound_of(given->memory);
    case LIMIT_LEASED:
        return bound_of(given->leased);
    case LIMIT_SUMMARIES:
        return bound_of(given->dram_max / TENANT_HELD_FRACTION);
    default:
        return UINT64_MAX;
    }
}

bool tenant_shared_quota(void *ctx, const char *tenant, uint64_t *guaranteed, uint64_t *most)
{
    const struct tenant_set *set = ctx;
    const struct tenant_settings *s = tenant ? settings_of(set, tenant) : &set->defaults;
    bool any = s->shared_min > 0 || s->shared_max > 0;

    for (const struct tenant *t = tenant_next(set, NULL); !tenant && !any && t;
         t = tenant_next(set, t))
        any = t->settings.shared_min > 0 || t->settings.shared_max > 0;
    if (tenant) {
        *guaranteed = s->shared_min;
        *most = s->shared_max;
    }
    return any;
}

#include "daemon/base/limit.h"

#include "daemon/base/list.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The dynamic threshold's alpha: an owner may have at most so many times what is free. */
#define TIMES_FREE 3u
/* One such fraction of all is reserved for operators; each owner may have one while there is that
 * much. */
#define SMALL_PART 64u
#define FEW_PART 16u /* see limit_few */

struct limit_owner {
    struct limits *limits;
    struct limit_owner *parent; /* of a uid its tenant, of a tenant all; NULL: this is all */
    struct list link;           /* in parent's children */
    struct list children;
    uint32_t refs;
    uint64_t used[LIMIT_KINDS];
    uid_t uid;
    bool admin;
    bool alone;      /* its tenant has no other uid */
    uint32_t number; /* of a tenant */
    char tenant[UCM_MAX_NAME_BYTES + 1];
};

struct limits {
    struct limit_owner all;
    uint64_t most[LIMIT_KINDS], refused;
    limit_setting_fn setting_cb;
    void *setting_ctx;
};

static const struct {
    const char *things, *source, *setting;
} kinds[] = {
#define X(NAME, things, source, setting) {things, source, setting},
    LIMITS(X)
#undef X
};

/* ---- owners ---- */

static void owner_init(struct limit_owner *o, struct limits *l, struct limit_owner *parent)
{
    o->limits = l;
    o->parent = parent;
    o->refs = 1;
    list_init(&o->children);
    if (parent) {
        list_push_back(&parent->children, &o->link);
        parent->refs++;
    }
}

struct limits *limits_new(void)
{
    struct limits *l = calloc(1, sizeof(*l));

    if (!l)
        return NULL;
    owner_init(&l->all, l, NULL);
    for (unsigned i = 0; i < LIMIT_KINDS; i++)
        l->most[i] = UINT64_MAX / (2 * TIMES_FREE); /* sums stay below the type's end */
    return l;
}

void limits_free(struct limits *l)
{
    assert(!l || l->all.refs == 1);
    free(l);
}

void limits_set(struct limits *l, enum limit what, uint64_t all)
{
    l->most[what] = all;
}

void limits_settings(struct limits *l, limit_setting_fn setting_cb, void *ctx)
{
    l->setting_cb = setting_cb;
    l->setting_ctx = ctx;
}

uint64_t limits_used(const struct limits *l, enum limit what)
{
    return l->all.used[what];
}

struct limit_owner *limits_tenant(struct limits *l, const char *tenant)
{
    struct list *place = &l->all.children; /* in front of the first gap among the numbers */
    struct limit_owner *t;
    uint32_t number = 1;

    for (struct list *n = l->all.children.next; n != &l->all.children; n = n->next) {
        t = LIST_ENTRY(n, struct limit_owner, link);
        if (strcmp(t->tenant, tenant) == 0) {
            t->refs++;
            return t;
        }
        if (t->number == number)
            number++;
        else if (place == &l->all.children)
            place = n;
    }
    t = calloc(1, sizeof(*t));
    if (!t)
        return NULL;
    snprintf(t->tenant, sizeof(t->tenant), "%s", tenant);
    t->number = number;
    owner_init(t, l, &l->all);
    list_remove(&t->link);
    list_push_back(place, &t->link);
    return t;
}

static struct limit_owner *uid_find(struct limit_owner *t, uid_t uid, bool admin)
{
    for (struct list *n = t->children.next; n != &t->children; n = n->next) {
        struct limit_owner *o = LIST_ENTRY(n, struct limit_owner, link);

        if (o->uid == uid && o->admin == admin)
            return o;
    }
    return NULL;
}

struct limit_owner *limits_uid(struct limits *l, const char *tenant, uid_t uid, bool admin)
{
    struct limit_owner *t = limits_tenant(l, tenant), *o;
    char own[32];

    if (!t)
        return NULL;
    o = uid_find(t, uid, admin);
    if (o) {
        o->refs++;
    } else if ((o = calloc(1, sizeof(*o)))) {
        snprintf(own, sizeof(own), "uid:%u", (unsigned)uid);
        snprintf(o->tenant, sizeof(o->tenant), "%s", tenant);
        o->uid = uid;
        o->admin = admin;
        o->alone = strcmp(tenant, own) == 0;
        owner_init(o, l, t);
    }
    limit_owner_unref(t); /* o has it */
    return o;
}

struct limit_owner *limit_owner_ref(struct limit_owner *o)
{
    o->refs++;
    return o;
}

void limit_owner_unref(struct limit_owner *o)
{
    struct limit_owner *parent = o->parent;

    if (--o->refs > 0 || !parent)
        return;
    for (unsigned i = 0; i < LIMIT_KINDS; i++)
        assert(o->used[i] == 0);
    list_remove(&o->link);
    free(o);
    limit_owner_unref(parent);
}

bool limit_within(const struct limit_owner *o, const struct limit_owner *group)
{
    while (o && o != group)
        o = o->parent;
    return o != NULL;
}

/* ---- how much ---- */

static uint64_t less(uint64_t a, uint64_t b)
{
    return a > b ? a - b : 0;
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static const struct limit_owner *tenant_of(const struct limit_owner *o)
{
    return o->parent->parent ? o->parent : o;
}

uint32_t limit_number(const struct limit_owner *o)
{
    return tenant_of(o)->number;
}

static uint64_t setting_of(const struct limit_owner *o, enum limit what)
{
    const struct limits *l = o->limits;

    if (!l->setting_cb || !kinds[what].setting || o->admin)
        return UINT64_MAX;
    return l->setting_cb(l->setting_ctx, o->tenant, what);
}

static struct limit_pool pool_of(const struct limit_owner *o, enum limit what)
{
    const struct limits *l = o->limits;

    return (struct limit_pool){kinds[what].things, kinds[what].source, l->most[what],
                               l->all.used[what], true};
}

bool limit_few(const struct limit_owner *o, enum limit what, uint64_t n)
{
    const struct limits *l = o->limits;
    const struct limit_owner *t = o->parent->parent ? o->parent : o;
    uint64_t all = l->most[what];

    /* With half of all free, a tenant of so little may have a third of all, and a uid of it a
     * fifth. */
    return n <= all / FEW_PART && t->used[what] <= all / FEW_PART - n &&
           l->all.used[what] <= all / 2 - n &&
           (!kinds[what].setting || o->admin || setting_of(o, what) == UINT64_MAX);
}

/* What o has of what is taken of the pool. */
static uint64_t part_of(const struct limit_owner *o, enum limit what, const struct limit_pool *pool)
{
    uint64_t counted = o->limits->all.used[what];

    if (counted == pool->used || counted == 0)
        return o->used[what];
    return (uint64_t)((double)o->used[what] / (double)counted * (double)pool->used);
}

/* How much more an owner with `used` may have, of `all` of which free_now is free. */
static uint64_t share_room(uint64_t all, uint64_t free_now, uint64_t used)
{
    uint64_t few = all / SMALL_PART > 0 ? all / SMALL_PART : 1;
    uint64_t room = less(TIMES_FREE * free_now, used) / (TIMES_FREE + 1);
    uint64_t least = smaller(less(few, used), free_now);

    return room > least ? room : least;
}

static uint64_t all_room(const struct limit_owner *o, const struct limit_pool *pool)
{
    return less(o->admin ? pool->all : pool->all - pool->all / SMALL_PART, pool->used);
}

static uint64_t tenant_room(const struct limit_owner *o, enum limit what,
                            const struct limit_pool *pool)
{
    uint64_t free_now = all_room(o, pool), has;

    if (o->admin)
        return free_now;
    has = part_of(tenant_of(o), what, pool);
    return smaller(share_room(pool->all, free_now, has),
                   pool->set ? less(setting_of(o, what), has) : UINT64_MAX);
}

static uint64_t owner_room(const struct limit_owner *o, enum limit what,
                           const struct limit_pool *pool)
{
    const struct limit_owner *t = tenant_of(o);
    uint64_t room = tenant_room(o, what, pool);

    if (o->admin || o->alone || o == t)
        return room;
    return share_room(room + part_of(t, what, pool), room, part_of(o, what, pool));
}

static const struct limit_owner *refuser_of(const struct limit_owner *o, enum limit what,
                                            const struct limit_pool *pool, uint64_t n)
{
    if (n > all_room(o, pool))
        return &o->limits->all;
    if (n > tenant_room(o, what, pool))
        return tenant_of(o);
    return n > owner_room(o, what, pool) ? o : NULL;
}

uint64_t limit_room(const struct limit_owner *o, enum limit what)
{
    struct limit_pool pool = pool_of(o, what);

    return owner_room(o, what, &pool);
}

uint64_t limit_room_within(const struct limit_owner *o, enum limit what, uint64_t all)
{
    uint64_t free_now = less(all, tenant_of(o)->used[what]);

    return o->admin || o->alone ? UINT64_MAX : share_room(all, free_now, o->used[what]);
}

uint64_t limit_most(const struct limit_owner *o, enum limit what)
{
    uint64_t all = o->limits->most[what], most = all - all / SMALL_PART;

    if (o->admin)
        return all;
    most = smaller(share_room(all, most, 0), setting_of(o, what));
    return o->alone || o == tenant_of(o) ? most : share_room(most, most, 0);
}

uint64_t limit_has(const struct limit_owner *o, enum limit what)
{
    return o->used[what];
}

const struct limit_owner *limit_refuser(const struct limit_owner *o, enum limit what, uint64_t n)
{
    struct limit_pool pool = pool_of(o, what);

    return refuser_of(o, what, &pool, n);
}

/* ---- taking ---- */

/* "tenant \"t\"", or "uid 5 of tenant \"t\"". */
static void name_write(const struct limit_owner *o, char *out, size_t size)
{
    int n = o->alone || o == tenant_of(o) ? 0 : snprintf(out, size, "uid %u of ", (unsigned)o->uid);

    snprintf(out + n, size - (size_t)n, "tenant \"%.64s\"", o->tenant);
}

int limit_check(const struct limit_owner *o, enum limit what, const struct limit_pool *pool,
                uint64_t n, struct ucm_error *e)
{
    const struct limit_owner *refuser;
    unsigned long long all = pool->all, used = pool->used, more = n, has, of_tenant;
    char who[128];

    if (n <= owner_room(o, what, pool))
        return 0;
    refuser = refuser_of(o, what, pool, n);
    o->limits->refused++;
    if (!e)
        return -UCM_WIRE_BUSY;
    if (!refuser->parent)
        return ucm_error_set(
            e, UCM_WIRE_BUSY,
            "%llu of %llu %s are taken, and %llu more would not fit%s; %s sets how many there are",
            used, all, pool->things, more, o->admin ? "" : " besides what is left for operators",
            pool->source);
    name_write(refuser, who, sizeof(who));
    has = part_of(refuser, what, pool);
    of_tenant = pool->set ? setting_of(o, what) : UINT64_MAX;
    if (refuser == tenant_of(o) && has + n > of_tenant)
        return ucm_error_set(e, UCM_WIRE_BUSY,
                             "%s has %llu %s, and with %llu more it would have more than the %llu "
                             "of its setting \"%s\" (ucmctl tenant set)",
                             who, has, pool->things, more, of_tenant, kinds[what].setting);
    if (refuser != tenant_of(o) && of_tenant < all)
        return ucm_error_set(
            e, UCM_WIRE_BUSY,
            "%s has %llu of the %llu %s that its tenant's setting \"%s\" gives, and "
            "with %llu more it would have more than three times what it leaves free "
            "of them (ucmctl tenant set)",
            who, has, of_tenant, pool->things, kinds[what].setting, more);
    return ucm_error_set(e, UCM_WIRE_BUSY,
                         "%s has %llu of %llu %s, and with %llu more it would have more than three "
                         "times what it leaves free; %s sets how many there are",
                         who, has, all, pool->things, more, pool->source);
}

int limit_ask(const struct limit_owner *o, enum limit what, uint64_t n, struct ucm_error *e)
{
    struct limit_pool pool = pool_of(o, what);

    return limit_check(o, what, &pool, n, e);
}

int limit_take(struct limit_owner *o, enum limit what, uint64_t n, struct ucm_error *e)
{
    int rc = limit_few(o, what, n) ? 0 : limit_ask(o, what, n, e);

    for (; o && rc == 0; o = o->parent)
        o->used[what] += n;
    return rc;
}

void limit_add(struct limit_owner *o, enum limit what, uint64_t n)
{
    for (; o; o = o->parent)
        o->used[what] += n;
}

void limit_give(struct limit_owner *o, enum limit what, uint64_t n)
{
    for (; o; o = o->parent) {
        assert(o->used[what] >= n);
        o->used[what] -= n;
    }
}

uint64_t limits_refused(const struct limits *l)
{
    return l->refused;
}

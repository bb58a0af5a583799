/* namespaces, tenants, ls, inspect: what is cached, and where. */
#include "client/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LS_PAGE 1024 /* blocks in one request; the daemon may return fewer */

/* ---- lists that come in pages ---- */

struct listing {
    const char *field; /* of a page, and of the document: the array */
    const struct ctl_column *columns;
    struct table table;
    cJSON *items; /* with --json */
    uint64_t n, cursor;
};

static void listing_add(struct listing *l, const struct args *a, const msgpack_object *page)
{
    for (uint32_t i = 0; i < answer_count(page, l->field); i++, l->n++) {
        const msgpack_object *o = answer_at(page, l->field, i);

        if (args_given(a, "json"))
            cJSON_AddItemToArray(l->items, answer_json(o));
        else
            ctl_table_row(&l->table, l->columns, o);
    }
}

/* Reads pages until the end, or until the list has `limit` items; limit 0: all. */
static int listing_read(struct listing *l, const struct args *a, enum ucm_method method,
                        uint32_t ns, uint64_t limit)
{
    int rc;

    ctl_table_begin(&l->table, l->columns);
    l->items = args_given(a, "json") ? cJSON_CreateArray() : NULL;
    do {
        uint64_t left = limit > 0 ? limit - l->n : 0; /* 0: the daemon chooses */
        struct answer page;

        rc = ctl_page(a, method, ns, left < LS_PAGE ? left : LS_PAGE, &l->cursor, &page);
        if (rc != CTL_OK) {
            table_end(&l->table, NULL);
            cJSON_Delete(l->items);
            return rc;
        }
        listing_add(l, a, page.root);
        answer_close(&page);
    } while (l->cursor != 0 && (limit == 0 || l->n < limit));
    return CTL_OK;
}

/* With --json it takes the document. */
static int listing_print(struct listing *l, const struct args *a, cJSON *document)
{
    if (args_given(a, "json")) {
        cJSON_AddItemToObject(document, l->field, l->items);
        return ctl_print_json(document, false);
    }
    if (l->n > 0 || l->cursor != 0)
        return ctl_table_end(&l->table);
    table_end(&l->table, NULL);
    printf("no %s\n", l->field);
    return CTL_OK;
}

/* ---- namespaces ---- */

int cmd_namespaces(const struct args *a)
{
    static const struct ctl_column columns[] = {{">NS", "ns", SHOW_NUMBER},
                                                {"FINGERPRINT", "fingerprint", SHOW_PREFIX},
                                                {"TENANT", "tenant", SHOW_TEXT},
                                                {"MODEL", "model", SHOW_TEXT},
                                                {"REVISION", "revision", SHOW_TEXT},
                                                {"DTYPE", "dtype", SHOW_TEXT},
                                                {"LAYOUT", "layout", SHOW_TEXT},
                                                {">TOKENS", "block_tokens", SHOW_NUMBER},
                                                {">PARTS", "parts", SHOW_NUMBER},
                                                {">SHARD", "shard_bytes", SHOW_BYTES},
                                                {">BLOCKS", "blocks", SHOW_NUMBER},
                                                {">DRAM", "dram_bytes", SHOW_BYTES},
                                                {">NVME", "nvme_bytes", SHOW_BYTES},
                                                {">SHARED", "shared_bytes", SHOW_BYTES},
                                                {0}};
    struct listing l = {.field = "namespaces", .columns = columns};
    int rc = listing_read(&l, a, UCM_METHOD_NS_LIST, 0, 0);

    return rc != CTL_OK ? rc
                        : listing_print(&l, a, args_given(a, "json") ? cJSON_CreateObject() : NULL);
}

/* ---- tenants ---- */

enum { NAMESPACES, SUMS = 5 };
static const char *const sum_fields[SUMS] = {"namespaces", "blocks", "dram_bytes", "nvme_bytes",
                                             "shared_bytes"};

struct tenant {
    char name[257];
    uint64_t sum[SUMS];
};

struct tenants {
    struct tenant *item;
    uint32_t n;
};

/* NULL when memory ran out. */
static struct tenant *tenant_of(struct tenants *all, const char *name)
{
    struct tenant *item;

    for (uint32_t i = 0; i < all->n; i++)
        if (strcmp(all->item[i].name, name) == 0)
            return &all->item[i];
    item = realloc(all->item, (all->n + 1) * sizeof(*item));
    if (!item)
        return NULL;
    all->item = item;
    item = &all->item[all->n++];
    memset(item, 0, sizeof(*item));
    snprintf(item->name, sizeof(item->name), "%s", name);
    return item;
}

static int tenant_add_cb(const struct args *a, const msgpack_object *ns, void *ctx)
{
    char name[257];
    struct tenant *t = tenant_of(ctx, answer_text(ns, "tenant", name, sizeof name));

    (void)a;
    if (!t)
        return ctl_fail(CTL_ERROR, "memory ran out");
    t->sum[NAMESPACES]++;
    for (size_t k = NAMESPACES + 1; k < SUMS; k++)
        t->sum[k] += answer_u64(ns, sum_fields[k]);
    return CTL_OK;
}

static int tenant_compare(const void *left, const void *right)
{
    const struct tenant *a = left, *b = right;

    return strcmp(a->name, b->name);
}

static int tenants_print(const struct tenants *all)
{
    static const char *const titles[] = {"TENANT", ">NAMESPACES", ">BLOCKS", ">DRAM",
                                         ">NVME",  ">SHARED",     NULL};
    char human[HUMAN_BYTES];
    struct table t;

    if (all->n == 0) {
        printf("no tenants\n");
        return CTL_OK;
    }
    table_begin(&t, titles);
    for (const struct tenant *item = all->item; item < all->item + all->n; item++) {
        table_cell(&t, "%s", item->name);
        for (size_t k = 0; k < SUMS; k++)
            if (strstr(sum_fields[k], "_bytes"))
                table_cell(&t, "%s", human_bytes(human, item->sum[k]));
            else
                table_cell(&t, "%" PRIu64, item->sum[k]);
    }
    return ctl_table_end(&t);
}

static int tenants_print_json(const struct tenants *all)
{
    cJSON *j = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(j, "tenants");

    for (uint32_t i = 0; i < all->n; i++) {
        cJSON *o = cJSON_CreateObject();

        cJSON_AddStringToObject(o, "tenant", all->item[i].name);
        for (size_t k = 0; k < SUMS; k++)
            ctl_json_u64(o, sum_fields[k], all->item[i].sum[k]);
        cJSON_AddItemToArray(list, o);
    }
    return ctl_print_json(j, false);
}

int cmd_tenants(const struct args *a)
{
    struct tenants all = {.n = 0};
    int rc = ctl_each_namespace(a, tenant_add_cb, &all);

    if (all.n > 0)
        qsort(all.item, all.n, sizeof(all.item[0]), tenant_compare);
    if (rc == CTL_OK)
        rc = args_given(a, "json") ? tenants_print_json(&all) : tenants_print(&all);
    free(all.item);
    return rc;
}

/* ---- ls ---- */

int cmd_ls(const struct args *a)
{
    static const struct ctl_column columns[] = {{"KEY", "key", SHOW_TEXT},
                                                {"STATE", "complete", SHOW_COMPLETE},
                                                {">PARTS", "ready", SHOW_NUMBER},
                                                {">DRAM", "dram", SHOW_NUMBER},
                                                {">NVME", "nvme", SHOW_NUMBER},
                                                {">SHARED", "shared", SHOW_NUMBER},
                                                {"PINNED", "pinned", SHOW_YES},
                                                {">LEASES", "leases", SHOW_NUMBER},
                                                {0}};
    struct listing l = {.field = "blocks", .columns = columns, .cursor = args_number(a, "cursor")};
    struct ctl_namespace ns;
    cJSON *j = NULL;
    int rc = ctl_namespace_find(a, a->word[0], &ns);

    if (rc == CTL_OK)
        rc = listing_read(&l, a, UCM_METHOD_LS, ns.ns, args_number(a, "limit"));
    if (rc != CTL_OK)
        return rc;
    if (args_given(a, "json")) {
        j = cJSON_CreateObject();
        ctl_json_u64(j, "ns", ns.ns);
        cJSON_AddStringToObject(j, "fingerprint", ns.fingerprint);
        ctl_json_u64(j, "next", l.cursor);
    }
    rc = listing_print(&l, a, j);
    if (rc == CTL_OK && l.cursor != 0 && !args_given(a, "json"))
        printf("more follow: --cursor %" PRIu64 ", or a larger --limit\n", l.cursor);
    return rc;
}

/* ---- inspect ---- */

static int print_block(const struct args *a, const msgpack_object *block)
{
    static const struct ctl_column parts[] = {{">PART", "part", SHOW_NUMBER},
                                              {"DRAM", "dram", SHOW_TEXT},
                                              {"NVME", "nvme", SHOW_TEXT},
                                              {"SHARED", "shared", SHOW_TEXT},
                                              {">ROOT", "root", SHOW_NUMBER},
                                              {">USERS", "users", SHOW_NUMBER},
                                              {">LOCATION", "loc", SHOW_HEX},
                                              {"CHECKSUM", "checksum", SHOW_HASH},
                                              {0}};
    char key[80];

    if (args_given(a, "json"))
        return ctl_print_json(answer_json(block), false);
    printf("key       %s\n", answer_text(block, "key", key, sizeof key));
    printf("state     %s, %" PRIu64 " parts ready\n",
           answer_flag(block, "complete") ? "complete" : "partial", answer_u64(block, "ready"));
    printf("pinned    %s\n", answer_flag(block, "pinned") ? "yes" : "no");
    printf("leases    %" PRIu64 "\n", answer_u64(block, "leases"));
    printf("heat      %" PRIu64 " of 3\n\n", answer_u64(block, "heat"));
    return ctl_table(block, "parts", parts);
}

int cmd_inspect(const struct args *a)
{
    struct msg_key params = {.ns = 0};
    struct ctl_namespace ns;
    int rc = ctl_namespace_find(a, a->word[0], &ns);

    if (rc == CTL_OK)
        rc = ctl_keys(a, a->word + 1, 1, &ns, &params.key);
    if (rc != CTL_OK)
        return rc;
    params.ns = ns.ns;
    rc = ctl_show(a, UCM_METHOD_INSPECT, &params, print_block);
    free((void *)params.key.p);
    return rc;
}

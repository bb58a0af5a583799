/* namespaces, tenants, ls, inspect: what is cached, and where. */
#include "client/ctl/ctl.h"
#include "client/ctl/table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LS_PAGE 1024 /* blocks asked for at once; the daemon may give fewer */

/* ---- namespaces ---- */

static void namespace_row(struct table *t, const msgpack_object *o)
{
    char text[257], human[HUMAN_BYTES];

    table_cell(t, "%" PRIu64, answer_u64(o, "ns"));
    table_cell(t, "%.12s", answer_text(o, "fingerprint", text, sizeof text));
    table_cell(t, "%s", answer_text(o, "tenant", text, sizeof text));
    table_cell(t, "%s", answer_text(o, "model", text, sizeof text));
    table_cell(t, "%s", answer_text(o, "revision", text, sizeof text));
    table_cell(t, "%s", answer_text(o, "dtype", text, sizeof text));
    table_cell(t, "%s", answer_text(o, "layout", text, sizeof text));
    table_cell(t, "%" PRIu64, answer_u64(o, "block_tokens"));
    table_cell(t, "%" PRIu64, answer_u64(o, "parts"));
    table_cell(t, "%s", human_bytes(human, answer_u64(o, "shard_bytes")));
    table_cell(t, "%" PRIu64, answer_u64(o, "blocks"));
    table_cell(t, "%s", human_bytes(human, answer_u64(o, "dram_bytes")));
    table_cell(t, "%s", human_bytes(human, answer_u64(o, "nvme_bytes")));
    table_cell(t, "%s", human_bytes(human, answer_u64(o, "shared_bytes")));
}

struct listing {
    bool json;
    struct table table;
    cJSON *items; /* with --json */
    uint64_t n, cursor;
};

static void listing_begin(struct listing *l, const struct ctl *c, const char *const *titles)
{
    l->json = c->json;
    table_begin(&l->table, titles);
    if (l->json)
        l->items = cJSON_CreateArray();
}

/* Adds a page's items, as JSON or as rows. */
static void listing_add(struct listing *l, const msgpack_object *page, const char *field,
                        void (*row)(struct table *t, const msgpack_object *o))
{
    uint32_t n = answer_count(page, field);

    for (uint32_t i = 0; i < n; i++) {
        const msgpack_object *o = answer_at(page, field, i);

        if (l->json)
            cJSON_AddItemToArray(l->items, answer_json(o));
        else
            row(&l->table, o);
    }
    l->n += n;
}

/* With --json: puts the items into the document, which is the caller's to print; else prints. */
static int listing_end(struct listing *l, cJSON *document, const char *field, int rc)
{
    if (l->json) {
        if (rc != CTL_OK || !cJSON_AddItemToObject(document, field, l->items))
            cJSON_Delete(l->items);
        return rc;
    }
    if (rc == CTL_OK && l->n == 0 && l->cursor == 0)
        printf("no %s\n", field);
    else if (table_end(&l->table, rc == CTL_OK ? stdout : NULL) < 0 && rc == CTL_OK)
        rc = ctl_fail(CTL_ERROR, "memory ran out");
    return rc;
}

int cmd_namespaces(const struct args *a)
{
    static const char *const titles[] = {">NS",     "FINGERPRINT", "TENANT",  "MODEL",   "REVISION",
                                         "DTYPE",   "LAYOUT",      ">TOKENS", ">PARTS",  ">SHARD",
                                         ">BLOCKS", ">DRAM",       ">NVME",   ">SHARED", NULL};
    struct listing l = {.n = 0};
    struct answer page;
    struct ctl c;
    cJSON *j = NULL;
    int rc = ctl_open(&c, a);

    if (rc != CTL_OK)
        return rc;
    listing_begin(&l, &c, titles);
    do {
        rc = ctl_page(&c, "namespace.list", 0, 0, &l.cursor, &page);
        if (rc == CTL_OK) {
            listing_add(&l, page.root, "namespaces", namespace_row);
            answer_close(&page);
        }
    } while (rc == CTL_OK && l.cursor != 0);
    ctl_close(&c);
    if (c.json)
        j = cJSON_CreateObject();
    rc = listing_end(&l, j, "namespaces", rc);
    if (c.json && rc == CTL_OK)
        return ctl_print_json(j, false);
    cJSON_Delete(j);
    return rc;
}

/* ---- tenants ---- */

struct tenant {
    char name[257];
    uint64_t namespaces, blocks, dram_bytes, nvme_bytes, shared_bytes;
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

static int tenants_add(struct tenants *all, const msgpack_object *page)
{
    for (uint32_t i = 0; i < answer_count(page, "namespaces"); i++) {
        const msgpack_object *o = answer_at(page, "namespaces", i);
        char name[257];
        struct tenant *t = tenant_of(all, answer_text(o, "tenant", name, sizeof name));

        if (!t)
            return ctl_fail(CTL_ERROR, "memory ran out");
        t->namespaces++;
        t->blocks += answer_u64(o, "blocks");
        t->dram_bytes += answer_u64(o, "dram_bytes");
        t->nvme_bytes += answer_u64(o, "nvme_bytes");
        t->shared_bytes += answer_u64(o, "shared_bytes");
    }
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
    for (uint32_t i = 0; i < all->n; i++) {
        table_cell(&t, "%s", all->item[i].name);
        table_cell(&t, "%" PRIu64, all->item[i].namespaces);
        table_cell(&t, "%" PRIu64, all->item[i].blocks);
        table_cell(&t, "%s", human_bytes(human, all->item[i].dram_bytes));
        table_cell(&t, "%s", human_bytes(human, all->item[i].nvme_bytes));
        table_cell(&t, "%s", human_bytes(human, all->item[i].shared_bytes));
    }
    return table_end(&t, stdout) < 0 ? ctl_fail(CTL_ERROR, "memory ran out") : CTL_OK;
}

static int tenants_print_json(const struct tenants *all)
{
    cJSON *j = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(j, "tenants");

    for (uint32_t i = 0; i < all->n; i++) {
        const struct tenant *t = &all->item[i];
        cJSON *o = cJSON_CreateObject();

        cJSON_AddStringToObject(o, "tenant", t->name);
        cJSON_AddItemToObject(o, "namespaces", answer_json_u64(t->namespaces));
        cJSON_AddItemToObject(o, "blocks", answer_json_u64(t->blocks));
        cJSON_AddItemToObject(o, "dram_bytes", answer_json_u64(t->dram_bytes));
        cJSON_AddItemToObject(o, "nvme_bytes", answer_json_u64(t->nvme_bytes));
        cJSON_AddItemToObject(o, "shared_bytes", answer_json_u64(t->shared_bytes));
        cJSON_AddItemToArray(list, o);
    }
    return ctl_print_json(j, false);
}

int cmd_tenants(const struct args *a)
{
    struct tenants all = {.n = 0};
    struct answer page;
    struct ctl c;
    uint64_t cursor = 0;
    int rc = ctl_open(&c, a);

    if (rc != CTL_OK)
        return rc;
    do {
        rc = ctl_page(&c, "namespace.list", 0, 0, &cursor, &page);
        if (rc == CTL_OK) {
            rc = tenants_add(&all, page.root);
            answer_close(&page);
        }
    } while (rc == CTL_OK && cursor != 0);
    ctl_close(&c);
    if (all.n > 0)
        qsort(all.item, all.n, sizeof(all.item[0]), tenant_compare);
    if (rc == CTL_OK)
        rc = c.json ? tenants_print_json(&all) : tenants_print(&all);
    free(all.item);
    return rc;
}

/* ---- ls ---- */

static void block_row(struct table *t, const msgpack_object *o)
{
    char text[80];

    table_cell(t, "%s", answer_text(o, "key", text, sizeof text));
    table_cell(t, "%s", answer_flag(o, "complete") ? "complete" : "partial");
    table_cell(t, "%" PRIu64, answer_u64(o, "ready"));
    table_cell(t, "%" PRIu64, answer_u64(o, "dram"));
    table_cell(t, "%" PRIu64, answer_u64(o, "nvme"));
    table_cell(t, "%" PRIu64, answer_u64(o, "shared"));
    table_cell(t, "%s", answer_flag(o, "pinned") ? "yes" : "-");
    table_cell(t, "%" PRIu64, answer_u64(o, "leases"));
}

static int ls_finish(const struct ctl *c, const struct ctl_namespace *ns, struct listing *l, int rc)
{
    cJSON *j = NULL;

    if (c->json) {
        j = cJSON_CreateObject();
        cJSON_AddNumberToObject(j, "ns", ns->ns);
        cJSON_AddStringToObject(j, "fingerprint", ns->fingerprint);
        cJSON_AddItemToObject(j, "next", answer_json_u64(l->cursor));
    }
    rc = listing_end(l, j, "blocks", rc);
    if (c->json && rc == CTL_OK)
        return ctl_print_json(j, false);
    cJSON_Delete(j);
    if (rc == CTL_OK && l->cursor != 0)
        printf("more follow: --cursor %" PRIu64 ", or a larger --limit\n", l->cursor);
    return rc;
}

int cmd_ls(const struct args *a)
{
    static const char *const titles[] = {"KEY",     "STATE",  ">PARTS",  ">DRAM", ">NVME",
                                         ">SHARED", "PINNED", ">LEASES", NULL};
    uint64_t limit = args_number(a, "limit");
    struct listing l = {.cursor = args_number(a, "cursor")};
    struct ctl_namespace ns;
    struct answer page;
    struct ctl c;
    int rc = ctl_open(&c, a);

    if (rc != CTL_OK)
        return rc;
    rc = ctl_namespace_find(&c, a->word[0], &ns);
    if (rc != CTL_OK) {
        ctl_close(&c);
        return rc;
    }
    listing_begin(&l, &c, titles);
    do {
        uint64_t left = limit - l.n;

        rc = ctl_page(&c, "ls", ns.ns, left < LS_PAGE ? left : LS_PAGE, &l.cursor, &page);
        if (rc == CTL_OK) {
            listing_add(&l, page.root, "blocks", block_row);
            answer_close(&page);
        }
    } while (rc == CTL_OK && l.cursor != 0 && l.n < limit);
    rc = ls_finish(&c, &ns, &l, rc);
    ctl_close(&c);
    return rc;
}

/* ---- inspect ---- */

static int print_parts(const msgpack_object *block)
{
    static const char *const titles[] = {">PART",  "DRAM",      "NVME",     "SHARED", ">ROOT",
                                         ">USERS", ">LOCATION", "CHECKSUM", NULL};
    struct table t;
    char text[32];

    table_begin(&t, titles);
    for (uint32_t i = 0; i < answer_count(block, "parts"); i++) {
        const msgpack_object *o = answer_at(block, "parts", i);

        table_cell(&t, "%" PRIu64, answer_u64(o, "part"));
        table_cell(&t, "%s", answer_text(o, "dram", text, sizeof text));
        table_cell(&t, "%s", answer_text(o, "nvme", text, sizeof text));
        table_cell(&t, "%s", answer_text(o, "shared", text, sizeof text));
        table_cell(&t, "%" PRIu64, answer_u64(o, "root"));
        table_cell(&t, "%" PRIu64, answer_u64(o, "users"));
        table_cell(&t, "%" PRIx64, answer_u64(o, "loc"));
        table_cell(&t, "%016" PRIx64, answer_u64(o, "checksum"));
    }
    return table_end(&t, stdout) < 0 ? ctl_fail(CTL_ERROR, "memory ran out") : CTL_OK;
}

static int print_block(const msgpack_object *block)
{
    char key[80];

    printf("key       %s\n", answer_text(block, "key", key, sizeof key));
    printf("state     %s, %" PRIu64 " parts ready\n",
           answer_flag(block, "complete") ? "complete" : "partial", answer_u64(block, "ready"));
    printf("pinned    %s\n", answer_flag(block, "pinned") ? "yes" : "no");
    printf("leases    %" PRIu64 "\n", answer_u64(block, "leases"));
    printf("heat      %" PRIu64 " of 3\n\n", answer_u64(block, "heat"));
    return print_parts(block);
}

int cmd_inspect(const struct args *a)
{
    struct ctl_namespace ns;
    struct answer block;
    msgpack_packer pk;
    msgpack_sbuffer params;
    struct ctl c;
    uint8_t *key = NULL;
    size_t n;
    int rc = ctl_open(&c, a);

    if (rc != CTL_OK)
        return rc;
    rc = ctl_namespace_find(&c, a->word[0], &ns);
    if (rc == CTL_OK)
        rc = ctl_keys(a, a->word + 1, 1, &ns, &key, &n);
    if (rc != CTL_OK)
        goto out;
    answer_map(&pk, &params, 2);
    answer_put_u64(&pk, "ns", ns.ns);
    answer_put_bin(&pk, "key", key, n);
    free(key);
    rc = ctl_call(&c, "inspect", &params, &block);
    if (rc != CTL_OK)
        goto out;
    rc = c.json ? ctl_print_json(answer_json(block.root), false) : print_block(block.root);
    answer_close(&block);
out:
    ctl_close(&c);
    return rc;
}

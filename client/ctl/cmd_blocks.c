/* namespaces, ls, inspect: what is cached, and where. */
#include "client/ctl/ctl.h"
#include "client/ctl/table.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

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
    static const char *const titles[] = {">NS",     "FINGERPRINT", "TENANT",  "MODEL",  "REVISION",
                                         "DTYPE",   "LAYOUT",      ">TOKENS", ">PARTS", ">SHARD",
                                         ">BLOCKS", ">DRAM",       ">NVME",   NULL};
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

/* ---- ls ---- */

static void block_row(struct table *t, const msgpack_object *o)
{
    char text[80];

    table_cell(t, "%s", answer_text(o, "key", text, sizeof text));
    table_cell(t, "%s", answer_flag(o, "complete") ? "complete" : "partial");
    table_cell(t, "%" PRIu64, answer_u64(o, "ready"));
    table_cell(t, "%" PRIu64, answer_u64(o, "dram"));
    table_cell(t, "%" PRIu64, answer_u64(o, "nvme"));
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
    static const char *const titles[] = {"KEY",   "STATE",  ">PARTS",  ">DRAM",
                                         ">NVME", "PINNED", ">LEASES", NULL};
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
    static const char *const titles[] = {">PART",     "DRAM",     "NVME", ">USERS",
                                         ">LOCATION", "CHECKSUM", NULL};
    struct table t;
    char text[32];

    table_begin(&t, titles);
    for (uint32_t i = 0; i < answer_count(block, "parts"); i++) {
        const msgpack_object *o = answer_at(block, "parts", i);

        table_cell(&t, "%" PRIu64, answer_u64(o, "part"));
        table_cell(&t, "%s", answer_text(o, "dram", text, sizeof text));
        table_cell(&t, "%s", answer_text(o, "nvme", text, sizeof text));
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

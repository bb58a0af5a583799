/* namespace, ls, inspect: what is cached, and where. */
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

/* ---- namespace ---- */

int cmd_namespace(const struct args *a)
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
                                                {">LAYER", "layer_bytes", SHOW_BYTES},
                                                {">BLOCKS", "blocks", SHOW_NUMBER},
                                                {">DRAM", "dram_bytes", SHOW_BYTES},
                                                {">NVME", "nvme_bytes", SHOW_BYTES},
                                                {">SHARED", "shared_bytes", SHOW_BYTES},
                                                {">RATIO", "layer_bytes", SHOW_RATIO},
                                                {"BASE", "base_fingerprint", SHOW_PREFIX},
                                                {0}};
    struct listing l = {.field = "namespaces", .columns = columns};
    int rc;

    if (a->n_words > 0 && strcmp(a->word[0], "list") != 0)
        return program_usage_error(a, "'namespace' wants nothing, or list, not '%s'", a->word[0]);
    rc = listing_read(&l, a, UCM_METHOD_NS_LIST, 0, 0);
    return rc != CTL_OK ? rc
                        : listing_print(&l, a, args_given(a, "json") ? cJSON_CreateObject() : NULL);
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

/* evict, pin, unpin, purge, verify: what an operator does to cached blocks. */
#include "client/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- changes: a namespace, maybe keys, and counts in the answer ---- */

struct change {
    const char *method, *done; /* done: what the counted blocks are now */
    uint64_t tier;             /* evict: 0: all tiers */
    bool ask_whole, ask_always;
    struct ctl_namespace ns;
};

static int print_change(const struct ctl *c, const msgpack_object *counts)
{
    static const char *const fields[] = {"blocks", "busy", "missing"};
    const struct change *how = c->ctx;
    uint64_t busy = answer_u64(counts, "busy"), missing = answer_u64(counts, "missing");
    cJSON *j;

    if (!c->json) {
        printf("%" PRIu64 " blocks %s", answer_u64(counts, "blocks"), how->done);
        if (busy > 0)
            printf(", %" PRIu64 " in use", busy);
        if (missing > 0)
            printf(", %" PRIu64 " not in the cache", missing);
        printf("\n");
        return CTL_OK;
    }
    j = cJSON_CreateObject();
    ctl_json_u64(j, "ns", how->ns.ns);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++)
        ctl_json_u64(j, fields[i], answer_u64(counts, fields[i]));
    return ctl_print_json(j, false);
}

static int change_call(struct ctl *c, const uint8_t *keys, size_t n)
{
    const struct change *how = c->ctx;
    msgpack_packer pk;
    msgpack_sbuffer params;

    answer_map(&pk, &params, 1u + (n > 0) + (how->tier > 0));
    answer_put_u64(&pk, "ns", how->ns.ns);
    if (n > 0)
        answer_put_bin(&pk, "keys", keys, n);
    if (how->tier > 0)
        answer_put_u64(&pk, "tier", how->tier);
    return ctl_show(c, how->method, &params, print_change);
}

static int change_ask(const struct args *a, const struct change *how, bool whole)
{
    const struct ctl_namespace *ns = &how->ns;

    if (!how->ask_always && !(how->ask_whole && whole))
        return CTL_OK;
    if (!whole)
        return ctl_confirm(a, "%s %d blocks of namespace %" PRIu32 " (%s)?", a->command,
                           a->n_words - 1, ns->ns, ns->model);
    return ctl_confirm(a, "%s all %" PRIu64 " blocks of namespace %" PRIu32 " (%s)?", a->command,
                       ns->blocks, ns->ns, ns->model);
}

static int change(struct ctl *c)
{
    const struct args *a = c->args;
    struct change *how = c->ctx;
    uint8_t *keys = NULL;
    size_t n = 0;
    int rc = ctl_namespace_find(c, a->word[0], &how->ns);

    if (rc == CTL_OK)
        rc = ctl_keys(a, a->word + 1, a->n_words - 1, &how->ns, &keys, &n);
    if (rc == CTL_OK)
        rc = change_ask(a, how, n == 0);
    if (rc == CTL_OK)
        rc = change_call(c, keys, n);
    free(keys);
    return rc;
}

int cmd_evict(const struct args *a)
{
    static const char *const tiers[] = {"all", "dram", "nvme", "share"};
    struct change how = {.method = "evict", .done = "evicted", .ask_whole = true};
    const char *tier = args_text(a, "tier");
    size_t i;

    for (i = 0; i < sizeof tiers / sizeof tiers[0]; i++)
        if (strcmp(tier, tiers[i]) == 0)
            break;
    if (i == sizeof tiers / sizeof tiers[0])
        return program_usage_error(a, "--tier %s: wanted all, dram, nvme or share", tier);
    how.tier = i;
    return ctl_run(a, change, &how);
}

int cmd_pin(const struct args *a)
{
    return ctl_run(a, change, &(struct change){.method = "pin", .done = "pinned"});
}

int cmd_unpin(const struct args *a)
{
    return ctl_run(a, change, &(struct change){.method = "unpin", .done = "unpinned"});
}

int cmd_purge(const struct args *a)
{
    struct change how = {.method = "namespace.purge", .done = "purged", .ask_always = true};

    return ctl_run(a, change, &how);
}

/* ---- verify ---- */

enum { CHECKED, CORRUPT, FAILED, SKIPPED, VERIFIED };
static const char *const verified_fields[VERIFIED] = {"checked", "corrupt", "failed", "skipped"};

static int verify_namespace(struct ctl *c, uint32_t ns, uint64_t sum[VERIFIED])
{
    bool progress = isatty(STDERR_FILENO);
    uint64_t cursor = 0;
    int rc;

    do {
        struct answer page;

        rc = ctl_page(c, "verify", ns, args_number(c->args, "page"), &cursor, &page);
        if (rc != CTL_OK)
            break;
        for (size_t i = 0; i < VERIFIED; i++)
            sum[i] += answer_u64(page.root, verified_fields[i]);
        answer_close(&page);
        if (progress)
            fprintf(stderr, "\rnamespace %" PRIu32 ": %" PRIu64 " checked, %" PRIu64 " corrupt ",
                    ns, sum[CHECKED], sum[CORRUPT]);
    } while (cursor != 0);
    if (progress)
        fprintf(stderr, "\r\033[K");
    return rc;
}

static int verify_all(struct ctl *c, uint64_t sum[VERIFIED])
{
    uint64_t cursor = 0;
    int rc;

    do {
        struct answer list;

        rc = ctl_page(c, "namespace.list", 0, 0, &cursor, &list);
        if (rc != CTL_OK)
            break;
        for (uint32_t i = 0; rc == CTL_OK && i < answer_count(list.root, "namespaces"); i++)
            rc = verify_namespace(
                c, (uint32_t)answer_u64(answer_at(list.root, "namespaces", i), "ns"), sum);
        answer_close(&list);
    } while (rc == CTL_OK && cursor != 0);
    return rc;
}

static int print_verified(const struct ctl *c, const uint64_t sum[VERIFIED])
{
    cJSON *j;

    if (!c->json) {
        printf("%" PRIu64 " parts checked: %" PRIu64 " corrupt, %" PRIu64 " unreadable, %" PRIu64
               " skipped: not on NVMe, or in use\n",
               sum[CHECKED], sum[CORRUPT], sum[FAILED], sum[SKIPPED]);
        return CTL_OK;
    }
    j = cJSON_CreateObject();
    for (size_t i = 0; i < VERIFIED; i++)
        ctl_json_u64(j, verified_fields[i], sum[i]);
    return ctl_print_json(j, false);
}

static int verify(struct ctl *c)
{
    uint64_t sum[VERIFIED] = {0};
    struct ctl_namespace ns;
    int rc;

    if (c->args->n_words == 0) {
        rc = verify_all(c, sum);
    } else {
        rc = ctl_namespace_find(c, c->args->word[0], &ns);
        if (rc == CTL_OK)
            rc = verify_namespace(c, ns.ns, sum);
    }
    if (rc == CTL_OK)
        rc = print_verified(c, sum);
    return rc == CTL_OK && sum[CORRUPT] + sum[FAILED] > 0 ? CTL_CORRUPT : rc;
}

int cmd_verify(const struct args *a)
{
    if (args_given(a, "offline"))
        return offline_verify(args_text(a, "offline"), args_text(a, "state"), args_given(a, "json"),
                              args_given(a, "salvage"), args_given(a, "lift-quarantine"));
    if (args_given(a, "salvage") || args_given(a, "lift-quarantine") || args_given(a, "state"))
        return ctl_fail(CTL_USAGE, "--salvage, --lift-quarantine and --state need --offline PATH");
    return ctl_run(a, verify, NULL);
}

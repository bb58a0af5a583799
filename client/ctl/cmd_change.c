/* evict, pin, unpin, purge, verify: what an operator does to cached blocks. */
#include "client/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- changes: a namespace, maybe keys, and counts in the answer ---- */

#define NO_TIER UINT64_MAX

struct change {
    const char *method, *done; /* done: what the counted blocks now are */
    uint64_t tier;             /* NO_TIER: the method takes none */
    bool ask_whole, ask_always;
};

static int print_change(const struct ctl *c, const struct ctl_namespace *ns,
                        const struct change *how, const msgpack_object *counts)
{
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
    cJSON_AddNumberToObject(j, "ns", ns->ns);
    cJSON_AddItemToObject(j, "blocks", answer_json_u64(answer_u64(counts, "blocks")));
    cJSON_AddItemToObject(j, "busy", answer_json_u64(busy));
    cJSON_AddItemToObject(j, "missing", answer_json_u64(missing));
    return ctl_print_json(j, false);
}

static int change_call(struct ctl *c, const struct ctl_namespace *ns, const struct change *how,
                       const uint8_t *keys, size_t n)
{
    bool tier = how->tier != NO_TIER && how->tier != 0;
    struct answer counts;
    msgpack_packer pk;
    msgpack_sbuffer params;
    int rc;

    answer_map(&pk, &params, 1u + (n > 0) + tier);
    answer_put_u64(&pk, "ns", ns->ns);
    if (n > 0)
        answer_put_bin(&pk, "keys", keys, n);
    if (tier)
        answer_put_u64(&pk, "tier", how->tier);
    rc = ctl_call(c, how->method, &params, &counts);
    if (rc != CTL_OK)
        return rc;
    rc = print_change(c, ns, how, counts.root);
    answer_close(&counts);
    return rc;
}

static int change_ask(struct ctl *c, const struct ctl_namespace *ns, const struct change *how,
                      bool whole)
{
    if (!how->ask_always && !(how->ask_whole && whole))
        return CTL_OK;
    if (!whole)
        return ctl_confirm(c->args, "%s %d blocks of namespace %" PRIu32 " (%s)?", c->args->command,
                           c->args->n_words - 1, ns->ns, ns->model);
    return ctl_confirm(c->args, "%s all %" PRIu64 " blocks of namespace %" PRIu32 " (%s)?",
                       c->args->command, ns->blocks, ns->ns, ns->model);
}

static int change_run(const struct args *a, const struct change *how)
{
    struct ctl_namespace ns;
    struct ctl c;
    uint8_t *keys = NULL;
    size_t n = 0;
    int rc = ctl_open(&c, a);

    if (rc != CTL_OK)
        return rc;
    rc = ctl_namespace_find(&c, a->word[0], &ns);
    if (rc == CTL_OK)
        rc = ctl_keys(a, a->word + 1, a->n_words - 1, &ns, &keys, &n);
    if (rc == CTL_OK)
        rc = change_ask(&c, &ns, how, n == 0);
    if (rc == CTL_OK)
        rc = change_call(&c, &ns, how, keys, n);
    free(keys);
    ctl_close(&c);
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
    return change_run(a, &how);
}

int cmd_pin(const struct args *a)
{
    return change_run(a, &(struct change){.method = "pin", .done = "pinned", .tier = NO_TIER});
}

int cmd_unpin(const struct args *a)
{
    return change_run(a, &(struct change){.method = "unpin", .done = "unpinned", .tier = NO_TIER});
}

int cmd_purge(const struct args *a)
{
    return change_run(
        a, &(struct change){
               .method = "namespace.purge", .done = "purged", .tier = NO_TIER, .ask_always = true});
}

/* ---- verify ---- */

struct verified {
    uint64_t checked, corrupt, failed, skipped;
};

static int verify_namespace(struct ctl *c, uint32_t ns, struct verified *sum)
{
    bool progress = isatty(STDERR_FILENO);
    uint64_t cursor = 0;
    int rc;

    do {
        struct answer page;

        rc = ctl_page(c, "verify", ns, args_number(c->args, "page"), &cursor, &page);
        if (rc != CTL_OK)
            break;
        sum->checked += answer_u64(page.root, "checked");
        sum->corrupt += answer_u64(page.root, "corrupt");
        sum->failed += answer_u64(page.root, "failed");
        sum->skipped += answer_u64(page.root, "skipped");
        answer_close(&page);
        if (progress)
            fprintf(stderr, "\rnamespace %" PRIu32 ": %" PRIu64 " checked, %" PRIu64 " corrupt ",
                    ns, sum->checked, sum->corrupt);
    } while (cursor != 0);
    if (progress)
        fprintf(stderr, "\r\033[K");
    return rc;
}

static int verify_all(struct ctl *c, struct verified *sum)
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

static int print_verified(const struct ctl *c, const struct verified *sum)
{
    cJSON *j;

    if (!c->json) {
        printf("%" PRIu64 " parts checked: %" PRIu64 " corrupt, %" PRIu64 " unreadable, %" PRIu64
               " skipped: not on NVMe, or in use\n",
               sum->checked, sum->corrupt, sum->failed, sum->skipped);
        return CTL_OK;
    }
    j = cJSON_CreateObject();
    cJSON_AddItemToObject(j, "checked", answer_json_u64(sum->checked));
    cJSON_AddItemToObject(j, "corrupt", answer_json_u64(sum->corrupt));
    cJSON_AddItemToObject(j, "failed", answer_json_u64(sum->failed));
    cJSON_AddItemToObject(j, "skipped", answer_json_u64(sum->skipped));
    return ctl_print_json(j, false);
}

int cmd_verify(const struct args *a)
{
    struct verified sum = {0};
    struct ctl_namespace ns;
    struct ctl c;
    int rc;

    if (args_given(a, "offline"))
        return offline_verify(args_text(a, "offline"), args_text(a, "state"), args_flag(a, "json"),
                              args_flag(a, "salvage"), args_flag(a, "lift-quarantine"));
    if (args_flag(a, "salvage") || args_flag(a, "lift-quarantine") || args_given(a, "state"))
        return ctl_fail(CTL_USAGE, "--salvage, --lift-quarantine and --state need --offline PATH");
    rc = ctl_open(&c, a);
    if (rc != CTL_OK)
        return rc;
    if (a->n_words == 0) {
        rc = verify_all(&c, &sum);
    } else {
        rc = ctl_namespace_find(&c, a->word[0], &ns);
        if (rc == CTL_OK)
            rc = verify_namespace(&c, ns.ns, &sum);
    }
    if (rc == CTL_OK)
        rc = print_verified(&c, &sum);
    ctl_close(&c);
    if (rc == CTL_OK && sum.corrupt + sum.failed > 0)
        return CTL_CORRUPT;
    return rc;
}

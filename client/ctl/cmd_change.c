/* evict, pin, unpin, purge, verify: what an operator does to cached blocks. */
#include "client/ctl/ctl.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- changes: a namespace, maybe keys, and counts in the answer ---- */

struct change {
    enum ucm_method method;
    const char *done; /* what the counted blocks are now */
    const char *busy; /* why blocks stay; NULL: they are in use */
    uint64_t tier;    /* evict: 0: all tiers */
    bool ask_whole, ask_always;
    struct ctl_namespace ns;
};

static int print_change(const struct args *a, const struct change *how,
                        const msgpack_object *counts)
{
    static const char *const fields[] = {"blocks", "busy", "missing", NULL};
    uint64_t busy = answer_u64(counts, "busy"), missing = answer_u64(counts, "missing");
    cJSON *j;

    if (!args_given(a, "json")) {
        printf("%" PRIu64 " blocks %s", answer_u64(counts, "blocks"), how->done);
        if (busy > 0)
            printf(", %" PRIu64 " %s", busy, how->busy ? how->busy : "in use");
        if (missing > 0)
            printf(", %" PRIu64 " not in the cache", missing);
        printf("\n");
        return CTL_OK;
    }
    j = cJSON_CreateObject();
    ctl_json_u64(j, "ns", how->ns.ns);
    ctl_json_counts(j, counts, fields);
    return ctl_print_json(j, false);
}

static int change_call(const struct args *a, const struct change *how, struct proto_bin keys)
{
    const struct msg_evict evict = {.ns = how->ns.ns, .keys = keys, .tier = how->tier};
    const struct msg_keys others = {.ns = how->ns.ns, .keys = keys};
    struct answer counts;
    int rc = ctl_call(a, how->method,
                      how->method == UCM_METHOD_EVICT ? (const void *)&evict : &others, &counts);

    if (rc != CTL_OK)
        return rc;
    rc = print_change(a, how, counts.root);
    answer_close(&counts);
    return rc;
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

static int change(const struct args *a, struct change *how)
{
    struct proto_bin keys = {NULL, 0};
    int rc = ctl_namespace_find(a, a->word[0], &how->ns);

    if (rc == CTL_OK)
        rc = ctl_keys(a, a->word + 1, a->n_words - 1, &how->ns, &keys);
    if (rc == CTL_OK)
        rc = change_ask(a, how, keys.n == 0);
    if (rc == CTL_OK)
        rc = change_call(a, how, keys);
    free((void *)keys.p);
    return rc;
}

int cmd_evict(const struct args *a)
{
    struct change how = {.method = UCM_METHOD_EVICT,
                         .done = "evicted",
                         .busy = "pinned or in use",
                         .tier = args_number(a, "tier"),
                         .ask_whole = true};

    return change(a, &how);
}

int cmd_pin(const struct args *a)
{
    return change(a, &(struct change){.method = UCM_METHOD_PIN, .done = "pinned"});
}

int cmd_unpin(const struct args *a)
{
    return change(a, &(struct change){.method = UCM_METHOD_UNPIN, .done = "unpinned"});
}

int cmd_purge(const struct args *a)
{
    struct change how = {.method = UCM_METHOD_NS_PURGE, .done = "purged", .ask_always = true};

    return change(a, &how);
}

/* ---- verify ---- */

enum { CHECKED, CORRUPT, FAILED, SKIPPED, VERIFIED };
static const char *const verified_fields[VERIFIED] = {"checked", "corrupt", "failed", "skipped"};

/* Adds what one namespace has. */
static int verify_namespace(const struct args *a, uint32_t ns, uint64_t sum[VERIFIED])
{
    bool progress = isatty(STDERR_FILENO);
    uint64_t cursor = 0;
    int rc;

    do {
        struct answer page;

        rc = ctl_page(a, UCM_METHOD_VERIFY, ns, args_number(a, "page"), &cursor, &page);
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

static int verify_cb(const struct args *a, const msgpack_object *ns, void *sum)
{
    return verify_namespace(a, (uint32_t)answer_u64(ns, "ns"), sum);
}

static int print_verified(const struct args *a, const uint64_t sum[VERIFIED])
{
    cJSON *j;

    if (!args_given(a, "json")) {
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

static int verify(const struct args *a)
{
    uint64_t sum[VERIFIED] = {0};
    struct ctl_namespace ns;
    int rc;

    if (a->n_words == 0) {
        rc = ctl_each_namespace(a, verify_cb, sum);
    } else {
        rc = ctl_namespace_find(a, a->word[0], &ns);
        if (rc == CTL_OK)
            rc = verify_namespace(a, ns.ns, sum);
    }
    if (rc == CTL_OK)
        rc = print_verified(a, sum);
    return rc == CTL_OK && sum[CORRUPT] + sum[FAILED] > 0 ? CTL_CORRUPT : rc;
}

int cmd_verify(const struct args *a)
{
    if (args_given(a, "offline"))
        return offline_verify(args_text(a, "offline"), args_text(a, "state"), args_given(a, "json"),
                              args_given(a, "salvage"), args_given(a, "lift-quarantine"));
    if (args_given(a, "salvage") || args_given(a, "lift-quarantine") || args_given(a, "state"))
        return program_fail(CTL_USAGE,
                            "--salvage, --lift-quarantine and --state need --offline PATH");
    return verify(a);
}

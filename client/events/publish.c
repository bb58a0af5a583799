#include "client/events/events.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/limits.h"

/* One request for events waits so long; meanwhile nobody gets a replay. */
#define WAIT_MS 100
/* Between two tries to reach the daemon. */
#define RETRY_MS 1000
/* From one list of all blocks to the next that somebody subscribes for: at least this, and so many
 * times what the list took. */
#define LIST_MS 500
#define LIST_SHARE 10
#define TIMEOUT_MS 10000
#define PAGE 1024
/* Blocks of one batch. */
#define BATCH_BLOCKS 512
#define TOPIC_BYTES 4096
#define END UINT64_MAX

struct space {
    uint32_t ns; /* 0: of a daemon that is gone */
    bool told;   /* its blocks are published */
    struct batch_block common;
    char topics[TOPIC_BYTES];
};

struct publisher {
    const struct args *a;
    struct ucm_client *client;
    struct outlet *outlet;
    struct batch *batch;
    const char *batch_topics; /* of what is in the batch; NULL: nothing is */
    struct space **spaces;
    uint32_t n_spaces;
    const char *media[4];
    char instance[40];
    uint64_t since, list_from_ms;
    bool whole;  /* subscribers have been told of all blocks; else that comes first */
    bool failed; /* memory ran out */
};

static uint64_t now_ms(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static void nap(unsigned ms)
{
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};

    nanosleep(&t, NULL);
}

/* ---- batches ---- */

static void flush(struct publisher *p)
{
    bool failed;
    size_t n;
    const void *bytes = batch_end(p->batch, &n, &failed);

    if (bytes && outlet_send(p->outlet, p->batch_topics, bytes, n) != 0)
        failed = true;
    p->failed = p->failed || failed;
    p->batch_topics = NULL;
}

/* What comes next goes under these topics. */
static void under(struct publisher *p, const char *topics)
{
    if (p->batch_topics &&
        (strcmp(p->batch_topics, topics) != 0 || batch_blocks(p->batch) >= BATCH_BLOCKS))
        flush(p);
    p->batch_topics = topics;
}

/* ---- namespaces ---- */

/* Every {model} of a topic becomes the namespace's model, in which a comma would be another
 * topic. */
static void topics_of(const char *form, const char *model, char out[TOPIC_BYTES])
{
    size_t n = 0;

    while (*form != '\0' && n < TOPIC_BYTES - 1) {
        if (strncmp(form, "{model}", 7) != 0) {
            out[n++] = *form++;
            continue;
        }
        for (const char *c = model; *c != '\0' && n < TOPIC_BYTES - 1; c++)
            out[n++] = *c == ',' ? '_' : *c;
        form += 7;
    }
    out[n] = '\0';
}

static bool wanted(const struct publisher *p, const msgpack_object *o)
{
    const char *tenant = args_text(p->a, "tenant"), *which = args_text(p->a, "namespace");
    char own[257], dtype[257], fingerprint[65];
    struct ucm_server_info info;

    if (ucm_server_info(p->client, &info) != 0)
        return false;
    answer_text(o, "tenant", own, sizeof(own));
    answer_text(o, "dtype", dtype, sizeof(dtype));
    answer_text(o, "fingerprint", fingerprint, sizeof(fingerprint));
    return strcmp(own, tenant ? tenant : info.tenant) == 0 && strcmp(dtype, "summary") != 0 &&
           (!which || strncmp(fingerprint, which, strlen(which)) == 0);
}

static struct space *space_find(const struct publisher *p, uint64_t ns)
{
    for (uint32_t i = 0; i < p->n_spaces; i++)
        if (p->spaces[i]->ns == ns)
            return p->spaces[i];
    return NULL;
}

static bool topics_known(const struct publisher *p, const char *topics)
{
    for (uint32_t i = 0; i < p->n_spaces; i++)
        if (p->spaces[i]->told && strcmp(p->spaces[i]->topics, topics) == 0)
            return true;
    return false;
}

static void space_add(struct publisher *p, const msgpack_object *o)
{
    struct space **grown, *s;
    char model[257];

    if (space_find(p, answer_u64(o, "ns")))
        return;
    s = calloc(1, sizeof(*s));
    grown = realloc(p->spaces, (p->n_spaces + 1) * sizeof(struct space *));
    if (grown)
        p->spaces = grown;
    if (!s || !grown) {
        free(s);
        p->failed = true;
        return;
    }
    s->ns = (uint32_t)answer_u64(o, "ns");
    s->told = wanted(p, o);
    s->common.key_bytes = (uint32_t)answer_u64(o, "key_bytes");
    s->common.block_tokens = (uint32_t)answer_u64(o, "block_tokens");
    topics_of(args_text(p->a, "topic"), answer_text(o, "model", model, sizeof(model)), s->topics);
    /* Under a topic that is new here, an earlier publisher may have told of blocks that are
     * gone. */
    if (s->told && !topics_known(p, s->topics))
        p->whole = false;
    p->spaces[p->n_spaces++] = s;
}

static int spaces_read(struct publisher *p)
{
    uint64_t cursor = 0;
    int rc;

    do {
        struct answer page;

        rc = answer_page(p->client, UCM_METHOD_NS_LIST, 0, 0, &cursor, TIMEOUT_MS, &page);
        if (rc < 0)
            return rc;
        for (uint32_t i = 0; i < answer_count(page.root, "namespaces"); i++)
            space_add(p, answer_at(page.root, "namespaces", i));
        answer_close(&page);
    } while (cursor != 0);
    return 0;
}

/* Another daemon gives renumbers everything. The topics of the one before stay until they are
 * cleared. */
static void spaces_outlive(struct publisher *p)
{
    for (uint32_t i = 0; i < p->n_spaces; i++)
        p->spaces[i]->ns = 0;
}

static void spaces_forget(struct publisher *p, bool all)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < p->n_spaces; i++)
        if (all || p->spaces[i]->ns == 0)
            free(p->spaces[i]);
        else
            p->spaces[kept++] = p->spaces[i];
    p->n_spaces = kept;
}

/* ---- blocks ---- */

static bool list_each_cb(void *ctx, const struct batch_block *block)
{
    struct publisher *p = ctx;

    under(p, p->batch_topics);
    batch_stored(p->batch, block);
    return !p->failed;
}

static int space_list(struct publisher *p, struct space *s)
{
    struct listing *l = listing_new();
    uint64_t cursor = 0;
    int rc = l ? 0 : -UCM_ENOMEMORY;

    while (rc == 0) {
        struct answer page;

        rc =
            answer_page(p->client, UCM_METHOD_EVENTS_LIST, s->ns, PAGE, &cursor, TIMEOUT_MS, &page);
        if (rc < 0)
            break;
        for (uint32_t i = 0; rc == 0 && i < answer_count(page.root, "blocks"); i++)
            if (listing_add(l, answer_at(page.root, "blocks", i), &s->common, p->media) != 0)
                rc = -UCM_ENOMEMORY;
        answer_close(&page);
        outlet_serve(p->outlet);
        if (cursor == 0)
            break;
    }
    if (rc == 0) {
        p->batch_topics = s->topics;
        listing_walk(l, list_each_cb, p);
        flush(p);
    }
    listing_free(l);
    return rc;
}

static void clear(struct publisher *p)
{
    for (uint32_t i = 0; i < p->n_spaces; i++) {
        bool again = !p->spaces[i]->told;

        for (uint32_t k = 0; k < i; k++)
            again = again ||
                    (p->spaces[k]->told && strcmp(p->spaces[k]->topics, p->spaces[i]->topics) == 0);
        if (again)
            continue;
        under(p, p->spaces[i]->topics);
        batch_cleared(p->batch);
        flush(p);
    }
}

/* Tells of all blocks. fresh: subscribers forget what they know first. */
static int list_all(struct publisher *p, bool fresh)
{
    uint64_t began_ms = now_ms(), took_ms;
    int rc = spaces_read(p);

    if (rc == 0 && (fresh || !p->whole)) {
        clear(p);
        spaces_forget(p, false);
    }
    for (uint32_t i = 0; rc == 0 && i < p->n_spaces; i++)
        if (p->spaces[i]->told) {
            rc = space_list(p, p->spaces[i]);
            rc = rc == -UCM_ENOTFOUND ? 0 : rc; /* it is gone, and so are its blocks */
        }
    took_ms = now_ms() - began_ms;
    p->list_from_ms = now_ms() + LIST_MS + LIST_SHARE * took_ms;
    return rc;
}

/* ---- events ---- */

static void event_tell(struct publisher *p, const struct space *s, const msgpack_object *e)
{
    uint64_t was = answer_u64(e, "was"), is = answer_u64(e, "is");
    struct batch_block b = s->common;
    char lora[LORA_BYTES];
    const char *from, *to;

    block_read(e, &b, lora);
    if (!b.key || was > 3 || is > 3)
        return;
    from = p->media[was];
    to = p->media[is];
    if (from && to && strcmp(from, to) == 0 && was != is)
        return;
    under(p, s->topics);
    /* The new place goes first: a router forgets a block's tokens when it hears that the last copy
     * has gone. */
    b.medium = to;
    if (to)
        batch_stored(p->batch, &b);
    b.medium = from;
    if (from && was != is)
        batch_removed(p->batch, &b);
}

static int page_tell(struct publisher *p, const msgpack_object *page)
{
    for (uint32_t i = 0; i < answer_count(page, "events"); i++) {
        const msgpack_object *e = answer_at(page, "events", i);
        const struct space *s = space_find(p, answer_u64(e, "ns"));
        int rc = s ? 0 : spaces_read(p);

        if (rc < 0)
            return rc;
        if (!p->whole)
            break; /* list_all() tells this one, too */
        s = s ? s : space_find(p, answer_u64(e, "ns"));
        if (s && s->told)
            event_tell(p, s, e);
    }
    flush(p);
    p->since = answer_u64(page, "next");
    return 0;
}

/* Whether the published state is no longer valid: events are missing, or another daemon has
 * them. */
static bool broken(struct publisher *p, const msgpack_object *page)
{
    char instance[40];
    uint64_t lost = p->since == END ? 0 : answer_u64(page, "lost");

    answer_text(page, "instance", instance, sizeof(instance));
    if (strcmp(instance, p->instance) != 0) {
        memcpy(p->instance, instance, sizeof(instance));
        spaces_outlive(p);
        return true;
    }
    if (lost > 0)
        fprintf(stderr, "ucmevents: %llu events lost: all blocks are published again\n",
                (unsigned long long)lost);
    return lost > 0;
}

static int step(struct publisher *p, struct ucm_client *client)
{
    const char *tenant = args_text(p->a, "tenant");
    struct msg_events asked = {.since = p->whole ? p->since : END,
                               .limit = PAGE,
                               .wait_ms = p->whole ? WAIT_MS : 0,
                               .tenant = {tenant, tenant ? (uint32_t)strlen(tenant) : 0},
                               .tokens = true};
    struct answer page;
    int rc = answer_call(client, UCM_METHOD_EVENTS, &asked, TIMEOUT_MS, &page);

    if (rc < 0)
        return rc;
    if (broken(p, page.root) || !p->whole) {
        p->since = answer_u64(page.root, "last");
        p->whole = false;
        rc = list_all(p, true);
        p->whole = rc == 0;
    } else {
        rc = page_tell(p, page.root);
    }
    answer_close(&page);
    return rc;
}

/* ---- the command ---- */

static int out_of_memory(void)
{
    return program_fail(PROGRAM_EXIT_FAILED, "memory ran out");
}

/* A daemon that is away comes back, and a tenant may be unknown until its first engine is there;
 * what else the daemon refuses it will refuse again. */
static bool may_pass(int rc)
{
    return rc == -UCM_ENODAEMON || rc == -UCM_EDISCONNECTED || rc == -UCM_EDEADLINE ||
           rc == -UCM_EBUSY || rc == -UCM_ESHUTDOWN || rc == -UCM_ENOTFOUND;
}

static int run(struct publisher *p)
{
    const struct ucm_options options = {.socket = args_text(p->a, "socket"), .name = "ucmevents"};
    bool away = false, asked = false;

    while (!program_interrupted && !p->failed) {
        int rc = p->client ? 0 : answer_connect(&options, RETRY_MS, &p->client);

        if (rc == 0)
            rc = step(p, p->client);
        if (rc < 0 && !may_pass(rc))
            return program_fail(PROGRAM_EXIT_FAILED, "%s",
                                ucm_errmsg()[0] ? ucm_errmsg() : ucm_strerror(rc));
        if (rc < 0 && !away)
            fprintf(stderr, "ucmevents: trying again: %s\n",
                    ucm_errmsg()[0] ? ucm_errmsg() : ucm_strerror(rc));
        if (rc == 0 && away)
            fprintf(stderr, "ucmevents: it works again\n");
        away = rc < 0;
        asked = outlet_serve(p->outlet) || asked;
        if (away) {
            nap(RETRY_MS);
        } else if (asked && now_ms() >= p->list_from_ms) {
            asked = false; /* a new subscriber knows nothing of blocks stored before */
            p->whole = list_all(p, false) == 0;
        }
    }
    return p->failed ? out_of_memory() : 0;
}

/* "dram=CPU,nvme=STORAGE,shared=STORAGE", each once. */
static int media_parse(const struct args *a, char text[256], const char *media[4])
{
    static const char *const tiers[] = {NULL, "dram=", "nvme=", "shared="};

    snprintf(text, 256, "%s", args_text(a, "media"));
    for (char *word = strtok(text, ","); word; word = strtok(NULL, ","))
        for (int i = 1; i < 4; i++)
            if (strncmp(word, tiers[i], strlen(tiers[i])) == 0 && word[strlen(tiers[i])] != '\0')
                media[i] = word + strlen(tiers[i]);
    if (media[1] && media[2] && media[3])
        return 0;
    return program_usage_error(a, "--media wants dram=NAME,nvme=NAME,shared=NAME");
}

int cmd_publish(const struct args *a)
{
    struct outlet_config outlet = {.endpoint = args_text(a, "endpoint"),
                                   .replay = args_text(a, "replay"),
                                   .steps = (uint32_t)args_number(a, "steps"),
                                   .bytes = args_number(a, "memory")};
    struct batch_form form = {.hash_bytes = args_number(a, "hashes") == 1,
                              .arrays = args_number(a, "format") == 1,
                              .rank = (uint32_t)args_number(a, "rank")};
    struct publisher p = {.a = a};
    char media[256];
    int rc = media_parse(a, media, p.media);

    if (rc != 0)
        return rc;
    signal(SIGINT, program_interrupt);
    signal(SIGTERM, program_interrupt);
    p.batch = batch_new(&form);
    if (!p.batch)
        return out_of_memory();
    rc = outlet_open(&outlet, &p.outlet) == 0 ? run(&p) : PROGRAM_EXIT_FAILED;
    ucm_close(p.client);
    outlet_close(p.outlet);
    batch_free(p.batch);
    spaces_forget(&p, true);
    free(p.spaces);
    return rc;
}

/* record: what a site's engines look up and store, as a trace that names no key. The daemon streams
 * the keys to this operator's connection, through the bounded ring of `trace`. docs/capacity.md
 * has the format.
 *
 * A block's number is the order of its first appearance. To find it again the recorder keeps salted
 * hashes in memory only, so that nothing in the file leads back to a key, and two files have nothing
 * in common. */
#include "client/bench/bench.h"
#include "client/ctl/answer.h"

#include <errno.h>
#include <inttypes.h>
#include <openssl/sha.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#define FORMAT_VERSION 1
#define POLL_NS 20000000
#define LIMIT_MARGIN_MS 10000 /* the daemon ends a trace that nobody ends so long after its time */
#define NAMES_MAX 4096        /* tenants, and namespaces */
#define ASKED_PLACES 4096

struct known {
    uint64_t hash[2]; /* of salt, namespace and key; both 0: an empty place */
    uint64_t id;
};

struct space {
    uint64_t ns;
    uint32_t tenant;
};

struct record {
    const struct args *args;
    struct ucm_client *client;
    FILE *out;
    const char *path;
    uint8_t salt[32];
    struct known *known;
    size_t n_known, known_cap;
    char *tenant[NAMES_MAX];
    struct space space[NAMES_MAX];
    uint32_t tenants, spaces;
    /* What an engine's request asked for last, by the hash of its id: engines ask again while a
     * request waits. */
    uint64_t asked[ASKED_PLACES][2];
    uint64_t lookups, dumps, repeated, lost, last_us;
    struct progress progress;
};

/* ---- numbers for names ---- */

static void hash_of(const struct record *r, uint64_t ns, const void *p, size_t n, uint64_t out[2])
{
    uint8_t digest[SHA256_DIGEST_LENGTH], bytes[sizeof r->salt + 8 + UCM_MAX_KEY_BYTES + 64];
    size_t at = sizeof r->salt + 8;

    memcpy(bytes, r->salt, sizeof r->salt);
    memcpy(bytes + sizeof r->salt, &ns, 8);
    n = n < sizeof bytes - at ? n : sizeof bytes - at;
    memcpy(bytes + at, p, n);
    SHA256(bytes, at + n, digest);
    memcpy(out, digest, 16);
    out[0] |= 1;
}

static struct known *known_place(struct known *known, size_t cap, const uint64_t hash[2])
{
    size_t at = hash[1] % cap;

    while (known[at].hash[0] != 0 && (known[at].hash[0] != hash[0] || known[at].hash[1] != hash[1]))
        at = (at + 1) % cap;
    return &known[at];
}

static int known_grow(struct record *r)
{
    size_t cap = r->known_cap ? 2 * r->known_cap : 1 << 16;
    struct known *known = calloc(cap, sizeof *known);

    if (known == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < r->known_cap; i++)
        if (r->known[i].hash[0] != 0)
            *known_place(known, cap, r->known[i].hash) = r->known[i];
    free(r->known);
    r->known = known;
    r->known_cap = cap;
    return 0;
}

static int block_id(struct record *r, uint64_t ns, const uint8_t *key, size_t key_bytes,
                    uint64_t *id)
{
    uint64_t hash[2];
    struct known *k;

    if (4 * r->n_known >= 3 * r->known_cap && known_grow(r) != 0)
        return -ENOMEM;
    hash_of(r, ns, key, key_bytes, hash);
    k = known_place(r->known, r->known_cap, hash);
    if (k->hash[0] == 0)
        *k = (struct known){{hash[0], hash[1]}, r->n_known++};
    *id = k->id;
    return 0;
}

/* From 1; 0: there are too many. */
static uint32_t tenant_number(struct record *r, const char *name)
{
    for (uint32_t i = 0; i < r->tenants; i++)
        if (strcmp(r->tenant[i], name) == 0)
            return i + 1;
    if (r->tenants == NAMES_MAX || (r->tenant[r->tenants] = strdup(name)) == NULL)
        return 0;
    return ++r->tenants;
}

/* The same; writes the line of a namespace that is new. */
static uint32_t space_number(struct record *r, uint32_t tenant, const msgpack_object *record)
{
    uint64_t ns = answer_u64(record, "ns");

    for (uint32_t i = 0; i < r->spaces; i++)
        if (r->space[i].ns == ns && r->space[i].tenant == tenant)
            return i + 1;
    if (r->spaces == NAMES_MAX)
        return 0;
    r->space[r->spaces++] = (struct space){ns, tenant};
    fprintf(r->out,
            "{\"define\":\"namespace\",\"namespace\":%" PRIu32 ",\"tenant\":%" PRIu32
            ",\"block_bytes\":%" PRIu64 ",\"block_tokens\":%" PRIu64 "}\n",
            r->spaces, tenant, answer_u64(record, "block_bytes"),
            answer_u64(record, "block_tokens"));
    return r->spaces;
}

/* ---- records ---- */

/* Whether the engine's request has asked for just these keys the last time. */
static bool asked_again(struct record *r, const msgpack_object *record, const msgpack_object *keys)
{
    char request[UCM_MAX_REQUEST_BYTES * 4 + 1];
    uint64_t who[2], what;
    uint8_t digest[SHA256_DIGEST_LENGTH];
    uint64_t *place;
    bool again;

    answer_text(record, "request", request, sizeof request);
    if (request[0] == '\0')
        return false;
    hash_of(r, answer_u64(record, "ns"), request, strlen(request), who);
    SHA256((const uint8_t *)keys->via.bin.ptr, keys->via.bin.size, digest);
    memcpy(&what, digest, sizeof what);
    place = r->asked[who[1] % ASKED_PLACES];
    again = place[0] == who[0] && place[1] == what;
    place[0] = who[0];
    place[1] = what;
    return again;
}

static int ids_write(struct record *r, uint64_t ns, const msgpack_object *keys, uint64_t n)
{
    size_t key_bytes = n > 0 ? keys->via.bin.size / n : 0;
    uint64_t id;

    for (uint64_t i = 0; i < n; i++) {
        if (block_id(r, ns, (const uint8_t *)keys->via.bin.ptr + i * key_bytes, key_bytes, &id) !=
            0)
            return program_fail(BENCH_FAILED, "memory ran out after %zu blocks", r->n_known);
        fprintf(r->out, "%s%" PRIu64, i > 0 ? "," : "", id);
    }
    return 0;
}

static int record_write(struct record *r, const msgpack_object *record)
{
    const msgpack_object *keys = answer_get(record, "keys");
    uint64_t n = answer_u64(record, "n_keys"), ns = answer_u64(record, "ns");
    uint64_t lost = answer_u64(record, "lost"), ms = answer_u64(record, "start_us") / 1000;
    char method[16], name[260];
    uint32_t tenant, space;
    bool dump, each = answer_flag(record, "per_key");
    int rc;

    r->last_us = answer_u64(record, "start_us");
    if (lost > 0)
        fprintf(r->out, "{\"timestamp\":%" PRIu64 ",\"lost\":%" PRIu64 "}\n", ms, lost);
    dump = strcmp(answer_text(record, "method", method, sizeof method), "dump") == 0;
    if (keys == NULL || keys->type != MSGPACK_OBJECT_BIN || n == 0 || n > UCM_MAX_KEYS)
        return program_fail(BENCH_FAILED, "the daemon sent a record that is none");
    if (!dump && asked_again(r, record, keys)) {
        r->repeated++;
        return 0;
    }
    tenant = tenant_number(r, answer_text(record, "tenant", name, sizeof name));
    space = space_number(r, tenant, record);
    if (tenant == 0 || space == 0)
        return program_fail(BENCH_FAILED, "more than %d tenants or namespaces", NAMES_MAX);
    fprintf(r->out, "{\"timestamp\":%" PRIu64 ",\"%s\":[", ms,
            dump   ? "dumped_ids"
            : each ? "each_ids"
                   : "hash_ids");
    rc = ids_write(r, ns, keys, n);
    fprintf(r->out, "],\"tenant\":%" PRIu32 ",\"namespace\":%" PRIu32, tenant, space);
    if (!dump && !each)
        fprintf(r->out, ",\"input_length\":%" PRIu64 ",\"output_length\":0",
                n * answer_u64(record, "block_tokens"));
    fprintf(r->out, "}\n");
    r->lookups += !dump;
    r->dumps += dump;
    return rc;
}

/* ---- the recording ---- */

static int call(struct record *r, const struct msg_trace *m, struct answer *out)
{
    int rc = answer_call(r->client, UCM_METHOD_TRACE, m, (int)args_number(r->args, "timeout"), out);

    if (rc < 0)
        return program_fail(rc == -UCM_EDISCONNECTED || rc == -UCM_ENODAEMON ? BENCH_NO_DAEMON
                                                                             : BENCH_FAILED,
                            "%s", ucm_errmsg());
    return 0;
}

static void show(struct record *r)
{
    if (progress_due(&r->progress))
        progress_show(&r->progress,
                      "%" PRIu64 " lookups, %" PRIu64 " dumps, %zu blocks, %" PRIu64 " lost",
                      r->lookups, r->dumps, r->n_known, r->lost);
}

static int read_all(struct record *r)
{
    struct msg_trace read = {.op = UCM_TRACE_READ}, stop = {.op = UCM_TRACE_STOP};
    const struct timespec pause = {.tv_nsec = POLL_NS};
    uint64_t end_ns = clock_ns() + args_number(r->args, "seconds") * 1000000;
    bool ending = false, more = true;
    struct answer page;
    int rc = 0;

    while (rc == 0 && (!ending || more)) {
        ending = ending || program_interrupted || clock_ns() >= end_ns;
        rc = call(r, ending ? &stop : &read, &page);
        if (rc != 0)
            return rc;
        for (uint32_t i = 0; rc == 0 && i < answer_count(page.root, "records"); i++)
            rc = record_write(r, answer_at(page.root, "records", i));
        more = answer_flag(page.root, "more");
        r->lost = answer_u64(page.root, "lost");
        answer_close(&page);
        show(r);
        if (!ending && !more && rc == 0)
            nanosleep(&pause, NULL);
    }
    progress_end(&r->progress);
    return rc;
}

static int report(const struct record *r)
{
    struct report out;

    report_begin(&out, "record", args_given(r->args, "json"));
    report_text(&out, "file", r->path);
    report_number(&out, "lookups", (double)r->lookups);
    report_number(&out, "dumps", (double)r->dumps);
    report_number(&out, "repeated", (double)r->repeated);
    report_number(&out, "blocks", (double)r->n_known);
    report_number(&out, "tenants", r->tenants);
    report_number(&out, "namespaces", r->spaces);
    report_number(&out, "lost", (double)r->lost);
    return report_end(&out) < 0 ? BENCH_FAILED : 0;
}

static int record_file(struct record *r)
{
    int rc;

    r->out = fopen(r->path, "we");
    if (r->out == NULL)
        return program_fail(BENCH_FAILED, "%s: %s", r->path, strerror(errno));
    fprintf(r->out, "{\"ucm_trace\":%d,\"program\":\"ucm-bench " UCM_VERSION "\"}\n",
            FORMAT_VERSION);
    rc = read_all(r);
    fprintf(r->out,
            "{\"end\":true,\"timestamp\":%" PRIu64 ",\"lookups\":%" PRIu64 ",\"dumps\":%" PRIu64
            ",\"repeated\":%" PRIu64 ",\"blocks\":%zu,\"lost\":%" PRIu64 "}\n",
            r->last_us / 1000, r->lookups, r->dumps, r->repeated, r->n_known, r->lost);
    if ((ferror(r->out) | fclose(r->out)) != 0 && rc == 0)
        rc = program_fail(BENCH_FAILED, "%s: %s", r->path, strerror(errno));
    return rc != 0 ? rc : report(r);
}

static int params_read(const struct args *a, struct msg_trace *m)
{
    const char *tenant = args_text(a, "tenant");

    *m = (struct msg_trace){.op = UCM_TRACE_START,
                            .keys = true,
                            .limit_ms = args_number(a, "seconds") + LIMIT_MARGIN_MS,
                            .bytes = args_number(a, "ring")};
    if (tenant != NULL && strlen(tenant) > UCM_MAX_NAME_BYTES)
        return program_usage_error(a, "--tenant: a name has at most %d bytes", UCM_MAX_NAME_BYTES);
    if (tenant != NULL)
        m->tenant = (struct proto_str){tenant, (uint32_t)strlen(tenant)};
    return 0;
}

static int record_open(struct record *r)
{
    const struct args *a = r->args;
    struct ucm_options options = {.socket = program_socket(a),
                                  .name = program_name(),
                                  .default_timeout_ms = (int)args_number(a, "timeout")};
    struct msg_trace start;
    struct answer answer;
    int rc = params_read(a, &start);

    if (rc != 0)
        return rc;
    if (getrandom(r->salt, sizeof r->salt, 0) != sizeof r->salt)
        return program_fail(BENCH_FAILED, "the kernel gives no random bytes");
    if (answer_connect(&options, options.default_timeout_ms, &r->client) < 0)
        return program_fail(BENCH_NO_DAEMON, "%s", ucm_errmsg());
    rc = call(r, &start, &answer);
    if (rc == 0)
        answer_close(&answer);
    return rc;
}

int bench_record(const struct args *a)
{
    struct record *r = calloc(1, sizeof *r);
    struct sigaction action = {.sa_handler = program_interrupt};
    int rc;

    if (r == NULL)
        return program_fail(BENCH_FAILED, "memory ran out");
    r->args = a;
    r->path = args_text(a, "out");
    progress_begin(&r->progress, args_given(a, "quiet"));
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    rc = r->path == NULL ? program_usage_error(a, "--out FILE says where to write the trace")
                         : record_open(r);
    if (rc == 0)
        rc = record_file(r);
    ucm_close(r->client);
    for (uint32_t i = 0; i < r->tenants; i++)
        free(r->tenant[i]);
    free(r->known);
    free(r);
    return rc;
}

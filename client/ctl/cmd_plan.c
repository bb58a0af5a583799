/* plan: what a model's KV takes, what a host holds of it, and what to buy. */
#include "client/ctl/ctl.h"
#include "client/ctl/kv_size.h"
#include "client/ctl/trace_hits.h"
#include "proto/units.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define CONFIG_BYTES (1u << 20)
#define GIB (UINT64_C(1) << 30)
#define NVME_PATH_MAX (16384 * GIB) /* of nvme.size */

/* nvme.backlog's default: DRAM that dumps may fill while the disks write. */
#define BACKLOG GIB
/* Percent of the NVMe tier that segments take which are being written or emptied. */
#define NVME_SPARE 10
/* index.max_blocks' default. */
#define USUAL_BLOCKS 16777216u
#define ONE_BLOCK_BYTES 128u /* of the index, for each of these */

struct plan {
    const struct args *a;
    struct kv_model model;
    struct kv_shape shape;
    struct kv_sizes sizes;
    uint64_t dram, nvme; /* bytes that there are; 0: not asked */
    bool from_daemon;
    uint64_t length, requests, history; /* length 0: not asked */
    struct trace_hits trace;            /* blocks 0: not asked */
};

/* What to buy. */
struct needs {
    uint64_t dram, nvme, blocks, index;
};

/* ---- input ---- */

/* A file of at most CONFIG_BYTES, or config.json in a folder. */
static int read_file(const char *path, char **out)
{
    char inside[4096];
    struct stat st;
    size_t n;
    FILE *f;

    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
        snprintf(inside, sizeof inside, "%s/config.json", path);
        path = inside;
    }
    f = fopen(path, "r");
    if (f == NULL)
        return ctl_fail(CTL_ERROR, "%s: %s", path, strerror(errno));
    *out = calloc(1, CONFIG_BYTES + 1);
    n = *out != NULL ? fread(*out, 1, CONFIG_BYTES, f) : 0;
    if (*out == NULL || ferror(f) || n == CONFIG_BYTES) {
        fclose(f);
        free(*out);
        return ctl_fail(CTL_ERROR, "%s: %s", path,
                        n == CONFIG_BYTES ? "larger than any config.json" : "can't be read");
    }
    fclose(f);
    return CTL_OK;
}

static int read_model(struct plan *p)
{
    const char *path = p->a->word[0];
    char *text, why[KV_WHY_BYTES] = "this is no JSON";
    int rc = read_file(path, &text);
    cJSON *config;

    if (rc != CTL_OK)
        return rc;
    config = cJSON_Parse(text);
    free(text);
    if (config == NULL || kv_model_read(config, &p->model, why) != 0)
        rc = ctl_fail(CTL_ERROR, "%s: %s", path, why);
    cJSON_Delete(config);
    return rc;
}

static int read_shape(struct plan *p)
{
    static const uint32_t bits[] = {0, 32, 16, 16, 8, 8, 4};
    char why[KV_WHY_BYTES];

    p->shape = (struct kv_shape){
        .tp = (uint32_t)args_number(p->a, "tp"),
        .pp = (uint32_t)args_number(p->a, "pp"),
        .block_tokens = (uint32_t)args_number(p->a, "block-tokens"),
        .value_bits = bits[args_number(p->a, "kv-dtype")],
    };
    if (kv_sizes(&p->model, &p->shape, &p->sizes, why) != 0)
        return ctl_fail(CTL_ERROR, "%s", why);
    return CTL_OK;
}

/* The sizes of the daemon that runs here, if one does: nothing is wrong without. */
static void ask_daemon(struct plan *p)
{
    const struct ucm_options options = {.name = program_name(), .socket = ctl_socket(p->a)};
    struct ucm_client *client;
    struct answer stats;

    if (answer_connect(&options, (int)args_number(p->a, "timeout"), &client) != 0)
        return;
    if (answer_call(client, UCM_METHOD_STATS, NULL, (int)args_number(p->a, "timeout"), &stats) ==
        0) {
        const msgpack_object *m = answer_get(stats.root, "metrics");

        p->dram = answer_u64(m, "arena_bytes_configured");
        p->nvme = answer_u64(m, "nvme_bytes_capacity");
        p->from_daemon = true;
        answer_close(&stats);
    }
    ucm_close(client);
}

/* ---- arithmetic ---- */

static uint64_t up(uint64_t v, uint64_t unit)
{
    return (v + unit - 1) / unit * unit;
}

static uint64_t blocks_of(const struct plan *p, uint64_t tokens)
{
    return up(tokens, p->shape.block_tokens) / p->shape.block_tokens;
}

static struct needs needs(const struct plan *p)
{
    uint64_t one = blocks_of(p, p->length);
    struct needs n = {.blocks = one * (p->requests + p->history)};

    n.dram = kv_dram_bytes(&p->sizes, one * p->requests);
    if (p->history > 0) {
        n.dram += BACKLOG;
        n.nvme = kv_nvme_bytes(&p->sizes, n.blocks);
        n.nvme = up(n.nvme + n.nvme * NVME_SPARE / (100 - NVME_SPARE), GIB);
    }
    n.dram = up(n.dram, GIB);
    n.index = n.blocks * p->sizes.index_bytes;
    return n;
}

/* What index.max_blocks has to be for so many: one of more parts counts as more. */
static uint64_t max_blocks(const struct plan *p, uint64_t blocks)
{
    return up(blocks * p->sizes.index_bytes, ONE_BLOCK_BYTES) / ONE_BLOCK_BYTES;
}

/* Blocks held: what lies in DRAM lies on NVMe too, once it is written. */
static uint64_t blocks_held(const struct plan *p)
{
    uint64_t dram = kv_dram_blocks(&p->sizes, p->dram), nvme = kv_nvme_blocks(&p->sizes, p->nvme);

    return dram > nvme ? dram : nvme;
}

/* What half, as much, twice and four times of a tier's size would hit. */
static const unsigned halves[] = {1, 2, 4, 8};
#define SIZES (sizeof halves / sizeof halves[0])
/* Of the hits that an endless cache has. */
static const unsigned percents[] = {50, 90, 99};
#define PERCENTS (sizeof percents / sizeof percents[0])

static uint64_t half_times(uint64_t bytes, unsigned n)
{
    return bytes / 2 * n;
}

static uint32_t hit_dram(const struct plan *p, uint64_t bytes)
{
    return trace_hits_permille(&p->trace, kv_dram_blocks(&p->sizes, bytes) * p->shape.block_tokens);
}

/* What lies in DRAM lies on NVMe too, once it is written. */
static uint32_t hit_nvme(const struct plan *p, uint64_t bytes)
{
    uint32_t nvme = trace_hits_permille(&p->trace,
                                        kv_nvme_blocks(&p->sizes, bytes) * p->shape.block_tokens),
             dram = hit_dram(p, p->dram);

    return dram > nvme ? dram : nvme;
}

/* ---- JSON ---- */

static void json_hits(cJSON *j, const char *name, const struct plan *p, uint64_t bytes,
                      uint32_t (*hit)(const struct plan *p, uint64_t bytes))
{
    cJSON *all = bytes > 0 ? cJSON_AddArrayToObject(j, name) : NULL;

    for (unsigned i = 0; all != NULL && i < SIZES; i++) {
        cJSON *o = cJSON_CreateObject();

        ctl_json_u64(o, "bytes", half_times(bytes, halves[i]));
        ctl_json_u64(o, "permille", hit(p, half_times(bytes, halves[i])));
        cJSON_AddItemToArray(all, o);
    }
}

static void json_trace(cJSON *j, const struct plan *p)
{
    cJSON *o = cJSON_AddObjectToObject(j, "trace"), *all;

    ctl_json_u64(o, "lookups", p->trace.lookups);
    ctl_json_u64(o, "blocks", p->trace.blocks);
    ctl_json_u64(o, "tokens", p->trace.tokens);
    ctl_json_u64(o, "permille", trace_hits_permille(&p->trace, UINT64_MAX));
    json_hits(o, "dram", p, p->dram, hit_dram);
    json_hits(o, "nvme", p, p->nvme, hit_nvme);
    all = cJSON_AddArrayToObject(o, "needs");
    for (unsigned i = 0; i < PERCENTS; i++) {
        uint64_t tokens = trace_hits_tokens(&p->trace, percents[i]);
        cJSON *need = cJSON_CreateObject();

        ctl_json_u64(need, "percent", percents[i]);
        ctl_json_u64(need, "tokens", tokens);
        ctl_json_u64(need, "dram_bytes", kv_dram_bytes(&p->sizes, blocks_of(p, tokens)));
        cJSON_AddItemToArray(all, need);
    }
}

static void json_model(cJSON *j, const struct plan *p)
{
    const struct kv_model *m = &p->model;
    cJSON *o = cJSON_AddObjectToObject(j, "model");

    cJSON_AddStringToObject(o, "type", m->type);
    ctl_json_u64(o, "layers", m->layers);
    ctl_json_u64(o, "sliding_layers", m->sliding_layers);
    ctl_json_u64(o, "window", m->window);
    ctl_json_u64(o, "recurrent_layers", m->recurrent_layers);
    cJSON_AddBoolToObject(o, "mla", m->mla != 0);
    ctl_json_u64(o, "kv_heads", m->heads);
    ctl_json_u64(o, "k_dim", m->k_dim);
    ctl_json_u64(o, "v_dim", m->v_dim);
    ctl_json_u64(o, "value_bits", p->shape.value_bits > 0 ? p->shape.value_bits : m->value_bits);
    ctl_json_u64(o, "max_tokens", m->max_tokens);
}

static void json_sizes(cJSON *j, const struct plan *p)
{
    const struct kv_sizes *s = &p->sizes;
    cJSON *o = cJSON_AddObjectToObject(j, "bytes");

    ctl_json_u64(o, "token", s->token_bytes);
    ctl_json_u64(o, "token_rank", s->rank_token_bytes);
    ctl_json_u64(o, "block", s->block_bytes);
    ctl_json_u64(o, "part", s->part_bytes);
    ctl_json_u64(o, "slot", s->slot_bytes);
    ctl_json_u64(o, "record", s->record_bytes);
    ctl_json_u64(o, "index", s->index_bytes);
    ctl_json_u64(j, "parts", s->parts);
    ctl_json_u64(j, "block_tokens", p->shape.block_tokens);
}

static int print_json(const struct plan *p)
{
    cJSON *j = cJSON_CreateObject(), *o;

    json_model(j, p);
    json_sizes(j, p);
    if (p->dram > 0 || p->nvme > 0) {
        o = cJSON_AddObjectToObject(j, "holds");
        cJSON_AddBoolToObject(o, "from_daemon", p->from_daemon);
        ctl_json_u64(o, "dram_bytes", p->dram);
        ctl_json_u64(o, "nvme_bytes", p->nvme);
        ctl_json_u64(o, "dram_tokens", kv_dram_blocks(&p->sizes, p->dram) * p->shape.block_tokens);
        ctl_json_u64(o, "nvme_tokens", kv_nvme_blocks(&p->sizes, p->nvme) * p->shape.block_tokens);
        ctl_json_u64(o, "index_bytes", blocks_held(p) * p->sizes.index_bytes);
    }
    if (p->length > 0) {
        struct needs n = needs(p);

        o = cJSON_AddObjectToObject(j, "buy");
        ctl_json_u64(o, "dram_bytes", n.dram);
        ctl_json_u64(o, "nvme_bytes", n.nvme);
        ctl_json_u64(o, "index_bytes", n.index);
        ctl_json_u64(o, "blocks", n.blocks);
    }
    if (p->trace.blocks > 0)
        json_trace(j, p);
    return ctl_print_json(j, false);
}

/* ---- text ---- */

static void print_model(const struct plan *p)
{
    const struct kv_model *m = &p->model;

    printf("model      %s: %" PRIu32 " layers", m->type[0] != '\0' ? m->type : "unknown type",
           m->layers);
    if (m->mla)
        printf(", MLA with %" PRIu32 " values", m->k_dim);
    else
        printf(", %" PRIu32 " KV heads of %" PRIu32, m->heads, m->k_dim);
    printf(", %s", p->shape.value_bits > 0 ? args_text(p->a, "kv-dtype") : m->dtype);
    if (m->max_tokens > 0)
        printf(", up to %" PRIu32 " tokens", m->max_tokens);
    printf("\n");
    if (m->sliding_layers > 0)
        printf("           %" PRIu32 " layers attend to the last %" PRIu32
               " tokens only; all tokens of theirs are stored\n",
               m->sliding_layers, m->window);
    if (m->recurrent_layers > 0)
        printf("           %" PRIu32
               " more layers keep a state a sequence, not KV: not counted, and vLLM's connector "
               "refuses such models\n",
               m->recurrent_layers);
}

static void print_sizes(const struct plan *p)
{
    const struct kv_sizes *s = &p->sizes;
    char a[HUMAN_BYTES], b[HUMAN_BYTES], c[HUMAN_BYTES];

    printf("a token    %s (%" PRIu64 " bytes)", human_bytes(a, s->token_bytes), s->token_bytes);
    if (p->shape.tp * p->shape.pp > 1)
        printf(", %s in each rank's GPU", human_bytes(a, s->rank_token_bytes));
    printf("\na block    %s for %" PRIu32 " tokens", human_bytes(a, s->block_bytes),
           p->shape.block_tokens);
    if (s->parts > 1)
        printf(", in %" PRIu32 " parts of %s", s->parts, human_bytes(b, s->part_bytes));
    printf("; %s in DRAM, %s on NVMe, %" PRIu64 " B of index\n",
           human_bytes(a, s->slot_bytes * s->parts), human_bytes(c, s->record_bytes * s->parts),
           s->index_bytes);
    if (s->extent > 64u << 20)
        printf("           such parts need arena.extent and nvme.segment of %s\n",
               human_bytes(a, s->extent));
}

static const char *human_count(char buf[HUMAN_BYTES], uint64_t n)
{
    if (n < 1000000)
        snprintf(buf, HUMAN_BYTES, "%" PRIu64, n);
    else if (n < 1000000000)
        snprintf(buf, HUMAN_BYTES, "%.2f million", (double)n / 1e6);
    else
        snprintf(buf, HUMAN_BYTES, "%.2f billion", (double)n / 1e9);
    return buf;
}

static void print_held(const struct plan *p, const char *tier, uint64_t bytes, uint64_t blocks)
{
    uint64_t tokens = blocks * p->shape.block_tokens;
    char a[HUMAN_BYTES], b[HUMAN_BYTES];

    if (bytes == 0)
        return;
    printf("%-10s %s: %s tokens", tier, human_bytes(a, bytes), human_count(b, tokens));
    if (p->length > 0)
        printf(", %" PRIu64 " requests of %" PRIu64, tokens / p->length, p->length);
    printf("\n");
}

static void print_holds(const struct plan *p)
{
    uint64_t blocks = blocks_held(p);
    char a[HUMAN_BYTES];

    if (p->dram == 0 && p->nvme == 0)
        return;
    printf("\n%s\n", p->from_daemon ? "The daemon here:" : "Such a host:");
    print_held(p, "dram", p->dram, kv_dram_blocks(&p->sizes, p->dram));
    print_held(p, "nvme", p->nvme, kv_nvme_blocks(&p->sizes, p->nvme));
    printf("index      %s beside the arena", human_bytes(a, blocks * p->sizes.index_bytes));
    if (max_blocks(p, blocks) > USUAL_BLOCKS)
        printf("; index.max_blocks: %" PRIu64 " at least", max_blocks(p, blocks));
    printf("\n");
}

/* What to write into ucmd.yaml: sizes of each path, since one has a bound. */
static void print_keys(const struct plan *p, const struct needs *n)
{
    uint64_t paths = up(n->nvme, NVME_PATH_MAX) / NVME_PATH_MAX;
    char extent[UNITS_TEXT_BYTES];
    bool large = p->sizes.extent > 64u << 20;

    units_size_text(extent, p->sizes.extent);
    printf("\nucmd.yaml");
    if (paths > 1)
        printf(", with %" PRIu64 " entries in nvme.paths", paths);
    printf(":\n  arena: {size: %" PRIu64 "GiB%s%s}\n", n->dram / GIB, large ? ", extent: " : "",
           large ? extent : "");
    if (n->nvme > 0)
        printf("  nvme: {size: %" PRIu64 "GiB%s%s}\n", up(n->nvme / paths, GIB) / GIB,
               large ? ", segment: " : "", large ? extent : "");
    if (max_blocks(p, n->blocks) > USUAL_BLOCKS)
        printf("  index: {max_blocks: %" PRIu64 "}\n", max_blocks(p, n->blocks));
}

static void print_needs(const struct plan *p)
{
    struct needs n = needs(p);
    char a[HUMAN_BYTES];

    printf("\nFor %" PRIu64 " request%s of %" PRIu64 " tokens at once", p->requests,
           p->requests == 1 ? "" : "s", p->length);
    if (p->history > 0)
        printf(", and %" PRIu64 " earlier ones", p->history);
    printf(":\ndram       %s: the requests", human_bytes(a, n.dram));
    if (p->history > 0)
        printf(", and %s that wait for the disks", human_bytes(a, BACKLOG));
    printf("\n");
    if (p->history > 0)
        printf("nvme       %s: all of them, and %d %% for segments that are being emptied\n",
               human_bytes(a, n.nvme), NVME_SPARE);
    printf("index      %s beside the arena\n", human_bytes(a, n.index));
    print_keys(p, &n);
}

static void print_hits(const struct plan *p, const char *tier, uint64_t bytes,
                       uint32_t (*hit)(const struct plan *p, uint64_t bytes))
{
    char a[HUMAN_BYTES];

    if (bytes == 0)
        return;
    printf("%-10s ", tier);
    for (unsigned i = 0; i < SIZES; i++) {
        uint64_t size = half_times(bytes, halves[i]);

        printf("%s%s: %.1f %%", i > 0 ? ", " : "", human_bytes(a, size), hit(p, size) / 10.0);
    }
    printf("\n");
}

static void print_trace(const struct plan *p)
{
    const struct trace_hits *h = &p->trace;
    char a[HUMAN_BYTES], b[HUMAN_BYTES];

    printf("\nThe trace: %" PRIu64 " lookups of %s blocks, %s tokens in all. With room for them "
           "%.1f %% of the blocks hit:\n",
           h->lookups, human_count(a, h->blocks), human_count(b, h->tokens),
           trace_hits_permille(h, UINT64_MAX) / 10.0);
    print_hits(p, "dram", p->dram, hit_dram);
    print_hits(p, "nvme", p->nvme, hit_nvme);
    for (unsigned i = 0; i < PERCENTS && h->n > 0; i++) {
        uint64_t tokens = trace_hits_tokens(h, percents[i]);

        printf("%s%u %% of these hits: %s of DRAM, %s tokens\n",
               i > 0 ? "           " : "needed     ", percents[i],
               human_bytes(a, kv_dram_bytes(&p->sizes, blocks_of(p, tokens))),
               human_count(b, tokens));
    }
}

static int read_trace(struct plan *p)
{
    const char *path = args_text(p->a, "trace");
    char why[TRACE_WHY_BYTES];

    if (path == NULL || trace_hits_read(path, p->shape.block_tokens, &p->trace, why) == 0)
        return CTL_OK;
    trace_hits_free(&p->trace);
    return ctl_fail(CTL_ERROR, "%s", why);
}

int cmd_plan(const struct args *a)
{
    struct plan p = {.a = a,
                     .dram = args_number(a, "dram"),
                     .nvme = args_number(a, "nvme"),
                     .length = args_number(a, "length"),
                     .requests = args_number(a, "requests"),
                     .history = args_number(a, "history")};
    int rc;

    if (p.length == 0 && (args_given(a, "requests") || args_given(a, "history")))
        return program_usage_error(a, "--requests and --history go with --length");
    rc = read_model(&p);
    if (rc == CTL_OK)
        rc = read_shape(&p);
    if (rc == CTL_OK)
        rc = read_trace(&p);
    if (rc != CTL_OK)
        return rc;
    if (p.dram == 0 && p.nvme == 0 && p.length == 0)
        ask_daemon(&p);
    if (args_given(a, "json")) {
        rc = print_json(&p);
        trace_hits_free(&p.trace);
        return rc;
    }
    print_model(&p);
    print_sizes(&p);
    print_holds(&p);
    if (p.length > 0)
        print_needs(&p);
    if (p.trace.blocks > 0)
        print_trace(&p);
    trace_hits_free(&p.trace);
    return CTL_OK;
}

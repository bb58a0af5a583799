/* select: scoring and choosing of one layer's blocks, beside a plain read of as many bytes; needs no
 * daemon. */
#include "client/bench/select.h"
#include "client/bench/bench.h"
#include "kernels/isa.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const struct select_device devices[] = {
    {"cpu", "memory read", 1.5, 0.7, true, select_measure_cpu},
    {"gpu", "GPU memory read", 0.03, 0, false, select_measure_gpu},
};

/* What a layer's time is held against: 8,192 blocks of 8 KV heads x 128, 2 threads. */
#define AIM_BLOCKS 8192
#define AIM_KV_HEADS 8
#define AIM_HEAD_DIM 128
#define AIM_THREADS 2

/* ---- data ---- */

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

void select_fill_queries(const struct select_case *c, float *q)
{
    size_t n = (size_t)c->score.rows * c->score.q_heads * c->plan.spec.shape.head_dim;

    for (size_t i = 0; i < n; i++)
        q[i] = (float)(int32_t)(mix(i + 1) >> 40) * 0x1p-23f - 1.0f;
}

static void fill_scales(const struct ucm_digest_plan *plan, uint8_t *digest)
{
    uint32_t heads = plan->spec.shape.kv_heads;
    uint32_t each = plan->spec.method == UCM_DIGEST_STATS ? heads : heads * plan->vectors;
    const uint16_t scale = 0x3c00; /* 1/128 */

    for (int a = 0; a < UCM_DIGEST_ARRAYS && (a == 0 || plan->scale[a] != 0); a++)
        for (uint32_t i = 0; i < each; i++)
            memcpy(digest + plan->scale[a] + 2 * i, &scale, sizeof(scale));
}

void select_fill_digest(const struct ucm_digest_plan *plan, uint64_t seed, uint8_t *digest)
{
    for (uint32_t i = 0; i < plan->bytes; i += 4) {
        uint32_t word = (uint32_t)mix(seed + i);

        memcpy(digest + i, &word, sizeof(word));
    }
    if (plan->spec.method == UCM_DIGEST_HASH)
        memset(digest + plan->array[1], 0, 4 * (size_t)plan->spec.shape.kv_heads);
    else
        fill_scales(plan, digest);
}

/* ---- cases ---- */

static const struct method_case {
    const char *name;
    uint32_t method, bits, run, chosen, rest;
} method_cases[] = {
    {"mean", UCM_DIGEST_MEAN, 0, 0, 0, 0},
    {"submean", UCM_DIGEST_SUBMEAN, 0, 8, 0, 0},
    {"box", UCM_DIGEST_BOX, 0, 0, 0, 0},
    {"hash64", UCM_DIGEST_HASH, 64, 0, 0, 0},
    {"hash128", UCM_DIGEST_HASH, 128, 0, 0, 0},
    {"hash256", UCM_DIGEST_HASH, 256, 0, 0, 0},
    {"stats", UCM_DIGEST_STATS, 0, 0, 0, 0},
    {"tokens", UCM_DIGEST_TOKENS, 0, 0, 2, 0},
    {"rest", UCM_DIGEST_TOKENS, 0, 0, 3, UCM_REST_MEAN},
};

static const struct select_device *device_named(const char *name)
{
    for (size_t i = 0; i < sizeof(devices) / sizeof(devices[0]); i++)
        if (strcmp(devices[i].name, name) == 0)
            return &devices[i];
    return NULL;
}

static const struct method_case *method_named(const char *name)
{
    for (size_t i = 0; i < sizeof(method_cases) / sizeof(method_cases[0]); i++)
        if (strcmp(method_cases[i].name, name) == 0)
            return &method_cases[i];
    return NULL;
}

static struct ucm_digest_spec digest_spec(const struct args *a, const struct method_case *m)
{
    uint32_t heads = (uint32_t)args_number(a, "heads"), d = (uint32_t)args_number(a, "dim");
    bool stats = m->method == UCM_DIGEST_STATS;

    return (struct ucm_digest_spec){
        .method = m->method,
        .run = m->run,
        .bits = m->bits,
        .seed = 1,
        .chosen = m->chosen,
        .rest = m->rest,
        .shape = {.dtype = UCM_KV_BF16,
                  .tokens = (uint32_t)args_number(a, "tokens"),
                  .kv_heads = heads,
                  .head_dim = d,
                  .v_head_dim = stats ? d : 0,
                  .k_token_stride = 2 * (uint64_t)heads * d,
                  .k_head_stride = 2 * (uint64_t)d,
                  .v_offset = stats ? 2 * args_number(a, "tokens") * heads * d : 0,
                  .v_token_stride = stats ? 2 * (uint64_t)heads * d : 0,
                  .v_head_stride = stats ? 2 * (uint64_t)d : 0},
    };
}

/* The parts of a list, one after the other; NULL at its end. Writes into the list. */
static char *next_part(char **list)
{
    char *part = strsep(list, ",");

    while (part != NULL && *part == '\0')
        part = strsep(list, ",");
    return part;
}

static int next_number(char **list, uint32_t least, uint32_t most, uint32_t *out)
{
    char *part = next_part(list), *end;
    unsigned long v;

    if (part == NULL)
        return 0;
    v = strtoul(part, &end, 10);
    if (*end != '\0' || v < least || v > most)
        return -EINVAL;
    *out = (uint32_t)v;
    return 1;
}

/* ---- measuring ---- */

struct select_bench {
    const struct args *args;
    const struct select_device *device;
    struct report report;
    struct select_case c;
};

static bool has_aim(const struct select_bench *b)
{
    const struct select_case *c = &b->c;
    const struct ucm_kv_shape *s = &c->plan.spec.shape;

    return c->blocks == AIM_BLOCKS && s->kv_heads == AIM_KV_HEADS && s->head_dim == AIM_HEAD_DIM &&
           (!b->device->threads || c->threads == AIM_THREADS) &&
           c->plan.spec.method == UCM_DIGEST_MEAN;
}

static void report_case(struct select_bench *b, struct select_result *r)
{
    const struct select_case *c = &b->c;
    double select = samples_at(&r->select, 0.5), read = samples_at(&r->read, 0.5);
    double megabytes = (double)c->blocks * c->plan.bytes / 1e6; /* in a ms: GB/s */
    char name[96], speed[112];

    if (b->device->threads)
        snprintf(name, sizeof(name), "%s %u x%u", c->name, c->blocks, c->threads);
    else
        snprintf(name, sizeof(name), "%s %u", c->name, c->blocks);
    report_figure(&b->report, &(struct figure){.name = name,
                                               .unit = "ms",
                                               .value = select,
                                               .target = has_aim(b) ? b->device->most_ms : 0,
                                               .target_is_value = true});
    snprintf(speed, sizeof(speed), "%s speed", name);
    report_figure(&b->report, &(struct figure){.name = speed,
                                               .unit = "GB/s",
                                               .value = megabytes / select,
                                               .baseline_name = b->device->read_name,
                                               .baseline = megabytes / read,
                                               .target = has_aim(b) ? b->device->least_of_read : 0,
                                               .more_is_better = true});
    if (r->score.n == 0) /* scores and choice are one launch */
        return;
    snprintf(speed, sizeof(speed), "%s scores", name);
    report_figure(
        &b->report,
        &(struct figure){.name = speed, .unit = "ms", .value = samples_at(&r->score, 0.5)});
}

static int measure_case(struct select_bench *b)
{
    struct select_result r = {.select = {.n = 0}};
    char why[SELECT_WHY] = "";
    int rc = b->device->measure(&b->c, &r, why);

    if (rc == 0)
        report_case(b, &r);
    else
        rc = bench_fail(BENCH_FAILED, "%s could not be measured: %s", b->c.name,
                        why[0] != '\0' ? why : strerror(-rc));
    samples_free(&r.select);
    samples_free(&r.score);
    samples_free(&r.read);
    return rc;
}

static int measure_threads(struct select_bench *b)
{
    char text[128], *list = text;
    uint32_t threads;
    int more, rc = 0;

    snprintf(text, sizeof(text), "%s", b->device->threads ? args_text(b->args, "threads") : "1");
    while (rc == 0 && (more = next_number(&list, 1, 64, &threads)) != 0) {
        if (more < 0)
            return program_usage_error(b->args, "--threads is a list of numbers from 1 to 64");
        b->c.threads = threads;
        rc = measure_case(b);
    }
    return rc;
}

static int measure_blocks(struct select_bench *b)
{
    char text[128], *list = text;
    int more, rc = 0;

    snprintf(text, sizeof(text), "%s", args_text(b->args, "blocks"));
    while (rc == 0 && (more = next_number(&list, 1, UCM_SCORE_BLOCKS_MAX, &b->c.blocks)) != 0) {
        if (more < 0)
            return program_usage_error(b->args, "--blocks is a list of numbers up to 2^20");
        rc = measure_threads(b);
    }
    return rc;
}

static int measure_method(struct select_bench *b, const char *name)
{
    const struct method_case *m = method_named(name);
    char why[UCM_SPARSE_WHY];
    struct ucm_digest_spec spec;

    if (m == NULL)
        return program_usage_error(b->args, "--methods: there is no %s", name);
    spec = digest_spec(b->args, m);
    b->c.name = m->name;
    if (ucm_digest_plan_init(&b->c.plan, &spec, why) != 0 ||
        ucm_score_check(&b->c.plan, &b->c.score, why) != 0)
        return program_usage_error(b->args, "%s: %s", m->name, why);
    return measure_blocks(b);
}

static int measure_methods(struct select_bench *b)
{
    char text[256], *list = text, *name;
    int rc = 0;

    snprintf(text, sizeof(text), "%s", args_text(b->args, "methods"));
    while (rc == 0 && (name = next_part(&list)) != NULL)
        rc = measure_method(b, name);
    return rc;
}

static int read_options(struct select_bench *b)
{
    const struct args *a = b->args;

    b->device = device_named(args_text(a, "device"));
    if (b->device == NULL)
        return program_usage_error(a, "--device: there is no %s", args_text(a, "device"));
    b->c.rounds = (unsigned)args_number(a, "rounds");
    b->c.layers = (uint32_t)args_number(a, "layers");
    b->c.score = (struct ucm_score_spec){.reduce = (uint32_t)args_number(a, "reduce"),
                                         .rows = (uint32_t)args_number(a, "rows"),
                                         .q_heads = (uint32_t)args_number(a, "q-heads")};
    ucm_choose_defaults(&b->c.choose);
    b->c.choose.block_tokens = (uint32_t)args_number(a, "tokens");
    b->c.choose.topk_tokens = (uint32_t)args_number(a, "topk-tokens");
    if (args_given(a, "mass"))
        b->c.choose.policy = UCM_CHOOSE_MASS;
    return 0;
}

int bench_select(const struct args *a)
{
    static const char *const isa_names[] = {"plain", "avx2", "avx512"};
    struct select_bench *b = calloc(1, sizeof(*b));
    int rc;

    if (b == NULL)
        return bench_fail(BENCH_FAILED, "memory ran out");
    b->args = a;
    rc = read_options(b);
    if (rc == 0) {
        report_begin(&b->report, "select", args_given(a, "json"));
        report_text(&b->report, "device", b->device->name);
        if (b->device->threads)
            report_text(&b->report, "instruction set", isa_names[ucm_isa()]);
        report_number(&b->report, "KV heads", (double)args_number(a, "heads"));
        report_number(&b->report, "query heads", (double)b->c.score.q_heads);
        report_number(&b->report, "head size", (double)args_number(a, "dim"));
        rc = measure_methods(b);
        if (report_end(&b->report) < 0)
            rc = BENCH_FAILED;
    }
    free(b);
    return rc;
}

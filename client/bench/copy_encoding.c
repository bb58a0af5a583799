/* copy --encoding: loads and dumps of encoded blocks, as GB/s of the KV that the worker sees. */
#include "client/bench/copy.h"

#include <stdlib.h>
#include <string.h>

#define LAYERS 32u
#define TOKENS 16u
#define HEADS 8u
#define DIM 128u
#define TENSOR (TOKENS * HEADS * DIM * 2) /* K or V of a layer, bf16 */
#define FILL_BYTES (8u << 20)

static const struct aims {
    const char *encoding;
    double load, dump;
} aims[] = {{"fp8", 1.9, 1.8}, {"int8", 1.9, 1.8}, {"q4", 3.3, 3.0}, {"lossless", 1.25, 1.2}};

/* bf16 of about a normal distribution, as KV has them: sums of random bytes. */
static void fill(uint8_t *to, size_t bytes)
{
    uint64_t x = 88172645463325252u;

    for (size_t i = 0; i < bytes; i += 2) {
        union {
            float f;
            uint32_t u;
        } value = {.f = -1020};

        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        for (unsigned k = 0; k < 8; k++)
            value.f += (float)(x >> 8 * k & 0xff);
        value.f *= 1.0f / 256;
        to[i] = (uint8_t)(value.u >> 16);
        to[i + 1] = (uint8_t)(value.u >> 24);
    }
}

/* What blocks hold decides whether `lossless` takes them. */
static int pages_fill(struct rig *rig)
{
    size_t bytes = rig->memory_bytes * rig->spread;
    uint8_t *kv = malloc(bytes);
    int rc = 0;

    if (!kv)
        return program_fail(BENCH_FAILED, "memory ran out");
    fill(kv, FILL_BYTES);
    for (size_t at = FILL_BYTES; at < bytes; at += FILL_BYTES)
        memcpy(kv + at, kv, bytes - at < FILL_BYTES ? bytes - at : FILL_BYTES);
    if (gpu_write(&rig->gpu, kv, bytes) < 0)
        rc = program_fail(BENCH_FAILED, "%s", rig->gpu.why);
    free(kv);
    return rc;
}

static int rig_encoded(struct copy_bench *b, struct rig *rig, const char *encoding)
{
    const struct rig_encoding e = {encoding, TOKENS, HEADS, DIM};
    struct rig_options o = {.socket = b->daemon.socket,
                            .name = program_name(),
                            .model = encoding,
                            .parts = 1,
                            .block_bytes = (uint64_t)2 * LAYERS * TENSOR,
                            .fragment = TENSOR,
                            .blocks = (uint32_t)(COPY_TOTAL / ((uint64_t)2 * LAYERS * TENSOR)),
                            .timeout_ms = (int)args_number(b->args, "timeout"),
                            .gpu = 1,
                            .copy_agent = b->ring,
                            .spread = COPY_SPREAD,
                            .encoding = &e};
    int rc = rig_open(rig, &o);

    if (rc < 0)
        return bench_rig_fail(rig, rc);
    rc = pages_fill(rig);
    if (rc != 0)
        rig_close(rig);
    return rc;
}

static void aim(struct copy_bench *b, const char *encoding, const char *what, double value,
                double target)
{
    char name[96];

    snprintf(name, sizeof name, "%s %s", encoding, what);
    report_figure(&b->report, &(struct figure){.name = name,
                                               .unit = "",
                                               .value = value,
                                               .target = target,
                                               .target_is_value = true,
                                               .more_is_better = true});
}

static void report_encoding(struct copy_bench *b, const char *encoding, const struct copy_row *row)
{
    const struct aims *a = aims;

    while (a < aims + sizeof aims / sizeof *aims && strcmp(a->encoding, encoding) != 0)
        a++;
    if (a == aims + sizeof aims / sizeof *aims)
        return;
    aim(b, encoding, "load, of the bus", row->idle[0].ratio, a->load);
    aim(b, encoding, "dump, of the bus", row->idle[1].ratio, a->dump);
    if (!gpu_work_kernels(&b->work))
        return;
    aim(b, encoding, "load alongside matrices, of the bus", row->busy[0].ratio, a->load);
    aim(b, encoding, "dump alongside matrices, of the bus", row->busy[1].ratio, a->dump);
    aim(b, encoding, "load, worker keeps", row->busy[0].keeps, 0.95);
    aim(b, encoding, "dump, worker keeps", row->busy[1].keeps, 0.95);
}

static int measure_encoding(struct copy_bench *b, const char *encoding)
{
    struct copy_row row = {.fragment = TENSOR};
    struct rig rig;
    int rc = rig_encoded(b, &rig, encoding);

    if (rc != 0)
        return rc;
    for (unsigned d = 0; d < 2 && rc == 0; d++)
        rc = copy_measure(b, &rig, d, &row.idle[d]);
    if (rc == 0 && gpu_work_kernels(&b->work))
        rc = copy_measure_busy(b, &rig, &row);
    rig_close(&rig);
    if (rc == 0)
        report_encoding(b, encoding, &row);
    return rc;
}

int copy_encodings(struct copy_bench *b, char *names)
{
    int rc = copy_daemon_start(b, NULL);

    if (rc != 0)
        return rc;
    for (char *at = names, *name; rc == 0 && (name = strsep(&at, ",")) != NULL;)
        rc = measure_encoding(b, name);
    return copy_daemon_stop(b, rc);
}

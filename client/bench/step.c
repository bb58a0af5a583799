/* step: what the steps of an engine that decodes take while loads run beside it, by strategy, and what
 * those loads get of the bus. Starts daemons of its own; this process plays the engine. */
#include "client/bench/copy.h"
#include "client/bench/gpu_step.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define REQUEST_BYTES (32ull << 20)
#define SETTLE_MS 400 /* of loads: steps leave a quarter of a second out */
#define WARM_MS 3000  /* until clocks are up */

#define MEDIAN_AIM 1.05
#define P99_AIM 1.10
#define BUS_AIM 0.95
#define BUS_BESIDE_AIM 0.85
#define DEFAULT_PERCENT 85

/* Medians and p99s of steps, in ms. */
struct step_row {
    double p50, p99, inputs[2], graph[2], tokens[2];
};

struct step_bench {
    struct copy_bench b; /* the first member: see of() */
    struct gpu_steps steps;
    struct step_row alone;
    char name[64];    /* of the strategy and its share, in the report */
    unsigned percent; /* copy.beside */
    bool last;        /* of the strategies, at the default share: its figures have aims */
};

static struct step_bench *of(struct copy_bench *b)
{
    return (struct step_bench *)b;
}

/* ---- steps beside something ---- */

static int beside_nothing(struct step_bench *t, struct stream *s)
{
    (void)s;
    usleep((unsigned)t->b.run_ms * 1000);
    return 0;
}

static int beside_dma(struct step_bench *t, struct stream *s)
{
    (void)s;
    return gpu_dma_repeat(&t->b.work, COPY_TOTAL, (uint64_t)t->b.run_ms * 1000000) < 0
               ? bench_fail(BENCH_FAILED, "%s", t->b.gpu.why)
               : 0;
}

static int beside_loads(struct step_bench *t, struct stream *s)
{
    return streams_run(s, 1, t->b.error) < 0 ? bench_fail(BENCH_FAILED, "%s", t->b.error) : 0;
}

static void part(struct samples *s, double out[2])
{
    out[0] = samples_at(s, 0.5);
    out[1] = samples_at(s, 0.99);
}

static int steps_beside(struct step_bench *t, int (*beside)(struct step_bench *, struct stream *),
                        struct stream *s, struct step_row *out)
{
    int rc;

    if (gpu_steps_start(&t->steps) < 0)
        return bench_fail(BENCH_FAILED, "no thread");
    rc = beside(t, s);
    if (gpu_steps_stop(&t->steps) < 0)
        return bench_fail(BENCH_FAILED, "%s", t->b.gpu.why);
    out->p50 = samples_at(&t->steps.step_ms, 0.5);
    out->p99 = samples_at(&t->steps.step_ms, 0.99);
    part(&t->steps.inputs_ms, out->inputs);
    part(&t->steps.graph_ms, out->graph);
    part(&t->steps.tokens_ms, out->tokens);
    return rc;
}

/* ---- reporting ---- */

static void report_part(struct step_bench *t, const char *beside, const char *what,
                        const double at[2])
{
    char name[96];

    snprintf(name, sizeof name, "%s: %s, ms", beside, what);
    report_number(&t->b.report, name, at[0]);
    snprintf(name, sizeof name, "%s: %s, p99, ms", beside, what);
    report_number(&t->b.report, name, at[1]);
}

static void report_parts(struct step_bench *t, const char *beside, const struct step_row *r)
{
    report_part(t, beside, "inputs", r->inputs);
    report_part(t, beside, "graph", r->graph);
    report_part(t, beside, "tokens", r->tokens);
}

static void report_step(struct step_bench *t, const char *beside, const char *what, double value,
                        double alone, double aim)
{
    char name[96];

    snprintf(name, sizeof name, "%s: %s", beside, what);
    report_figure(&t->b.report, &(struct figure){.name = name,
                                                 .unit = "ms",
                                                 .value = value,
                                                 .baseline_name = "alone",
                                                 .baseline = alone,
                                                 .target = t->last ? aim : 0});
}

static void report_row(struct step_bench *t, const char *beside, const struct step_row *r)
{
    report_step(t, beside, "step", r->p50, t->alone.p50, MEDIAN_AIM);
    report_step(t, beside, "step's p99", r->p99, t->alone.p99, P99_AIM);
    report_parts(t, beside, r);
}

static void report_loads(struct step_bench *t, const char *what, double rate, double aim)
{
    char name[96];

    snprintf(name, sizeof name, "%s: %s", t->name, what);
    report_figure(&t->b.report, &(struct figure){.name = name,
                                                 .unit = "GB/s",
                                                 .value = rate / 1e9,
                                                 .baseline_name = "one DMA",
                                                 .baseline = t->b.dma.to_gpu / 1e9,
                                                 .target = t->last ? aim : 0,
                                                 .more_is_better = true});
}

/* ---- one strategy ---- */

static int measure_loads(struct step_bench *t, struct rig *rig)
{
    struct stream s = copy_stream(&t->b, rig, true, 2, REQUEST_BYTES);
    struct step_row row;
    double rate;
    int rc = copy_stream_run(&t->b, &s, 1, &rate);

    if (rc != 0)
        return rc;
    report_loads(t, "loads alone", rate, BUS_AIM);
    rc = steps_beside(t, beside_nothing, NULL, &t->alone);
    s.warm_ms = SETTLE_MS;
    ucm_region_computes(rig->region, 1);
    if (rc == 0)
        rc = steps_beside(t, beside_loads, &s, &row);
    if (rc != 0)
        return rc;
    report_row(t, t->name, &row);
    report_loads(t, "loads beside steps", streams_rate(&s, 1), BUS_BESIDE_AIM);
    return 0;
}

static int measure_share(struct step_bench *t)
{
    char share[32];
    struct rig rig;
    int rc, stopped;

    snprintf(t->name, sizeof t->name, "%s %u %%", t->b.strategy, t->percent);
    snprintf(share, sizeof share, "copy.beside=%u", t->percent);
    rc = copy_daemon_start(&t->b, (const char *const[]){share, NULL});
    if (rc != 0)
        return rc;
    rc = copy_rig_open(&t->b, &rig, args_number(t->b.args, "chunk"), 0);
    if (rc == 0) {
        rc = measure_loads(t, &rig);
        rig_close(&rig);
    }
    stopped = copy_daemon_stop(&t->b);
    return rc != 0 ? rc : stopped;
}

static int measure_strategy(struct step_bench *t, const char *strategy, bool last)
{
    char shares[128], *list = shares, *share;
    int rc = 0;

    copy_strategy_set(&t->b, strategy);
    snprintf(shares, sizeof shares, "%s", args_text(t->b.args, "beside"));
    while (rc == 0 && (share = strsep(&list, ",")) != NULL) {
        t->percent = (unsigned)strtoul(share, NULL, 10);
        t->last = last && t->percent == DEFAULT_PERCENT;
        rc = measure_share(t);
    }
    return rc;
}

/* ---- the command ---- */

static int measure_alone(struct step_bench *t)
{
    struct step_row row;
    int run_ms = t->b.run_ms, rc;

    t->b.run_ms = WARM_MS;
    rc = steps_beside(t, beside_nothing, NULL, &row);
    t->b.run_ms = run_ms;
    if (gpu_dma_measure(&t->b.work, COPY_TOTAL, &t->b.dma) < 0)
        return bench_fail(BENCH_FAILED, "%s", t->b.gpu.why);
    report_number(&t->b.report, "one DMA to the GPU", t->b.dma.to_gpu);
    if (rc == 0)
        rc = steps_beside(t, beside_nothing, NULL, &t->alone);
    if (rc == 0)
        rc = steps_beside(t, beside_dma, NULL, &row);
    if (rc != 0)
        return rc;
    report_number(&t->b.report, "alone: step, ms", t->alone.p50);
    report_number(&t->b.report, "alone: step's p99, ms", t->alone.p99);
    report_parts(t, "alone", &t->alone);
    report_row(t, "one DMA", &row);
    return 0;
}

static int measure_all(struct step_bench *t)
{
    char names[128], *list = names, *name;
    int rc = measure_alone(t);

    snprintf(names, sizeof names, "%s", args_text(t->b.args, "strategies"));
    while (rc == 0 && (name = strsep(&list, ",")) != NULL)
        rc = measure_strategy(t, name, list == NULL);
    return rc;
}

static int measure(struct copy_bench *b)
{
    struct step_bench *t = of(b);
    int rc;

    if (!gpu_work_kernels(&b->work))
        return bench_fail(BENCH_FAILED, "built without CUDA's compiler, so there are no kernels");
    if (gpu_steps_open(&t->steps, &b->work) < 0)
        rc = bench_fail(BENCH_FAILED, "%s", b->gpu.why);
    else
        rc = measure_all(t);
    gpu_steps_close(&t->steps);
    return rc;
}

int bench_step(const struct args *a)
{
    struct step_bench t = {.b = {.args = a}};
    int rc;

    report_begin(&t.b.report, "step", args_given(a, "json"));
    rc = copy_with_gpu(&t.b, measure);
    return report_end(&t.b.report) < 0 ? BENCH_FAILED : rc;
}

/* gate: has ucmd become slower? Made for machines whose speed changes from one second to the next.
 *
 * Each repetition of a case measures the machine, ucmd, and the machine again; the ratio of ucmd to
 * the mean of both goes into a sample. Cases take turns. The sample's median has an interval that
 * holds the true one 99 times in 100, by its order statistics. A case passes when the whole interval
 * lies below its committed ratio and the gate above it, and fails when the whole interval lies
 * beyond, also by the later half of the repetitions alone: a machine may change its mind. It must lie
 * beyond the machine's own noise, too: load slows the two sides of a ratio alike only roughly.
 * Otherwise the case is repeated, up to a bound; then it is undecided, which is neither. */
#include "tests/bench/ucm_bench_gate.h"

#include "client/ctl/table.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FEW 15u
#define Z99 2.58
#define FILE_BYTES (1u << 16)

enum verdict { UNDECIDED, PASSED, SLOWER };

struct judged {
    struct samples ratio, base;
    double committed; /* 0: none */
    double median, low, high;
    enum verdict verdict;
};

struct gate {
    const struct args *args;
    struct gate_bench bench;
    struct judged judged[GATE_CASES];
    double limit; /* 1.10 */
    struct progress progress;
};

/* ---- the committed ratios ---- */

static char *file_read(const char *path)
{
    FILE *f = fopen(path, "re");
    char *text = f ? calloc(1, FILE_BYTES) : NULL;

    if (text && fread(text, 1, FILE_BYTES - 1, f) == 0) {
        free(text);
        text = NULL;
    }
    if (f)
        fclose(f);
    return text;
}

static int committed_read(struct gate *g)
{
    const char *path = args_text(g->args, "baseline");
    char *text = file_read(path);
    cJSON *j = text ? cJSON_Parse(text) : NULL;
    const cJSON *cases = cJSON_GetObjectItemCaseSensitive(j, "cases");
    int rc = cJSON_IsObject(cases) ? 0 : -1;

    for (uint32_t i = 0; rc == 0 && i < GATE_CASES; i++) {
        const cJSON *v = cJSON_GetObjectItemCaseSensitive(cases, gate_cases[i].name);

        g->judged[i].committed = cJSON_IsNumber(v) && v->valuedouble > 0 ? v->valuedouble : 0;
    }
    cJSON_Delete(j);
    free(text);
    return rc == 0 ? 0 : bench_fail(BENCH_FAILED, "%s: wanted the file that --write makes", path);
}

static int committed_write(struct gate *g, const char *path)
{
    cJSON *j = cJSON_CreateObject(), *cases;
    FILE *f = fopen(path, "we");
    char *text;
    int rc = 0;

    cJSON_AddNumberToObject(j, "gate", 1);
    cases = cJSON_AddObjectToObject(j, "cases");
    for (uint32_t i = 0; i < GATE_CASES; i++)
        cJSON_AddNumberToObject(cases, gate_cases[i].name,
                                round(g->judged[i].median * 1000) / 1000);
    text = cJSON_Print(j);
    if (f == NULL || text == NULL || fprintf(f, "%s\n", text) < 0)
        rc = bench_fail(BENCH_FAILED, "%s: %s", path, strerror(errno));
    if (f != NULL && fclose(f) != 0 && rc == 0)
        rc = bench_fail(BENCH_FAILED, "%s: %s", path, strerror(errno));
    cJSON_free(text);
    cJSON_Delete(j);
    return rc;
}

/* ---- judging ---- */

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The median of v and its interval. Sorts v. */
static void interval(double *v, size_t n, double *median, double *low, double *high)
{
    double half = Z99 * sqrt((double)n) / 2, middle = (double)(n - 1) / 2;

    qsort(v, n, sizeof *v, by_size);
    *median = (v[(n - 1) / 2] + v[n / 2]) / 2;
    *low = v[middle > half ? (size_t)(middle - half) : 0];
    *high = v[middle + half < (double)n - 1 ? (size_t)ceil(middle + half) : n - 1];
}

/* The middle half of the machine's own times, to their median. Sorts them. */
static double noise_of(struct judged *j)
{
    return (samples_at(&j->base, 0.75) - samples_at(&j->base, 0.25)) / samples_at(&j->base, 0.5);
}

/* The ratios stay in order of time. */
static int judge(struct gate *g, struct judged *j)
{
    size_t n = j->ratio.n, later = n - n / 2;
    double *v = malloc(n * sizeof *v), most = j->committed * g->limit, median, low, high;
    double certain = j->committed * (1 + fmax(g->limit - 1, noise_of(j)));

    if (v == NULL)
        return bench_fail(BENCH_FAILED, "memory ran out");
    memcpy(v, j->ratio.v + n - later, later * sizeof *v);
    interval(v, later, &median, &low, &high);
    memcpy(v, j->ratio.v, n * sizeof *v);
    interval(v, n, &j->median, &j->low, &j->high);
    free(v);
    j->verdict = j->high <= most                                        ? PASSED
                 : j->low > certain && median > certain && n >= 2 * FEW ? SLOWER
                                                                        : UNDECIDED;
    return 0;
}

/* ---- measuring ---- */

static int repeat(struct gate *g, uint32_t i)
{
    const struct gate_case *c = &gate_cases[i];
    struct judged *j = &g->judged[i];
    double before, own, after;
    int rc = c->base_cb(&g->bench, &before);

    if (rc == 0)
        rc = c->own_cb(&g->bench, &own);
    if (rc == 0)
        rc = c->base_cb(&g->bench, &after);
    if (rc == 0 && (samples_add(&j->ratio, own / ((before + after) / 2)) < 0 ||
                    samples_add(&j->base, before) < 0 || samples_add(&j->base, after) < 0))
        rc = bench_fail(BENCH_FAILED, "memory ran out");
    return rc;
}

/* A repetition of each case that is not decided. *left: how many are not. */
static int turn(struct gate *g, uint32_t number, uint32_t *left)
{
    bool writing = args_given(g->args, "write");
    int rc = 0;

    *left = 0;
    for (uint32_t i = 0; rc == 0 && i < GATE_CASES; i++) {
        struct judged *j = &g->judged[i];

        if (number > FEW && j->verdict != UNDECIDED)
            continue;
        rc = repeat(g, i);
        if (rc == 0 && number >= FEW)
            rc = judge(g, j);
        *left += writing || j->verdict == UNDECIDED;
        if (writing)
            j->verdict = UNDECIDED;
    }
    if (progress_due(&g->progress))
        progress_show(&g->progress, "repetition %u, %u of %u cases are not decided", number, *left,
                      GATE_CASES);
    return rc;
}

static int turns(struct gate *g)
{
    uint32_t most = (uint32_t)args_number(g->args, "most"), left = GATE_CASES;
    int rc = 0;

    for (uint32_t i = 0; rc == 0 && i < GATE_CASES; i++) { /* not counted: caches warm up */
        double seconds;

        rc = gate_cases[i].own_cb(&g->bench, &seconds);
    }
    for (uint32_t n = 1; rc == 0 && n <= most && (n <= FEW || left > 0); n++)
        rc = turn(g, n, &left);
    progress_end(&g->progress);
    return rc;
}

/* ---- reporting ---- */

/* The median over the cases, in %. */
static double noise(struct gate *g)
{
    struct samples of = {0};
    double at;

    for (uint32_t i = 0; i < GATE_CASES; i++) {
        samples_add(&of, 100 * noise_of(&g->judged[i]));
    }
    at = samples_at(&of, 0.5);
    samples_free(&of);
    return at;
}

static double change(const struct judged *j)
{
    return j->committed > 0 ? 100 * (j->median / j->committed - 1) : 0;
}

static double spread(const struct judged *j)
{
    return 50 * (j->high - j->low) / j->median;
}

static const char *word(const struct judged *j)
{
    static const char *const words[] = {"undecided", "ok", "SLOWER"};

    return j->committed > 0 ? words[j->verdict] : "new";
}

static void report_json(struct gate *g, const char *verdict)
{
    cJSON *j = cJSON_CreateObject(), *cases;
    char *text;

    cJSON_AddStringToObject(j, "command", "gate");
    cJSON_AddStringToObject(j, "verdict", verdict);
    cJSON_AddNumberToObject(j, "noise_percent", noise(g));
    cases = cJSON_AddArrayToObject(j, "cases");
    for (uint32_t i = 0; i < GATE_CASES; i++) {
        struct judged *d = &g->judged[i];
        cJSON *o = cJSON_CreateObject();

        cJSON_AddStringToObject(o, "name", gate_cases[i].name);
        cJSON_AddStringToObject(o, "against", gate_cases[i].against);
        cJSON_AddNumberToObject(o, "committed", d->committed);
        cJSON_AddNumberToObject(o, "ratio", d->median);
        cJSON_AddNumberToObject(o, "low", d->low);
        cJSON_AddNumberToObject(o, "high", d->high);
        cJSON_AddNumberToObject(o, "change_percent", change(d));
        cJSON_AddNumberToObject(o, "noise_percent", 100 * noise_of(&g->judged[i]));
        cJSON_AddNumberToObject(o, "repetitions", (double)d->ratio.n);
        cJSON_AddStringToObject(o, "verdict", word(d));
        cJSON_AddItemToArray(cases, o);
    }
    text = cJSON_Print(j);
    puts(text ? text : "");
    cJSON_free(text);
    cJSON_Delete(j);
}

static void report_table(struct gate *g, const char *verdict)
{
    static const char *const titles[] = {"WHAT",    "AGAINST", ">COMMITTED", ">NOW", ">CHANGE",
                                         ">SPREAD", ">TIMES",  "",           NULL};
    struct table t;

    table_begin(&t, titles);
    for (uint32_t i = 0; i < GATE_CASES; i++) {
        const struct judged *j = &g->judged[i];

        table_cell(&t, "%s", gate_cases[i].name);
        table_cell(&t, "%s", gate_cases[i].against);
        table_cell(&t, j->committed > 0 ? "%.2f" : "-", j->committed);
        table_cell(&t, "%.2f", j->median);
        table_cell(&t, j->committed > 0 ? "%+.1f %%" : "-", change(j));
        table_cell(&t, "%.1f %%", spread(j));
        table_cell(&t, "%zu", j->ratio.n);
        table_cell(&t, "%s", word(j));
    }
    table_end(&t, stdout);
    printf("\nthis machine: its own times vary by %.0f %% (the middle half of them)\n%s\n",
           noise(g), verdict);
}

static int report(struct gate *g)
{
    static const char *const verdicts[] = {"undecided", "passed", "slower"};
    uint32_t n[3] = {0};
    enum verdict verdict;

    for (uint32_t i = 0; i < GATE_CASES; i++)
        if (g->judged[i].committed > 0)
            n[g->judged[i].verdict]++;
    verdict = n[SLOWER] > 0 ? SLOWER : n[UNDECIDED] > 0 ? UNDECIDED : PASSED;
    if (args_given(g->args, "json"))
        report_json(g, verdicts[verdict]);
    else
        report_table(g, verdicts[verdict]);
    return verdict == SLOWER ? BENCH_SLOWER : verdict == UNDECIDED ? BENCH_UNDECIDED : 0;
}

int bench_gate(const struct args *a)
{
    struct gate *g = calloc(1, sizeof *g);
    const char *write = args_text(a, "write");
    int rc = 0;

    if (g == NULL)
        return bench_fail(BENCH_FAILED, "memory ran out");
    g->args = a;
    g->limit = 1 + (double)args_number(a, "gate") / 100;
    progress_begin(&g->progress, args_given(a, "quiet"));
    if (write == NULL)
        rc = committed_read(g);
    if (rc == 0) {
        rc = gate_open(&g->bench, a);
        if (rc == 0)
            rc = turns(g);
        gate_close(&g->bench);
    }
    if (rc == 0)
        rc = write ? committed_write(g, write) : report(g);
    for (uint32_t i = 0; i < GATE_CASES; i++) {
        samples_free(&g->judged[i].ratio);
        samples_free(&g->judged[i].base);
    }
    free(g);
    return rc;
}

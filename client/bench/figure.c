#include "client/bench/figure.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define TERMINAL_NS UINT64_C(200000000)
#define LINE_NS UINT64_C(2000000000)

uint64_t clock_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* ---- samples ---- */

int samples_add(struct samples *s, double v)
{
    if (s->n == s->cap) {
        size_t cap = s->cap != 0 ? 2 * s->cap : 1024;
        double *p = realloc(s->v, cap * sizeof *p);

        if (p == NULL)
            return -ENOMEM;
        s->v = p;
        s->cap = cap;
    }
    s->v[s->n++] = v;
    return 0;
}

void samples_clear(struct samples *s)
{
    s->n = 0;
}

void samples_free(struct samples *s)
{
    free(s->v);
    *s = (struct samples){.n = 0};
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double samples_at(struct samples *s, double share)
{
    size_t i;

    if (s->n == 0)
        return 0;
    qsort(s->v, s->n, sizeof *s->v, compare);
    i = (size_t)(share * (double)s->n);
    return s->v[i < s->n ? i : s->n - 1];
}

int pair_add(struct pair *p, double own, double base)
{
    return samples_add(&p->own, own) < 0 || samples_add(&p->base, base) < 0 ||
                   (base > 0 && samples_add(&p->ratio, own / base) < 0)
               ? -ENOMEM
               : 0;
}

void pair_free(struct pair *p)
{
    samples_free(&p->own);
    samples_free(&p->base);
    samples_free(&p->ratio);
}

/* ---- report ---- */

void report_begin(struct report *r, const char *command, bool json)
{
    r->json = json;
    r->document = cJSON_CreateObject();
    r->figures = cJSON_CreateArray();
    cJSON_AddStringToObject(r->document, "command", command);
}

void report_number(struct report *r, const char *name, double v)
{
    if (r->json)
        cJSON_AddNumberToObject(r->document, name, v);
    else
        printf("%-24s %.10g\n", name, v);
}

void report_text(struct report *r, const char *name, const char *text)
{
    if (r->json)
        cJSON_AddStringToObject(r->document, name, text);
    else
        printf("%-24s %s\n", name, text);
}

static bool target_met(const struct figure *f, double ratio)
{
    double v = f->target_is_value ? f->value : ratio;

    return f->more_is_better ? v >= f->target : v <= f->target;
}

static void print_figure(const struct figure *f, double ratio)
{
    printf("%-24s %10.4g %-5s", f->name, f->value, f->unit);
    if (f->baseline_name != NULL)
        printf("  %5.2fx of %s (%.4g %s)", ratio, f->baseline_name, f->baseline, f->unit);
    if (f->target > 0)
        printf("  target %s %g%s%s: %s", f->more_is_better ? "at least" : "at most", f->target,
               f->target_is_value ? " " : "x", f->target_is_value ? f->unit : "",
               target_met(f, ratio) ? "met" : "MISSED");
    printf("\n");
    fflush(stdout);
}

void report_figure(struct report *r, const struct figure *f)
{
    double ratio = f->ratio;
    cJSON *j, *base;

    if (f->ratio <= 0 && f->baseline > 0)
        ratio = f->value / f->baseline;
    if (!r->json) {
        print_figure(f, ratio);
        return;
    }
    j = cJSON_CreateObject();
    cJSON_AddStringToObject(j, "name", f->name);
    cJSON_AddNumberToObject(j, "value", f->value);
    cJSON_AddStringToObject(j, "unit", f->unit);
    if (f->baseline_name != NULL) {
        base = cJSON_AddObjectToObject(j, "baseline");
        cJSON_AddStringToObject(base, "name", f->baseline_name);
        cJSON_AddNumberToObject(base, "value", f->baseline);
        cJSON_AddNumberToObject(j, "ratio", ratio);
    }
    if (f->target > 0) {
        cJSON_AddNumberToObject(j, "target", f->target);
        cJSON_AddStringToObject(j, "target_of", f->target_is_value ? "value" : "ratio");
        cJSON_AddBoolToObject(j, "met", target_met(f, ratio));
    }
    cJSON_AddItemToArray(r->figures, j);
}

void report_pair(struct report *r, struct pair *p, struct figure f)
{
    f.value = samples_at(&p->own, 0.5);
    f.baseline = samples_at(&p->base, 0.5);
    f.ratio = samples_at(&p->ratio, 0.5);
    report_figure(r, &f);
}

int report_end(struct report *r)
{
    char *text = NULL;
    int rc = 0;

    if (!r->json) {
        cJSON_Delete(r->figures);
        cJSON_Delete(r->document);
        return 0;
    }
    if (cJSON_AddItemToObject(r->document, "figures", r->figures))
        text = cJSON_Print(r->document);
    if (text != NULL) {
        puts(text);
    } else {
        fprintf(stderr, "ucm-bench: memory ran out\n");
        rc = -1;
    }
    cJSON_free(text);
    cJSON_Delete(r->document);
    return rc;
}

/* ---- progress ---- */

void progress_begin(struct progress *p, bool quiet)
{
    p->quiet = quiet;
    p->terminal = isatty(STDERR_FILENO) != 0;
    p->shown = false;
    p->last_ns = clock_ns();
}

bool progress_due(struct progress *p)
{
    return !p->quiet && clock_ns() - p->last_ns >= (p->terminal ? TERMINAL_NS : LINE_NS);
}

void progress_show(struct progress *p, const char *format, ...)
{
    va_list ap;

    if (p->quiet)
        return;
    if (p->terminal)
        fputs("\r\033[K", stderr);
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    if (!p->terminal)
        fputc('\n', stderr);
    fflush(stderr);
    p->shown = true;
    p->last_ns = clock_ns();
}

void progress_end(struct progress *p)
{
    if (p->shown && p->terminal)
        fputs("\r\033[K", stderr);
    p->shown = false;
}

/* Figures: clock, samples, percentiles, and the report that a command ends with. A figure that
 * depends on the machine stands next to a baseline measured in the same run, and their ratio.
 * Threads: one. */
#ifndef UCM_BENCH_FIGURE_H
#define UCM_BENCH_FIGURE_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

uint64_t clock_ns(void);

/* ---- samples ---- */

struct samples {
    double *v;
    size_t n, cap;
};

/* 0 or -ENOMEM. */
int samples_add(struct samples *s, double v);
void samples_clear(struct samples *s);
void samples_free(struct samples *s);
/* Sorts. share: 0.5 is the median; 0 of nothing. */
double samples_at(struct samples *s, double share);

/* What was measured, its baseline, and their ratio: one of each a round. */
struct pair {
    struct samples own, base, ratio;
};

/* 0 or -ENOMEM. A baseline of 0 has no ratio. */
int pair_add(struct pair *p, double own, double base);
void pair_free(struct pair *p);

/* ---- report ---- */

struct figure {
    const char *name, *unit;
    double value;
    const char *baseline_name; /* NULL: none */
    double baseline;           /* in the same unit */
    double ratio;              /* 0: value / baseline */
    double target;             /* 0: none; of the ratio, or with target_is_value of the value */
    bool target_is_value;
    bool more_is_better; /* then the target is a least, else a most */
};

struct report {
    bool json;
    cJSON *document;
    cJSON *figures;
};

void report_begin(struct report *r, const char *command, bool json);
/* A count or a setting; whole numbers are printed as such. */
void report_number(struct report *r, const char *name, double v);
void report_text(struct report *r, const char *name, const char *text);
void report_figure(struct report *r, const struct figure *f);
/* The same with the medians of a pair. */
void report_pair(struct report *r, struct pair *p, struct figure f);
/* Prints what --json wants and frees. 0, or -1 with a sentence on standard error. */
int report_end(struct report *r);

/* ---- progress ---- */

/* One status line on standard error: rewritten on a terminal, else a line every two seconds. */
struct progress {
    bool quiet, terminal, shown;
    uint64_t last_ns;
};

void progress_begin(struct progress *p, bool quiet);
/* Whether it is time to show one; cheap. */
bool progress_due(struct progress *p);
void progress_show(struct progress *p, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
void progress_end(struct progress *p);

#endif

#include "daemon/cuda/costs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 3
#define FIGURES (sizeof(struct costs_table) / sizeof(double))

/* The engines leave the SMs and their path to memory alone, and an idle GPU may be busy a moment
 * later: the kernel must be faster by this. */
#define KERNEL_GAIN_IDLE 1.15
/* Alongside another process the kernel ran at 0.4 of its speed, in time slices of about 2 ms; the
 * other process loses as much time as it takes. */
#define KERNEL_SLOWER_BUSY 2.5
#define KERNEL_GAIN_BUSY 3.0
/* Times a large transfer's time: 1.1 alone, 2.5 and more alongside others. */
#define KERNEL_UNDISTURBED 1.5

/* Staging takes memory traffic and a few CTAs from the worker, 0.02 of its speed. Others that leave
 * pauses wait for each of their kernels and would pay with a third of their p99: staging must save
 * most of the time there. */
#define STAGED_GAIN 0.97
#define STAGED_GAIN_PAUSES 0.25

void costs_default(struct costs_table *t)
{
    t->of[UCM_COPY_LOAD] = (struct costs){.byte_ns = 0.0180,
                                          .run_ns = {414, 1150, 1524, 5030},
                                          .op_ns = 1700,
                                          .row_ns = {100, 40},
                                          .kernel_ns = 9000,
                                          .kernel_byte_ns = 0.0195};
    t->of[UCM_COPY_DUMP] = (struct costs){.byte_ns = 0.0180,
                                          .run_ns = {277, 371, 1513, 5030},
                                          .op_ns = 1700,
                                          .row_ns = {100, 40},
                                          .kernel_ns = 9000,
                                          .kernel_byte_ns = 0.0191};
}

/* ---- text ---- */

void costs_format(const struct costs_table *t, const char *of, char text[COSTS_TEXT_BYTES])
{
    double v[FIGURES];
    int n = snprintf(text, COSTS_TEXT_BYTES, "ucm-copy %d %s", VERSION, of);

    memcpy(v, t, sizeof(v));
    for (unsigned i = 0; i < FIGURES && n < COSTS_TEXT_BYTES; i++)
        n += snprintf(text + n, (size_t)(COSTS_TEXT_BYTES - n), " %.6f", v[i]);
    if (n < COSTS_TEXT_BYTES - 1)
        memcpy(text + n, "\n", 2);
}

static bool within(double v, double low, double high)
{
    return v >= low && v <= high; /* false for NaN */
}

/* From 0.1 to 10,000 GB/s, and no step longer than 100 ms. */
bool costs_sound(const struct costs_table *t)
{
    bool sound = true;

    for (unsigned i = 0; i < 2; i++) {
        const struct costs *c = &t->of[i];

        sound &= within(c->byte_ns, 1e-4, 10) && within(c->kernel_byte_ns, 1e-4, 10) &&
                 within(c->op_ns, 0, 1e8) && within(c->row_ns[0], 0, 1e8) &&
                 within(c->row_ns[1], 0, 1e8) && within(c->kernel_ns, 0, 1e8);
        for (unsigned w = 0; w < COSTS_WIDTHS; w++)
            sound &= within(c->run_ns[w], 1, 1e8);
    }
    return sound;
}

int costs_parse(struct costs_table *t, const char *of, const char *text)
{
    struct costs_table read;
    double v[FIGURES];
    char head[256], *end;
    size_t length = (size_t)snprintf(head, sizeof(head), "ucm-copy %d %s ", VERSION, of);

    if (length >= sizeof(head) || strncmp(text, head, length) != 0)
        return -EINVAL;
    text += length;
    for (unsigned i = 0; i < FIGURES; i++, text = end) {
        v[i] = strtod(text, &end);
        if (end == text)
            return -EINVAL;
    }
    memcpy(&read, v, sizeof(read));
    if (strcmp(text, "\n") != 0 || !costs_sound(&read))
        return -EINVAL;
    *t = read;
    return 0;
}

bool costs_undisturbed(const struct costs_table *t)
{
    return t->of[0].kernel_byte_ns < KERNEL_UNDISTURBED * t->of[0].byte_ns &&
           t->of[1].kernel_byte_ns < KERNEL_UNDISTURBED * t->of[1].byte_ns;
}

/* ---- estimates ---- */

/* A straight line between the measured widths; beyond the last, the bus's speed. */
static double run_ns(const struct costs *c, uint64_t width)
{
    uint64_t at = COSTS_WIDTH_FIRST;
    unsigned i = 0;

    if (width <= at)
        return c->run_ns[0];
    for (; i + 1 < COSTS_WIDTHS && width > 4 * at; i++)
        at *= 4;
    if (i + 1 == COSTS_WIDTHS)
        return c->run_ns[i] + (double)(width - at) * c->byte_ns;
    return c->run_ns[i] +
           (c->run_ns[i + 1] - c->run_ns[i]) * (double)(width - at) / (double)(3 * at);
}

static double row_ns(const struct costs *c, uint64_t width)
{
    double fraction;

    if (width <= COSTS_ROW_NARROW || width >= COSTS_ROW_WIDE)
        return c->row_ns[width >= COSTS_ROW_WIDE];
    fraction = (double)(width - COSTS_ROW_NARROW) / (COSTS_ROW_WIDE - COSTS_ROW_NARROW);
    return c->row_ns[0] + fraction * (c->row_ns[1] - c->row_ns[0]);
}

static double extent_ns(const struct costs *c, const struct plan_extent *e)
{
    return e->rows == 1
               ? run_ns(c, e->width)
               : c->op_ns + e->rows * (row_ns(c, e->width) + (double)e->width * c->byte_ns);
}

uint32_t costs_cut(const struct costs *c, struct plan_extent *extents, uint32_t n, uint32_t max)
{
    uint32_t total = n;

    for (uint32_t i = 0; i < n; i++) {
        struct plan_extent *e = &extents[i];
        struct plan_extent run = {e->slot, e->page, e->width, e->width, e->width, 1};

        if (e->rows == 1 || e->width < COSTS_RUN_LEAST || e->rows - 1 > max - total ||
            e->rows * run_ns(c, e->width) >= extent_ns(c, e))
            continue;
        for (uint32_t row = 1; row < e->rows; row++) {
            extents[total] = run;
            extents[total].slot += row * e->slot_pitch;
            extents[total++].page += row * e->page_pitch;
        }
        *e = run;
    }
    return total;
}

double costs_dma_ns(const struct costs *c, const struct plan_extent *extents, uint32_t n)
{
    double ns = 0;

    for (uint32_t i = 0; i < n; i++)
        ns += extent_ns(c, &extents[i]);
    return ns;
}

double costs_kernel_ns(const struct costs *c, uint64_t bytes)
{
    return c->kernel_ns + (double)bytes * c->kernel_byte_ns;
}

static double kernel_ns(const struct costs *c, uint64_t bytes, bool busy)
{
    return costs_kernel_ns(c, bytes) * (busy ? KERNEL_SLOWER_BUSY : 1);
}

double costs_direct_ns(const struct costs *c, const struct plan_extent *extents, uint32_t n,
                       uint64_t bytes, bool busy)
{
    return costs_pick(c, extents, n, bytes, busy) == COPY_DMA ? costs_dma_ns(c, extents, n)
                                                              : kernel_ns(c, bytes, busy);
}

bool costs_staged_pays(double staged_ns, double direct_ns, bool pauses)
{
    return staged_ns < (pauses ? STAGED_GAIN_PAUSES : STAGED_GAIN) * direct_ns;
}

enum copy_strategy costs_pick(const struct costs *c, const struct plan_extent *extents, uint32_t n,
                              uint64_t bytes, bool busy)
{
    double gain = busy ? KERNEL_GAIN_BUSY : KERNEL_GAIN_IDLE;

    if (n == 0)
        return COPY_SM;
    return costs_dma_ns(c, extents, n) <= gain * kernel_ns(c, bytes, busy) ? COPY_DMA : COPY_SM;
}

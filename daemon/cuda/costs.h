/* What copies cost on one GPU: measured once, kept in a file, and asked before each launch.
 *
 * A table has one row a direction, all in nanoseconds. The model:
 * - a run costs what was measured for runs of its width;
 * - an extent of rows costs op_ns to begin, row_ns a row (between those of narrow and of wide rows)
 *   and byte_ns a byte;
 * - the kernel costs kernel_ns to begin and kernel_byte_ns a byte. While other processes use the
 *   GPU's SMs, kernels take turns with theirs; the copy engines don't.
 * Pure computation. Any thread. */
#ifndef UCMD_CUDA_COSTS_H
#define UCMD_CUDA_COSTS_H

#include "daemon/cuda/plan.h"
#include "daemon/device/device.h"

#include <stdbool.h>

#define COSTS_WIDTHS 4
#define COSTS_WIDTH_FIRST 4096u /* each next one is four times that */
#define COSTS_ROW_NARROW 4096u
#define COSTS_ROW_WIDE 65536u
#define COSTS_TEXT_BYTES 1024
/* The driver moves narrower runs to the GPU with kernels of its own, not by the engines alone.
 * Batches of them took up to 0.3 of another process's speed, where rows took nothing. */
#define COSTS_RUN_LEAST 32768u

struct costs {                   /* doubles only: the text lists them in this order */
    double byte_ns;              /* of one large transfer */
    double run_ns[COSTS_WIDTHS]; /* a run of that width, one of many in a batch */
    double op_ns, row_ns[2];     /* rows of COSTS_ROW_NARROW and of COSTS_ROW_WIDE */
    double kernel_ns, kernel_byte_ns;
};

struct costs_table {
    struct costs of[2]; /* by enum ucm_copy_direction */
};

/* An H200's, for a GPU that could not be measured. */
void costs_default(struct costs_table *t);

/* To one line of text and back. `of` names GPU and driver in one word. costs_parse returns 0, or
 * -EINVAL when the text is of another `of` or format version, or not sound. */
void costs_format(const struct costs_table *t, const char *of, char text[COSTS_TEXT_BYTES]);
int costs_parse(struct costs_table *t, const char *of, const char *text);
/* Could a GPU have these figures? */
bool costs_sound(const struct costs_table *t);
/* Were they measured while nobody else used the GPU? Alongside others the kernel falls far
 * behind. */
bool costs_undisturbed(const struct costs_table *t);

double costs_dma_ns(const struct costs *c, const struct plan_extent *extents, uint32_t n);
double costs_kernel_ns(const struct costs *c, uint64_t bytes); /* on an idle GPU */
/* What costs_pick's choice costs. */
double costs_direct_ns(const struct costs *c, const struct plan_extent *extents, uint32_t n,
                       uint64_t bytes, bool busy);
/* Does it pay to go through the worker's entries? staged_ns: of the bus to or from them, and what
 * follows. pauses: others run and leave pauses (busy.h). */
bool costs_staged_pays(double staged_ns, double direct_ns, bool pauses);

/* Cuts extents of rows into runs where a batch of runs costs less. Returns the new number; leaves
 * an extent whole when there would be more than `max`. */
uint32_t costs_cut(const struct costs *c, struct plan_extent *extents, uint32_t n, uint32_t max);

/* COPY_DMA or COPY_SM for a piece of so many bytes. n: its extents; 0: too many for the engines.
 * busy: other processes' kernels run; a kernel must save much to be worth their time. */
enum copy_strategy costs_pick(const struct costs *c, const struct plan_extent *extents, uint32_t n,
                              uint64_t bytes, bool busy);

#endif

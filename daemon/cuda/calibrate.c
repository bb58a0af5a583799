/* What copies cost on this GPU: read from the file of an earlier start, or measured. */
#include "daemon/cuda/gpu.h"

#include "daemon/base/text_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define BYTES (16ull << 20)   /* of one measurement at most */
#define SPREAD (512ull << 20) /* of rows, if the GPU has four times that to spare */
#define BLOCK_STEP 1237       /* from a block to the next of rows: odd */
#define ROUNDS 3
#define LIMIT_NS 1000000000ull
#define KERNEL_FRAGMENT 65536u
#define ROWS_FEW 4
#define ROWS_MANY 32
#define ROW_LEAST_NS 40.0 /* a lower figure would be too good for a region of some GiB */

struct bench {
    struct gpu *g;
    enum ucm_copy_direction direction;
    CUdeviceptr pages, planes;
    size_t pages_bytes;
    void *slots;
    uint64_t end_ns; /* when to give up */
    CUresult r;
};

/* ---- one measurement ---- */

/* Rows lie as far apart as layers do, if the memory allows that, and their blocks in no order: rows
 * close together are cheaper than any real ones. */
static CUresult copy_extents(struct bench *b, uint64_t width, uint32_t rows, uint64_t bytes)
{
    uint32_t n = (uint32_t)(bytes / width / rows);
    struct plan_extent *extents = b->g->dma.extents;
    uint64_t pitch = b->pages_bytes / rows;

    for (uint32_t i = 0; i < n; i++)
        extents[i] = (struct plan_extent){
            .slot = (uint64_t)(uintptr_t)b->slots + i * rows * width,
            .page = b->pages + (rows > 1 ? i * 2 * width * BLOCK_STEP % pitch : i * 2 * width),
            .slot_pitch = width,
            .page_pitch = rows > 1 ? pitch : width,
            .width = width,
            .rows = rows};
    return gpu_dma_launch(b->g, b->direction, n);
}

static CUresult copy_kernel(struct bench *b, uint64_t bytes)
{
    uint32_t n = (uint32_t)(bytes / KERNEL_FRAGMENT);
    struct ucm_copy_item *items = b->g->items;

    for (uint32_t i = 0; i < n; i++)
        items[i] = (struct ucm_copy_item){
            .slot = (uint64_t)(uintptr_t)b->slots + i * (uint64_t)KERNEL_FRAGMENT, .block = i};
    return gpu_kernel_launch(b->g, b->g->streams[b->direction].stream, b->planes, 1, items, n,
                             KERNEL_FRAGMENT, b->direction);
}

/* The best of ROUNDS, in ns. width 0: by the kernel. */
static double measure(struct bench *b, uint64_t width, uint32_t rows, uint64_t bytes)
{
    double best = 1e12;

    for (unsigned i = 0; i <= ROUNDS && b->r == CUDA_SUCCESS; i++) {
        uint64_t begin = uv_hrtime();
        double ns;

        b->r = width == 0 ? copy_kernel(b, bytes) : copy_extents(b, width, rows, bytes);
        if (b->r == CUDA_SUCCESS)
            b->r = cuda.cuStreamSynchronize(b->g->streams[b->direction].stream);
        ns = (double)(uv_hrtime() - begin);
        if (i > 0 && ns < best) /* the first round pays for lazy initialisation */
            best = ns;
        if (uv_hrtime() > b->end_ns && b->r == CUDA_SUCCESS)
            b->r = CUDA_ERROR_TIMEOUT;
    }
    return best;
}

static double at_least_0(double v)
{
    return v > 0 ? v : 0;
}

/* Fills row_ns[i] from extents of FEW and of MANY rows, and returns what an extent costs to begin.
 * launch_ns: the fixed time of any launch. */
static double measure_rows(struct bench *b, struct costs *c, unsigned i, uint64_t width,
                           uint64_t bytes, double launch_ns)
{
    double row_ns = (double)width * c->byte_ns, rows = (double)(bytes / width);
    double few = (measure(b, width, ROWS_FEW, bytes) - launch_ns) / rows * ROWS_FEW;
    double many = (measure(b, width, ROWS_MANY, bytes) - launch_ns) / rows * ROWS_MANY;

    c->row_ns[i] = (many - few) / (ROWS_MANY - ROWS_FEW) - row_ns;
    if (c->row_ns[i] < ROW_LEAST_NS)
        c->row_ns[i] = ROW_LEAST_NS;
    return at_least_0(few - ROWS_FEW * (c->row_ns[i] + row_ns));
}

static void measure_direction(struct bench *b, struct costs *c)
{
    const uint64_t small = BYTES / 4;
    double least = measure(b, 0, 1, KERNEL_FRAGMENT), one = measure(b, small, 1, small);
    uint64_t width = COSTS_WIDTH_FIRST;
    double launch_ns;

    c->byte_ns = (measure(b, BYTES, 1, BYTES) - one) / (double)(BYTES - small);
    launch_ns = at_least_0(one - (double)small * c->byte_ns);
    for (unsigned i = 0; i < COSTS_WIDTHS; i++, width *= 4)
        c->run_ns[i] = (measure(b, width, 1, BYTES) - launch_ns) / (double)(BYTES / width);
    (void)measure_rows(b, c, 0, COSTS_ROW_NARROW, small, launch_ns);
    c->op_ns = measure_rows(b, c, 1, COSTS_ROW_WIDE, BYTES, launch_ns);
    c->kernel_byte_ns = (measure(b, 0, 1, BYTES) - least) / (double)(BYTES - KERNEL_FRAGMENT);
    c->kernel_ns = at_least_0(least - KERNEL_FRAGMENT * c->kernel_byte_ns);
}

/* Pages lie 2 x KERNEL_FRAGMENT apart for the kernel, as for the engines. */
static CUresult bench_open(struct bench *b)
{
    struct ucm_copy_plane plane = {.stride = 2 * KERNEL_FRAGMENT, .block_bytes = KERNEL_FRAGMENT};
    size_t left, total;
    CUresult r = cuda.cuMemGetInfo(&left, &total);

    b->pages_bytes = r == CUDA_SUCCESS && left >= 4 * SPREAD ? SPREAD : 2 * BYTES;
    if (r == CUDA_SUCCESS)
        r = cuda.cuMemAlloc(&b->pages, b->pages_bytes);
    if (r == CUDA_SUCCESS)
        r = cuda.cuMemAlloc(&b->planes, sizeof(plane));
    if (r == CUDA_SUCCESS)
        r = cuda.cuMemHostAlloc(&b->slots, BYTES, CU_MEMHOSTALLOC_PORTABLE);
    plane.base = b->pages;
    if (r == CUDA_SUCCESS)
        r = cuda.cuMemcpyHtoDAsync(b->planes, &plane, sizeof(plane), b->g->streams[0].stream);
    if (r != CUDA_SUCCESS)
        return r;
    memset(b->slots, 0, BYTES);
    r = cuda.cuMemsetD8Async(b->pages, 0, b->pages_bytes, b->g->streams[0].stream);
    return r == CUDA_SUCCESS ? cuda.cuStreamSynchronize(b->g->streams[0].stream) : r;
}

static void bench_close(struct bench *b)
{
    for (unsigned i = 0; i < 2; i++)
        (void)cuda.cuStreamSynchronize(b->g->streams[i].stream);
    if (b->slots)
        (void)cuda.cuMemFreeHost(b->slots);
    if (b->planes)
        (void)cuda.cuMemFree(b->planes);
    if (b->pages)
        (void)cuda.cuMemFree(b->pages);
}

static int measure_all(struct gpu *g, struct costs_table *t)
{
    struct bench b = {.g = g, .end_ns = uv_hrtime() + LIMIT_NS};

    b.r = bench_open(&b);
    for (unsigned i = 0; i < 2 && b.r == CUDA_SUCCESS; i++) {
        b.direction = i;
        measure_direction(&b, &t->of[i]);
    }
    bench_close(&b);
    return b.r == CUDA_SUCCESS && costs_sound(t) ? 0 : -EIO;
}

/* ---- the file ---- */

static void file_name(const struct gpu *g, const char *end, char path[256])
{
    int n = snprintf(path, 256, "%.160s/copy-", g->config.calibration);

    for (unsigned i = 0; i < UCM_UUID_BYTES && n < 230; i++)
        n += snprintf(path + n, 256 - (size_t)n, "%02x", g->work.stats.uuid[i]);
    snprintf(path + n, 256 - (size_t)n, "%s", end);
}

static int file_read(const struct gpu *g, const char *of, struct costs_table *t)
{
    char path[256], text[COSTS_TEXT_BYTES];
    ssize_t n;

    file_name(g, "", path);
    n = text_file_read(AT_FDCWD, path, O_NOFOLLOW | O_NONBLOCK, text, sizeof(text));
    return n < 0 ? (int)n : costs_parse(t, of, text);
}

/* Without the file the next start measures again. */
static void file_write(const struct gpu *g, const char *of, const struct costs_table *t)
{
    char path[256], fresh[256], text[COSTS_TEXT_BYTES];
    ssize_t n;
    int fd;

    file_name(g, "", path);
    file_name(g, ".new", fresh);
    costs_format(t, of, text);
    (void)unlink(fresh);
    fd = open(fresh, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0)
        return;
    n = write(fd, text, strlen(text));
    if (close(fd) != 0 || n != (ssize_t)strlen(text) || rename(fresh, path) != 0)
        (void)unlink(fresh);
}

void gpu_calibrate(struct gpu *g)
{
    bool kept = g->config.calibration && g->config.calibration[0] != '\0';
    char of[128];
    struct nvml seen;
    int version = 0;

    nvml_read(&seen, g->work.stats.uuid);
    (void)cuda.cuDriverGetVersion(&version);
    for (char *p = seen.driver; *p; p++)
        if (*p <= ' ')
            *p = '_';
    snprintf(of, sizeof(of), "%d/%s", version, seen.driver);
    if (kept && file_read(g, of, &g->costs) == 0)
        return;
    if (measure_all(g, &g->costs) < 0)
        costs_default(&g->costs);
    else if (kept && costs_undisturbed(&g->costs))
        file_write(g, of, &g->costs);
}

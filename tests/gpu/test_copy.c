/* Copies are bit for bit what the reference makes, in every layout; dumps are ordered after
 * events; full queues keep every block's bytes apart. */
#include "tests/gpu/harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY FLAT_BYTES
#define SLOTS (256 * MIB)
#define SLOT_FILL 0xEE

static struct test_device t;
static struct test_worker a, b;
static uint8_t *shadow, *slots; /* what memory and slots should hold */

/* ---- layouts ---- */

static void plane_add(struct test_layout *l, uint64_t handle, uint64_t offset, uint64_t stride,
                      uint64_t fragment, uint64_t layer)
{
    l->planes[l->n_planes++] = (struct msg_plane){handle, offset, stride, fragment, layer};
}

/* Layers of equal pieces. */
struct pieces {
    const char *name;
    uint32_t layers, pieces, blocks;
    uint64_t fragment, layer_step, piece_step, stride; /* bytes */
    bool apart;                                        /* each layer has a handle of its own */
    uint64_t first;
};

static const struct pieces forms[] = {
    {"NHD, a tensor a layer", 8, 1, 64, 65536, 64 * 65536, 0, 65536, true, 0},
    {"MLA", 3, 1, 64, 64 * 576 * 2, 64 * 64 * 576 * 2, 0, 64 * 576 * 2, true, 0},
    /* [2][blocks][fragment] a layer */
    {"split K/V", 6, 2, 48, 32768, 2 * 48 * 32768, 48 * 32768, 32768, false, 0},
    /* [blocks][K, V][fragment] a layer: one fragment of both */
    {"fused K/V", 6, 1, 48, 65536, 48 * 65536, 0, 65536, false, 0},
    /* [blocks][tokens][all heads], of which this region names the first half: a fragment a token */
    {"NHD, half of the heads", 2, 16, 40, 1024, 40 * 32 * 1024, 2 * 1024, 32 * 1024, false, 0},
    /* [blocks][all heads][fragment], of which this region names every second head */
    {"HND, half of the heads", 2, 4, 40, 4096, 40 * 8 * 4096, 2 * 4096, 8 * 4096, false, 0},
    /* all layers of a block together */
    {"cross-layer", 16, 1, 50, 16384, 16384, 0, 16 * 16384, false, 0},
};

static void layout_make(struct test_layout *l, const struct pieces *f)
{
    *l = (struct test_layout){.name = f->name,
                              .layers = f->layers,
                              .n_handles = f->apart ? f->layers : 1,
                              .blocks = f->blocks,
                              .layer_bytes = f->pieces * f->fragment};
    for (uint32_t i = 0; i < f->layers; i++) {
        uint64_t at = f->first + i * f->layer_step;

        l->handle_offsets[f->apart ? i : 0] = f->apart ? at : 0;
        for (uint32_t piece = 0; piece < f->pieces; piece++)
            plane_add(l, f->apart ? i : 0, (f->apart ? 0 : at) + piece * f->piece_step, f->stride,
                      f->fragment, i);
    }
}

/* Fragments of very different sizes in one layer. */
static void layout_mixed(struct test_layout *l)
{
    *l = (struct test_layout){.name = "mixed fragments",
                              .layers = 2,
                              .n_handles = 1,
                              .blocks = 20,
                              .layer_bytes = 100000 + 3 + 4096};
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t base = i * 4 * MIB;

        plane_add(l, 0, base, 100000, 100000, i);
        plane_add(l, 0, base + 20 * 100000, 5, 3, i);
        plane_add(l, 0, base + 20 * 100005 + 12, 8192, 4096, i);
    }
}

/* ---- one layout ---- */

/* n items: blocks in random order, slots `pitch` apart from `skew` on. */
static void items_make(struct ucm_copy_item *items, const struct test_layout *l, uint32_t n,
                       uint64_t skew, uint64_t seed)
{
    uint64_t pitch = (l->layers * l->layer_bytes + 4095) / 4096 * 4096;

    for (uint32_t i = 0; i < l->blocks; i++)
        items[i] = (struct ucm_copy_item){
            .slot = (uint64_t)(uintptr_t)t.slots + skew + (i < n ? i : 0) * pitch, .block = i};
    for (uint32_t i = l->blocks - 1; i > 0; i--) {
        uint32_t j = (uint32_t)(random_next(&seed) % (i + 1)), block = items[i].block;

        items[i].block = items[j].block;
        items[j].block = block;
    }
}

/* Writes every page of the region once, by a load, because initcheck sees only what this process
 * writes, not what the worker does. */
static void pages_write(struct device_region *r, uint32_t blocks)
{
    struct ucm_copy_item *items = calloc(blocks, sizeof(*items));
    struct test_job j;

    for (uint32_t i = 0; i < blocks; i++)
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)t.slots, .block = i};
    job_init(&j, DEVICE_LOAD, r, items, blocks);
    CHECK(job_run(&t, &j) == 0, "pages are written: %s", j.job.error.text);
    free(items);
}

/* Dumps from a, loads into b, of planes [first, first + n_planes). */
static void copy_both(const struct test_layout *l, struct device_region *from,
                      struct device_region *to, uint64_t offset_a, uint64_t offset_b, uint64_t skew,
                      uint32_t first, uint32_t n_planes)
{
    struct ucm_copy_item items[64], others[64];
    uint32_t n = l->blocks > 3 ? l->blocks - 3 : l->blocks;
    struct test_job j;

    items_make(items, l, n, skew, 1);
    items_make(others, l, n, skew, 2);
    random_bytes(a.shared, MEMORY, 3);
    memcpy(shadow, a.shared, MEMORY);
    memset(t.slots, SLOT_FILL, 64 * MIB);
    memset(slots, SLOT_FILL, 64 * MIB);
    worker_do(&a, WORKER_WRITE, 0, 0, 0);
    job_init(&j, DEVICE_DUMP, from, items, n);
    j.job.first_plane = first;
    j.job.n_planes = n_planes;
    CHECK(job_run(&t, &j) == 0, "%s: dump: %s", l->name, j.job.error.text);
    oracle_copy(&t, from, items, n, slots, shadow, offset_a, UCM_COPY_DUMP, first, n_planes);
    CHECK(memcmp(t.slots, slots, 64 * MIB) == 0,
          "%s: slots are the reference's, planes %u+%u, skew %d", l->name, first, n_planes,
          (int)skew);

    random_bytes(b.shared, MEMORY, 4);
    memcpy(shadow, b.shared, MEMORY);
    worker_do(&b, WORKER_WRITE, 0, 0, 0);
    job_init(&j, DEVICE_LOAD, to, others, n);
    j.job.first_plane = first;
    j.job.n_planes = n_planes;
    CHECK(job_run(&t, &j) == 0, "%s: load: %s", l->name, j.job.error.text);
    oracle_copy(&t, to, others, n, slots, shadow, offset_b, UCM_COPY_LOAD, first, n_planes);
    worker_do(&b, WORKER_READ, 0, 0, 0);
    CHECK(memcmp(b.shared, shadow, MEMORY) == 0, "%s: memory is the reference's", l->name);
}

/* ipc_a, ipc_b: handles; NULL: the worker's descriptor. */
static void layout_test(const struct test_layout *l, const uint8_t *ipc_a, uint64_t offset_a,
                        const uint8_t *ipc_b, uint64_t offset_b)
{
    struct device_region *from, *to;
    struct ucm_error e = {0};

    if (!CHECK(region_open(&t, l, a.pid, ipc_a, a.fd, offset_a, MEMORY, &from, &e) == 0,
               "%s: first region opens: %s", l->name, e.text))
        return;
    if (!CHECK(region_open(&t, l, b.pid, ipc_b, b.fd, offset_b, MEMORY, &to, &e) == 0,
               "%s: second region opens: %s", l->name, e.text))
        return;
    pages_write(from, l->blocks);
    copy_both(l, from, to, offset_a, offset_b, 0, 0, l->n_planes);
    if (l->n_planes > 2)
        copy_both(l, from, to, offset_a, offset_b, 0, 1, l->n_planes - 2);
    copy_both(l, from, to, offset_a, offset_b, 7, 0, l->n_planes);
    region_shut(&t, from);
    region_shut(&t, to);
}

static void test_layouts(const uint8_t *ipc_a, uint64_t offset_a, const uint8_t *ipc_b,
                         uint64_t offset_b)
{
    static const uint64_t odd[] = {1, 3, 17, 4095, 4097, 65537};
    struct test_layout l;
    char name[64];

    for (unsigned i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
        if (forms[i].apart && !(ipc_a && ipc_b))
            continue;
        layout_make(&l, &forms[i]);
        layout_test(&l, ipc_a, offset_a, ipc_b, offset_b);
    }
    layout_mixed(&l);
    layout_test(&l, ipc_a, offset_a, ipc_b, offset_b);
    for (unsigned i = 0; i < sizeof(odd) / sizeof(odd[0]); i++) {
        snprintf(name, sizeof(name), "fragments of %d, misaligned", (int)odd[i]);
        layout_make(&l, &(struct pieces){.name = name,
                                         .layers = 3,
                                         .pieces = 1,
                                         .blocks = 31,
                                         .fragment = odd[i],
                                         .layer_step = 31 * (odd[i] + i * 3) + 1,
                                         .stride = odd[i] + i * 3,
                                         .first = i * 5});
        layout_test(&l, ipc_a, offset_a, ipc_b, offset_b);
    }
}

/* ---- events ---- */

static void test_event_order(struct device_region *r)
{
    struct ucm_copy_item items[32];
    struct test_job j;
    unsigned wrong = 0, early = 0;
    uint64_t begin;

    flat_items(&t, 0, items);
    for (unsigned i = 0; i < 12; i++) {
        unsigned ms = i % 4 * 40;

        random_bytes(a.shared, MEMORY, 100 + i);
        memset(t.slots, 0, MEMORY);
        begin = uv_hrtime();
        /* Half of the time the event is new, and may have the handle of the one before. */
        if (i % 2 == 0 && i > 0)
            worker_do(&a, WORKER_EVENT_DESTROY, 0, 0, 0);
        worker_do(&a, WORKER_EVENT, 0, 0, ms);
        job_init(&j, DEVICE_DUMP, r, items, 32);
        j.job.event = a.reply.handle;
        j.job.deadline_ms = now_ms(&t) + 10000;
        if (job_run(&t, &j) != 0)
            printf("INFO  %s\n", j.job.error.text);
        early += uv_hrtime() - begin < ms * 1000000ull;
        wrong += j.status != 0 || memcmp(t.slots, a.shared, MEMORY) != 0;
    }
    CHECK(wrong == 0 && early == 0,
          "12 dumps after events store the final bytes (%u wrong, %u early)", wrong, early);
}

/* Two dumps that wait for one event, which is recorded again between them. */
static void test_event_again(struct device_region *r)
{
    struct ucm_copy_item items[32];
    struct test_job j, k;
    uint8_t handle[64];

    flat_items(&t, 0, items);
    random_bytes(a.shared, MEMORY, 200);
    worker_do(&a, WORKER_EVENT, 0, 0, 100);
    memcpy(handle, a.reply.handle, 64);
    job_init(&j, DEVICE_DUMP, r, items, 32);
    j.job.event = handle;
    j.job.deadline_ms = now_ms(&t) + 10000;
    job_submit(&t, &j);
    loop_for(&t, 10);
    worker_do(&a, WORKER_EVENT_AGAIN, 0, 0, 200);
    job_init(&k, DEVICE_DUMP, r, items, 32);
    k.job.event = handle;
    k.job.deadline_ms = now_ms(&t) + 10000;
    job_submit(&t, &k);
    CHECK(job_wait(&t, &k) == 0 && job_wait(&t, &j) == 0 && memcmp(t.slots, a.shared, MEMORY) == 0,
          "one event for two dumps, recorded again: %s", k.job.error.text);
}

/* ---- many jobs ---- */

#define MANY 3000

/* Small jobs at once, of all priorities and both directions, each with blocks of its own. */
static void test_many(struct device_region *from, struct device_region *to,
                      const struct test_layout *l)
{
    struct test_job *jobs = calloc(MANY, sizeof(*jobs));
    struct ucm_copy_item *items = calloc(MANY, sizeof(*items));
    unsigned bad = 0;
    uint64_t begin;

    random_bytes(a.shared, MEMORY, 300);
    worker_do(&a, WORKER_WRITE, 0, 0, 0);
    memset(b.shared, 0, MEMORY);
    worker_do(&b, WORKER_WRITE, 0, 0, 0);
    for (int pass = 0; pass < 2; pass++) {
        begin = uv_hrtime();
        for (uint32_t i = 0; i < MANY; i++) {
            items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)t.slots + i * 12288ull,
                                              .block = i};
            job_init(&jobs[i], pass ? DEVICE_LOAD : DEVICE_DUMP, pass ? to : from, &items[i], 1);
            jobs[i].job.priority = i % 8;
            job_submit(&t, &jobs[i]);
        }
        for (uint32_t i = 0; i < MANY; i++)
            bad += job_wait(&t, &jobs[i]) != 0;
        printf("INFO  %d %s of %d bytes at once: %.2f us each\n", MANY, pass ? "loads" : "dumps",
               (int)(l->layers * l->layer_bytes), (double)(uv_hrtime() - begin) / 1e3 / MANY);
    }
    worker_do(&b, WORKER_READ, 0, 0, 0);
    CHECK(bad == 0 && memcmp(b.shared, a.shared, MANY * 10240ull) == 0,
          "%d dumps and loads at once: every block is intact (%u failed)", MANY, bad);
    free(items);
    free(jobs);
}

/* A load of 1 MiB comes after 24 MiB, many times over, of less urgent dumps or loads. If four of
 * those have not ended, three times what is enqueued ahead, it overtakes the last of them. */
static void test_urgent(struct device_region *r)
{
    struct ucm_copy_item items[32];
    double worst_us[2] = {0};
    unsigned judged = 0, overtook = 0;

    flat_items(&t, 0, items);
    for (unsigned round = 0; round < 2 * 20; round++) {
        struct test_job many[8], urgent;
        uint64_t begin;
        bool waits;
        double us;

        for (unsigned i = 0; i < 8; i++) {
            job_init(&many[i], round % 2 ? DEVICE_DUMP : DEVICE_LOAD, r, items, 24);
            job_submit(&t, &many[i]);
        }
        loop_for(&t, 1);
        job_init(&urgent, DEVICE_LOAD, r, items + 31, 1);
        urgent.job.priority = 1;
        waits = round % 2 == 0 && !many[4].done;
        begin = uv_hrtime();
        (void)job_run(&t, &urgent);
        us = (double)(urgent.done_ns - begin) / 1e3;
        if (us > worst_us[round % 2])
            worst_us[round % 2] = us;
        for (unsigned i = 0; i < 8; i++)
            (void)job_wait(&t, &many[i]);
        judged += waits;
        overtook += waits && urgent.done_ns < many[7].done_ns;
    }
    CHECK(judged - overtook <= 1, /* the host may have looked away for as long as four loads take */
          "an urgent load overtakes others (%u of %u): at worst %.0f us after loads, %.0f after "
          "dumps",
          overtook, judged, worst_us[0], worst_us[1]);
}

static void test_ordering(const uint8_t *ipc_a, const uint8_t *ipc_b)
{
    struct test_layout l;
    struct device_region *from, *to;
    struct ucm_error e = {0};

    if (!CHECK(region_open(&t, &layout_flat, a.pid, ipc_a, -1, 0, MEMORY, &from, &e) == 0,
               "flat region opens: %s", e.text))
        return;
    pages_write(from, FLAT_BLOCKS);
    test_event_order(from);
    test_event_again(from);
    test_urgent(from);
    region_shut(&t, from);

    layout_make(&l, &(struct pieces){"small", 2, 1, MANY, 5120, 5120, 0, 10240, false, 0});
    if (!CHECK(region_open(&t, &l, a.pid, ipc_a, -1, 0, MEMORY, &from, &e) == 0 &&
                   region_open(&t, &l, b.pid, ipc_b, -1, 0, MEMORY, &to, &e) == 0,
               "small regions open: %s", e.text))
        return;
    pages_write(from, l.blocks);
    test_many(from, to, &l);
    region_shut(&t, from);
    region_shut(&t, to);
}

int main(int argc, char **argv)
{
    uint8_t ipc_a[64], ipc_b[64];
    struct device_stats stats;

    harness_main(argc, argv);
    device_start(&t, SLOTS);
    shadow = malloc(MEMORY);
    slots = malloc(SLOTS);
    worker_start(&a);
    worker_start(&b);
    CHECK(worker_do(&a, WORKER_ALLOC_IPC, MEMORY, 0, 0), "worker allocates");
    memcpy(ipc_a, a.reply.handle, 64);
    CHECK(worker_do(&b, WORKER_ALLOC_IPC, MEMORY, 4096 + 16, 0),
          "worker allocates after an offset");
    memcpy(ipc_b, b.reply.handle, 64);
    test_layouts(ipc_a, 0, ipc_b, 4096 + 16);
    worker_do(&b, WORKER_FREE, 0, 0, 0);
    CHECK(worker_do(&b, WORKER_ALLOC_IPC, MEMORY, 0, 0), "worker allocates again");
    memcpy(ipc_b, b.reply.handle, 64);
    test_ordering(ipc_a, ipc_b);

    worker_do(&a, WORKER_FREE, 0, 0, 0);
    /* Under initcheck a worker can't even write to VMM memory. */
    if (!getenv("UCM_TEST_NO_VMM") &&
        CHECK(worker_do(&a, WORKER_ALLOC_VMM, MEMORY, 0, 0) && a.fd >= 0,
              "worker allocates VMM memory")) {
        printf("INFO  VMM memory\n");
        test_layouts(NULL, 0, ipc_b, 0);
    }
    t.gpu->ops->stats(t.gpu, &stats);
    printf("INFO  %s: %llu jobs, %llu bytes dumped, %llu loaded, context of %llu MiB\n", stats.name,
           (unsigned long long)stats.jobs, (unsigned long long)stats.dump_bytes,
           (unsigned long long)stats.load_bytes, (unsigned long long)(stats.context_bytes >> 20));
    CHECK(stats.regions == 0 && !stats.failed && t.failures == 0,
          "no region is left, nothing failed");
    worker_kill(&a);
    worker_kill(&b);
    free(shadow);
    free(slots);
    device_stop(&t);
    return tally();
}

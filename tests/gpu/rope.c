/* test_rope [--few]: loads with position shifts on a GPU against the same in C. */
#include "kernels/rope/rope_cuda.h"
#include "tests/gpu/compare.h"

#include <string.h>

#define BLOCKS 6u
#define ITEMS 4u
#define LAYERS 2u
#define TABLES 2u
#define GUARD 0xa5

extern const unsigned char ucm_rope_fatbin[];

/* ---- bits ---- */

struct shape {
    /* the last two: bytes of a fragment around K */
    uint32_t rows, dim, first, rotary, before, behind;
};

static void fill_rows(const struct ucm_rope_spec *spec, uint8_t *at, uint64_t bytes)
{
    uint32_t element = spec->dtype == UCM_ROPE_F32 ? 4 : spec->dtype == UCM_ROPE_FP8_E4M3 ? 1 : 2;

    for (uint64_t i = 0; i + element <= bytes; i += element) {
        uint32_t word = rnd_below(16) == 0 ? rnd() : ucm_rope_encode(spec->dtype, rnd_normal() * 4);

        memcpy(at + i, &word, element);
    }
}

/* By the reference, in pages that lie here. */
static void rerotate_pages(const struct ucm_rope_spec *spec, const struct ucm_copy_plane *planes,
                           const uint32_t *at, const struct ucm_copy_item *items,
                           const struct ucm_rope_angle *tables)
{
    for (uint32_t i = 0; i < ITEMS; i++)
        for (uint32_t p = 0; p < 2 * LAYERS; p += 2) {
            uint8_t *page =
                (uint8_t *)(uintptr_t)(planes[p].base + items[i].block * planes[p].stride + at[p]);

            if (items[i].memory != UCM_ROPE_STAYS)
                ucm_rope_apply(spec, tables + items[i].memory * (spec->rotary / 2), page, page);
        }
}

/* A load into pages of a GPU, and the same on the host. */
struct load {
    struct ucm_copy_plane planes[2 * LAYERS], host[2 * LAYERS];
    struct ucm_copy_item items[ITEMS], on_host[ITEMS];
    uint32_t at[2 * LAYERS];
    struct ucm_rope_angle *tables;
    uint64_t page_bytes, slots_bytes;
    uint8_t *pages, *slots, *found;
    uint32_t largest; /* fragment */
    CUdeviceptr gpu_pages, gpu_slots, gpu_planes, gpu_items, gpu_at, gpu_tables;
};

static void launch(struct load *l, const struct ucm_rope_spec *spec, uint32_t in_place)
{
    uint32_t n_planes = 2 * LAYERS, n_items = ITEMS, n_tables = TABLES;
    uint32_t tiles = ucm_rope_tiles(spec, l->largest);
    struct ucm_rope_spec by_value = *spec;
    void *arguments[] = {&l->gpu_planes, &n_planes, &l->gpu_items, &n_items, &l->gpu_at,
                         &l->gpu_tables, &n_tables, &by_value,     &tiles,   &in_place};
    char name[UCM_ROPE_KERNEL_NAME];

    ucm_rope_kernel_name(spec, name);
    gpu_launch(name, 5, UCM_COPY_THREADS, ucm_rope_tables_bytes(spec, n_tables), arguments);
    gpu_sync();
}

/* K with other bytes before and after it, and V, whose pages follow K's. All lie `shift` bytes from
 * an aligned place. */
static void load_place(struct load *l, const struct ucm_rope_spec *spec, const struct shape *shape,
                       uint32_t shift)
{
    uint32_t k = spec->rows * ucm_rope_row_bytes(spec),
             fragment = shape->before + k + shape->behind, v = 1000;
    uint64_t stride = (uint64_t)fragment + (shift ? 3 : 16 - fragment % 16),
             slot = (uint64_t)LAYERS * (fragment + v) + (shift ? 5 : 0),
             layer = BLOCKS * stride + BLOCKS * 1024u,
             slot_step = shift ? slot : (slot + 15) / 16 * 16;

    l->largest = fragment > v ? fragment : v;
    l->page_bytes = LAYERS * layer + 16;
    l->slots_bytes = (slot + 16) / 16 * 16 * ITEMS + 16;
    l->pages = fresh(l->page_bytes);
    l->slots = fresh(l->slots_bytes);
    l->gpu_pages = gpu_new(l->page_bytes);
    l->gpu_slots = gpu_new(l->slots_bytes);
    for (uint32_t p = 0; p < 2 * LAYERS; p++) {
        uint64_t base = p / 2 * layer + (p % 2 ? BLOCKS * stride : 0) + shift;

        l->planes[p] = (struct ucm_copy_plane){l->gpu_pages + base, p % 2 ? 1024 : stride,
                                               p / 2 * (fragment + v) + (p % 2 ? fragment : 0),
                                               p % 2 ? v : fragment, 0};
        l->host[p] = l->planes[p];
        l->host[p].base = (uint64_t)(uintptr_t)l->pages + base;
        l->at[p] = p % 2 ? UCM_ROPE_NO_K : shape->before;
    }
    for (uint32_t i = 0; i < ITEMS; i++) {
        l->items[i] = (struct ucm_copy_item){.slot = l->gpu_slots + shift + i * slot_step,
                                             .block = (i * 5 + 2) % BLOCKS,
                                             .memory = i == 2 ? UCM_ROPE_STAYS : i % TABLES};
        l->on_host[i] = l->items[i];
        l->on_host[i].slot = (uint64_t)(uintptr_t)l->slots + shift + i * slot_step;
    }
}

static void load_new(struct load *l, const struct ucm_rope_spec *spec, const struct shape *shape,
                     uint32_t shift)
{
    uint32_t half = spec->rotary / 2;

    memset(l, 0, sizeof(*l));
    load_place(l, spec, shape, shift);
    l->found = fresh(l->page_bytes);
    memset(l->pages, GUARD, l->page_bytes);
    fill_rows(spec, l->slots + shift, l->slots_bytes - shift);
    l->tables = fresh(TABLES * half * sizeof *l->tables);
    for (uint32_t i = 0; i < TABLES; i++)
        ucm_rope_table(spec, &(struct ucm_rope_shift){i * 70000u, 5 + rnd_below(1000000), 0, 0},
                       l->tables + i * half);
    l->gpu_planes = gpu_put(0, l->planes, sizeof l->planes);
    l->gpu_items = gpu_put(0, l->items, sizeof l->items);
    l->gpu_at = gpu_put(0, l->at, sizeof l->at);
    l->gpu_tables = gpu_put(0, l->tables, TABLES * half * sizeof *l->tables);
    gpu_put(l->gpu_pages, l->pages, l->page_bytes);
    gpu_put(l->gpu_slots, l->slots, l->slots_bytes);
}

static void check_load(const struct ucm_rope_spec *spec, const struct shape *shape, uint32_t shift)
{
    struct load l;

    load_new(&l, spec, shape, shift);
    launch(&l, spec, 0);
    gpu_get(l.found, l.gpu_pages, l.page_bytes);
    ucm_copy_ref(l.host, 2 * LAYERS, l.on_host, ITEMS, UCM_COPY_LOAD);
    rerotate_pages(spec, l.host, l.at, l.items, l.tables);
    check(memcmp(l.found, l.pages, l.page_bytes) == 0,
          "dtype %u, pairs %u, %u rows of %u, [%u, +%u), %u and %u bytes around, shifted by %u",
          spec->dtype, spec->pairs, spec->rows, spec->dim, spec->first, spec->rotary, shape->before,
          shape->behind, shift);
    launch(&l, spec, 1);
    gpu_get(l.found, l.gpu_pages, l.page_bytes);
    rerotate_pages(spec, l.host, l.at, l.items, l.tables);
    check(memcmp(l.found, l.pages, l.page_bytes) == 0, "in place: dtype %u, pairs %u, rows of %u",
          spec->dtype, spec->pairs, spec->dim);
    memory_end();
}

static void test_bits(void)
{
    static const struct shape shapes[] = {
        {128, 128, 0, 128, 0, 0}, /* 16 tokens of 8 heads */
        {37, 64, 0, 64, 0, 4608}, /* K, then V, in one plane */
        {16, 576, 512, 64, 0, 0}, /* MLA */
        {33, 96, 0, 24, 48, 16},  /* partial rotary, lanes that divide no warp */
        {40, 128, 32, 64, 0, 0},  /* the middle of a row */
        {5, 80, 0, 80, 0, 0},     /* a head of 80 */
        {9, 30, 3, 18, 7, 9},     /* nothing fits */
        {3, 1024, 0, 1024, 0, 0}, /* long rows */
        {50, 128, 0, 32, 0, 0},   /* partial rotary, whole rows as runs */
    };
    uint32_t n = few ? 4 : sizeof shapes / sizeof *shapes;

    for (uint32_t dtype = 0; dtype <= UCM_ROPE_FP8_E4M3; dtype++)
        for (uint32_t pairs = 0; pairs < 2; pairs++)
            for (uint32_t i = 0; i < n; i++)
                for (uint32_t shift = 0; shift < 2; shift++) {
                    struct ucm_rope_spec spec = {.dtype = dtype,
                                                 .rows = shapes[i].rows,
                                                 .dim = shapes[i].dim,
                                                 .first = shapes[i].first,
                                                 .rotary = shapes[i].rotary,
                                                 .pairs = pairs,
                                                 .base = 500000};
                    char why[UCM_ROPE_WHY] = "";

                    if (check(ucm_rope_check(&spec, why) == 0, "a spec: %s", why))
                        check_load(&spec, &shapes[i], shift);
                }
}

int main(int argc, char **argv)
{
    gpu_begin(argc, argv);
    gpu_load(ucm_rope_fatbin);
    test_bits();
    return gpu_end();
}

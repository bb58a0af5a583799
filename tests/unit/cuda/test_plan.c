#include "daemon/cuda/plan.h"

#include <criterion/criterion.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Slots and pages in one block of memory each. The test itself copies the planned extents, and
 * compares the result with the reference. */
#define MEMORY (1u << 20)
#define MAX 4096u

static uint8_t *slots, *pages, *want;
static struct plan_extent extents[MAX];

static void setup(void)
{
    slots = malloc(MEMORY);
    pages = malloc(MEMORY);
    want = malloc(MEMORY);
    for (uint32_t i = 0; i < MEMORY; i++)
        slots[i] = (uint8_t)(i * 2654435761u >> 13);
}

static void teardown(void)
{
    free(slots);
    free(pages);
    free(want);
}

static uint64_t address(const uint8_t *p)
{
    return (uint64_t)(uintptr_t)p;
}

static struct ucm_copy_plane plane(uint64_t base, uint64_t stride, uint64_t slot_offset,
                                   uint32_t fragment)
{
    return (struct ucm_copy_plane){address(pages) + base, stride, slot_offset, fragment, 1};
}

static struct ucm_copy_item item(uint64_t slot, uint32_t block)
{
    return (struct ucm_copy_item){address(slots) + slot, block, 1};
}

/* Plans a load, carries it out, and checks that each byte was copied once, to its place. */
static uint32_t plan(const struct ucm_copy_plane *planes, uint32_t n_planes,
                     const struct ucm_copy_item *items, uint32_t n_items)
{
    uint64_t bytes = 0, moved = 0;
    uint32_t n = plan_extents(planes, n_planes, items, n_items, extents, MAX);

    memset(pages, 0xEE, MEMORY);
    for (uint32_t i = 0; i < n; i++) {
        const struct plan_extent *e = &extents[i];

        cr_assert(e->rows > 0 && e->width > 0 && e->slot_pitch >= e->width &&
                  e->page_pitch >= e->width && e->slot_pitch <= PLAN_PITCH_MAX &&
                  e->page_pitch <= PLAN_PITCH_MAX);
        for (uint32_t row = 0; row < e->rows; row++)
            memcpy((void *)(uintptr_t)(e->page + row * e->page_pitch),
                   (void *)(uintptr_t)(e->slot + row * e->slot_pitch), e->width);
        moved += e->rows * e->width;
    }
    memcpy(want, pages, MEMORY);
    memset(pages, 0xEE, MEMORY);
    ucm_copy_ref(planes, n_planes, items, n_items, UCM_COPY_LOAD);
    for (uint32_t p = 0; p < n_planes; p++)
        bytes += (uint64_t)planes[p].block_bytes * n_items;
    if (n > 0) {
        cr_assert_eq(moved, bytes);
        cr_assert_eq(memcmp(want, pages, MEMORY), 0);
    }
    return n;
}

TestSuite(plan, .init = setup, .fini = teardown);

Test(plan, layers_at_one_distance_are_rows_of_a_block)
{
    struct ucm_copy_plane planes[8];
    struct ucm_copy_item items[] = {item(0, 7), item(20000, 2), item(40000, 5)};

    for (uint32_t i = 0; i < 8; i++)
        planes[i] = plane(i * 65536, 1024, i * 1024, 1024);
    cr_assert_eq(plan(planes, 8, items, 3), 3);
    cr_assert_eq(extents[0].rows, 8);
    cr_assert_eq(extents[0].page_pitch, 65536);
}

Test(plan, blocks_in_one_piece_are_one_run)
{
    struct ucm_copy_plane planes[4];
    struct ucm_copy_item items[6];

    for (uint32_t i = 0; i < 4; i++)
        planes[i] = plane(i * 512, 2048, i * 512, 512);
    for (uint32_t i = 0; i < 6; i++)
        items[i] = item(i * 2048, 3 + i);
    cr_assert_eq(plan(planes, 4, items, 6), 1);
    cr_assert_eq(extents[0].rows, 1);
    cr_assert_eq(extents[0].width, 6 * 2048);
    items[3].block = 40;
    cr_assert_eq(plan(planes, 4, items, 6), 3, "a block elsewhere ends the run");
    items[3].block = 6;
    items[3].memory = 2;
    cr_assert_eq(plan(planes, 4, items, 6), 3, "so does a slot in another piece of memory");
}

Test(plan, many_blocks_of_few_layers_are_rows_over_blocks)
{
    struct ucm_copy_plane planes[] = {plane(0, 640, 0, 600), plane(99999, 640, 600, 600)};
    struct ucm_copy_item items[100];

    for (uint32_t i = 0; i < 100; i++)
        items[i] = item(i * 4096, 20 + i);
    cr_assert_eq(plan(planes, 2, items, 100), 2);
    cr_assert_eq(extents[0].rows, 100);
    cr_assert_eq(extents[0].slot_pitch, 4096);
    cr_assert_eq(extents[0].page_pitch, 640);
}

Test(plan, allocations_are_not_reached_over)
{
    struct ucm_copy_plane planes[4];
    struct ucm_copy_item items[] = {item(0, 9)};

    for (uint32_t i = 0; i < 4; i++)
        planes[i] = plane(i * 65536, 512, i * 512, 512);
    planes[2].memory = planes[3].memory = 2;
    cr_assert_eq(plan(planes, 4, items, 1), 2);
    for (uint32_t i = 0; i < 4; i++)
        planes[i] = plane(i * 512, 2048, i * 512, 512);
    planes[2].memory = planes[3].memory = 2;
    cr_assert_eq(plan(planes, 4, items, 1), 2);
}

Test(plan, too_many_extents_are_refused)
{
    struct ucm_copy_plane planes[] = {plane(0, 8, 0, 5)};
    struct ucm_copy_item *items = calloc(MAX + 1, sizeof(*items));

    for (uint32_t i = 0; i <= MAX; i++)
        items[i] = item(i * 16, 2 * i);
    cr_assert_eq(plan(planes, 1, items, MAX + 1), 0);
    cr_assert_eq(plan(planes, 1, items, MAX), MAX);
    free(items);
}

/* Whatever the layout, and in whatever order the blocks come. */
Test(plan, random_layouts_are_copied_as_by_the_reference)
{
    unsigned seed = 11;

    for (unsigned round = 0; round < 2000; round++) {
        uint32_t n_planes = 1 + (uint32_t)rand_r(&seed) % 12, n_items = 1, offset = 0, blocks = 24;
        struct ucm_copy_plane planes[12];
        struct ucm_copy_item items[24];
        uint32_t order[24], place = 0, gap = (uint32_t)rand_r(&seed) % 3 * 7;

        for (uint32_t p = 0; p < n_planes; p++) {
            uint32_t fragment = rand_r(&seed) % 4 ? 96 : 1 + (uint32_t)rand_r(&seed) % 200;
            uint32_t stride = rand_r(&seed) % 4 ? fragment : fragment + gap + 8;

            planes[p] = plane(place, stride, offset, fragment);
            planes[p].memory = rand_r(&seed) % 8 == 0;
            place += blocks * stride + (rand_r(&seed) % 3 ? 0 : (uint32_t)rand_r(&seed) % 64);
            offset += fragment;
        }
        n_items = 1 + (uint32_t)rand_r(&seed) % blocks;
        for (uint32_t i = 0; i < blocks; i++)
            order[i] = i;
        for (uint32_t i = 0; i < blocks; i++) {
            uint32_t j = (uint32_t)rand_r(&seed) % blocks, x = order[i];

            if (rand_r(&seed) % 3)
                continue;
            order[i] = order[j];
            order[j] = x;
        }
        for (uint32_t i = 0; i < n_items; i++)
            items[i] = item(i * (uint64_t)(offset + gap), order[i]);
        cr_assert_gt(plan(planes, n_planes, items, n_items), 0);
    }
}

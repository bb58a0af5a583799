/* What the GPU knows of a mapping, over the fake driver and a mapping that this program plays. Each
 * range is registered once. None is released while the driver or a place uses it. */
/* Sanitizers: thread */
#include "client/cuda/decode.h"
#include "tests/unit/cuda/library_rig.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <string.h>

#define NUMBERS 40u
#define SLAB (64u << 10)
#define ENTRY 4096u

/* ---- the mapping ---- */

static struct ucm_mapping *const mapping = (struct ucm_mapping *)(void *)0x1000;
static struct ucm_mapped_range maps[8];
static uint32_t n_maps, released;
static uint64_t opened, part_bytes = ENTRY;
static uint8_t memory[4][SLAB];
static int release_fails;
static struct ucm_cuda_decode *d;

int __wrap_ucm_mapping_info(struct ucm_mapping *w, struct ucm_mapping_info *out);
int __wrap_ucm_mapping_ranges(struct ucm_mapping *w, struct ucm_mapped_range *out, uint32_t room,
                              uint32_t *n);
int __wrap_ucm_mapping_release(struct ucm_mapping *w, const void *address);
int __wrap_ucm_mapping_address(struct ucm_mapping *w, const struct ucm_place *place,
                               const void **address, const uint64_t **seq);

int __wrap_ucm_mapping_info(struct ucm_mapping *w, struct ucm_mapping_info *out)
{
    cr_expect(w == mapping || part_bytes != ENTRY);
    *out = (struct ucm_mapping_info){.opened = opened, .part_bytes = part_bytes};
    return 0;
}

int __wrap_ucm_mapping_ranges(struct ucm_mapping *w, struct ucm_mapped_range *out, uint32_t room,
                              uint32_t *n)
{
    cr_expect_eq(w, mapping);
    memcpy(out, maps, (n_maps < room ? n_maps : room) * sizeof *maps);
    *n = n_maps;
    return 0;
}

static bool lies_in(uint64_t at, const struct ucm_mapped_range *m)
{
    return at - (uintptr_t)m->address < m->bytes;
}

/* Checks that nothing uses it any more: no place on the GPU, nor the driver. */
int __wrap_ucm_mapping_release(struct ucm_mapping *w, const void *address)
{
    const struct ucm_entries_place *places = (const void *)(uintptr_t)d->plan.gather.places;
    uint32_t i = 0;

    cr_expect_eq(w, mapping);
    while (i < n_maps && maps[i].address != address)
        i++;
    cr_assert_lt(i, n_maps, "nothing is mapped there");
    for (uint32_t k = 0; k < NUMBERS; k++)
        cr_expect(!lies_in(places[k].bytes, &maps[i]) && !lies_in(places[k].seq, &maps[i]),
                  "number %u has a place in it", k);
    for (uint32_t k = 0; k < d->n_ranges; k++)
        cr_expect_neq((const void *)d->range[k].host, address, "the driver knows it");
    if (release_fails)
        return -UCM_EDEADLINE;
    maps[i] = maps[--n_maps];
    released++;
    return 0;
}

int __wrap_ucm_mapping_address(struct ucm_mapping *w, const struct ucm_place *place,
                               const void **address, const uint64_t **seq)
{
    cr_expect_eq(w, mapping);
    if (place->opened != opened)
        return UCM_MAPPING_MISS;
    *address = memory[1 + place->slab] + place->slot * ENTRY;
    *seq = (const uint64_t *)(const void *)memory[0] + place->slab * 100 + place->slot;
    return 0;
}

/* Slab i is memory 1 + i; the table is memory 0. */
static void map(uint32_t slab)
{
    maps[n_maps++] =
        (struct ucm_mapped_range){.address = slab == UCM_PLACE_NONE ? memory[0] : memory[1 + slab],
                                  .bytes = SLAB,
                                  .slab = slab,
                                  .opened = opened};
}

static struct ucm_place place(uint32_t slab, uint32_t slot)
{
    return (struct ucm_place){.slab = slab, .slot = slot, .seq = 2 * slot + 2, .opened = opened};
}

/* ---- a handle ---- */

static void setup(void)
{
    struct ucm_cuda_decode_options options = {
        .layers = 1,
        .q_heads = 1,
        .kv_heads = 1,
        .head_dim = 64,
        .dtype = UCM_SPARSE_BF16,
        .tokens = 16,
        .block_pool = 4096,
        .entries = 8,
        .numbers = NUMBERS,
        .requests = 1,
        .sequences = 1,
        .lists = 1,
        .room = 4,
        .stored = {.k_token_stride = 128, .v_offset = 2048, .v_token_stride = 128},
        .layer_bytes = ENTRY};

    rig_open();
    cr_assert_eq(ucm_cuda_decode_open(uuid, &options, &d), 0, "%s", ucm_cuda_errmsg());
    opened = 1;
    map(UCM_PLACE_NONE);
    map(0);
}

static void teardown(void)
{
    ucm_cuda_decode_close(d);
    rig_close();
}

TestSuite(cuda_decode_mapping, .init = setup, .fini = teardown, .timeout = 60);

static int put(uint32_t number, struct ucm_place at)
{
    return ucm_cuda_decode_places(d, mapping, &number, &at, 1, stream);
}

/* The place that the GPU has for a number. */
static struct ucm_entries_place has(uint32_t number)
{
    return ((const struct ucm_entries_place *)(uintptr_t)d->plan.gather.places)[number];
}

static uint32_t update(int wanted)
{
    uint32_t lost = 7;
    int r = ucm_cuda_decode_mapping_update(d, &lost, stream);

    cr_expect_eq(r, wanted, "%d: %s", r, r ? ucm_cuda_errmsg() : "");
    return lost;
}

Test(cuda_decode_mapping, places)
{
    struct ucm_place places[3] = {place(0, 5), {.slab = UCM_PLACE_NONE, .opened = 1}, place(0, 7)};
    uint32_t numbers[3] = {30, 4, 0};

    cr_assert_eq(ucm_cuda_decode_places(d, mapping, numbers, places, 3, stream), 0, "%s",
                 ucm_cuda_errmsg());
    cr_expect_eq(fake_cuda.registered, 2);
    cr_expect_eq(has(30).bytes, (uintptr_t)memory[1] + 5 * ENTRY);
    cr_expect_eq(has(30).seq, (uintptr_t)memory[0] + 5 * 8);
    cr_expect_eq(has(30).told, 12);
    cr_expect_eq(has(0).bytes, (uintptr_t)memory[1] + 7 * ENTRY);
    cr_expect_eq(has(4).bytes, 0);
    cr_expect_eq(has(5).bytes, 0);
    map(1);
    cr_expect_eq(put(4, place(1, 0)), 0);
    cr_expect_eq(fake_cuda.registered, 3, "each once");
    cr_expect_eq(has(4).bytes, (uintptr_t)memory[2]);
    cr_expect_eq(ucm_cuda_decode_places(d, NULL, numbers, NULL, 1, stream), 0);
    cr_expect_eq(has(30).bytes, 0);
    cr_expect_neq(has(0).bytes, 0);
}

Test(cuda_decode_mapping, what_is_wanted_back)
{
    map(1);
    for (uint32_t i = 0; i < 6; i++)
        cr_expect_eq(put(i, place(i % 2, i)), 0);
    cr_expect_eq(update(0), 0);
    cr_expect_eq(released, 0);
    maps[1].wanted = 1; /* slab 0 */
    cr_expect_eq(update(0), 3);
    cr_expect_eq(released, 1);
    cr_expect_eq(fake_cuda.registered, 2);
    for (uint32_t i = 0; i < 6; i++)
        cr_expect_eq(has(i).bytes != 0, i % 2 == 1, "%u", i);
    cr_expect_eq(update(0), 0);
    map(0); /* granted again, and wanted back before any reference into it */
    maps[n_maps - 1].wanted = 1;
    cr_expect_eq(update(0), 0);
    cr_expect_eq(released, 2);
}

Test(cuda_decode_mapping, another_connection)
{
    for (uint32_t i = 0; i < 6; i++)
        cr_expect_eq(put(i, place(0, i)), 0);
    opened = 2;
    map(2);
    maps[n_maps - 1].slab = UCM_PLACE_NONE; /* its table */
    cr_expect_eq(put(9, (struct ucm_place){.slab = 0, .opened = 1}), 0);
    cr_expect_eq(has(9).bytes, 0, "a place of the old one");
    cr_expect_neq(has(3).bytes, 0, "its memory is still mapped, and its sequence numbers tell");
    cr_expect_eq(update(0), 6);
    cr_expect_eq(released, 2);
    cr_expect_eq(has(3).bytes, 0);
    cr_expect_eq(fake_cuda.registered, 1);
}

Test(cuda_decode_mapping, what_is_not_released_in_time_is_released_later)
{
    cr_expect_eq(put(1, place(0, 1)), 0);
    maps[1].wanted = 1;
    release_fails = 1;
    cr_expect_eq(update(-UCM_EDEADLINE), 7);
    cr_expect_eq(has(1).bytes, 0);
    release_fails = 0;
    cr_expect_eq(update(0), 0);
    cr_expect_eq(released, 1);
}

Test(cuda_decode_mapping, of_smaller_blocks)
{
    struct ucm_mapping *other = (struct ucm_mapping *)(void *)0x2000;
    struct ucm_place at = place(0, 1);
    uint32_t number = 2;

    part_bytes = ENTRY - 16;
    cr_expect_eq(ucm_cuda_decode_places(d, other, &number, &at, 1, stream), -UCM_EINVALID);
    cr_expect_not_null(strstr(ucm_cuda_errmsg(), "has 4080 bytes; 1 layers have 4096"));
    cr_expect_eq(fake_cuda.registered, 0);
    cr_expect_eq(update(0), 0, "it is not asked any more");
    part_bytes = ENTRY;
    cr_expect_eq(put(2, at), 0);
}

Test(cuda_decode_mapping, one_at_a_time)
{
    uint32_t number = 2;
    struct ucm_place at = place(0, 1);
    struct ucm_mapping *other = (struct ucm_mapping *)(void *)0x2000;

    cr_expect_eq(put(1, at), 0);
    cr_expect_eq(ucm_cuda_decode_places(d, other, &number, &at, 1, stream), -UCM_EINVALID);
    cr_expect_not_null(strstr(ucm_cuda_errmsg(), "another mapping"));
    cr_expect_eq(ucm_cuda_decode_mapping_leave(d, stream), 0);
    cr_expect_eq(has(1).bytes, 0);
    cr_expect_eq(fake_cuda.registered, 0);
    cr_expect_eq(update(0), 0, "there is none");
    cr_expect_eq(put(1, at), 0);
    cr_expect_eq(fake_cuda.registered, 2);
}

Test(cuda_decode_mapping, registered_before_places_need_it)
{
    uint32_t left = 9;

    map(1);
    map(2);
    cr_expect_eq(ucm_cuda_decode_mapping_register(d, mapping, 1, &left), 0);
    cr_expect_eq(left, 3);
    cr_expect_eq(fake_cuda.registered, 1);
    maps[3].wanted = 1; /* no place needs that one any more */
    cr_expect_eq(ucm_cuda_decode_mapping_register(d, mapping, 1, &left), 0);
    cr_expect_eq(left, 1);
    cr_expect_eq(put(1, place(1, 1)), 0, "registers what is left");
    cr_expect_eq(fake_cuda.registered, 3);
    cr_expect_eq(ucm_cuda_decode_mapping_register(d, mapping, 1, &left), 0);
    cr_expect_eq(left, 0);
    cr_expect_eq(fake_cuda.registered, 3, "each once");
    cr_expect_eq(ucm_cuda_decode_mapping_register(d, (void *)0x2000, 1, &left), -UCM_EINVALID);
    cr_expect_not_null(strstr(ucm_cuda_errmsg(), "another mapping"));
    cr_expect_eq(ucm_cuda_decode_mapping_register(d, NULL, 1, &left), -UCM_EINVALID);
    cr_expect_eq(ucm_cuda_decode_mapping_leave(d, stream), 0);
    cr_expect_eq(fake_cuda.registered, 0);
}

static void *register_all(void *ctx)
{
    uint32_t left = 1;

    while (left > 0)
        cr_expect_eq(ucm_cuda_decode_mapping_register(d, mapping, 1, &left), 0);
    return ctx;
}

/* For TSan, too. */
Test(cuda_decode_mapping, registered_alongside_steps)
{
    for (uint32_t round = 0; round < 50; round++) {
        pthread_t beside;

        n_maps = 0;
        map(UCM_PLACE_NONE);
        for (uint32_t i = 0; i < 3; i++)
            map(i);
        cr_assert_eq(pthread_create(&beside, NULL, register_all, NULL), 0);
        for (uint32_t i = 0; i < 6; i++) {
            cr_expect_eq(put(i, place(i % 3, i)), 0);
            cr_expect_eq(update(0), 0);
        }
        cr_assert_eq(pthread_join(beside, NULL), 0);
        cr_expect_eq(fake_cuda.registered, 4);
        cr_expect_eq(ucm_cuda_decode_mapping_leave(d, stream), 0);
        cr_expect_eq(fake_cuda.registered, 0);
    }
}

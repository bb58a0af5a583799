/* Regions of encoded namespaces, and copies of encoded slots on the cpu device. */
#include "tests/unit/device/kv_rig.h"

static struct ucm_encoding_spec spec;

static void encoded_setup(void)
{
    kv_setup();
    spec = kv_encoding();
}

/* Small numbers, as KV has them. */
static void fill_kv(uint8_t *p, size_t n)
{
    bytes_random(p, n, 3);
    for (size_t i = 1; i < n; i += 2)
        p[i] = (uint8_t)((p[i] & 0x83) | 0x3c);
}

static uint64_t slot_bytes(void)
{
    return LAYERS * ucm_encoding_layer_bytes(&spec);
}

static uint8_t *slot_of(uint8_t *base, uint32_t i)
{
    return base + i * (slot_bytes() + 48);
}

/* The bytes that a copy of those planes should leave, by the C reference alone. */
static void expect(uint32_t first, uint32_t n_planes, const struct ucm_copy_item *items, uint32_t n,
                   bool load)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t p = first; p < first + n_planes; p++) {
            uint8_t *page = want_memory + planes[p].offset + items[i].block * planes[p].stride;
            uint8_t *encoded = slot_of(want_slots, i) + p / 2 * ucm_encoding_layer_bytes(&spec) +
                               p % 2 * ucm_encoding_bytes(&spec, 0);

            if (load)
                ucm_encoding_method(spec.encoding)->decode(&spec, p % 2, encoded, page);
            else
                ucm_encoding_method(spec.encoding)->encode(&spec, p % 2, page, encoded);
        }
}

static void copy_check(struct device_region *r, enum device_op op, uint32_t first,
                       uint32_t n_planes)
{
    struct ucm_copy_item items[BLOCKS];
    struct test_job j;

    for (uint32_t i = 0; i < BLOCKS; i++)
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slot_of(slots, i),
                                          .block = (i * 11 + 3) % BLOCKS};
    fill_kv(memory, MEMORY);
    bytes_random(slots, SLOTS, 2);
    memcpy(want_memory, memory, MEMORY);
    memcpy(want_slots, slots, SLOTS);
    expect(first, n_planes, items, BLOCKS, op == DEVICE_LOAD);
    job_init(&j, op, r, items, BLOCKS);
    j.job.converts = true;
    j.job.first_plane = first;
    j.job.n_planes = n_planes;
    cr_assert_eq(job_run(&j), 0, "%s", j.job.error.text);
    cr_assert_eq(memcmp(memory, want_memory, MEMORY), 0);
    cr_assert_eq(memcmp(slots, want_slots, SLOTS), 0);
}

TestSuite(device_encoded, .init = encoded_setup, .fini = teardown, .timeout = 60);

Test(device_encoded, every_method_gives_the_references_bytes)
{
    for (unsigned i = 0; ucm_encoding_methods[i]; i++) {
        const struct ucm_encoding_method *method = ucm_encoding_methods[i];
        struct device_region *r;
        char why[UCM_ENCODING_WHY];

        spec.encoding = method->number;
        spec.version = method->version;
        cr_assert_eq(ucm_encoding_check(&spec, why), 0, "%s", why);
        r = kv_region(&spec);
        open_ok(r);
        for (int op = DEVICE_LOAD; op <= DEVICE_DUMP; op++) {
            copy_check(r, op, 0, 2 * LAYERS);
            copy_check(r, op, 3, 4); /* begins with a V */
        }
        close_ok(r);
    }
}

/* Random bytes have too many exponents. */
Test(device_encoded, what_does_not_fit_is_marked)
{
    struct ucm_copy_item items[BLOCKS];
    atomic_uchar unfit[BLOCKS];
    struct device_region *r;
    struct test_job j;

    if (!ucm_encoding_method(UCM_ENCODING_LOSSLESS))
        return;
    spec.encoding = UCM_ENCODING_LOSSLESS;
    r = kv_region(&spec);
    open_ok(r);
    fill_kv(memory, MEMORY);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint32_t plane = i % (2 * LAYERS);

        atomic_init(&unfit[i], 0);
        items[i] =
            (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slot_of(slots, i), .block = i};
        if (i % 3 == 0)
            bytes_random(memory + planes[plane].offset + i * planes[plane].stride, TENSOR, i + 9);
    }
    job_init(&j, DEVICE_DUMP, r, items, BLOCKS);
    j.job.converts = true;
    j.job.unfit = unfit;
    cr_assert_eq(job_run(&j), 0, "%s", j.job.error.text);
    for (uint32_t i = 0; i < BLOCKS; i++)
        cr_expect_eq(atomic_load(&unfit[i]), i % 3 == 0, "item %u", i);
    close_ok(r);
}

Test(device_encoded, a_region_serves_raw_blocks_too)
{
    struct device_region *r = kv_region(&spec);
    struct ucm_copy_item item = {.slot = (uint64_t)(uintptr_t)slots, .block = 7};

    open_ok(r);
    bytes_random(memory, MEMORY, 1);
    job_ends(DEVICE_DUMP, r, &item, 1, 0);
    for (uint32_t p = 0; p < 2 * LAYERS; p++)
        cr_assert_eq(
            memcmp(slots + p * TENSOR, memory + planes[p].offset + 7 * planes[p].stride, TENSOR),
            0);
    close_ok(r);
}

/* The copy moved the encoded form. */
Test(device_encoded, stats_count_encoded_bytes)
{
    struct device_region *r = kv_region(&spec);
    struct ucm_copy_item item = {.slot = (uint64_t)(uintptr_t)slots};
    struct device_stats stats;
    struct test_job j;

    open_ok(r);
    job_init(&j, DEVICE_DUMP, r, &item, 1);
    j.job.converts = true;
    cr_assert_eq(job_run(&j), 0);
    cpu->ops->stats(cpu, &stats);
    cr_assert_eq(stats.dump_bytes, slot_bytes());
    close_ok(r);
}

Test(device_encoded, only_an_encoded_region_takes_encoded_jobs)
{
    struct device_region *r = region_flat(memfd, 0, MEMORY);
    struct ucm_copy_item item = {.slot = (uint64_t)(uintptr_t)slots};
    struct test_job j;

    open_ok(r);
    job_init(&j, DEVICE_LOAD, r, &item, 1);
    j.job.converts = true;
    cr_assert_eq(job_run(&j), -EINVAL);
    cr_assert(strstr(j.job.error.text, "not encoded"), "%s", j.job.error.text);
    close_ok(r);
}

Test(device_encoded, every_plane_is_one_tensor)
{
    for (uint32_t p = 0; p < LAYERS; p++)
        planes[p] = (struct msg_plane){.offset = p * (BLOCKS * 2ull * TENSOR),
                                       .stride = 2 * TENSOR,
                                       .block_bytes = 2 * TENSOR,
                                       .layer = p};
    m.planes.n = LAYERS;
    kv_refused(&spec, "plane 0: block_bytes is 16384 bytes; in this encoded namespace a layer has "
                      "2 planes, and here "
                      "its K of 8192 bytes belongs");
}

Test(device_encoded, tensors_of_different_sizes_are_in_order)
{
    spec.tensor[1].dim = 32;
    for (uint32_t p = 0; p < 2 * LAYERS; p++)
        planes[p].block_bytes = p % 2 ? TENSOR / 2 : TENSOR;
    region_free(kv_region(&spec));
    planes[2].block_bytes = TENSOR / 2;
    planes[3].block_bytes = TENSOR;
    kv_refused(&spec, "plane 2: block_bytes is 4096 bytes");
}

Test(device_encoded, planes_are_aligned)
{
    planes[0].offset = 8;
    planes[1].offset = TENSOR + 8;
    kv_refused(&spec, "multiples of 16");
    planes[0].offset = 0;
    planes[1].offset = TENSOR;
    handle.offset = 4;
    handle.bytes -= 4;
    planes[2 * LAYERS - 1].offset -= 8;
    planes[2 * LAYERS - 2].offset -= 8;
    m.blocks = 16;
    kv_refused(&spec, "multiples of 16");
}

/* ---- what a job takes ---- */

#define ADDED 4u

static struct device_job any_job(struct device_region *r, enum device_op op, bool encoded,
                                 uint32_t layer, uint32_t n, struct ucm_copy_item items[ADDED])
{
    struct device_job job = {
        .op = op, .region = r, .converts = encoded, .items = items, .cap_items = ADDED};

    device_job_layers(&job, layer, n);
    return job;
}

static struct span any_span(const struct form *form, uint32_t first, uint32_t n, bool fill)
{
    return (struct span){.form = form,
                         .first = first,
                         .n = n,
                         .origin = slots + first * form->layer_bytes,
                         .len = n * form->layer_bytes,
                         .pending = fill};
}

/* A block's form, its range, its number and the direction each decide alone. */
Test(device_encoded, a_job_takes_spans_of_its_own_kind)
{
    struct device_region *r = kv_region(&spec);
    struct form raw = r->pages,
                encoded = {.layer_bytes = ucm_encoding_layer_bytes(&spec), .layers = LAYERS},
                bytes = encoded, other = encoded, fewer = raw;
    struct ucm_copy_item items[ADDED];
    struct device_job job;
    struct codec codec;
    struct span span;

    encoded.codec = r->codec;
    spec.encoding = UCM_ENCODING_INT8;
    codec_init(&codec, &spec);
    other.codec = &codec;
    fewer.layers--;
    for (int way = 0; way < 2; way++) {
        const struct form *right = way ? &encoded : &raw, *wrong = way ? &raw : &encoded;
        const struct form *never[] = {&bytes, &other, &fewer, wrong};

        job = any_job(r, DEVICE_LOAD, way, 1, 2, items);
        for (unsigned i = 0; i < 4; i++) {
            span = any_span(never[i], 0, never[i]->layers, false);
            cr_expect_eq(device_job_add(&job, &span, 0), -EINVAL, "way %d, form %u", way, i);
        }
        span = any_span(right, 0, LAYERS, true); /* nobody has written it */
        cr_expect_eq(device_job_add(&job, &span, 0), -EINVAL);
        span = any_span(right, 0, LAYERS, false);
        cr_expect_eq(device_job_add(&job, &span, BLOCKS), -EINVAL);
        cr_expect_eq(device_job_add(&job, &span, BLOCKS - 1), 0);
        span = any_span(right, 2, 2, false); /* begins after the job's layers */
        cr_expect_eq(device_job_add(&job, &span, 0), -EINVAL);
        span = any_span(right, 1, 1, false); /* ends in them */
        cr_expect_eq(device_job_add(&job, &span, 0), -EINVAL);
        span = any_span(right, 1, 2, false);
        cr_expect_eq(device_job_add(&job, &span, 0), 0);
        cr_expect_eq(job.n_items, 2u);
        cr_expect_eq(items[0].slot, items[1].slot, "one part's");
        job = any_job(r, DEVICE_DUMP, way, 1, 2, items);
        cr_expect_eq(device_job_add(&job, &span, 0), -EINVAL, "others read it");
        span = any_span(right, 1, 2, true);
        for (unsigned i = 0; i < ADDED; i++)
            cr_expect_eq(device_job_add(&job, &span, i), 0);
        cr_expect_eq(device_job_add(&job, &span, 0), -EINVAL, "there is no room left");
    }
    region_free(r);
}

Test(device_encoded, a_pool_takes_single_layers)
{
    struct device_region *r = kv_region(&spec);
    struct form raw = r->pages;
    struct ucm_copy_item items[ADDED];
    struct device_job job;
    struct span span;

    r->block_pool = true;
    r->pages.layers = 1;
    job = any_job(r, DEVICE_LOAD, false, 0, 1, items);
    span = any_span(&raw, 2, 2, false);
    cr_expect_eq(device_job_add(&job, &span, 0), -EINVAL);
    span = any_span(&raw, 3, 1, false);
    cr_expect_eq(device_job_add(&job, &span, 7), 0);
    cr_expect_eq(items[0].slot, (uint64_t)(uintptr_t)span.origin);
    region_free(r);
}

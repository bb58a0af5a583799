/* Regions that say where K lies, and loads that re-rotate it, on the cpu device. The result has the
 * reference's bits, and only K changes. */
#include "tests/unit/device/kv_rig.h"

/* K lies in every first plane. */
static uint32_t rope[] = {0, 64, 64, 0, 64, 1};
static const struct ucm_rope_spec spec = {
    .dtype = UCM_ROPE_BF16, .rows = 64, .dim = 64, .rotary = 64, .base = 10000};

static void shifted_setup(void)
{
    kv_setup();
    m.rope.p = rope;
    m.rope.n = 5;
    m.rope_dtype = (struct proto_str){"bf16", 4};
    m.rope_base = 10000;
}

static void load_check(struct device_region *r, bool encoded)
{
    static struct ucm_rope_angle tables[2][32];
    const struct ucm_rope_angle *shifts[BLOCKS];
    struct ucm_copy_item items[BLOCKS];
    struct test_job plain, shifted;

    ucm_rope_table(&spec, &(struct ucm_rope_shift){0, 1000000, 0, 0}, tables[0]);
    ucm_rope_table(&spec, &(struct ucm_rope_shift){512, 16, 0, 0}, tables[1]);
    bytes_random(slots, SLOTS, 2);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        items[i] = (struct ucm_copy_item){.slot = (uint64_t)(uintptr_t)slots +
                                                  i * (SLOTS / BLOCKS / 16 * 16),
                                          .block = (i * 11 + 3) % BLOCKS};
        shifts[i] = i % 3 == 2 ? NULL : tables[i % 3];
    }
    job_init(&plain, DEVICE_LOAD, r, items, BLOCKS);
    plain.job.converts = encoded;
    cr_assert_eq(job_run(&plain), 0, "%s", plain.job.error.text);
    memcpy(want_memory, memory, MEMORY);
    for (uint32_t i = 0; i < BLOCKS; i++)
        for (uint32_t p = 0; p < 2 * LAYERS; p += 2) {
            uint8_t *k = want_memory + planes[p].offset + items[i].block * planes[p].stride;

            if (shifts[i])
                ucm_rope_apply(&spec, shifts[i], k, k);
        }
    job_init(&shifted, DEVICE_LOAD, r, items, BLOCKS);
    shifted.job.converts = encoded;
    shifted.job.shifts = shifts;
    cr_assert_eq(job_run(&shifted), 0, "%s", shifted.job.error.text);
    cr_assert_eq(memcmp(memory, want_memory, MEMORY), 0);
}

TestSuite(device_shifted, .init = shifted_setup, .fini = teardown, .timeout = 60);

/* Also after it was decoded. */
Test(device_shifted, a_load_turns_k_alone)
{
    struct ucm_encoding_spec encoding = kv_encoding();

    for (unsigned encoded = 0; encoded < 2; encoded++) {
        struct device_region *r = kv_region(encoded ? &encoding : NULL);

        open_ok(r);
        load_check(r, encoded);
        close_ok(r);
    }
}

Test(device_shifted, refuses_what_can_not_be)
{
    m.rope.n = 4;
    kv_refused(NULL, "rope has 4 numbers; it has 6");
    m.rope.n = 6;
    rope[5] = 65537;
    kv_refused(NULL, "rope: a row holds 65537 tokens of each channel; at most 65536");
    rope[5] = 2;
    kv_refused(NULL, "rope: K is bytes 0 to 16384 of a layer, but the fragment of plane 0");
    rope[5] = 1;
    m.rope_dtype = (struct proto_str){"fp8_e5m2", 8};
    kv_refused(NULL, "rope_dtype is \"fp8_e5m2\"; f32, f16, bf16 and fp8_e4m3 can be re-rotated");
    m.rope_dtype = (struct proto_str){"bf16", 4};
    m.rope_scaling = (struct proto_str){"longrope", 8};
    kv_refused(NULL,
               "rope_scaling is \"longrope\"; default, linear, dynamic, yarn and llama3 are known");
    m.rope_scaling = (struct proto_str){"linear", 6};
    kv_refused(NULL, "rope: the factor is 0; 1 to 1e6 are allowed");
    m.rope_scaling = (struct proto_str){"default", 7};
    rope[0] = 2;
    kv_refused(NULL, "rope: K is bytes 2 to 8194 of a layer, but the fragment of plane 0 "
                     "ends at 8192; K must lie in one plane");
    rope[0] = 2 * TENSOR;
    kv_refused(NULL, "rope: K begins at byte 16384 of a layer, which has 16384");
    rope[0] = 0;
    m.block_pool = true;
    kv_refused(NULL, "which does not re-rotate K");
}

Test(device_shifted, refuses_rows_of_several_tokens_on_a_gpu)
{
    static const uint8_t id[64];

    handle = (struct msg_handle){.kind = UCM_HANDLE_CUDA_IPC, .bytes = MEMORY, .ipc = {id, 64}};
    m.device = (struct proto_str){"cuda", 4};
    m.gpu = (struct proto_bin){id, 16};
    m.rope.n = 6;
    rope[5] = 2;
    kv_refused(NULL, "rope: a row holds 2 tokens of each channel; on a GPU a row is one token");
}

/* The second tensor of a layer, or a part of one plane, may be K as well. */
Test(device_shifted, k_lies_where_the_registration_says)
{
    struct device_region *r;

    rope[0] = TENSOR;
    r = kv_region(NULL);
    cr_assert_eq(r->rope->at[0], DEVICE_NO_K);
    cr_assert_eq(r->rope->at[1], 0);
    region_free(r);
    rope[0] = TENSOR + 128;
    rope[1] = 8;
    r = kv_region(NULL);
    cr_assert_eq(r->rope->at[3], 128);
    region_free(r);
}

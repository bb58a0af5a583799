/* libucmclient_cuda over the fake driver: how a copy agent ends when the daemon answers, and when
 * it does not. */
#include "client/include/ucmclient_cuda.h"
#include "tests/unit/client/client_rig.h"
#include "tests/unit/cuda/fake_cuda.h"

static struct ucm_cuda *cuda;

static void setup(void)
{
    uint8_t uuid[16];

    rig_setup();
    fake_cuda_uuid(0, uuid);
    cr_assert_eq(ucm_cuda_open(rig.client, uuid, NULL, -1, &cuda), 0, "%s", ucm_cuda_errmsg());
}

static void teardown(void)
{
    rig_teardown();
    cr_expect_eq(fake_cuda_left(), 0, "all is freed");
}

TestSuite(cuda_library, .init = setup, .fini = teardown, .timeout = 60);

static bool dead(void)
{
    struct ucm_staging *ring = (struct ucm_staging *)(uintptr_t)FAKE_GET(&rig.fake, rings.maps[0]);

    return atomic_load(&ring->words.dead) != 0;
}

/* Leaves the copy agent's last request without an answer. */
static bool silent(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    (void)f;
    (void)conn;
    (void)env;
    return method == UCM_METHOD_RING_UNREGISTER;
}

static bool encodes(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    static const uint8_t fingerprint[UCM_FINGERPRINT_BYTES] = {7};

    if (method == UCM_METHOD_ENCODING_OPEN)
        fake_reply(f, conn, env->msgid, &proto_encoding_open_r,
                   &(struct msg_encoding_open_r){.ns = 9,
                                                 .fingerprint = {fingerprint, sizeof fingerprint},
                                                 .version = 1,
                                                 .encoded_bytes = 60,
                                                 .raw_bytes = 100});
    return method == UCM_METHOD_ENCODING_OPEN;
}

static int prove_cb(void *ctx, uint64_t offset, const uint8_t *nonce)
{
    (void)ctx, (void)offset, (void)nonce;
    return 0;
}

static int region_add(struct ucm_namespace *ns, CUdeviceptr at, const struct ucm_rope *rope)
{
    struct ucm_memory memory = {.kind = UCM_MEMORY_CUDA_IPC, .bytes = 65536, .prove_cb = prove_cb};
    struct ucm_plane planes[2] = {
        {.stride = 4096, .block_bytes = 4096},
        {.offset = 32768, .stride = 4096, .block_bytes = 4096, .layer = 1}};
    uint8_t uuid[16];
    struct ucm_region_spec spec = {.blocks = 8,
                                   .device = "cuda",
                                   .gpu = uuid,
                                   .memory = &memory,
                                   .n_memory = 1,
                                   .planes = planes,
                                   .n_planes = 2,
                                   .rope = rope};
    struct ucm_region *region;
    uint64_t address = at;

    fake_cuda_uuid(0, uuid);
    return ucm_cuda_region_register(cuda, ns, &spec, &address, -1, &region);
}

/* The daemon is not asked, so the sentence is the library's. */
Test(cuda_library, says_what_planes_of_encoded_regions_are)
{
    struct ucm_encoded_form form = {.encoding = "fp8", .dtype = "bf16", .k = {16, 1, 64}};
    struct ucm_namespace *ns;
    CUdeviceptr memory;

    rig.fake.hook = encodes;
    cr_assert_eq(ucm_encoding_open(rig.ns, &form, -1, &ns), 0, "%s", ucm_errmsg());
    cr_assert_eq(cuMemAlloc(&memory, 65536), CUDA_SUCCESS);
    cr_expect_eq(region_add(ns, memory, NULL), -UCM_EINVALID);
    cr_expect(strstr(ucm_cuda_errmsg(), "whole K"), "%s", ucm_cuda_errmsg());
    ucm_namespace_close(ns);
    cr_assert_eq(cuMemFree(memory), CUDA_SUCCESS);
    cr_assert_eq(ucm_cuda_close(cuda, -1), 0, "%s", ucm_cuda_errmsg());
}

static void rope_refused(struct ucm_rope rope, CUdeviceptr memory, const char *sentence)
{
    cr_expect_eq(region_add(rig.ns, memory, &rope), -UCM_EINVALID);
    cr_expect(strstr(ucm_cuda_errmsg(), sentence), "%s", ucm_cuda_errmsg());
}

/* The copy agent re-rotates K, too, so it must know where K lies before the daemon is asked. */
Test(cuda_library, knows_where_k_lies)
{
    struct ucm_rope rope = {.rows = 16, .dim = 64, .rotary = 64, .dtype = "bf16", .base = 10000};
    struct ucm_rope wrong = rope;
    CUdeviceptr memory = fake_cuda_alloc(0, 65536);

    wrong.dtype = "fp8_e5m2";
    rope_refused(wrong, memory, "rope: dtype is \"fp8_e5m2\"");
    wrong = rope;
    wrong.run = 16;
    rope_refused(wrong, memory,
                 "rope: a row holds 16 tokens of each channel; on a GPU a row is one token");
    wrong = rope;
    wrong.rotary = 65;
    rope_refused(wrong, memory, "rope: ");
    cr_expect_eq(region_add(rig.ns, memory, &rope), 0, "%s", ucm_cuda_errmsg());
    cr_assert_eq(ucm_cuda_close(cuda, -1), 0, "%s", ucm_cuda_errmsg());
    cr_assert_eq(cuMemFree(memory), CUDA_SUCCESS);
}

Test(cuda_library, closes_with_the_daemon)
{
    cr_assert_eq(ucm_cuda_close(cuda, -1), 0, "%s", ucm_cuda_errmsg());
    cr_assert_eq(FAKE_GET(&rig.fake, rings.ids[0]), 0, "the daemon knows");
    cr_assert(dead());
}

Test(cuda_library, a_daemon_that_does_not_answer_is_abandoned)
{
    CUdeviceptr pages = fake_cuda_alloc(0, 65536);

    cr_assert_eq(region_add(rig.ns, pages, NULL), 0, "%s", ucm_cuda_errmsg());
    rig.fake.hook = silent;
    cr_assert_eq(ucm_cuda_close(cuda, 10), -UCM_EDEADLINE);
    cr_assert_not(dead(), "it is served still");
    ucm_cuda_abandon(cuda);
    cr_assert(dead(), "no kernel begins any more");
    cr_assert_eq(cuMemFree(pages), CUDA_SUCCESS);
}

static bool busy(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    if (method != UCM_METHOD_RING_UNREGISTER || fake_count(f, UCM_METHOD_RING_UNREGISTER) > 1)
        return false;
    fake_error(f, conn, env->msgid, UCM_WIRE_BUSY, "too much under way");
    return true;
}

/* After a refusal, memory that the daemon still has mapped must not be freed. */
Test(cuda_library, a_daemon_that_refuses_keeps_the_entries)
{
    rig.fake.hook = busy;
    cr_assert_eq(ucm_cuda_close(cuda, -1), -UCM_EBUSY);
    cr_assert_not(dead());
    cr_assert_neq(FAKE_GET(&rig.fake, rings.ids[0]), 0);
    cr_assert_eq(ucm_cuda_close(cuda, -1), 0, "%s", ucm_cuda_errmsg());
    cr_assert_eq(FAKE_GET(&rig.fake, rings.ids[0]), 0, "the daemon knows");
}

Test(cuda_library, nothing_is_abandoned)
{
    ucm_cuda_abandon(NULL);
    cr_assert_eq(ucm_cuda_close(cuda, -1), 0, "%s", ucm_cuda_errmsg());
}

/* ucm_cuda_stream_wait: streams of the fake driver wait for layers that a fake daemon reports. */
/* Sanitizers: thread */
#include "client/cuda/stream_wait.h"
#include "client/include/ucmclient_cuda.h"
#include "kernels/copy.h"
#include "tests/unit/client/client_rig.h"
#include "tests/unit/cuda/fake_cuda.h"

#define LAYER_BYTES 32768u /* of all blocks, as client_rig.h lays them out */
#define SOON_MS 2000       /* much more than it takes, much less than the waits' timeouts */
#define NEVER_MS 60000

static struct ucm_cuda *cuda;
static CUstream stream;
static unsigned left_before;

static void setup(void)
{
    uint8_t uuid[16];

    rig_setup();
    rig.fake.hook = rig_hold_loads;
    left_before = fake_cuda_left();
    fake_cuda_uuid(0, uuid);
    cr_assert_eq(ucm_cuda_open(rig.client, uuid, NULL, -1, &cuda), 0, "%s", ucm_cuda_errmsg());
    cr_assert_eq(cuStreamCreateWithPriority(&stream, 0, 0), CUDA_SUCCESS);
}

static void teardown(void)
{
    cr_expect_eq(ucm_cuda_close(cuda, -1), 0);
    cr_expect_eq(cuStreamDestroy(stream), CUDA_SUCCESS);
    cr_expect_eq(fake_cuda_left(), left_before, "all is freed");
    rig_teardown();
}

TestSuite(cuda_stream, .init = setup, .fini = teardown, .timeout = 60);

/* The n-th to be held. */
static struct ucm_task *load(unsigned n)
{
    struct ucm_transfer t = {
        .keys = rig.keys, .blocks = rig.blocks, .n_keys = 3, .progress_interval = 1};
    struct ucm_task *task = NULL;

    cr_assert_eq(ucm_load(rig.region, &t, -1, &task), 0, "%s", ucm_errmsg());
    fake_await(&rig.fake, &rig.fake.n_held, n);
    return task;
}

static void await(struct ucm_task *task, uint32_t layers, CUstream s, int timeout_ms)
{
    cr_assert_eq(ucm_cuda_stream_wait(cuda, task, layers, s, timeout_ms), 0, "%s",
                 ucm_cuda_errmsg());
}

/* Stands for a kernel: reads what lies in a layer when the stream comes to it. */
static void layer_read(uint32_t layer, void *out)
{
    CUDA_MEMCPY2D copy = {.srcDevice = (uintptr_t)rig.memory + layer * LAYER_BYTES,
                          .dstDevice = (uintptr_t)out,
                          .srcPitch = LAYER_BYTES,
                          .dstPitch = LAYER_BYTES,
                          .WidthInBytes = LAYER_BYTES,
                          .Height = 1};

    cr_assert_eq(cuMemcpy2DAsync(&copy, stream), CUDA_SUCCESS);
}

static void layer_land(unsigned held, uint32_t layer, int byte)
{
    memset((uint8_t *)rig.memory + layer * LAYER_BYTES, byte, LAYER_BYTES);
    rig_tell_layers(held, layer + 1, NULL, 0);
}

static bool parked(CUstream s)
{
    return cuStreamQuery(s) == CUDA_ERROR_NOT_READY;
}

static void expect_free(CUstream s)
{
    int64_t end = fake_now_ms() + SOON_MS;

    while (parked(s) && fake_now_ms() < end)
        fake_sleep_ms(1);
    cr_expect_not(parked(s), "the stream goes on");
}

static void expect_parked(CUstream s)
{
    fake_sleep_ms(20);
    cr_expect(parked(s), "the stream waits");
}

static void expect_result(struct ucm_task *task, int want)
{
    struct ucm_result r;

    cr_expect_eq(ucm_task_wait(task, -1, &r), want, "%s", ucm_errmsg());
}

static void end(struct ucm_task *task, int want)
{
    cr_expect_eq(ucm_cuda_stream_waits_end(cuda, task), want);
    cr_expect_eq(ucm_cuda_stream_waits_end(cuda, task), 0, "it says so once");
    ucm_task_free(task);
}

Test(cuda_stream, reads_each_layer_after_its_wait)
{
    uint8_t *seen = calloc(2, LAYER_BYTES);
    struct ucm_task *task = load(1);

    cr_assert_not_null(seen);
    for (uint32_t layer = 0; layer < 2; layer++) {
        await(task, layer + 1, stream, NEVER_MS);
        layer_read(layer, seen + layer * LAYER_BYTES);
    }
    for (uint32_t layer = 0; layer < 2; layer++) {
        expect_parked(stream);
        layer_land(0, layer, 0x51 + (int)layer);
    }
    expect_free(stream);
    for (uint32_t layer = 0; layer < 2; layer++) {
        cr_expect_eq(seen[layer * LAYER_BYTES], 0x51 + layer);
        cr_expect_eq(seen[(layer + 1) * LAYER_BYTES - 1], 0x51 + layer);
    }
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    expect_result(task, 0);
    end(task, 0);
    free(seen);
}

Test(cuda_stream, does_not_stop_for_layers_that_lie_there)
{
    struct ucm_task *task = load(1);

    layer_land(0, 1, 1);
    cr_assert_eq(ucm_task_wait_layers(task, 2, -1, NULL), 0);
    await(task, 2, stream, NEVER_MS);
    cr_expect_not(parked(stream));
    await(task, UINT32_MAX, stream, NEVER_MS);
    expect_parked(stream);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    expect_free(stream);
    end(task, 0);
}

Test(cuda_stream, waits_for_tasks_that_end_in_another_order)
{
    struct ucm_task *first = load(1), *second = load(2);
    CUstream other;

    cr_assert_eq(cuStreamCreateWithPriority(&other, 0, 0), CUDA_SUCCESS);
    await(first, UINT32_MAX, stream, NEVER_MS);
    await(second, 2, stream, NEVER_MS);
    await(second, 1, other, NEVER_MS);
    expect_parked(other);
    rig_tell_layers(1, 1, NULL, 0);
    expect_free(other);
    rig_tell_layers(1, 2, NULL, 0);
    expect_parked(stream);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    expect_free(stream);
    fake_answer_held(&rig.fake, 1, UCM_BLOCK_OK);
    expect_result(second, 0);
    end(second, 0);
    end(first, 0);
    cr_expect_eq(cuStreamDestroy(other), CUDA_SUCCESS);
}

static void *waiter_run(void *arg)
{
    expect_result(arg, 0);
    return NULL;
}

Test(cuda_stream, leaves_the_result_to_who_waits_for_it)
{
    struct ucm_task *task = load(1);
    pthread_t waiter;

    await(task, 1, stream, NEVER_MS);
    cr_assert_eq(pthread_create(&waiter, NULL, waiter_run, task), 0);
    expect_parked(stream);
    rig_tell_layers(0, 1, NULL, 0);
    expect_free(stream);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    pthread_join(waiter, NULL);
    end(task, 0);
}

Test(cuda_stream, goes_on_when_the_task_fails)
{
    static const int codes[] = {UCM_WIRE_DEVICE, UCM_WIRE_DEADLINE, UCM_WIRE_CANCELLED};

    for (unsigned i = 0; i < sizeof codes / sizeof *codes; i++) {
        struct ucm_task *task = load(i + 1);

        await(task, 1, stream, NEVER_MS);
        expect_parked(stream);
        fake_error(&rig.fake, (int)FAKE_GET(&rig.fake, held[i].conn),
                   (uint32_t)FAKE_GET(&rig.fake, held[i].msgid), codes[i], "as the test wants it");
        expect_free(stream);
        expect_result(task, -codes[i]);
        end(task, 0);
    }
}

/* The task's own refusal and "not yet" have one code. For a while the thread listens only to the
 * oldest wait. */
Test(cuda_stream, goes_on_when_a_younger_task_fails_by_a_deadline)
{
    struct ucm_task *older = load(1), *task = load(2);
    CUstream other;

    cr_assert_eq(cuStreamCreateWithPriority(&other, 0, 0), CUDA_SUCCESS);
    await(older, 1, stream, NEVER_MS);
    await(task, 1, other, NEVER_MS);
    expect_parked(other);
    fake_error(&rig.fake, (int)FAKE_GET(&rig.fake, held[1].conn),
               (uint32_t)FAKE_GET(&rig.fake, held[1].msgid), UCM_WIRE_DEADLINE, "too late");
    expect_free(other);
    expect_parked(stream);
    expect_result(task, -UCM_EDEADLINE);
    end(task, 0);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    expect_free(stream);
    end(older, 0);
    cr_expect_eq(cuStreamDestroy(other), CUDA_SUCCESS);
}

Test(cuda_stream, goes_on_when_the_task_is_cancelled)
{
    struct ucm_task *task = load(1);

    await(task, 1, stream, NEVER_MS);
    cr_expect_eq(ucm_task_cancel(task, -1), 0);
    expect_parked(stream);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_CANCELLED);
    expect_free(stream);
    expect_result(task, 0);
    end(task, 0);
}

Test(cuda_stream, goes_on_when_the_daemon_is_gone)
{
    struct ucm_task *task = load(1);

    await(task, 1, stream, NEVER_MS);
    expect_parked(stream);
    fake_down(&rig.fake);
    expect_free(stream);
    expect_result(task, -UCM_EDISCONNECTED);
    end(task, 0);
    fake_up(&rig.fake);
}

/* The task succeeds in the end, but what the stream read before is not to be trusted. */
Test(cuda_stream, goes_on_at_its_deadline_and_that_is_told)
{
    struct ucm_task *task = load(1);
    int64_t begun = fake_now_ms();
    CUstream late;

    cr_assert_eq(cuStreamCreateWithPriority(&late, CU_STREAM_NON_BLOCKING, 0), CUDA_SUCCESS);
    await(task, 2, stream, NEVER_MS);
    await(task, 2, late, 50);
    await(task, 1, late, 50);
    expect_free(late);
    cr_expect_geq(fake_now_ms() - begun, 50);
    cr_expect(parked(stream));
    rig_tell_layers(0, 2, NULL, 0);
    expect_free(stream);
    cr_assert_eq(cuStreamDestroy(late), CUDA_SUCCESS);
    fake_answer_held(&rig.fake, 0, UCM_BLOCK_OK);
    expect_result(task, 0);
    end(task, -UCM_EDEADLINE);
}

Test(cuda_stream, goes_on_when_its_waits_are_ended)
{
    struct ucm_task *task = load(1);

    await(task, 1, stream, NEVER_MS);
    expect_parked(stream);
    end(task, -UCM_EDEADLINE);
    expect_free(stream);
}

/* The task itself reports layers that the thread has not come to yet. */
Test(cuda_stream, may_be_ended_as_soon_as_the_task_is_done)
{
    for (unsigned i = 0; i < 50; i++) {
        struct ucm_task *task = load(i + 1);

        await(task, 1, stream, NEVER_MS);
        await(task, UINT32_MAX, stream, NEVER_MS);
        fake_answer_held(&rig.fake, i, UCM_BLOCK_OK);
        expect_result(task, 0);
        end(task, 0);
    }
    expect_free(stream);
}

Test(cuda_stream, waits_are_bounded_and_free_again)
{
    struct ucm_task *task = load(1);

    for (unsigned i = 0; i < STREAM_WAITS; i++)
        await(task, 1 + i % 2, stream, i < STREAM_WAITS / 2 ? 1 : NEVER_MS);
    cr_expect_eq(ucm_cuda_stream_wait(cuda, task, 1, stream, NEVER_MS), -UCM_EBUSY);
    cr_expect(strstr(ucm_cuda_errmsg(), "256") != NULL, "%s", ucm_cuda_errmsg());
    expect_parked(stream);
    rig_tell_layers(0, 2, NULL, 0);
    expect_free(stream);
    cr_expect_eq(ucm_cuda_stream_wait(cuda, task, UINT32_MAX, stream, 0), 0, "half are free again");
    expect_free(stream);
    end(task, -UCM_EDEADLINE);

    task = load(2);
    for (unsigned i = 0; i < STREAM_WAITS; i++)
        await(task, 1, stream, NEVER_MS);
    expect_parked(stream);
    rig_tell_layers(1, 1, NULL, 0);
    expect_free(stream);
    end(task, 0);
}

Test(cuda_stream, passes_waits_that_ended_before_it_came)
{
    struct ucm_task *gate = load(1), *task;

    await(gate, 1, stream, NEVER_MS);
    for (unsigned i = 1; i <= 100; i++) {
        task = load(i + 1);
        await(task, 1, stream, NEVER_MS);
        fake_answer_held(&rig.fake, i, UCM_BLOCK_OK);
        expect_result(task, 0);
        end(task, 0);
    }
    cr_expect(parked(stream));
    rig_tell_layers(0, 1, NULL, 0);
    expect_free(stream);
    end(gate, 0);
}

/* A kernel that takes so long and copies nothing. */
static void kernel_run(unsigned us)
{
    uint64_t nowhere = 0;
    uint32_t none = 0;
    void *arguments[] = {&nowhere, &none, &nowhere, &none, &none, &none};
    CUfunction copy;

    cr_assert_eq(cuModuleGetFunction(&copy, (CUmodule)arguments, UCM_COPY_KERNEL), CUDA_SUCCESS);
    fake_cuda.slow_us = us;
    cr_assert_eq(cuLaunchKernel(copy, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL), CUDA_SUCCESS);
    fake_cuda.slow_us = 0;
}

Test(cuda_stream, goes_on_when_the_handle_is_closed)
{
    struct ucm_task *task = load(1);
    uint8_t uuid[16], seen[LAYER_BYTES];

    kernel_run(100000);
    await(task, 1, stream, NEVER_MS);
    layer_read(0, seen);
    expect_parked(stream);
    cr_expect_eq(ucm_cuda_close(cuda, -1), 0);
    cr_expect_not(parked(stream), "closing awaits what was enqueued");
    ucm_task_free(task);
    fake_cuda_uuid(0, uuid);
    cr_assert_eq(ucm_cuda_open(rig.client, uuid, NULL, -1, &cuda), 0, "%s", ucm_cuda_errmsg());
}

Test(cuda_stream, refuses_what_it_cannot_serve)
{
    struct ucm_task *task = load(1);

    cr_expect_eq(ucm_cuda_stream_wait(NULL, task, 1, stream, -1), -UCM_EINVALID);
    cr_expect_eq(ucm_cuda_stream_wait(cuda, NULL, 1, stream, -1), -UCM_EINVALID);
    cr_expect_eq(ucm_cuda_stream_waits_end(cuda, NULL), -UCM_EINVALID);
    fake_cuda.capturing = true;
    cr_expect_eq(ucm_cuda_stream_wait(cuda, task, 1, stream, -1), -UCM_EINVALID);
    fake_cuda.capturing = false;
    fake_cuda.refuse_waits = true;
    cr_expect_eq(ucm_cuda_stream_wait(cuda, task, 1, stream, -1), -UCM_EDEVICE);
    fake_cuda.refuse_waits = false;
    cr_expect_not(parked(stream));
    end(task, 0);
}

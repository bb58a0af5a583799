/* Only a worker that can write to memory can register it by IPC handle. The tests try guessed
 * handles, and events of other tenants. A refused handle is closed again: each test ends with none
 * open. */
#include "tests/unit/cuda/cuda_rig.h"

static struct worker_side owner;
static struct ucm_error e;

static void begin(void)
{
    daemon_begin(COPY_AUTO, 2 * BLOCKS * UINT64_C(65536));
    unproven = false;
    owner = (struct worker_side){.n_planes = 0};
    worker_memory(&owner, 0, 2, 4096, 0);
}

static void end(void)
{
    cr_assert_eq(cuMemFree(owner.memory), CUDA_SUCCESS);
    daemon_end();
}

static struct device_region *region_new(uint64_t connection)
{
    struct device_region *r = region_of(&owner, gpu, getpid(), 0);

    r->connection = connection;
    return r;
}

static void refused(struct device_region *r, int code, const char *part)
{
    cr_assert_eq(control(DEVICE_OPEN, r, NULL, &e), -EINVAL);
    cr_expect_eq(e.code, code, "%s", e.text);
    cr_expect(strstr(e.text, part), "%s", e.text);
    region_free(r);
}

static void taken(struct device_region *r)
{
    cr_assert_eq(control(DEVICE_OPEN, r, NULL, &e), 0, "%s", e.text);
    cr_assert_eq(control(DEVICE_CLOSE, r, NULL, &e), 0, "%s", e.text);
    region_free(r);
}

/* Handles with other fields, of an unknown driver, can't be checked. */
Test(cuda_proof, handles_of_an_unknown_driver_are_taken, .timeout = 60)
{
    fake_cuda.handles_unlike = true;
    begin();
    taken(region_new(1));
    unproven = true;
    refused(region_new(1), UCM_WIRE_DENIED, "region.challenge");
    end();
    fake_cuda.handles_unlike = false;
}

/* ---- events ---- */

Test(cuda_proof, a_stranger_has_no_events, .timeout = 60)
{
    static struct test_job j;
    uint8_t handle[64];
    CUevent event;

    begin();
    owner.region = region_new(1);
    owner.region->stranger = true;
    cr_assert_eq(control(DEVICE_OPEN, owner.region, NULL, &e), 0, "%s", e.text);
    cr_assert_eq(cuEventCreate(&event, 0), CUDA_SUCCESS);
    fake_cuda_event_signal(event, true);
    fake_cuda_event_handle(event, handle);
    copy_half(&j, &owner, DEVICE_DUMP);
    j.job.event = handle;
    job_submit(&j, gpu);
    cr_assert_eq(job_wait(&j), -EINVAL);
    cr_assert(strstr(j.job.error.text, "another tenant"), "%s", j.job.error.text);
    copy_half(&j, &owner, DEVICE_DUMP);
    job_submit(&j, gpu);
    cr_assert_eq(job_wait(&j), 0, "%s", j.job.error.text);
    cr_assert_eq(cuEventDestroy(event), CUDA_SUCCESS);
    cr_assert_eq(control(DEVICE_CLOSE, owner.region, NULL, &e), 0, "%s", e.text);
    region_free(owner.region);
    end();
}

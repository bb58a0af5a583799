/* Who registers memory by IPC handle: only a worker that can write there. Handles that nobody was given, and events of other
 * tenants. What is refused is not open any more: at the end of each test nothing is left. */
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
    cr_assert_eq(fake_cuda_left(), 0);
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

/* It knows the handle, and that is all. */
Test(cuda_proof, a_thief_gets_nothing_and_keeps_nobody_out, .timeout = 60)
{
    struct device_region *thief;

    begin();
    for (unsigned i = 0; i < 3; i++) {
        unproven = true;
        thief = region_new(1);
        thief->pid = getppid();
        refused(thief, UCM_WIRE_DENIED, "region.challenge");
        unproven = false;
        taken(region_new(2));
    }
    end();
}

Test(cuda_proof, each_registration_is_proven, .timeout = 60)
{
    struct device_region *first;

    begin();
    first = region_new(1);
    cr_assert_eq(control(DEVICE_OPEN, first, NULL, &e), 0, "%s", e.text);
    unproven = true;
    refused(region_new(1), UCM_WIRE_DENIED, "handle 0: ");
    unproven = false;
    taken(region_new(1));
    cr_assert_eq(control(DEVICE_CLOSE, first, NULL, &e), 0, "%s", e.text);
    region_free(first);
    end();
}

Test(cuda_proof, a_nonce_at_another_place_is_none, .timeout = 60)
{
    begin();
    unproven = true;
    memcpy((void *)(uintptr_t)(owner.memory + 1), nonce, sizeof(nonce));
    refused(region_new(1), UCM_WIRE_DENIED, "does not begin with the nonce");
    memcpy((void *)(uintptr_t)owner.memory, nonce, sizeof(nonce) - 1);
    refused(region_new(1), UCM_WIRE_DENIED, "does not begin with the nonce");
    end();
}

Test(cuda_proof, rings_are_proven, .timeout = 60)
{
    CUipcMemHandle handle;

    begin();
    owner.region = region_new(1);
    cr_assert_eq(control(DEVICE_OPEN, owner.region, NULL, &e), 0, "%s", e.text);
    owner.slices = fake_cuda_alloc(0, 1u << 20);
    cr_assert_eq(cuIpcGetMemHandle(&handle, owner.slices), CUDA_SUCCESS);
    owner.ring = (struct device_staging){.slice_bytes = 65536, .slices = 4, .offset = 4096};
    memcpy(owner.ring.ipc, &handle, sizeof(handle));
    unproven = true;
    cr_assert_eq(ring_open(&owner, getpid(), &e), -EINVAL);
    cr_expect_eq(e.code, UCM_WIRE_DENIED);
    cr_expect(strstr(e.text, "the ring's handle: "), "%s", e.text);
    munmap(owner.shared, sizeof(*owner.shared));
    close(owner.ring.fd);
    unproven = false;
    cr_assert_eq(ring_open(&owner, getpid(), &e), 0, "%s", e.text);
    ring_close(&owner);
    cr_assert_eq(cuMemFree(owner.slices), CUDA_SUCCESS);
    cr_assert_eq(control(DEVICE_CLOSE, owner.region, NULL, &e), 0, "%s", e.text);
    region_free(owner.region);
    end();
}

/* ---- altered handles ---- */

static void altered(size_t at, const void *what, size_t n)
{
    struct device_region *r = region_new(1);

    memcpy(r->handles[0].ipc + at, what, n);
    refused(r, UCM_WIRE_INVALID, "is no handle that cudaIpcGetMemHandle gave");
}

/* The driver takes these from the handle, and a copy past what there is would end the daemon's context. */
Test(cuda_proof, a_handle_whose_numbers_were_altered_is_refused, .timeout = 60)
{
    static const uint64_t wrong[] = {0, 1, 1u << 30, UINT64_MAX, (uint64_t)UINT32_MAX * 4096};
    static const uint32_t offsets[] = {1, 4096, UINT32_MAX};
    uint32_t pages;
    uint64_t size;

    begin();
    for (size_t i = 0; i < sizeof(wrong) / sizeof(*wrong); i++)
        altered(16, &wrong[i], sizeof(wrong[i]));
    size = owner.bytes - 1;
    altered(16, &size, sizeof(size));
    for (size_t i = 0; i < sizeof(offsets) / sizeof(*offsets); i++)
        altered(28, &offsets[i], sizeof(offsets[i]));
    pages = (uint32_t)(owner.bytes / 4096) - 1;
    altered(24, &pages, sizeof(pages));
    taken(region_new(1));
    end();
}

/* Of a driver whose handles have other fields nothing can be said. */
Test(cuda_proof, handles_of_an_unknown_driver_are_taken, .timeout = 60)
{
    fake_cuda_handles_unlike(true);
    begin();
    taken(region_new(1));
    unproven = true;
    refused(region_new(1), UCM_WIRE_DENIED, "region.challenge");
    end();
    fake_cuda_handles_unlike(false);
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

/* libucmclient_cuda over the fake driver, and a libucmclient of the test's: how a companion ends
 * beside a daemon that answers, and beside one that does not. */
#include "client/include/ucmclient_cuda.h"

#include "proto/ring.h"
#include "tests/unit/cuda/fake_cuda.h"

#include <criterion/criterion.h>
#include <stdlib.h>

static struct ucm_ring *ring;
static bool hangs;
static unsigned asked;

/* ---- libucmclient ---- */

int ucm_ring_register(struct ucm_client *c, const struct ucm_ring_spec *spec, int timeout_ms,
                      struct ucm_ring_registration **out, void **memory)
{
    (void)c;
    (void)spec;
    (void)timeout_ms;
    ring = calloc(1, sizeof(*ring));
    cr_assert(ring);
    atomic_store(&ring->words.generation, 1);
    *out = (struct ucm_ring_registration *)ring;
    *memory = ring;
    return 0;
}

int ucm_ring_alive(struct ucm_ring_registration *r)
{
    cr_assert_eq((void *)r, (void *)ring);
    return 1;
}

int ucm_ring_unregister(struct ucm_ring_registration *r, int timeout_ms)
{
    (void)r;
    (void)timeout_ms;
    asked++;
    return hangs ? -UCM_EDEADLINE : 0;
}

void ucm_ring_free(struct ucm_ring_registration *r)
{
    cr_assert_eq((void *)r, (void *)ring);
    cr_assert(atomic_load(&ring->words.dead), "kernels may begin still");
    free(ring);
    ring = NULL;
}

uint64_t ucm_generation(struct ucm_client *c)
{
    (void)c;
    return 1;
}

const char *ucm_errmsg(void)
{
    return "";
}

int ucm_region_register(struct ucm_namespace *ns, const struct ucm_region_spec *spec,
                        int timeout_ms, struct ucm_region **out)
{
    (void)ns;
    (void)timeout_ms;
    cr_assert_neq(spec->ring_region, 0);
    *out = (struct ucm_region *)(uintptr_t)1;
    return 0;
}

int ucm_region_unregister(struct ucm_region *region, int timeout_ms)
{
    (void)region;
    (void)timeout_ms;
    return 0;
}

/* ---- ends ---- */

static struct ucm_cuda *opened(void)
{
    static char client;
    struct ucm_cuda *cuda = NULL;
    uint8_t uuid[16];

    fake_cuda_install();
    fake_cuda_uuid(0, uuid);
    cr_assert_eq(ucm_cuda_open((struct ucm_client *)&client, uuid, NULL, 100, &cuda), 0, "%s",
                 ucm_cuda_errmsg());
    return cuda;
}

static void region_add(struct ucm_cuda *cuda, CUdeviceptr at)
{
    static char ns;
    struct ucm_memory memory = {.kind = UCM_MEMORY_CUDA_IPC, .bytes = 65536};
    struct ucm_plane plane = {.stride = 4096, .chunk_bytes = 4096};
    struct ucm_region_spec spec = {
        .blocks = 16, .memory = &memory, .n_memory = 1, .planes = &plane, .n_planes = 1};
    struct ucm_region *region;
    uint64_t address = at;

    cr_assert_eq(
        ucm_cuda_region_register(cuda, (struct ucm_namespace *)&ns, &spec, &address, 100, &region),
        0, "%s", ucm_cuda_errmsg());
}

Test(cuda_library, closes_with_the_daemon, .timeout = 60)
{
    struct ucm_cuda *cuda = opened();

    cr_assert_eq(ucm_cuda_close(cuda, 100), 0);
    cr_assert_eq(asked, 1);
    cr_assert_null(ring);
    cr_assert_eq(fake_cuda_left(), 0);
}

Test(cuda_library, a_daemon_that_does_not_answer_is_abandoned, .timeout = 60)
{
    CUdeviceptr pages = fake_cuda_alloc(0, 65536);
    struct ucm_cuda *cuda = opened();

    region_add(cuda, pages);
    hangs = true;
    cr_assert_eq(ucm_cuda_close(cuda, 10), -UCM_EDEADLINE);
    cr_assert_not_null(ring, "it is served still");
    cr_assert_not(atomic_load(&ring->words.dead));
    asked = 0;
    ucm_cuda_abandon(cuda);
    cr_assert_eq(asked, 0);
    cr_assert_null(ring);
    cr_assert_eq(cuMemFree(pages), CUDA_SUCCESS);
    cr_assert_eq(fake_cuda_left(), 0);
    ucm_cuda_abandon(NULL);
}

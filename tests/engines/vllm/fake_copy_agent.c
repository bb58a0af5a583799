/* Tests load this in place of libucmclient_cuda: the same calls, for memory of the host, without a
 * GPU. Regions are registered as the host's, so that the daemon moves their bytes as usual. Checks
 * what a copy agent must be able to rely on, and tells which calls came. For one thread at a time.
 */
#include <ucmclient_cuda.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ucm_cuda {
    struct ucm_client *client;
    unsigned regions;
};

/* The test's: what ucm_cuda_open (first) and ucm_cuda_region_register (second) are refused with. */
UCM_API int fake_refusals[2];
/* For the test: copy agents there are, and calls by their letters: Open, Register, Unregister,
 * Close, Abandon. */
UCM_API int fake_copy_agents;
UCM_API char fake_calls[4096];

static const char *sentence = "";
static int ours;

static void called(char call)
{
    size_t n = strlen(fake_calls);

    if (n + 1 < sizeof fake_calls)
        fake_calls[n] = call;
}

static int fail(int status, const char *why)
{
    sentence = why;
    ours = 1;
    return -status;
}

static int pass(int r)
{
    ours = 0;
    return r;
}

const char *ucm_cuda_errmsg(void)
{
    return ours ? sentence : ucm_errmsg();
}

int ucm_cuda_open(struct ucm_client *client, const uint8_t *gpu,
                  const struct ucm_cuda_options *options, int timeout_ms, struct ucm_cuda **out)
{
    struct ucm_cuda *cuda;

    (void)gpu;
    (void)timeout_ms;
    called('O');
    if (fake_refusals[0])
        return fail(fake_refusals[0], "the copy agent can't be made: out of memory");
    if (options->entry_bytes % 4096 != 0)
        return fail(UCM_EINVALID, "entry_bytes is odd");
    cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        return fail(UCM_ENOMEMORY, "no memory");
    cuda->client = client;
    fake_copy_agents++;
    *out = cuda;
    return 0;
}

int ucm_cuda_close(struct ucm_cuda *cuda, int timeout_ms)
{
    (void)timeout_ms;
    called('C');
    if (cuda->regions > 0 || ucm_connection_epoch(cuda->client) == 0)
        abort();
    fake_copy_agents--;
    free(cuda);
    return 0;
}

/* The client must be there still. */
void ucm_cuda_abandon(struct ucm_cuda *cuda)
{
    called('A');
    if (ucm_connection_epoch(cuda->client) == 0)
        abort();
    fake_copy_agents--;
    free(cuda);
}

int ucm_cuda_region_register(struct ucm_cuda *cuda, struct ucm_namespace *ns,
                             const struct ucm_region_spec *spec, const uint64_t *addresses,
                             int timeout_ms, struct ucm_region **out)
{
    struct ucm_region_spec host = *spec;
    int r;

    called('R');
    if (fake_refusals[1])
        return fail(fake_refusals[1], "an address is not of CUDA's memory");
    for (uint32_t i = 0; i < spec->n_memory; i++) /* it must be readable there */
        if (((const volatile uint8_t *)(uintptr_t)addresses[i])[spec->memory[i].bytes - 1] > 255)
            abort();
    host.device = "cpu";
    host.gpu = NULL;
    r = pass(ucm_region_register(ns, &host, timeout_ms, out));
    cuda->regions += r == 0;
    return r;
}

int ucm_cuda_region_unregister(struct ucm_cuda *cuda, struct ucm_region *region, int timeout_ms)
{
    int r = pass(ucm_region_unregister(region, timeout_ms));

    called('U');
    cuda->regions -= r == 0 || r == -UCM_EDISCONNECTED;
    return r;
}

/* libucmclient_cuda, found while the program runs: ucm-bench starts without a CUDA driver, and
 * without that library. Its calls into libucmclient are answered by ucm-bench, which exports them.
 * Threads: one. */
#ifndef UCM_BENCH_COPY_AGENT_H
#define UCM_BENCH_COPY_AGENT_H

#include "client/include/ucmclient_cuda.h"

#include <stdbool.h>
#include <stddef.h>

struct bench_copy_agent {
    int (*open)(struct ucm_client *client, const uint8_t *gpu,
                const struct ucm_cuda_options *options, int timeout_ms, struct ucm_cuda **out);
    int (*close)(struct ucm_cuda *cuda, int timeout_ms);
    int (*region_register)(struct ucm_cuda *cuda, struct ucm_namespace *ns,
                           const struct ucm_region_spec *spec, const uint64_t *addresses,
                           int timeout_ms, struct ucm_region **out);
    int (*region_unregister)(struct ucm_cuda *cuda, struct ucm_region *region, int timeout_ms);
    const char *(*errmsg)(void);
};

/* NULL with a sentence in `why` when the library is not there. */
const struct bench_copy_agent *bench_copy_agent(char *why, size_t why_bytes);

#endif

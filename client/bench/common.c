#include "client/bench/bench.h"
#include "client/bench/workload.h"

#include <string.h>
#include <unistd.h>

int bench_rig_fail(const struct rig *rig, int status)
{
    bool gone = status == -UCM_ENODAEMON || status == -UCM_EDISCONNECTED;

    return program_fail(gone ? BENCH_NO_DAEMON : BENCH_FAILED, "%s", rig->error);
}

void bench_rig_options(const struct args *a, struct rig_options *out)
{
    memset(out, 0, sizeof *out);
    out->socket = program_socket(a);
    out->name = program_name();
    out->model = "ucm-bench";
    out->parts = 1;
    out->timeout_ms = (int)args_number(a, "timeout");
    out->block_bytes = args_number(a, "block-bytes");
    out->fragment = args_number(a, "fragment");
    if (out->fragment > out->block_bytes)
        out->fragment = out->block_bytes;
}

uint64_t bench_run_id(void)
{
    uint64_t state = clock_ns() ^ ((uint64_t)getpid() << 40);

    return workload_random(&state);
}

void bench_keys(uint64_t run, uint32_t round, uint32_t n, uint8_t *keys)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t state = run + ((uint64_t)round << 32 | i);

        for (size_t b = 0; b < RIG_KEY_BYTES; b += 8) {
            uint64_t w = workload_random(&state);

            memcpy(keys + (size_t)i * RIG_KEY_BYTES + b, &w, 8);
        }
    }
}

int bench_serve(const struct args *a)
{
    return program_script(a, "ucm-bench-serve");
}

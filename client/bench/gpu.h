/* GPU memory of a worker, by the CUDA driver found while the program runs: one allocation with an
 * IPC handle that the daemon opens, and copies between it and ordinary memory. Needs no CUDA to
 * build. Threads: a struct belongs to one thread. A process that opened one must not fork
 * afterwards. */
#ifndef UCM_BENCH_GPU_H
#define UCM_BENCH_GPU_H

#include <stddef.h>
#include <stdint.h>

struct gpu {
    void *library;
    int device;
    void *context;
    unsigned long long memory; /* device address */
    uint8_t ipc[64];           /* cudaIpcMemHandle_t */
    uint8_t uuid[16];
    uint8_t kept[16]; /* gpu_prove_cb's */
    char why[200];    /* of a failure */
};

/* Takes `bytes` on the GPU of that number. 0, or -1 with g->why and nothing held. */
int gpu_open(struct gpu *g, int ordinal, size_t bytes);
void gpu_close(struct gpu *g); /* one that is not open is fine */
/* Copies the whole allocation; done when it returns. 0, or -1 with g->why. */
int gpu_write(struct gpu *g, const void *from, size_t bytes);
int gpu_read(struct gpu *g, void *to, size_t bytes);
/* For struct ucm_memory: the allocation is the calling process's. ctx: the struct gpu; any thread. */
int gpu_prove_cb(void *ctx, uint64_t offset, const uint8_t *nonce);
/* Makes it the calling thread's. */
int gpu_current(struct gpu *g);
int gpu_count(void); /* how many there are; while one is open */

#endif

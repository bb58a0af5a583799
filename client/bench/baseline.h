/* What the machine itself can do, measured in the same run as what the daemon does: a bare echo
 * over a Unix stream socket, memcpy of the same fragments. Threads: one caller; the copy uses
 * threads of its own while it runs. */
#ifndef UCM_BENCH_BASELINE_H
#define UCM_BENCH_BASELINE_H

#include "client/bench/figure.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* ---- echo: two processes, blocking reads and writes ---- */

struct echo {
    pid_t child;
    int fd;
    size_t request_bytes, response_bytes;
    uint8_t *buf;
};

/* Forks: before any client is connected. 0 or -errno. */
int echo_start(struct echo *e, size_t request_bytes, size_t response_bytes);
void echo_stop(struct echo *e);
/* Adds one sample in microseconds a call. 0 or -errno. */
int echo_run(struct echo *e, unsigned calls, struct samples *out_us);

/* ---- memcpy between contiguous blocks and scattered fragments ---- */

struct copy {
    uint8_t *region; /* fragment p of block b at region + (p * blocks + b) * fragment */
    uint8_t *slots;  /* block b at slots + b * block_bytes; owned */
    uint32_t blocks, planes, fragment;
    unsigned threads;
};

/* region: the caller's, of blocks * planes * fragment bytes. 0 or -ENOMEM. */
int copy_init(struct copy *c, uint8_t *region, uint32_t blocks, uint32_t planes, uint32_t fragment,
              unsigned threads);
void copy_close(struct copy *c);
/* Copies everything once, to the region or out of it. Bytes a second, or 0 when threads failed. */
double copy_run(struct copy *c, bool to_region);

#endif

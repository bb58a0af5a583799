/* What integration and fault tests share: a private daemon in a temporary directory, and a worker
 * with shared memory. A raw socket sends what the client library never would. Failures abort the
 * test. */
#ifndef UCM_TESTS_HARNESS_H
#define UCM_TESTS_HARNESS_H

#include "ucmclient.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct host {
    char dir[64], socket[96];
    pid_t pid;
    int status; /* of a daemon that ended at start, as waitpid gives it */
    bool nvme;
    const char *ucmd;     /* another program than $UCMD */
    const char *sets[16]; /* more --set values, NULL-terminated; set before host_start */
};

/* The directory and the socket's name only. */
void host_prepare(struct host *h);
/* Starts $UCMD (default build/ucmd), and waits until it answers. It has a 16 MiB arena of 1 MiB
 * slabs, and with nvme a 256 MiB file tier. */
void host_start(struct host *h);
/* Starts it again in the same directory with the same options, after host_stop or host_kill.
 * Returns when the daemon has found all blocks of the earlier one. */
void host_restart(struct host *h);
/* The same, but returns as soon as the daemon answers: it may not have found stored blocks yet. */
void host_restart_at_once(struct host *h);
/* The same; false when the daemon ended before it answered. */
bool host_try_restart(struct host *h);
int host_stop(struct host *h); /* SIGTERM; its exit status */
void host_kill(struct host *h);
/* The daemon was killed by another process, or by itself. */
void host_killed(struct host *h);
uint64_t host_rss_bytes(const struct host *h);
void host_remove(struct host *h); /* stops it if need be and removes the directory */

/* Built with AddressSanitizer or ThreadSanitizer: gcc says so by macros, clang by __has_feature. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#endif

#define WORKER_KEY_BYTES 32

/* A connection with one namespace and one region of `layers` layers. Each layer has two planes (K
 * and V) of half of layer_bytes. All layers' planes lie one after the other. */
struct worker {
    struct ucm_client *client;
    struct ucm_namespace *ns;
    struct ucm_region *region;
    uint32_t layers, blocks, part;
    uint64_t layer_bytes;
    uint8_t *memory;
    size_t memory_bytes;
};

struct worker_options {
    const char *model; /* "test" */
    uint32_t parts, part, layers, blocks;
    uint64_t layer_bytes;
    const char *salt;
    uint32_t durability; /* of dumps that name none */
};

/* The identity of a worker's namespace. *layers: room for its number of layers. */
struct ucm_identity worker_identity(const struct worker_options *o, uint32_t *layers);
void worker_open(struct worker *w, const struct host *h, const struct worker_options *o);
/* Memory and region of a worker whose other fields are set. Returns what register returned. */
int worker_region_try(struct worker *w);
void worker_close(struct worker *w);
/* Closes what is open of a worker whose daemon is gone. */
void worker_drop(struct worker *w);

/* Keys that differ by a number. Fill block i of a worker's memory with a pattern of seed, or
 * compare it: returns the number of bytes that differ. */
void key_make(uint64_t number, uint8_t out[WORKER_KEY_BYTES]);
void keys_make(uint64_t first, uint32_t n, uint8_t *out);
void worker_fill(struct worker *w, uint32_t block, uint64_t seed);
void worker_clear(struct worker *w);
size_t worker_differs(const struct worker *w, uint32_t block, uint64_t seed);

/* Send a request and wait for it. statuses: one a key, or NULL. Return what the wait returned. */
int worker_dump(struct worker *w, const uint8_t *keys, const uint32_t *blocks, uint32_t n,
                uint8_t *status);
/* As worker_dump, answered when the blocks are on stable storage. */
int worker_dump_durable(struct worker *w, const uint8_t *keys, const uint32_t *blocks, uint32_t n,
                        uint8_t *status);
int worker_load(struct worker *w, const uint8_t *keys, const uint32_t *blocks, uint32_t n,
                uint8_t *status);
/* Fills blocks 0 to n with seed first on, and dumps them as keys first on. Each has the status
 * `expected`; IS_STORED: it is there now, whoever stored it. */
#define IS_STORED UINT8_MAX
void worker_store_as(struct worker *w, uint64_t first, uint32_t n, uint32_t durability,
                     uint8_t expected);
/* The same, answered when each lies on NVMe. */
void worker_store_durable(struct worker *w, uint64_t first, uint32_t n, uint8_t expected);
/* Loads blocks number first to first + n into blocks 0 on. Returns how many are there, and checks
 * their bytes. status: of each, or NULL. */
uint32_t worker_found(struct worker *w, uint64_t first, uint32_t n, uint8_t *status);
/* The same; all must be there. */
void worker_expect(struct worker *w, uint64_t first, uint32_t n);
/* How many blocks from key number first on a lookup finds, of n. */
uint32_t worker_hits(struct worker *w, uint64_t first, uint32_t n);
void worker_store(struct worker *w, uint64_t first, uint32_t n);
/* Dumps one block, out of block 0, to stay on NVMe; its status. */
uint8_t worker_dump_one(struct worker *w, uint64_t number);

/* A metric of `stats`; the second waits until it is at least `least`. It, raw_frame and raw_closed
 * wait for three times timeout_ms before they give up. */
uint64_t metric(struct ucm_client *c, const char *name);
bool metric_reaches(struct ucm_client *c, const char *name, uint64_t least, int timeout_ms);

/* Waits until the arena is all there. Before that, few blocks have to leave it. */
void arena_wait(struct ucm_client *c);

/* Whether `health` reports this status. */
bool health_is(struct ucm_client *c, const char *status);
void wait_ok(struct ucm_client *c);
/* Whether its answer has this text anywhere. */
bool health_says(struct ucm_client *c, const char *text);
/* Whether it may still find parts of an earlier run. */
bool recovering(struct ucm_client *c);

/* Purge the namespace of that number; let DRAM go of its blocks. Return what ucm_call returned. */
int purge_ns(struct ucm_client *c, uint8_t ns, int timeout_ms);
int evict_dram(struct ucm_client *c, uint8_t ns, int timeout_ms);

/* Runs a command of the shell, or of ucmctl. Returns its exit status. What it printed is in `out`,
 * as much as there is room for. */
int shell(char *out, size_t cap, const char *format, ...) __attribute__((format(printf, 3, 4)));
int ucmctl(char *out, size_t cap, const char *format, ...) __attribute__((format(printf, 3, 4)));

uint64_t now_ms(void);
void sleep_ms(int ms);

/* ---- raw sockets ---- */

int raw_connect(const struct host *h);
/* Writes all of it, or returns false when the peer is gone. */
bool raw_write(int fd, const void *p, size_t n);
/* One frame's body into buf; its length, 0 at the end, -1 after timeout_ms. */
ssize_t raw_frame(int fd, uint8_t *buf, size_t cap, int timeout_ms);
/* Whether the daemon closes the connection within timeout_ms. Frames before that are discarded. */
bool raw_closed(int fd, int timeout_ms);
void raw_hello(int fd);

#endif

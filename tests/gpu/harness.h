/* What the GPU tests share: worker processes, the device module on a loop of its own, regions, jobs,
 * and the tally. The test's process plays the daemon. */
#ifndef UCM_TESTS_GPU_HARNESS_H
#define UCM_TESTS_GPU_HARNESS_H

#include "daemon/device/device.h"
#include "tests/gpu/worker.h"

#include <uv.h>

#define MIB (1ull << 20)

/* ---- tally ---- */

#define CHECK(condition, ...) check(condition, __FILE__, __LINE__, __VA_ARGS__)
/* Prints PASS or FAIL with the text; returns the condition. */
bool check(bool condition, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void die(const char *what) __attribute__((noreturn)); /* with errno's text */
int tally(void); /* prints the last line; the program's exit status */

/* ---- workers ---- */

struct test_worker {
    pid_t pid;
    int socket, fd; /* fd: the last descriptor that came with a reply, -1 */
    uint8_t *shared;
    struct worker_reply reply;
};

/* First thing in main: becomes a worker when the program was started as one. */
void harness_main(int argc, char **argv);
void worker_start(struct test_worker *w);
/* Exits the test when the worker does not answer; returns whether CUDA was content there. */
bool worker_do(struct test_worker *w, enum worker_op op, uint64_t bytes, uint64_t offset,
               unsigned ms);
void worker_kill(struct test_worker *w); /* SIGKILL, and reaps it */

/* ---- the device ---- */

struct test_device {
    uv_loop_t loop;
    struct device_set *set;
    struct device *gpu; /* of regions and jobs from now on: see device_use */
    uint32_t gpus;
    uint8_t uuid[UCM_UUID_BYTES];
    uint8_t *slots; /* slots_bytes, given to the device */
    uint64_t slots_bytes;
    unsigned failures;
    char why[256];
    bool proves_nothing; /* regions open without the worker's proof */
};

/* UCM_TEST_NO_BATCHES: copies as with a driver before CUDA 13. */
void device_start(struct test_device *t, uint64_t slots_bytes);
void device_stop(struct test_device *t);
/* Regions and jobs are of this GPU from now on. */
bool device_use(struct test_device *t, const uint8_t uuid[UCM_UUID_BYTES]);

/* ---- rings ---- */

struct ucm_staging;

/* What the device shares with the worker's copy agent; NULL: it has none. UCM_TEST_STRATEGY=staged
 * and auto+ring give every worker one, with its first region. */
struct ucm_staging *ring_words(const struct test_worker *w);
void ring_shut(struct test_device *t, const struct test_worker *w);

/* ---- regions and jobs ---- */

struct test_layout {
    const char *name;
    uint32_t blocks, layers, n_planes, n_handles;
    uint64_t layer_bytes;
    struct msg_plane planes[128];
    uint64_t handle_offsets[16]; /* from the worker's memory */
};

/* One layer of FLAT_BLOCKS blocks of 1 MiB, in one allocation. */
#define FLAT_BLOCKS 32u
#define FLAT_BYTES (FLAT_BLOCKS * MIB)
extern const struct test_layout layout_flat;
/* Its blocks, in slots one after another from `first` on. */
void flat_items(const struct test_device *t, uint64_t first,
                struct ucm_copy_item items[FLAT_BLOCKS]);

/* Registers the worker's memory of `bytes`, which begins at `offset` of its allocation. ipc: the
 * handle's bytes, or NULL for the descriptor fd, which is duplicated. */
int region_make(struct test_device *t, const struct test_layout *layout, pid_t pid,
                const uint8_t *ipc, int fd, uint64_t offset, uint64_t bytes,
                struct device_region **out);
/* region_make and OPEN; 0 or the job's status, *error filled. */
int region_open(struct test_device *t, const struct test_layout *layout, pid_t pid,
                const uint8_t *ipc, int fd, uint64_t offset, uint64_t bytes,
                struct device_region **out, struct ucm_error *error);
void region_shut(struct test_device *t, struct device_region *r);

/* A worker's part before and after an OPEN of its region: it proves that the one allocation of its
 * IPC handles is its own. The test does it, because the handle opens here. */
struct test_proof {
    bool written;
    uint8_t kept[16][UCM_NONCE_BYTES];
};
void proof_write(const struct test_device *t, struct device_region *r, struct test_proof *p);
void proof_undo(const struct test_device *t, const struct device_region *r, struct test_proof *p);

struct test_job {
    struct device_job job;
    bool done;
    int status;
    uint64_t done_ns;
};

void job_done(struct device_job *job, int status); /* every test_job's done */
/* All planes, no event, no deadline. */
void job_init(struct test_job *j, enum device_op op, struct device_region *r,
              struct ucm_copy_item *items, uint32_t n);
void job_submit(struct test_device *t, struct test_job *j);
int job_wait(struct test_device *t, struct test_job *j);
int job_run(struct test_device *t, struct test_job *j);
uint64_t now_ms(struct test_device *t);
void loop_for(struct test_device *t, unsigned ms);

/* ---- the oracle ---- */

void random_bytes(void *p, size_t n, uint64_t seed);
uint64_t random_next(uint64_t *state);
/* The copy that the GPU should have made, between slots (a copy of them at `slots`) and a shadow of
 * the worker's memory. */
void oracle_copy(const struct test_device *t, const struct device_region *r,
                 const struct ucm_copy_item *items, uint32_t n, uint8_t *slots, uint8_t *shadow,
                 uint64_t offset, enum ucm_copy_direction direction, uint32_t first_plane,
                 uint32_t n_planes);

#endif

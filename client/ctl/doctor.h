/* `ucmctl doctor`: checks of this host and of the daemon that runs on it, each a finding with what it
 * means and what to do.
 *
 * Promise: nothing is changed. Measurements write to a temporary file that has no name, and to a
 * namespace of their own, whose blocks they drop. What can't be looked at here is `skip`, not `ok`.
 * One thread, but for the measurement of a disk. */
#ifndef UCM_CTL_DOCTOR_H
#define UCM_CTL_DOCTOR_H

#include "client/ctl/ctl.h"

#include <sys/types.h>

enum verdict { DOCTOR_OK, DOCTOR_SKIP, DOCTOR_WARN, DOCTOR_FAIL };

#define DOCTOR_TEXT_BYTES 512

struct finding {
    enum verdict verdict;
    const char *check;
    char text[DOCTOR_TEXT_BYTES];
    const char *remedy; /* what to do; NULL: nothing */
};

#define DOCTOR_FINDINGS 64

struct doctor {
    const struct args *a;
    struct ucm_client *client;   /* NULL: no daemon answers */
    const msgpack_object *stats; /* NULL: the same */
    pid_t pid;                   /* of the daemon, where /proc shows it; 0: not known */
    uint64_t arena;              /* bytes configured; 0: not known */
    int gpus;                    /* that libcuda shows here */
    bool measure;
    uint32_t n;
    struct finding finding[DOCTOR_FINDINGS];
};

/* Adds a finding; with DOCTOR_FINDINGS of them it is left out. */
void doctor_add(struct doctor *d, enum verdict verdict, const char *check, const char *remedy,
                const char *format, ...) __attribute__((format(printf, 5, 6)));
/* The first line of a file, without its end. false: it can't be read. */
bool doctor_line(const char *path, char *buf, size_t n);
/* Seconds, for measuring. */
double doctor_now(void);

void doctor_keys(struct doctor *d);   /* of tenants whose blocks are encrypted */
void doctor_host(struct doctor *d);   /* limits, io_uring, NUMA, huge pages */
void doctor_memory(struct doctor *d); /* what there is, and what the cgroup allows */
void doctor_disks(struct doctor *d);  /* DRAM's and directories' bandwidth and space */
void doctor_trip_cpu(struct doctor *d);
void doctor_gpus(struct doctor *d); /* driver, bus, and the trip through each */

/* ---- a round trip through a worker's region ---- */

/* A worker's memory on some device. put and get copy all of it; -1 with a sentence in `why` on
 * failure. */
struct trip_memory {
    const char *device; /* "cpu", "cuda" */
    const uint8_t *gpu; /* its UUID, or NULL */
    struct ucm_memory memory;
    int (*put_cb)(struct trip_memory *m, const void *from);
    int (*get_cb)(struct trip_memory *m, void *to);
    /* The daemon refused to register it, and said why. true: this is what to expect of the daemon,
     * and a finding says so. NULL: it never is. */
    bool (*refused_cb)(struct trip_memory *m, const char *why);
    void *ctx;
    char why[160];
};

#define TRIP_BYTES (16u << 20)
/* Dumps, looks up, loads, compares and drops TRIP_BYTES. Waits for a daemon that starts its GPUs. */
void doctor_trip(struct doctor *d, const char *check, struct trip_memory *m);

#endif

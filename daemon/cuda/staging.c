#include "daemon/cuda/staging_entry.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#define STAGING_PAUSE_MS 1000         /* after it was too slow */
#define STAGING_MEMFD_MOST (4u << 20) /* the last page may be a huge one */

/* The GPU's thread touches the ring, and gives it back: a worker that punches holes in a large
 * file, or lets the last mapping of it go, would hold up all copies of that GPU. */
static int shared_check(struct device_job *job, int fd, uint64_t bytes)
{
    int rc = job_check_memfd(job, "the ring's descriptor", fd, 0, bytes);
    struct stat st;

    if (rc < 0)
        return rc;
    if (!(fcntl(fd, F_GET_SEALS) & F_SEAL_GROW))
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "the ring's descriptor is not a memfd sealed with F_SEAL_GROW");
    if (fstat(fd, &st) < 0 || (uint64_t)st.st_size != bytes ||
        (uint64_t)st.st_blocks * 512 > STAGING_MEMFD_MOST)
        return job_refuse(job, -EINVAL, UCM_WIRE_INVALID,
                          "the ring's memfd must have %" PRIu64 " bytes, and no pages past its end",
                          bytes);
    return 0;
}

static int shared_map(struct device_job *job, struct gpu_staging *s)
{
    int fd = job->staging->fd, rc = shared_check(job, fd, sizeof(*s->shared));
    void *p;

    if (rc < 0)
        return rc;
    p = mmap(NULL, sizeof(*s->shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        return job_refuse(job, -EINVAL, UCM_WIRE_DEVICE, "the ring can't be mapped: %s",
                          strerror(errno));
    s->shared = p;
    return 0;
}

static void staging_delete(struct gpu_staging *s)
{
    if (s->shared)
        munmap(s->shared, sizeof(*s->shared));
    if (s->ipc)
        gpu_ipc_put(s->ipc);
    worker_close(&s->worker);
    free(s);
}

/* Two rings on the same bytes would write over each other's entries: a worker that reconnects must
 * wait until the copies of its old connection have ended. */
static int refuse_second(struct gpu *g, struct device_job *job, const struct gpu_staging *s)
{
    uint64_t end = s->base + s->n_entries * s->entry_bytes;

    for (struct list *node = g->stagings.next; node != &g->stagings; node = node->next) {
        const struct gpu_staging *other = LIST_ENTRY(node, struct gpu_staging, link);

        if (other->connection == s->connection)
            return job_refuse(job, -EBUSY, UCM_WIRE_BUSY,
                              "this connection has a ring on that GPU; unregister it first");
        if (s->base < other->base + other->n_entries * other->entry_bytes && other->base < end)
            return job_refuse(job, -EBUSY, UCM_WIRE_BUSY,
                              "the ring's memory is still in use by an older connection's ring");
    }
    return 0;
}

static int staging_fill(struct gpu *g, struct device_job *job, struct gpu_staging *s)
{
    const struct device_staging *wanted = job->staging;
    struct gpu_ipc_wish wish = {.ipc = wanted->ipc,
                                .offset = wanted->offset,
                                .bytes = wanted->entries * wanted->entry_bytes,
                                .proof = &wanted->proof,
                                .name = "the ring's handle"};
    uint32_t random;
    int rc = worker_open(&s->worker, wanted->pid);

    if (rc < 0)
        return job_refuse(job, -EINVAL, UCM_WIRE_DEVICE,
                          "the worker's process can't be seen from here (another pid namespace?), "
                          "so it can have no ring");
    rc = shared_map(job, s);
    if (rc == 0)
        rc = gpu_ipc_get(g, job, &wish, &s->worker, &s->ipc);
    if (rc < 0)
        return rc;
    s->connection = wanted->connection;
    s->base = s->ipc->address + wanted->offset;
    s->n_entries = wanted->entries;
    s->entry_bytes = wanted->entry_bytes;
    rc = refuse_second(g, job, s);
    if (rc < 0)
        return rc;
    if (getrandom(&random, sizeof(random), 0) != (ssize_t)sizeof(random))
        return job_refuse(job, -EIO, UCM_WIRE_INTERNAL, "no random number for the ring");
    s->generation = ucm_staging_generation_of(random);
    backoff_init(&s->backoff, STAGING_PAUSE_MS, STAGING_PAUSE_MS, 0);
    for (uint32_t i = 0; i < s->n_entries; i++)
        s->entries[i] = (struct gpu_staging_entry){.staging = s, .index = i};
    return 0;
}

int gpu_staging_open(struct gpu *g, struct device_job *job)
{
    struct gpu_staging *s = calloc(1, sizeof(*s));
    int rc;

    if (!s)
        return job_refuse(job, -EIO, UCM_WIRE_NO_MEMORY, "no memory for the ring");
    s->worker.fd = -1;
    rc = staging_fill(g, job, s);
    if (rc < 0) {
        staging_delete(s);
        return rc;
    }
    atomic_store(&s->shared->words.generation, s->generation);
    job->staging->mapping = s;
    list_push_back(&g->stagings, &s->link);
    return 0;
}

void staging_mark_dead(struct gpu_staging *s)
{
    atomic_store(&s->shared->words.dead, 1);
    s->retired = true;
}

void gpu_staging_close(struct device_staging *staging)
{
    struct gpu_staging *s = staging->mapping;

    staging_mark_dead(s);
    ucm_staging_wake(s->shared);
    list_remove(&s->link);
    staging_delete(s);
    staging->mapping = NULL;
}

bool staging_paused(const struct gpu_staging *s)
{
    return s->retired || !backoff_ready(&s->backoff, job_clock_ms());
}

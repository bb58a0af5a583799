#include "daemon/device/device.h"

#include "daemon/config/config.h"
#include "daemon/cuda/cuda.h"
#include "daemon/device/work.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <uv.h>

struct device_set {
    uv_loop_t *loop;
    struct device_config config;
    struct device *devices[1 + DEVICE_GPUS_MAX];
    uint32_t n;
    struct memory {
        void *base;
        uint64_t bytes;
        bool removed; /* waits until it is the one that devices let go of */
    } * memory;       /* all that was added, for GPUs that appear later */
    size_t n_memory, cap_memory;
    char why_no_gpu[200];
    /* The memory that devices let go of now: one at a time, so that nothing has to be allocated. */
    struct memory removing;
    struct unpin {
        struct device_job job;
        struct device_set *set;
    } unpin[1 + DEVICE_GPUS_MAX];
    uint32_t unpins; /* under way */

    /* A thread that enumerates the driver's GPUs; it owns `gpus` while `starting`. */
    bool starting;
    uv_thread_t thread;
    uv_async_t started;
    struct cuda_gpus gpus;
};

/* ---- GPUs ---- */

static void add_gpus(struct device_set *s)
{
    snprintf(s->why_no_gpu, sizeof(s->why_no_gpu), "%s", s->gpus.why);
    for (uint32_t i = 0; i < s->gpus.n && s->n <= DEVICE_GPUS_MAX; i++) {
        struct device *d;
        int rc = cuda_new(s->loop, &s->gpus.gpu[i], &s->config, &d);

        if (rc < 0) {
            snprintf(s->why_no_gpu, sizeof(s->why_no_gpu), "GPU %u: %s", i, strerror(-rc));
            continue;
        }
        for (size_t j = 0; j < s->n_memory; j++)
            if (!s->memory[j].removed)
                d->ops->memory_add(d, s->memory[j].base, s->memory[j].bytes);
        s->devices[s->n++] = d;
    }
}

static void start_cb(void *arg)
{
    struct device_set *s = arg;

    cuda_enumerate(&s->gpus);
    uv_async_send(&s->started);
}

static void started_cb(uv_async_t *async)
{
    struct device_set *s = async->data;

    if (!s->starting)
        return;
    uv_thread_join(&s->thread);
    s->starting = false;
    add_gpus(s);
    if (s->config.found_cb)
        s->config.found_cb(s->config.ctx, s->n - 1, s->why_no_gpu);
}

static void free_cb(uv_handle_t *handle)
{
    free(handle->data);
}

/* Looks for GPUs as the configuration says. 0, or -code with *e. */
static int find_gpus(struct device_set *s, char note[200], struct ucm_error *e)
{
    if (s->config.cuda == CONFIG_CUDA_OFF) {
        snprintf(s->why_no_gpu, sizeof(s->why_no_gpu),
                 "CUDA is switched off in the daemon's configuration (device.cuda)");
        return 0;
    }
    if (cuda_load(s->why_no_gpu) == 0) {
        if (s->config.cuda == CONFIG_CUDA_REQUIRED) {
            cuda_enumerate(&s->gpus);
            add_gpus(s);
        } else if (uv_thread_create(&s->thread, start_cb, s) == 0) {
            s->starting = true;
            snprintf(note, 200, "the NVIDIA driver is being started");
            return 0;
        } else {
            snprintf(s->why_no_gpu, sizeof(s->why_no_gpu), "no thread to start the GPUs with");
        }
    }
    if (s->config.cuda == CONFIG_CUDA_REQUIRED && s->n == 1)
        return ucm_error_set(e, UCM_WIRE_DEVICE, "device.cuda is \"required\", but %s",
                             s->why_no_gpu);
    snprintf(note, 200, "%s", s->why_no_gpu);
    return 0;
}

/* ---- the set ---- */

int device_check(int cuda, char why[200])
{
    return cuda == CONFIG_CUDA_REQUIRED ? cuda_load(why) : 0;
}

int device_set_new(struct uv_loop_s *loop, const struct device_config *config,
                   struct device_set **out, char note[200], struct ucm_error *e)
{
    struct device_set *s = calloc(1, sizeof(*s));
    int rc;

    if (!s)
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "no memory for the devices");
    s->loop = loop;
    s->config = *config;
    rc = uv_async_init(loop, &s->started, started_cb);
    if (rc < 0) {
        free(s);
        return ucm_error_set(e, UCM_WIRE_INTERNAL, "devices: %s", uv_strerror(rc));
    }
    s->started.data = s;
    uv_unref((uv_handle_t *)&s->started);
    rc = cpu_new(loop, config->cpu_threads, &s->devices[0]);
    if (rc < 0) {
        device_set_free(s);
        return ucm_error_set(e, UCM_WIRE_NO_MEMORY, "copy threads: %s", uv_strerror(rc));
    }
    s->n = 1;
    note[0] = '\0';
    rc = find_gpus(s, note, e);
    if (rc < 0) {
        device_set_free(s);
        return rc;
    }
    *out = s;
    return 0;
}

void device_set_free(struct device_set *s)
{
    if (!s)
        return;
    if (s->starting)
        uv_thread_join(&s->thread);
    for (uint32_t i = 0; i < s->n; i++)
        s->devices[i]->ops->close(s->devices[i]);
    free(s->memory);
    uv_close((uv_handle_t *)&s->started, free_cb);
}

uint32_t device_set_count(const struct device_set *s)
{
    return s->n;
}

struct device *device_set_at(struct device_set *s, uint32_t i)
{
    return s->devices[i];
}

static struct device *find_gpu(struct device_set *s, struct proto_bin gpu, struct ucm_error *e)
{
    char uuid[2 * UCM_UUID_BYTES + 1];

    if (s->starting) {
        ucm_error_set(e, UCM_WIRE_BUSY, "the GPUs are starting; try again in a second");
        return NULL;
    }
    if (s->n == 1) {
        ucm_error_set(e, UCM_WIRE_DEVICE, "the daemon has no GPU: %s", s->why_no_gpu);
        return NULL;
    }
    if (gpu.n != UCM_UUID_BYTES) {
        ucm_error_set(e, UCM_WIRE_INVALID, "gpu has %u bytes; the %d of cuDeviceGetUuid are right",
                      gpu.n, UCM_UUID_BYTES);
        return NULL;
    }
    for (uint32_t i = 1; i < s->n; i++) {
        struct device_stats stats;

        s->devices[i]->ops->stats(s->devices[i], &stats);
        if (memcmp(stats.uuid, gpu.p, UCM_UUID_BYTES) == 0)
            return s->devices[i];
    }
    for (unsigned i = 0; i < UCM_UUID_BYTES; i++)
        snprintf(uuid + 2 * i, 3, "%02x", gpu.p[i]);
    ucm_error_set(e, UCM_WIRE_DEVICE, "no GPU with UUID %s; the daemon sees %u others", uuid,
                  s->n - 1);
    return NULL;
}

struct device *device_set_find(struct device_set *s, struct proto_str name, struct proto_bin gpu,
                               struct ucm_error *e)
{
    if (proto_str_is(name, "cpu"))
        return s->devices[0];
    if (proto_str_is(name, "cuda"))
        return find_gpu(s, gpu, e);
    ucm_error_set(e, UCM_WIRE_UNSUPPORTED, "device is \"%.*s\"; \"cpu\" and \"cuda\" are known",
                  (int)(name.n < 16 ? name.n : 16), name.p);
    return NULL;
}

int device_set_memory_add(struct device_set *s, void *base, uint64_t bytes)
{
    if (s->n_memory == s->cap_memory) {
        size_t cap = s->cap_memory ? 2 * s->cap_memory : 64;
        struct memory *grown = realloc(s->memory, cap * sizeof(*grown));

        if (!grown)
            return -ENOMEM;
        s->memory = grown;
        s->cap_memory = cap;
    }
    s->memory[s->n_memory++] = (struct memory){.base = base, .bytes = bytes};
    for (uint32_t i = 0; i < s->n; i++)
        if (s->devices[i]->ops->memory_add)
            s->devices[i]->ops->memory_add(s->devices[i], base, bytes);
    return 0;
}

static void unpin_all(struct device_set *s);

static void unpinned_cb(struct device_job *job, int status)
{
    struct device_set *s = LIST_ENTRY(job, struct unpin, job)->set;

    (void)status;
    if (--s->unpins > 0)
        return;
    s->config.memory_removed_cb(s->config.ctx, s->removing.base, s->removing.bytes);
    unpin_all(s);
}

static void unpin(struct device_set *s)
{
    s->unpins = 1; /* this call's: for devices that pin nothing */
    for (uint32_t i = 0; i < s->n; i++) {
        struct unpin *u = &s->unpin[i];

        if (!s->devices[i]->ops->memory_add)
            continue;
        u->set = s;
        u->job = (struct device_job){.op = DEVICE_UNPIN,
                                     .memory = s->removing.base,
                                     .memory_bytes = s->removing.bytes,
                                     .done_cb = unpinned_cb};
        s->unpins++;
        (void)s->devices[i]->ops->submit(s->devices[i], &u->job); /* refuses copies only */
    }
    s->unpins--;
}

/* Until one is under way. */
static void unpin_all(struct device_set *s)
{
    for (size_t i = 0; i < s->n_memory && s->unpins == 0;) {
        if (!s->memory[i].removed) {
            i++;
            continue;
        }
        s->removing = s->memory[i];
        s->memory[i] = s->memory[--s->n_memory];
        unpin(s);
        if (s->unpins == 0)
            s->config.memory_removed_cb(s->config.ctx, s->removing.base, s->removing.bytes);
    }
}

void device_set_memory_remove(struct device_set *s, void *base, uint64_t bytes)
{
    for (size_t i = 0; i < s->n_memory; i++) {
        if (s->memory[i].base != base)
            continue;
        s->memory[i].removed = true;
        unpin_all(s);
        return;
    }
    s->config.memory_removed_cb(s->config.ctx, base, bytes); /* there was no memory to note it */
}

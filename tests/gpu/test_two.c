/* Two GPUs in one device module. Each is found by its UUID, has a thread and a context of its own,
 * and takes only its own memory. With one GPU there is nothing to test. */
#include "tests/gpu/harness.h"

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY FLAT_BYTES
#define ROUNDS 40

static struct test_device t;

struct side {
    struct test_worker w;
    uint8_t uuid[UCM_UUID_BYTES], ipc[64];
    struct device_region *region;
    struct ucm_copy_item items[FLAT_BLOCKS];
};
static struct side sides[2];

static bool side_open(unsigned i)
{
    struct side *s = &sides[i];
    struct ucm_error e = {0};

    setenv("CUDA_VISIBLE_DEVICES", i == 0 ? "0" : "1", 1);
    worker_start(&s->w);
    if (!worker_do(&s->w, WORKER_HELLO, 0, 0, 0))
        return false;
    memcpy(s->uuid, s->w.reply.handle, sizeof(s->uuid));
    if (!CHECK(device_use(&t, s->uuid), "GPU %u is found by its UUID", i) ||
        !worker_do(&s->w, WORKER_ALLOC_IPC, MEMORY, 0, 0))
        return false;
    memcpy(s->ipc, s->w.reply.handle, sizeof(s->ipc));
    flat_items(&t, i * MEMORY, s->items);
    return CHECK(region_open(&t, &layout_flat, s->w.pid, s->ipc, -1, 0, MEMORY, &s->region, &e) ==
                     0,
                 "a region of GPU %u opens: %s", i, e.text);
}

/* The driver may map it over the link between the GPUs and call it this GPU's. It is the worker's
 * memory all the same. */
static void wrong_gpu(void)
{
    struct device_region *r;
    struct ucm_error e = {0};
    struct test_job j;

    (void)device_use(&t, sides[1].uuid);
    if (region_open(&t, &layout_flat, sides[0].w.pid, sides[0].ipc, -1, 0, MEMORY, &r, &e) < 0) {
        CHECK(e.text[0] != '\0', "a handle of the other GPU is refused: %s", e.text);
        return;
    }
    random_bytes(t.slots, MEMORY, 5);
    job_init(&j, DEVICE_LOAD, r, sides[0].items, FLAT_BLOCKS);
    CHECK(job_run(&t, &j) == 0 && worker_do(&sides[0].w, WORKER_READ, 0, 0, 0) &&
              memcmp(t.slots, sides[0].w.shared, MEMORY) == 0,
          "a handle of the other GPU is reached from this one, bit for bit");
    region_shut(&t, r);
}

static void submit(struct side *s, struct test_job *j, enum device_op op)
{
    (void)device_use(&t, s->uuid);
    job_init(j, op, s->region, s->items, FLAT_BLOCKS);
    job_submit(&t, j);
}

static void copies_are_right(void)
{
    struct test_job j[2];
    unsigned wrong = 0;

    for (unsigned round = 0; round < 4; round++) {
        memset(t.slots, 0, 2 * MEMORY);
        for (unsigned i = 0; i < 2; i++) {
            random_bytes(sides[i].w.shared, MEMORY, 10 * round + i);
            worker_do(&sides[i].w, WORKER_WRITE, 0, 0, 0);
        }
        for (unsigned i = 0; i < 2; i++)
            submit(&sides[i], &j[i], DEVICE_DUMP);
        for (unsigned i = 0; i < 2; i++)
            wrong += job_wait(&t, &j[i]) != 0 ||
                     memcmp(t.slots + i * MEMORY, sides[i].w.shared, MEMORY) != 0;
        random_bytes(t.slots, 2 * MEMORY, 99 + round);
        for (unsigned i = 0; i < 2; i++)
            submit(&sides[i], &j[i], DEVICE_LOAD);
        for (unsigned i = 0; i < 2; i++) {
            wrong += job_wait(&t, &j[i]) != 0;
            worker_do(&sides[i].w, WORKER_READ, 0, 0, 0);
            wrong += memcmp(t.slots + i * MEMORY, sides[i].w.shared, MEMORY) != 0;
        }
    }
    CHECK(wrong == 0, "copies of both at once are bit for bit right");
}

/* Bytes a second of both or one of the GPUs. */
static double rate(unsigned first, unsigned n, enum device_op op)
{
    struct test_job j[2][2];
    uint64_t begin = uv_hrtime();

    for (unsigned round = 0; round < ROUNDS; round++)
        for (unsigned i = first; i < first + n; i++) {
            if (round >= 2)
                (void)job_wait(&t, &j[i][round % 2]);
            submit(&sides[i], &j[i][round % 2], op);
        }
    for (unsigned i = first; i < first + n; i++)
        for (unsigned k = 0; k < 2; k++)
            (void)job_wait(&t, &j[i][k]);
    return (double)(n * ROUNDS * MEMORY) / ((double)(uv_hrtime() - begin) * 1e-9);
}

static void side_by_side(enum device_op op, const char *name)
{
    double one, two;

    (void)rate(0, 2, op);
    one = (rate(0, 1, op) + rate(1, 1, op)) / 2;
    two = rate(0, 2, op);
    CHECK(two >= 1.8 * one, "%s of two GPUs at once: %.1f GB/s, %.2f times one's", name, two / 1e9,
          two / one);
}

/* One worker ends. The other GPU's copies go on, and the daemon releases the memory. */
static void one_dies(void)
{
    struct test_job j;

    worker_kill(&sides[0].w);
    (void)device_use(&t, sides[0].uuid);
    region_shut(&t, sides[0].region);
    submit(&sides[1], &j, DEVICE_DUMP);
    CHECK(job_wait(&t, &j) == 0, "the other GPU's copies go on");
    region_shut(&t, sides[1].region);
    worker_kill(&sides[1].w);
}

int main(int argc, char **argv)
{
    harness_main(argc, argv);
    device_start(&t, 2 * MEMORY);
    if (t.gpus < 2) {
        printf("INFO  one GPU: nothing to test\n");
    } else if (side_open(0) && side_open(1)) {
        CHECK(sides[0].region->device != sides[1].region->device, "each has a device of its own");
        wrong_gpu();
        copies_are_right();
        side_by_side(DEVICE_LOAD, "loads");
        side_by_side(DEVICE_DUMP, "dumps");
        one_dies();
    }
    device_stop(&t);
    return tally();
}

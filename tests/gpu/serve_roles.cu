/* The roles of test_serve but those of streams (serve_stream.cu): each is a process of its own. */
#include "tests/gpu/serve.h"

#include <stdio.h>
#include <unistd.h>

int role_produce(void)
{
    struct worker w;
    struct ucm_task *task;
    struct ucm_result r;

    worker_open(&w);
    task = dump_begin(&w, 1000, 64, 300);
    need(ucm_task_wait(task, 30000, &r) == 0, "dump's end");
    need(r.n_ok == 64, "64 stored blocks");
    ucm_task_free(task);
    worker_close(&w);
    return 0;
}

int role_consume(void)
{
    struct worker w;
    size_t differ;

    worker_open(&w);
    differ = load_and_compare(&w, 1000, 64);
    if (differ)
        fprintf(stderr, "%zu words differ\n", differ);
    worker_close(&w);
    return differ ? 1 : 0;
}

/* A forward pass: each layer's kernel, an event of its own after it, and its dump, one after another.
 * No block may be found before the last layer is stored. */
int role_produce_layers(void)
{
    struct worker w;
    struct transfer t(3000, 64, false);
    struct ucm_task *task[LAYERS];
    struct ucm_lookup l = {};
    struct ucm_result r;
    uint32_t hits;

    worker_open(&w);
    l.keys = t.keys;
    l.n_keys = 64;
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        cudaIpcEventHandle_t handle;
        cudaEvent_t event;

        need(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess) ==
                 cudaSuccess, "event");
        need(cudaIpcGetEventHandle(&handle, event) == cudaSuccess, "event handle");
        delay_ms<<<1, 1, 0, w.stream>>>(20);
        fill<<<264, 256, 0, w.stream>>>(w.kv, 3000, 64, 2 * layer, 2);
        need(cudaEventRecord(event, w.stream) == cudaSuccess, "record");
        t.cuda_event = (const uint8_t *)&handle;
        t.layer = layer;
        t.n_layers = 1;
        need(ucm_dump(w.region, &t, -1, &task[layer]) == 0, "dump");
        need(ucm_lookup_prefix(w.ns, &l, -1, &hits, NULL, NULL) == 0 && hits == 0,
             "no block before its last layer");
    }
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        need(ucm_task_wait(task[layer], 30000, &r) == 0 && r.n_ok == 64, "a layer's dump");
        ucm_task_free(task[layer]);
    }
    need(ucm_lookup_prefix(w.ns, &l, -1, &hits, NULL, NULL) == 0 && hits == 64, "all blocks");
    worker_close(&w);
    return 0;
}

/* Compares each layer on the GPU as soon as it is reported, while the others are on their way. */
int role_consume_layers(void)
{
    struct worker w;
    std::vector<uint8_t> result(64);
    std::vector<unsigned> host(2 * BLOCKS * FRAGMENT / 4);
    struct transfer t(3000, 64, true);
    struct ucm_task *task;
    struct ucm_result r;
    const unsigned words = FRAGMENT / 4;
    size_t differ = 0;

    worker_open(&w);
    t.progress_interval = 1;
    need(ucm_load(w.region, &t, -1, &task) == 0, "load");
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        need(ucm_task_wait_layers(task, layer + 1, 30000, result.data()) == 0, "a layer");
        need(cudaMemcpy(host.data(), w.kv + (size_t)2 * layer * BLOCKS * words, host.size() * 4,
                        cudaMemcpyDeviceToHost) == cudaSuccess, "copy back");
        for (unsigned p = 0; p < 2; p++)
            for (unsigned b = 0; b < 64; b++)
                for (unsigned i = 0; i < words; i++)
                    differ += result[b] != UCM_BLOCK_IS_OK ||
                              host[((size_t)p * BLOCKS + BLOCKS - 1 - b) * words + i] !=
                                  pattern(3000 + b, 2 * layer + p, i);
    }
    need(ucm_task_wait(task, 30000, &r) == 0 && r.n_ok == 64, "load's end");
    ucm_task_free(task);
    worker_close(&w);
    return differ ? 1 : 0;
}

/* Says that its dump is under way and waits to be killed, its event never signalled. */
int role_victim(void)
{
    struct worker w;

    worker_open(&w);
    dump_begin(&w, 5000, 64, 60000);
    usleep(100000);
    puts("dumping");
    fflush(stdout);
    pause();
    return 1;
}

static bool load_all(struct worker *w, const struct ucm_transfer *t)
{
    struct ucm_task *task;
    struct ucm_result r;
    bool all;

    if (ucm_load(w->region, t, -1, &task) != 0)
        return false;
    all = ucm_task_wait(task, 30000, &r) == 0 && r.n_ok == t->n_keys;
    ucm_task_free(task);
    return all;
}

/* Loads without a pause until the daemon is gone. A load that was reported as failed writes nothing
 * any more. Then it goes on with the next daemon, through a new ring. */
int role_survivor(void)
{
    struct worker w;
    struct ucm_task *tasks[4];
    struct ucm_result r;
    struct transfer t(1000, 64, true);
    unsigned loads = 0;
    double end;
    bool lost = false;

    worker_open(&w);
    for (unsigned i = 0; i < 4; i++)
        need(ucm_load(w.region, &t, -1, &tasks[i]) == 0, "load");
    while (!lost) {
        for (unsigned i = 0; i < 4 && !lost; i++) {
            lost = ucm_task_wait(tasks[i], 30000, &r) != 0;
            ucm_task_free(tasks[i]);
            tasks[i] = NULL;
            /* Too short for the next daemon to be there. */
            lost = lost || ucm_load(w.region, &t, 2, &tasks[i]) != 0;
        }
        if (++loads == 20) {
            puts("loading");
            fflush(stdout);
        }
    }
    for (unsigned i = 0; i < 4; i++)
        if (tasks[i]) {
            need(ucm_task_wait(tasks[i], 30000, &r) != 0, "a load under way when the daemon died fails");
            ucm_task_free(tasks[i]);
        }
    if (!staged()) /* copies that the copy engines have begun may go on for a moment */
        usleep(100000);
    poison(&w);
    usleep(100000);
    need(compare(&w, 1000, 0) == 0, "nothing is written after that");
    for (end = now_s() + 20; !load_all(&w, &t) && now_s() < end;)
        usleep(20000);
    need(load_all(&w, &t), "the next daemon serves it");
    usleep(300000); /* the ring follows the connection */
    need(load_and_compare(&w, 1000, 64) == 0, "bit for bit");
    worker_close(&w);
    return 0;
}

int role_free_bytes(void)
{
    size_t free_bytes, total;

    need(cudaMemGetInfo(&free_bytes, &total) == cudaSuccess, "cudaMemGetInfo");
    printf("%zu\n", free_bytes);
    return 0;
}

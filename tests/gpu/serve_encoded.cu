/* Roles of test_serve: workers whose blocks are stored encoded. Loaded pages are compared with what
 * the C reference makes of the dumped pages. */
#include "tests/gpu/serve.h"

#include "kernels/encoding/encoding.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define N 48u    /* blocks */
#define RAW 8u /* of them are dumped as they are */

static const char *const encodings[] = {"fp8", "int8", "q4", "lossless"};

static struct ucm_encoding_spec spec_of(uint32_t encoding)
{
    struct ucm_encoding_spec s = {};

    s.encoding = encoding;
    s.version = ucm_encoding_method(encoding)->version;
    s.dtype = UCM_ENCODING_BF16;
    s.n_tensors = 2;
    for (uint32_t i = 0; i < 2; i++) {
        s.tensor[i].kind = i;
        s.tensor[i].tokens = 16;
        s.tensor[i].heads = 8;
        s.tensor[i].dim = 128;
    }
    return s;
}

/* Turns the worker's namespace into that of its encoded blocks, with a region of its own. */
static void encode_open(struct worker *w, uint32_t encoding)
{
    struct ucm_encoded_form form = {};

    worker_unregister(w);
    form.encoding = encodings[encoding - 1];
    form.dtype = "bf16";
    form.k = {16, 8, 128};
    form.v = form.k;
    need(ucm_encoding_open(w->base, &form, -1, &w->ns) == 0, "an encoded namespace");
    worker_register(w);
}

static void encode_close(struct worker *w)
{
    worker_unregister(w);
    ucm_namespace_close(w->ns);
    w->ns = NULL;
}

/* Values as KV has them, of few exponents; the same for the same block. */
static std::vector<uint16_t> kv_of(unsigned seed)
{
    std::vector<uint16_t> kv((size_t)2 * LAYERS * N * FRAGMENT / 2);

    for (size_t i = 0; i < kv.size(); i++) {
        unsigned x = pattern(seed, 1, (unsigned)i);

        kv[i] = (uint16_t)((x & 0x807f) | (120 + (x >> 16) % 10) << 7);
        if (i % 5003 == 0)
            kv[i] = i % 2 ? 0x7f80 : 0;
    }
    return kv;
}

static uint16_t *fragment_of(std::vector<uint16_t> &kv, unsigned plane, unsigned block)
{
    return kv.data() + ((size_t)plane * N + block) * FRAGMENT / 2;
}

static void put(struct worker *w, std::vector<uint16_t> &kv)
{
    for (unsigned p = 0; p < 2 * LAYERS; p++)
        need(cudaMemcpy((uint8_t *)w->kv + (size_t)p * BLOCKS * FRAGMENT, fragment_of(kv, p, 0), (size_t)N * FRAGMENT,
                        cudaMemcpyHostToDevice) == cudaSuccess, "to the GPU");
    need(cudaDeviceSynchronize() == cudaSuccess, "synchronize");
}

static void move(struct worker *w, const struct ucm_transfer *t, bool load, bool raw)
{
    struct ucm_task *task;
    struct ucm_result r;
    int rc = load    ? ucm_load(w->region, t, -1, &task)
             : raw ? ucm_dump_raw(w->region, t, -1, &task)
                     : ucm_dump(w->region, t, -1, &task);

    need(rc == 0, load ? "load" : "dump");
    need(ucm_task_wait(task, 30000, &r) == 0, load ? "load's end" : "dump's end");
    for (unsigned i = 0; i < t->n_keys; i++)
        need(r.result[i] == UCM_BLOCK_IS_OK || (!load && r.result[i] == UCM_BLOCK_IS_EXISTS),
             load ? "a loaded block's status" : "a dumped block's status");
    ucm_task_free(task);
}

/* Bytes that differ from the reference after blocks were loaded to the places that they came from. */
static size_t differ(struct worker *w, std::vector<uint16_t> &kv, uint32_t encoding)
{
    struct ucm_encoding_spec spec = spec_of(encoding);
    std::vector<uint8_t> encoded(ucm_encoding_bytes(&spec, 0)), want(FRAGMENT), is(w->bytes);
    size_t n = 0;

    need(cudaMemcpy(is.data(), w->kv, w->bytes, cudaMemcpyDeviceToHost) == cudaSuccess, "copy back");
    for (unsigned p = 0; p < 2 * LAYERS; p++)
        for (unsigned b = 0; b < N; b++) {
            memcpy(want.data(), fragment_of(kv, p, b), FRAGMENT);
            if (b >= RAW) {
                ucm_encode(&spec, p % 2, fragment_of(kv, p, b), encoded.data());
                ucm_decode(&spec, p % 2, encoded.data(), want.data());
            }
            for (unsigned i = 0; i < FRAGMENT; i++)
                n += is[((size_t)p * BLOCKS + b) * FRAGMENT + i] != want[i];
        }
    return n;
}

/* The first RAW blocks as they are, the others encoded. */
static void dump_all(struct worker *w, unsigned first)
{
    struct transfer t(first, N, false);

    t.only(0, RAW);
    move(w, &t, false, true);
    t.only(RAW, N - RAW);
    move(w, &t, false, false);
}

static void load_all(struct worker *w, unsigned first, uint32_t step)
{
    struct transfer t(first, N, false);

    poison(w);
    t.progress_interval = step;
    move(w, &t, true, false);
}

/* How many of the N blocks a lookup finds. */
static uint32_t found(struct ucm_namespace *ns, unsigned first)
{
    std::vector<uint8_t> status(N);
    struct transfer t(first, N, false);
    struct ucm_lookup l = {};
    uint32_t hits, lease;

    l.keys = t.keys;
    l.n_keys = t.n_keys;
    need(ucm_lookup_per_key(ns, &l, -1, status.data(), &hits, &lease) == 0, "lookup");
    return hits;
}

/* As a forward pass stores them: each layer's event and dump after the layer. */
static void dump_layers(struct worker *w, unsigned first)
{
    struct transfer t(first, N, false);
    struct ucm_task *task[2 * LAYERS];
    struct ucm_result r;

    for (unsigned i = 0; i < 2 * LAYERS; i++) {
        bool raw = i % 2 == 0;

        if (raw) {
            need(cudaEventRecord(w->event, w->stream) == cudaSuccess, "record");
            if (i == 2 * (LAYERS - 1))
                need(found(w->ns, first) == 0, "no block before its last layer");
        }
        t.cuda_event = (const uint8_t *)&w->handle;
        t.layer = i / 2;
        t.n_layers = 1;
        t.only(raw ? 0 : RAW, raw ? RAW : N - RAW);
        need((raw ? ucm_dump_raw : ucm_dump)(w->region, &t, -1, &task[i]) == 0, "a layer's dump");
    }
    for (unsigned i = 0; i < 2 * LAYERS; i++) {
        need(ucm_task_wait(task[i], 30000, &r) == 0 && r.n_ok == (i % 2 == 0 ? RAW : N - RAW),
             "a layer's dump ends");
        ucm_task_free(task[i]);
    }
    need(found(w->ns, first) == N, "all blocks");
}

static void encoded(struct worker *w, uint32_t encoding)
{
    unsigned first = 20000 + 1000 * encoding;
    std::vector<uint16_t> kv = kv_of(first);

    encode_open(w, encoding);
    put(w, kv);
    dump_all(w, first);
    load_all(w, first, 0);
    need(differ(w, kv, encoding) == 0, encodings[encoding - 1]);
    load_all(w, first, 1);
    need(differ(w, kv, encoding) == 0, "layer by layer");
    put(w, kv);
    dump_layers(w, first + 500);
    load_all(w, first + 500, 0);
    need(differ(w, kv, encoding) == 0, "dumped layer by layer");
    load_all(w, first + 500, 3);
    need(differ(w, kv, encoding) == 0, "and so loaded, three at a time");
    encode_close(w);
}

/* Dumps by every encoding, some blocks as they are, and loads them again. */
int role_encoded(void)
{
    struct worker w;

    worker_open(&w);
    for (uint32_t e = UCM_ENCODING_FP8; e <= UCM_ENCODING_LOSSLESS; e++)
        encoded(&w, e);
    worker_close(&w);
    return 0;
}

/* Loads fp8 blocks of role_encoded without a pause, stops for a second in the middle, and goes on. */
int role_encoded_hangs(void)
{
    unsigned first = 20000 + 1000 * UCM_ENCODING_FP8;
    std::vector<uint16_t> kv = kv_of(first);
    struct worker w;
    pid_t child, self = getpid();

    worker_open(&w);
    encode_open(&w, UCM_ENCODING_FP8);
    child = fork();
    if (child == 0) { /* no CUDA here */
        usleep(200000);
        kill(self, SIGSTOP);
        sleep(1);
        kill(self, SIGCONT);
        _exit(0);
    }
    for (double end = now_s() + 2; now_s() < end;) {
        load_all(&w, first, 0);
        need(differ(&w, kv, UCM_ENCODING_FP8) == 0, "a load around the stop");
    }
    need(waitpid(child, NULL, 0) == child, "the one that stops it");
    encode_close(&w);
    worker_close(&w);
    return 0;
}

#define ORPHANS 25000u /* first of the blocks that encoded-dies dumps */

/* Fills the GPU with a kernel of its own, so that the copy agent's never begin. Dies when orders of
 * a dump and of a load are claimed. */
int role_encoded_dies(void)
{
    std::vector<uint16_t> kv = kv_of(ORPHANS);
    struct transfer t(ORPHANS, N, false);
    struct transfer stored(20000 + 1000 * UCM_ENCODING_FP8, N, false);
    struct ucm_task *dump, *load;
    cudaDeviceProp prop;
    struct worker w;

    worker_open(&w);
    encode_open(&w, UCM_ENCODING_FP8);
    put(&w, kv);
    need(cudaGetDeviceProperties(&prop, 0) == cudaSuccess, "properties");
    delay_ms<<<prop.multiProcessorCount * prop.maxThreadsPerMultiProcessor / 1024, 1024, 0, w.stream>>>(20000);
    need(cudaPeekAtLastError() == cudaSuccess, "launch");
    usleep(50000);
    stored.only(RAW, N - RAW);
    need(ucm_dump(w.region, &t, -1, &dump) == 0, "dump");
    need(ucm_load(w.region, &stored, -1, &load) == 0, "load");
    for (double end = now_s() + 5; (ring_claimed(0) == 0 || ring_claimed(1) == 0) && now_s() < end;)
        usleep(100);
    puts(ring_claimed(0) > 0 && ring_claimed(1) > 0 ? "claimed" : "none");
    fflush(stdout);
    kill(getpid(), SIGKILL);
    return 1;
}

int role_encoded_after(void)
{
    std::vector<uint16_t> kv = kv_of(ORPHANS);
    struct worker w;

    worker_open(&w);
    encode_open(&w, UCM_ENCODING_FP8);
    need(found(w.ns, ORPHANS) == 0 && found(w.base, ORPHANS) == 0, "nothing of the dead worker's dump");
    put(&w, kv);
    dump_all(&w, ORPHANS);
    load_all(&w, ORPHANS, 0);
    need(differ(&w, kv, UCM_ENCODING_FP8) == 0, "the same keys, stored by another");
    encode_close(&w);
    worker_close(&w);
    return 0;
}

#include "client/bench/stream.h"

#include "client/bench/bench.h"
#include "client/bench/workload.h"

#include <stdio.h>
#include <stdlib.h>

#define ROUND_LOAD 0xffffffffu /* of the keys that loads name */

static int stream_fail(struct stream *s, int status, const char *what)
{
    const char *text = ucm_errmsg();

    if (s->status == 0) {
        s->status = status;
        snprintf(s->error, sizeof s->error, "%s: %s", what, *text ? text : ucm_strerror(status));
    }
    return -1;
}

static int stream_begin(struct stream *s)
{
    uint64_t seed = s->first + 1;
    size_t n = s->load ? s->blocks : (size_t)s->batch * s->in_flight;

    s->order = calloc(s->blocks, sizeof *s->order);
    s->keys = malloc(n * RIG_KEY_BYTES);
    s->next = s->dumped = 0;
    s->status = 0;
    s->bytes = s->requests = s->begin_ns = s->end_ns = s->waited_ns = 0;
    if (!s->order || !s->keys)
        return stream_fail(s, -UCM_ENOMEMORY, "a stream");
    for (uint32_t i = 0; i < s->blocks; i++)
        s->order[i] = s->first + i;
    for (uint32_t i = s->blocks - 1; i > 0; i--) {
        uint32_t j = (uint32_t)(workload_random(&seed) % (i + 1)), block = s->order[i];

        s->order[i] = s->order[j];
        s->order[j] = block;
    }
    if (s->load)
        bench_keys(s->run + s->first, ROUND_LOAD, s->blocks, s->keys);
    return 0;
}

static void stream_end(struct stream *s)
{
    free(s->order);
    free(s->keys);
    s->order = NULL;
    s->keys = NULL;
}

/* The next batch of blocks in their order; the last ones that are no whole batch are left out. */
static int stream_send(struct stream *s, struct stream_slot *slot, unsigned number)
{
    struct ucm_transfer t = {.n_keys = s->batch};
    int rc;

    if (s->next + s->batch > s->blocks)
        s->next = 0;
    t.blocks = s->order + s->next;
    if (s->load) {
        slot->keys = s->keys + (size_t)s->next * RIG_KEY_BYTES;
    } else {
        uint8_t *keys = s->keys + (size_t)number * s->batch * RIG_KEY_BYTES;

        bench_keys(s->run + s->first, s->dumped++, s->batch, keys);
        slot->keys = keys;
    }
    t.keys = slot->keys;
    s->next += s->batch;
    slot->sent_ns = clock_ns();
    rc = (s->load ? ucm_load : ucm_dump)(s->rig->region, &t, s->rig->timeout_ms, &slot->task);
    return rc < 0 ? stream_fail(s, rc, s->load ? "a load" : "a dump") : 0;
}

/* 1: some of its blocks were not moved. */
static int slot_wait(struct stream *s, struct stream_slot *slot)
{
    struct ucm_result r;
    int rc = ucm_task_wait(slot->task, s->rig->timeout_ms, &r);

    if (rc == 0 && r.n_ok != r.n_keys) {
        s->status = -UCM_EDEVICE;
        snprintf(s->error, sizeof s->error, "%s: %u of %u blocks were moved; one has status %u",
                 s->load ? "a load" : "a dump", r.n_ok, r.n_keys, r.result[0]);
        rc = -UCM_EDEVICE;
    } else if (rc < 0) {
        stream_fail(s, rc, s->load ? "a load" : "a dump");
    }
    ucm_task_free(slot->task);
    slot->task = NULL;
    return rc < 0 ? -1 : 0;
}

static int slot_drop(struct stream *s, struct stream_slot *slot)
{
    int rc = ucm_evict(s->rig->ns, slot->keys, s->batch, s->rig->timeout_ms, NULL, NULL);

    return rc < 0 ? stream_fail(s, rc, "dropping what was dumped") : 0;
}

static void count(struct stream *s, const struct stream_slot *slot, uint64_t start_ns)
{
    uint64_t now_ns = clock_ns(), begin_ns = start_ns + (uint64_t)s->warm_ms * 1000000;

    if (now_ns < begin_ns)
        return;
    if (s->begin_ns == 0) {
        s->begin_ns = now_ns; /* from the end of one request on */
        return;
    }
    s->bytes += s->batch * s->rig->block_bytes;
    s->requests++;
    s->waited_ns += now_ns - slot->sent_ns;
    s->end_ns = now_ns;
}

static void *stream_run(void *arg)
{
    struct stream *s = arg;
    uint64_t start_ns = clock_ns();
    uint64_t end_ns = start_ns + (uint64_t)(s->warm_ms + s->run_ms) * 1000000;
    unsigned slot = 0;

    for (unsigned i = 0; i < s->in_flight && s->status == 0; i++)
        (void)stream_send(s, &s->slots[i], i);
    while (s->status == 0 && clock_ns() < end_ns) {
        if (slot_wait(s, &s->slots[slot]) < 0)
            break;
        count(s, &s->slots[slot], start_ns);
        if ((!s->load && slot_drop(s, &s->slots[slot]) < 0) ||
            stream_send(s, &s->slots[slot], slot) < 0)
            break;
        slot = (slot + 1) % s->in_flight;
    }
    for (unsigned i = 0; i < s->in_flight; i++) {
        struct stream_slot *last = &s->slots[(slot + i) % s->in_flight];

        if (last->task && slot_wait(s, last) == 0 && !s->load)
            (void)slot_drop(s, last);
    }
    return NULL;
}

int stream_store(struct stream *s)
{
    struct ucm_transfer t = {.n_keys = s->batch};
    int rc = stream_begin(s);

    for (uint32_t i = 0; rc == 0 && i < s->blocks; i += s->batch) {
        struct stream_slot slot = {.task = NULL};

        t.n_keys = s->blocks - i < s->batch ? s->blocks - i : s->batch;
        t.keys = s->keys + (size_t)i * RIG_KEY_BYTES;
        t.blocks = s->order + i;
        rc = ucm_dump(s->rig->region, &t, s->rig->timeout_ms, &slot.task);
        rc = rc < 0 ? stream_fail(s, rc, "storing blocks") : slot_wait(s, &slot);
    }
    stream_end(s);
    return rc;
}

int streams_run(struct stream *s, unsigned n, char error[320])
{
    unsigned started = 0, begun = 0;
    int rc = 0;

    for (; begun < n && rc == 0; begun++)
        rc = stream_begin(&s[begun]);
    for (; started < n && rc == 0; started++)
        if (pthread_create(&s[started].thread, NULL, stream_run, &s[started]) != 0) {
            rc = stream_fail(&s[started], -UCM_ENOMEMORY, "a thread");
            break;
        }
    for (unsigned i = 0; i < started; i++)
        pthread_join(s[i].thread, NULL);
    for (unsigned i = 0; i < begun; i++) {
        stream_end(&s[i]);
        if (s[i].status == 0)
            continue;
        rc = -1;
        snprintf(error, 320, "%s", s[i].error);
    }
    return rc;
}

double streams_rate(const struct stream *s, unsigned n)
{
    double rate = 0;

    for (unsigned i = 0; i < n; i++) {
        uint64_t ns = s[i].in_flight == 1 ? s[i].waited_ns : s[i].end_ns - s[i].begin_ns;

        if (ns > 0)
            rate += (double)s[i].bytes / ((double)ns * 1e-9);
    }
    return rate;
}

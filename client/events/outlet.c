#include "client/events/events.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

/* As vLLM's publisher. */
#define SEND_MOST 100000
#define LINGER_MS 1000
/* No publisher sends more batches than that in a millisecond, in the long run. */
#define STEPS_PER_MS 1024
/* A replay request's number, after the identity of its sender and an empty frame. */
#define NUMBER_BYTES 8
#define WHO_BYTES 256
/* Requests and subscriptions that are looked at before events have their turn. */
#define SERVED_MOST 64

/* A batch, which libzmq has too until it is sent. */
struct kept {
    _Atomic unsigned refs;
    size_t n;
    uint8_t bytes[];
};

struct step {
    struct kept *batch;
    char *topic;
    uint64_t number;
};

struct outlet {
    struct outlet_config config;
    void *context, *pub, *replay;
    uint64_t next;      /* number */
    struct step *steps; /* a ring of config.steps */
    uint32_t first, n;
    uint64_t bytes;
};

static void kept_unref_cb(void *bytes, void *batch)
{
    struct kept *k = batch;

    (void)bytes;
    if (atomic_fetch_sub(&k->refs, 1) == 1)
        free(k);
}

/* Above all numbers of a publisher that ran before: a reader of those detects a gap, and asks for
 * what it missed. */
static uint64_t number_first(void)
{
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    return ((uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000) * STEPS_PER_MS;
}

static void number_pack(uint8_t out[NUMBER_BYTES], uint64_t number)
{
    for (int i = 0; i < NUMBER_BYTES; i++)
        out[i] = (uint8_t)(number >> (8 * (NUMBER_BYTES - 1 - i)));
}

/* ---- sending ---- */

static int frame_send(void *socket, const void *p, size_t n, bool more)
{
    return zmq_send(socket, p, n, ZMQ_DONTWAIT | (more ? ZMQ_SNDMORE : 0)) < 0 ? -1 : 0;
}

/* Topic, number and batch, after what was sent already. */
static int step_send(void *socket, const struct step *s)
{
    uint8_t number[NUMBER_BYTES];
    zmq_msg_t message;

    number_pack(number, s->number);
    if (frame_send(socket, s->topic, strlen(s->topic), true) != 0 ||
        frame_send(socket, number, sizeof(number), true) != 0)
        return -1;
    atomic_fetch_add(&s->batch->refs, 1);
    if (zmq_msg_init_data(&message, s->batch->bytes, s->batch->n, kept_unref_cb, s->batch) != 0) {
        kept_unref_cb(NULL, s->batch);
        return frame_send(socket, "", 0, false);
    }
    if (zmq_msg_send(&message, socket, ZMQ_DONTWAIT) < 0) {
        zmq_msg_close(&message);
        return -1;
    }
    return 0;
}

static void step_drop(struct outlet *o)
{
    struct step *s = &o->steps[o->first];

    o->bytes -= s->batch->n;
    kept_unref_cb(NULL, s->batch);
    free(s->topic);
    o->first = (o->first + 1) % o->config.steps;
    o->n--;
}

static void step_keep(struct outlet *o, const struct step *s)
{
    while (o->n > 0 && (o->n == o->config.steps || o->bytes + s->batch->n > o->config.bytes))
        step_drop(o);
    o->steps[(o->first + o->n++) % o->config.steps] = *s;
    o->bytes += s->batch->n;
}

static int topic_send(struct outlet *o, const char *topic, size_t n, struct kept *batch)
{
    struct step s = {.batch = batch, .topic = strndup(topic, n), .number = o->next};

    if (!s.topic)
        return -1;
    o->next++;
    step_send(o->pub, &s); /* a PUB socket drops what a subscriber does not take */
    atomic_fetch_add(&batch->refs, 1);
    step_keep(o, &s);
    return 0;
}

int outlet_send(struct outlet *o, const char *topics, const void *batch, size_t n)
{
    struct kept *k = malloc(sizeof(*k) + n);
    int rc = k ? 0 : -1;

    if (!k)
        return -1;
    atomic_init(&k->refs, 1);
    k->n = n;
    memcpy(k->bytes, batch, n);
    for (const char *at = topics; at && rc == 0;) {
        const char *end = strchr(at, ',');

        rc = topic_send(o, at, end ? (size_t)(end - at) : strlen(at), k);
        at = end ? end + 1 : NULL;
    }
    kept_unref_cb(NULL, k);
    return rc;
}

/* ---- replay ---- */

/* Reads one request: a message of three frames, which are the peer's identity, an empty one, and a number. It drops any other
 * message, and then *sound is false. Returns false if no message waits. */
static bool request_take(struct outlet *o, uint8_t who[WHO_BYTES], size_t *who_n, uint64_t *from,
                         bool *sound)
{
    uint8_t frame[3][WHO_BYTES];
    int n[3] = {0}, more = 1, frames = 0;
    size_t size = sizeof(more);

    for (; more; frames++) {
        int got = zmq_recv(o->replay, frame[frames < 3 ? frames : 2], WHO_BYTES, ZMQ_DONTWAIT);

        if (got < 0)
            return false;
        n[frames < 3 ? frames : 2] = got;
        if (zmq_getsockopt(o->replay, ZMQ_RCVMORE, &more, &size) != 0)
            return false;
    }
    *sound = frames == 3 && n[0] <= WHO_BYTES && n[1] == 0 && n[2] == NUMBER_BYTES;
    *from = 0;
    for (int i = 0; *sound && i < NUMBER_BYTES; i++)
        *from = *from << 8 | frame[2][i];
    *who_n = *sound ? (size_t)n[0] : 0;
    memcpy(who, frame[0], *who_n);
    return true;
}

static void replay_send(struct outlet *o, const uint8_t *who, size_t who_n, uint64_t from)
{
    uint8_t end[NUMBER_BYTES];

    for (uint32_t i = 0; i < o->n; i++) {
        const struct step *s = &o->steps[(o->first + i) % o->config.steps];

        if (s->number >= from &&
            (frame_send(o->replay, who, who_n, true) != 0 ||
             frame_send(o->replay, "", 0, true) != 0 || step_send(o->replay, s) != 0))
            return;
    }
    number_pack(end, UINT64_MAX);
    if (frame_send(o->replay, who, who_n, true) == 0 && frame_send(o->replay, "", 0, true) == 0 &&
        frame_send(o->replay, "", 0, true) == 0 &&
        frame_send(o->replay, end, sizeof(end), true) == 0)
        frame_send(o->replay, "", 0, false);
}

bool outlet_serve(struct outlet *o)
{
    uint8_t who[WHO_BYTES], change = 0;
    bool subscribed = false, sound;
    uint64_t from;
    size_t who_n;

    for (int i = 0; i < SERVED_MOST && o->replay && request_take(o, who, &who_n, &from, &sound);
         i++)
        if (sound)
            replay_send(o, who, who_n, from);
    /* An XPUB socket receives subscriptions: 1, and the topic. */
    for (int i = 0; i < SERVED_MOST && zmq_recv(o->pub, &change, 1, ZMQ_DONTWAIT) >= 0; i++) {
        subscribed = subscribed || change == 1;
        change = 0; /* an empty message writes none */
    }
    return subscribed;
}

/* ---- life ---- */

static int fail(const char *what, const char *endpoint)
{
    fprintf(stderr, "ucmevents: %s %s: %s\n", what, endpoint, zmq_strerror(zmq_errno()));
    return -1;
}

static int socket_open(struct outlet *o, int type, const char *endpoint, int most, void **out)
{
    static const int linger = LINGER_MS, verbose = 1;
    void *s = zmq_socket(o->context, type);

    if (!s)
        return fail("no socket for", endpoint);
    if (zmq_setsockopt(s, ZMQ_SNDHWM, &most, sizeof(most)) != 0 ||
        zmq_setsockopt(s, ZMQ_LINGER, &linger, sizeof(linger)) != 0 ||
        (type == ZMQ_XPUB && zmq_setsockopt(s, ZMQ_XPUB_VERBOSE, &verbose, sizeof(verbose)) != 0) ||
        zmq_bind(s, endpoint) != 0) {
        fail("can't listen on", endpoint);
        zmq_close(s);
        return -1;
    }
    *out = s;
    return 0;
}

int outlet_open(const struct outlet_config *config, struct outlet **out)
{
    struct outlet *o = calloc(1, sizeof(*o));
    int rc = -1;

    if (o) {
        o->config = *config;
        o->next = number_first();
        o->steps = calloc(config->steps, sizeof(*o->steps));
        o->context = o->steps ? zmq_ctx_new() : NULL;
    }
    if (!o || !o->context)
        fprintf(stderr, "ucmevents: memory ran out\n");
    else
        rc = socket_open(o, ZMQ_XPUB, config->endpoint, SEND_MOST, &o->pub);
    /* Room for one whole replay and half of the one before: libzmq learns late that this half was
     * read. ZeroMQ drops messages beyond this limit. */
    if (rc == 0 && config->replay[0] != '\0')
        rc = socket_open(o, ZMQ_ROUTER, config->replay, 2 * ((int)config->steps + 16), &o->replay);
    if (rc == 0)
        *out = o;
    else
        outlet_close(o);
    return rc;
}

void outlet_close(struct outlet *o)
{
    if (!o)
        return;
    if (o->pub)
        zmq_close(o->pub);
    if (o->replay)
        zmq_close(o->replay);
    if (o->context)
        zmq_ctx_term(o->context);
    while (o->n > 0)
        step_drop(o);
    free(o->steps);
    free(o);
}

/* What the daemon of fake_daemon.h answers by itself. */
#ifndef UCM_TESTS_FAKE_ANSWERS_H
#define UCM_TESTS_FAKE_ANSWERS_H

#include "tests/unit/client/fake_base.h"

#include <sys/stat.h>

/* Sends one frame with descriptors, and closes them. */
FAKE_FN void fake_reply_fds(int conn, uint32_t msgid, const struct proto_message *m,
                            const void *result, int *fds, uint32_t n)
{
    union {
        char bytes[CMSG_SPACE(UCM_MAX_FRAME_FDS * sizeof(int))];
        struct cmsghdr align;
    } control = {{0}};
    struct proto_buf b;
    struct ucm_error e;
    struct iovec iov;
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};

    proto_buf_init(&b, 2u << 20);
    cr_assert_eq(proto_response(&b, msgid, m, result, &e), 0, "%s", e.text);
    iov = (struct iovec){b.p, b.n};
    if (n > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(n * sizeof(int));
        *CMSG_FIRSTHDR(&message) = (struct cmsghdr){.cmsg_level = SOL_SOCKET,
                                                    .cmsg_type = SCM_RIGHTS,
                                                    .cmsg_len = CMSG_LEN(n * sizeof(int))};
        memcpy(CMSG_DATA(CMSG_FIRSTHDR(&message)), fds, n * sizeof(int));
    }
    while (b.n > 0) {
        ssize_t sent = sendmsg(conn, &message, MSG_NOSIGNAL);

        if (sent < 0)
            break; /* the client hung up */
        iov = (struct iovec){(char *)iov.iov_base + sent, iov.iov_len - (size_t)sent};
        b.n -= (size_t)sent;
        message.msg_control = NULL;
        message.msg_controllen = 0;
    }
    proto_buf_free(&b);
    for (uint32_t i = 0; i < n; i++)
        close(fds[i]);
}

FAKE_FN void fake_hello(struct fake *f, int conn, uint32_t msgid)
{
    static const uint8_t instance[16] = {1, 2, 3};
    struct msg_hello_r m = {
        .version = 1,
        .server = {"ucmd fake", 9},
        .instance = {instance, 16},
        .tenant = {"uid:7", 5},
        .max_frame_bytes = UCM_MAX_FRAME_BYTES,
        .max_keys = UCM_MAX_KEYS,
        .max_requests = 256,
        .max_regions = 64,
        .max_leases = 16,
        .max_lease_ms = 60000,
        .max_timeout_ms = 60000,
    };

    fake_reply(f, conn, msgid, &proto_hello_r, &m);
}

FAKE_FN uint32_t fake_region_add(struct fake *f, int slot, uint32_t ns)
{
    struct fake_region *r;
    struct stat st;
    uint32_t id;

    pthread_mutex_lock(&f->lock);
    cr_assert(f->n_regions < FAKE_REGIONS);
    r = &f->regions[f->n_regions++];
    *r = (struct fake_region){.id = f->next_id++, .ns = ns, .n_fds = f->n_fds[slot]};
    for (uint32_t i = 0; i < f->n_fds[slot]; i++) {
        if (i == 0 && fstat(f->fds[slot][i], &st) == 0)
            r->ino = st.st_ino;
        close(f->fds[slot][i]);
    }
    f->n_fds[slot] = 0;
    id = r->id;
    pthread_mutex_unlock(&f->lock);
    return id;
}

/* hits: the first byte of the first key, so that each caller can tell its own answer. */
FAKE_FN void fake_lookup(struct fake *f, int conn, uint32_t msgid, const struct msg_lookup *m)
{
    uint32_t n = m->keys.n / 16;
    uint8_t status[1024] = {0};
    struct msg_lookup_r r = {.hits = m->keys.p[0] < n ? m->keys.p[0] : n};

    if (m->per_key) {
        memset(status, UCM_LOOKUP_DRAM, r.hits);
        r.status = (struct proto_bin){status, n};
    }
    pthread_mutex_lock(&f->lock);
    f->last_wait_ms = m->wait_ms;
    if (m->lease_ms && r.hits)
        r.lease = f->next_lease++;
    pthread_mutex_unlock(&f->lock);
    fake_reply(f, conn, msgid, &proto_lookup_r, &r);
}

FAKE_FN void fake_note_request(struct fake *f, struct proto_str id)
{
    uint64_t first = 0;

    if (id.n > 0)
        memcpy(&first, id.p, id.n < 8 ? id.n : 8);
    FAKE_SET(f, f->last_request, first);
}

/* Requests about memory: regions and rings. False: the request is none of these. */
FAKE_FN bool fake_answer_memory(struct fake *f, int slot, int method, uint32_t id,
                                const union proto_any *m)
{
    int conn = f->conns[slot];
    struct msg_region region;
    struct msg_ring ring;
    bool found;

    switch (method) {
    case UCM_METHOD_REGION_REGISTER:
        region.region = fake_region_add(f, slot, (uint32_t)m->region_register.ns);
        fake_reply(f, conn, id, &proto_region, &region);
        return true;
    case UCM_METHOD_REGION_CHALLENGE:
        FAKE_SET(f, f->nonce[0], f->nonce[0] + 1);
        fake_reply(f, conn, id, &proto_challenge_r,
                   &(struct msg_challenge_r){.nonce = {f->nonce, sizeof f->nonce}});
        return true;
    case UCM_METHOD_REGION_UNREGISTER:
        pthread_mutex_lock(&f->lock);
        for (unsigned i = 0; i < f->n_regions; i++)
            if (f->regions[i].id == m->region.region)
                f->regions[i] = f->regions[--f->n_regions];
        pthread_mutex_unlock(&f->lock);
        fake_reply(f, conn, id, &proto_none, NULL);
        return true;
    case UCM_METHOD_RING_REGISTER:
        pthread_mutex_lock(&f->lock);
        cr_assert_eq(f->n_fds[slot], 1);
        ring.ring = f->next_id++;
        fake_staging_add(&f->rings, f->fds[slot][0], (uint32_t)ring.ring);
        f->n_fds[slot] = 0;
        pthread_mutex_unlock(&f->lock);
        fake_reply(f, conn, id, &proto_ring, &ring);
        return true;
    case UCM_METHOD_RING_UNREGISTER:
        FAKE_SET(f, found, fake_staging_remove(&f->rings, (uint32_t)m->ring.ring));
        fake_reply_if(f, conn, id, found, &proto_none, NULL);
        return true;
    default:
        return false;
    }
}

/* Requests that name blocks by their keys. False: the request is none of these. */
FAKE_FN bool fake_answer_keys(struct fake *f, int conn, int method, uint32_t id,
                              const union proto_any *m)
{
    switch (method) {
    case UCM_METHOD_LOOKUP:
        fake_note_request(f, m->lookup.request);
        fake_lookup(f, conn, id, &m->lookup);
        return true;
    case UCM_METHOD_LOAD:
        fake_note_request(f, m->load.request);
        FAKE_SET(f, f->last_lease, (uint32_t)m->load.lease);
        FAKE_SET(f, f->computing, f->computing + m->load.gpu_busy);
        fake_reply_blocks(f, conn, id, m->load.keys.n / 16, UCM_BLOCK_OK);
        return true;
    case UCM_METHOD_DUMP:
        fake_note_request(f, m->dump.request);
        FAKE_SET(f, f->computing, f->computing + m->dump.gpu_busy);
        fake_reply_blocks(f, conn, id, m->dump.keys.n / 16, UCM_BLOCK_EXISTS);
        return true;
    case UCM_METHOD_PREFETCH:
        fake_note_request(f, m->prefetch.request);
        fake_reply_blocks(f, conn, id, m->prefetch.keys.n / 16, UCM_BLOCK_MISS);
        return true;
    case UCM_METHOD_PIN:
    case UCM_METHOD_UNPIN:
        fake_reply(f, conn, id, &proto_count_r,
                   &(struct msg_count_r){.blocks = m->keys.keys.n / 16});
        return true;
    case UCM_METHOD_EVICT:
        fake_reply(f, conn, id, &proto_count_r, &(struct msg_count_r){.blocks = 3, .busy = 2});
        return true;
    default:
        return false;
    }
}

FAKE_FN void fake_answer(struct fake *f, int slot, int method, struct proto_envelope *env)
{
    static const uint8_t fingerprint[32] = {9};
    int conn = f->conns[slot];
    uint32_t id = env->msgid;
    struct msg_ns_open_r ns;
    union proto_any m;
    struct ucm_error e;

    if (method < 0) {
        fake_error(f, conn, id, UCM_WIRE_UNSUPPORTED, "the fake knows no such method");
        return;
    }
    cr_assert_eq(proto_decode(proto_methods[method].params, env, &m, &e), 0, "%s", e.text);
    if (fake_answer_memory(f, slot, method, id, &m) || fake_answer_keys(f, conn, method, id, &m))
        return;
    switch (method) {
    case UCM_METHOD_HELLO:
        fake_hello(f, conn, id);
        return;
    case UCM_METHOD_NS_OPEN:
        ns.fingerprint = (struct proto_bin){fingerprint, sizeof fingerprint};
        FAKE_SET(f, ns.ns, f->next_id++);
        fake_reply(f, conn, id, &proto_ns_open_r, &ns);
        return;
    case UCM_METHOD_RELEASE:
        FAKE_SET(f, f->last_lease, (uint32_t)m.release.lease);
        fake_reply(f, conn, id, &proto_none, NULL);
        return;
    case UCM_METHOD_CANCEL:
        FAKE_SET(f, f->last_cancelled, (uint32_t)m.cancel.msgid);
        fake_reply(f, conn, id, &proto_cancel_r, &(struct msg_cancel_r){.cancelled = true});
        return;
    default:
        fake_error(f, conn, id, UCM_WIRE_UNSUPPORTED, "the fake does not answer this method");
    }
}

#endif

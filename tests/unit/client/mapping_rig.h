/* Mappings of a fake daemon, as a hook of fake_daemon.h: a table and slabs that the test writes, and answers
 * that are spoiled on demand. */
#ifndef UCM_TESTS_MAPPING_RIG_H
#define UCM_TESTS_MAPPING_RIG_H

#include "proto/memory/mapping.h"
#include "tests/unit/client/sparse_rig.h"

#define MAPPING_SLABS 8u
#define MAPPING_SLAB_BYTES 65536u
#define MAPPING_SLOT_BYTES 8192u
#define MAPPING_SLOTS (MAPPING_SLAB_BYTES / MAPPING_SLOT_BYTES)
#define MAPPING_BLOCKS (MAPPING_SLABS * MAPPING_SLOTS)

enum mapping_spoil {
    /* mapping.open */
    SPOIL_TABLE_MAGIC = SPOIL_FDS,
    SPOIL_TABLE_SIZES,
    SPOIL_SLOT_BYTES,
    SPOIL_OPEN_LAST = SPOIL_SLOT_BYTES,
    /* mapping.ref */
    SPOIL_REF_NO_FD,
    SPOIL_REF_TOO_MANY_FDS,
    SPOIL_SLAB_SHORT,
    SPOIL_SLAB_UNSEALED,
    SPOIL_SLAB_TWICE,
    SPOIL_SLAB_BEYOND,
    SPOIL_PLACES_FEW,
    SPOIL_PLACES_MANY,
    SPOIL_PLACES_HALF,
    SPOIL_REF_LAST = SPOIL_PLACES_HALF,
    /* Takes a request that it does not refuse, and never reads. */
    SPOIL_PLACE_SLOT,
    SPOIL_PLACE_SLAB,
    SPOIL_PLACE_UNGRANTED,
};

/* Under the fake's lock. */
static struct {
    int table, slabs[MAPPING_SLABS];
    struct ucm_mapping_header *header;
    uint8_t *memory[MAPPING_SLABS];
    unsigned spoil;           /* rig_spoil or mapping_spoil */
    bool sent[MAPPING_SLABS]; /* to the present mapping */
    uint32_t id;              /* 0: none is open */
    uint32_t most_granted;    /* descriptors of one answer */
    uint32_t opens, refs, unrefs, releases, closes;
    uint32_t last_first, last_n;
    bool hold;        /* references are not answered */
    unsigned slow_ms; /* references are answered so late */
} win;

#define WSET(field, value) FAKE_SET(&rig.fake, win.field, value)
#define WGET(field) fake_read(&rig.fake, &win.field, sizeof win.field)

FAKE_FN uint64_t mapping_table_bytes(void)
{
    return ucm_mapping_table_bytes(MAPPING_SLABS, MAPPING_SLAB_BYTES / UCM_MAPPING_ALIGN);
}

FAKE_FN _Atomic uint64_t *mapping_seq(uint32_t block)
{
    _Atomic uint64_t *first =
        (_Atomic uint64_t *)((uint8_t *)win.header + UCM_MAPPING_HEADER_BYTES);

    return &first[block / MAPPING_SLOTS * (MAPPING_SLAB_BYTES / UCM_MAPPING_ALIGN) +
                  block % MAPPING_SLOTS];
}

/* What the block's slot holds: the block's number in each byte. */
FAKE_FN uint8_t *mapping_slot(uint32_t block)
{
    return win.memory[block / MAPPING_SLOTS] + block % MAPPING_SLOTS * MAPPING_SLOT_BYTES;
}

FAKE_FN void mapping_answer_open(struct fake *f, int conn, uint32_t msgid)
{
    struct msg_mapping_open_r r = {.slab_bytes = MAPPING_SLAB_BYTES,
                                   .slot_bytes = MAPPING_SLOT_BYTES,
                                   .slabs = MAPPING_SLABS,
                                   .budget = MAPPING_SLABS * MAPPING_SLAB_BYTES};
    unsigned spoil;
    int fds[2];

    pthread_mutex_lock(&f->lock);
    spoil = win.spoil;
    r.mapping = win.id = f->next_id++;
    memset(win.sent, 0, sizeof win.sent);
    win.opens++;
    pthread_mutex_unlock(&f->lock);
    if (spoil == SPOIL_SLOT_BYTES)
        r.slot_bytes = 4096;
    win.header->magic[0] = spoil == SPOIL_TABLE_MAGIC ? 'X' : 'U';
    win.header->slabs = spoil == SPOIL_TABLE_SIZES ? MAPPING_SLABS + 1 : MAPPING_SLABS;
    fake_reply_fds(conn, msgid, &proto_mapping_open_r, &r, fds,
                   rig_spoil_fds(spoil, win.table, mapping_table_bytes(), fds));
}

/* Block b of a sequence lies in slot b, if there is one. */
FAKE_FN void mapping_answer_ref(struct fake *f, int conn, uint32_t msgid,
                                const struct msg_mapping_ref *m)
{
    struct ucm_wire_place *places = calloc(UCM_MAX_KEYS + 1, sizeof *places);
    uint32_t granted[UCM_MAX_FRAME_FDS], n_granted = 0, n_fds, done = 0;
    struct msg_mapping_ref_r r = {.moved = 1, .read = 2};
    int fds[UCM_MAX_FRAME_FDS];
    unsigned spoil;

    pthread_mutex_lock(&f->lock);
    spoil = win.spoil;
    win.refs++;
    win.last_first = (uint32_t)m->first;
    win.last_n = (uint32_t)m->n;
    for (; done < m->n; done++) {
        uint32_t block = (uint32_t)m->first + done, slab = block / MAPPING_SLOTS;

        places[done] = (struct ucm_wire_place){.slab = UCM_PLACE_NONE};
        if (block >= MAPPING_BLOCKS)
            continue;
        if (!win.sent[slab] && spoil != SPOIL_PLACE_UNGRANTED) {
            if (n_granted == win.most_granted)
                break;
            win.sent[slab] = true;
            fds[n_granted] =
                spoil == SPOIL_SLAB_SHORT      ? rig_memfd(MAPPING_SLAB_BYTES - 4096, true, NULL)
                : spoil == SPOIL_SLAB_UNSEALED ? rig_memfd(MAPPING_SLAB_BYTES, false, NULL)
                                               : dup(win.slabs[slab]);
            granted[n_granted++] = spoil == SPOIL_SLAB_BEYOND  ? MAPPING_SLABS
                                   : spoil == SPOIL_SLAB_TWICE ? 0
                                                               : slab;
        }
        places[done] =
            (struct ucm_wire_place){slab, block % MAPPING_SLOTS, atomic_load(mapping_seq(block))};
        if (spoil == SPOIL_PLACE_SLOT)
            places[done].slot = MAPPING_SLOTS;
        if (spoil == SPOIL_PLACE_SLAB)
            places[done].slab = MAPPING_SLABS;
    }
    pthread_mutex_unlock(&f->lock);
    n_fds = n_granted;
    if (spoil == SPOIL_REF_NO_FD && n_fds > 0)
        close(fds[--n_fds]);
    if (spoil == SPOIL_REF_TOO_MANY_FDS)
        fds[n_fds++] = dup(win.table);
    fake_sleep_ms((int)WGET(slow_ms));
    r.more = done < m->n;
    r.places = (struct proto_bin){(uint8_t *)places, done * UCM_PLACE_BYTES};
    if (spoil == SPOIL_PLACES_FEW)
        r.places.n -= UCM_PLACE_BYTES;
    if (spoil == SPOIL_PLACES_MANY)
        r.places.n += UCM_PLACE_BYTES;
    if (spoil == SPOIL_PLACES_HALF)
        r.places.n -= 8;
    r.granted = (struct proto_u32s){granted, n_granted};
    fake_reply_fds(conn, msgid, &proto_mapping_ref_r, &r, fds, n_fds);
    free(places);
}

FAKE_FN bool mapping_hook(struct fake *f, int conn, int method, struct proto_envelope *env)
{
    union proto_any m;
    struct ucm_error e;

    if (method < UCM_METHOD_MAPPING_OPEN || method > UCM_METHOD_MAPPING_CLOSE)
        return sparse_hook(f, conn, method, env);
    cr_assert_eq(proto_decode(proto_methods[method].params, env, &m, &e), 0, "%s", e.text);
    switch (method) {
    case UCM_METHOD_MAPPING_OPEN:
        mapping_answer_open(f, conn, env->msgid);
        return true;
    case UCM_METHOD_MAPPING_REF:
        if (WGET(hold))
            return true;
        if (m.mapping_ref.mapping == WGET(id))
            mapping_answer_ref(f, conn, env->msgid, &m.mapping_ref);
        else
            fake_reply_if(f, conn, env->msgid, false, NULL, NULL);
        return true;
    case UCM_METHOD_MAPPING_UNREF:
        WSET(unrefs, win.unrefs + 1);
        break;
    case UCM_METHOD_MAPPING_RELEASE:
        pthread_mutex_lock(&f->lock);
        for (uint32_t i = 0; i < m.mapping_release.slabs.n; i++)
            win.sent[m.mapping_release.slabs.p[i]] = false;
        win.releases += m.mapping_release.slabs.n;
        pthread_mutex_unlock(&f->lock);
        break;
    default:
        WSET(closes, win.closes + 1);
    }
    fake_reply(f, conn, env->msgid, &proto_none, NULL);
    return true;
}

FAKE_FN void mapping_up(void)
{
    memset(&win, 0, sizeof win);
    win.most_granted = UCM_MAX_FRAME_FDS;
    win.table = rig_memfd(mapping_table_bytes(), true, (void **)&win.header);
    memcpy(win.header->magic, UCM_MAPPING_MAGIC, 8);
    win.header->version = UCM_MAPPING_VERSION;
    win.header->slot_align = UCM_MAPPING_ALIGN;
    win.header->slab_bytes = MAPPING_SLAB_BYTES;
    win.header->slabs = MAPPING_SLABS;
    win.header->slots_per_slab = MAPPING_SLAB_BYTES / UCM_MAPPING_ALIGN;
    for (uint32_t i = 0; i < MAPPING_SLABS; i++)
        win.slabs[i] = rig_memfd(MAPPING_SLAB_BYTES, true, (void **)&win.memory[i]);
    for (uint32_t b = 0; b < MAPPING_BLOCKS; b++) {
        memset(mapping_slot(b), (int)b, MAPPING_SLOT_BYTES);
        atomic_store(mapping_seq(b), 2 * (uint64_t)(b + 1));
    }
    sparse_up();
    rig.fake.hook = mapping_hook;
}

FAKE_FN void mapping_down(void)
{
    rig_teardown();
    munmap(win.header, mapping_table_bytes());
    close(win.table);
    for (uint32_t i = 0; i < MAPPING_SLABS; i++) {
        munmap(win.memory[i], MAPPING_SLAB_BYTES);
        close(win.slabs[i]);
    }
}

/* The daemon's notification, on the only connection. */
FAKE_FN void mapping_ask_back(const uint32_t *slabs, uint32_t n)
{
    struct msg_mapping_revoke m = {.mapping = WGET(id), .slabs = {slabs, n}, .timeout_ms = 1000};
    struct proto_buf b;
    struct ucm_error e;

    proto_buf_init(&b, 1u << 20);
    cr_assert_eq(proto_notification(&b, UCM_MAPPING_REVOKE, &proto_mapping_revoke, &m, &e), 0);
    for (int i = 0; i < FAKE_CONNS; i++) {
        int conn = FAKE_GET(&rig.fake, conns[i]);

        if (conn >= 0)
            fake_raw(&rig.fake, conn, b.p, b.n);
    }
    proto_buf_free(&b);
}

#endif

/* What the files of this directory share. As for client/lib/internal.h, the caller of each function
 * holds the client's lock unless a comment says otherwise. */
#ifndef UCM_CLIENT_SPARSE_INTERNAL_H
#define UCM_CLIENT_SPARSE_INTERNAL_H

#include "client/include/ucmclient_sparse.h"
#include "client/lib/internal.h"

struct client_summary {
    struct msg_summary_open open;
    struct ucm_sparse_summary summary; /* keep: the array below, or NULL */
    uint8_t keep[UCM_MAX_HEAD_DIM / 2 / 8];
};

/* ---- sequences: sequence.c ---- */

/* Sequences are no handles, since appending a million keys again would delay every call after a
 * reconnect. The first call that names a sequence opens it again. */
struct ucm_sequence {
    struct client_hook hook;
    struct ucm_client *client;
    struct ucm_namespace *ns; /* of summaries, referenced */
    unsigned refs;            /* of the user, of threads that use it, of tasks */
    bool closed;              /* by the user */
    bool busy;                /* a thread opens it or appends to it: others wait for client->idle */
    bool reopening;
    bool build; /* missing summaries are built, also when it is opened again */
    uint32_t part, lease_ms;
    uint32_t id;       /* on the wire ... */
    uint64_t attempts; /* ... of this connection; 0: the daemon does not know it */
    uint8_t *keys;     /* n_blocks, in room for `room` */
    uint32_t n_blocks, room;
};

/* As client_begin of `h`, which may be NULL. Afterwards the daemon of the present connection knows
 * all of the sequences, each by its id. They are of one client. May return CLIENT_AGAIN. */
int client_sequences_begin(struct ucm_sequence *const *sequences, uint32_t n,
                           struct client_handle *h, int64_t deadline_ns);
/* The timeout that a request tells the daemon. With it the daemon stops in time for its answer, and
 * says what came too late. asked_ms: a shorter time, or 0. */
uint64_t client_answer_ms(uint32_t asked_ms, int64_t deadline_ns);
void client_sequence_ref(struct ucm_sequence *sequence);
void client_sequence_unref(struct ucm_sequence *sequence);
/* The daemon answered that it has no such sequence: the next call opens it again. */
void client_sequence_forget(struct ucm_sequence *sequence);
/* A task of n blocks of a sequence. sequence_id: the field that receives the sequence's id. */
int client_sequence_task(struct ucm_sequence *sequence, uint64_t *sequence_id,
                         const struct client_request *q, uint32_t n, int64_t deadline_ns,
                         struct ucm_task **out);

/* ---- memory of the daemon: map.c ---- */

/* Maps a descriptor that the daemon sent, read-only. First it checks that reading there can't kill
 * this process. what: "a mapping". 0 or -code with *e. Without the lock. */
int client_memory_map(int fd, uint64_t bytes, const char *what, void **out, struct ucm_error *e);

/* ---- mappings: mapping.c, mapping_ref.c, mapping_ranges.c ---- */

struct client_range {
    uint8_t *p;
    size_t bytes;
    uint32_t slab; /* UCM_PLACE_NONE: a table */
    bool wanted;
    uint64_t opened;
};

/* What the answer to an opening of a mapping says, checked. */
struct client_geometry {
    uint64_t slab_bytes, slot_bytes, part_bytes;
    uint32_t slabs, slots; /* slots of a slab */
    uint64_t budget;
};

/* The daemon's memory as this process maps it. Readers take only `lock`, so a call that takes it
 * waits only for their copies. Changes also need the client's lock. */
struct client_maps {
    pthread_rwlock_t lock;
    _Atomic uint64_t opened; /* whose places may be read; 0: none */
    struct client_geometry geometry;
    const _Atomic uint64_t *seqs; /* in the table */
    const uint8_t **slabs;        /* geometry.slabs; NULL: not mapped */
    struct client_range *ranges;  /* n of room */
    uint32_t n, room;
};

int client_maps_init(struct client_maps *m);
void client_maps_free(struct client_maps *m); /* unmaps all */
/* For a new opening, maps the table. fd stays the caller's. 0, or -code with *e: what the daemon
 * sent does not fit, or memory ran out. */
int client_maps_open(struct client_maps *m, uint64_t opened, const struct client_geometry *g,
                     int fd, struct ucm_error *e);
/* Maps a slab of the present opening, which must not be mapped. */
int client_maps_add(struct client_maps *m, uint32_t slab, int fd, struct ucm_error *e);
bool client_maps_has(const struct client_maps *m, uint32_t slab);
/* All places become invalid. keep: the ranges stay until each is released; else they go now. */
void client_maps_end(struct client_maps *m, bool keep);
/* Unmaps a slab of the present opening. */
void client_maps_remove(struct client_maps *m, uint32_t slab);
void client_maps_want(struct client_maps *m, uint32_t slab);
/* NULL: nothing is mapped there. */
struct client_range *client_maps_find(struct client_maps *m, const void *address);
void client_maps_unmap(struct client_maps *m, struct client_range *range);

struct ucm_mapping {
    struct client_hook hook;
    struct ucm_client *client;
    struct ucm_namespace *ns; /* referenced */
    unsigned refs;            /* of the user, of threads that use it */
    /* a thread opens it, takes or ends references: others wait for client->idle */
    bool busy;
    bool closed; /* by the user */
    uint32_t part, flags;
    uint32_t id;       /* on the wire ... */
    uint64_t attempts; /* ... of this connection; 0: the daemon does not know it */
    uint64_t openings;
    struct client_maps maps;
};

/* The daemon of the present connection knows it. */
bool client_mapping_known(const struct ucm_mapping *w);
/* Forgets all that the daemon said of it. */
void client_mapping_abandon(struct ucm_mapping *w);
/* One try to open it at the daemon; CLIENT_AGAIN as client_request_wait. */
int client_mapping_send_open(struct ucm_mapping *w, int64_t deadline_ns);
/* Whether n descriptors came with the answer. 0 or -code with call->error. */
int client_mapping_fds_check(struct client_call *call, uint32_t n);
/* 0: the caller has entered the client, and the mapping is its own until client_mapping_leave,
 * which returns the status. */
int client_mapping_enter(struct ucm_mapping *w, int timeout_ms, int64_t *deadline_ns);
int client_mapping_leave(struct ucm_mapping *w, int status);

#endif

/* What shared.c (opening, closing, counters), shared_policy.c (which root), shared_io.c (parts),
 * lookup.c (keys) and daemon/gc (what goes from roots) share. */
#ifndef UCMD_SHARED_SHARED_INTERNAL_H
#define UCMD_SHARED_SHARED_INTERNAL_H

#include "daemon/config/config.h"
#include "daemon/shared/answer_cache.h"
#include "daemon/shared/root.h"
#include "daemon/shared/shared.h"

/* How long an answer about a key is remembered: the file exists; it is damaged. */
#define SHARED_FOUND_MS 5000u
#define SHARED_DAMAGED_MS 600000u
#define SHARED_NO_KEY_MS 60000u
#define SHARED_ANSWERS (64u << 10) /* remembered at a time */
#define SHARED_NOTED 1024u         /* namespaces whose notes are remembered */
#define SHARED_NOTES_MAX 64u       /* under way */

struct shared_settings {
    uv_loop_t *loop;
    struct deadlines *deadlines;
    struct metrics *metrics;
    struct encryption *encryption;
    const char *secrets; /* a directory, borrowed during shared_new; NULL or "": none */
    uint64_t secrets_ms; /* that a call to it may take */
    const char *host;    /* borrowed during shared_new */
    enum config_placement placement;
    bool sync;
    unsigned low; /* 0: no garbage collection */
    uint64_t negative_ms, timeout_ms, collect_ms, touch_ms;
    uint32_t n;
    /* ops, target (borrowed), depth, capacity_bytes and read_only; shared_new sets the others. */
    struct shared_root_config roots[UCM_MAX_ROOTS];
};

/* A namespace whose tenant file was written, or is on its way, to these roots. */
struct shared_noted {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    uint64_t until_ms;
    uint32_t roots; /* bit by root */
};

struct shared {
    struct shared_settings settings;
    uint32_t n;
    struct shared_root *roots[UCM_MAX_ROOTS];

    bool stopped;
    uint64_t hash_seed;
    struct answer_cache answers;
    struct list lookups; /* of lookup.c: done_cb has not run */
    struct list purges;  /* of gc/purge.c; each until the last of its operations has ended */
    uint32_t n_lookups;
    struct remover *removers; /* of gc/remove.c, by root */
    struct list removals;     /* of shared_removal.link: done_cb has not run */
    struct list unnamed;      /* of them, those that wait for a secret */
    uint32_t alone;           /* of shared_remove, under way */
    uint64_t removed;         /* removals that have ended */
    void (*ready_cb)(void *ctx);
    void (*secrets_cb)(void *ctx);
    void *ready_ctx;
    struct list encrypted;    /* writes of shared_io.c that are encrypted and wait for a root */
    uint32_t encrypting;      /* parts that are being encrypted, opened, or wait in `encrypted` */
    uint64_t encrypted_bytes; /* of memory that was encrypted into */
    struct secrets *secrets;  /* NULL: keys here have none */
    bool encryption_full;     /* a write was refused for it */
    struct shared_noted noted[SHARED_NOTED];
    uint32_t noting; /* under way */
};

/* A set of roots: bit i is shared->roots[i]. */
typedef uint32_t shared_roots_mask;

static inline uint64_t shared_now(const struct shared *s)
{
    return uv_now(s->settings.loop);
}

/* shared.c */
int shared_new(const struct shared_settings *settings, struct shared **out);

/* gc/roots.c */

/* A collector for each root, if the settings say so. 0 or -ENOMEM; then shared_collectors_close all
 * the same. */
int shared_collectors_open(struct shared *s);
void shared_collectors_stop(struct shared *s);
uint32_t shared_collectors_busy(const struct shared *s); /* how many are */
void shared_collectors_close(struct shared *s);
/* What the root holds, as of the last collection. */
void shared_collectors_stats(const struct shared *s, uint32_t root, struct shared_root_stats *out);

/* gc/purge.c */

/* Those that waited for a secret begin. */
void shared_purges_go_on(struct shared *s);
/* Ends all purges: done_cb runs with -ECANCELED. */
void shared_purges_stop(struct shared *s);

/* gc/remove.c */

int shared_removals_init(struct shared *s, uint32_t roots);
/* A root may take some again, or a secret has come. */
void shared_removals_go_on(struct shared *s);
/* Ends all of them: done_cb will run with -ECANCELED. */
void shared_removals_stop(struct shared *s);

/* shared_policy.c */

/* Remembers an answer. "It exists" is not remembered while a namespace is purged. */
void shared_remember(struct shared *s, const struct block_file_id *id, uint32_t root, bool found,
                     uint64_t for_ms);
/* The same of a file that an operation found which began when s->removed was `removed`: it may be
 * gone by now. */
void shared_remember_found(struct shared *s, const struct block_file_id *id, uint32_t root,
                           uint64_t removed);
enum shared_known { SHARED_KNOWN_NOT, SHARED_KNOWN_FOUND, SHARED_KNOWN_MISSING };
enum shared_known shared_recall(const struct shared *s, const struct block_file_id *id,
                                uint32_t root);
/* Those of `asked` that could have the part. */
shared_roots_mask shared_roots_that_may_have(const struct shared *s, const struct block_file_id *id,
                                             shared_roots_mask asked);
/* Those whose breaker is closed. */
shared_roots_mask shared_roots_up(const struct shared *s);
/* The roots that a new part may go to, best first. The number of them. */
uint32_t shared_write_roots(struct shared *s, const struct block_file_id *id,
                            uint8_t out[UCM_MAX_ROOTS]);

/* encryption/shared_encryption.c */

/* One part that is encrypted or opened in a thread. Memory of the caller, embedded. */
struct shared_encryption {
    uv_work_t work;
    struct shared *shared;
    const struct shared_io *io;
    struct encryption_key *key;
    struct encryption_space space; /* whose salt is `secret`, or none */
    uint8_t secret[SHARED_SECRET_BYTES];
    void *cipher; /* of a write: what goes to the root */
    /* the file's second header: BLOCK_FILE_ENCRYPTION_BYTES, of the operation */
    uint8_t *encryption;
    int status;
    void (*done_cb)(struct shared_encryption *x, int status);
};
/* 0: done_cb will run, on the event loop. A write: -EAGAIN: too much waits, and ready_cb will say
 * when not; -ENOKEY. */
int shared_encryption_begin(struct shared_encryption *x);
/* Gives up its memory and key; of one of zeroes, too. */
void shared_encryption_end(struct shared_encryption *x);

/* encryption/shared_secret.c */

/* Opens the directory of secrets, where the settings have one; changed_cb(s): a secret has come, or
 * another one. 0 or -ENOMEM. */
int shared_secrets_open(struct shared *s, void (*changed_cb)(void *ctx));
void shared_secrets_close(struct shared *s);

/* gc/notes.c */

/* A part was written: notes whose its namespace is, on roots where this host has not done so
 * lately. Best effort. */
void shared_tenant_note(struct shared *s, const struct shared_io *io);

/* shared_io.c */

/* A root may take writes again, or the shared tier stops. */
void shared_encrypted_go_on(struct shared *s);

/* REMOVE or TOUCH in the background; nobody waits for it. 0 or -errno of the root. */
int shared_submit_background(struct shared *s, uint32_t root, enum shared_verb verb,
                             const struct block_file_id *id, uint64_t bytes);

#endif

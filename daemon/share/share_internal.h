/* What share.c (opening, closing, counters), share_policy.c (which root), share_io.c (parts),
 * lookup.c (keys) and daemon/gc (what goes from roots) share. */
#ifndef UCMD_SHARE_SHARE_INTERNAL_H
#define UCMD_SHARE_SHARE_INTERNAL_H

#include "daemon/config/config.h"
#include "daemon/share/answer_cache.h"
#include "daemon/share/root.h"
#include "daemon/share/share.h"

/* How long an answer about a key is remembered: the file exists; it is damaged. */
#define SHARE_FOUND_MS 5000u
#define SHARE_DAMAGED_MS 600000u
#define SHARE_NO_KEY_MS 60000u
#define SHARE_ANSWERS (64u << 10) /* remembered at a time */
#define SHARE_NOTED 1024u         /* namespaces whose notes are remembered */
#define SHARE_NOTES_MAX 64u       /* under way */

struct share_settings {
    uv_loop_t *loop;
    struct deadlines *deadlines;
    struct metrics *metrics;
    struct encryption *encryption;
    const char *secrets; /* a directory, borrowed during share_new; NULL or "": none */
    uint64_t secrets_ms; /* that a call to it may take */
    const char *host;    /* borrowed during share_new */
    enum config_spread spread;
    bool sync;
    unsigned low; /* 0: no garbage collection */
    uint64_t negative_ms, deadline_ms, collect_ms, touch_ms;
    uint32_t n;
    /* ops, target (borrowed), depth, capacity_bytes and read_only; share_new sets the others. */
    struct share_root_config roots[UCM_MAX_ROOTS];
};

/* A namespace whose tenant file was written, or is on its way, to these roots. */
struct share_noted {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES];
    uint64_t until_ms;
    uint32_t roots; /* bit by root */
};

struct share {
    struct share_settings settings;
    uint32_t n;
    struct share_root *roots[UCM_MAX_ROOTS];

    bool stopped;
    uint64_t hash_seed;
    struct answer_cache answers;
    struct list lookups; /* of lookup.c: done_cb has not run */
    struct list purges;  /* of gc/purge.c; each until the last of its operations has ended */
    uint32_t n_lookups;
    struct remover *removers; /* of gc/remove.c, by root */
    struct list removals;     /* of share_removal.link: done_cb has not run */
    struct list unnamed;      /* of them, those that wait for a secret */
    uint32_t alone;           /* of share_remove, under way */
    uint64_t removed;         /* removals that have ended */
    void (*ready_cb)(void *ctx);
    void (*secrets_cb)(void *ctx);
    void *ready_ctx;
    struct list encrypted;    /* writes of share_io.c that are encrypted and wait for a root */
    uint32_t encrypting;      /* parts that are being encrypted, opened, or wait in `encrypted` */
    uint64_t encrypted_bytes; /* of memory that was encrypted into */
    struct secrets *secrets;  /* NULL: keys here have none */
    bool encryption_full;     /* a write was refused for it */
    struct share_noted noted[SHARE_NOTED];
    uint32_t noting; /* under way */
};

/* A set of roots: bit i is share->roots[i]. */
typedef uint32_t share_roots_mask;

static inline uint64_t share_now(const struct share *s)
{
    return uv_now(s->settings.loop);
}

/* share.c */
int share_new(const struct share_settings *settings, struct share **out);

/* gc/roots.c */

/* A collector for each root, if the settings say so. 0 or -ENOMEM; then share_collectors_close all
 * the same. */
int share_collectors_open(struct share *s);
void share_collectors_stop(struct share *s);
uint32_t share_collectors_busy(const struct share *s); /* how many are */
void share_collectors_close(struct share *s);
/* What the root holds, as of the last collection. */
void share_collectors_stats(const struct share *s, uint32_t root, struct share_root_stats *out);

/* gc/purge.c */

/* Ends all purges: done_cb runs with -ECANCELED. */
void share_purges_stop(struct share *s);

/* gc/remove.c */

int share_removals_init(struct share *s, uint32_t roots);
/* A root may take some again, or a secret has come. */
void share_removals_go_on(struct share *s);
/* Ends all of them: done_cb will run with -ECANCELED. */
void share_removals_stop(struct share *s);

/* share_policy.c */

/* Remembers an answer. "It exists" is not remembered while a namespace is purged. */
void share_remember(struct share *s, const struct block_file_id *id, uint32_t root, bool found,
                    uint64_t for_ms);
/* The same of a file that an operation found which began when s->removed was `removed`: it may be
 * gone by now. */
void share_remember_found(struct share *s, const struct block_file_id *id, uint32_t root,
                          uint64_t removed);
enum share_known { SHARE_KNOWN_NOT, SHARE_KNOWN_FOUND, SHARE_KNOWN_MISSING };
enum share_known share_recall(const struct share *s, const struct block_file_id *id, uint32_t root);
/* Those of `asked` that could have the part. */
share_roots_mask share_roots_that_may_have(const struct share *s, const struct block_file_id *id,
                                           share_roots_mask asked);
/* Those whose breaker is closed. */
share_roots_mask share_roots_up(const struct share *s);
/* The roots that a new part may go to, best first. The number of them. */
uint32_t share_write_roots(struct share *s, const struct block_file_id *id,
                           uint8_t out[UCM_MAX_ROOTS]);

/* encryption/share_encryption.c */

/* One part that is encrypted or opened in a thread. Memory of the caller, embedded. */
struct share_encryption {
    uv_work_t work;
    struct share *share;
    const struct share_io *io;
    struct encryption_key *key;
    struct encryption_space space; /* whose salt is `secret`, or none */
    uint8_t secret[SHARE_SECRET_BYTES];
    void *cipher; /* of a write: what goes to the root */
    /* the file's second header: BLOCK_FILE_ENCRYPTION_BYTES, of the operation */
    uint8_t *encryption;
    int status;
    void (*done_cb)(struct share_encryption *x, int status);
};
/* 0: done_cb will run, on the event loop. A write: -EAGAIN: too much waits, and ready_cb will say
 * when not; -ENOKEY. */
int share_encryption_begin(struct share_encryption *x);
/* Gives up its memory and key; of one of zeroes, too. */
void share_encryption_end(struct share_encryption *x);

/* encryption/share_secret.c */

/* Opens the directory of secrets, where the settings have one; changed_cb(s): a secret has come, or
 * another one. 0 or -ENOMEM. */
int share_secrets_open(struct share *s, void (*changed_cb)(void *ctx));
void share_secrets_close(struct share *s);

/* gc/notes.c */

/* A part was written: notes whose its namespace is, on roots where this host has not done so
 * lately. Best effort. */
void share_tenant_note(struct share *s, const struct share_io *io);

/* share_io.c */

/* A root may take writes again, or the share stops. */
void share_encrypted_go_on(struct share *s);

/* REMOVE or TOUCH in the background; nobody waits for it. 0 or -errno of the root. */
int share_submit_background(struct share *s, uint32_t root, enum share_verb verb,
                            const struct block_file_id *id, uint64_t bytes);

#endif

/* Whose the files of a root are, and what of it tenants are guaranteed and get at most: for garbage
 * collection.
 *
 * A file's name has its namespace's fingerprint, but no tenant, and most hosts know few of the
 * namespaces on a root. So each host that writes parts of a namespace leaves a *tenant file* for it
 * on each root (notes.c). Before a pass the collecting host reads those of namespaces that it does
 * not know yet. If it can't, the pass fails: it would take what is guaranteed for anybody's. Quotas
 * are the collecting host's settings, so hosts that share a root should have the same.
 *
 * Promises of a pass, for files of tenants that are known:
 * - for space of the root no file goes of a tenant that would hold less than it is guaranteed then,
 *   by what the pass has listed;
 * - a tenant that holds more than it gets at most is brought to `low` percent of that, its oldest
 *   first;
 * - of both kinds no file goes that is younger than ages.h says.
 * Between passes a tenant may exceed its bound by what all hosts write, as a root its capacity.
 *
 * 128 KiB, and 32 KiB for each tenant with a quota. Thread: the event loop. */
#ifndef UCMD_GC_QUOTA_H
#define UCMD_GC_QUOTA_H

#include "daemon/gc/ages.h"
#include "daemon/shared/root.h"

#define GC_OWNERS 1024u /* tenants that are known; others count as without a quota */
#define GC_SPACES 4096u /* namespaces, likewise */
#define GC_TENANT_AGE_NS                                                                           \
    (86400ull * 1000000000u) /* of a tenant file that may go with its namespace's last file */
/* Ages of a tenant's files are counted in classes of 8 of ages.h. */
#define GC_OWNER_CELLS ((1 + (GC_AGES - 1 + 7) / 8) * GC_GROUPS)

struct gc_owner {
    char tenant[UCM_MAX_NAME_BYTES + 1];
    uint64_t *cells; /* bytes by age: GC_OWNER_CELLS; NULL: it has no quota in this pass */
    uint64_t guaranteed, most; /* as of this pass */
    uint64_t bytes, pending;   /* of its files that are there; of those, that are being removed */
    uint64_t target;           /* what it is brought to; UINT64_MAX: it may keep all */
    uint32_t most_cut;         /* files of this cell and above go to bring it there */
    uint32_t spare_cut;        /* those of this one and above may go for others' space */
};

struct gc_space {
    uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES];
    bool used;
    uint16_t owner;       /* 1 and up; 0: not known */
    uint32_t files, last; /* listed in this pass; in the one before */
};

struct gc_quota {
    shared_quota_fn quota_cb; /* NULL: nobody has any */
    void *ctx;
    struct gc_space *spaces; /* GC_SPACES; NULL before the first pass with quotas */
    struct gc_owner *owners[GC_OWNERS];
    uint32_t n_owners;
    bool listed;   /* a pass has counted all files */
    bool left_out; /* logged */
    /* While tenant files are read. */
    struct shared_root *root;
    struct shared_task task;
    struct shared_listing listing;
    uint32_t at;
    bool removing; /* a file that says nothing */
    bool cancelled;
    uint8_t name[UCM_MAX_NAME_BYTES];
    void (*learned_cb)(struct gc_quota *q, int status);
};

void gc_quota_free(struct gc_quota *q);
/* Reads what the host does not know yet; nothing, if no tenant has a quota. learned_cb runs with 0
 * or -errno, perhaps from inside. */
void gc_quota_learn(struct gc_quota *q, struct shared_root *root,
                    void (*learned_cb)(struct gc_quota *q, int status));
bool gc_quota_busy(const struct gc_quota *q);
/* True: learned_cb will not run. */
bool gc_quota_cancel(struct gc_quota *q);

/* A pass begins. NULL or 0 as owner below: nobody has a quota there. */
void gc_quota_begin(struct gc_quota *q);
/* counts: the file is listed for the first time in this pass. */
struct gc_owner *gc_quota_owner(struct gc_quota *q,
                                const uint8_t namespace[BLOCK_FILE_NAMESPACE_BYTES], bool counts);
/* The cell that an owner's file counts for, which is as old, or up to an eighth of a doubling
 * younger. */
uint32_t gc_quota_cell(uint32_t cell);
void gc_quota_add(struct gc_owner *o, uint32_t cell, uint64_t bytes);
/* All is added: finds out which files go, and adds those that may go for space to *ages. Returns
 * the bytes of those that go as their owners have too much. */
uint64_t gc_quota_cut(struct gc_quota *q, unsigned low, struct gc_ages *ages);
/* Whether the file goes because its owner has too much; and may go for space. */
bool gc_quota_goes(const struct gc_owner *o, uint32_t cell);
bool gc_quota_spares(const struct gc_owner *o, uint32_t cell, uint64_t bytes);
/* Is it a tenant file that is of no use any more? */
bool gc_quota_stale(const struct gc_quota *q, const char *name, uint64_t age_ns);
void gc_quota_ended(struct gc_quota *q, bool complete);

#endif

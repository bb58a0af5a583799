/* The lookup tables of all namespaces that have one, next to a cache whose blocks they follow.
 * Thread: the event loop only. */
#ifndef UCMD_LOOKUP_TABLE_TABLES_H
#define UCMD_LOOKUP_TABLE_TABLES_H

#include "daemon/base/limit.h"
#include "daemon/cache/cache.h"

struct lookup_tables;

/* All of it is borrowed. */
struct lookup_tables_config {
    struct uv_loop_s *loop;
    struct deadlines *deadlines; /* NULL: a table ends at once (daemon/mapping/loan.h) */
    struct index *index;
    struct cache *cache;
};
/* 0 or -errno. */
int lookup_tables_new(const struct lookup_tables_config *config, struct lookup_tables **out);
/* No table is in use. Closes its handle on the event loop. NULL-safe. */
void lookup_tables_free(struct lookup_tables *t);

/* So many namespaces should have a table: 1024, or a quarter of this process's descriptors. */
uint32_t lookup_tables_max(void);
/* The namespace has a table (proto/memory/lookup_table.h) while somebody uses it; it may have to be
 * filled first, in iterations of the event loop. The caller bounds how many have one. owner: whose
 * the table is that this use makes, borrowed until its end; NULL: nobody's.
 * 0 or -errno. */
int lookup_tables_ref(struct lookup_tables *t, struct ns *ns, struct limit_owner *owner);
/* Returns whose the table was that ended with this use; NULL: others use it. */
struct limit_owner *lookup_tables_unref(struct lookup_tables *t, struct ns *ns);
/* What to give to readers of a namespace whose table somebody uses (ns.follower): a descriptor,
 * which stays the table's, and how long the file is. */
int lookup_tables_fd(const struct ns *ns, uint64_t *bytes);
/* Tells readers that the daemon lives. */
void lookup_tables_beat(struct lookup_tables *t);
struct lookup_tables_stats {
    uint64_t tables, bytes, left_out;
};
void lookup_tables_stats(const struct lookup_tables *t, struct lookup_tables_stats *out);

#endif

/* The tables of hints of all namespaces that have one, beside a cache whose blocks they follow.
 * Thread: the event loop only. */
#ifndef UCMD_HINTS_TABLES_H
#define UCMD_HINTS_TABLES_H

#include "daemon/base/limit.h"
#include "daemon/cache/cache.h"

struct hint_tables;

/* All of it is borrowed. */
struct hint_tables_config {
    struct uv_loop_s *loop;
    struct deadlines *deadlines; /* NULL: a table ends at once (daemon/window/loan.h) */
    struct index *index;
    struct cache *cache;
};
/* 0 or -errno. */
int hint_tables_new(const struct hint_tables_config *config, struct hint_tables **out);
/* No table is in use. Closes its handle on the event loop. NULL-safe. */
void hint_tables_free(struct hint_tables *t);

/* So many namespaces should have a table: 1024, or a quarter of this process's descriptors. */
uint32_t hint_tables_max(void);
/* The namespace has a table (proto/memory/hint.h) while somebody uses it; it may have to be filled
 * first, in iterations of the event loop. The caller bounds how many have one. owner: whose the
 * table is that this use makes, borrowed until its end; NULL: nobody's.
 * 0 or -errno. */
int hint_tables_ref(struct hint_tables *t, struct ns *ns, struct limit_owner *owner);
/* Returns whose the table was that ended with this use; NULL: others use it. */
struct limit_owner *hint_tables_unref(struct hint_tables *t, struct ns *ns);
/* What to give to readers of a namespace whose table somebody uses (ns.follower): a descriptor,
 * which stays the table's, and how long the file is. */
int hint_tables_fd(const struct ns *ns, uint64_t *bytes);
/* Tells readers that the daemon lives. */
void hint_tables_beat(struct hint_tables *t);
struct hint_tables_stats {
    uint64_t tables, bytes, left_out;
};
void hint_tables_stats(const struct hint_tables *t, struct hint_tables_stats *out);

#endif

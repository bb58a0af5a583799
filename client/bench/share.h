/* Shared by the files of `ucm-bench share`. */
#ifndef UCM_BENCH_SHARE_H
#define UCM_BENCH_SHARE_H

#include "client/bench/link.h"
#include "client/bench/tier.h"

#define SHARE_TARGET_BYTES 512

/* tier.folder is the daemons' folder; tier.args those of `share`. */
struct share_bench {
    struct tier_bench tier;
    const char *target; /* the root */
};

/* A daemon whose only place besides DRAM is `target`, and a rig on it. more: further "key=value",
 * NULL-terminated. 0 or an exit code, everything stopped. */
int share_daemon_open(struct share_bench *b, const char *target, uint64_t arena_bytes,
                      const char *const *more, struct rig_options *o, struct rig *rig);
int share_daemon_close(struct share_bench *b, struct rig *rig);
/* Stores the blocks and waits until the root has them all. *ns: from the first dump on. */
int share_store(struct rig *rig, const struct rig_move *move, uint64_t *ns);

/* The root's server by way of links of ours, which can be slow or dead. -ENOTSUP: the target names
 * no server and ports. */
struct share_links {
    struct bench_link *nfs, *mount;
    char target[SHARE_TARGET_BYTES];
};
int share_links_open(const char *target, struct share_links *out);
void share_links_close(struct share_links *l);

/* Stores and loads at each block size against a plain client of the root. */
int share_bench_speed(struct share_bench *b);
/* A prefix that only the share holds, at 1 ms a round trip. */
int share_bench_lookup(struct share_bench *b);
/* Hits in DRAM while the server hangs. */
int share_bench_hung(struct share_bench *b);

#endif

/* The messages of operators, and of who follows events. As messages.h, which includes this. */
#ifndef UCM_PROTO_FEATURES_OPERATORS_H
#define UCM_PROTO_FEATURES_OPERATORS_H

#include "proto/limits.h"

/* No keys: every block of the namespace. */
#define UCM_MSG_KEYS(F, m)                                                                         \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, OPT, 0, UCM_KEYS_BYTES)
/* tier: 0 all, 1 dram only (a copy below stays), 2 nvme only, 3 shared only (of all hosts). */
#define UCM_MSG_EVICT(F, m)                                                                        \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, OPT, 0, UCM_KEYS_BYTES)                                                        \
    F(m, u64, tier, OPT, 0, 3)
/* blocks: how many changed; busy: how many did not, being pinned, read, written or leased. */
#define UCM_MSG_COUNT_R(F, m)                                                                      \
    F(m, u64, blocks, REQ, 0, UINT64_MAX)                                                          \
    F(m, u64, busy, OPT, 0, UINT64_MAX)                                                            \
    F(m, u64, missing, OPT, 0, UINT64_MAX)

/* For operators. ls answers a page: next is the cursor of the following one, 0 at the end. */
#define UCM_MSG_LS(F, m)                                                                           \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, u64, cursor, OPT, 0, UINT64_MAX)                                                          \
    F(m, u64, limit, OPT, 0, 4096)
#define UCM_MSG_KEY(F, m)                                                                          \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, key, REQ, UCM_MIN_KEY_BYTES, UCM_MAX_KEY_BYTES)
/* verify takes ls's message: it reads the page's parts that lie on NVMe and checks them. */
#define UCM_MSG_VERIFY_R(F, m)                                                                     \
    F(m, u64, checked, REQ, 0, UINT64_MAX)                                                         \
    F(m, u64, corrupt, OPT, 0, UINT64_MAX)                                                         \
    F(m, u64, failed, OPT, 0, UINT64_MAX)                                                          \
    F(m, u64, skipped, OPT, 0, UINT64_MAX)                                                         \
    F(m, u64, next, OPT, 0, UINT64_MAX)

/* root: of the shared tier, from 1; 0: each. roots: how many begin a collection; busy: how many
 * have one under way. */
#define UCM_MSG_COLLECT(F, m) F(m, u64, root, OPT, 0, UCM_MAX_ROOTS)
#define UCM_MSG_COLLECT_R(F, m)                                                                    \
    F(m, u64, roots, REQ, 0, UCM_MAX_ROOTS)                                                        \
    F(m, u64, busy, OPT, 0, UCM_MAX_ROOTS)

/* Of namespace ns, of all namespaces of `tenant`, or of all (neither). load, store: enum
 * ucm_bypass. */
#define UCM_MSG_BYPASS(F, m)                                                                       \
    F(m, u64, ns, OPT, 0, UCM_U32)                                                                 \
    F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)                                                  \
    F(m, u64, load, OPT, 0, 2)                                                                     \
    F(m, u64, store, OPT, 0, 2)

/* Of this tenant's source; empty: of all. */
#define UCM_MSG_KEY_RELOAD(F, m) F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)
/* tenant: by name, or "*". settings: "KEY=VALUE KEY=VALUE". */
#define UCM_MSG_TENANT_SET(F, m)                                                                   \
    F(m, str, tenant, REQ, 1, UCM_MAX_NAME_BYTES)                                                  \
    F(m, str, settings, REQ, 1, UCM_MAX_SETTINGS_BYTES)
#define UCM_MSG_TENANT(F, m) F(m, str, tenant, REQ, 1, UCM_MAX_NAME_BYTES)

/* Events behind number `since`, of the peer's tenant or, for operators, of `tenant`; wait_ms: until
 * there is one. tokens: with what blocks stand for. */
#define UCM_MSG_EVENTS(F, m)                                                                       \
    F(m, u64, since, OPT, 0, UINT64_MAX)                                                           \
    F(m, u64, limit, OPT, 0, 2048)                                                                 \
    F(m, u64, wait_ms, OPT, 0, UCM_DEADLINE_MS)                                                    \
    F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)                                                  \
    F(m, flag, tokens, OPT, 0, 0)
/* The keys' blocks follow one another in one sequence; parent: the key before them, if there is
 * one. tokens: block_tokens u32 for each key, little-endian. */
#define UCM_MSG_EVENTS_DESCRIBE(F, m)                                                              \
    F(m, u64, ns, REQ, 1, UCM_U32)                                                                 \
    F(m, bin, keys, REQ, UCM_MIN_KEY_BYTES, UCM_MAX_DESCRIBED *UCM_MAX_KEY_BYTES)                  \
    F(m, bin, tokens, REQ, 4, UCM_MAX_FRAME_BYTES / 2)                                             \
    F(m, bin, parent, OPT, 0, UCM_MAX_KEY_BYTES)                                                   \
    F(m, str, lora, OPT, 0, UCM_MAX_NAME_BYTES)

enum ucm_bypass { UCM_BYPASS_KEEP = 0, UCM_BYPASS_ON = 1, UCM_BYPASS_OFF = 2 };

/* A page of namespaces, like ls. */
#define UCM_MSG_PAGE(F, m)                                                                         \
    F(m, u64, cursor, OPT, 0, UINT64_MAX)                                                          \
    F(m, u64, limit, OPT, 0, 4096)

/* For operators; see docs/protocol.md. op: enum ucm_trace_op; the other fields are of a start. */
#define UCM_MSG_TRACE(F, m)                                                                        \
    F(m, u64, op, OPT, 0, 2)                                                                       \
    F(m, flag, keys, OPT, 0, 0)                                                                    \
    F(m, u64, slower_us, OPT, 0, UCM_U32)                                                          \
    F(m, str, request, OPT, 0, UCM_MAX_REQUEST_BYTES)                                              \
    F(m, str, tenant, OPT, 0, UCM_MAX_NAME_BYTES)                                                  \
    F(m, u64, sample, OPT, 0, UCM_U32)                                                             \
    F(m, u64, limit_ms, OPT, 0, UCM_TRACE_MS)                                                      \
    F(m, u64, bytes, OPT, 0, 1u << 28)

enum ucm_trace_op {
    UCM_TRACE_READ = 0, /* a page of records, which leave the daemon */
    UCM_TRACE_START = 1,
    UCM_TRACE_STOP = 2,
};

#endif

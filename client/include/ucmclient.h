/* libucmclient: how an inference worker talks to ucmd, the KV cache daemon of its host.
 *
 * A worker connects, opens the namespace of its model, registers its paged KV memory once, and from
 * then on says only which blocks to look up, prefetch, load or dump; the daemon moves the bytes.
 *
 * Threads: every function may be called from any thread at any time, on one client or many; a
 * handle (namespace, region, task) must not be used while or after it is closed. No function starts
 * a thread, installs a signal handler or logs. Not async-signal-safe.
 *
 * Fork: only the parent may go on using a client. In the child every call returns -UCM_EINVALID,
 * and the copies of the connection and of the regions' descriptors are closed at once, so that the
 * child keeps nothing alive in the daemon.
 *
 * Errors: functions return 0 or a positive number where they say so, else a negative enum
 * ucm_status; ucm_errmsg() has the sentence. Outputs are untouched on failure.
 *
 * Deadlines: every blocking call takes timeout_ms, in milliseconds: 0 never blocks (a call that
 * needs an answer then returns -UCM_EDEADLINE), and negative means the client's default (struct
 * ucm_options). The answer to a call that ran out of time is dropped; a lease or a registration
 * that it brings is undone.
 *
 * Restart of the daemon: a call or task that was on its way when the connection broke returns
 * -UCM_EDISCONNECTED. The next call connects again within its timeout (-UCM_ENODAEMON when nobody
 * listens for so long), opens every namespace and registers every region again by itself; what a
 * short timeout does not complete of this, the call after it goes on with. A region that is refused
 * then fails the calls that name it, with the daemon's reason, and no others. A break that is found
 * before a request has left costs the caller nothing. ucm_generation() counts the reconnects, so
 * that a caller can know of them. Leases do not survive one: an old one is ignored.
 *
 * What a broken connection leaves under way: the daemon's devices begin no piece of a copy any more
 * for a worker that has hung up, even where the daemon itself was stopped meanwhile. What they had
 * begun by then may still arrive in a load's blocks within some milliseconds: on a GPU 48 MiB at
 * most where no chunk is larger than 16, else a piece of a MiB or a chunk a thread. What a dump
 * read is not stored unless all of it was read before. */
#ifndef UCMCLIENT_H
#define UCMCLIENT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define UCM_API __attribute__((visibility("default")))

#define UCM_DEFAULT_SOCKET "/run/ucmd/ucmd.sock"

/* Codes below 100 are the daemon's, sent over the wire (docs/protocol.md); the others are this
 * library's own. Functions return them negated. */
enum ucm_status {
    UCM_OK = 0,
    UCM_EINVALID = 1,     /* an argument breaks a bound; the message says which and what is right */
    UCM_EUNSUPPORTED = 2, /* the daemon does not speak this version or know this feature */
    UCM_EDENIED = 3,      /* this uid and gid may not do that */
    UCM_ENOTFOUND = 4,    /* no such namespace, region, lease or request */
    UCM_EBUSY = 5,        /* a bounded resource is used up; try again */
    UCM_EDEADLINE = 6,    /* the deadline passed */
    UCM_ECANCELLED = 7,   /* the request was cancelled */
    UCM_EDEVICE = 8,      /* the device refused or failed */
    UCM_EIO = 9,          /* the daemon's storage failed */
    UCM_ENOMEMORY = 10,   /* memory ran out, here or in the daemon */
    UCM_ESHUTDOWN = 11,   /* the daemon is shutting down */
    UCM_EINTERNAL = 12,   /* a bug in the daemon */
    UCM_EDISCONNECTED = 100, /* the connection broke; what was on its way may have happened */
    UCM_ENODAEMON = 101,     /* nobody listens on the socket */
    UCM_EPROTOCOL = 102,     /* the daemon sent something that is not the protocol */
    UCM_EREPORTED = 103,     /* the task's result was already taken by an earlier check or wait */
    UCM_EPENDING = 104,      /* ucm_task_check: the task is not done */
};

/* "UCM_EBUSY" for UCM_EBUSY or -UCM_EBUSY. Static memory, never NULL. */
UCM_API const char *ucm_strerror(int status);
/* The sentence of the calling thread's last failed call, "" when there was none. Valid until the
 * thread's next call into the library. */
UCM_API const char *ucm_errmsg(void);
/* "0.1.0" */
UCM_API const char *ucm_version(void);

/* ---- client ---- */

struct ucm_client;

struct ucm_options {
    const char *socket;     /* path; NULL: $UCM_SOCKET, else UCM_DEFAULT_SOCKET. Copied. */
    const char *name;       /* shown to operators, e.g. "vllm-0"; NULL: the program's. Copied. */
    int default_timeout_ms; /* for negative timeouts; 0: 10000 */
};

/* Connects and says hello; where nobody listens it tries again until timeout_ms have passed.
 * options may be NULL. On success *out is owned by the caller. */
UCM_API int ucm_connect(const struct ucm_options *options, int timeout_ms, struct ucm_client **out);
/* Closes everything; calls under way in other threads return UCM_EDISCONNECTED, but must have
 * returned before the caller frees what it passed to them. Namespaces, regions and tasks of this
 * client that were not closed are freed with it. NULL is fine. */
UCM_API void ucm_close(struct ucm_client *client);

/* How often this client has connected, 1 at first. A change says that the daemon was restarted or
 * the connection lost: leases are gone, namespaces and regions were registered again. 0 in a child
 * after fork(). */
UCM_API uint64_t ucm_generation(struct ucm_client *client);

/* A descriptor that polls readable when ucm_process() has something to do, which includes layers of
 * a load that have landed. Owned by the client, and
 * the same for the client's whole life, over reconnects too. */
UCM_API int ucm_fd(struct ucm_client *client);
/* Takes in what has arrived, never blocks. Returns how many tasks became done since the last time,
 * by this call or by others, failed ones included. -UCM_EDISCONNECTED or -UCM_EPROTOCOL: the
 * connection turned out to be broken, and no task that would tell was under way. Never connects:
 * that is left to the next call that sends something. */
UCM_API int ucm_process(struct ucm_client *client);

/* Of the daemon that the client is, or was last, connected to. */
struct ucm_server_info {
    char server[64];      /* "ucmd 0.1.0" */
    char tenant[257];     /* who the daemon takes the caller for */
    uint8_t instance[16]; /* random for each start of the daemon */
    int admin;            /* 1: may use operators' calls */
    uint32_t max_keys, max_requests, max_regions, max_leases, max_lease_ms, max_deadline_ms;
};
UCM_API int ucm_server_info(struct ucm_client *client, struct ucm_server_info *out);

/* ---- namespaces ---- */

struct ucm_namespace;

/* When a dump is answered: as soon as the bytes are in DRAM, or when they are on stable storage, to
 * be found again even after a power failure. */
enum ucm_durability_wish {
    UCM_DURABLE_DEFAULT = 0, /* a dump: as its namespace was opened; a namespace: in DRAM */
    UCM_DURABLE_ON_NVME = 1,
    UCM_DURABLE_IN_DRAM = 2, /* a dump, whatever its namespace was opened with */
};

/* One set of interchangeable bytes. Two workers that agree on every field (and belong to one
 * tenant) share blocks; two that differ in one never see each other's. Strings are UTF-8, at most
 * 256 bytes, and copied. */
struct ucm_identity {
    const char *tenant;     /* NULL: the caller's own; another than the daemon grants is refused */
    const char *model;      /* e.g. "meta-llama/Llama-3.1-8B" */
    const char *revision;   /* weights and adapters; NULL: "" */
    const char *dtype;      /* of the KV, e.g. "bf16", "fp8_e4m3" */
    const char *layout;     /* name and version of the bytes' order, e.g. "nhd/1" */
    uint32_t block_tokens;  /* tokens of a block */
    uint32_t key_bytes;     /* 16 to 32 */
    uint32_t parts;         /* ranks that each hold a slice of a block; MLA: 1 */
    const uint32_t *shards; /* layers of each part */
    uint32_t n_shards;      /* 1: the same for every part; else as many as parts */
    uint64_t shard_bytes;   /* KV bytes of one layer of one part of one block */
    const void *salt;       /* whatever else must separate; may be NULL */
    size_t salt_bytes;      /* at most 1024 */
    /* No part of the identity: of this client's dumps that name none, enum ucm_durability_wish.
     * What the client opened a namespace with last counts for all its handles on it. */
    uint32_t durability;
};

/* On success *out lives until ucm_namespace_close or ucm_close. */
UCM_API int ucm_namespace_open(struct ucm_client *client, const struct ucm_identity *identity,
                               int timeout_ms, struct ucm_namespace **out);
/* Frees the handle, never blocks; cached blocks stay. Its regions must have been unregistered. NULL
 * is fine. */
UCM_API void ucm_namespace_close(struct ucm_namespace *ns);
/* SHA-256 over the whole identity, tenant included (docs/protocol.md, "Fingerprint"). */
UCM_API void ucm_namespace_fingerprint(const struct ucm_namespace *ns, uint8_t out[32]);

/* ---- regions ---- */

struct ucm_region;

enum ucm_memory_kind {
    UCM_MEMORY_MEMFD = 0,    /* a memfd sealed with F_SEAL_SHRINK, see ucm_shared_memory */
    UCM_MEMORY_CUDA_IPC = 1, /* from cudaIpcGetMemHandle */
    UCM_MEMORY_CUDA_FD = 2,  /* from cuMemExportToShareableHandle (VMM memory) */
};

struct ucm_memory {
    enum ucm_memory_kind kind;
    uint64_t bytes;  /* size of the allocation, counted from `offset` */
    uint64_t offset; /* cuda_ipc: of the tensor from the base of its allocation; others: 0 mostly */
    int fd;          /* memfd, cuda_fd: duplicated, the caller may close its own at once */
    uint8_t ipc[64]; /* cuda_ipc: the bytes of cudaIpcMemHandle_t */
};

/* Address of block b = start of memory[memory] + offset + b * stride; chunk_bytes are its KV. */
struct ucm_plane {
    uint32_t memory;      /* index into struct ucm_region_spec's memory */
    uint64_t offset;      /* bytes */
    uint64_t stride;      /* bytes from a block to the next; at least chunk_bytes */
    uint32_t chunk_bytes; /* of this plane in one block */
    uint32_t shard; /* layer, from 0; planes are sorted by it, and the chunks of each shard add
                       up to the namespace's shard_bytes */
};

struct ucm_region_spec {
    uint32_t part;      /* which part of the namespace this worker holds, from 0 */
    uint32_t blocks;    /* block ids below this may be loaded and dumped */
    const char *device; /* "cpu" or "cuda" */
    const uint8_t *gpu; /* cuda: the 16 bytes of the GPU's UUID; else NULL */
    const struct ucm_memory *memory;
    uint32_t n_memory; /* at most 256, of them 64 by descriptor */
    const struct ucm_plane *planes;
    uint32_t n_planes;    /* at most 2048 */
    uint32_t ring_region; /* how orders on this connection's ring name it; 0: they never do */
};

/* Everything is copied. The memory must stay allocated until ucm_region_unregister returned. */
UCM_API int ucm_region_register(struct ucm_namespace *ns, const struct ucm_region_spec *spec,
                                int timeout_ms, struct ucm_region **out);
/* Returns when the daemon has closed its mapping: only then may the memory be freed. Frees the
 * handle on success and on -UCM_EDISCONNECTED (the daemon, where it still runs, closes the mapping
 * by itself as soon as it sees that the connection is gone); on any other error the handle stays,
 * and the call can be made again. Does not connect. */
UCM_API int ucm_region_unregister(struct ucm_region *region, int timeout_ms);

/* Creates a memfd of `bytes`, seals it against shrinking and maps it: memory that a cpu region may
 * name. On success *fd and *address are the caller's, to close and munmap. */
UCM_API int ucm_shared_memory(size_t bytes, int *fd, void **address);

/* ---- rings: for companions ---- */

/* Slices of a worker's GPU memory that the daemon may move copies through, where the worker's own
 * kernels scatter and gather them. libucmclient_cuda (ucmclient_cuda.h) does all of this; what
 * follows is for who writes another companion. docs/protocol.md, "Rings", has the memory's layout
 * and its rules. */
struct ucm_ring_registration;

struct ucm_ring_spec {
    const uint8_t *gpu;   /* the 16 bytes of the GPU's UUID */
    const uint8_t *ipc;   /* the 64 bytes of a CUDA IPC handle */
    uint64_t offset;      /* of the first slice from the base of the allocation */
    uint64_t slice_bytes; /* a multiple of 4096 */
    uint32_t slices;      /* 2 to 8 */
};

/* One ring a GPU. On success *memory is the shared memory of this registration, mapped until
 * ucm_ring_free. It serves this connection only: when the connection breaks, the library marks
 * it dead. Calls under way fail only when the orders that were claimed have ended, or after 5 s;
 * a call whose timeout passes before that returns -UCM_EDEADLINE.
 * After a reconnect (ucm_generation) free it and register anew; -UCM_EBUSY as long as the daemon is
 * not done with the slices. */
UCM_API int ucm_ring_register(struct ucm_client *client, const struct ucm_ring_spec *spec,
                              int timeout_ms, struct ucm_ring_registration **out, void **memory);
/* 1: the daemon knows it, on the connection that it was made on; else 0. */
UCM_API int ucm_ring_alive(struct ucm_ring_registration *ring);
/* Returns when the daemon has closed its mapping; copies under way are awaited, so its orders must
 * be served until then. Does not connect. */
UCM_API int ucm_ring_unregister(struct ucm_ring_registration *ring, int timeout_ms);
/* Unmaps the memory. Of one that the daemon still knows, only when its slices stay allocated. NULL
 * is fine. */
UCM_API void ucm_ring_free(struct ucm_ring_registration *ring);

/* ---- lookup ---- */

struct ucm_lookup {
    const void *keys;  /* n_keys * key_bytes, the chain's head first */
    uint32_t n_keys;   /* 1 to ucm_server_info's max_keys */
    uint32_t lease_ms; /* keep what was found from being evicted for so long, 0: no lease */
    uint32_t wait_ms;  /* for the shared tier, at most; 0: as long as ucmd is configured to. Never
                          longer than half of the call's timeout. */
    uint32_t *shared;  /* not NULL: receives how many hits must be read from the shared tier, and
                          each is told as UCM_FOUND_SHARED, not UCM_FOUND_NVME */
};

enum ucm_found {
    UCM_FOUND_NOT = 0,
    UCM_FOUND_DRAM = 1,
    UCM_FOUND_NVME = 2,
    UCM_FOUND_SHARED = 3,
};

/* Counts how many blocks from the first key on are complete without a gap: *hits. *lease, when
 * asked for and something was hit, names the lease, else 0; give it to ucm_load or ucm_release.
 * in_dram, if not NULL, receives how many of the hits lie wholly in DRAM. */
UCM_API int ucm_lookup_prefix(struct ucm_namespace *ns, const struct ucm_lookup *lookup,
                              int timeout_ms, uint32_t *hits, uint32_t *in_dram, uint32_t *lease);
/* Looks at each key by itself: found[i] is an enum ucm_found. A lease covers all that were found;
 * hits may be NULL. */
UCM_API int ucm_lookup_each(struct ucm_namespace *ns, const struct ucm_lookup *lookup,
                            int timeout_ms, uint8_t *found, uint32_t *hits, uint32_t *lease);
/* Ends a lease early. One that has run out, was used by a load or is of before a reconnect is no
 * error, and neither is 0. */
UCM_API int ucm_release(struct ucm_client *client, uint32_t lease, int timeout_ms);

/* ---- tasks: load, dump, prefetch ---- */

enum ucm_block_result {
    UCM_BLOCK_IS_OK = 0,
    UCM_BLOCK_IS_MISS = 1,        /* not here, or not whole */
    UCM_BLOCK_IS_FAILED = 2,      /* its read or checksum failed: treat as a miss */
    UCM_BLOCK_IS_NO_ROOM = 3,     /* DRAM is full of blocks in use; nothing was moved */
    UCM_BLOCK_IS_EXISTS = 4,      /* dump: stored already */
    UCM_BLOCK_IS_IN_PROGRESS = 5, /* dump: another worker is storing it */
    UCM_BLOCK_IS_CANCELLED = 6,   /* not moved before the cancel or the deadline */
    UCM_BLOCK_IS_DEVICE = 7,      /* the copy failed on the device */
    UCM_BLOCK_IS_NOT_DURABLE = 8, /* dump: stored, but not known to be on stable storage as asked */
};

struct ucm_task;

struct ucm_transfer {
    const void *keys;       /* n_keys * key_bytes */
    const uint32_t *blocks; /* n_keys ids of blocks in the region; NULL for prefetch */
    uint32_t n_keys;
    uint32_t shard;       /* first layer */
    uint32_t n_shards;    /* 0: all from `shard` on */
    uint32_t priority;    /* 0 to 7, more is more urgent */
    uint32_t deadline_ms; /* the daemon gives up after so long; 0: its default */
    uint32_t lease;       /* load: released when the load is done, whatever its result; else 0 */
    const uint8_t *event; /* dump from cuda: the 64 bytes of a cudaIpcEventHandle_t that the worker
                             recorded behind its last write; else NULL */
    uint32_t part;        /* prefetch: 0 all parts, else part + 1 */
    uint32_t durability;  /* dump: enum ucm_durability_wish */
    uint32_t step;        /* load: layer-wise, the daemon tells as every so many layers have landed
                             (ucm_task_wait_layers); 0: it copies block by block and doesn't */
};

/* Each queues a request and returns at once; on success *out is owned by the caller until
 * ucm_task_free. Arguments are copied. Blocks only to connect and register again and when the
 * socket's buffer is full, at most timeout_ms. A request of which a part was sent when the timeout
 * passed cannot be taken back: that breaks the connection. */
UCM_API int ucm_load(struct ucm_region *region, const struct ucm_transfer *transfer, int timeout_ms,
                     struct ucm_task **out);
UCM_API int ucm_dump(struct ucm_region *region, const struct ucm_transfer *transfer, int timeout_ms,
                     struct ucm_task **out);
UCM_API int ucm_prefetch(struct ucm_namespace *ns, const struct ucm_transfer *transfer,
                         int timeout_ms, struct ucm_task **out);

/* What became of a task: result[i] is an enum ucm_block_result for key i. */
struct ucm_result {
    uint64_t bytes; /* moved for this task */
    uint32_t n_ok;  /* blocks with UCM_BLOCK_IS_OK or UCM_BLOCK_IS_EXISTS */
    uint32_t n_keys;
    const uint8_t *result; /* n_keys; owned by the task, valid until ucm_task_free */
};

/* Never blocks: takes in what has arrived and returns 0 with *out when the task is done,
 * -UCM_EPENDING when it is not, the request's error when it failed as a whole. The result is
 * reported once, to whichever check or wait comes first; a second ask returns -UCM_EREPORTED. */
UCM_API int ucm_task_check(struct ucm_task *task, struct ucm_result *out);
/* The same, waiting. -UCM_EDEADLINE after timeout_ms leaves the task as it was. Several threads may
 * wait for one task: one gets the result, the others -UCM_EREPORTED. A wait that, by the requests
 * before, should end within a millisecond spins around that time, for 0.16 ms at most: to be woken
 * takes as long as some MiB. */
UCM_API int ucm_task_wait(struct ucm_task *task, int timeout_ms, struct ucm_result *out);
/* Layer-wise load (`step`): waits until the first `layers` layers of those that it loads lie in all
 * blocks, or the task is done, so that work on them can begin while the rest is on its way. 0, and
 * result[i], unless NULL, is the enum ucm_block_result of key i as known by now: a block whose
 * result is not OK must not be used, and one that is OK now fails later only with the device, a
 * cancel or the deadline. The request's error when it failed as a whole; -UCM_EDEADLINE after
 * timeout_ms, which leaves the task as it was. The task's own result is still to be taken by check
 * or wait. A load without `step` lands as a whole. */
UCM_API int ucm_task_wait_layers(struct ucm_task *task, uint32_t layers, int timeout_ms,
                                 uint8_t *result);
/* Asks the daemon to stop; the task still becomes done, with what was moved until then. */
UCM_API int ucm_task_cancel(struct ucm_task *task, int timeout_ms);
/* Frees the task, done or not, never blocks; one that is under way is cancelled and its answer
 * thrown away. The daemon may still write to the region's blocks for a while, or read what a dump
 * is to store: wait before they are used for anything else. NULL is fine. */
UCM_API void ucm_task_free(struct ucm_task *task);

/* ---- keeping and dropping ---- */

/* Pinned blocks are never evicted. Each counts in *changed how many blocks changed state (may be
 * NULL). keys NULL with n_keys 0: every block of the namespace. */
UCM_API int ucm_pin(struct ucm_namespace *ns, const void *keys, uint32_t n_keys, int timeout_ms,
                    uint64_t *changed);
UCM_API int ucm_unpin(struct ucm_namespace *ns, const void *keys, uint32_t n_keys, int timeout_ms,
                      uint64_t *changed);
/* Blocks in use are left, and counted in *busy (may be NULL). */
UCM_API int ucm_evict(struct ucm_namespace *ns, const void *keys, uint32_t n_keys, int timeout_ms,
                      uint64_t *changed, uint64_t *busy);

/* ---- operators ---- */

/* Calls any method of docs/protocol.md with a params map already packed as MessagePack (NULL, 0: an
 * empty map). On success *result is the packed result, from malloc, the caller's to free. */
UCM_API int ucm_call(struct ucm_client *client, const char *method, const void *params,
                     size_t params_bytes, int timeout_ms, uint8_t **result, size_t *result_bytes);

/* ---- chained block keys ---- */

/* Keys of consecutive blocks: key[i] hashes key[i-1] and block i's tokens, so that a key stands for
 * the whole prefix. parent is the key before the first block, NULL at the start of a sequence;
 * tokens has n_blocks * block_tokens ids; out receives n_blocks keys of 32 bytes. No state, no
 * allocation that outlives the call; 0 or -UCM_EINVALID, -UCM_ENOMEMORY. docs/protocol.md, "Block
 * keys", has the formula and test vectors. */
UCM_API int ucm_keys_sha256(const uint8_t parent[32], const uint32_t *tokens, uint32_t block_tokens,
                            uint32_t n_blocks, uint8_t *out);
/* The chain of the original UCM library's vLLM connector (MD5, 16-byte keys), so that its keys can
 * be reproduced. meta is its string, "model:size:dtype:rank" (docs/protocol.md); block_tokens at
 * most 2^20. -UCM_EUNSUPPORTED where libcrypto offers no MD5. */
UCM_API int ucm_keys_md5(const char *meta, const uint8_t parent[16], const uint32_t *tokens,
                         uint32_t block_tokens, uint32_t n_blocks, uint8_t *out);

#ifdef __cplusplus
}
#endif
#endif

/* libucmclient: the interface of an inference worker to ucmd, the KV cache daemon of its host.
 *
 * A worker connects, opens the namespace of its model and registers its paged KV memory, once each.
 * From then on it says only which blocks to look up, prefetch, load or dump; the daemon moves the
 * bytes. client/examples/load_or_dump.c is a whole program.
 *
 * Structs. Zero a struct that you pass before you set its fields, by an initializer such as
 * `struct ucm_lookup l = {.keys = keys, .n_keys = n}`. Structs may gain fields at their end, of
 * which 0 leaves everything as it was.
 *
 * Threads. Any thread may call any function at any time, on one client or several. No thread may
 * use a handle (client, namespace, region, task) while a function closes it, nor after that.
 * Programs that can't promise that of a client call ucm_disconnect. No function starts a thread,
 * installs a signal handler or logs. None is async-signal-safe.
 *
 * Fork. After fork() only the parent may use its clients. In the child every call returns
 * -UCM_EINVALID. The child's copies of the connection and of the regions' descriptors close by
 * themselves, so that they keep nothing alive in the daemon.
 *
 * Errors. Functions return 0, or a positive number where they say so, or a negated enum ucm_status;
 * ucm_errmsg() returns the sentence. On failure outputs keep their values. Any call may return:
 * -UCM_EINVALID (NULL or out of bounds), -UCM_ENOMEMORY, -UCM_EDEADLINE, -UCM_ENODAEMON,
 * -UCM_EDISCONNECTED, -UCM_EPROTOCOL, and what the daemon answers.
 *
 * Timeouts. timeout_ms is in milliseconds and bounds the whole call, including a reconnect. 0 never
 * blocks: a call that needs an answer then returns -UCM_EDEADLINE. A negative value means the
 * client's default (struct ucm_options). If a call times out and its answer arrives later, the
 * library undoes a lease or registration that the answer brings.
 *
 * Ownership. The library copies all arguments, and the caller may free them when the call returns.
 * Handles belong to the caller until the function that closes them; ucm_close frees all that are
 * left of its client.
 *
 * When the daemon restarts, calls and tasks under way return -UCM_EDISCONNECTED. The next call
 * connects again within its timeout, opens every namespace and registers every region again. If its
 * timeout is too short for all of that, the call after it goes on from there. If the connection
 * breaks before the library has sent any of a request, it connects again and sends the request. The
 * call then does not fail. If the daemon refuses to register a region again, calls that name the
 * region fail with the daemon's reason, and no others. Leases end with their connection; a call
 * ignores an old one. ucm_connection_epoch() counts connections, so callers can notice.
 *
 * After a break the daemon begins no further copies from or to the worker's memory. Copies that it
 * had begun may still write to a load's blocks for some milliseconds. On a GPU they write at most
 * 48 MiB if no fragment is larger than 16 MiB. In host memory, each copy thread of the daemon may
 * write 1 MiB more, or one fragment if fragments are larger. A dump is stored only if all of it was
 * read before the break. */
#ifndef UCMCLIENT_H
#define UCMCLIENT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define UCM_API __attribute__((visibility("default")))

#define UCM_DEFAULT_SOCKET "/run/ucmd/ucmd.sock"

/* Functions return these negated. The daemon sends codes below 100 (docs/protocol.md); the library
 * adds the others. */
enum ucm_status {
    UCM_OK = 0,
    UCM_EINVALID = 1,     /* an argument is out of bounds; the message says which, and the bounds */
    UCM_EUNSUPPORTED = 2, /* the daemon lacks this protocol version, feature or method */
    UCM_EDENIED = 3,      /* this user and group may not do that */
    UCM_ENOTFOUND = 4,    /* no such namespace, region, lease or request */
    UCM_EBUSY = 5,        /* a bounded resource is used up; try again later */
    UCM_EDEADLINE = 6,    /* the deadline passed */
    UCM_ECANCELLED = 7,   /* the request was cancelled */
    UCM_EDEVICE = 8,      /* the device refused or failed */
    UCM_EIO = 9,          /* the daemon's storage failed */
    UCM_ENOMEMORY = 10,   /* memory ran out, here or in the daemon */
    UCM_ESHUTDOWN = 11,   /* the daemon is shutting down */
    UCM_EINTERNAL = 12,   /* a bug in the daemon */
    UCM_EDISCONNECTED = 100, /* the connection broke; the daemon may have done the request */
    UCM_ENODAEMON = 101,     /* no daemon listens on the socket */
    UCM_EPROTOCOL = 102,     /* the daemon's bytes violate the protocol */
    UCM_ECONSUMED = 103,     /* an earlier check or wait took the task's result */
    UCM_EPENDING = 104,      /* ucm_task_check: the task is not done yet */
};

/* The name of a status of either sign: "UCM_EBUSY" for UCM_EBUSY and -UCM_EBUSY. Static memory,
 * never NULL. */
UCM_API const char *ucm_strerror(int status);
/* The sentence of the calling thread's last failed call, or "". Valid until that thread's next call
 * into the library. */
UCM_API const char *ucm_errmsg(void);
/* The library's version, such as "0.1.0". Static memory. */
UCM_API const char *ucm_version(void);

/* ---- client ---- */

struct ucm_client;

struct ucm_options {
    const char *socket;     /* path; NULL: $UCM_SOCKET, else UCM_DEFAULT_SOCKET */
    const char *name;       /* for operators, such as "vllm-0"; NULL: the program's name */
    int default_timeout_ms; /* what a negative timeout_ms means; 0: 10000 */
};

/* Connects. While no daemon listens, or the daemon is busy, it retries until the timeout and then
 * returns -UCM_ENODAEMON or -UCM_EBUSY. A refusal ends it at once (-UCM_EDENIED,
 * -UCM_EUNSUPPORTED). options may be NULL. */
UCM_API int ucm_connect(const struct ucm_options *options, int timeout_ms, struct ucm_client **out);
/* Closes the connection and frees the client with all its namespaces, regions, tasks and rings.
 * Calls under way in other threads return -UCM_EDISCONNECTED, and ucm_close returns after them.
 * Waits up to 5 s for a copy agent's kernels. NULL is allowed. */
UCM_API void ucm_close(struct ucm_client *client);
/* Closes the connection for good and frees nothing. Calls under way in other threads return
 * -UCM_EDISCONNECTED, and so does every later call except ucm_close, which frees the client. For
 * programs in which another thread may be about to call: they call ucm_close when no thread uses a
 * handle any more. Waits as ucm_close does. NULL is allowed. */
UCM_API void ucm_disconnect(struct ucm_client *client);

/* How many connections this client has had, 1 at first. A change means that the daemon restarted or
 * the connection broke, so all earlier leases have ended. 0 in a child after fork(). */
UCM_API uint64_t ucm_connection_epoch(struct ucm_client *client);

/* A descriptor to poll. It is readable when ucm_process() has something to do, or when layers of a
 * load have landed. While a broken connection waits for a copy agent, it is readable once a
 * millisecond. Reconnects do not change it. The client owns it; only poll it. */
UCM_API int ucm_fd(struct ucm_client *client);
/* Handles what has arrived. Never blocks and never connects. Returns how many tasks became done
 * since the last ucm_process. That includes tasks that failed, and tasks whose answer another call
 * read. If the connection breaks now, its tasks fail and are counted, too. Only if there are none
 * to count does the call return -UCM_EDISCONNECTED or -UCM_EPROTOCOL. */
UCM_API int ucm_process(struct ucm_client *client);

/* Describes the daemon of the present connection, or of the last one. */
struct ucm_server_info {
    char server[64];                                /* "ucmd 0.1.0" */
    char tenant[257];                               /* the tenant that the caller belongs to */
    uint8_t instance[16];                           /* random, new at each start of the daemon */
    int admin;                                      /* 1: the caller may use operators' calls */
    uint32_t max_keys;                              /* of one request */
    uint32_t max_requests, max_regions, max_leases; /* of one connection, at a time */
    uint32_t max_lease_ms, max_timeout_ms;          /* longest that may be asked for */
};
UCM_API int ucm_server_info(struct ucm_client *client, struct ucm_server_info *out);

/* ---- namespaces ---- */

struct ucm_namespace;

/* When a dump counts as done: when its bytes are in DRAM, or when they are on stable storage and
 * survive a power failure. */
enum ucm_durability {
    UCM_DURABLE_DEFAULT = 0, /* for a dump: as its namespace; for a namespace: in DRAM */
    UCM_DURABLE_ON_NVME = 1,
    UCM_DURABLE_IN_DRAM = 2,
};

/* Names a set of interchangeable bytes. Two workers of one tenant share blocks if they agree on
 * every field up to salt_bytes, and otherwise never see each other's. Strings are UTF-8 of at most
 * 256 bytes. */
struct ucm_identity {
    const char *tenant;     /* NULL: the caller's; another one than the daemon grants is refused */
    const char *model;      /* such as "meta-llama/Llama-3.1-8B" */
    const char *revision;   /* of weights and adapters; NULL: "" */
    const char *dtype;      /* of the KV, such as "bf16", "fp8_e4m3" */
    const char *layout;     /* name and version of the order of bytes, such as "nhd/1" */
    uint32_t block_tokens;  /* tokens in a block */
    uint32_t key_bytes;     /* bytes in a key, 16 to 32 */
    uint32_t parts;         /* ranks that each hold a part of a block; 1 for MLA */
    const uint32_t *layers; /* n_layers numbers of layers */
    uint32_t n_layers;    /* 1: all parts have layers[0] layers; else `parts`: one number a part */
    uint64_t layer_bytes; /* KV bytes of one layer of one part of one block */
    const void *salt;     /* anything else that must separate caches; NULL: nothing */
    size_t salt_bytes;    /* 0 to 1024 */
    /* enum ucm_durability, for this client's dumps that have UCM_DURABLE_DEFAULT. The client's
     * latest ucm_namespace_open decides for all its handles on the namespace. */
    uint32_t durability;
};

UCM_API int ucm_namespace_open(struct ucm_client *client, const struct ucm_identity *identity,
                               int timeout_ms, struct ucm_namespace **out);
/* Frees the handle; cached blocks stay. Never blocks. Unregister its regions first. NULL is
 * allowed. */
UCM_API void ucm_namespace_close(struct ucm_namespace *ns);
/* Copies the SHA-256 over the identity and the tenant (docs/protocol.md, "Fingerprint"). */
UCM_API void ucm_namespace_fingerprint(const struct ucm_namespace *ns, uint8_t out[32]);

/* ---- encodings ---- */

/* An encoded namespace stores the blocks of its base in a smaller form. The daemon or the worker's
 * copy agent encodes them in dumps and decodes them in loads. docs/encodings.md says what each
 * encoding loses. */

/* A layer's K, or its V, in a block: tokens x heads rows of dim elements. */
struct ucm_kv_rows {
    uint32_t tokens, heads, dim;
};

struct ucm_encoded_form {
    const char *encoding; /* "fp8", "int8", "q4", "lossless" */
    const char *dtype;    /* of the KV: "f16" or "bf16"; "lossless" takes only "bf16" */
    uint32_t version;     /* of the encoding; 0: the library's */
    struct ucm_kv_rows k; /* MLA: the latent, with heads = 1 */
    struct ucm_kv_rows v; /* tokens 0: there is none (MLA) */
    uint32_t order;       /* of rows: 0: token after token; 1: head after head */
    uint32_t axis;        /* int8: 1: K has a scale for each channel of a head; 0: for each row */
    uint64_t seed;        /* q4: of its rotation */
    uint32_t run; /* int8 with axis 1: tokens that share a scale: a layer's, where k is several
                           * layers side by side; 0: all of k */
};

/* Opens the namespace of the base's blocks in that form. Use it as any other, with these rules:
 * - In its regions each plane is a layer's whole K, or its whole V, in this order, as the worker
 *   has it. offset and stride are multiples of 16 bytes.
 * - ucm_dump stores the form, ucm_dump_raw the bytes as they are, in the base.
 * - Lookups, loads and prefetches find a block in either, key by key. A block in DRAM comes before
 *   one that is not; if both are, or neither is, the encoded one comes first.
 * - Pinning and evicting concern the one namespace that is named.
 * Close the base after it. -UCM_EUNSUPPORTED: the daemon or the library does not know the encoding
 * or this version of it. The base can still be used. */
UCM_API int ucm_encoding_open(struct ucm_namespace *base, const struct ucm_encoded_form *form,
                              int timeout_ms, struct ucm_namespace **out);

struct ucm_encoding_info {
    struct ucm_encoded_form form; /* its strings live as long as the namespace */
    uint64_t raw_bytes;           /* of a block, all parts, as it is */
    uint64_t encoded_bytes;       /* and encoded */
};
/* -UCM_ENOTFOUND: ns was not opened by ucm_encoding_open. */
UCM_API int ucm_encoding_describe(const struct ucm_namespace *ns, struct ucm_encoding_info *out);

/* ---- regions ---- */

struct ucm_region;

enum ucm_memory_kind {
    UCM_MEMORY_MEMFD = 0,    /* a sealed memfd with all its pages, see ucm_shared_memory */
    UCM_MEMORY_CUDA_IPC = 1, /* from cudaIpcGetMemHandle */
    UCM_MEMORY_CUDA_FD = 2,  /* from cuMemExportToShareableHandle, for VMM memory */
};

/* Proves that the memory of a CUDA IPC handle is this process's. Handles can be guessed, so ucmd
 * accepts one only from a client that can write to its memory.
 *
 * If nonce is not NULL, save the 16 bytes at byte `offset` of the allocation. Then write the 16
 * bytes of nonce there, with this process's own CUDA context. Return 0 when they are in GPU memory.
 * Return anything else if nothing was written; the registration then fails with -UCM_EDEVICE. If
 * nonce is NULL, put the saved bytes back; the result is ignored. `offset` counts from the
 * allocation's base, as ucm_memory.offset does.
 *
 * Before ucm_region_register, wait for GPU work that writes to this memory, such as a cudaMemset:
 * it could overwrite the nonce. If the daemon does not find the nonce, the registration fails with
 * -UCM_EDENIED.
 *
 * The library picks the place: the first bytes of block 0 in the memory's lowest plane. The nonce
 * stays there for some ms, or longer if the daemon has to create its CUDA context first. Until it
 * is gone, kernels and copies must not use these bytes, and copies of other regions there may see
 * the nonce. So let block 0 be one that the engine never uses.
 *
 * When: in ucm_region_register and ucm_ring_register. After a reconnect, which registers regions
 * again, also in any other function of the client. For each call with a nonce that returned 0, the
 * library makes a call with NULL, in reverse order. It does so before this or the process's next
 * registration ends, even if the connection breaks or time runs out. The last one comes before
 * ucm_region_unregister or ucm_close returns.
 *
 * Thread: any that is in a function of the client, or a copy agent's. A process never has two such
 * calls at once. Call no function of the client here, and wait for no thread that does. Use a
 * separate stream that waits for no other (cudaStreamNonBlocking): streams of the engine may wait
 * for a load that waits for the registration. */
typedef int (*ucm_prove_cb)(void *ctx, uint64_t offset, const uint8_t *nonce);

struct ucm_memory {
    enum ucm_memory_kind kind;
    uint64_t bytes;  /* size, counted from `offset` */
    uint64_t offset; /* bytes from the start of the allocation; with CUDA_IPC often not 0 */
    int fd;          /* MEMFD, CUDA_FD: the library duplicates it */
    uint8_t ipc[64]; /* CUDA_IPC: the cudaIpcMemHandle_t, and: */
    ucm_prove_cb prove_cb;
    void *prove_ctx;
};

/* Where one layer (or its K, or its V) lies. The fragment of block b is block_bytes long and begins
 * at memory[memory] + offset + b * stride. No two fragments of a region may overlap. */
struct ucm_plane {
    uint32_t memory;      /* index into ucm_region_spec.memory */
    uint64_t offset;      /* bytes */
    uint64_t stride;      /* bytes from one block to the next; at least block_bytes */
    uint32_t block_bytes; /* KV bytes of this plane in one block */
    /* Layer, from 0. Planes are sorted by it, and the fragments of a layer add up to the
     * namespace's layer_bytes. A region may leave layers out; loads and dumps then name ranges
     * without them. */
    uint32_t layer;
};

/* Where K lies in a layer, and how the model rotates it. Loads that re-rotate K for other positions
 * (struct ucm_shift) need it. K is `rows` rows of `dim` elements, contiguous, from byte `offset` of
 * the layer on, and lies in one plane. In each row, elements [first, first + rotary) are rotated. A
 * row is a token of a KV head. With MLA it is a token, with the latent before the rotary part.
 * Where K and V of a token and head lie side by side, a row has both. With `run` above 1 a row has
 * `run` tokens of a head: `dim` times `run` elements, those of one channel side by side.
 * docs/design/blend.md defines the arithmetic and says what the kinds of scaling are. */
struct ucm_rope {
    uint32_t offset, rows, dim, first, rotary;
    uint32_t interleaved; /* not 0: pairs are neighbours; 0: the halves of the rotary part (neox) */
    const char *dtype;    /* "f32", "f16", "bf16" or "fp8_e4m3" */
    const char *scaling;  /* NULL or "default", "linear", "dynamic", "yarn" or "llama3" */
    double base;          /* rope_theta */
    double factor;        /* all but default */
    uint32_t trained;     /* dynamic, yarn, llama3: original_max_position_embeddings, in tokens */
    uint32_t whole;       /* yarn: "truncate"; 1 where a model says nothing */
    double fast, slow;    /* yarn: beta_fast, beta_slow (32, 1 where a model says nothing); llama3:
                             high_freq_factor, low_freq_factor */
    uint32_t run;         /* 0 and 1: a row is one token; more: for regions with device "cpu" */
};

struct ucm_region_spec {
    uint32_t part;      /* which part of each block this worker holds, from 0 */
    uint32_t blocks;    /* how many blocks the memory holds; block ids are below this */
    const char *device; /* "cpu" or "cuda" */
    const uint8_t *gpu; /* cuda: the 16 bytes of the GPU's UUID; cpu: NULL */
    const struct ucm_memory *memory;
    uint32_t n_memory; /* 1 to 256, at most 64 of them with a descriptor */
    const struct ucm_plane *planes;
    uint32_t n_planes;    /* 1 to 2048 */
    uint32_t ring_region; /* its number in orders on the staging ring; 0: none */
    /* Not 0: a GPU block pool, for ucm_gather alone. Each of its blocks is an entry for one layer
     * of any block. `planes` describe one layer, as layer 0. */
    uint32_t block_pool;
    const struct ucm_rope *rope; /* NULL: loads re-rotate nothing */
};

/* The memory must stay allocated until ucm_region_unregister has returned 0 or
 * -UCM_EDISCONNECTED. */
UCM_API int ucm_region_register(struct ucm_namespace *ns, const struct ucm_region_spec *spec,
                                int timeout_ms, struct ucm_region **out);
/* Returns 0 when the daemon has closed its mapping of the memory. After -UCM_EDISCONNECTED the
 * daemon closes it by itself. In both cases the handle is freed and the caller may free the memory.
 * On any other error the handle stays; call again. Never connects. */
UCM_API int ucm_region_unregister(struct ucm_region *region, int timeout_ms);
/* From now on the region's loads and dumps tell the daemon whether the worker's GPU computes
 * meanwhile (0: it does not; the default). If it does, they give way to the worker's own small
 * copies, and take at most copy.busy_max_percent percent of the bus. An engine can call this in
 * every step, since it stores a word and sends nothing. Any thread. */
UCM_API void ucm_region_gpu_busy(struct ucm_region *region, int busy);

/* Creates a memfd of `bytes` (at least 1), seals its size, maps it and allocates all its pages:
 * memory for a region with device "cpu". The daemon registers no memory that lacks a page. The
 * caller closes *fd and unmaps *address. */
UCM_API int ucm_shared_memory(size_t bytes, int *fd, void **address);

/* ---- staging rings: for copy agents ---- */

/* A staging ring is a set of entries of a worker's GPU memory. The daemon copies whole entries over
 * the bus, and kernels of the worker scatter and gather them. libucmclient_cuda (ucmclient_cuda.h)
 * does all of this; the calls below are for authors of another copy agent.
 * docs/design/mappings.md, "Staging rings", has the shared memory and its rules. */
struct ucm_ring_registration;

struct ucm_ring_spec {
    const uint8_t *gpu;   /* the 16 bytes of the GPU's UUID */
    const uint8_t *ipc;   /* the 64 bytes of a CUDA IPC handle of the entries' allocation */
    uint64_t offset;      /* bytes from the base of the allocation to the first entry */
    uint64_t entry_bytes; /* 65536 to 67108864 (64 KiB to 64 MiB), a multiple of 4096 */
    uint32_t entries;     /* 2 to 8 */
    ucm_prove_cb prove_cb;
    void *prove_ctx;
};

/* Registers the one ring of this client on that GPU. *memory receives the address of the shared
 * memory, which stays mapped until ucm_ring_free. -UCM_EBUSY: the daemon still uses these entries.
 *
 * A ring serves one connection. When that breaks, the library marks the ring dead. Calls under way
 * then fail when the orders that were claimed have ended, but after 5 s at the latest. A call whose
 * timeout passes before that returns -UCM_EDEADLINE. After a reconnect (ucm_connection_epoch) free
 * the ring and register a new one. */
UCM_API int ucm_ring_register(struct ucm_client *client, const struct ucm_ring_spec *spec,
                              int timeout_ms, struct ucm_ring_registration **out, void **memory);
/* 1 while the daemon knows the ring, which ends with its connection; else 0. */
UCM_API int ucm_ring_alive(struct ucm_ring_registration *ring);
/* Returns 0 when the daemon has closed its mapping. The daemon completes its copies first, so serve
 * its orders until this returns. Never connects. */
UCM_API int ucm_ring_unregister(struct ucm_ring_registration *ring, int timeout_ms);
/* Unmaps the shared memory and frees the handle. If the daemon still knows the ring, the entries
 * must stay allocated. NULL is allowed. */
UCM_API void ucm_ring_free(struct ucm_ring_registration *ring);

/* ---- whose request ---- */

/* The id under which the engine knows the request that the calling thread works for, such as
 * "cmpl-7f3a-0". Until the next call, this thread's lookups, loads, dumps and prefetches carry it,
 * on every client, and `ucmctl trace` shows them under it. It changes nothing else. The library
 * copies at most the first 64 bytes, in whole characters. NULL and "": none. -UCM_EINVALID: no
 * UTF-8, or control characters; then there is none. */
UCM_API int ucm_set_request_id(const char *id);

/* ---- lookup ---- */

struct ucm_lookup {
    const void *keys; /* n_keys * key_bytes, in the order of the sequence */
    uint32_t n_keys;  /* 1 to ucm_server_info.max_keys */
    /* How long a lease protects the blocks that are found from eviction; 0: no lease. */
    uint32_t lease_ms;
    /* Longest wait for the shared tier; 0: the daemon's setting (shared.lookup_timeout). Never more
     * than half of timeout_ms. With UCM_WAIT_MODE_LATER: how long the daemon asks it, at most; 0:
     * shared.timeout. */
    uint32_t wait_ms;
    /* If not NULL, receives how many hits must be read from the shared tier. found[i] of these is
     * then UCM_FOUND_SHARED instead of UCM_FOUND_NVME. */
    uint32_t *shared;
    uint32_t wait_mode; /* enum ucm_wait_mode */
    /* If not NULL, receives 1 if the shared tier is being asked (UCM_WAIT_MODE_LATER), else 0. */
    uint32_t *pending;
};

/* What a lookup does where the shared tier may have what this host lacks. */
enum ucm_wait_mode {
    UCM_WAIT_MODE_WAIT = 0, /* waits for wait_ms */
    /* Answers at once with what this host has. *pending 1: the daemon is asking the shared tier,
     * and takes no lease and counts no lookup yet. Repeat the lookup later on this client: it then
     * finds what the shared tier has, too. */
    UCM_WAIT_MODE_LATER = 1,
    UCM_WAIT_MODE_HERE = 2, /* answers at once with what this host has, and asks nobody */
};

/* Where a lookup found a block. */
enum ucm_found {
    UCM_FOUND_NOT = 0,
    UCM_FOUND_DRAM = 1,
    UCM_FOUND_NVME = 2,
    UCM_FOUND_SHARED = 3,
};

/* *hits receives how many blocks from the first key on are cached without a gap. *in_dram (may be
 * NULL) receives how many of these lie wholly in DRAM. *lease (may be NULL without lease_ms)
 * receives the lease, 0 if there is none; give it to ucm_load or ucm_release. */
UCM_API int ucm_lookup_prefix(struct ucm_namespace *ns, const struct ucm_lookup *lookup,
                              int timeout_ms, uint32_t *hits, uint32_t *in_dram, uint32_t *lease);
/* Looks at each key by itself: found[i], one of n_keys bytes, receives an enum ucm_found. *hits
 * (may be NULL) receives how many were found. The lease covers all of them. */
UCM_API int ucm_lookup_per_key(struct ucm_namespace *ns, const struct ucm_lookup *lookup,
                               int timeout_ms, uint8_t *found, uint32_t *hits, uint32_t *lease);
/* Ends a lease early. Neither 0 nor a lease that has ended already is an error. */
UCM_API int ucm_release(struct ucm_client *client, uint32_t lease, int timeout_ms);
/* The same without waiting: the lease ends when the daemon reads the request. If the socket is
 * full, the library sends the request in a later call. Never connects. */
UCM_API int ucm_release_soon(struct ucm_client *client, uint32_t lease);

/* ---- lookup tables: lookups without asking ---- */

/* The daemon shares a table of each namespace's complete blocks, and keeps it up to date. A process
 * looks up one key there in some 100 ns, or many keys in some 10 ns each, however busy the daemon
 * is. The table is advisory: such a lookup takes no lease, so the daemon may evict the block at any
 * moment. So look the found keys up again with a lease, and load the blocks that are leased. Those
 * that are not leased are misses. */

/* Gets the namespace's table from the daemon and maps it. If a usable table is mapped already, it
 * returns at once. Call it once before ucm_lookup_table_read, and again each time that returns
 * UCM_LOOKUP_TABLE_NONE. The daemon may need some milliseconds to fill a table; until then reads
 * return UCM_LOOKUP_TABLE_NONE. -UCM_EUNSUPPORTED: the namespace holds summaries. */
UCM_API int ucm_lookup_table_open(struct ucm_namespace *ns, int timeout_ms);

struct ucm_lookup_table_hits {
    uint32_t hits; /* keys that were found; without `found`, from the first key on without a gap */
    uint32_t in_dram, on_shared; /* of these: wholly in DRAM, and to be read from the shared tier */
    /* Not 0: the table had every block that this host could find. A miss is then a miss for
     * ucm_lookup_prefix, too, except in the shared tier. */
    uint32_t complete;
    uint32_t shared_tier; /* not 0: there is one */
};

#define UCM_LOOKUP_TABLE_NONE 1

/* Looks n_keys keys up in the table. found: NULL, or n_keys bytes that receive an enum ucm_found
 * for each key. Never asks the daemon, never waits, takes no lease. Any thread; the namespace must
 * stay open meanwhile. 0: *out is filled. UCM_LOOKUP_TABLE_NONE: there is no table to rely on; use
 * ucm_lookup_prefix or ucm_lookup_per_key. Either none was opened, or it is being filled, or it was
 * replaced. Or the connection broke, or the daemon has given no sign of life for 5 s. */
UCM_API int ucm_lookup_table_read(struct ucm_namespace *ns, const void *keys, uint32_t n_keys,
                                  uint8_t *found, struct ucm_lookup_table_hits *out);
/* Tells the daemon of a lookup that the table answered. The daemon then counts the keys in its
 * metrics, and counts the blocks that it has as used, for eviction. Sends a lookup and does not
 * wait for the answer. timeout_ms bounds the sending. -UCM_EBUSY: the daemon has not answered 256
 * such lookups yet, and this one was not sent. */
UCM_API int ucm_lookup_note(struct ucm_namespace *ns, const void *keys, uint32_t n_keys,
                            int timeout_ms);

/* Metadata of consecutive blocks of one sequence, for routers that follow the daemon's events
 * (docs/events.md). It reveals the text of prompts. keys: n_keys packed keys; tokens: block_tokens
 * ids for each. parent: the key before the first, or NULL. lora: the adapter's name, or NULL. */
struct ucm_block_metadata {
    const void *keys;
    uint32_t n_keys;
    const uint32_t *tokens;
    const void *parent;
    const char *lora;
};

/* Sends block metadata, of blocks stored already or later. -UCM_EUNSUPPORTED: this daemon keeps no
 * events. */
UCM_API int ucm_block_metadata(struct ucm_namespace *ns, const struct ucm_block_metadata *d,
                               int timeout_ms);

/* ---- tasks: load, gather, dump, prefetch ---- */

/* What became of one block. */
enum ucm_block_result {
    UCM_BLOCK_IS_OK = 0,
    /* Load, prefetch, gather: not cached, not complete, or the shared tier did not answer in
     * time. */
    UCM_BLOCK_IS_MISS = 1,
    UCM_BLOCK_IS_FAILED = 2, /* reading it failed, or its checksum differs: treat as a miss */
    /* Not moved. DRAM is full of blocks in use, or an encryption key is still being read. Or the
     * prefetch has read half of the daemon's DRAM, or an operator bypasses stores. */
    UCM_BLOCK_IS_NO_ROOM = 3,
    UCM_BLOCK_IS_EXISTS = 4, /* dump: it was stored before */
    /* Dump: nothing was copied. Another connection stores this part, one of these layers was dumped
     * before, or the block was evicted and is still in use. */
    UCM_BLOCK_IS_IN_PROGRESS = 5,
    UCM_BLOCK_IS_CANCELLED = 6,   /* a cancel or the deadline came before it was moved */
    UCM_BLOCK_IS_DEVICE = 7,      /* the copy failed on the device */
    UCM_BLOCK_IS_NOT_DURABLE = 8, /* dump: stored, but not on stable storage in time */
    UCM_BLOCK_IS_UNFIT = 9,       /* dump: the encoding can't hold these bytes; use ucm_dump_raw */
};

struct ucm_task;

/* A run of consecutive blocks whose K is re-rotated. `keys` is how many blocks it has. The run's
 * first token was at old_position when K was computed, and is at new_position now. Dynamic scaling
 * computed its frequencies for old_length then, and for new_length now. With other kinds of scaling
 * both are 0. */
struct ucm_shift {
    uint32_t keys;
    uint32_t old_position, new_position;
    uint32_t old_length, new_length;
};
enum { UCM_SHIFTS_MAX = 512 };

struct ucm_transfer {
    const void *keys; /* n_keys * key_bytes */
    /* n_keys block ids of the region, one for each key; a load names each at most once. Prefetch:
     * NULL. */
    const uint32_t *blocks;
    uint32_t n_keys;            /* 1 to ucm_server_info.max_keys */
    uint32_t layer;             /* first layer to load or dump */
    uint32_t n_layers;          /* how many layers; 0: all from `layer` on */
    uint32_t priority;          /* 0 to 7; larger goes first */
    uint32_t daemon_timeout_ms; /* the daemon gives up after so long; 0: its default */
    uint32_t lease;             /* load: ends with the load, done or refused; 0: none */
    /* Dump from "cuda": the 64 bytes of a cudaIpcEventHandle_t that the worker recorded after its
     * last write to the blocks. Else NULL. The daemon opens it only from a process of its own user,
     * pid namespace and /dev/shm; otherwise the blocks are UCM_BLOCK_IS_DEVICE. */
    const uint8_t *cuda_event;
    uint32_t part;       /* prefetch: the first part, from 0 */
    uint32_t n_parts;    /* prefetch: how many; one part: n_parts = 1; 0: all from `part` on */
    uint32_t durability; /* dump: enum ucm_durability */
    /* Load: not 0: copy layer by layer and report every `progress_interval` layers, for
     * ucm_task_wait_layers; 0: copy block by block, without reports. */
    uint32_t progress_interval;
    /* Load, of a region with `rope`: runs that together have n_keys keys, in the order of `keys`,
     * by new position and without overlap. NULL: K stays as it was stored. */
    const struct ucm_shift *shifts;
    uint32_t n_shifts; /* at most UCM_SHIFTS_MAX */
};

/* Each sends a request and returns without waiting for the answer; *out receives a task, for
 * ucm_task_free. A call blocks only to connect and register again, and while the socket is full. If
 * the timeout passes when part of the request was sent, the library breaks the connection and
 * returns -UCM_EDISCONNECTED. */
UCM_API int ucm_load(struct ucm_region *region, const struct ucm_transfer *transfer, int timeout_ms,
                     struct ucm_task **out);
/* ucm_lookup_prefix, its lease and ucm_load in one request, for callers that need no answer in
 * between. Loads the blocks that are cached from the first key on without a gap; the other keys'
 * results are UCM_BLOCK_IS_MISS. transfer->lease must be 0. wait_ms: as in struct ucm_lookup. */
UCM_API int ucm_load_prefix(struct ucm_region *region, const struct ucm_transfer *transfer,
                            uint32_t wait_ms, int timeout_ms, struct ucm_task **out);
UCM_API int ucm_dump(struct ucm_region *region, const struct ucm_transfer *transfer, int timeout_ms,
                     struct ucm_task **out);
/* As ucm_dump. In a region of an encoded namespace, stores the blocks in the base, as they are. */
UCM_API int ucm_dump_raw(struct ucm_region *region, const struct ucm_transfer *transfer,
                         int timeout_ms, struct ucm_task **out);
UCM_API int ucm_prefetch(struct ucm_namespace *ns, const struct ucm_transfer *transfer,
                         int timeout_ms, struct ucm_task **out);

struct ucm_sequence; /* ucmclient_sparse.h */

struct ucm_gather_item {
    uint32_t block; /* its place in the sequence, or in keys */
    uint32_t layer; /* layer */
    uint32_t entry; /* of the pool; no two items may have one */
};
enum { UCM_GATHER_ITEMS_MAX = 65536 };
struct ucm_gather_spec {
    struct ucm_sequence *sequence; /* of the pool's namespace and part; NULL: keys */
    const void *keys;              /* n_keys * key_bytes */
    uint32_t n_keys;
    const struct ucm_gather_item *items;
    /* 1 to UCM_GATHER_ITEMS_MAX, of as many different blocks as a load may have */
    uint32_t n_items;
    uint32_t priority;          /* 0 to 7; 7 for what a decode step waits for */
    uint32_t daemon_timeout_ms; /* as in ucm_transfer */
};

/* Copies single layers of blocks into entries of a block pool, as ucm_load copies blocks; results
 * are by item. The library sends all items of a call in one request, which makes many small copies
 * cheap. So make one call, by keys, for all that the sequences of a batch miss. If the daemon does
 * not know the sequence any more, the library opens it again first. -UCM_ENOTFOUND from the task:
 * as for ucm_sequence_prefetch. */
UCM_API int ucm_gather(struct ucm_region *pool, const struct ucm_gather_spec *gather,
                       int timeout_ms, struct ucm_task **out);

struct ucm_result {
    uint64_t bytes; /* moved for this task */
    uint32_t n_ok;  /* blocks with UCM_BLOCK_IS_OK or UCM_BLOCK_IS_EXISTS; of a gather, items */
    uint32_t n_keys;
    const uint8_t *result; /* n_keys of enum ucm_block_result; valid until ucm_task_free */
};

/* Handles what has arrived, without blocking. 0 with *out: the task is done. -UCM_EPENDING: it is
 * not. Another error: the whole request failed. The library reports a result once, to the first
 * check or wait. A later one returns -UCM_ECONSUMED. */
UCM_API int ucm_task_check(struct ucm_task *task, struct ucm_result *out);
/* The same, but waits until the task is done. -UCM_EDEADLINE after timeout_ms leaves the task as it
 * was. If several threads wait for one task, one gets the result and the others -UCM_ECONSUMED. If
 * earlier requests suggest an end within a millisecond, the wait spins around that time for at most
 * 0.16 ms. Waking a thread would take as long as moving some MiB. */
UCM_API int ucm_task_wait(struct ucm_task *task, int timeout_ms, struct ucm_result *out);
/* For a load with `progress_interval`: waits until the first `layers` of its layers have landed in
 * all blocks, or the task is done. So the worker can use them while the rest is on its way. On 0,
 * result (n_keys bytes, may be NULL) receives each block's enum ucm_block_result so far. Never use
 * a block that is not OK. One that is OK can fail later only by its device, a cancel or the
 * deadline. Errors are those of ucm_task_wait, which still has to take the task's result. A load
 * without `progress_interval` lands as a whole. */
UCM_API int ucm_task_wait_layers(struct ucm_task *task, uint32_t layers, int timeout_ms,
                                 uint8_t *result);
/* Asks the daemon to stop the task. The task then becomes done, with what was moved until then. */
UCM_API int ucm_task_cancel(struct ucm_task *task, int timeout_ms);
/* Frees the task. Never blocks. If the task is not done, the library cancels it and drops its
 * answer. For a while the daemon may still write to a load's blocks, or read a dump's. If you need
 * these blocks for anything else, wait for the task instead. NULL is allowed. */
UCM_API void ucm_task_free(struct ucm_task *task);

/* ---- keeping and dropping ---- */

/* Pinned blocks are never evicted. For operators only (struct ucm_server_info.admin); others get
 * -UCM_EDENIED. keys: n_keys * key_bytes; NULL and 0: every block of the namespace. *changed (may
 * be NULL) receives how many blocks changed. */
UCM_API int ucm_pin(struct ucm_namespace *ns, const void *keys, uint32_t n_keys, int timeout_ms,
                    uint64_t *changed);
UCM_API int ucm_unpin(struct ucm_namespace *ns, const void *keys, uint32_t n_keys, int timeout_ms,
                      uint64_t *changed);
/* Drops blocks from all tiers, the shared tier of all hosts included. keys as above. Pinned blocks
 * stay. Lookups no longer find blocks that are leased, or being read or written; these go with
 * their last lease or reference. Returns when the files on shared roots are gone; -UCM_EIO: some
 * may be left there. *changed receives how many blocks were dropped at once, *busy how many are
 * pinned, leased, or being read or written; both may be NULL. */
UCM_API int ucm_evict(struct ucm_namespace *ns, const void *keys, uint32_t n_keys, int timeout_ms,
                      uint64_t *changed, uint64_t *busy);

/* ---- operators ---- */

/* Calls any method of docs/methods.md. params: a map packed as MessagePack; NULL and 0: an empty
 * map. *result receives the packed result, for the caller to free(). */
UCM_API int ucm_call(struct ucm_client *client, const char *method, const void *params,
                     size_t params_bytes, int timeout_ms, uint8_t **result, size_t *result_bytes);

/* ---- chained block keys ---- */

/* Computes the keys of consecutive blocks. Key i hashes key i - 1 and the tokens of block i, so a
 * key identifies the whole prefix. parent: the key before the first block, NULL at the start of a
 * sequence. tokens: n_blocks * block_tokens ids. out: space for n_blocks keys of 32 bytes.
 * docs/protocol.md, "Block keys", has the formula and test vectors. Needs no client.
 * -UCM_EUNSUPPORTED: this machine's libcrypto refuses the hash; the message has its reason. */
UCM_API int ucm_keys_sha256(const uint8_t parent[32], const uint32_t *tokens, uint32_t block_tokens,
                            uint32_t n_blocks, uint8_t *out);
/* The same for the keys of the original UCM library's vLLM connector: MD5, 16 bytes each. meta is
 * its string "model:size:dtype:rank" (docs/protocol.md); block_tokens is at most 2^20. */
UCM_API int ucm_keys_md5(const char *meta, const uint8_t parent[16], const uint32_t *tokens,
                         uint32_t block_tokens, uint32_t n_blocks, uint8_t *out);

#ifdef __cplusplus
}
#endif
#endif

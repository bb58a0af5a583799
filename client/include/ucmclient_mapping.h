/* libucmclient: shared mappings, for workers whose own code reads blocks in the daemon's memory.
 * ucmclient_sparse.h, which includes this, has the sequences whose blocks are referenced. Threads,
 * fork, errors and timeouts are as in ucmclient.h. */
#ifndef UCMCLIENT_MAPPING_H
#define UCMCLIENT_MAPPING_H

#include <ucmclient.h>

#ifdef __cplusplus
extern "C" {
#endif

struct ucm_sequence; /* ucmclient_sparse.h */

/* A shared mapping is memory of the daemon in which the worker's own code reads blocks without
 * asking the daemon. That code is a GPU kernel, or ucm_mapping_read on the CPU. The daemon brings
 * blocks of sequences there when they are *referenced*, and says where each lies: its *place*. The
 * mapping is mapped read-only, in slabs, and holds only blocks of the client's own tenant. The
 * daemon may reuse a place at any time. So a reader compares the place's sequence number before and
 * after its copy, and throws the copy away if the number changed. A read therefore gives the
 * block's bytes or a *miss*, never other bytes.
 *
 * The daemon also asks for memory back, and ends the connection of a client that keeps it for 5
 * seconds. The library has no thread. It gives memory back in any call that reads from the
 * connection. A client that may make no such call for 5 seconds watches ucm_fd, and calls
 * ucm_process when that is readable.
 *
 * Threads: as for every object of the client. ucm_mapping_read waits for no other call of the
 * library, except one that maps or unmaps. Close a mapping only when no thread reads from it. */
struct ucm_mapping;

enum {
    /* The worker reads by address (ucm_mapping_address), as a kernel does. Then the library unmaps
     * nothing by itself. Without this, read by ucm_mapping_read. */
    UCM_MAPPING_ADDRESSES = 1,
};

/* Opens the shared mapping of that part of each block of a namespace. The namespace is from
 * ucm_namespace_open, and must stay open as long as the mapping is used. A client can open one
 * mapping for each part of a namespace. -UCM_EUNSUPPORTED: the daemon has none, or the namespace is
 * encoded.
 *
 * When the connection breaks, all places read as misses, and the daemon drops all references. The
 * next ucm_mapping_ref opens the mapping again. */
UCM_API int ucm_mapping_open(struct ucm_namespace *ns, uint32_t part, uint32_t flags,
                             int timeout_ms, struct ucm_mapping **out);
/* Ends its references, unmaps everything and frees the mapping. No thread or kernel may still read
 * from it. Never blocks on the daemon. NULL is allowed. */
UCM_API void ucm_mapping_close(struct ucm_mapping *mapping);

#define UCM_PLACE_NONE UINT32_MAX

/* Where a block lies. Copy it freely; it means something to this mapping only. */
struct ucm_place {
    uint32_t slab; /* UCM_PLACE_NONE: not in the mapping */
    uint32_t slot;
    uint64_t seq;
    uint64_t opened; /* in which opening of the mapping it is valid, see ucm_mapping_info */
};

struct ucm_mapping_ref {
    struct ucm_sequence *sequence;
    uint32_t first, n;          /* blocks of the sequence */
    uint32_t priority;          /* of reading them, 0 to 7 */
    uint32_t daemon_timeout_ms; /* for bringing them; 0: the timeout */
    struct ucm_place *places;   /* receives n */
};
struct ucm_mapping_referenced {
    uint32_t placed; /* of the blocks; the others have UCM_PLACE_NONE */
    uint32_t moved;  /* copied within DRAM for this call */
    uint32_t read;   /* read from NVMe or the shared tier for this call */
    uint32_t
        missing; /* not cached any more. Others without a place found no space, or did not come in
                  * time */
};
/* Brings blocks into the mapping and keeps them there until ucm_mapping_unref, or until the
 * sequence or the mapping is closed. A block that is already referenced only reports its place. A
 * block that is unavailable is not an error. The daemon ends references by itself when a block is
 * evicted by name, and when it needs the memory for another tenant. result may be NULL.
 * -UCM_EDISCONNECTED: the connection broke meanwhile, and all places are invalid; take references
 * again. If a call fails otherwise, its places are undefined, and its references may or may not
 * exist: call again, or end them. */
UCM_API int ucm_mapping_ref(struct ucm_mapping *mapping, const struct ucm_mapping_ref *ref,
                            int timeout_ms, struct ucm_mapping_referenced *result);
/* Ends references. It skips blocks of the range that are not referenced. Reads at the places may
 * still succeed for a while. */
UCM_API int ucm_mapping_unref(struct ucm_mapping *mapping, struct ucm_sequence *sequence,
                              uint32_t first, uint32_t n, int timeout_ms);

#define UCM_MAPPING_MISS 1

/* Copies bytes [offset, offset + bytes) of the block at that place. 0: *out has them.
 * UCM_MAPPING_MISS: they are not there any more, and *out may have any bytes. -UCM_EINVALID: they
 * lie beyond the block. Any number of threads may read at once. */
UCM_API int ucm_mapping_read(struct ucm_mapping *mapping, const struct ucm_place *place,
                             uint64_t offset, uint64_t bytes, void *out);

/* For UCM_MAPPING_ADDRESSES. Where the block's bytes lie, and where its sequence number of 64 bits
 * lies. Load the number with acquire order in system scope, and compare it with place->seq. Do so
 * before the copy, and again after the copy and a fence. UCM_MAPPING_MISS: the place is not valid
 * any more. Both addresses stay mapped until ucm_mapping_release of their ranges. */
UCM_API int ucm_mapping_address(struct ucm_mapping *mapping, const struct ucm_place *place,
                                const void **address, const uint64_t **seq);

/* What the mapping maps: slabs, and the table of sequence numbers. */
struct ucm_mapped_range {
    const void *address;
    uint64_t bytes;
    uint32_t slab;   /* UCM_PLACE_NONE: the table */
    uint32_t wanted; /* not 0: the daemon wants it back: release it */
    uint64_t
        /* of which opening of the mapping it is; release all ranges of an earlier one */
        opened;
};
/* For UCM_MAPPING_ADDRESSES. Lists up to `room` ranges; *n receives how many there are. Call it
 * after each reference, to register new ranges with the GPU. Call it between steps, too. When a
 * range is wanted, stop the kernels that read it, take it from the GPU, and call
 * ucm_mapping_release. The daemon ends the connection of a client that does not do so within 5
 * seconds, since others wait for that memory. ucm_fd is readable when the daemon has asked;
 * ucm_process then reads its message. */
UCM_API int ucm_mapping_ranges(struct ucm_mapping *mapping, struct ucm_mapped_range *out,
                               uint32_t room, uint32_t *n);
/* Unmaps the range at that address. No kernel may still read from it. It may wait for another
 * thread's reference. -UCM_ENOTFOUND: there is none. -UCM_EINVALID: the table of the present
 * opening stays mapped. */
UCM_API int ucm_mapping_release(struct ucm_mapping *mapping, const void *address);

struct ucm_mapping_info {
    uint64_t opened;     /* counts how often the mapping was opened; 0: it is not open now */
    uint64_t slab_bytes; /* of each slab */
    uint64_t slot_bytes; /* bytes from one slot to the next */
    uint64_t part_bytes; /* of a slot: bytes of the block */
    uint32_t slabs;      /* numbers of slabs are below this */
    uint32_t mapped;     /* slabs that are mapped now */
    uint64_t budget;     /* the daemon's mapping.size when it was opened, for all tenants */
};
UCM_API int ucm_mapping_info(struct ucm_mapping *mapping, struct ucm_mapping_info *out);

#ifdef __cplusplus
}
#endif
#endif

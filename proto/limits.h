/* Hard bounds of the wire, the same for every daemon of this version. */
#ifndef UCM_PROTO_LIMITS_H
#define UCM_PROTO_LIMITS_H

#define UCM_PROTOCOL_VERSION 1
#define UCM_PROTOCOL_VERSION_MIN 1

#define UCM_TENANTS_OTHER "other"      /* in metrics: all tenants without a label of their own */
#define UCM_MAX_FRAME_BYTES (1u << 20) /* body of a frame, without its 4-byte length */
#define UCM_MAX_DEPTH 8                /* nesting of MessagePack containers */
#define UCM_MAX_ELEMENTS 65536         /* MessagePack values in one frame, containers included */
#define UCM_MAX_FRAME_FDS 64           /* descriptors that travel with one frame */

#define UCM_MIN_KEY_BYTES 16
#define UCM_MAX_KEY_BYTES 32
#define UCM_MAX_KEYS 16384 /* keys of one request */
#define UCM_MAX_GATHER_ITEMS 65536
#define UCM_MAX_METADATA_KEYS 1024 /* keys of one events.metadata */
#define UCM_GATHER_ITEM_BYTES 12

#define UCM_MAX_SHIFTS 512  /* runs of blocks that one load re-rotates */
#define UCM_SHIFT_NUMBERS 5 /* of each */
#define UCM_ROPE_NUMBERS 6  /* that say where K lies in a layer; the last may be left out */

#define UCM_MAX_SETTINGS_BYTES 512 /* of tenant.set */
#define UCM_MAX_NAME_BYTES 256     /* model, revision, dtype, layout, client, tenant */
#define UCM_MAX_REQUEST_BYTES 64   /* the engine's id of a request */
#define UCM_MAX_SALT_BYTES 1024
#define UCM_MAX_PARTS 256
#define UCM_MAX_LAYERS 1024       /* layers of one part: the length of a part's layer bitmap */
#define UCM_MAX_PLANES 2048       /* planes of one region */
#define UCM_MAX_HANDLES 256       /* memory handles of one region */
#define UCM_MAX_HANDLE_BYTES 64   /* cudaIpcMemHandle_t, cudaIpcEventHandle_t */
#define UCM_NONCE_BYTES 16        /* of region.challenge */
#define UCM_MAX_STAGING_ENTRIES 8 /* of a staging ring */
#define UCM_MAX_ROOTS 8           /* of the shared tier */
#define UCM_MAX_KV_HEADS 1024     /* of a layer's KV in a part */
#define UCM_MAX_HEAD_DIM 1024     /* channels of a head */
#define UCM_MAX_Q_HEADS 4096      /* query heads of a row of a selection */
#define UCM_MAX_Q_ROWS 64         /* queries of a row of a selection */
#define UCM_MAX_SELECT_ROWS 4096  /* layers of sequences that one selection asks for */
#define UCM_MAX_QUERY_BYTES (UCM_MAX_FRAME_BYTES - 4096) /* of all rows */
#define UCM_MAX_SEQUENCE_BLOCKS (1u << 20)
#define UCM_MAX_MAPPING_SLABS (1u << 20)
#define UCM_MAX_REVOKED 4096 /* slabs that one release or revocation names */
#define UCM_PLACE_BYTES 16   /* struct ucm_wire_place */
#define UCM_UUID_BYTES 16    /* a GPU's UUID, as cuDeviceGetUuid gives it */
#define UCM_FINGERPRINT_BYTES 32

#endif

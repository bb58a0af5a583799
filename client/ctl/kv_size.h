/* How many bytes the KV cache of a model takes, from its Hugging Face config.json, and what the daemon
 * makes of them: blocks, parts, slots in DRAM, records on NVMe, index.
 *
 * Promise: a config that leaves out what cannot be known is refused with a sentence. Sizes are of what
 * ucmd stores: every token in every layer that has KV, also where a window slides over it, and copies
 * that several ranks hold alike once. Pure functions, any thread. */
#ifndef UCM_CTL_KV_SIZE_H
#define UCM_CTL_KV_SIZE_H

#include <cjson/cJSON.h>
#include <stdint.h>

#define KV_WHY_BYTES 200

struct kv_model {
    char type[64];             /* "llama"; "" where the config does not say */
    uint32_t layers;           /* with KV; those with recurrent state only are not counted */
    uint32_t recurrent_layers; /* these */
    uint32_t sliding_layers;   /* of `layers`: attend to `window` tokens */
    uint32_t window;           /* tokens; 0: none slides */
    uint32_t heads;            /* KV heads; 1 for MLA */
    uint32_t k_dim, v_dim;     /* values of one head and token; MLA: the latent and 0 */
    uint32_t index_bytes;      /* of a sparse indexer's key, a layer and token; 0: none */
    uint32_t value_bits;       /* as the config says; --kv-dtype goes over it */
    char dtype[24];            /* "bfloat16" */
    uint32_t max_tokens;       /* max_position_embeddings; 0: not said */
    int mla;                   /* one latent for all heads, the same on every rank of a TP group */
};

/* 0; or -EINVAL with a sentence that names the field. */
int kv_model_read(const cJSON *config, struct kv_model *out, char why[KV_WHY_BYTES]);

struct kv_shape {
    uint32_t tp, pp, block_tokens, value_bits; /* value_bits 0: the model's */
};

struct kv_sizes {
    uint64_t token_bytes;      /* all parts */
    uint64_t rank_token_bytes; /* what the rank with the most layers holds in its GPU */
    uint32_t parts;            /* of a block: ranks that store something of their own */
    uint64_t part_bytes;       /* the largest */
    uint64_t block_bytes;      /* all parts */
    uint64_t slot_bytes;       /* a part in DRAM */
    uint64_t record_bytes;     /* a part on NVMe */
    uint64_t index_bytes;      /* of a block, about */
    uint64_t extent;           /* arena.extent and nvme.segment: 64MiB, or what a part needs */
};

/* 0; or -EINVAL with a sentence: the model can't be split like that, or a part is larger than the
 * daemon takes. */
int kv_sizes(const struct kv_model *m, const struct kv_shape *shape, struct kv_sizes *out,
             char why[KV_WHY_BYTES]);

/* Blocks that fit into an arena, or a file of the NVMe tier, of so many bytes. */
uint64_t kv_dram_blocks(const struct kv_sizes *s, uint64_t bytes);
uint64_t kv_nvme_blocks(const struct kv_sizes *s, uint64_t bytes);
/* And the bytes for so many blocks. */
uint64_t kv_dram_bytes(const struct kv_sizes *s, uint64_t blocks);
uint64_t kv_nvme_bytes(const struct kv_sizes *s, uint64_t blocks);

#endif

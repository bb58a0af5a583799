/* One value of every message of the wire, with every field set, and the frames that they make. The
 * round trips, the examples in docs/protocol.md and the seeds in tests/fuzz/corpus/proto/ are all
 * made from these. */
#ifndef UCM_TESTS_PROTO_SAMPLES_H
#define UCM_TESTS_PROTO_SAMPLES_H

#include "proto/proto.h"

#include <stddef.h>

#define SAMPLE_STR(s)                                                                              \
    {                                                                                              \
        s, sizeof(s) - 1                                                                           \
    }
#define SAMPLE_BIN(a)                                                                              \
    {                                                                                              \
        a, sizeof(a)                                                                               \
    }

static const uint8_t sample_uuid[16] = {0x8f, 0x1c, 0x20, 0x44, 0x5b, 0x9a, 0x4e, 0x02,
                                        0xa1, 0x77, 0x33, 0xd0, 0x6e, 0x58, 0x90, 0xbc};
static const uint8_t sample_fingerprint[32] = {
    0xd1, 0x0e, 0x1c, 0x2b, 0x3a, 0x49, 0x58, 0x67, 0x76, 0x85, 0x94, 0xa3, 0xb2, 0xc1, 0xd0, 0xef,
    0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff};
/* Two keys of 16 bytes. */
static const uint8_t sample_keys[32] = {
    0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0a, 0x0b, 0x0c, 0x0d, 0x0e, 0x0f,
    0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f};
static const uint8_t sample_blocks[8] = {7, 0, 0, 0, 0x2c, 0x01, 0, 0}; /* 7 and 300 */
static const uint8_t sample_status[2] = {UCM_BLOCK_OK, UCM_BLOCK_MISS};
static const uint8_t sample_found[2] = {UCM_LOOKUP_DRAM, UCM_LOOKUP_NVME};
static const uint8_t sample_ipc[64] = {1, 2, 3, 4};
static const uint8_t sample_salt[4] = {0xde, 0xad, 0xbe, 0xef};
static const uint32_t sample_shards[2] = {32, 1000};
static const struct msg_handle sample_handles[2] = {
    {.kind = UCM_HANDLE_CUDA_IPC, .bytes = 1u << 20, .offset = 512, .ipc = SAMPLE_BIN(sample_ipc)},
    {.kind = UCM_HANDLE_CUDA_FD, .bytes = 1u << 20, .fd = 3},
};
static const struct msg_plane sample_planes[2] = {
    {.stride = 4096, .chunk = 2048},
    {.handle = 1, .offset = 2048, .stride = 4096, .chunk = 1024, .shard = 1},
};

static const struct msg_hello sample_hello = {
    .version_min = 1, .version_max = 1, .client = SAMPLE_STR("vllm-0")};
static const struct msg_hello_r sample_hello_r = {
    .version = 1,
    .server = SAMPLE_STR("ucmd 0.1.0"),
    .instance = SAMPLE_BIN(sample_uuid),
    .tenant = SAMPLE_STR("uid:1000"),
    .admin = true,
    .max_frame_bytes = UCM_MAX_FRAME_BYTES,
    .max_keys = UCM_MAX_KEYS,
    .max_requests = 256,
    .max_regions = 64,
    .max_leases = 4096,
    .max_lease_ms = 600000,
    .max_deadline_ms = UCM_DEADLINE_MS,
};
static const struct msg_ns_open sample_ns_open = {
    .tenant = SAMPLE_STR("uid:1000"),
    .model = SAMPLE_STR("meta-llama/Llama-3.1-8B"),
    .revision = SAMPLE_STR("main"),
    .dtype = SAMPLE_STR("bf16"),
    .layout = SAMPLE_STR("nhd/1"),
    .block_tokens = 16,
    .key_bytes = 16,
    .parts = 2,
    .shards = {sample_shards, 2},
    .shard_bytes = 65536,
    .salt = SAMPLE_BIN(sample_salt),
    .durability = UCM_DURABILITY_NVME,
};
static const struct msg_ns_open_r sample_ns_open_r = {
    .ns = 1, .fingerprint = SAMPLE_BIN(sample_fingerprint)};
static const uint32_t sample_rope[] = {0, 128, 128, 0, 128};
static const struct msg_region_register sample_region_register = {
    .ns = 1,
    .part = 1,
    .blocks = 1000,
    .device = SAMPLE_STR("cuda"),
    .gpu = SAMPLE_BIN(sample_uuid),
    .handles = {sample_handles, 2},
    .planes = {sample_planes, 2},
    .ring_region = 3,
    .pool = true,
    .rope = {sample_rope, 5},
    .rope_dtype = SAMPLE_STR("bf16"),
    .rope_interleaved = true,
    .rope_base = 500000,
    .rope_scaling = SAMPLE_STR("llama3"),
    .rope_factor = 8,
    .rope_trained = 8192,
    .rope_fast = 4,
    .rope_slow = 1,
    .rope_whole = true,
};
static const struct msg_region sample_region = {.region = 5};
static const struct msg_challenge_r sample_challenge_r = {.nonce = SAMPLE_BIN(sample_uuid)};
static const struct msg_ring_register sample_ring_register = {
    .gpu = SAMPLE_BIN(sample_uuid),
    .ipc = SAMPLE_BIN(sample_ipc),
    .offset = 512,
    .slice_bytes = 1u << 24,
    .slices = 4,
    .fd = 1,
};
static const struct msg_ring sample_ring = {.ring = 2};
static const struct msg_lookup sample_lookup = {
    .ns = 1,
    .keys = SAMPLE_BIN(sample_keys),
    .each = true,
    .lease_ms = 30000,
    .shared = true,
    .wait_ms = 20,
    .request = SAMPLE_STR("cmpl-7f3a-0"),
    .nowait = UCM_LOOKUP_LATER,
};
static const struct msg_lookup_r sample_lookup_r = {.hits = 2,
                                                    .dram = 1,
                                                    .lease = 9,
                                                    .status = SAMPLE_BIN(sample_found),
                                                    .shared = 1,
                                                    .pending = true};
static const struct msg_release sample_release = {.lease = 9};
static const uint32_t sample_turns[] = {2, 0, 512, 0, 0};
static const struct msg_load sample_load = {
    .region = 5,
    .keys = SAMPLE_BIN(sample_keys),
    .blocks = SAMPLE_BIN(sample_blocks),
    .shard = 1,
    .shards = 2,
    .lease = 9,
    .priority = 7,
    .deadline_ms = 5000,
    .step = 1,
    .request = SAMPLE_STR("cmpl-7f3a-0"),
    .computes = true,
    .turns = {sample_turns, 5},
};
static const struct msg_load_prefix sample_load_prefix = {
    .region = 5,
    .keys = SAMPLE_BIN(sample_keys),
    .blocks = SAMPLE_BIN(sample_blocks),
    .shard = 1,
    .shards = 2,
    .wait_ms = 9,
    .priority = 7,
    .deadline_ms = 5000,
    .step = 1,
    .request = SAMPLE_STR("cmpl-7f3a-0"),
    .computes = true,
};
static const struct msg_progress sample_progress = {
    .msgid = 3, .shards = 1, .status = SAMPLE_BIN(sample_status)};
static const uint8_t sample_fetch_items[24] = {7, 0, 0, 0, 31, 0, 0, 0, 0, 1};
static const struct msg_fetch sample_fetch = {
    .region = 5,
    .chain = 8,
    .keys = SAMPLE_BIN(sample_keys),
    .items = SAMPLE_BIN(sample_fetch_items),
    .priority = 7,
    .deadline_ms = 5000,
};
static const struct msg_fetch_r sample_fetch_r = {.status = SAMPLE_BIN(sample_status),
                                                  .bytes = 131072};
static const struct msg_dump sample_dump = {
    .region = 5,
    .keys = SAMPLE_BIN(sample_keys),
    .blocks = SAMPLE_BIN(sample_blocks),
    .shard = 1,
    .shards = 1,
    .event = SAMPLE_BIN(sample_ipc),
    .priority = 1,
    .deadline_ms = 5000,
    .durability = 1,
    .request = SAMPLE_STR("cmpl-7f3a-0"),
    .plain = true,
    .computes = true,
};
static const struct msg_prefetch sample_prefetch = {
    .ns = 1,
    .keys = SAMPLE_BIN(sample_keys),
    .part = 2,
    .priority = 3,
    .deadline_ms = 5000,
    .request = SAMPLE_STR("cmpl-7f3a-0"),
};
static const struct msg_blocks_r sample_blocks_r = {.status = SAMPLE_BIN(sample_status),
                                                    .bytes = 4194304};
static const struct msg_cancel sample_cancel = {.msgid = 3};
static const struct msg_cancel_r sample_cancel_r = {.cancelled = true};
static const struct msg_keys sample_some_keys = {.ns = 1, .keys = SAMPLE_BIN(sample_keys)};
static const struct msg_evict sample_evict = {.ns = 1, .keys = SAMPLE_BIN(sample_keys), .tier = 1};
static const struct msg_count_r sample_count_r = {.blocks = 1, .busy = 2, .missing = 3};
static const struct msg_ls sample_ls = {.ns = 1, .cursor = UINT64_MAX, .limit = 100};
static const struct msg_key sample_key = {.ns = 1, .key = {sample_keys, 16}};
static const struct msg_verify_r sample_verify_r = {
    .checked = 90, .corrupt = 1, .failed = 2, .skipped = 7, .next = 4321};
static const struct msg_collect sample_collect = {.root = 2};
static const struct msg_trace sample_trace = {
    .op = UCM_TRACE_START,
    .keys = true,
    .slower_us = 50000,
    .request = SAMPLE_STR("cmpl-7f3a-0"),
    .tenant = SAMPLE_STR("uid:1000"),
    .sample = 10,
    .limit_ms = 5000,
    .bytes = 1u << 20,
};
static const struct msg_bypass sample_bypass = {
    .ns = 7, .tenant = {"team-a", 6}, .load = UCM_BYPASS_ON, .store = UCM_BYPASS_OFF};
static const struct msg_key_reload sample_key_reload = {.tenant = SAMPLE_STR("team-a")};
static const struct msg_tenant_set sample_tenant_set = {
    .tenant = SAMPLE_STR("team-a"),
    .settings = SAMPLE_STR("weight=300 dram.guaranteed=1GiB"),
};
static const struct msg_tenant sample_tenant = {.tenant = SAMPLE_STR("team-a")};
static const struct msg_collect_r sample_collect_r = {.roots = 1, .busy = 1};
static const struct msg_page sample_page = {.cursor = 3, .limit = 100};
static const uint8_t sample_keep[4] = {0xff, 0x0f, 0, 1};
static const struct msg_digest_open sample_digest_open = {
    .ns = 1,
    .method = 2,
    .kind = 1,
    .run = 4,
    .keep = SAMPLE_BIN(sample_keep),
    .pairs = 1,
    .bits = 128,
    .rope_bits = 64,
    .seed = UINT64_MAX,
    .chosen = 3,
    .rest = 1,
    .dtype = 2,
    .kv_heads = 8,
    .head_dim = 64,
    .v_head_dim = 64,
    .rope_dim = 16,
    .k_offset = 128,
    .k_token_stride = 1024,
    .k_head_stride = 128,
    .v_offset = 32768,
    .v_token_stride = 1024,
    .v_head_stride = 128,
    .build = true,
};
static const struct msg_digest_open_r sample_digest_open_r = {
    .ns = 2, .fingerprint = SAMPLE_BIN(sample_fingerprint), .shard_bytes = 1040};
static const struct msg_digest_build sample_digest_build = {
    .ns = 2, .keys = SAMPLE_BIN(sample_keys), .part = 1, .priority = 2, .deadline_ms = 5000};
static const struct msg_chain_open sample_chain_open = {.ns = 2, .part = 1, .lease_ms = 60000};
static const struct msg_chain sample_chain = {.chain = 8};
static const struct msg_chain_append sample_chain_append = {
    .chain = 8, .keys = SAMPLE_BIN(sample_keys), .build = true, .priority = 2, .deadline_ms = 5000};
static const struct msg_chain_append_r sample_chain_append_r = {
    .blocks = 100,
    .dram = 1,
    .nvme = 2,
    .shared = 3,
    .missing = 4,
    .digests = 5,
    .built = 6,
    .status = SAMPLE_BIN(sample_found),
};
static const struct msg_select sample_select = {
    .chains = {sample_shards, 2},
    .shards = {sample_shards, 2},
    .q = SAMPLE_BIN(sample_ipc),
    .q_dtype = 1,
    .q_heads = 32,
    .rows = 2,
    .metric = 1,
    .reduce = 2,
    .heads = 1,
    .beta = 0.125,
    .policy = 1,
    .sparse_ratio = 0.3,
    .topk_tokens = 512,
    .min_blocks = 4,
    .eps = 0.95,
    .beta_m = 1,
    .limit = 64,
    .init_window_sz = 1,
    .local_window_sz = 2,
    .scores = true,
    .prefetch = 8,
    .deadline_ms = 5000,
};
static const struct msg_select_r sample_select_r = {
    .counts = SAMPLE_BIN(sample_blocks),
    .index = SAMPLE_BIN(sample_blocks),
    .scores = SAMPLE_BIN(sample_salt),
    .gone = 1,
    .no_digest = 2,
};
static const struct msg_chain_prefetch sample_chain_prefetch = {
    .chain = 8, .index = SAMPLE_BIN(sample_blocks), .priority = 3, .deadline_ms = 5000};
static const uint32_t sample_section[3] = {16, 8, 128};
static const struct msg_encoding_open sample_encoding_open = {
    .ns = 1,
    .encoding = {"int8", 4},
    .version = 1,
    .dtype = {"bf16", 4},
    .k = {sample_section, 3},
    .v = {sample_section, 3},
    .order = 1,
    .axis = 1,
    .seed = UINT64_MAX,
    .run = 16,
};
static const struct msg_encoding_open_r sample_encoding_open_r = {
    .ns = 2,
    .fingerprint = SAMPLE_BIN(sample_fingerprint),
    .version = 1,
    .coded_bytes = 2129920,
    .plain_bytes = 4194304,
};
static const struct msg_events sample_events = {
    .since = 41, .limit = 512, .wait_ms = 1000, .tenant = SAMPLE_STR("team-a"), .tokens = true};
static const uint8_t sample_tokens[8] = {1, 0, 0, 0, 2, 0, 0, 0};
static const struct msg_events_describe sample_events_describe = {
    .ns = 1,
    .keys = SAMPLE_BIN(sample_keys),
    .tokens = SAMPLE_BIN(sample_tokens),
    .parent = SAMPLE_BIN(sample_uuid),
    .lora = SAMPLE_STR("tuned"),
};
static const struct msg_hints_open sample_hints_open = {.ns = 1};
static const struct msg_hints_open_r sample_hints_open_r = {.bytes = 8192, .shared = true};
static const struct msg_window_open sample_window_open = {.ns = 1, .part = 1};
static const struct msg_window_open_r sample_window_open_r = {
    .window = 3, .extent_bytes = 1u << 30, .slot_bytes = 65536, .extents = 64, .budget = 1u << 30};
static const struct msg_window sample_window = {.window = 3};
static const struct msg_window_pin sample_window_pin = {
    .window = 3, .chain = 8, .first = 16, .n = 4, .priority = 3, .deadline_ms = 5000};
static const struct msg_window_pin_r sample_window_pin_r = {
    .places = SAMPLE_BIN(sample_fingerprint),
    .lent = {sample_section, 3},
    .more = true,
    .moved = 1,
    .read = 1,
    .missing = 1,
};
static const struct msg_window_unpin sample_window_unpin = {
    .window = 3, .chain = 8, .first = 16, .n = 4};
static const struct msg_window_release sample_window_release = {.window = 3,
                                                                .extents = {sample_section, 3}};
static const struct msg_window_revoke sample_window_revoke = {
    .window = 3, .extents = {sample_section, 3}, .deadline_ms = 1000};

struct proto_sample {
    const struct proto_message *m;
    const void *value;
};

#define SAMPLE(suffix)                                                                             \
    {                                                                                              \
        &proto_##suffix, &sample_##suffix                                                          \
    }
static const struct proto_sample proto_samples[] = {
    SAMPLE(hello),
    SAMPLE(hello_r),
    SAMPLE(ns_open),
    SAMPLE(ns_open_r),
    SAMPLE(region_register),
    SAMPLE(region),
    SAMPLE(challenge_r),
    SAMPLE(lookup),
    SAMPLE(lookup_r),
    SAMPLE(release),
    SAMPLE(load),
    SAMPLE(dump),
    SAMPLE(prefetch),
    SAMPLE(blocks_r),
    SAMPLE(fetch),
    SAMPLE(fetch_r),
    SAMPLE(cancel),
    SAMPLE(cancel_r),
    {&proto_keys, &sample_some_keys},
    SAMPLE(evict),
    SAMPLE(count_r),
    SAMPLE(ls),
    SAMPLE(key),
    SAMPLE(verify_r),
    SAMPLE(bypass),
    SAMPLE(key_reload),
    SAMPLE(tenant_set),
    SAMPLE(tenant),
    SAMPLE(collect),
    SAMPLE(collect_r),
    SAMPLE(trace),
    SAMPLE(page),
    SAMPLE(progress),
    SAMPLE(digest_open),
    SAMPLE(digest_open_r),
    SAMPLE(digest_build),
    SAMPLE(chain_open),
    SAMPLE(chain),
    SAMPLE(chain_append),
    SAMPLE(chain_append_r),
    SAMPLE(select),
    SAMPLE(select_r),
    SAMPLE(chain_prefetch),
    SAMPLE(encoding_open),
    SAMPLE(encoding_open_r),
    SAMPLE(window_open),
    SAMPLE(window_open_r),
    SAMPLE(window),
    SAMPLE(window_pin),
    SAMPLE(window_pin_r),
    SAMPLE(window_unpin),
    SAMPLE(window_release),
    SAMPLE(window_revoke),
    SAMPLE(events),
    SAMPLE(events_describe),
    SAMPLE(hints_open),
    SAMPLE(hints_open_r),
    SAMPLE(load_prefix),
    SAMPLE(ring_register),
    SAMPLE(ring),
    {&proto_none, NULL},
};
#define N_PROTO_SAMPLES (sizeof(proto_samples) / sizeof(proto_samples[0]))

static inline const void *sample_of(const struct proto_message *m)
{
    for (size_t i = 0; i < N_PROTO_SAMPLES; i++)
        if (proto_samples[i].m == m)
            return proto_samples[i].value;
    return NULL;
}

/* A free map as `health` answers it. */
static inline int sample_health(struct proto_buf *b, uint32_t msgid, struct ucm_error *e)
{
    struct proto_builder pb;

    proto_response_begin(&pb, b, msgid);
    msgpack_pack_map(&pb.pk, 2);
    proto_pack_str(&pb.pk, "status");
    proto_pack_str(&pb.pk, "degraded");
    proto_pack_str(&pb.pk, "reasons");
    msgpack_pack_array(&pb.pk, 1);
    proto_pack_str(&pb.pk, "nvme: the file system is read-only");
    return proto_response_end(&pb, e);
}

static inline int sample_request(struct proto_buf *b, enum ucm_method method, uint32_t msgid,
                                 struct ucm_error *e)
{
    const struct proto_message *m = proto_method_params(method);

    return proto_request(b, msgid, method, m, sample_of(m), e);
}

static inline int sample_response(struct proto_buf *b, enum ucm_method method, uint32_t msgid,
                                  struct ucm_error *e)
{
    const struct proto_message *m = proto_method_result(method);

    if (m == &proto_free_map)
        return sample_health(b, msgid, e);
    return proto_response(b, msgid, m, sample_of(m), e);
}

#endif

/* What the tests of encoded regions and of position shifts share: a registration of K and V. A
 * block has 16 tokens, 4 heads of 64 channels, BF16, and 4 layers. K and V take 8 KiB each, side by
 * side in a page of 16 KiB. */
#ifndef UCM_TESTS_DEVICE_KV_RIG_H
#define UCM_TESTS_DEVICE_KV_RIG_H

#include "tests/unit/device/device_rig.h"

#define LAYERS 4u
#define BLOCKS 32u
#define TENSOR 8192u

static struct msg_plane planes[2 * LAYERS];
static struct msg_handle handle;
static struct msg_region_register m;
static struct ucm_error e;

static inline void kv_setup(void)
{
    setup();
    for (uint32_t p = 0; p < 2 * LAYERS; p++)
        planes[p] = (struct msg_plane){.offset = p / 2 * (BLOCKS * 2 * TENSOR) + p % 2 * TENSOR,
                                       .stride = 2 * TENSOR,
                                       .block_bytes = TENSOR,
                                       .layer = p / 2};
    handle = (struct msg_handle){.kind = UCM_HANDLE_MEMFD, .bytes = MEMORY};
    m = (struct msg_region_register){.ns = 1,
                                     .blocks = BLOCKS,
                                     .device = {"cpu", 3},
                                     .handles = {&handle, 1},
                                     .planes = {planes, 2 * LAYERS}};
}

static inline struct ucm_encoding_spec kv_encoding(void)
{
    struct ucm_encoding_spec spec = {
        .encoding = UCM_ENCODING_FP8, .version = 1, .dtype = UCM_ENCODING_BF16, .n_tensors = 2};

    for (uint32_t s = 0; s < 2; s++)
        spec.tensor[s] = (struct ucm_encoding_tensor){s, 16, 4, 64, UCM_ENCODING_NHD};
    return spec;
}

/* spec: of an encoded namespace; NULL: of a raw one. */
static inline int kv_ask(const struct ucm_encoding_spec *spec, int *fds, struct device_region **r)
{
    struct form pages = {.layer_bytes = 2 * TENSOR, .layers = LAYERS};
    struct codec codec;

    if (spec) {
        codec_init(&codec, spec);
        pages.layer_bytes = codec.raw_layer_bytes;
    }
    return region_check(&m, &pages, spec ? &codec : NULL, fds, 1, r, &e);
}

static inline struct device_region *kv_region(const struct ucm_encoding_spec *spec)
{
    struct device_region *r = NULL;
    int fds[1] = {dup(memfd)};

    cr_assert_eq(kv_ask(spec, fds, &r), 0, "%s", e.text);
    r->device = cpu;
    r->pid = getpid();
    return r;
}

static inline void kv_refused(const struct ucm_encoding_spec *spec, const char *word)
{
    struct device_region *r = NULL;
    int fds[1] = {memfd};

    cr_assert_eq(kv_ask(spec, fds, &r), -UCM_WIRE_INVALID, "expected a refusal about: %s", word);
    cr_assert(strstr(e.text, word), "\"%s\" does not say \"%s\"", e.text, word);
    cr_assert_eq(fds[0], memfd, "a refusal takes no descriptor");
}

#endif

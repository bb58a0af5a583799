/* How fast one core builds digests, by method, element type and instruction set: GB of KV (K and V of
 * the blocks whose digests are built) a second of CPU time, beside reading the same K with the same
 * decoding, and copying it. docs/retrieval.md has the answer.
 * Usage: digest_speed [MiB of blocks, 64] [rounds, 5] */
#include "kernels/isa.h"
#include "kernels/sparse/sparse.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TOKENS 16
#define HEADS 8
#define DIM 128

struct method {
    const char *name;
    struct ucm_digest_spec spec;
};

static const struct method methods[] = {
    {"mean", {.method = UCM_DIGEST_MEAN}},
    {"mean max", {.method = UCM_DIGEST_MEAN, .kind = UCM_MEAN_MAX}},
    {"mean normal", {.method = UCM_DIGEST_MEAN, .kind = UCM_MEAN_NORMALISED}},
    {"submean 4", {.method = UCM_DIGEST_SUBMEAN, .run = 4}},
    {"box", {.method = UCM_DIGEST_BOX}},
    {"hash 64", {.method = UCM_DIGEST_HASH, .bits = 64}},
    {"hash 128", {.method = UCM_DIGEST_HASH, .bits = 128}},
    {"hash 256", {.method = UCM_DIGEST_HASH, .bits = 256}},
    {"stats", {.method = UCM_DIGEST_STATS}},
    {"tokens 2", {.method = UCM_DIGEST_TOKENS, .chosen = 2}},
    {"tokens 3, rest", {.method = UCM_DIGEST_TOKENS, .chosen = 3, .rest = UCM_REST_MEAN}},
};
static const char *const isas[UCM_ISA_COUNT] = {"base", "avx2", "avx512"};
static const char *const dtypes[] = {"f32", "f16", "bf16", "fp8"};
static const uint32_t element_bytes[] = {4, 2, 2, 1};

static double cpu_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static struct ucm_kv_shape shape_of(uint32_t dtype)
{
    uint32_t head = DIM * element_bytes[dtype];

    return (struct ucm_kv_shape){
        .dtype = dtype,
        .tokens = TOKENS,
        .kv_heads = HEADS,
        .head_dim = DIM,
        .v_head_dim = DIM,
        .k_token_stride = HEADS * head,
        .k_head_stride = head,
        .v_offset = TOKENS * HEADS * head,
        .v_token_stride = HEADS * head,
        .v_head_stride = head,
    };
}

/* Values of both signs and about 1 in size, as keys are: a product of denormals takes ten times as
 * long. */
static void fill(uint8_t *kv, size_t bytes, uint32_t dtype)
{
    static const uint8_t top[] = {0x3f, 0x3c, 0x3f, 0x30}; /* the byte with the exponent */
    uint64_t x = 1;

    for (size_t i = 0; i < bytes; i++) {
        x = x * UINT64_C(6364136223846793005) + 1442695040888963407;
        kv[i] = (uint8_t)(x >> 56);
        if (i % element_bytes[dtype] == element_bytes[dtype] - 1)
            kv[i] = (kv[i] & 0x83) | top[dtype];
    }
}

static double best_of(const struct ucm_digest_plan *plan, const uint8_t *kv, size_t block, size_t n,
                      uint8_t *out, unsigned rounds)
{
    double best = 1e9;

    for (unsigned round = 0; round < rounds; round++) {
        double start = cpu_s(), took;

        for (size_t b = 0; b < n; b++) {
            if (plan != NULL)
                ucm_digest_build(plan, kv + b * block, out);
            else
                memcpy(out, kv + b * block, block);
        }
        took = cpu_s() - start;
        best = took < best ? took : best;
    }
    return (double)(n * block) / best * 1e-9;
}

int main(int argc, char **argv)
{
    size_t bytes = (size_t)(argc > 1 ? atol(argv[1]) : 64) << 20;
    unsigned rounds = argc > 2 ? (unsigned)atol(argv[2]) : 5;
    uint8_t *kv = malloc(bytes), *out = malloc(1 << 20);

    if (kv == NULL || out == NULL)
        return 1;
    printf("GB/s of KV and core, blocks of %d tokens, %d heads of %d\n%-12s", TOKENS, HEADS, DIM,
           "");
    for (uint32_t isa = 0; isa < UCM_ISA_COUNT; isa++)
        for (uint32_t t = 0; t < 4; t++)
            printf(" %6s", t == 0 ? isas[isa] : "");
    printf("\n%-12s", "");
    for (uint32_t i = 0; i < 4 * UCM_ISA_COUNT; i++)
        printf(" %6s", dtypes[i % 4]);
    for (size_t m = 0; m < sizeof(methods) / sizeof(methods[0]); m++) {
        printf("\n%-12s", methods[m].name);
        for (uint32_t i = 0; i < 4 * UCM_ISA_COUNT; i++) {
            struct ucm_digest_spec spec = methods[m].spec;
            struct ucm_digest_plan plan;
            char why[UCM_SPARSE_WHY];
            size_t block = (size_t)2 * TOKENS * HEADS * DIM * element_bytes[i % 4];

            fill(kv, bytes, i % 4);
            spec.shape = shape_of(i % 4);
            ucm_isa_limit(i / 4);
            if (ucm_digest_plan_init(&plan, &spec, why) < 0)
                return 1;
            printf(" %6.2f", best_of(&plan, kv, block, bytes / block, out, rounds));
            fflush(stdout);
        }
    }
    printf("\n%-12s %6.2f\n", "memcpy", best_of(NULL, kv, 65536, bytes / 65536, out, rounds));
    free(kv);
    free(out);
    return 0;
}

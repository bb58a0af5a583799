/* How fast one core encodes and decodes, by encoding, element type and instruction set: GB of plain
 * KV a second of CPU time, beside copying it; docs/encodings.md has the answer. The memory is cold: each section is used once a
 * round. Usage: encoding_speed [MiB of plain KV, 64] [rounds, 5] [part of a line's name] */
#include "kernels/encoding/encoding.h"
#include "kernels/isa.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TOKENS 16
#define HEADS 8
#define DIM 128
#define ELEMENTS (TOKENS * HEADS * DIM)

struct line {
    const char *name;
    uint32_t encoding, dtype, axis;
};

static const struct line lines[] = {
    {"fp8, bf16", UCM_ENCODING_FP8, UCM_ENCODING_BF16, 0},
    {"fp8, f16", UCM_ENCODING_FP8, UCM_ENCODING_F16, 0},
    {"int8, bf16", UCM_ENCODING_INT8, UCM_ENCODING_BF16, 0},
    {"int8, f16", UCM_ENCODING_INT8, UCM_ENCODING_F16, 0},
    {"int8 by channel, bf16", UCM_ENCODING_INT8, UCM_ENCODING_BF16, 1},
    {"q4, bf16", UCM_ENCODING_Q4, UCM_ENCODING_BF16, 0},
    {"q4, f16", UCM_ENCODING_Q4, UCM_ENCODING_F16, 0},
    {"lossless, bf16", UCM_ENCODING_LOSSLESS, UCM_ENCODING_BF16, 0},
    {"lossless, fp8", UCM_ENCODING_LOSSLESS, UCM_ENCODING_FP8_E4M3, 0},
};
static const char *const isas[UCM_ISA_COUNT] = {"base", "avx2", "avx512"};

static double cpu_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* About normal, so that exponents are as those of KV. */
static float value(uint64_t *x)
{
    float sum = 0;

    for (int i = 0; i < 4; i++) {
        *x = *x * UINT64_C(6364136223846793005) + 1442695040888963407;
        sum += (float)(*x >> 40) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7f;
}

static uint32_t bits_of(float f)
{
    uint32_t u;

    memcpy(&u, &f, sizeof(u));
    return u;
}

/* Cut off, not rounded. */
static void fill(uint8_t *plain, size_t elements, uint32_t dtype)
{
    uint64_t x = 1;

    for (size_t i = 0; i < elements; i++) {
        uint32_t u = bits_of(value(&x)), sign = u >> 16 & 0x8000, rest = u & 0x7fffffff;
        uint16_t h = (uint16_t)(u >> 16);

        if (dtype == UCM_ENCODING_F16)
            h = (uint16_t)(rest < 0x38800000 ? sign : sign | (rest - (112u << 23)) >> 13);
        if (dtype == UCM_ENCODING_FP8_E4M3)
            plain[i] = (uint8_t)(sign >> 8 | (rest < 0x3c800000 ? 0 : (rest >> 20) - (120 << 3)));
        else
            memcpy(plain + 2 * i, &h, sizeof(h));
    }
}

enum what { COPY, ENCODE, DECODE };

static double best_of(const struct ucm_encoding_spec *spec, enum what what, uint8_t *plain,
                      uint8_t *coded, size_t plain_bytes, unsigned rounds)
{
    size_t section = ucm_encoding_plain_bytes(spec, 0), small = ucm_encoding_bytes(spec, 0);
    size_t n = plain_bytes / section;
    double best = 1e9;

    for (unsigned round = 0; round < rounds; round++) {
        double start = cpu_s(), took;

        for (size_t b = 0; b < n; b++) {
            if (what == COPY)
                memcpy(coded + b * section, plain + b * section, section);
            else if (what == ENCODE)
                ucm_encode(spec, 0, plain + b * section, coded + b * small);
            else
                ucm_decode(spec, 0, coded + b * small, plain + b * section);
        }
        took = cpu_s() - start;
        best = took < best ? took : best;
    }
    return (double)(n * section) / best * 1e-9;
}

static struct ucm_encoding_spec spec_of(const struct line *l)
{
    return (struct ucm_encoding_spec){
        .encoding = l->encoding,
        .version = ucm_encoding_method(l->encoding)->version,
        .dtype = l->dtype,
        .n_sections = 1,
        .section = {{.tokens = TOKENS, .heads = HEADS, .dim = DIM}},
        .axis = l->axis,
    };
}

int main(int argc, char **argv)
{
    size_t bytes = (size_t)(argc > 1 ? atol(argv[1]) : 64) << 20;
    unsigned rounds = argc > 2 ? (unsigned)atol(argv[2]) : 5;
    uint8_t *plain = malloc(bytes), *coded = calloc(1, 2 * bytes);
    struct ucm_encoding_spec spec = spec_of(&lines[0]);

    if (plain == NULL || coded == NULL)
        return 1;
    fill(plain, bytes / 2, UCM_ENCODING_BF16);
    printf("GB/s of plain KV and core, sections of %d tokens, %d heads of %d\n%-22s", TOKENS, HEADS,
           DIM, "");
    for (int isa = 0; isa < UCM_ISA_COUNT; isa++)
        printf(" %15s", isas[isa]);
    printf("\n%-22s %15.2f\n", "memcpy", best_of(&spec, COPY, plain, coded, bytes, rounds));
    for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
        char why[UCM_ENCODING_WHY];

        spec = spec_of(&lines[i]);
        if (ucm_encoding_check(&spec, why) < 0 || (argc > 3 && !strstr(lines[i].name, argv[3])))
            continue;
        fill(plain, bytes / (lines[i].dtype == UCM_ENCODING_FP8_E4M3 ? 1 : 2), lines[i].dtype);
        printf("%-22s", lines[i].name);
        for (int isa = 0; isa < UCM_ISA_COUNT; isa++) {
            ucm_isa_limit((enum ucm_isa)isa);
            printf(" %7.2f", best_of(&spec, ENCODE, plain, coded, bytes, rounds));
            printf(" %7.2f", best_of(&spec, DECODE, plain, coded, bytes, rounds));
            fflush(stdout);
        }
        printf("\n");
    }
    free(plain);
    free(coded);
    return 0;
}

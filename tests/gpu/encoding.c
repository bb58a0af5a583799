/* test_encoding [--few]: compares; a part of the cases only. */
#include "kernels/encoding/encoding_cuda.h"
#include "tests/gpu/compare.h"

#include <string.h>

#define BLOCKS 6u
#define ITEMS 4u
#define LAYERS 2u
#define GUARD 0xa5

extern const unsigned char ucm_encoding_fatbin[];

/* Of planes and items that the GPU can read; ends the program if there is no kernel. */
static void launch(const struct ucm_encoding_spec *spec, enum ucm_copy_direction direction,
                   CUdeviceptr planes, uint32_t n_planes, CUdeviceptr items, uint32_t n_items)
{
    uint32_t tiles = ucm_encoding_tiles(spec);
    struct ucm_encoding_spec by_value = *spec;
    void *arguments[] = {&planes, &n_planes, &items, &n_items, &by_value, &tiles};
    char name[UCM_ENCODING_KERNEL_NAME];

    if (!check(ucm_encoding_kernel_name(spec, direction, name),
               "no kernel for encoding %u, dtype %u", spec->encoding, spec->dtype))
        must(CUDA_ERROR_NOT_FOUND, "a kernel");
    gpu_launch(name, 5, UCM_ENCODING_THREADS, 0, arguments);
    gpu_sync();
}

static struct ucm_encoding_spec encoding_spec(uint32_t encoding, uint32_t dtype, uint32_t tokens,
                                              uint32_t heads, uint32_t dim, uint32_t order,
                                              uint32_t axis)
{
    struct ucm_encoding_spec s = {.encoding = encoding,
                                  .version = ucm_encoding_method(encoding)->version,
                                  .dtype = dtype,
                                  .n_tensors = 2,
                                  .axis = axis,
                                  .seed = 7};
    char why[UCM_ENCODING_WHY] = "";

    for (uint32_t i = 0; i < 2; i++)
        s.tensor[i] = (struct ucm_encoding_tensor){i, tokens, heads, dim, order};
    if (!check(ucm_encoding_check(&s, why) == 0, "a spec: %s", why))
        must(CUDA_ERROR_INVALID_VALUE, "a test's spec");
    return s;
}

/* ---- a region and slots, on both sides ---- */

struct rig {
    struct ucm_encoding_spec spec;
    uint64_t raw[2], encoded[2], slot_bytes, stride, page_bytes, slots_bytes;
    uint32_t n_planes, shift;
    struct ucm_encoding_plane planes[2 * LAYERS]; /* base counts from the pages' first byte */
    uint32_t blocks[ITEMS];
    uint8_t *pages, *slots; /* as they should be */
    CUdeviceptr gpu_pages, gpu_slots, gpu_planes, gpu_items;
    void *pinned; /* the slots, if they are the host's */
};

/* Shift 0: every page begins at a multiple of 16. */
static uint64_t place(uint64_t bytes, uint32_t shift)
{
    return shift == 0 ? (bytes + 15) / 16 * 16 : bytes;
}

static void rig_open(struct rig *r, const struct ucm_encoding_spec *spec, uint32_t shift, bool host)
{
    struct ucm_encoding_plane planes[2 * LAYERS];
    struct ucm_copy_item items[ITEMS];
    uint64_t at = shift;

    *r = (struct rig){.spec = *spec, .shift = shift, .n_planes = spec->n_tensors * LAYERS};
    for (uint32_t i = 0; i < spec->n_tensors; i++) {
        r->raw[i] = ucm_encoding_raw_bytes(spec, i);
        r->encoded[i] = ucm_encoding_bytes(spec, i);
    }
    r->stride = place(r->raw[0], shift) + place(r->raw[1], shift) + (shift ? 6 : 32);
    for (uint32_t p = 0; p < r->n_planes; p++) {
        uint32_t tensor = p % spec->n_tensors;

        r->planes[p] = (struct ucm_encoding_plane){at, r->stride, r->slot_bytes,
                                                   (uint32_t)r->encoded[tensor], tensor};
        r->slot_bytes += r->encoded[tensor];
        if (tensor + 1 < spec->n_tensors)
            at += place(r->raw[0], shift);
        else
            at += r->stride * BLOCKS - (tensor > 0 ? place(r->raw[0], shift) : 0);
    }
    r->slot_bytes += 16;
    r->page_bytes = at + r->stride;
    r->slots_bytes = r->slot_bytes * ITEMS;
    r->pages = fresh(r->page_bytes);
    r->slots = fresh(r->slots_bytes);
    memset(r->pages, GUARD, r->page_bytes);
    memset(r->slots, GUARD, r->slots_bytes);
    r->gpu_pages = gpu_new(r->page_bytes);
    if (host) {
        must(cuMemHostAlloc(&r->pinned, r->slots_bytes, CU_MEMHOSTALLOC_DEVICEMAP),
             "pinned memory");
        must(cuMemHostGetDevicePointer(&r->gpu_slots, r->pinned, 0), "its address");
    } else {
        r->gpu_slots = gpu_new(r->slots_bytes);
    }
    for (uint32_t i = 0; i < ITEMS; i++) {
        r->blocks[i] = (i * 5 + 2) % BLOCKS;
        items[i] =
            (struct ucm_copy_item){.slot = r->gpu_slots + i * r->slot_bytes, .block = r->blocks[i]};
    }
    memcpy(planes, r->planes, sizeof(planes));
    for (uint32_t p = 0; p < r->n_planes; p++)
        planes[p].base += r->gpu_pages;
    r->gpu_planes = gpu_put(0, planes, sizeof(planes));
    r->gpu_items = gpu_put(0, items, sizeof(items));
}

static void rig_close(struct rig *r)
{
    if (r->pinned)
        must(cuMemFreeHost(r->pinned), "freeing pinned memory");
    memory_end();
}

static void slots_put(struct rig *r, const void *from)
{
    if (r->pinned)
        memcpy(r->pinned, from, r->slots_bytes);
    else
        gpu_put(r->gpu_slots, from, r->slots_bytes);
}

static void slots_get(struct rig *r, void *to)
{
    if (r->pinned)
        memcpy(to, r->pinned, r->slots_bytes);
    else
        gpu_get(to, r->gpu_slots, r->slots_bytes);
}

static uint8_t *page_of(const struct rig *r, uint32_t item, uint32_t plane)
{
    return r->pages + r->planes[plane].base + r->blocks[item] * r->planes[plane].stride;
}

static uint8_t *encoded_of(const struct rig *r, uint32_t item, uint32_t plane)
{
    return r->slots + item * r->slot_bytes + r->planes[plane].slot_offset;
}

static void same(const struct rig *r, const char *what, const uint8_t *is, const uint8_t *should,
                 size_t n)
{
    const struct ucm_encoding_tensor *s = &r->spec.tensor[0];
    size_t at = memcmp(is, should, n) == 0 ? n : 0;

    while (at < n && is[at] == should[at])
        at++;
    check(at == n,
          "%s, encoding %u, dtype %u, %u x %u x %u, order %u, axis %u, run %u, pages shifted by "
          "%u, %s: byte %zu of %zu is %02x, not %02x",
          what, r->spec.encoding, r->spec.dtype, s->tokens, s->heads, s->dim, s->order,
          r->spec.axis, r->spec.run, r->shift, r->pinned ? "slots of the host" : "an entry", at, n,
          at < n ? is[at] : 0, at < n ? should[at] : 0);
}

/* Encodes the pages and compares all slots, with the bytes between tensors. */
static void dump(struct rig *r)
{
    uint8_t *found = fresh(r->slots_bytes);

    gpu_put(r->gpu_pages, r->pages, r->page_bytes);
    memset(r->slots, GUARD, r->slots_bytes);
    slots_put(r, r->slots);
    launch(&r->spec, UCM_COPY_DUMP, r->gpu_planes, r->n_planes, r->gpu_items, ITEMS);
    slots_get(r, found);
    for (uint32_t i = 0; i < ITEMS; i++)
        for (uint32_t p = 0; p < r->n_planes; p++)
            ucm_encode(&r->spec, r->planes[p].tensor, page_of(r, i, p), encoded_of(r, i, p));
    same(r, "a dump", found, r->slots, r->slots_bytes);
}

/* Decodes the slots and compares all pages, with the bytes between them. */
static void load(struct rig *r)
{
    uint8_t *found = fresh(r->page_bytes);

    memset(r->pages, GUARD, r->page_bytes);
    gpu_put(r->gpu_pages, r->pages, r->page_bytes);
    slots_put(r, r->slots);
    launch(&r->spec, UCM_COPY_LOAD, r->gpu_planes, r->n_planes, r->gpu_items, ITEMS);
    gpu_get(found, r->gpu_pages, r->page_bytes);
    for (uint32_t i = 0; i < ITEMS; i++)
        for (uint32_t p = 0; p < r->n_planes; p++)
            ucm_decode(&r->spec, r->planes[p].tensor, encoded_of(r, i, p), page_of(r, i, p));
    same(r, "a load", found, r->pages, r->page_bytes);
}

/* ---- values ---- */

static uint16_t bf16(float x)
{
    uint32_t u;

    memcpy(&u, &x, sizeof(u));
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* Halves are any below 2, or below 2^-7 of a channel that does not stand out. */
static uint16_t element(uint32_t dtype, float x, bool stands_out)
{
    return dtype == UCM_ENCODING_BF16 ? bf16(x)
                                      : (uint16_t)(rnd() & (stands_out ? 0xbfff : 0x9fff));
}

/* How much larger than others a channel is. */
static float channel_size(uint64_t c)
{
    return c % 37 == 5 ? 9.0f : c % 41 == 7 ? 0x1p12f : c % 43 == 9 ? 0x1p-20f : 1.0f;
}

/* Rows like those of KV, and rows that are not: of zeros, of any bits, with one NaN, very large, tiny. */
static void fill_rows(uint8_t *to, uint64_t elements, uint32_t dim, uint32_t dtype)
{
    for (uint64_t i = 0; i < elements; i += dim) {
        uint32_t kind = rnd_below(12);
        float size = kind == 1 ? 0x1p100f : kind == 2 ? 0x1p-125f : kind == 3 ? 0x1p126f : 4.0f;

        for (uint64_t c = i; c < i + dim && c < elements; c++) {
            uint16_t h = kind == 4 ? (uint16_t)rnd() : kind == 5 ? (uint16_t)(rnd() & 0x8000) : 0;

            if (kind < 4 || kind > 5)
                h = element(dtype, rnd_normal() * size * channel_size(c - i),
                            channel_size(c - i) > 1);
            memcpy(to + 2 * c, &h, 2);
        }
        if (kind == 6) {
            uint16_t odd[] = {0x7f80, 0xff80, 0x7fc0, 0xffc1, 0x7c00, 0xfc00, 0x7e00, 0xfe01};
            uint64_t c = i + rnd_below(dim);

            if (c < elements)
                memcpy(to + 2 * c, &odd[rnd_below(8)], 2);
        }
    }
}

/* Values of few exponents, as KV has them, except some elements in a thousand. Once in a while they
 * have more exponents than lossless has room for. */
static void fill_close(uint8_t *to, uint64_t elements)
{
    uint32_t odd = rnd_below(4) == 0 ? 40 : 4;

    for (uint64_t i = 0; i < elements; i++) {
        uint16_t h = (uint16_t)((rnd() & 0x807f) | (120 + rnd_below(11)) << 7);

        if (rnd_below(1000) < odd)
            h = (uint16_t)(rnd_below(3) ? rnd() : rnd() & 0x807f);
        memcpy(to + 2 * i, &h, 2);
    }
}

static void fill_pages(struct rig *r)
{
    memset(r->pages, GUARD, r->page_bytes);
    for (uint32_t i = 0; i < ITEMS; i++)
        for (uint32_t p = 0; p < r->n_planes; p++) {
            const struct ucm_encoding_tensor *s = &r->spec.tensor[r->planes[p].tensor];
            uint64_t elements = (uint64_t)s->tokens * s->heads * s->dim;

            if (r->spec.encoding == UCM_ENCODING_LOSSLESS && rnd_below(6) > 0)
                fill_close(page_of(r, i, p), elements);
            else
                fill_rows(page_of(r, i, p), elements, s->dim, r->spec.dtype);
        }
}

/* A list of escapes that no encoder makes: not sorted, some elements twice. */
static void fill_list(const struct rig *r, uint32_t tensor, uint8_t *encoded)
{
    const struct ucm_encoding_tensor *s = &r->spec.tensor[tensor];
    uint32_t elements = s->tokens * s->heads * s->dim, room = (elements + 127) / 128, at = 0;
    uint32_t count = rnd_below(room + 3);
    uint8_t *list =
        encoded + ucm_encoding_bytes(&r->spec, tensor) - (4 + 4 * (uint64_t)room + 15) / 16 * 16;

    memcpy(list, &count, 4);
    for (uint32_t i = 0; i < room; i++) {
        uint32_t entry;

        at = rnd_below(3) == 0 ? at : rnd_below(elements + elements / 8 + 1);
        entry = at << 8 | (rnd() & 0xff);
        memcpy(list + 4 + 4 * i, &entry, 4);
    }
}

static void fill_slots(struct rig *r)
{
    for (uint64_t i = 0; i < r->slots_bytes; i++)
        r->slots[i] = (uint8_t)rnd();
    for (uint32_t i = 0; r->spec.encoding == UCM_ENCODING_LOSSLESS && i < ITEMS; i++)
        for (uint32_t p = 0; p < r->n_planes; p++)
            fill_list(r, r->planes[p].tensor, encoded_of(r, i, p));
}

static void test_spec(const struct ucm_encoding_spec *spec, uint32_t shift, bool host)
{
    struct rig r;

    rig_open(&r, spec, shift, host);
    fill_pages(&r);
    dump(&r);
    load(&r);
    fill_slots(&r);
    load(&r);
    rig_close(&r);
}

/* ---- shapes ---- */

static const uint32_t methods[] = {UCM_ENCODING_FP8, UCM_ENCODING_INT8, UCM_ENCODING_Q4,
                                   UCM_ENCODING_LOSSLESS};
static const struct {
    uint32_t tokens, heads, dim;
} shapes[] = {{16, 8, 128}, {16, 2, 64}, {16, 1, 576}, {32, 3, 80}, {7, 5, 256},
              {16, 4, 96},  {1, 1, 1},   {16, 3, 127}, {5, 7, 72},  {3, 1, 1024},
              {16, 1, 8},   {64, 1, 20}, {9, 2, 1000}, {2, 9, 2}};

/* A shape whose pages begin at multiples of 16. */
static bool aligned_pages(uint32_t encoding)
{
    return encoding == UCM_ENCODING_Q4 || encoding == UCM_ENCODING_LOSSLESS;
}

static void test_shapes(uint32_t encoding)
{
    static const uint32_t shifts[] = {0, 8, 2, 1};

    for (uint32_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++)
        for (uint32_t how = 0; how < 2 * 2 * 2; how++) {
            uint32_t axis = how >> 1 & 1, shift = shifts[(i + how) % 4];
            uint32_t dtype = how & 1 ? UCM_ENCODING_F16 : UCM_ENCODING_BF16;
            struct ucm_encoding_spec spec;

            if ((axis == 1 && encoding != UCM_ENCODING_INT8) || (few && (i + how) % 4 != 0) ||
                (encoding == UCM_ENCODING_Q4 && shapes[i].dim % 16 != 0) ||
                (encoding == UCM_ENCODING_LOSSLESS && dtype != UCM_ENCODING_BF16))
                continue;
            if (aligned_pages(encoding))
                shift = 0;
            spec = encoding_spec(encoding, dtype, shapes[i].tokens, shapes[i].heads, shapes[i].dim,
                                 how >> 2, axis);
            test_spec(&spec, i < 7 ? 0 : shift, i % 2);
            spec.run = (i + how) % (1 + shapes[i].tokens / 2);
            test_spec(&spec, shift, (i + 1) % 2);
        }
}

/* MLA: one tensor; K and V of different sizes. */
static void test_tensors(uint32_t encoding)
{
    struct ucm_encoding_spec one = encoding_spec(encoding, UCM_ENCODING_BF16, 16, 1, 576, 0, 0),
                             two;

    one.n_tensors = 1;
    test_spec(&one, 0, false);
    two = encoding_spec(encoding, UCM_ENCODING_BF16, 16, 2, 192, 0, 0);
    two.tensor[1].dim = 128;
    two.tensor[1].heads = 5;
    test_spec(&two, 0, true);
}

/* A block whose layers lie side by side is one tensor. With lossless, some blocks fit, some have a
 * part with more escapes than its share, and some do not fit. */
static void fill_long(uint8_t *to, uint64_t elements, uint32_t kind)
{
    uint64_t dense = rnd_below(64) * (elements / 64);

    for (uint64_t i = 0; i < elements; i++) {
        bool here = kind == 1 && i >= dense && i < dense + elements / 64;
        uint32_t odd = kind == 2 ? 12 : here ? 30 : 1;
        uint32_t exponent = rnd_below(1000) < odd ? rnd_below(3) == 0 ? 255 : 60 + rnd_below(9)
                                                  : 120 + rnd_below(10);
        uint16_t h = (uint16_t)((rnd() & 0x807f) | exponent << 7);

        memcpy(to + 2 * i, &h, 2);
    }
}

static void test_long(uint32_t encoding)
{
    for (uint32_t how = 0; how < 4; how++) {
        struct ucm_encoding_spec spec =
            encoding_spec(encoding, UCM_ENCODING_BF16, how < 2 ? 1024 : 600, 8, 128, how % 2, 0);
        struct rig r;

        spec.n_tensors = 1;
        rig_open(&r, &spec, 0, how == 3);
        for (uint32_t turn = 0; turn < 2; turn++) {
            for (uint32_t i = 0; i < ITEMS; i++)
                for (uint32_t p = 0; p < r.n_planes; p++)
                    fill_long(page_of(&r, i, p), r.raw[0] / 2, (i + p + turn) % 3);
            dump(&r);
            load(&r);
        }
        rig_close(&r);
    }
}

/* ---- all values ---- */

static void put_all(struct rig *r, uint32_t how)
{
    for (uint32_t i = 0; i < ITEMS; i++)
        for (uint32_t p = 0; p < r->n_planes; p++) {
            uint8_t *page = page_of(r, i, p);
            uint64_t n = r->raw[r->planes[p].tensor] / 2;

            for (uint64_t e = 0; e < n; e++) {
                uint64_t row = e / r->spec.tensor[0].dim;
                /* One value a row; neighbours; values far apart. */
                uint16_t h = (uint16_t)(how == 0   ? (e % 8 == row % 8 ? row : 0)
                                        : how == 1 ? e
                                                   : e * 40503);

                memcpy(page + 2 * e, &h, 2);
            }
        }
}

static void test_values(uint32_t encoding, uint32_t dtype)
{
    bool wide = aligned_pages(encoding);
    struct ucm_encoding_spec spec =
        encoding_spec(encoding, dtype, 1024, wide ? 32 : 64, wide ? 16 : 8, 0, 0);
    struct rig r;

    rig_open(&r, &spec, 0, false);
    for (uint32_t how = 0; how < 4; how++) {
        put_all(&r, how);
        dump(&r);
        load(&r);
    }
    rig_close(&r);
}

/* Every code with every scale byte. int8's scales have two bytes: all 256 high bytes, with some low
 * ones. */
static void test_codes(uint32_t encoding, uint32_t dtype)
{
    struct ucm_encoding_spec spec = encoding_spec(encoding, dtype, 256, 4, 256, 0, 0);
    uint32_t rows = 1024, bytes = encoding == UCM_ENCODING_FP8 ? 1 : 2;
    struct rig r;

    rig_open(&r, &spec, 0, false);
    for (uint32_t i = 0; i < ITEMS; i++)
        for (uint32_t p = 0; p < r.n_planes; p++) {
            uint8_t *encoded = encoded_of(&r, i, p), *scales = encoded + rows * 256;

            for (uint32_t e = 0; e < rows * 256; e++)
                encoded[e] = (uint8_t)e;
            for (uint32_t row = 0; row < rows; row++) {
                scales[row * bytes] = bytes == 1 ? (uint8_t)row : (uint8_t)(rnd() * (p > 0));
                scales[row * bytes + bytes - 1] = (uint8_t)row;
            }
        }
    load(&r);
    rig_close(&r);
}

int main(int argc, char **argv)
{
    gpu_begin(argc, argv);
    gpu_load(ucm_encoding_fatbin);
    for (uint32_t i = 0; i < sizeof(methods) / sizeof(*methods); i++) {
        test_shapes(methods[i]);
        test_tensors(methods[i]);
        if (!few || methods[i] == UCM_ENCODING_LOSSLESS)
            test_long(methods[i]);
        for (uint32_t dtype = UCM_ENCODING_F16; !few && dtype <= UCM_ENCODING_BF16; dtype++) {
            if (methods[i] == UCM_ENCODING_LOSSLESS && dtype != UCM_ENCODING_BF16)
                continue;
            test_values(methods[i], dtype);
            if (methods[i] <= UCM_ENCODING_INT8)
                test_codes(methods[i], dtype);
        }
    }
    return gpu_end();
}

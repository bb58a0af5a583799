/* docs/protocol.md against the tables and the encoder: every method, field, bound, limit and error
 * that the code has stands there, and its frames and vectors are the ones that the code makes. A
 * failure says what the page should hold. */
#include "proto/tables.h"
#include "tests/unit/proto/docs_page.h"

#include <criterion/criterion.h>
#include <ctype.h>
#include <inttypes.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE "docs/protocol.md"
static char *page;

static void page_read(void)
{
    page = docs_page_read(PAGE);
}

static void page_free(void)
{
    free(page);
}

TestSuite(proto_docs, .init = page_read, .fini = page_free);

/* ---- tables ---- */

static const char *kind_text(enum proto_kind kind)
{
    switch (kind) {
    case PROTO_KIND_u64:
        return "uint";
    case PROTO_KIND_str:
        return "str";
    case PROTO_KIND_bin:
        return "bin";
    case PROTO_KIND_flag:
        return "bool";
    case PROTO_KIND_f64:
        return "float";
    case PROTO_KIND_u32s:
        return "array of uint";
    case PROTO_KIND_handles:
        return "array of handle";
    case PROTO_KIND_planes:
        break;
    }
    return "array of plane";
}

/* "| `keys` | bin | required | 16 to 524288 bytes |" */
static void row_text(const struct proto_field *f, char *out, size_t room)
{
    const char *unit = f->kind == PROTO_KIND_u64 || f->kind == PROTO_KIND_f64   ? ""
                       : f->kind == PROTO_KIND_str || f->kind == PROTO_KIND_bin ? " bytes"
                                                                                : " entries";
    char bounds[64];

    if (f->kind == PROTO_KIND_flag)
        snprintf(bounds, sizeof(bounds), "true, false");
    else if (f->min == f->max)
        snprintf(bounds, sizeof(bounds), "%" PRIu64 "%s", f->min, unit);
    else
        snprintf(bounds, sizeof(bounds), "%" PRIu64 " to %" PRIu64 "%s", f->min, f->max, unit);
    snprintf(out, room, "| `%s` | %s | %s | %s |", f->name, kind_text((enum proto_kind)f->kind),
             f->required ? "required" : "optional", bounds);
}

/* The text from a heading to the next one of its level. Freed by the caller. */
static char *section(const char *heading)
{
    const char *begin = strstr(page, heading), *end;

    cr_assert_not_null(begin, PAGE " has no heading \"%s\"", heading + 1);
    end = strstr(begin + strlen(heading), "\n### ");
    return end ? strndup(begin, (size_t)(end - begin)) : strdup(begin);
}

static void assert_rows(const char *text, const char *where, const struct proto_message *m)
{
    const struct proto_field *f = m->fields;
    char row[200];

    for (uint32_t i = 0; i < m->n_fields; i++, f++) {
        row_text(f, row, sizeof(row));
        cr_assert_not_null(strstr(text, row), PAGE ", \"%s\" lacks: %s", where, row);
    }
}

Test(proto_docs, every_method_and_field_is_told)
{
    char heading[64], *text;

    for (int i = 0; i < UCM_METHOD_COUNT; i++) {
        const char *name = proto_methods[i].name.p;

        snprintf(heading, sizeof(heading), "\n### `%s`\n", name);
        text = section(heading);
        assert_rows(text, name, proto_methods[i].params);
        assert_rows(text, name, proto_methods[i].result);
        if (i == UCM_METHOD_REGION_REGISTER) {
            assert_rows(text, name, &proto_handle);
            assert_rows(text, name, &proto_plane);
        }
        if (i == UCM_METHOD_LOAD)
            assert_rows(text, UCM_PROGRESS, &proto_progress);
        if (i == UCM_METHOD_WINDOW_RELEASE)
            assert_rows(text, UCM_WINDOW_REVOKE, &proto_window_revoke);
        free(text);
    }
}

Test(proto_docs, every_error_is_told)
{
    char row[200];

#define X(name, code, sentence)                                                                    \
    snprintf(row, sizeof(row), "| %d | %s | %s |", code, #name, sentence);                         \
    cr_assert_not_null(strstr(page, row), PAGE " lacks: %s", row);
    UCM_ERRORS(X)
#undef X
}

Test(proto_docs, every_limit_is_told)
{
    static const struct {
        const char *what;
        unsigned long value;
    } limits[] = {
        {"protocol version", UCM_PROTOCOL_VERSION},
        {"oldest protocol version", UCM_PROTOCOL_VERSION_MIN},
        {"bytes of a request id", UCM_MAX_REQUEST_BYTES},
        {"bytes of a frame's body", UCM_MAX_FRAME_BYTES},
        {"nesting of arrays and maps", UCM_MAX_DEPTH},
        {"MessagePack values in a frame", UCM_MAX_ELEMENTS},
        {"descriptors with a frame", UCM_MAX_FRAME_FDS},
        {"bytes of a key, at least", UCM_MIN_KEY_BYTES},
        {"bytes of a key, at most", UCM_MAX_KEY_BYTES},
        {"keys of a request", UCM_MAX_KEYS},
        {"items of a fetch", UCM_MAX_FETCH_ITEMS},
        {"bytes of a name", UCM_MAX_NAME_BYTES},
        {"bytes of a salt", UCM_MAX_SALT_BYTES},
        {"parts of a block", UCM_MAX_PARTS},
        {"shards of a part", UCM_MAX_SHARDS},
        {"planes of a region", UCM_MAX_PLANES},
        {"handles of a region", UCM_MAX_HANDLES},
        {"bytes of a CUDA IPC handle", UCM_MAX_HANDLE_BYTES},
        {"bytes of a nonce", UCM_NONCE_BYTES},
        {"rows of a selection", UCM_MAX_SELECT_ROWS},
        {"blocks of a chain", UCM_MAX_CHAIN_BLOCKS},
        {"milliseconds of a deadline", UCM_DEADLINE_MS},
    };
    char row[100];

    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        snprintf(row, sizeof(row), "| %s | %lu |", limits[i].what, limits[i].value);
        cr_assert_not_null(strstr(page, row), PAGE " lacks: %s", row);
    }
}

/* ---- hex ---- */

/* The bytes of the first fenced block behind a marker. Returns how many; freed by the caller. */
static size_t hex_after(const char *marker, uint8_t **out)
{
    const char *p = strstr(page, marker), *end;
    unsigned high = 0;
    size_t n = 0;

    cr_assert_not_null(p, PAGE " lacks %s", marker);
    p = strstr(p, "```\n");
    cr_assert_not_null(p, "no block behind %s", marker);
    p += 4;
    end = strstr(p, "```");
    cr_assert_not_null(end, "the block behind %s does not end", marker);
    *out = malloc((size_t)(end - p) / 2 + 1);
    for (bool second = false; p < end; p++) {
        if (isspace((unsigned char)*p))
            continue;
        cr_assert(isxdigit((unsigned char)*p), "%s: '%c' is no hex digit", marker, *p);
        high =
            high << 4 | (unsigned)(isdigit((unsigned char)*p) ? *p - '0' : tolower(*p) - 'a' + 10);
        if (second)
            (*out)[n++] = (uint8_t)high;
        second = !second;
    }
    return n;
}

static void assert_hex(const char *marker, const uint8_t *right, size_t n)
{
    char *text = malloc(3 * n + n / 16 + 2);
    uint8_t *shown;
    size_t shown_n = hex_after(marker, &shown), at = 0;

    for (size_t i = 0; i < n; i++)
        at +=
            (size_t)sprintf(text + at, "%02x%s", right[i], i % 16 == 15 || i + 1 == n ? "\n" : " ");
    cr_assert(shown_n == n && memcmp(shown, right, n) == 0, PAGE ", %s should be:\n%s", marker,
              text);
    free(shown);
    free(text);
}

/* ---- frames: the session that the page shows ---- */

#define TEXT(s)                                                                                    \
    {                                                                                              \
        s, sizeof(s) - 1                                                                           \
    }
#define BYTES(a)                                                                                   \
    {                                                                                              \
        a, sizeof(a)                                                                               \
    }

static const uint8_t instance[16] = {0xb0, 0x2f, 0x9d, 0x11, 0x64, 0xc8, 0x4a, 0x70,
                                     0x93, 0x5e, 0x21, 0x0c, 0xfa, 0x87, 0x36, 0xd4};
static const uint8_t keys[32] = {0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0a,
                                 0x0b, 0x0c, 0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15,
                                 0x16, 0x17, 0x18, 0x19, 0x1a, 0x1b, 0x1c, 0x1d, 0x1e, 0x1f};
static const uint8_t blocks[8] = {7, 0, 0, 0, 0x2c, 0x01, 0, 0};
static const uint8_t both_ok[2] = {UCM_BLOCK_OK, UCM_BLOCK_OK};
static const uint32_t shards[1] = {2};
static const struct msg_handle handles[1] = {{.kind = UCM_HANDLE_MEMFD, .bytes = 8192000}};
static const struct msg_plane planes[2] = {
    {.stride = 8192, .chunk = 4096},
    {.offset = 4096, .stride = 8192, .chunk = 4096, .shard = 1},
};

static void fingerprint_of_page(uint8_t out[32])
{
    uint8_t *canonical;
    size_t n = hex_after("<!-- vector: canonical form -->", &canonical);

    cr_assert_eq(EVP_Digest(canonical, n, out, NULL, EVP_sha256(), NULL), 1);
    free(canonical);
}

static void assert_request(const char *marker, uint32_t msgid, enum ucm_method method,
                           const void *params)
{
    struct ucm_error e = {0};
    struct proto_buf b;

    proto_buf_init(&b, DOCS_PAGE_BYTES);
    cr_assert_eq(proto_request(&b, msgid, method, proto_methods[method].params, params, &e), 0,
                 "%s", e.text);
    assert_hex(marker, b.p, b.n);
    proto_buf_free(&b);
}

static void assert_response(const char *marker, uint32_t msgid, enum ucm_method method,
                            const void *result)
{
    struct ucm_error e = {0};
    struct proto_buf b;

    proto_buf_init(&b, DOCS_PAGE_BYTES);
    cr_assert_eq(proto_response(&b, msgid, proto_methods[method].result, result, &e), 0, "%s",
                 e.text);
    assert_hex(marker, b.p, b.n);
    proto_buf_free(&b);
}

Test(proto_docs, frames_that_open_a_session)
{
    struct msg_hello hello = {1, 1, TEXT("demo")};
    struct msg_hello_r hello_r = {
        .version = 1,
        .server = TEXT("ucmd 0.1.0"),
        .instance = BYTES(instance),
        .tenant = TEXT("uid:1000"),
        .max_frame_bytes = UCM_MAX_FRAME_BYTES,
        .max_keys = UCM_MAX_KEYS,
        .max_requests = 256,
        .max_regions = 64,
        .max_leases = 4096,
        .max_lease_ms = 600000,
        .max_deadline_ms = UCM_DEADLINE_MS,
    };
    struct msg_ns_open ns = {
        .model = TEXT("demo"),
        .dtype = TEXT("bf16"),
        .layout = TEXT("nhd/1"),
        .block_tokens = 16,
        .key_bytes = 16,
        .parts = 1,
        .shards = {shards, 1},
        .shard_bytes = 4096,
    };
    uint8_t fingerprint[32];
    struct msg_ns_open_r ns_r = {1, BYTES(fingerprint)};
    struct msg_region_register region = {.ns = 1,
                                         .blocks = 1000,
                                         .device = TEXT("cpu"),
                                         .handles = {handles, 1},
                                         .planes = {planes, 2}};

    fingerprint_of_page(fingerprint);
    assert_request("<!-- frame: hello -->", 1, UCM_METHOD_HELLO, &hello);
    assert_response("<!-- frame: hello, answer -->", 1, UCM_METHOD_HELLO, &hello_r);
    assert_request("<!-- frame: namespace.open -->", 2, UCM_METHOD_NS_OPEN, &ns);
    assert_response("<!-- frame: namespace.open, answer -->", 2, UCM_METHOD_NS_OPEN, &ns_r);
    assert_request("<!-- frame: region.register -->", 3, UCM_METHOD_REGION_REGISTER, &region);
    assert_response("<!-- frame: region.register, answer -->", 3, UCM_METHOD_REGION_REGISTER,
                    &(struct msg_region){1});
}

Test(proto_docs, frames_that_move_blocks)
{
    struct msg_lookup lookup = {.ns = 1, .keys = BYTES(keys), .lease_ms = 30000};
    struct msg_lookup_r lookup_r = {.hits = 2, .dram = 2, .lease = 1};
    struct msg_load load = {.region = 1, .keys = BYTES(keys), .blocks = BYTES(blocks), .lease = 1};
    struct msg_dump dump = {.region = 1, .keys = BYTES(keys), .blocks = BYTES(blocks)};
    struct msg_blocks_r blocks_r = {BYTES(both_ok), 16384};

    assert_request("<!-- frame: dump -->", 4, UCM_METHOD_DUMP, &dump);
    assert_response("<!-- frame: dump, answer -->", 4, UCM_METHOD_DUMP, &blocks_r);
    assert_request("<!-- frame: lookup -->", 5, UCM_METHOD_LOOKUP, &lookup);
    assert_response("<!-- frame: lookup, answer -->", 5, UCM_METHOD_LOOKUP, &lookup_r);
    assert_request("<!-- frame: load -->", 6, UCM_METHOD_LOAD, &load);
    assert_response("<!-- frame: load, answer -->", 6, UCM_METHOD_LOAD, &blocks_r);
}

Test(proto_docs, frames_that_tell_errors)
{
    struct ucm_error e;
    struct proto_buf b;

    proto_buf_init(&b, DOCS_PAGE_BYTES);
    ucm_error_set(&e, UCM_WIRE_NOT_FOUND, "namespace 9 is not open");
    cr_assert_eq(proto_response_error(&b, 7, &e), 0);
    assert_hex("<!-- frame: error, answer -->", b.p, b.n);
    b.n = 0;
    ucm_error_set(&e, UCM_WIRE_INVALID, "the frame ends inside a value");
    cr_assert_eq(proto_notification_error(&b, &e), 0);
    assert_hex("<!-- frame: error, notification -->", b.p, b.n);
    proto_buf_free(&b);
}

/* ---- vectors ---- */

static void put_u32(uint8_t *p, size_t *n, uint32_t v)
{
    for (unsigned i = 0; i < 4; i++)
        p[(*n)++] = (uint8_t)(v >> (8 * i));
}

static void put_text(uint8_t *p, size_t *n, const char *s)
{
    put_u32(p, n, (uint32_t)strlen(s));
    memcpy(p + *n, s, strlen(s));
    *n += strlen(s);
}

/* The canonical form, written down once more from the page's words. */
Test(proto_docs, fingerprint_vector)
{
    static const char label[16] = "ucm-namespace-1";
    static const char *const texts[] = {"uid:1000", "demo", "", "bf16", "nhd/1"};
    static const uint32_t numbers[] = {16, 16, 1, 2, 4096, 0, 0};
    uint8_t form[256], digest[32];
    size_t n = sizeof(label);

    memcpy(form, label, n);
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        put_text(form, &n, texts[i]);
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        put_u32(form, &n, numbers[i]);
    assert_hex("<!-- vector: canonical form -->", form, n);
    cr_assert_eq(EVP_Digest(form, n, digest, NULL, EVP_sha256(), NULL), 1);
    assert_hex("<!-- vector: fingerprint -->", digest, sizeof(digest));
}

Test(proto_docs, block_key_vectors)
{
    static const char label[12] = "ucm-block-1";
    static const char *const markers[] = {"<!-- vector: sha256 key 0 -->",
                                          "<!-- vector: sha256 key 1 -->"};
    uint8_t form[256], key[32] = {0};
    uint32_t token = 1;

    for (size_t block = 0; block < 2; block++) {
        size_t n = sizeof(label);

        memcpy(form, label, n);
        memcpy(form + n, key, sizeof(key));
        n += sizeof(key);
        for (unsigned i = 0; i < 16; i++)
            put_u32(form, &n, token++);
        cr_assert_eq(EVP_Digest(form, n, key, NULL, EVP_sha256(), NULL), 1);
        assert_hex(markers[block], key, sizeof(key));
    }
}

/* docs/protocol.md against the tables: every method, field, bound, limit and error that the code has stands there. A failure
 * says what the page should hold. Its frames and vectors: tests/integration/test_protocol.py. */
#include "proto/tables.h"
#include "tests/unit/proto/docs_page.h"

#include <criterion/criterion.h>
#include <inttypes.h>
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

static const struct {
    const char *name, *unit;
} kinds[] = {
    [PROTO_KIND_u64] = {"uint", ""},
    [PROTO_KIND_str] = {"str", " bytes"},
    [PROTO_KIND_bin] = {"bin", " bytes"},
    [PROTO_KIND_flag] = {"bool", ""},
    [PROTO_KIND_f64] = {"float", ""},
    [PROTO_KIND_u32s] = {"array of uint", " entries"},
    [PROTO_KIND_handles] = {"array of handle", " entries"},
    [PROTO_KIND_planes] = {"array of plane", " entries"},
};

/* "| `keys` | bin | required | 16 to 524288 bytes |" */
static void row_text(const struct proto_field *f, char *out, size_t room)
{
    const char *unit = kinds[f->kind].unit;
    char bounds[64];

    if (f->kind == PROTO_KIND_flag)
        snprintf(bounds, sizeof(bounds), "true, false");
    else if (f->min == f->max)
        snprintf(bounds, sizeof(bounds), "%" PRIu64 "%s", f->min, unit);
    else
        snprintf(bounds, sizeof(bounds), "%" PRIu64 " to %" PRIu64 "%s", f->min, f->max, unit);
    snprintf(out, room, "| `%s` | %s | %s | %s |", f->name, kinds[f->kind].name,
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

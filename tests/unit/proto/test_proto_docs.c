/* Compares docs/methods.md and docs/protocol.md with the tables: they have every method, field,
 * bound, limit and error of the code. So `make docs` reads the headers as the compiler does. Frames
 * and vectors: tests/integration/test_protocol.py. */
#include "proto/tables.h"
#include "tests/unit/proto/docs_page.h"

#include <criterion/criterion.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE "docs/protocol.md"
#define METHODS "docs/methods.md"
static char *page, *methods;

static void page_read(void)
{
    page = docs_page_read(PAGE);
    methods = docs_page_read(METHODS);
}

static void page_free(void)
{
    free(page);
    free(methods);
}

TestSuite(proto_docs, .init = page_read, .fini = page_free);

/* ---- tables ---- */

static const char *const kinds[] = {
    [PROTO_KIND_u64] = "uint",     [PROTO_KIND_str] = "str",     [PROTO_KIND_bin] = "bin",
    [PROTO_KIND_flag] = "bool",    [PROTO_KIND_f64] = "float",   [PROTO_KIND_u32s] = "uints",
    [PROTO_KIND_handles] = "maps", [PROTO_KIND_planes] = "maps",
};

/* "16", "2^32-1" */
static void number_text(uint64_t n, char out[32])
{
    uint64_t more = n + 1;

    if (n >= 1u << 30 && (n & more) == 0)
        snprintf(out, 32, "2^%d-1", more ? __builtin_ctzll(more) : 64);
    else if (n >= 1u << 30 && (n & (n - 1)) == 0)
        snprintf(out, 32, "2^%d", __builtin_ctzll(n));
    else
        snprintf(out, 32, "%" PRIu64, n);
}

/* "`keys`? bin(16..524288)" */
static void field_text(const struct proto_field *f, bool mark, char *out, size_t room)
{
    char min[32], max[32], bounds[80] = "";

    number_text(f->min, min);
    number_text(f->max, max);
    if (f->kind == PROTO_KIND_flag ||
        (f->kind == PROTO_KIND_u64 && f->min == 0 && f->max == UINT64_MAX))
        bounds[0] = '\0';
    else if (f->min == f->max)
        snprintf(bounds, sizeof(bounds), "(%s)", min);
    else
        snprintf(bounds, sizeof(bounds), "(%s..%s)", min, max);
    snprintf(out, room, "`%s`%s %s%s", f->name, mark ? "?" : "", kinds[f->kind], bounds);
}

/* Whether p stands in an item before its meaning: of a list, or after the list's title. Further
 * lines of an item begin with spaces. */
static bool before_meaning(const char *text, const char *p)
{
    const char *line = p, *item = NULL, *meaning;

    while (line > text && (line[-1] != '\n' || *line == ' '))
        line--;
    if (strncmp(line, "- `", 3) == 0)
        item = line;
    else if (strncmp(line, "Params: ", 8) == 0 || strncmp(line, "Results: ", 9) == 0 ||
             strncmp(line, "In `", 4) == 0)
        item = strstr(line, ": `");
    if (!item || item > p)
        return false;
    meaning = strstr(item + 2, ": ");
    return !meaning || meaning > p;
}

/* Whether a list of text, a method's section, has the field. */
static bool has_field(const char *text, const char *field)
{
    for (const char *p = text; (p = strstr(p, field)) != NULL; p++)
        if (before_meaning(text, p) && strchr(":,.\n", p[strlen(field)]))
            return true;
    return false;
}

/* The text of a method, from its heading to the next. Freed by the caller. */
static char *section(const char *method)
{
    const char *begin, *end;
    char heading[64];

    snprintf(heading, sizeof(heading), "\n### `%s`\n", method);
    begin = strstr(methods, heading);
    cr_assert_not_null(begin, METHODS " has no heading \"%s\"", heading + 1);
    end = strstr(begin + strlen(heading), "\n### ");
    return end ? strndup(begin, (size_t)(end - begin)) : strdup(begin);
}

/* As has_field(). Or it has the name alone, and the common fields have the type. */
static bool tells(const char *text, const struct proto_field *f)
{
    char field[200], name[80], *common;
    const char *begin, *end;
    bool told;

    field_text(f, !f->required, field, sizeof(field));
    if (has_field(text, field))
        return true;
    snprintf(name, sizeof(name), "`%s`%s", f->name, f->required ? "" : "?");
    begin = strstr(methods, "\n## Common fields\n");
    end = begin ? strstr(begin, "\n## Connect\n") : NULL;
    cr_assert_not_null(end, METHODS " has no common fields before \"Connect\"");
    common = strndup(begin, (size_t)(end - begin));
    field_text(f, false, field, sizeof(field));
    told = has_field(text, name) && has_field(common, field);
    free(common);
    return told;
}

/* other: another section, or NULL. */
static void assert_fields(const char *text, const char *other, const char *where,
                          const struct proto_message *m)
{
    const struct proto_field *f = m->fields;
    char field[200];

    for (uint32_t i = 0; i < m->n_fields; i++, f++) {
        field_text(f, !f->required, field, sizeof(field));
        cr_assert(tells(text, f) || (other && tells(other, f)), METHODS ", \"%s\" lacks: %s", where,
                  field);
    }
}

/* Fields stand in the method's section, or in that of the method which "Params: [`NAME`]" names
 * there, or the same of results. */
static void assert_message(const char *method, const char *begins, const struct proto_message *m)
{
    char *text = section(method), *same = strstr(text, begins), *other = NULL, name[64];

    if (same) {
        same += strlen(begins);
        snprintf(name, sizeof(name), "%.*s", (int)strcspn(same, "`"), same);
        other = section(name);
    }
    assert_fields(text, other, method, m);
    free(text);
    free(other);
}

static void assert_inner(const char *method, const char *name, const struct proto_message *m)
{
    char *text = section(method);

    assert_fields(text, NULL, name, m);
    free(text);
}

Test(proto_docs, every_method_and_field_is_told)
{
    for (int i = 0; i < UCM_METHOD_COUNT; i++) {
        const char *name = proto_methods[i].name.p;

        assert_message(name, "\nParams: [`", proto_methods[i].params);
        assert_message(name, "\nResults: [`", proto_methods[i].result);
    }
    assert_inner("region.register", "handles", &proto_handle);
    assert_inner("region.register", "planes", &proto_plane);
    assert_inner("load", UCM_PROGRESS, &proto_progress);
    assert_inner("mapping.release", UCM_MAPPING_REVOKE, &proto_mapping_revoke);
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
        {"items of a gather", UCM_MAX_GATHER_ITEMS},
        {"bytes of a name", UCM_MAX_NAME_BYTES},
        {"bytes of a salt", UCM_MAX_SALT_BYTES},
        {"parts of a block", UCM_MAX_PARTS},
        {"layers of a part", UCM_MAX_LAYERS},
        {"planes of a region", UCM_MAX_PLANES},
        {"handles of a region", UCM_MAX_HANDLES},
        {"bytes of a CUDA IPC handle", UCM_MAX_HANDLE_BYTES},
        {"bytes of a nonce", UCM_NONCE_BYTES},
        {"rows of a selection", UCM_MAX_SELECT_ROWS},
        {"blocks of a sequence", UCM_MAX_SEQUENCE_BLOCKS},
        {"milliseconds of a timeout", UCM_TIMEOUT_MS},
    };
    char row[100];

    for (size_t i = 0; i < sizeof(limits) / sizeof(limits[0]); i++) {
        snprintf(row, sizeof(row), "| %s | %lu |", limits[i].what, limits[i].value);
        cr_assert_not_null(strstr(page, row), PAGE " lacks: %s", row);
    }
}

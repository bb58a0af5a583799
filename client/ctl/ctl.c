#include "client/ctl/ctl.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fail_status(const struct args *a, int status, bool connecting)
{
    const char *text = ucm_errmsg(), *socket = program_socket(a);

    if (status == -UCM_ENODAEMON)
        return program_fail(CTL_NO_DAEMON,
                            "no daemon listens on %s. Start it with 'systemctl start ucmd' or "
                            "'ucmd --set socket=%s', or name another socket with --socket PATH or "
                            "$UCM_SOCKET.",
                            socket, socket);
    if (status == -UCM_EDISCONNECTED || (connecting && status == -UCM_EDEADLINE))
        return program_fail(CTL_NO_DAEMON, "the daemon at %s does not answer: %s", socket,
                            text[0] != '\0' ? text : ucm_strerror(status));
    if (text[0] == '\0')
        return program_fail(CTL_ERROR, "%s", ucm_strerror(status));
    return program_fail(CTL_ERROR, "%s (%s)", text, ucm_strerror(status));
}

static int timeout_ms(const struct args *a)
{
    return (int)args_number(a, "timeout");
}

int ctl_connect_quietly(const struct args *a)
{
    struct ctl *c = a->ctx;
    const struct ucm_options options = {
        .name = program_name(), .socket = program_socket(a), .default_timeout_ms = timeout_ms(a)};
    int rc = 0;

    if (c->client == NULL) {
        rc = answer_connect(&options, timeout_ms(a), &c->client);
        if (rc == 0)
            rc = ucm_server_info(c->client, &c->server);
    }
    return rc;
}

int ctl_connect(const struct args *a)
{
    int rc = ctl_connect_quietly(a);

    return rc < 0 ? fail_status(a, rc, true) : CTL_OK;
}

int ctl_call(const struct args *a, enum ucm_method method, const void *params, struct answer *out)
{
    struct ctl *c = a->ctx;
    int rc = ctl_connect(a);

    if (rc != CTL_OK)
        return rc;
    rc = answer_call(c->client, method, params, timeout_ms(a), out);
    return rc < 0 ? fail_status(a, rc, false) : CTL_OK;
}

int ctl_page(const struct args *a, enum ucm_method method, uint32_t ns, uint64_t limit,
             uint64_t *cursor, struct answer *out)
{
    struct ctl *c = a->ctx;
    int rc = ctl_connect(a);

    if (rc != CTL_OK)
        return rc;
    rc = answer_page(c->client, method, ns, limit, cursor, timeout_ms(a), out);
    return rc < 0 ? fail_status(a, rc, false) : CTL_OK;
}

int ctl_show(const struct args *a, enum ucm_method method, const void *params,
             int (*show)(const struct args *a, const msgpack_object *result))
{
    struct answer result;
    int rc = ctl_call(a, method, params, &result);

    if (rc != CTL_OK)
        return rc;
    rc = show(a, result.root);
    answer_close(&result);
    return rc;
}

int ctl_print_json(cJSON *document, bool one_line)
{
    char *text = NULL;

    if (document != NULL)
        text = one_line ? cJSON_PrintUnformatted(document) : cJSON_Print(document);
    cJSON_Delete(document);
    if (text == NULL)
        return program_fail(CTL_ERROR, "memory ran out");
    puts(text);
    fflush(stdout);
    cJSON_free(text);
    return CTL_OK;
}

void ctl_json_u64(cJSON *object, const char *name, uint64_t v)
{
    cJSON_AddItemToObject(object, name, answer_json_u64(v));
}

void ctl_json_counts(cJSON *object, const msgpack_object *map, const char *const *fields)
{
    for (; *fields != NULL; fields++)
        ctl_json_u64(object, *fields, answer_u64(map, *fields));
}

/* ---- tables ---- */

void ctl_table_begin(struct table *t, const struct ctl_column *columns)
{
    const char *titles[TABLE_MAX_COLUMNS + 1] = {0};

    for (size_t i = 0; i < TABLE_MAX_COLUMNS && columns[i].title; i++)
        titles[i] = columns[i].title;
    table_begin(t, titles);
}

static void ratio_cell(struct table *t, uint64_t raw, uint64_t stored)
{
    if (raw == 0 || stored == 0 || raw == stored)
        table_cell(t, "-");
    else
        table_cell(t, "%.2f", (double)raw / (double)stored);
}

static void cell(struct table *t, const struct ctl_column *column, const msgpack_object *o)
{
    uint64_t v = answer_u64(o, column->field);
    bool flag = answer_flag(o, column->field);
    char text[257];

    switch (column->format) {
    case SHOW_TEXT:
        table_cell(t, "%s", answer_text(o, column->field, text, sizeof text));
        break;
    case SHOW_PREFIX:
        table_cell(t, "%.12s", answer_text(o, column->field, text, sizeof text));
        break;
    case SHOW_NUMBER:
        table_cell(t, "%" PRIu64, v);
        break;
    case SHOW_RATIO:
        ratio_cell(t, answer_u64(o, "raw_layer_bytes"), v);
        break;
    case SHOW_BYTES:
    case SHOW_BOUND:
        table_cell(t, "%s", v == 0 && column->format == SHOW_BOUND ? "-" : human_bytes(text, v));
        break;
    case SHOW_US:
        table_cell(t, "%.1f", (double)v / 1000);
        break;
    case SHOW_HEX:
        table_cell(t, "%" PRIx64, v);
        break;
    case SHOW_HASH:
        table_cell(t, "%016" PRIx64, v);
        break;
    case SHOW_YES:
        table_cell(t, "%s", flag ? "yes" : "-");
        break;
    case SHOW_COMPLETE:
        table_cell(t, "%s", flag ? "complete" : "partial");
        break;
    }
}

void ctl_table_row(struct table *t, const struct ctl_column *columns, const msgpack_object *o)
{
    for (; columns->title; columns++)
        cell(t, columns, o);
}

int ctl_table_end(struct table *t)
{
    return table_end(t, stdout) < 0 ? program_fail(CTL_ERROR, "memory ran out") : CTL_OK;
}

int ctl_table(const msgpack_object *map, const char *array, const struct ctl_column *columns)
{
    struct table t;

    ctl_table_begin(&t, columns);
    for (uint32_t i = 0; i < answer_count(map, array); i++)
        ctl_table_row(&t, columns, answer_at(map, array, i));
    return ctl_table_end(&t);
}

/* ---- namespaces ---- */

int ctl_each_namespace(const struct args *a,
                       int (*each_cb)(const struct args *a, const msgpack_object *ns, void *ctx),
                       void *ctx)
{
    uint64_t cursor = 0;
    int rc;

    do {
        struct answer page;

        rc = ctl_page(a, UCM_METHOD_NS_LIST, 0, 0, &cursor, &page);
        if (rc != CTL_OK)
            return rc;
        for (uint32_t i = 0; rc == CTL_OK && i < answer_count(page.root, "namespaces"); i++)
            rc = each_cb(a, answer_at(page.root, "namespaces", i), ctx);
        answer_close(&page);
    } while (rc == CTL_OK && cursor != 0);
    return rc;
}

struct search {
    const char *name;
    unsigned long long number;
    bool is_number, by_number; /* by_number: found by it, which beats fingerprints */
    uint32_t found;
    struct ctl_namespace *out;
};

static int search_cb(const struct args *a, const msgpack_object *o, void *ctx)
{
    struct search *search = ctx;
    uint32_t ns = (uint32_t)answer_u64(o, "ns");
    size_t digits = strlen(search->name);
    char fingerprint[sizeof search->out->fingerprint];
    bool by_number = search->is_number && ns == search->number;

    (void)a;
    answer_text(o, "fingerprint", fingerprint, sizeof fingerprint);
    if (search->by_number || (!by_number && (digits < CTL_FINGERPRINT_DIGITS ||
                                             strncasecmp(fingerprint, search->name, digits) != 0)))
        return CTL_OK;
    search->by_number = by_number;
    search->found = by_number ? 1 : search->found + 1;
    *search->out = (struct ctl_namespace){
        .ns = ns,
        .key_bytes = (uint32_t)answer_u64(o, "key_bytes"),
        .blocks = answer_u64(o, "blocks"),
    };
    memcpy(search->out->fingerprint, fingerprint, sizeof fingerprint);
    answer_text(o, "model", search->out->model, sizeof search->out->model);
    return CTL_OK;
}

int ctl_namespace_find(const struct args *a, const char *name, struct ctl_namespace *out)
{
    struct search search = {.name = name, .out = out};
    char *end;
    int rc;

    search.number = strtoull(name, &end, 10);
    search.is_number = *end == '\0' && name[0] >= '0' && name[0] <= '9';
    rc = ctl_each_namespace(a, search_cb, &search);
    if (rc != CTL_OK)
        return rc;
    if (search.found == 1)
        return CTL_OK;
    if (search.found > 1)
        return program_fail(CTL_ERROR,
                            "%" PRIu32
                            " namespaces have fingerprints that begin with '%s'; give more of it",
                            search.found, name);
    return program_fail(CTL_ERROR,
                        "no namespace '%s': give its number or the first %d digits or more of its "
                        "fingerprint, as '%s namespace list' shows them",
                        name, CTL_FINGERPRINT_DIGITS, program_name());
}

static bool parse_hex(const char *text, uint8_t *out, size_t n)
{
    if (strlen(text) != 2 * n || strspn(text, "0123456789abcdefABCDEF") != 2 * n)
        return false;
    for (size_t i = 0; i < n; i++)
        if (sscanf(text + 2 * i, "%2hhx", &out[i]) != 1)
            return false;
    return true;
}

int ctl_keys(const struct args *a, char **word, int n_words, const struct ctl_namespace *ns,
             struct proto_bin *keys)
{
    uint8_t *p;

    *keys = (struct proto_bin){NULL, 0};
    if (n_words == 0)
        return CTL_OK;
    p = calloc((size_t)n_words, ns->key_bytes);
    if (p == NULL)
        return program_fail(CTL_ERROR, "memory ran out");
    for (int i = 0; i < n_words; i++) {
        if (!parse_hex(word[i], p + (size_t)i * ns->key_bytes, ns->key_bytes)) {
            free(p);
            return program_usage_error(
                a, "'%s' is no key of namespace %" PRIu32 ": wanted %" PRIu32 " hexadecimal digits",
                word[i], ns->ns, 2 * ns->key_bytes);
        }
    }
    *keys = (struct proto_bin){p, (uint32_t)n_words * ns->key_bytes};
    return CTL_OK;
}

int ctl_confirm(const struct args *a, const char *format, ...)
{
    char line[16];
    va_list ap;

    if (args_given(a, "yes"))
        return CTL_OK;
    if (!isatty(STDIN_FILENO))
        return program_usage_error(a, "'%s' drops cached blocks: without a terminal it needs --yes",
                                   a->command);
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fprintf(stderr, " [y/N] ");
    if (fgets(line, sizeof line, stdin) == NULL || (line[0] != 'y' && line[0] != 'Y'))
        return program_fail(CTL_ERROR, "nothing was done");
    return CTL_OK;
}

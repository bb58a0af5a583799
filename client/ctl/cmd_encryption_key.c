/* encryption-key: tenants' keys for encryption at rest. The source of the configuration has them;
 * the daemon reads it again when told to. */
#include "client/ctl/ctl.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define POLL_MS 20
#define WAIT_MS 15000 /* a source has 10 s */

/* What came before, to tell what a reload changed. */
static struct {
    const char *tenant, *id; /* of the words */
    char current[64];
    bool found, reading, has_id;
    unsigned ids;
    char error[256];
} seen;

/* Element i of an array of numbers. */
static uint64_t number_at(const msgpack_object *o, const char *field, uint32_t i)
{
    const msgpack_object *n = answer_at(o, field, i);

    return n && n->type == MSGPACK_OBJECT_POSITIVE_INTEGER ? n->via.u64 : 0;
}

/* What the k-th key, counted from 1, has encrypted; 0: there is none. */
static void encrypted_cells(struct table *t, const msgpack_object *o, uint32_t k)
{
    char bytes[HUMAN_BYTES];

    if (k == 0) {
        table_cell(t, "%s", "");
        table_cell(t, "%s", "");
        return;
    }
    table_cell(t, "%" PRIu64, number_at(o, "nvme_parts", k - 1));
    table_cell(t, "%s", human_bytes(bytes, number_at(o, "nvme_bytes", k - 1)));
}

static int print_list(const struct args *a, const msgpack_object *result)
{
    static const char *const titles[] = {"TENANT", "KEY", "", ">PARTS", ">BYTES", "SOURCE", NULL};
    char tenant[257], source[512], error[256], id[64];
    struct table t;

    if (args_given(a, "json"))
        return ctl_print_json(answer_json(result), false);
    if (answer_count(result, "keys") == 0)
        printf("nothing is encrypted: encryption.tenants is empty\n");
    else
        table_begin(&t, titles);
    for (uint32_t i = 0; i < answer_count(result, "keys"); i++) {
        const msgpack_object *o = answer_at(result, "keys", i);
        uint32_t n = answer_count(o, "ids");

        answer_text(o, "tenant", tenant, sizeof tenant);
        answer_text(o, "source", source, sizeof source);
        answer_text(o, "error", error, sizeof error);
        for (uint32_t k = n; k > 0 || (k == 0 && n == 0); k--) {
            bool none = n == 0;

            id[0] = '\0';
            if (!none)
                answer_object_text(answer_at(o, "ids", k - 1), id, sizeof id);
            table_cell(&t, "%s", tenant);
            table_cell(&t, "%s", none ? "none" : id);
            table_cell(&t, "%s", none ? error : k == n ? "current" : "");
            encrypted_cells(&t, o, k);
            table_cell(&t, "%s", source);
            if (none)
                break;
        }
    }
    if (answer_count(result, "keys") > 0)
        (void)table_end(&t, stdout);
    return CTL_OK;
}

static int look(const struct args *a, const msgpack_object *result)
{
    char tenant[257], id[64];

    (void)a;
    seen.found = seen.has_id = false;
    for (uint32_t i = 0; i < answer_count(result, "keys"); i++) {
        const msgpack_object *o = answer_at(result, "keys", i);

        answer_text(o, "tenant", tenant, sizeof tenant);
        if (strcmp(tenant, seen.tenant) != 0)
            continue;
        seen.found = true;
        seen.reading = answer_flag(o, "reading");
        seen.ids = answer_count(o, "ids");
        seen.current[0] = '\0';
        answer_text(o, "error", seen.error, sizeof seen.error);
        for (uint32_t k = 0; k < seen.ids; k++) {
            answer_object_text(answer_at(o, "ids", k), id, sizeof id);
            seen.has_id |= seen.id && strcmp(id, seen.id) == 0;
            snprintf(seen.current, sizeof seen.current, "%s", id);
        }
    }
    return CTL_OK;
}

/* The source is read again, and has been when this returns. */
static int reload(const struct args *a)
{
    struct msg_key_reload m = {.tenant = {seen.tenant, (uint32_t)strlen(seen.tenant)}};
    int rc = ctl_show(a, UCM_METHOD_ENCRYPTION_KEY_RELOAD, &m, look);

    for (int ms = 0; rc == CTL_OK && seen.reading && ms < WAIT_MS; ms += POLL_MS) {
        (void)nanosleep(&(struct timespec){.tv_nsec = POLL_MS * 1000000L}, NULL);
        rc = ctl_show(a, UCM_METHOD_ENCRYPTION_KEY_LIST, NULL, look);
    }
    if (rc != CTL_OK)
        return rc;
    if (seen.error[0] == '\0' && !seen.reading)
        return CTL_OK;
    return program_fail(CTL_ERROR, "the keys of %s stay as they were: %s", seen.tenant, seen.error);
}

static int rotate(const struct args *a)
{
    char before[sizeof seen.current];
    int rc = ctl_show(a, UCM_METHOD_ENCRYPTION_KEY_LIST, NULL, look);

    memcpy(before, seen.current, sizeof before);
    if (rc == CTL_OK)
        rc = reload(a);
    if (rc != CTL_OK)
        return rc;
    if (strcmp(before, seen.current) == 0)
        return program_fail(CTL_ERROR,
                            "the last key of the source, %s, is the one that was current: add a "
                            "line after it (openssl rand -hex 32), and again",
                            before);
    printf("rotated: %s is current now; %u keys open what is stored\n", seen.current, seen.ids);
    return CTL_OK;
}

static int forget(const struct args *a)
{
    int rc;

    seen.id = a->word[2];
    rc = reload(a);
    if (rc != CTL_OK)
        return rc;
    if (seen.has_id)
        return program_fail(
            CTL_ERROR, "%s is still there: take its line out of the source, and again", seen.id);
    printf(
        "forgotten: nothing that %s has encrypted can be read by this daemon; %u keys are left\n",
        seen.id, seen.ids);
    return CTL_OK;
}

static int read_again(const struct args *a)
{
    int rc = reload(a);

    if (rc == CTL_OK)
        printf("read: %u keys, %s is current\n", seen.ids, seen.current);
    return rc;
}

int cmd_encryption_key(const struct args *a)
{
    const char *what = a->n_words > 0 ? a->word[0] : "list";

    if (strcmp(what, "list") == 0 && a->n_words <= 1)
        return ctl_show(a, UCM_METHOD_ENCRYPTION_KEY_LIST, NULL, print_list);
    if (a->n_words > 1)
        seen.tenant = a->word[1];
    if (strcmp(what, "reload") == 0 && a->n_words == 2)
        return read_again(a);
    if (strcmp(what, "rotate") == 0 && a->n_words == 2)
        return rotate(a);
    if (strcmp(what, "forget") == 0 && a->n_words == 3)
        return forget(a);
    if (strcmp(what, "files") == 0 && a->n_words == 2)
        return key_files(a, a->word[1]);
    return program_usage_error(
        a,
        "'encryption-key' wants list, files DIR, reload TENANT, rotate TENANT or forget TENANT ID");
}

#include "client/lib/features/encoding_spec.h"
#include "client/lib/internal.h"

#include <stdlib.h>
#include <string.h>

static int open_take_cb(struct client_call *call, const union proto_any *any)
{
    struct ucm_namespace *ns = (struct ucm_namespace *)client_handle_of(call);
    const struct msg_encoding_open_r *m = &any->encoding_open_r;

    ns->handle.id = (uint32_t)m->ns;
    memcpy(ns->fingerprint, m->fingerprint.p, sizeof ns->fingerprint);
    ns->encoding->info.raw_bytes = m->raw_bytes;
    ns->encoding->info.encoded_bytes = m->encoded_bytes;
    return 0;
}

static struct proto_u32s rows_to_wire(const struct ucm_kv_rows *rows, uint32_t at[3])
{
    at[0] = rows->tokens;
    at[1] = rows->heads;
    at[2] = rows->dim;
    return (struct proto_u32s){at, rows->tokens != 0 ? 3 : 0};
}

static void form_copy(struct client_encoding *e, const struct ucm_encoded_form *form,
                      uint32_t version)
{
    e->info.form = *form;
    e->info.form.version = version;
    strcpy(e->encoding, form->encoding);
    strcpy(e->dtype, form->dtype);
    e->info.form.encoding = e->encoding;
    e->info.form.dtype = e->dtype;
    e->open = (struct msg_encoding_open){
        .encoding = {e->encoding, (uint32_t)strlen(e->encoding)},
        .version = version,
        .dtype = {e->dtype, (uint32_t)strlen(e->dtype)},
        .k = rows_to_wire(&form->k, e->k),
        .v = rows_to_wire(&form->v, e->v),
        .order = form->order,
        .axis = form->axis,
        .seed = form->seed,
        .run = form->run,
    };
}

/* A namespace like the base. It borrows the base's strings and numbers, so the handle references
 * the base. */
static struct ucm_namespace *encoded_new(struct ucm_namespace *base,
                                         const struct ucm_encoded_form *form, uint32_t version)
{
    struct ucm_namespace *ns = calloc(1, sizeof *ns + sizeof *ns->encoding);
    struct client_request q = {UCM_METHOD_ENCODING_OPEN, .handle = &base->handle};

    if (!ns)
        return NULL;
    ns->encoding = (struct client_encoding *)(ns + 1);
    ns->open = base->open;
    form_copy(ns->encoding, form, version);
    q.params = &ns->encoding->open;
    q.handle_id = &ns->encoding->open.ns;
    client_handle_init(&ns->handle, base->handle.client, &q, open_take_cb);
    return ns;
}

/* Checks what the library knows; the daemon checks the rest. */
static int form_check(const struct ucm_namespace *base, const struct ucm_encoded_form *form,
                      uint32_t *version)
{
    struct ucm_encoding_spec spec;
    char why[UCM_ENCODING_WHY];
    int r;

    if (!base || !form || !form->encoding || !form->dtype)
        return client_fail(UCM_EINVALID, "base, form, encoding or dtype is NULL");
    if (base->summary || base->encoding)
        return client_fail(UCM_EINVALID, "the base must hold KV as it is, and no %s",
                           base->summary ? "summaries" : "encoded blocks");
    r = encoding_spec(form, &spec, why);
    if (r)
        return client_fail(-r, "%s", why);
    *version = spec.version;
    return 0;
}

int ucm_encoding_open(struct ucm_namespace *base, const struct ucm_encoded_form *form,
                      int timeout_ms, struct ucm_namespace **out)
{
    struct ucm_namespace *ns;
    struct ucm_client *c;
    uint32_t version;
    int r = form_check(base, form, &version);

    if (r == 0 && !out)
        r = client_fail(UCM_EINVALID, "out is NULL");
    if (r)
        return r;
    c = base->handle.client;
    r = client_enter(c);
    if (r)
        return r;
    ns = encoded_new(base, form, version);
    if (!ns)
        return client_leave(c, client_fail(UCM_ENOMEMORY, "no memory for the namespace"));
    r = client_handle_open(&ns->handle, client_deadline(c, timeout_ms));
    if (r == 0)
        *out = ns;
    return client_leave(c, r);
}

int ucm_encoding_describe(const struct ucm_namespace *ns, struct ucm_encoding_info *out)
{
    struct ucm_client *c;
    int r;

    if (!ns || !out)
        return client_fail(UCM_EINVALID, "namespace or out is NULL");
    if (!ns->encoding)
        return client_fail(UCM_ENOTFOUND, "the namespace's blocks are stored as they are");
    c = ns->handle.client;
    r = client_enter(c);
    if (r)
        return r;
    *out = ns->encoding->info;
    return client_leave(c, 0);
}

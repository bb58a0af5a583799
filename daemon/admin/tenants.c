/* tenant.list, tenant.set, tenant.reset: what tenants are given, and what they have. */
#include "daemon/admin/admin.h"
#include "daemon/admin/kept.h"

#include <stdlib.h>
#include <string.h>

bool tenant_known(const struct requests *rq, const char *name)
{
    const struct config_list *tenants = &rq->modules.config->tenants;
    const struct tenant *t = tenant_find(index_tenants(rq->modules.index), name);
    size_t n = strlen(name);

    if (strncmp(name, "uid:", 4) == 0 && n > 4 && strspn(name + 4, "0123456789") == n - 4)
        return true;
    for (size_t i = 0; i < tenants->n; i++)
        if (strncmp(tenants->item[i], name, n) == 0 && tenants->item[i][n] == ' ')
            return true;
    return t && t->namespaces > 0;
}

/* ---- tenant.list ---- */

static bool is_shown(const struct tenant *t, const struct peer *peer)
{
    return (t->namespaces > 0 || t->configured.given || t->kept.given) &&
           (peer->admin || strcmp(t->name, peer->tenant) == 0);
}

/* 0 for a tenant without its own label in the metrics, which counts among others. */
static void pack_obtained(msgpack_packer *pk, const struct tenant *t)
{
    static const struct metrics_tenant none;
    const struct metrics_tenant *m =
        t->metrics && strcmp(t->metrics->name, t->name) == 0 ? t->metrics : &none;

    proto_pack_u64(pk, "bus_contended_bytes", m->bus_contended_bytes);
    proto_pack_u64(pk, "bus_fair_share_bytes", m->bus_fair_share_bytes);
    proto_pack_u64(pk, "nvme_contended_bytes", m->nvme_contended_bytes);
    proto_pack_u64(pk, "nvme_fair_share_bytes", m->nvme_fair_share_bytes);
    proto_pack_u64(pk, "shared_contended_bytes", m->shared_contended_bytes);
    proto_pack_u64(pk, "shared_fair_share_bytes", m->shared_fair_share_bytes);
}

static void pack_tenant(msgpack_packer *pk, const struct tenant *t)
{
    char text[TENANT_TEXT_BYTES];

    msgpack_pack_map(pk, 13 + TENANT_KEYS);
    proto_pack_text(pk, "tenant", t->name);
    proto_pack_u64(pk, "namespaces", t->namespaces);
    proto_pack_u64(pk, "blocks", t->blocks);
    proto_pack_u64(pk, "dram_bytes", t->dram_bytes);
    proto_pack_u64(pk, "nvme_bytes", t->nvme_bytes);
    proto_pack_u64(pk, "shared_bytes", t->shared_bytes);
#define X(field, name, kind, min, max, initial)                                                    \
    proto_pack_u64(pk, "given_" #field, t->settings.field);
    TENANT_SETTINGS(X)
#undef X
    pack_obtained(pk, t);
    proto_pack_text(pk, "kept", tenant_settings_text(&t->kept, text));
}

/* Bytes of a tenant with the longest name: a full page still fits a frame. */
#define TENANT_PACKED_MAX 2048
#define TENANT_PAGE_MAX (UCM_MAX_FRAME_BYTES / TENANT_PACKED_MAX - 1)

int method_tenant_list(struct call *call)
{
    const struct tenant_set *set = index_tenants(call->s->rq->modules.index);
    const struct msg_page *m = &call->params.page;
    const struct tenant *page[TENANT_PAGE_MAX], *t;
    uint32_t n = 0, limit = TENANT_PAGE_MAX, next = 0;
    struct proto_builder pb;

    limit = m->limit && m->limit < limit ? (uint32_t)m->limit : limit;
    for (t = tenant_from(set, m->cursor); t && next == 0; t = tenant_next(set, t)) {
        if (!is_shown(t, &call->s->peer))
            continue;
        if (n == limit)
            next = t->id;
        else
            page[n++] = t;
    }
    call_map_begin(call, &pb);
    msgpack_pack_map(&pb.pk, 2);
    proto_pack_str(&pb.pk, "tenants");
    msgpack_pack_array(&pb.pk, n);
    for (uint32_t i = 0; i < n; i++)
        pack_tenant(&pb.pk, page[i]);
    proto_pack_u64(&pb.pk, "next", next);
    return call_reply_map(call, &pb);
}

/* ---- tenant.set, tenant.reset ---- */

/* A change that is in force, while a thread writes the file that keeps it. */
struct keeping {
    struct request r;
    uv_work_t work;
    const char *directory;
    char *text;
    int rc;
};

static void keep_work_cb(uv_work_t *work)
{
    struct keeping *k = LIST_ENTRY(work, struct keeping, work);

    k->rc = tenants_kept_write(k->directory, k->text);
}

static void keep_done_cb(uv_work_t *work, int status)
{
    struct keeping *k = LIST_ENTRY(work, struct keeping, work);
    struct ucm_error e = {0};
    int rc = status != 0 ? status : k->rc;

    admin_of(k->r.s->rq)->keeping = false;
    if (rc != 0)
        ucm_error_set(&e, UCM_WIRE_IO,
                      "it is in force, but ends with the daemon: %.100s can't be written: %s; see "
                      "`state` in the configuration",
                      k->directory, strerror(-rc));
    free(k->text);
    request_end(&k->r, rc != 0 ? &e : NULL, NULL);
}

/* The disk ends the wait, sooner or later. */
static void keep_stop_cb(struct request *r)
{
    (void)r;
}

static int change_check(struct call *call, const char *name, const struct tenant_settings *s)
{
    struct requests *rq = call->s->rq;
    struct tenant_set *set = index_tenants(rq->modules.index);
    const struct tenant *t = tenant_find(set, name);
    char why[TENANT_WHY_BYTES];

    if (strcmp(name, TENANT_ALL) != 0 && !(t && t->kept.given) &&
        (!tenant_name_possible(name) || !tenant_known(rq, name)))
        return ucm_error_set(
            &call->error, UCM_WIRE_NOT_FOUND,
            "there is no tenant \"%.64s\": no namespace is its, and `tenants` does "
            "not name it; others are called uid:N",
            name);
    if (tenant_give_check(set, rq->modules.config, name, s, why) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "%s", why);
    if (admin_of(rq)->keeping)
        return ucm_error_set(&call->error, UCM_WIRE_BUSY,
                             "another change is being written; try again");
    return 0;
}

/* s: NULL takes back. Its name is known and its settings hold together. */
static int change(struct call *call, const char *name, const struct tenant_settings *s)
{
    struct requests *rq = call->s->rq;
    struct tenant_set *set = index_tenants(rq->modules.index);
    bool keeps = rq->modules.config->state[0] != '\0';
    char text[TENANT_TEXT_BYTES];
    struct keeping *k;
    int rc = change_check(call, name, s);

    if (rc != 0)
        return rc;
    k = request_new(call, sizeof(*k), 0, 0, keep_stop_cb);
    if (!k)
        return -call->error.code;
    if (tenant_give(set, name, s) != 0) {
        ucm_error_set(&call->error, UCM_WIRE_NO_MEMORY, "no memory for a tenant");
        request_refuse(&k->r, call);
        return -call->error.code;
    }
    cache_tenants_changed(rq->modules.cache);
    audit(call->s, call->method, "of_tenant=%s settings=\"%s\"", name,
          s ? tenant_settings_text(s, text) : "");
    k->directory = rq->modules.config->state;
    k->text = keeps ? tenants_kept_text(set) : NULL;
    if (!keeps)
        request_end(&k->r, NULL, NULL);
    else if (!k->text || uv_queue_work(rq->modules.loop, &k->work, keep_work_cb, keep_done_cb) != 0)
        keep_done_cb(&k->work, -ENOMEM);
    else
        admin_of(rq)->keeping = true;
    return 0;
}

static void text_of(struct proto_str from, char *out)
{
    memcpy(out, from.p, from.n);
    out[from.n] = '\0';
}

int method_tenant_set(struct call *call)
{
    const struct msg_tenant_set *m = &call->params.tenant_set;
    char name[UCM_MAX_NAME_BYTES + 1], text[UCM_MAX_SETTINGS_BYTES + 1], why[TENANT_WHY_BYTES];
    struct tenant_settings s = {.given = 0};

    if (!call_operator(call))
        return -call->error.code;
    text_of(m->tenant, name);
    text_of(m->settings, text);
    if (tenant_settings_parse(text, &s, why) != 0)
        return ucm_error_set(&call->error, UCM_WIRE_INVALID, "%s", why);
    return change(call, name, &s);
}

int method_tenant_reset(struct call *call)
{
    char name[UCM_MAX_NAME_BYTES + 1];

    if (!call_operator(call))
        return -call->error.code;
    text_of(call->params.tenant.tenant, name);
    return change(call, name, NULL);
}

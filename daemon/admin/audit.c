/* Audit lines: which peer changed what, and how much. Every method that changes stored blocks or
 * the daemon for others writes one line for each call that changed something or began to. */
#include "daemon/admin/admin.h"

#include <stdio.h>
#include <string.h>

#define LINE_MS 100     /* a tenant's lines: one so often in the long run, */
#define BURST_LINES 100 /* and so many in one go */
#define IDLE_MS 1000
#define TELL_MS 1000

static void tell_cb(struct deadline *d)
{
    struct audits *a = LIST_ENTRY(d, struct audits, tell);

    for (uint32_t i = 0; i <= AUDIT_TENANTS; i++) {
        struct audit_tenant *t = &a->tenant[i];

        if (t->calls == 0)
            continue;
        log_audit("held", "tenant=%s calls=%llu blocks=%llu busy=%llu",
                  i < AUDIT_TENANTS ? t->name : "*", (unsigned long long)t->calls,
                  (unsigned long long)t->blocks, (unsigned long long)t->busy);
        t->calls = t->blocks = t->busy = 0;
    }
}

void audits_close(struct requests *rq)
{
    struct audits *a = &admin_of(rq)->audits;

    deadline_disarm(rq->modules.deadlines, &a->tell);
    tell_cb(&a->tell);
}

/* A tenant with a full burst and nothing to summarize needs no entry. */
static struct audit_tenant *tenant_of(struct audits *a, const char *name, uint64_t now_ms)
{
    struct audit_tenant *others = &a->tenant[AUDIT_TENANTS], *spare = others;

    for (struct audit_tenant *t = a->tenant; t < others; t++) {
        if (strcmp(t->name, name) == 0)
            return t;
        if (t->calls == 0 && t->full_ms <= now_ms)
            spare = t;
    }
    if (spare != others)
        snprintf(spare->name, sizeof(spare->name), "%s", name);
    return spare;
}

/* A call that found nothing to change costs the client nothing: it has a line only where that takes
 * no change's place. With roots all that name a whole namespace count as changes: its files there
 * may have gone, of which the count tells nothing. By key such a call asks for the files of its own
 * keys only. */
static bool line_passes(struct audit_tenant *t, uint64_t now_ms, bool idle)
{
    uint64_t from_ms = t->full_ms > now_ms ? t->full_ms : now_ms;

    if (from_ms > now_ms + (idle ? 0 : (BURST_LINES - 1) * LINE_MS))
        return false;
    t->full_ms = from_ms + (idle ? IDLE_MS : LINE_MS);
    return true;
}

/* The journal drops a unit's lines beyond 10,000 in 30 s. Operators' lines are all written. So that
 * the journal drops none of them, tenants' lines are limited, and a summary line counts the omitted
 * ones. */
static bool held(const struct session *s, const struct audit_blocks *a)
{
    const struct msg_count_r *r = a->result;
    struct requests *rq = s->rq;
    uint64_t now_ms = uv_now(rq->modules.loop);
    bool idle = r->blocks == 0 && r->busy == 0 && !(rq->modules.shared && a->keys == 0);
    struct audits *all = &admin_of(rq)->audits;
    struct audit_tenant *t;

    if (s->peer.admin)
        return false;
    t = tenant_of(all, s->peer.tenant, now_ms);
    if (line_passes(t, now_ms, idle))
        return false;
    t->calls++;
    t->blocks += r->blocks;
    t->busy += r->busy;
    if (!deadline_armed(&all->tell))
        deadline_arm(rq->modules.deadlines, &all->tell, now_ms + TELL_MS, tell_cb);
    return true;
}

void audit_blocks(const struct session *s, enum ucm_method method, const struct ns *ns,
                  const struct audit_blocks *a)
{
    const struct msg_count_r *r = a->result;
    char keys[24] = "all";

    if (held(s, a))
        return;
    if (a->keys > 0)
        snprintf(keys, sizeof(keys), "%u", a->keys);
    audit(s, method,
          "ns=%u tier=%s keys=%s blocks=%llu busy=%llu missing=%llu result=%s ns_tenant=%s "
          "model=\"%s\"",
          ns->id, a->tier, keys, (unsigned long long)r->blocks, (unsigned long long)r->busy,
          (unsigned long long)r->missing, a->code ? ucm_error_name(a->code) : "OK",
          ns->identity.tenant, ns->identity.model);
}

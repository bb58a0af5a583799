/* Audit lines: who changed what, and how much. Every method that changes stored blocks or the daemon for others
 * comes here, once for each call that changed something or began to. */
#include "daemon/base/log.h"
#include "daemon/request/internal.h"

#include <stdarg.h>
#include <stdio.h>

/* Tenants' names hold nothing that must be escaped. */
void audit(const struct session *s, enum ucm_method method, const char *format, ...)
{
    const struct peer *peer = &s->peer;
    char what[768];
    va_list args;

    va_start(args, format);
    vsnprintf(what, sizeof(what), format, args);
    va_end(args);
    log_audit(proto_method_name(method), "uid=%u gid=%u pid=%d tenant=%s%s%s", (unsigned)peer->uid,
              (unsigned)peer->gid, (int)peer->pid, peer->tenant, what[0] ? " " : "", what);
}

#define IDLE_MS 1000

/* A client's call that found nothing to change is no change, and costs the client nothing: in a loop it would
 * write megabytes a second, and the journal would drop the lines that matter. Such calls have one line a second,
 * which says how many were left out. Operators' are all there, and with roots all that name a whole namespace: its files
 * there may have gone, of which the count tells nothing. By key such a call asks for the files of its own keys only. */
static bool idle_held(const struct session *s, const struct audit_blocks *a, uint32_t *held)
{
    const struct msg_count_r *r = a->result;
    struct requests *rq = s->rq;
    uint64_t now_ms = uv_now(rq->rooms.loop);

    *held = 0;
    if (s->peer.admin || r->blocks > 0 || r->busy > 0 || (rq->rooms.share && a->keys == 0))
        return false;
    if (rq->audit_idle_ms != 0 && now_ms - rq->audit_idle_ms < IDLE_MS) {
        rq->audit_idle_held++;
        return true;
    }
    rq->audit_idle_ms = now_ms;
    *held = rq->audit_idle_held;
    rq->audit_idle_held = 0;
    return false;
}

void audit_blocks(const struct session *s, enum ucm_method method, const struct ns *ns,
                  const struct audit_blocks *a)
{
    const struct msg_count_r *r = a->result;
    char model[256], keys[24] = "all", left_out[32] = "";
    uint32_t held;

    if (idle_held(s, a, &held))
        return;
    if (held > 0)
        snprintf(left_out, sizeof(left_out), " held=%u", held);
    if (a->keys > 0)
        snprintf(keys, sizeof(keys), "%u", a->keys);
    audit(s, method,
          "ns=%u tier=%s keys=%s blocks=%llu busy=%llu missing=%llu result=%s ns_tenant=%s "
          "model=\"%s\"%s",
          ns->id, a->tier, keys, (unsigned long long)r->blocks, (unsigned long long)r->busy,
          (unsigned long long)r->missing, a->code ? ucm_error_name(a->code) : "OK",
          ns->identity.tenant, log_escape(ns->identity.model, model, sizeof(model)), left_out);
}

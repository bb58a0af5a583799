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

void audit_blocks(const struct session *s, enum ucm_method method, const struct ns *ns,
                  const struct audit_blocks *a)
{
    const struct msg_count_r *r = a->result;
    char model[256], keys[24] = "all";

    if (a->keys > 0)
        snprintf(keys, sizeof(keys), "%u", a->keys);
    audit(s, method,
          "ns=%u tier=%s keys=%s blocks=%llu busy=%llu missing=%llu result=%s ns_tenant=%s "
          "model=\"%s\"",
          ns->id, a->tier, keys, (unsigned long long)r->blocks, (unsigned long long)r->busy,
          (unsigned long long)r->missing, a->code ? ucm_error_name(a->code) : "OK",
          ns->identity.tenant, log_escape(ns->identity.model, model, sizeof(model)));
}

/* Health of a root: breakers and counters. */
#include "daemon/shared/root_internal.h"

#include "daemon/base/log.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define FAILURES 5u     /* in a row open the breaker */
#define LATE_LOOKUPS 8u /* in a row open that of lookups */

void root_health_init(struct shared_root *r)
{
    uint64_t seed = uv_hrtime();

    breaker_init(&r->breaker, FAILURES, seed);
    breaker_init(&r->writes, 1, seed >> 3);
    breaker_init(&r->lookups, LATE_LOOKUPS, seed >> 7);
}

/* ---- answers ---- */

static bool status_answers(int status)
{
    switch (status) {
    case 0:
    case -ENOENT:
    case -ESTALE:
    case -EEXIST:
    case -EBADMSG:
    case -EINVAL:
        return true;
    default:
        return false;
    }
}

/* Does it make a file? */
static bool task_writes(const struct shared_task *t)
{
    return t->op.verb == SHARED_WRITE || (t->op.verb == SHARED_CHECK && t->op.sync);
}

/* The root answered, and takes no writes. */
static bool status_stops_writes(const struct shared_task *t, int status)
{
    switch (status) {
    case -ENOSPC:
    case -EDQUOT:
    case -EROFS:
        return true;
    case -EACCES:
    case -EPERM:
        return task_writes(t);
    default:
        return false;
    }
}

/* A failure of this host says nothing about the root. */
static bool status_local(int status)
{
    return status == -ENOMEM || status == -ECANCELED || status == -EMFILE || status == -ENFILE;
}

static const char *status_text(const struct shared_root *r, int status)
{
    const char *known = r->config.ops->reason ? r->config.ops->reason(r->backend) : NULL;

    if (known)
        return known;
    return status == -ENODEV ? "the directory or export does not exist" : strerror(-status);
}

static void reason_note(struct shared_root *r, int status)
{
    snprintf(r->stats.reason, sizeof(r->stats.reason), "%s", status_text(r, status));
}

/* What began before the root went down says nothing of it as it is now. */
static void root_good(struct shared_root *r, const struct shared_task *t)
{
    if (!breaker_closed(&r->breaker) && t->begun_ns < r->broken_ns)
        return;
    if (!breaker_good(&r->breaker))
        return;
    r->config.metrics->shared_roots_down--;
    log_info("shared", "root-up", "root=%s", r->shown);
}

/* A failed health check counts as much as FAILURES of other operations. True: the root goes
 * down. */
static bool root_bad(struct shared_root *r, const struct shared_task *t, int status)
{
    uint64_t now = shared_root_now(r);

    if (!(t == &r->check ? breaker_trip(&r->breaker, now) : breaker_bad(&r->breaker, now)))
        return false;
    r->broken_ns = uv_hrtime();
    r->stats.breaks++;
    r->config.metrics->shared_roots_down++;
    log_warn("shared", "root-down", "root=%s reason=\"%s\"", r->shown, status_text(r, status));
    return true;
}

static void writes_breaker_feed(struct shared_root *r, const struct shared_task *t, int status)
{
    if (status_stops_writes(t, status)) {
        r->writes_status = status;
        reason_note(r, status);
        if (breaker_closed(&r->writes))
            r->writes_stopped_ms = shared_root_now(r);
        if (breaker_bad(&r->writes, shared_root_now(r)))
            log_warn("shared", "root-takes-no-writes", "root=%s reason=\"%s\"", r->shown,
                     status_text(r, status));
    } else if (status == 0 &&
               task_writes(t) && /* a check's file is too small to say that there is space again */
               (t->op.verb == SHARED_WRITE || !shared_status_full(r->writes_status)) &&
               breaker_good(&r->writes)) {
        r->writes_status = 0;
        log_info("shared", "root-takes-writes", "root=%s", r->shown);
    }
}

static void count(struct shared_root *r, const struct shared_task *t, int status)
{
    uint64_t us = (uv_hrtime() - t->begun_ns) / 1000;

    if (t->op.verb == SHARED_FIND && status_answers(status))
        r->stats.latency_us += r->stats.latency_us ? us / 8 - r->stats.latency_us / 8 : us;
    if (t->op.verb == SHARED_READ && status == 0 && !t->op.note) {
        r->stats.reads++;
        r->stats.read_bytes += t->op.bytes;
    } else if (t->op.verb == SHARED_WRITE && status == 0 && !t->op.note) {
        r->stats.writes++;
        r->stats.write_bytes += t->op.bytes;
        r->config.metrics->shared_writes++;
    }
    if (status_answers(status) || status_local(status))
        return;
    reason_note(r, status);
    if (status == -ETIMEDOUT)
        r->stats.timeouts++;
    else
        r->stats.failures++;
}

bool root_status_note(struct shared_root *r, const struct shared_task *t, int status)
{
    count(r, t, status);
    writes_breaker_feed(r, t, status);
    if (status_local(status))
        breaker_again(&r->breaker, shared_root_now(r)); /* in case it was a health check */
    else if (status_answers(status) || status_stops_writes(t, status))
        root_good(r, t);
    else
        return root_bad(r, t, status);
    return false;
}

/* ---- is the root usable? ---- */

bool shared_root_up(const struct shared_root *r)
{
    return breaker_closed(&r->breaker);
}

void shared_root_lookup_ended(struct shared_root *r, enum shared_lookup_end how)
{
    if (how == SHARED_LOOKUP_LEFT)
        breaker_again(&r->lookups, shared_root_now(r));
    else if (how == SHARED_LOOKUP_ANSWERED)
        (void)breaker_good(&r->lookups);
    else if (breaker_bad(&r->lookups, shared_root_now(r)))
        log_warn("shared", "root-slow", "root=%s latency_us=%llu", r->shown,
                 (unsigned long long)r->stats.latency_us);
}

bool root_write_try(struct shared_root *r)
{
    return breaker_closed(&r->writes) || breaker_try(&r->writes, shared_root_now(r));
}

bool shared_root_takes_writes(const struct shared_root *r)
{
    const struct breaker *w = &r->writes;

    if (r->config.read_only || r->stopped || !breaker_closed(&r->breaker))
        return false;
    return breaker_closed(w) ||
           (w->state == BREAKER_OPEN && backoff_ready(&w->backoff, shared_root_now(r)));
}

enum shared_health shared_root_health(const struct shared_root *r)
{
    if (!breaker_closed(&r->breaker))
        return SHARED_DOWN;
    if (r->config.read_only)
        return SHARED_READ_ONLY;
    if (breaker_closed(&r->writes))
        return SHARED_UP;
    return shared_status_full(r->writes_status) ? SHARED_FULL : SHARED_READ_ONLY;
}

void shared_root_stats_get(const struct shared_root *r, struct shared_root_stats *out)
{
    *out = r->stats;
    out->target = r->shown;
    out->backend = r->config.kind;
    if (r->config.ops->process)
        r->config.ops->process(r->backend, &out->process);
    out->backend_starts = out->process.starts;
    out->backend_ends = out->process.ends;
    out->backend_kills = out->process.kills;
    out->health = shared_root_health(r);
    out->writes_refused = !r->config.read_only && !breaker_closed(&r->writes);
    out->refused_ms = out->writes_refused ? shared_root_now(r) - r->writes_stopped_ms : 0;
    out->capacity_bytes = r->config.capacity_bytes;
    out->in_flight = out->queued = 0;
    for (int c = 0; c < SHARED_CLASSES; c++) {
        out->in_flight += r->begun[c];
        out->queued += r->queued[c];
    }
}

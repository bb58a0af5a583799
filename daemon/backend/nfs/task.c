#include "daemon/backend/nfs/nfs.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WRITE_STEP_OF 16u
#define FILES 200u /* of an answer */

/* ---- queues ---- */

static struct nfs_tasks *queue_of(struct nfs_task *t)
{
    return t->queue == TASK_READS    ? &t->nfs->reads
           : t->queue == TASK_WRITES ? &t->nfs->writes
                                     : &t->nfs->later;
}

static void unqueue(struct nfs_task *t)
{
    if (t->queue != TASK_NOWHERE)
        TAILQ_REMOVE(queue_of(t), t, link);
    t->queue = TASK_NOWHERE;
}

static void enqueue(struct nfs_task *t, nfs_step *step, bool first)
{
    unqueue(t);
    t->step = step;
    t->queue = t->verb == WIRE_WRITE || t->verb == WIRE_REMOVE ? TASK_WRITES : TASK_READS;
    if (first)
        TAILQ_INSERT_HEAD(queue_of(t), t, link);
    else
        TAILQ_INSERT_TAIL(queue_of(t), t, link);
}

void nfs_task_next(struct nfs_task *t, nfs_step *step)
{
    enqueue(t, step, true);
}

/* ---- beginning ---- */

static void task_begin(struct nfs_task *t)
{
    t->over = false;
    t->status = 0;
    t->directory.n = t->file.n = 0;
    t->by_known = t->temp_made = t->verifier_known = t->verifier_changed = false;
    t->eager = t->looked = t->made = false;
    t->make_error = 0;
    t->at = t->moved = t->cookie = t->unread = 0;
    t->n_files = t->pages = t->blank = 0;
    memset(t->cookie_verifier, 0, sizeof(t->cookie_verifier));
    enqueue(t, t->nfs->verbs[t->verb].first, false);
}

static bool hex_take(const char *text, uint8_t *out)
{
    unsigned value;
    char end;

    if (strspn(text, "0123456789abcdef") != 2 || sscanf(text, "%2x%c", &value, &end) != 2 ||
        end != '/')
        return false;
    *out = (uint8_t)value;
    return true;
}

/* "blocks/XX/NAME"; of a list the name is "". */
static bool key_take(const char *key, uint8_t *bucket, char name[NFS_NAME_CAP])
{
    static const char directory[] = "blocks/";

    if (strncmp(key, directory, strlen(directory)) != 0 ||
        !hex_take(key + strlen(directory), bucket) || strchr(key + strlen(directory) + 3, '/'))
        return false;
    snprintf(name, NFS_NAME_CAP, "%s", key + strlen(directory) + 3);
    return true;
}

static bool place_take(struct nfs_task *t)
{
    const struct ucm_backend_request *r = t->request;
    bool temp = t->verb == WIRE_WRITE || t->verb == WIRE_CHECK;
    uint8_t bucket = 0;

    if (t->verb != WIRE_CHECK && !key_take(r->key, &t->bucket, t->name))
        return false;
    if (temp && !key_take(r->temp, &bucket, t->temp))
        return false;
    if (t->verb == WIRE_CHECK)
        t->bucket = bucket;
    return !temp || bucket == t->bucket;
}

static void answer(struct nfs *n, struct ucm_backend_request *r,
                   const struct ucm_backend_result *result)
{
    if (ucm_backend_answer(n->backend, r, result) < 0)
        n->broken = true;
}

void nfs_task_new(struct nfs *n, struct ucm_backend_request *request)
{
    struct nfs_task *t = calloc(1, sizeof(*t));
    struct ucm_backend_result failed = {.status = WIRE_FAILED, .reason = strerror(ENOMEM)};

    if (!t) {
        answer(n, request, &failed);
        return;
    }
    t->nfs = n;
    t->request = request;
    t->verb = request->verb;
    if (!place_take(t)) {
        failed.reason = "a key is blocks/XX/NAME";
        answer(n, request, &failed);
        free(t);
        return;
    }
    TAILQ_INSERT_TAIL(&n->tasks, t, all);
    if (t->verb == WIRE_CHECK) /* the root's back-off paces health checks */
        n->conn.refused_until_ms = 0;
    task_begin(t);
}

/* ---- ending ---- */

static enum wire_status status_of(const struct nfs_task *t)
{
    switch (t->status) {
    case -EEXIST:
        return t->verb == WIRE_WRITE ? WIRE_EXISTS : WIRE_OTHER;
    case -EBADMSG:
        return WIRE_OTHER;
    case -ESTALE: /* with fresh handles too: no answer about a file */
        return WIRE_ABSENT;
    case -EADDRNOTAVAIL:
        return WIRE_UNREACHABLE;
    default:
        return ucm_backend_status(-t->status);
    }
}

static const char *reason_of(const struct nfs_task *t, char text[WIRE_REASON_BYTES + 1])
{
    const struct nfs_conn *c = &t->nfs->conn;
    const char *what = t->status == -ENODEV || t->status == -ESTALE ? "the export does not exist"
                       : t->status == -EADDRNOTAVAIL ? "the server's name is not known"
                       : t->status == -NFS_LATER ? "the server asks again and again to try later"
                                                 : strerror(-t->status);
    bool of_conn = t->status == -ECONNRESET || t->status == c->refused;

    snprintf(text, WIRE_REASON_BYTES + 1, "%s%s%.80s", what, of_conn && c->said[0] ? ": " : "",
             of_conn ? c->said : "");
    return text;
}

static void task_free(struct nfs_task *t)
{
    TAILQ_REMOVE(&t->nfs->tasks, t, all);
    free(t->files);
    free(t);
}

/* Before the answer. */
static void list_send(struct nfs_task *t)
{
    for (uint32_t at = 0; at < t->n_files; at += FILES) {
        uint32_t n = t->n_files - at < FILES ? t->n_files - at : FILES;

        if (ucm_backend_files(t->nfs->backend, t->request, t->files + at, n) < 0)
            t->nfs->broken = true;
    }
    t->result.unread = t->unread;
}

static void task_report(struct nfs_task *t)
{
    char reason[WIRE_REASON_BYTES + 1];

    if (t->status == 0 && t->verb == WIRE_LIST)
        list_send(t);
    t->result.status = status_of(t);
    t->result.reason = reason_of(t, reason);
    answer(t->nfs, t->request, &t->result);
    task_free(t);
}

static bool task_again(struct nfs_task *t)
{
    struct nfs *n = t->nfs;

    if (t->verb == WIRE_READ && t->status < 0)
        nfs_known_forget(t);
    if (t->by_known && t->status < 0 && t->status != -NFS_LATER && t->status != -ECONNRESET) {
        t->attempts++;
        task_begin(t);
        return true;
    }
    if (t->status == -NFS_LATER && t->turns < NFS_LATER_TURNS) {
        t->turns++;
        if (TAILQ_EMPTY(&n->later))
            n->later_ms = n->now_ms + NFS_LATER_MS;
        t->queue = TASK_LATER;
        TAILQ_INSERT_TAIL(&n->later, t, link);
        return true;
    }
    if ((t->status != -ESTALE && t->status != -ECONNRESET) || ++t->attempts >= NFS_ATTEMPTS)
        return false;
    if (t->status == -ESTALE) {
        nfs_directory_stale(t);
        if (t->attempts > 1) /* fresh directories did not help: the export's own handle is stale */
            nfs_conn_drop(n, -ESTALE, NULL);
    }
    task_begin(t);
    return true;
}

void nfs_task_settle(struct nfs_task *t)
{
    if (t->awaiting || t->queue != TASK_NOWHERE || (t->request && !t->over))
        return;
    if (t->temp_made && nfs_conn_up(t->nfs))
        nfs_task_next(t, t->nfs->verbs[t->verb].clean);
    else if (!t->request)
        task_free(t);
    else if (!task_again(t))
        task_report(t);
}

void nfs_task_end(struct nfs_task *t, int status)
{
    if (!t->over) {
        t->over = true;
        t->status = status;
    }
    unqueue(t);
}

static void tasks_fail(struct nfs_tasks *queue, int error)
{
    struct nfs_task *t;

    while ((t = TAILQ_FIRST(queue)) != NULL) {
        unqueue(t);
        t->over = true;
        t->status = error;
        t->attempts = NFS_ATTEMPTS;
        t->turns = NFS_LATER_TURNS;
        nfs_task_settle(t);
    }
}

/* Its deadline has passed: nobody waits any more, and the span may be the daemon's again at any
 * time. */
static void give_up(struct nfs_task *t)
{
    const struct ucm_backend_result late = {.status = WIRE_TIMEOUT,
                                            .reason = "the server did not answer in time"};

    answer(t->nfs, t->request, &late);
    t->request = NULL;
    unqueue(t);
    nfs_task_settle(t);
}

void nfs_tasks_watch(struct nfs *n)
{
    struct nfs_tasks later = TAILQ_HEAD_INITIALIZER(later);
    struct nfs_task *t, *next;

    for (t = TAILQ_FIRST(&n->tasks); t; t = next) {
        next = TAILQ_NEXT(t, all);
        if (t->request && n->now_ms >= t->request->until_ms)
            give_up(t);
    }
    if (n->now_ms >= n->later_ms)
        while ((t = TAILQ_FIRST(&n->later)) != NULL) {
            unqueue(t);
            task_begin(t);
        }
}

/* ---- taking steps ---- */

/* Reads go first; one step in WRITE_STEP_OF is a write's, so that writes do not starve. */
static struct nfs_task *pump_next(struct nfs *n)
{
    bool may_write = n->n_write_calls < n->write_calls_max;
    struct nfs_task *t = NULL;

    if (may_write && ++n->steps % WRITE_STEP_OF == 0)
        t = TAILQ_FIRST(&n->writes);
    if (!t)
        t = TAILQ_FIRST(&n->reads);
    if (!t && may_write)
        t = TAILQ_FIRST(&n->writes);
    if (t)
        unqueue(t);
    return t;
}

void nfs_pump(struct nfs *n)
{
    while (nfs_conn_up(n) && n->n_calls < n->depth) {
        struct nfs_task *t = pump_next(n);

        if (!t)
            break;
        t->step(t);
    }
    if (n->conn.state == NFS_DOWN && !(TAILQ_EMPTY(&n->reads) && TAILQ_EMPTY(&n->writes))) {
        int err = nfs_conn_want(n);

        if (err < 0) {
            tasks_fail(&n->reads, err);
            tasks_fail(&n->writes, err);
        }
    }
}

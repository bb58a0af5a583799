#include "daemon/encryption/secrets.h"

#include "daemon/base/log.h"
#include "daemon/encryption/aside.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MODULE "shared"
#define WAYS 4u
#define SETS 256u
#define BATCH 64u
#define TROUBLE_MS 1000u /* then a directory that can't be used is looked at again */
#define IDLE_MS 60000u   /* one that nobody asked for is forgotten */

enum state { NONE, AWAITED, KNOWN, FAILED };

struct entry {
    uint8_t fingerprint[UCM_FINGERPRINT_BYTES], secret[SHARED_SECRET_BYTES];
    enum state state;
    bool due;         /* to be read, or looked at again */
    uint64_t read_ms; /* when the last reading that succeeded began; of FAILED: when it failed */
    uint64_t used_ms;
};

/* One call to the directory: a purge, secrets to be read, or with neither a look at the directory
 * itself. */
struct job {
    char *directory;
    bool replace;
    int checked; /* with n == 0 */
    unsigned n;
    uint64_t began_ms;
    struct item {
        uint8_t fingerprint[UCM_FINGERPRINT_BYTES], secret[SHARED_SECRET_BYTES];
        int status;
    } item[BATCH];
};

struct secrets {
    uv_loop_t *loop;
    uv_timer_t timer;
    uint64_t timeout_ms;
    void (*changed_cb)(void *ctx);
    void *ctx;
    char *directory;
    struct aside aside;
    bool busy, closing, news;    /* news: changed_cb is due */
    struct list purges;          /* that wait */
    struct secrets_purge *purge; /* under way; NULL: none, or it was cancelled */
    struct entry entry[SETS][WAYS];
    uint64_t tell_ms; /* when the log may say so again */
    bool check_due;
    /* Results of the last look at the directory (secrets_file_check), and of the last reads: 0 or
     * -errno. */
    int checked, read;
    char problem[320];
};

static void pump(struct secrets *s);
static void timer_cb(uv_timer_t *timer);

/* ---- the table ---- */

static struct entry *entry_find(struct secrets *s, const uint8_t *fingerprint)
{
    struct entry *set = s->entry[fingerprint[0]];

    for (unsigned i = 0; i < WAYS; i++)
        if (set[i].state != NONE &&
            memcmp(set[i].fingerprint, fingerprint, sizeof(set[i].fingerprint)) == 0)
            return &set[i];
    return NULL;
}

static void entry_drop(struct entry *e)
{
    OPENSSL_cleanse(e, sizeof(*e));
}

/* In the place of the one that nobody has used for longest. */
static struct entry *entry_new(struct secrets *s, const uint8_t *fingerprint)
{
    struct entry *set = s->entry[fingerprint[0]], *e = &set[0];

    for (unsigned i = 0; i < WAYS && e->state != NONE; i++)
        if (set[i].state == NONE || set[i].used_ms < e->used_ms)
            e = &set[i];
    entry_drop(e);
    memcpy(e->fingerprint, fingerprint, sizeof(e->fingerprint));
    e->state = AWAITED;
    e->due = true;
    return e;
}

static void changed(struct secrets *s)
{
    if (!s->closing)
        s->changed_cb(s->ctx);
}

int secrets_find(struct secrets *s, const uint8_t fingerprint[UCM_FINGERPRINT_BYTES],
                 const uint8_t **secret)
{
    uint64_t now_ms = uv_now(s->loop);
    struct entry *e = entry_find(s, fingerprint);

    if (s->closing)
        return -ENOKEY;
    if (!e)
        e = entry_new(s, fingerprint);
    e->used_ms = now_ms;
    if (e->state == FAILED && now_ms - e->read_ms >= SECRETS_CHECK_MS) {
        e->state = AWAITED;
        e->due = true;
    }
    if (e->state == KNOWN && now_ms - e->read_ms >= SECRETS_FRESH_MS) {
        e->state = AWAITED; /* another host may have replaced it */
        e->due = true;
    }
    if (e->due)
        pump(s);
    if (!uv_is_active((uv_handle_t *)&s->timer))
        (void)uv_timer_start(&s->timer, timer_cb, SECRETS_CHECK_MS, 0);
    *secret = e->secret;
    return e->state == KNOWN ? 0 : e->state == AWAITED ? -EAGAIN : -ENOKEY;
}

/* ---- calls to the directory ---- */

static void run_cb(void *job)
{
    struct job *j = job;

    if (j->n == 0)
        j->checked = secrets_file_check(j->directory);
    for (unsigned i = 0; i < j->n; i++)
        j->item[i].status = (j->replace ? secrets_file_replace : secrets_file_get)(
            j->directory, j->item[i].fingerprint, j->item[i].secret);
}

static void free_cb(void *job)
{
    struct job *j = job;

    free(j->directory);
    OPENSSL_cleanse(j, sizeof(*j));
    free(j);
}

static void tell(struct secrets *s, int status)
{
    uint64_t now_ms = uv_now(s->loop);

    if (now_ms < s->tell_ms)
        return;
    s->tell_ms = now_ms + 2 * SECRETS_CHECK_MS;
    log_warn(
        MODULE, "secret-not-read",
        "directory=%s error=\"%s\": encrypted blocks of its namespaces are misses on shared roots",
        s->directory, strerror(-status));
}

static const char *words(int status)
{
    return status > 0 ? "users other than its owner and group may write to it, and make misses"
           : status == -EBADMSG ? "a secret in it is damaged"
                                : strerror(-status);
}

/* The sentence of health. */
static void problem_find(struct secrets *s)
{
    bool before = s->problem[0] != '\0', now = s->checked != 0 || s->read != 0;

    s->problem[0] = '\0';
    if (now)
        snprintf(s->problem, sizeof(s->problem), "encryption.secrets %.160s: %s%s", s->directory,
                 words(s->checked ? s->checked : s->read),
                 s->checked > 0
                     ? ""
                     : "; encrypted blocks are misses on shared roots, and can't be purged there");
    if (now && !before)
        log_warn(MODULE, "secrets-trouble", "%s", s->problem);
    else if (before && !now)
        log_info(MODULE, "secrets-well", "directory=%s", s->directory);
    if (now && !s->closing && !uv_is_active((uv_handle_t *)&s->timer))
        (void)uv_timer_start(&s->timer, timer_cb, TROUBLE_MS, 0);
}

const char *secrets_problem(const struct secrets *s)
{
    return s->problem[0] ? s->problem : NULL;
}

/* Takes the result of a call that has ended; job NULL: the call hangs. */
static void health_take(struct secrets *s, const struct job *j, int status)
{
    int worst = status;

    for (unsigned i = 0; j && i < j->n; i++)
        worst = worst ? worst : j->item[i].status;
    if (!j || j->n == 0)
        s->checked = j ? j->checked : status;
    if (j && (j->n > 0 || (j->checked == 0 && s->read != -EBADMSG)))
        s->read = worst;
    problem_find(s);
}

/* status: 0 with the secret that was read, or why there is none. True: the callers have something
 * new to see. */
static bool entry_settle(struct secrets *s, struct entry *e, int status, const uint8_t *secret,
                         uint64_t began_ms)
{
    bool same = e->state == KNOWN && status == 0 && secret &&
                memcmp(e->secret, secret, SHARED_SECRET_BYTES) == 0;

    if (status < 0 && !s->closing)
        tell(s, status);
    if (status < 0 && e->state == KNOWN)
        return false; /* until it is too old */
    e->state = status == 0 ? KNOWN : FAILED;
    e->read_ms = status == 0 ? began_ms : uv_now(s->loop);
    if (status == 0)
        memcpy(e->secret, secret, SHARED_SECRET_BYTES);
    return !same;
}

static void purge_end(struct secrets *s, int status)
{
    struct secrets_purge *p = s->purge;

    s->purge = NULL;
    if (!p)
        return;
    p->queued = false;
    p->done_cb(p, status);
}

static void ended_cb(void *ctx, void *job, int status)
{
    struct job *j = job;
    struct secrets *s = ctx;
    bool any = false;

    s->busy = false;
    if (status != -ECANCELED)
        health_take(s, j, status);
    for (unsigned i = 0; j && i < j->n; i++) {
        struct entry *e = entry_find(s, j->item[i].fingerprint);

        if (e)
            any |= entry_settle(s, e, j->item[i].status, j->item[i].secret, j->began_ms);
    }
    /* A call that hangs: all that wait for one. */
    for (unsigned i = 0; !j && i < SETS * WAYS; i++) {
        struct entry *e = &s->entry[i / WAYS][i % WAYS];

        if (e->state == AWAITED)
            any |= entry_settle(s, e, status, NULL, 0);
        e->due = false;
    }
    if (!j || j->n > 0)
        purge_end(s, j ? j->item[0].status : status);
    if (any)
        changed(s);
    if (!s->closing)
        pump(s);
}

static void job_add(struct job *j, const uint8_t *fingerprint)
{
    memcpy(j->item[j->n++].fingerprint, fingerprint, UCM_FINGERPRINT_BYTES);
}

/* What is to be done next; false: nothing. */
static bool job_fill(struct secrets *s, struct job *j)
{
    struct list *node = list_pop_front(&s->purges);

    j->began_ms = uv_now(s->loop);
    if (node) {
        struct entry *e;

        s->purge = LIST_ENTRY(node, struct secrets_purge, link);
        e = entry_find(s, s->purge->fingerprint);
        if (!e)
            e = entry_new(s, s->purge->fingerprint);
        e->state = AWAITED; /* a read may have brought it meanwhile */
        e->due = false;
        e->used_ms = j->began_ms;
        j->replace = true;
        job_add(j, s->purge->fingerprint);
        return true;
    }
    for (unsigned i = 0; i < SETS * WAYS && j->n < BATCH; i++) {
        struct entry *e = &s->entry[i / WAYS][i % WAYS];

        if (e->state != NONE && e->due) {
            e->due = false;
            job_add(j, e->fingerprint);
        }
    }
    if (j->n > 0 || !s->check_due)
        return j->n > 0;
    s->check_due = false;
    return true;
}

static void pump(struct secrets *s)
{
    static const struct aside_call call = {run_cb, ended_cb, free_cb};
    struct job *j;
    int rc = -ENOMEM;

    if (s->busy || s->purge) /* the timer ends a purge that could not begin */
        return;
    j = calloc(1, sizeof(*j));
    if (j && job_fill(s, j)) {
        j->directory = strdup(s->directory);
        rc = j->directory ? aside_start(&s->aside, s->loop, &call, s, j, s->timeout_ms) : -ENOMEM;
    } else if (j) {
        free(j);
        return;
    }
    s->busy = rc == 0;
    if (rc == 0)
        return;
    if (j)
        free_cb(j);
    problem_find(s);
    /* The call before still hangs. A later secrets_find tries again; waiters are notified in the
     * next iteration. */
    for (unsigned i = 0; i < SETS * WAYS; i++) {
        struct entry *e = &s->entry[i / WAYS][i % WAYS];

        if (e->state == AWAITED)
            s->news |= entry_settle(s, e, rc, NULL, 0);
        e->due = false;
    }
    if (s->purge || s->news)
        (void)uv_timer_start(&s->timer, timer_cb, 0, 0);
}

/* A purge that could not begin ends here: done_cb never runs inside secrets_purge. */
static void timer_cb(uv_timer_t *timer)
{
    struct secrets *s = timer->data;
    uint64_t now_ms = uv_now(s->loop);
    bool any = false;

    if (!s->busy && s->purge)
        purge_end(s, -EBUSY);
    for (unsigned i = 0; i < SETS * WAYS; i++) {
        struct entry *e = &s->entry[i / WAYS][i % WAYS];

        if (e->state != NONE && e->state != AWAITED && now_ms - e->used_ms >= IDLE_MS)
            entry_drop(e);
        any |= e->state != NONE;
        e->due |= e->state == KNOWN;
    }
    if (!any && s->read == -EBADMSG)
        s->read = 0; /* nobody has asked for it for long */
    s->check_due |= s->checked != 0 || s->read != 0;
    if (s->news) {
        s->news = false;
        changed(s);
    }
    pump(s);
    if ((any || s->check_due) && !uv_is_active((uv_handle_t *)timer))
        (void)uv_timer_start(&s->timer, timer_cb, SECRETS_CHECK_MS, 0);
}

void secrets_purge(struct secrets *s, struct secrets_purge *p)
{
    struct entry *e = entry_find(s, p->fingerprint);

    if (e && e->state == KNOWN) {
        e->state = AWAITED; /* nobody uses the one that goes */
        e->due = true;      /* if the purge is cancelled before its turn */
    }
    p->queued = true;
    list_push_back(&s->purges, &p->link);
    pump(s);
}

void secrets_cancel(struct secrets *s, struct secrets_purge *p)
{
    if (!p->queued)
        return;
    p->queued = false;
    if (s->purge == p)
        s->purge = NULL;
    else
        list_remove(&p->link);
}

/* ---- opening and closing ---- */

int secrets_open(uv_loop_t *loop, const char *directory, uint64_t timeout_ms,
                 void (*changed_cb)(void *ctx), void *ctx, struct secrets **out)
{
    struct secrets *s = calloc(1, sizeof(*s));

    if (!s)
        return -ENOMEM;
    s->directory = strdup(directory);
    if (!s->directory) {
        free(s);
        return -ENOMEM;
    }
    s->loop = loop;
    s->timeout_ms = timeout_ms;
    s->changed_cb = changed_cb;
    s->ctx = ctx;
    list_init(&s->purges);
    (void)uv_timer_init(loop, &s->timer); /* can't fail */
    s->timer.data = s;
    uv_unref((uv_handle_t *)&s->timer);
    s->check_due = true;
    (void)uv_timer_start(&s->timer, timer_cb, 0, 0);
    *out = s;
    return 0;
}

static void closed_cb(uv_handle_t *handle)
{
    struct secrets *s = handle->data;

    OPENSSL_cleanse(s->entry, sizeof(s->entry));
    free(s->directory);
    free(s);
}

void secrets_close(struct secrets *s)
{
    struct list *node;

    if (!s)
        return;
    s->closing = true;
    aside_stop(&s->aside);
    purge_end(s, -ECANCELED); /* of one that could not begin */
    while ((node = list_pop_front(&s->purges)) != NULL) {
        s->purge = LIST_ENTRY(node, struct secrets_purge, link);
        purge_end(s, -ECANCELED);
    }
    uv_close((uv_handle_t *)&s->timer, closed_cb);
}

/* What steps a request takes, when a step is tried again, and what is answered. */
#include "daemon/backend/s3/s3.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TRIES 8u
#define PAUSE_MS 50u /* at most, before the second try; doubled up to */
#define PAUSE_MAX_MS 2000u
#define LEFT_MS 5u     /* no try begins with less time */
#define SEEN_MS 10000u /* a bucket that was there then is taken to be there */
#define LOG_MS 10000u

static const char *const verbs[] = {
    "HEAD", "GET", "PUT", "PUT", "copy", "DELETE", "list", "look at bucket", "PUT", "DELETE"};

/* ---- the end of a job ---- */

static void job_free(struct s3_job *j)
{
    j->r = NULL;
}

static void answer(struct s3_job *j, struct ucm_backend_result result)
{
    if (result.status >= WIRE_ABSENT)
        result.reason = j->reason;
    if (ucm_backend_answer(j->s3->backend, j->r, &result) < 0)
        j->s3->gone = true;
    job_free(j);
}

static void answer_status(struct s3_job *j, enum wire_status status)
{
    answer(j, (struct ucm_backend_result){
                  .status = status, .bytes = j->r->bytes, .unread = j->unread});
}

static void answer_failure(struct s3_job *j, enum s3_outcome o)
{
    static const enum wire_status statuses[] = {
        [S3_NO_BUCKET] = WIRE_ABSENT, [S3_WRONG_BYTES] = WIRE_OTHER, [S3_AGAIN] = WIRE_FAILED,
        [S3_SLOW] = WIRE_TIMEOUT,     [S3_AWAY] = WIRE_UNREACHABLE,  [S3_FULL] = WIRE_FULL,
        [S3_DENIED] = WIRE_DENIED,    [S3_REFUSED] = WIRE_FAILED,
    };
    bool listed = o < sizeof(statuses) / sizeof(statuses[0]) && statuses[o] != WIRE_OK;

    if (o == S3_NO_BUCKET)
        snprintf(j->reason, sizeof(j->reason), "there is no bucket %.63s", j->s3->target.bucket);
    answer_status(j, listed ? statuses[o] : WIRE_FAILED);
}

/* ---- tries ---- */

/* One line for what is tried again, every LOG_MS at most. */
static void log_again(struct s3_job *j, uint64_t pause_ms)
{
    struct s3 *s3 = j->s3;
    uint64_t now = clock_ms();

    if (s3->log.last_ms != 0 && now < s3->log.last_ms + LOG_MS) {
        s3->log.more++;
        return;
    }
    fprintf(stderr, "ucmd-backend-s3: root=%s %s is tried again in %llu ms: %s (and %u before)\n",
            ucm_backend_hello(s3->backend)->root, verbs[j->step], (unsigned long long)pause_ms,
            j->reason, s3->log.more);
    s3->log.last_ms = now;
    s3->log.more = 0;
}

static uint64_t below(struct s3 *s3, uint64_t n)
{
    s3->random ^= s3->random << 13;
    s3->random ^= s3->random >> 7;
    s3->random ^= s3->random << 17;
    return n ? s3->random % n : 0;
}

/* Random, so that hosts that were refused at once do not come back at once. */
static uint64_t pause_of(struct s3_job *j, uint64_t wait_ms)
{
    uint64_t most = (uint64_t)PAUSE_MS << j->tries;

    if (wait_ms > 0)
        return wait_ms + below(j->s3, wait_ms / 4 + PAUSE_MS);
    return 1 + below(j->s3, most < PAUSE_MAX_MS ? most : PAUSE_MAX_MS);
}

static bool time_left(const struct s3_job *j, uint64_t pause_ms)
{
    return clock_ms() + pause_ms + LEFT_MS < j->r->until_ms;
}

/* The step will not be tried. */
static void step_drop(struct s3_job *j, enum s3_outcome o);

static void step_try(struct s3_job *j)
{
    const struct s3_key *key = s3_credentials_get(j->s3->credentials);

    if (!key && s3_credentials_awaited(j->s3->credentials)) {
        j->state = S3_WANTS_KEY;
        j->wake_ms = j->r->until_ms;
        return;
    }
    snprintf(j->reason, sizeof(j->reason), "%.119s",
             key ? "no memory" : s3_credentials_reason(j->s3->credentials));
    if (!key) {
        step_drop(j, S3_DENIED);
        return;
    }
    j->key_version = s3_credentials_version(j->s3->credentials);
    j->state = S3_RUNS;
    if (s3_http_begin(j, key) < 0)
        step_drop(j, S3_REFUSED);
}

static void step_go(struct s3_job *j, enum s3_step step)
{
    j->step = step;
    j->tries = 0;
    step_try(j);
}

/* False: it is not to be tried again. */
static bool step_again(struct s3_job *j, enum s3_outcome o, uint64_t wait_ms)
{
    uint64_t pause_ms = pause_of(j, wait_ms);

    if (o != S3_AGAIN && o != S3_SLOW && o != S3_AWAY)
        return false;
    if (++j->tries >= TRIES || !time_left(j, pause_ms))
        return false;
    log_again(j, pause_ms);
    j->state = S3_PAUSES;
    j->wake_ms = clock_ms() + pause_ms;
    return true;
}

/* The server did not take our word: with other credentials it may. */
static bool step_with_others(struct s3_job *j)
{
    if (j->doubted || !time_left(j, 0) || !s3_credentials_doubt(j->s3->credentials, j->key_version))
        return false;
    j->doubted = true;
    j->state = S3_WANTS_KEY;
    j->wake_ms = j->r->until_ms;
    return true;
}

/* ---- is the bucket there? ---- */

/* A HEAD's 404 does not say what is missing. */
static void missing_or_no_bucket(struct s3_job *j)
{
    struct s3 *s3 = j->s3;

    if (j->code_known || (s3->seen_ms != 0 && clock_ms() < s3->seen_ms + SEEN_MS)) {
        answer_status(j, WIRE_MISSING);
    } else if (s3->probing) {
        j->state = S3_WANTS_PROBE;
        j->wake_ms = j->r->until_ms;
    } else {
        s3->probing = true;
        step_go(j, S3_PROBE);
    }
}

/* For all that wait for it. */
static void probed(struct s3_job *j, enum s3_outcome o)
{
    struct s3 *s3 = j->s3;

    s3->probing = false;
    for (unsigned i = 0; i < s3->n_jobs; i++) {
        struct s3_job *other = &s3->jobs[i];

        if (!other->r || (other != j && other->state != S3_WANTS_PROBE))
            continue;
        if (other != j)
            memcpy(other->reason, j->reason, sizeof(j->reason));
        if (o == S3_DONE)
            answer_status(other, other->r->verb == WIRE_CHECK ? WIRE_OK : WIRE_MISSING);
        else
            answer_failure(other, o);
    }
}

static void step_drop(struct s3_job *j, enum s3_outcome o)
{
    if (j->step == S3_PROBE)
        probed(j, o);
    else
        answer_failure(j, o);
}

/* ---- from step to step ---- */

static void head_done(struct s3_job *j, enum s3_outcome o)
{
    uint64_t bytes = s3_http_bytes(j);

    if (j->r->verb == WIRE_WRITE) {
        if (o == S3_DONE && bytes == j->r->bytes)
            answer_status(j, WIRE_EXISTS);
        else if (o == S3_DONE || o == S3_MISSING)
            step_go(j, S3_PUT);
        else
            answer_failure(j, o);
    } else if (o == S3_DONE) {
        answer(j, (struct ucm_backend_result){.status = WIRE_OK, .bytes = bytes});
    } else if (o == S3_MISSING) {
        missing_or_no_bucket(j);
    } else {
        answer_failure(j, o);
    }
}

static void get_done(struct s3_job *j, enum s3_outcome o)
{
    if (o == S3_DONE)
        answer(j, (struct ucm_backend_result){
                      .status = WIRE_OK, .bytes = j->r->bytes, .mtime_ns = s3_http_mtime_ns(j)});
    else if (o == S3_MISSING)
        missing_or_no_bucket(j);
    else
        answer_failure(j, o);
}

static void put_done(struct s3_job *j, enum s3_outcome o)
{
    if (o == S3_DONE) {
        answer_status(j, WIRE_OK);
    } else if (o == S3_EXISTS && j->step == S3_PUT_NEW) {
        step_go(j, S3_HEAD); /* has it the right length? */
    } else if (o == S3_UNSUPPORTED) {
        j->s3->unconditional = true;
        step_go(j, S3_HEAD);
    } else {
        answer_failure(j, o);
    }
}

static void list_done(struct s3_job *j, enum s3_outcome o)
{
    if (o != S3_DONE)
        answer_failure(j, o == S3_MISSING ? S3_NO_BUCKET : o);
    else if (j->token[0])
        step_go(j, S3_LIST);
    else
        answer_status(j, WIRE_OK);
}

static void temp_done(struct s3_job *j, enum s3_outcome o)
{
    if (o != S3_DONE) {
        answer_failure(j, o == S3_MISSING ? S3_NO_BUCKET : o);
    } else if (j->step == S3_PUT_TEMP) {
        j->put_ns = s3_http_now_ns(j);
        step_go(j, S3_DELETE_TEMP);
    } else if (j->put_ns == 0) {
        snprintf(j->reason, sizeof(j->reason), "the server's answers have no Date");
        answer_status(j, WIRE_FAILED);
    } else {
        answer(j, (struct ucm_backend_result){.status = WIRE_OK, .now_ns = j->put_ns});
    }
}

static void step_done(struct s3_job *j, enum s3_outcome o)
{
    switch (j->step) {
    case S3_HEAD:
        head_done(j, o);
        break;
    case S3_GET:
        get_done(j, o);
        break;
    case S3_PUT:
    case S3_PUT_NEW:
        put_done(j, o);
        break;
    case S3_LIST:
        list_done(j, o);
        break;
    case S3_PROBE:
        probed(j, o == S3_MISSING ? S3_NO_BUCKET : o);
        break;
    case S3_PUT_TEMP:
    case S3_DELETE_TEMP:
        temp_done(j, o);
        break;
    default: /* S3_COPY, S3_DELETE */
        if (o == S3_DONE || o == S3_MISSING)
            answer_status(j, o == S3_DONE ? WIRE_OK : WIRE_MISSING);
        else
            answer_failure(j, o);
    }
}

void s3_job_step_done(struct s3_job *j, CURLcode result)
{
    uint64_t wait_ms;
    enum s3_outcome o = s3_http_end(j, result, &wait_ms);

    if (o == S3_DONE || (o == S3_MISSING && j->code_known))
        j->s3->seen_ms = clock_ms();
    if (o == S3_NO_BUCKET)
        j->s3->seen_ms = 0;
    if (!step_again(j, o, wait_ms) && !(o == S3_DENIED && step_with_others(j)))
        step_done(j, o);
}

/* ---- jobs ---- */

static enum s3_step first_step(const struct s3 *s3, const struct ucm_backend_request *r)
{
    switch (r->verb) {
    case WIRE_READ:
        return S3_GET;
    case WIRE_WRITE:
        return s3->unconditional ? S3_HEAD : S3_PUT_NEW;
    case WIRE_REMOVE:
        return S3_DELETE;
    case WIRE_TOUCH:
        return S3_COPY;
    case WIRE_LIST:
        return S3_LIST;
    case WIRE_CHECK:
        return r->sync ? S3_PUT_TEMP : S3_PROBE;
    default:
        return S3_HEAD;
    }
}

static struct s3_job *job_take(struct s3 *s3)
{
    for (unsigned i = 0; i < s3->n_jobs; i++)
        if (!s3->jobs[i].r)
            return &s3->jobs[i];
    return NULL;
}

void s3_job_begin(struct s3 *s3, struct ucm_backend_request *r)
{
    struct s3_job *j = job_take(s3);

    if (!j) {
        const struct ucm_backend_result full = {.status = WIRE_FAILED,
                                                .reason = "more requests than were agreed on"};

        s3->gone |= ucm_backend_answer(s3->backend, r, &full) < 0;
        return;
    }
    j->r = r;
    j->doubted = false;
    j->put_ns = j->unread = 0;
    j->token[0] = j->reason[0] = '\0';
    step_go(j, first_step(s3, r));
}

static void job_late(struct s3_job *j)
{
    if (j->state == S3_WANTS_KEY)
        snprintf(j->reason, sizeof(j->reason), "no credentials in time");
    step_drop(j, S3_SLOW);
}

static void job_turn(struct s3_job *j, uint64_t now, bool fresh)
{
    bool key = j->state == S3_WANTS_KEY && fresh;

    if (j->state == S3_RUNS || (!key && now < j->wake_ms))
        return;
    if (key || j->state == S3_PAUSES)
        step_try(j);
    else
        job_late(j);
}

uint64_t s3_jobs_iteration(struct s3 *s3, bool fresh)
{
    uint64_t now = clock_ms(), next = UINT64_MAX;

    for (unsigned i = 0; i < s3->n_jobs; i++) {
        struct s3_job *j = &s3->jobs[i];

        if (j->r)
            job_turn(j, now, fresh);
        if (j->r && j->state != S3_RUNS && j->wake_ms < next)
            next = j->wake_ms;
    }
    return next;
}

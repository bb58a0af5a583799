/* The requests of ucmd-backend-s3. A job is one request of the daemon's: one or more steps, each an
 * HTTP request that is tried until it gets an answer or the job's time is over.
 *
 * Promises:
 * - A job is answered once, and when libcurl has let go of its span.
 * - "ok" of a read: the server said the right length and sent as many bytes. What they are is for
 *   the daemon to check.
 * - A step that failed in a way that may pass is tried again, with a pause that grows and is
 *   random, or as long as the server asked.
 * Threads: one, that of the event loop. */
#ifndef UCM_BACKEND_S3_S3_H
#define UCM_BACKEND_S3_S3_H

#include "daemon/backend/s3/credentials.h"
#include "daemon/backend/s3/target.h"
#include "daemon/backend/s3/xml.h"
#include "daemon/backend/ucmbackend.h"
#include "proto/clock.h"

#include <curl/curl.h>

/* One HTTP request each. */
enum s3_step {
    S3_HEAD,
    S3_GET,
    S3_PUT_NEW, /* if there is none */
    S3_PUT,
    S3_COPY, /* onto itself */
    S3_DELETE,
    S3_LIST,
    S3_PROBE, /* is the bucket there? A listing of one object */
    S3_PUT_TEMP,
    S3_DELETE_TEMP
};

/* What a step came to. */
enum s3_outcome {
    S3_DONE,
    S3_MISSING,
    S3_NO_BUCKET,
    S3_EXISTS,      /* the condition of S3_PUT_NEW did not hold */
    S3_UNSUPPORTED, /* the server knows no such condition */
    S3_WRONG_BYTES, /* it has another length */
    S3_AGAIN,       /* may pass */
    S3_SLOW,        /* may pass; nothing came in time */
    S3_AWAY,        /* may pass; the server can't be reached */
    S3_FULL,
    S3_DENIED,
    S3_REFUSED /* anything else */
};

struct s3_job {
    struct s3 *s3;
    struct ucm_backend_request *r; /* NULL: the slot is free */
    enum s3_step step;
    enum {
        S3_RUNS,       /* libcurl has it */
        S3_PAUSES,     /* until wake_ms */
        S3_WANTS_KEY,  /* until there are credentials, or wake_ms */
        S3_WANTS_PROBE /* until another job has found out whether the bucket is there, or wake_ms */
    } state;
    uint64_t wake_ms;
    unsigned tries;       /* of this step */
    bool doubted;         /* credentials were refused, and fetched again */
    uint64_t key_version; /* that the step was signed with */
    uint64_t put_ns;      /* the store's time at S3_PUT_TEMP */
    uint64_t unread;
    char token[S3_XML_TEXT_BYTES]; /* of the page that is next */
    char reason[WIRE_REASON_BYTES + 1];
    /* The HTTP request. */
    CURL *easy;
    struct curl_slist *headers;
    struct s3_xml *xml;
    uint64_t at; /* bytes that came or went */
    bool judged, to_span, wrong_bytes, code_known;
    char error[CURL_ERROR_SIZE];
    struct wire_file *files; /* of a page: they are sent when it is whole */
    uint32_t n_files, cap_files;
};

struct s3 {
    struct s3_target target;
    struct s3_credentials *credentials;
    struct ucm_backend *backend;
    CURLM *multi;
    struct s3_job *jobs;
    unsigned n_jobs;
    bool unconditional; /* the server knows no If-None-Match of a PUT */
    bool probing;       /* a job is at S3_PROBE */
    uint64_t seen_ms;   /* when the bucket was last known to be there; 0: unknown */
    uint64_t random;
    bool gone; /* the daemon */
    struct {   /* of log lines about tries */
        uint64_t last_ms;
        unsigned more;
    } log;
};

/* ---- http.c: one HTTP request ---- */

/* Gives the step to libcurl. 0, or -ENOMEM. There are credentials. */
int s3_http_begin(struct s3_job *j, const struct s3_key *key);
/* libcurl is done with it. Fills in j->reason for what is a failure, and how long the server asked
 * to wait. */
enum s3_outcome s3_http_end(struct s3_job *j, CURLcode result, uint64_t *wait_ms);
/* Bytes of an answer; 0: unknown. */
uint64_t s3_http_bytes(struct s3_job *j);
uint64_t s3_http_mtime_ns(struct s3_job *j);
uint64_t s3_http_now_ns(struct s3_job *j);

/* ---- job.c: what steps a request takes ---- */

void s3_job_begin(struct s3 *s3, struct ucm_backend_request *r);
/* libcurl is done with the step. */
void s3_job_step_done(struct s3_job *j, CURLcode result);
/* Goes on with jobs whose time has come; `fresh`: there are new credentials, or none will come.
 * Returns when it is to be called next. */
uint64_t s3_jobs_iteration(struct s3 *s3, bool fresh);

#endif

/* A backend of ucmd's shared tier, in C: the process side of docs/backends.md.
 *
 * Two ways to use it:
 * - ucm_backend_serve runs a function for each request in threads of its own. For libraries whose
 *   calls block.
 * - ucm_backend_open, then a loop of the caller's over ucm_backend_fd, ucm_backend_next and
 *   ucm_backend_answer. For libraries with an event loop.
 *
 * Promises: a request is handed out once and stays valid until it is answered; its span lies within
 * the buffer. A daemon that breaks the protocol ends the process with a line on standard error.
 *
 * Threads: ucm_backend_answer, ucm_backend_files and ucm_backend_flush from any thread; the rest
 * from one. */
#ifndef UCM_BACKEND_UCMBACKEND_H
#define UCM_BACKEND_UCMBACKEND_H

#include "daemon/backend/wire.h"

struct ucm_backend;

/* One request. Owned by the library; the caller may use `user`. */
struct ucm_backend_request {
    uint64_t id;
    enum wire_verb verb;
    const char *key;   /* WIRE_LIST: the prefix; WIRE_CHECK: "" */
    const char *temp;  /* WIRE_WRITE, WIRE_CHECK: a key of nobody else's */
    void *data;        /* WIRE_READ, WIRE_WRITE: the span; NULL otherwise */
    uint64_t bytes;    /* of the whole file: WIRE_FIND, WIRE_READ, WIRE_WRITE */
    uint64_t until_ms; /* by CLOCK_MONOTONIC: nobody waits for the answer any more */
    bool sync;
    void *user;
};

/* What an answer has besides its status, all optional but `bytes` (WIRE_FIND, WIRE_READ) and
 * `now_ns` (WIRE_CHECK with sync). */
struct ucm_backend_result {
    enum wire_status status;
    uint64_t bytes;    /* of the file */
    uint64_t mtime_ns; /* WIRE_READ: 0: unknown */
    uint64_t now_ns;
    uint64_t unread;    /* WIRE_LIST: files left out because nothing is known of them */
    const char *reason; /* of a failure, borrowed: cut to 120 bytes, made printable. NULL: none */
};

struct ucm_backend_about {
    const char *name; /* what `ucmctl shared` shows, 1 to 63 bytes */
    unsigned depth;   /* requests at a time; 0: as many as the daemon wants */
    bool touch, list; /* abilities */
};

/* What the daemon said in its hello. Valid until ucm_backend_close. */
const struct wire_hello *ucm_backend_hello(const struct ucm_backend *b);

/* Takes the socket that the daemon passed, waits for its hello, and answers it. 0 or -errno;
 * -EPROTO: what came is no hello of this protocol. */
int ucm_backend_open(const struct ucm_backend_about *about, struct ucm_backend **out);
/* No thread uses a request any more. NULL-safe. */
void ucm_backend_close(struct ucm_backend *b);

/* For poll(2): readable when ucm_backend_next may have a request. */
int ucm_backend_fd(const struct ucm_backend *b);
/* 0 and a request; -EAGAIN: there is none now; -EPIPE: the daemon is gone, the process is to end;
 * -EPROTO. */
int ucm_backend_next(struct ucm_backend *b, struct ucm_backend_request **out);
/* The same, but waits for one; the socket blocks, as the daemon made it. */
int ucm_backend_wait(struct ucm_backend *b, struct ucm_backend_request **out);
/* Answers the request, which is gone then. Kept back until ucm_backend_flush, unless a packet is
 * full. 0; -EPIPE. */
int ucm_backend_answer(struct ucm_backend *b, struct ucm_backend_request *r,
                       const struct ucm_backend_result *result);
/* Some of a list's files, before its answer; n at most 200. What no block file's name can be is
 * left out. */
int ucm_backend_files(struct ucm_backend *b, struct ucm_backend_request *r,
                      const struct wire_file *files, uint32_t n);
/* Sends the answers that were kept back, or leaves them to a thread that is sending; may wait for
 * the daemon to read. 0; -EPIPE. */
int ucm_backend_flush(struct ucm_backend *b);

/* Serves until the daemon is gone: handle_cb runs in one of `threads` threads for each request, and
 * fills in the result, which is all zero before (WIRE_OK). A request whose time has passed is
 * answered without it. Returns 0, or -errno when it could not begin. */
int ucm_backend_serve(const struct ucm_backend_about *about, unsigned threads,
                      void (*handle_cb)(void *ctx, struct ucm_backend *b,
                                        struct ucm_backend_request *r,
                                        struct ucm_backend_result *result),
                      void *ctx);

/* Turns an errno into a status. An errno without a status of its own gives WIRE_FAILED. */
enum wire_status ucm_backend_status(int error);

#endif

/* What stands around the methods; request_fakes.c has the functions, in place of the daemon's. */
#ifndef UCMD_TESTS_REQUEST_FAKES_H
#define UCMD_TESTS_REQUEST_FAKES_H

#include "daemon/base/list.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- a connection that keeps what it is sent ---- */

#define ANSWERS_MAX 96

struct conn {
    struct answer {
        uint8_t *frame;
        size_t bytes;
        uint32_t msgid;
    } answer[ANSWERS_MAX];
    unsigned n;
    bool freed;
};

/* ---- threads for summaries, which work when a test says so ---- */

struct summary_pool {
    struct list jobs;
};

extern struct summary_pool pool; /* of the test's requests */

#endif

/* What requests are signed with: from AWS's shared credentials file, the environment, or a command
 * that prints them as AWS's credential_process does.
 *
 * Promises: no secret is ever written anywhere. The file is read again when it has changed; the
 * command runs again before what it printed expires. What expired is not used.
 * Threads: one. */
#ifndef UCM_BACKEND_S3_CREDENTIALS_H
#define UCM_BACKEND_S3_CREDENTIALS_H

#include "daemon/backend/s3/target.h"

#include <stdint.h>

struct s3_key {
    char id[256];
    char secret[512];
    char token[8192]; /* of a session; "": none */
};

struct s3_credentials;

/* 0 or -ENOMEM. `t` outlives it. Nothing is read yet. */
int s3_credentials_open(const struct s3_target *t, struct s3_credentials **out);
void s3_credentials_close(struct s3_credentials *c); /* NULL-safe */

/* Goes on with what is due: reads the file, starts the command, takes what it printed. Call it at
 * least at the time that it returns (by CLOCK_MONOTONIC, in ms), and when its descriptor is
 * readable. */
uint64_t s3_credentials_iteration(struct s3_credentials *c);
/* Output of the command; -1: it does not run. */
int s3_credentials_fd(const struct s3_credentials *c);
/* A command runs, and may bring other ones. */
bool s3_credentials_awaited(const struct s3_credentials *c);

/* NULL: there are none. Valid until the next iteration. */
const struct s3_key *s3_credentials_get(struct s3_credentials *c);
/* Grows with each new key. */
uint64_t s3_credentials_version(const struct s3_credentials *c);
/* The server refused those of this version: they are fetched again at the next iteration, once a
 * second at most. True: others may come. */
bool s3_credentials_doubt(struct s3_credentials *c, uint64_t version);
/* Why there are none, or no newer ones. "": nothing is wrong. */
const char *s3_credentials_reason(const struct s3_credentials *c);

#endif

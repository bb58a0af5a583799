/* ucmctl, the operator's command line: a client like any other, on ucm_call.
 *
 * ucmctl.c has the table of commands; each file cmd_*.c is a group of them; program.h parses and
 * teaches, answer.h reads the daemon's results, table.h prints them for people.
 * Promise: what fails says so in a sentence on standard error and in the exit code; with --json,
 * standard output carries one JSON document (one a line for `stats --watch`) and nothing else.
 * Threads: one. */
#ifndef UCM_CTL_CTL_H
#define UCM_CTL_CTL_H

#include "client/ctl/answer.h"
#include "client/ctl/program.h"

enum ctl_exit {
    CTL_OK = 0,
    CTL_ERROR = PROGRAM_EXIT_FAILED,
    CTL_USAGE = PROGRAM_EXIT_USAGE,
    CTL_NO_DAEMON = 3,
    CTL_UNHEALTHY = 4,
    CTL_CORRUPT = 5,
};

struct ctl {
    const struct args *args;
    bool json;
    int timeout_ms;
    const char *socket;
    struct ucm_client *client;
    struct ucm_server_info server;
};

/* Reads the common options and connects. CTL_OK, or an exit code with its sentence printed. */
int ctl_open(struct ctl *c, const struct args *a);
void ctl_close(struct ctl *c);

/* Calls a method; takes params (may be NULL) and destroys it. CTL_OK and *out for answer_close, or
 * an exit code with its sentence printed. */
int ctl_call(struct ctl *c, const char *method, msgpack_sbuffer *params, struct answer *out);
/* The same for answer_page. */
int ctl_page(struct ctl *c, const char *method, uint32_t ns, uint64_t limit, uint64_t *cursor,
             struct answer *out);
/* Prints and frees the document (NULL: memory ran out). */
int ctl_print_json(cJSON *document, bool one_line);

/* Prints "ucmctl: sentence" and returns `code`. */
int ctl_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- namespaces and keys, as people name them ---- */

struct ctl_namespace {
    uint32_t ns;
    uint32_t key_bytes;
    uint64_t blocks;
    char fingerprint[65];
    char model[257];
};

#define CTL_FINGERPRINT_DIGITS 4 /* the shortest prefix taken */

/* By number, or by a prefix of the fingerprint that only one has. */
int ctl_namespace_find(struct ctl *c, const char *name, struct ctl_namespace *out);
/* Hex words to keys, one after the other. On success *keys is from malloc, NULL for no words. */
int ctl_keys(const struct args *a, char **word, int n_words, const struct ctl_namespace *ns,
             uint8_t **keys, size_t *bytes);
/* Asks on a terminal, wants --yes elsewhere. CTL_OK: go on. */
int ctl_confirm(const struct args *a, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- commands ---- */

int cmd_status(const struct args *a);
int cmd_health(const struct args *a);
int cmd_version(const struct args *a);
int cmd_stats(const struct args *a);
int cmd_share(const struct args *a);
int cmd_namespaces(const struct args *a);
int cmd_tenants(const struct args *a);
int cmd_ls(const struct args *a);
int cmd_inspect(const struct args *a);
int cmd_evict(const struct args *a);
int cmd_pin(const struct args *a);
int cmd_unpin(const struct args *a);
int cmd_purge(const struct args *a);
int cmd_verify(const struct args *a);
int cmd_format(const struct args *a);

/* verify --offline: the files of an entry of nvme.paths, read without a daemon; state: nvme.state,
 * for one that is no folder, or NULL. salvage: and repaired; lift: and taken out of quarantine. An
 * exit code: of what was found, also where it was repaired. */
int offline_verify(const char *path, const char *state, bool json, bool salvage, bool lift);

#endif

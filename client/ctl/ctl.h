/* ucmctl, the operator's command line: a client of the daemon, by ucm_call.
 *
 * commands*.c have the table of commands, and each cmd_*.c implements some of them. program.h
 * parses the command line and prints help, answer.h reads the daemon's results, table.h prints
 * tables. Promise: a failure prints one sentence on standard error and sets the exit status. With
 * --json, standard output is one JSON document (one a line for `stats --watch`) and nothing else.
 * Threads: one. */
#ifndef UCM_CTL_CTL_H
#define UCM_CTL_CTL_H

#include "client/ctl/answer.h"
#include "client/ctl/program.h"
#include "client/ctl/table.h"

enum ctl_exit {
    CTL_OK = 0,
    CTL_ERROR = PROGRAM_EXIT_FAILED,
    CTL_USAGE = PROGRAM_EXIT_USAGE,
    CTL_NO_DAEMON = 3,
    CTL_DEGRADED = 4,
    CTL_CORRUPT = 5,
    CTL_FAILING = 6,
};

/* The connection to the daemon. Every command finds it in its args. */
struct ctl {
    struct ucm_client *client; /* NULL before the first call */
    struct ucm_server_info server;
};

/* All functions below that return int return CTL_OK, or another exit status after they printed a
 * sentence. */

/* Calls a method; params as answer_call has them. On CTL_OK *out is for answer_close. The first
 * call connects. */
int ctl_call(const struct args *a, enum ucm_method method, const void *params, struct answer *out);
/* The same by answer_page. */
int ctl_page(const struct args *a, enum ucm_method method, uint32_t ns, uint64_t limit,
             uint64_t *cursor, struct answer *out);
/* Calls a method and has `show` print its result. */
int ctl_show(const struct args *a, enum ucm_method method, const void *params,
             int (*show)(const struct args *a, const msgpack_object *result));
/* Connects, for a command that calls no method. */
int ctl_connect(const struct args *a);
/* The same for one that can do without a daemon: 0 or a negative enum ucm_status, and prints
 * nothing. */
int ctl_connect_quietly(const struct args *a);
/* Prints and frees the document (NULL: memory ran out). */
int ctl_print_json(cJSON *document, bool one_line);
void ctl_json_u64(cJSON *object, const char *name, uint64_t v);
/* Adds the counts of a result: a field that is absent is 0. NULL ends the list. */
void ctl_json_counts(cJSON *object, const msgpack_object *map, const char *const *fields);

/* ---- tables of the daemon's objects ---- */

enum ctl_format {
    SHOW_TEXT,
    SHOW_PREFIX, /* 12 characters of a text */
    SHOW_RATIO,  /* raw_layer_bytes by this field; "-": they are the same */
    SHOW_NUMBER,
    SHOW_BYTES,
    SHOW_BOUND, /* bytes; "-" for 0 */
    SHOW_US,    /* microseconds, in milliseconds */
    SHOW_HEX,
    SHOW_HASH, /* 16 hexadecimal digits */
    SHOW_YES,  /* "yes" or "-" */
    SHOW_COMPLETE,
};

/* A column shows one field of each object. */
struct ctl_column {
    const char *title; /* as struct table has it; NULL ends a list of columns */
    const char *field;
    enum ctl_format format;
};

void ctl_table_begin(struct table *t, const struct ctl_column *columns);
void ctl_table_row(struct table *t, const struct ctl_column *columns, const msgpack_object *o);
int ctl_table_end(struct table *t); /* prints it */
/* Prints a table of the objects in an array of `map`. */
int ctl_table(const msgpack_object *map, const char *array, const struct ctl_column *columns);

/* ---- namespaces and keys, as people name them ---- */

struct ctl_namespace {
    uint32_t ns;
    uint32_t key_bytes;
    uint64_t blocks;
    char fingerprint[65];
    char model[257];
};

#define CTL_FINGERPRINT_DIGITS 4 /* of the shortest prefix */

/* Calls back for each namespace of the daemon, until one call does not return CTL_OK. */
int ctl_each_namespace(const struct args *a,
                       int (*each_cb)(const struct args *a, const msgpack_object *ns, void *ctx),
                       void *ctx);
/* Finds a namespace by its number, or by a prefix of its fingerprint that no other one has. */
int ctl_namespace_find(const struct args *a, const char *name, struct ctl_namespace *out);
/* Turns hexadecimal words into packed keys, whose memory is from malloc; NULL for no words. */
int ctl_keys(const struct args *a, char **word, int n_words, const struct ctl_namespace *ns,
             struct proto_bin *keys);
/* Asks on a terminal; elsewhere --yes must be given. CTL_OK: go on. */
int ctl_confirm(const struct args *a, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- commands ---- */

extern const struct program ctl_program;
extern const struct program_group commands_show, commands_change, commands_host;

int cmd_status(const struct args *a);
int cmd_health(const struct args *a);
int cmd_version(const struct args *a);
int cmd_stats(const struct args *a);
int cmd_top(const struct args *a);
int cmd_shared(const struct args *a);
int cmd_namespace(const struct args *a);
int cmd_tenant(const struct args *a);
int cmd_ls(const struct args *a);
int cmd_inspect(const struct args *a);
int cmd_evict(const struct args *a);
int cmd_pin(const struct args *a);
int cmd_unpin(const struct args *a);
int cmd_purge(const struct args *a);
int cmd_verify(const struct args *a);
int cmd_bypass(const struct args *a);
int cmd_encryption_key(const struct args *a);
/* cmd_encryption_key_files.c: which keys have encrypted the files of a root, which is mounted
 * there. */
int key_files(const struct args *a, const char *directory);
int cmd_config(const struct args *a);
int cmd_format(const struct args *a);
int cmd_plan(const struct args *a);
int cmd_doctor(const struct args *a);
int cmd_trace(const struct args *a);
int cmd_events(const struct args *a);

/* verify --offline: the files of an entry of nvme.paths, read without a daemon; state: nvme.state,
 * for one that is not a directory, or NULL. salvage: and repaired; lift: and taken out of
 * quarantine. An exit status: of what was found, also where it was repaired. */
int offline_verify(const char *path, const char *state, bool json, bool salvage, bool lift);

/* A line for each entry of the list `bypassed`, each after `before`. */
void print_bypasses(const msgpack_object *map, const char *before);

#endif

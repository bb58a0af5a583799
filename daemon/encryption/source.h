/* Where a tenant's keys come from: the text of a file, of a systemd credential, or of a command's
 * output. One key a line, 64 hexadecimal digits; empty lines and such that begin with '#' do not
 * count. docs/security.md, "Encrypt a tenant's blocks".
 *
 * Threads: the event loop. */
#ifndef UCMD_ENCRYPTION_SOURCE_H
#define UCMD_ENCRYPTION_SOURCE_H

#include "daemon/encryption/aside.h"
#include "daemon/encryption/encryption.h"

#define SOURCE_BYTES 4096u /* of the text */

/* Length of the name in an item of encryption.tenants. */
size_t source_name_bytes(const char *item);

/* 0 and the number of keys, or -EINVAL with `why`. Keys that occur twice count once, at the last
 * place. */
int source_parse(const char *text, size_t n,
                 uint8_t keys[ENCRYPTION_KEYS_MAX][ENCRYPTION_KEY_BYTES], unsigned *count,
                 char why[160]);

/* Memory of the caller. text holds keys: the caller cleanses it when it has used it. */
struct source {
    uv_loop_t *loop;
    const char *from;    /* the item after the name */
    uint64_t timeout_ms; /* then a command is killed, and a file is left to its thread */
    void (*done_cb)(struct source *s, int status, const char *why);
    char *text; /* SOURCE_BYTES of locked memory */
    size_t n;
    bool busy;
    /* of a file */
    char path[4096];
    struct aside aside;
    /* of a command */
    uv_process_t process;
    uv_pipe_t out;
    uv_timer_t timer;
    unsigned handles; /* open */
    int status;       /* 0, or why it was ended */
    int64_t exit_status;
    int signal;
    char more; /* room for what is too much */
};
/* done_cb runs once, on the event loop, inside the call where nothing can be begun: 0 with s->text
 * and s->n, or -errno with a sentence. */
void source_read(struct source *s);
/* Blocks for at most so long until a file has been read; then done_cb has run. Not for a
 * command. */
void source_wait(struct source *s, uint64_t ms);
/* Ends what is under way; done_cb runs. */
void source_stop(struct source *s);

#endif

/* What a file of credentials and a command for them say: AWS's shared credentials file, and what
 * its credential_process prints. Pure functions, any thread. They write no secret anywhere but to
 * `key`. */
#ifndef UCM_BACKEND_S3_CREDENTIALS_PARSE_H
#define UCM_BACKEND_S3_CREDENTIALS_PARSE_H

#include "daemon/backend/s3/credentials.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* False: there is no room for it. */
bool s3_text_take(char *to, size_t cap, const char *text);

/* One profile of the file's `text`, which is changed; what it does not name stays as it was.
 * process: its credential_process, "" where it has none. False: a value is longer than its
 * place. */
bool s3_profile_parse(char *text, const char *profile, struct s3_key *key, char *process,
                      size_t process_cap);

/* The n bytes that a command printed. now_s: since 1970. *expires_s: the same; 0: never. NULL, or
 * what is wrong, a sentence's end; then `key` may have a part of it. */
const char *s3_command_parse(const char *text, size_t n, int64_t now_s, struct s3_key *key,
                             int64_t *expires_s);

#endif

/* Where a backend's objects are, as "s3://BUCKET[/PREFIX][?OPTION=VALUE[&...]]" says it
 * (docs/shared-tier.md).
 * Threads: no state. */
#ifndef UCM_BACKEND_S3_TARGET_H
#define UCM_BACKEND_S3_TARGET_H

#include <stdbool.h>
#include <stddef.h>

#define S3_TEXT_BYTES 512u
#define S3_WHY_BYTES 200u
#define S3_CREDENTIALS "/etc/ucmd/s3/credentials"

struct s3_target {
    char bucket[64];
    char prefix[S3_TEXT_BYTES]; /* "", or ends with a slash */
    char base[S3_TEXT_BYTES];   /* URL of the bucket; without its last slash that of a listing */
    char region[64];
    char ca[S3_TEXT_BYTES]; /* file of certificates; "": the system's */
    char credentials[S3_TEXT_BYTES];
    char command[S3_TEXT_BYTES]; /* prints credentials; "": none */
    char profile[64];
    bool file_named; /* `credentials` was given */
    bool touch, list;
    bool payload_signed;
};

/* 0, or -EINVAL with a sentence in `why`. */
int s3_target_parse(const char *text, struct s3_target *out, char why[S3_WHY_BYTES]);

/* Appends what an URL's path, or with `query` a parameter, has for `text`, as signatures want it.
 * False: no room, and *out is cut. */
bool s3_encode(char *out, size_t cap, const char *text, bool query);

#endif

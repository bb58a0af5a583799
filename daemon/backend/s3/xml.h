/* What an S3 server says in XML: a page of a listing, or an error. By expat.
 *
 * Bounds: a page is 8 MiB at most, an element's text 4 KiB. Threads: one object at a time. */
#ifndef UCM_BACKEND_S3_XML_H
#define UCM_BACKEND_S3_XML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define S3_XML_TEXT_BYTES 4096u

struct s3_xml;

struct s3_listed {
    char key[S3_XML_TEXT_BYTES]; /* decoded */
    uint64_t bytes, mtime_ns;
    bool whole; /* all three were there */
};

/* file_cb for each object that a page names. NULL: no memory. */
struct s3_xml *s3_xml_new(void (*file_cb)(void *ctx, const struct s3_listed *file), void *ctx);
void s3_xml_free(struct s3_xml *x); /* NULL-safe */
/* Takes the next bytes. At the first that are no XML it remembers that, and ignores all after
 * them. */
void s3_xml_feed(struct s3_xml *x, const char *data, size_t n);

/* After the last byte. */
bool s3_xml_is_listing(struct s3_xml *x);  /* whole, and a listing */
const char *s3_xml_code(struct s3_xml *x); /* of an error: "NoSuchKey"; "": it was none */
const char *s3_xml_next(struct s3_xml *x); /* the token of the next page; "": it was the last */

/* "2026-11-23T18:55:36[.FRACTION](Z|+00:00)" in nanoseconds since 1970; 0: it is none. */
uint64_t s3_time_parse(const char *text);

#endif

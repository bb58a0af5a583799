#include "daemon/checkpoint/read.h"

#include "daemon/checkpoint/format.h"
#include "daemon/format/io.h"

#include <errno.h>

void checkpoint_read(struct checkpoint_reader *r)
{
    ssize_t n = io_read_some(r->fd, r->buffer, r->capacity, r->offset);
    struct checkpoint_span span;
    int rc = 0;

    r->good = 0;
    while (n > 0 && r->good < (size_t)n) {
        rc = checkpoint_span_decode(r->buffer + r->good, (size_t)n - r->good, &span);
        if (rc < 0)
            break;
        r->good += checkpoint_span_bytes(span.entries);
    }
    /* a span that goes on after a full buffer is read again from its start */
    r->damaged = n < 0 || rc == -EBADMSG || (rc == -EAGAIN && (size_t)n < r->capacity);
    r->end = r->damaged || (size_t)n < r->capacity;
    r->offset += r->good;
}

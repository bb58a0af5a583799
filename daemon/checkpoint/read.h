/* Reading ucmd.index: the daemon's recovery and ucmctl's offline tools share it. Any thread; it
 * blocks. */
#ifndef UCMD_CHECKPOINT_READ_H
#define UCMD_CHECKPOINT_READ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Piece by piece. */
struct checkpoint_reader {
    int fd;
    uint64_t offset; /* after the spans that were read */
    uint8_t *buffer;
    size_t capacity;
    size_t good;  /* bytes of whole spans in the buffer, all of which pass */
    bool damaged; /* what follows them does not pass */
    bool end;     /* nothing that counts follows them */
};

/* Fills the buffer with the next spans. */
void checkpoint_read(struct checkpoint_reader *r);

#endif

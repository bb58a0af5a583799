/* Faults that build/ucmd-inject.so, preloaded into a daemon, causes in its calls on the cache file.
 * The struct lies in a file that both map: $UCM_INJECT names it. */
#ifndef UCM_TESTS_INJECT_H
#define UCM_TESTS_INJECT_H

struct inject {
    int read_error, write_error, sync_error; /* errno, or 0 */
    int reads, writes;                       /* so many calls fail; negative: all */
    long read_from;                          /* pread() fails at this offset and after it only */
    int short_by;                            /* transfers end early by so many bytes */
    int setup_error;                         /* of making a ring */
    int ring_error;                          /* of all that a ring completes */
    int no_room;                             /* the file system has none left */
    int failed;                              /* calls that did, so far */
    int read_delay_ms;                       /* preadv() takes so much longer */
};

#endif

/* What tests/fault/test_damage.c does to the files of a daemon whose segments have 1 MiB and whose
 * parts have 32 KiB. */
#ifndef UCM_TESTS_HARM_H
#define UCM_TESTS_HARM_H

#include "tests/integration/harness.h"

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define HARM_PAGE 4096u
#define HARM_SLOT_BYTES (9 * HARM_PAGE) /* header, and 4 layers of 8 KiB */
#define HARM_VICTIM 7u                  /* the key whose slot is damaged */

struct harm {
    const char *name, *file; /* NULL: the cache file */
    enum {
        HARM_FLIPS,       /* a bit of the byte at `at`, */
        HARM_FLIPS_STATE, /* or at `at` in the newer state page, */
        HARM_CUTS,        /* the file there, */
        HARM_SWAPS,       /* the slot with another from `at` on, */
        HARM_OVERWRITES,  /* or writes that one over it */
    } what;
    enum {
        OF_FILE,
        OF_VICTIM,
        OF_SEGMENT
    } of;                            /* where `at` begins: at the victim's slot or its segment */
    off_t at, and_at;                /* and_at: another bit; 0: none */
    bool checkpoint_only, scan_only; /* needs a checkpoint; or is only felt where there is none */
    bool harmless;                   /* nothing is lost */
    bool rebuilt;                    /* or not after a repair */
};

#define HARMS 15u
/* some of them */
enum { HARM_PAYLOAD, HARM_HEADER, HARM_MAGIC, HARM_SWAP };
enum { HARM_CUT = 6, HARM_SEGMENT, HARM_SEGMENT_MAGIC };
extern const struct harm harms[HARMS];

/* Opens a file in the daemon's directory; whole reads and writes; a bit of the byte at `at`. */
int harm_file(const struct host *h, const char *name);
void harm_get(int fd, void *p, size_t n, off_t at);
void harm_put(int fd, const void *p, size_t n, off_t at);
void harm_flip(int fd, off_t at);
/* Where the header of this key's slot lies. */
off_t harm_slot(int fd, uint64_t number);

void harm_do(const struct host *host, const struct harm *h);

#endif

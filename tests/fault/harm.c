#include "tests/fault/harm.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define DATA (1 << 20)
#define OTHER 8u /* what is swapped with the victim */

int harm_file(const struct host *h, const char *name)
{
    char path[128];
    int fd;

    snprintf(path, sizeof(path), "%s/%s", h->dir, name);
    fd = open(path, O_RDWR | O_CLOEXEC);
    cr_assert_geq(fd, 0, "%s", path);
    return fd;
}

void harm_get(int fd, void *p, size_t n, off_t at)
{
    cr_assert_eq(pread(fd, p, n, at), (ssize_t)n);
}

void harm_put(int fd, const void *p, size_t n, off_t at)
{
    cr_assert_eq(pwrite(fd, p, n, at), (ssize_t)n);
}

void harm_flip(int fd, off_t at)
{
    uint8_t byte;

    harm_get(fd, &byte, 1, at);
    byte ^= 0x10;
    harm_put(fd, &byte, 1, at);
}

/* Where the slot of this key's header lies. */
off_t harm_slot(int fd, uint64_t number)
{
    uint8_t page[HARM_PAGE], key[WORKER_KEY_BYTES];

    key_make(number, key);
    for (off_t at = DATA; pread(fd, page, HARM_PAGE, at) == (ssize_t)HARM_PAGE; at += HARM_PAGE)
        if (memcmp(page, "UCMS", 4) == 0 && memcmp(page + 64, key, sizeof(key)) == 0)
            return at;
    cr_assert_fail("no slot of key %llu", (unsigned long long)number);
    return 0;
}

static void swap(int fd, off_t a_at, off_t b_at, off_t skip)
{
    static uint8_t a[HARM_SLOT_BYTES], b[HARM_SLOT_BYTES];
    size_t n = HARM_SLOT_BYTES - (size_t)skip;

    harm_get(fd, a, n, a_at + skip);
    harm_get(fd, b, n, b_at + skip);
    harm_put(fd, b, n, a_at + skip);
    harm_put(fd, a, n, b_at + skip);
}

static void overwrite(int fd, off_t to, off_t from)
{
    static uint8_t slot[HARM_SLOT_BYTES];

    harm_get(fd, slot, HARM_SLOT_BYTES, from);
    harm_put(fd, slot, HARM_SLOT_BYTES, to);
}

/* Harms one of the two copies. The older one knows only an earlier start. */
static off_t newer_state(int fd)
{
    uint64_t a, b;

    harm_get(fd, &a, 8, HARM_PAGE + 32);
    harm_get(fd, &b, 8, 2 * HARM_PAGE + 32);
    return a > b ? HARM_PAGE : 2 * HARM_PAGE;
}

const struct harm harms[HARMS] = {
    {.name = "a bit of a payload flipped", .of = OF_VICTIM, .at = HARM_PAGE + 12345},
    {.name = "a bit of a slot's header flipped", .of = OF_VICTIM, .at = 104, .scan_only = true},
    {.name = "a bit of a slot's magic flipped", .of = OF_VICTIM, .at = 1, .scan_only = true},
    {.name = "two slots swapped", .what = HARM_SWAPS},
    {.name = "two payloads swapped", .what = HARM_SWAPS, .at = HARM_PAGE},
    {.name = "a slot written over another", .what = HARM_OVERWRITES},
    {.name = "the file cut in a slot", .what = HARM_CUTS, .of = OF_VICTIM, .at = HARM_PAGE + 5000},
    {.name = "a bit of a segment's header flipped", .of = OF_SEGMENT, .at = 33, .rebuilt = true},
    {.name = "a bit of a segment's magic flipped",
     .of = OF_SEGMENT,
     .checkpoint_only = true,
     .rebuilt = true},
    {.name = "a bit of the newer state page flipped",
     .what = HARM_FLIPS_STATE,
     .at = 40,
     .harmless = true},
    {.name = "both state pages damaged",
     .at = HARM_PAGE + 40,
     .and_at = 2 * HARM_PAGE + 3,
     .harmless = true},
    {.name = "a bit of the checkpoint flipped",
     .file = "ucmd.index",
     .at = 777,
     .checkpoint_only = true,
     .harmless = true},
    {.name = "the checkpoint cut",
     .file = "ucmd.index",
     .what = HARM_CUTS,
     .at = 3000,
     .checkpoint_only = true,
     .harmless = true},
    {.name = "a bit of the namespaces flipped", .file = "ucmd.namespaces", .at = 90},
    {.name = "the namespaces cut", .file = "ucmd.namespaces", .what = HARM_CUTS, .at = 1000},
};

void harm_do(const struct host *host, const struct harm *h)
{
    int fd = harm_file(host, h->file ? h->file : "ucmd.cache");
    off_t victim = h->file ? 0 : harm_slot(fd, HARM_VICTIM), at = h->at;

    if (h->of == OF_VICTIM)
        at += victim;
    else if (h->of == OF_SEGMENT)
        at += victim / DATA * DATA;
    else if (h->what == HARM_FLIPS_STATE)
        at += newer_state(fd);
    if (h->what == HARM_CUTS)
        cr_assert_eq(ftruncate(fd, at), 0);
    else if (h->what == HARM_SWAPS)
        swap(fd, victim, harm_slot(fd, OTHER), at);
    else if (h->what == HARM_OVERWRITES)
        overwrite(fd, victim, harm_slot(fd, OTHER));
    else
        harm_flip(fd, at);
    if (h->and_at)
        harm_flip(fd, h->and_at);
    close(fd);
}

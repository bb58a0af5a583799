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

static off_t segment_of(off_t at)
{
    return at / DATA * DATA;
}

static void harm_payload(int fd, off_t victim, off_t other)
{
    (void)other;
    harm_flip(fd, victim + HARM_PAGE + 12345);
}

static void harm_header(int fd, off_t victim, off_t other)
{
    (void)other;
    harm_flip(fd, victim + 104);
}

static void harm_magic(int fd, off_t victim, off_t other)
{
    (void)other;
    harm_flip(fd, victim + 1);
}

static void swap(int fd, off_t a_at, off_t b_at, size_t skip)
{
    static uint8_t a[HARM_SLOT_BYTES], b[HARM_SLOT_BYTES];

    harm_get(fd, a, HARM_SLOT_BYTES - skip, a_at + (off_t)skip);
    harm_get(fd, b, HARM_SLOT_BYTES - skip, b_at + (off_t)skip);
    harm_put(fd, b, HARM_SLOT_BYTES - skip, a_at + (off_t)skip);
    harm_put(fd, a, HARM_SLOT_BYTES - skip, b_at + (off_t)skip);
}

static void harm_swap(int fd, off_t victim, off_t other)
{
    swap(fd, victim, other, 0);
}

static void harm_swap_payloads(int fd, off_t victim, off_t other)
{
    swap(fd, victim, other, HARM_PAGE);
}

static void harm_misdirected(int fd, off_t victim, off_t other)
{
    static uint8_t a[HARM_SLOT_BYTES];

    harm_get(fd, a, HARM_SLOT_BYTES, other);
    harm_put(fd, a, HARM_SLOT_BYTES, victim);
}

static void harm_cut(int fd, off_t victim, off_t other)
{
    (void)other;
    cr_assert_eq(ftruncate(fd, victim + HARM_PAGE + 5000), 0);
}

static void harm_segment(int fd, off_t victim, off_t other)
{
    (void)other;
    harm_flip(fd, segment_of(victim) + 33);
}

static void harm_segment_magic(int fd, off_t victim, off_t other)
{
    (void)other;
    harm_flip(fd, segment_of(victim));
}

/* The newer copy: the older one knows only an earlier start. */
static void harm_state(int fd, off_t victim, off_t other)
{
    uint64_t a, b;

    (void)victim;
    (void)other;
    harm_get(fd, &a, 8, HARM_PAGE + 32);
    harm_get(fd, &b, 8, 2 * HARM_PAGE + 32);
    harm_flip(fd, (a > b ? HARM_PAGE : 2 * HARM_PAGE) + 40);
}

static void harm_states(int fd, off_t victim, off_t other)
{
    (void)victim;
    (void)other;
    harm_flip(fd, HARM_PAGE + 40);
    harm_flip(fd, 2 * HARM_PAGE + 3);
}

static void harm_index(int fd, off_t victim, off_t other)
{
    (void)victim;
    (void)other;
    harm_flip(fd, 777);
}

static void harm_index_cut(int fd, off_t victim, off_t other)
{
    (void)victim;
    (void)other;
    cr_assert_eq(ftruncate(fd, 3000), 0);
}

static void harm_name(int fd, off_t victim, off_t other)
{
    (void)victim;
    (void)other;
    harm_flip(fd, 90);
}

static void harm_name_cut(int fd, off_t victim, off_t other)
{
    (void)victim;
    (void)other;
    cr_assert_eq(ftruncate(fd, 1000), 0);
}

const struct harm harms[HARMS] = {
    {.name = "a bit of a payload flipped", .do_it = harm_payload},
    {.name = "a bit of a slot's header flipped", .do_it = harm_header, .scan_only = true},
    {.name = "a bit of a slot's magic flipped", .do_it = harm_magic, .scan_only = true},
    {.name = "two slots swapped", .do_it = harm_swap},
    {.name = "two payloads swapped", .do_it = harm_swap_payloads},
    {.name = "a slot written over another", .do_it = harm_misdirected},
    {.name = "the file cut in a slot", .do_it = harm_cut},
    {.name = "a bit of a segment's header flipped", .do_it = harm_segment, .rebuilt = true},
    {.name = "a bit of a segment's magic flipped",
     .do_it = harm_segment_magic,
     .checkpoint_only = true,
     .rebuilt = true},
    {.name = "a bit of the newer state page flipped", .do_it = harm_state, .harmless = true},
    {.name = "both state pages damaged", .do_it = harm_states, .harmless = true},
    {.name = "a bit of the checkpoint flipped",
     .file = "ucmd.index",
     .do_it = harm_index,
     .checkpoint_only = true,
     .harmless = true},
    {.name = "the checkpoint cut",
     .file = "ucmd.index",
     .do_it = harm_index_cut,
     .checkpoint_only = true,
     .harmless = true},
    {.name = "a bit of the namespaces flipped", .file = "ucmd.namespaces", .do_it = harm_name},
    {.name = "the namespaces cut", .file = "ucmd.namespaces", .do_it = harm_name_cut},
};

void harm_do(const struct host *host, const struct harm *h)
{
    int cache = harm_file(host, "ucmd.cache"),
        fd = harm_file(host, h->file ? h->file : "ucmd.cache");

    h->do_it(fd, h->file ? 0 : harm_slot(cache, HARM_VICTIM),
             h->file ? 0 : harm_slot(cache, OTHER));
    close(fd);
    close(cache);
}

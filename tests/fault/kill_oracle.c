#include "tests/fault/kill_oracle.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096u
#define DATA (1u << 20) /* where the first segment begins */
#define SLOT_BYTES (9 * PAGE)

uint64_t oracle_random(struct oracle *o)
{
    uint64_t z = o->seed += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

uint32_t oracle_below(struct oracle *o, uint32_t n)
{
    return (uint32_t)(oracle_random(o) % n);
}

void oracle_doubt(struct oracle *o)
{
    for (uint32_t i = 0; i < o->keys; i++)
        if (o->state[i] != ORACLE_NOTHING)
            o->state[i] = ORACLE_DOUBTED;
}

bool oracle_load_proves(const struct oracle *o, uint32_t key)
{
    return !o->warm || o->state[key] != ORACLE_DOUBTED;
}

void oracle_run_ended(struct oracle *o, bool in_order)
{
    for (uint32_t i = 0; i < o->keys; i++) {
        if (in_order && o->held[i])
            o->state[i] = ORACLE_DURABLE;
        o->held[i] = false;
    }
    o->warm = in_order && o->keeps;
}

/* ---- damage ---- */

struct file {
    int fd;
    uint64_t bytes;
};

static bool file_open(struct file *f, const char *directory, const char *name)
{
    char path[160];
    struct stat st;

    snprintf(path, sizeof(path), "%s/%s", directory, name);
    f->fd = open(path, O_RDWR | O_CLOEXEC);
    if (f->fd < 0)
        return false;
    cr_assert_eq(fstat(f->fd, &st), 0);
    f->bytes = (uint64_t)st.st_size;
    return true;
}

static void get(const struct file *f, void *p, size_t n, uint64_t at)
{
    cr_assert_eq(pread(f->fd, p, n, (off_t)at), (ssize_t)n);
}

static void put(const struct file *f, const void *p, size_t n, uint64_t at)
{
    cr_assert_eq(pwrite(f->fd, p, n, (off_t)at), (ssize_t)n);
}

static void flip(struct oracle *o, const struct file *f, uint64_t from)
{
    uint64_t at = from + oracle_random(o) % (f->bytes - from);
    uint8_t byte;

    get(f, &byte, 1, at);
    byte ^= (uint8_t)(1u << oracle_below(o, 8));
    put(f, &byte, 1, at);
}

/* Pages from `at` on that were never written, up to the file's end. */
static uint64_t pages_unwritten(const struct file *f, uint64_t at)
{
    off_t data = lseek(f->fd, (off_t)at, SEEK_DATA);

    return ((data < 0 ? f->bytes : (uint64_t)data) - at) / PAGE;
}

/* Offset of a slot's header: the first after a random place; 0: there is none. */
static uint64_t slot_find(struct oracle *o, const struct file *f)
{
    uint64_t pages = (f->bytes - DATA) / PAGE, start = oracle_random(o) % pages;
    char magic[4];

    for (uint64_t i = 0; i < pages; i++) {
        uint64_t at = DATA + (start + i) % pages * PAGE, unwritten = pages_unwritten(f, at);

        if (unwritten > 0) {
            i += unwritten - 1;
            continue;
        }
        get(f, magic, sizeof(magic), at);
        if (memcmp(magic, "UCMS", 4) == 0 && at + SLOT_BYTES <= f->bytes)
            return at;
    }
    return 0;
}

static const char *cache_damage(struct oracle *o, const struct file *f)
{
    static uint8_t a[SLOT_BYTES], b[SLOT_BYTES];
    uint64_t one = slot_find(o, f), two = slot_find(o, f);
    uint32_t skip = oracle_below(o, 2) * PAGE; /* with their headers, or the payloads alone */

    if (one == 0)
        return "nothing to damage";
    get(f, a, sizeof(a), one);
    get(f, b, sizeof(b), two);
    switch (oracle_below(o, 5)) {
    case 0:
        for (unsigned i = 0; i < 200; i++)
            flip(o, f, DATA);
        return "200 bits of the cache flipped";
    case 1:
        a[oracle_below(o, SLOT_BYTES)] ^= 1;
        put(f, a, sizeof(a), one);
        return "a bit of a slot flipped";
    case 2:
        put(f, b + skip, sizeof(b) - skip, one + skip);
        put(f, a + skip, sizeof(a) - skip, two + skip);
        return skip ? "two payloads swapped" : "two slots swapped";
    case 3:
        put(f, a, sizeof(a), two); /* misdirected, or an old one in a new one's place */
        return "a slot written over another";
    default:
        cr_assert_eq(ftruncate(f->fd, (off_t)(one + oracle_below(o, SLOT_BYTES))), 0);
        return "the cache cut in a slot";
    }
}

static const char *small_damage(struct oracle *o, const struct file *f, const char *directory,
                                const char *name)
{
    char path[160];

    switch (f->bytes > 0 ? oracle_below(o, 3) : 0) {
    case 0:
        snprintf(path, sizeof(path), "%s/%s", directory, name);
        cr_assert_eq(unlink(path), 0);
        return "removed";
    case 1:
        cr_assert_eq(ftruncate(f->fd, (off_t)(oracle_random(o) % f->bytes)), 0);
        return "cut";
    default:
        flip(o, f, 0);
        return "a bit flipped";
    }
}

bool damage(struct oracle *o, const char *directory, const char **what)
{
    static const char *const names[] = {"ucmd.cache", "ucmd.cache", "ucmd.cache", "ucmd.index",
                                        "ucmd.namespaces"};
    static char text[96];
    const char *name = names[oracle_below(o, 5)];
    bool cache = strcmp(name, "ucmd.cache") == 0;
    struct file f;

    *what = "nothing";
    if (!file_open(&f, directory, name))
        return false;
    snprintf(text, sizeof(text), "%s: %s", name,
             cache ? cache_damage(o, &f) : small_damage(o, &f, directory, name));
    /* Writes the damage out of the page cache. If the daemon's direct writes met dirty pages, the
     * kernel would report an error that no disk had. */
    cr_assert_eq(fsync(f.fd), 0);
    cr_assert_eq(posix_fadvise(f.fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(f.fd);
    *what = text;
    o->cache_damaged |= cache;
    return strcmp(name, "ucmd.index") != 0 || o->cache_damaged;
}

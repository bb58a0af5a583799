#include "daemon/format/nvme_read.h"

#include "daemon/format/io.h"

#include <errno.h>
#include <stdalign.h>
#include <string.h>

static bool copy_read(int fd, uint64_t at, unsigned copy, uint8_t *page, struct nvme_copies *c)
{
    ssize_t n = io_read_some(fd, page, NVME_PAGE, at);

    if (n >= 0) { /* past the end of the file: never written, so zero */
        memset(page + n, 0, NVME_PAGE - (size_t)n);
        return true;
    }
    c->unreadable |= 1u << copy;
    c->error = (int)n;
    return false;
}

/* Whether it is the newest so far. */
static bool copy_counts(bool passes, bool newer, unsigned copy, const uint8_t *page,
                        struct nvme_copies *c)
{
    if (!passes) {
        c->damaged |= nvme_page_blank(page) ? 0 : 1u << copy;
        return false;
    }
    newer = newer || c->good == 0;
    c->good |= 1u << copy;
    if (newer)
        c->next = 1 - copy;
    return newer;
}

struct nvme_copies nvme_state_read(int fd, const uint8_t uuid[NVME_UUID_BYTES],
                                   struct nvme_state *out)
{
    alignas(NVME_PAGE) uint8_t page[NVME_PAGE];
    struct nvme_copies c = {0};
    struct nvme_state s;

    memset(&s, 0, sizeof(s));
    for (unsigned i = 0; i < 2; i++) {
        bool passes;

        if (!copy_read(fd, NVME_STATE_OFFSET(i), i, page, &c))
            continue;
        passes = nvme_state_decode(page, &s) == 0 && memcmp(s.uuid, uuid, sizeof(s.uuid)) == 0;
        if (copy_counts(passes, s.epoch > out->epoch, i, page, &c))
            *out = s;
    }
    return c;
}

struct nvme_copies nvme_quarantine_read(int fd, const uint8_t uuid[NVME_UUID_BYTES],
                                        struct nvme_quarantine *out)
{
    alignas(NVME_PAGE) uint8_t page[NVME_PAGE];
    struct nvme_copies c = {0};
    struct nvme_quarantine q;

    memset(&q, 0, sizeof(q));
    for (unsigned i = 0; i < 2; i++) {
        bool passes;

        if (!copy_read(fd, NVME_QUARANTINE_OFFSET(i), i, page, &c))
            continue;
        passes = nvme_quarantine_decode(page, &q) == 0 && memcmp(q.uuid, uuid, sizeof(q.uuid)) == 0;
        if (copy_counts(passes, q.change > out->change, i, page, &c))
            *out = q;
    }
    return c;
}

int nvme_ns_record_read(int fd, uint64_t i, struct nvme_ns_record *out)
{
    uint8_t page[NVME_PAGE];
    ssize_t n = io_read_some(fd, page, NVME_PAGE, i * NVME_PAGE);

    if (n <= 0)
        return n < 0 ? (int)n : -ENODATA;
    return n == (ssize_t)NVME_PAGE && nvme_ns_record_decode(page, out) == 0 ? 0 : -EBADMSG;
}

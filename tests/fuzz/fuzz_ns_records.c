/* Any bytes as a tier's file of namespaces. Whole records in it are found, with the highest number,
 * and the others are passed over. The next start finds records that are written after them. */
#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "daemon/format/checksum.h"
#include "daemon/format/nvme_read.h"
#include "daemon/tier/ns_records.h"
#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PAGES_MAX 64u

/* How one page is made from the input. */
struct page_recipe {
    uint8_t kind, fingerprint, identity_bytes, sequence, at, value;
};

static char directory[64], path[128];

static void directory_remove(void)
{
    unlink(path);
    rmdir(directory);
}

static void directory_make(void)
{
    if (directory[0])
        return;
    log_set_level(LOG_ERROR);
    snprintf(directory, sizeof(directory), "%s", "/dev/shm/ucm-fuzz-XXXXXX");
    if (!mkdtemp(directory)) {
        snprintf(directory, sizeof(directory), "%s", "/tmp/ucm-fuzz-XXXXXX");
        must(mkdtemp(directory) != NULL);
    }
    snprintf(path, sizeof(path), "%s/%s", directory, NVME_NS_FILE);
    must(atexit(directory_remove) == 0);
}

/* A whole record; one with a byte changed under a right checksum, or under a wrong one. */
static void page_make(const struct page_recipe *r, uint64_t *newest, uint8_t page[NVME_PAGE])
{
    struct nvme_ns_record name = {.identity_bytes = r->identity_bytes + 1u,
                                  .from_sequence = r->sequence};
    uint64_t sum;

    name.fingerprint[0] = r->fingerprint;
    memset(name.identity, 'i', name.identity_bytes);
    nvme_ns_record_encode(&name, page);
    if (r->kind % 4 == 0 && name.from_sequence + 1 > newest[r->fingerprint])
        newest[r->fingerprint] = name.from_sequence + 1;
    if (r->kind % 4 == 0)
        return;
    page[r->at % 80u] ^= r->value ? r->value : 1;
    if (r->kind % 4 == 1)
        return;
    sum = checksum_of(page, NVME_PAGE - 8);
    for (unsigned i = 0; i < 8; i++)
        page[NVME_PAGE - 8 + i] = (uint8_t)(sum >> (8 * i));
}

static void file_make(const uint8_t *data, size_t size, uint64_t *newest)
{
    struct page_recipe r;
    uint8_t page[NVME_PAGE];
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);

    must(fd >= 0);
    for (unsigned i = 0; i < PAGES_MAX && size >= sizeof(r); i++) {
        memcpy(&r, data, sizeof(r));
        data += sizeof(r);
        size -= sizeof(r);
        page_make(&r, newest, page);
        must(write(fd, page, sizeof(page)) == (ssize_t)sizeof(page));
    }
    must(write(fd, data, size) == (ssize_t)size); /* an append that was cut off */
    close(fd);
}

/* Records of a changed byte may be whole as well, of another fingerprint or number. */
static void ns_records_expect(const struct ns_records *n, const uint64_t *newest)
{
    for (uint32_t i = 0; i < n->count; i++) {
        const struct nvme_ns_record *r = ns_records_at(n, i);

        must(r->identity_bytes >= 1 && r->identity_bytes <= NVME_IDENTITY_BYTES);
        must(ns_records_find(n, r->fingerprint) == r);
    }
    for (unsigned i = 0; i < 256; i++) {
        uint8_t fingerprint[UCM_FINGERPRINT_BYTES] = {(uint8_t)i};
        const struct nvme_ns_record *name = ns_records_find(n, fingerprint);

        must(newest[i] == 0 || (name && name->from_sequence + 1 >= newest[i]));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *directories[1] = {directory};
    struct nvme_ns_record one = {.identity_bytes = 3, .from_sequence = 5, .identity = "new"};
    const struct nvme_ns_record *writes = &one;
    bool any;
    uint64_t newest[256] = {0};
    struct ns_records n;

    directory_make();
    file_make(data, size, newest);
    must(ns_records_open(&n, directories, 1) == 0);
    ns_records_expect(&n, newest);
    must(ns_records_write(&n, &writes, 1, &any) == 0 && any);
    ns_records_close(&n);
    newest[0] = newest[0] > 6 ? newest[0] : 6;
    must(ns_records_open(&n, directories, 1) == 0);
    ns_records_expect(&n, newest);
    ns_records_close(&n);
    return 0;
}

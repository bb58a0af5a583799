/* Sanitizers: thread */
#include "tests/unit/random.h"
#include "tests/unit/tier/nvme_rig.h"

TestSuite(nvme, .fini = rig_close);

/* Sizes about a sector, a page, and the most that the event loop sums by itself; then any. */
static uint64_t round_trip_bytes(unsigned i)
{
    static const uint64_t edges[] = {1, 511, 512, 4095, 4096, 4097, 16384, 16385, 10 * 32768};

    if (i < sizeof(edges) / sizeof(edges[0]))
        return edges[i];
    return 1 + below(4096) + below(10) * 32768;
}

Test(nvme, round_trip)
{
    unsigned n = 300;
    for (unsigned k = 0; k < 2; k++) {
        rig_queue_depth = 4; /* the queue is much deeper than that */
        rig_start(1, 1 * MIB + 64 * 4 * MIB, 4 * MIB, rig_engines[k], n, 10 * 32768);
        for (unsigned i = 0; i < n; i++)
            cr_assert_eq(part_write(i, round_trip_bytes(i)), 0);
        rig_run();
        rig_ended(0, n, 0);
        cr_assert_eq(rig_verify(), n);
        cr_assert_eq(rig.metrics.nvme_writes, n);
        cr_assert_eq(rig.metrics.nvme_reads, n);
        cr_assert_eq(rig.metrics.nvme_corrupt, 0);
        rig_close();
    }
}

/* A reader made from docs/design/storage-format.md alone: how many records of r's parts are in the
 * file. */
static unsigned read_by_the_text(uint64_t segment_bytes, unsigned segments)
{
    static uint8_t page[NVME_PAGE];
    int fd = rig_fd(0);
    unsigned found = 0;

    for (unsigned s = 0; s < segments; s++) {
        off_t base = (off_t)(MIB + s * segment_bytes);
        struct nvme_segment_header header;

        cr_assert_eq(pread(fd, page, sizeof(page), base), (ssize_t)sizeof(page));
        if (nvme_segment_header_decode(page, &header) < 0)
            continue;
        cr_assert_eq(header.segment, s);
        for (uint64_t i = 0; i < (segment_bytes - 4096) / header.stride; i++) {
            off_t at = base + 4096 + (off_t)(i * header.stride);
            struct nvme_record_header record;
            char *payload;

            cr_assert_eq(pread(fd, page, sizeof(page), at), (ssize_t)sizeof(page));
            if (nvme_record_header_decode(page, &record) < 0 ||
                record.generation != header.sequence)
                continue;
            cr_assert_eq(record.segment, s);
            cr_assert_eq(record.record, i);
            cr_assert_eq(record.fingerprint[5], 0xf0);
            for (unsigned k = 0; k < rig.n; k++) {
                const struct rig_part *p = &rig.parts[k];

                if (memcmp(p->io.name.key, record.key, 32) != 0)
                    continue;
                payload = malloc(record.payload_bytes);
                cr_assert_eq(pread(fd, payload, record.payload_bytes, at + 4096),
                             (ssize_t)record.payload_bytes);
                cr_assert_eq(record.payload_bytes, p->io.bytes);
                cr_assert_eq(record.checksum, p->place.checksum);
                cr_assert(bytes_are(payload, record.payload_bytes, k));
                free(payload);
                found++;
            }
        }
    }
    close(fd);
    return found;
}

Test(nvme, both_engines_write_what_the_text_says)
{
    for (unsigned k = 0; k < 2; k++) {
        rig_start(1, 17 * MIB, 1 * MIB, rig_engines[k], 60, 70000);
        cr_assert_eq(rig_write(0, 30, 70000), 30);
        cr_assert_eq(rig_write(30, 60, 4096), 30);
        cr_assert_eq(read_by_the_text(MIB, 16), 60);
        rig_close();
    }
}

Test(nvme, files_share_the_load)
{
    struct tier_stats stats;
    unsigned per_file[3] = {0};

    rig_start(3, 33 * MIB, 4 * MIB, CONFIG_IO_AUTO, 60, MIB);
    cr_assert_eq(rig_write(0, 60, MIB), 60);
    for (unsigned i = 0; i < 60; i++)
        per_file[nvme_loc_file(rig.parts[i].place.loc)]++;
    for (unsigned i = 0; i < 3; i++)
        cr_assert_geq(per_file[i], 10);
    cr_assert_eq(rig_verify(), 60);
    stats = rig_stats();
    cr_assert_eq(stats.capacity_bytes, 3 * 32 * MIB);
    cr_assert_eq(stats.used_bytes, 60 * (MIB + 4096));
    cr_assert_eq(rig.metrics.nvme_bytes_used, stats.used_bytes);
    cr_assert_eq(stats.queued + stats.in_flight, 0);
    cr_assert_not(stats.degraded);
    cr_assert_eq(tier_nvme.sync(rig.tier), 0);
}

Test(nvme, churn_reclaims_and_never_mixes_up)
{
    for (unsigned k = 0; k < 2; k++) {
        rig_start(2, 9 * MIB, 1 * MIB, rig_engines[k], 400, 200000);
        for (unsigned round = 0; round < 10; round++) {
            for (unsigned i = round * 40; i < (round + 1) * 40; i++)
                cr_assert_eq(part_write(i, 100000 + below(4) * 30000), 0);
            rig_run();
            cr_assert_geq(rig_verify(), 40);
        }
        cr_assert_gt(rig.drops, 100);
        cr_assert_eq(rig.metrics.nvme_reclaimed_blocks, rig.drops);
        cr_assert_leq(rig.metrics.nvme_bytes_used, rig.metrics.nvme_bytes_capacity);
        rig_close();
    }
}

static void pin_all(bool pinned, unsigned heat)
{
    for (unsigned i = 0; i < rig.n; i++) {
        rig.parts[i].pinned = pinned;
        rig.parts[i].heat = heat;
    }
}

/* One part in each segment of the first file is in use. Which parts share a segment is not known:
 * several threads sum the writes, and these may overtake one another. */
static void use_one_in_each_segment(void)
{
    bool used[64] = {false};

    for (unsigned i = 0; i < rig.n; i++) {
        unsigned segment =
            (unsigned)((place_offset(&rig.parts[i].place) - (off_t)MIB) / (off_t)MIB);

        if (!rig.parts[i].stored || used[segment])
            continue;
        rig.parts[i].heat = TIER_HEAT_BUSY;
        used[segment] = true;
    }
}

Test(nvme, nothing_to_drop_is_no_room)
{
    unsigned stored;

    rig_start(1, 5 * MIB, 1 * MIB, CONFIG_IO_AUTO, 80, 100000);
    pin_all(true, 0);
    stored = rig_write(0, 60, 100000);
    cr_assert_eq(stored, 36, "4 segments of 9 records, not %u", stored);
    for (unsigned i = 0; i < 60; i++)
        cr_assert(rig.parts[i].status == 0 || rig.parts[i].status == -ENOSPC);
    cr_assert_eq(rig_verify(), stored);
    /* their heat says so in advance, so the neighbours are not lost for nothing */
    pin_all(false, 0);
    use_one_in_each_segment();
    cr_assert_eq(rig_write(60, 61, 100000), 0);
    cr_assert_eq(rig.drops, 0);
    pin_all(false, 0);
    cr_assert_eq(rig_write(61, 62, 100000), 1);
    cr_assert_eq(rig.drops, 9);
}

Test(nvme, forgotten_segments_are_free_at_once)
{
    rig_start(1, 5 * MIB, 1 * MIB, CONFIG_IO_AUTO, 200, 100000);
    pin_all(true, TIER_HEAT_BUSY);
    for (unsigned i = 0; i < 200; i++) {
        cr_assert_eq(rig_write(i, i + 1, 100000), 1);
        tier_nvme.forget(rig.tier, &rig.parts[i].place, 100000);
        tier_nvme.forget(rig.tier, &rig.parts[i].place, 100000); /* harmless */
        rig.parts[i].stored = false;
        cr_assert_eq(part_read(i, 0), -ESTALE);
    }
    cr_assert_eq(rig.metrics.nvme_bytes_used, 0);
}

Test(nvme, places_of_the_past_are_misses)
{
    struct rig_part *p = &rig.parts[0];
    struct tier_place good;

    rig_start(1, 5 * MIB, 1 * MIB, CONFIG_IO_AUTO, 100, 100000);
    cr_assert_eq(rig_write(0, 1, 100000), 1);
    good = p->place;
    cr_assert_eq(part_read(0, 0), 0);
    rig_run();
    for (unsigned bit = 0; bit < 64; bit++) {
        p->place.loc = good.loc ^ 1ull << bit;
        cr_assert_eq(part_read(0, 0), -ESTALE, "bit %u", bit);
    }
    p->place = good;
    p->io.bytes = 200000; /* longer than the record */
    cr_assert_eq(part_submit(0, TIER_READ), -ESTALE);
    cr_assert_eq(rig_write(1, 100, 100000), 99); /* round and round: record 0 is reused */
    p->io.bytes = 100000;
    p->place = good;
    cr_assert_eq(part_read(0, 0), -ESTALE);
}

Test(nvme, a_read_under_way_keeps_its_segment)
{
    rig_start(1, 4 * MIB, 1 * MIB, CONFIG_IO_AUTO, 200, 100000);
    cr_assert_eq(rig_write(0, 27, 100000), 27);
    for (unsigned i = 0; i < 27; i++)
        cr_assert_eq(part_read(i, 0), 0);
    for (unsigned i = 27; i < 200; i++)
        cr_assert_eq(part_write(i, 100000), 0);
    rig_run();
    for (unsigned i = 0; i < 27; i++) {
        cr_assert_eq(rig.parts[i].status, 0);
        cr_assert(part_right(i));
    }
    rig_verify();
}

Test(nvme, bounds_are_kept)
{
    rig_init(1, 9 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    rig.config.nvme_write_queue_size = 300000;
    rig_open();
    rig_memory(10, 2 * MIB);
    cr_assert_eq(part_write(0, 2 * MIB), -EFBIG);
    cr_assert_eq(part_write(0, 0), -EINVAL);
    cr_assert_eq(part_write(0, 100000), 0);
    cr_assert_eq(part_write(1, 100000), 0);
    cr_assert_eq(part_write(2, 100000), -EAGAIN);
    cr_assert_eq(rig.metrics.nvme_write_waits, 1);
    cr_assert_eq(rig.metrics.nvme_write_dropped, 0, "the caller tries again");
    rig_run();
    cr_assert_eq(part_write(2, MIB - 8192), 0); /* alone it may pass the bound */
    rig_run();
    cr_assert_eq(rig.parts[2].status, 0);
}

/* Parts of this size are summed on the event loop, so that they end in the order in which they are read.
 */
Test(nvme, urgent_reads_go_first)
{
    rig_queue_depth = 1;
    rig_start(1, 33 * MIB, 4 * MIB, CONFIG_IO_AUTO, 40, 16384);
    cr_assert_eq(rig_write(0, 40, 16384), 40);
    rig.done = 0;
    for (unsigned i = 0; i < 40; i++)
        cr_assert_eq(part_read(i, i < 30 ? 0 : 7), 0);
    rig_run();
    cr_expect_eq(rig.parts[0].order, 0, "it was under way already");
    for (unsigned i = 30; i < 40; i++)
        cr_expect_eq(rig.parts[i].order, 1 + i - 30);
}

#define NVME_FAIR_BYTES_HERE (4 * MIB) /* nvme.h */

static void read_as(unsigned from, unsigned to, uint32_t tenant, uint32_t weight)
{
    for (unsigned i = from; i < to; i++) {
        rig.parts[i].io.who = (struct fair_who){.tenant = tenant, .weight = weight};
        cr_assert_eq(part_read(i, 0), 0);
    }
}

static unsigned done_before(unsigned from, unsigned to, unsigned order)
{
    unsigned n = 0;

    for (unsigned i = from; i < to; i++)
        n += rig.parts[i].status == 0 && rig.parts[i].order <= order;
    return n;
}

/* Two tenants want 24 MiB each. When the one with three times the weight has all of it, the other
 * has a third. */
Test(nvme, tenants_share_a_disk_by_their_weights)
{
    const unsigned half = 1500;
    unsigned last = 0, had;

    rig_queue_depth = 1;
    rig_start(1, 129 * MIB, 4 * MIB, CONFIG_IO_AUTO, 2 * half, 16384);
    cr_assert_eq(rig_write(0, 2 * half, 16384), 2 * half);
    rig.done = 0;
    read_as(0, half, 1, 100);
    read_as(half, 2 * half, 2, 300);
    rig_run();
    for (unsigned i = half; i < 2 * half; i++)
        last = rig.parts[i].order > last ? rig.parts[i].order : last;
    had = done_before(0, half, last);
    cr_assert(had >= half / 3 - half / 30 && had <= half / 3 + half / 30, "%u", had);
}

/* Counts by order, not by time: parts under way and one part of the flood go first. */
Test(nvme, a_part_goes_before_what_another_tenant_has_queued)
{
    const unsigned flood = 600, bytes = 65536;
    unsigned before;

    rig_start(1, 129 * MIB, 4 * MIB, CONFIG_IO_AUTO, flood + 10, bytes);
    cr_assert_eq(rig_write(0, flood + 10, bytes), flood + 10);
    rig.done = 0;
    read_as(0, flood, 1, 100);
    for (unsigned i = 0; i < 10; i++) {
        while (rig.done < 100 + 20 * i)
            (void)uv_run(&rig.loop, UV_RUN_ONCE);
        before = rig.done;
        read_as(flood + i, flood + i + 1, 2, 100);
        while (rig.parts[flood + i].status != 0)
            (void)uv_run(&rig.loop, UV_RUN_ONCE);
        /* The first one comes while the other is alone, and finds its depth full. Checksums, in threads, may pass
         * each other. */
        cr_assert_leq(rig.parts[flood + i].order - before,
                      i == 0 ? 2 * 128 : 2 * NVME_FAIR_BYTES_HERE / bytes, "%u", i);
    }
    rig_run();
}

Test(nvme, may_be_closed_from_the_last_done)
{
    for (unsigned k = 0; k < 2; k++) {
        rig_start(1, 9 * MIB, 1 * MIB, rig_engines[k], 20, 50000);
        cr_assert_eq(rig_write(0, 20, 50000), 20);
        rig.close_when_done = true;
        rig_read(0, 20, 0);
        cr_assert_null(rig.tier);
        rig_close();
    }
}

Test(nvme, unregistered_memory_reads_too)
{
    rig_init(1, 9 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    rig_open();
    tier_nvme.buffer_add(rig.tier, 1u << 30, &rig, 4096);             /* beyond any table */
    tier_nvme.buffer_add(rig.tier, 0, (void *)(uintptr_t)4096, 4096); /* refused by the kernel */
    rig_memory(10, 50000);
    cr_assert_eq(rig_write(0, 10, 50000), 10);
    cr_assert_eq(rig_verify(), 10);
}

/* ---- files ---- */

static uint64_t first_sequence(void)
{
    static uint8_t page[NVME_PAGE];
    struct nvme_segment_header header;
    int fd = rig_fd(0);

    cr_assert_eq(pread(fd, page, sizeof(page), MIB), (ssize_t)sizeof(page));
    close(fd);
    cr_assert_eq(nvme_segment_header_decode(page, &header), 0);
    return header.sequence;
}

static void poke(off_t at, const void *bytes, size_t n)
{
    int fd = rig_fd(0);

    cr_assert_eq(pwrite(fd, bytes, n, at), (ssize_t)n);
    close(fd);
}

Test(nvme, sequences_grow_over_restarts)
{
    static const uint8_t zeros[2 * NVME_PAGE];
    uint64_t last = 0;

    rig_init(1, 5 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    rig_memory(1, 50000);
    for (unsigned round = 0; round < 6; round++) {
        uint64_t sequence;

        rig_open();
        cr_assert_eq(rig_write(0, 1, 50000), 1);
        rig_close_tier();
        sequence = first_sequence();
        cr_assert_gt(sequence, last);
        last = sequence;
        if (round == 3) /* both state pages lost: the segments say */
            poke(NVME_STATE_OFFSET(0), zeros, sizeof(zeros));
        if (round == 4) /* the newer one torn */
            poke(NVME_STATE_OFFSET(0) + 1024, "x", 1);
    }
}

static void refused(const char *sentence)
{
    struct stat before, after;

    cr_assert_eq(stat(rig_path(0), &before), 0);
    cr_assert_eq(rig_try_open(), -EINVAL);
    cr_assert(strstr(rig.error.text, sentence), "%s", rig.error.text);
    cr_assert_eq(stat(rig_path(0), &after), 0);
    cr_assert_eq(before.st_size, after.st_size);
    cr_assert_eq(before.st_mtim.tv_nsec, after.st_mtim.tv_nsec, "it was written to");
}

Test(nvme, foreign_files_are_refused_and_not_touched)
{
    char text[32] = {0};
    int fd;

    rig_init(1, 5 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    fd = open(rig_path(0), O_RDWR | O_CREAT, 0600);
    cr_assert_geq(fd, 0);
    refused("is not a file of ucmd");
    cr_assert_eq(write(fd, "precious", 8), 8);
    refused("is not a file of ucmd");
    cr_assert_eq(ftruncate(fd, 8 * MIB), 0);
    refused("is not a file of ucmd");
    cr_assert_eq(pread(fd, text, 8, 0), 8);
    cr_assert_str_eq(text, "precious");
    close(fd);
}

Test(nvme, other_versions_and_layouts_are_refused)
{
    rig_init(1, 9 * MIB, 2 * MIB, CONFIG_IO_AUTO);
    rig_open();
    rig_close_tier();
    rig.config.nvme_segment = 1 * MIB;
    refused("set nvme.segment to that");
    rig.config.nvme_segment = 2 * MIB;
    poke(8, "\2", 1);
    refused("storage format version 2, this ucmd needs 1");
    poke(8, "\1", 1);
    rig_open();
}

Test(nvme, a_path_that_is_not_there_is_refused)
{
    rig_init(1, 9 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    rig.items[0] = (char[]){"/nonexistent/directory"};
    cr_assert_eq(rig_try_open(), -ENOENT);
    cr_assert(strstr(rig.error.text, "/nonexistent/directory"), "%s", rig.error.text);
}

Test(nvme, a_file_grows_and_is_never_truncated)
{
    struct stat st;

    rig_init(1, 5 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    rig_open();
    rig_close_tier();
    rig.config.nvme_size = 9 * MIB;
    rig_open();
    cr_assert_eq(rig_stats().capacity_bytes, 8 * MIB);
    rig_close_tier();
    rig.config.nvme_size = 4 * MIB;
    rig_open();
    cr_assert_eq(rig_stats().capacity_bytes, 3 * MIB);
    rig_close_tier();
    cr_assert_eq(stat(rig_path(0), &st), 0);
    cr_assert_eq(st.st_size, 9 * MIB);
    cr_assert_eq(truncate(rig_path(0), 2 * MIB),
                 0); /* not by the daemon, which makes it whole again */
    rig.config.nvme_size = 9 * MIB;
    rig_open();
    cr_assert_eq(stat(rig_path(0), &st), 0);
    cr_assert_eq(st.st_size, 9 * MIB);
}

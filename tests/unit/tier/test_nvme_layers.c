/* Reads of some layers of a part. */
/* Sanitizers: thread */
#include "daemon/tier/nvme.h"
#include "tests/unit/tier/nvme_rig.h"

TestSuite(nvme_layers, .fini = rig_close);

#define LAYER 21000u /* no multiple of a page */
#define LAYERS 9u
#define PART (LAYER * LAYERS)
#define ROOM (PART + 3 * NVME_PAGE)

static void write_parts(unsigned from, unsigned to, uint64_t bytes, uint64_t layer_bytes)
{
    for (unsigned i = from; i < to; i++)
        rig.parts[i].io.layer_bytes = layer_bytes;
    cr_assert_eq(rig_write(from, to, bytes), to - from);
}

static void stored(enum config_io io, unsigned n)
{
    rig_start(1, 33 * MIB, 1 * MIB, io, n, ROOM);
    write_parts(0, n, PART, LAYER);
}

static int layers_submit(unsigned number, uint32_t layer, uint32_t n)
{
    struct tier_io *io = &rig.parts[number].io;

    io->layer = layer;
    io->layers = n;
    memset(part_data(number), 0xee, rig.slot_bytes);
    return part_submit(number, TIER_READ_LAYERS);
}

/* Checks the bytes that it brought, too. */
static int layers_read(unsigned number, uint32_t layer, uint32_t n)
{
    const struct tier_io *io = &rig.parts[number].io;
    int rc = layers_submit(number, layer, n);
    uint8_t *whole;

    cr_assert_eq(rc, 0, "%s", strerror(-rc));
    rig_run();
    if (rig.parts[number].status != 0)
        return rig.parts[number].status;
    whole = malloc(io->bytes + 8);
    bytes_put(whole, io->bytes, number);
    cr_assert_eq(memcmp(part_data(number) + tier_layers_at(io->layer_bytes, layer),
                        whole + layer * io->layer_bytes, n * io->layer_bytes),
                 0, "part %u, layers %u + %u", number, layer, n);
    free(whole);
    return 0;
}

Test(nvme_layers, every_range)
{
    for (unsigned k = 0; k < 2; k++) {
        stored(rig_engines[k], 3);
        for (uint32_t first = 0; first < LAYERS; first++)
            for (uint32_t n = 1; first + n <= LAYERS; n++)
                cr_assert_eq(layers_read(1, first, n), 0);
        cr_assert_eq(rig.metrics.nvme_reads, LAYERS * (LAYERS + 1) / 2);
        rig_close();
    }
}

/* Many side by side, of layers of several lengths, deeper than the queue, with whole parts between
 * them. */
Test(nvme_layers, many_at_once)
{
    static const uint64_t layer_bytes[] = {4096, 65536, 600, 32768, 12345};
    unsigned n = 100;

    rig_queue_depth = 3;
    rig_start(2, 33 * MIB, 1 * MIB, CONFIG_IO_AUTO, n, 4 * 65536 + 3 * NVME_PAGE);
    for (unsigned i = 0; i < n; i++) {
        rig.parts[i].io.layer_bytes = layer_bytes[i % 5];
        cr_assert_eq(part_write(i, 4 * layer_bytes[i % 5]), 0);
    }
    rig_run();
    for (unsigned i = 0; i < n; i++) {
        bool small = i % 5 == 0 || i % 5 == 2; /* at most 16 KiB: without checksums of layers */

        if (i % 7 == 0)
            cr_assert_eq(part_read(i, 3), 0);
        else
            cr_assert_eq(layers_submit(i, i % 4, 1), small ? -ENODATA : 0);
    }
    rig_run();
    for (unsigned i = 0; i < n; i++)
        if (i % 7 == 0 || (i % 5 != 0 && i % 5 != 2))
            cr_assert_eq(rig.parts[i].status, 0, "part %u: %d", i, rig.parts[i].status);
    cr_assert_eq(rig_verify(), n);
}

Test(nvme_layers, a_flipped_bit_matters_to_its_layer)
{
    stored(CONFIG_IO_AUTO, 2);
    part_flip(0, NVME_PAGE + 4 * LAYER + 100);
    for (uint32_t i = 0; i < LAYERS; i++)
        cr_assert_eq(layers_read(0, i, 1), i == 4 ? -EBADMSG : 0);
    cr_assert_eq(layers_read(0, 2, 2), 0);
    cr_assert_eq(layers_read(0, 3, 3), -EBADMSG);
    cr_assert_eq(rig.metrics.nvme_corrupt, 0, "the whole part has not been looked at");
    cr_assert_eq(rig_read_one(0), -EBADMSG);
    cr_assert_eq(rig.metrics.nvme_corrupt, 1);
    cr_assert_not(rig_stats().degraded);
}

/* The header says which part these layers are of. */
Test(nvme_layers, a_header_that_is_damaged_or_anothers)
{
    struct tier_place place;

    stored(CONFIG_IO_AUTO, 8);
    for (unsigned k = 0; k < 3; k++) {
        static const off_t at[] = {40, 150, 4000};

        part_flip(k, at[k]);
        cr_assert_eq(layers_read(k, 1, 1), -ENODATA);
        part_flip(k, at[k]);
        cr_assert_eq(layers_read(k, 1, 1), 0);
    }
    rig.parts[3].io.layer_bytes = LAYER / 3;
    cr_assert_eq(layers_read(3, 1, 1), -ENODATA);
    rig.parts[3].io.layer_bytes = LAYER;
    place = rig.parts[3].place;
    rig.parts[3].place = rig.parts[4].place;
    cr_assert_eq(layers_read(3, 1, 1), -ENODATA);
    rig.parts[3].place.checksum = place.checksum;
    cr_assert_eq(layers_read(3, 1, 1), -ENODATA);
    rig.parts[3].place = place;
    rig.parts[3].io.name.part++;
    cr_assert_eq(layers_read(3, 1, 1), -ENODATA);
    rig.parts[3].io.name.part--;
    cr_assert_eq(layers_read(3, 1, 1), 0);
}

/* The tier remembers a part's header for a while, even if it is damaged meanwhile. It does not use
 * it for bytes that were written over. */
Test(nvme_layers, a_header_is_read_once)
{
    uint64_t bytes;

    stored(CONFIG_IO_AUTO, 2);
    cr_assert_eq(layers_read(0, 3, 1), 0);
    cr_assert_eq(rig.metrics.nvme_read_bytes, tier_layers_room(LAYER, 3, 1));
    part_flip(0, 150);
    for (uint32_t first = 1; first < LAYERS; first++) {
        bytes = rig.metrics.nvme_read_bytes;
        cr_assert_eq(layers_read(0, first, 1), 0);
        cr_assert_eq(rig.metrics.nvme_read_bytes - bytes,
                     tier_layers_room(LAYER, first, 1) - NVME_PAGE);
    }
    part_flip(0, NVME_PAGE + 4 * LAYER + 100);
    cr_assert_eq(layers_read(0, 4, 1), -EBADMSG);
    cr_assert_eq(layers_read(0, 5, 4), 0);
    cr_assert_eq(layers_read(1, 5, 4), 0);
}

/* Other parts' checksums go when there would be more than the tier keeps. */
Test(nvme_layers, checksums_that_are_kept_are_bounded)
{
    stored(CONFIG_IO_AUTO, 5);
    for (unsigned i = 0; i < 3; i++)
        cr_assert_eq(layers_read(i, 3, 1), 0);
    cr_expect_eq(rig.tier->known_bytes, 3 * LAYERS * 8);
    rig.tier->known_most = 2 * LAYERS * 8;
    for (unsigned i = 3; i < 5; i++) {
        cr_assert_eq(layers_read(i, 3, 1), 0);
        cr_expect_leq(rig.tier->known_bytes, 2 * LAYERS * 8);
    }
    for (unsigned i = 0; i < 5; i++)
        cr_assert_eq(layers_read(i, 4, 2), 0);
}

Test(nvme_layers, records_without_them)
{
    static const struct {
        uint64_t bytes, layer_bytes;
    } without[] = {{PART, 0}, {PART, LAYER - 1}, {PART, PART}, {494 * 100, 100}, {16384, 4096}};

    rig_start(1, 33 * MIB, 1 * MIB, CONFIG_IO_AUTO, 5, ROOM);
    for (unsigned i = 0; i < 5; i++) {
        write_parts(i, i + 1, without[i].bytes, without[i].layer_bytes);
        rig.parts[i].io.layer_bytes = without[i].bytes / 4;
        if (i < 4)
            cr_assert_eq(layers_read(i, 1, 1), -ENODATA, "part %u", i);
    }
    /* The tier knows this before it reads. */
    rig.parts[3].io.layer_bytes = 100;
    cr_expect_eq(layers_submit(3, 1, 1), -ENODATA);
    rig.parts[4].io.layer_bytes = 4096;
    cr_expect_eq(layers_submit(4, 1, 1), -ENODATA);
    cr_assert_eq(rig_verify(), 5);
}

/* The file ends after the header, or before it. */
Test(nvme_layers, a_file_that_is_cut)
{
    stored(CONFIG_IO_THREADS, 2);
    for (unsigned k = 0; k < 2; k++) {
        int fd = rig_fd(0);

        cr_assert_eq(ftruncate(fd, place_offset(&rig.parts[1].place) + (k == 0 ? NVME_PAGE : 0)),
                     0);
        close(fd);
        cr_assert_eq(layers_read(1, 5, 1), -EIO);
        cr_assert_eq(layers_read(1, 0, 2), -EIO);
    }
}

/* While it is read, its segment is not reused. */
Test(nvme_layers, a_read_under_way_keeps_its_segment)
{
    rig_start(1, 5 * MIB, 1 * MIB, CONFIG_IO_AUTO, 100, ROOM);
    write_parts(0, 20, PART, LAYER);
    for (unsigned i = 0; i < 20; i++)
        cr_assert_eq(layers_submit(i, 4, 2), 0);
    for (unsigned i = 20; i < 100; i++)
        cr_assert_eq(part_write(i, PART), 0);
    rig_run();
    rig_ended(0, 20, 0);
}

/* A part that is moved before its segment is reused takes its checksums along. */
Test(nvme_layers, moved_parts_have_them)
{
    unsigned moved = 0;

    rig_init(1, 9 * MIB, 1 * MIB, CONFIG_IO_AUTO);
    rig.config.nvme_rewrite = 50;
    rig_open();
    rig_memory(100, ROOM);
    write_parts(0, 30, PART, LAYER);
    for (unsigned i = 0; i < 30; i += 2)
        cr_assert_eq(layers_read(i, i % LAYERS, 1), 0);
    write_parts(30, 60, PART, LAYER);
    for (unsigned i = 0; i < 30; i++) {
        if (!rig.parts[i].stored)
            continue;
        moved++;
        cr_assert_eq(layers_read(i, (i + 1) % LAYERS, 1), 0);
    }
    cr_assert_gt(rig.moves, 0u);
    cr_assert_gt(moved, 0u);
}

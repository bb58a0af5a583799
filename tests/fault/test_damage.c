/* The cache's files are damaged under a daemon, and between two. In every kind of page, a bit is
 * flipped, slots are swapped, an old slot is put back, or a file is cut. A load is right or a miss,
 * and a counter shows it. */
/* Sanitizers: address */
#include "tests/fault/damage.h"

#include <fcntl.h>
#include <unistd.h>

TestSuite(damage, .fini = close_host, .timeout = 120);

/* ---- between two daemons ---- */

static void between(const struct harm *h, bool clean)
{
    unsigned missing;
    bool victim;

    open_host(false);
    store(0);
    store(1000);
    stop(clean);
    harm_do(&host, h);
    start_again();
    missing = load_all(0, &victim) + load_all(1000, &(bool){false});
    if (h->harmless)
        cr_expect_eq(missing, 0u, "%s, clean %d: %u missing", h->name, clean, missing);
    else
        cr_expect(victim, "%s, clean %d: the block is there", h->name, clean);
    cr_expect_geq(damage_seen(), 1u, "%s, clean %d: no counter shows it", h->name, clean);
    store_again();
    cr_expect_eq(load_all(0, &victim), 0u, "%s", h->name);
}

Test(damage, after_a_clean_stop)
{
    for (size_t i = 0; i < HARMS; i++) {
        if (harms[i].scan_only || left_out(i))
            continue;
        if (i > 0)
            close_host();
        between(&harms[i], true);
    }
}

Test(damage, after_a_kill)
{
    bool first = true;

    for (size_t i = 0; i < HARMS; i++) {
        if (harms[i].checkpoint_only || left_out(i))
            continue;
        if (!first)
            close_host();
        first = false;
        between(&harms[i], false);
    }
}

/* ---- an old slot in a new one's place ---- */

/* 8 segments. The blocks of two stores take 5 at most. So none is dropped for lack of a free
 * segment, even while the scrubber holds another. */
#define STALE_BYTES (9 << 20)

/* Stores blocks until the victim's place has been used twice. The file as it was before the last of
 * them goes to `old`. Which segment comes next depends on what the scrubber is reading just then.
 * Returns the first key of the blocks that are stored now. */
static uint64_t stale_prepare(uint8_t *old, bool scrub)
{
    uint64_t first = 0;
    off_t at;
    int fd;

    open_host_of("nvme.size=9MiB", scrub);
    store(first);
    fd = harm_file(&host, "ucmd.cache");
    do {
        cr_assert_lt(first, 16000u, "the victim's place is never one that was used before");
        harm_get(fd, old, STALE_BYTES, 0);
        cr_assert_eq(purge_ns(w.client, 1, -1), 0, "%s", ucm_errmsg());
        first += 1000;
        store(first);
        at = harm_slot(fd, first + HARM_VICTIM);
    } while (memcmp(old + at, "UCMS", 4) != 0);
    close(fd);
    return first;
}

/* The slot that lay in the victim's place before comes back. */
static void stale_put(const uint8_t *old, uint64_t first, size_t skip)
{
    int fd = harm_file(&host, "ucmd.cache");
    off_t at = harm_slot(fd, first + HARM_VICTIM);

    harm_put(fd, old + at + skip, HARM_SLOT_BYTES - skip, at + (off_t)skip);
    close(fd);
}

static void stale(bool clean, size_t skip)
{
    static uint8_t old[STALE_BYTES];
    uint64_t first;
    bool victim;

    first = stale_prepare(old, false);
    stop(clean);
    stale_put(old, first, skip);
    start_again();
    cr_expect_eq(load_all(first, &victim), 1u);
    cr_expect(victim);
    /* After the last checkpoint, an old header looks like the end of the log. */
    if (clean || skip > 0)
        cr_expect_geq(damage_seen(), 1u);
}

Test(damage, an_old_slot_or_payload_put_back)
{
    stale(true, 0);
    close_host();
    stale(false, 0);
    close_host();
    stale(false, HARM_PAGE);
}

Test(damage, an_old_slot_put_back_under_a_daemon)
{
    static uint8_t old[STALE_BYTES];
    uint64_t first = stale_prepare(old, true);

    store(first + 100); /* the victim's segment is full: only such are scrubbed */
    cr_assert_eq(metric(w.client, "nvme_bytes_used"), 2u * BLOCKS * HARM_SLOT_BYTES);
    stale_put(old, first, 0);
    cr_expect(metric_reaches(w.client, "nvme_scrub_bad", 1, 20000));
}

/* ---- under a daemon ---- */

/* All lies in closed segments, and nothing in DRAM. */
static void prepare_running(bool scrub)
{
    open_host(scrub);
    store(0);
    stop(true);
    start_again();
}

static bool victim_is_hit(void)
{
    return worker_hits(&w, HARM_VICTIM, 1) == 1;
}

Test(damage, a_read_finds_it_and_its_segment_is_not_used_again)
{
    uint64_t capacity;
    bool victim;

    prepare_running(false);
    capacity = metric(w.client, "nvme_bytes_capacity");
    harm_do(&host, &harms[HARM_PAYLOAD]);
    cr_expect_eq(load_all(0, &victim), 1u);
    cr_expect(victim);
    cr_expect(!victim_is_hit(), "what failed is still a hit");
    cr_expect_eq(metric(w.client, "nvme_corrupt"), 1u);
    cr_expect_eq(metric(w.client, "nvme_quarantined_bytes"), 1u << 20);
    cr_expect_eq(metric(w.client, "nvme_bytes_capacity"), capacity - (1u << 20));
    cr_expect(health_is(w.client, "ok"));
    /* the next daemon knows */
    stop(false);
    start_again();
    cr_expect_eq(metric(w.client, "nvme_quarantined_bytes"), 1u << 20);
    cr_expect_eq(metric(w.client, "nvme_bytes_capacity"), capacity - (1u << 20));
}

static void scrub_finds(const struct harm *h, bool lost)
{
    bool victim;

    prepare_running(true);
    cr_assert(metric_reaches(w.client, "nvme_scrub_passes", 2, 20000));
    cr_assert_eq(metric(w.client, "nvme_scrub_bad"), 0u);
    harm_do(&host, h);
    cr_assert(metric_reaches(w.client, "nvme_scrub_bad", 1, 20000), "%s: not found", h->name);
    cr_assert(metric_reaches(w.client, "nvme_quarantined_bytes", 1, 20000), "%s", h->name);
    for (uint64_t end = now_ms() + 20000; lost && victim_is_hit(); sleep_ms(2))
        cr_assert_lt(now_ms(), end, "%s: still a hit", h->name);
    load_all(0, &victim);
    cr_expect_eq(victim, lost, "%s", h->name);
}

Test(damage, the_scrub_finds_it_before_anybody_reads)
{
    scrub_finds(&harms[HARM_PAYLOAD], true);
    for (unsigned i = HARM_SWAP; i <= HARM_CUT; i++) {
        if (left_out(i))
            continue;
        close_host();
        scrub_finds(&harms[i], true);
    }
    /* A daemon whose file was cut can't promise its blocks, and says so by its exit status. */
    worker_close(&w);
    cr_expect_eq(host_stop(&host), left_out(HARM_CUT) ? 0 : 1);
    start_again();
}

/* The next start finds what it finds by headers alone. */
static void start_without_checkpoint(void)
{
    int directory = open(host.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    cr_assert_geq(directory, 0);
    stop(false);
    (void)unlinkat(directory, "ucmd.index", 0); /* there or not */
    close(directory);
    start_again();
}

/* The payload is sound and is still served. Only a start would have missed it. */
Test(damage, the_scrub_mends_a_bad_header)
{
    bool victim;

    for (unsigned i = HARM_HEADER; i <= HARM_MAGIC; i++) {
        if (i > HARM_HEADER)
            close_host();
        scrub_finds(&harms[i], false);
        cr_assert(metric_reaches(w.client, "nvme_bad_headers", 1, 20000));
        start_without_checkpoint();
        cr_expect_eq(load_all(0, &victim), 0u, "%s", harms[i].name);
    }
}

/* A block that DRAM has as well is stored again, because a worker may have been promised that it is
 * durable. */
Test(damage, what_the_scrub_finds_lost_is_written_again)
{
    uint64_t writes;
    bool victim;

    prepare_running(true);
    cr_assert_eq(load_all(0, &victim), 0u);
    writes = metric(w.client, "nvme_writes");
    harm_do(&host, &harms[HARM_PAYLOAD]);
    cr_assert(metric_reaches(w.client, "nvme_scrub_bad", 1, 20000));
    cr_assert(metric_reaches(w.client, "nvme_writes", writes + 1, 20000));
    cr_expect_eq(load_all(0, &victim), 0u);
    stop(false);
    start_again();
    cr_expect_eq(load_all(0, &victim), 0u);
}

/* ---- what is acknowledged as durable ---- */

/* The header goes bad under a daemon that found the part by it, or only a checkpoint names the
 * part. A dump that was answered as durable is there at a start without the checkpoint. */
static void durable_under(const struct harm *h, bool running)
{
    bool victim;

    open_host(false);
    store(0);
    stop(!running);
    if (running)
        start_again();
    harm_do(&host, h);
    if (!running)
        start_again();
    cr_expect_eq(worker_dump_one(&w, HARM_VICTIM), UCM_BLOCK_IS_EXISTS, "%s", h->name);
    cr_expect_eq(metric(w.client, "nvme_bad_headers"), 1u, "%s", h->name);
    cr_expect_eq(metric(w.client, "nvme_quarantined_bytes"), running ? 0u : 1u << 20);
    start_without_checkpoint();
    cr_expect_eq(load_all(0, &victim), 0u, "%s, running %d: %s", h->name, running,
                 victim ? "what was durable is LOST" : "another is");
    cr_expect_eq(worker_dump_one(&w, HARM_VICTIM), UCM_BLOCK_IS_EXISTS, "%s", h->name);
    cr_expect_eq(metric(w.client, "nvme_bad_headers"), 0u, "%s", h->name);
}

Test(damage, a_durable_answer_outlives_a_bad_header)
{
    static const unsigned running[] = {HARM_HEADER, HARM_MAGIC, HARM_SEGMENT, HARM_SEGMENT_MAGIC};

    durable_under(&harms[HARM_HEADER], false);
    for (size_t i = 0; i < sizeof(running) / sizeof(running[0]); i++) {
        close_host();
        durable_under(&harms[running[i]], true);
    }
}

static void segment_headers(const char *path, uint8_t (*page)[HARM_PAGE], unsigned n)
{
    int fd = harm_file(&host, path);

    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(pread(fd, page[i], HARM_PAGE, (off_t)(i + 1) << 20), HARM_PAGE);
    close(fd);
}

/* A power failure may leave new bytes in a segment under its old header, which a checkpoint
 * matches. Parts that this spoils are misses; the disk is not to blame. */
Test(damage, a_reuse_that_was_cut_off_puts_no_segment_in_quarantine)
{
    static uint8_t before[16][HARM_PAGE], after[16][HARM_PAGE];
    unsigned torn = 0;
    int fd;

    open_host_of("nvme.size=17MiB", false);
    store(0);
    stop(true);
    segment_headers("ucmd.cache", before, 16);
    start_again();
    for (unsigned i = 1; i < 12; i++)
        store(i * 1000);
    stop(false);
    segment_headers("ucmd.cache", after, 16);
    fd = harm_file(&host, "ucmd.cache");
    for (unsigned i = 0; i < 16; i++) {
        if (memcmp(before[i], "UCMG", 4) != 0 || memcmp(before[i], after[i], HARM_PAGE) == 0)
            continue;
        cr_assert_eq(pwrite(fd, before[i], HARM_PAGE, (off_t)(i + 1) << 20), HARM_PAGE);
        torn++;
    }
    close(fd);
    cr_assert_gt(torn, 0u, "nothing was reused");
    start_again();
    cr_expect_gt(load_all(0, &(bool){false}), 0u);
    cr_expect_gt(metric(w.client, "nvme_corrupt"), 0u);
    cr_expect_eq(metric(w.client, "nvme_quarantined_bytes"), 0u);
    store(20000);
}

/* The cache's files are damaged under a daemon, and between two: a bit flipped, slots swapped, an
 * old slot put back, a file cut, in every kind of page. What is delivered is right or a miss, and a
 * counter tells of it. */
#include "tests/fault/harm.h"
#include "tests/inject/inject.h"
#include "tests/integration/harness.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCKS 64u

static struct host host;
static struct worker w;

static void close_host(void)
{
    worker_close(&w);
    host_remove(&host);
}

TestSuite(damage, .fini = close_host, .timeout = 120);

static void open_host_of(const char *size, bool scrub)
{
    host = (struct host){.nvme = true,
                         .sets = {"nvme.segment=1MiB", "log.level=error", size,
                                  scrub ? "nvme.scrub=1GiB" : "nvme.scrub=0",
                                  "nvme.scrub_interval=10ms"}};
    host_start(&host);
    worker_open(&w, &host, &(struct worker_options){0});
}

static void open_host(bool scrub)
{
    open_host_of("nvme.size=64MiB", scrub);
}

static void start_again(void)
{
    host_restart(&host);
    worker_open(&w, &host, &(struct worker_options){0});
    for (uint64_t end = now_ms() + 20000; health_is(w.client, "recovering"); sleep_ms(2))
        cr_assert_lt(now_ms(), end, "recovery does not end");
}

static void stop(bool clean)
{
    worker_close(&w);
    if (clean)
        cr_assert_eq(host_stop(&host), 0);
    else
        host_kill(&host);
}

static void store_written(uint64_t first, uint32_t n)
{
    uint64_t before = metric(w.client, "nvme_writes");

    worker_store(&w, first, n);
    cr_assert(metric_reaches(w.client, "nvme_writes", before + n, 20000));
}

/* What is damaged lies first in the log, in whichever order the others come: at the end of a
 * segment a slot with another's header is where the log ended, for all that one can see. */
#define EARLY 16u

static void store(uint64_t first)
{
    store_written(first, EARLY);
    store_written(first + EARLY, BLOCKS - EARLY);
}

/* Loads all; every one that is there is right. How many are missing; *victim: is that one? */
static unsigned load_all(uint64_t first, bool *victim)
{
    uint8_t keys[BLOCKS * WORKER_KEY_BYTES], status[BLOCKS];
    uint32_t blocks[BLOCKS];
    unsigned missing = 0;

    keys_make(first, BLOCKS, keys);
    for (uint32_t i = 0; i < BLOCKS; i++)
        blocks[i] = i;
    worker_clear(&w);
    cr_assert_eq(worker_load(&w, keys, blocks, BLOCKS, status), 0, "%s", ucm_errmsg());
    for (uint32_t i = 0; i < BLOCKS; i++) {
        missing += status[i] != UCM_BLOCK_IS_OK;
        if (status[i] == UCM_BLOCK_IS_OK)
            cr_assert_eq(worker_differs(&w, i, first + i), 0u, "block %u has WRONG BYTES", i);
    }
    *victim = status[HARM_VICTIM] != UCM_BLOCK_IS_OK;
    return missing;
}

/* What was lost is stored again. */
static void store_again(void)
{
    uint8_t keys[BLOCKS * WORKER_KEY_BYTES];
    uint32_t blocks[BLOCKS];

    keys_make(0, BLOCKS, keys);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        blocks[i] = i;
        worker_fill(&w, i, i);
    }
    cr_assert_eq(worker_dump(&w, keys, blocks, BLOCKS, NULL), 0, "%s", ucm_errmsg());
}

static uint64_t told(void)
{
    return metric(w.client, "nvme_corrupt") + metric(w.client, "nvme_damaged_pages") +
           metric(w.client, "nvme_read_errors") + metric(w.client, "nvme_scrub_bad");
}

/* A daemon with a sanitizer takes long to start: some of them will do. */
static bool left_out(size_t i)
{
    const char *phase = getenv("UCM_PHASE");

    return phase && strcmp(phase, "plain") != 0 && i % 5 != 0;
}

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
    cr_expect_geq(told(), 1u, "%s, clean %d: nothing tells of it", h->name, clean);
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

static void purge(void)
{
    static const char first[] = "\x81\xa2ns\x01"; /* {ns: 1} */
    uint8_t *answer;
    size_t n;

    cr_assert_eq(ucm_call(w.client, "namespace.purge", first, sizeof(first) - 1, -1, &answer, &n),
                 0, "%s", ucm_errmsg());
    free(answer);
}

/* 8 segments: the blocks of two stores take 5 at most, so that none is dropped for want of a free
 * one, even while the scrubber holds another. */
#define STALE_BYTES (9 << 20)

/* Blocks are stored until the victim's place has been used twice; the file as it was before the
 * last of them goes to old. Which segment comes next depends on what the scrubber is reading just
 * then. Gives the first key of the blocks that are stored now. */
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
        purge();
        first += 1000;
        store(first);
        at = harm_slot(fd, first + HARM_VICTIM);
    } while (memcmp(old + at, "UCMS", 4) != 0);
    close(fd);
    return first;
}

/* What lay in the victim's place before comes back. */
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
    /* Behind the last checkpoint an old header is where the log ended, for all that one can see. */
    if (clean || skip > 0)
        cr_expect_geq(told(), 1u);
}

Test(damage, an_old_slot_put_back_after_a_clean_stop)
{
    stale(true, 0);
}

Test(damage, an_old_slot_put_back_after_a_kill)
{
    stale(false, 0);
}

Test(damage, an_old_payload_put_back)
{
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

/* All lies in sealed segments, and nothing in DRAM. */
static void prepare_running(bool scrub)
{
    open_host(scrub);
    store(0);
    stop(true);
    start_again();
}

static bool victim_is_hit(void)
{
    uint8_t key[WORKER_KEY_BYTES];

    key_make(HARM_VICTIM, key);
    return worker_hits(&w, key, 1) == 1;
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
    cr_assert_geq(metric(w.client, "nvme_scrub_bytes"), 2u * BLOCKS * HARM_SLOT_BYTES);
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
    /* A daemon whose file was cut can't promise what it holds, and says so by its exit status. */
    worker_close(&w);
    cr_expect_eq(host_stop(&host), left_out(HARM_CUT) ? 0 : 1);
    start_again();
}

/* The next start finds what it finds by headers alone. */
static void start_without_checkpoint(void)
{
    int folder = open(host.dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    cr_assert_geq(folder, 0);
    stop(false);
    (void)unlinkat(folder, "ucmd.index", 0); /* there or not */
    close(folder);
    start_again();
}

/* The payload is sound and served on; only a start would have missed it. */
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

/* What DRAM has as well is stored again, for whoever was promised that it is. */
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

static uint8_t dump_durably(uint64_t number)
{
    uint8_t key[WORKER_KEY_BYTES], status = UCM_BLOCK_IS_FAILED;

    key_make(number, key);
    worker_fill(&w, 0, number);
    cr_assert_eq(worker_dump_durable(&w, key, &(uint32_t){0}, 1, &status), 0, "%s", ucm_errmsg());
    return status;
}

/* The header goes bad under a daemon that found the part by it, or only a checkpoint had told of
 * it: a dump that is answered as durable is there at a start without that. */
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
    cr_expect_eq(dump_durably(HARM_VICTIM), UCM_BLOCK_IS_EXISTS, "%s", h->name);
    cr_expect_eq(metric(w.client, "nvme_bad_headers"), 1u, "%s", h->name);
    cr_expect_eq(metric(w.client, "nvme_quarantined_bytes"), running ? 0u : 1u << 20);
    start_without_checkpoint();
    cr_expect_eq(load_all(0, &victim), 0u, "%s, running %d: %s", h->name, running,
                 victim ? "what was durable is LOST" : "another is");
    cr_expect_eq(dump_durably(HARM_VICTIM), UCM_BLOCK_IS_EXISTS, "%s", h->name);
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

/* ---- salvage ---- */

/* The exit status of ucmctl verify --offline; its output in `out`. */
static int verify_offline(const char *more, char *out, size_t cap)
{
    const char *ucmctl = getenv("UCMCTL");
    char command[400];
    FILE *f;
    size_t n;
    int status;

    snprintf(command, sizeof(command), "%s verify --json --offline %s %s 2>&1",
             ucmctl ? ucmctl : "build/ucmctl", host.dir, more);
    f = popen(command, "r");
    cr_assert_not_null(f);
    n = fread(out, 1, cap - 1, f);
    out[n] = '\0';
    status = pclose(f);
    cr_assert(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void salvaged(const struct harm *h, bool clean)
{
    static char out[8192];
    unsigned missing;
    bool victim;

    open_host(false);
    store(0);
    store(1000);
    stop(clean);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 0, "before: %s", out);
    harm_do(&host, h);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 5, "%s: not found: %s", h->name, out);
    cr_expect_eq(verify_offline("--salvage", out, sizeof(out)), 5, "%s: %s", h->name, out);
    cr_expect_not_null(strstr(out, "\"salvaged\""), "%s", out);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 0, "%s: not repaired: %s", h->name, out);
    start_again();
    cr_expect_eq(told(), 0u, "%s: the start finds damage", h->name);
    missing = load_all(0, &victim) + load_all(1000, &(bool){false});
    if (h->harmless || h->rebuilt)
        cr_expect_eq(missing, 0u, "%s: %u missing", h->name, missing);
    else
        cr_expect(victim, "%s", h->name);
    cr_expect_eq(told(), 0u, "%s: a read finds damage", h->name);
    store_again();
    cr_expect_eq(load_all(0, &victim), 0u, "%s", h->name);
}

Test(damage, salvage_makes_the_next_start_clean)
{
    for (size_t i = 0; i < HARMS; i++) {
        if (left_out(i))
            continue;
        if (i > 0)
            close_host();
        salvaged(&harms[i], !harms[i].scan_only);
    }
}

Test(damage, salvage_refuses_what_it_must_not_touch)
{
    static char out[8192];
    int fd;

    open_host(false);
    store(0);
    cr_expect_eq(verify_offline("--salvage", out, sizeof(out)), 1, "%s", out);
    cr_expect_not_null(strstr(out, "in use"), "%s", out);
    stop(true);
    fd = harm_file(&host, "ucmd.cache");
    harm_put(fd, "\x02", 1, 8);
    cr_expect_eq(verify_offline("--salvage", out, sizeof(out)), 1, "%s", out);
    cr_expect_not_null(strstr(out, "version 2"), "%s", out);
    harm_put(fd, "\x01", 1, 8);
    close(fd);
    cr_expect_eq(verify_offline("--salvage", out, sizeof(out)), 0, "%s", out);
    start_again();
    cr_expect_eq(load_all(0, &(bool){false}), 0u);
}

/* verify_offline with reads that fail as `fault` says. */
static int verify_under(const struct inject *fault, const char *more, char *out, size_t cap)
{
    const char *ucmd = getenv("UCMD"), *asan = getenv("ASAN_OPTIONS");
    char path[128], library[256], options[512];
    FILE *f;
    int rc;

    snprintf(library, sizeof(library), "%s-inject.so", ucmd ? ucmd : "build/ucmd");
    cr_assert_eq(access(library, R_OK), 0, "%s is not there", library);
    snprintf(options, sizeof(options), "%.400s%s", asan ? asan : "",
             asan && strstr(asan, "link_order") ? "" : ":verify_asan_link_order=0");
    snprintf(path, sizeof(path), "%s.inject", host.dir);
    f = fopen(path, "w");
    cr_assert_not_null(f);
    cr_assert_eq(fwrite(fault, sizeof(*fault), 1, f), 1u);
    cr_assert_eq(fclose(f), 0);
    setenv("ASAN_OPTIONS", options, 1);
    setenv("UCM_INJECT", path, 1);
    setenv("LD_PRELOAD", library, 1);
    rc = verify_offline(more, out, cap);
    unsetenv("LD_PRELOAD");
    unsetenv("UCM_INJECT");
    unlink(path);
    return rc;
}

/* The last record of ucmd.namespaces can't be read: it lies farther back than the cache file is
 * long, so that the fault spares that one. Blank pages before it are damage for salvage to mend. */
Test(damage, salvage_keeps_namespaces_that_it_cannot_read)
{
    static char out[8192];
    struct inject fault = {.read_error = EIO, .reads = -1};
    uint8_t record[HARM_PAGE], after[HARM_PAGE];
    struct stat st;
    int fd;

    open_host(false);
    store(0);
    stop(true);
    fd = harm_file(&host, "ucmd.cache");
    cr_assert_eq(fstat(fd, &st), 0);
    close(fd);
    fault.read_from = st.st_size + (1 << 20);
    fd = harm_file(&host, "ucmd.namespaces");
    harm_get(fd, record, sizeof(record), 0);
    harm_put(fd, record, sizeof(record), fault.read_from);
    close(fd);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 5, "%s", out);
    cr_expect_eq(verify_under(&fault, "", out, sizeof(out)), 1, "%s", out);
    cr_expect_not_null(strstr(out, "ucmd.namespaces"), "%s", out);
    cr_expect_eq(verify_under(&fault, "--salvage", out, sizeof(out)), 1, "%s", out);
    cr_expect_not_null(strstr(out, "\"names_rewritten\":\tfalse"), "%s", out);
    fd = harm_file(&host, "ucmd.namespaces");
    harm_get(fd, after, sizeof(after), fault.read_from);
    close(fd);
    cr_expect_eq(memcmp(record, after, sizeof(record)), 0);
    cr_expect_eq(verify_offline("--salvage", out, sizeof(out)), 5, "%s", out);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 0, "%s", out);
    start_again();
    cr_expect_eq(load_all(0, &(bool){false}), 0u);
}

static void segment_headers(const char *path, uint8_t (*page)[HARM_PAGE], unsigned n)
{
    int fd = harm_file(&host, path);

    for (unsigned i = 0; i < n; i++)
        cr_assert_eq(pread(fd, page[i], HARM_PAGE, (off_t)(i + 1) << 20), HARM_PAGE);
    close(fd);
}

/* A power failure may leave new bytes in a segment, and its old header, that a checkpoint matches.
 * What that spoils is a miss; the disk is not to blame. */
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

#define SOUND 12u

/* Its bytes are right, but a start without a checkpoint would not find them. */
static void no_promise_for_what_is_not_mended(uint64_t number)
{
    int fd = harm_file(&host, "ucmd.cache");

    harm_flip(fd, harm_slot(fd, number) + 104);
    close(fd);
    cr_expect_eq(dump_durably(number), UCM_BLOCK_IS_NOT_DURABLE);
    cr_expect_eq(metric(w.client, "nvme_bad_headers"), 1u);
    cr_expect_eq(load_all(0, &(bool){false}), 1u, "it is served on");
}

/* Damages one of the next parts, in another segment than `last`: they are not written in order. */
static off_t harm_apart(int fd, uint64_t number, off_t last)
{
    off_t at;

    do
        at = harm_slot(fd, number++);
    while (at >> 20 == last >> 20);
    harm_flip(fd, at + HARM_PAGE);
    return at;
}

/* Past nvme.quarantine the file is read only; an operator may say that the disk is well. */
Test(damage, too_many_bad_segments_stop_the_writes)
{
    static char out[8192];
    bool victim;
    off_t at = 0;
    int fd;

    open_host(false);
    for (unsigned i = 0; i < 4; i++)
        store(i * 1000);
    stop(true);
    start_again();
    fd = harm_file(&host, "ucmd.cache");
    for (unsigned i = 0; i < 4; i++)
        at = harm_apart(fd, i * 1000 + HARM_VICTIM, at);
    close(fd);
    for (unsigned i = 0; i < 4; i++)
        cr_expect_eq(load_all(i * 1000, &victim), 1u);
    cr_expect(health_is(w.client, "degraded"));
    stop(true);
    start_again();
    cr_expect(health_is(w.client, "degraded"));
    for (unsigned i = 0; i < 4; i++)
        cr_expect_eq(load_all(i * 1000, &victim), 1u);
    no_promise_for_what_is_not_mended(SOUND);
    stop(true);
    cr_expect_eq(verify_offline("--salvage --lift-quarantine", out, sizeof(out)), 5, "%s", out);
    cr_expect_eq(verify_offline("", out, sizeof(out)), 0, "%s", out);
    start_again();
    cr_expect(health_is(w.client, "ok"));
    cr_expect_eq(metric(w.client, "nvme_quarantined_bytes"), 0u);
    store(9000);
}

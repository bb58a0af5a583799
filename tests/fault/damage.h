/* What test_damage and test_salvage share: a daemon whose files are damaged, and its worker. */
#ifndef UCMD_TESTS_DAMAGE_H
#define UCMD_TESTS_DAMAGE_H

#include "tests/fault/harm.h"
#include "tests/integration/harness.h"
#include "tests/runner/environment.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#define BLOCKS 64u

static struct host host;
static struct worker w;

static inline void close_host(void)
{
    worker_close(&w);
    host_remove(&host);
}

static inline void open_host_of(const char *size, bool scrub)
{
    host = (struct host){.nvme = true,
                         .sets = {"arena.size=8MiB", "nvme.segment=1MiB", "log.level=error", size,
                                  scrub ? "nvme.scrub=1GiB" : "nvme.scrub=0",
                                  "nvme.scrub_interval=10ms"}};
    host_start(&host);
    worker_open(&w, &host, &(struct worker_options){0});
}

static inline void open_host(bool scrub)
{
    open_host_of("nvme.size=64MiB", scrub);
}

static inline void start_again(void)
{
    host_restart(&host);
    worker_open(&w, &host, &(struct worker_options){0});
}

static inline void stop(bool clean)
{
    worker_close(&w);
    if (clean)
        cr_assert_eq(host_stop(&host), 0);
    else
        host_kill(&host);
}

static inline void store_written(uint64_t first, uint32_t n)
{
    uint64_t before = metric(w.client, "nvme_writes");

    worker_store(&w, first, n);
    cr_assert(metric_reaches(w.client, "nvme_writes", before + n, 20000));
}

/* The damaged slot lies first in the log, in whichever order the others come. At the end of a
 * segment, a slot with another part's header would look like the end of the log. */
#define EARLY 16u

static inline void store(uint64_t first)
{
    store_written(first, EARLY);
    store_written(first + EARLY, BLOCKS - EARLY);
}

/* Loads all, and checks each that is there. Returns how many are missing. *victim: whether the
 * victim is one of them. */
static inline unsigned load_all(uint64_t first, bool *victim)
{
    uint8_t status[BLOCKS];
    unsigned missing = BLOCKS - worker_found(&w, first, BLOCKS, status);

    *victim = status[HARM_VICTIM] != UCM_BLOCK_IS_OK;
    return missing;
}

/* Stores lost blocks again. */
static inline void store_again(void)
{
    worker_store_as(&w, 0, BLOCKS, UCM_DURABLE_DEFAULT, IS_STORED);
}

static inline uint64_t damage_seen(void)
{
    return metric(w.client, "nvme_corrupt") + metric(w.client, "nvme_damaged_pages") +
           metric(w.client, "nvme_read_errors") + metric(w.client, "nvme_scrub_bad");
}

/* A daemon with a sanitizer takes long to start, so only some cases run there. */
static inline bool left_out(size_t i)
{
    return phase_is_slow() && i % 5 != 0;
}

#endif

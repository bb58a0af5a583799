/* Many workers at once do everything that a worker may do, and check each byte that they get
 * (churn_worker.c). They are stopped and killed in the middle of it.
 *
 * The oracle: a block's bytes follow from its key, part, plane and offset, whichever worker dumps
 * it. A load that says OK delivered exactly these, and touched nothing else. A leased block is not
 * missed, unless a worker evicts it by name. Every request is answered. When all workers are gone,
 * the daemon holds nothing of them, and does not grow from round to round.
 *
 * UCM_SEED repeats a run's choices (not its timing); UCM_CHURN_SECONDS makes it longer. */
/* Sanitizers: thread */
#include "tests/fault/churn_worker.h"
#include "tests/runner/environment.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECONDS 3
#define ROUNDS 3
#define MORE_ROUNDS 5
#define PROCESSES 6

static struct host host;

/* ---- the parent, which stops, kills and counts them ---- */

struct process {
    pid_t pid;
    uint64_t wake_ms; /* stopped until then; 0: runs */
};

static void process_start(struct process *p)
{
    uint64_t seed = churn_random();

    fflush(NULL);
    p->wake_ms = 0;
    p->pid = fork();
    cr_assert_geq(p->pid, 0);
    if (p->pid == 0)
        churn_process(&host, seed);
}

static void expect_fine_end(int status)
{
    bool fine = WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0;

    cr_assert(fine, "a worker ended with status %#x", (unsigned)status);
}

static void process_disturb(struct process *p)
{
    if (p->wake_ms != 0) {
        if (now_ms() < p->wake_ms)
            return;
        p->wake_ms = 0;
        kill(p->pid, SIGCONT);
    } else if (churn_below(1000) < 4) {
        kill(p->pid, SIGKILL);
    } else if (churn_below(1000) < 8) {
        kill(p->pid, SIGSTOP);
        p->wake_ms = now_ms() + 20 + churn_below(300);
    }
}

static void processes_end(struct process *all)
{
    uint64_t end = now_ms() + 2 * CHURN_WAIT_MS;

    for (int i = 0; i < PROCESSES; i++) {
        kill(all[i].pid, churn_chance(50) ? SIGKILL : SIGTERM);
        kill(all[i].pid, SIGCONT);
    }
    for (int i = 0; i < PROCESSES; i++) {
        int status;

        while (waitpid(all[i].pid, &status, WNOHANG) == 0) {
            cr_assert_lt(now_ms(), end, "a worker does not end");
            sleep_ms(5);
        }
        expect_fine_end(status);
    }
}

static unsigned churn(uint64_t until_ms)
{
    struct process all[PROCESSES];
    unsigned started = PROCESSES;

    churn_round();
    for (int i = 0; i < PROCESSES; i++)
        process_start(&all[i]);
    while (now_ms() < until_ms) {
        for (int i = 0; i < PROCESSES; i++) {
            int status;

            cr_assert_eq(waitpid(host.pid, &status, WNOHANG), 0, "the daemon ended, status %#x",
                         (unsigned)status);
            if (waitpid(all[i].pid, &status, WNOHANG) == all[i].pid) {
                expect_fine_end(status);
                process_start(&all[i]);
                started++;
            } else {
                process_disturb(&all[i]);
            }
        }
        sleep_ms(5);
    }
    processes_end(all);
    return started;
}

/* ---- what is left ---- */

static bool falls_to(struct ucm_client *c, const char *name, uint64_t most)
{
    for (uint64_t end = now_ms() + 20000; now_ms() < end; sleep_ms(10))
        if (metric(c, name) <= most)
            return true;
    return false;
}

static void evict_all(struct ucm_client *c)
{
    for (size_t i = 0; i < CHURN_SPACES; i++) {
        const struct churn_space *space = &churn_spaces[i];
        uint32_t layers;
        struct ucm_identity id =
            worker_identity(&(struct worker_options){.model = space->model,
                                                     .parts = space->parts,
                                                     .layers = space->layers,
                                                     .layer_bytes = space->layer_bytes},
                            &layers);
        struct ucm_namespace *ns;
        uint64_t changed, busy;

        cr_assert_eq(ucm_namespace_open(c, &id, CHURN_WAIT_MS, &ns), 0, "%s", ucm_errmsg());
        cr_assert_eq(ucm_unpin(ns, NULL, 0, CHURN_WAIT_MS, &changed), 0, "%s", ucm_errmsg());
        cr_assert_eq(ucm_evict(ns, NULL, 0, CHURN_WAIT_MS, &changed, &busy), 0, "%s", ucm_errmsg());
        ucm_namespace_close(ns);
    }
}

static void expect_nothing_left(struct ucm_client *c)
{
    static const char *const left[] = {"regions", "leases", "requests_active"};
    static const char *const after[] = {"blocks", "blocks_partial", "blocks_pinned",
                                        "arena_bytes_used", "nvme_bytes_used"};

    cr_assert(falls_to(c, "connections", 1), "connections");
    for (size_t i = 0; i < sizeof(left) / sizeof(left[0]); i++)
        cr_assert(falls_to(c, left[i], 0), "%s: %llu left", left[i],
                  (unsigned long long)metric(c, left[i]));
    evict_all(c);
    for (size_t i = 0; i < sizeof(after) / sizeof(after[0]); i++)
        cr_assert(falls_to(c, after[i], 0), "%s: %llu left after everything was evicted", after[i],
                  (unsigned long long)metric(c, after[i]));
    cr_expect_eq(metric(c, "nvme_corrupt"), 0u);
    cr_expect_eq(metric(c, "nvme_read_errors"), 0u);
    cr_expect_eq(metric(c, "connections_dropped"), 0u);
}

static unsigned daemon_fds(void)
{
    char path[64];
    unsigned n = 0;
    DIR *dir;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)host.pid);
    dir = opendir(path);
    cr_assert(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

/* A checkpoint or a list of namespaces that is being written has its files open for a moment. */
static bool fds_fall_to(unsigned most)
{
    for (uint64_t end = now_ms() + CHURN_WAIT_MS; daemon_fds() > most; sleep_ms(20))
        if (now_ms() >= end)
            return false;
    return true;
}

/* Sanitizers keep what was freed for a while. */
#ifdef SANITIZED
#define RSS_SLACK_BYTES (400u << 20)
#else
#define RSS_SLACK_BYTES (8u << 20)
#endif

static void remove_host(void)
{
    host_remove(&host);
}

TestSuite(churn, .fini = remove_host, .timeout = 3600);

Test(churn, workers_come_and_go_and_nothing_is_ever_wrong)
{
    static const char *const progress[] = {
        "dump_blocks",     "load_blocks_dram",  "load_blocks_nvme",     "prefetch_blocks",
        "reads_coalesced", "arena_slabs_moved", "arena_evicted_blocks", "nvme_reclaimed_segments"};
    uint64_t seconds = number_given("UCM_CHURN_SECONDS", SECONDS);
    uint64_t seed = number_given("UCM_SEED", now_ms() * 1000003 + (uint64_t)getpid());
    unsigned rounds = seconds > 20 * ROUNDS ? (unsigned)(seconds / 20) : ROUNDS, fds = 0;
    uint64_t rss = 0;
    bool enough = false;

    churn_leave_on_sigterm();
    churn_seed(seed);
    fprintf(stderr, "UCM_SEED=%#llx UCM_CHURN_SECONDS=%llu\n", (unsigned long long)seed,
            (unsigned long long)seconds);
    alarm((unsigned)(4 * seconds + 64 * seconds / rounds + 300)); /* MORE_ROUNDS included */
    host = (struct host){.nvme = true,
                         .sets = {"arena.size=16MiB", "arena.prefault=true", "nvme.size=24MiB",
                                  "nvme.segment=2MiB", "nvme.write_queue_size=8MiB"}};
    host_start(&host);
    /* On a slow machine, rounds of twice the length follow until DRAM was full once. */
    for (unsigned round = 0; round < rounds || (!enough && round < rounds + MORE_ROUNDS); round++) {
        struct ucm_options options = {.socket = host.socket, .name = "counter"};
        unsigned more = round < rounds ? 0 : round - rounds + 1;
        unsigned started = churn(now_ms() + (seconds * 1000 / rounds << more));
        struct ucm_client *c;

        cr_assert_eq(ucm_connect(&options, CHURN_WAIT_MS, &c), 0, "%s", ucm_errmsg());
        expect_nothing_left(c);
        fprintf(stderr, "round %u: %u processes, fds %u, rss %llu KiB", round, started,
                daemon_fds(), (unsigned long long)host_rss_bytes(&host) / 1024);
        for (size_t i = 0; i < sizeof(progress) / sizeof(progress[0]); i++)
            fprintf(stderr, ", %s %llu", progress[i], (unsigned long long)metric(c, progress[i]));
        fputc('\n', stderr);
        if (round == 0) {
            fds = daemon_fds();
            rss = host_rss_bytes(&host);
        }
        enough = metric(c, "load_blocks_nvme") > 0 && metric(c, "arena_evicted_blocks") > 0;
        cr_expect(fds_fall_to(fds), "descriptors leak: %u, %u before", daemon_fds(), fds);
        cr_expect_leq(host_rss_bytes(&host), rss + RSS_SLACK_BYTES, "memory leaks");
        ucm_close(c);
    }
    cr_expect(enough, "no block was loaded from NVMe, or none was evicted from DRAM");
    cr_expect_eq(host_stop(&host), 0, "the daemon's exit status");
}

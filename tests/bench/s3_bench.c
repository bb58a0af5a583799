/* A root that is a bucket, beside a plain libcurl program: stores and loads of 1, 2 and 4 MiB with 32 under way, by turns in one run, and one find and one
 * read of 64 KiB at a time. The server is a process of this program that keeps objects in memory, or another one. Beside the rates
 * stands the processor time of both sides, which depends less on what else runs.
 *
 *   build/bench/s3_bench [ENDPOINT KEY SECRET BUCKET [MIB]] */
#include "daemon/base/log.h"
#include "daemon/config/roots.h"
#include "daemon/share/backend.h"
#include "daemon/share/share.h"
#include "tests/bench/s3_server.h"
#include "tests/integration/s3/s3_plain.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define WAYS 32u /* under way */
#define TURNS 9u
#define LONE 1000u /* finds and reads one at a time */
#define HEAD BLOCK_FILE_HEADER_BYTES
#define LARGE (4u << 20)

static struct {
    char endpoint[128], key[128], secret[128], bucket[64], folder[64];
    uint64_t mib; /* of a turn */
    uint8_t *data[WAYS];
    unsigned numbers; /* of objects, so that none is stored twice */
    pid_t server;     /* 0: another program's */
} b;

static double now_s(void)
{
    return (double)uv_hrtime() / 1e9;
}

static int compare(const void *x, const void *y)
{
    double d = *(const double *)x - *(const double *)y;

    return (d > 0) - (d < 0);
}

static double median(double *of, unsigned n)
{
    qsort(of, n, sizeof(*of), compare);
    return of[n / 2];
}

static void fail(const char *what, const char *why)
{
    fprintf(stderr, "s3_bench: %s: %s\n", what, why);
    exit(1);
}

/* ---- plain libcurl ---- */

struct transfer {
    CURL *easy;
    struct s3_bytes bytes;
};

static struct curl_slist *plain_headers;

static size_t take_cb(char *data, size_t size, size_t n, void *ctx)
{
    struct s3_bytes *to = ctx;

    n *= size;
    if (n > to->n - to->at)
        return 0;
    memcpy(to->data + to->at, data, n);
    to->at += n;
    return n;
}

enum what { STORE, LOAD, FIND };

static void plain_begin(CURLM *multi, struct transfer *t, enum what what, unsigned number)
{
    char url[300];

    curl_easy_reset(t->easy);
    snprintf(url, sizeof(url), "%s/%s/plain/%u", b.endpoint, b.bucket, number);
    s3_plain_begin(t->easy, url, b.key, b.secret, plain_headers);
    curl_easy_setopt(t->easy, CURLOPT_BUFFERSIZE, 128L << 10);
    curl_easy_setopt(t->easy, CURLOPT_UPLOAD_BUFFERSIZE, 128L << 10);
    curl_easy_setopt(t->easy, CURLOPT_PRIVATE, t);
    curl_easy_setopt(t->easy, CURLOPT_FAILONERROR, 1L);
    curl_easy_setopt(t->easy, CURLOPT_WRITEFUNCTION, take_cb);
    curl_easy_setopt(t->easy, CURLOPT_WRITEDATA, &t->bytes);
    t->bytes.at = 0;
    if (what == FIND)
        curl_easy_setopt(t->easy, CURLOPT_NOBODY, 1L);
    else if (what == STORE)
        s3_plain_upload(t->easy, &t->bytes);
    curl_multi_add_handle(multi, t->easy);
}

/* Seconds for `count` objects from `first` on. */
static double plain_run(CURLM *multi, struct transfer *t, unsigned ways, enum what what,
                        unsigned first, unsigned count)
{
    double from = now_s();
    unsigned begun = 0, done = 0;

    while (begun < ways && begun < count) {
        plain_begin(multi, &t[begun], what, first + begun);
        begun++;
    }
    while (done < count) {
        CURLMsg *m;
        int running, left;

        curl_multi_perform(multi, &running);
        while ((m = curl_multi_info_read(multi, &left)) != NULL) {
            struct transfer *of;

            if (m->data.result != CURLE_OK)
                fail("plain", curl_easy_strerror(m->data.result));
            curl_easy_getinfo(m->easy_handle, CURLINFO_PRIVATE, &of);
            if (what != FIND && of->bytes.at != of->bytes.n)
                fail("plain", "not all bytes");
            curl_multi_remove_handle(multi, of->easy);
            done++;
            if (begun < count)
                plain_begin(multi, of, what, first + begun++);
        }
        if (done < count)
            curl_multi_poll(multi, NULL, 0, 1000, NULL);
    }
    return now_s() - from;
}

/* ---- the daemon's root ---- */

struct root {
    uv_loop_t loop;
    struct deadlines deadlines;
    struct share_backend *backend;
    enum what what;
    unsigned next, end, busy;
    uint64_t bytes;
};
struct root_op {
    struct share_op op; /* first */
    struct root *root;
    uint8_t *data;
};

static void root_begin(struct root_op *o);

static void root_done_cb(struct share_op *op, int status)
{
    struct root_op *o = (struct root_op *)op;

    if (status != 0)
        fail("root", share_s3.reason(o->root->backend) ? share_s3.reason(o->root->backend)
                                                       : strerror(-status));
    o->root->busy--;
    root_begin(o);
}

static void root_begin(struct root_op *o)
{
    static const enum share_verb verbs[] = {SHARE_WRITE, SHARE_READ, SHARE_FIND};
    struct root *r = o->root;
    unsigned number = r->next;

    if (number == r->end)
        return;
    r->next++;
    r->busy++;
    o->op = (struct share_op){.verb = verbs[r->what],
                              .id = {.key_bytes = 16},
                              .data = o->data,
                              .bytes = r->bytes,
                              .done_cb = root_done_cb};
    memcpy(o->op.id.key, &number, sizeof(number));
    share_s3.start(r->backend, &o->op);
}

static double root_run(struct root *r, unsigned ways, enum what what, uint64_t bytes,
                       unsigned first, unsigned count)
{
    static struct root_op ops[WAYS];
    double from = now_s();

    r->what = what;
    r->bytes = bytes;
    r->next = first;
    r->end = first + count;
    for (unsigned i = 0; i < ways; i++) {
        ops[i].root = r;
        ops[i].data = b.data[i];
        root_begin(&ops[i]);
    }
    while (r->busy > 0)
        uv_run(&r->loop, UV_RUN_ONCE);
    return now_s() - from;
}

static void root_open(struct root *r, struct config_process *p)
{
    static char target[400];
    static char ucmd[PATH_MAX]; /* borrowed while it is open */
    char *backend = realpath("build/ucmd-backend-s3", NULL);
    struct share_backend_config config = {
        .loop = &r->loop, .deadlines = &r->deadlines, .host = "bench", .depth = WAYS, .process = p};

    if (!backend || !realpath("build/ucmd", ucmd))
        fail("build/ucmd-backend-s3", "run this in the top folder, behind make");
    snprintf(target, sizeof(target), "s3://%s/root?endpoint=%s&credentials=%s/key", b.bucket,
             b.endpoint, b.folder);
    snprintf(p->command, sizeof(p->command), "%s %s", backend, target);
    snprintf(p->read, sizeof(p->read), "%s", b.folder);
    p->network = true;
    p->buffer_bytes = 256u << 20;
    config.target = target;
    config.launcher = ucmd;
    uv_loop_init(&r->loop);
    deadlines_init(&r->deadlines, &r->loop);
    if (share_s3.open(&config, &r->backend) != 0)
        fail("root", "it can't be opened");
    free(backend);
}

/* ---- processor time ---- */

static double cpu_of(pid_t pid)
{
    struct timespec t;
    clockid_t clock;

    if (pid == 0 || clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &t) < 0)
        return 0;
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Of this program and of the backend; of the server, if it is ours. */
static void cpu_read(const struct root *r, double s[2])
{
    struct share_process_stats stats;

    share_s3.process(r->backend, &stats);
    s[0] = cpu_of(getpid()) + cpu_of((pid_t)stats.pid);
    s[1] = cpu_of(b.server);
}

/* ---- the comparison ---- */

/* Of each turn, of s3:// and of libcurl. */
struct side {
    double rate[TURNS], own[TURNS], server[TURNS]; /* MB/s, and processor seconds a GB */
};

static void side_run(CURLM *multi, struct transfer *t, struct root *r, bool plain, enum what what,
                     uint64_t bytes, unsigned first, unsigned count, struct side *to, unsigned turn)
{
    double gb = (double)count * (double)bytes / 1e9, from[2], until[2], s;

    for (unsigned k = 0; k < WAYS; k++)
        t[k].bytes.n = bytes + HEAD;
    cpu_read(r, from);
    s = plain ? plain_run(multi, t, WAYS, what, first, count)
              : root_run(r, WAYS, what, bytes, first, count);
    cpu_read(r, until);
    to->rate[turn] = gb * 1e3 / s;
    to->own[turn] = (until[0] - from[0]) / gb;
    to->server[turn] = (until[1] - from[1]) / gb;
}

static void turns_show(const char *name, uint64_t bytes, struct side sides[2], double *ratios)
{
    double mid = median(ratios, TURNS);

    printf(
        "%-6s %u MiB  %8.0f %8.0f MB/s   %.2f (%.2f to %.2f)   %.2f, %.2f s/GB; the server %.2f, "
        "%.2f\n",
        name, (unsigned)(bytes >> 20), median(sides[1].rate, TURNS), median(sides[0].rate, TURNS),
        mid, ratios[0], ratios[TURNS - 1], median(sides[1].own, TURNS), median(sides[0].own, TURNS),
        median(sides[1].server, TURNS), median(sides[0].server, TURNS));
}

static void turns(CURLM *multi, struct transfer *t, struct root *r, uint64_t bytes)
{
    static const char *const names[] = {"store", "load"};
    unsigned count = (unsigned)((b.mib << 20) / bytes);
    static struct side sides[2][2];
    double ratios[2][TURNS];

    for (unsigned turn = 0; turn < TURNS; turn++) {
        unsigned first = b.numbers;

        b.numbers += count;
        for (unsigned what = STORE; what <= LOAD; what++) {
            for (unsigned i = 0; i < 2; i++) {
                bool plain = (turn + i) % 2 == 0;

                side_run(multi, t, r, plain, what, bytes, first, count, &sides[what][plain], turn);
            }
            ratios[what][turn] = sides[what][0].rate[turn] / sides[what][1].rate[turn];
        }
    }
    for (unsigned what = STORE; what <= LOAD; what++)
        turns_show(names[what], bytes, sides[what], ratios[what]);
}

/* One at a time; half of them of each side, by turns. */
static void lone(CURLM *multi, struct transfer *t, struct root *r, enum what what, uint64_t bytes)
{
    static double us[2][LONE];
    unsigned number = b.numbers++;

    t[0].bytes.n = bytes + HEAD;
    (void)plain_run(multi, t, 1, STORE, number, 1);
    (void)root_run(r, 1, STORE, bytes, number, 1);
    for (unsigned i = 0; i < 2 * LONE; i++)
        us[i % 2][i / 2] = 1e6 * (i % 2 ? plain_run(multi, t, 1, what, number, 1)
                                        : root_run(r, 1, what, bytes, number, 1));
    printf("%-18s %8.0f %8.0f us     %.0f more\n", what == FIND ? "find" : "read of 64 KiB",
           median(us[1], LONE), median(us[0], LONE), us[0][LONE / 2] - us[1][LONE / 2]);
}

static void key_lay(void)
{
    char path[128];

    snprintf(b.folder, sizeof(b.folder), "/tmp/s3-bench-XXXXXX");
    if (!mkdtemp(b.folder))
        fail(b.folder, strerror(errno));
    chmod(b.folder, 0755);
    snprintf(path, sizeof(path), "%s/key", b.folder);
    if (!s3_credentials_lay(path, b.key, b.secret))
        fail(path, strerror(errno));
}

int main(int argc, char **argv)
{
    struct config_process process = {.network = true};
    struct transfer t[WAYS];
    struct root r = {.busy = 0};
    CURLM *multi;
    char path[128];

    signal(SIGPIPE, SIG_IGN);
    log_set_level(LOG_ERROR);
    b.mib = argc > 5 ? strtoull(argv[5], NULL, 10) : 128;
    snprintf(b.key, sizeof(b.key), "%s", argc > 4 ? argv[2] : "bench");
    snprintf(b.secret, sizeof(b.secret), "%s", argc > 4 ? argv[3] : "bench");
    snprintf(b.bucket, sizeof(b.bucket), "%s", argc > 4 ? argv[4] : "bench");
    if (argc > 4)
        snprintf(b.endpoint, sizeof(b.endpoint), "%s", argv[1]);
    else
        snprintf(b.endpoint, sizeof(b.endpoint), "http://127.0.0.1:%d", s3_server_start(&b.server));
    key_lay();
    curl_global_init(CURL_GLOBAL_DEFAULT);
    multi = curl_multi_init();
    curl_multi_setopt(multi, CURLMOPT_MAXCONNECTS, (long)WAYS);
    plain_headers = curl_slist_append(NULL, S3_PLAIN_PAYLOAD);
    for (unsigned i = 0; i < WAYS; i++) {
        b.data[i] = malloc(LARGE + HEAD);
        if (!b.data[i])
            fail("memory", strerror(errno));
        memset(b.data[i], (int)i, LARGE + HEAD);
        t[i] = (struct transfer){.easy = curl_easy_init(), .bytes.data = b.data[i]};
    }
    root_open(&r, &process);
    printf("%-18s %8s %8s\n", "", "libcurl", "s3://");
    lone(multi, t, &r, FIND, 64u << 10);
    lone(multi, t, &r, LOAD, 64u << 10);
    turns(multi, t, &r, 1u << 20);
    turns(multi, t, &r, 2u << 20);
    turns(multi, t, &r, LARGE);
    share_s3.close(r.backend);
    uv_run(&r.loop, UV_RUN_DEFAULT);
    if (b.server > 0)
        kill(b.server, SIGKILL);
    snprintf(path, sizeof(path), "%s/key", b.folder);
    unlink(path);
    rmdir(b.folder);
    return 0;
}

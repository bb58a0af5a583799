/* A root's process sends any packets, while requests of each verb await their answers. Each
 * operation ends once. A read that succeeds has the bytes of its part, and nothing is written
 * outside of the operation's memory. The library for backends reads each packet, too, as one of a
 * daemon. Traps on any break of these promises. */
#include "daemon/shared/process/process.h"

#include "daemon/base/log.h"
#include "tests/fuzz/fuzz.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define OPS 7u
#define BYTES 300u
#define BUFFER 65536u

static struct fuzzed {
    struct shared_op op;      /* first */
    uint8_t bytes[BYTES + 8]; /* the last ones are nobody's */
    unsigned ended;
} ops[OPS];

static void done_cb(struct shared_op *op, int status)
{
    struct fuzzed *f = (struct fuzzed *)op;

    must(f->ended++ == 0);
    if (op->verb == SHARED_READ && status == 0)
        must(shared_op_verify(op) == 0);
    if (op->verb == SHARED_LIST && status == 0) {
        for (uint32_t i = 0; i < op->listing.n; i++)
            must(shared_listing_wants(op->listing.files[i].name));
        shared_listing_free(&op->listing);
    }
}

static void as_request(const uint8_t *p, size_t n)
{
    struct wire_reader r;
    struct ucm_error e;
    struct wire_request q;
    struct wire_hello h;

    if (wire_open(&r, p, n, &e) < 0)
        return;
    while (wire_more(&r))
        if (wire_take_request(&r, &q, &e) == 0)
            must(memchr(q.key, 0, sizeof(q.key)) && memchr(q.temp, 0, sizeof(q.temp)));
    r.at = 0;
    if (wire_take_hello(&r, &h, &e) == 0)
        must(memchr(h.root, 0, sizeof(h.root)) && memchr(h.host, 0, sizeof(h.host)));
    wire_close(&r);
}

static void ops_start(struct shared_backend *b)
{
    static const enum shared_verb verbs[OPS] = {SHARED_FIND,   SHARED_READ,  SHARED_WRITE,
                                                SHARED_REMOVE, SHARED_TOUCH, SHARED_LIST,
                                                SHARED_CHECK};

    for (unsigned i = 0; i < OPS; i++) {
        struct fuzzed *f = &ops[i];

        *f = (struct fuzzed){.op = {.verb = verbs[i],
                                    .id = {.key_bytes = 16, .key = {1}},
                                    .data = f->bytes,
                                    .bytes = BYTES,
                                    .sync = true,
                                    .done_cb = done_cb}};
        shared_process.start(b, &f->op);
    }
}

/* A run whose process is the fuzzer. Returns the fuzzer's end of its socket. */
static int run_make(struct shared_backend *b)
{
    struct process_run *run = calloc(1, sizeof(*run));
    int sockets[2];

    must(run && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, sockets) == 0);
    run->b = b;
    run->pid_fd = run->buffer_fd = -1;
    run->socket = sockets[0];
    run->buffer_bytes = BUFFER;
    run->buffer = mmap(NULL, BUFFER, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(run->buffer != MAP_FAILED);
    list_init(&run->spans);
    must(uv_timer_init(b->loop, &run->limit) == 0);
    run->limit.data = run;
    run->limit_open = true;
    run->handles = 1;
    run->state = RUN_GREETING;
    b->run = run;
    must(process_run_greet(run) == 0);
    return sockets[1];
}

/* Packets: two bytes of length each, then so many bytes. */
static void packets_send(struct shared_backend *b, uv_loop_t *loop, int fd, const uint8_t *data,
                         size_t n)
{
    while (n >= 2 && b->run) {
        size_t length = data[0] | (size_t)data[1] << 8;

        data += 2;
        n -= 2;
        length = length < n ? length : n;
        as_request(data, length);
        if (length > 0)
            (void)send(fd, data, length, MSG_NOSIGNAL | MSG_DONTWAIT);
        data += length;
        n -= length;
        for (unsigned i = 0; i < 3; i++)
            uv_run(loop, UV_RUN_NOWAIT);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    static const struct config_process process = {.command = "/x", .buffer_bytes = BUFFER};
    struct deadlines deadlines;
    struct shared_backend_config config = {.deadlines = &deadlines,
                                           .target = CONFIG_PROCESS "fuzzed",
                                           .host = "host",
                                           .depth = 8,
                                           .process = &process};
    struct shared_backend *b;
    uv_loop_t loop;
    int fd;

    log_set_level(LOG_ERROR);
    must(uv_loop_init(&loop) == 0 && deadlines_init(&deadlines, &loop) == 0);
    config.loop = &loop;
    must(shared_process.open(&config, &b) == 0);
    fd = run_make(b);
    ops_start(b);
    packets_send(b, &loop, fd, data, n);
    if (b->run)
        process_run_end(b->run, 0, "the input is at its end");
    while (b->run || b->under_way > 0)
        uv_run(&loop, UV_RUN_NOWAIT);
    for (unsigned i = 0; i < OPS; i++) {
        must(ops[i].ended == 1);
        for (unsigned at = BYTES; at < BYTES + 8; at++)
            must(ops[i].bytes[at] == 0);
    }
    shared_process.close(b);
    close(fd);
    deadlines_close(&deadlines);
    uv_run(&loop, UV_RUN_DEFAULT);
    must(uv_loop_close(&loop) == 0);
    return 0;
}

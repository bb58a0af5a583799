/* Processes of roots that end, hang and lie: what each costs, and that the next process serves. */
/* Sanitizers: address */
#include "tests/unit/shared/shared_contract_rig.h"

#include "daemon/shared/process/process.h"

#include <dirent.h>
#include <signal.h>

#define BYTES 70000u /* more than what the event loop copies by itself */

static struct config_process process;

static const char *how; /* VERB:HOW */
/* How long the process that misbehaves has for its hello. Long, unless the test is about it: a busy machine starts
 * processes slowly. */
static unsigned hello_ms = CONTRACT_DEADLINE_MS;
#define HANG_MS 500 /* how long to wait for a process that hangs, once it is up */

static void begin(struct contract *c)
{
    char here[256];

    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    contract_directory_begin(c, "/tmp");
    cr_assert(getcwd(here, sizeof(here)));
    snprintf(process.command, sizeof(process.command),
             "%s/tests/integration/hostile_backend.py %s %s", here, c->directory, how);
    process.buffer_bytes = 1u << 20; /* each start makes all its pages */
    process.patience_ms = CONTRACT_DEADLINE_MS;
    process.pause_ms = 10;
    strcpy(c->target, CONFIG_PROCESS "hostile");
    c->process = &process;
    c->ops = &shared_process;
}

/* Turns the event loop until this is true. */
#define UNTIL(c, condition)                                                                        \
    do {                                                                                           \
        uv_update_time(&(c)->loop);                                                                \
        uv_timer_start(&(c)->deadline, contract_late_cb, CONTRACT_DEADLINE_MS, 0);                 \
        while (!(condition))                                                                       \
            uv_run(&(c)->loop, UV_RUN_ONCE);                                                       \
        uv_timer_stop(&(c)->deadline);                                                             \
    } while (0)

/* Pauses between starts pass. */
static void until_up(struct contract *c)
{
    uint64_t now, end_ns = uv_hrtime() + CONTRACT_DEADLINE_MS * 1000000ull;

    while (contract_check(c, false, &now) != 0) {
        cr_assert_lt(uv_hrtime(), end_ns);
        usleep(10000);
        uv_update_time(&c->loop);
    }
}

/* Each verb once. Files written before can be read, whatever happened meanwhile. */
static void serves(struct contract *c)
{
    struct shared_listing l;
    char name[BLOCK_FILE_NAME_CAP];

    until_up(c);
    cr_assert_eq(contract_read(c, 1, BYTES), 0);
    cr_assert_eq(contract_write(c, 2, BYTES), 0);
    cr_assert_eq(contract_read(c, 2, BYTES), 0);
    cr_assert_eq(contract_do(c, SHARED_FIND, 2, NULL, BYTES), 0);
    cr_assert_eq(contract_do(c, SHARED_TOUCH, 2, NULL, BYTES), 0);
    l = contract_list(c, contract_bucket(2, name));
    cr_assert_eq(l.n, 1);
    shared_listing_free(&l);
    cr_assert_eq(contract_do(c, SHARED_REMOVE, 2, NULL, BYTES), 0);
}

/* The first operation of that verb, on a file that is there, with a deadline that passes soon. */
static int first(struct contract *c, enum shared_verb verb)
{
    struct contract_op o = {.op = contract_of(verb, verb == SHARED_WRITE ? 3 : 1, NULL, BYTES)};

    o.op.data = contract_data(BYTES, 3);
    o.op.sync = verb == SHARED_CHECK;
    o.op.deadline_ms = uv_now(&c->loop) + 300;
    (void)contract_run(c, &o);
    free(o.op.data);
    if (o.status == 0 && verb == SHARED_LIST)
        shared_listing_free(&o.op.listing);
    return o.status;
}

static enum shared_verb verb_of(const char *text)
{
    for (int v = 0; v < WIRE_VERBS; v++) {
        const char *name = wire_verbs[v];

        if (strncmp(text, name, strlen(name)) == 0)
            return (enum shared_verb)v;
    }
    return SHARED_FIND; /* any: of hello */
}

static void write_one(struct contract *c)
{
    until_up(c);
    for (unsigned i = 0; contract_write(c, 1, BYTES) != 0; i++)
        cr_assert_lt(i, 10);
}

/* The path of the only file in the directory, or "". */
static void only_file(const struct contract *c, char path[512])
{
    DIR *d = opendir(c->directory);

    cr_assert(d);
    path[0] = '\0';
    for (struct dirent *e; (e = readdir(d)) != NULL;)
        if (e->d_name[0] != '.')
            snprintf(path, 512, "%s/%s", c->directory, e->d_name);
    closedir(d);
}

/* A process that behaved has written a file: the first case's, and for the others a copy. */
static void one_is_there(struct contract *c)
{
    char *words = process.command + strlen(process.command) - strlen(how), path[512];
    static uint64_t bytes;
    static uint8_t *data;
    static char name[256];

    contract_close(c);
    if (data) {
        snprintf(path, sizeof(path), "%s/%s", c->directory, name);
        contract_put(path, data, bytes);
    } else {
        strcpy(words, "x");
        contract_open(c);
        write_one(c);
        contract_close(c);
        only_file(c, path);
        data = contract_get(path, &bytes);
        cr_assert(data);
        snprintf(name, sizeof(name), "%s", strrchr(path, '/') + 1);
    }
    strcpy(words, how);
    process.patience_ms = hello_ms;
    contract_open(c);
}

/* The operation fails, the process is gone, the next one serves. */
static void ends_and_comes_back(struct contract *c)
{
    int status;

    one_is_there(c);
    status = first(c, verb_of(how));
    cr_assert_not(contract_answer(status), "%s: %d", how, status);
    UNTIL(c, c->b->ends > 0 && !c->b->run);
    serves(c);
    cr_assert_eq(c->b->ends, 1);
    cr_assert_eq(c->b->starts, 2);
}

static void hangs_and_comes_back(struct contract *c)
{
    int status;

    one_is_there(c);
    if (hello_ms == CONTRACT_DEADLINE_MS)
        until_up(c);
    c->b->config.patience_ms = HANG_MS;
    status = first(c, verb_of(how));
    cr_assert_not(contract_answer(status), "%s: %d", how, status);
    UNTIL(c, c->b->ends > 0); /* the next one may have been started at once */
    c->b->config.patience_ms = CONTRACT_DEADLINE_MS;
    serves(c);
}

/* The operation may have had its answer before. */
static void is_killed_and_comes_back(struct contract *c)
{
    one_is_there(c);
    (void)first(c, verb_of(how));
    UNTIL(c, c->b->kills == 1 && !c->b->run);
    serves(c);
}

/* A miss, and the process goes on. */
static void is_a_miss(struct contract *c)
{
    one_is_there(c);
    cr_assert_eq(first(c, SHARED_READ), -EBADMSG, "%s", how);
    cr_assert_eq(c->b->ends, 0);
}

static void each(const char *const *ways, unsigned n, void (*body)(struct contract *))
{
    for (unsigned i = 0; i < n; i++) {
        how = ways[i];
        contract_case(begin, contract_directory_end, body);
    }
}
#define EACH(ways, body) each(ways, sizeof(ways) / sizeof((ways)[0]), body)

Test(shared_process_hostile, it_dies)
{
    static const char *const ways[] = {"hello:die",  "find:die",  "read:die", "write:die",
                                       "remove:die", "touch:die", "list:die", "check:die",
                                       "read:abort", "find:close"};

    EACH(ways, ends_and_comes_back);
}

Test(shared_process_hostile, it_hangs)
{
    static const char *const ways[] = {"find:hang", "read:hang", "write:hang", "list:endless"};

    EACH(ways, hangs_and_comes_back);
}

Test(shared_process_hostile, its_hello_hangs)
{
    how = "hello:hang";
    hello_ms = HANG_MS;
    contract_case(begin, contract_directory_end, hangs_and_comes_back);
}

Test(shared_process_hostile, it_breaks_the_protocol)
{
    static const char *const ways[] = {
        "hello:garbage", "hello:version", "find:stranger", "find:far",   "find:exists",
        "read:files",    "find:no-bytes", "find:word",     "find:field", "find:garbage",
        "find:empty",    "find:deep",     "find:huge",     "find:flood"};

    EACH(ways, ends_and_comes_back);
}

Test(shared_process_hostile, it_answers_twice)
{
    static const char *const ways[] = {"find:twice", "read:twice", "write:twice"};

    EACH(ways, is_killed_and_comes_back);
}

Test(shared_process_hostile, its_bytes_are_not_those)
{
    static const char *const ways[] = {"read:length", "read:wrong", "read:early"};

    EACH(ways, is_a_miss);
}

/* Bytes that were verified do not change any more. */
static void scribbles(struct contract *c)
{
    one_is_there(c);
    for (unsigned i = 0; i < 200; i++) {
        int status = contract_read(c, 1, BYTES); /* compares each byte */

        cr_assert(status == 0 || status == -EBADMSG);
    }
}

Test(shared_process_hostile, it_writes_to_the_buffer_after_its_answer)
{
    how = "read:scribble";
    contract_case(begin, contract_directory_end, scribbles);
}

static unsigned descriptors(void)
{
    DIR *dir = opendir("/proc/self/fd");
    unsigned n = 0;

    cr_assert(dir);
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static void sends_descriptors(struct contract *c)
{
    unsigned before = descriptors();

    one_is_there(c);
    (void)first(c, SHARED_FIND);
    UNTIL(c, c->b->kills == 1 && !c->b->run);
    for (unsigned i = 0; !closing_done(c->b->closing_fds); i++) {
        cr_assert_lt(i, 1000);
        usleep(10000);
    }
    cr_assert_eq(descriptors(), before);
    serves(c);
}

Test(shared_process_hostile, its_descriptors_are_dropped)
{
    how = "find:fds";
    contract_case(begin, contract_directory_end, sends_descriptors);
}

static pid_t holder(struct contract *c)
{
    char path[300];
    long pid = 0;
    FILE *f;

    snprintf(path, sizeof(path), "%s/holder", c->directory);
    f = fopen(path, "r");
    cr_assert(f && fscanf(f, "%ld", &pid) == 1 && pid > 1);
    fclose(f);
    return (pid_t)pid;
}

/* The event loop goes on. The next process may have to wait until no process holds memory that the
 * last one wrote to. */
static void sends_what_lingers(struct contract *c)
{
    one_is_there(c);
    (void)first(c, SHARED_FIND);
    UNTIL(c, c->b->kills == 1 && !c->b->run);
    cr_assert_eq(kill(holder(c), SIGKILL), 0);
    serves(c);
}

Test(shared_process_hostile, a_descriptor_that_lingers_does_not_hold_up_the_loop)
{
    how = "find:linger";
    contract_case(begin, contract_directory_end, sends_what_lingers);
}

/* The child lives on with the socket and the old buffer. */
static void forks(struct contract *c)
{
    one_is_there(c);
    cr_assert_not(contract_answer(first(c, SHARED_READ)));
    UNTIL(c, !c->b->run);
    serves(c);
    for (unsigned i = 0; i < 50; i++)
        cr_assert_eq(contract_read(c, 1, BYTES), 0);
}

Test(shared_process_hostile, its_child_writes_to_a_buffer_that_nobody_reads)
{
    how = "read:fork";
    contract_case(begin, contract_directory_end, forks);
}

/* A request that is given up gives its memory back at once, though the process has not answered it. */
static void is_given_up(struct contract *c)
{
    struct contract_op o = {.op = contract_of(SHARED_READ, 1, malloc(BYTES), BYTES)};

    one_is_there(c);
    until_up(c);
    c->b->config.patience_ms = HANG_MS;
    o.op.deadline_ms = uv_now(&c->loop) + 2000;
    contract_start(c, &o);
    UNTIL(c, o.op.state == SHARED_OP_BUSY &&
                 ((struct process_call *)o.op.backend)->stage == CALL_ASKED);
    cr_assert(c->ops->cancel(c->b, &o.op));
    free(o.op.data);
    UNTIL(c, c->b->kills > 0 && !c->b->run);
    c->b->config.patience_ms = CONTRACT_DEADLINE_MS;
    serves(c);
}

Test(shared_process_hostile, what_is_given_up_is_free_at_once)
{
    how = "read:hang";
    contract_case(begin, contract_directory_end, is_given_up);
}

static void is_not_there(struct contract *c)
{
    uint64_t now;

    strcpy(process.command, "/nonexistent/backend");
    contract_close(c);
    contract_open(c);
    cr_assert_not(contract_answer(contract_check(c, false, &now)));
    cr_assert(strstr(c->ops->reason(c->b), "/nonexistent/backend can't be started"));
    UNTIL(c, !c->b->run);
    cr_assert_not(contract_answer(contract_check(c, false, &now)), "the pause is not over");
    cr_assert_eq(c->b->starts, 0);
}

Test(shared_process_hostile, its_command_is_not_there)
{
    how = "x";
    contract_case(begin, contract_directory_end, is_not_there);
}

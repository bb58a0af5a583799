/* A root that is a process: what every backend promises, through the real boundary, with the example in
 * Python and with the library in C. */
#include "tests/unit/share_contract.h"

#include "daemon/base/config_roots.h"

#include <signal.h>

static struct config_process process;

static int wipe_cb(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st, (void)type, (void)at;
    return remove(path);
}

/* program: below the folder that the tests run in. */
static void begin_with(struct contract *c, const char *program)
{
    char here[256];

    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    snprintf(c->folder, sizeof(c->folder), "/tmp/ucm-test-process-XXXXXX");
    cr_assert(mkdtemp(c->folder));
    cr_assert(getcwd(here, sizeof(here)));
    snprintf(process.command, sizeof(process.command), "%s/%s %s", here, program, c->folder);
    process.buffer_bytes = 64u << 20;
    strcpy(c->target, CONFIG_PROCESS "folder");
    c->process = &process;
    c->ops = &share_process;
}

static void python_begin(struct contract *c)
{
    begin_with(c, "backend/folder.py");
}

static void c_begin(struct contract *c)
{
    char program[256];
    const char *ucmd = getenv("UCMD"), *slash = ucmd ? strrchr(ucmd, '/') : NULL;

    /* Beside the daemon that is tested. */
    snprintf(program, sizeof(program), "%.*s/ucmd-backend-folder", slash ? (int)(slash - ucmd) : 5,
             slash ? ucmd : "build");
    begin_with(c, program);
}

static void end(struct contract *c)
{
    cr_assert_eq(nftw(c->folder, wipe_cb, 16, FTW_DEPTH | FTW_PHYS), 0);
}

SHARE_CONTRACT(share_process_python, python_begin, end)
SHARE_CONTRACT(share_process_c, c_begin, end)

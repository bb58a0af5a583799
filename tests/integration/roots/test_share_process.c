/* A root that is a process: what every backend promises, through the real boundary. */
#include "tests/unit/share/share_contract.h"

#include "daemon/config/roots.h"

#include <signal.h>

static struct config_process process;

static int wipe_cb(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st, (void)type, (void)at;
    return remove(path);
}

/* An absolute path of what the build made, beside the daemon that is tested. */
static void built(const char *program, char out[256])
{
    const char *ucmd = getenv("UCMD") ? getenv("UCMD") : "build/ucmd";
    char *real = realpath(ucmd, NULL);

    cr_assert(real, "%s", ucmd);
    cr_assert_lt(snprintf(out, 256, "%.*s/%s", (int)(strrchr(real, '/') - real), real, program),
                 256);
    free(real);
}

static void begin(struct contract *c)
{
    char program[256];

    built("ucmd-backend-folder", program);
    signal(SIGPIPE, SIG_IGN); /* as the daemon does */
    snprintf(c->folder, sizeof(c->folder), "/tmp/ucm-test-process-XXXXXX");
    cr_assert(mkdtemp(c->folder));
    snprintf(process.command, sizeof(process.command), "%s %s", program, c->folder);
    process.buffer_bytes = 20u << 20;
    strcpy(process.folder, c->folder); /* what it may write to, and no more */
    built("ucmd", c->launcher);
    strcpy(c->target, CONFIG_PROCESS "folder");
    c->process = &process;
    c->ops = &share_process;
}

static void end(struct contract *c)
{
    cr_assert_eq(nftw(c->folder, wipe_cb, 16, FTW_DEPTH | FTW_PHYS), 0);
}

SHARE_CONTRACT(share_process, begin, end)

/* pages DIR: writes manual pages and completion into a folder that is there. */
#include "client/pages/pages.h"

#include "client/ctl/ctl.h"
#ifdef UCM_HAVE_ZMQ
#include "client/events/events.h"
#endif
#include "client/bench/bench.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static FILE *begin(const char *folder, const char *before, const char *name, const char *after)
{
    char path[4096];
    FILE *out;

    snprintf(path, sizeof(path), "%s/%s%s%s", folder, before, name, after);
    out = fopen(path, "w");
    if (out == NULL) {
        fprintf(stderr, "pages: %s: %s\n", path, strerror(errno));
        exit(1);
    }
    return out;
}

static void end(FILE *out)
{
    if (ferror(out) || fclose(out) != 0) {
        fprintf(stderr, "pages: a page can't be written: %s\n", strerror(errno));
        exit(1);
    }
}

static void write_man(const char *folder, const struct program *p, const char *section,
                      const char *see_also)
{
    char after[8];
    FILE *out;

    snprintf(after, sizeof(after), ".%s", section);
    out = begin(folder, "", p->name, after);
    man_program(out, p, section, see_also);
    end(out);
}

static void write_completion(const char *folder, const struct program *p)
{
    FILE *out = begin(folder, "", p->name, ".bash");

    complete_bash(out, p);
    end(out);
    out = begin(folder, "_", p->name, "");
    complete_zsh(out, p);
    end(out);
    out = begin(folder, "", p->name, ".fish");
    complete_fish(out, p);
    end(out);
}

int main(int argc, char **argv)
{
    const char *folder = argv[1];
    FILE *out;

    if (argc != 2) {
        fprintf(stderr, "usage: pages DIR\n");
        return 2;
    }
    write_man(folder, &ctl_program, "1", "ucmd(8), ucmd.yaml(5), ucm-bench(1)");
    write_man(folder, &bench_program, "1", "ucmctl(1), ucmd(8)");
    write_man(folder, pages_daemon(), "8", "ucmd.yaml(5), ucmctl(1)");
    write_completion(folder, &ctl_program);
    write_completion(folder, &bench_program);
    write_completion(folder, pages_daemon());
#ifdef UCM_HAVE_ZMQ
    write_man(folder, &events_program, "1", "ucmd(8), ucmctl(1)");
    write_completion(folder, &events_program);
#endif
    out = begin(folder, "", "ucmd.yaml", ".5");
    man_config(out);
    end(out);
    return 0;
}

/* ucmd [--config FILE] [--set key=value]... [--check | --unit] [--version] */
#include "daemon/config/config.h"
#include "daemon/config/unit.h"
#include "daemon/server.h"
#include "daemon/shared/process/sandbox.h"
#include "daemon/usage.h"
#include "proto/build.h"
#include "proto/errors.h"

#include <errno.h>
#include <getopt.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { EXIT_USAGE = 2 };

static void usage_print(FILE *out)
{
    fprintf(out, "Usage: ucmd [OPTIONS]\n\n%s.\n\nOptions:\n", usage_summary);
    for (const struct usage_option *o = usage_options; o < usage_options + usage_option_count;
         o++) {
        int width =
            fprintf(out, "  --%s%s%s", o->name, o->value ? " " : "", o->value ? o->value : "");

        fprintf(out, "%*s%s\n", width < 20 ? 20 - width : 2, "", o->help);
    }
    fprintf(out, "\n%s", usage_help);
}

/* The table as getopt_long takes it. */
#define MAX_OPTIONS 16
static void options_table(struct option out[MAX_OPTIONS + 1])
{
    memset(out, 0, (MAX_OPTIONS + 1) * sizeof(*out));
    for (size_t i = 0; i < usage_option_count && i < MAX_OPTIONS; i++)
        out[i] =
            (struct option){.name = usage_options[i].name,
                            .has_arg = usage_options[i].value ? required_argument : no_argument,
                            .val = usage_options[i].letter};
}

struct options {
    struct server_sources from;
    char **sets; /* argc places */
    bool check, unit;
};

/* Reads --config first, wherever it is on the command line: each --set overrides the file. */
static int options_read(int argc, char **argv, struct options *o, struct config *c,
                        struct config_error *e)
{
    struct option names[MAX_OPTIONS + 1];
    int option;

    options_table(names);
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        switch (option) {
        case 'c':
            o->from.config.path = optarg;
            break;
        case 's':
            o->sets[o->from.config.n_sets++] = optarg;
            break;
        case 'k':
            o->check = true;
            break;
        case 'u':
            o->unit = true;
            break;
        case 'v':
            printf("ucmd " UCM_VERSION "\ncommit %s, %s\n", ucm_build_commit, ucm_build_options);
            exit(0);
        case 'h':
            usage_print(stdout);
            exit(0);
        default:
            usage_print(stderr);
            exit(EXIT_USAGE);
        }
    }
    if (optind < argc) {
        fprintf(stderr, "ucmd: \"%s\" is no option\n", argv[optind]);
        usage_print(stderr);
        exit(EXIT_USAGE);
    }
    o->from.config.sets = o->sets;
    return config_read_all(c, &o->from.config, e);
}

/* libuv reads the size of its pool once, from the environment. */
static int threads_set(unsigned n)
{
    char text[16];

    snprintf(text, sizeof(text), "%u", n);
    return setenv("UV_THREADPOOL_SIZE", text, 1);
}

/* As many descriptors as the hard limit allows: connections, files, workers' memory. */
static void descriptors_raise(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
            log_warn("main", "descriptors", "errno=%d", errno);
    }
}

static void warn_cb(const char *text)
{
    fprintf(stderr, "ucmd: warning: %s\n", text);
}

/* Fixed, or glibc raises both to multiples of the largest block ever freed, and the daemon keeps
 * the memory of its busiest moment. Above the largest frame: a buffer that is mapped and unmapped
 * for each request costs a long lookup a seventh of its time. */
static void heap_bound(void)
{
    if (mallopt(M_MMAP_THRESHOLD, 2 << 20) != 1 || mallopt(M_TRIM_THRESHOLD, 4 << 20) != 1)
        log_warn("main", "heap", "reason=\"%s\"", "mallopt refused a threshold");
}

/* Serves until the daemon stops. The exit status. */
static int serve(struct config *config, const struct server_sources *sources)
{
    struct ucm_error e = {.text = "no memory"};
    struct server *server;
    int status;

    log_set_level(config->log_level);
    signal(SIGPIPE, SIG_IGN);
    descriptors_raise();
    if (threads_set(config->nvme_threads) != 0 || server_new(config, sources, &server, &e) != 0) {
        fprintf(stderr, "ucmd: %s\n", e.text);
        return 1;
    }
    heap_bound(); /* what stays for good is mapped: the heap would clear it, which touches it */
    log_start();
    status = server_run(server);
    server_free(server);
    log_flush();
    return status;
}

int main(int argc, char **argv)
{
    struct options o = {.from = {.commit = ucm_build_commit, .config.environment = environ}};
    struct config config;
    struct config_error e;
    int status = 1;

    if (argc > 2 && strcmp(argv[1], PROCESS_SANDBOX) == 0)
        return process_sandbox_main(argv + 2);
    config_init(&config);
    o.sets = calloc((size_t)argc, sizeof(*o.sets));
    if (!o.sets)
        return 1;
    if (options_read(argc, argv, &o, &config, &e) != 0 ||
        (o.unit ? config_unit_print(&config, stdout, &e) : server_check(&config, warn_cb, &e)) !=
            0) {
        fprintf(stderr, "ucmd: %s\n", e.text);
    } else if (o.unit) {
        status = fflush(stdout) == 0 ? 0 : 1;
    } else if (o.check) {
        config_print(&config);
        status = 0;
    } else {
        status = serve(&config, &o.from);
    }
    config_free(&config);
    free(o.sets);
    return status;
}

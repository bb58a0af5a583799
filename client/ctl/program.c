#include "client/ctl/program.h"

#include "client/include/ucmclient.h"
#include "proto/units.h"

#include <assert.h>
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *name_;

static const struct arg_option own_options[] = {{.name = "help"}, {.name = "version"}};

const char *program_name(void)
{
    return name_ != NULL ? name_ : "ucm";
}

int program_fail(int code, const char *format, ...)
{
    va_list ap;

    fflush(stdout);
    fprintf(stderr, "%s: ", program_name());
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fputc('\n', stderr);
    return code;
}

volatile sig_atomic_t program_interrupted;

void program_interrupt(int number)
{
    (void)number;
    program_interrupted = 1;
}

const char *program_socket(const struct args *a)
{
    const char *path = args_text(a, "socket");

    if (path == NULL)
        path = getenv("UCM_SOCKET");
    return path != NULL && path[0] != '\0' ? path : UCM_DEFAULT_SOCKET;
}

/* ---- values ---- */

static char *bound_text(const struct arg_option *o, uint64_t bound, char buf[UNITS_TEXT_BYTES])
{
    if (o->kind == ARG_SIZE)
        return units_size_text(buf, bound);
    if (o->kind == ARG_SECONDS)
        return units_duration_text(buf, bound);
    snprintf(buf, UNITS_TEXT_BYTES, "%" PRIu64, bound);
    return buf;
}

/* A number without a unit counts seconds; others are durations. In milliseconds. */
static int parse_seconds(const char *text, uint64_t *ms, char why[UNITS_WHY_BYTES])
{
    char *end;
    double v = strtod(text, &end);

    if (text[0] < '0' || text[0] > '9' || *end != '\0')
        return units_parse_duration(text, ms, why);
    *ms = v < 9e15 ? (uint64_t)(v * 1000 + 0.5) : UINT64_MAX;
    return 0;
}

/* Finds the text among the words of "all|dram|nvme". */
static bool parse_choice(const char *choices, const char *text, uint64_t *number)
{
    size_t n = strlen(text);

    for (*number = 0; *choices != '\0'; ++*number) {
        size_t wide = strcspn(choices, "|");

        if (wide == n && memcmp(choices, text, n) == 0)
            return true;
        choices += wide + (choices[wide] == '|');
    }
    return false;
}

/* "all, dram or nvme" */
static void choice_sentence(const char *choices, char why[UNITS_WHY_BYTES])
{
    int at = snprintf(why, UNITS_WHY_BYTES, "wanted ");

    for (size_t wide; *choices != '\0' && at < UNITS_WHY_BYTES; choices += wide) {
        const char *after;

        wide = strcspn(choices, "|");
        after = choices[wide] == '\0' ? "" : strchr(choices + wide + 1, '|') ? ", " : " or ";
        at += snprintf(why + at, UNITS_WHY_BYTES - (size_t)at, "%.*s%s", (int)wide, choices, after);
        wide += choices[wide] == '|';
    }
}

/* What is wrong with the value, "" for nothing. */
static void parse_value(const struct arg_option *o, const char *text, struct arg_value *out,
                        char why[UNITS_WHY_BYTES])
{
    char min[UNITS_TEXT_BYTES], max[UNITS_TEXT_BYTES];
    uint64_t number = 0;
    int rc = 0;

    why[0] = '\0';
    if (o->kind == ARG_NUMBER)
        rc = units_parse_count(text, &number, why);
    else if (o->kind == ARG_SIZE)
        rc = units_parse_size(text, &number, why);
    else if (o->kind == ARG_SECONDS)
        rc = parse_seconds(text, &number, why);
    else if (o->kind == ARG_CHOICE && !parse_choice(o->value, text, &number))
        choice_sentence(o->value, why);
    if (rc == 0 && o->kind != ARG_TEXT && o->kind != ARG_CHOICE &&
        (number < o->min || number > o->max))
        snprintf(why, UNITS_WHY_BYTES, "wanted %s to %s", bound_text(o, o->min, min),
                 bound_text(o, o->max, max));
    out->text = text;
    out->number = number;
}

/* ---- options ---- */

static void args_add(struct args *a, const struct arg_option *options, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const struct arg_option *o = &options[i];
        char why[UNITS_WHY_BYTES] = "";

        assert(a->n_options < ARGS_MAX_OPTIONS);
        a->option[a->n_options] = o;
        if (o->fallback != NULL)
            parse_value(o, o->fallback, &a->value[a->n_options], why);
        assert(why[0] == '\0');
        a->n_options++;
    }
}

static size_t args_find(const struct args *a, const char *name)
{
    for (size_t i = 0; i < a->n_options; i++)
        if (strcmp(a->option[i]->name, name) == 0)
            return i;
    assert(!"an option that no table names");
    return 0;
}

bool args_given(const struct args *a, const char *name)
{
    return a->value[args_find(a, name)].given;
}

const char *args_text(const struct args *a, const char *name)
{
    return a->value[args_find(a, name)].text;
}

uint64_t args_number(const struct args *a, const char *name)
{
    return a->value[args_find(a, name)].number;
}

int program_usage_error(const struct args *a, const char *format, ...)
{
    va_list ap;

    fprintf(stderr, "%s: ", program_name());
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fprintf(stderr, "\nSee '%s %s%s--help'.\n", program_name(),
            a->command != NULL ? a->command : "", a->command != NULL ? " " : "");
    return PROGRAM_EXIT_USAGE;
}

/* getopt_long's number of the first option of the table; below lie its own. */
#define FIRST_OPTION 256

static int unknown_option(const struct args *a, const char *word)
{
    char letter[] = {'-', (char)optopt, '\0'};

    if (optopt != 0)
        word = letter;
    if (a->command != NULL)
        return program_usage_error(a, "unknown option '%s' for '%s'", word, a->command);
    return program_usage_error(a, "unknown option '%s'", word);
}

/* Takes what getopt_long found; word: as it was written. 0 or PROGRAM_EXIT_USAGE. */
static int take_option(struct args *a, int found, const char *word)
{
    int number = found == '?' || found == ':' ? optopt : found;
    char why[UNITS_WHY_BYTES] = "";
    const struct arg_option *option;
    struct arg_value *value;

    if (number == 'h')
        number = FIRST_OPTION + (int)args_find(a, "help");
    if (number < FIRST_OPTION)
        return unknown_option(a, word);
    option = a->option[number - FIRST_OPTION];
    value = &a->value[number - FIRST_OPTION];
    if (found == '?')
        return program_usage_error(a, "--%s takes no value", option->name);
    if (found == ':')
        return program_usage_error(a, "--%s wants a value: %s", option->name, option->value);
    if (option->kind != ARG_FLAG)
        parse_value(option, optarg, value, why);
    if (why[0] != '\0')
        return program_usage_error(a, "--%s %s: %s", option->name, optarg, why);
    value->given = true;
    return 0;
}

/* Parses options after argv[0] until the end or, with stop_at_word, until the first word. What they
 * leave are a's words. 0 or PROGRAM_EXIT_USAGE. */
static int args_parse(struct args *a, int argc, char **argv, bool stop_at_word)
{
    struct option table[ARGS_MAX_OPTIONS + 1] = {{0}};
    int found;

    for (size_t i = 0; i < a->n_options; i++)
        table[i] = (struct option){
            .name = a->option[i]->name,
            .has_arg = a->option[i]->kind == ARG_FLAG ? no_argument : required_argument,
            .val = FIRST_OPTION + (int)i,
        };
    optind = 0; /* getopt_long begins again */
    opterr = 0;
    while ((found = getopt_long(argc, argv, stop_at_word ? "+:h" : ":h", table, NULL)) != -1) {
        int rc = take_option(a, found, argv[optind - 1]);

        if (rc != 0)
            return rc;
    }
    a->word = argv + optind;
    a->n_words = argc - optind;
    return 0;
}

/* ---- help ---- */

static void print_options(const char *title, const struct arg_option *options, size_t n)
{
    if (n == 0)
        return;
    printf("\n%s:\n", title);
    for (size_t i = 0; i < n; i++) {
        const struct arg_option *o = &options[i];
        int width = printf("  --%s%s%s", o->name, o->value != NULL ? " " : "",
                           o->value != NULL ? o->value : "");

        printf("%*s%s", width < 26 ? 26 - width : 2, "", o->help);
        if (o->fallback != NULL)
            printf(" (default: %s)", o->fallback);
        printf("\n");
    }
}

static void print_command_help(const struct program *p, const struct program_command *c)
{
    printf("Usage: %s %s%s%s%s\n\n%s.\n", p->name, c->name, c->n_options > 0 ? " [OPTIONS]" : "",
           c->words[0] != '\0' ? " " : "", c->words, c->summary);
    if (c->help != NULL)
        printf("\n%s", c->help);
    print_options("Options", c->options, c->n_options);
    print_options("Options of every command", p->options, p->n_options);
}

static void print_group(const struct program_group *group)
{
    printf("\n%s:\n", group->title);
    for (size_t i = 0; i < group->n_commands; i++) {
        const struct program_command *c = &group->commands[i];
        int width = printf("  %s%s%s", c->name, c->words[0] != '\0' ? " " : "", c->words);

        printf("%*s%s\n", width < 26 ? 26 - width : 2, "", c->summary);
    }
}

static void print_help(const struct program *p)
{
    printf("Usage: %s [OPTIONS] COMMAND [...]\n\n%s.\n", p->name, p->summary);
    for (size_t i = 0; i < p->n_groups; i++)
        print_group(p->groups[i]);
    printf("%s  help [COMMAND]          Show this text, or that of a command\n",
           p->n_groups > 1 ? "\n" : "");
    print_options("Options", p->options, p->n_options);
    printf("  --help                  show this text; after a command, that command's\n"
           "  --version               show the version\n");
    if (p->help != NULL)
        printf("\n%s", p->help);
}

/* ---- running ---- */

static const struct program_command *find_command(const struct program *p, const char *name)
{
    for (size_t g = 0; g < p->n_groups; g++)
        for (size_t i = 0; i < p->groups[g]->n_commands; i++)
            if (strcmp(p->groups[g]->commands[i].name, name) == 0)
                return &p->groups[g]->commands[i];
    return NULL;
}

static int run_command(const struct program *p, struct args *a, const struct program_command *c,
                       int argc, char **argv)
{
    int rc;

    a->command = c->name;
    args_add(a, c->options, c->n_options);
    rc = args_parse(a, argc, argv, false);
    if (rc != 0)
        return rc;
    if (args_given(a, "help")) {
        print_command_help(p, c);
        return 0;
    }
    if (a->n_words < c->min_words)
        return program_usage_error(a, "'%s' wants %s", c->name, c->words);
    if (a->n_words > c->max_words)
        return program_usage_error(a, "'%s' does not take '%s'", c->name, a->word[c->max_words]);
    return c->run_cb(a);
}

static int dispatch(const struct program *p, int argc, char **argv, void *ctx)
{
    struct args a = {.ctx = ctx};
    const struct program_command *c;
    bool help;
    int rc;

    args_add(&a, p->options, p->n_options);
    args_add(&a, own_options, sizeof own_options / sizeof own_options[0]);
    rc = args_parse(&a, argc, argv, true);
    if (rc != 0)
        return rc;
    if (args_given(&a, "help")) {
        print_help(p);
        return 0;
    }
    if (args_given(&a, "version")) {
        printf("%s %s\ncommit %s, %s\n", p->name, p->version, p->commit, p->built_with);
        return 0;
    }
    if (a.n_words == 0)
        return program_usage_error(&a, "no command; the first word says what to do");
    help = strcmp(a.word[0], "help") == 0;
    if (help && a.n_words == 1) {
        print_help(p);
        return 0;
    }
    c = find_command(p, a.word[help]);
    if (c == NULL)
        return program_usage_error(&a, "unknown command '%s'", a.word[help]);
    if (!help)
        return run_command(p, &a, c, a.n_words, a.word);
    print_command_help(p, c);
    return 0;
}

int program_main(const struct program *p, int argc, char **argv, void *ctx)
{
    int rc;

    name_ = p->name;
    rc = dispatch(p, argc, argv, ctx);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "%s: the output could not be written: %s\n", p->name, strerror(errno));
        return rc != 0 ? rc : PROGRAM_EXIT_FAILED;
    }
    return rc;
}

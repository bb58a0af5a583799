#include "client/ctl/program.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *name_;

static const struct arg_option help_option = {.name = "help", .help = "show this text"};

const char *program_name(void)
{
    return name_ != NULL ? name_ : "ucm";
}

/* ---- values ---- */

struct unit {
    const char *name;
    double factor;
};

static const struct unit size_units[] = {
    {"", 1},        {"B", 1},         {"K", 1024},       {"KiB", 1024},
    {"M", 1048576}, {"MiB", 1048576}, {"G", 1073741824}, {"GiB", 1073741824},
    {"KB", 1e3},    {"MB", 1e6},      {"GB", 1e9},
};

static const struct unit time_units[] = {{"", 1000}, {"s", 1000}, {"ms", 1}, {"min", 60000}};

static bool parse_unit(const char *text, const struct unit *unit, size_t n_units, uint64_t *out)
{
    char *end;
    double v;

    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    v = strtod(text, &end);
    if (errno != 0)
        return false;
    for (size_t i = 0; i < n_units; i++) {
        if (strcmp(end, unit[i].name) == 0) {
            v *= unit[i].factor;
            if (!(v < 9e18))
                return false;
            *out = (uint64_t)(v + 0.5);
            return true;
        }
    }
    return false;
}

static bool parse_number(const char *text, uint64_t *out)
{
    char *end;
    unsigned long long v;

    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    v = strtoull(text, &end, 10);
    if (errno != 0 || *end != '\0')
        return false;
    *out = v;
    return true;
}

static bool parse_value(const struct arg_option *o, const char *text, struct arg_value *out)
{
    uint64_t number = 0;
    bool ok = true;

    if (o->kind == ARG_NUMBER)
        ok = parse_number(text, &number);
    else if (o->kind == ARG_SIZE)
        ok = parse_unit(text, size_units, sizeof size_units / sizeof size_units[0], &number);
    else if (o->kind == ARG_SECONDS)
        ok = parse_unit(text, time_units, sizeof time_units / sizeof time_units[0], &number);
    if (!ok || (o->kind != ARG_TEXT && (number < o->min || number > o->max)))
        return false;
    out->text = text;
    out->number = number;
    return true;
}

static const char *kind_text(enum arg_kind kind)
{
    switch (kind) {
    case ARG_NUMBER:
        return "a whole number";
    case ARG_SIZE:
        return "a size such as 64KiB";
    case ARG_SECONDS:
        return "a time such as 2, 1.5 or 200ms";
    default:
        return "a text";
    }
}

/* ---- options ---- */

static void args_add(struct args *a, const struct arg_option *options, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const struct arg_option *o = &options[i];
        bool ok;

        assert(a->n_options < ARGS_MAX_OPTIONS);
        a->option[a->n_options] = o;
        if (o->fallback != NULL) {
            ok = parse_value(o, o->fallback, &a->value[a->n_options]);
            assert(ok);
            (void)ok;
        }
        a->n_options++;
    }
}

static struct arg_value *args_find(struct args *a, const char *name, size_t n,
                                   const struct arg_option **option)
{
    for (size_t i = 0; i < a->n_options; i++) {
        if (strlen(a->option[i]->name) == n && strncmp(a->option[i]->name, name, n) == 0) {
            *option = a->option[i];
            return &a->value[i];
        }
    }
    return NULL;
}

static const struct arg_value *args_value(const struct args *a, const char *name)
{
    for (size_t i = 0; i < a->n_options; i++)
        if (strcmp(a->option[i]->name, name) == 0)
            return &a->value[i];
    assert(!"an option that no table names");
    return NULL;
}

bool args_flag(const struct args *a, const char *name)
{
    return args_value(a, name)->given;
}

bool args_given(const struct args *a, const char *name)
{
    return args_value(a, name)->given;
}

const char *args_text(const struct args *a, const char *name)
{
    return args_value(a, name)->text;
}

uint64_t args_number(const struct args *a, const char *name)
{
    return args_value(a, name)->number;
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

static int bad_value(const struct args *a, const struct arg_option *o, const char *text)
{
    if (o->kind == ARG_SECONDS)
        return program_usage_error(a, "--%s %s: wanted %s, %g to %g seconds", o->name, text,
                                   kind_text(o->kind), (double)o->min / 1000,
                                   (double)o->max / 1000);
    return program_usage_error(a, "--%s %s: wanted %s, %llu to %llu", o->name, text,
                               kind_text(o->kind), (unsigned long long)o->min,
                               (unsigned long long)o->max);
}

static int unknown_option(const struct args *a, const char *word)
{
    if (a->command != NULL)
        return program_usage_error(a, "unknown option '%s' for '%s'", word, a->command);
    return program_usage_error(a, "unknown option '%s'", word);
}

/* Parses the option at argv[*i], which may use argv[*i + 1], too. 0 or PROGRAM_EXIT_USAGE. */
static int parse_option(struct args *a, int argc, char **argv, int *i)
{
    const char *name = argv[*i] + 2, *equal = strchr(name, '=');
    const struct arg_option *option = NULL;
    struct arg_value *value;
    const char *text;

    if (strcmp(argv[*i], "-h") == 0)
        name = "help", equal = NULL;
    else if (argv[*i][1] != '-')
        return unknown_option(a, argv[*i]);
    value = args_find(a, name, equal != NULL ? (size_t)(equal - name) : strlen(name), &option);
    if (value == NULL)
        return unknown_option(a, argv[*i]);
    if (option->kind == ARG_FLAG) {
        if (equal != NULL)
            return program_usage_error(a, "--%s takes no value", option->name);
        value->given = true;
        return 0;
    }
    text = equal != NULL ? equal + 1 : *i + 1 < argc ? argv[++*i] : NULL;
    if (text == NULL)
        return program_usage_error(a, "--%s wants a value: %s", option->name, option->value);
    if (!parse_value(option, text, value))
        return bad_value(a, option, text);
    value->given = true;
    return 0;
}

/* Parses options until the end or, with stop_at_word, until the first word, and moves words to the
 * front of argv. *used: how much of argv it took. 0 or PROGRAM_EXIT_USAGE. */
static int args_parse(struct args *a, int argc, char **argv, bool stop_at_word, int *used)
{
    bool options = true;
    int i, rc;

    a->word = argv;
    a->n_words = 0;
    for (i = 0; i < argc; i++) {
        if (options && strcmp(argv[i], "--") == 0) {
            options = false;
        } else if (options && argv[i][0] == '-' && argv[i][1] != '\0') {
            rc = parse_option(a, argc, argv, &i);
            if (rc != 0)
                return rc;
        } else if (stop_at_word) {
            break;
        } else {
            argv[a->n_words++] = argv[i];
        }
    }
    *used = i;
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
            printf(" (%s)", o->fallback);
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

static void print_help(const struct program *p)
{
    printf("Usage: %s [OPTIONS] COMMAND [...]\n\n%s.\n\nCommands:\n", p->name, p->summary);
    for (size_t i = 0; i < p->n_commands; i++) {
        const struct program_command *c = &p->commands[i];
        int width = printf("  %s%s%s", c->name, c->words[0] != '\0' ? " " : "", c->words);

        printf("%*s%s\n", width < 26 ? 26 - width : 2, "", c->summary);
    }
    printf("  help [COMMAND]          show this text, or that of a command\n");
    print_options("Options", p->options, p->n_options);
    printf("  --help                  show this text; after a command, that command's\n"
           "  --version               show the version\n");
    if (p->help != NULL)
        printf("\n%s", p->help);
}

/* ---- running ---- */

static const struct program_command *find_command(const struct program *p, const char *name)
{
    for (size_t i = 0; i < p->n_commands; i++)
        if (strcmp(p->commands[i].name, name) == 0)
            return &p->commands[i];
    return NULL;
}

static int run_help(const struct program *p, struct args *a, int argc, char **argv)
{
    const struct program_command *c;

    if (argc == 0) {
        print_help(p);
        return 0;
    }
    c = find_command(p, argv[0]);
    if (c == NULL)
        return program_usage_error(a, "unknown command '%s'", argv[0]);
    print_command_help(p, c);
    return 0;
}

static int run_command(const struct program *p, struct args *a, const struct program_command *c,
                       int argc, char **argv)
{
    int rc, used;

    a->command = c->name;
    args_add(a, c->options, c->n_options);
    rc = args_parse(a, argc, argv, false, &used);
    if (rc != 0)
        return rc;
    if (args_flag(a, "help")) {
        print_command_help(p, c);
        return 0;
    }
    if (a->n_words < c->min_words)
        return program_usage_error(a, "'%s' wants %s", c->name, c->words);
    if (a->n_words > c->max_words)
        return program_usage_error(a, "'%s' does not take '%s'", c->name, a->word[c->max_words]);
    return c->run(a);
}

static int dispatch(const struct program *p, int argc, char **argv)
{
    static const struct arg_option version_option = {.name = "version", .help = "the version"};
    struct args a = {.n_options = 0};
    const struct program_command *c;
    int rc, used;

    args_add(&a, p->options, p->n_options);
    args_add(&a, &help_option, 1);
    args_add(&a, &version_option, 1);
    rc = args_parse(&a, argc, argv, true, &used);
    if (rc != 0)
        return rc;
    if (args_flag(&a, "help")) {
        print_help(p);
        return 0;
    }
    if (args_flag(&a, "version")) {
        printf("%s %s\n", p->name, p->version);
        return 0;
    }
    if (used == argc)
        return program_usage_error(&a, "no command; the first word says what to do");
    if (strcmp(argv[used], "help") == 0)
        return run_help(p, &a, argc - used - 1, argv + used + 1);
    c = find_command(p, argv[used]);
    if (c == NULL)
        return program_usage_error(&a, "unknown command '%s'", argv[used]);
    return run_command(p, &a, c, argc - used - 1, argv + used + 1);
}

int program_main(const struct program *p, int argc, char **argv)
{
    int rc;

    name_ = p->name;
    rc = dispatch(p, argc - 1, argv + 1);
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "%s: the output could not be written: %s\n", p->name, strerror(errno));
        return rc != 0 ? rc : PROGRAM_EXIT_FAILED;
    }
    return rc;
}

/* A command-line program from tables: a program declares its options and commands once, and this
 * parses the command line and prints usage and `--help`, of which pages.py makes manual pages and
 * completion. For ucmctl, ucm-bench and ucmevents.
 *
 * Promise: before a command runs, an unknown option, a value out of bounds or a missing word is
 * refused with a sentence that names it. Options may come before or after the command;
 * "--name=value" and "--name value" are the same; "--" ends the options.
 * For main only. Nothing is allocated: words and texts point into argv. */
#ifndef UCM_CTL_PROGRAM_H
#define UCM_CTL_PROGRAM_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ARGS_MAX_OPTIONS 32

enum arg_kind {
    ARG_FLAG,
    ARG_TEXT,
    ARG_CHOICE,  /* one of the words in `value`, "all|dram|nvme"; its number is the word's place */
    ARG_NUMBER,  /* a whole number between min and max */
    ARG_SIZE,    /* bytes as the configuration takes them, "64KiB"; between min and max */
    ARG_SECONDS, /* "1.5", or with a unit "200ms", "2min"; min and max in milliseconds */
};

struct arg_option {
    const char *name; /* without its dashes */
    enum arg_kind kind;
    const char *value; /* the value's name in usage; NULL for a flag */
    const char *help;
    const char *fallback; /* the value if the option is not given; NULL: none */
    uint64_t min, max;
};

struct arg_value {
    bool given; /* on the command line */
    const char *text;
    uint64_t number; /* ARG_SECONDS: milliseconds */
};

struct args {
    const struct arg_option *option[ARGS_MAX_OPTIONS];
    struct arg_value value[ARGS_MAX_OPTIONS];
    size_t n_options;
    char **word; /* neither options nor the command */
    int n_words;
    const char *command;
    void *ctx; /* main's own */
};

/* The name must be one of the program's or the command's options. */
bool args_given(const struct args *a, const char *name);       /* on the command line */
const char *args_text(const struct args *a, const char *name); /* NULL when there is none */
uint64_t args_number(const struct args *a, const char *name);  /* 0 when there is none */

struct program_command {
    const char *name;
    const char *words;   /* for usage, after the name: "NS [KEY...]" */
    const char *summary; /* one line */
    const char *help;    /* the rest of `COMMAND --help`: details, examples */
    const struct arg_option *options;
    size_t n_options;
    int min_words, max_words;
    int (*run_cb)(const struct args *a); /* the exit status */
};

/* Commands that --help shows together. */
struct program_group {
    const char *title;
    const struct program_command *commands;
    size_t n_commands;
};

struct program {
    const char *name, *version, *summary;
    const char *commit, *built_with; /* for --version */
    const char *help;                /* the end of `--help`: exit status, examples */
    const struct arg_option *options;
    size_t n_options;
    const struct program_group *const *groups;
    size_t n_groups;
};

/* The fields of a table and its length. */
#define PROGRAM_COUNT(table) (sizeof(table) / sizeof((table)[0]))
#define PROGRAM_OPTIONS(table) .options = (table), .n_options = PROGRAM_COUNT(table)

#define PROGRAM_EXIT_FAILED 1
#define PROGRAM_EXIT_USAGE 2

/* Parses, runs one command, which finds ctx in its args, and returns the program's exit status. */
int program_main(const struct program *p, int argc, char **argv, void *ctx);
/* For what only a command can check: prints "NAME: sentence" and where to find help. Returns
 * PROGRAM_EXIT_USAGE. */
int program_usage_error(const struct args *a, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* The running program's name. */
const char *program_name(void);
/* Prints "NAME: sentence" and returns `code`. */
int program_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Becomes the Python program `name`, which gets every option that has a value, numbers in digits, and the words: it lies
 * next to this program, or in ../libexec/ucmd. Returns an exit status if it can't. */
int program_script(const struct args *a, const char *name);
/* A handler of signals: sets the flag that ends a command which runs until it is stopped. */
void program_interrupt(int number);
extern volatile sig_atomic_t program_interrupted;
/* The path of the daemon's socket: --socket, else $UCM_SOCKET, else the default. */
const char *program_socket(const struct args *a);

#endif

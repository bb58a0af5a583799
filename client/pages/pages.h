/* Manual pages and shell completion, written while building from the tables that --help prints: struct
 * program of ucmctl and ucm-bench, the daemon's options and its configuration keys. What is in a
 * table is in the page; nobody edits the pages.
 *
 * Above all rooms: it reads client/ctl, client/bench and daemon/base, and nothing includes it. Nothing
 * of it is installed but its output. One thread. */
#ifndef UCM_PAGES_PAGES_H
#define UCM_PAGES_PAGES_H

#include "client/ctl/program.h"

#include <stdio.h>

/* ---- manual pages ---- */

/* section: "1", "8". see_also: "ucmctl(1), ucmd(8)". */
void man_program(FILE *out, const struct program *p, const char *section, const char *see_also);
/* ucmd.yaml(5), from the table of configuration keys. */
void man_config(FILE *out);

/* ---- completion ---- */

void complete_bash(FILE *out, const struct program *p);
void complete_zsh(FILE *out, const struct program *p);
void complete_fish(FILE *out, const struct program *p);

/* What completes a word, or an option's value. */
enum complete_kind {
    COMPLETE_NOTHING, /* a number, a key: nothing is known */
    COMPLETE_WORDS,   /* `words` */
    COMPLETE_FILES,
    COMPLETE_FOLDERS,
    COMPLETE_SOURCE, /* the first column of what the program prints for `words` */
};

struct complete_value {
    enum complete_kind kind;
    char words[4096]; /* separated by spaces */
    char name[64];    /* as usage calls it */
    bool repeats;     /* the last of a command's words: all that follow are like it */
};

/* Of an option that takes a value. */
void complete_option(const struct program *p, const struct arg_option *o,
                     struct complete_value *out);
/* Of the command's at-th word, from 0. false: it takes none there. */
bool complete_word(const struct program *p, const struct program_command *c, unsigned at,
                   struct complete_value *out);
/* Runs `each_cb` for each command of the program. */
void complete_commands(const struct program *p,
                       void (*each_cb)(const struct program_command *c, void *ctx), void *ctx);

/* ---- roff, for the macros of man(7) ---- */

/* date: none, so that the same tree gives the same page. */
void roff_begin(FILE *out, const char *name, const char *section, const char *title);
void roff_section(FILE *out, const char *title); /* in capitals */
/* A line of text: nothing in it is taken for roff. */
void roff_line(FILE *out, const char *text);
/* The text without an end of the line, for use within one. */
void roff_text(FILE *out, const char *text);
/* Text as --help has it: an empty line begins a paragraph, and lines that begin with two spaces
 * stay as they are. sections: a line that ends with ':' becomes a heading. */
void roff_help(FILE *out, const char *text, bool sections);
/* Usage: words in capitals are italic. */
void roff_usage(FILE *out, const char *words);

/* ---- the daemon's options, as a program without commands ---- */

const struct program *pages_daemon(void);
/* Whether the option is ucmd's --set; then the names of all keys with '=', separated by '|'. */
bool pages_config_keys(const struct program *p, const struct arg_option *o, const char **words);

#endif

/* Completion for fish. A function finds the command and how many words follow it; each line below it
 * says where it holds. */
#include "client/pages/pages.h"

#include <string.h>

struct writer {
    FILE *out;
    const struct program *p;
};

static void quoted(FILE *out, const char *text)
{
    fputc('\'', out);
    for (; *text != '\0'; text++) {
        if (*text == '\'' || *text == '\\')
            fputc('\\', out);
        fputc(*text, out);
    }
    fputc('\'', out);
}

/* What follows the conditions; an option's value is required. */
static void value(struct writer *w, const struct complete_value *v, bool option)
{
    if (option)
        fputs(v->kind == COMPLETE_FILES || v->kind == COMPLETE_FOLDERS ? " -r" : " -x", w->out);
    if (v->kind == COMPLETE_FILES)
        fputs(" -F", w->out);
    else if (v->kind == COMPLETE_FOLDERS)
        fputs(" -a '(__fish_complete_directories)'", w->out);
    else if (v->kind == COMPLETE_WORDS)
        fprintf(w->out, " -a '%s'", v->words);
    else if (v->kind == COMPLETE_SOURCE)
        fprintf(w->out, " -a '(__%s_run %s)'", w->p->name, v->words);
}

static void options(struct writer *w, const char *command, const struct arg_option *o, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fprintf(w->out, "complete -c %s", w->p->name);
        if (command != NULL)
            fprintf(w->out, " -n '__%s_at %s'", w->p->name, command);
        fprintf(w->out, " -l %s -d ", o[i].name);
        quoted(w->out, o[i].help);
        if (o[i].kind != ARG_FLAG) {
            struct complete_value v;

            complete_option(w->p, &o[i], &v);
            value(w, &v, true);
        }
        fputc('\n', w->out);
    }
}

static void command_cb(const struct program_command *c, void *ctx)
{
    struct writer *w = ctx;
    struct complete_value v;

    fprintf(w->out, "\ncomplete -c %s -n '__%s_at \"\"' -a %s -d ", w->p->name, w->p->name,
            c->name);
    quoted(w->out, c->summary);
    fprintf(w->out, "\ncomplete -c %s -n '__%s_at help' -a %s\n", w->p->name, w->p->name, c->name);
    options(w, c->name, c->options, c->n_options);
    for (unsigned at = 0; complete_word(w->p, c, at, &v); at++) {
        if (v.kind == COMPLETE_NOTHING)
            continue;
        fprintf(w->out, "complete -c %s -n '__%s_at %s %u%s'", w->p->name, w->p->name, c->name, at,
                v.repeats ? " more" : "");
        value(w, &v, false);
        fputc('\n', w->out);
    }
}

static void valued(struct writer *w, const struct arg_option *o, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (o[i].kind != ARG_FLAG)
            fprintf(w->out, " --%s", o[i].name);
}

static void valued_cb(const struct program_command *c, void *ctx)
{
    valued(ctx, c->options, c->n_options);
}

/* @ is the program's name. */
static void template(struct writer *w, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '@')
            fputs(w->p->name, w->out);
        else
            fputc(*text, w->out);
    }
}

static const char at_begin[] =
    "# COMMAND [N [more]]: whether the line has this command and N words (or more) after it.\n"
    "function __@_at\n"
    "    set -l command ''\n"
    "    set -l n 0\n"
    "    set -l skip 0\n"
    "    for word in (commandline -opc)[2..-1]\n"
    "        if test $skip = 1\n"
    "            set skip 0\n"
    "            continue\n"
    "        end\n"
    "        switch $word\n"
    "            case";
static const char at_end[] =
    "\n"
    "                set skip 1\n"
    "            case '-*'\n"
    "            case '*'\n"
    "                if test -z \"$command\"\n"
    "                    set command $word\n"
    "                else\n"
    "                    set n (math $n + 1)\n"
    "                end\n"
    "        end\n"
    "    end\n"
    "    test \"$command\" = \"$argv[1]\"; or return 1\n"
    "    test (count $argv) -lt 2; and return 0\n"
    "    test $n -eq $argv[2]; and return 0\n"
    "    test (count $argv) -gt 2 -a $n -gt $argv[2]\n"
    "end\n"
    "\n"
    "# The first column of what the program prints, asked with the line's own options.\n"
    "function __@_run\n"
    "    set -l words (commandline -opc)\n"
    "    set -l given\n"
    "    for i in (seq 2 (math (count $words) - 1))\n"
    "        if contains -- $words[$i]";
static const char run_end[] = "\n"
                              "            set -a given $words[$i] $words[(math $i + 1)]\n"
                              "        end\n"
                              "    end\n"
                              "    $words[1] $given $argv 2>/dev/null | awk 'NR > 1 {print $1}'\n"
                              "end\n"
                              "\n";

void complete_fish(FILE *out, const struct program *p)
{
    struct writer w = {out, p};

    fprintf(out, "# Completion of %s for fish. Made by `make` from the tables behind --help.\n",
            p->name);
    if (p->n_groups > 0) {
        template(&w, at_begin);
        valued(&w, p->options, p->n_options);
        complete_commands(p, valued_cb, &w);
        template(&w, at_end);
        valued(&w, p->options, p->n_options);
        template(&w, run_end);
    }
    fprintf(out, "complete -c %s -f\n", p->name);
    options(&w, NULL, p->options, p->n_options);
    fprintf(out, "complete -c %s -l help -d 'show what it can do'\n", p->name);
    fprintf(out, "complete -c %s -l version -d 'show the version'\n", p->name);
    complete_commands(p, command_cb, &w);
    if (p->n_groups > 0)
        fprintf(out, "\ncomplete -c %s -n '__%s_at \"\"' -a help -d 'Show what a command can do'\n",
                p->name, p->name);
}

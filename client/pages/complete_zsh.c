/* Completion for zsh, by _arguments. */
#include "client/pages/pages.h"

#include <string.h>

struct writer {
    FILE *out;
    const struct program *p;
};

/* In single quotes, where also these end a part of what _arguments reads. */
static void quoted(FILE *out, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '\'')
            fputs("'\\'", out);
        else if (strchr("[]:\\", *text) != NULL)
            fputc('\\', out);
        fputc(*text, out);
    }
}

static void action(FILE *out, const struct complete_value *v)
{
    static const char *const kinds[] = {"", NULL, "_files", "_files -/", NULL};

    if (v->kind == COMPLETE_WORDS && strchr(v->words, '=') != NULL)
        fprintf(out, "{compadd -S \"\" -- %s}", v->words);
    else if (v->kind == COMPLETE_WORDS)
        fprintf(out, "(%s)", v->words);
    else if (v->kind == COMPLETE_SOURCE)
        fprintf(out,
                "{compadd -- ${(f)\"$($program $given %s 2>/dev/null | awk '\\''NR > 1 {print "
                "$1}'\\'')\"}}",
                v->words);
    else
        fputs(kinds[v->kind], out);
}

static void options(struct writer *w, const char *indent, const struct arg_option *o, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        fprintf(w->out, "%s'%s--%s%s[", indent, o[i].kind == ARG_FLAG ? "" : "*", o[i].name,
                o[i].kind == ARG_FLAG ? "" : "=");
        quoted(w->out, o[i].help);
        fputc(']', w->out);
        if (o[i].kind != ARG_FLAG) {
            struct complete_value v;

            complete_option(w->p, &o[i], &v);
            fputc(':', w->out);
            quoted(w->out, v.name);
            fputc(':', w->out);
            action(w->out, &v);
        }
        fputs("'\n", w->out);
    }
}

static void command_cb(const struct program_command *c, void *ctx)
{
    struct writer *w = ctx;
    struct complete_value v;

    fprintf(w->out, "    %s)\n        more=(\n", c->name);
    options(w, "            ", c->options, c->n_options);
    for (unsigned at = 0; complete_word(w->p, c, at, &v); at++) {
        if (v.repeats)
            fprintf(w->out, "            '*:");
        else
            fprintf(w->out, "            '%u:", at + 1);
        quoted(w->out, v.name);
        fputc(':', w->out);
        action(w->out, &v);
        fputs("'\n", w->out);
    }
    fputs("        ) ;;\n", w->out);
}

static void describe_cb(const struct program_command *c, void *ctx)
{
    struct writer *w = ctx;

    fprintf(w->out, "        '%s:", c->name);
    quoted(w->out, c->summary);
    fputs("'\n", w->out);
}

static const char commands_begin[] =
    "    )\n"
    "    _arguments -C $common '1:command:->command' '*::argument:->argument' && return 0\n"
    "    for name in $valued; do\n"
    "        [[ -n ${opt_args[$name]} ]] && given+=($name ${opt_args[$name]})\n"
    "    done\n"
    "    if [[ $state == command ]]; then\n"
    "        _describe command commands\n"
    "        return\n"
    "    fi\n"
    "    case $words[1] in\n";

static const char commands_end[] = "    esac\n"
                                   "    _arguments $common $more\n";

void complete_zsh(FILE *out, const struct program *p)
{
    struct writer w = {out, p};

    fprintf(out, "#compdef %s\n# Made by `make` from the tables behind --help.\n\n", p->name);
    fprintf(out,
            "_%s()\n{\n"
            "    local curcontext=$curcontext state name program=$words[1]\n"
            "    local -A opt_args\n"
            "    local -a line common more given valued commands\n",
            p->name);
    fprintf(out, "    common=(\n");
    options(&w, "        ", p->options, p->n_options);
    fprintf(out, "        '--help[show what it can do]'\n        '--version[show the version]'\n");
    if (p->n_groups == 0) {
        fprintf(out, "    )\n    _arguments $common\n}\n\n_%s\n", p->name);
        return;
    }
    fprintf(out, "    )\n    valued=(");
    for (size_t i = 0; i < p->n_options; i++)
        if (p->options[i].kind != ARG_FLAG)
            fprintf(out, " --%s", p->options[i].name);
    fprintf(out, ")\n    commands=(\n");
    complete_commands(p, describe_cb, &w);
    fprintf(out, "        'help:Show what a command can do'\n");
    fputs(commands_begin, out);
    complete_commands(p, command_cb, &w);
    fprintf(out, "    help)\n        _describe command commands\n        return ;;\n");
    fputs(commands_end, out);
    fprintf(out, "}\n\n_%s \"$@\"\n", p->name);
}

/* Completion for bash: functions that answer what an option or a word may be, from the tables, and one
 * that walks the line. Works without the package bash-completion. */
#include "client/pages/pages.h"

#include <ctype.h>
#include <string.h>

struct writer {
    FILE *out;
    const struct program *p;
    char id[64]; /* the program's name, for names of functions */
};

static void value(FILE *out, const struct complete_value *v)
{
    static const char *const kinds[] = {"none", NULL, "files", "folders", NULL};

    if (v->kind == COMPLETE_WORDS)
        fprintf(out, "echo '%s'", v->words);
    else if (v->kind == COMPLETE_SOURCE)
        fprintf(out, "echo '@run %s'", v->words);
    else
        fprintf(out, "echo '@%s'", kinds[v->kind]);
}

static void names(FILE *out, const struct arg_option *o, size_t n)
{
    for (size_t i = 0; i < n; i++)
        fprintf(out, " --%s", o[i].name);
}

static void options_cb(const struct program_command *c, void *ctx)
{
    struct writer *w = ctx;

    if (c->n_options == 0)
        return;
    fprintf(w->out, "    %s) echo '", c->name);
    names(w->out, c->options, c->n_options);
    fprintf(w->out, "' ;;\n");
}

static void values(struct writer *w, const char *command, const struct arg_option *o, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        struct complete_value v;

        if (o[i].kind == ARG_FLAG)
            continue;
        complete_option(w->p, &o[i], &v);
        fprintf(w->out, "    %s:--%s) ", command, o[i].name);
        value(w->out, &v);
        fprintf(w->out, " ;;\n");
    }
}

static void values_cb(const struct program_command *c, void *ctx)
{
    values(ctx, c->name, c->options, c->n_options);
}

static void words_cb(const struct program_command *c, void *ctx)
{
    struct writer *w = ctx;
    struct complete_value v;

    for (unsigned at = 0; complete_word(w->p, c, at, &v); at++) {
        fprintf(w->out, v.repeats ? "    %s:*) " : "    %s:%u) ", c->name, at);
        value(w->out, &v);
        fprintf(w->out, " ;;\n");
    }
}

static void name_cb(const struct program_command *c, void *ctx)
{
    fprintf(((struct writer *)ctx)->out, " %s", c->name);
}

static void function(struct writer *w, const char *what, const char *argument)
{
    fprintf(w->out, "_%s_%s()\n{\n    case %s in\n", w->id, what, argument);
}

static const char end_function[] = "    *) return 1 ;;\n    esac\n}\n\n";

/* The walk, with @ for the program's id. */
static const char walk[] =
    "_@()\n"
    "{\n"
    "    local cur=${COMP_WORDS[COMP_CWORD]} word option='' command='' may='' i n=0\n"
    "    local -a given=()\n"
    "    for ((i = 1; i < COMP_CWORD; i++)); do\n"
    "        word=${COMP_WORDS[i]}\n"
    "        if [[ $word == = ]]; then\n"
    "            continue\n"
    "        elif [[ -n $option ]]; then\n"
    "            _@_value \":$option\" >/dev/null && given+=(\"$option\" \"$word\")\n"
    "            option=\n"
    "        elif [[ $word == -* ]]; then\n"
    "            if _@_value \"$command:$word\" >/dev/null || _@_value \":$word\" >/dev/null; "
    "then\n"
    "                option=$word\n"
    "            fi\n"
    "        elif [[ -z $command ]]; then\n"
    "            command=$word\n"
    "        else\n"
    "            ((n++))\n"
    "        fi\n"
    "    done\n"
    "    [[ $cur == = ]] && cur=\n"
    "    if [[ -n $option ]]; then\n"
    "        may=$(_@_value \"$command:$option\" || _@_value \":$option\")\n"
    "    elif [[ $cur == -* ]]; then\n"
    "        may=\"$(_@_options \"$command\") $(_@_options '')\"\n"
    "    elif [[ -z $command || $command == help ]]; then\n"
    "        may=$(_@_commands)\n"
    "    else\n"
    "        may=$(_@_word \"$command:$n\")\n"
    "    fi\n"
    "    case $may in\n"
    "    @files) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- \"$cur\") ;;\n"
    "    @folders) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- \"$cur\") ;;\n"
    "    @run*)\n"
    "        # shellcheck disable=SC2086\n"
    "        may=$(\"${COMP_WORDS[0]}\" \"${given[@]}\" ${may#@run} 2>/dev/null |\n"
    "            awk 'NR > 1 {print $1}')\n"
    "        mapfile -t COMPREPLY < <(compgen -W \"$may\" -- \"$cur\") ;;\n"
    "    @none | '') COMPREPLY=() ;;\n"
    "    *)\n"
    "        mapfile -t COMPREPLY < <(compgen -W \"$may\" -- \"$cur\")\n"
    "        [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace ;;\n"
    "    esac\n"
    "    return 0\n"
    "}\n"
    "complete -F _@ ";

static void print_walk(const struct writer *w)
{
    for (const char *p = walk; *p != '\0'; p++) {
        if (*p == '@' && p > walk && p[-1] == '_' && (p[1] == '_' || p[1] == '(' || p[1] == ' '))
            fputs(w->id, w->out);
        else
            fputc(*p, w->out);
    }
}

void complete_bash(FILE *out, const struct program *p)
{
    struct writer w = {.out = out, .p = p};

    snprintf(w.id, sizeof(w.id), "%s", p->name);
    for (char *c = w.id; *c != '\0'; c++)
        if (!isalnum((unsigned char)*c))
            *c = '_';
    fprintf(out, "# Completion of %s for bash. Made by `make` from the tables behind --help.\n\n",
            p->name);
    function(&w, "options", "$1");
    fprintf(out, "    '') echo '");
    names(out, p->options, p->n_options);
    fprintf(out, " --help --version' ;;\n");
    complete_commands(p, options_cb, &w);
    fputs(end_function, out);
    function(&w, "value", "$1");
    values(&w, "", p->options, p->n_options);
    complete_commands(p, values_cb, &w);
    fputs(end_function, out);
    function(&w, "word", "$1");
    complete_commands(p, words_cb, &w);
    fputs(end_function, out);
    fprintf(out, "_%s_commands()\n{\n    echo '", w.id);
    if (p->n_groups > 0) {
        complete_commands(p, name_cb, &w);
        fputs(" help", out);
    }
    fprintf(out, "'\n}\n\n");
    print_walk(&w);
    fprintf(out, "%s\n", p->name);
}

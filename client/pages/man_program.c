/* The manual page of a program. */
#include "client/pages/pages.h"

#include <ctype.h>
#include <string.h>

static void options(FILE *out, const struct arg_option *o, size_t n)
{
    for (; n > 0; n--, o++) {
        fprintf(out, ".TP\n\\fB\\-\\-");
        for (const char *p = o->name; *p != '\0'; p++)
            fputs(*p == '-' ? "\\-" : (char[]){*p, '\0'}, out);
        fputs("\\fR", out);
        if (o->value != NULL) {
            fputc(' ', out);
            roff_usage(out, o->value);
        }
        fputc('\n', out);
        roff_text(out, o->help);
        if (o->fallback != NULL) {
            fputs(" (default: ", out);
            roff_text(out, o->fallback);
            fputc(')', out);
        }
        fputc('\n', out);
    }
}

static void command(FILE *out, const struct program *p, const struct program_command *c)
{
    fprintf(out, ".SS ");
    roff_text(out, p->name);
    fprintf(out, " %s", c->name);
    if (c->n_options > 0)
        fprintf(out, " \\fR[\\fIOPTIONS\\fR]");
    if (c->words[0] != '\0') {
        fprintf(out, " \\fR");
        roff_usage(out, c->words);
    }
    fputc('\n', out);
    roff_text(out, c->summary);
    fputs(".\n", out);
    if (c->help != NULL) {
        fputs(".PP\n", out);
        roff_help(out, c->help, false);
    }
    options(out, c->options, c->n_options);
}

static void name(FILE *out, const struct program *p)
{
    roff_section(out, "Name");
    roff_text(out, p->name);
    fprintf(out, " \\- %c", tolower((unsigned char)p->summary[0]));
    roff_line(out, p->summary + 1);
}

void man_program(FILE *out, const struct program *p, const char *section, const char *see_also)
{
    roff_begin(out, p->name, section,
               section[0] == '8' ? "System Administration" : "User Commands");
    name(out, p);
    roff_section(out, "Synopsis");
    fputs(".B ", out);
    roff_line(out, p->name);
    fputs(p->n_groups > 0 ? "[\\fIOPTIONS\\fR] \\fICOMMAND\\fR [...]\n" : "[\\fIOPTIONS\\fR]\n",
          out);
    roff_section(out, p->n_groups > 0 ? "Options of every command" : "Options");
    options(out, p->options, p->n_options);
    options(out,
            (const struct arg_option[]){
                {.name = "help", .help = "Show what the program, or a command, can do."},
                {.name = "version", .help = "Show the version."}},
            2);
    for (size_t g = 0; g < p->n_groups; g++) {
        roff_section(out, p->groups[g]->title);
        for (size_t i = 0; i < p->groups[g]->n_commands; i++)
            command(out, p, &p->groups[g]->commands[i]);
    }
    if (p->help != NULL)
        roff_help(out, p->help, true);
    roff_section(out, "See also");
    roff_line(out, see_also);
}

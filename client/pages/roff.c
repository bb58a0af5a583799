#include "client/pages/pages.h"

#include <ctype.h>
#include <string.h>

/* fixed: an example or an option, whose '-' is typed; otherwise one between letters is a hyphen. */
static void text(FILE *out, const char *p, size_t n, bool fixed)
{
    bool typed = fixed;

    for (size_t i = 0; i < n; i++) {
        bool start = i == 0 || strchr(" ('\"/=[|", p[i - 1]) != NULL;

        if (start)
            typed = fixed || p[i] == '-';
        switch (p[i]) {
        case '\\':
            fputs("\\e", out);
            break;
        case '-':
            fputs(typed || !isalnum((unsigned char)p[i + 1]) ? "\\-" : "-", out);
            break;
        case '\'':
            fputs("\\(aq", out);
            break;
        case '"':
            fputs("\\(dq", out);
            break;
        case '`':
            fputs("\\(ga", out);
            break;
        case '^':
            fputs("\\(ha", out);
            break;
        case '~':
            fputs("\\(ti", out);
            break;
        default:
            fputc(p[i], out);
        }
    }
}

/* A line that begins with a dot or a quote would be a request. */
static void line(FILE *out, const char *p, size_t n, bool fixed)
{
    if (n > 0 && (p[0] == '.' || p[0] == '\''))
        fputs("\\&", out);
    text(out, p, n, fixed);
    fputc('\n', out);
}

void roff_text(FILE *out, const char *t)
{
    text(out, t, strlen(t), false);
}

void roff_line(FILE *out, const char *t)
{
    line(out, t, strlen(t), false);
}

static void capitals(FILE *out, const char *t, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        char c = (char)toupper((unsigned char)t[i]);

        text(out, &c, 1, false);
    }
}

void roff_begin(FILE *out, const char *name, const char *section, const char *title)
{
    fputs(".\\\" Made by `make` from the tables behind --help: change those.\n.nr HY 0\n.TH \"",
          out);
    capitals(out, name, strlen(name));
    fprintf(out, "\" %s \"\" \"ucmd " UCM_VERSION "\" \"%s\"\n", section, title);
    fputs(".ad l\n", out);
}

void roff_section(FILE *out, const char *title)
{
    fputs(".SH ", out);
    capitals(out, title, strlen(title));
    fputc('\n', out);
}

void roff_help(FILE *out, const char *t, bool sections)
{
    bool fixed = false;

    while (*t != '\0') {
        size_t n = strcspn(t, "\n");
        bool indented = n > 2 && t[0] == ' ' && t[1] == ' ';

        if (fixed != indented && n > 0) {
            fputs(indented ? ".RS 4\n.EX\n" : ".EE\n.RE\n", out);
            fixed = indented;
        }
        if (indented)
            line(out, t + 2, n - 2, true);
        else if (sections && n > 1 && t[n - 1] == ':') {
            fputs(".SH ", out);
            capitals(out, t, n - 1);
            fputc('\n', out);
        } else if (n > 0)
            line(out, t, n, false);
        else if (t[1] != '\0' && !fixed && !(sections && strncmp(t + 1, "  ", 2) != 0))
            fputs(".PP\n", out);
        t += n + (t[n] == '\n');
    }
    if (fixed)
        fputs(".EE\n.RE\n", out);
}

void roff_usage(FILE *out, const char *words)
{
    for (size_t n; *words != '\0'; words += n) {
        n = strspn(words, "ABCDEFGHIJKLMNOPQRSTUVWXYZ");
        if (n > 1 || (n == 1 && !islower((unsigned char)words[1]))) {
            fputs("\\fI", out);
            text(out, words, n, true);
            fputs("\\fR", out);
        } else {
            n = 1;
            text(out, words, 1, true);
        }
    }
}

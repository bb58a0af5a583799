#include "client/ctl/table.h"

#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

void table_begin(struct table *t, const char *const *titles)
{
    memset(t, 0, sizeof *t);
    while (t->n_columns < TABLE_MAX_COLUMNS && titles[t->n_columns] != NULL) {
        t->title[t->n_columns] = titles[t->n_columns];
        t->n_columns++;
    }
}

void table_cell(struct table *t, const char *format, ...)
{
    va_list ap;
    char *text = NULL;
    int n;

    if (t->n_cells == t->cap) {
        size_t cap = t->cap != 0 ? 2 * t->cap : 64;
        char **cell = realloc(t->cell, cap * sizeof *cell);

        if (cell == NULL) {
            t->failed = 1;
            return;
        }
        t->cell = cell;
        t->cap = cap;
    }
    va_start(ap, format);
    n = vasprintf(&text, format, ap);
    va_end(ap);
    if (n < 0) {
        t->failed = 1;
        return;
    }
    t->cell[t->n_cells++] = text;
}

/* Columns on a terminal, not bytes: continuation bytes of UTF-8 take no column. */
static size_t width(const char *s)
{
    size_t n = 0;

    for (; *s != '\0'; s++)
        n += ((unsigned char)*s & 0xc0) != 0x80;
    return n;
}

static void print_cell(FILE *out, const char *text, size_t wide, int right, int last)
{
    int pad = (int)(wide - width(text));

    if (right)
        fprintf(out, "%*s%s", pad, "", text);
    else
        fprintf(out, "%s%*s", text, last ? 0 : pad, "");
    fputs(last ? "\n" : "  ", out);
}

static void table_print(const struct table *t, FILE *out)
{
    size_t wide[TABLE_MAX_COLUMNS] = {0};
    int right[TABLE_MAX_COLUMNS];

    for (size_t c = 0; c < t->n_columns; c++) {
        right[c] = t->title[c][0] == '>';
        wide[c] = width(t->title[c] + right[c]);
    }
    for (size_t i = 0; i < t->n_cells; i++) {
        size_t w = width(t->cell[i]);

        if (w > wide[i % t->n_columns])
            wide[i % t->n_columns] = w;
    }
    for (size_t c = 0; c < t->n_columns; c++)
        print_cell(out, t->title[c] + right[c], wide[c], right[c], c + 1 == t->n_columns);
    for (size_t i = 0; i < t->n_cells; i++) {
        size_t c = i % t->n_columns;

        print_cell(out, t->cell[i], wide[c], right[c], c + 1 == t->n_columns);
    }
}

int table_end(struct table *t, FILE *out)
{
    int rc = t->failed ? -ENOMEM : 0;

    if (rc == 0 && out != NULL)
        table_print(t, out);
    for (size_t i = 0; i < t->n_cells; i++)
        free(t->cell[i]);
    free(t->cell);
    t->cell = NULL;
    t->n_cells = t->cap = 0;
    return rc;
}

char *human_bytes(char buf[HUMAN_BYTES], uint64_t bytes)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double v = (double)bytes;
    size_t u = 0;

    while (v >= 1024 && u + 1 < sizeof unit / sizeof unit[0]) {
        v /= 1024;
        u++;
    }
    snprintf(buf, HUMAN_BYTES, u == 0 || v >= 100 ? "%.0f %s" : "%.1f %s", v, unit[u]);
    return buf;
}

char *human_us(char buf[HUMAN_BYTES], uint64_t us)
{
    if (us < 1000)
        snprintf(buf, HUMAN_BYTES, "%llu us", (unsigned long long)us);
    else if (us < 1000000)
        snprintf(buf, HUMAN_BYTES, "%.1f ms", (double)us / 1e3);
    else
        snprintf(buf, HUMAN_BYTES, "%.2f s", (double)us / 1e6);
    return buf;
}

char *human_duration(char buf[HUMAN_BYTES], uint64_t ms)
{
    unsigned long long s = ms / 1000;

    if (s < 60)
        snprintf(buf, HUMAN_BYTES, "%.1fs", (double)ms / 1000);
    else if (s < 3600)
        snprintf(buf, HUMAN_BYTES, "%llum %llus", s / 60, s % 60);
    else if (s < 86400)
        snprintf(buf, HUMAN_BYTES, "%lluh %llum", s / 3600, s / 60 % 60);
    else
        snprintf(buf, HUMAN_BYTES, "%llud %lluh", s / 86400, s / 3600 % 24);
    return buf;
}

char *human_percent(char buf[HUMAN_BYTES], uint64_t part, uint64_t of)
{
    if (of == 0)
        snprintf(buf, HUMAN_BYTES, "-");
    else
        snprintf(buf, HUMAN_BYTES, "%.1f %%", 100.0 * (double)part / (double)of);
    return buf;
}

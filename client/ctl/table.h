/* Text for people: tables with columns as wide as they need, sizes and times with units.
 * A table belongs to one thread. */
#ifndef UCM_CTL_TABLE_H
#define UCM_CTL_TABLE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define TABLE_MAX_COLUMNS 16

struct table {
    const char *title[TABLE_MAX_COLUMNS]; /* a leading '>' aligns the column to the right */
    size_t n_columns;
    char **cell;
    size_t n_cells, cap;
    int failed; /* memory ran out; table_end returns it */
};

/* Titles end with NULL; they must outlive the table. */
void table_begin(struct table *t, const char *const *titles);
/* Appends one cell; rows fill from left to right. */
void table_cell(struct table *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Prints the table (unless out is NULL) and frees it. 0 or -ENOMEM. */
int table_end(struct table *t, FILE *out);

/* Each returns buf. */
#define HUMAN_BYTES 32
char *human_bytes(char buf[HUMAN_BYTES], uint64_t bytes); /* "1.5 GiB" */
char *human_us(char buf[HUMAN_BYTES], uint64_t us);       /* "12 us", "3.4 ms" */
char *human_duration(char buf[HUMAN_BYTES], uint64_t ms); /* "2d 3h", "4.2s" */
char *human_percent(char buf[HUMAN_BYTES], uint64_t part,
                    uint64_t of); /* "12.3 %", "-" of nothing */

#endif

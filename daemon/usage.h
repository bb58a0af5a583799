/* ucmd's options, declared once: the command line's parser, --help, ucmd(8) and the shells' completion
 * read this table. For main only, and for client/pages. */
#ifndef UCMD_USAGE_H
#define UCMD_USAGE_H

#include <stddef.h>

struct usage_option {
    const char *name;  /* without its dashes */
    char letter;       /* what getopt_long returns for it */
    const char *value; /* the value's name; NULL: it takes none */
    const char *help;
};

extern const struct usage_option usage_options[];
extern const size_t usage_option_count;
extern const char usage_summary[]; /* one line */
extern const char usage_help[];    /* the rest of --help */

#endif

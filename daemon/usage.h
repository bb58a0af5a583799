/* ucmd's options, declared once: the command line's parser and --help read this table, and
 * client/ctl/pages.py makes ucmd(8) and the shells' completion of --help. For main only. */
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

/* ucmd.yaml(5). */
#include "client/pages/pages.h"

#include "daemon/config/table.h"
#include "proto/units.h"

#include <inttypes.h>
#include <string.h>

static const char *bound(const struct config_key *k, uint64_t v, char buf[UNITS_TEXT_BYTES])
{
    if (k->kind == CONFIG_SIZE)
        return units_size_text(buf, v);
    if (k->kind == CONFIG_DURATION)
        return units_duration_text(buf, v);
    snprintf(buf, UNITS_TEXT_BYTES, k->kind == CONFIG_OCTAL ? "%04" PRIo64 : "%" PRIu64, v);
    return buf;
}

/* What the key takes, and when a change takes effect. */
static void facts(FILE *out, const struct config_key *k)
{
    char min[UNITS_TEXT_BYTES], max[UNITS_TEXT_BYTES];

    fputs("Default: ", out);
    roff_text(out, config_initial_text(k));
    for (size_t i = 0; k->names && k->names[i]; i++) {
        fputs(i == 0 ? "; one of " : ", ", out);
        roff_text(out, k->names[i]);
    }
    if (k->kind == CONFIG_LIST)
        fprintf(out, "; at most %" PRIu64 " items", k->max);
    else if (!k->names && k->kind != CONFIG_STRING)
        fprintf(out, "; from %s to %s", bound(k, k->min, min), bound(k, k->max, max));
    fprintf(out, ".%s\n", k->reloadable ? " Reloadable." : "");
}

static void key(FILE *out, const struct config_key *k)
{
    fputs(".TP\n\\fB", out);
    roff_text(out, k->name);
    fputs("\\fR\n", out);
    roff_line(out, k->help);
    fputs(".br\n", out);
    facts(out, k);
}

static void section(FILE *out, const struct config_section *s)
{
    size_t n = strlen(s->name);

    if (n > 0) {
        roff_section(out, s->name);
        roff_line(out, s->help);
    } else {
        roff_section(out, "Keys at the top");
    }
    for (const struct config_key *k = config_keys; k < config_keys + config_key_count; k++)
        if (!k->internal && config_section_length(k->name) == n && memcmp(k->name, s->name, n) == 0)
            key(out, k);
}

void man_config(FILE *out)
{
    roff_begin(out, "ucmd.yaml", "5", "File Formats");
    roff_section(out, "Name");
    fputs("ucmd.yaml \\- configuration of ucmd, the KV cache daemon of a host\n", out);
    roff_section(out, "Description");
    roff_line(out, config_sections[0].help);
    fputs(".PP\nA key is written in its section, or on the command line as a whole:\n"
          ".RS 4\n.EX\narena:\n  size: 16GiB\n.EE\n.RE\n.RS 4\n.EX\n"
          "ucmd \\-\\-set arena.size=16GiB\n.EE\n.RE\n",
          out);
    for (size_t i = 0; i < config_section_count; i++)
        section(out, &config_sections[i]);
    roff_section(out, "Files");
    fputs(".TP\n/etc/ucmd/ucmd.yaml\nwhat the shipped unit reads\n", out);
    roff_section(out, "See also");
    roff_line(out, "ucmd(8), ucmctl(1)");
}

/* What a shell may offer, for all shells alike. */
#include "client/pages/pages.h"

#include <ctype.h>
#include <string.h>

static bool among(const char *name, const char *const *words)
{
    for (; *words != NULL; words++)
        if (strstr(name, *words) != NULL)
            return true;
    return false;
}

/* "all|dram|nvme" as words. */
static void choices(struct complete_value *out, const char *from, size_t n)
{
    out->kind = COMPLETE_WORDS;
    if (n >= sizeof(out->words))
        n = sizeof(out->words) - 1;
    memcpy(out->words, from, n);
    out->words[n] = '\0';
    for (char *p = out->words; *p != '\0'; p++)
        if (*p == '|')
            *p = ' ';
}

/* By what usage calls it. */
static void named(const struct program *p, struct complete_value *out)
{
    static const char *const files[] = {"PATH", "FILE", ".json", ".yaml", NULL};
    static const char *const folders[] = {"FOLDER", "DIR", NULL};

    for (size_t i = 0; i < p->n_sources; i++) {
        if (strcmp(p->sources[i].word, out->name) == 0) {
            out->kind = COMPLETE_SOURCE;
            snprintf(out->words, sizeof(out->words), "%s", p->sources[i].command);
            return;
        }
    }
    if (among(out->name, files))
        out->kind = COMPLETE_FILES;
    else if (among(out->name, folders))
        out->kind = COMPLETE_FOLDERS;
}

void complete_option(const struct program *p, const struct arg_option *o,
                     struct complete_value *out)
{
    const char *keys;

    *out = (struct complete_value){.kind = COMPLETE_NOTHING};
    if (pages_config_keys(p, o, &keys)) {
        choices(out, keys, strlen(keys));
        snprintf(out->name, sizeof(out->name), "KEY");
        return;
    }
    snprintf(out->name, sizeof(out->name), "%s", o->value);
    if (o->kind == ARG_CHOICE)
        choices(out, o->value, strlen(o->value));
    else
        named(p, out);
}

bool complete_word(const struct program *p, const struct program_command *c, unsigned at,
                   struct complete_value *out)
{
    const char *word = c->words;

    *out = (struct complete_value){.kind = COMPLETE_NOTHING};
    for (unsigned i = 0;; i++) {
        size_t n;

        word += strspn(word, " []");
        n = strcspn(word, " []");
        if (n == 0)
            return false;
        out->repeats = n > 3 && memcmp(word + n - 3, "...", 3) == 0;
        n -= out->repeats ? 3 : 0;
        if (i < at) {
            word += n + (out->repeats ? 3 : 0);
            continue;
        }
        snprintf(out->name, sizeof(out->name), "%.*s", (int)n, word);
        if (islower((unsigned char)word[0]))
            choices(out, word, n);
        else
            named(p, out);
        return true;
    }
}

void complete_commands(const struct program *p,
                       void (*each_cb)(const struct program_command *c, void *ctx), void *ctx)
{
    for (size_t g = 0; g < p->n_groups; g++)
        for (size_t i = 0; i < p->groups[g]->n_commands; i++)
            each_cb(&p->groups[g]->commands[i], ctx);
}

/* A command that is a Python program next to this one, as `ucmctl plan` is. This program checks the command line,
 * and becomes that one. */
#include "client/ctl/program.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NUMBER_BYTES 24

/* Next to this program, or where `make install` puts it. False: nobody could say where this program lies. */
static bool script_find(const char *name, char path[PATH_MAX + 64])
{
    char self[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    char *slash;

    self[n > 0 ? n : 0] = '\0';
    slash = strrchr(self, '/');
    if (slash == NULL || setenv("UCMCTL_PROGRAM", self, 1) != 0)
        return false;
    *slash = '\0';
    snprintf(path, PATH_MAX + 64, "%s/%s", self, name);
    if (access(path, X_OK) == 0)
        return true;
    slash = strrchr(self, '/');
    if (slash != NULL)
        *slash = '\0';
    snprintf(path, PATH_MAX + 64, "%s/libexec/ucmd/%s", self, name);
    return true;
}

/* The option as a script takes it: numbers in digits. How many words that is. */
static int option_words(const struct args *a, size_t i, char name[64], char number[NUMBER_BYTES],
                        char **word)
{
    const struct arg_option *o = a->option[i];
    const struct arg_value *v = &a->value[i];

    snprintf(name, 64, "--%s", o->name);
    word[0] = name;
    if (o->kind == ARG_FLAG)
        return v->given;
    if (v->text == NULL)
        return 0;
    snprintf(number, NUMBER_BYTES, "%" PRIu64, v->number);
    word[1] = o->kind == ARG_TEXT || o->kind == ARG_CHOICE ? (char *)v->text : number;
    return 2;
}

int program_script(const struct args *a, const char *name)
{
    char path[PATH_MAX + 64] = "", names[ARGS_MAX_OPTIONS][64];
    char numbers[ARGS_MAX_OPTIONS][NUMBER_BYTES], *word[2 * ARGS_MAX_OPTIONS + 8];
    int n = 0;

    if (!script_find(name, path))
        return program_fail(PROGRAM_EXIT_FAILED, "%s: where %s lies is not known", name,
                            program_name());
    word[n++] = path;
    for (size_t i = 0; i < a->n_options; i++)
        n += option_words(a, i, names[i], numbers[i], &word[n]);
    word[n++] = (char *)"--";
    for (int i = 0; i < a->n_words && i < 4; i++)
        word[n++] = a->word[i];
    word[n] = NULL;
    fflush(stdout);
    execv(path, word);
    return program_fail(PROGRAM_EXIT_FAILED, "%s can't be run: %s; it needs python3", path,
                        strerror(errno));
}

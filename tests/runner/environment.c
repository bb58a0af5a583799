#include "tests/runner/environment.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *built(const char *name, char out[256])
{
    const char *ucmd = getenv("UCMD") ? getenv("UCMD") : "build/ucmd";
    char *real = realpath(ucmd, NULL);

    cr_assert(real, "%s", ucmd);
    cr_assert_lt(snprintf(out, 256, "%.*s/%s", (int)(strrchr(real, '/') - real), real, name), 256);
    free(real);
    return out;
}

void preload(const char *name)
{
    const char *asan = getenv("ASAN_OPTIONS");
    char library[256], options[512];

    cr_assert_eq(access(built(name, library), R_OK), 0, "%s is not there", library);
    snprintf(options, sizeof(options), "%.400s%s", asan ? asan : "",
             asan && strstr(asan, "link_order") ? "" : ":verify_asan_link_order=0");
    setenv("ASAN_OPTIONS", options, 1);
    setenv("LD_PRELOAD", library, 1);
}

uint64_t number_given(const char *variable, uint64_t otherwise)
{
    const char *text = getenv(variable);

    return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

bool phase_is_slow(void)
{
    const char *phase = getenv("UCM_PHASE");

    return phase && strcmp(phase, "plain") != 0;
}

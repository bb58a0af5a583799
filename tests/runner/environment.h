/* What the environment says to tests, and what they leave there for programs that they start. */
#ifndef UCM_TESTS_ENVIRONMENT_H
#define UCM_TESTS_ENVIRONMENT_H

#include <stdbool.h>
#include <stdint.h>

/* Fills and returns the absolute path of what the build made beside $UCMD (default build/ucmd). */
const char *built(const char *name, char out[256]);
/* Preloads that library of the build, until the caller unsets LD_PRELOAD. */
void preload(const char *name);

uint64_t number_given(const char *variable, uint64_t otherwise);
/* Whether check.sh runs a build with a sanitizer. */
bool phase_is_slow(void);

#endif

/* What a configuration needs of the sandbox that systemd/ucmd.service makes: the drop-in that the
 * generator (systemd/ucmd-generator) installs, by `ucmd --unit`. Reads the configuration only: a
 * generator runs before file systems are mounted. The main thread. */
#ifndef UCMD_CONFIG_UNIT_H
#define UCMD_CONFIG_UNIT_H

#include "daemon/config/config.h"

#include <stdio.h>

/* 0, or -EINVAL with *e when shared.roots can't be read. Nothing is written on failure. */
int config_unit_print(const struct config *c, FILE *out, struct config_error *e);

/* What to add to a sentence about what the sandbox may have refused: "" unless systemd started this
 * process. */
const char *config_unit_hint(void);

#endif

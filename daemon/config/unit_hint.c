#include "daemon/config/unit.h"

#include <stdlib.h>

const char *config_unit_hint(void)
{
    return getenv("INVOCATION_ID")
               ? "; if the sandbox of ucmd.service forbids it, run systemctl daemon-reload and "
                 "restart: that fits the sandbox to the configuration"
               : "";
}

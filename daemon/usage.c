#include "daemon/usage.h"

const struct usage_option usage_options[] = {
    {"config", 'c', "FILE",
     "read FILE, e.g. /etc/ucmd/ucmd.yaml; without it the built-in defaults hold"},
    {"set", 's', "KEY=VALUE",
     "set one key over the file, e.g. --set arena.size=16GiB; may be repeated"},
    {"check", 'k', NULL, "say whether the configuration is good, print it, and exit"},
    {"unit", 'u', NULL, "print what the configuration needs of ucmd.service's sandbox, and exit"},
    {"version", 'v', NULL, "print the version and exit"},
    {"help", 'h', NULL, "print this and exit"},
};
const size_t usage_option_count = sizeof(usage_options) / sizeof(usage_options[0]);

const char usage_summary[] = "The KV cache daemon of a host";

const char usage_help[] =
    "Signals:\n"
    "  TERM, INT  stop it; shutdown.drain bounds each phase\n"
    "  HUP        read the file again\n\n"
    "Exit status:\n"
    "  0  stopped as asked\n"
    "  1  could not start, or a device or a sync of the NVMe tier failed\n"
    "  2  wrong usage\n";

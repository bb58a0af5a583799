/* Evict, pin, purge: what an operator changes in a running daemon. */
#include "client/ctl/ctl.h"

#define MAX_KEY_WORDS 16384
#define MAX_SETTINGS_WORDS 64

static const struct arg_option evict_options[] = {
    {"tier", ARG_CHOICE, "all|dram|nvme|shared",
     "where from; dram leaves other copies, shared is for all hosts", "all", 0, 0},
    {"yes", ARG_FLAG, NULL, "do not ask", NULL, 0, 0},
};

static const struct arg_option purge_options[] = {
    {"yes", ARG_FLAG, NULL, "do not ask", NULL, 0, 0},
};

static const struct arg_option bypass_options[] = {
    {"tenant", ARG_TEXT, "TENANT", "of this tenant only", NULL, 0, 0},
    {"ns", ARG_TEXT, "NS", "of this namespace only", NULL, 0, 0},
};

static const struct program_command commands[] = {
    {"evict", "NS [KEY...]", "Drop blocks that are not pinned",
     "Without keys it drops every block of the namespace, and asks first; without a\n"
     "terminal it needs --yes. The tiers all and shared remove files that other hosts\n"
     "use, too. With one tier, blocks in use stay; else they go with their last use.\n\n"
     "Examples:\n"
     "  ucmctl evict 1 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n"
     "  ucmctl evict 1 --tier dram --yes\n",
     PROGRAM_OPTIONS(evict_options), 1, MAX_KEY_WORDS, cmd_evict},
    {"pin", "NS [KEY...]", "Keep blocks from eviction until unpin or a restart",
     "Without keys: every complete block of the namespace. Pinned blocks take memory from\n"
     "all others: see 'pinned' in 'ucmctl status'.\n\n"
     "Example:\n"
     "  ucmctl pin 1 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n",
     NULL, 0, 1, MAX_KEY_WORDS, cmd_pin},
    {"unpin", "NS [KEY...]", "Let pinned blocks be evicted again",
     "Without keys: every block of the namespace.\n\nExample:\n  ucmctl unpin 1\n", NULL, 0, 1,
     MAX_KEY_WORDS, cmd_unpin},
    {"purge", "NS [KEY...]", "Drop blocks from every tier, pinned ones too",
     "Without keys: the whole namespace. It asks first; without a terminal it needs\n"
     "--yes. Lookups no longer find a block that a worker is using; it is dropped when the\n"
     "last worker releases it.\n\n"
     "Example:\n"
     "  ucmctl purge 3fa94c --yes\n",
     PROGRAM_OPTIONS(purge_options), 1, MAX_KEY_WORDS, cmd_purge},
    {"bypass", "[load|store on|off]", "Let engines run without the cache, at once",
     "load on: lookups find nothing and loads are misses, so engines compute what they would\n"
     "have loaded. store on: dumps store nothing. Engines need no restart. Without --tenant\n"
     "or --ns it is for all. Cached blocks stay; off brings them back. off ends what was\n"
     "turned on with the same option, and no other bypass. All end with the daemon.\n"
     "Without words it shows what is bypassed now. For operators.\n\n"
     "Examples:\n"
     "  ucmctl bypass load on --tenant team-a\n"
     "  ucmctl bypass store on --ns 3fa94c\n"
     "  ucmctl bypass\n"
     "  ucmctl bypass load off --tenant team-a\n",
     PROGRAM_OPTIONS(bypass_options), 0, 2, cmd_bypass},
    {"encryption-key", "[list | files DIR | reload TENANT | rotate TENANT | forget TENANT ID]",
     "Show the keys of encrypted tenants, or read their source again",
     "list: each key's id, the current one first, and how much of this host's NVMe it encrypts.\n\n"
     "files: how much of a shared root each key encrypts, from the beginning of each file.\n"
     "DIR is where the root is mounted, here or on any other host. It asks no daemon and needs\n"
     "no key. It skips what it can't list, says so, and exits with 5: the counts are too low.\n\n"
     "reload: reads the source again, after a read that failed or to learn a key that is not\n"
     "yet current.\n\n"
     "rotate: first write the new key as the source's last line. The daemon then reads the\n"
     "source and encrypts with that key.\n\n"
     "forget: first remove the key's line. The daemon then reads the source, and what the key\n"
     "encrypted is a miss from now on. Until it reads the source, the daemon keeps the key.\n\n"
     "If the source has not changed, rotate and forget exit with 1. TENANT is as in\n"
     "encryption.tenants. For operators.\n\n"
     "Examples:\n"
     "  cd /etc/ucmd && cp -p team-a.keys team-a.new\n"
     "  openssl rand -hex 32 >> team-a.new && mv team-a.new team-a.keys\n"
     "  ucmctl encryption-key rotate team-a\n"
     "  ucmctl encryption-key files /mnt/kv\n"
     "  ucmctl encryption-key forget team-a 5f3c09a1b2c4d6e8\n",
     NULL, 0, 0, 3, cmd_encryption_key},
    {"tenant", "[list | set NAME KEY=VALUE... | reset NAME]",
     "Show what each tenant has and is given, or change that at once",
     "list: GIVEN shows the min and the max size on the tier to its left; 'all' is no maximum.\n"
     "See tenant_settings in ucmd.yaml(5).\n\n"
     "set: these settings win over tenant_settings of the configuration. They survive a\n"
     "restart of the daemon, until reset. If the directory that the configuration calls state\n"
     "can't be written, the exit status is 1, and they end with the daemon. NAME is one of\n"
     "tenants, uid:N, or '*' for every tenant whose own settings do not name the key. For\n"
     "operators.\n\n"
     "Examples:\n"
     "  ucmctl tenant list --json | jq '.tenants[] | {tenant, nvme_bytes}'\n"
     "  ucmctl tenant set team-a dram.min=64GiB weight=300\n"
     "  ucmctl tenant set '*' dram.max=200GiB\n"
     "  ucmctl tenant reset team-a\n",
     NULL, 0, 0, MAX_SETTINGS_WORDS, cmd_tenant},
};

const struct program_group commands_change = {
    .title = "Commands that change", .commands = commands, .n_commands = PROGRAM_COUNT(commands)};

/* Evict, pin, purge: what an operator changes in a running daemon. */
#include "client/ctl/ctl.h"

#define MAX_KEY_WORDS 16384
#define MAX_SETTINGS_WORDS 64

static const struct arg_option evict_options[] = {
    {"tier", ARG_CHOICE, "all|dram|nvme|share",
     "where from; dram leaves other copies, share is for all hosts", "all", 0, 0},
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
    {"evict", "NS [KEY...]", "Drop blocks that are neither pinned nor in use",
     "Without keys it drops every block of the namespace, and asks first; without a\n"
     "terminal it needs --yes. The tiers all and share remove files that other hosts\n"
     "use, too.\n\n"
     "Examples:\n"
     "  ucmctl evict 1 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08\n"
     "  ucmctl evict 1 --tier dram --yes\n",
     PROGRAM_OPTIONS(evict_options), 1, MAX_KEY_WORDS, cmd_evict},
    {"pin", "NS [KEY...]", "Keep blocks from ever being evicted",
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
     "--yes. Lookups no longer find a block that a worker is using, and it goes with its\n"
     "last user.\n\n"
     "Example:\n"
     "  ucmctl purge 3fa94c --yes\n",
     PROGRAM_OPTIONS(purge_options), 1, MAX_KEY_WORDS, cmd_purge},
    {"bypass", "[load|store on|off]", "Have engines go on without the cache, at once",
     "load on: lookups find nothing and loads are misses, so engines compute what they would\n"
     "have loaded. store on: dumps store nothing. Engines need no restart. Without --tenant\n"
     "or --ns it is for all. What is cached stays; off brings it back. The daemon's end turns\n"
     "all off. Without words: what is bypassed now. For operators.\n\n"
     "Examples:\n"
     "  ucmctl bypass load on --tenant team-a\n"
     "  ucmctl bypass store on --ns 3fa94c\n"
     "  ucmctl bypass\n"
     "  ucmctl bypass load off --tenant team-a\n",
     PROGRAM_OPTIONS(bypass_options), 0, 2, cmd_bypass},
    {"key", "[list | files FOLDER | reload TENANT | rotate TENANT | forget TENANT ID]",
     "Show the keys of encrypted tenants, or read their source again",
     "list: each key's id, the current one first, and what of this host's NVMe it has sealed.\n"
     "files: what each key has sealed on a shared root, by reading the beginning of each file; "
     "FOLDER is\n"
     "where the root is mounted, here or on any other host. It asks no daemon and needs no key.\n"
     "It passes over what can't be listed, says so, and exits with 5: the counts are too low.\n"
     "reload: reads the source again, after one that failed. rotate: write the new key as the\n"
     "source's last line first; the daemon then reads it and seals with that key. forget: remove\n"
     "the key's line first; the daemon then reads the source, and what the key has sealed is a\n"
     "miss from now on. Where the source still says the same, rotate and forget exit with 1.\n"
     "TENANT is as in encryption.tenants. For operators.\n\n"
     "Examples:\n"
     "  openssl rand -hex 32 >> /etc/ucmd/team-a.keys && ucmctl key rotate team-a\n"
     "  ucmctl key files /mnt/kv\n"
     "  ucmctl key forget team-a 5f3c09a1b2c4d6e8\n",
     NULL, 0, 0, 3, cmd_key},
    {"tenant", "set|reset NAME [KEY=VALUE...]", "Change what a tenant is given, at once",
     "Over what tenant_settings of the configuration gives, and kept over a restart of the\n"
     "daemon, until reset. NAME is one of tenants, uid:N, or '*' for all whose own settings\n"
     "say nothing. 'ucmctl tenants' shows what each has. For operators.\n\n"
     "Examples:\n"
     "  ucmctl tenant set team-a dram.guaranteed=64GiB weight=300\n"
     "  ucmctl tenant set '*' dram.most=200GiB\n"
     "  ucmctl tenant reset team-a\n",
     NULL, 0, 2, MAX_SETTINGS_WORDS, cmd_tenant},
    {"reload", "", "Read the daemon's configuration again, and say what changed",
     "Lists what changed and what needs a restart. A mistake anywhere in the file changes\n"
     "nothing: the exit status is 1, with the file, the line and what would be right.\n"
     "Connections keep the tenant and the rights that they have. For operators.\n\n"
     "Example:\n"
     "  ucmctl reload\n",
     NULL, 0, 0, 0, cmd_reload},
};

const struct program_group commands_change = {
    .title = "Commands that change", .commands = commands, .n_commands = PROGRAM_COUNT(commands)};

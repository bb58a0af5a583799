"""docs/configuration.md: each key of config/ucmd.yaml, a tenant's settings, and limits that no key sets."""

import re

import text as md

REFUSED, INVALID, NO_START = "a request is answered BUSY", "a request is INVALID", "the daemon does not start"
FIXED = (  # what, constant, its file, beyond it
    ("requests in progress, of all clients", "CONFIG_MAX_REQUESTS", "daemon/config/config.h", REFUSED),
    ("regions of one connection", "CONFIG_MAX_REGIONS_CONN", "daemon/config/config.h", REFUSED),
    ("leases of one connection", "CONFIG_MAX_LEASES_CONN", "daemon/config/config.h", REFUSED),
    ("keys of one request", "UCM_MAX_KEYS", "proto/limits.h", INVALID),
    ("parts of a block", "UCM_MAX_PARTS", "proto/limits.h", INVALID),
    ("layers of a part", "UCM_MAX_LAYERS", "proto/limits.h", INVALID),
    ("blocks of one sequence", "UCM_MAX_SEQUENCE_BLOCKS", "proto/limits.h", INVALID),
    ("bytes of one message on the socket (a frame)", "UCM_MAX_FRAME_BYTES", "proto/limits.h", "the connection ends"),
    ("entries of `nvme.paths`", "CONFIG_MAX_PATHS", "daemon/config/config.h", NO_START),
    ("shared roots", "UCM_MAX_ROOTS", "proto/limits.h", NO_START),
)


def number(value):
    return f"{value:,}"


def named(text, names):
    """Values of the key are code, too: outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(rf"\b({'|'.join(names)})\b(?!-)", r"`\1`", part) for part in parts)


def key_text(key, mark):
    default, _, rest = key.facts.partition("; ")
    reloadable = key.facts.endswith("(reloadable)")
    bounds = rest.removesuffix(" (reloadable)").removesuffix(".")
    default = default.removesuffix(" (reloadable)").removesuffix(".")
    if re.fullmatch(r"[a-z]+\.[a-z]+", default):  # no key
        default = f'"{default}"'
    if bounds == "one of false, true":
        bounds = ""
    bounds = re.sub(r"^from (\w+) to (\w+)$", r"\1..\2", bounds)
    facts = f"`{default}`{f'; {bounds}' * bool(bounds)}" + "; reloadable" * reloadable
    text = mark(key.help.replace("docs/configuration.md", "[This table](#settings-of-a-tenant)"))
    values = rest.partition("one of ")[2].removesuffix(" (reloadable)").removesuffix(".")
    if values and key.name != "log.level":
        text = named(text, values.split(", "))
    return f"\n### {key.name}\n\n" + md.wrap(facts) + "\n" + md.wrap(text)


def keys_text(mark):
    _, sections = md.pages.read_config(md.TOP / "config/ucmd.yaml")
    for name, comment, keys in sections:
        yield f"\n## {name or 'Keys without a section'}\n"
        if name:
            yield "\n" + md.wrap(mark(comment))
        for key in keys:
            yield key_text(key, mark)


def size(value):
    for shift, unit in ((50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB")):
        if value and value % (1 << shift) == 0:
            return f"{value >> shift}{unit}"
    return number(value)


def settings_text():
    alike = {}
    for _, name, _, low, high, initial in md.x_rows("TENANT_SETTINGS", "daemon/config/tenants.h"):
        high = size(1 << 50) if high == "TENANT_SIZE_MAX" else number(int(high))
        initial = "`limits.namespaces_per_tenant`" if name == "namespaces" else "no bound" if initial == "0" and not name.endswith(".min") else initial
        alike.setdefault((initial, low, high), []).append(f"`{name}`")
    yield "\n## Settings of a tenant\n\n"
    yield md.wrap("An entry of `tenant_settings` and the command `ucmctl tenant set` take these settings. "
                  "[Divide the cache between tenants](operations.md#divide-the-cache-between-tenants) says what each does.") + "\n"
    for (initial, low, high), names in alike.items():
        yield md.wrap(f"- {', '.join(names)}: {low}..{high}; default {initial}", "  ")


def limits_text():
    yield "\n## Limits that no key sets\n\n"
    yield md.wrap("[operations.md](operations.md#who-may-have-how-much) says how tenants share what clients use together.")
    for beyond in dict.fromkeys(row[3] for row in FIXED):
        yield "\n" + md.wrap(f"Beyond these {beyond}:") + "\n"
        yield from (md.wrap(f"- {what}: {number(md.defined(name, path))}", "  ") for what, name, path, of in FIXED if of == beyond)


def page():
    mark = md.Marker()
    about, _ = md.pages.read_config(md.TOP / "config/ucmd.yaml")
    yield md.begin("Configuration", "the table in `daemon/config/table.c`",
                   "For operators: every key of `ucmd.yaml` with its default and its range. [operations.md](operations.md#configure) says how to change, "
                   "check and reload them.")
    yield "\n## How to write them\n\n"
    yield md.wrap("Below each key stand its default, its range, and whether it is reloadable. " + mark(about.partition(". ")[2].partition(". ")[2]))
    yield "\nA key is written in its section of the file, on the command line, or as a variable:\n"
    yield "\n```yaml\narena:\n  size: 16GiB\n```\n\n```sh\nucmd --set arena.size=16GiB\nUCMD_ARENA_SIZE=16GiB ucmd\n```\n"
    yield "\n" + md.wrap("A list on the command line or in a variable has commas and no brackets: `--set nvme.paths=/a,/b`.")
    yield "\n" + md.wrap("The command line wins over variables, and these win over the file.")
    yield from keys_text(mark)
    yield from settings_text()
    yield from limits_text()

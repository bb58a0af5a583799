"""docs/metrics.md: every metric of proto/metrics/metrics.h, in groups, and the alerts of config/observe/alerts.yml."""

import re

import text as md

HEADER = "proto/metrics/metrics.h"
ALERTS = "config/observe/alerts.yml"

#: Title, what a reader should know of the group, and the names in it: a metric belongs to the first group that has it.
GROUPS = (
    ("Bypass", "An operator turns the cache off for somebody with `ucmctl bypass`. Keys that a bypass turns into misses count in "
     "`bypass_lookup_keys` only, and do not lower the hit rate.", r"bypass.*"),
    ("Lookups", "The hit rate is the rate of `lookup_hits` divided by that of `lookup_keys`. A hit neither in DRAM nor shared is on NVMe.",
     r"lookup(?!_hits_raw|_table).*"),
    ("Loads and prefetches", "", r"load_.*|prefetch_.*|reads_coalesced|span_refused|regions"),
    ("Gathers", "", r"gather(s|_.*)"),
    ("Dumps", "", r"dumps?_.*"),
    ("Encodings", "Raw bytes divided by encoded bytes are the compression ratio. Other metrics of bytes count encoded bytes.",
     r"lookup_hits_raw|encode_.*|decode_.*|encode_unfit|unfit_.*"),
    ("DRAM", "", r"arena_.*|slot_.*|leases.*"),
    ("Index", "", r"blocks|blocks_(partial|pinned)|index_.*"),
    ("NVMe", "", r"nvme_.*"),
    ("Encryption", "", r"encryption_.*"),
    ("Shared tier", "", r"shared_.*|blocks_shared"),
    ("Retrieval", "", r"summaries.*|sequence.*|select.*"),
    ("Shared mappings", "", r"mapping.*"),
    ("Lookup tables", "", r"lookup_table.*"),
    ("Cache events", "", r"events_.*"),
    ("Connections and requests", "", r"connections.*|quota_rejections|client_descriptors|frame_bytes|request.*|device_.*"),
)

#: The table in the header, the array in `stats`, the prefix on Prometheus, the title, and what a reader should know.
LISTS = (
    ("UCMD_TENANT_METRICS", "tenants", "tenant_", "By tenant",
     "Label `tenant`. The first 64 tenants have their own label until the daemon ends; the label `other` sums up the rest. An operator reads all of "
     "them in `stats`, another client its own. `contended` and `fair_share` count only while several tenants are queued."),
    ("UCMD_TIER_METRICS", "tiers", "tier_", "By tier", "Label `tier`."),
    ("UCMD_ROOT_METRICS", "shared_roots", "shared_root_", "By shared root", "Labels `root` and `index`, its number from 0."),
    ("UCMD_DEVICE_METRICS", "devices", "device_", "By device", "Labels `device`, which is `cpu` or the name of a GPU, and `index`."),
    ("UCMD_NODE_METRICS", "nodes", "arena_node_", "By NUMA node", "Label `node`. Present where the arena spans several nodes."),
)

UNITS = {"us": "seconds", "1/1000": "ratio", "bytes": "bytes"}


def prometheus(prefix, name, kind, unit):
    """As exposition_name() of proto/metrics/exposition.c has it; a unit test compares both."""
    if kind == "counter":
        name = name.removesuffix("_total")
    if unit == "us":
        name = name.removesuffix("_us")
    base = UNITS.get(unit, "")
    if base and not name.endswith(base):
        name = (name.replace(base + "_", "", 1) if base in name else name) + "_" + base
    return f"ucmd_{prefix}{name}" + "_total" * (kind == "counter")


# ---- alerts ----


class Alert:
    def __init__(self, text):
        def field(name, default=""):
            return (re.search(rf"^ +{name}: (.*)$", text, re.M) or ["", default])[1].strip('"')
        self.name, self.expression, self.wait = field("- alert"), field("expr"), field("for", "0m")
        self.meaning = (re.search(r"^ +expr: .*\n +# (.*)$", text, re.M) or ["", ""])[1]
        self.severity = re.search(r"severity: (\w+)", text)[1]
        self.link = re.sub(r"^docs/", "", field("docs") or field("runbook_url"))
        self.metrics = {re.sub("_seconds_bucket$", "_seconds", name) for name in re.findall(r"ucmd_\w+", self.expression)}


def alerts():
    return [Alert(text) for text in re.split(r"\n(?= +- alert:)", md.read(ALERTS))[1:]]


def alert_names(of, name):
    names = [f"`{alert.name}`" for alert in of if name in alert.metrics]
    return f"; alert{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""


def alerts_text(of):
    yield "\n## Alerts\n\n"
    yield md.wrap(f"`{ALERTS}` has the expressions. Each name links to what to do; the time after it is how long its condition must hold.")
    for severity in sorted({a.severity for a in of}):
        yield f"\n{severity.capitalize()}:\n\n"
        for a in of:
            if not a.meaning:
                raise SystemExit(f"{ALERTS}: a comment after the expression of {a.name} says what it means")
            if a.severity == severity:
                yield md.wrap(f"- [{a.name}]({a.link}){f', {a.wait}' * (a.wait != '0m')}: {a.meaning}", "  ")


# ---- metrics ----


def plain(shown, prefix):
    """The name in `stats` of most metrics: what the page's introduction says."""
    return shown.removeprefix("ucmd_" + prefix).removesuffix("_total")


def unit_text(shown, unit, meaning):
    """Only where neither the name nor the meaning says what is counted."""
    units = {"blocks": ("block", "key"), "requests": ("",), "refusals": ("",), "times": ("",), "passes": ("",)}.get(unit, (UNITS.get(unit, unit).rstrip("s"),))
    return "" if any(said in f"{shown} {meaning}" for said in units) else f" ({unit})"


def item(prefix, cells, mark, of):
    name, kind, unit, meaning = cells
    if prefix == "tenant_":  # the section says it
        meaning = meaning.removesuffix(" while several tenants were queued")
    shown = prometheus(prefix, name, kind, unit)
    own = "" if plain(shown, prefix) == name else f"; `stats`:\0`{name}`"
    return md.wrap(f"- `{shown}`: {mark(meaning)}{unit_text(shown, unit, meaning)}{alert_names(of, shown)}{own}", "  ")


def histograms_text(mark, of):
    yield "\n## Durations\n\n"
    yield md.wrap("Histograms in seconds. `ucmctl stats` prints the count, the median and the 99th percentile since the start. "
                  "Label `tier` names the slowest tier that the request read: `dram`, `nvme` or `shared`. Label `size` is the class of "
                  "the bytes that it copied: `le1MiB`, `le64MiB` or `gt64MiB`. Loads, gathers and dumps that copied nothing do not count.") + "\n"
    for name, tiers, sizes, meaning in md.x_rows("UCMD_HISTOGRAMS", HEADER):
        labels = ", ".join(["`tier`"] * (tiers != "1") + ["`size`"] * (sizes != "1"))
        shown = f"ucmd_{name}_seconds"
        yield md.wrap(f"- `{shown}`{f' ({labels})' * bool(labels)}: {mark(meaning)}{alert_names(of, shown)}", "  ")


def groups_text(mark, of):
    items = {title: [] for title, _, _ in GROUPS}
    for cells in md.x_rows("UCMD_METRICS", HEADER):
        title = next((title for title, _, names in GROUPS if re.fullmatch(names, cells[0])), None)
        if not title:
            raise SystemExit(f"{cells[0]} of {HEADER} belongs to no group of {__file__}")
        items[title].append(item("", cells, mark, of))
    for title, about, _ in GROUPS:
        yield f"\n## {title}\n\n" + (md.wrap(about) + "\n") * bool(about) + "".join(items[title])


def lists_text(mark, of):
    for name, wire, prefix, title, about in LISTS:
        yield f"\n## {title}\n\n" + md.wrap(f"{about} In `stats`: `{wire}`.") + "\n"
        yield from (item(prefix, cells, mark, of) for cells in md.x_rows(name, HEADER))


def reuse_text():
    yield "\n## Reuse\n\n"
    yield md.wrap("The daemon estimates the hit rate that other cache sizes would give. `ucmctl status` prints it. Label `tiers` is `dram` or "
                  "`dram_nvme`; label `factor` is `0.5`, `1`, `2` or `4`.")
    yield "\n- `ucmd_reuse_references_total`: keys looked up; `stats`: `reuse.references`\n"
    yield md.wrap("- `ucmd_reuse_hit_ratio`: estimated hit rate at `factor` times today's size of `tiers`; `stats`: `reuse.curves`", "  ")


def page():
    mark, of = md.Marker(), alerts()
    yield md.begin("Metrics", f"`{HEADER}` and `{ALERTS}`",
                   "For operators: every counter, gauge and histogram of the daemon, and the alerts that read them. [monitoring.md](monitoring.md) "
                   "says how to scrape them and which to look at first.")
    yield "\n"
    yield md.wrap("`ucmctl stats` prints all of them, and `ucmctl stats --watch 1` their rates. Counters start at 0 with the daemon. "
                  "Names here are Prometheus', which end in `_total` for counters. `stats` has them without `ucmd_`, `_total`, and the prefix of a list "
                  "such as `tenant_`; where it has another name, the line ends with that. `stats` has microseconds instead of seconds, and thousandths "
                  "instead of a ratio. A meaning that begins with `1:` is a flag; `(parts)` and the like say what is counted.")
    yield "\n"
    yield md.wrap("A scraper also reads `ucmd_health{state}`, 1 for the state that `ucmctl health` prints; `ucmd_shared_root_health{root,index,state}`; "
                  "`ucmd_build_info{version,commit,options,policy}`, always 1; and `ucmd_uptime_seconds`.")
    yield from alerts_text(of)
    yield from histograms_text(mark, of)
    yield from groups_text(mark, of)
    yield from lists_text(mark, of)
    yield from reuse_text()

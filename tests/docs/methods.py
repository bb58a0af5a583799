#!/usr/bin/python3
"""The page of methods, of the comments in proto/messages.h and proto/features/*.h; messages.h says what form they have. A method,
field or value without a meaning is an error, and so is a meaning without a field."""

import collections
import os
import re
import sys

import text as md

HEADERS = ["proto/messages.h", *sorted(path.relative_to(md.TOP).as_posix() for path in (md.TOP / "proto/features").glob("*.h"))]
#: The page's order. Every method stands in one of these.
TASKS = {
    "Connect": "hello namespace.open encoding.open",
    "Register memory": "region.register region.unregister region.challenge ring.register ring.unregister",
    "Find blocks": "lookup release lookup_table.open",
    "Move blocks": "load load_prefix dump prefetch gather cancel",
    "Select blocks": "summary.open summary.build sequence.open sequence.append sequence.close select sequence.prefetch",
    "Read blocks in place": "mapping.open mapping.ref mapping.unref mapping.release mapping.close",
    "Follow the cache": "events events.list events.metadata",
    "Look at blocks, and drop them": "stats health namespace.list ls inspect verify evict namespace.purge",
    "Operate the daemon": "pin unpin bypass shared.gc tenant.list tenant.set tenant.reset encryption_key.list encryption_key.reload config.get config.reload trace",
}
KINDS = {"u64": "uint", "str": "str", "bin": "bin", "flag": "bool", "f64": "float", "u32s": "uints", "handles": "maps", "planes": "maps"}
FREE_TYPES = {"uint": "uint", "str": "str", "bin": "bin", "bool": "bool", "map": "map", "array of map": "maps", "array of uint": "uints",
              "array of str": "strs"}
CALLERS = {"operators": "For operators.", "the namespace's tenant": "For the tenant."}
COMMON, PLAIN = "common", "plain"  # in place of a meaning: that of the common field; the name and the type say it

ABOUT = """For authors of clients: every request that ucmd answers, with its fields, bounds and errors. [protocol.md](protocol.md) says how
frames carry requests, and what blocks, leases and sequences are.

`name`? is an optional field. Parentheses hold bounds: of a number's value, of a str's or bin's bytes, of an array's entries.
`uints`, `strs` and `maps` are arrays. Times are in milliseconds, sizes in bytes. A field without a text is
one of the [common fields](#common-fields), or its name says enough.

A method with `cursor` answers one page of a list. Call it again with `cursor` = `next` until `next` is 0 or absent. Earlier pages may
have few entries or none.

Any client may call a method that names no callers. "For the tenant" means clients of the namespace's tenant, and operators.
Every request may also get one of [these errors](protocol.md#errors)."""


class Wrong(Exception):
    """What a comment lacks, or has too much."""


# ---- constants ----

class Constants:
    def __init__(self):
        self.raw = {"UINT32_MAX": "4294967295", "UINT64_MAX": "18446744073709551615"}
        for path in ["proto/limits.h", *HEADERS]:
            text = re.sub(r"/\*.*?\*/", " ", md.read(path), flags=re.S)
            self.raw.update(re.findall(r"^#define (UCM_\w+) (\(?[\w(][^\n\"]*)$", text, re.M))
            for body in re.findall(r"enum ucm_\w+ \{(.*?)\};", text, re.S):
                self.raw.update(re.findall(r"(UCM_\w+) = (\d+)", body))

    def value(self, words):
        words = re.sub(r"\(uint64_t\)|UINT64_C", "", words)
        words = re.sub(r"(?<=\d)(ull|u|f)\b", "", words)
        words = re.sub(r"\b[A-Z]\w+", lambda found: str(self.value(self.raw[found[0]])), words)
        if not re.fullmatch(r"[\d\s+*/()<-]+", words):
            raise Wrong(f"not a constant: {words}")
        return eval(words.replace("/", "//"))  # pylint: disable=eval-used


def number(n):
    """2^32-1 rather than 4294967295."""
    if n >= 1 << 30 and n & (n + 1) == 0:
        return f"2^{n.bit_length()}-1"
    return f"2^{n.bit_length() - 1}" if n >= 1 << 30 and n & (n - 1) == 0 else str(n)


# ---- comments ----

Comment = collections.namedtuple("Comment", "about paragraphs entries tags")
NOTHING = Comment("", [], {}, {})


def plain(comment):
    """A comment's lines, without what makes it one."""
    lines = [re.sub(r"^\s*\* ?", "", line).rstrip() for line in comment[2:-2].strip("\n").split("\n")]
    lines[0] = lines[0].strip()
    return re.sub(r"\n {2,}(?=\S)", " ", "\n".join(lines).strip()).split("\n")


def parse(comment):
    """A comment of the form that messages.h describes: paragraphs, and entries by name; `In NAME` has those of maps."""
    about, paragraphs, entries, tags, last = "", [[]], {}, {}, None
    lines = plain(comment)
    begins = re.match(r"(Common fields|Method [\w.]+|Result of [\w., ]+?|Notification [\w.]+ of [\w.]+)\.(?: |$)", lines[0])
    if begins:
        about, lines[0] = begins[1], lines[0][begins.end():]
    inner = entries
    for line in lines:
        tag = re.match(r"(Callers|Errors): (.*)", line)
        into = re.match(r"In (\w+):(.*)", line)
        field = re.match(r"((?:[a-z_0-9]+, )*[a-z_0-9]+|(?:[a-z_0-9]+, )+array of \w+): (.*)", line)
        if tag:
            tags[tag[1]] = last = tag[2]
        elif into:
            last = into[2]
            inner = entries.setdefault("In " + into[1], {}) if about.startswith("Result") else entries
            about = about or "In " + into[1]
            if inner is entries:
                paragraphs[-1].append(into[2].strip())
        elif field:
            if field[1] in inner:
                raise Wrong(f"{about}: {field[1]} twice")
            inner[field[1]] = last = field[2].removesuffix(".")
        elif not line.strip():
            paragraphs.append([])
        elif last is not None:
            raise Wrong(f"{about or lines[0]}: after fields: {line}")
        elif re.match(r"\d\. ", line) and paragraphs[-1]:
            paragraphs.append([line])
        else:
            paragraphs[-1].append(line.strip())
    return Comment(about, [" ".join(p) for p in paragraphs if any(p)], entries, tags)


# ---- headers ----

Field = collections.namedtuple("Field", "name type optional meaning")


class Headers:
    TOKEN = re.compile(r"(?P<comment>/\*.*?\*/)|^#define (?P<list>UCM_\w+)\(F, m\)(?P<body>(?:[^\n]*\\\n)*[^\n]*)"
                       r"|^enum (?P<enum>ucm_\w+) \{\n(?P<values>.*?)\n\};", re.S | re.M)

    def __init__(self):
        self.constants = Constants()
        self.methods, self.lists, self.results, self.notifications, self.enums = {}, {}, {}, {}, {}
        self.array_maps, self.includes, self.common, self.in_common = {}, {}, {}, set()
        self.common_types = collections.defaultdict(collections.Counter)  # of common fields: how often each stands
        for path in HEADERS:
            self.read(path)
        text = re.sub(r"/\*.*?\*/", "", md.read("proto/messages.h"), flags=re.S)
        self.suffixes = dict(re.findall(r"S\((\w+), (UCM_MSG_\w+)\)", text))
        rows = re.findall(r'M\([A-Z_]+, \w+, "([\w.]+)",[\s\\]+(\w+),[\s\\]+(\w+)\)', text)
        self.table = {name: (params, result) for name, params, result in rows}
        codes = re.findall(r"X\(([A-Z_]+), \d+,", md.read("proto/errors.h"))
        for name, comment in self.methods.items():
            self.check_method(name, comment, codes)

    def read(self, path):
        near, end, text = [], 0, md.read(path)
        for found in self.TOKEN.finditer(text):
            if text[end:found.start()].strip():
                near = []
            end = found.end()
            if found["comment"]:
                if re.match(r"/\* (Common fields|Method|Result of|Notification)\b", found["comment"]):
                    self.comment(parse(found["comment"]))
                near.append(found["comment"])
            elif found["list"]:
                self.fields(found["list"], found["body"], parse(near[-1]) if near else NOTHING)
                near = []
            else:
                self.values(found["enum"], found["values"], near[-1] if near else "")
                near = []

    def comment(self, comment):
        kind, _, names = comment.about.partition(" ")
        if kind == "Common":
            self.common = comment.entries
        if kind == "Method":
            self.methods[names] = comment
        elif kind == "Result":
            for fields in (comment.entries, *(entry for entry in comment.entries.values() if isinstance(entry, dict))):
                for field, meaning in fields.items():
                    if meaning == COMMON:
                        *alike, type_ = field.split(", ")
                        for name in alike:
                            self.common_types[name][FREE_TYPES.get(type_)] += 1
            for name in names.removeprefix("of ").split(", "):
                self.results[name] = comment.entries
        elif kind == "Notification":
            self.notifications[names.partition(" of ")[2]] = (names.partition(" of ")[0], comment)

    def fields(self, name, body, comment):
        meanings = dict(comment.entries)
        own = re.findall(r"F\(m, (\w+), (\w+), (REQ|OPT),\s+([^,]+), ([^,]+?)\)(?=\s*\\?$)", body, re.M)
        included = re.search(r"(UCM_\w+)\(F, m\)", body)
        found = list(self.lists[included[1]]) if included else []
        if included:
            self.includes[name] = included[1]
        for kind, field, need, low, high in own:
            if field not in meanings and field in self.common:
                self.in_common.add(field)
                self.common_types[field][self.type(kind, low, high)] += 1
            elif not meanings.get(field):
                raise Wrong(f"{name}: {field} has no meaning: put \"{field}: ...\" into the comment in front of it")
            found.append(Field(field, self.type(kind, low, high), need == "OPT", meanings.pop(field, "")))
        if meanings:
            raise Wrong(f"{name}: there is no field {', '.join(meanings)}")
        self.lists[name] = found
        if comment.about.startswith("In "):
            self.array_maps[comment.about.removeprefix("In ")] = (name, " ".join(comment.paragraphs))
        if comment.about.startswith("Notification "):
            self.notifications[comment.about.partition(" of ")[2]] += (name,)

    def type(self, kind, low, high):
        low, high = self.constants.value(low), self.constants.value(high)
        if kind == "flag" or (kind == "u64" and (low, high) == (0, (1 << 64) - 1)):
            return KINDS[kind]
        return f"{KINDS[kind]}({number(low)}" + ("" if low == high else f"..{number(high)}") + ")"

    def values(self, enum, body, comment):
        about = " ".join(plain(comment)) if comment else ""
        if not about.startswith("Values of "):
            return
        rows = []
        for before, name, value, after in re.findall(r"(/\*(?:(?!\*/).)*\*/\s*)?\b(UCM_\w+) = (\d+),?[ \t]*(/\*(?:(?!\*/).)*\*/)?", body, re.S):
            meaning = " ".join(" ".join(plain((after or before).strip() or "/* */")).split())
            if not meaning:
                raise Wrong(f"enum {enum}: {name} has no meaning")
            rows.append((value, name, meaning.removesuffix(".")))
        prefix = re.match(r"(?:\w+_)?", os.path.commonprefix([name for _, name, _ in rows]))[0]
        self.enums[enum] = (about, [(value, f"`{name.removeprefix(prefix)}`", meaning) for value, name, meaning in rows])

    def check_method(self, name, comment, codes):
        if name not in self.table:
            raise Wrong(f"there is no method {name}")
        if not comment.paragraphs:
            raise Wrong(f"method {name}: says nothing")
        if comment.tags.get("Callers", "operators.").removesuffix(".") not in CALLERS:
            raise Wrong(f"method {name}: Callers is one of {', '.join(CALLERS)}")
        for code in re.findall(r"\b([A-Z_]{4,})(?=[,:])", comment.tags.get("Errors", "")):
            if code not in codes and code not in ("DRAM", "NVMe"):
                raise Wrong(f"method {name}: there is no error {code}")


# ---- the page ----

def linked(text):
    """Names of pages, their sections and enums become links; docs/ is where the page lies."""
    text = re.sub(r'docs/([\w/-]+\.md), "([^"]+)"', lambda found: f"[{found[2]}]({found[1]}#{md.slug(found[2])})", text)
    text = re.sub(r"docs/([\w/-]+\.md)", lambda found: f"[{found[1].rpartition('/')[2]}]({found[1]})", text)
    return re.sub(r"enum (ucm_\w+)", lambda found: f"[{found[1]}](#{found[1]})", text)


Shown = collections.namedtuple("Shown", "names type optional meaning")


def listed(title, fields):
    """`title:` and a list; a single item stands after the title. Neighbours without a meaning share an item."""
    items = []
    for field in fields:
        names, own = [f"`{name}`" + "?" * field.optional for name in field.names], f"\0{field.type}" * bool(field.type)
        if field.meaning:
            items.append((", ".join(names) + own, ": " + linked(field.meaning)))
        elif not items or items[-1][1]:
            items.append((", ".join(name + own for name in names), ""))
        else:
            items[-1] = (", ".join((items[-1][0], *(name + own for name in names))), "")
    return bullets(title, [text + meaning for text, meaning in items])


def bullets(title, items):
    if len(items) == 1:
        return md.wrap(f"{title}: {items[0].removesuffix('.')}.", "  ") + "\n"
    return f"{title}:\n\n" + "".join(md.wrap(f"- {item}", "  ") for item in items) + "\n"


class Page:
    def __init__(self, headers):
        self.headers, self.shown = headers, {}
        self.common = {name: headers.common_types[name].most_common(1)[0][0] for name in headers.common if name in headers.common_types}

    def own(self, name, type_):
        """The type of a field with a common meaning, if it is not the common one."""
        return "" if self.common[name] == type_ else type_

    def fields(self, fields):
        return [Shown([f.name], f.type if f.meaning else self.own(f.name, f.type), f.optional, "" if f.meaning == PLAIN else f.meaning) for f in fields]

    def message(self, method, word, suffix):
        """The fields of a message, or where they stand already."""
        if suffix in ("none", "free_map"):
            return ""
        name = self.headers.suffixes[suffix]
        if (word, name) in self.shown:
            first = self.shown[word, name]
            return f"{word}: [`{first}`](#{md.slug(first)})'s.\n\n"
        self.shown[word, name] = method
        fields, title, included = self.headers.lists[name], word, self.headers.includes.get(name)
        if (word, included) in self.shown:
            first = self.shown[word, included]
            less = [field.name for field in self.headers.lists[self.headers.suffixes[self.headers.table[first][0]]] if field not in fields]
            fields = [field for field in fields if field not in self.headers.lists[included]]
            title = f"{word}: [`{first}`](#{md.slug(first)})'s, without {' and '.join(f'`{name}`' for name in less)}; and"
        elif included:
            self.shown[word, included] = method
        out = listed(title, self.fields(fields))
        for field in self.headers.lists[name]:
            if field.type.startswith("maps"):
                inner, about = self.headers.array_maps[field.name]
                out += listed(f"In `{field.name}`" + (f", {about.removesuffix('.')}" if about else ""), self.fields(self.headers.lists[inner]))
        return out

    def free(self, method):
        entries = self.headers.results.get(method)
        if not entries:
            raise Wrong(f"method {method}: its result is a free map: a comment \"Result of {method}.\" lists the fields")
        same = [name for name, other in self.headers.results.items() if other is entries]
        if same[0] != method:
            return f"Results: [`{same[0]}`](#{md.slug(same[0])})'s.\n\n"
        out, maps = "", {"Results": {k: v for k, v in entries.items() if not k.startswith("In ")}}
        maps.update({f"In `{k.removeprefix('In ')}`": v for k, v in entries.items() if k.startswith("In ")})
        for title, fields in maps.items():
            shown = []
            for names, meaning in fields.items():
                *names, kind = names.split(", ")
                if kind not in FREE_TYPES or not names or not meaning:
                    raise Wrong(f"result of {method}: {', '.join(names)}, {kind}: \"NAME, TYPE: meaning.\"")
                for name in names:
                    if kind == "array of map" and f"In `{name}`" not in maps and "as in" not in meaning.lower():
                        raise Wrong(f"result of {method}: {name}: \"In {name}:\" lists the fields of its maps")
                if meaning == COMMON and not set(names) <= set(self.headers.common):
                    raise Wrong(f"result of {method}: no common field {', '.join(names)}")
                self.headers.in_common.update(names if meaning == COMMON else ())
                if meaning == COMMON:
                    shown += [Shown([name], self.own(name, FREE_TYPES[kind]), True, "") for name in names]
                else:
                    shown.append(Shown(names, FREE_TYPES[kind], True, "" if meaning == PLAIN else meaning))
            out += listed(title, shown)
        return out

    def method(self, name):
        comment = self.headers.methods.get(name)
        if not comment:
            raise Wrong(f"method {name}: no comment says \"Method {name}.\"")
        out = f"### `{name}`\n\n"
        for i, paragraph in enumerate(comment.paragraphs):
            item = re.match(r"\d\. ", paragraph)
            follows = item and i + 1 < len(comment.paragraphs) and re.match(r"\d\. ", comment.paragraphs[i + 1])
            out += md.wrap(linked(paragraph), "   " if item else "") + ("" if follows else "\n")
        if "Callers" in comment.tags:
            out += md.wrap(f"**{CALLERS[comment.tags['Callers'].removesuffix('.')]}**") + "\n"
        if "Errors" in comment.tags:
            errors = re.split(r"(?:^|; )(?=[A-Z_]+(?:, [A-Z_]+)*: )", comment.tags["Errors"])
            if errors[0]:
                raise Wrong(f"method {name}: an error begins with its name")
            out += bullets("Errors", [linked(error.removesuffix(".")) for error in errors[1:]])
        params, result = self.headers.table[name]
        out += self.message(name, "Params", params)
        out += self.free(name) if result == "free_map" else self.message(name, "Results", result)
        if name in self.headers.notifications:
            told, about, fields = self.headers.notifications[name]
            out += md.wrap(f"**Notification** `{told}`: {linked(' '.join(about.paragraphs))}") + "\n"
            out += listed(f"In `{told}`", self.fields(self.headers.lists[fields]))
        return out

    def text(self):
        left = set(self.headers.table)
        parts = [md.begin("Methods", "the comments of `proto/messages.h` and `proto/features/`", ABOUT.split("\n\n", maxsplit=1)[0]), "\n",
                 "\n".join(md.wrap(text) for text in ABOUT.split("\n\n")[1:]), "\n"]
        common = [md.wrap(f"- `{name}`\0{self.common.get(name)}: {linked(meaning)}", "  ") for name, meaning in self.headers.common.items()]
        parts.append("## Common fields\n\n" + "".join(common) + "\n")
        for task, names in TASKS.items():
            parts.append(f"## {task}\n\n")
            for name in names.split():
                parts.append(self.method(name))
                left.discard(name)
        if set(self.headers.common) - self.headers.in_common:
            raise Wrong(f"no message has the common fields {', '.join(sorted(set(self.headers.common) - self.headers.in_common))}")
        if left:
            raise Wrong(f"no task of tests/docs/methods.py has {', '.join(sorted(left))}")
        parts.append("## Values\n\n")
        for enum, (about, rows) in self.headers.enums.items():
            parts.append(f"### {enum}\n\n" + md.wrap(about) + "\n")
            parts.append("".join(md.wrap(f"- {value} {name}: {linked(meaning)}", "  ") for value, name, meaning in rows) + "\n")
        return "".join(parts).rstrip("\n") + "\n"


def page():
    return Page(Headers()).text()


if __name__ == "__main__":
    try:
        sys.stdout.write(page())
    except Wrong as wrong:
        sys.exit(str(wrong))

#!/usr/bin/python3
"""How pages are written. Generated ones are up to date, sentences are short, and words are the
field's. What a page states of versions, trees and programs is true.

$UCMCTL names the programs whose --help the page of commands is compared with. `make docs` mends generated pages.
"""

import collections
import os
import pathlib
import re
import sys
import unittest

from test_docs import SOURCES, UCMD, Document, comments

TOP = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("UCMCTL", str(TOP / "build/ucmctl"))).parent
sys.path.insert(0, str(TOP / "tests/docs"))
sys.dont_write_bytecode = True

import make  # noqa: E402  pylint: disable=wrong-import-position
import text as md  # noqa: E402  pylint: disable=wrong-import-position
import words  # noqa: E402  pylint: disable=wrong-import-position

BUDGET_WORDS = 60_000  # of all pages but those of docs/lab
TERMS = 60
COLUMNS = 100
SENTENCE_WORDS, LONG_WORDS = 40, 30
FIRST_WORDS = 70

#: A word that is not the field's: what to say instead. Words in code are not looked at. docs/terms.md may name both.
RETIRED = {
    r"rooms|(a|the|this|each|every|its) room": "module, or space",
    r"(?<!event )the loop(?='s| (that|thread|serves|owns|runs)\b)": "the event loop",
    r"turns? of the (event )?loop": "iteration",
    r"turn(s|ed|ing)? (of )?K|turned (load|block|chunk)s?": "re-rotate",
    r"extents?": "slab",
    r"strands?": "(layer, KV head)",
    r"shards?": "layer",
    r"(a|an|the|each|every|one|this) fetch|fetches": "gather",
    r"windows? (of|that) (a )?workers?|windows pin": "shared mapping",
    r"lent": "granted",
    r"doomed": "marked for deletion",
    r"tables? of hints|hint tables?|hints": "lookup table",
    r"(?<!hash )chains?(?! keys| of (short|hash|keys|MTP))": "sequence",
    r"(?<!SHA-256 )(?<!image )digests?": "block summary",
    r"(?<!hard-)coded": "encoded",
    r"plain (block|part|form|byte|namespace|KV)s?": "raw",
    r"pieces? of (a |the )?(part|layer|transfer)s?": "fragment",
    r"seal(s|ed|ing)?": "encrypt",
    r"seeds? of (a |the )?namespaces?|namespace'?s'? seeds?": "namespace secret",
    r"write-behind": "write-back",
    r"presumed": "unverified",
    r"companions?": "copy agent",
    r"slices? of (a |the )?(staging )?rings?": "entry of a staging ring",
    r"(?<!falls )(?<!fall )(?<!lags )(?<!lag )behind(?! (a|the) (proxy|load balancer|router|firewall|NAT)\b)(?=\s)": "after, or below",
    r"beside": "alongside, or next to",
    r"anew": "again",
    r"folders?": "directory",
    r"doors?": "interface, or header",
    r"(a|the|each|every) walks?": "transfer",
    r"amid": "during",
    r"he|him|his": "it, or they",
    r"the own": "its own",
    r"(is|are|was|were) had": "has, with a subject",
    r"not measured again|was tried and|part of this repository": "nothing: no diary",
}
#: What other programs call theirs.
OF_OTHERS = {("docs/engines.md", "layer")}
RETIRED_RE = {re.compile(rf"(?<![\w./-])(?:{word})(?![\w-]|\.\w)", re.I): say for word, say in RETIRED.items()}

MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATE = re.compile(rf"\b20[2-9]\d-[01]\d(-[0-3]\d)?\b|\b({MONTHS}) (\d{{1,2}}, )?20\d\d\b")
COMMIT = re.compile(r"(?<![\w/=-])(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])(?:[0-9a-f]{7,10}|[0-9a-f]{12}|[0-9a-f]{40})(?![\w-])")
NUMBERS = dict(zip("two three four five six seven eight nine ten eleven twelve".split(), range(2, 13)))


def pages(lab=False):
    return [name for name in words.names() if lab or words.kind(name) != "lab"]


def without_code(document):
    """With as many lines."""
    text = re.sub(r"^( *)```.*?^ *```$", lambda found: "\n" * found[0].count("\n"), document.text, flags=re.S | re.M)
    return re.sub(r"(?<=\n\n)(?:    [^\n]*\n+)+", lambda found: found[0] if re.match(r" +([-*]|\d+\.) ", found[0]) else "\n" * found[0].count("\n"), text)


def paragraphs(document):
    """Prose alone: paragraphs and items of lists as (line, text), without headings, tables, pictures and code."""
    text = without_code(document)
    found, lines, first, item = [], [], 0, re.compile(r"\s*([-*]|\d+\.) ")
    for n, line in enumerate([*text.splitlines(), ""], 1):
        ends = not line.strip() or re.match(r"#|\s*\||!\[", line)
        if (ends or item.match(line)) and lines:
            found.append((first, " ".join(lines)))
            lines = []
        if not ends:
            first = first if lines else n
            lines.append(item.sub("", line.strip(), count=1) if not lines else line.strip())
    return found


def cells(document):
    """Of tables: (line, text)."""
    return [(n, cell) for n, line in enumerate(without_code(document).splitlines(), 1) if line.lstrip().startswith("|")
            for cell in re.split(r"(?<!\\)\|", line) if re.search(r"\w", cell)]


def headings(document):
    """Not comments of code."""
    return [(n, line.lstrip("# ")) for n, line in enumerate(without_code(document).splitlines(), 1) if re.match("#+ ", line)]


def spoken(text):
    """Without code, addresses and what emphasis is made of; each code is a word."""
    text = re.sub(r"(?<!`)`[^`]+`(?!`)", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"https?://\S+", "CODE", text)
    text = re.sub(r'"[^"]*"', lambda found: found[0] if " " in found[0] else "CODE", text)
    return re.sub(r"\*\*|(?<!\w)[*_]|[*_](?!\w)", "", text)


def sentences(text):
    text = re.sub(r"\b(e\.g|i\.e|etc|vs|cf|No|approx)\.", lambda found: found[1].replace(".", ""), spoken(text))
    return [part for part in re.split(r"(?<=[.?!])[)\"']*\s+|:$", text) if re.search(r"\w", part)]


def length(sentence):
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


class Case(unittest.TestCase):
    def none(self, wrong, why=""):
        self.assertEqual(wrong, [], f"{len(wrong)} {why}\n" + "\n".join(map(str, wrong[:80])))


class Generated(Case):
    def test_pages_are_up_to_date(self):
        made = make.texts(BUILD)
        self.assertIn("docs/configuration.md", made)
        self.none([name for name, text in made.items() if md.read(name) != text], "pages are old; `make docs` writes them")

    def test_pages_say_that_they_are_generated(self):
        for name in make.texts(BUILD):
            self.assertRegex(md.read(name), r"\A# .*\n\n(?:\S.*\n)+\n\*Generated by `make docs`", name)


class Pages(Case):
    def test_words_of_all_pages(self):
        total = {kind: sum(found.values()) for kind, found in words.by_kind().items()}
        print("words:", ", ".join(f"{kind} {n:,}" for kind, n in total.items()), file=sys.stderr)
        self.assertLessEqual(sum(n for kind, n in total.items() if kind != "lab"), BUDGET_WORDS, total)

    def test_lines_wrap(self):
        wrong = []
        for name in pages():
            code = False
            for n, line in enumerate(md.read(name).splitlines(), 1):
                code ^= bool(re.match(r"\s*```", line))
                alone = re.sub(r"\[[^\]]*\]\([^)]*\)|https?://\S+|`[^`]*`", "", line)
                table, one_word = line.lstrip().startswith("|"), len(line.split()) < 3
                if len(line) > COLUMNS and not (code or table or one_word or line.startswith("#") or len(alone) < COLUMNS / 2):
                    wrong.append(f"{name}:{n}: {len(line)} columns")
        self.none(wrong, "lines are too long")

    def test_the_first_paragraph_says_for_whom(self):
        wrong = []
        for name in pages():
            if name == "CHANGELOG.md":
                continue
            first = [text for _, text in paragraphs(Document(TOP / name)) if not text.startswith("*Generated")][:1]
            if not first or not re.search(r"\b(for|you|your)\b", first[0], re.I) or length(first[0]) > FIRST_WORDS:
                wrong.append(f"{name}: {first}")
        self.none(wrong, f"pages don't begin with who they are for, in {FIRST_WORDS} words")

    def test_no_page_is_a_diary(self):
        wrong = []
        for name in pages():
            document = Document(TOP / name)
            for n, text in paragraphs(document) + cells(document) + headings(document):
                for found in [*DATE.finditer(text), *COMMIT.finditer(text)]:
                    wrong.append(f"{name}:{n}: {found[0]}")
        self.none(wrong, "dates or commits; they belong into docs/lab")

    def test_only_the_index_links_into_the_lab(self):
        wrong = []
        for name in pages():
            wrong += [f"{name}: {target}" for target in re.findall(r"\]\(([^)\s]*)\)", md.read(name)) if re.search(r"(^|/)lab/", target)]
        self.none(wrong, "links into docs/lab")
        index = TOP / "docs/lab/README.md"
        linked = set(re.findall(r"\]\(([\w.-]+\.md)\)", index.read_text()))
        self.assertEqual(linked, {p.name for p in index.parent.glob("*.md")} - {index.name}, "`make docs` writes the index")

    def test_sentences_are_short(self):
        wrong, long = [], collections.Counter()
        for name in pages(lab=True):
            for n, text in paragraphs(Document(TOP / name)):
                for sentence in sentences(text):
                    if length(sentence) > LONG_WORDS:
                        long[name] += 1
                    if length(sentence) > SENTENCE_WORDS and words.kind(name) != "lab":
                        wrong.append(f"{name}:{n}: {length(sentence)} words: {sentence}")
        print(f"sentences of more than {LONG_WORDS} words: {sum(long.values())}", dict(long.most_common(12)), file=sys.stderr)
        self.none(wrong, f"sentences have more than {SENTENCE_WORDS} words")

    def test_words_are_the_field_s(self):
        wrong = []
        for name in pages():
            if name == "docs/terms.md":
                continue
            document = Document(TOP / name)
            for n, text in paragraphs(document) + cells(document) + headings(document):
                text = spoken(text)
                wrong += [f"{name}:{n}: {found[0]!r}: say {say}: ...{text[max(0, found.start() - 30):found.end() + 30]}..."
                          for word, say in RETIRED_RE.items() if (name, say) not in OF_OTHERS for found in word.finditer(text)]
                wrong += [f"{name}:{n}: 'Who' as subject: {sentence}" for sentence in sentences(text)
                          if re.match(r"Who(ever)? (?!is it\b)", sentence) and not sentence.endswith("?") and (n, text) not in headings(document)
                          and re.search(r"[.;]$", sentence)]
        self.none(wrong, "retired words; docs/terms.md has the field's")

    def test_words_of_comments_are_the_field_s(self):
        """But for words that have another sense in code: a chain of a hash table, an extent of a copy, a sealed memfd."""
        other = re.compile("chain|extent|walk|room|seal|shard|beside|behind|door|fetch")
        here = {word: say for word, say in RETIRED_RE.items() if not other.search(word.pattern)}
        any_of_them = re.compile("|".join(word.pattern for word in here), re.I)  # in one pass, as nearly all have none
        wrong = [f"{path.relative_to(TOP)}: {found[0]!r}: say {say}"
                 for path in SOURCES if path.suffix in (".c", ".h", ".cu", ".cuh", ".py", ".sh") and path != pathlib.Path(__file__)
                 for comment in comments(path)
                 for plain in [re.sub(r"\s+(\*|//|#)?\s*", " ", comment)] if any_of_them.search(plain)
                 for word, say in here.items() for found in word.finditer(plain)]
        self.none(wrong, "retired words; docs/terms.md has the field's")

    def test_terms(self):
        page = TOP / "docs/terms.md"
        if page.exists():
            rows = [line for line in page.read_text().splitlines() if line.startswith("|") and not re.match(r"\|[-| :]+$", line)]
            tables = len(re.findall(r"^\|[-| :]+$", page.read_text(), re.M))
            self.assertLessEqual(len(rows) - tables, TERMS, "docs/terms.md defines too many terms")


def directories(path):
    """That git has, or that have a file with source in them."""
    return {p.name for p in (TOP / path).iterdir() if p.is_dir() and not p.name.startswith((".", "build", "__")) and any(p.rglob("*.*"))}


class Facts(Case):
    def test_the_protocol_s_version(self):
        version, seen = md.defined("UCM_PROTOCOL_VERSION", "proto/limits.h"), 0
        for name in words.names():
            if words.kind(name) == "lab":
                continue
            for found in re.finditer(r"^# .*protocol.*version (\d+)|protocol version (?:\| )?(\d+)|version (\d+) of the protocol", md.read(name), re.M):
                seen += 1
                self.assertEqual(int(found[1] or found[2] or found[3]), version, f"{name}: {found[0]}")
        self.assertGreater(seen, 0)

    def test_trees(self):
        """A page that lists the directories of the tree, in a table or a picture, lists all of them. What it lists below is there."""
        seen = 0
        for name in {"README.md", *pages()}:
            named = collections.defaultdict(set)
            for line in md.read(name).splitlines():
                found = re.match(r"\| `([\w/]+)/` \||([a-z][\w/]*)/  +\S", line)
                if found:
                    parent, _, last = (found[1] or found[2]).rpartition("/")
                    named[parent].add(last)
            for parent, of in named.items():
                if len(of) > 2 and (TOP / parent).is_dir():
                    seen += 1
                    self.none(sorted(of - directories(parent)), f"directories of {parent or 'the tree'} that {name} lists are not there")
                    self.none(sorted(directories("") - of) if not parent else [], f"directories of the tree that {name} lacks")
        self.assertGreater(seen, 0, "README has the tree")

    def test_programs(self):
        """Programs that pages name are built, and the page about installing names all of them."""
        built = {p.name for p in BUILD.glob("ucm*") if p.is_file() and os.access(p, os.X_OK)}
        sources = {p.parent.name for p in (TOP / "daemon/backend").glob("*/main.*")}
        known = built | {f"ucmd-backend-{name}" for name in sources} | {"ucmevents", "ucmd-generator", "ucm-demo"}
        for name in pages():
            for span in Document(TOP / name).spans:
                if re.fullmatch(r"(ucmd-backend|ucmctl|ucm-bench)-[a-z0-9]+|ucm-?(d|ctl|bench|events)", span):
                    self.assertIn(span, known, name)
        install = TOP / "docs/install.md"
        if install.exists():
            self.none([p for p in ("ucmd", "ucmctl", "ucm-bench", "ucmevents") if f"`{p}`" not in install.read_text()], "programs that docs/install.md lacks")

    def test_kinds_of_backends(self):
        """A root is served by a program of ours, or by one of the operator's own."""
        kinds = {p.parent.name for p in (TOP / "daemon/backend").glob("*/main.*")}
        say = {"directory": r"mounted|director", "nfs": r"\bNFS\b", "s3": r"\bS3\b", "mooncake": r"\bMooncake\b"}
        self.assertEqual(set(say), kinds, "a new kind of backend: say here how pages call it")
        for name in ("docs/shared-tier.md", "docs/backends.md", "docs/configuration.md"):
            if name in pages():
                self.none([kind for kind in kinds if not re.search(say[kind], md.read(name), re.I)], f"kinds of roots that {name} lacks")
        for name in words.names():
            for found in re.finditer(rf"\b({'|'.join(NUMBERS)}) kinds of (?:shared )?(?:roots|backends)", md.read(name), re.I):
                self.assertEqual(NUMBERS[found[1].lower()], len(kinds) + 1, f"{name}: {found[0]}")

    def test_alerts(self):
        """Each alert's page has the heading that the alert links to."""
        for alert in make.metrics.alerts():
            file, _, anchor = alert.link.partition("#")
            found = [re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for _, text in headings(Document(TOP / "docs" / file))]
            self.assertIn(anchor, found, f"{alert.name} links to {alert.link}")

    def test_pages_name_no_internal_key(self):
        """Keys for tests and measurements are not for users."""
        text = md.read("daemon/config/table.c")
        internal = [key for key, more in re.findall(r'KEY\("([a-z_.]+)"((?:[^{]|\n)*?)\.help', text) if ".internal" in more]
        self.assertGreater(len(internal), 5)
        for name in pages():
            if words.kind(name) == "user":
                spans = {re.split("[:= ]", span)[0] for span in Document(TOP / name).spans}
                self.none(sorted(spans & set(internal)), f"internal keys in {name}")


if __name__ == "__main__":
    assert os.access(UCMD, os.X_OK), f"{UCMD} is not built"
    unittest.main()

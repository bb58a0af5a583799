#!/usr/bin/python3
"""Only one file makes and checks spans, which name bytes of slots. Only one does so for the copies
that devices run. And the core includes no feature's header."""

import glob
import os
import re
import sys
import unittest

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "tests/shape"))

import includes  # noqa: E402

SPANS, ITEMS, MEMORY = "daemon/cache/ref.c", "daemon/device/job.c", "daemon/arena/"
WRITE = r"(?:\[[^]]*\])?\s*(?:=(?!=)|\+=|-=|\|=|&=|\+\+|--)"


def sources():
    """The daemon's, without comments and strings, which may say anything."""
    for path in sorted(glob.glob(os.path.join(TOP, "daemon", "**", "*.[ch]"), recursive=True)):
        with open(path, encoding="utf-8") as file:
            text = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', re.sub(r"/\*.*?\*/", "", file.read(), flags=re.S))
        yield os.path.relpath(path, TOP), text


def span_writes(text):
    """Places where the file writes fields of its variables that are spans or pointers to spans, or
    makes values of them."""
    found = re.findall(r"\(struct span\)\s*\{", text)
    names = set()
    for variables, parameter in re.findall(r"struct span\s+(?:([\w\s*,\[\]]*);|\**(\w+))", text):
        names.update(re.findall(r"\w+", variables or parameter))
    for name in names:
        found += re.findall(rf"\b{name}(?:\.|->)\w+{WRITE}", text)
        found += re.findall(rf"mem(?:set|cpy|move)\s*\(\s*&?\w*(?:\.|->)?{name}\b", text)
    return found


class Sources(unittest.TestCase):
    def check(self, found, wanted):
        self.assertEqual({path: what for path, what in found.items() if what and not path.startswith(wanted)}, {})
        self.assertTrue(any(what for path, what in found.items() if path.startswith(wanted)), "it finds none at all")

    def test_spans_are_made_by_one_file(self):
        self.check({path: span_writes(text) for path, text in sources()}, SPANS)

    def test_what_lies_in_a_slot_is_asked_by_one_file(self):
        self.check({path: re.findall(r"\barena_memory\s*\(", text) if not path.startswith(MEMORY) else [] for path, text in sources()}, SPANS)

    def test_items_of_jobs_are_written_by_one_file(self):
        """The GPU's module passes on copies of those items, and items of its own measurements."""
        self.check({path: re.findall(rf"\(struct ucm_copy_item\)\s*\{{|\bitems\[[^]]*\](?:\.\w+)?\s*=(?!=)", text)
                    for path, text in sources() if not path.startswith("daemon/cuda/")}, ITEMS)

    def test_the_core_includes_no_feature(self):
        self.assertEqual(includes.wrong(), [])

    def test_it_would_find_one(self):
        for text in ("struct span s; s.len = 4;", "void f(struct span *to) { to->origin += 1; }", "x = (struct span){0};",
                     "struct span s, other; memset(&other, 0, sizeof(other));"):
            self.assertTrue(span_writes(text), text)
        self.assertEqual(span_writes("struct span s; struct other { int len; } o; o.len = s.len; if (s.len == 4) f(&s);"), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)

"""docs/lab/README.md: the studies by title and date."""

import re

import text as md


def page():
    yield md.begin("Studies", "the files of this directory",
                   "For maintainers: the measurements that decided something. Each file names its question, commit, machine and command.")
    rows = []
    for path in sorted((md.TOP / "docs/lab").glob("*.md")):
        if path.name == "README.md":
            continue
        text = path.read_text(encoding="utf-8")
        title = re.search(r"^# (.*)", text, re.M)
        date = re.search(r"\b20\d\d-\d\d(-\d\d)?\b|\b\d{1,2} [A-Z][a-z]+ 20\d\d\b|\b[A-Z][a-z]+ 20\d\d\b", text)
        rows.append((f"[{title[1] if title else path.stem}]({path.name})", date[0] if date else ""))
    yield "\n" + md.table(("study", "date"), rows)

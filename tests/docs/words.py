"""Words of each page, by what the page is for."""

import text as md

GENERATED = ("docs/configuration.md", "docs/metrics.md", "docs/commands.md", "docs/methods.md")


def kind(name):
    return ("generated" if name in GENERATED else "lab" if name.startswith("docs/lab/") else
            "design" if name.startswith("docs/design/") or name == "docs/architecture.md" else "user")


def names():
    """README, CONTRIBUTING, CHANGELOG and all of docs, from the top directory."""
    paths = [md.TOP / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((md.TOP / "docs").rglob("*.md"))
    return [path.relative_to(md.TOP).as_posix() for path in paths]


def count(text):
    """What lies between spaces, as `wc -w` counts."""
    return len(text.split())


def by_kind():
    found = {"user": {}, "generated": {}, "design": {}, "lab": {}}
    for name in names():
        found[kind(name)][name] = count(md.read(name))
    return found

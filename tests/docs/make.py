#!/usr/bin/python3
"""make.py BUILD: writes the generated pages of docs/ from the tree and from the programs in BUILD, and prints the words of each
page. A page is only written when its text changes. --check writes nothing and names the pages that are not up to date."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True

import commands  # noqa: E402
import configuration  # noqa: E402
import lab  # noqa: E402
import metrics  # noqa: E402
import methods  # noqa: E402
import text as md  # noqa: E402
import words  # noqa: E402


def texts(build):
    """{page: its text}. Without all programs there is no page of commands."""
    made = {"docs/configuration.md": configuration.page(), "docs/metrics.md": metrics.page(), "docs/lab/README.md": lab.page(),
            "docs/methods.md": methods.page()}
    if all((build / name).exists() for name in commands.PROGRAMS):
        made["docs/commands.md"] = commands.page(build)
    return {name: "".join(parts) for name, parts in made.items()}


def stale(build):
    """The pages that are not what the tree says."""
    return [name for name, text in texts(build).items() if not (md.TOP / name).exists() or md.read(name) != text]


def report():
    total = {}
    for kind, pages in words.by_kind().items():
        print(f"{kind}:")
        for name, n in pages.items():
            print(f"  {n:6,}  {name}")
        total[kind] = sum(pages.values())
        print(f"  {total[kind]:6,}  in all")
    print(f"{sum(n for kind, n in total.items() if kind != 'lab'):,} words without lab")


def main(build, check=""):
    build = pathlib.Path(build)
    if check:
        found = stale(build)
        print("".join(f"{name} is not up to date: make docs\n" for name in found), end="")
        return bool(found)
    for name, text in texts(build).items():
        if not (md.TOP / name).exists() or md.read(name) != text:
            (md.TOP / name).write_text(text, encoding="utf-8")
    report()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

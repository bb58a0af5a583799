#!/usr/bin/env python3
"""The core includes no feature's header: modules.py says which files are whose, and which headers are interfaces.

    includes.py [--shrink]

allowed.txt has today's exceptions, one a line, and can only shrink. A new exception fails. One that
is no longer needed fails, too; --shrink removes it.
"""

import os
import re
import sys

import modules

ALLOWED = os.path.join(modules.TOP, "tests/shape/allowed.txt")


def found():
    """{"FILE HEADER"} of files of the core."""
    pairs = set()
    for file in modules.listed("daemon", "client/lib", "proto", "kernels", ends=modules.C):
        if modules.core_of(file):
            headers = re.findall(r'^\s*#\s*include "([^"]+)"', modules.read(file), re.M)
            pairs.update(f"{file} {header}" for header in headers if modules.feature_of(header) and header not in modules.INTERFACES)
    return pairs


def allowed():
    with open(ALLOWED, encoding="utf-8") as lines:
        return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def idle():
    """Patterns of modules.py that match no file."""
    files = list(modules.listed("daemon", "client", "proto", "kernels"))
    patterns = [pattern for module in (*modules.FEATURES.values(), *modules.CORE.values()) for pattern in module] + list(modules.INTERFACES)
    return [pattern for pattern in patterns if not any(modules.within(file, [pattern]) for file in files)]


def wrong():
    """The problems, as sentences; []: there are none."""
    now, may = found(), allowed()
    hint = "the core names no feature; an interface of one stands in modules.py's INTERFACES"
    return ([f"{pair.replace(' ', ' includes ')}, a header of {modules.feature_of(pair.split()[1])}: {hint}" for pair in sorted(now - may)]
            + [f"tests/shape/allowed.txt: \"{pair}\" is over: python3 tests/shape/includes.py --shrink" for pair in sorted(may - now)]
            + [f"tests/shape/modules.py: no file is {pattern}" for pattern in idle()])


def shrink():
    now = found()
    with open(ALLOWED, encoding="utf-8") as file:
        kept = [line for line in file if line.startswith("#") or not line.strip() or line.strip() in now]
    with open(ALLOWED, "w", encoding="utf-8") as file:
        file.writelines(kept)


if __name__ == "__main__":
    if sys.argv[1:] == ["--shrink"]:
        shrink()
    sentences = wrong()
    print("\n".join(sentences) or f"includes: the core names no feature, but for {len(allowed())} times")
    sys.exit(bool(sentences))

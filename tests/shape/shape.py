#!/usr/bin/env python3
"""The measures of the tree's shape (`make shape`): what a request runs, which files know which feature, circles, sizes.

    shape.py [--built DIRECTORY] [--counted DIRECTORY]

--built: a build, whose objects tell which file calls which. --counted: a build with --coverage, in which requests are followed.
"""

import argparse
import glob
import os
import re
import subprocess
from collections import Counter, defaultdict

import modules
import walks

PRODUCT = ("daemon", "client", "proto", "kernels", "config", "systemd")


# ---- names ----

def code(text):
    """Without comments and strings."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.S)
    return re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', text)


def naming(subject):
    """Files of the daemon outside of the subject's module that name it."""
    module, names, others = modules.NAMES[subject]
    found = []
    for file in modules.listed("daemon", ends=modules.C):
        if modules.feature_of(file) != module and not file.startswith(modules.APART):
            words = {word.lower() for word in re.findall(r"\w+", code(modules.read(file)))}
            if any(re.fullmatch(names, word) and not re.fullmatch(others, word) for word in words):
                found.append(file)
    return found


# ---- circles ----

def sources_of(built):
    """{file: its objects}: one source of SIMD is compiled for several instruction sets."""
    found, objects = defaultdict(list), os.path.join(modules.TOP, built, "obj")
    for path in glob.glob(f"{objects}/**/*.o", recursive=True):
        file = re.sub(r"^(kernels/\w+)/(?:base|avx2|avx512)/", r"\1/simd/", os.path.relpath(path, objects))[:-2] + ".c"
        if file.split("/")[0] in PRODUCT and os.path.exists(os.path.join(modules.TOP, file)):
            found[file].append(path)
    return found


def uses(built):
    """{file: the files whose functions or data it names}, of the symbols of objects: what is reached through a pointer does not count."""
    defined, wanted = defaultdict(set), defaultdict(set)
    for file, objects in sources_of(built).items():
        for line in subprocess.run(["nm", *objects], capture_output=True, text=True, check=True).stdout.split("\n"):
            kind, _, symbol = line[17:].partition(" ")
            if kind == "U":
                wanted[file].add(symbol)
            elif kind and kind in "TDBRVWC":
                defined[symbol].add(file)
        wanted.setdefault(file, set())
    return {file: {other for symbol in symbols for other in defined.get(symbol, ()) if other != file} for file, symbols in wanted.items()}


def circles(graph):
    """Sets of files of which each reaches each other: Tarjan's strongly connected components, of two files or more."""
    order, low, stack, held, found = {}, {}, [], set(), []
    for root in sorted(graph):
        if root in order:
            continue
        order[root] = low[root] = len(order)
        stack.append(root)
        held.add(root)
        work = [(root, iter(sorted(graph[root])))]
        while work:
            file, others = work[-1]
            other = next(others, None)
            if other is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[file])
                if low[file] == order[file]:
                    circle = stack[stack.index(file):]
                    del stack[stack.index(file):]
                    held.difference_update(circle)
                    if len(circle) > 1:
                        found.append(sorted(circle))
            elif other not in order:
                order[other] = low[other] = len(order)
                stack.append(other)
                held.add(other)
                work.append((other, iter(sorted(graph[other]))))
            elif other in held:
                low[file] = min(low[file], order[other])
    return sorted(found, key=lambda circle: (-len(circle), circle))


def calls_by_name(graph):
    """{file of the core: files of features that it names}, interfaces left out."""
    interfaces = {header.removesuffix(".h") for header in modules.INTERFACES}
    found = {file: sorted(other for other in others if modules.feature_of(other) and not other.startswith(tuple(interfaces)))
             for file, others in graph.items() if modules.core_of(file)}
    return {file: others for file, others in found.items() if others}


# ---- sizes ----

def members(file, struct):
    """How many members `struct` has, those of structs and unions that are defined within it too."""
    text = code(modules.read(file))
    start = re.search(rf"^struct {struct} {{", text, re.M)
    if not start:
        return None
    depth, end = 1, start.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    body = text[start.end():end - 1]
    # A declaration may name several; commas within brackets separate arguments and elements.
    body = re.sub(r"\([^()]*\)", "", re.sub(r"\[[^\]]*\]", "", re.sub(r"\([^()]*\)", "", body)))
    while (flat := re.sub(r"(?:struct|union)(?:\s+\w+)?\s*{([^{}]*)}", r"\1", body)) != body:
        body = flat
    return sum(part.count(",") + 1 for part in body.split(";") if part.strip())


def where_is(struct):
    files = sorted(modules.listed("daemon", ends=modules.C), key=lambda file: not file.endswith(".h"))
    return next((file for file in files if re.search(rf"^struct {struct} {{", modules.read(file), re.M)), None)


def lines(files):
    return sum(modules.read(file).count("\n") for file in files)


# ---- what is printed ----

def print_names():
    print("files of daemon/ that name, outside of its module")
    for subject in modules.NAMES:
        found = naming(subject)
        print(f"  {subject:<28}{len(found):>6}   {', '.join(f'{directory} {n}' for directory, n in by_directory(found))}")


def by_directory(files):
    return Counter(os.path.dirname(file).removeprefix("daemon/") for file in files).most_common()


def print_circles(built, all_files):
    graph = uses(built)
    found = circles(graph)
    print(f"circles of files that call each other, of {len(graph)} objects' symbols")
    print(f"  {'number':<28}{len(found):>6}")
    print(f"  {'files of the largest':<28}{max(map(len, found), default=0):>6}")
    for circle in found:
        directory = os.path.commonpath(circle)
        print(f"    {len(circle):>3}  {directory}" + (f": {' '.join(os.path.relpath(file, directory) for file in circle)}" if all_files else ""))


def print_calls(built, names):
    found = calls_by_name(uses(built))
    print("files of the core that call a feature by name")
    print(f"  {'files, of features':<28}{len(found):>6}, {len({other for others in found.values() for other in others})}")
    for file, others in found.items() if names else ():
        print(f"    {file}: {' '.join(others)}")


def print_members():
    print("members")
    for struct in ("transfer", "copies", "load", "dump", "cache", "session", "requests"):
        file = where_is(struct)
        if file:
            print(f"  {'struct ' + struct:<28}{members(file, struct):>6}   {file}")


def print_sizes():
    parts, features, rest = defaultdict(list), defaultdict(list), []
    for file in modules.listed("daemon", "proto", "client/lib", "kernels"):
        part, feature = modules.core_of(file), modules.feature_of(file)
        (parts[part] if part else features[feature] if feature else rest).append(file)
    print("lines of the core")
    for part in modules.CORE:
        print(f"  {part:<28}{lines(parts[part]):>6}   {len(parts[part])} files")
    print(f"  {'all of it':<28}{sum(map(lines, parts.values())):>6}")
    print("lines of features' modules")
    for feature in modules.FEATURES:
        print(f"  {feature:<28}{lines(features[feature]):>6}   {len(features[feature])} files")
    print(f"  {'around both':<28}{lines(rest):>6}   {', '.join(f'{directory} {n}' for directory, n in by_directory(rest))}")
    print("lines")
    for name, directories in (("product", [*PRODUCT, "Makefile"]), ("tests", ["tests"])):
        print(f"  {name:<28}{lines(modules.listed(*directories)):>6}")


def print_walks(counted):
    print("a request of 4 blocks in DRAM, in the daemon       functions  files  calls")
    for name, walk in walks.followed(counted).items():
        print(f"  {name:<49}{len(walk):>9}{len({file for file, _ in walk}):>7}{round(sum(walk.values())):>7}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--built", metavar="DIRECTORY")
    parser.add_argument("--counted", metavar="DIRECTORY")
    parser.add_argument("--names", action="store_true", help="name the files of each circle, and those of the core that call a feature")
    parser.add_argument("--walk", metavar="NAME", help="name only the functions that a request (load, dump, lookup) runs")
    args = parser.parse_args()
    if args.walk:
        for (file, function), calls in sorted(walks.followed(args.counted, [args.walk])[args.walk].items()):
            print(f"{calls:8.2f}  {file}: {function}")
        return
    if args.counted:
        print_walks(args.counted)
    print_names()
    if args.built:
        print_circles(args.built, args.names)
        print_calls(args.built, args.names)
    print_members()
    print_sizes()


if __name__ == "__main__":
    main()

#!/usr/bin/python3
"""What the documentation names is there: commands, options, targets, files, links, configuration keys; and the files that
comments of the sources name."""

import functools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import tempfile
import unittest

TOP = pathlib.Path(__file__).resolve().parents[2]
UCMD = os.environ.get("UCMD", str(TOP / "build/ucmd"))
PROGRAMS = {"ucmd": UCMD, "ucmctl": os.environ.get("UCMCTL", str(TOP / "build/ucmctl")),
            "ucm-bench": os.environ.get("UCM_BENCH", str(TOP / "build/ucm-bench"))}
# Where libzmq3-dev was.
PROGRAMS["ucmevents"] = str(pathlib.Path(PROGRAMS["ucmctl"]).parent / "ucmevents")
# Commands that are not ours: the test looks only at their first word. A command that is neither
# ours nor here fails the test.
SYSTEM = set("""apt apt-get awk cat cc cd chmod chown cmake cp curl docker dpkg echo env export exportfs fio for git grep install journalctl jq kill kubectl ldd lfs
    mkdir mount mv lmcache numactl nvme openssl perf pip podman pkg-config printf ps python python3 rm sed setfattr smartctl ssh sudo sudoedit systemctl
    systemd-run systemd-sysusers systemd-tmpfiles tar taskset trtllm-serve umount uv useradd usermod vllm wget""".split())
# Files that tests/check.sh and make leave, or programs whose rules are patterns.
MADE = {"build/check", "build/demo", "build/results", "build/san-address", "build/san-thread", "build/wheel/ucmclient-*.whl", "build/bench-bundle",
        "build/bench-bundle/run.sh", "build/deb", "build/deb/ucmd_*.deb", "build/deb/libucmclient0_*.deb", "build/gpu",
        "build/gpu/run.sh"}
TEXT_LANGUAGES = {"c", "cpp", "json", "text", "python", "ini", "svg"}
SOURCES = [p for directory in ("proto", "kernels", "client", "daemon", "config", "tests")
           for kind in ("*.c", "*.h", "*.cu", "*.cuh", "*.py", "*.sh", "*.S", "*.md", "*.map", "*.mk") for p in (TOP / directory).rglob(kind)]


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


@functools.cache
def help_of(*command):
    done = run(*command, "--help")
    return done.stdout if done.returncode == 0 else ""


@functools.cache
def makefile():
    return "".join(f.read_text() for f in (TOP / "Makefile", *(TOP / name for name in tree()[0] if name.endswith(".mk"))))


@functools.cache
def make_names():
    """Every target and prerequisite that make knows from the Makefile; it runs nothing. The build
    directory is the one that documents name, whatever the tests were built in."""
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "BUILD", "SAN")}
    rules = run("make", "-C", str(TOP), "-pq", "list-fuzz", env=environment).stdout
    names = set()
    for line in rules.splitlines():
        if re.match(r"[^\t#\s][^=]*:(?!=)", line):
            names.update(line.replace(":", " ").split())
    # Without a CUDA toolkit make does not read the rest of kernels/cuda.mk, nor of tests/gpu/gpu.mk.
    names.update(re.findall(r"^([a-z][\w-]*):", makefile(), re.M))
    return names | {f"build/{name}" for name in re.findall(r"^\$O/([\w./-]+):", makefile(), re.M)}


def tenant_keys():
    """What `tenant_settings` gives."""
    return set(re.findall(r'X\(\w+, "([a-z.]+)"', (TOP / "daemon/config/tenants.h").read_text()))


@functools.cache
def config_keys():
    return set(re.findall(r'KEY\("([a-z_.]+)"', (TOP / "daemon/config/table.c").read_text()))


@functools.cache
def messages():
    text = "".join(header.read_text() for header in [TOP / "proto/messages.h", *(TOP / "proto/features").glob("*.h")])
    return set(re.findall(r'"([a-z]+\.[a-z_]+)"', text))


@functools.cache
def tree():
    paths = [p.relative_to(TOP).as_posix() for p in SOURCES]
    return set(paths), {p.rsplit("/", 1)[-1] for p in paths}


def named_file_exists(name, beside=TOP):
    """A path from the top, or from the directory of the file that names it, or the end of a path,
    such as cache/cache.c."""
    name = name.rstrip("/")
    if any(list(directory.glob(name + end)) for directory in (TOP, beside) for end in ("", ".c")):
        return True
    paths, bases = tree()
    return name in bases or any(p.endswith("/" + name) for p in paths)


def documents():
    files = [TOP / "README.md", TOP / "CONTRIBUTING.md", *TOP.glob("docs/*.md"), *TOP.glob("docs/design/*.md")]
    return files + [p for directory in ("client", "daemon", "kernels", "proto", "tests") for p in (TOP / directory).rglob("*.md")]


class Document:
    def __init__(self, path):
        self.path, self.name = path, str(path.relative_to(TOP))
        self.text = path.read_text()
        self.blocks = []  # (language, text)
        rest = re.sub(r"^( *)```([^\n]*)\n(.*?)^ *```$", self.block, self.text, flags=re.S | re.M)
        rest = re.sub(r"(?:(?<=\n\n)(?:    [^\n]*\n+)+)", self.indented, rest)
        self.prose = rest
        self.spans = [" ".join(s.split()) for s in re.findall(r"(?<!`)`([^`]+)`(?!`)", rest)]

    def block(self, found):
        self.blocks.append((found[2].strip(), found[3]))
        return ""

    def indented(self, found):
        if re.search(r"^    [*-] ", found[0], re.M):  # a list in a list
            return found[0]
        self.blocks.append(("", found[0]))
        return "\n"


def commands(text):
    """Words of each command of a shell text; raises ValueError for what no shell reads."""
    inner = []
    text = re.sub(r"\$\(([^)]*)\)", lambda found: inner.append(found[1]) or "RESULT", text)
    pending = ""
    for line in ["\n".join(inner), *text.replace("\\\n", " ").splitlines()]:
        pending = pending + "\n" + line if pending else re.sub(r"^\s*\$ ", "", line)
        lexer = shlex.shlex(pending, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # a quote that a later line closes
        pending, command, skip = "", [], False
        for word in [*words, ";"]:
            if set(word) <= set("();|&"):
                if command:
                    yield command
                command = []
            elif set(word) <= set("<>&"):
                skip = True
            elif not skip and (command or not re.match(r"[A-Z_]+=", word)):
                command.append(word)
            else:
                skip = False
    if pending.strip():
        raise ValueError(f"a quote is not closed: {pending}")


class Docs(unittest.TestCase):
    def wrong_with_make(self, words):
        for word in words:
            name, equals, _ = word.partition("=")
            if equals and not re.search(rf"\b{name}\b", makefile()):
                yield f"make has no variable {name}"
            if not equals and not word.startswith("-") and name not in make_names() | {"TARGET"}:
                yield f"make has no target {name}"

    def wrong_with_ours(self, program, words):
        if not os.access(PROGRAMS[program], os.X_OK) and program == "ucmevents":
            return
        text, options = help_of(PROGRAMS[program]), [w for w in words if re.match(r"--\w", w)]
        first = next((w for w in words if re.match(r"[a-z]+(-[a-z]+)*$", w)), None)
        if program != "ucmd" and first:
            if not re.search(rf"^  {first}\b", text, re.M):
                yield f"{program} has no command {first}"
            text += help_of(PROGRAMS[program], first)
        for option in options:
            if not re.search(rf"{re.escape(option.partition('=')[0])}\b", text):
                yield f"{program} {first or ''} has no option {option}"

    def wrong_with(self, words):
        while words[:1] == ["sudo"]:
            words = words[3:] if words[1:2] == ["-u"] else words[1:]
        if not words:
            return
        first, rest = words[0], words[1:]
        name = pathlib.PurePath(first).name
        if first == "make":
            yield from self.wrong_with_make(rest)
        elif first in PROGRAMS or (first.startswith("build/") and name in PROGRAMS):
            yield from self.wrong_with_ours(name, rest)
        elif re.match(r"(\./)?(build|tests|docs|client)/", first):
            yield from self.wrong_with_path(first.removeprefix("./"))
        elif not (first in SYSTEM or re.match(r"[A-Za-z_]+=", first)):
            yield f"no command that is known: {' '.join(words)}"
        for word in rest:
            if re.match(r"(build|tests|docs|client|daemon)/[\w./*-]+$", word):
                yield from self.wrong_with_path(word)

    def wrong_with_path(self, path):
        if path.startswith("build/"):
            if path.rstrip("/") not in make_names() | MADE:
                yield f"nothing makes {path}"
        elif not named_file_exists(path):
            yield f"no file {path}"

    def check(self, wrong, where):
        for sentence in wrong:
            with self.subTest(where):
                self.fail(f"{where}: {sentence}")

    def test_commands(self):
        seen = 0
        for document in map(Document, documents()):
            for language, text in document.blocks:
                if language in TEXT_LANGUAGES or language == "yaml":
                    continue
                self.assertIn(language, ("", "sh", "bash", "console"), document.name)
                lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
                first = re.sub(r"^(\$ |[A-Z_]+=\S+ )*", "", lines[0].strip()).split()[0]
                ours = first in PROGRAMS or first == "make" or re.match(r"(build|tests)/.*[\w]$", first)
                if not language and not ours and first not in SYSTEM:
                    self.assertIsNone(re.search(r"^\s*(sudo |\$ )?(make [a-z]|ucmctl [a-z-])", text, re.M),
                                      f"{document.name}: begin this block with a command, or label it sh: {text}")
                    continue  # a picture, or what a program prints
                for words in commands(text):
                    seen += 1
                    self.check(self.wrong_with(words), document.name)
            for span in document.spans:
                if re.match(r"([A-Z_]+=\S+ )*(sudo )?(make|ucmctl|ucmd|ucm-bench|build/\S+) [^=<]", span):
                    for words in commands(re.sub(r"[\[\]]|\.\.\.", "", span)):
                        seen += 1
                        self.check(self.wrong_with(words), document.name)
        self.assertGreater(seen, 50)

    def test_paths(self):
        seen = 0
        for document in map(Document, documents()):
            for span in document.spans:
                path = re.sub(r":\d+$", "", span)
                if re.match(r"(build|client|config|daemon|docs|kernels|proto|systemd|tests)/[\w./*-]*$", path):
                    seen += 1
                    self.check(self.wrong_with_path(path), document.name)
                elif re.match(r"[\w-]+/[\w/-]+\.(c|h|cu|py|sh|md|yaml)$", path) or re.match(r"[\w-]+\.(c|cu)$", path):
                    seen += 1
                    if not named_file_exists(path, document.path.parent) and not pathlib.Path("/usr/include", path).exists():
                        self.check([f"no file {path}"], document.name)
        self.assertGreater(seen, 30)

    def test_links(self):
        seen = 0
        for document in map(Document, documents()):
            for target in re.findall(r"\]\(([^)\s]+)\)", document.prose):
                if re.match(r"https?://|mailto:", target):
                    continue
                seen += 1
                file, _, anchor = target.partition("#")
                path = document.path.parent / file if file else document.path
                self.assertTrue(path.exists(), f"{document.name}: link to {target}")
                if anchor and path.suffix == ".md":
                    headings = re.findall(r"^#+ (.*)", path.read_text(), re.M)
                    slugs = {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}
                    self.assertIn(anchor, slugs, f"{document.name}: link to {target}")
        self.assertGreater(seen, 20)

    def test_configuration(self):
        """Blocks of YAML pass --check, with small sizes, and the test's directories in place of
        theirs. Keys in the text exist."""
        sections = {key.partition(".")[0] for key in config_keys() if "." in key}
        for document in map(Document, documents()):
            for _, text in [b for b in document.blocks if b[0] == "yaml"]:
                with tempfile.TemporaryDirectory(prefix="ucmd-docs-") as directory, self.subTest(document.name):
                    memory = tempfile.mkdtemp(prefix="ucmd-docs-", dir="/dev/shm")
                    self.addCleanup(shutil.rmtree, memory)

                    def local(found):
                        path = pathlib.Path((memory if found[1].startswith("/dev/shm/") else directory) + found[1])
                        (path.parent if "." in path.name else path).mkdir(parents=True, exist_ok=True)
                        return str(path)

                    file = pathlib.Path(directory, "ucmd.yaml")
                    small = re.sub(r"\b(dram\.\w+=\d+)GiB", r"\1MiB", text)  # of what tenants are guaranteed, and get at most
                    file.write_text(re.sub(r"(?<![\w/:.])(/\w[\w/.-]+)", local, small))
                    sizes = ["arena.size=64MiB"] + ["nvme.size=256MiB"] * ("nvme:" in text)
                    done = run(UCMD, "--config", str(file), "--set", f"socket={directory}/s",
                               *[word for size in sizes for word in ("--set", size)], "--check")
                    self.assertEqual(done.returncode, 0, f"{text}\n{done.stderr}")
            for span in document.spans:
                found = re.match(r"([a-z]+\.[a-z_]+)(: .*|=.*)?$", span)
                if found and found[1].partition(".")[0] in sections and not re.search(r"\.(c|h|cu|py|md)$", found[1]):
                    known = config_keys() | tenant_keys() | messages()
                    self.check([] if found[1] in known else [f"no configuration key {found[1]}"], document.name)


def comments(path):
    text = path.read_text(errors="replace")
    if path.suffix in (".c", ".h", ".cu", ".cuh"):
        return re.findall(r"/\*.*?\*/|(?<!:)//[^\n]*", text, re.S)
    docstrings = re.findall(r'^\s*(""".*?""")', text, re.S | re.M) if path.suffix == ".py" else []
    return docstrings + re.findall(r"(?:^|\s)#[^\n]*", text, re.M)


class Comments(unittest.TestCase):
    def test_files_that_comments_name(self):
        seen, wrong = 0, []
        for path in SOURCES:
            if path.suffix not in (".c", ".h", ".cu", ".cuh", ".py", ".sh"):
                continue
            for comment in comments(path):
                for name in re.findall(r"(?<![\w/.<-])((?:[a-z_]+/)*[a-z][a-z0-9_]*\.(?:c|h|cu|md))\b(?![.(\w])", comment):
                    seen += 1
                    directory = path.parent
                    if not (named_file_exists(name, directory) or pathlib.Path("/usr/include", name).exists()):
                        wrong.append(f"{path.relative_to(TOP)}: no file {name}")
        self.assertGreater(seen, 100)
        self.assertEqual(wrong, [], "comments name files that are not there")


if __name__ == "__main__":
    unittest.main()

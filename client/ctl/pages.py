"""pages.py DIRECTORY CONFIG PROGRAM...: writes manual pages and completion for bash, zsh and fish, of what each program's --help says
and of the shipped configuration. What is in a program's tables is in its page; nobody edits the pages. Runs while building."""

import os
import re
import subprocess
import sys

#: A word of a command that a shell completes by the first column of what another command prints.
SOURCES = {("ucmctl", "NS"): "namespace list"}
SECTIONS = {"ucmd": "8"}
SEE_ALSO = {"ucmctl": "ucmd(8), ucmd.yaml(5), ucm-bench(1)", "ucm-bench": "ucmctl(1), ucmd(8)", "ucmd": "ucmd.yaml(5), ucmctl(1)",
            "ucmevents": "ucmd(8), ucmctl(1)"}
OWN = (("help", "show what it can do"), ("version", "show the version"))


# ---- what programs say ----


class Option:
    def __init__(self, line):
        usage, self.help = re.split("  +", line.strip(), maxsplit=1)
        self.name, _, self.value = usage[2:].partition(" ")
        self.default = (re.search(r" \(default: (.*)\)$", self.help) or ["", None])[1]
        self.text = re.sub(r" \(default: .*\)$", "", self.help)


class Command:
    def __init__(self, program, line):
        usage, self.summary = re.split("  +", line.strip(), maxsplit=1)
        self.name, _, self.words = usage.partition(" ")
        text = run(program.path, self.name, "--help").partition(".\n")[2].partition("\nOptions of every command:\n")[0]
        self.help, _, options = text.strip("\n").rpartition("\nOptions:\n") if "Options:\n" in text else (text, "", "")
        self.help = self.help.strip("\n") + "\n" * bool(self.help.strip())
        self.options = [Option(line) for line in options.splitlines()]


class Program:
    def __init__(self, path, keys):
        self.path, self.name, self.keys = path, os.path.basename(path), keys
        self.version = run(path, "--version").split()[1]
        usage, self.summary, *blocks = run(path, "--help").split("\n\n")
        self.groups, self.options, self.help = [], [], ""
        for i, block in enumerate(blocks):
            title, _, lines = block.partition(":\n")
            if title == "Options":
                self.options = [option for option in map(Option, lines.splitlines()) if option.name not in ("help", "version")]
                self.help = "\n\n".join(blocks[i + 1:])
                break
            found = [line for line in lines.splitlines() if not line.startswith("  help ")]
            if found:
                self.groups.append((title, [Command(self, line) for line in found]))
        self.commands = [command for _, commands in self.groups for command in commands]


def run(*words):
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


class Key:
    def __init__(self, name, comment):
        self.name = name
        self.help, _, self.facts = comment.rpartition(" Default: ")


def read_config(path):
    """The parts of config/ucmd.yaml: the text above all keys, and each section's name, comment and keys."""
    with open(path, encoding="utf-8") as file:
        paragraphs = file.read().strip("\n").split("\n\n")
    about, sections = comment_of(paragraphs[0])[0], [("", "", [])]
    for paragraph in paragraphs[1:]:
        comment, rest = comment_of(paragraph)
        if rest and re.fullmatch(r"[a-z_]+:", rest[0]):
            sections.append((rest[0][:-1], comment, []))
            comment, rest = comment_of("\n".join(rest[1:]))
        name = rest[0].strip().partition(":")[0]
        sections[-1][2].append(Key(f"{sections[-1][0]}.{name}".lstrip("."), comment))
    return about, sections


def comment_of(paragraph):
    lines = paragraph.splitlines()
    n = next((i for i, line in enumerate(lines) if not line.strip().startswith("#")), len(lines))
    return " ".join(line.strip()[1:].strip() for line in lines[:n]), lines[n:]


# ---- manual pages, for the macros of man(7) ----

ROFF = {"\\": "\\e", "'": "\\(aq", '"': "\\(dq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}


def roff(text, fixed=False):
    """fixed: an example or an option, whose '-' is typed; otherwise one between letters is a hyphen."""
    out, typed = "", fixed
    for i, letter in enumerate(text):
        if i == 0 or text[i - 1] in " ('\"/=[|":
            typed = fixed or letter == "-"
        if letter == "-":
            hyphen = not typed and text[i + 1:i + 2].isalnum()
            letter = "-" if hyphen else "\\-"
        out += ROFF.get(letter, letter)
    return out


def line(text, fixed=False):
    """One that begins with a dot or a quote would be a request."""
    return ("\\&" if text[:1] in (".", "'") and text else "") + roff(text, fixed) + "\n"


def begin(name, section, title, version):
    return (".\\\" Made by `make` from what --help says: change that.\n.nr HY 0\n"
            f'.TH "{roff(name.upper())}" {section} "" "ucmd {version}" "{title}"\n.ad l\n')


def section(title):
    return f".SH {roff(title.upper())}\n"


def usage(words):
    """Words in capitals are italic."""
    return "".join(f"\\fI{roff(part, True)}\\fR" if re.fullmatch(r"[A-Z]+", part) else roff(part, True)
                   for part in re.findall(r"[A-Z]{2,}|[A-Z](?![a-z])|.", words))


def options(of):
    return "".join(f".TP\n\\fB\\-\\-{roff(name, True)}\\fR{' ' + usage(value) if value else ''}\n{roff(text)}\n" for name, value, text in of)


def help_text(text, headings):
    """Text as --help has it: an empty line begins a paragraph, and lines that begin with two spaces stay as they are. headings: a
    line that ends with ':' becomes one."""
    out, fixed, lines = "", False, text.splitlines()
    for i, words in enumerate(lines):
        indented = words.startswith("  ")
        if words and fixed != indented:
            out += ".RS 4\n.EX\n" if indented else ".EE\n.RE\n"
            fixed = indented
        if indented:
            out += line(words[2:], True)
        elif headings and words.endswith(":"):
            out += section(words[:-1])
        elif words:
            out += line(words)
        elif not fixed and i + 1 < len(lines) and (not headings or lines[i + 1].startswith("  ")):
            out += ".PP\n"
    return out + ".EE\n.RE\n" * fixed


def man(p):
    number = SECTIONS.get(p.name, "1")
    summary = p.summary.rstrip(".")
    yield begin(p.name, number, "System Administration" if number == "8" else "User Commands", p.version)
    yield section("Name") + roff(p.name) + f" \\- {summary[0].lower()}" + line(summary[1:])
    yield section("Synopsis") + ".B " + line(p.name) + ("[\\fIOPTIONS\\fR] \\fICOMMAND\\fR [...]\n" if p.commands else "[\\fIOPTIONS\\fR]\n")
    yield section("Options of every command" if p.commands else "Options")
    yield options((o.name, o.value, o.help) for o in p.options)
    yield options([("help", "", "Show what the program, or a command, can do."), ("version", "", "Show the version.")])
    for title, commands in p.groups:
        yield section(title)
        for c in commands:
            yield f".SS {roff(p.name)} {c.name}" + " \\fR[\\fIOPTIONS\\fR]" * bool(c.options) + (" \\fR" + usage(c.words) if c.words else "")
            yield f"\n{roff(c.summary)}.\n" + (".PP\n" + help_text(c.help, False) if c.help else "")
            yield options((o.name, o.value, o.help) for o in c.options)
    yield help_text(p.help, True) + section("See also") + line(SEE_ALSO[p.name])


def man_config(about, sections, version):
    yield begin("ucmd.yaml", "5", "File Formats", version)
    yield section("Name") + "ucmd.yaml \\- configuration of ucmd, the KV cache daemon of a host\n" + section("Description") + line(about)
    yield (".PP\nA key is written in its section, or on the command line as a whole:\n.RS 4\n.EX\narena:\n  size: 16GiB\n.EE\n.RE\n.RS 4\n.EX\n"
           "ucmd \\-\\-set arena.size=16GiB\n.EE\n.RE\n")
    for name, comment, keys in sections:
        yield section(name) + line(comment) if name else section("Keys at the top")
        for key in keys:
            facts = re.sub(r" \(reloadable\)$", " Reloadable.", key.facts)
            yield f".TP\n\\fB{roff(key.name)}\\fR\n{line(key.help)}.br\nDefault: {roff(facts)}\n"
    yield section("Files") + ".TP\n/etc/ucmd/ucmd.yaml\nwhat the shipped unit reads\n" + section("See also") + line("ucmd(8), ucmctl(1)")


# ---- completion: what a shell may offer, for all shells alike ----

NOTHING, WORDS, FILES, DIRECTORIES, SOURCE = range(5)


class Value:
    """What completes a word or an option's value. words: of WORDS, or the command of SOURCE."""

    def __init__(self, p, name):
        self.repeats, self.name = name.endswith("..."), name.removesuffix("...")
        self.kind, self.words = NOTHING, ""
        if self.name[:1].islower():
            self.kind, self.words = WORDS, self.name.replace("|", " ")
        elif (p.name, self.name) in SOURCES:
            self.kind, self.words = SOURCE, SOURCES[p.name, self.name]
        elif any(part in self.name for part in ("PATH", "FILE", ".json", ".yaml")):
            self.kind = FILES
        elif any(part in self.name for part in ("DIR",)):
            self.kind = DIRECTORIES


def of_option(p, o):
    value = Value(p, o.value)
    if (p.name, o.name) == ("ucmd", "set"):
        value.kind, value.name, value.words = WORDS, "KEY", " ".join(f"{key}=" for key in p.keys)
    return value


def of_words(p, c):
    """Only the first word of words with alternatives."""
    alternatives = [re.findall(r"[^ \[\]]+", words) for words in c.words.split(" | ")]
    if len(alternatives) > 1:
        return [Value(p, "|".join(words[0] for words in alternatives))]
    return [Value(p, word) for word in alternatives[0]]


def template(text, p, **more):
    """@name@ and @id@ are the program's; others are given."""
    words = {"name": p.name, "id": re.sub(r"\W", "_", p.name), **more}
    return re.sub("@(name|id|" + "|".join(more or ["name"]) + ")@", lambda found: words[found[1]], text)


BASH = r"""
_@id@()
{
    local cur=${COMP_WORDS[COMP_CWORD]} word option='' command='' may='' i n=0
    local -a given=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $word == = ]]; then
            continue
        elif [[ -n $option ]]; then
            _@id@_value ":$option" >/dev/null && given+=("$option" "$word")
            option=
        elif [[ $word == -* ]]; then
            if _@id@_value "$command:$word" >/dev/null || _@id@_value ":$word" >/dev/null; then
                option=$word
            fi
        elif [[ -z $command ]]; then
            command=$word
        else
            ((n++))
        fi
    done
    [[ $cur == = ]] && cur=
    if [[ -n $option ]]; then
        may=$(_@id@_value "$command:$option" || _@id@_value ":$option")
    elif [[ $cur == -* ]]; then
        may="$(_@id@_options "$command") $(_@id@_options '')"
    elif [[ -z $command || $command == help ]]; then
        may='@commands@'
    else
        may=$(_@id@_word "$command:$n")
    fi
    case $may in
    @files) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -f -- "$cur") ;;
    @directories) compopt -o filenames; mapfile -t COMPREPLY < <(compgen -d -- "$cur") ;;
    @run*)
        # shellcheck disable=SC2086
        may=$("${COMP_WORDS[0]}" "${given[@]}" ${may#@run} 2>/dev/null |
            awk 'NR > 1 {print $1}')
        mapfile -t COMPREPLY < <(compgen -W "$may" -- "$cur") ;;
    @none | '') COMPREPLY=() ;;
    *)
        mapfile -t COMPREPLY < <(compgen -W "$may" -- "$cur")
        [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace ;;
    esac
    return 0
}
complete -F _@id@ @name@
"""


def bash(p):
    """Functions that answer what an option or a word may be, and one that walks the line. Works without the package bash-completion."""
    def cases(name, of):
        lines = "".join(f"    {case}) echo '{words}' ;;\n" for case, words in of)
        return template(f"\n_@id@_{name}()\n{{\n    case $1 in\n{lines}    *) return 1 ;;\n    esac\n}}\n", p)

    def say(value):
        return {NOTHING: "@none", FILES: "@files", DIRECTORIES: "@directories", WORDS: value.words, SOURCE: f"@run {value.words}"}[value.kind]

    def names(of):
        return " ".join(f"--{o.name}" for o in of)
    yield f"# Completion of {p.name} for bash. Made by `make` from what --help says.\n"
    yield cases("options", [("''", names(p.options) + " --help --version"), *((c.name, names(c.options)) for c in p.commands if c.options)])
    yield cases("value", [(f"{of}:--{o.name}", say(of_option(p, o))) for of, all_of in [("", p.options), *((c.name, c.options) for c in p.commands)]
                          for o in all_of if o.value])
    yield cases("word", [(f"{c.name}:{'*' if v.repeats else at}", say(v)) for c in p.commands for at, v in enumerate(of_words(p, c))])
    yield template(BASH, p, commands=" ".join([c.name for c in p.commands] + ["help"] * bool(p.commands)))


ZSH = r"""#compdef @name@
# Made by `make` from what --help says.

_@name@()
{
    local curcontext=$curcontext state name program=$words[1]
    local -A opt_args
    local -a line common more given valued commands
    common=(
@common@    )
"""
ZSH_COMMANDS = r"""    valued=(@valued@)
    commands=(
@commands@    )
    _arguments -C $common '1:command:->command' '*::argument:->argument' && return 0
    for name in $valued; do
        [[ -n ${opt_args[$name]} ]] && given+=($name ${opt_args[$name]})
    done
    if [[ $state == command ]]; then
        _describe command commands
        return
    fi
    case $words[1] in
@cases@    help)
        _describe command commands
        return ;;
    esac
    _arguments $common $more
}

_@name@ "$@"
"""


def zsh(p):
    def quoted(text):
        return re.sub(r"[\[\]:\\]", r"\\\g<0>", text).replace("'", "'\\''")

    def action(value):
        if value.kind == WORDS:
            return f'{{compadd -S "" -- {value.words}}}' if "=" in value.words else f"({value.words})"
        if value.kind == SOURCE:
            return f"{{compadd -- ${{(f)\"$($program $given {value.words} 2>/dev/null | awk '\\''NR > 1 {{print $1}}'\\'')\"}}}}"
        return {NOTHING: "", FILES: "_files", DIRECTORIES: "_files -/"}[value.kind]

    def words(value):
        return f"{quoted(value.name)}:{action(value)}"

    def opts(of, indent):
        return "".join(f"{indent}'*--{o.name}=[{quoted(o.text)}]:{words(of_option(p, o))}'\n" if o.value else
                       f"{indent}'--{o.name}[{quoted(o.text)}]'\n" for o in of)
    own = "".join(f"        '--{name}[{text}]'\n" for name, text in OWN)
    yield template(ZSH, p, common=opts(p.options, "        ") + own)
    if not p.commands:
        yield template("    _arguments $common\n}\n\n_@name@\n", p)
        return
    cases = "".join(f"    {c.name})\n        more=(\n" + opts(c.options, " " * 12)
                    + "".join(f"            '{'*' if v.repeats else at}:{words(v)}'\n" for at, v in enumerate(of_words(p, c), 1))
                    + "        ) ;;\n" for c in p.commands)
    described = "".join(f"        '{c.name}:{quoted(c.summary)}'\n" for c in p.commands) + "        'help:Show what a command can do'\n"
    yield template(ZSH_COMMANDS, p, valued="".join(f" --{o.name}" for o in p.options if o.value), commands=described, cases=cases)


FISH = r"""# COMMAND [N [more]]: whether the line has this command and N words (or more) after it.
function __@name@_at
    set -l command ''
    set -l n 0
    set -l skip 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
            continue
        end
        switch $word
            case @all@
                set skip 1
            case '-*'
            case '*'
                if test -z "$command"
                    set command $word
                else
                    set n (math $n + 1)
                end
        end
    end
    test "$command" = "$argv[1]"; or return 1
    test (count $argv) -lt 2; and return 0
    test $n -eq $argv[2]; and return 0
    test (count $argv) -gt 2 -a $n -gt $argv[2]
end

# The first column of what the program prints, asked with the line's own options.
function __@name@_run
    set -l words (commandline -opc)
    set -l given
    for i in (seq 2 (math (count $words) - 1))
        if contains -- $words[$i] @valued@
            set -a given $words[$i] $words[(math $i + 1)]
        end
    end
    $words[1] $given $argv 2>/dev/null | awk 'NR > 1 {print $1}'
end

"""


def fish(p):
    """A function finds the command and how many words follow it; each line below it says where it holds."""
    def quoted(text):
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    def at(*words):
        return f"complete -c {p.name} -n '__{p.name}_at {' '.join(words)}'"

    none = at('""')

    def offers(value):
        return {NOTHING: "", FILES: " -F", DIRECTORIES: " -a '(__fish_complete_directories)'", WORDS: f" -a '{value.words}'",
                SOURCE: f" -a '(__{p.name}_run {value.words})'"}[value.kind]

    def opts(before, of):
        for o in of:  # an option's value is required
            value = of_option(p, o) if o.value else None
            how = (" -r" if value.kind in (FILES, DIRECTORIES) else " -x") + offers(value) if value else ""
            yield f"{before} -l {o.name} -d {quoted(o.text)}{how}\n"

    def valued(of):
        return " ".join(f"--{o.name}" for o in of if o.value)
    yield f"# Completion of {p.name} for fish. Made by `make` from what --help says.\n"
    if p.commands:
        yield template(FISH, p, all=valued([*p.options, *(o for c in p.commands for o in c.options)]), valued=valued(p.options))
    yield f"complete -c {p.name} -f\n"
    yield from opts(f"complete -c {p.name}", p.options)
    yield from (f"complete -c {p.name} -l {name} -d '{text}'\n" for name, text in OWN)
    for c in p.commands:
        yield f"\n{none} -a {c.name} -d {quoted(c.summary)}\n{at('help')} -a {c.name}\n"
        yield from opts(at(c.name), c.options)
        yield from (f"{at(c.name, str(n), *['more'] * v.repeats)}{offers(v)}\n" for n, v in enumerate(of_words(p, c)) if v.kind != NOTHING)
    if p.commands:
        yield f"\n{none} -a help -d 'Show what a command can do'\n"


def main(directory, config, *paths):
    about, sections = read_config(config)
    keys = [key.name for _, _, of in sections for key in of]
    programs = [Program(path, keys) for path in paths]
    pages = {"ucmd.yaml.5": man_config(about, sections, programs[0].version)}
    for p in programs:
        pages.update({f"{p.name}.{SECTIONS.get(p.name, '1')}": man(p), f"{p.name}.bash": bash(p), f"_{p.name}": zsh(p), f"{p.name}.fish": fish(p)})
    for name, parts in pages.items():
        with open(os.path.join(directory, name), "w", encoding="utf-8") as file:
            file.writelines(parts)


if __name__ == "__main__":
    main(*sys.argv[1:])

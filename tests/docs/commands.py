"""docs/commands.md: what each program's --help says."""

import re

import text as md

PROGRAMS = ("ucmctl", "ucm-bench", "ucmd", "ucmevents")
ABOUT = {"ucmctl": "ucmctl shows and controls the daemon", "ucm-bench": "measures", "ucmd": "the daemon", "ucmevents": "publishes cache events"}

#: Commands that another page explains, step by step: here they have their options and a link.
EXPLAINED = {
    "ucmctl top": "[See what happens now](monitoring.md#see-what-happens-now)",
    "ucmctl trace": "[A request was slow](troubleshooting.md#a-request-was-slow)",
    "ucmctl events": "[Cache events](events.md#switch-it-on)",
    "ucmctl health": "[Is it well?](monitoring.md#is-it-well)",
    "ucmctl config": "[Configure](operations.md#configure)",
    "ucmctl bypass": "[Take the cache out of the way](operations.md#take-the-cache-out-of-the-way)",
    "ucmctl tenant": "[Divide the cache between tenants](operations.md#divide-the-cache-between-tenants)",
    "ucmctl encryption-key": "[Manage keys](security.md#manage-keys)",
    "ucmctl plan": "[How much a model needs](capacity.md#how-much-a-model-needs)",
    "ucmctl verify": "[Damaged bytes on NVMe](troubleshooting.md#damaged-bytes-on-nvme)",
    "ucmctl format": "[Use a whole disk](operations.md#use-a-whole-disk)",
    "ucm-bench replay": "[Record and replay a trace](capacity.md#record-and-replay-a-trace)",
    "ucm-bench record": "[Record and replay a trace](capacity.md#record-and-replay-a-trace)",
    "ucm-bench serve": "[What does the cache bring](capacity.md#what-does-the-cache-bring)",
    "ucm-bench tier": "[Measure your own host](performance.md#measure-your-own-host)",
    "ucm-bench copy": "[Measure your own host](performance.md#measure-your-own-host)",
    "ucmevents publish": "[Switch it on](events.md#switch-it-on)",
}


def options_list(options, mark):
    """A meaning that is the option's name is left out."""
    def item(o):
        value, default = f" {o.value}" * bool(o.value), f" (`{o.default}`)" * bool(o.default)
        return f"- `--{o.name}{value}`{default}" + f": {mark(o.text)}" * (o.text != o.name)
    return "".join(md.wrap(item(o), "  ") for o in options)


def key(option):
    return option.name, option.value, option.help


def heading(program, command):
    return " ".join(filter(None, (program.name, command.name, command.words)))


def link(program, command):
    return f"[{command.name}](#{md.slug(heading(program, command))})"


def help_text(text, mark):
    """Paragraphs are filled again. Indented lines under `Example:` are commands; under another title they are a list."""
    for paragraph in text.strip("\n").split("\n\n"):
        lines = paragraph.splitlines()
        title = lines[0]
        if not all(line.startswith("  ") for line in lines[1:]) or len(lines) == 1:
            yield "\n" + md.wrap(mark(paragraph))
        elif title in ("Example:", "Examples:"):
            commands = [re.sub(r"  +", "  # ", line.strip(), count=1) for line in lines[1:]]
            # One with a single option says no more than the list.
            commands = [command for command in commands if len(re.findall(r" --", command)) > 1 or re.search(r" ([|>]|&&) ", command)]
            yield ("\n```sh\n" + "\n".join(commands) + "\n```\n") * bool(commands)
        else:
            yield f"\n{title}\n\n"
            yield from (md.wrap(f"- `{left}`: {mark(right)}", "  ") for left, right in (re.split("  +", line.strip(), maxsplit=1) for line in lines[1:]))


def command_text(program, command, mark):
    title = heading(program, command)
    yield f"\n### {title}\n\n"
    page = EXPLAINED.get(f"{program.name} {command.name}")
    yield md.wrap(md.sentence(mark(command.summary)) + f" See {page}." * bool(page))
    if not page and command.help and command.help.strip() not in (f"Example:\n  {title}", f"Example:\n  {program.name} {command.name}"):
        yield from help_text(command.help, mark)
    same = next((c for c in program.commands if list(map(key, c.options)) == list(map(key, command.options))), command)
    if len(command.options) > 1 and same is not command:
        yield "\n" + md.wrap(f"Options: those of {link(program, same)}.")
    elif command.options:
        yield "\n" + options_list(command.options, mark)


def program_text(program, first, mark):
    """first: the program whose options are on the page already."""
    yield f"\n## {program.name}\n\n" + md.wrap(md.sentence(program.summary.strip())) + "\n"
    known = [key(option) for option in first.options] if first is not program else []
    new = [option for option in program.options if key(option) not in known]
    if program.commands:
        same = f"those of [every {first.name} command](#{first.name})" * (len(new) < len(program.options))
        yield md.wrap(f"Options of every command{', ' * bool(same)}{same}{', and' * bool(same)}:") + "\n"
    yield options_list(new, mark)
    if program.help:
        about = program.help.partition("\n\nExamples:\n")[0] if program.commands else program.help
        yield from help_text(about, mark)
    for title, commands in program.groups:
        if len(program.groups) > 1:
            yield "\n" + md.wrap(f"{title}: " + ", ".join(link(program, c) for c in commands) + ".")
    for command in program.commands:
        yield from command_text(program, command, mark)


def page(build):
    mark = md.Marker()
    yield md.begin("Commands", "what each program's `--help` says",
                   "For operators and for engineers who measure: the commands and options of every program. `ucmctl COMMAND --help` says more. "
                   "A default is in parentheses.")
    programs = [md.pages.Program(str(build / name), []) for name in PROGRAMS]
    unknown = set(EXPLAINED) - {f"{program.name} {command.name}" for program in programs for command in program.commands}
    if unknown:
        raise SystemExit(f"EXPLAINED of {__file__} names no command: {', '.join(sorted(unknown))}")
    for program in programs:
        yield from program_text(program, programs[0], mark)

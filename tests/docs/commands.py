"""docs/commands.md: what each program's --help says."""

import re

import text as md

PROGRAMS = ("ucmctl", "ucm-bench", "ucmd", "ucmevents")
ABOUT = {"ucmctl": "ucmctl shows and controls the daemon", "ucm-bench": "measures", "ucmd": "the daemon", "ucmevents": "publishes cache events"}


def options_table(options, mark):
    rows = [(f"`--{o.name}{' ' * bool(o.value)}{o.value}`", mark(o.text), f"`{o.default}`" if o.default else "") for o in options]
    head = ("option", "meaning", "default")
    if not any(default for _, _, default in rows):
        rows, head = [cells[:2] for cells in rows], head[:2]
    return md.table(head, rows)


def help_text(text, mark, depth):
    """Paragraphs are filled again. Indented lines under `Example:` are commands; under another title they are a list."""
    for paragraph in text.strip("\n").split("\n\n"):
        lines = paragraph.splitlines()
        title = lines[0]
        if not all(line.startswith("  ") for line in lines[1:]) or len(lines) == 1:
            yield "\n" + md.wrap(mark(paragraph))
        elif title in ("Example:", "Examples:"):
            commands = [re.sub(r"  +", "  # ", line.strip(), count=1) for line in lines[1:]]
            yield "\n```sh\n" + "\n".join(commands) + "\n```\n"
        else:
            yield f"\n{'#' * depth} {title.removesuffix(':')}\n\n"
            yield md.table((title.split()[0].lower() if title != "Exit status:" else "status", "meaning"),
                           [(f"`{left}`", mark(right)) for left, right in (re.split("  +", line.strip(), maxsplit=1) for line in lines[1:])])


def command_text(program, command, mark):
    yield f"\n### {program.name} {command.name}\n\n"
    usage = " ".join(filter(None, (program.name, "[OPTIONS]" * bool(command.options), command.name, command.words)))
    if command.words:
        yield f"```text\n{usage}\n```\n\n"
    yield md.wrap(md.sentence(mark(command.summary)))
    if command.help and command.help.strip() != f"Example:\n  {usage}":
        yield from help_text(command.help, mark, 4)
    if command.options:
        yield "\n" + options_table(command.options, mark)


def program_text(program, mark):
    yield f"\n## {program.name}\n\n" + md.wrap(md.sentence(program.summary.strip())) + "\n"
    if program.commands:
        yield "Options of every command:\n\n"
    yield options_table(program.options, mark)
    if program.help:
        yield from help_text(program.help, mark, 3)
    for title, commands in program.groups:
        if len(program.groups) > 1:
            yield "\n" + md.wrap(f"{title}: " + ", ".join(f"[{c.name}](#{program.name}-{c.name})" for c in commands) + ".")
    for command in program.commands:
        yield from command_text(program, command, mark)


def page(build):
    mark = md.Marker()
    yield md.begin("Commands", "what each program's `--help` says",
                   "For operators and for engineers who measure: the commands and options of every program. `ucmctl COMMAND --help` says the same.")
    for name in PROGRAMS:
        yield from program_text(md.pages.Program(str(build / name), []), mark)

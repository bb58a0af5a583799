"""Makes a program short that shows a finding, by leaving out calls for as long as the finding stays."""

import time

from subject import Finding
from world import World


def find(program, trace=None):
    """The Finding of a run, or None; and what was counted."""
    world = World(program, trace)
    try:
        world.run()
        return None, world.counts
    except Finding as finding:
        finding.at = world.at
        return finding, world.counts


def shows(program, kind, tries):
    for _ in range(tries):
        finding, _ = find(program)
        if finding and finding.kind == kind:
            return finding
    return None


def shrink(program, finding, seconds=300, tries=2, say=print):
    """(program, finding): the shortest program that was found in the time, and its finding, or None
    if it does not show in another run."""
    deadline, kind = time.monotonic() + seconds, finding.kind
    ops = program["ops"]
    if finding.at is not None:
        again = shows(dict(program, ops=ops[:finding.at + 1]), kind, tries)
        ops = ops[:finding.at + 1] if again else ops
    else:
        again = None
    again = again or shows(program, kind, 2 * tries)
    if not again:
        return program, None
    finding, step = again, max(len(ops) // 2, 1)
    while time.monotonic() < deadline:
        at, shorter = len(ops), False
        while at > 0 and time.monotonic() < deadline:
            cut = ops[:max(at - step, 0)] + ops[at:]
            found = shows(dict(program, ops=cut), kind, tries) if len(cut) < len(ops) else None
            if found:
                at, ops, finding, shorter = min(max(at - step, 0), len(cut)), cut, found, True
                say(f"{len(ops)} calls", end=" ", flush=True)
            else:
                at -= step
        if step == 1 and not shorter:
            break
        step = max(step // 2, 1)
    program = dict(program, ops=ops)
    for key, simple in (("keep", False), ("shared", False), ("encrypted", False), ("nvme", False)):
        options = dict(program["options"], **{key: simple})
        found = shows(dict(program, options=options), kind, tries) if time.monotonic() < deadline else None
        if found:
            program, finding = dict(program, options=options), found
    say()
    return program, finding

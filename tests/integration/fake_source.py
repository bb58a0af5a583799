"""A connection of ucmclient.decode without a daemon."""

from types import SimpleNamespace

from ucmclient import BlockResult
from ucmclient.errors import UcmError

OK, MISS, NO_ROOM = BlockResult.OK, BlockResult.MISS, BlockResult.NO_ROOM


class Source:
    """A daemon that answers gathers as the test says: statuses, an error, or None for no answer."""

    away = False
    summaries = SimpleNamespace(register=lambda *_, **__: True)

    def __init__(self, *answers):
        self.answers, self.asked, self.cuts = list(answers), [], 0
        self.ns = SimpleNamespace(register=lambda *_, **__: SimpleNamespace(gather=self.gather), client=SimpleNamespace(connection_epoch=1))

    def ask(self, call, *args, **named):
        return call(*args, **named)

    def cut(self):
        self.cuts += 1

    def gather(self, keys, items, **_):
        self.asked.append(items)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            return None

        def wait(timeout):
            if isinstance(answer, UcmError):
                raise answer
            return SimpleNamespace(blocks=bytes(answer[: len(items)]))
        return SimpleNamespace(wait=wait, close=lambda: None)

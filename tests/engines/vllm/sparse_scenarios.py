"""What sparse decoding in vLLM must bear, with a GPU (check_sparse_gpu.py) and without
(check_sparse_steps.py). Engines whose policy takes everything answer like a dense one, whatever
happens to blocks, daemon and requests meanwhile."""

import json
import os
import subprocess
import tempfile
import time

from gpu_engine import HERE, PYTHON, Engine, plugin, prompt

#: The tolerance between log probabilities of one token, computed in two ways. If there is a choice,
#: rounding makes a token choose another block now and then. That has moved one by 0.6. Other blocks
#: throughout move them by 2.7 and more.
CLOSE, EXACT = 1.0, 0.25


def differs(a, b, close):
    """Compares two answers to the same prompt, as tokens and log probabilities. Returns where they
    differ by more than rounding, and the largest difference. After a near tie each follows its own
    text, and nothing is compared."""
    most = 0.0
    for i, (s, t) in enumerate(zip(a[1], b[1])):
        x, y = str(a[0][i]), str(b[0][i])
        most = max(most, abs(s[x] - t.get(x, -99.0)), abs(t[y] - s.get(y, -99.0)))
        if most > close:
            return f"token {i}: {x} {s[x]:.3f} and {t.get(x)}, {y} {t[y]:.3f} and {s.get(y)}", most
        if x != y:
            break
    return None, most


def said(answer):
    print("  ", {k: v for k, v in answer["counts"].items() if v}, flush=True)
    return answer


class Scenarios:
    """A part of a TestCase. ENGINES: for each, the size of its daemon's mappings in MiB (None: no
    daemon), and its options besides SIZES."""

    ENGINES, SIZES = {}, {}
    #: Whether engines start next to each other, or when they are needed.
    AT_ONCE = True
    #: For engines whose policy leaves blocks out: which other engine has that policy, and how close
    #: log probabilities are.
    REFERENCES = {}
    PROMPTS = MORE = ()
    #: Tokens that are generated where something happens meanwhile; pages that go back, and that hits don't take.
    SOME, PAGES = 200, 100

    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.directory.cleanup)
        plugin(os.path.join(cls.directory.name, "plugin"))
        cls.model = os.path.join(cls.directory.name, "model")
        subprocess.run([PYTHON, "-B", os.path.join(HERE, "gpu_engine.py"), "--model", cls.model], check=True)
        cls.daemons, cls.engines, cls.known = {}, {}, {}
        for name in os.environ.get("UCM_CHECK_ENGINES", ";".join(cls.ENGINES)).split(";") if cls.AT_ONCE else ():
            cls.start(name)

    @classmethod
    def start(cls, name):
        mapping, options = cls.ENGINES[name]
        if mapping is not None:
            cls.daemons[name] = cls.daemon(mapping)
            cls.addClassCleanup(lambda: cls.daemons[name].stop())
            options = {**options, "socket": cls.daemons[name].socket}
        cls.engines[name] = Engine(cls.model, name=name, **{**cls.SIZES, **options})
        cls.addClassCleanup(cls.engines[name].close)

    @staticmethod
    def daemon(mapping, **more):
        from daemon import Daemon

        return Daemon(nvme=False, **{"arena.size": "512MiB", "arena.slab": "8MiB", "mapping.size": f"{mapping}MiB", **more})

    def engine(self, name):
        if name not in self.engines:
            self.start(name)
        e = self.engines[name].ready()
        return e

    def of(self, name, prompts=None, outputs=40):
        """What an engine answers first."""
        prompts = self.PROMPTS if prompts is None else prompts
        key = name, json.dumps(prompts), outputs
        if key not in self.known:
            self.known[key] = self.engine(name).generate(prompts, outputs)
        return self.known[key]

    def alike(self, answer, wanted, which=None, close=CLOSE):
        found = [differs(*[(of["tokens"][i], of["logprobs"][i]) for of in (answer, wanted)], close)
                 for i in (range(len(wanted["tokens"])) if which is None else which)]
        print("   differ by", [round(most, 3) for _, most in found], flush=True)
        self.assertEqual([why for why, _ in found if why], [])

    def right(self, name, answer):
        """The answers of a dense engine, or of one with the same policy and nothing to bear."""
        of, close = self.REFERENCES.get(name, ("dense", EXACT))
        self.alike(answer, self.of(of, outputs=len(answer["tokens"][0])), close=close)

    def giving_back(self, e, pages, check):
        """Answers until so many pages have gone back. The daemon gets time for that alongside
        steps, and a small model's steps are short. check(): each answer. -> the last one."""
        until = time.monotonic() + 60
        while True:
            answer = said(e.generate(self.PROMPTS))
            check(answer)
            if answer["counts"]["given_back"] > pages:
                return answer
            self.assertLess(time.monotonic(), until, f"pages that went back: {answer['counts']['given_back']}, and not {pages}")

    # ---- scenarios ----

    def everything(self, name):
        e = self.engine(name)
        self.right(name, e.generate(self.PROMPTS))
        second = self.giving_back(e, self.PAGES, lambda answer: self.right(name, answer))
        third = said(e.generate(self.PROMPTS, reset=True))
        self.right(name, third)
        self.assertGreater(third["counts"]["spared"], self.PAGES)  # hits without pages
        self.assertEqual(third["counts"]["lost"], second["counts"]["lost"])

    def ucmctl(self, name, *words):
        from daemon import UCMCTL

        return [UCMCTL, "--socket", self.daemons[name].socket, *words]

    def losses(self, answer):
        return answer["counts"]["lost"] + answer["counts"]["repeated"]

    def losing(self, loses, lost):
        """lost(): how much it lost. If loses, repeats until that is not 0: on a busy host few pages
        go back alongside steps."""
        until = time.monotonic() + 120
        while not lost() and loses:
            self.assertLess(time.monotonic(), until, "nothing is lost")

    def goes_on(self, name, loses=True):
        """Evictions while requests hit and decode. Then all blocks are purged, some of which have
        no page any more. loses: not all of those are in entries."""
        e, evict, purge = self.engine(name), self.ucmctl(name, "evict", "1", "--yes"), self.ucmctl(name, "purge", "1", "--yes")
        e.generate(self.PROMPTS)
        for _ in range(2):
            self.right(name, said(e.generate(self.PROMPTS, self.SOME, reset=True, events=[[1, 3, "run", evict]])))

        def purged():
            before = e.generate(self.PROMPTS, reset=True)  # what the evictions took is stored again
            answer = said(e.generate(self.PROMPTS, self.SOME, events=[[self.SOME // 2, 20, "run", purge]]))
            self.right(name, answer)
            return self.losses(answer) - self.losses(before)

        self.losing(loses, purged)
        self.right(name, said(e.generate(self.PROMPTS, self.SOME)))

    def gives_up(self, name):
        """Requests are aborted while they decode, and while prompts are computed. The others'
        answers stay, and nothing is left."""
        e = self.engine(name)
        for step in 1, 2, 30:
            answer = said(e.generate(self.PROMPTS[:3] * 2, reset=True, events=[[step, 0, "abort", [1, 3, 5]]]))
            self.alike(answer, {n: [self.of("dense")[n][i] for i in (0, 2, 1)] for n in ("tokens", "logprobs")}, close=EXACT)
            self.assertLessEqual(answer["counts"]["sequences"], 3)
        after = e.generate([self.PROMPTS[3]])
        self.assertEqual((after["counts"]["sequences"], after["counts"]["requests"]), (0, 0))
        self.right(name, e.generate(self.PROMPTS))

    def preempts(self, name):
        """More requests than there are pages for, none of which go back while they decode."""
        e = self.engine(name)
        for again in False, True:
            answer = said(e.generate(self.MORE, 100, reset=again))
            self.alike(answer, self.of("dense", self.MORE, 100), close=EXACT)
        self.assertGreater(answer["counts"]["preempted"], answer["counts"]["lost"])  # what loses blocks is preempted, too

    def dies(self, name, loses=True):
        """The daemon is killed while requests decode whose blocks only it has, except for entries.
        Then another one comes."""
        self.losing(loses, lambda: self.killed(name))

    def killed(self, name):
        """-> how much was lost."""
        e, daemon = self.engine(name), self.daemons[name]
        before = e.generate(self.PROMPTS)
        answer = said(e.generate(self.PROMPTS, self.SOME, reset=True, events=[[self.SOME // 2, 0, "kill", daemon.process.pid]]))
        self.right(name, answer)
        daemon.process.wait()
        self.daemons[name] = self.daemon(self.ENGINES[name][0], socket=daemon.socket)
        until = time.monotonic() + 60
        while True:
            again = e.generate(self.PROMPTS, self.SOME)
            self.right(name, again)
            if again["counts"]["given_back"] > answer["counts"]["given_back"]:
                break
            self.assertLess(time.monotonic(), until)
        said(again)
        return self.losses(answer) - self.losses(before)

    def gathers(self, name):
        """Blocks without a place in the mapping keep their pages. Blocks that hits brought are
        gathered, if others have taken their entries meanwhile."""
        e = self.engine(name)
        self.right(name, e.generate(self.PROMPTS))
        for _ in range(2):
            e.generate(self.MORE)
            answer = said(e.generate(self.PROMPTS, reset=True))
            self.right(name, answer)
        self.assertGreater(answer["counts"]["gathered"], 0)

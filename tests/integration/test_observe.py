#!/usr/bin/python3
"""Monitoring as an operator sets it up: a daemon that has served requests, with the shipped scrape
example, alerts and board in a real Prometheus. And the answers of its listener while it starts,
serves and stops. And the pictures of both in docs.

$UCMD, $UCMCTL and $UCM_BENCH name other programs than those in build/.
"""

import collections
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
import unittest
import urllib.parse
import urllib.request
import xml.etree.ElementTree

from daemon import TIMEOUT_S, UCMD, Daemon, threads_named, until
from second_client import Client
from test_ucmctl import replay

TOP = pathlib.Path(__file__).resolve().parents[2]
OBSERVE = TOP / "config/observe"
# The shipped files do not depend on how the daemon was built.
HAVE_PROMETHEUS = shutil.which("prometheus") and shutil.which("promtool") and os.environ.get("UCM_PHASE", "plain") == "plain"
WITHOUT = "prometheus and promtool are not installed (Debian: prometheus), or a sanitizer's build is tested"
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("ucmd", timeout=TIMEOUT_S)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(self.path)


def address_of(daemon):
    """The address of its TCP listener, which the kernel chose."""
    return re.findall(r"http listening address=(\S+)", daemon.log())[-1]


def serving(**options):
    """A daemon that also listens for monitoring, which it begins to do after it opened its own
    socket."""
    daemon = Daemon(**options)
    try:
        until(lambda: " server serving " in daemon.log(), lambda: daemon.log())
    except AssertionError:
        daemon.stop()
        raise
    return daemon


def get(where, page, method="GET", **headers):
    """where: ADDRESS:PORT, or the path of a socket. Status, body and content type."""
    connection = UnixConnection(where) if where.startswith("/") else http.client.HTTPConnection(where, timeout=TIMEOUT_S)
    try:
        connection.request(method, page, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.getheader("Content-Type")
    finally:
        connection.close()


def promtool(*words, **options):
    return subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options)


class Listener(unittest.TestCase):
    """The listener of a daemon, without Prometheus."""

    def daemon(self, **more):
        daemon = serving(**more)
        self.addCleanup(daemon.stop)
        return daemon

    def test_both_sockets_say_the_same(self):
        daemon = self.daemon(**{"metrics.listen": "0", "metrics.socket_mode": "0600"})
        path = os.path.join(daemon.directory, "metrics.sock")
        self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), 0o600)
        for where in (path, address_of(daemon)):
            self.assertIn("/ready", get(where, "/")[1])
            self.assertEqual(get(where, "/live")[:2], (200, "ok\n"))
            status, text, _ = until(lambda at=where: not (page := get(at, "/ready"))[1].startswith("recovering") and page)
            self.assertEqual((status, text.splitlines()[0]), (200, "ok"))
            self.assertEqual(get(where, "/nothing")[0], 404)
            self.assertEqual(get(where, "/metrics", "POST")[0], 405)
            status, text, kind = get(where, "/metrics")
            self.assertEqual((status, kind), (200, "text/plain; version=0.0.4; charset=utf-8"))
            self.assertIn('\nucmd_health{state="ok"} ', text)
            status, text, kind = get(where, "/metrics", Accept=OPENMETRICS)
            self.assertEqual((status, kind), (200, "application/openmetrics-text; version=1.0.0; charset=utf-8"))
            self.assertTrue(text.endswith("\n# EOF\n"))
        self.assertEqual(daemon.stop(), 0)

    def test_none_is_none(self):
        daemon = self.daemon(**{"metrics.socket": ""})
        self.assertNotIn("http", [line.split()[2] for line in daemon.log().splitlines()])
        self.assertFalse(os.path.exists(os.path.join(daemon.directory, "metrics.sock")))
        self.assertEqual(list(threads_named(f"/proc/{daemon.process.pid}/task", "http")), [])

    def test_what_the_loop_counts_is_on_the_page(self):
        daemon = self.daemon(**{"metrics.listen": "0"})
        client = Client(daemon)
        self.addCleanup(client.close)

        def on_the_page():
            return int(re.search(r"\nucmd_requests_total (\d+)", get(address_of(daemon), "/metrics")[1])[1])
        for _ in range(3):
            counted = client.metrics()["requests_total"]
            until(lambda: on_the_page() == counted)  # noqa: B023

    def test_a_taken_port_is_a_warning(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = "127.0.0.1:%d" % taken.getsockname()[1]
            daemon = self.daemon(**{"metrics.listen": address})
            self.assertRegex(daemon.log(), r"warn http no-listener key=metrics.listen .*Address already in use")
            self.assertEqual(get(os.path.join(daemon.directory, "metrics.sock"), "/live")[0], 200)
            check = self.check(daemon, address)
        self.assertEqual(check.returncode, 0)
        self.assertRegex(check.stderr, rf"warning: metrics\.listen: cannot listen on {address}: .*; the daemon runs without it")

    def check(self, daemon, address):
        return subprocess.run([UCMD, "--check", "--set", f"socket={daemon.directory}/other", "--set", "arena.size=64MiB", "--set",
                               f"metrics.listen={address}", "--set", "device.cuda=off"], capture_output=True, text=True,
                              timeout=TIMEOUT_S, check=False)

    def test_a_check_alongside_a_running_daemon_says_nothing(self):
        daemon = self.daemon(**{"metrics.listen": "0"})
        check = self.check(daemon, address_of(daemon))
        self.assertEqual((check.returncode, check.stderr), (0, ""))

    def test_an_address_for_others_draws_a_warning(self):
        daemon = self.daemon()
        self.assertIn("is reachable from other hosts", self.check(daemon, "0.0.0.0:0").stderr)
        self.assertEqual(self.check(daemon, "[::1]:0").returncode, 0)
        refused = self.check(daemon, "localhost:9471")
        self.assertEqual(refused.returncode, 1)
        self.assertIn("write an address and a port in numbers", refused.stderr)

    def test_a_daemon_that_stops_waits_for_no_monitor(self):
        daemon = self.daemon(**{"metrics.listen": "0", "shutdown.drain": "20s"})
        address = address_of(daemon)
        silent = socket.create_connection(address.rsplit(":", 1), TIMEOUT_S)
        self.addCleanup(silent.close)
        half = socket.create_connection(address.rsplit(":", 1), TIMEOUT_S)
        self.addCleanup(half.close)
        half.sendall(b"GET /metrics HTTP/1.1\r\nHo")
        begun = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        self.assertEqual(daemon.process.wait(TIMEOUT_S), 0)
        self.assertLess(time.monotonic() - begun, 15)
        self.assertFalse(os.path.exists(os.path.join(daemon.directory, "metrics.sock")))

    def test_a_killed_daemons_socket_is_taken_over(self):
        directory = tempfile.mkdtemp(prefix="observe.")
        self.addCleanup(shutil.rmtree, directory, True)
        first = self.daemon(directory=directory)
        first.kill()
        second = self.daemon(directory=directory)
        self.assertEqual(get(os.path.join(directory, "metrics.sock"), "/live")[0], 200)
        self.assertEqual(second.stop(), 0)


@unittest.skipUnless(HAVE_PROMETHEUS, WITHOUT)
class Shipped(unittest.TestCase):
    """config/observe, by promtool."""

    def ok(self, done):
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_scrape_example_and_rules_are_well_formed(self):
        self.ok(promtool("check", "config", "prometheus.yml", cwd=OBSERVE))
        self.ok(promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yml", cwd=OBSERVE))

    def test_each_alert_fires_and_does_not(self):
        self.ok(promtool("test", "rules", "alerts_test.yml", cwd=OBSERVE))

    def test_each_alert_has_a_test_and_a_heading_in_the_docs(self):
        rules = (OBSERVE / "alerts.yml").read_text()
        names = re.findall(r"- alert: (\w+)", rules)
        self.assertEqual(len(names), len(re.findall(r"action: \".+\"", rules)))
        self.assertEqual(names, re.findall(r"- name: (\w+)", (OBSERVE / "alerts_test.yml").read_text()))
        self.assertEqual([f"docs/troubleshooting.md#{name.lower()}" for name in names], re.findall(r" docs: (\S+)", rules))
        page = (TOP / "docs/troubleshooting.md").read_text()
        self.assertEqual(names, re.findall(r"^### (Ucmd\w+)$", page, re.M))


def panels_of(board):
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


class Pictures(unittest.TestCase):
    """What `make pictures` drew: another title on the board, or in ucmctl top, needs new ones."""

    def texts(self, name):
        path, svg = TOP / "docs" / name, "{http://www.w3.org/2000/svg}"
        self.assertLess(path.stat().st_size, 120_000)
        root = xml.etree.ElementTree.parse(path).getroot()
        self.assertEqual(root.tag, svg + "svg")
        return ["".join(text.itertext()) for text in root.iter(svg + "text")]

    def test_the_board_s_picture_names_every_panel(self):
        board = json.loads((OBSERVE / "ucmd-board.json").read_text())
        titles = collections.Counter(panel["title"] for panel in panels_of(board))
        self.assertGreater(len(titles), 50)
        self.assertEqual(titles - collections.Counter(self.texts("board.svg")), collections.Counter(), "make pictures")

    def test_the_screen_of_top_has_every_label(self):
        source, lines = (TOP / "client/ctl/ucmctl-top").read_text(), self.texts("top.svg")
        labels = set(re.findall(r'yield \(?f"([a-z]+) ', source))
        self.assertGreater(len(labels), 8)
        self.assertLessEqual(labels, {line.split()[0] for line in lines})
        titles = set(re.findall(r'"(?:>([A-Z][^"]*)|(TENANT|MODEL))"', source))
        tables = [line for line in lines if re.match(" *(TENANT|NS) ", line)]
        self.assertEqual(len(tables), 2)
        self.assertEqual({right or left for right, left in titles}, set(re.split(" {2,}", "  ".join(tables).strip())), "make pictures")


class Prometheus:
    """A real Prometheus with the shipped files. It scrapes `address` four times a second, or every
    `every`."""

    def __init__(self, address, every="250ms"):
        self.directory = tempfile.mkdtemp(prefix="prometheus.")
        text = (OBSERVE / "prometheus.yml").read_text()
        assert "127.0.0.1:9471" in text
        text = text.replace("127.0.0.1:9471", address).replace(": 15s", f": {every}")
        pathlib.Path(self.directory, "prometheus.yml").write_text(text)
        shutil.copy(OBSERVE / "alerts.yml", self.directory)
        self.log = open(os.path.join(self.directory, "log"), "wb")
        self.process = subprocess.Popen(
            ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data", "--web.listen-address=127.0.0.1:0"],
            cwd=self.directory, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        try:
            self.address = until(self.listening, self.said)
            until(self.ready, self.said)
        except AssertionError:
            self.stop()
            raise

    def said(self):
        return pathlib.Path(self.directory, "log").read_text(errors="replace")

    def listening(self):
        """The port on which the kernel let it listen, as its own log may only say port 0."""
        inodes = set()
        for fd in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(fd)))
            except FileNotFoundError:
                pass
        with open("/proc/net/tcp") as table:
            for line in table:
                words = line.split()
                if words[3] == "0A" and words[9] in inodes:
                    return "127.0.0.1:%d" % int(words[1].split(":")[1], 16)
        assert self.process.poll() is None, self.said()
        return None

    def ready(self):
        try:
            return get(self.address, "/-/ready")[0] == 200
        except OSError:
            return False

    def api(self, path, **query):
        status, text, _ = get(self.address, f"/api/v1/{path}?" + urllib.parse.urlencode(query))
        answer = json.loads(text)
        if status != 200 or answer["status"] != "success" or answer.get("warnings"):
            raise AssertionError(f"{path} {query}: {text}")
        return answer["data"]

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()
        shutil.rmtree(self.directory, ignore_errors=True)


@unittest.skipUnless(HAVE_PROMETHEUS, WITHOUT)
class RealPrometheus(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = tempfile.mkdtemp(prefix="root.")
        cls.addClassCleanup(shutil.rmtree, cls.root, True)
        cls.daemon = serving(**{"metrics.listen": "0", "arena.slab": "4MiB", "shared.roots": cls.root})
        cls.addClassCleanup(cls.daemon.stop)
        cls.address = address_of(cls.daemon)
        cls.prometheus = Prometheus(cls.address)
        cls.addClassCleanup(cls.prometheus.stop)
        # The first scrapes come before the requests, so that rates are not 0.
        until(lambda: cls.prometheus.api("query", query="ucmd_uptime_seconds")["result"])
        replay(cls.daemon.socket)
        # The figures published now may be older.
        lookups = until(lambda: int(re.search(r"\nucmd_lookups_total (\d+)", get(cls.address, "/metrics")[1])[1]))
        until(lambda: cls.prometheus.api("query", query=f"ucmd_lookups_total >= {lookups}")["result"])
        # A series has no rate before its second sample.
        until(lambda: cls.prometheus.api("query", query="rate(ucmd_tenant_lookups_total[1m])")["result"])
        cls.known = set(cls.prometheus.api("label/__name__/values"))
        cls.board = json.loads((OBSERVE / "ucmd-board.json").read_text())

    def test_metrics_as_promtool_wants_them(self):
        done = promtool("check", "metrics", input=get(self.address, "/metrics")[1])
        self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))

    def test_it_is_scraped_whole_as_openmetrics(self):
        target, = self.prometheus.api("targets")["activeTargets"]
        self.assertEqual((target["health"], target["lastError"], target["labels"]["job"]), ("up", "", "ucmd"))
        text = get(self.address, "/metrics")[1]
        samples = sum(1 for line in text.splitlines() if not line.startswith("#"))
        scraped, = self.prometheus.api("query", query="scrape_samples_scraped")["result"]
        self.assertGreaterEqual(int(scraped["value"][1]), samples - 100)  # tenants and tiers may come in between
        kinds = self.prometheus.api("targets/metadata", metric="ucmd_lookup_seconds")
        self.assertEqual([k["type"] for k in kinds], ["histogram"])
        kinds = self.prometheus.api("targets/metadata", metric="ucmd_build")
        self.assertEqual([k["type"] for k in kinds], ["info"], "not scraped as OpenMetrics")

    def test_rules_are_loaded_and_none_fires(self):
        def rules():
            group, = self.prometheus.api("rules")["groups"]
            return all(r["health"] != "unknown" for r in group["rules"]) and group["rules"]
        for rule in until(rules):
            self.assertEqual((rule["health"], rule.get("lastError", "")), ("ok", ""), rule["name"])
            # On a busy machine lookups are slow for a while, which is pending.
            self.assertNotEqual(rule["state"], "firing", rule["name"])
        for expression in re.findall(r"expr: (.*)", (OBSERVE / "alerts.yml").read_text()):
            self.names_known(expression)

    def names_known(self, expression):
        for name in re.findall(r"\b(?:ucmd_[a-z_]+|up|ALERTS)\b", expression):
            if name in ("up", "ALERTS") or name in self.known or name in self.sometimes():
                continue
            self.fail(f"there is no metric {name}: {expression}")

    def sometimes(self):
        """Families that a daemon shows only if it has data for them, which this one lacks."""
        text = (TOP / "proto/metrics/exposition.c").read_text()
        return set(re.findall(r'"(ucmd_reuse_hit_ratio)"', text))

    def resolved(self, text):
        variables = {v["name"]: v for v in self.board["templating"]["list"]}
        values = {name: v.get("allValue") or v.get("query") for name, v in variables.items() if v["type"] != "datasource"}
        values.update({"__rate_interval": "1m", "__range": "5m", "__interval": "15s"})
        text = re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda m: values[m[1] or m[2]], text)
        self.assertNotIn("$", text)
        return text

    def test_every_query_of_the_board_answers(self):
        queries = 0
        for panel in panels_of(self.board):
            for target in panel.get("targets", []):
                with self.subTest(panel=panel["title"], query=target["expr"]):
                    self.assertEqual(target["datasource"], {"type": "prometheus", "uid": "${datasource}"})
                    self.names_known(target["expr"])
                    result = self.prometheus.api("query", query=self.resolved(target["expr"]))["result"]
                    if not any(name in target["expr"] for name in self.sometimes()):
                        self.assertTrue(result, "no data: does a label not exist, or do two sides not match?")
                    # Each label that the legend names is there.
                    for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                        self.assertTrue(all(label in r["metric"] for r in result), label)
                    queries += 1
        self.assertGreater(queries, 80)

    def test_the_boards_variables_find_values(self):
        found = 0
        for variable in self.board["templating"]["list"]:
            if variable["type"] != "query":
                continue
            metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"]).groups()
            self.assertEqual(variable["query"]["query"], variable["definition"])
            self.assertTrue(self.prometheus.api(f"label/{label}/values", **{"match[]": self.resolved(metric)}), metric)
            found += 1
        self.assertEqual(found, 2)

    def test_the_board_can_be_provisioned(self):
        ids = [panel["id"] for panel in panels_of(self.board)]
        self.assertEqual(len(ids), len(set(ids)))
        self.assertNotIn("__inputs", self.board)
        self.assertGreaterEqual(self.board["schemaVersion"], 39)
        self.assertEqual(self.board["uid"], "ucmd")
        taken = set()
        for panel in self.board["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            self.assertLessEqual(at["x"] + at["w"], 24, panel["title"])
            self.assertFalse(cells & taken, f"{panel['title']} lies over another panel")
            taken |= cells

    def test_what_prometheus_has_is_what_the_daemon_counted(self):
        text = get(self.address, "/metrics")[1]
        for name in ("ucmd_lookup_keys_total", "ucmd_load_bytes_total", "ucmd_dump_bytes_total"):
            value = float(re.search(rf"\n{name} (\S+)", text)[1])
            self.assertGreater(value, 0)
            until(lambda n=name, v=value: [r for r in self.prometheus.api("query", query=n)["result"]
                                                if float(r["value"][1]) == v])


if __name__ == "__main__":
    unittest.main()

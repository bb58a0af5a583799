#!/usr/bin/python3
"""What building coded forms costs where tiers differ, on the cpu device: how fast the daemon's threads encode, beside memcpy, and how
much longer loads from DRAM take meanwhile, beside dumps that are not encoded. Every figure of one run, on the machine as it is."""

import ctypes
import multiprocessing
import os
import statistics
import sys
import time

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(TOP, "tests/integration"))
from encoding_case import ENCODINGS, IDENTITY, Pages, random_kv
from second_client import Client, Daemon

SIZES = {"dtype": "bf16", "k": [16, 8, 128], "v": [16, 8, 128]}
SECTION, LAYERS = 16 * 8 * 128 * 2, 16
BLOCK = 2 * SECTION * LAYERS  # 1 MiB
LOADS, ROUNDS, BATCH = int(os.environ.get("LOADS", "500")), int(os.environ.get("ROUNDS", "7")), 8
RATE = 0.25e9  # bytes of KV that dumps bring in a second
OPTIONS = {"arena.size": "512MiB", "arena.extent": "8MiB", "nvme.size": "2GiB", "nvme.segment": "64MiB", "device.cpu_threads": "2",
           "nvme.pressure": "slow", "nvme.pressure_wait": "10s"}
CODED_BELOW = {"dram": "plain", "disk": "coded"}


class Worker:
    def __init__(self, daemon, model, encoding=None, tiers=None, blocks=BATCH):
        self.client = Client(daemon)
        self.ns = self.client.open({**IDENTITY, "model": model, "shards": [LAYERS], "shard_bytes": 2 * SECTION})
        if encoding:
            self.ns = self.client.call("encoding.open", ns=self.ns, encoding=encoding, **SIZES, **(tiers or {}))["ns"]
        self.pages = Pages(self.client, self.ns, blocks, sections=(SECTION, SECTION), layers=LAYERS)
        for i in range(blocks):
            self.pages.put(i, random_kv(BLOCK))


def dumps(daemon, encoding, way):
    """Dumps at RATE: not at all (0), as they are (1), encoded below (2), until told to end (3)."""
    workers = {1: Worker(daemon, "plain"), 2: Worker(daemon, "coded below", encoding, CODED_BELOW)}
    number = 0
    while way.value != 3:
        begun = time.perf_counter()
        if way.value in workers:
            number += BATCH
            workers[way.value].pages.dump([f"{way.value} {number + i}" for i in range(BATCH)], range(BATCH))
        time.sleep(max(0.001, BATCH * BLOCK / RATE - (time.perf_counter() - begun)))


def loads(worker):
    """p50 and p99 of loading a block that DRAM has, in seconds."""
    took = []
    for _ in range(LOADS):
        begun = time.perf_counter()
        assert worker.pages.load(["hit"], [0]) == [0]
        took.append(time.perf_counter() - begun)
    took.sort()
    return statistics.median(took), took[len(took) * 99 // 100]


def measure(daemon, reader, encoding):
    """For each way the medians, over rounds by turns, of p50 and of p99."""
    way = multiprocessing.Value("L", 0)
    process = multiprocessing.Process(target=dumps, args=(daemon, encoding, way))
    process.start()
    found = {0: [], 1: [], 2: []}
    for _ in range(ROUNDS):
        for now, figures in found.items():
            way.value = now
            time.sleep(0.2)
            figures.append(loads(reader))
    way.value = 3
    process.join()
    return [[statistics.median(f[i] for f in figures) for i in range(2)] for figures in found.values()]


def memcpy_speed():
    size = 64 << 20
    one, two = ctypes.create_string_buffer(os.urandom(size), size), ctypes.create_string_buffer(size)
    best = float("inf")
    for _ in range(7):
        begun = time.thread_time()
        ctypes.memmove(two, one, size)
        best = min(best, time.thread_time() - begun)
    return size / best / 1e9


def main():
    copy = memcpy_speed()
    print(f"memcpy: {copy:.2f} GB/s of a thread; dumps of {RATE / 1e9} GB/s; {ROUNDS} rounds of {LOADS} loads of 1 MiB")
    print("| encoding | GB/s a thread, by memcpy | load alone: p50, p99 | beside plain dumps, by alone | beside dumps that are encoded, by alone |")
    print("|---|---|---|---|---|")
    for encoding in ENCODINGS:
        daemon = Daemon(**OPTIONS)
        reader = Worker(daemon, "reader")
        reader.pages.dump(["hit"], [0])
        loads(reader)
        alone, plain, coded = measure(daemon, reader, encoding)
        m = reader.client.call("stats")["metrics"]
        speed = m["transcode_plain_bytes"] / m["transcode_us"] / 1e3
        ratios = [", ".join(f"{f / by:.2f}" for f, by in zip(figures, alone)) for figures in (plain, coded)]
        print(f"| `{encoding}` | {speed:.2f}, {speed / copy:.2f} | {alone[0] * 1e6:.0f}, {alone[1] * 1e6:.0f} us | {ratios[0]} | {ratios[1]} |",
              flush=True)
        daemon.stop()


if __name__ == "__main__":
    main()

"""Requests a second that dense and sparse decoding serve within a limit on the time per token: a simulation with measured times of steps.

Requests come at random (Poisson), each with the long prompt, whose KV lies in the daemon's DRAM, and want as many tokens as `WANTED` allows. A
request is admitted, in the order of arrival, when its memory is free: all its KV, or its digests and its expected slots. Then its bytes come
over the bus, one request after the other, while others decode: all KV, or digests and the blocks of one step. Then it joins the batch. A
step takes what was measured for a batch of its size; sizes between are interpolated. A request's time per token is from its arrival to its
last token, over its tokens. How many requests decode at once is capped, by each with the cap that serves most."""

import random
from bisect import bisect_left

WANTED = (128, 384)
REQUESTS = 1500
LIMITS = (5, 25)  # times a dense step of one request
BUS = 55e9


class Times:
    """Seconds of a step by batch size."""

    def __init__(self, rows):
        self.known = sorted((row["batch"], row["ms"] / 1e3) for row in rows)

    @property
    def most(self):
        return self.known[-1][0]

    def of(self, batch):
        at = bisect_left(self.known, (batch, 0))
        right = self.known[min(at, len(self.known) - 1)]
        left = self.known[max(at - 1, 0)]
        if right[0] == left[0]:
            return right[1]
        return left[1] + (right[1] - left[1]) * (batch - left[0]) / (right[0] - left[0])


def p99(rate, times, cap, join):
    """Of the time per token."""
    draw, now, arrivals = random.Random(3), 0.0, []
    for _ in range(REQUESTS):
        now += draw.expovariate(rate)
        arrivals.append((now, draw.randint(*WANTED)))
    step = [0.0] + [times.of(n) for n in range(1, cap + 1)]
    now, bus, waiting, loading, running, taken = 0.0, 0.0, 0, [], [], []
    while len(taken) < REQUESTS:
        while waiting < REQUESTS and arrivals[waiting][0] <= now and len(loading) + len(running) < cap:
            bus = max(bus, now) + join
            loading.append((bus, *arrivals[waiting]))
            waiting += 1
        while loading and loading[0][0] <= now:
            _, came, tokens = loading.pop(0)
            running.append([tokens, came, tokens])
        events = [loading[0][0]] if loading else []
        if waiting < REQUESTS and len(loading) + len(running) < cap:
            events.append(arrivals[waiting][0])
        if not running:
            now = max(now, min(events))
            continue
        each = step[len(running)]
        steps = min(one[0] for one in running)
        if events:
            steps = min(steps, max(1, int((min(events) - now) / each) + 1))
        now += steps * each
        for one in running:
            one[0] -= steps
        taken += [(now - came) / tokens for left, came, tokens in running if left == 0]
        running = [one for one in running if one[0]]
    late = sorted(taken[REQUESTS // 10:])
    return late[int(len(late) * 0.99)]


def rate(times, join, limit):
    """The highest rate within the limit, and its cap."""
    best = (0.0, 0)
    for cap in sorted({max(1, round(times.most * share / 8)) for share in range(1, 9)}):
        low, high = 0.0, cap / times.of(cap) / (sum(WANTED) / 2)
        if times.of(cap) > limit or p99(best[0] + 1e-3, times, cap, join) > limit:
            continue
        low = best[0]
        for _ in range(9):
            middle = (low + high) / 2
            if middle and p99(middle, times, cap, join) <= limit:
                low = middle
            else:
                high = middle
        best = max(best, (low, cap))
    return best


def table(result):
    """A row for each sparse batch that was measured, beside dense."""
    if not result.get("dense") or not result.get("batch"):
        return None
    dense, kv = Times(result["dense"][0]["rows"]), result["options"]["kv_bytes"]
    out = []
    for times, limit in ((times, times * dense.of(1)) for times in LIMITS):
        served = rate(dense, kv / BUS, limit)
        for one in result["batch"]:
            join = (one["request_bytes"]["digests"] + one["need_bytes"]) / BUS
            mine = rate(Times(one["rows"]), join, limit)
            out.append({"times": times, "limit_ms": limit * 1e3, "policy": one["policy"], "dense": served, "sparse": mine,
                        "ratio": mine[0] / served[0] if served[0] else None})
    return out

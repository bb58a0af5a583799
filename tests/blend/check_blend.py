#!/usr/bin/env python3
"""check_blend.py MODEL.gguf FOLDER [SIZE]: what reused chunks cost a small real model's answers, through ucmclient.blend.transformers and a daemon.

A request is chunks of documents, in an order that none of them was computed in, and a tail of two parts: *recall*, tokens of a chunk in its middle, said again;
and *continue*, the tokens that follow another chunk in its document, behind that chunk's last ones. Measured on the tail's predicted tokens beside a full
computation of the same request: divergence of the logits (KL, nats), the same likeliest token, perplexity. FOLDER/results.json has a row for each request and policy, and
is written as it goes; a second run goes on."""

import json
import math
import os
import pathlib
import random
import sys

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "client/python"), str(TOP / "tests/integration"), str(TOP / "tests/models")]
os.environ.setdefault("UCMCLIENT_LIB", str(TOP / "build/libucmclient.so"))

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import texts  # noqa: E402
from daemon import Daemon  # noqa: E402
from ucmclient import Client, UcmError  # noqa: E402
from ucmclient.blend import First, Hkvd, Nothing, Span  # noqa: E402
from ucmclient.blend.transformers import Runner  # noqa: E402

POLICIES = {"none": Nothing(), **{f"first {n}": First(n) for n in (4, 16, 64)}, **{f"hkvd {r} %": Hkvd(r / 100) for r in (5, 10, 20, 40)}}
SIZES = {"short": dict(requests=20, chunks=6, tokens=192), "full": dict(requests=24, chunks=8, tokens=512)}
ASKED, SCORED = 16, 48  # tokens of a part of the tail before those that are scored, and those


def documents(tokenizer, chunks, tokens, request):
    """Of each chunk its tokens, and those that follow it in its document."""
    rng = random.Random(request)
    names = [(texts.documentation, n) for n in texts.DOCS] + [(texts.book, n) for n in texts.BOOKS]
    out = []
    for of, name in rng.sample(names, chunks):
        text = of(name)
        start = rng.randrange(0, len(text) // 2)
        ids = tokenizer(text[start:start + tokens * 12])["input_ids"]
        assert len(ids) >= tokens + SCORED, name
        out.append((ids[:tokens], ids[tokens:tokens + SCORED]))
    return out


def request_of(tokenizer, chunks, tokens, number):
    """-> (tokens up to the tail, spans, tail, which of the tail's tokens are scored)"""
    parts = documents(tokenizer, chunks, tokens, number)
    ids, spans = tokenizer("Some documents.\n\n")["input_ids"], []
    for chunk, _ in parts:
        spans.append(Span(len(ids), len(ids) + tokens))
        ids = ids + chunk
    rng = random.Random(-number)
    recalled, continued = rng.sample(range(chunks), 2)
    middle = tokens // 2 + rng.randrange(-16, 16)
    tail = tokenizer("\n\n")["input_ids"] + parts[recalled][0][middle:middle + ASKED + SCORED]
    scored = list(range(len(tail) - SCORED, len(tail)))
    chunk, behind = parts[continued]
    tail += tokenizer("\n\n")["input_ids"] + chunk[-ASKED:] + behind
    return ids, spans, tail, scored, list(range(len(tail) - SCORED, len(tail)))


def behind(runner, logits, cache, at, tail):
    """Log-probabilities before each token of the tail."""
    with torch.no_grad():
        answer = runner.model(input_ids=torch.tensor([tail]), position_ids=torch.arange(at, at + len(tail))[None], past_key_values=cache, use_cache=True)
    return torch.log_softmax(torch.cat([logits[None], answer.logits[0, :-1].float()]), -1)


def measured(full, other, tail, scored):
    p, q = full[scored], other[scored]
    right = torch.tensor(tail)[scored]
    return {"kl": float((p.exp() * (p - q)).sum(-1).mean()), "same": float((p.argmax(-1) == q.argmax(-1)).float().mean()),
            "nll": float(-q[range(len(scored)), right].mean()), "full_nll": float(-p[range(len(scored)), right].mean())}


def run(model, tokenizer, folder, size):
    path = pathlib.Path(folder, "results.json")
    rows = json.loads(path.read_text()) if path.exists() else []
    done = {row["request"] for row in rows}
    daemon = Daemon(nvme=False, **{"arena.size": "1GiB"})
    try:
        client = Client(socket=daemon.socket, name="check_blend")
        runner = Runner(model, client, name="SmolLM2-135M", blocks=size["chunks"] * (size["tokens"] // 16 + 1))
        for number in range(size["requests"]):
            if number in done:
                continue
            ids, spans, tail, recall, go_on = request_of(tokenizer, size["chunks"], size["tokens"], number)
            for span in spans:
                runner.store(ids[span.start:span.end])
            full = behind(runner, *runner.prefill(ids, [], Nothing(), prefixes=False), len(ids), tail)
            for name, policy in POLICIES.items():
                logits, cache = runner.prefill(ids, spans, policy, prefixes=False)
                other = behind(runner, logits, cache, len(ids), tail)
                rows.append({"request": number, "policy": name, "computed": runner.computed_tokens / len(ids), "tokens": len(ids),
                             "recall": measured(full, other, tail, recall), "continue": measured(full, other, tail, go_on)})
            path.write_text(json.dumps(rows))
            print(f"request {number}", flush=True)
    except UcmError:
        print(f"the daemon (exit status {daemon.process.poll()}) says:\n{daemon.log()[-4000:]}", file=sys.stderr)
        raise
    finally:
        daemon.stop()
    return rows


def mean(values):
    """With the standard error."""
    values = list(values)
    m = sum(values) / len(values)
    return m, math.sqrt(sum((v - m) ** 2 for v in values) / max(1, len(values) - 1) / len(values))


def table(rows):
    out = ["| policy | computed | recall: KL | same token | perplexity | continue: KL | same token | perplexity |", "|---|---|---|---|---|---|---|---|"]
    for name in POLICIES:
        mine = [r for r in rows if r["policy"] == name]
        cells = [f"{mean(r['computed'] for r in mine)[0]:.1%}"]
        for part in ("recall", "continue"):
            kl, error = mean(r[part]["kl"] for r in mine)
            off, off_error = mean(r[part]["nll"] - r[part]["full_nll"] for r in mine)
            same, same_error = mean(r[part]["same"] for r in mine)
            cells += [f"{kl:.4f} ± {error:.4f}", f"{same:.3f} ± {same_error:.3f}", f"{math.expm1(off):+.1%} ± {off_error:.1%}"]
        out.append(f"| {name} | " + " | ".join(cells) + " |")
    n = len({r["request"] for r in rows})
    out.append(f"\n{n} requests of {rows[0]['tokens']} tokens; full computation: perplexity " + ", ".join(
        f"{math.exp(mean(r[part]['full_nll'] for r in rows)[0]):.2f} ({part})" for part in ("recall", "continue")) + ".")
    return "\n".join(out)


def main():
    model_path, folder = sys.argv[1], sys.argv[2]
    size = SIZES[sys.argv[3] if len(sys.argv) > 3 else "short"]
    os.makedirs(folder, exist_ok=True)
    where = dict(pretrained_model_name_or_path=os.path.dirname(model_path), gguf_file=os.path.basename(model_path))
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    rows = run(model, AutoTokenizer.from_pretrained(**where), folder, size)
    text = table(rows)
    pathlib.Path(folder, "tables.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

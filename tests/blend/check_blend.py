#!/usr/bin/env python3
"""check_blend.py MODEL.gguf FOLDER [SIZE [KIND]]: what reused chunks cost a small real model's answers, through ucmclient.blend.transformers and a daemon.

A prompt is chunks of documents, in an order that none of them was computed in, and a question: for *recall* tokens of a chunk from its middle, whose answer are
the tokens behind them there; for *continue* the last tokens of another chunk, whose answer is what follows that chunk in its document. Measured on the answer,
token by token, beside a full computation of the same prompt: divergence of the logits (KL), the same likeliest token, perplexity. Policies see prompts, and no
answer. KIND: prose (Python's documentation, the King James Bible) or headers (of C). FOLDER/results.json has a row for each request and policy, and is written
as it goes; a second run goes on. On a GPU if $UCM_TEST_CUDA, which says what the daemon does with GPUs, is not off."""

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
from ucmclient.blend import Asked, First, Hkvd, Nothing, Span  # noqa: E402
from ucmclient.blend.transformers import Runner  # noqa: E402

DEVICE = "cpu" if os.environ.get("UCM_TEST_CUDA", "off") == "off" else "cuda"
POLICIES = {"none": Nothing(), **{f"first {n}": First(n) for n in (4, 16, 64)}, **{f"hkvd {r} %": Hkvd(r / 100) for r in (2, 5, 10, 20, 40)},
            **{f"asked {r} %": Asked(r / 100) for r in (2, 4, 6, 8)}}
BASE = "hkvd 20 %"  # that others are compared with, request by request
SIZES = {"short": dict(requests=20, chunks=6, tokens=192), "full": dict(requests=24, chunks=8, tokens=512)}
KINDS = {"prose": [(texts.documentation, n) for n in texts.DOCS] + [(texts.book, n) for n in texts.BOOKS],
         "headers": [(texts.header, n) for n in texts.HEADERS]}
PARTS = ("recall", "continue")
ASKED, SCORED = 16, 48  # tokens of a question, and of its answer


def documents(tokenizer, kind, chunks, tokens, request):
    """Of each chunk its tokens, and those that follow it in its document."""
    rng = random.Random(request)
    names = KINDS[kind]
    out = []
    for of, name in rng.sample(names, chunks):
        text = of(name)[:60000]
        start = rng.randrange(0, len(text) // 2)
        ids = tokenizer(text[start:start + tokens * 12])["input_ids"]
        assert len(ids) >= tokens + SCORED, name
        out.append((ids[:tokens], ids[tokens:tokens + SCORED]))
    return out


def request_of(tokenizer, kind, chunks, tokens, number):
    """-> (tokens of the documents, spans, {question's name: (its tokens, those of the answer)})"""
    parts = documents(tokenizer, kind, chunks, tokens, number)
    ids, spans = tokenizer("Some documents.\n\n")["input_ids"], []
    for chunk, _ in parts:
        spans.append(Span(len(ids), len(ids) + tokens))
        ids = ids + chunk
    rng = random.Random(-number)
    recalled, continued = rng.sample(range(chunks), 2)
    middle = tokens // 2 + rng.randrange(-16, 16)
    gap = tokenizer("\n\n")["input_ids"]
    said, (chunk, behind) = parts[recalled][0][middle:middle + ASKED + SCORED], parts[continued]
    return ids, spans, {"recall": (gap + said[:ASKED], said[ASKED:]), "continue": (gap + chunk[-ASKED:], behind)}


def tensor(of, runner):
    return torch.tensor([of], device=runner.device)


def behind(runner, logits, cache, at, tail):
    """Log-probabilities before each token of the tail. The cache stays as it was."""
    with torch.no_grad():
        answer = runner.model(input_ids=tensor(tail, runner), position_ids=tensor(range(at, at + len(tail)), runner), past_key_values=cache, use_cache=True)
    cache.crop(-len(tail))
    return torch.log_softmax(torch.cat([logits[None], answer.logits[0, :-1].float()]), -1)


def answers(runner, ids, spans, policy, questions):
    """Of each question the log-probabilities before each token of its answer, and the share of tokens times layers that was computed. A policy that
    asks sees the documents and the question, so each question is a request of its own; to others questions make no difference."""
    out = {}
    if isinstance(policy, Asked):
        for name, (question, answer) in questions.items():
            prompt = ids + question
            logits, cache = runner.prefill(prompt, spans, policy, prefixes=False)
            out[name] = behind(runner, logits, cache, len(prompt), answer), runner.computed_tokens / len(prompt)
        return out
    logits, cache = runner.prefill(ids, spans, policy, prefixes=False)
    for name, (question, answer) in questions.items():
        told = behind(runner, logits, cache, len(ids), question + answer)[len(question):]
        out[name] = told, (runner.computed_tokens + len(question)) / (len(ids) + len(question))
    return out


def measured(p, q, answer):
    rows = range(len(answer))
    return {"kl": float((p.exp() * (p - q)).sum(-1).mean()), "same": float((p.argmax(-1) == q.argmax(-1)).float().mean()),
            "nll": float(-q[rows, answer].mean()), "full_nll": float(-p[rows, answer].mean())}


def request(runner, tokenizer, kind, size, number, done):
    """Rows of the policies that are not done."""
    policies = {name: policy for name, policy in POLICIES.items() if (number, name) not in done}
    if not policies:
        return
    ids, spans, questions = request_of(tokenizer, kind, size["chunks"], size["tokens"], number)
    for span in spans:
        runner.store(ids[span.start:span.end])
    full = answers(runner, ids, [], Nothing(), questions)
    for name, policy in policies.items():
        row = {"request": number, "policy": name, "tokens": len(ids)}
        for part, (told, computed) in answers(runner, ids, spans, policy, questions).items():
            row[part] = {"computed": computed, **measured(full[part][0], told, questions[part][1])}
        yield row


def run(model, tokenizer, folder, size, kind):
    path = pathlib.Path(folder, "results.json")
    rows = json.loads(path.read_text()) if path.exists() else []
    done = {(row["request"], row["policy"]) for row in rows}
    daemon = Daemon(nvme=False, **{"arena.size": "1GiB"})
    try:
        client = Client(socket=daemon.socket, name="check_blend")
        runner = Runner(model, client, name="SmolLM2-135M", blocks=size["chunks"] * (size["tokens"] // 16 + 1))
        for number in range(size["requests"]):
            rows += request(runner, tokenizer, kind, size, number, done)
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


def cells(rows, base, part):
    kl, error = mean(r[part]["kl"] for r in rows)
    more, more_error = mean(r[part]["kl"] - base[r["request"]][part]["kl"] for r in rows)
    same, same_error = mean(r[part]["same"] for r in rows)
    off, off_error = mean(r[part]["nll"] - r[part]["full_nll"] for r in rows)
    return (f"{kl * 1e3:.0f} ± {error * 1e3:.0f} | {more * 1e3:+.0f} ± {more_error * 1e3:.0f} | {same:.3f} ± {same_error:.3f} | "
            f"{math.expm1(off):+.1%} ± {off_error:.1%}")


def table(rows):
    """KL in thousandths of a nat, and how much it is above BASE's, request by request."""
    head = f"KL | above {BASE} | same token | perplexity"
    out = [f"| policy | computed | recall: {head} | continue: {head} |", "|---|---|" + "---|" * 8]
    base = {r["request"]: r for r in rows if r["policy"] == BASE}
    for name in POLICIES:
        mine = [r for r in rows if r["policy"] == name]
        computed, _ = mean(r[part]["computed"] for r in mine for part in PARTS)
        out.append(f"| {name} | {computed:.1%} | " + " | ".join(cells(mine, base, part) for part in PARTS) + " |")
    out.append(f"\n{len(base)} requests of {rows[0]['tokens']} tokens; full computation: perplexity " + ", ".join(
        f"{math.exp(mean(r[part]['full_nll'] for r in base.values())[0]):.2f} ({part})" for part in PARTS) + ".")
    return "\n".join(out)


def main():
    model_path, folder = sys.argv[1], sys.argv[2]
    size, kind = SIZES[sys.argv[3] if len(sys.argv) > 3 else "short"], sys.argv[4] if len(sys.argv) > 4 else "prose"
    os.makedirs(folder, exist_ok=True)
    where = dict(pretrained_model_name_or_path=os.path.dirname(model_path), gguf_file=os.path.basename(model_path))
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval().to(DEVICE)
    rows = run(model, AutoTokenizer.from_pretrained(**where), folder, size, kind)
    text = table(rows)
    pathlib.Path(folder, "tables.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

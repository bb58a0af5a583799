"""Long contexts after their dense prefill, kept on disk: a text, what a model's layers made of it, and the questions in it."""

import dataclasses
import os

import numpy as np
import tasks
import texts
from model import f32, softmax

CHUNK = 64  # queries that attend at once: their logits over 32k of context are 17 MB a KV head of the trained decoder


@dataclasses.dataclass
class Context:
    name: str
    ids: list
    K: list       # of each layer, [G, N, d], as the cache holds them
    V: list
    asked: list   # (distance, first position of the answer, its tokens), where the text asks something


def attend_causal(model, q, k, v, out):
    """Dense attention of a whole text: q[N, heads, d], k and v[G, N, d], into out[N, heads, d]."""
    N, group, d = len(q), model.group, model.d
    future = np.triu(np.ones((CHUNK, CHUNK), bool), 1)
    for g in range(model.kv_heads):
        queries = np.ascontiguousarray(q[:, g * group:(g + 1) * group]) * f32(model.beta)
        for at in range(0, N, CHUNK):
            end = min(N, at + CHUNK)
            p = (queries[at:end].reshape(-1, d) @ k[g, :end].T).reshape(end - at, group, end)
            p[:, :, at:].swapaxes(0, 1)[:, future[:end - at, :end - at]] = -np.inf
            out[at:end, g * group:(g + 1) * group] = (softmax(p).reshape(-1, end) @ v[g, :end]).reshape(end - at, group, d)


def prefill(model, ids):
    """-> K, V of each layer, [G, N, d] in float16."""
    h, positions, K, V = model.embed(ids), np.arange(len(ids)), [], []
    out = np.empty((len(ids), model.heads, model.d), f32)
    for layer in range(model.layers):
        q, k, v = model.qkv(layer, h, positions)
        k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (k, v))
        K.append(k.astype(np.float16)), V.append(v.astype(np.float16))
        if layer + 1 < model.layers:
            attend_causal(model, q, k, v, out)
            h = model.after_attention(layer, h, out)
    return K, V


def kept(folder, model, name, make):
    """The context of that name, made and saved when first asked for. make() -> (ids, asked)."""
    path = os.path.join(folder, name.replace("/", "_").replace(" ", "_") + ".npz")
    if not os.path.exists(path):
        ids, asked = make()
        K, V = prefill(model, ids)
        with open(path + ".new", "wb") as file:
            np.savez(file, ids=np.array(ids), asked=np.array(asked, np.int64).reshape(-1, 3), K=np.stack(K), V=np.stack(V))
        os.replace(path + ".new", path)
    with np.load(path) as saved:
        K, V = saved["K"].astype(f32), saved["V"].astype(f32)
        return Context(name, saved["ids"].tolist(), list(K), list(V), [tuple(a) for a in saved["asked"].tolist()])


# ---- which ----

def text(folder, model, name, length):
    """A piece of the documentation or of the Bible that no model here was trained or tuned on beyond what docs/sparse.md says."""
    def make():
        whole = texts.book(name) if name in texts.BOOKS else texts.documentation(name)
        ids = model.tokenizer.encode(whole[:length * 6])
        assert len(ids) >= length, f"{name} has {len(ids)} tokens"
        return ids[:length], []

    return kept(folder, model, f"text {name} {length}", make)


def recall(folder, model, seed, length):
    """Records that are asked for at the end, of the trained decoder's task."""
    def make():
        source = tasks.held_out()
        begin = seed * length % (len(source) - length)
        ids, asked = tasks.questions(1000 + seed, source[begin:begin + length], length)
        return ids, [(distance, at, tasks.VALUE) for distance, at in asked]

    return kept(folder, model, f"recall {seed} {length}", make)


def passkey(folder, model, length, depth, seed):
    def make():
        ids, at, digits = texts.passkey(model.tokenizer, length, depth, seed)
        return ids, [(round(length * (1 - depth)), at, digits)]

    return kept(folder, model, f"passkey {length} {depth} {seed}", make)

"""Token sequences to decode: pieces of the Python documentation, of the Bible and of C headers, and passkeys hidden in them."""

import functools
import glob
import os
import pathlib
import random
import subprocess

DOCS = ["howto/logging-cookbook", "library/argparse", "reference/datamodel", "whatsnew/3.11", "faq/programming", "library/stdtypes"]
BOOKS = ["ezek", "1chr", "acts", "jer", "num", "isa"]
# Of linux-libc-dev, which a compiler needs anyway.
HEADERS = ["linux/bpf", "linux/nl80211", "linux/ethtool", "linux/kvm", "linux/videodev2", "linux/btrfs", "linux/perf_event", "linux/fuse", "linux/if_link",
           "rdma/ib_user_verbs", "sound/asound", "linux/netfilter/nf_tables"]


# Where UCM_SPARSE_TEXTS names a folder that save() wrote, the texts come from there and no Debian package is needed.
SAVED = os.environ.get("UCM_SPARSE_TEXTS")


def saved(name):
    return pathlib.Path(SAVED, name.replace("/", "_") + ".txt")


def save():
    for name in DOCS:
        saved(name).write_text(documentation(name)[:60000], encoding="utf-8")
    for name in BOOKS:
        saved(name).write_text(book(name)[:60000], encoding="utf-8")
    for name in HEADERS:
        saved(name).write_text(header(name)[:60000], encoding="utf-8")


@functools.cache
def documentation(name):
    if SAVED and saved(name).exists():
        return saved(name).read_text(encoding="utf-8")
    folder = sorted(glob.glob("/usr/share/doc/python3.*/html/_sources"))[-1]
    with open(f"{folder}/{name}.rst.txt", encoding="utf-8") as file:
        return file.read()


@functools.cache
def header(name):
    if SAVED and saved(name).exists():
        return saved(name).read_text(encoding="utf-8")
    return pathlib.Path(f"/usr/include/{name}.h").read_text(encoding="utf-8")


@functools.cache
def book(name):
    if SAVED and saved(name).exists():
        return saved(name).read_text(encoding="utf-8")
    return verses(f"{name}1:1-99:99")


def verses(which):
    text = subprocess.run(["bible", "-f", which], capture_output=True, text=True, check=True).stdout
    return "\n".join(line.strip() for line in text.splitlines())


def pieces(tokenizer, count, length):
    """[(name, ids)], the two sources in turn."""
    out = []
    for i in range(count):
        name = (DOCS if i % 2 == 0 else BOOKS)[i // 2]
        text = documentation(name) if i % 2 == 0 else book(name)
        ids = tokenizer.encode(text[:length * 6])
        assert len(ids) >= length, name
        out.append((name, ids[:length]))
    return out


def passkey(tokenizer, length, depth, seed):
    """A question behind a long text that has the answer at `depth`. -> (ids, first position of the answer, its length)."""
    rng = random.Random(seed)
    key = "".join(rng.choice("0123456789") for _ in range(5))
    text = documentation(rng.choice(DOCS[:4]))
    question = "<|im_end|>\n<|im_start|>user\nWhat is the pass key?<|im_end|>\n<|im_start|>assistant\nThe pass key is "
    head = tokenizer.encode("<|im_start|>user\nThere is a pass key hidden in the following text. Find it and remember it.\n\n")
    needle = tokenizer.encode(f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n")
    tail, answer = tokenizer.encode(question), tokenizer.encode(key)
    hay = tokenizer.encode(text[:length * 6])[:length - len(head) - len(needle) - len(tail) - len(answer)]
    at = int(len(hay) * depth)
    ids = head + hay[:at] + needle + hay[at:] + tail
    return ids + answer, len(ids), len(answer)

"""Token sequences to decode: pieces of the Python documentation and of the Bible, and passkeys hidden in them."""

import functools
import glob
import random
import subprocess

DOCS = ["howto/logging-cookbook", "library/argparse", "reference/datamodel", "whatsnew/3.11", "faq/programming", "library/stdtypes"]
BOOKS = ["ezek", "1chr", "acts", "jer", "num", "isa"]


@functools.cache
def documentation(name):
    folder = sorted(glob.glob("/usr/share/doc/python3.*/html/_sources"))[-1]
    with open(f"{folder}/{name}.rst.txt", encoding="utf-8") as file:
        return file.read()


@functools.cache
def book(name):
    text = subprocess.run(["bible", "-f", f"{name}1:1-99:99"], capture_output=True, text=True, check=True).stdout
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

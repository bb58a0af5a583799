"""What train.py trains on, as bytes: Debian's texts, with records planted in them that are asked for again far behind.

A record is "<kkkk=vvvvvvvv>", a key of letters and a value of letters and digits, all random. Its second occurrence is the question: who
reads "<kkkk=" for the second time can know the value from the first only. The texts that are decoded later are left out."""

import glob
import pathlib

import numpy as np
import texts

KEY, VALUE = 4, 8
RECORD = KEY + VALUE + 3
FIRST = 2 + KEY  # of the value, in a record
LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
SIGNS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz0123456789", np.uint8)


def corpus():
    """All of the Python documentation and of the King James Bible but what is decoded later. UCM_SPARSE_TEXTS may name a folder that has it."""
    saved = texts.SAVED and pathlib.Path(texts.SAVED, "corpus.txt")
    if saved and saved.exists():
        return np.frombuffer(saved.read_bytes(), np.uint8)
    folder = sorted(glob.glob("/usr/share/doc/python3.*/html/_sources"))[-1]
    left_out = {f"{folder}/{name}.rst.txt" for name in texts.DOCS}
    parts = [pathlib.Path(file).read_bytes() for file in sorted(glob.glob(f"{folder}/**/*.rst.txt", recursive=True)) if file not in left_out]
    bible = texts.verses("gen1:1-rev22:21")
    for name in texts.BOOKS:
        before, book, bible = bible.partition(texts.book(name))
        assert book, name
        bible = before + bible
    return np.frombuffer(b"\n\n".join([*parts, bible.encode()]), np.uint8)


def save():
    pathlib.Path(texts.SAVED, "corpus.txt").write_bytes(corpus().tobytes())


def held_out():
    """What is not trained on, the sources in turn."""
    pairs = zip(texts.DOCS, texts.BOOKS)
    return np.frombuffer("".join(t for doc, book in pairs for t in (texts.documentation(doc)[:60000], texts.book(book)[:60000])).encode(), np.uint8)


def plant(text, starts, records):
    """text with records[i] at starts[i], ascending; what the text had there moves on."""
    out = np.empty(len(text) + records.size, np.uint8)
    inside = np.zeros(len(out), bool)
    at = (starts[:, None] + np.arange(RECORD)).ravel()
    inside[at] = True
    out[at] = records.ravel()
    out[~inside] = text
    return out


def records(rng, count):
    out = np.empty((count, RECORD), np.uint8)
    out[:, 0], out[:, 1 + KEY], out[:, -1] = ord("<"), ord("="), ord(">")
    out[:, 1:1 + KEY] = LETTERS[rng.integers(len(LETTERS), size=(count, KEY))]
    out[:, FIRST:-1] = SIGNS[rng.integers(len(SIGNS), size=(count, VALUE))]
    return out


def sequence(rng, text, length):
    """-> (bytes[length + 1], weights[length] of the targets behind each byte): nobody can predict a record's key or a new value."""
    most = length // (2 * RECORD)
    pairs = max(1, int(most * 0.8 * rng.random() ** 3)) if rng.random() < 0.8 else int(most * 0.8)
    # Of each pair when it comes, as a share of the length: half of the distances are uniform, half uniform in their logarithm.
    first = rng.random(pairs)
    far = rng.random(pairs)
    near = np.exp(-far * np.log(max(2, length / 64)))
    second = first + (1 - first) * np.where(rng.random(pairs) < 0.5, far, near)
    order = np.argsort(np.concatenate([first, second]), kind="stable")
    again = order >= pairs
    cuts = np.sort(rng.integers(0, length + 1 - 2 * pairs * RECORD, size=2 * pairs))
    starts = cuts + RECORD * np.arange(2 * pairs)
    at = rng.integers(0, len(text) - length - 1)
    out = plant(text[at:at + length + 1 - 2 * pairs * RECORD], starts, records(rng, pairs)[order % pairs])
    weights = np.ones(length + 1, np.uint8)
    weights[(starts[:, None] + np.arange(1 + KEY)).ravel()] = 0
    weights[(starts[~again][:, None] + np.arange(FIRST, FIRST + VALUE)).ravel()] = 0
    return out, weights[1:]


def batch(seed, number, text, sequences, length):
    """The same whatever else was asked for."""
    rng = np.random.default_rng([seed, length, number])
    rows = [sequence(rng, text, length) for _ in range(sequences)]
    return np.stack([r[0] for r in rows]), np.stack([r[1] for r in rows])


def questions(seed, text, length):
    """A text that ends in questions whose records lie 15/16 of its length back, half of that, and so on, five distances by turns; between these, as
    many records that nobody asks for. -> (ids[length], [(distance, first position of the value)])"""
    rng = np.random.default_rng([seed, length])
    count = max(4, min(20, length // 128))
    distances = np.maximum((length * 15 // 16) >> (np.arange(count) % 5), (count + 1) * (RECORD + 1))
    made = records(rng, 2 * count)
    tail = length - count * (RECORD + 1)
    order = rng.permutation(count)
    asked = tail + np.arange(count) * (RECORD + 1)  # where the question about distances[order[i]] begins
    wanted = np.empty(count, np.int64)
    wanted[order] = asked - distances[order]
    starts = np.concatenate([wanted, rng.integers(0, tail - RECORD, size=count)])
    starts = np.sort(starts.clip(0, tail - RECORD)), np.argsort(starts, kind="stable")
    places, which = starts[0].copy(), starts[1]
    for i in range(1, len(places)):  # none in another
        places[i] = max(places[i], places[i - 1] + RECORD)
    for i in range(len(places) - 1, -1, -1):
        places[i] = min(places[i], (places[i + 1] if i + 1 < len(places) else tail) - RECORD)
    out = plant(text[:tail - 2 * count * RECORD], places, made[which])
    end = np.concatenate([np.append(made[i], np.uint8(10)) for i in order])
    place_of = dict(zip(which.tolist(), places.tolist()))
    found = [(int(asked[k] - place_of[i]), int(asked[k] + FIRST)) for k, i in enumerate(order.tolist())]
    return np.concatenate([out, end]).tolist(), found

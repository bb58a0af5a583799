#!/usr/bin/env python3
"""report.py RESULTS.JSON FOLDER: FOLDER/tables.md of what encodings.py measured."""

import json
import math
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "../../reference/encoding")]
import methods  # noqa: E402
import variants  # noqa: E402

ENCODINGS = {"fp8": {"encoding": "fp8"}, "int8": {"encoding": "int8"}, "int8, K a channel": {"encoding": "int8", "axis": 1},
             "q4": {"encoding": "q4"}}


def table(head, rows):
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(out + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def ratio(name, dim):
    if name in ENCODINGS:
        coded = sum(methods.coded_bytes(methods.Spec(kind=kind, tokens=16, heads=8, dim=dim, **ENCODINGS[name])) for kind in (0, 1))
        return 2 * 2 * 16 * 8 * dim / coded
    return variants.VARIANTS[name][2](dim) if name in variants.VARIANTS else None


def mean(rows):
    return [sum(row[i] for row in rows) / len(rows) for i in range(len(rows[0]))]


def summary(by_text):
    """by_text: rows [nll, nll of plain, KL, same] of each text -> worse perplexity, its standard error over texts, KL, same."""
    means = [mean(rows) for rows in by_text]
    worse = [m[0] - m[1] for m in means]
    middle = sum(worse) / len(worse)
    error = math.sqrt(sum((w - middle) ** 2 for w in worse) / max(1, len(worse) - 1) / len(worse))
    all_ = mean(means)
    return middle, error, all_[2], all_[3]


def cells(by_text):
    worse, error, kl, same = summary(by_text)
    return [f"{worse:+.3%} ± {error:.3%}", f"{kl * 1e3:.3f}", f"{same:.4f}"]


def main_table(results, names):
    texts, rows = list(results["texts"].values()), []
    for name in names:
        lost = [list(t["by_length"][name].values()) for t in texts]
        k, v = mean([t["nmse"][name] for t in texts])
        alone = [f"{summary([list(t['by_length'][f'{name}, {part} alone'].values()) for t in texts])[2] * 1e3:.3f}"
                 if f"{name}, {part} alone" in texts[0]["by_length"] else "-" for part in "KV"]
        bytes_ = [f"{ratio(name, dim):.2f}" if ratio(name, dim) else "-" for dim in (128, 64)]
        rows.append([name, *bytes_, *cells(lost), *alone, f"{k:.5f}", f"{v:.5f}"])
    return table(["what", "ratio, d = 128", "d = 64", "perplexity", "KL, 1e-3", "same token", "KL, K alone", "V alone", "NMSE of K", "of V"],
                 rows)


def length_table(results, names):
    texts, lengths = list(results["texts"].values()), list(map(str, results["settings"]["lengths"]))
    rows = []
    for name in names:
        row = [name]
        for at in lengths:
            worse, error, kl, _ = summary([[t["by_length"][name][at]] for t in texts])
            row.append(f"{kl * 1e3:.3f}; {worse:+.2%} ± {error:.2%}")
        rows.append(row)
    return table(["KL, 1e-3; perplexity, behind"] + lengths, rows)


def ends_table(results):
    texts, ends = list(results["texts"].values()), list(map(str, results["settings"]["ends"]))
    rows = []
    for name in ENCODINGS:
        for key in ["0 + 0"] + [k.split(", ")[-1] for k in texts[0]["ends"] if k.rpartition(", ")[0] == name]:
            row = [name, *key.split(" + ")]
            for at in ends:
                found = [[t["by_length"][name][at] if key == "0 + 0" else t["ends"][f"{name}, {key}"][at]] for t in texts]
                worse, error, kl, _ = summary(found)
                row.append(f"{kl * 1e3:.3f}; {worse:+.2%} ± {error:.2%}")
            rows.append(row)
    return table(["what", "first tokens plain", "last"] + [f"KL, 1e-3; perplexity, behind {at}" for at in ends], rows)


def outlier_table(results):
    factors = sorted({int(key.split(", ")[-1]) for key in results["outliers"]})
    rows = []
    for name in dict.fromkeys(key.rpartition(", ")[0] for key in results["outliers"]):
        found = [summary([[row] for row in results["outliers"][f"{name}, {factor}"].values()]) for factor in factors]
        rows.append([name] + [f"{kl * 1e3:.3f}; {worse:+.2%}" for worse, _, kl, _ in found])
    return table(["KL, 1e-3; perplexity, a pair of K's channels larger by"] + list(map(str, factors)), rows)


def key_table(results):
    asked = [k for k in results["keys"] if k["plain"]]
    rows = [[name, f"{sum(k['found'][name] for k in asked)} of {len(asked)}"] for name in (asked[0]["found"] if asked else [])]
    return f"Plain finds {len(asked)} of {len(results['keys'])}.\n\n" + table(["what", "passkeys found"], rows)


def main(file, folder):
    with open(file, encoding="utf-8") as f:
        results = json.load(f)
    others = [name for name in variants.VARIANTS if all(name in text["by_length"] for text in results["texts"].values())]
    tables = {"Encodings": main_table(results, ENCODINGS), "Others": main_table(results, others),
              "By length": length_table(results, [*ENCODINGS, *others])}
    if results["settings"]["ends"]:
        tables["Ends"] = ends_table(results)
    if results.get("outliers"):
        tables["Outliers"] = outlier_table(results)
    if results["keys"]:
        tables["Passkeys"] = key_table(results)
    with open(os.path.join(folder, "tables.md"), "w", encoding="utf-8") as out:
        out.write("\n".join(f"## {title}\n\n{text}" for title, text in tables.items()))
    print(os.path.join(folder, "tables.md"))


if __name__ == "__main__":
    main(*sys.argv[1:])

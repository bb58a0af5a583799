"""decode.py's result as tables for docs/sparse.md: by policy, by batch size, and the rest."""

GIB, MIB = 1 << 30, 1 << 20


def table(head, rows):
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def speed(row):
    return f"{row['ms']:.2f}, {row['tokens_per_second']:.0f}"


def memory(r):
    """Digests, slots, pages and tables of a request, over its KV."""
    whole = sum(r["request_bytes"].values()) + r["tables_bytes"] / max(row["batch"] for row in r["rows"])
    return f"1/{r['kv_bytes'] / whole:.1f}, {whole / GIB:.2f}"


def ratio(row, dense):
    return f"{row['tokens_per_second'] / dense['tokens_per_second']:.2f}" if dense else ""


def by_policy(result, dense, most):
    out = {}
    if dense:
        out["dense"] = ["`dense`", speed(dense), "", "", "", "", f"{most['batch']}: {speed(most)}", "", ""]
    for name in ("one", "eighth", "batch", "long"):
        for r in result.get(name, []):
            row, key = r["rows"][-1], (name == "eighth", r["policy"])
            cells = out.setdefault(key, [f"`{r['policy']}`" + ", an eighth" * key[0]] + [""] * 8)
            if name == "batch":
                cells[6:8] = [f"{row['batch']}: {speed(row)}", ratio(row, most)]
            elif name == "long":
                cells[8] = f"{speed(row)}; {memory(r)}"
            else:
                cells[1:6] = [speed(row), ratio(row, dense), f"{row['misses'] * 100:.1f} %, {row['bus_bytes'] / MIB:.1f}", memory(r),
                              f"{row['select_us']:.1f}"]
    return out.values()


def by_batch(result):
    for r in [{"policy": "dense", **d} for d in result.get("dense", [])] + result.get("batch", []):
        for row in r["rows"]:
            yield [f"`{r['policy']}`", str(row["batch"]), f"{row['ms']:.2f}", f"{row['tokens_per_second']:.0f}",
                   f"{row['bus_bytes'] / MIB:.1f}" if "bus_bytes" in row else "", f"{row['select_us']:.0f}" if "select_us" in row else "",
                   row.get("kernel", "")]


def others(result):
    for r in result.get("serve") or []:
        yield [f"requests/s within {r['times']} times a step, `{r['policy']}`", (
            f"{r['ratio'] or 0:.1f} times dense: {r['sparse'][0]:.2f} with {r['sparse'][1]} at once, dense {r['dense'][0]:.2f} with {r['dense'][1]}")]
    restart = {r["how"]: r for r in result.get("restart", [])}
    if "steps" in restart:
        whole, steps = restart["whole"], restart["steps"]
        yield ["first token after a restart, from NVMe", (
            f"{steps['seconds'] / whole['seconds']:.2f} of loading all: {steps['seconds']:.2f} s, {steps['nvme_read_bytes'] / GIB:.1f} GiB read, "
            f"{steps['runs']} runs; {whole['seconds']:.2f} s, {whole['nvme_read_bytes'] / GIB:.1f} GiB")]
    for r in result.get("second", [])[:1]:
        yield ["second engine", (f"{r['stored_bytes'] + r['built_bytes']} bytes stored or built; found {r['found']} of {r['blocks']} blocks, digests in "
                                 f"{r['seconds']['digests'] * 1e3:.0f} ms, window in {r['seconds']['pin'] * 1e3:.0f} ms")]
    for name in ("one", "eighth", "batch", "long"):
        for r in result.get(name, []):
            yield [f"largest error of attention, {name}, `{r['policy']}`", f"{r['checked']}"]
    for r in result.get("failed", []):
        yield [f"FAILED {r['part']}", f"`{r['policy']}`"]


def show(result):
    dense = result["dense"][0]["rows"] if result.get("dense") else []
    best = max(dense, key=lambda row: row["tokens_per_second"]) if dense else None
    table(["policy", "1 request: ms, tokens/s", "of dense", "misses, MiB a token", "memory of KV, GiB", "choose us", "as many as fit: ms, tokens/s",
           "of dense", "8 times the tokens: ms, tokens/s; memory"], by_policy(result, dense[0] if dense else None, best))
    table(["policy", "requests", "ms", "tokens/s", "MiB a token", "choose us", "kernel"], by_batch(result))
    table(["what", "measured"], others(result))

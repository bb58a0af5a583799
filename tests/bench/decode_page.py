"""decode.py's result as the table of docs/sparse.md."""

GIB, MIB = 1 << 30, 1 << 20


def per_second(row):
    return f"{row['tokens_per_second']:.0f}"


def rows(result):
    """(what, aim, measured) each."""
    dense = result["dense"][0]["rows"] if result.get("dense") else []
    one = {row["batch"]: row for row in dense}
    best = max(dense, key=lambda row: row["tokens_per_second"]) if dense else None
    kv = result["options"]["kv_bytes"]
    if dense:
        yield "dense, 1 request", "", f"{one[1]['ms']:.2f} ms, {per_second(one[1])} tokens/s; without attention {one[1]['without_attention_ms']:.2f} ms"
        yield f"dense, {best['batch']} requests", "", f"{best['ms']:.1f} ms, {per_second(best)} tokens/s"
    for r in result.get("one", []) + result.get("eighth", []):
        row = r["rows"][0]
        times = f", {row['tokens_per_second'] / one[1]['tokens_per_second']:.2f} times dense" if dense else ""
        memory = sum(r["request_bytes"].values()) + r["tables_bytes"]
        yield f"1 request, `{r['policy']}`", "1.3", f"{row['ms']:.2f} ms, {per_second(row)} tokens/s{times}"
        yield "its memory", "1/8", (f"1/{kv / memory:.1f}: {memory / GIB:.2f} GiB, digests {r['request_bytes']['digests'] / GIB:.2f}, slots "
                                    f"{r['request_bytes']['slots'] / GIB:.2f}")
        yield "its bus bytes a token", "16 MiB", f"{row['bus_bytes'] / MIB:.1f} MiB: {row['misses'] * 100:.1f} % miss"
        yield "score and choose a layer", "30 us", f"{row['select_us']:.1f} us, and resolve"
        yield "largest error of attention against float32", "", f"{r['checked']}"
    for r in result.get("batch", []):
        row = r["rows"][-1]
        times = f", {row['tokens_per_second'] / best['tokens_per_second']:.1f} times dense" if dense else ""
        yield (f"{row['batch']} requests, `{r['policy']}`", "6 times",
               f"{row['ms']:.1f} ms, {per_second(row)} tokens/s{times}; {row['bus_bytes'] / MIB:.1f} MiB a token; select {row['select_us']:.0f} us")
        for other in r["rows"][:-1]:
            yield f"{other['batch']} of them", "", f"{other['ms']:.2f} ms, {per_second(other)} tokens/s"
    for r in result.get("long", []):
        row, memory = r["rows"][0], sum(r["request_bytes"].values()) + r["tables_bytes"]
        yield (f"{r['tokens'] >> 10}k tokens, `{r['policy']}`", "60 tokens/s",
               f"{row['ms']:.2f} ms, {per_second(row)} tokens/s; memory 1/{8 * kv / memory:.1f}; select {row['select_us']:.0f} us")
    for r in result.get("serve") or []:
        yield (f"requests/s within {r['times']} times a step, `{r['policy']}`", {5: "1.5", 25: "2"}[r["times"]] + " times dense",
               f"{r['ratio'] or 0:.1f} times: {r['sparse'][0]:.2f} with {r['sparse'][1]} at once, dense {r['dense'][0]:.2f} with {r['dense'][1]}")
    restart = {r["how"]: r for r in result.get("restart", [])}
    if "steps" in restart:
        whole, steps = restart["whole"], restart["steps"]
        yield "first token after a restart, from NVMe", "1/4", (
            f"{steps['seconds'] / whole['seconds']:.2f}: {steps['seconds']:.2f} s, {steps['nvme_read_bytes'] / GIB:.1f} GiB read, {steps['runs']} runs; "
            f"loading all {whole['seconds']:.2f} s")
    for r in result.get("second", []):
        yield "second engine computed", "0", (f"{r['stored_bytes'] + r['built_bytes']} bytes; found {r['found']} of {r['blocks']} blocks, digests in "
                                              f"{r['seconds']['digests'] * 1e3:.0f} ms, window in {r['seconds']['pin'] * 1e3:.0f} ms")


def show(result):
    print("| what | aim | measured |\n|---|---|---|")
    for what, aim, measured in rows(result):
        print(f"| {what} | {aim} | {measured} |")

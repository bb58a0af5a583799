"""Programs: what clients of several tenants do, as a list of calls that names everything and can be shortened anywhere.

A seed decides all of it. The generator knows what it has opened, for which client and how, and what
was stored under which keys. So most calls mean something. If a call needs a thing that is not
there, the generator makes it first, or takes one that was made for another purpose. So orders arise
that no client would think of. For example, a namespace with a pool is later opened in another way.
Or a sequence has blocks of another form, or a summary's block has changed.

A value {"of": NAME, "field": F} is what the answer named NAME has as F. {"hex": ...} is binary, {"keys": [...]} are keys, and
{"u32": [...]} numbers."""

import random

from shapes import (Shape, encoded_bytes, summary_end, summary_identity, summary_within, encoded_identity, encoding_params,
                    fingerprint, padded)
from things import BYTES, SUMMARY, ENCODED, KEYS, RAW, SPECS, SPEC_WEIGHTS, TIMED, BlockSequence, Connection, Family, Ns, Region, of


class Generator:
    def __init__(self, seed, length=None):
        self.random = random.Random(seed)
        self.ops, self.names, self.open, self.free = [], 0, [], 0
        self.length = length or self.random.choice((60, 120, 240))
        self.options = self.daemon_options()
        self.families = [self.family(number) for number in range(self.some(1, 1, 2, 2, 3))]
        self.specs = list(dict.fromkeys(self.random.choices(range(len(SPECS)), SPEC_WEIGHTS, k=self.some(1, 1, 2, 3))))
        self.tenants = self.some(2, 2, 3)
        self.focus = self.weights()

    def some(self, *values):
        return self.random.choice(values)

    def chance(self, of_1):
        return self.random.random() < of_1

    def daemon_options(self):
        some = self.some
        options = {"arena.size": some("4MiB", "8MiB", "16MiB"), "arena.slab": some("1MiB", "2MiB"),
                   "mapping.size": some("0", "2MiB", "4MiB"), "events.memory": some("0", "1MiB"), "lease.max": some("2s", "10min"),
                   "device.cpu_threads": some("1", "2", "4"), "limits.namespaces": some("64", "4096")}
        nvme = self.chance(0.5)
        if nvme:
            options.update({"nvme.size": some("8MiB", "32MiB"), "nvme.segment": "1MiB", "nvme.io": some("auto", "auto", "threads"),
                            "nvme.admission": some("all", "learned"), "nvme.on_write_stall": some("drop", "slow")})
        return {"set": options, "nvme": nvme, "shared": self.chance(0.3), "keep": self.chance(0.2), "encrypted": nvme and self.chance(0.4)}

    def family(self, number):
        if number > 0 and self.chance(0.5):
            shape = self.families_shape
        else:
            some = self.some
            tokens, heads, dim = some(1, 4, 16, 16, 17, 64), some(1, 2, 4, 8), some(16, 32, 48, 64, 128)
            layers, parts = some(1, 1, 2, 3, 8, 16), some(1, 1, 1, 2)
            tensors = some(1, 1, 2)
            while tokens * heads * dim * 2 * tensors * layers > 1 << 18:
                tokens, layers = max(tokens // 2, 1), max(layers // 2, 1)
            shape = Shape(tokens, heads, dim, tensors, layers, parts, some(tokens, tokens, tokens, 1))
        self.families_shape = shape
        return Family(number, shape)

    def weights(self):
        """Each program likes other things."""
        acts = {self.act_dump: 14, self.act_load: 8, self.act_gather: 8, self.act_append: 6, self.act_build: 5, self.act_reopen: 8,
                self.act_summary_load: 4, self.act_region: 3, self.act_sequence: 3, self.act_select: 3, self.act_mapping: 3,
                self.act_lookup: 2, self.act_prefetch: 2, self.act_evict: 3, self.act_space: 3, self.act_end: 2, self.act_vanish: 1.5,
                self.act_connect: 1.5, self.act_operator: 2, self.act_look: 2, self.act_lookup_table: 1, self.act_events: 1,
                self.act_cancel: 1, self.act_restart: 0.7, self.act_odd: 2, self.act_keys: 0.5, self.act_ring: 0.2, self.act_settle: 1}
        return {act: weight * self.some(0.3, 1, 1, 2, 4) for act, weight in acts.items()}

    def program(self):
        for tenant in range(self.tenants):
            self.connect(tenant)
        acts, weights = list(self.focus), list(self.focus.values())
        while len(self.ops) < self.length:
            if not self.open:
                self.connect(self.random.randrange(self.tenants))
            self.random.choices(acts, weights)[0](self.random.choice(self.open))
        return {"options": self.options, "ops": self.ops}

    # ---- words ----

    def name(self, letter):
        self.names += 1
        return f"{letter}{self.names}"

    def add(self, do, conn, **more):
        self.ops.append({"do": do, "c": conn.number, **more})

    def call(self, conn, method, name=None, late=0.1, /, **params):
        """late: the probability that nobody waits for the answer yet."""
        if method in TIMED and self.chance(0.06):
            params["timeout_ms"] = self.some(1, 2, 20)
        if method in TIMED and self.chance(0.2):
            params["priority"] = self.some(0, 1, 7)
        self.add("call", conn, m=method, p=params, **({"as": name} if name else {}), **({"late": 1} if self.chance(late) else {}))

    def part(self, ns):
        return self.random.randrange(ns.identity["parts"])

    def keys(self, tenant, family, spec=None, most=6):
        """Mostly keys of stored blocks, as a prefix."""
        n = self.random.randint(1, most)
        stored = self.stored(tenant, family, spec)
        if stored and self.chance(0.85):
            at = self.random.randrange(len(stored))
            return stored[at:at + n]
        first = self.random.randrange(KEYS)
        return [(first + i) % KEYS for i in range(n)]

    def stored(self, tenant, family, spec=None):
        own = family.stored.get((tenant, spec), [])
        return own if own or spec is None else family.stored.get((tenant, None), [])

    # ---- what there is to be used ----

    def some_family(self):
        return self.random.choice(self.families)

    def some_spec(self):
        return self.random.choice(self.specs)

    def base(self, conn, family=None):
        family = family or self.some_family()
        found = [ns for ns in conn.of(RAW) if ns.family is family and ns.layer_bytes == family.shape.raw]
        return self.random.choice(found) if found and self.chance(0.9) else self.open_base(conn, family)

    def space(self, conn):
        """Any that holds blocks, opened in any way."""
        if conn.of(RAW, BYTES, ENCODED) and self.chance(0.8):
            return self.random.choice(conn.of(RAW, BYTES, ENCODED))
        return self.random.choice((self.open_base, self.open_bytes, self.open_encoded))(conn, self.some_family())

    def open_base(self, conn, family, layer_bytes=None):
        identity = family.identity(conn.tenant, layer_bytes)
        return self.opened(conn, RAW, family, None, identity)

    def open_bytes(self, conn, family, spec=None, wrong_of_1=0.2):
        """An encoded namespace as a namespace of bytes."""
        spec = self.some_spec() if spec is None else spec
        shape, lie, wrong = family.shape, None, {}
        if self.chance(wrong_of_1):
            wrong = self.some({"raw": shape.raw * 2}, {"raw": shape.raw // 2}, {"block_tokens": 1}, {"raw": 1 << 40}, {"parts": 1},
                              {"layout": "encoding/9/int8"}, {"layout": "encoding/1/none"}, {"layout": "encoding/1/int8"})
        elif self.chance(wrong_of_1):
            # The salt describes another layer.
            lie = Shape(shape.tokens * self.some(1, 2, 16), shape.heads * self.some(1, 2), shape.dim * self.some(1, 2), self.some(1, 2), 0, 0, 0)
        identity = encoded_identity(self.tenant_name(conn), family.identity(conn.tenant), shape, SPECS[spec], lie, **wrong)
        if self.chance(0.03):
            identity["salt"] = identity["salt"][:self.some(0, 32, 40, 135)]
        if self.chance(wrong_of_1 / 2):
            identity["layer_bytes"] = self.some(family.shape.raw, padded(identity["layer_bytes"]), identity["layer_bytes"] + 16, 64)
        return self.opened(conn, BYTES, family, spec, identity)

    def tenant_name(self, conn):
        return f"uid:{1000 + conn.tenant}"

    def opened(self, conn, form, family, spec, identity):
        ns = Ns(self.name("n"), form, family, spec, identity)
        conn.spaces.append(ns)
        params = {k: {"hex": v.hex()} if isinstance(v, bytes) else v for k, v in identity.items()}
        self.call(conn, "namespace.open", ns.name, 0, **params)
        return ns

    def open_encoded(self, conn, family, spec=None):
        spec = self.some_spec() if spec is None else spec
        base, shape = self.base(conn, family), family.shape
        if self.chance(0.03) and conn.spaces:
            base = self.random.choice(conn.spaces)  # which may be encoded, or hold summaries
            family, shape = base.family, base.family.shape
        params = encoding_params(shape, SPECS[spec])
        if self.chance(0.05):
            params.update(self.some({"axis": 1}, {"order": 1}, {"v": []}, {"k": [1, 1, 16]}))
        identity = encoded_identity(self.tenant_name(conn), base.identity, shape, SPECS[spec])
        ns = Ns(self.name("n"), ENCODED, family, spec, identity)
        conn.spaces.append(ns)
        conn.encoded.add((family, spec))
        self.call(conn, "encoding.open", ns.name, 0, ns=base.ref, **params)
        return ns

    def summary(self, conn, ns=None):
        found = [space for space in conn.of(SUMMARY) if ns is None or space.base is ns]
        if found and self.chance(0.7):
            return self.random.choice(found)
        if found and self.chance(0.1):
            return self.open_summary_bytes(conn, self.random.choice(found))
        return self.open_summary(conn, ns or (self.random.choice(conn.spaces) if self.chance(0.03) and conn.spaces else self.space(conn)))

    def open_summary_bytes(self, conn, summary):
        """A namespace of summaries by hand, as one of bytes."""
        base = fingerprint(self.tenant_name(conn), summary.base.identity)
        identity = summary_identity(base, dict(summary.base.identity), summary.params)
        identity["layer_bytes"] = {"of": summary.name, "field": "layer_bytes"}
        ns = Ns(self.name("n"), SUMMARY, summary.family, None, dict(summary.identity), summary.base)
        ns.params = summary.params
        conn.spaces.append(ns)
        self.call(conn, "namespace.open", ns.name, 0, **{k: {"hex": v.hex()} if isinstance(v, bytes) else v for k, v in identity.items()})
        return ns

    def open_summary(self, conn, ns):
        params = self.summary_params(ns)
        if self.chance(0.9):
            summary_within(params, ns.identity["block_tokens"], ns.family.shape.raw if ns.form in (BYTES, ENCODED) else ns.layer_bytes)
        summary = Ns(self.name("d"), SUMMARY, ns.family, None, dict(ns.identity, dtype="summary", layer_bytes=0, params=params), ns)
        summary.params = params
        conn.spaces.append(summary)
        self.call(conn, "summary.open", summary.name, 0, ns=ns.ref, build=self.builds(ns, 0.3), **params)
        return summary

    def builds(self, ns, of_1):
        """Whether to ask for summaries to be built; seldom where that is refused."""
        lossy = ns.spec is not None and SPECS[ns.spec]["encoding"] != "lossless"
        return self.chance(of_1 / 8 if lossy else of_1)

    def summary_params(self, ns):
        shape, some = ns.family.shape, self.some
        tokens = ns.identity["block_tokens"]
        method = some({"method": 1, "kind": some(0, 0, 1, 2)}, {"method": 1, "kind": 0}, {"method": 2, "run": some(1, 4, tokens)}, {"method": 3},
                      {"method": 4, "bits": some(64, 128)}, {"method": 5}, {"method": 6, "chosen": some(1, 4), "rest": some(0, 1)})
        if self.chance(0.6):
            row = shape.heads * shape.dim * 2
            return dict(method, dtype=2, kv_heads=shape.heads, head_dim=shape.dim, k_token_stride=row, k_head_stride=shape.dim * 2)
        # A shape of another kind, which ends where something else does.
        params = dict(method, dtype=some(0, 1, 2, 2, 3), kv_heads=some(1, 2, 8, 64, 1024), head_dim=some(4, 16, 64, 128, 1024))
        params["k_head_stride"] = params["head_dim"] * ((4, 2, 2, 1)[params["dtype"]] if self.chance(0.8) else 8)
        params["k_token_stride"] = params["kv_heads"] * params["k_head_stride"]
        encoded = [encoded_bytes(shape, SPECS[spec]) for spec in self.specs]
        ends = [shape.raw, shape.raw, ns.layer_bytes, ns.layer_bytes] + encoded + [padded(n) for n in encoded]
        ends += [min(padded(n) + 4096, shape.raw) for n in encoded]
        params["k_offset"] = max(some(*ends) + some(0, 0, 0, 4, -4) - summary_end(params, tokens), 0) & ~3
        return params

    def region(self, conn, ns=None, pool=False):
        found = [r for r in conn.regions if r.pool == pool and (ns is None or r.ns is ns)]
        if found and self.chance(0.85):
            return self.random.choice(found)
        return self.open_region(conn, ns or self.space(conn), pool)

    def open_region(self, conn, ns, pool, part=None):
        """Mostly planes as the namespace should want them: tensors where it is encoded on this
        connection."""
        encoded = ns.form == ENCODED or (ns.form == BYTES and (ns.family, ns.spec) in conn.encoded)
        if ns.form in (ENCODED, BYTES) and self.chance(0.15):
            encoded = not encoded
        shape, part = ns.family.shape, self.part(ns) if part is None else part
        if ns.form == SUMMARY:
            fragments = [{"of": ns.name, "field": "layer_bytes"}]
        elif encoded:
            fragments = [shape.tensor_bytes] * shape.tensors
        else:
            fragments = [ns.layer_bytes]
        layers = 1 if pool else ns.identity["layers"][0]
        region = Region(self.name("p" if pool else "r"), ns, part, self.some(2, 4, 8) * (2 if pool else 1), pool)
        conn.regions.append(region)
        rope = self.rope(ns, pool)
        region.shifts = bool(rope)
        self.add("region", conn, **{"as": region.name}, ns=ns.ref, part=part, blocks=region.blocks, fragments=fragments, layers=layers,
                 pool=pool, form=ns.form if ns.form in (RAW, SUMMARY) else BYTES, label=ns.label, crc=ns.crc,
                 raw=self.label_of(ns.family, conn), base=ns.base.ref if ns.form == SUMMARY else None,
                 lossless=ns.spec is not None and SPECS[ns.spec]["encoding"] == "lossless", **rope)
        return region

    def rope(self, ns, pool):
        """Where K lies, for loads that re-rotate it."""
        if ns.form == SUMMARY or pool or self.chance(0.9):
            return {}
        shape = ns.family.shape
        numbers = [self.some(0, 0, 0, 16), shape.tokens * shape.heads, shape.dim, 0, self.some(shape.dim, shape.dim // 2 & ~1, 16)]
        return {"more": {"rope": numbers, "rope_dtype": self.some("bf16", "f16", "f32"), "rope_base": 10000.0,
                         "rope_interleaved": self.chance(0.5)}}

    @staticmethod
    def label_of(family, conn):
        return Ns("", RAW, family, None, family.identity(conn.tenant)).label

    def sequence(self, conn, summary=None, part=None):
        found = [c for c in conn.sequences if summary is None or c.summary is summary]
        if found and part is None and self.chance(0.85):
            return self.random.choice(found)
        summary = summary or self.summary(conn)
        sequence = BlockSequence(self.name("c"), summary, self.part(summary) if part is None else part)
        conn.sequences.append(sequence)
        self.call(conn, "sequence.open", sequence.name, 0, ns=summary.ref, part=sequence.part, lease_ms=self.some(0, 0, 50))
        return sequence

    def filled_sequence(self, conn, of=None):
        """A sequence that has blocks, if its keys were stored. of: a region; the sequence is of the
        region's part and namespace, however that was opened."""
        def same(ns):
            return of is None or ns.identity == of.ns.identity
        strict = self.chance(0.9)
        found = [c for c in conn.sequences if not strict or (same(c.summary.base) and (of is None or c.part == of.part))]
        if found and self.chance(0.85):
            sequence = self.random.choice(found)
        else:
            spaces = [ns for ns in conn.of(RAW, BYTES, ENCODED) if same(ns)]
            summary = self.summary(conn, self.random.choice(spaces)) if of and spaces else self.summary(conn)
            sequence = self.sequence(conn, summary, of.part if of and strict else None)
        if sequence.blocks == 0 or self.chance(0.3):
            self.append(conn, sequence)
        return sequence

    def store_first(self, conn, ns):
        if ns.form != SUMMARY and not self.stored(conn.tenant, ns.family, ns.spec) and self.chance(0.8):
            self.dump(conn, self.region(conn, ns))

    def append(self, conn, sequence):
        self.store_first(conn, sequence.summary.base)
        keys = self.keys(conn.tenant, sequence.summary.family, self.some(None, sequence.summary.base.spec))
        sequence.blocks += len(keys)
        self.call(conn, "sequence.append", self.name("a"), sequence=of(sequence, "sequence"), keys={"keys": keys},
                  build=self.builds(sequence.summary.base, 0.5))

    def likely(self, sequence):
        """How many blocks it has: an append stops at the first that is not stored."""
        return self.random.randint(1, sequence.blocks) if sequence.blocks and self.chance(0.4) else 1

    def to(self, region, n):
        return self.random.sample(range(region.blocks), min(n, region.blocks))

    def layers(self, ns):
        n = ns.identity["layers"][0]
        if n == 1 or self.chance(0.75):
            return {}
        first = self.random.randrange(n)
        return {"layer": first, "layers": self.random.randint(0, n - first)}

    # ---- what they do ----

    def act_space(self, conn):
        self.some(self.open_base, self.open_bytes, self.open_encoded)(conn, self.some_family())

    def act_reopen(self, conn):
        """Opens again, in the other way, what is open already. Things that were made before still
        serve."""
        found = conn.of(BYTES, ENCODED)
        if found and self.chance(0.5):
            ns = self.random.choice(found)
        else:
            ns = self.open_bytes(conn, self.some_family(), None, 0.05) if self.chance(0.7) else self.open_encoded(conn, self.some_family())
        base = self.base(conn, ns.family)
        made = self.random.sample((lambda: self.region(conn, ns), lambda: self.region(conn, ns, pool=True), lambda: self.summary(conn, ns)),
                                  self.some(1, 2, 3))
        for make in made:
            make()
        again = (self.open_encoded(conn, ns.family, ns.spec) if ns.form == BYTES else
                 self.open_bytes(conn, ns.family, ns.spec, 0.05))
        for _ in range(self.some(1, 1, 2)):
            self.dump(conn, self.region(conn, self.some(base, base, ns, again)))
        for use in self.random.sample((lambda: self.gather(conn, self.region(conn, ns, pool=True)), lambda: self.load(conn, self.region(conn, ns)),
                                       lambda: self.build(conn, self.summary(conn, ns))), self.some(1, 2, 3)):
            use()

    def act_odd(self, conn):
        """A tenant's blocks of the same size as others' slots."""
        family = self.some_family()
        encoded = [encoded_bytes(family.shape, SPECS[spec]) for spec in self.specs]
        sizes = [padded(n) for n in encoded] + encoded + [padded(family.shape.raw), family.shape.raw + 16]
        ns = self.open_base(conn, family, min(self.some(*sizes), 1 << 18))
        self.dump(conn, self.open_region(conn, ns, False))

    def act_region(self, conn):
        spaces = conn.of(RAW, BYTES, ENCODED, SUMMARY)
        ns = self.random.choice(spaces) if spaces else self.space(conn)
        self.open_region(conn, ns, self.chance(0.5))

    def act_dump(self, conn):
        self.dump(conn, self.region(conn))

    def dump(self, conn, region):
        ns, tenant = region.ns, conn.tenant
        first = self.random.randrange(KEYS)
        at = self.to(region, self.random.randint(1, 6))
        keys = [(first + i) % KEYS for i in range(len(at))]
        if self.chance(0.3):
            keys = self.keys(tenant, ns.family, ns.spec, len(at))
            at = at[:len(keys)]
        more = self.layers(ns)
        if self.chance(0.15):
            more["durability"] = self.some(0, 1, 2)
        if ns.form in (ENCODED, BYTES) and self.chance(0.25):
            more["raw"] = True
        if ns.form != SUMMARY:
            spec = None if more.get("raw") or ns.form == RAW else ns.spec
            stored = ns.family.stored.setdefault((tenant, spec), [])
            stored += [key for key in keys if key not in stored]
        self.add("dump", conn, region=region.name, keys=keys, at=at, more=more, **({"late": 1} if self.chance(0.15) else {}))
        for part in range(ns.identity["parts"]):
            if part != region.part and self.chance(0.85):
                found = [r for r in conn.regions if r.ns is ns and r.part == part and not r.pool]
                other = found[0] if found else self.open_region(conn, ns, False, part)
                at = self.to(other, len(keys))
                self.add("dump", conn, region=other.name, keys=keys[:len(at)], at=at, more=more)

    def act_load(self, conn):
        self.load(conn, self.region(conn))

    def load(self, conn, region):
        self.store_first(conn, region.ns)
        keys = self.keys(conn.tenant, region.ns.family, region.ns.spec if region.ns.form != SUMMARY else None)
        at = self.to(region, len(keys))
        more = self.layers(region.ns)
        if self.chance(0.2):
            more["progress_interval"] = 1
        if region.shifts:
            old = self.some(0, 7, 100)
            more["shifts"] = [len(at), old, old + self.some(0, 1, 64), 0, 0]
        if conn.leases and self.chance(0.2):
            more["lease"] = {"of": conn.leases.pop(), "field": "lease"}
        self.add("load", conn, region=region.name, keys=keys[:len(at)], at=at, more=more, m=self.some("load", "load", "load_prefix"),
                 **({"late": 1} if self.chance(0.15) else {}))

    def act_summary_load(self, conn):
        summary = self.summary(conn)
        if self.chance(0.5):
            self.build(conn, summary)
        region = self.region(conn, summary)
        keys = self.keys(conn.tenant, summary.family, self.some(None, summary.base.spec))
        at = self.to(region, len(keys))
        self.add(self.some("load", "load", "load", "dump"), conn, region=region.name, keys=keys[:len(at)], at=at, more={})

    def act_gather(self, conn):
        self.gather(conn, self.region(conn, pool=True))

    def gather(self, conn, pool):
        layers, items = pool.ns.identity["layers"][0], []
        if self.chance(0.7):
            sequence = self.filled_sequence(conn, pool)
            source, n = {"sequence": of(sequence, "sequence")}, self.likely(sequence)
        else:
            self.store_first(conn, pool.ns)
            keys = self.keys(conn.tenant, pool.ns.family, pool.ns.spec if pool.ns.form != SUMMARY else None)
            source, n = {"keys": {"keys": keys}}, len(keys)
        for slot in self.to(pool, self.random.randint(1, 16)):
            items.append([self.random.randrange(n), self.random.randrange(layers), slot])
        self.add("gather", conn, region=pool.name, source=source, items=items, **({"late": 1} if self.chance(0.1) else {}))

    def act_sequence(self, conn):
        self.sequence(conn, self.summary(conn))

    def act_append(self, conn):
        self.append(conn, self.sequence(conn))

    def act_build(self, conn):
        self.build(conn, self.summary(conn))

    def build(self, conn, summary):
        keys = self.keys(conn.tenant, summary.family, self.some(None, summary.base.spec))
        if not self.builds(summary.base, 1) and self.chance(0.8):
            return
        self.call(conn, "summary.build", None, ns=summary.ref, keys={"keys": keys}, part=self.some(0, 0, 1, summary.identity["parts"] - 1), parts=self.some(0, 1))

    def act_select(self, conn):
        sequence, some = self.filled_sequence(conn), self.some
        params = getattr(sequence.summary, "params", None)
        rows, heads = some(1, 2), params["kv_heads"] * some(1, 1, 2)
        self.add("select", conn, sequences=[of(sequence, "sequence")] * rows, layers=[self.random.randrange(sequence.summary.identity["layers"][0])] * rows,
                 heads=heads, dim=params["head_dim"], rows=some(1, 1, 2),
                 more={"metric": some(0, 0, 1, 2), "reduce": some(0, 1, 2), "heads": some(0, 1, 2), "policy": some(0, 1), "sparse_ratio": 1.0,
                       "min_blocks": some(0, 4), "eps": 0.9, "scores": True, "prefetch": some(0, 0, 8), "limit": some(0, 2)})

    def act_mapping(self, conn):
        if self.options["set"]["mapping.size"] == "0" and self.chance(0.9):
            return
        if not conn.mappings or self.chance(0.2):
            bases = conn.of(RAW) if self.chance(0.85) else conn.of(BYTES, ENCODED, SUMMARY)
            fresh = [ns for ns in bases if all(w.ns.identity != ns.identity for w in conn.mappings)]
            ns = self.random.choice(fresh) if fresh else self.base(conn)
            mapping = Region(self.name("w"), ns, self.part(ns), 0, False)
            conn.mappings.append(mapping)
            self.add("mapping", conn, **{"as": mapping.name}, ns=ns.ref, part=mapping.part, label=ns.label, layer_bytes=ns.layer_bytes,
                     layers=ns.identity["layers"][0], exact=ns.form == RAW)
        mapping = self.random.choice(conn.mappings)
        sequence = self.filled_sequence(conn, mapping)
        n = self.likely(sequence)
        first = self.random.randrange(n)
        self.add("ref", conn, mapping=mapping.name, sequence=of(sequence, "sequence"), first=first, n=self.random.randint(1, n - first))
        if self.chance(0.3):
            self.call(conn, "mapping.unref", mapping=of(mapping, "mapping"), sequence=of(sequence, "sequence"), first=0, n=n)
        if self.chance(0.2):
            self.add("release", conn, mapping=mapping.name)
        if self.chance(0.1):
            conn.mappings.remove(mapping)
            self.add("close", conn, mapping=mapping.name)

    def act_lookup(self, conn):
        ns = self.space(conn)
        keys = self.keys(conn.tenant, ns.family, ns.spec if ns.form != SUMMARY else None)
        more = {"per_key": self.chance(0.5), "lease_ms": self.some(0, 20, 5000), "wait_mode": self.some(0, 0, 1, 2), "shared": self.chance(0.3)}
        name = self.name("l")
        self.call(conn, "lookup", name, ns=ns.ref, keys={"keys": keys}, **more)
        if more["lease_ms"]:
            conn.leases.append(name)
            if self.chance(0.3):
                self.call(conn, "release", lease={"of": conn.leases.pop(), "field": "lease"})

    def act_prefetch(self, conn):
        if conn.sequences and self.chance(0.5):
            sequence = self.random.choice(conn.sequences)
            n = self.likely(sequence)
            self.call(conn, "sequence.prefetch", sequence=of(sequence, "sequence"), index={"u32": [self.random.randrange(n) for _ in range(3)]})
        else:
            ns = self.space(conn)
            self.call(conn, "prefetch", ns=ns.ref, keys={"keys": self.keys(conn.tenant, ns.family, ns.spec)},
                      part=self.some(0, 0, 1, ns.identity["parts"] - 1), parts=self.some(0, 0, 1, 2))

    def act_evict(self, conn):
        spaces = conn.of(RAW, BYTES, ENCODED, SUMMARY)
        if not spaces:
            return
        ns = self.random.choice(spaces)
        keys = {} if self.chance(0.2) else {"keys": {"keys": self.keys(conn.tenant, ns.family)}}
        if self.chance(0.15):
            self.call(conn, "namespace.purge", ns=ns.ref, **keys)
        else:
            self.call(conn, "evict", ns=ns.ref, tier=self.some(0, 1, 1, 1, 2, 3), **keys)

    def act_end(self, conn):
        """Of one thing."""
        if conn.regions and self.chance(0.5):
            region = conn.regions.pop(self.random.randrange(len(conn.regions)))
            self.add("unregister", conn, region=region.name)
        elif conn.sequences:
            sequence = conn.sequences.pop(self.random.randrange(len(conn.sequences)))
            self.call(conn, "sequence.close", sequence=of(sequence, "sequence"))

    def act_vanish(self, conn):
        self.open.remove(conn)
        self.add("vanish", conn)
        if self.chance(0.7):
            self.connect(conn.tenant)

    def act_connect(self, conn):
        if len(self.open) < 8:
            self.connect(self.random.randrange(self.tenants))

    def connect(self, tenant):
        conn = Connection(self.free, tenant)
        self.free += 1
        self.open.append(conn)
        self.add("connect", conn, tenant=tenant)
        return conn

    def act_cancel(self, conn):
        self.add("cancel", conn)

    def act_settle(self, conn):
        self.add("settle", conn)

    def act_lookup_table(self, conn):
        self.call(conn, "lookup_table.open", ns=self.space(conn).ref)

    def act_look(self, conn):
        """Calls that tell what is stored; of others, too, if these allow it."""
        ns, some = self.space(conn), self.some
        number = ns.ref if self.chance(0.7) else self.random.randint(1, 12)
        method, params = some(("ls", {"ns": number}), ("inspect", {"ns": number, "key": {"keys": [self.random.randrange(KEYS)]}}),
                              ("verify", {"ns": number}), ("namespace.list", {}), ("tenant.list", {}), ("stats", {}), ("health", {}),
                              ("encryption_key.list", {}), ("events.list", {"ns": number}), ("config.get", {}),
                              ("lookup", {"ns": number, "keys": {"keys": [0, 1, 2]}}), ("lookup_table.open", {"ns": number}),
                              ("hello", {"version_min": 1, "version_max": some(1, 2, 5), "client": "again"}))
        self.call(conn, method, **params)

    def act_events(self, conn):
        ns = self.space(conn)
        if self.chance(0.5):
            self.call(conn, "events", since=0, limit=0, wait_ms=self.some(0, 0, 5), tokens=self.chance(0.5))
        else:
            keys = self.keys(conn.tenant, ns.family, ns.spec)
            tokens = ns.identity["block_tokens"] * len(keys)
            self.call(conn, "events.metadata", ns=ns.ref, keys={"keys": keys}, tokens={"u32": [7 + conn.tenant] * tokens},
                      lora=f"lora-{'abcd'[conn.tenant]}")

    def act_operator(self, conn):
        """By root, or by a client that may not."""
        some = self.some
        ns = self.space(conn)
        keys = {} if self.chance(0.3) else {"keys": {"keys": self.keys(conn.tenant, ns.family)}}
        tenant = f"uid:{1000 + self.random.randrange(self.tenants)}"
        mib = some("1MiB", "2MiB", "0")
        method, params = some(("pin", {"ns": ns.ref, **keys}), ("unpin", {"ns": ns.ref, **keys}), ("unpin", {"ns": ns.ref}),
                              ("shared.gc", {}), ("trace", {"op": some(0, 1, 2)}), ("config.reload", {}),
                              ("bypass", {"ns": ns.ref, "load": some(0, 1, 2, 2), "store": some(0, 1, 2, 2)}), ("bypass", {"load": 2, "store": 2}),
                              ("tenant.set", {"tenant": tenant, "settings": some(f"dram.max={mib}", f"nvme.max={mib}", f"dram.min={mib}", "weight=3")}),
                              ("tenant.reset", {"tenant": tenant}), ("encryption_key.reload", {}), ("evict", {"ns": ns.ref, "tier": 1}))
        self.add("operator" if self.chance(0.8) else "call", conn, m=method, p=params)

    def act_keys(self, conn):
        self.add("rekey", conn)

    def act_ring(self, conn):
        if self.chance(0.3):
            self.call(conn, "region.challenge")
        elif self.chance(0.5):
            self.call(conn, "ring.register", gpu={"hex": "00" * 16}, ipc={"hex": "00" * 64}, entry_bytes=1 << 16, entries=2)
        else:
            self.call(conn, "ring.unregister", ring=1)

    def act_restart(self, conn):
        self.add("restart", conn, how=self.some("term", "term", "kill"))
        tenants = [conn.tenant for conn in self.open]
        self.open = []
        for tenant in tenants:
            self.connect(tenant)

#!/usr/bin/python3
"""`ucmctl plan`: its arithmetic against figures of models' papers and vendors, and against the
daemon; and what it prints."""

import json
import math
import os
import random
import re
import tempfile
import unittest

from daemon import ctl, script_of
from second_client import DEMO, Case, Daemon, Region

OK, ERROR, USAGE = 0, 1, 2
NOWHERE = "/nonexistent/ucmd.sock"
MIB, GIB = 1 << 20, 1 << 30
# Public numbers of Llama-3.1-70B.
LLAMA = {"model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8,
         "max_position_embeddings": 131072, "torch_dtype": "bfloat16"}
HEADS = {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "hidden_size": 4096}
# The public config.json of each model, cut to the fields that count: bytes a token at the config's
# own type, sliding and recurrent layers.
MODELS = {
    # 2 x 32 layers x 8 heads x 128 x 2 bytes.
    "Llama-3.1-8B": ({"model_type": "llama", "torch_dtype": "bfloat16", **HEADS}, 131072, 0, 0),
    # 516.096 KB, as the paper "Insights into DeepSeek-V3" (ISCA 2025, table 1) has it.
    "Llama-3.1-405B": ({"model_type": "llama", "hidden_size": 16384, "num_attention_heads": 128, "num_hidden_layers": 126,
                        "num_key_value_heads": 8, "torch_dtype": "bfloat16"}, 516096, 0, 0),
    # Multi-head: as many KV heads as heads, and no field for them.
    "Llama-2-7B": ({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}, 524288, 0, 0),
    # 327.680 KB, in the same table.
    "Qwen2.5-72B": ({**LLAMA, "model_type": "qwen2", "sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 80},
                    327680, 0, 0),
    # A mixture of experts whose head_dim is not hidden_size by heads.
    "Qwen3-30B-A3B": ({"model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 48,
                       "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "sliding_window": None,
                       "use_sliding_window": False}, 98304, 0, 0),
    "Mistral-7B-v0.1": ({"model_type": "mistral", "sliding_window": 4096, **HEADS}, 131072, 32, 0),
    "Mixtral-8x7B-v0.1": ({"model_type": "mixtral", "sliding_window": None, "num_local_experts": 8, **HEADS}, 131072, 0, 0),
    "gemma-2-9b": ({"model_type": "gemma2", "hidden_size": 3584, "num_attention_heads": 16, "num_hidden_layers": 42,
                    "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 4096, "torch_dtype": "float32"}, 688128, 21, 0),
    # Leaves its heads to transformers' defaults, in a part of its own.
    "gemma-3-4b-it": ({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34,
                                                               "sliding_window": 1024}}, 139264, 29, 0),
    "gpt-oss-120b": ({"model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 4,
                      "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
                      "layer_types": ["sliding_attention", "full_attention"] * 2}, 8192, 2, 0),
    # 70.272 KB, in the same table.
    "DeepSeek-V3": ({"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61,
                     "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
                     "quantization_config": {"quant_method": "fp8"}}, 70272, 0, 0),
    "DeepSeek-V2-Lite": ({"model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 27,
                          "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}, 31104, 0, 0),
    # Every fourth of 48 layers has KV: 2 x 12 x 2 x 256 x 2.
    "Qwen3-Next-80B-A3B": ({"model_type": "qwen3_next", "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 48,
                            "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4}, 24576, 0, 36),
}
WRONG = (([], "no JSON object"), ({}, "num_hidden_layers"), ({"num_hidden_layers": -1}, "num_hidden_layers"),
         ({"num_hidden_layers": "32"}, "num_hidden_layers"), ({"num_hidden_layers": 1e9}, "num_hidden_layers"),
         ({"num_hidden_layers": 2.5}, "num_hidden_layers"), ({"num_hidden_layers": 32}, "num_attention_heads"),
         ({"num_hidden_layers": True}, "num_hidden_layers"), ({"num_hidden_layers": math.inf}, "num_hidden_layers"),
         ({"num_hidden_layers": 32, "num_attention_heads": 32}, "head_dim"),
         ({"num_hidden_layers": 32, "num_attention_heads": 3, "hidden_size": 4096}, "head_dim"),
         ({"num_hidden_layers": 32, "kv_lora_rank": 512}, "qk_rope_head_dim"),
         ({"num_hidden_layers": 3, "layer_types": ["full_attention"]}, "layer_types"),
         ({"num_hidden_layers": 1, "layer_types": [7]}, "layer_types"),
         ({"num_hidden_layers": 1, "layer_types": ["linear_attention"]}, "no layer"))


script = script_of("client/ctl/ucmctl-plan")


def sizes_of(name, tp=1, pp=1, block_tokens=16, bits=None):
    model = script.read_model(MODELS[name][0])
    return script.Sizes(model, tp, pp, block_tokens, bits or model.bits)


class Arithmetic(unittest.TestCase):
    def test_published_bytes_a_token(self):
        for name, (config, token, sliding, recurrent) in MODELS.items():
            model, sizes = script.read_model(config), sizes_of(name)
            self.assertEqual((sizes.token, model.sliding, model.recurrent), (token, sliding, recurrent), name)
            self.assertEqual(sizes.block, 16 * token)

    def test_ranks_split_heads_and_layers(self):
        for tp, pp, parts in ((4, 1, 4), (2, 2, 4), (16, 1, 8)):  # more ranks than heads: two hold the same head, and one stores it
            s = sizes_of("Llama-3.1-8B", tp, pp)
            self.assertEqual((s.parts, s.token, s.rank_token, s.part), (parts, 131072, 131072 // parts, 16 * 131072 // parts))
        self.assertEqual(sizes_of("Llama-3.1-8B", bits=8).token, 65536)

    def test_a_latent_is_stored_once_for_all_ranks(self):
        s = sizes_of("DeepSeek-V3", tp=8, block_tokens=64)
        self.assertEqual((s.parts, s.token, s.rank_token), (1, 70272, 70272))
        self.assertEqual(sizes_of("DeepSeek-V3", tp=8, bits=8).token, 61 * 576)

    def test_fp8_of_the_config(self):
        config = {"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64,
                  "quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
        self.assertEqual(script.read_model(config).bits, 8)

    def test_what_fits_and_what_is_needed_agree(self):
        for name in MODELS:
            s = sizes_of(name, 2, 2)
            for blocks in (1, 8, 57, 400, 2801, 19608):
                dram, nvme = s.dram_bytes(blocks), s.nvme_bytes(blocks)
                self.assertGreaterEqual(min(s.dram_blocks(dram), s.nvme_blocks(nvme)), blocks, name)
                self.assertLess(max(s.dram_blocks(dram - s.slab), s.nvme_blocks(nvme - s.slab)), blocks, name)
            self.assertEqual(s.nvme_blocks(0), 0)

    def test_large_parts_ask_for_a_larger_slab(self):
        # 128 MiB, and a segment also has a header
        self.assertEqual(sizes_of("Llama-3.1-8B", block_tokens=1024).slab, 256 * MIB)
        with self.assertRaisesRegex(script.Refused, "--block-tokens"):
            sizes_of("Llama-3.1-8B", block_tokens=65536)

    def test_what_it_cannot_know_is_refused(self):
        for config, word in WRONG:
            with self.assertRaisesRegex(script.Refused, word, msg=config):
                script.read_model(config)

    def test_ranks_that_do_not_divide_are_refused(self):
        for word, split in (("--tp 3", {"tp": 3}), ("--pp 33", {"pp": 33})):
            with self.assertRaisesRegex(script.Refused, word):
                sizes_of("Llama-3.1-8B", **split)


class TheDaemonsOwn(Case):
    """What a slot, a record and an entry of the index take in the daemon."""
    options = {"index.max_blocks": "1024"}

    def test_sizes(self):
        client = self.client()
        for parts in (1, 4):
            s = script.Sizes(script.read_model({"num_hidden_layers": parts, "num_attention_heads": 1, "head_dim": 64}), 1, parts, 17, 16)
            self.assertEqual((s.parts, s.part), (parts, 17 * 256))
            identity = dict(DEMO, model=self.id(), block_tokens=17, parts=parts, layers=[1] * parts, layer_bytes=s.part)
            ns = client.open(identity)

            def dump(first, n):
                for part in range(parts):
                    Region(client, ns, identity, n, part=part).dump(range(first, first + n), range(n))
                self.settled(client, ns)
                return client.metrics()
            before, after = client.metrics(), dump(0, 256)
            for name, size in (("arena_bytes_used", s.slot), ("nvme_bytes_used", s.record)):
                self.assertEqual(after[name] - before[name], size * parts * 256, name)
            # As many as index.max_blocks allows; a block of more parts counts as more.
            self.assertEqual(dump(256, 1024)["blocks"], 1024 * 128 // s.index)
            client.call("namespace.purge", ns=ns)


class Plan(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        directory = tempfile.TemporaryDirectory(prefix="ucmctl.")
        cls.addClassCleanup(directory.cleanup)
        cls.directory = directory.name
        cls.config = os.path.join(directory.name, "config.json")
        with open(cls.config, "w") as file:
            json.dump(LLAMA, file)

    def plan(self, *words, socket=NOWHERE, code=OK):
        done = ctl(socket, "plan", *words)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def json(self, *words, **more):
        return json.loads(self.plan(self.config, "--json", *words, **more).stdout)

    def test_bytes(self):
        plan = self.json("--tp", 4)
        self.assertEqual((plan["bytes"]["token"], plan["bytes"]["token_rank"]), (327680, 81920))
        self.assertEqual((plan["parts"], plan["bytes"]["part"]), (4, 16 * 81920))
        self.assertNotIn("holds", plan)
        self.assertEqual(self.json("--kv-dtype", "fp8")["bytes"]["token"], 163840)
        text = self.plan(self.directory, "--tp", 4).stdout
        self.assertIn("80 layers, 8 KV heads of 128, bfloat16, up to 131072 tokens", text)
        self.assertIn("320 KiB (327680 bytes), 80.0 KiB in each rank's GPU", text)

    def test_what_a_host_holds(self):
        holds = self.json("--dram", "512GiB", "--nvme", "15TiB")["holds"]
        self.assertFalse(holds["from_daemon"])
        # Slots fill slabs, and records fill segments, except for a few percent.
        for tier, size in (("dram", 512 * GIB), ("nvme", 15 * 1024 * GIB)):
            self.assertLessEqual(holds[f"{tier}_tokens"], size // 327680)
            self.assertGreater(holds[f"{tier}_tokens"], 0.9 * size / 327680)
        text = self.plan(self.config, "--dram", "512GiB", "--length", 32768).stdout
        self.assertRegex(text, r"(?m)^dram +512 GiB: 1\.\d\d million tokens, [45]\d requests of 32768$")

    def test_what_to_buy(self):
        buy = self.json("--length", 32768, "--requests", 8, "--history", 100)["buy"]
        self.assertGreaterEqual(buy["dram_bytes"], 8 * 32768 * 327680)
        self.assertGreaterEqual(buy["nvme_bytes"], 108 * 32768 * 327680)
        self.assertEqual(buy["blocks"], 108 * 2048)
        holds = self.json("--dram", buy["dram_bytes"], "--nvme", buy["nvme_bytes"])["holds"]
        self.assertGreaterEqual(holds["dram_tokens"], 8 * 32768)
        self.assertGreaterEqual(holds["nvme_tokens"], 108 * 32768)
        text = self.plan(self.config, "--length", 131072, "--requests", 100000).stdout
        self.assertIn("That is more than one host has: ucmd takes 16 paths and an arena of 15.0 TiB at most.", text)
        self.assertNotIn("ucmd.yaml", text)
        text = self.plan(self.config, "--length", 32768, "--history", 10000).stdout
        paths, size = int(re.search(r"with (\d+) entries", text)[1]), int(re.search(r"nvme: {size: (\d+)GiB}", text)[1])
        self.assertLessEqual(size, 16 * 1024)
        self.assertGreater(paths * size * GIB, 10000 * 32768 * 327680)
        self.assertRegex(text, r"index: {max_blocks: 20482048}")
        text = self.plan(self.config, "--tp", 4, "--length", 32768, "--history", 10000).stdout
        self.assertRegex(text, rf"index: {{max_blocks: {20482048 * (160 + 32) // 128}}}")

    def test_a_model_s_words_reach_no_terminal_as_they_are(self):
        path = os.path.join(self.directory, "odd.json")
        with open(path, "w") as file:
            json.dump({**LLAMA, "torch_dtype": "\x1b[31m\ud800", "model_type": "\x1b]0;"}, file)
        self.assertIn("?[31m?", self.plan(path).stdout)

    def test_the_daemon_s_sizes(self):
        daemon = Daemon()
        self.addCleanup(daemon.stop)
        holds = self.json(socket=daemon.socket)["holds"]
        self.assertTrue(holds["from_daemon"])
        self.assertEqual(holds["dram_bytes"], 16 << 20)
        self.assertGreater(holds["nvme_bytes"], 200 << 20)
        self.assertIn("The daemon here:", self.plan(self.config, socket=daemon.socket).stdout)

    def test_mistakes_are_named(self):
        for text, sentence in (("{", "no JSON"), ("[1]", "no JSON object"), ("{}", "num_hidden_layers is missing"),
                               ('{"num_hidden_layers": 2}', "num_attention_heads is missing")):
            path = os.path.join(self.directory, "wrong.json")
            with open(path, "w") as file:
                file.write(text)
            done = self.plan(path, code=ERROR)
            self.assertIn(sentence, done.stderr)
            self.assertEqual(done.stdout, "")
        self.assertIn("No such file", self.plan("/nonexistent/config.json", code=ERROR).stderr)
        self.assertIn("--tp 3 does not divide 8 KV heads", self.plan(self.config, "--tp", 3, code=ERROR).stderr)
        self.assertIn("--length", self.plan(self.config, "--history", 3, code=USAGE).stderr)
        self.assertIn("wanted auto, fp32", self.plan(self.config, "--kv-dtype", "fp9", code=USAGE).stderr)

    def write_trace(self, lines):
        path = os.path.join(self.directory, "site.jsonl")
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        return path

    def test_trace(self):
        """Hits of a recorded trace by cache size, as a simple LRU list has them."""
        rng, kinds = random.Random(5), ("hash_ids", "each_ids", "dumped_ids")
        lines = [{"ucm_trace": 1, "program": "test"},
                 {"define": "namespace", "namespace": 1, "tenant": 1, "block_bytes": 1, "block_tokens": 32}]
        stack, distances, asked, tokens = [], [], 0, {}
        while asked < 20000:
            kind = rng.choice(kinds)
            first = int(rng.paretovariate(1)) * 20 % 2000
            ids = list(range(first, first + 20)) if kind != "each_ids" else [rng.randrange(2000) for _ in range(5)]
            line = {"timestamp": len(lines), kind: ids, "tenant": 1}
            if kind == "hash_ids":
                line |= {"input_length": 32 * len(ids), "output_length": 0}
            if kind != "hash_ids" or rng.random() < 0.5:
                line["namespace"] = 1
            lines.append(line)
            deepest = 0
            for id in ids:
                at = stack.index(id) + 1 if id in tokens else math.inf
                if at != math.inf:
                    stack.remove(id)
                stack.insert(0, id)
                tokens[id] = 32
                if kind != "dumped_ids":
                    deepest = at if kind == "each_ids" else max(deepest, at)
                    asked += 1
                    distances.append(32 * deepest)
        path = self.write_trace(lines + [{"end": True, "timestamp": len(lines)}])
        said = self.json("--dram", "1GiB", "--nvme", "2GiB", "--trace", path)
        trace = said["trace"]
        self.assertEqual((trace["blocks"], trace["tokens"]), (asked, sum(tokens.values())))
        self.assertEqual(trace["lookups"], sum("hash_ids" in line or "each_ids" in line for line in lines))
        self.assertEqual([size["bytes"] for size in trace["dram"]], [2 ** 29, 2 ** 30, 2 ** 31, 2 ** 32])
        for tier in ("dram", "nvme"):
            sizes = [size["permille"] for size in trace[tier]]
            hits = sum(d <= said["holds"][f"{tier}_tokens"] for d in distances)
            self.assertAlmostEqual(sizes[1], 1000 * hits / asked, delta=1)
            self.assertEqual(sizes, sorted(sizes))
            self.assertLess(sizes[0], sizes[-1])
        self.assertGreater(trace["nvme"][1]["permille"], trace["dram"][1]["permille"])
        for need in trace["needs"]:
            hits = sum(d <= need["tokens"] for d in distances) / sum(d < math.inf for d in distances)
            self.assertAlmostEqual(100 * hits, need["percent"], delta=2)
        text = self.plan(self.config, "--dram", "1GiB", "--trace", path).stdout
        self.assertIn(f"The trace: {trace['lookups']} lookups of {asked} blocks, {trace['tokens']} tokens in different blocks.", text)
        self.assertIn("50 % of these hits: ", text)

    def test_trace_mistakes(self):
        for lines, sentence in (([{"ucm_trace": 1}], "it has no lookup"),
                                ([{"hash_ids": [0]}, {"hash_ids": [-1]}], "line 2 is none of what"),
                                ([[1]], "line 1 is none of what"),
                                ([{"hash_ids": [1 << 40]}], "line 1 is none of what")):
            self.assertIn(sentence, self.plan(self.config, "--trace", self.write_trace(lines), code=ERROR).stderr)
        self.assertIn("No such file", self.plan(self.config, "--trace", "/nonexistent/site.jsonl", code=ERROR).stderr)


if __name__ == "__main__":
    unittest.main()

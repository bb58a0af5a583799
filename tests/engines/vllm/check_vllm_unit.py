#!/usr/bin/env python3
"""The connector under vLLM's own scheduler, aggregator and statistics, one question at a time. The
questions are those of vLLM's tests of connectors: backwards compatibility, load failures, invalid
blocks, errors, cache pollution, aggregation of ranks. Runs in a Python that has vLLM, with a real
daemon. The test makes up the workers' reports, so that each failure comes when it is wanted. `make
check-vllm`."""

import dataclasses
import inspect
import os
import sys
import tempfile
import unittest
from types import SimpleNamespace

TOP = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path[:0] = [os.path.join(TOP, "client/python"), os.path.join(TOP, "tests/integration")]
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1")

import torch  # noqa: E402
from prometheus_client import REGISTRY  # noqa: E402
from transformers import LlamaConfig  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalFieldElem, PlaceholderRange  # noqa: E402
from vllm.pooling_params import PoolingParams  # noqa: E402
from vllm.utils.hashing import get_hash_fn_by_name  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402
from vllm.v1.engine import EngineCoreRequest, FinishReason  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

from daemon import Daemon  # noqa: E402
import request_fields as known  # noqa: E402
from extra import extra_of  # noqa: E402
from ucmclient import BlockResult, Client, Plane  # noqa: E402
from ucmclient.memory import SharedMemory  # noqa: E402
from ucmclient.engine.vllm.connector import UcmConnector, UcmProgress  # noqa: E402
from ucmclient.engine.vllm.identity import EngineIdentity  # noqa: E402
from ucmclient.engine.vllm.inputs import _HASH, chosen_items  # noqa: E402
from ucmclient.engine.vllm.scheduler import HANDOVER  # noqa: E402
from ucmclient.engine.vllm.stats import UcmStats  # noqa: E402

BLOCK, BYTES, POOL = 16, 64, 64
IDENTITY = EngineIdentity(model="unit", dtype="auto", layout="unit/1", block_tokens=BLOCK, layer_bytes=BYTES, layers=(1,))


def tokens(seed, n, shared=0):
    return [7] * shared + [1 + (seed * 97 + i) % 400 for i in range(n - shared)]


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.directory = tempfile.TemporaryDirectory(prefix="unit.")
        LlamaConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                    vocab_size=512, max_position_embeddings=8192, architectures=["LlamaForCausalLM"]).save_pretrained(cls.directory.name)
        init_none_hash(get_hash_fn_by_name("sha256"))

    @classmethod
    def tearDownClass(cls):
        cls.directory.cleanup()

    def setUp(self):
        self.daemon = Daemon(nvme=False, **{"arena.size": "64MiB"})
        self.addCleanup(lambda: self.assertEqual(self.daemon.stop(), 0))
        self.worker = Client(self.daemon.socket)
        self.addCleanup(self.worker.close)
        self.ns = self.worker.namespace(IDENTITY)
        memory = SharedMemory(POOL * BYTES)
        self.region = self.ns.register([memory.memory()], [Plane(0, 0, BYTES, BYTES, 0)], blocks=POOL)

    def configs(self, policy="recompute", **settings):
        settings = {"socket": self.daemon.socket, "lookup_timeout": 5.0, **settings}
        config = EngineArgs(
            model=self.directory.name, skip_tokenizer_init=True, dtype="float32", max_model_len=1024, block_size=BLOCK, enforce_eager=True,
            prefix_caching_hash_algo="sha256", max_num_batched_tokens=1024, max_num_seqs=16, async_scheduling=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="UcmConnector", kv_connector_module_path="ucmclient.engine.vllm.connector", kv_role="kv_both",
                kv_load_failure_policy=policy, kv_connector_extra_config=extra_of(settings),
            ),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = POOL
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        return config, KVCacheConfig(num_blocks=POOL, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])

    def scheduler(self, policy="recompute", identity=IDENTITY, **settings):
        config, caches = self.configs(policy, **settings)
        caches.hash_block_size = BLOCK
        scheduler = Scheduler(vllm_config=config, kv_cache_config=caches, structured_output_manager=StructuredOutputManager(config),
                              block_size=BLOCK, hash_block_size=BLOCK, log_stats=True)
        self.addCleanup(scheduler.connector.shutdown)
        scheduler.connector._connect({identity})
        return scheduler

    def request(self, name, ids, outputs=4):
        sampling = SamplingParams(max_tokens=outputs, ignore_eos=True)
        sampling.update_from_generation_config({}, eos_token_id=511)
        return Request(name, ids, sampling, None, block_hasher=get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256")))

    def store(self, request, blocks):
        result = self.region.dump(request.block_hashes[:blocks], list(range(blocks))).wait()
        self.assertTrue({BlockResult.OK, BlockResult.EXISTS} >= set(result.blocks))

    def step(self, scheduler, received=(), invalid=(), sent=()):
        """One step with what the workers report after it. Returns what was scheduled, and the outputs."""
        scheduled = scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = scheduler.requests[name]
            sampled.append([5] if request.num_computed_tokens >= request.num_tokens else [])
        plan = scheduled.kv_connector_metadata.plan
        report = KVConnectorOutput(finished_recving=set(received) or None, invalid_block_ids=set(invalid),
                                   kv_connector_worker_meta=UcmProgress(plan.number, sent=dict.fromkeys(sent, 1)))
        outputs = scheduler.update_from_output(scheduled, ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled, kv_connector_output=report))
        return scheduled, [output for client in outputs.values() for output in client.outputs]

    def blocks_of(self, scheduler, request):
        return scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]

    def metric(self, name):
        return self.daemon.metrics()[name]

    def idle(self, scheduler):
        self.assertFalse(scheduler.requests)
        pool = scheduler.kv_cache_manager.block_pool
        self.assertEqual(pool.get_num_free_blocks(), POOL - 1)  # all but the null block

    def finish(self, scheduler, steps=20):
        """Steps until every request is over. For those that have ended, the workers report that no
        store reads any more."""
        kept = scheduler.connector._scheduler._kept
        for _ in range(steps):
            if not scheduler.requests and not kept:
                break
            self.step(scheduler, sent=set(kept))
        self.idle(scheduler)


class Compatibility(Case):
    def test_the_factory_makes_both_halves_as_this_vllm_calls_for_them(self):
        config, caches = self.configs()
        for role in (KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER):
            connector = KVConnectorFactory.create_connector(config, role, caches)
            self.addCleanup(connector.shutdown)
            self.assertIsInstance(connector, UcmConnector)
            self.assertEqual(connector.role, role)
        self.assertFalse(UcmConnector.__abstractmethods__)

    def test_statistics_pass_through_vllms_log_and_prometheus(self):
        config, _ = self.configs()
        lines, log = [], KVConnectorLogging(config.kv_transfer_config)
        for _ in range(2):
            log.observe(UcmStats({"loads": 1, "load_blocks": 8}).to_dict())
        log.log(lambda text, *words: lines.append(text % words))
        self.assertEqual(lines, ["KV Transfer metrics: loads=2, load_blocks=16"])
        prom = KVConnectorProm(config, ["model_name", "engine"], {0: ["unit", "0"]})
        prom.observe({"loads": 2, "load_seconds": 0.5}, 0)
        labels = {"model_name": "unit", "engine": "0"}
        self.assertEqual(REGISTRY.get_sample_value("vllm:ucm_loads_total", labels), 2)
        self.assertEqual(REGISTRY.get_sample_value("vllm:ucm_load_seconds_total", labels), 0.5)


class Failures(Case):
    """Six blocks of a prompt, of which the daemon has four; the third does not arrive."""

    def begin(self, policy="recompute", **settings):
        scheduler = self.scheduler(policy, **settings)
        request = self.request("one", tokens(1, 6 * BLOCK + 3))
        self.store(request, 4)
        scheduler.add_request(request)
        return scheduler, request

    def test_a_load_between_steps_is_computed_from_the_first_block_that_failed(self):
        scheduler, request = self.begin()
        scheduled, _ = self.step(scheduler)
        self.assertEqual((request.status, scheduled.num_scheduled_tokens), (RequestStatus.WAITING_FOR_REMOTE_KVS, {}))
        loads = scheduled.kv_connector_metadata.plan.loads
        self.assertEqual([copy.blocks for copy in loads], [self.blocks_of(scheduler, request)[:4]])
        self.step(scheduler, received=["one"], invalid=[loads[0].blocks[2]])
        scheduled, _ = self.step(scheduler)
        self.assertEqual(scheduled.num_scheduled_tokens, {"one": request.num_prompt_tokens - 2 * BLOCK})
        stored = [key for copy in scheduled.kv_connector_metadata.plan.stores for key in (copy.keys[i : i + 32] for i in range(0, len(copy.keys), 32))]
        self.assertEqual(stored, request.block_hashes[2:6], "what failed is stored again, and what is new")
        self.finish(scheduler)
        self.assertEqual(self.metric("leases"), 0)

    def test_a_load_within_the_step_is_computed_from_the_first_block_that_failed(self):
        scheduler, request = self.begin(async_load=False)
        scheduled = scheduler.schedule()
        self.assertEqual(scheduled.num_scheduled_tokens, {"one": request.num_prompt_tokens - 4 * BLOCK})
        bad = scheduled.kv_connector_metadata.plan.loads[0].blocks[2]
        report = KVConnectorOutput(invalid_block_ids={bad}, kv_connector_worker_meta=UcmProgress(scheduled.kv_connector_metadata.plan.number))
        outputs = scheduler.update_from_output(scheduled, ModelRunnerOutput(
            req_ids=["one"], req_id_to_index={"one": 0}, sampled_token_ids=[[5]], kv_connector_output=report))
        self.assertFalse([o for c in outputs.values() for o in c.outputs if o.new_token_ids], "a worthless step gives no token")
        scheduled, _ = self.step(scheduler)
        self.assertEqual(scheduled.num_scheduled_tokens, {"one": request.num_prompt_tokens - 2 * BLOCK})
        self.finish(scheduler)

    def test_what_failed_is_in_no_prefix_cache(self):
        scheduler, request = self.begin("fail", async_load=False)
        scheduled = scheduler.schedule()
        plan = scheduled.kv_connector_metadata.plan
        report = KVConnectorOutput(invalid_block_ids={plan.loads[0].blocks[2]}, kv_connector_worker_meta=UcmProgress(plan.number))
        scheduler.update_from_output(scheduled, ModelRunnerOutput(
            req_ids=["one"], req_id_to_index={"one": 0}, sampled_token_ids=[[5]], kv_connector_output=report))
        self.assertFalse(plan.stores, "nor in the daemon")
        again = self.request("again", list(request.prompt_token_ids))
        computed = scheduler.kv_cache_manager.get_computed_blocks(again)[0]
        self.assertLessEqual(len(computed.get_block_ids()[0]), 2)

    def test_the_policy_fail_ends_the_request_with_an_error(self):
        for settings in ({}, {"async_load": False}):
            with self.subTest(settings):
                scheduler, request = self.begin("fail", **settings)
                scheduled = scheduler.schedule()
                plan = scheduled.kv_connector_metadata.plan
                names = list(scheduled.num_scheduled_tokens)
                report = KVConnectorOutput(finished_recving={"one"} if not names else None, invalid_block_ids={plan.loads[0].blocks[2]},
                                           kv_connector_worker_meta=UcmProgress(plan.number))
                outputs = scheduler.update_from_output(scheduled, ModelRunnerOutput(
                    req_ids=names, req_id_to_index={name: 0 for name in names}, sampled_token_ids=[[5] for _ in names], kv_connector_output=report))
                ended = [o for c in outputs.values() for o in c.outputs]
                self.assertEqual([(o.request_id, o.finish_reason) for o in ended], [("one", FinishReason.ERROR)])
                self.assertEqual(request.status, RequestStatus.FINISHED_ERROR)
                self.finish(scheduler)
                self.assertEqual(self.metric("leases"), 0)

    def test_all_who_share_a_block_that_failed_compute_it(self):
        scheduler = self.scheduler(async_load=False)
        one, two = self.request("one", tokens(1, 6 * BLOCK + 3, shared=4 * BLOCK)), self.request("two", tokens(2, 6 * BLOCK + 3, shared=4 * BLOCK))
        self.store(one, 4)
        scheduler.add_request(one)
        scheduler.add_request(two)
        scheduled = scheduler.schedule()
        plan = scheduled.kv_connector_metadata.plan
        bad = plan.loads[0].blocks[1]
        self.assertIn(bad, self.blocks_of(scheduler, two))
        report = KVConnectorOutput(invalid_block_ids={bad}, kv_connector_worker_meta=UcmProgress(plan.number))
        scheduler.update_from_output(scheduled, ModelRunnerOutput(
            req_ids=["one", "two"], req_id_to_index={"one": 0, "two": 1}, sampled_token_ids=[[5], [5]], kv_connector_output=report))
        self.assertFalse(plan.stores, "nothing of a step is stored before its loads are known to have come")
        scheduled, _ = self.step(scheduler)
        computed = sum(scheduled.num_scheduled_tokens.values())
        self.assertGreaterEqual(computed, one.num_prompt_tokens - BLOCK)
        self.finish(scheduler, 30)

    def test_the_engine_resets_its_cache_while_blocks_are_stored(self):
        """As sleep() does right after generate()."""
        scheduler = self.scheduler()
        scheduler.add_request(self.request("one", tokens(1, 6 * BLOCK), 1))
        self.step(scheduler)
        self.step(scheduler)
        self.assertFalse(scheduler.requests)
        pool = scheduler.kv_cache_manager.block_pool
        self.assertEqual(pool.get_num_free_blocks(), POOL - 1 - 6)
        self.assertTrue(scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True))
        self.idle(scheduler)
        scheduler.add_request(self.request("two", tokens(2, 6 * BLOCK)))
        scheduled, _ = self.step(scheduler, sent=["one"])
        self.assertTrue(scheduled.kv_connector_metadata.plan.fence)
        self.finish(scheduler)

    def test_an_abort_during_a_load_leaves_neither_block_nor_lease(self):
        scheduler, request = self.begin()
        self.step(scheduler)
        scheduler.finish_requests(["one"], RequestStatus.FINISHED_ABORTED)
        self.step(scheduler, received=["one"])
        self.finish(scheduler)
        self.idle(scheduler)
        self.assertEqual(self.metric("leases"), 0)

    def test_one_that_has_to_wait_holds_up_nobody(self):
        """get_num_new_matched_tokens answers None while a prefill instance is still storing."""
        scheduler = self.scheduler(handover_wait=60.0)
        one, two = self.request("one", tokens(1, 3 * BLOCK)), self.request("two", tokens(2, 3 * BLOCK))
        one.kv_transfer_params = {HANDOVER: 2}
        scheduler.add_request(one)
        scheduler.add_request(two)
        scheduled, _ = self.step(scheduler)
        self.assertEqual(set(scheduled.num_scheduled_tokens), {"two"})
        self.store(one, 2)
        for _ in range(3):
            scheduled, _ = self.step(scheduler)
            if one.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                break
        self.assertEqual(one.status, RequestStatus.WAITING_FOR_REMOTE_KVS)
        self.step(scheduler, received=["one"])
        self.finish(scheduler)


class Aggregation(Case):
    def output(self, **fields):
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=KVConnectorOutput(**fields))

    def test_what_ranks_report_is_what_all_of_them_have_done(self):
        both = KVOutputAggregator(2)
        first = both.aggregate([
            self.output(finished_sending={"a"}, finished_recving={"x"}, invalid_block_ids={3}, kv_connector_worker_meta=UcmProgress(7),
                        kv_connector_stats=UcmStats({"loads": 1, "load_blocks": 4})),
            self.output(finished_recving={"x"}, invalid_block_ids={5}, kv_connector_worker_meta=UcmProgress(6, frozenset({IDENTITY})),
                        kv_connector_stats=UcmStats({"loads": 1, "load_failed_blocks": 4})),
        ]).kv_connector_output
        self.assertEqual((first.finished_recving, first.finished_sending or None, first.invalid_block_ids), ({"x"}, None, {3, 5}))
        self.assertEqual((first.kv_connector_worker_meta.number, first.kv_connector_worker_meta.identities), (6, {IDENTITY}))
        self.assertEqual(first.kv_connector_stats.data, {"loads": 2, "load_blocks": 4, "load_failed_blocks": 4})
        second = both.aggregate([self.output(), self.output(finished_sending={"a"})]).kv_connector_output
        self.assertEqual(second.finished_sending, {"a"})


class Fields(unittest.TestCase):
    """For each field of a request, request_fields.py says whether it is in keys."""

    def test_none_is_new(self):
        for of, fields in ((Request, known.REQUEST), (EngineCoreRequest, known.REQUEST), (SamplingParams, known.SAMPLING), (PoolingParams, known.POOLING),
                           (LoRARequest, known.LORA), (MultiModalFeatureSpec, known.FEATURE)):
            if of is Request:
                there = set(inspect.signature(of.__init__).parameters) - {"self"}
            else:
                there = set(getattr(of, "__struct_fields__", ()) or [one.name for one in dataclasses.fields(of)])
            self.assertEqual(there - fields.keys(), set(), f"{of.__name__} has fields that the connector does not know")

    def test_what_is_a_name_of_a_client(self):
        """Also where vLLM makes a hash of it and a processor's options."""
        from PIL import Image
        from vllm.multimodal.parse import MultiModalDataParser
        from vllm.multimodal.processing.inputs import ProcessorInputs

        def names(options, *uuids):
            items = MultiModalDataParser().parse_mm_data({"image": [Image.new("RGB", (8, 8))] * len(uuids)})
            inputs = ProcessorInputs([1], items, {"image": list(uuids)}, hf_processor_mm_kwargs=options)
            return [not _HASH.fullmatch(name) for name in inputs.get_mm_hashes("m", "blake3")["image"]]
        for options in ({}, {"crop": 4}):
            self.assertEqual(names(options, None, "mine", "ab" * 32), [False, True, True], options)

    def test_what_a_client_has_named_is_known_by_its_bytes(self):
        def item(*values):
            elements = {f"pixels{i}": MultiModalFieldElem(value, None) for i, value in enumerate(values)}
            return SimpleNamespace(mm_features=[SimpleNamespace(identifier="mine", mm_hash=None, mm_position=PlaceholderRange(3, 4), data=elements)])
        images = [torch.zeros(4, 6), torch.zeros(6, 4), torch.ones(4, 6), torch.ones(4, 6, dtype=torch.bfloat16), [torch.ones(4), torch.zeros(2)]]
        digests = [chosen_items(item(image)) for image in (*images, images[0].clone())]
        self.assertEqual(len({digest for ((_, digest),) in digests}), len(images))
        self.assertEqual(digests[0], digests[-1])
        for elsewhere in (item(), item(None), item(17)):
            self.assertNotEqual(chosen_items(elsewhere), chosen_items(elsewhere), "where its bytes are not here, it is nobody's")


if __name__ == "__main__":
    unittest.main()

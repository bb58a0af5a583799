"""Where the steps of an engine of vLLM spend their time: calls of its parts and of ours by the host's clock, and kernels by torch's profiler.
It times what runs in this process: start with VLLM_ENABLE_V1_MULTIPROCESSING=0."""

import functools
import statistics
import sys
import time

#: Module, class, and functions; who has no such module or function is not timed there.
_PARTS = (
    ("vllm.v1.engine.llm_engine", "LLMEngine", ("step",)),
    ("vllm.v1.engine.core", "EngineCore", ("step", "step_with_batch_queue")),
    ("vllm.v1.core.sched.scheduler", "Scheduler", ("schedule", "update_from_output")),
    ("vllm.v1.worker.gpu_worker", "Worker", ("execute_model", "sample_tokens")),
    ("ucmclient.engine.vllm.connector", "UcmConnector", ("build_connector_meta", "bind_connector_metadata", "wait_for_save", "get_finished",
                                                  "update_connector_output")),
    ("ucmclient.engine.vllm.sparse_gpu", "SparseGpuWorker", ("_begin", "_wait", "_end", "_update", "_extend", "_short", "_keep_beside", "_slices", "_launch")),
    ("ucmclient.decode.gpu", "GpuDecoder", ("_keep_all", "serve", "keep_beside", "_append", "_ask_window", "_come")),
    ("ucmclient.decode.supply", "Supply", ("keep_beside", "_append", "_ask_window", "_come")),
    ("ucmclient.decode.cuda", "Steps", ("places", "layer", "register_window", "update_window")),
    ("ucmclient.sparse.cuda", "Selector", ("__call__",)),
)


class Times:
    """Of all calls since it was made; start() again forgets them."""

    def __init__(self):
        self.calls = {}
        for module, name, functions in _PARTS:
            of = getattr(sys.modules.get(module), name, None)
            for function in functions:
                if function in vars(of or object):
                    setattr(of, function, self._timed(f"{name}.{function}", vars(of)[function]))

    def _timed(self, name, call):
        @functools.wraps(call)
        def timed(*args, **named):
            began = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                self.calls.setdefault(name, []).append((began, time.perf_counter() - began))

        return timed

    def start(self):
        self.calls.clear()

    def table(self, first=8, last=256):
        """Of each part: calls, the median and the mean in ms, of all and of the last ones, and the first calls."""
        rows = {}
        for name, calls in self.calls.items():
            ms = [1e3 * seconds for _, seconds in calls]
            rows[name] = {"calls": len(ms), "median ms": round(statistics.median(ms), 3), "mean ms": round(sum(ms) / len(ms), 3),
                          "last median ms": round(statistics.median(ms[-last:]), 3), "last mean ms": round(statistics.fmean(ms[-last:]), 3),
                          "most ms": round(max(ms), 2), "all ms": round(sum(ms), 1), "first ms": [round(x, 2) for x in ms[:first]]}
        return rows


def kernels(run, steps, trace=None, most=40):
    """What the GPU does in `steps` steps of run(), in ms a step: the time in which it does something, and the kernels that take most."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    if trace is not None:
        seen.export_chrome_trace(trace)
    events = sorted((e for e in seen.events() if e.device_type == DeviceType.CUDA), key=lambda e: e.time_range.start)
    busy, end, by_name = 0.0, 0.0, {}
    for e in events:
        first, last = e.time_range.start, e.time_range.end
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
        of = by_name.setdefault(e.name[:90], [0, 0.0])
        of[0] += 1
        of[1] += last - first
    rows = sorted(by_name.items(), key=lambda row: -row[1][1])[:most]
    return {"busy ms": round(busy / 1e3 / steps, 3),
            "kernels": [(name, round(n / steps, 2), round(us / 1e3 / steps, 4)) for name, (n, us) in rows]}

"""vLLM's worker for CPUs as a stage of a pipeline, without compiled graphs. vLLM allocates memory
for the output of the stage before only where it warms graphs up (seen in 0.32)."""

from vllm.v1.worker.cpu_worker import CPUWorker


class PipelineWorker(CPUWorker):
    def compile_or_warm_up_model(self):
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device)
        return super().compile_or_warm_up_model()

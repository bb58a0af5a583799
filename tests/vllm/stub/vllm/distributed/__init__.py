_rank = 0


def set_tensor_model_parallel_rank(rank):
    """The stub's own: vLLM has a process for each rank, the tests have one for all."""
    global _rank
    _rank = rank


def get_tensor_model_parallel_rank():
    return _rank

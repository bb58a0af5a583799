"""What each layer of a step chooses, in memory that launches read. One Selector serves layers and requests that choose different numbers of
blocks. Budgets can follow what steps cover."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Optional

from ..sparse.choice import TopK
from ..sparse.cuda import Chosen, Selector
from ..sparse.summary import Summary
from ..sparse.policy import Budget
from .choices import Choices, Refused
from .cuda import Ranked


class LayerChoices:
    """For `sequences` sequences of up to max_blocks candidates. Between steps set() says how many each has. In a step

        chosen = choices(layer, summaries[layer], table, candidates, q)
        steps.layer(layer, chosen, table, requests, q, pages, ranked=choices.ranked(layer, candidates))

    where `steps` is a cuda.Steps with this one's `room` and the choices' `rounds`. torch makes the tensors. follow: budgets of a policy with
    a goal follow what steps covered. Then what a token attends also depends on the steps before it."""

    def __init__(
        self, choices: Choices, summary: Summary, gpu: Any, q_heads: int, *, max_blocks: int, sequences: int = 1, follow: bool = False
    ):
        import torch

        layers, tokens = range(len(choices.layers)), summary.shape.tokens
        most = [choices.of_candidates(layer, max_blocks) for layer in layers]
        if not all(isinstance(choice, TopK) for choice in most):
            raise Refused("choice=mass has no number of blocks that a launch can take; make a Selector for each layer")
        if follow and choices.budget(max_blocks) is None:
            raise Refused("follow: only a policy with a goal has budgets")
        self.choices, self.sequences, self.max_blocks, self.follows = choices, sequences, max_blocks, follow
        room = max(self._room(layer, tokens) for layer in layers)
        choose = TopK(max(choice.sink_blocks for choice in most), 0, sparse_ratio=0.0, min_blocks=0)
        self.select = Selector(summary, gpu, q_heads, max_blocks, sequences=sequences, choose=choose, score=choices.score, room=max(room, 1))
        self.lists, self.room = self.select.lists, self.select.room
        self._tensor, self._int32, self._float32 = torch.tensor, torch.int32, torch.float32
        int32 = {"dtype": torch.int32, "device": self.select.device}
        #: [layers][sequences]: blocks of a list, and those that it attends whatever they cover.
        self.most, self.least = torch.zeros((len(layers), sequences), **int32), torch.zeros((len(layers), sequences), **int32)
        #: [layers][sequences][lists]: blocks, rounds, and as float32 share and certificate.
        self.reports = torch.zeros((len(layers), sequences, self.lists, 4), **int32)
        shape = (sequences, self.lists)
        self._chosen = {
            layer: Chosen(
                torch.zeros(shape, **int32), torch.zeros((*shape, self.room), **int32),
                torch.zeros((*shape, self.room), dtype=torch.float32, device=self.select.device) if choices.rounds else None,
            )
            for layer in layers if choices.source(layer) == layer
        }
        self._candidates = [0] * sequences
        self._budgets: list[Optional[list[Budget]]] = [None] * sequences

    def close(self) -> None:
        self.select.close()

    def _room(self, layer: int, tokens: int) -> int:
        """What a list of the layer has at most."""
        budget = self.choices.budget(self.max_blocks) if self.follows else None
        if budget is None:
            return self.choices.room(layer, self.max_blocks, tokens)
        budget.native.blocks = self.max_blocks + self.choices.window  # what it may grow to
        return self.choices.of_budget(layer, self.max_blocks, budget)

    # ---- between steps ----

    def set(self, sequence: int, candidates: int) -> None:
        """The sequence has so many candidates from now on. 0: no request is there, and the next one begins with a budget of its own."""
        if candidates == self._candidates[sequence]:
            return
        layers, known = range(len(self.choices.layers)), self._budgets[sequence]
        if candidates == 0:
            known = None
        elif self.follows and known is None:
            known = [budget for _ in layers if (budget := self.choices.budget(candidates)) is not None]
        self._candidates[sequence], self._budgets[sequence] = candidates, known
        self._write(sequence)

    def _write(self, sequence: int) -> None:
        candidates, budgets = self._candidates[sequence], self._budgets[sequence]
        layers, tokens = range(len(self.choices.layers)), self.select.summary.shape.tokens
        for to, numbers in (
            (self.most, [self.choices.of_budget(layer, candidates, budgets[layer]) if budgets else
                         self.choices.room(layer, candidates, tokens) for layer in layers]),
            (self.least, [self.choices.least(layer, candidates) for layer in layers]),
        ):
            to[:, sequence].copy_(self._tensor(numbers, dtype=self._int32))

    def shares(self) -> Any:
        """float32 [layers][sequences] on the GPU: what the step that ran last covered of each layer's least covered KV head."""
        return self.reports[..., 2].contiguous().view(self._float32).amin(-1)

    def follow(self, sequences: Iterable[int]) -> None:
        """The step that ran last counts, so budgets of these sequences move on by what it covered. Waits for the GPU."""
        shares = self.shares().tolist()
        for sequence in sequences:
            budgets = self._budgets[sequence]
            if not budgets:
                continue
            complete = self._candidates[sequence] + self.choices.window
            before = [budget.blocks for budget in budgets]
            for layer, budget in enumerate(budgets):
                budget.next(complete, shares[self.choices.source(layer)][sequence])
            if [budget.blocks for budget in budgets] != before:
                self._write(sequence)

    # ---- a step ----

    def __call__(self, layer: int, summaries: Any, table: Any, candidates: Any, q: Any, stream: Any = None) -> Chosen:
        """As a Selector's call, for all sequences. A layer that shares another one's choice gets that choice."""
        source = self.choices.source(layer)
        if source == layer:
            self.select(summaries, table, candidates, q, out=self._chosen[layer], most=self.most[layer], stream=stream)
        return self._chosen[source]

    def ranked(self, layer: int, candidates: Any) -> Optional[Ranked]:
        """For Steps.layer, after that layer's selection."""
        if self.choices.rounds is None:
            return None
        return Ranked(self.select, candidates, self.least[layer], self.reports[layer])

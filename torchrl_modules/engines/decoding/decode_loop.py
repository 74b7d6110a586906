"""Drawing tokens from a Transformers model, one step for the whole batch at a time.

Beside what ``generate`` does, a prompt that many rows share is read once, rows that have ended cost
nothing where the model's cache can leave them out, and the log-probability of each sampled token is
kept without keeping any logits.

Shape legend: A rows that still run, V vocabulary.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from torchrl_modules.engines.protocol import Generation
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.sampling.token_history import TokenHistory

from .prompt_readers import PromptReader
from .slot_reader import SlotReader
from .token_draw import RowStream, TokenDraw

_COMPACT_BELOW = 0.75
"""Rows that have ended are dropped from the batch once fewer than this fraction still run."""


class DecodeLoop:
    """One batch of prompts, read and continued until every row has ended.

    Args:
        reader: of a model in evaluation mode.
        prompts: token ids of each row, none empty.
        params: the distribution and the stop tokens.
        budgets: most new tokens of each row.
        seeds: of each row's stream; torch's generator draws when not given.
    """

    def __init__(
        self,
        reader: PromptReader,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        budgets: Sequence[int],
        seeds: Sequence[int] | None = None,
    ) -> None:
        self._reader = reader
        self._prompts = prompts
        model = reader.model
        self._params = params
        self._draw_token = TokenDraw(params)
        self._streams = None if seeds is None else [RowStream(seed) for seed in seeds]
        self._budgets = torch.tensor(budgets, device=model.device)
        self._stops = torch.tensor(params.stop_token_ids or (), device=model.device)
        shape = (len(prompts), max(budgets))
        self._ids = torch.zeros(shape, dtype=torch.int64, device=model.device)
        # What is reported of each token: the log-prob, and what else was asked for.
        names = ["log_probs"]
        names += ["untempered_log_probs"] if params.untempered_log_probs else []
        names += ["entropies"] if params.entropy else []
        self._figures = {name: torch.zeros(shape, device=model.device) for name in names}
        self._num_drawn = torch.zeros(len(prompts), dtype=torch.int64, device=model.device)
        self._stopped = torch.zeros(len(prompts), dtype=torch.bool, device=model.device)
        # Row of each batch element; elements leave the batch when their rows have ended.
        self._rows = torch.arange(len(prompts), device=model.device)
        self._running = torch.ones(len(prompts), dtype=torch.bool, device=model.device)
        self._logits = reader.read(prompts)
        self._count_prompts(prompts)

    def run(self) -> list[Generation]:
        """Draw until every row has drawn a stop token or used up its budget."""
        for step in range(int(self._budgets.max())):
            tokens = self._draw(step)
            is_stop = torch.isin(tokens, self._stops)
            is_stop |= self._completes_stop_string(step)
            self._num_drawn[self._rows] += self._running
            self._stopped[self._rows] |= is_stop & self._running
            self._running &= ~is_stop & (step + 1 < self._budgets[self._rows])
            num_running = int(self._running.sum())
            if num_running == 0:
                break
            if num_running < _COMPACT_BELOW * len(self._rows) and self._reader.can_drop:
                tokens = self._drop_ended(tokens)
            self._logits = self._reader.advance(tokens)
        self._leave_behind(range(len(self._rows)))
        return self._generations()

    def _leave_behind(self, elements: Iterable[int]) -> None:
        """Rows leave; what was read of them may serve the next turn."""
        if not isinstance(self._reader, SlotReader):
            return
        for element in elements:
            row = int(self._rows[element])
            drawn = self._ids[row, : int(self._num_drawn[row])].tolist()
            self._reader.leave_behind(element, [*self._prompts[row], *drawn])

    def _generations(self) -> list[Generation]:
        longest = int(self._num_drawn.max())
        figures = {name: values[:, :longest].tolist() for name, values in self._figures.items()}
        drawn = self._ids[:, :longest].tolist()
        ends = zip(self._num_drawn.tolist(), self._stopped.tolist(), strict=True)
        return [
            Generation(
                ids=ids[:n],
                finish_reason="stop" if stopped else "length",
                **{name: values[row][:n] for name, values in figures.items()},
            )
            for row, (ids, (n, stopped)) in enumerate(zip(drawn, ends, strict=True))
        ]

    def _count_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Penalties know which tokens a row holds, and how often it has drawn them."""
        device = self._logits.device
        self._seen = self._counts = None
        if self._params.penalises:
            self._counts = torch.zeros(self._logits.shape, device=device)
            self._seen = torch.zeros_like(self._counts, dtype=torch.bool)
            for row, prompt in enumerate(prompts):
                self._seen[row, torch.tensor(prompt, device=device)] = True

    def _draw(self, step: int) -> Tensor:
        """One token per batch element, int64 ``[A]``; keeps it and what is reported of it."""
        drawn_before = torch.full((len(self._logits),), step, device=self._logits.device)
        history = TokenHistory(drawn_before, self._seen, self._counts)
        streams = self._streams and [self._streams[row] for row in self._rows.tolist()]
        drawn = self._draw_token(self._logits, history, streams)
        self._ids[self._rows, step] = drawn.ids
        for name, values in self._figures.items():
            values[self._rows, step] = getattr(drawn, name)
        return drawn.ids

    def _completes_stop_string(self, step: int) -> Tensor:
        ends = torch.zeros_like(self._running)
        matcher = self._params.stop_matcher
        if matcher is not None:
            for element in self._running.nonzero().squeeze(1).tolist():
                row = int(self._rows[element])
                ends[element] = matcher.just_ended(self._ids[row, : step + 1].tolist())
        return ends

    def _drop_ended(self, tokens: Tensor) -> Tensor:
        self._leave_behind((~self._running).nonzero().squeeze(1).tolist())
        keep = self._running.nonzero().squeeze(1)
        if self._seen is not None and self._counts is not None:
            self._seen, self._counts = self._seen[keep], self._counts[keep]
        self._reader.keep(keep)
        self._rows, self._running = self._rows[keep], self._running[keep]
        return tokens[keep]

"""Drawing tokens from a Transformers model, one step for the whole batch at a time.

Beside what ``generate`` does, a prompt that many rows share is read once, rows that have ended cost
nothing where the model's cache can leave them out, and the log-probability of each sampled token is
kept without keeping any logits.

Shape legend: A rows that still run, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrl_modules.sampling.logit_warping import logits_warpers
from torchrl_modules.sampling.params import SamplingParameters
from torchrl_modules.sampling.token_history import TokenHistory, changed_logits, too_early

from .prompt_readers import PromptReader
from .protocol import Generation

_COMPACT_BELOW = 0.75
"""Rows that have ended are dropped from the batch once fewer than this fraction still run."""


class DecodeLoop:
    """One batch of prompts, read and continued until every row has ended.

    Args:
        reader: of a model in evaluation mode.
        prompts: token ids of each row, none empty.
        params: the distribution and the stop tokens.
        budgets: most new tokens of each row.
    """

    def __init__(
        self,
        reader: PromptReader,
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        budgets: Sequence[int],
    ) -> None:
        self._reader = reader
        model = reader.model
        self._params = params
        self._warpers = logits_warpers(params)
        self._generator = None
        if params.seed is not None:
            self._generator = torch.Generator(model.device).manual_seed(params.seed)
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
        return self._generations()

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
        logits = self._logits.float()
        log_p = self._log_probs(logits, step)
        p = log_p.exp()
        greedy = self._params.temperature == 0
        tokens = log_p.argmax(-1, True) if greedy else p.multinomial(1, generator=self._generator)
        if self._seen is not None and self._counts is not None:
            self._seen.scatter_(1, tokens, True)
            self._counts.scatter_add_(1, tokens, torch.ones_like(tokens, dtype=torch.float32))
        self._ids[self._rows, step] = tokens.squeeze(1)
        self._figures["log_probs"][self._rows, step] = log_p.gather(1, tokens).squeeze(1)
        if "untempered_log_probs" in self._figures:
            is_own = self._params.is_own_softmax
            own = log_p if is_own else torch.log_softmax(logits, -1)
            untempered = own.gather(1, tokens).squeeze(1)
            self._figures["untempered_log_probs"][self._rows, step] = untempered
        if "entropies" in self._figures:
            self._figures["entropies"][self._rows, step] = torch.special.entr(p).sum(-1)
        return tokens.squeeze(1)

    def _log_probs(self, logits: Tensor, step: int) -> Tensor:
        """Of the distribution that is drawn from, ``[A, V]``."""
        scores = logits
        if self._params.changes_logits:
            drawn = torch.full((len(logits),), step, device=logits.device)
            history = TokenHistory(drawn, self._seen, self._counts)
            scores = changed_logits(logits, self._params, history)
            banned = too_early(scores, self._params, history)
            scores = scores if banned is None else scores.masked_fill(banned, -torch.inf)
        for warper in self._warpers:
            scores = warper(None, scores)  # type: ignore[arg-type]
        return torch.log_softmax(scores, -1)

    def _completes_stop_string(self, step: int) -> Tensor:
        ends = torch.zeros_like(self._running)
        matcher = self._params.stop_matcher
        if matcher is not None:
            for element in self._running.nonzero().squeeze(1).tolist():
                row = int(self._rows[element])
                ends[element] = matcher.just_ended(self._ids[row, : step + 1].tolist())
        return ends

    def _drop_ended(self, tokens: Tensor) -> Tensor:
        keep = self._running.nonzero().squeeze(1)
        if self._seen is not None and self._counts is not None:
            self._seen, self._counts = self._seen[keep], self._counts[keep]
        self._reader.keep(keep)
        self._rows, self._running = self._rows[keep], self._running[keep]
        return tokens[keep]

"""A step of drawing as one CUDA graph, which launches all its kernels at once.

Shape legend: A rows, V vocabulary.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchrl_modules.scoring.slot_attention import PrefixPlan

Capture: TypeAlias = Callable[[Callable[[], Tensor], torch.device], Callable[[], Tensor]]
_GRAPH_COLUMNS: Final = 256
"""Graphs see so many columns, or a multiple; of long rows in steps of a quarter of their length."""
_GRAPH_TOLERANCE: Final = 0.02
"""Of the largest logit: kernels may be others than those of the step alone."""


def captured_on_cuda(run: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """What a function launches, launched again at once; each time its result is overwritten."""
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # What is made once is made before.
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile, as a trainer does.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


CAPTURES: Final[dict[str, Capture]] = {"cuda": captured_on_cuda}
"""Ways to capture, by the kind of device."""


def _without_kept_casts(kind: str) -> AbstractContextManager[Any]:
    """What autocast keeps of weights is of one moment; inside, each step casts them itself."""
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


class StepInput(NamedTuple):
    """Rows that go on with a step."""

    tokens: Tensor
    """int64 ``[A]``, the last one of each."""
    lengths: Tensor
    """int64 ``[A]``, tokens that each has read."""
    shared: Tensor
    """int64 ``[A]``, those of them that it shares with others and has not in its slot."""
    prefixes: PrefixPlan | None


class StepGraph:
    """A step of a fixed number of rows, of which the last may be nobody's."""

    def __init__(
        self,
        step: Callable[[StepInput, Tensor], Tensor],
        capture: Capture,
        given: StepInput,
        size: int,
    ) -> None:
        device = given.tokens.device
        # What a graph reads has to live as long as it does.
        tokens, lengths, starts = (x.new_zeros(size) for x in given[:3])
        shared = given.prefixes
        own = None if shared is None else PrefixPlan(*(x.clone() for x in shared))
        self._own, self._shared = StepInput(tokens, lengths, starts, own), shared
        self._slots = torch.arange(size, device=device)
        # Captured with other tokens, so that a replay that does nothing is found out. Each run
        # writes its keys and values in the same places, the last one those of the tokens.
        self._set(given._replace(tokens=torch.zeros_like(given.tokens)))

        def run() -> Tensor:
            with _without_kept_casts(device.type):
                return step(self._own, self._slots)

        self._replay = capture(run, device)
        replayed = self(given).float()
        own_logits = step(self._own, self._slots).float()
        apart = (replayed - own_logits).abs().max()
        if bool(apart > _GRAPH_TOLERANCE * own_logits.abs().max()):
            raise RuntimeError(f"its logits are off by {apart.item():.2g}")

    def _set(self, given: StepInput) -> None:
        for own, its in zip(self._own[:3], given[:3], strict=True):
            own[: len(its)] = its
            own[len(its) :] = 0  # of rows that are nobody's
        if given.prefixes is not self._shared:
            assert self._own.prefixes is not None
            assert given.prefixes is not None
            self._shared = given.prefixes
            for own, its in zip(self._own.prefixes, given.prefixes, strict=True):
                own.copy_(its)

    def __call__(self, given: StepInput) -> Tensor:
        """Logits ``[size, V]``, until the next call.

        Args:
            given: of at most ``size`` rows; its prefixes are of exactly so many.
        """
        self._set(given)
        return self._replay()


class GraphShape(NamedTuple):
    """The sizes of a captured step."""

    num_rows: int
    num_columns: int
    num_prefixes: int
    """It has places for."""

    def fits(self, num_rows: int, num_columns: int, num_prefixes: int) -> bool:
        """Say if it is a step of so many rows, columns and prefixes, or a few more."""
        is_enough = self.num_rows >= num_rows and self.num_columns >= num_columns
        return is_enough and self.num_prefixes == num_prefixes


def graph_columns(num_seen: int) -> int:
    """Columns of the graph of steps that see so many, or a few more."""
    step = max(_GRAPH_COLUMNS, 1 << max(0, num_seen.bit_length() - 3))
    return -(-num_seen // step) * step

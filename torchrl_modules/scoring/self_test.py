"""Whether a model is read right: tried on a few short rows, beside the model's own logits.

Architectures differ in what comes before and after the head, in where positions begin, in what
joins tokens beside attention. Instead of a list of them, a model is tried once, when a scorer or an
engine is built on it.

Shape legend: L tokens of a row.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .wrapped_models import call, evaluation_mode

_LENGTHS: Final = (9, 5, 9, 6)
"""The second row is the beginning of the first, the third begins like it."""
_NUM_SHARED: Final = 4


class Tolerance(NamedTuple):
    """How far log-probs of the same tokens may lie apart, in nats."""

    worst: float
    mean: float

    def allows(self, difference: "Difference") -> bool:
        """Whether a difference is no more than other kernels make."""
        # A comparison with NaN is false.
        return difference.worst <= self.worst and difference.mean <= self.mean


class Difference(NamedTuple):
    """How far the log-probs of the trial's tokens lie apart, in nats."""

    worst: float
    mean: float

    def __str__(self) -> str:
        return f"{self.worst:.2g} nats at worst, {self.mean:.2g} on average"


class Trial(NamedTuple):
    """Rows, and what a model itself makes of them, one row at a time."""

    rows: list[Tensor]
    """int64 ``[L]`` each."""
    log_probs: list[Tensor]
    """float64 ``[L - 1]`` each: of every token but the first."""
    tolerance: Tolerance

    def difference(self, log_probs: Sequence[Tensor]) -> Difference:
        """How far others lie from the model's own."""
        # log_probs: of the last tokens of each row; at most [L - 1].
        own = [row[len(row) - len(x) :] for row, x in zip(self.log_probs, log_probs, strict=True)]
        apart = (torch.cat(own) - torch.cat([x.double() for x in log_probs])).abs()
        return Difference(apart.max().item(), apart.mean().item())


def tolerance_of(model: PreTrainedModel) -> Tolerance:
    """What kernels of a model's precision make of the same sum."""
    tf32 = model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    if model.dtype in (torch.float32, torch.float64) and not tf32:
        return Tolerance(worst=5e-4, mean=1e-4)
    return Tolerance(worst=torch.inf, mean=0.1)


@torch.no_grad()
def run_trial(model: PreTrainedModel, *, who: str) -> Trial:
    """Score rows with nothing but the model's own forward, one at a time."""
    name = type(model).__name__
    if model.device.type == "meta":
        raise ValueError(f"{who}: {name} is on the meta device. Load its weights first.")
    rows = trial_rows(model)
    with evaluation_mode(model):
        try:
            log_probs = [next_log_probs(_logits(model, row), row) for row in rows]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"{who}: {name} can't be used, because its own forward of one row of "
                f"{len(rows[0])} tokens fails: {type(error).__name__}: {error}"
            ) from error
    trial = Trial(rows, log_probs, tolerance_of(model))
    if not all(bool(row.isfinite().all()) for row in log_probs):
        raise ValueError(f"{who}: the logits of {name} are not finite; are its weights loaded?")
    shared = len(rows[1]) - 1
    beginning = trial._replace(rows=rows[:1], log_probs=[log_probs[0][:shared]])
    ahead = beginning.difference([log_probs[1]])
    if not trial.tolerance.allows(ahead):
        raise ValueError(
            f"{who}: {name} is no policy: what it says of a token depends on the tokens after it, "
            f"by {ahead}. A model is trained here only if it sees what comes before; some need "
            "is_decoder=True in their configuration for that."
        )
    return trial


def next_log_probs(logits: Tensor, row: Tensor) -> Tensor:
    """Log-probs of every token but the first, float64 ``[L - 1]``, from logits ``[L, V]``."""
    log_p = logits[:-1].double().log_softmax(-1)
    return log_p.gather(1, row[1:, None]).squeeze(1)


def find_first(
    model: PreTrainedModel, trial: Trial, ways: Sequence[tuple[str, Callable[[], Sequence[Tensor]]]]
) -> tuple[int | None, Difference | None, list[str]]:
    """Try ways to compute a trial's log-probs until one gives the model's own."""
    # Gives which way, how far it is off, and what was wrong with those before it; `None` twice when
    # none is right.
    wrong = []
    for i, (name, compute) in enumerate(ways):
        try:
            with torch.no_grad(), evaluation_mode(model):
                difference = trial.difference(compute())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # kept, and told where no way is right
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if trial.tolerance.allows(difference):
            return i, difference, wrong
        wrong.append(f"{name}: off by {difference}")
    return None, None, wrong


def _logits(model: PreTrainedModel, row: Tensor) -> Tensor:
    named: Any = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in named else {}
    return call(model, input_ids=row[None], **options).logits[0]


def trial_rows(model: PreTrainedModel) -> list[Tensor]:
    """Short rows of plain tokens: none that stands for padding, an image or the like."""
    config = model.config.get_text_config()
    size = min(config.vocab_size, next(model.get_input_embeddings().parameters()).shape[0])
    settings = {**model.config.to_dict(), **config.to_dict()}
    special = {
        value
        for key, value in settings.items()
        if key.endswith(("token_id", "token_index"))
        if isinstance(value, int)
    }
    plain = torch.tensor([i for i in range(min(size, 4096)) if i not in special] or [0])
    generator = torch.Generator().manual_seed(0)
    longest = max(2, min(max(_LENGTHS), getattr(config, "max_position_embeddings", None) or 9))
    rows = [
        plain[torch.randint(len(plain), (min(length, longest),), generator=generator)]
        for length in _LENGTHS
    ]
    rows[1] = rows[0][: len(rows[1])]
    rows[2] = torch.cat([rows[0][:_NUM_SHARED], rows[2][_NUM_SHARED:]])
    return [row.to(model.device) for row in rows]

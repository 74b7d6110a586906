"""Trial of a reading: a few short rows, beside the model's own log-probs.

Architectures differ in what comes before and after the head, in where positions begin and in what
joins tokens beside attention. Instead of a list of them, a model is tried once, when a scorer or
an engine is built on it.

Shape legend: L tokens of a row.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch.distributed
from torch import Tensor
from transformers import PreTrainedModel

from torchrl_data.ragged.packed import cumulative_lengths, pack
from torchrl_modules.transformers_releases import forward_parameters

from .packed_attention import PackedInputLost
from .wrapped_models import call, evaluation_mode

_LENGTHS: Final = (9, 5, 9, 6)
"""The second row is the beginning of the first, the third begins like it."""
_NUM_SHARED: Final = 4


class Difference(NamedTuple):
    """The distance of log-probs of the same tokens, in nats."""

    worst: float
    mean: float

    def __str__(self) -> str:
        return f"{self.worst:.2g} nats at worst, {self.mean:.2g} on average"


ROUNDED: Final = Difference(float("inf"), 0.1)
"""Of log-probs in bfloat16, at most."""


class ReadingTrial(NamedTuple):
    """Rows, and what a model itself makes of them, one row at a time."""

    rows: list[Tensor]
    """int64 ``[L]`` each."""
    log_probs: list[Tensor]
    """float64 ``[L - 1]`` each: of every token but the first."""
    tolerance: Difference
    """What kernels of the model's precision make of the same sum, at most."""
    images: Sequence[Sequence[str]] = ()
    """Of each row, in base 64; empty for rows of text."""

    def difference(self, log_probs: Sequence[Tensor]) -> Difference:
        """How far others lie from the model's own."""
        # log_probs: of the last tokens of each row; at most [L - 1].
        own = [row[len(row) - len(x) :] for row, x in zip(self.log_probs, log_probs, strict=True)]
        apart = (torch.cat(own) - torch.cat([x.double() for x in log_probs])).abs()
        return Difference(apart.max().item(), apart.mean().item())

    def allows(self, difference: Difference) -> bool:
        """Whether a difference is no more than other kernels make."""
        # A comparison with NaN is false.
        worst, mean = self.tolerance
        return difference.worst <= worst and difference.mean <= mean


@torch.no_grad()
def own_log_probs(
    model: PreTrainedModel,
    rows: list[Tensor],
    inputs: Callable[[int], dict[str, Any]],
    failure: str,
    images: Sequence[Sequence[str]] = (),
) -> ReadingTrial:
    """Score rows with nothing but the model's own forward, one at a time."""
    # inputs: what the forward takes of a row beside its tokens.
    # failure: begins the error where the forward fails.
    log_probs = []
    for i, row in enumerate(rows):
        try:
            logits = call(model, input_ids=row[None], **inputs(i)).logits[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(f"{failure}: {type(error).__name__}: {error}") from error
        log_p = logits[:-1].double().log_softmax(-1)
        log_probs.append(log_p.gather(1, row[1:, None]).squeeze(1))
    return ReadingTrial(rows, log_probs, tolerance_of(model), images)


def tolerance_of(model: PreTrainedModel) -> Difference:
    """What kernels of a model's precision make of the same sum of numbers around 1, at most."""
    tf32 = model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    is_exact = model.dtype in (torch.float32, torch.float64) and not tf32
    return Difference(5e-4, 1e-4) if is_exact else ROUNDED


def run_trial(model: PreTrainedModel, *, who: str) -> ReadingTrial:
    """Try a model's own forward on rows of text, and check that it is a policy."""
    name = type(model).__name__
    if model.device.type == "meta":
        raise ValueError(f"{who}: {name} is on the meta device. Load its weights first.")
    rows = trial_rows(model)
    options = {"use_cache": False} if "use_cache" in forward_parameters(model) else {}
    with evaluation_mode(model):
        trial = own_log_probs(
            model,
            rows,
            lambda _: options,
            f"{who}: {name} can't be used, because its own forward of one row of {len(rows[0])} "
            "tokens fails",
        )
    if not all(bool(row.isfinite().all()) for row in trial.log_probs):
        raise ValueError(f"{who}: the logits of {name} are not finite; are its weights loaded?")
    begin, whole = trial.log_probs[1], trial.log_probs[0]
    ahead = trial._replace(log_probs=[whole[: len(begin)]]).difference([begin])
    if not trial.allows(ahead):
        raise ValueError(
            f"{who}: {name} is no policy: what it says of a token depends on the tokens after it, "
            f"by {ahead}. A model is trained here only if it sees what comes before; some need "
            "is_decoder=True in their configuration for that."
        )
    return trial


class Rejected(NamedTuple):
    """A way to compute log-probs that was tried and not taken."""

    name: str
    reason: str
    is_error: bool
    """It failed; otherwise the model is none for it: its log-probs are others, say."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def find_first(
    model: PreTrainedModel,
    trial: ReadingTrial,
    ways: Sequence[tuple[str, Callable[[], Sequence[Tensor]]]],
    failure: str,
) -> tuple[int, Difference, list[Rejected]]:
    """Try ways to compute a trial's log-probs until one gives the model's own."""
    # failure: begins the error where none does.
    # Gives which way, how far it is off, and what was wrong with those before it.
    wrong: list[Rejected] = []
    for i, (name, compute) in enumerate(ways):
        try:
            with torch.no_grad(), evaluation_mode(model):
                difference = trial.difference(compute())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # kept, and told where it matters
            is_error = not isinstance(error, PackedInputLost)
            wrong.append(Rejected(name, f"{type(error).__name__}: {str(error)[:200]}", is_error))
            continue
        if trial.allows(difference):
            return i, difference, wrong
        wrong.append(Rejected(name, f"off by {difference}", False))
    raise ValueError(f"{failure} ({'; '.join(map(str, wrong))}).")


def trial_rows(model: PreTrainedModel) -> list[Tensor]:
    """Short rows of plain tokens: none that stands for padding, an image or the like."""
    config = model.config.get_text_config()
    size = min(config.vocab_size, next(model.get_input_embeddings().parameters()).shape[0])
    settings = {**model.config.to_dict(), **config.to_dict()}
    names = [name for name in settings if name.endswith(("token_id", "token_index"))]
    special = {settings[name] for name in names if isinstance(settings[name], int)}
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


def packed_rows(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and lengths of rows packed on the host, with all tokens but the first of each marked."""
    ids, lengths = pack([row.cpu() for row in rows])
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[cumulative_lengths(lengths)[:-1]] = False
    return ids, lengths, mask

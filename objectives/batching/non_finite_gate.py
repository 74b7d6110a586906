"""An optimizer step that a loss or a gradient that is not finite cannot pass.

One NaN in a gradient turns every parameter into NaN; here it costs one step, leaves a file with the
batch to look at, and ends the run only when it keeps happening.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.checks import POSITIVE, check_counts, check_numbers, check_type
from torchrl_data.sampling_masks import SamplingMasks

from .gradient_norm import clip_over, norm_over, num_shards
from .packed_batch import PackedBatch
from .ranks import Ranks


@runtime_checkable
class LossOutput(Protocol):
    """The output of a loss."""

    def total(self) -> Tensor:
        """Return what to call ``backward`` on."""
        ...


class StepOutcome(NamedTuple):
    """The outcome of one optimizer step."""

    grad_norm: float
    """Norm of the whole gradient before clipping; NaN where it is not finite."""
    skipped: str = ""
    """Why no step was made; empty when one was."""
    dump: Path | None = None
    """The file with the batch of a step that was not finite."""


class NonFiniteStepError(RuntimeError):
    """Too many steps in a row were not finite."""


class NonFiniteGate(ChecksAttributes):
    """Runs ``backward`` and ``optimizer.step`` while everything is finite.

    A step whose loss or gradient is not finite is skipped: parameters and the optimizer's state
    stay as they are, to the bit, and the gradients are dropped. So is a step for which there is no
    gradient at all::

        gate = NonFiniteGate(optimizer, max_grad_norm=1.0, dump_dir="outputs/not_finite")
        for part in packed.micro_batches(max_tokens=8192):
            gate.backward(loss(part, window=window), part)
        outcome = gate.step()

    Args:
        optimizer: its parameters are trained.
        max_grad_norm: gradients of a larger norm are scaled down to it; ``None`` for no limit.
        dump_dir: where the batches of skipped steps are written, a safetensors file each: the
            tensors of the packed batch, and the reason in the header. ``None`` for nowhere.
        max_skipped_in_a_row: more than so many, and :meth:`step` raises.
        ranks: of a model that several train: all make a step, or none does, and the norm is that of
            the gradient of all. Each of them calls :meth:`backward` equally often.

    Raises:
        ValueError: a number is not positive, the parameters are sharded and no ranks are given, or
            they have gradients already, which the first step would take for its own.

    Example:
        >>> from objectives import SFTLossOutput
        >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
        >>> gate = NonFiniteGate(torch.optim.SGD([weight], lr=0.5))
        >>> count = torch.tensor(1.0)
        >>> for factor in (3.0, float("nan")):
        ...     loss = (factor * weight).sum()
        ...     output = SFTLossOutput(loss, count, count, loss.detach(), batch_size=[])
        ...     _ = gate.backward(output)
        ...     outcome = gate.step()
        ...     print(outcome.grad_norm, bool(outcome.skipped), weight.data)  # 1 - 0.5 * 3
        3.0 False tensor([-0.5000])
        nan True tensor([-0.5000])
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        max_grad_norm: float | None = None,
        dump_dir: str | Path | None = None,
        max_skipped_in_a_row: int = 2,
        ranks: Ranks | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.max_grad_norm: float | None = self._checked_change("max_grad_norm", max_grad_norm)
        self.max_skipped_in_a_row: int = self._checked_change(
            "max_skipped_in_a_row", max_skipped_in_a_row
        )
        self.dump_dir: Path | None = self._checked_change("dump_dir", dump_dir)
        self._ranks = ranks or Ranks.alone()
        sharded = sum(num_shards(p) > 1 for p in self._parameters())
        if sharded and self._ranks.size == 1:
            raise ValueError(
                f"NonFiniteGate: {sharded} parameters are spread over several ranks, which have to "
                "agree on every step. Give it ranks=Ranks.join()."
            )
        left = sum(p.grad is not None and bool(p.grad.any()) for p in self._parameters())
        if left:
            raise ValueError(
                f"NonFiniteGate: {left} parameters have gradients of an earlier training, which "
                "would be a part of the first step. Call optimizer.zero_grad() before."
            )
        self.num_steps = 0
        """Calls of :meth:`step`, skipped ones included."""
        self.num_not_finite = 0
        self._in_a_row = 0
        self._batches: list[PackedBatch] = []
        self._bad_loss = ""
        # Trained tokens of the step so far, and those that no filter took out; None: not known.
        self._num_trained: float | None = None
        self._num_kept: float | None = None

    changeable = frozenset({"max_grad_norm", "max_skipped_in_a_row", "dump_dir"})

    def _checked_change(self, name: str, value: Any) -> Any:
        if name == "dump_dir":
            return None if value is None else Path(value)
        if name == "max_grad_norm":
            check_numbers("NonFiniteGate", POSITIVE, max_grad_norm=value)
        else:
            check_counts("NonFiniteGate", 0, max_skipped_in_a_row=value)
        return value

    def backward(self, output: LossOutput, batch: PackedBatch | None = None) -> Tensor:
        """Add the gradient of a loss to those of the step.

        Args:
            output: of a loss.
            batch: what it was computed from, for the dump of a step that is not finite.

        Returns:
            The loss, detached.

        Raises:
            TypeError: it is something else, such as a tensor.
        """
        check_type("backward", output, LossOutput, who="NonFiniteGate")
        total = output.total()
        if batch is not None and self.dump_dir is not None:
            self._batches.append(batch)
        self._note_tokens(output)
        is_finite = bool(total.isfinite().all())
        if not is_finite:
            items = getattr(output, "items", dict)()
            bad = [
                f"{name} {value.detach().tolist()}"
                for name, value in items
                if isinstance(value, Tensor) and not bool(value.isfinite().all())
            ]
            terms = ", ".join(bad) or "no term by name"
            self._bad_loss = self._bad_loss or f"the loss is {total.detach().tolist()} ({terms})"
        together = self._ranks.size > 1  # the others wait for this backward pass
        if together and not total.requires_grad:
            raise RuntimeError(
                f"NonFiniteGate: the loss of rank {self._ranks.rank} has no gradient, while others "
                "wait for its backward pass. Train a model in DistributedDataParallel or after "
                "fully_shard, of which a parameter requires a gradient."
            )
        if total.requires_grad and (is_finite or together):
            total.backward()
        return total.detach()

    def step(self) -> StepOutcome:
        """Make the optimizer step, or skip it, and drop the gradients.

        Returns:
            What became of it.

        Raises:
            NonFiniteStepError: this one and those before it were skipped for what is not finite,
                more than ``max_skipped_in_a_row``.
            RuntimeError: ranks hold different gradients of the same parameters.
        """
        self.num_steps += 1
        parameters = [p for p in self._parameters() if p.grad is not None]
        norm = norm_over(self._ranks, [p.grad for p in parameters if p.grad is not None])
        reason = self._bad_loss
        if self._ranks.size > 1:  # what is wrong on any of them, and on which
            reasons = enumerate(self._ranks.gather(reason))
            reason = next((f"of rank {rank} {found}" for rank, found in reasons if found), "")
        if not reason and not bool(norm.isfinite()):
            reason = f"the norm of the gradient is {float(norm)}"
        outcome = StepOutcome(float(norm))
        if reason:
            outcome = StepOutcome(float("nan"), reason, self._dump(reason))
        elif not parameters or float(norm) == 0:
            outcome = StepOutcome(0.0, self._why_nothing(has_gradient=bool(parameters)))
        else:
            if self.max_grad_norm is not None:
                clip_over(self._ranks, parameters, norm, self.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self._batches, self._bad_loss = [], ""
        self._num_trained = self._num_kept = None
        self.num_not_finite += bool(reason)
        self._in_a_row = self._in_a_row + 1 if reason else 0
        if self._in_a_row > self.max_skipped_in_a_row:
            where = f" The batch is in {outcome.dump}." if outcome.dump is not None else ""
            raise NonFiniteStepError(
                f"{self._in_a_row} optimizer steps in a row were not finite, the last because "
                f"{outcome.skipped}. The parameters are those of before.{where} Lower the learning "
                "rate, clip harder, or look at the batch."
            )
        return outcome

    def _note_tokens(self, output: LossOutput) -> None:
        for each in getattr(output, "streams", {"": output}).values():
            tokens, kept = (getattr(each, n, None) for n in ("num_active_tokens", "kept_fraction"))
            if tokens is not None:
                count = float(tokens)
                self._num_trained = (self._num_trained or 0.0) + count
                share = 1.0 if kept is None else float(kept)
                self._num_kept = (self._num_kept or 0.0) + share * count

    def _why_nothing(self, *, has_gradient: bool) -> str:
        """Return why a step has no gradient, as far as the outputs of the loss tell."""
        if self._num_trained == 0:
            return "no token was trained"
        if self._num_kept == 0:
            return "a filter of the loss left no token (kept_fraction is 0)"
        return "every gradient is 0" if has_gradient else "no gradient"

    def state_dict(self) -> dict[str, int]:
        """Counts of the gate."""
        return {
            "num_steps": self.num_steps,
            "num_not_finite": self.num_not_finite,
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Count on.

        Args:
            state_dict: what :meth:`state_dict` gave.
        """
        self.num_steps = state_dict["num_steps"]
        self.num_not_finite = state_dict["num_not_finite"]
        self._in_a_row = state_dict["in_a_row"]

    def _parameters(self) -> Iterator[Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _dump(self, reason: str) -> Path | None:
        if self.dump_dir is None or not self._batches:
            return None
        from safetensors.torch import save_file

        self.dump_dir.mkdir(parents=True, exist_ok=True)
        rank = f"_rank_{self._ranks.rank}" if self._ranks.size > 1 else ""
        path = self.dump_dir / f"step_{self.num_steps}{rank}.safetensors"
        tensors: dict[str, Tensor] = {}
        for index, batch in enumerate(self._batches):
            for field in fields(batch):
                for name, tensor in _as_tensors(getattr(batch, field.name)):
                    key = f"{index}.{field.name}.{name}".rstrip(".")
                    tensors[key] = tensor.detach().cpu().clone()
        save_file(tensors, path, metadata={"reason": reason, "step": json.dumps(self.num_steps)})
        return path


def _as_tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    """What a field of a batch holds, by name: tensors; other values as UTF-8 of their JSON."""
    if isinstance(value, SamplingMasks):
        value = value._asdict()
    for name, held in (value if isinstance(value, Mapping) else {"": value}).items():
        if isinstance(held, Tensor):
            yield name, held
        elif held is not None:
            yield name, torch.frombuffer(bytearray(json.dumps(held).encode()), dtype=torch.uint8)

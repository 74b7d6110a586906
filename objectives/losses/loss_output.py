"""Outputs of losses: named terms, of which only the ``loss_*`` ones are optimised.

Every tensor is a scalar, unless the loss was told not to aggregate. Losses are shares of the
accumulation window, so those of its micro-batches add up; metrics are means over the trained
tokens of the call, or over its pairs, and ``combine`` weighs them by the number of these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from tensordict import TensorClass, TensorDict
from torch import Tensor

from objectives.batching.ranks import Ranks

Output = TypeVar("Output")


def make_output(kind: type[Output], terms: Mapping[str, Tensor]) -> Output:
    """Make an output from its entries by name."""
    made: Any = kind
    return made.from_tensordict(TensorDict(dict(terms)))


class LossTerms:
    """The fields that every output of a loss has."""

    weighted_by: ClassVar[str] = "num_active_tokens"
    """Entry with the number of what metrics are means over."""
    weighted_apart: ClassVar[Mapping[str, str]] = {}
    """Metrics that are means over something else, and the entry with the number of that."""

    def total(self) -> Tensor:
        """The objective: the sum of the ``loss_*`` entries."""
        output: Any = self
        terms = [value for key, value in output.items() if str(key).startswith("loss_")]
        return torch.stack([term for term in terms if term is not None]).sum(0)

    @classmethod
    def combine(
        cls: type[Output], outputs: Sequence[Output], *, ranks: Ranks | None = None
    ) -> Output:
        """The output of a whole window from those of its micro-batches, detached.

        Args:
            outputs: at least one, each computed with the window's counts (``window=``).
            ranks: also over all of these, each of which calls it.

        Returns:
            What one call on all rows would have given; over several ranks on the CPU.

        Raises:
            ValueError: there are no outputs.
        """
        if not outputs:
            raise ValueError("combine needs at least one output.")
        made: Any = cls
        weights = made.weighted_by, made.weighted_apart
        terms = combined_terms(outputs, *weights)
        if ranks is not None and ranks.data.size > 1:
            own = {  # its losses were divided by its share of the counts of all
                name: value.cpu() / (ranks.data.size if name.startswith("loss_") else 1)
                for name, value in terms.items()
            }
            terms = combined_terms(ranks.data.gather(own), *weights)
        return make_output(cls, terms)


def combined_terms(
    outputs: Sequence[Any],
    weighted_by: str = "num_active_tokens",
    weighted_apart: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """The entries of a whole window by name, from the outputs of its micro-batches.

    Args:
        outputs: at least one.
        weighted_by: the entry with the number of what metrics are means over.
        weighted_apart: the same of single metrics, by their names.
    """
    parts = [
        {str(key): value.detach() for key, value in output.items() if value is not None}
        for output in outputs
    ]
    combined: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        present = [part for part in parts if name in part]
        values = torch.stack([part[name] for part in present])
        if name.startswith(("loss_", "num_")):
            combined[name] = values.sum(0)
        else:
            combined[name] = _mean(values, present, weighted_apart.get(name, weighted_by))
    if "ESS" in combined:
        # ESS = mean(r)^2 / mean(r^2): recover the mean square of each part.
        ratio = torch.stack([part["ratio_mean"] for part in parts])
        ess = torch.stack([part["ESS"] for part in parts])
        square = _mean(ratio.square() / ess, parts, weighted_by)
        fraction = combined["ratio_mean"].square() / square
        combined["ESS"] = torch.where(combined["num_active_tokens"] > 0, fraction, 1.0)
    return combined


def _mean(values: Tensor, parts: Sequence[Mapping[str, Tensor]], weighted_by: str) -> Tensor:
    weights = torch.stack([part[weighted_by] for part in parts])
    return (values * weights).sum(0) / weights.sum(0).clamp(min=1)


def loss_output(kind: type[Output]) -> type[Output]:
    """Class decorator: an output shows its values, and reduces to its objective."""
    # loss.mean(reduce=True) is TorchRL's idiom for what to differentiate.
    # TensorClass gives its own text and docstring; the class keeps a copy of what it says itself.
    own = {name: _reduction(name, getattr(kind, name)) for name in ("mean", "sum")}
    for key, value in {**own, "__repr__": _shown, "__doc__": vars(kind)["_documentation"]}.items():
        setattr(kind, key, value)
    return kind


def _reduction(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def reduction(output: Any, *args: Any, reduce: bool | None = None, **options: Any) -> Any:
        if reduce:
            return getattr(output.total(), name)(*args, **options)
        return plain(output, *args, reduce=reduce, **options)

    reduction.__name__ = name
    reduction.__doc__ = f"With ``reduce=True`` the {name} of the objective; else of each entry."
    return reduction


def _shown(output: TensorClass) -> str:
    entries = ", ".join(
        f"{key}={value.item():.6g}" if value.numel() == 1 else f"{key}=[{value.numel()} values]"
        for key, value in output.items()
        if isinstance(value, Tensor)
    )
    return f"{type(output).__name__}({entries})"

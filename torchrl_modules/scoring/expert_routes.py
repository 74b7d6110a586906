"""Experts that a mixture sends each token to: recorded as a model computes, and replayed.

Models of Transformers choose experts with one ``topk`` of a router's scores in each layer. That
call is what is seen and replaced here, so that it makes no difference how a family names its parts.

Shape legend: L layers with experts, N tokens of a pass, E experts, S experts of a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchrl_data.routed_experts import UNKNOWN_BYTE

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")


def expert_counts(model: nn.Module) -> tuple[int, int] | None:
    """The number of experts that a layer of a model has, and of those that each token goes to.

    Args:
        model: of Transformers.

    Returns:
        E and S; ``None`` of a model without experts.
    """
    config: Any = model.config
    config = config.get_text_config()
    counts = [
        next((n for name in names if isinstance(n := getattr(config, name, None), int)), 0)
        for names in (_EXPERTS, _CHOSEN)
    ]
    return (counts[0], counts[1]) if all(counts) and counts[0] > 1 else None


def packed_experts(layers: Sequence[Tensor], num_experts: int) -> Tensor:
    """Put the experts of all layers into as few bytes as a row carries them in.

    Args:
        layers: of each layer in order int64 ``[N, S]``, negative where a choice is not known.
        num_experts: E.

    Returns:
        ``[N, L, S]``: uint8, in which 255 stands for a choice that is not known, of up to 255
        experts; int16 with negative numbers of more.
    """
    experts = torch.stack(list(layers), 1)
    if num_experts < UNKNOWN_BYTE:
        return experts.masked_fill(experts < 0, UNKNOWN_BYTE).to(torch.uint8)
    return experts.to(torch.int16)


def replayed_layers(experts: Tensor) -> list[Tensor]:
    """Undo :func:`packed_experts`.

    Args:
        experts: ``[N, L, S]``.

    Returns:
        Of each layer int64 ``[N, S]``, negative where a choice is not known.
    """
    wide = experts.long()
    if experts.dtype == torch.uint8:
        wide = wide.masked_fill(wide == UNKNOWN_BYTE, -1)
    return list(wide.unbind(1))


class ExpertRoutes(TorchFunctionMode):
    """Sees the experts of every token that a model reads meanwhile, or says which they are.

    It is used like this::

        with ExpertRoutes(model) as routes:
            model(input_ids)
        with ExpertRoutes(model, replay=routes.layers):
            model(input_ids)  # the same experts, whatever the weights

    Args:
        model: a mixture of experts of Transformers.
        replay: the experts of each layer in order, int64 ``[M, S]`` each, for the tokens in the
            order in which the model reads them, at least as many as it reads. The router's scores
            of these experts weigh them, whichever it would have chosen. A negative number leaves a
            token's choice to the router, and ``None`` all of them.
        margins: also see which expert came next, and by how much; it takes a second ``topk``.

    Raises:
        ValueError: the model has no experts; or, as it computes, there are fewer to replay.
    """

    def __init__(
        self, model: nn.Module, replay: list[Tensor] | None = None, *, margins: bool = True
    ) -> None:
        super().__init__()
        counts = expert_counts(model)
        if counts is None:
            raise ValueError(
                f"ExpertRoutes: {type(model).__name__} is no mixture of experts: its config names "
                f"none of {', '.join(_EXPERTS)}."
            )
        self.num_experts, self._num_chosen = counts
        self._with_margins = margins
        self._replay = replay
        self.layers: list[Tensor] = []
        """The experts of each layer that was computed so far, int64 ``[N, S]``, on the host."""
        self.runners_up: list[Tensor] = []
        """The expert of each layer that came next by the router's score, int64 ``[N]``."""
        self.margins: list[Tensor] = []
        """By how much of its score the last expert of each token was ahead of that, ``[N]``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let everything be computed, but for the choice of experts."""
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        scores = args[0]
        k = args[1] if len(args) > 1 else kwargs["k"]
        if k != self._num_chosen or scores.shape[-1] != self.num_experts:
            return func(*args, **kwargs)
        values, chosen = func(*args, **kwargs)
        if self._with_margins and k < self.num_experts:
            best = torch.topk(scores.detach().reshape(-1, self.num_experts), k + 1, dim=-1)
            last, after = best.values[:, -2].double(), best.values[:, -1].double()
            self.margins.append(((last - after) / last.abs().clamp(min=1e-12)).cpu())
            self.runners_up.append(best.indices[:, -1].cpu())
        if self._replay is not None:
            number, size = len(self.layers), chosen.numel() // k
            given = self._replay[number] if number < len(self._replay) else scores.new_zeros(0)
            if len(given) < size:
                raise ValueError(
                    f"ExpertRoutes: layer {number} reads {size} tokens, and there are the experts "
                    f"of {len(given)} to replay."
                )
            given = given[:size].to(chosen.device).reshape(chosen.shape)
            chosen = torch.where(given < 0, chosen, given)
            values = scores.gather(-1, chosen)
        self.layers.append(chosen.detach().reshape(-1, k).cpu())
        return torch.return_types.topk((values, chosen))  # type: ignore[call-arg]

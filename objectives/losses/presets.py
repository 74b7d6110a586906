"""The family by name: :class:`~objectives.GRPOLoss` with other defaults, and nothing else.

Any option of ``GRPOLoss`` can still be given. The advantages that an algorithm wants are made by
:class:`~objectives.MCAdvantage`: Dr. GRPO goes with ``scale="none"``.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torchrl_data.protocols import TokenScorer

from .grpo import GRPOLoss


class GRPOPreset(GRPOLoss):
    """``GRPOLoss`` whose defaults are ``preset``.

    Args:
        actor_network: scores packed tokens.
        **options: of :class:`~objectives.GRPOLoss`; they win over the preset.

    Raises:
        TypeError: there is no such option, or the actor cannot score.
        ValueError: as ``GRPOLoss``.
    """

    preset: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, actor_network: TokenScorer, **options: Any) -> None:
        super().__init__(actor_network, **{**self.preset, **options})


class GRPO(GRPOPreset):
    """As first published: every sequence weighs the same (arXiv:2402.03300)."""

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "sequence_mean"}


class BNPO(GRPOPreset):
    """The mean over the tokens of the micro-batch at hand: call it without ``window=``.

    With the window's counts it is DAPO's aggregation, the same for every split.
    """

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "token_mean"}


class DAPO(GRPOPreset):
    """Clip higher, mean over the tokens of the window (arXiv:2503.14476)."""

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "token_mean", "clip_epsilon": (0.2, 0.28)}


class DrGRPO(GRPOPreset):
    """The sum over the tokens by a constant: needs ``max_tokens`` (arXiv:2503.20783)."""

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "fixed_length"}


class LUSPO(GRPOPreset):
    """The sum over the tokens of each sequence, averaged over them (arXiv:2602.05261).

    The paper takes the ratio of the sequence as well: add ``ratio_level="sequence"`` and a clip
    that fits it.
    """

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "sequence_sum"}


class GSPO(GRPOPreset):
    """The ratio and its clip belong to the sequence (arXiv:2507.18071).

    A mean of log-ratios hardly leaves 0, so the clip is the paper's 3e-4 and 4e-4, not 0.2.
    """

    preset: ClassVar[Mapping[str, Any]] = {
        "aggregation": "sequence_mean",
        "ratio_level": "sequence",
        "clip_epsilon": (3e-4, 4e-4),
    }


class CISPO(GRPOPreset):
    """A bounded weight in front of the log-prob; no token loses its gradient (arXiv:2506.13585)."""

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "token_mean", "surrogate": "cispo"}


CISPOLoss = CISPO
"""TorchRL's name for it."""


class SAPO(GRPOPreset):
    """A soft gate in place of the clip (arXiv:2511.20347)."""

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "sequence_mean", "surrogate": "sapo"}


class VESPO(GRPOPreset):
    """A gamma-shaped weight of the whole sequence's ratio (arXiv:2602.10693)."""

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "token_mean", "surrogate": "vespo"}


class GMPO(GRPOPreset):
    """The geometric mean of the clipped token ratios (arXiv:2507.20673)."""

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "sequence_mean", "surrogate": "gmpo"}

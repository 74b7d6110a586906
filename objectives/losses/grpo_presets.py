"""The family by name: :class:`~objectives.GRPOLoss` with other defaults, and nothing else.

Any option of ``GRPOLoss`` can still be given, and wins over the preset's. The advantages that an
algorithm wants are made by :class:`~objectives.MCAdvantage`: Dr. GRPO goes with ``scale="none"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .grpo import GRPOLoss
from .surrogates import CispoSurrogate, DivergenceSurrogate


class GRPO(GRPOLoss):
    """``GRPOLoss`` as it is: the clip of 0.2, and the mean over the tokens of the window.

    That is what is called GRPO today (the default of TRL, TorchRL and verl). As it was first
    published, with the mean over the sequences, it is :class:`OriginalGRPO`.

    Example:
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> actor = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> GRPO(actor).options == GRPOLoss(actor).options
        True
    """


class OriginalGRPO(GRPOLoss):
    """GRPO as first published: every sequence weighs the same (arXiv:2402.03300).

    Example:
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> actor = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> options = OriginalGRPO(actor, kl_to_ref_coeff=0.04).options
        >>> options.aggregation, options.kl_to_ref_coeff
        ('sequence_mean', 0.04)
    """

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "sequence_mean"}


class BNPO(GRPOLoss):
    """The mean over the tokens of the micro-batch at hand: call it without ``window=``.

    With the window's counts it is DAPO's aggregation, the same for every split.

    Example:
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> actor = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> options = BNPO(actor, clip_epsilon=(0.2, 0.28)).options
        >>> options.aggregation, options.clip_epsilon
        ('token_mean', (0.2, 0.28))
    """

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "token_mean"}


class DAPO(GRPOLoss):
    """Clip higher, mean over the tokens of the window (arXiv:2503.14476).

    Example:
        >>> import math
        >>> from tensordict import lazy_stack
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model = tiny_qwen3(len(tokenizer))
        >>> _ = torch.nn.init.zeros_(model.lm_head.weight)  # all tokens are equally likely
        >>> row = TensorDict({("tokens", "full"): torch.tensor([65, 66])})  # [T]
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True])
        >>> row["log_probs", "full"] = torch.full((2,), -math.log(1.5 * len(tokenizer)))
        >>> row["advantage"] = torch.ones(1, 1)
        >>> loss = DAPO(TransformersWrapper(model, tokenizer=tokenizer))
        >>> loss(lazy_stack([row])).total().detach()  # the ratio is 1.5, clipped at 1.28
        tensor(-1.2800)
    """

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "token_mean", "clip_epsilon": (0.2, 0.28)}


class DrGRPO(GRPOLoss):
    """The sum over the tokens by a constant: needs ``max_tokens`` (arXiv:2503.20783).

    Example:
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> actor = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> options = DrGRPO(actor, max_tokens=256).options  # with MCAdvantage(8, scale="none")
        >>> options.aggregation, options.max_tokens
        ('fixed_length', 256)
    """

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "fixed_length"}


class LUSPO(GRPOLoss):
    """The sum over the tokens of each sequence, averaged over them (arXiv:2602.05261).

    The paper takes the ratio of the sequence as well: add ``ratio_level="sequence"`` and a clip
    that fits it.
    """

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "sequence_sum"}


class GSPO(GRPOLoss):
    """The ratio and its clip belong to the sequence (arXiv:2507.18071).

    A mean of log-ratios hardly leaves 0, so the clip is the paper's 3e-4 and 4e-4, not 0.2.
    """

    preset: ClassVar[Mapping[str, Any]] = {
        "aggregation": "sequence_mean",
        "ratio_level": "sequence",
        "clip_epsilon": (3e-4, 4e-4),
    }


class CISPO(GRPOLoss):
    """A bounded weight in front of the log-prob; no token loses its gradient (arXiv:2506.13585).

    Example:
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> actor = TransformersWrapper(tiny_qwen3(len(tokenizer)), tokenizer=tokenizer)
        >>> options = CISPO(actor).options
        >>> options.surrogate, options.aggregation
        ('cispo', 'token_mean')
    """

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "token_mean", "surrogate": "cispo"}


CISPOLoss = CISPO
"""TorchRL's name for it."""


class SAPO(GRPOLoss):
    """A soft gate in place of the clip (arXiv:2511.20347)."""

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "sequence_mean", "surrogate": "sapo"}


class VESPO(GRPOLoss):
    """A gamma-shaped weight of the whole sequence's ratio (arXiv:2602.10693)."""

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "token_mean", "surrogate": "vespo"}


class GMPO(GRPOLoss):
    """The geometric mean of the clipped token ratios (arXiv:2507.20673)."""

    preset: ClassVar[Mapping[str, Any]] = {"aggregation": "sequence_mean", "surrogate": "gmpo"}


class DPPO(GRPOLoss):
    """A trust region of |pi - mu| in place of the ratio's clip, mu the sampler (arXiv:2602.04879).

    For the binary KL: ``DPPO(policy, surrogate=DivergenceSurrogate(divergence="kl"))``.
    """

    preset: ClassVar[Mapping[str, Any]] = {
        "aggregation": "token_mean",
        "surrogate": DivergenceSurrogate(),
    }


class IPO(GRPOLoss):
    """DPPO's mask whatever the direction of the step, and tau log^2 r with tau = 1e-3 (prime-rl).

    The penalty is the KL to the sampler by k2, which is log^2 r / 2: its weight is 2 tau.
    """

    preset: ClassVar[Mapping[str, Any]] = {
        "aggregation": "token_mean",
        "surrogate": DivergenceSurrogate(one_sided=False, threshold=0.2),
        "kl_to_inference_coeff": 2e-3,
        "kl_estimator": "k2",
    }


class KPop(GRPOLoss):
    """Tokens whose binary KL exceeds 0.1 in either direction are masked (KPop, Ant Group, 2026)."""

    preset: ClassVar[Mapping[str, Any]] = {
        "aggregation": "token_mean",
        "surrogate": DivergenceSurrogate(divergence="symmetric_kl", one_sided=False),
    }


class PolicyDistillation(GRPOLoss):
    """On-policy distillation by policy gradient: the advantage is log q - log pi, q the teacher.

    Reads ``("next", "teacher_log_probs", "full")`` and no advantage; with ``advantage_coeff=1.0``
    both are added up. What an older student sampled is weighed by the ratio, up to 5.
    """

    preset: ClassVar[Mapping[str, Any]] = {
        "aggregation": "token_mean",
        "surrogate": CispoSurrogate(),
        "teacher_coeff": 1.0,
        "advantage_coeff": 0.0,
    }

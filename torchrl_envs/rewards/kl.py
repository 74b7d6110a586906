"""Log-probabilities of trajectories under other models, and the KL divergence from them.

Everything is over the tokens that the policy sampled, and nothing else: a prompt, a tool's answer
or padding neither counts nor dilutes. A trajectory is scored once, packed, at a cost of its
tokens.

Shape legend: B rows, T tokens of a row (ragged), N packed tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from tensordict import NestedKey
from torch import Tensor, nn

from torchrl_data.checks import POSITIVE, check_numbers
from torchrl_data.keys import FULL, LOG_PROBS_FULL
from torchrl_data.ragged.packed import pack
from torchrl_data.sampling_masks import SamplingMasks
from torchrl_data.token_scorer import (
    TokenScorer,
    TokenScores,
    agent_arguments,
    check_scorer,
    image_arguments,
    mask_arguments,
)
from torchrl_envs.episode.episode_transform import EpisodeEnvironment
from torchrl_envs.episode.trajectory_transform import ScoredRow, TrajectoryTransform

from .recorded_log_probs import check_recorded

REF_LOG_PROBS: NestedKey = ("ref_log_probs", FULL)
GEN_LOG_PROBS: NestedKey = ("gen_log_probs", FULL)
Estimator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From log-probs, reference log-probs and mask, ``[T]`` each, to the KL of each token, ``[T]``."""


class RetrieveLogProb(TrajectoryTransform):
    """Scores the tokens of trajectories with a model.

    Args:
        model: gives log-probs, see :class:`~torchrl_data.TokenScorer`
            (``TransformersWrapper`` is one). It is not part of ``state_dict``; place it yourself.
        log_probs_full_key: what is written under ``"next"``: float32 ``[T]``, 0 where not scored.
        assistant_only: score the sampled tokens only; otherwise all but the first, which nothing
            comes before.
        detach: without gradients. (An environment never has any.)
        temperature: the logits are divided by it. Log-probs of a policy that samples at another
            temperature than 1 compare with those at the same one.

    Raises:
        TypeError: the model gives no log-probs.
        ValueError: the temperature is not positive.

    Example:
        >>> from tensordict import lazy_stack
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model = tiny_qwen3(len(tokenizer))
        >>> _ = torch.nn.init.zeros_(model.lm_head.weight)  # all tokens are equally likely
        >>> reference = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
        >>> row = TensorDict({("tokens", "full"): torch.tensor([65, 66, 67])})  # [T]
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        >>> scored = RetrieveLogProb(reference, log_probs_full_key=("ref_log_probs", "full"))
        >>> [row] = scored(lazy_stack([row])).unbind(0)
        >>> (row["next", "ref_log_probs", "full"].exp() * len(tokenizer)).round()[1:]
        tensor([1., 1.])
    """

    def __init__(
        self,
        model: TokenScorer,
        *,
        log_probs_full_key: NestedKey | None = None,
        assistant_only: bool = True,
        detach: bool = True,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        check_scorer(self._get_name(), model)
        check_numbers(self._get_name(), POSITIVE, temperature=temperature)
        self.entry: NestedKey = REF_LOG_PROBS if log_probs_full_key is None else log_probs_full_key
        self.results = (self.entry,)
        self.assistant_only = assistant_only
        self.detach = detach
        self.temperature = temperature
        self._model = (model,)  # In a tuple, so that a module is no part of this one.

    def score(self, rows: Sequence[ScoredRow]) -> None:
        """Add the log-probs of each row."""
        targets = [row.assistant_mask for row in rows]
        if not self.assistant_only:  # nothing comes before the first
            targets = [torch.arange(len(target)) > 0 for target in targets]
        for row, target in zip(rows, targets, strict=True):
            row.results[self.entry] = torch.zeros(len(target))
        chosen = [i for i, target in enumerate(targets) if bool(target.any())]
        if not chosen:
            return
        ids, lengths = pack([rows[i].ids for i in chosen])
        mask, _ = pack([targets[i] for i in chosen])
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detach):
            model: Any = self._model[0]
            images = image_arguments(model, [rows[i].images for i in chosen], self._get_name())
            masks = SamplingMasks.of(s for i in chosen for s in rows[i].sets_of(targets[i]))
            recorded = mask_arguments(model, masks, self._get_name())
            by_agent = agent_arguments(model, [rows[i].agent for i in chosen])
            options: dict[str, Any] = {"temperature": self.temperature, **images, **recorded}
            options |= by_agent
            scores: TokenScores = model.score_packed(ids, lengths, mask, **options)
        log_probs = scores.log_prob.to(ids.device).float()
        counts = [int(targets[i].sum()) for i in chosen]
        for i, part in zip(chosen, log_probs.split(counts), strict=True):
            nothing = rows[i].results[self.entry]
            rows[i].results[self.entry] = nothing.masked_scatter(targets[i], part)

    def check_policy(self, policy: Any) -> None:
        """A reference scores the distribution that the policy samples from, and is another model.

        What is written under a name of its own is compared with what its reader says, and so are
        log-probs beside untempered ones of the policy.

        Raises:
            ValueError: it scores another distribution; or its model is the policy's own, from
                which there is no KL.
        """
        if self.entry != REF_LOG_PROBS or getattr(policy, "untempered_log_probs", False):
            return
        self.check_recorded(policy)
        if _trained_models(policy) & _trained_models(self._model[0]):
            raise ValueError(
                f"{self._get_name()}: its model is the one that the policy samples with, from "
                "which the KL of what it has just sampled is 0. Give it a copy of the model as it "
                "was before training, or name another entry with log_probs_full_key=."
            )

    def check_recorded(self, policy: Any) -> None:
        """See :func:`check_recorded`."""
        check_recorded(self._get_name(), self._model[0], self.temperature, policy)


def _trained_models(policy: Any) -> set[int]:
    """The models of a policy, each by its identity; of agents' those that are trained."""
    model = getattr(policy, "model", None)
    if not isinstance(model, nn.ModuleDict):
        return set() if model is None else {id(model)}
    return {id(own) for own in model.values() if any(x.requires_grad for x in own.parameters())}


class KLComputation(TrajectoryTransform):
    """KL divergence of the policy from a reference, from the log-probs of both.

    Args:
        gen_log_probs_full_key: the policy's, ``[T]``.
        ref_log_probs_full_key: the reference's, ``[T]``.
        kl_key: what is written under ``"next"``, float32 ``[T]``, in nats, 0 where nothing was
            sampled.
        add_to_reward: subtract ``coeff`` times the KL from the reward.
        coeff: of the KL in the reward; it may be set later.
        dense: whether each token has its own KL in the reward, which becomes ``[T, 1]`` (the reward
            of the trajectory is then at its last sampled token); otherwise their sum is subtracted
            from the reward as it is.
        estimator: of a token's KL: a function of log-probs, reference log-probs and mask, ``[T]``
            each; ``None`` is their difference (k1). A loss's estimator fits:
            ``functools.partial(objectives.functional.kl_estimate, estimator="k3")``.

    Raises:
        ValueError: the coefficient is not finite.
    """

    def __init__(
        self,
        gen_log_probs_full_key: NestedKey = LOG_PROBS_FULL,
        ref_log_probs_full_key: NestedKey = REF_LOG_PROBS,
        *,
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float = 1.0,
        dense: bool = True,
        estimator: Estimator | None = None,
    ) -> None:
        super().__init__()
        self._checked_change("coeff", coeff)
        self.gen_key = gen_log_probs_full_key
        self.ref_key = ref_log_probs_full_key
        self.kl_key = kl_key
        self.results = (kl_key,)
        self.penalty_name = kl_key if isinstance(kl_key, str) else "_".join(map(str, kl_key))
        self.add_to_reward = add_to_reward
        self.coeff = coeff
        self.dense = dense
        self.estimator = estimator or reference_log_ratio
        self._scorers: list[RetrieveLogProb] = []

    changeable = frozenset({"coeff"})

    def _checked_change(self, name: str, value: Any) -> Any:
        check_numbers(self._get_name(), **{name: value})
        return value

    def check(self, env: EpisodeEnvironment) -> None:
        """Note who scores the reference's log-probs."""
        self._scorers = [t for t in env.transforms_of(RetrieveLogProb) if t.entry == self.ref_key]

    def check_policy(self, policy: Any) -> None:
        """Recorded log-probs are of the distribution that the reference's will be of.

        Raises:
            ValueError: they are not.
        """
        for reference in self._scorers if self.gen_key == LOG_PROBS_FULL else ():
            reference.check_recorded(policy)

    def score(self, rows: Sequence[ScoredRow]) -> None:
        """Add the KL of each row, and the penalty."""
        for row in rows:
            log_prob, reference = row.read(self.gen_key), row.read(self.ref_key)
            row.results[self.kl_key] = self.estimator(log_prob, reference, row.assistant_mask)
            if self.add_to_reward:
                row.penalty = -self.coeff * row.results[self.kl_key]


def reference_log_ratio(log_prob: Tensor, ref_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Log-prob less reference log-prob, 0 outside the mask; its mean estimates the KL (k1)."""
    return (log_prob - ref_log_prob).masked_fill(~mask, 0.0)


class RetrieveKL(TrajectoryTransform):
    """Scores trajectories with a reference, and computes the KL from it.

    Of rows ``[B]`` it writes the reference's log-probs and ``("next", "kl_penalty")`` of each,
    float32 ``[T]`` in nats, and unless ``add_to_reward=False`` it subtracts the KL from the reward,
    which then has a value per token, ``[T, 1]``, unless ``dense=False``.

    Args:
        gen_model: ``"from_collector"`` takes the log-probs that the policy recorded when it
            sampled; a model scores the tokens anew.
        ref_model: the reference.
        gen_model_factory: makes the ``gen_model`` here, in the process that uses it.
        ref_model_factory: makes the ``ref_model`` here.
        gen_log_probs_full_key: where the policy's log-probs are; with a ``gen_model`` where they
            are written under ``"next"``, ``("gen_log_probs", "full")`` when not given.
        ref_log_probs_full_key: what is written under ``"next"``.
        assistant_only: see :class:`RetrieveLogProb`. The KL is over the sampled tokens always.
        detach: see :class:`RetrieveLogProb`.
        temperature: see :class:`RetrieveLogProb`; of both models. Recorded log-probs are at the
            policy's: a collector refuses another one.
        **kwargs: see :class:`KLComputation`.

    Raises:
        TypeError: a model gives no log-probs.
        ValueError: there is no reference, or a model is given twice.

    Example:
        >>> import math
        >>> from tensordict import lazy_stack
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model = tiny_qwen3(len(tokenizer))
        >>> _ = torch.nn.init.zeros_(model.lm_head.weight)  # all tokens are equally likely
        >>> reference = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
        >>> row = TensorDict({("tokens", "full"): torch.tensor([65, 66, 67])})  # [T]
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        >>> row["log_probs", "full"] = torch.full((3,), math.log(2 / len(tokenizer)))
        >>> transform = RetrieveKL(ref_model=reference, add_to_reward=False)
        >>> [row] = transform(lazy_stack([row])).unbind(0)
        >>> row["next", "ref_log_probs", "full"].shape
        torch.Size([3])
        >>> row["next", "kl_penalty"]  # log 2 where the policy sampled
        tensor([0.0000, 0.6931, 0.6931])
    """

    def __init__(
        self,
        gen_model: TokenScorer | Literal["from_collector"] | None = "from_collector",
        ref_model: TokenScorer | None = None,
        *,
        gen_model_factory: Callable[[], TokenScorer] | None = None,
        ref_model_factory: Callable[[], TokenScorer] | None = None,
        gen_log_probs_full_key: NestedKey | None = None,
        ref_log_probs_full_key: NestedKey = REF_LOG_PROBS,
        assistant_only: bool = True,
        detach: bool = True,
        temperature: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        recorded = gen_model is None or gen_model == "from_collector"
        gen = _one_model(self, "gen", None if recorded else gen_model, gen_model_factory)
        ref = _one_model(self, "ref", ref_model, ref_model_factory)
        if ref is None:
            raise ValueError(f"{self._get_name()} needs a ref_model or a ref_model_factory.")
        default = LOG_PROBS_FULL if gen is None else GEN_LOG_PROBS
        gen_key = default if gen_log_probs_full_key is None else gen_log_probs_full_key
        same: Any = {"assistant_only": assistant_only, "detach": detach, "temperature": temperature}
        self.kl = KLComputation(gen_key, ref_log_probs_full_key, **kwargs)
        # Of the distribution that was sampled from; what else a policy records says so itself.
        self._is_recorded = gen is None and gen_key == LOG_PROBS_FULL
        self._reference = RetrieveLogProb(ref, log_probs_full_key=ref_log_probs_full_key, **same)
        self.steps: list[TrajectoryTransform] = [self._reference, self.kl]
        if gen is not None:
            self.steps.insert(0, RetrieveLogProb(gen, log_probs_full_key=gen_key, **same))
        self.results = tuple(key for step in self.steps for key in step.results)
        self.penalty_name = self.kl.penalty_name
        self.dense = self.kl.dense

    @property
    def coeff(self) -> float:
        """Coefficient of the KL in the reward; it may be set."""
        return self.kl.coeff

    @coeff.setter
    def coeff(self, coeff: float) -> None:
        self.kl.coeff = coeff

    def check_policy(self, policy: Any) -> None:
        """Recorded log-probs are of the distribution that the reference's will be of.

        Raises:
            ValueError: they are not.
        """
        if self._is_recorded:
            self._reference.check_recorded(policy)

    def score(self, rows: Sequence[ScoredRow]) -> None:
        """Add log-probs, the KL and the penalty of each row."""
        for step in self.steps:
            step.score(rows)


class KLRewardTransform(RetrieveKL):
    """Subtracts the KL from a reference model from the reward, which becomes dense, ``[T, 1]``.

    Args:
        ref_model: the reference; see :class:`RetrieveLogProb`.
        ref_model_factory: makes it here.
        coef: of the KL in the reward.
        log_prob_key: the policy's log-probs.
        **kwargs: see :class:`RetrieveKL`.

    Raises:
        TypeError: the model gives no log-probs.
        ValueError: there is no reference, or two.

    Example:
        >>> import math
        >>> from tensordict import lazy_stack
        >>> from torchrl_modules import TransformersWrapper
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model = tiny_qwen3(len(tokenizer))
        >>> _ = torch.nn.init.zeros_(model.lm_head.weight)  # all tokens are equally likely
        >>> reference = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
        >>> row = TensorDict({("tokens", "full"): torch.tensor([65, 66, 67])})  # [T]
        >>> row["masks", "all_assistant_mask"] = torch.tensor([False, True, True])
        >>> row["log_probs", "full"] = torch.full((3,), math.log(2 / len(tokenizer)))
        >>> row["reward"] = torch.ones(1, 1)
        >>> [row] = KLRewardTransform(reference, coef=0.5)(lazy_stack([row])).unbind(0)
        >>> row["next", "kl_penalty"]  # log 2 where the policy sampled
        tensor([0.0000, 0.6931, 0.6931])
        >>> row["reward"].shape, row["reward"].flatten()  # -0.5 log 2, and 1 - 0.5 log 2
        (torch.Size([3, 1]), tensor([ 0.0000, -0.3466,  0.6534]))
    """

    def __init__(
        self,
        ref_model: TokenScorer | None = None,
        *,
        ref_model_factory: Callable[[], TokenScorer] | None = None,
        coef: float = 1.0,
        log_prob_key: NestedKey = LOG_PROBS_FULL,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            "from_collector",
            ref_model,
            ref_model_factory=ref_model_factory,
            gen_log_probs_full_key=log_prob_key,
            coeff=coef,
            **kwargs,
        )

    @property
    def coef(self) -> float:
        """Coefficient of the KL in the reward; it may be set."""
        return self.coeff

    @coef.setter
    def coef(self, coef: float) -> None:
        self.coeff = coef


def _one_model(
    owner: TrajectoryTransform, which: str, model: Any, factory: Callable[[], TokenScorer] | None
) -> TokenScorer | None:
    if model is not None and factory is not None:
        raise ValueError(
            f"{owner._get_name()}: give {which}_model or {which}_model_factory, not both."
        )
    return model if factory is None else factory()

"""A policy over a Transformers model: generates, and scores what was generated."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any, Literal, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from torchrl_data.devices import on_device, on_host
from torchrl_data.keys import ENTROPY, FULL, LOG_PROBS_FULL, UNTEMPERED_LOG_PROBS
from torchrl_data.sampling_masks import SamplingMasks
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_data.token_scorer import TokenScores
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.sampling.distribution import warped_log_softmax
from torchrl_modules.sampling.parameters import SamplingParameters
from torchrl_modules.sampling.token_history import TargetHistory
from torchrl_modules.scoring.packed_attention import PACKED_SDPA, drops_out
from torchrl_modules.scoring.scorer import PackedScorer
from torchrl_modules.scoring.token_distribution import TokenDistribution

from .base import LLMWrapperBase, RowsToScore, rows_to_score, write_scores
from .loading import load_policy_model
from .model_files import local_model


class TransformersWrapper(LLMWrapperBase):
    """Samples from a model of Transformers, and scores packed sequences with it.

    Each is tried on a few short rows when the policy is built, beside the model's own logits of a
    row alone: the fastest way that gives them is taken, and a model without one is refused.

    Args:
        model: a causal language model, or where to load one from: a hub id, a folder or a ``.gguf``
            file (see :func:`~torchrl_modules.local_model`). One that is built already may have
            adapters of PEFT, and be in `DistributedDataParallel` or sharded by `fully_shard`; a
            sharded one scores, and does not sample.
        tokenizer: its tokenizer; loaded beside the model when ``model`` is a string.
        generate: ``True`` to sample in :meth:`forward`, ``False`` to score ``full``.
        device: where a model is loaded to; the accelerator, if there is one, when not given.
        dtype: of the parameters of a model that is loaded, or ``"auto"`` for the checkpoint's;
            float32 when not given, because a step of a usual learning rate changes nothing in most
            parameters of bfloat16.
        attn_implementation: of a model that is loaded, as in Transformers. Another one than
            ``"sdpa"`` is kept, and rows are padded then instead of packed.
        model_kwargs: more arguments for ``from_pretrained``.
        autocast_dtype: sample and score under ``torch.autocast`` of this type, such as bfloat16,
            with parameters of float32.
        head_dtype: of the products that make the logits when scoring, such as float32 for a model
            that computes in bfloat16; ``None`` for the type that it computes in.
        max_model_len: most tokens of a row; the model's own limit when not given.
        micro_batch_tokens: most tokens of one scoring pass when no gradient is needed.
        score_truncated: scores are those of the distribution that is sampled from, top-k, top-p
            and min-p included, so that with the sampler's weights they are the sampler's; a token
            that was drawn is always in the distribution. Where rows have sampling masks, they are
            those of the recorded sets instead. ``False`` leaves no token out. Penalties,
            a bias and ``min_tokens`` count in any case: a turn is a run of scored tokens.
        compile_layers: ``torch.compile`` compiles the layers of the model for packed rows, and its
            norms for all calls: a training pass takes about half the time, and the first one some
            20 s more, unless the compiled code is kept from an earlier run. ``None``: for models of
            at least 100 million weights on a GPU, where they are whole.
        **kwargs: ``processor``, of a vision-language model, for messages with images: loaded beside
            a model that is nothing else when ``model`` is a string, and with one, a model that
            could be loaded without its vision is loaded with it. ``batch_invariant=True``: a row
            has the same log-probs to the bit whatever is drawn or scored beside it, and what is
            scored is what was drawn; in float32 on a CPU, in about 2.5 times the time, see
            :class:`~torchrl_modules.batch_invariance.BatchInvariance`. ``context_group``, such as
            :attr:`.Ranks.context_group`: ranks that share out the tokens of each row that is
            scored; all of them score the same rows, with a model in `DistributedDataParallel` or
            after `fully_shard`. For the others see
            :class:`~torchrl_modules.policies.base.LLMWrapperBase`.

    Raises:
        TypeError: ``model`` is a model and no tokenizer is given, or arguments of loading are; or
            it has adapters of PEFT that are not layers of it, such as prompts.
        ValueError: ``max_model_len`` is above the model's positions, SDPA is asked for where it
            computes something else, or the model can't be scored or sampled from.

    Example:
        >>> from torchrl_envs import ChatEnv
        >>> from torchrl_modules.tiny_model import tiny_qwen3
        >>> model = tiny_qwen3(len(tokenizer))  # or "Qwen/Qwen3-0.6B", which brings its tokenizer
        >>> sampling = {"max_new_tokens": 8, "min_tokens": 8, "temperature": 0.8}
        >>> policy = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling)
        >>> queries = TensorDict({"query": ["hello", "What is 2 + 2?"]}, batch_size=[2])
        >>> batch = policy(ChatEnv(batch_size=(2,)).reset(queries))
        >>> [(ids.dtype, ids.shape) for ids in batch["tokens"].response]
        [(torch.int64, torch.Size([8])), (torch.int64, torch.Size([8]))]
        >>> [log_probs.shape for log_probs in batch["log_probs"].response]
        [torch.Size([8]), torch.Size([8])]
        >>> [int(mask.sum()) for mask in batch["masks"].all_assistant_mask]
        [8, 8]
    """

    def __init__(
        self,
        model: nn.Module | str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        generate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        attn_implementation: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        autocast_dtype: torch.dtype | None = None,
        head_dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        micro_batch_tokens: int | None = None,
        score_truncated: bool = True,
        compile_layers: bool | None = None,
        **kwargs: Any,
    ) -> None:
        processor = kwargs.pop("processor", None)
        batch_invariant = bool(kwargs.pop("batch_invariant", False))
        context_group = kwargs.pop("context_group", None)
        sampling = kwargs.get("generate_kwargs")
        if not isinstance(sampling, SamplingParameters):  # checked before a model is loaded
            kwargs["generate_kwargs"] = SamplingParameters.from_kwargs(sampling or {})
        options = {
            "device": device,
            "dtype": dtype,
            "attn_implementation": attn_implementation,
            "model_kwargs": model_kwargs,
        }
        if isinstance(model, str):
            model, tokenizer, processor = load_policy_model(
                local_model(model), tokenizer, processor, options
            )
        elif given := [name for name, value in options.items() if value is not None]:
            names = ", ".join(f"{name}=" for name in given)
            raise TypeError(
                f"TransformersWrapper: {names} {'apply' if len(given) > 1 else 'applies'} only "
                f"when the wrapper loads the model, and got a {type(model).__name__}. Pass a hub "
                "id or path, or build the model that way."
            )
        if tokenizer is None:
            raise TypeError("TransformersWrapper needs the tokenizer of the model: tokenizer=...")
        images = None if processor is None else ImageProcessor(processor)
        engine = TransformersEngine(
            model,
            max_model_len=max_model_len,
            autocast_dtype=autocast_dtype,
            images=images,
            compile_layers=compile_layers,
            batch_invariant=batch_invariant,
            check=generate,
        )
        super().__init__(engine, tokenizer=tokenizer, **kwargs)
        self.model = model
        self.generate = generate
        self.score_truncated = self._checked_change("score_truncated", score_truncated)
        self.scorer = PackedScorer(
            model,
            micro_batch_tokens=micro_batch_tokens,
            pack=attn_implementation in (None, "sdpa", PACKED_SDPA),
            autocast_dtype=autocast_dtype,
            head_dtype=head_dtype,
            max_model_len=max_model_len,
            images=images,
            compile_layers=compile_layers,
            batch_invariant=batch_invariant,
            context_group=context_group,
        )
        if self.sampling.routed_experts and self.scorer.is_compiled:
            raise ValueError(
                "TransformersWrapper: routed_experts are replayed in layers that are not compiled. "
                "Give compile_layers=False, or leave routed_experts out."
            )

    changeable = LLMWrapperBase.changeable | {"generate", "score_truncated"}

    def _checked_change(self, name: str, value: Any) -> Any:
        if name == "score_truncated" and not value and self.sampling.sampling_mask:
            raise ValueError(
                "TransformersWrapper: sampling_mask records the sets that tokens are scored in, "
                "and score_truncated=False scores over the whole vocabulary. Leave one of them out."
            )
        return super()._checked_change(name, value)

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks take part in every scoring pass: all have to make equally many."""
        return self.scorer.is_distributed

    @property
    def drops_out(self) -> bool:
        """Whether scores differ from pass to pass: the model is in training, and has dropout."""
        return drops_out(cast("PreTrainedModel", self.model))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sample a turn (``generate=True``) or score ``full`` (``generate=False``).

        Args:
            tensordict: ``(input_mode, "prompt")`` to generate; ``(input_mode, "full")`` or
                ``("tokens", "full")``, with the assistant mask if it is known, to score.

        Returns:
            The same TensorDict. Scoring writes ``("log_probs", "full")``, float32, aligned with the
            tokens, 0 where nothing was scored: outside the assistant mask or, without one, outside
            the response (the whole row where no prompt says what the response is); NaN instead of
            the scores of a row that holds a token outside the model's vocabulary; and likewise
            ``("entropy", "full")`` and ``("untempered_log_probs", "full")`` where they were asked
            for.
        """
        if self.generate:
            return super().forward(tensordict)
        rows, scores = self._score_rows(tensordict)
        found = {
            LOG_PROBS_FULL: scores.log_prob,
            (ENTROPY, FULL): scores.entropy,
            (UNTEMPERED_LOG_PROBS, FULL): scores.untempered_log_prob,
        }
        columns = {key: rows.spread(values) for key, values in found.items() if values is not None}
        write_scores(tensordict, rows, columns)
        return tensordict

    def _score_rows(self, batch: TensorDictBase) -> tuple[RowsToScore, TokenScores]:
        """Full rows, and their scores under the distribution that this policy samples from."""
        rows = rows_to_score(batch, self)
        self._make_room()
        scores = self.scorer.score_packed(
            *rows.packed(),
            temperature=self.sampling.temperature or 1.0,
            entropy=self.sampling.entropy,
            truncation=self._truncation,
            untempered=self.sampling.untempered_log_probs,
            images=rows.images,
            sampling_masks=rows.sampling_masks if self.score_truncated else None,
            routed_experts=rows.packed_experts,
        )
        return rows, scores

    def _make_room(self) -> None:
        if torch.is_grad_enabled():
            cast("TransformersEngine", self.engine).make_room()

    @property
    def _truncation(self) -> SamplingParameters:
        if self.score_truncated:
            return self.sampling
        return replace(self.sampling, top_k=0, top_p=1.0, min_p=0.0)

    def score_packed(
        self,
        ids: Tensor,
        lengths: Tensor,
        target_mask: Tensor,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        images: Sequence[Sequence[str]] | None = None,
        sampling_masks: SamplingMasks | None = None,
        routed_experts: Tensor | None = None,
    ) -> TokenScores:
        """See :class:`torchrl_data.TokenScorer`.

        The temperature is the caller's; penalties, top-k, top-p and min-p are those of the sampling
        parameters, the last three unless ``score_truncated`` is off. Sampling masks stand for
        these three.
        """
        self._make_room()
        return self.scorer.score_packed(
            ids,
            lengths,
            target_mask,
            temperature=temperature,
            entropy=entropy,
            truncation=self._truncation,
            images=images,
            sampling_masks=sampling_masks if self.score_truncated else None,
            routed_experts=routed_experts,
        )

    def log_prob(self, tensordict: TensorDictBase) -> Tensor:
        """Log-probs of what :meth:`forward` would score, differentiable; nothing is written.

        Args:
            tensordict: as for :meth:`forward` with ``generate=False``.

        Returns:
            float32 ``[*B, T]`` in nats, 0 where nothing is scored, NaN where it can't be. Ragged
            rows are padded on the right to the longest; padded ones keep their columns.
        """
        rows, scores = self._score_rows(tensordict)
        padded = rows.columns(rows.spread(scores.log_prob))
        return padded.reshape(*tensordict.batch_size, -1)

    def get_dist(
        self, tensordict: TensorDictBase, *, padding_side: Literal["left", "right"] = "right"
    ) -> TokenDistribution:
        """The distributions of what :meth:`forward` would score: memory of K x V logits.

        Args:
            tensordict: as for :meth:`forward` with ``generate=False``.
            padding_side: of ragged rows; padded ones keep their columns.

        Returns:
            One distribution per scored position of the batch ``[*B, T]``, laid out as in
            :meth:`log_prob`; differentiable.
        """
        rows = rows_to_score(tensordict, self)
        if rows.packed_experts is not None:
            raise ValueError(
                "TransformersWrapper.get_dist does not replay routed_experts: use log_prob, or "
                "leave the entry out of the batch."
            )
        ids, lengths, mask = on_host(*rows.packed())
        logits = self.scorer.logits(ids, lengths, mask, rows.images)
        history = TargetHistory.of(ids, lengths, mask).read(
            logits.shape[1], self._truncation, logits.device
        )
        targets = on_device(ids[mask], logits.device)
        masks = rows.sampling_masks if self.score_truncated else None
        if masks is not None:
            masks.check_targets(ids[mask])
        log_p = warped_log_softmax(logits, self._truncation, targets, history, masks)
        columns = rows.columns(rows.scored, padding_side)
        return TokenDistribution(log_p, columns.reshape(*tensordict.batch_size, -1))

    # What TorchRL's losses ask for, of rows that they pad on the left.
    _get_sft_dist = _get_rlhf_dist = partialmethod(get_dist, padding_side="left")

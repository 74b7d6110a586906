"""A language model with the adapters of many training runs."""

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from objectives.batching.packed_batch import PackedBatch
from torchrl_agents.device_defaults import bytes_of_a_token, default_micro_batch_tokens, describe
from torchrl_data import import_package
from torchrl_modules import SamplingParameters
from torchrl_modules.engines.engine import Generation
from torchrl_modules.engines.joined_engine import JoinedEngine
from torchrl_modules.engines.joined_model import CannotJoinError
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.policies.served_weights import check_same_weights
from torchrl_modules.scoring.head_product import plain_head
from torchrl_modules.scoring.scorer import PackedScorer
from torchrl_modules.weights.adapter_weights import AdapterWeights

from .errors import RefusedRequest
from .messages import INSTALL, Example, TopTokens
from .sampling_engine import SamplingEngine
from .token_losses import ScoredTokens

_LOG: Final = logging.getLogger("torchrl_agents")

_DOWN: Final = ".lora_A.weight"
_UP: Final = ".lora_B.weight"
_CPU_TOKENS: Final = 2_048
"""Of a training pass on a CPU."""
_SCORED_TOKENS: Final = 8_192
"""Of a pass without a gradient."""
_DIGEST_VALUES: Final = 256
"""Of each weight, about."""


@dataclass(frozen=True)
class AdapterShape:
    """The layers that have adapters, and their rank.

    Args:
        rank: of the two factors.
        train_attn: layers of attention have one.
        train_mlp: all other linear layers but the head have one.
        train_unembed: the head has one.
    """

    rank: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class AdapterState(NamedTuple):
    """The weights of an adapter, apart from the model."""

    shape: AdapterShape
    tensors: Mapping[str, Tensor]
    """By the names that PEFT gives them, on the host."""


class Gradient(NamedTuple):
    """The result of a training pass."""

    loss: float
    """The sum over all tokens."""
    log_probs: list[Tensor]
    """Of each sequence, float32 ``[N]``, on the host."""


class AdaptedModel:
    """A frozen model, and adapters by name. For one thread.

    Args:
        name: by which clients know it.
        model: a causal language model of Transformers, in evaluation mode from now on.
        tokenizer: of it.
        folder: where clients on this machine find the tokenizer.
        lora_alpha: the product of the factors is multiplied by it, and divided by the rank.
        max_model_len: most tokens of a sequence; the model's own limit when not given.
        micro_batch_tokens: most tokens of one training pass, those that sequences begin with in
            common counted once; ``None``: 2,048 on a CPU, on a GPU as many as its memory holds when
            the first pass is made.
        autocast_dtype: compute in this type, with the weights as they are.

    Raises:
        ImportError: PEFT is missing.
        ValueError: the model can't be sampled from or scored, or has fewer positions.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        folder: str,
        *,
        lora_alpha: float = 32.0,
        max_model_len: int | None = None,
        micro_batch_tokens: int | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        import_package("peft", who="serve-training", install=INSTALL)
        self.name, self.tokenizer, self.folder = name, tokenizer, folder
        self._model = model.requires_grad_(False).eval()
        self.digest = _digest_of(model)
        """Of its frozen weights, by which an adapter knows them again; empty: can't be told."""
        self._lora_alpha = lora_alpha
        self._micro_batch_tokens = micro_batch_tokens
        self._autocast_dtype = autocast_dtype
        self._layers = _linear_layers(model)
        self._wrapped: Any = None
        self._engine = TransformersEngine(
            model, max_model_len=max_model_len, autocast_dtype=autocast_dtype
        )
        self.sampling_engine: SamplingEngine | None = None
        """What draws in place of this model; ``None``: it draws itself."""
        self._joined: dict[tuple[str | None, ...], JoinedEngine | None] = {}
        """What drew last with several adapters at once, by their names."""
        self._scorers: dict[type | None, PackedScorer] = {}
        self._scorer()

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._engine.vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence."""
        if self.sampling_engine is None:
            return self._engine.max_model_len
        return min(self._engine.max_model_len, self.sampling_engine.max_model_len)

    def draw_with(self, engine: SamplingEngine) -> float:
        """Let an engine draw from now on, which has the same weights.

        Args:
            engine: of the same model, without adapters so far.

        Returns:
            How far its log-probs are from this model's, the mean over a few tokens in nats.

        Raises:
            ValueError: it is another model's.
        """
        if engine.vocab_size not in (None, self.vocab_size):
            raise ValueError(
                f"serve-training: {engine.name} has a vocabulary of {engine.vocab_size} tokens, "
                f"{self.name} one of {self.vocab_size}. Give one of the same model."
            )

        def draw(prompt: list[int], params: SamplingParameters) -> Generation:
            (drawn,) = engine.draw(None, [prompt], params, [params.max_new_tokens], [None])
            return drawn

        def score(row: Tensor, first: int) -> Tensor:
            return self.score(None, [row], [first])[0][first:]

        gap = check_same_weights(
            self.tokenizer,
            draw,
            score,
            quantized=engine.quantization is not None,
            engine=f"serve-training: {engine.name}",
            model=self.name,
        )
        if engine.quantization is not None:
            _LOG.warning(
                "%s draws with weights quantised by %s, and %s, which is trained, has whole ones: "
                "log-probs of what it draws are %.2g nats from those of a training pass in the "
                "mean. A loss that weighs the ratio of both (importance_sampling, ppo, cispo) "
                "takes it for a step that was made.",
                *(engine.name, engine.quantization, self.name, gap),
            )
        self.sampling_engine = engine
        return gap

    # Adapters ------------------------------------------------------------------------------------

    def add(self, adapter: str, shape: AdapterShape, seed: int | None = None) -> list[nn.Parameter]:
        """Add an adapter that changes nothing yet, and give its weights.

        Args:
            adapter: its name.
            shape: of it.
            seed: of its first factors.

        Raises:
            RefusedRequest: no layer would have one, or the rank is not positive.
        """
        import peft

        if shape.rank < 1:
            raise RefusedRequest(f"lora_config.rank must be at least 1, got {shape.rank}.")
        config = self._config(shape)
        if not config.target_modules:
            raise RefusedRequest(
                f"lora_config leaves {self.name} no layer to train: train_attn, train_mlp and "
                "train_unembed are all false, or the model has no such linear layer."
            )
        if (shape.train_attn or shape.train_mlp) and not {"attn", "mlp"} & {*self._layers.values()}:
            raise RefusedRequest(
                f"lora_config: the layers of {self.name} can't have adapters, because none of them "
                f"is a linear layer (torch.nn.Linear) but the head. Give train_attn=False and "
                "train_mlp=False to train the head alone, or another model."
            )
        held = nullcontext if self.sampling_engine is None else self.sampling_engine.held
        with held(), torch.random.fork_rng(), warnings.catch_warnings():
            if seed is not None:
                torch.manual_seed(seed)
            # A tied head has an adapter of its own, and the embeddings none: as it is meant.
            warnings.filterwarnings("ignore", ".*tie_word_embeddings.*")
            if self._wrapped is None:
                self._wrapped = peft.get_peft_model(self._model, config, adapter_name=adapter)
            else:
                is_only = not self._wrapped.peft_config
                self._wrapped.add_adapter(adapter, config)
                if is_only:  # the one that was active is gone
                    self._wrapped.set_adapter(adapter)
        marks = f".{adapter}."
        return [value for key, value in self._wrapped.named_parameters() if marks in key]

    def remove(self, adapter: str) -> None:
        """Let go of an adapter."""
        self._joined.clear()
        others = [name for name in self._wrapped.peft_config if name != adapter]
        if others:  # one that there is has to be active
            self._wrapped.set_adapter(others[0])
        self._wrapped.delete_adapter(adapter)

    def weights_of(self, adapter: str, shape: AdapterShape) -> AdapterState:
        """Copy the weights of an adapter to the host."""
        own = self._tensors_of(adapter)
        return AdapterState(shape, {k: v.detach().cpu().clone() for k, v in own.items()})

    def _tensors_of(self, adapter: str) -> dict[str, Tensor]:
        from peft import get_peft_model_state_dict

        return get_peft_model_state_dict(
            self._wrapped, adapter_name=adapter, save_embedding_layers=False
        )

    def set_weights(self, adapter: str, weights: AdapterState) -> None:
        """Overwrite the weights of an adapter.

        Args:
            adapter: its name.
            weights: of the same shape.

        Raises:
            RefusedRequest: they have other names or shapes.
        """
        from peft import set_peft_model_state_dict

        shapes = {key: tuple(value.shape) for key, value in self._tensors_of(adapter).items()}
        given = {key: tuple(value.shape) for key, value in weights.tensors.items()}
        if shapes != given:
            wrong = sorted(key for key in {*shapes, *given} if shapes.get(key) != given.get(key))
            raise RefusedRequest(
                f"The weights are not those of an adapter of {self.name}: {wrong[0]} has shape "
                f"{given.get(wrong[0])}, not {shapes.get(wrong[0])}."
            )
        set_peft_model_state_dict(self._wrapped, dict(weights.tensors), adapter_name=adapter)

    def save(self, weights: AdapterState, folder: Path) -> None:
        """Write weights as PEFT and vLLM load them.

        Args:
            weights: of an adapter of this model.
            folder: is there.
        """
        from safetensors.torch import save_file

        save_file(dict(weights.tensors), folder / "adapter_model.safetensors")
        config = self._config(
            weights.shape, base_model_name_or_path=self.folder, inference_mode=True
        )
        config.save_pretrained(str(folder))

    def for_engine(self, weights: AdapterState) -> AdapterWeights:
        """The weights of an adapter as an engine takes them, by layer, their scale multiplied in.

        Args:
            weights: of an adapter of this model.
        """
        scale = self._lora_alpha / weights.shape.rank
        factors: dict[str, tuple[Tensor, Tensor]] = {}
        for name, down in weights.tensors.items():
            if name.endswith(_DOWN):
                layer = name.removesuffix(_DOWN)
                up = weights.tensors[f"{layer}{_UP}"]
                factors[layer.removeprefix("base_model.model.")] = down, up * scale
        return AdapterWeights(factors)

    def _config(self, shape: AdapterShape, **more: Any) -> Any:
        """Settings of PEFT for an adapter."""
        import peft

        kinds = {"attn": shape.train_attn, "mlp": shape.train_mlp, "unembed": shape.train_unembed}
        alpha: Any = self._lora_alpha  # PEFT divides it
        return peft.LoraConfig(
            r=shape.rank,
            lora_alpha=alpha,
            target_modules=[name for name, kind in self._layers.items() if kinds[kind]],
            task_type="CAUSAL_LM",
            **more,
        )

    @contextmanager
    def _acting(self, adapter: str | None) -> Iterator[None]:
        """One adapter acts, or none."""
        if self._wrapped is None or not self._wrapped.peft_config:
            yield
        elif adapter is None:
            with self._wrapped.disable_adapter():
                yield
        else:
            self._wrapped.set_adapter(adapter)
            yield

    def _scorer(self) -> PackedScorer:
        """The scorer for the head as it is: its first adapter makes it another one."""
        head: Any = plain_head(self._model)
        kind = None if head is None else type(head)
        if kind not in self._scorers:
            self._scorers[kind] = PackedScorer(
                self._model,
                autocast_dtype=self._autocast_dtype,
                micro_batch_tokens=_SCORED_TOKENS,
                max_model_len=self.max_model_len,
            )
        return self._scorers[kind]

    # Training ------------------------------------------------------------------------------------

    def forward_backward(
        self,
        adapter: str,
        examples: Sequence[Example],
        loss: Callable[[ScoredTokens], Tensor],
        *,
        is_forward_only: bool = False,
    ) -> Gradient:
        """Score sequences, and add the gradient of their loss to what the adapter has of it.

        What sequences begin with in common is read once.

        Args:
            adapter: which is trained.
            examples: the sequences.
            loss: of each token.
            is_forward_only: without a gradient.
        """
        batch = _packed(examples)
        total, log_probs = 0.0, []
        with self._acting(adapter), torch.set_grad_enabled(not is_forward_only):
            scorer = self._scorer()
            parts = batch.micro_batches(
                max_tokens=self._tokens_of_a_pass(scorer), count_shared_once=scorer.share_prefixes
            )
            for part in parts:
                inputs = dict(part.entries)
                targets = inputs.pop("targets")
                scored = scorer.score_packed(
                    part.ids, part.lengths, part.target_mask, targets=targets
                ).log_prob
                on = part.targets_on(scored.device)
                inputs = {name: on.entries[name] for name in inputs}
                each = loss(ScoredTokens(scored, inputs, on.target_lengths)).sum()
                if not is_forward_only:
                    each.backward()
                total += float(each.detach())
                own = scored.detach().float().cpu()
                log_probs += own.split(part.target_lengths.tolist())
        return Gradient(total, log_probs)

    def _tokens_of_a_pass(self, scorer: PackedScorer) -> int:
        """Most tokens of a training pass; an adapter acts, without which none would be kept."""
        if self._micro_batch_tokens is None:
            device = describe(self._model.device)
            self._micro_batch_tokens = _CPU_TOKENS
            if device.kind == "cuda":
                num_bytes = bytes_of_a_token(self._model, scorer)
                self._micro_batch_tokens = default_micro_batch_tokens(device, num_bytes)
        return self._micro_batch_tokens

    # Sampling ------------------------------------------------------------------------------------

    def sample(
        self,
        adapters: Sequence[str | None],
        prompts: Sequence[Sequence[int]],
        params: SamplingParameters,
        budgets: Sequence[int],
        seeds: Sequence[int | None],
    ) -> list[Generation]:
        """Draw a sequence for each prompt, whichever adapters they are drawn with.

        Args:
            adapters: which acts, of each; ``None`` for the model as it is.
            prompts: token ids; equal ones with equal adapters are read once.
            params: one distribution for all, see :meth:`with_ends`.
            budgets: most new tokens of each.
            seeds: of each; all ``None`` or none.
        """
        names = list(dict.fromkeys(adapters))
        own_seeds = None if not seeds or seeds[0] is None else list(seeds)
        joined = self._joined_for(tuple(names)) if len(names) > 1 else None
        if joined is not None:
            models = [names.index(name) for name in adapters]
            return joined.generate(
                prompts, params, max_new_tokens=list(budgets), seeds=own_seeds, models=models
            )
        drawn: dict[int, Generation] = {}
        for name in names:
            own = [row for row, its in enumerate(adapters) if its == name]
            with self._acting(name):
                given = self._engine.generate(
                    [prompts[row] for row in own],
                    params,
                    max_new_tokens=[budgets[row] for row in own],
                    seeds=own_seeds and [own_seeds[row] for row in own],
                )
            drawn |= zip(own, given, strict=True)
        return [drawn[row] for row in range(len(prompts))]

    def _joined_for(self, names: tuple[str | None, ...]) -> JoinedEngine | None:
        """Draws with several adapters at once, if the model can be drawn with so."""
        if names not in self._joined:
            self._joined.clear()
            try:
                self._joined[names] = JoinedEngine(
                    [self._engine] * len(names),
                    acting=[() if name is None else (name,) for name in names],
                    alone=lambda number: self._acting(names[number]),
                )
            except CannotJoinError as error:
                _LOG.debug("%s: adapters are drawn with one by one: %s", self.name, error)
                self._joined[names] = None
        return self._joined[names]

    def with_ends(self, params: SamplingParameters) -> SamplingParameters:
        """Fill in what ends a sequence: without tokens that do, those of the model and tokenizer.

        Args:
            params: as a client gave them.
        """
        if params.stop_token_ids is None:
            own: Any = self.tokenizer.eos_token_id
            ends = dict.fromkeys([*self._engine.end_token_ids, *([] if own is None else [own])])
            params = replace(params, stop_token_ids=tuple(ends))
        return params.with_tokenizer(self.tokenizer)

    @torch.no_grad()
    def score(
        self, adapter: str | None, rows: Sequence[Tensor], first: Sequence[int]
    ) -> list[Tensor]:
        """Log-prob of each token of rows but their first, under the model's own softmax.

        Args:
            adapter: which acts; ``None`` for the model as it is.
            rows: int64 ``[N]`` each.
            first: from which token on, of each row, at least 1.

        Returns:
            Of each row float32 ``[N]``, in nats, NaN before its first token.
        """
        lengths = torch.tensor([len(row) for row in rows])
        mask = torch.cat(
            [torch.arange(len(row)) >= at for row, at in zip(rows, first, strict=True)]
        )
        with self._acting(adapter):
            scored = self._scorer().score_packed(torch.cat(list(rows)), lengths, mask).log_prob
        values = torch.full(mask.shape, torch.nan)
        values[mask] = scored.float().cpu()
        return list(values.split(lengths.tolist()))

    @torch.no_grad()
    def top(self, adapter: str | None, row: Tensor, first: int, k: int) -> TopTokens:
        """The most likely tokens at each place of a row, under the model's own softmax.

        Args:
            adapter: which acts; ``None`` for the model as it is.
            row: int64 ``[N]``.
            first: from which token on, at least 1; before it there are none.
            k: how many.

        Returns:
            ``[N, k]``.
        """
        ids = torch.zeros(len(row), k, dtype=torch.int64)
        log_probs = torch.full((len(row), k), -torch.inf)
        mask = torch.arange(len(row)) >= first
        with self._acting(adapter):
            logits = self._scorer().logits(row, torch.tensor([len(row)]), mask)
        best = logits.log_softmax(-1).topk(min(k, logits.shape[-1]), -1)
        ids[mask, : best.indices.shape[1]] = best.indices.cpu()
        log_probs[mask, : best.values.shape[1]] = best.values.cpu()
        return TopTokens(ids, log_probs)


def _digest_of(model: nn.Module) -> str:
    """Return a digest of some values of every weight; empty in float16.

    The values are rounded to bfloat16: the same checkpoint has it in float32, too.
    """
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        if weight.dtype == torch.float16:
            return ""
        some = weight.detach().flatten()[:: max(1, weight.numel() // _DIGEST_VALUES)]
        digest.update(name.encode() + some.to(torch.bfloat16).float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _linear_layers(model: PreTrainedModel) -> dict[str, str]:
    """Linear layers by their names, and what each is: ``attn``, ``mlp`` or ``unembed``."""
    head: Any = model.get_output_embeddings()
    kinds = {}
    for name, module in model.named_modules():
        if module is head:
            kinds[name] = "unembed"
        elif isinstance(module, nn.Linear):
            parts = name.split(".")
            is_router = parts[-1] in ("gate", "router")
            if not is_router:
                kinds[name] = (
                    "attn" if any("attn" in p or "attention" in p for p in parts) else "mlp"
                )
    return kinds


def _packed(examples: Sequence[Example]) -> PackedBatch:
    """Sequences one after the other: each ends with its last target, which nothing reads."""
    ids = torch.cat([torch.cat([each.ids, each.targets[-1:]]) for each in examples])
    counts = torch.tensor([len(each.ids) for each in examples])
    lengths = counts + 1
    mask = torch.ones(len(ids), dtype=torch.bool)
    mask[lengths.cumsum(0) - lengths] = False
    names = examples[0].inputs
    entries = {name: torch.cat([each.inputs[name] for each in examples]) for name in names}
    entries["targets"] = torch.cat([each.targets for each in examples])
    return PackedBatch(
        ids=ids,
        lengths=lengths,
        target_mask=mask,
        target_lengths=counts,
        sampled=torch.ones(int(counts.sum()), dtype=torch.bool),
        entries=entries,
        left_out=torch.zeros_like(lengths, dtype=torch.bool),
    )

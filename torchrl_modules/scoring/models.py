"""What a scorer has to know of a model.

Its wrappers, shards and positions, whether it reads as it should, and the hidden states of rows:
packed, padded, or with images.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from transformers import PreTrainedModel

from torchrl_data.devices import on_device
from torchrl_data.images import noise_image
from torchrl_data.ragged.packed import cumulative_lengths, pack, pad, sequence_index
from torchrl_data.routed_experts import unknown_expert
from torchrl_data.templates.image_processor import ImageProcessor
from torchrl_modules.transformers_releases import forward_parameters

from .expert_routes import ExpertRoutes, replayed_layers
from .packed_attention import PackedInputLost, build_trie, can_share, no_mask, packed_input

# Models inside wrappers: PEFT, `DistributedDataParallel`, `fully_shard`, `replicate`.
#
# What a wrapper does (gather shards, reduce gradients) happens in the hooks of the outermost
# module's forward. Scoring runs parts of a model, so for such a model it runs them inside that
# forward. PEFT is not imported: a model that has adapters has done it.

T = TypeVar("T")
SPLIT_OVER: Final = "_tp_size"
"""Attribute in which Transformers writes down how many ranks compute a matrix of a model."""
SPLIT_HERE: Final = "_is_split_here"
"""Attribute of a model that :func:`~torchrl_modules.split_model` has split."""
_is_inside: ContextVar[bool] = ContextVar("is_inside", default=False)


def unwrapped(model: Any, *, who: str) -> PreTrainedModel:
    """The causal language model inside its wrappers, which computes what they do."""
    if isinstance(model, (nn.DataParallel, _of_fsdp("FullyShardedDataParallel"))):
        raise TypeError(
            f"{who}: {type(model).__name__} cuts the inputs or the parameters of a model up in a "
            "way that can't be scored. Use DistributedDataParallel(model) or fully_shard(model)."
        )
    if hasattr(model, "_orig_mod"):
        raise TypeError(
            f"{who}: torch.compile(model) would take no effect, because rows go through the "
            "model's decoder and not through its forward. Give the model itself."
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return unwrapped(model.module, who=who)
    # Adapters such as LoRA are layers of the model inside, so that it gives the PEFT model's logits
    # and gradients by itself.
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    for config in model.peft_config.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        is_layers = not config.is_prompt_learning and kind != "POLY"
        if not is_layers or getattr(config, "alora_invocation_tokens", None):
            raise TypeError(
                f"{type(model).__name__} has adapters of the kind {'aLoRA' if is_layers else kind},"
                " which are not layers of the model. Train one that is, such as LoRA."
            )
    return model.get_base_model()


def without_ddp(model: nn.Module) -> nn.Module:
    """The module inside `DistributedDataParallel`; another one is given back."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def is_distributed(model: nn.Module) -> bool:
    """Whether a model's forward does what other processes take part in."""
    if isinstance(model, nn.parallel.DistributedDataParallel) or is_sharded(model):
        return True
    if is_split(model):
        return True
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")
    return composable is not None and composable.replicate.state(model) is not None


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a model as a whole."""
    return isinstance(model, _of_fsdp("FSDPModule"))


def is_split(model: Any) -> bool:
    """Whether ranks compute parts of one layer of a model."""
    return (getattr(model, SPLIT_OVER, None) or 1) > 1


def _of_fsdp(name: str) -> Any:
    """A class of FSDP, which is not imported: a model that is sharded has done it."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, ())


def run_inside(model: nn.Module, function: Callable[[], T]) -> T:
    """Call a function within the forward of a model, so that the forward's hooks see it."""
    if not is_distributed(model):
        return function()
    inside = without_ddp(model)
    own = vars(inside).get("forward")

    def forward(*_: Any, **__: Any) -> T:
        with _forward_is(inside, own):
            token = _is_inside.set(True)
            try:
                return function()
            finally:
                _is_inside.reset(token)

    with _forward_is(inside, forward):
        result = model()
    if is_sharded(model) and not torch.is_grad_enabled():
        # No backward pass will do it, and an optimizer built now would hold the whole parameters.
        sharded: Any = model
        sharded.reshard()
    return result


def call(model: nn.Module, **inputs: Any) -> Any:
    """Call a model; within its own forward (:func:`run_inside`) its hooks have been called already.

    Args:
        model: the causal language model inside the wrappers.
        **inputs: of its forward.
    """
    return model.forward(**inputs) if _is_inside.get() else model(**inputs)


@contextmanager
def _forward_is(module: nn.Module, function: Callable[..., Any] | None) -> Iterator[None]:
    """Within, a module has this forward; ``None`` for that of its class."""
    own = vars(module)
    before = own.pop("forward", None)
    if function is not None:
        own["forward"] = function
    try:
        yield
    finally:
        own.pop("forward", None)
        if before is not None:
            own["forward"] = before


def acting_adapters(model: nn.Module) -> tuple[tuple[bool, tuple[Any, ...]], ...]:
    """Of each layer with adapters of PEFT, whether they are off, and which act when they are not.

    Args:
        model: of PEFT, or any other one.
    """
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return ()
    layers: list[Any] = list(model.modules())
    return tuple(
        (bool(layer.disable_adapters), tuple(layer.active_adapters))
        for layer in layers
        if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer)
    )


def precision(model: PreTrainedModel, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """What a model computes in: ``torch.autocast`` of a type, or its own type without one."""
    return nullcontext() if dtype is None else torch.autocast(model.device.type, dtype=dtype)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Inside, a model is in evaluation mode; afterwards each of its modules is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def check_wrapped_whole(model: nn.Module, *, who: str) -> None:
    """Refuse a model of which only parts are sharded or replicated: the rest would not be reduced.

    Raises:
        TypeError: names such a part.
    """
    if is_split(model) and not getattr(model, SPLIT_HERE, False):
        # Of a second micro-batch it would count the gradients of norms of the first one again.
        raise TypeError(
            f"{who}: {type(model).__name__} was split by Transformers itself "
            "(distributed_config=), whose gradients add up wrongly over micro-batches. Load it "
            "whole, and give it to split_model(model, tensor_parallel_size=...)."
        )
    if is_distributed(model):
        return
    for name, part in model.named_modules():
        if name and is_distributed(part):
            raise TypeError(
                f"{who}: {name} of {type(model).__name__} is sharded or replicated, but not the "
                "model, so that the gradients of the rest would stay different on every rank. Call "
                "fully_shard(model) last, on the very model that is given."
            )


# Rotary embeddings whose factors change with the length of a row (LongRoPE).
#
# Transformers picks the factors of a whole batch by its longest row, so a row would depend on its
# neighbours, and a token on what comes after it: nothing that can be trained. The factors are fixed
# once instead, by the longest row there may be, as vLLM does.

_BY_LENGTH: Final = "longrope"
_LONG: Final = "longrope with its long factors"


def settle_rope_factors(
    model: PreTrainedModel, max_model_len: int | None, *, who: str
) -> int | None:
    """Fix the factors of a model."""
    # model: changed in place where rows may be longer than it was pretrained on: it computes with
    # its long factors from now on, short rows too.
    # Gives the longest row that the factors are for; `None` where it makes no difference.
    modules: list[Any] = list(model.modules())
    changing = [m for m in modules if getattr(m, "rope_type", None) in (_BY_LENGTH, _LONG)]
    if not changing:
        return None
    limits = [m.config.rope_parameters["original_max_position_embeddings"] for m in changing]
    limit, name = min(limits), type(model).__name__
    if max_model_len is None:
        raise ValueError(
            f"{who}: {name} computes rows of more than {limit} tokens with other rotary factors "
            "(longrope), so a token's log-prob would depend on how its row goes on. Give "
            f"max_model_len: up to {limit} the short factors are used, above it the long ones for "
            "every row. vLLM does the same with its max_model_len; give both the same side."
        )
    if max_model_len <= limit:
        if any(module.rope_type == _LONG for module in changing):
            raise ValueError(
                f"{who}: max_model_len={max_model_len} is for the short rotary factors of {name}, "
                "but another policy has set this model to its long ones."
            )
        return limit
    for module, original in zip(changing, limits, strict=True):
        if module.rope_type == _BY_LENGTH:
            # Its own code sets the factors for this length; under another name it leaves them.
            device = module.inv_freq.device
            module(torch.zeros(1, 1, 1, device=device), torch.tensor([[original]], device=device))
            module.rope_type = _LONG
    return None


# Whether a model is read right: tried on a few short rows, beside the model's own logits.
#
# Architectures differ in what comes before and after the head, in where positions begin, in what
# joins tokens beside attention. Instead of a list of them, a model is tried once, when a scorer or
# an engine is built on it.
#
# Shape legend: L tokens of a row.

_LENGTHS: Final = (9, 5, 9, 6)
"""The second row is the beginning of the first, the third begins like it."""
_NUM_SHARED: Final = 4


class Difference(NamedTuple):
    """How far log-probs of the same tokens lie apart, in nats."""

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
) -> Trial:
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
    tf32 = model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    is_exact = model.dtype in (torch.float32, torch.float64) and not tf32
    tolerance = Difference(5e-4, 1e-4) if is_exact else Difference(torch.inf, 0.1)
    return Trial(rows, log_probs, tolerance, images)


def run_trial(model: PreTrainedModel, *, who: str) -> Trial:
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
    trial: Trial,
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


# How packed rows go through a model: what they must be, and which tokens it reads together.
#
# Shape legend: N packed tokens, B sequences, T tokens of the longest, K target tokens, D hidden
# size, V vocabulary.


class Layout(Enum):
    """Which tokens a model reads together, the fastest first."""

    PACKED = "packed"
    """All rows one after the other, what they begin with in common once."""
    PADDED = "padded"
    """Rows padded on the right, with a mask."""
    BY_LENGTH = "by length"
    """Rows of one length at a time, as the model computes a row alone."""


class Targets(NamedTuple):
    """What is to be predicted, and from where; on the host."""

    ids: Tensor
    """int64 ``[N]``."""
    starts: Tensor
    """int64 ``[B]``, of each row in the packed tokens."""
    ends: Tensor
    """int64 ``[B]``: this many tokens of each row have to be read."""
    rows: Tensor
    """int64 ``[K]``: the row of each target."""
    positions: Tensor
    """int64 ``[K]``, in the row, of the token that predicts each target."""
    lengths: Tensor
    """int64 ``[B]``."""

    def beginnings(self, rows: Tensor) -> list[Tensor]:
        """The tokens of some rows that have to be read."""
        starts, ends = self.starts[rows].tolist(), self.ends[rows].tolist()
        return [self.ids[a : a + n] for a, n in zip(starts, ends, strict=True)]


def targets_of(ids: Tensor, lengths: Tensor, target_mask: Tensor) -> Targets:
    """The targets of packed rows."""
    # ids: int64 [N]; lengths: int64 [B]; target_mask: bool [N]; no first token of a row.
    starts = cumulative_lengths(lengths)[:-1]
    at = torch.from_numpy(np.flatnonzero(target_mask.numpy()))
    rows = sequence_index(lengths)[at]
    # The token at position t is predicted by the hidden state at t - 1, and what comes after the
    # predictor of a row's last target is needed by nobody.
    positions = at - starts[rows] - 1
    ends = torch.zeros_like(lengths).scatter_reduce(0, rows, positions + 1, "amax")
    return Targets(ids, starts, ends, rows, positions, lengths)


def check_packed(
    ids: Tensor,
    lengths: Tensor,
    target_mask: Tensor,
    vocab_size: int,
    processor: ImageProcessor | None,
    images: Sequence[Sequence[str]] | None,
) -> None:
    """Check packed sequences, their targets, and that they have the images of their tokens."""
    if ids.ndim != 1 or ids.shape != target_mask.shape or int(lengths.sum()) != len(ids):
        raise ValueError(
            f"score_packed takes ids [N], lengths that sum to N and a mask [N]; got ids "
            f"{tuple(ids.shape)}, lengths that sum to {int(lengths.sum())}, mask "
            f"{tuple(target_mask.shape)}."
        )
    if bool((lengths < 1).any()):
        raise ValueError(f"score_packed: a sequence is empty; lengths are {lengths.tolist()}.")
    starts = cumulative_lengths(lengths)[:-1].to(target_mask.device)
    if bool(target_mask[starts].any()):
        raise ValueError(
            "score_packed: the first token of a sequence is a target, but nothing comes before "
            "it to predict it."
        )
    if processor is None and images and any(images):
        raise ValueError(
            "score_packed: the sequences have images, and the scorer reads none. Give it the "
            "processor of the vision-language model: TransformersWrapper(processor=...)."
        )
    if processor is not None and (images is not None or bool((ids == processor.token_id).any())):
        rows = ids.split(lengths.tolist())
        for i, (row, its) in enumerate(zip(rows, images or [[]] * len(rows), strict=True)):
            if fault := processor.fault(row, its):
                raise ValueError(
                    f"score_packed: sequence {i} can't be scored: {fault}. A batch keeps them in "
                    "'images', which a loss hands on."
                )
    unknown = (ids < 0) | (ids >= vocab_size)
    if bool(unknown.any()):
        at = int(unknown.nonzero()[0])
        row = int(sequence_index(lengths)[at])
        raise ValueError(
            f"score_packed: token {at - int(lengths[:row].sum())} of sequence {row} has the id "
            f"{int(ids[at])}, but the model's vocabulary ends at {vocab_size - 1}. Was it encoded "
            "with another tokenizer?"
        )


@dataclass(eq=False)
class ModelReader:
    """Reads packed rows with a model, and gives what predicts their targets."""

    model: PreTrainedModel
    layout: Layout
    head: nn.Linear | None
    share_prefixes: bool = True

    def __post_init__(self) -> None:
        takes = forward_parameters(self.model)
        any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes.values())
        self._no_cache = {"use_cache": False} if any_name or "use_cache" in takes else {}
        self._picks_logits = "logits_to_keep" in takes

    def read(self, targets: Targets, experts: Tensor | None = None) -> Tensor:
        """Hidden states ``[K, D]`` that predict the targets, or float32 logits ``[K, V]``.

        Args:
            targets: what is to be predicted.
            experts: those to which the packed tokens are sent, ``[N, L, S]``; each router chooses
                when not given.
        """
        inputs: dict[str, Any]
        if self.layout is Layout.PACKED:
            share = self.share_prefixes and can_share(self.model, int(targets.ends.max()))
            # Tokens are read once for several rows where they went to the same experts there.
            keys = targets.ids if experts is None else _ids_with_experts(targets.ids, experts)
            trie = build_trie(
                keys, targets.lengths, targets.ends, share=share, device=self.model.device
            )
            if experts is not None:
                read = (trie.node >= 0).nonzero().squeeze(1)
                first = torch.zeros(len(trie.ids), dtype=torch.int64)
                first[trie.node[read]] = read
                ids = on_device(targets.ids[first], self.model.device)
                trie, experts = replace(trie, ids=ids), experts[first]
            at = trie.node[targets.starts[targets.rows] + targets.positions]
            inputs = {"input_ids": trie.ids[None], "position_ids": trie.positions[None]}
            if (nothing := no_mask(self.model.device)) is not None:
                inputs["attention_mask"] = nothing
            with packed_input():
                return self.pick({**inputs, "trie": trie}, torch.zeros_like(at), at, experts)
        if self.layout is Layout.PADDED:
            used = targets.ends.nonzero().squeeze(1)
            place = torch.zeros_like(targets.ends)
            place[used] = torch.arange(len(used))
            rows = targets.beginnings(used)
            mask = pad([torch.ones_like(row) for row in rows], value=0)
            inputs = {"input_ids": pad(rows, value=0), "attention_mask": mask}
            if experts is not None:
                experts = _padded_experts(experts, targets, used)
            return self.pick(inputs, place[targets.rows], targets.positions, experts)
        parts, order = [], []
        for end in targets.ends[targets.ends > 0].unique():
            used = (targets.ends == end).nonzero().squeeze(1)
            rows = torch.stack(targets.beginnings(used))
            mine = torch.isin(targets.rows, used).nonzero().squeeze(1)
            place = torch.searchsorted(used, targets.rows[mine])
            own = None if experts is None else _padded_experts(experts, targets, used)
            parts.append(self.pick({"input_ids": rows}, place, targets.positions[mine], own))
            order.append(mine)
        return torch.cat(parts)[on_device(torch.cat(order).argsort(), self.model.device)]

    def pick(
        self, inputs: dict[str, Any], rows: Tensor, columns: Tensor, experts: Tensor | None = None
    ) -> Tensor:
        """What the model gives at some rows and columns of its input, ``[K, ...]``."""
        if experts is not None:
            replay = replayed_layers(experts)
            with ExpertRoutes(self.model, replay, margins=False) as routes:
                picked = self.pick(inputs, rows, columns)
            if len(routes.layers) != len(replay):
                raise ValueError(
                    f"score_packed: routed_experts are of {len(replay)} layers, and "
                    f"{type(self.model).__name__} has {len(routes.layers)} with experts. Were they "
                    "recorded with another model?"
                )
            return picked
        device = self.model.device
        for name in ("input_ids", "attention_mask"):
            if name in inputs:
                inputs[name] = on_device(inputs[name], device)
        if self.head is not None:
            outputs = self.model.base_model(**inputs, **self._no_cache).last_hidden_state
        else:
            if self._picks_logits:
                kept, columns = columns.unique(return_inverse=True)
                inputs["logits_to_keep"] = on_device(kept, device)
            outputs = call(self.model, **inputs, **self._no_cache).logits.float()
        # One index and not two: its backward pass adds in a fixed order.
        index = on_device(rows * outputs.shape[1] + columns, device)
        return outputs.flatten(0, 1).index_select(0, index)


def _ids_with_experts(ids: Tensor, experts: Tensor) -> Tensor:
    """A number for each packed token, the same for those alike in id and experts, int64 ``[N]``."""
    columns = torch.cat([ids[:, None], experts.flatten(1).long()], 1)
    return columns.unique(dim=0, return_inverse=True)[1]


def _padded_experts(experts: Tensor, targets: Targets, rows: Tensor) -> Tensor:
    """Experts of some rows, padded on the right as they are: ``[rows x T, L, S]``."""
    starts, ends = targets.starts[rows].tolist(), targets.ends[rows].tolist()
    own = [experts[a : a + n] for a, n in zip(starts, ends, strict=True)]
    unknown = unknown_expert(experts.dtype)
    padded = torch.nn.utils.rnn.pad_sequence(own, batch_first=True, padding_value=unknown)
    return padded.flatten(0, 1)


def plain_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head, if the logits may be :func:`head_product` of the decoder's output, nothing else."""
    head: Any = model.get_output_embeddings()
    # A head inside another module comes after something else; a model may be its own base.
    is_last = any(child is head for child in model.children()) and model.base_model is not model
    peft: Any = sys.modules.get("peft")
    inside = head
    if peft is not None and type(head) is peft.utils.ModulesToSaveWrapper:
        inside = head.original_module
    elif peft is not None and _is_plain_lora(peft, head):
        inside = head.base_layer
    return head if is_last and type(inside) is nn.Linear else None


def _is_plain_lora(peft: Any, head: Any) -> bool:
    """Whether a layer adds ``B @ A @ x`` to its own product, and nothing else."""
    return (
        type(head) is peft.tuners.lora.Linear
        and not head.fan_in_fan_out
        and not head.lora_variant
        and all(type(each) is nn.Identity for each in head.lora_dropout.values())
        and not any(head.lora_bias.values())
    )


class HeadProduct(NamedTuple):
    """What the logits are a product of: ``hidden @ weight.T + bias``."""

    hidden: Tensor
    """``[K, D]``, or ``[K, D + R]`` with adapters of rank R in all."""
    weight: Tensor
    """``[V, D]``, or ``[V, D + R]``."""
    bias: Tensor | None


def head_product(head: nn.Linear, hidden: Tensor) -> HeadProduct:
    """Return the factors of the logits.

    Adapters of LoRA that act on the head are further columns, so that no logits need be held:
    ``x @ W.T + s (x @ A.T) @ B.T`` is ``[x, s x @ A.T] @ [W, B].T``.

    Args:
        head: by :func:`plain_head`.
        hidden: ``[K, D]``, the decoder's output.
    """
    lora: Any = head
    peft: Any = sys.modules.get("peft")
    is_lora = peft is not None and type(head) is peft.tuners.lora.Linear
    acting = []
    if is_lora and not lora.disable_adapters and not lora.merged:
        acting = [name for name in lora.active_adapters if name in lora.lora_A]
    parts, columns = [hidden], [lora.weight]
    for name in acting:
        down, up = lora.lora_A[name].weight, lora.lora_B[name].weight
        part = nn.functional.linear(hidden.to(down.dtype), down) * lora.scaling[name]
        parts.append(part.to(hidden.dtype))
        columns.append(up.to(lora.weight.dtype))
    if not acting:
        return HeadProduct(hidden, lora.weight, lora.bias)
    return HeadProduct(torch.cat(parts, 1), torch.cat(columns, 1), lora.bias)


# Rows with images, read by a model's own forward: those of one length and shape together.
#
# Shape legend: N packed tokens, B sequences, K target tokens, L tokens of a row, V vocabulary.


def alike(
    processor: ImageProcessor, lengths: Sequence[int], images: Sequence[Sequence[str]]
) -> list[list[int]]:
    """Rows that can be one batch: of one length, with images of one shape."""
    groups: dict[Any, list[int]] = {}
    for row, (length, its) in enumerate(zip(lengths, images, strict=True)):
        groups.setdefault((length, processor.shape(its)), []).append(row)
    return list(groups.values())


def read_with_images(
    reader: ModelReader,
    processor: ImageProcessor,
    packed: tuple[Tensor, Tensor, Tensor],
    images: Sequence[Sequence[str]],
) -> Tensor:
    """What predicts the targets, ``[K, ...]``; rows without images are read as ever."""
    # packed: ids [N], lengths [B], target mask [N], on the host.
    # images: of each row, base 64; perhaps none.
    ids, lengths, mask = packed
    sequence = sequence_index(lengths)
    rows_of_targets = sequence[mask]
    has_images = torch.tensor([bool(its) for its in images])
    parts, places = [], []
    plain = ~has_images[sequence]
    if bool(mask[plain].any()):
        targets = targets_of(ids[plain], lengths[~has_images], mask[plain])
        parts.append(reader.read(targets))
        places.append((~has_images[rows_of_targets]).nonzero().squeeze(1))
    with_images: list[int] = has_images.nonzero().squeeze(1).tolist()
    rows, masks = ids.split(lengths.tolist()), mask.split(lengths.tolist())
    with own_positions(reader.model):
        for group in alike(
            processor, [len(rows[i]) for i in with_images], [images[i] for i in with_images]
        ):
            members = [with_images[k] for k in group]
            # The token at position t is predicted by what was read at t - 1.
            at = torch.stack([masks[i][1:] for i in members]).nonzero()
            if not len(at):
                continue
            stacked = on_device(torch.stack([rows[i] for i in members]), reader.model.device)
            media = model_inputs(reader.model, processor, stacked, [images[i] for i in members])
            parts.append(reader.pick({"input_ids": stacked, **media}, at[:, 0], at[:, 1]))
            places += [(rows_of_targets == i).nonzero().squeeze(1) for i in members]
    return torch.cat(parts)[on_device(torch.cat(places).argsort(), reader.model.device)]


def model_inputs(
    model: PreTrainedModel, processor: ImageProcessor, ids: Tensor, images: Sequence[Sequence[str]]
) -> dict[str, Tensor]:
    """What a model takes beside token ids ``[B, L]``, in its precision."""
    return {
        name: value.to(model.dtype) if value.is_floating_point() else value
        for name, value in processor.inputs(ids, images).items()
    }


class RowPositions:
    """What a model keeps of the positions of the rows that it read last, beside its cache.

    Models with positions in three dimensions count on from where the images ended.
    """

    def __init__(self, model: nn.Module) -> None:
        self._holders: list[Any] = [m for m in model.modules() if hasattr(m, "rope_deltas")]

    def take(self, index: Tensor) -> None:
        """Go on with some of the rows."""
        for holder in self._holders:
            if isinstance(holder.rope_deltas, Tensor):
                holder.rope_deltas = holder.rope_deltas[index]

    def forget(self) -> None:
        """The next rows have positions of their own."""
        for holder in self._holders:
            holder.rope_deltas = None


@contextmanager
def own_positions(model: nn.Module) -> Iterator[RowPositions]:
    """Inside, rows with images are read; others that come later are not placed like them."""
    positions = RowPositions(model)
    try:
        yield positions
    finally:
        positions.forget()


def run_image_trial(model: PreTrainedModel, processor: ImageProcessor, *, who: str) -> Trial:
    """Try a model's own forward on rows with images, one at a time."""
    # The first two rows differ in their images alone.
    name = type(model).__name__
    if "pixel_values" not in forward_parameters(model):
        raise TypeError(
            f"{who}: the forward of {name} takes no pixel_values, so it reads no images. Leave "
            "processor= out, or load the model with AutoModelForImageTextToText."
        )
    images = [[noise_image(seed)] for seed in (0, 1, 0)]
    text = trial_rows(model)
    rows = [
        torch.cat([words[:3], words.new_tensor(processor.process(its).ids), words[3:]])
        for words, its in zip((text[0], text[0], text[1]), images, strict=True)
    ]
    with evaluation_mode(model), own_positions(model) as positions:

        def inputs(i: int) -> dict[str, Tensor]:
            positions.forget()
            return model_inputs(model, processor, rows[i][None], [images[i]])

        failure = (
            f"{who}: the forward of {name} fails for a row with an image as "
            f"{type(processor.processor).__name__} processes it (do they belong together?)"
        )
        return own_log_probs(model, rows, inputs, failure, images)


@torch.no_grad()
def check_image_reading(reader: ModelReader, processor: ImageProcessor, *, who: str) -> None:
    """Check that rows with images, read together, get what the model says of each alone."""
    model = reader.model
    trial = run_image_trial(model, processor, who=who)
    ids, lengths = pack([row.cpu() for row in trial.rows])
    mask = torch.cat([torch.arange(len(row)) >= len(row) - 2 for row in trial.rows])
    with evaluation_mode(model):
        outputs = read_with_images(reader, processor, (ids, lengths, mask), trial.images)
        logits = outputs if reader.head is None else reader.head(outputs)
    targets = on_device(ids[mask], logits.device)
    log_p = logits.double().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    difference = trial.difference(log_p.split(2))
    if not trial.allows(difference):
        raise ValueError(
            f"{who}: rows with images that {type(model).__name__} reads together get other "
            f"log-probs than each alone: off by {difference}."
        )

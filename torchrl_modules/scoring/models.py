"""What a scorer has to know of a model.

Its wrappers, its shards, its positions, and whether it reads as it should.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, TypeVar

import torch
import torch.distributed
from torch import Tensor, nn
from transformers import PreTrainedModel

# Models inside wrappers: PEFT, `DistributedDataParallel`, `fully_shard`, `replicate`.
#
# What a wrapper does (gather shards, reduce gradients) happens in the hooks of the outermost
# module's forward. Scoring runs parts of a model, so for such a model it runs them inside that
# forward. PEFT is not imported: a model that has adapters has done it.

T = TypeVar("T")
_is_inside: ContextVar[bool] = ContextVar("is_inside", default=False)


def unwrapped(model: Any, *, who: str) -> PreTrainedModel:
    """The causal language model inside."""
    if isinstance(model, nn.DataParallel) or _is(model, "FullyShardedDataParallel"):
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
    return model_inside(model)


def without_ddp(model: nn.Module) -> nn.Module:
    """The module inside `DistributedDataParallel`; another one is given back."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def is_distributed(model: nn.Module) -> bool:
    """Whether a model's forward does what other processes take part in."""
    return (
        isinstance(model, nn.parallel.DistributedDataParallel)
        or is_sharded(model)
        or _is_replicated(model)
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a model as a whole."""
    return _is(model, "FSDPModule")


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


def _is(model: Any, name: str) -> bool:
    """Of a class of FSDP, which is not imported: a model that is sharded has done it."""
    cls = getattr(sys.modules.get("torch.distributed.fsdp"), name, None)
    return cls is not None and isinstance(model, cls)


def _is_replicated(model: nn.Module) -> bool:
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")
    return composable is not None and composable.replicate.state(model) is not None


def model_inside(model: Any) -> PreTrainedModel:
    """The causal language model that computes what a PEFT model does."""
    # Adapters such as LoRA are layers of the model inside, so that it gives the PEFT model's logits
    # and gradients by itself.
    peft: Any = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    for config in model.peft_config.values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        if config.is_prompt_learning or kind == "POLY":
            what = kind
        elif getattr(config, "alora_invocation_tokens", None):
            what = "aLoRA"
        else:
            continue
        raise TypeError(
            f"{type(model).__name__} has adapters of the kind {what}, which are not layers of the "
            "model. Train one that is, such as LoRA."
        )
    return model.get_base_model()


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


def is_linear(module: Any) -> bool:
    """Whether a module computes ``x @ weight.T + bias`` with its own ``weight`` and ``bias``."""
    peft: Any = sys.modules.get("peft")
    if peft is not None and type(module) is peft.utils.ModulesToSaveWrapper:
        module = module.original_module
    return type(module) is nn.Linear


def draws_dropout(model: nn.Module) -> bool:
    """Whether a module of the model leaves values out at random now."""
    return any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0
        for module in model.modules()
    )


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


# What ranks that train a model together have to do alike.


def check_wrapped_whole(model: nn.Module, *, who: str) -> None:
    """Refuse a model of which only parts are sharded or replicated: the rest would not be reduced.

    Raises:
        TypeError: names such a part.
    """
    if is_distributed(model):
        return
    for name, part in model.named_modules():
        if name and is_distributed(part):
            raise TypeError(
                f"{who}: {name} of {type(model).__name__} is sharded or replicated, but not the "
                "model, so that the gradients of the rest would stay different on every rank. Call "
                "fully_shard(model) last, on the very model that is given."
            )


def most_of_ranks(count: int, device: torch.device) -> int:
    """The largest of the ranks' numbers."""
    dist: Any = torch.distributed
    most = torch.tensor(count, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


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
    changing = list(_changing(model))
    if not changing:
        return None
    limit = min(original for _, _, original in changing)
    name = type(model).__name__
    if max_model_len is None:
        raise ValueError(
            f"{who}: {name} computes rows of more than {limit} tokens with other rotary factors "
            "(longrope), so a token's log-prob would depend on how its row goes on. Give "
            f"max_model_len: up to {limit} the short factors are used, above it the long ones for "
            "every row. vLLM does the same with its max_model_len; give both the same side."
        )
    is_long = [rope_type == _LONG for _, rope_type, _ in changing]
    if max_model_len <= limit:
        if any(is_long):
            raise ValueError(
                f"{who}: max_model_len={max_model_len} is for the short rotary factors of {name}, "
                "but another policy has set this model to its long ones."
            )
        return limit
    for module, rope_type, original in changing:
        if rope_type == _BY_LENGTH:
            _take_long_factors(module, original)
    return None


def _changing(model: PreTrainedModel) -> Iterator[tuple[Any, str, int]]:
    """Rotary embeddings of this kind, their type, and where their factors change."""
    for module in model.modules():
        rope_type: Any = getattr(module, "rope_type", None)
        if rope_type in (_BY_LENGTH, _LONG):
            config: Any = module.config
            yield module, rope_type, config.rope_parameters["original_max_position_embeddings"]


def _take_long_factors(module: nn.Module, original: int) -> None:
    # Its own code sets the factors for this length; under another name it leaves them there.
    parameter = torch.zeros(1, 1, 1, device=module.inv_freq.device)  # type: ignore[arg-type]
    module(parameter, torch.tensor([[original]], device=parameter.device))
    module.rope_type = _LONG  # type: ignore[assignment]


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


class Tolerance(NamedTuple):
    """How far log-probs of the same tokens may lie apart, in nats."""

    worst: float
    mean: float

    def allows(self, difference: "Difference") -> bool:
        """Whether a difference is no more than other kernels make."""
        # A comparison with NaN is false.
        return difference.worst <= self.worst and difference.mean <= self.mean


class Difference(NamedTuple):
    """How far the log-probs of the trial's tokens lie apart, in nats."""

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
    tolerance: Tolerance

    def difference(self, log_probs: Sequence[Tensor]) -> Difference:
        """How far others lie from the model's own."""
        # log_probs: of the last tokens of each row; at most [L - 1].
        own = [row[len(row) - len(x) :] for row, x in zip(self.log_probs, log_probs, strict=True)]
        apart = (torch.cat(own) - torch.cat([x.double() for x in log_probs])).abs()
        return Difference(apart.max().item(), apart.mean().item())


def tolerance_of(model: PreTrainedModel) -> Tolerance:
    """What kernels of a model's precision make of the same sum."""
    tf32 = model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    if model.dtype in (torch.float32, torch.float64) and not tf32:
        return Tolerance(worst=5e-4, mean=1e-4)
    return Tolerance(worst=torch.inf, mean=0.1)


@torch.no_grad()
def run_trial(model: PreTrainedModel, *, who: str) -> Trial:
    """Score rows with nothing but the model's own forward, one at a time."""
    name = type(model).__name__
    if model.device.type == "meta":
        raise ValueError(f"{who}: {name} is on the meta device. Load its weights first.")
    rows = trial_rows(model)
    with evaluation_mode(model):
        try:
            log_probs = [next_log_probs(_logits(model, row), row) for row in rows]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ValueError(
                f"{who}: {name} can't be used, because its own forward of one row of "
                f"{len(rows[0])} tokens fails: {type(error).__name__}: {error}"
            ) from error
    trial = Trial(rows, log_probs, tolerance_of(model))
    if not all(bool(row.isfinite().all()) for row in log_probs):
        raise ValueError(f"{who}: the logits of {name} are not finite; are its weights loaded?")
    shared = len(rows[1]) - 1
    beginning = trial._replace(rows=rows[:1], log_probs=[log_probs[0][:shared]])
    ahead = beginning.difference([log_probs[1]])
    if not trial.tolerance.allows(ahead):
        raise ValueError(
            f"{who}: {name} is no policy: what it says of a token depends on the tokens after it, "
            f"by {ahead}. A model is trained here only if it sees what comes before; some need "
            "is_decoder=True in their configuration for that."
        )
    return trial


def next_log_probs(logits: Tensor, row: Tensor) -> Tensor:
    """Log-probs of every token but the first, float64 ``[L - 1]``, from logits ``[L, V]``."""
    log_p = logits[:-1].double().log_softmax(-1)
    return log_p.gather(1, row[1:, None]).squeeze(1)


def find_first(
    model: PreTrainedModel, trial: Trial, ways: Sequence[tuple[str, Callable[[], Sequence[Tensor]]]]
) -> tuple[int | None, Difference | None, list[str]]:
    """Try ways to compute a trial's log-probs until one gives the model's own."""
    # Gives which way, how far it is off, and what was wrong with those before it; `None` twice when
    # none is right.
    wrong = []
    for i, (name, compute) in enumerate(ways):
        try:
            with torch.no_grad(), evaluation_mode(model):
                difference = trial.difference(compute())
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # kept, and told where no way is right
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if trial.tolerance.allows(difference):
            return i, difference, wrong
        wrong.append(f"{name}: off by {difference}")
    return None, None, wrong


def _logits(model: PreTrainedModel, row: Tensor) -> Tensor:
    named: Any = inspect.signature(model.forward).parameters
    options = {"use_cache": False} if "use_cache" in named else {}
    return call(model, input_ids=row[None], **options).logits[0]


def trial_rows(model: PreTrainedModel) -> list[Tensor]:
    """Short rows of plain tokens: none that stands for padding, an image or the like."""
    config = model.config.get_text_config()
    size = min(config.vocab_size, next(model.get_input_embeddings().parameters()).shape[0])
    settings = {**model.config.to_dict(), **config.to_dict()}
    special = {
        value
        for key, value in settings.items()
        if key.endswith(("token_id", "token_index"))
        if isinstance(value, int)
    }
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

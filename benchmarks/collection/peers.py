"""TorchRL's and TRL's collection on the simulated engine, tools and reward, by their own loops.

Where a peer would do more than is simulated, it is spared: TorchRL keeps no tokens and log-probs,
and TRL asks the engine directly, in place of HTTP to a server from a process of its own. With
``total_dialog_turns`` TorchRL's collector over an ``AsyncEnvPool`` ends with "RuntimeError: Cannot
await 1 step_and_maybe_reset when only 0 are being stepped", so it goes on until all are there.
"""

import asyncio
import copy
import json
import queue
import re
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.state import PartialState
from datasets import Dataset
from simulated_rollouts import (
    GROUP_SIZE,
    TURNS,
    SimulatedEngine,
    Trace,
    make_tools,
    questions_of,
    reward,
)
from tensordict import TensorDictBase, lazy_stack, set_list_to_stack
from tensordict.nn import TensorDictModuleBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Unbounded
from torchrl.data.llm import History
from torchrl.envs import AsyncEnvPool, StepCounter, Transform
from torchrl.envs.llm import DatasetChatEnv
from torchrl.envs.llm.transforms import SimpleToolTransform
from torchrl.modules.llm.policies.common import ChatHistory
from trl.chat_template_utils import add_response_schema, qwen2_5_chat_template
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

Rollouts = list[tuple[float, int]]
"""Of each rollout: the reward, and the tokens that may be trained."""
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


# TorchRL ------------------------------------------------------------------------------------------


class _Questions:
    """Gives each question once for every rollout of its group, whichever environment asks.

    What is asked for to set up environments and collector does not count, and after the last one
    there is one more, of which nobody waits for the answers.
    """

    def __init__(self, trace: Trace) -> None:
        self._all = questions_of(trace)
        self._last = self._all[-1]
        self._left: Iterator[str] = iter(())
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin with the first question."""
        self._left = iter([q for q in self._all for _ in range(GROUP_SIZE)])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        with self._lock:
            return {"query": next(self._left, self._last)}


class _Reward(Transform):
    """The reward at the end of an episode, of all rows that end together."""

    def __init__(self) -> None:
        super().__init__(in_keys=["history"], out_keys=["reward"])

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        del tensordict
        done = next_tensordict["truncated"].flatten().tolist()
        values = torch.zeros(*next_tensordict.batch_size, 1)
        if any(done):
            ended = [row for row, is_done in enumerate(done) if is_done]
            last = next_tensordict["history"].prompt[..., -1].content
            given = reward([[{"content": last[row]}] for row in ended])
            values[ended] = torch.tensor(given)[:, None]
        return next_tensordict.set("reward", values)

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1))
        return reward_spec


class _Policy(TensorDictModuleBase):
    """What TorchRL's wrappers do with a batch of histories, on the simulated engine."""

    in_keys = [("history", "prompt")]  # noqa: RUF012
    out_keys = [("history", "response"), ("history", "full"), "num_sampled"]  # noqa: RUF012

    def __init__(self, engine: SimulatedEngine) -> None:
        super().__init__()
        self._engine = engine

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """A turn of each row; environments of a pool are rows of one more dimension."""
        tokenizer = self._engine.tokenizer
        parts = [td] if td.ndim == 1 else list(td.unbind(0))
        texts: list[str] = []
        for part in parts:
            prompt = part["history"].prompt
            texts += prompt.apply_chat_template(tokenizer=tokenizer, add_generation_prompt=True)
        said = self._engine.generate(tokenizer(texts, add_special_tokens=False)["input_ids"])
        answers = tokenizer.batch_decode([each.ids for each in said], skip_special_tokens=True)
        turns = iter(zip(said, answers, strict=True))
        answered = [self._answered(part, list(islice(turns, len(part)))) for part in parts]
        return answered[0] if td.ndim == 1 else lazy_stack(answered)

    def _answered(self, part: TensorDictBase, turns: list[tuple[Any, str]]) -> TensorDictBase:
        prompt = part["history"].prompt
        response = lazy_stack(
            [lazy_stack([History(role="assistant", content=answer)]) for _, answer in turns]
        )
        full = prompt.extend(response, inplace=False, dim=-1)
        part = part.copy().set("history", ChatHistory(prompt=prompt, response=response, full=full))
        return part.set("num_sampled", torch.tensor([[len(said.ids)] for said, _ in turns]))


def _torchrl_env(trace: Trace, questions: _Questions, num_rows: int) -> Any:
    search, ask = make_tools(trace)
    tools = {"search": search, "ask": lambda **arguments: asyncio.run(ask(**arguments))}

    def parse(text: str) -> dict[str, Any]:
        calls = [json.loads(body) for body in _CALL.findall(text)]
        return {"calls": [SimpleNamespace(tool=c["name"], args=c["arguments"]) for c in calls]}

    env: Any = DatasetChatEnv.from_dataloader(
        questions, batch_size=(num_rows,), input_mode="history"
    )
    for transform in (
        SimpleToolTransform(tools, parser=parse),
        StepCounter(max_steps=TURNS),
        _Reward(),
    ):
        env = env.append_transform(transform)
    return env


def torchrl(engine: SimulatedEngine, trace: Trace, num_slots: int, *, pool: bool) -> Callable:
    """TorchRL's ``LLMCollector``, of a batch of rows or of a pool of environments of one.

    Args:
        engine: draws.
        trace: what takes how long.
        num_slots: rows, or environments.
        pool: ``AsyncEnvPool``, each environment in a thread.

    Returns:
        Collects all rollouts.
    """
    set_list_to_stack(True).set()
    num_slots = min(num_slots, len(trace.tokens))
    questions = _Questions(trace)
    if pool:
        makers = [lambda: _torchrl_env(trace, questions, 1) for _ in range(num_slots)]
        env = AsyncEnvPool(makers, backend="threading", stack="lazy")
    else:
        env = _torchrl_env(trace, questions, num_slots)
    collector = LLMCollector(
        env,
        policy=_Policy(engine),
        dialog_turns_per_batch=TURNS,
        yield_completed_trajectories=True,
        total_dialog_turns=-1,  # with a total AsyncEnvPool fails, see the module's text
    )

    def collect() -> Rollouts:
        found: dict[str, tuple[float, int]] = {}
        questions.begin()
        for batch in collector:
            for episode in batch.reshape(-1, TURNS).unbind(0):
                end = episode[-1]["next"]
                given, tokens = float(end["reward"]), int(episode["num_sampled"].sum())
                found.setdefault(end["history"].prompt[-1].content, (given, tokens))
            if len(found) == len(trace.tokens):
                break
        threading.Thread(target=collector.shutdown, daemon=True).start()
        return sorted(found.values())

    return collect


# TRL ----------------------------------------------------------------------------------------------


class _Loop(_AsyncRolloutLoop):
    """TRL's loop, which asks the simulated engine, and ends with the data."""

    engine: SimulatedEngine
    num_groups: int

    def _repeat_iterator(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, (group_id, row) in enumerate(super()._repeat_iterator(), 1):
            if number == self.num_groups * GROUP_SIZE:
                self._drawn.set()
            yield group_id, row

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        self._drawn = asyncio.Event()  # begins nothing more, and scores what has begun
        await asyncio.gather(self._generate_loop(self._drawn), self._score_loop(stop_event))

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        said = await self.engine.respond(prompt_ids)
        return said.ids, said.log_probs


def trl(engine: SimulatedEngine, trace: Trace, num_slots: int) -> Callable[[], Rollouts]:
    """TRL's asynchronous GRPO loop, in this process.

    Args:
        engine: draws.
        trace: what takes how long.
        num_slots: ``max_inflight_tasks``.

    Returns:
        Collects all rollouts.
    """
    PartialState()  # as TRL's process does: its logger asks for it
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = qwen2_5_chat_template
    samples: queue.Queue[Any] = queue.Queue()
    questions = questions_of(trace)
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
    loop = _Loop(
        model_name="simulated",
        dataset=Dataset.from_list(rows),
        reward_funcs=[reward],
        processing_class=add_response_schema(tokenizer),
        eos_token_ids=[tokenizer.eos_token_id],
        rollout_buffer=samples,
        model_version_value=SimpleNamespace(value=0),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        tools=[*make_tools(trace)],
        num_generations=GROUP_SIZE,
        max_inflight_tasks=num_slots,
        score_queue_maxsize=len(questions) + 1,  # and the end
        max_tokens=700,
    )
    loop.engine, loop.num_groups = engine, len(questions)

    def collect() -> Rollouts:
        loop.run()
        drawn = [samples.get_nowait() for _ in range(samples.qsize())]
        return sorted((each.metrics["reward"], int(each.completion_mask.sum())) for each in drawn)

    return collect

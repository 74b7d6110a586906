"""How many files a rollout goes through: what somebody has to read who follows it.

    python test/house/code_paths.py [--names]

``files`` are those of this library whose functions run while prompts go from ``env.reset`` to
``GRPOLoss``: a batch is collected with a tool and a reward function, gets its advantages in the
replay buffer, is sampled, scored and trained on; a tiny model on Transformers. ``stays``, of one
call of a policy on one chat: each time that another file goes on, by a call or by a return, is one.
Each once with the engine that decodes, and once with one that says something at once. The stays and
the functions of an ``env.step`` are of two rows, whose turns call a tool. All in a
second run, so that nothing is imported or compiled on the way. The numbers do not depend on the
machine.
"""

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer

from collectors import LLMCollector
from objectives import GRPOLoss, MCAdvantage
from torchrl_envs import ChatEnv, DataLoadingPrimer, FunctionTools, RewardFunctions, StepCounter
from torchrl_modules import Generation, LLMWrapperBase, TransformersWrapper
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

PACKAGES = ("torchrl_data", "torchrl_modules", "torchrl_envs", "objectives", "collectors")
ROOT = Path(sys.modules[ChatEnv.__module__.partition(".")[0]].__file__ or "").parents[1]
GROUP = 2


class Trace:
    """The files of the library in which functions run, on any thread; stays and functions on this.

    A thread that runs already is not seen, so those of a pool count by chance.
    """

    def __init__(self) -> None:
        self.files: Counter[str] = Counter()
        self.stays: list[str] = []
        self.functions: Counter[str] = Counter()
        self._thread = threading.get_ident()

    def run(self, call: Callable[[], Any]) -> Any:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        try:
            return call()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (name := _file(frame)):
            self.files[name] += 1
            is_named = not frame.f_code.co_name.endswith(("comp>", "genexpr>"))
            if is_named and threading.get_ident() == self._thread:
                self.functions[f"{name}:{frame.f_code.co_qualname}"] += 1
            self._stay(name)
        elif event == "return" and _file(frame):
            above = frame.f_back
            while above is not None and not _file(above):
                above = above.f_back
            if above is not None:
                self._stay(_file(above))

    def _stay(self, name: str) -> None:
        is_here = threading.get_ident() == self._thread
        if is_here and (not self.stays or self.stays[-1] != name):
            self.stays.append(name)


_names: dict[str, str] = {}


def _file(frame: FrameType) -> str:
    """The file of a function of the library, relative to it; empty for everything else."""
    code = frame.f_code
    if code.co_name == "<module>":
        return ""
    name = _names.get(code.co_filename)
    if name is None:
        path = Path(code.co_filename)
        is_ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
        name = _names[code.co_filename] = path.relative_to(ROOT).as_posix() if is_ours else ""
    return name


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def length(completions: list[Any]) -> list[float]:
    return [float(len(completion[-1]["content"])) for completion in completions]


class Says:
    """An engine that says one thing at once."""

    version = 0

    def __init__(self, ids: list[int]) -> None:
        self.said = Generation(ids, [-0.5] * len(ids), "stop")

    def generate(self, prompts: list[Any], params: Any, *, max_new_tokens: Any = None) -> list[Any]:
        del params, max_new_tokens
        return [self.said] * len(prompts)

    def update_weights(self, state_dict: Any, *, version: int | None = None) -> None:
        raise ValueError(f"no place for {len(state_dict)} tensors of version {version}")


def way_to_the_loss(acting: Any, trained: Any, tokenizer: Any) -> Trace:
    size = 2 * GROUP
    env = ChatEnv(batch_size=size, tokenizer=tokenizer)
    env = env.append_transform(DataLoadingPrimer([{"prompt": "question"}], group_size=GROUP))
    for transform in (StepCounter(max_steps=2), FunctionTools([add]), RewardFunctions([length])):
        env = env.append_transform(transform)
    storage = LazyStackStorage(size)
    buffer = ReplayBuffer(storage=storage, transform=MCAdvantage(GROUP), batch_size=size)
    collector = LLMCollector(env, acting, replay_buffer=buffer)
    loss = GRPOLoss(trained)

    def to_the_loss() -> None:
        collector.collect()
        loss(buffer.sample())

    to_the_loss()
    trace = Trace()
    trace.run(to_the_loss)
    collector.shutdown()
    return trace


def one_turn(policy: Any, tokenizer: Any) -> Trace:
    env = ChatEnv(batch_size=1, tokenizer=tokenizer)
    batch = env.reset(TensorDict({"query": ["question"]}, batch_size=[1]))
    policy(batch.copy())
    given = batch.copy()
    trace = Trace()
    trace.run(lambda: policy.forward(given))
    return trace


def step_with_a_tool(tokenizer: Any) -> Trace:
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|im_end|>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    policy = LLMWrapperBase(Says(ids), tokenizer=tokenizer)
    env = ChatEnv(batch_size=2, tokenizer=tokenizer)
    env = env.append_transform(DataLoadingPrimer([{"prompt": "question"}], group_size=2))
    for transform in (StepCounter(max_steps=4), FunctionTools([add]), RewardFunctions([length])):
        env = env.append_transform(transform)
    batch = env.step_mdp(env.step(policy(env.reset())))
    spoken = policy(batch)
    trace = Trace()
    trace.run(lambda: env.step(spoken))
    env.close()
    return trace


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="name the files")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["user assistant system question tool"] * 4, vocab_size=300)
    model = tiny_qwen3(len(tokenizer))
    trained = TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8})
    ids = tokenizer.encode("question<|im_end|>", add_special_tokens=False)
    policies = {"decoding": trained, "without": LLMWrapperBase(Says(ids), tokenizer=tokenizer)}
    for name, policy in policies.items():
        way, turn = way_to_the_loss(policy, trained, tokenizer), one_turn(policy, tokenizer)
        packages = dict(Counter(file.partition("/")[0] for file in way.files))
        num_files = len(set(turn.stays))
        print(f"{name}: {len(way.files)} files to the loss {packages}")
        print(
            f"{name}: one turn {len(turn.stays)} stays in {num_files} files, "
            f"{len(turn.stays) - num_files} returns"
        )
        if options.names:
            print("\n".join(f"{calls:8d} {file}" for file, calls in sorted(way.files.items())))
            print(" -> ".join(turn.stays))
    step = step_with_a_tool(tokenizer)
    print(
        f"tool: one step {len(step.stays)} stays in {len(set(step.stays))} files, "
        f"{len(step.functions)} functions"
    )
    if options.names:
        print("\n".join(f"{calls:8d} {name}" for name, calls in step.functions.items()))
        print(" -> ".join(step.stays))


if __name__ == "__main__":
    main()

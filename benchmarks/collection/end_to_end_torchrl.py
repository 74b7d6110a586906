"""The steps of ``end_to_end.py`` by the parts of TorchRL's recipe of GRPO, in one process.

With its own Transformers wrapper, and without the entropy bonus, the reference model and the KL
terms that the recipe has. Every turn is a row of its buffer.
"""

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import torch
from end_to_end_task import (
    LR,
    QUESTIONS,
    ROWS,
    Clock,
    N,
    Work,
    calls_in,
    make_model,
    make_tool,
    reward_of,
    tokenizer_of,
    tool_schema,
)
from tensordict import lazy_stack, set_list_to_stack
from torch.nn.functional import pad as pad_tensor

_TEMPLATE = """\
{%- for m in messages %}{% if m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + m.content.split('\\n')[-1] + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' }}{% else %}
{{- '<|im_start|>' + m.role + '\\n' }}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}
{{- '\\n' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Qwen's, as far as it is used. TorchRL's own ``qwen`` reads calls into lists of dictionaries, and
its wrapper can't stack a batch of these ("The sets of keys in the tensordicts to stack are
exclusive")."""
_MESSAGE = re.compile(r"<\|im_start\|>(.*?)\n(.*?)(<\|im_end\|>|\Z)", re.DOTALL)


def _messages_of(text: str) -> Any:
    from torchrl.data.llm import History

    found = _MESSAGE.findall(text)
    return lazy_stack(
        [History(role=role, content=said, is_complete=bool(end)) for role, said, end in found]
    )


def _torchrl_env(work: Work) -> Any:
    from tensordict import TensorDictBase
    from torchrl.data import Unbounded
    from torchrl.envs import StepCounter, Transform
    from torchrl.envs.llm import DatasetChatEnv
    from torchrl.envs.llm.transforms import SimpleToolTransform

    class Reward(Transform):
        """At the end, of the last thing that was said."""

        def __init__(self) -> None:
            super().__init__(in_keys=["history"], out_keys=["reward"])

        def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> Any:
            values = torch.zeros(*next_tensordict.batch_size, 1, 1)
            done = next_tensordict["truncated"].flatten().tolist()
            for row, is_done in enumerate(done):
                if is_done or work.turns == 1:
                    last = tensordict["history"].response[row]
                    values[row] = reward_of(str(last[-1].content))
            return next_tensordict.set("reward", values)

        def transform_reward_spec(self, reward_spec: Any) -> Any:
            reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
            return reward_spec

    def parse(text: str) -> dict[str, Any]:
        calls = calls_in(text)
        return {"calls": [SimpleNamespace(tool=c["name"], args=c["arguments"]) for c in calls]}

    tools = [tool_schema()] if work.turns > 1 else None
    chat = [{"role": "user", "content": ""}]
    text = tokenizer_of(work).apply_chat_template(chat, tools=tools, tokenize=False)
    system = text.split("<|im_start|>system\n")[1].split("<|im_end|>")[0]
    env: Any = DatasetChatEnv.from_dataloader(
        iter([{"query": q} for q in QUESTIONS * 100 for _ in range(N)]),
        batch_size=(ROWS,),
        input_mode="history",
        system_prompt=system,
    )
    transforms: list[Any] = [StepCounter(max_steps=work.turns), Reward()]
    if work.turns > 1:
        tool = make_tool(work)
        calls = {"look_up": lambda **arguments: asyncio.run(tool(**arguments))}
        transforms.insert(0, SimpleToolTransform(calls, parser=parse))
    for transform in transforms:
        env = env.append_transform(transform)
    return env


def _with_old_log_probs(batch: Any) -> Any:
    """What the loss asks for of all tokens, where the wrapper has it of those that it drew."""
    episodes = []
    for episode in batch.unbind(0):
        turns = list(episode.unbind(0))
        for turn in turns:
            drawn, all_ids = turn["log_probs", "response"], turn["tokens", "full"]
            turn["log_probs"].full = pad_tensor(drawn, (len(all_ids) - len(drawn), 0))
        episodes.append(lazy_stack(turns))
    return lazy_stack(episodes)


def torchrl(clock: Clock, num_steps: int, work: Work) -> None:
    """``LLMCollector``, a buffer with ``MCAdvantage``, ``GRPOLoss``."""
    from torchrl.collectors.llm import LLMCollector
    from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.data.llm.history import add_chat_template
    from torchrl.modules.llm import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss, MCAdvantage

    set_list_to_stack(True).set()
    add_chat_template("dialogue", _TEMPLATE, _messages_of)
    model, tokenizer = make_model(work), tokenizer_of(work)
    limits: dict[str, Any] = {"max_new_tokens": work.max_new_tokens, "do_sample": True}
    limits["temperature"] = work.temperature
    if work.turns == 1:
        limits["min_new_tokens"] = work.max_new_tokens
    shared: dict[str, Any] = {"tokenizer": tokenizer, "return_log_probs": True}
    acting = TransformersWrapper(
        model, input_mode="history", chat_template_name="dialogue", generate_kwargs=limits, **shared
    )
    trained = TransformersWrapper(model, input_mode="tokens", generate=False, **shared)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(ROWS * work.turns),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=N),
        batch_size=ROWS,
    )
    loss = GRPOLoss(trained, entropy_bonus=False, masking_strategy="sft")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    collector = LLMCollector(
        _torchrl_env(work),
        policy=acting,
        dialog_turns_per_batch=ROWS * work.turns,
        total_dialog_turns=-1,
        yield_completed_trajectories=False,
    )
    for _, batch in zip(range(num_steps), collector, strict=False):
        buffer.extend(_with_old_log_probs(batch))
        num_trained = 0
        for part in buffer:
            num_trained += sum(len(row["tokens", "response"]) for row in part.unbind(0))
            (loss(part).loss_objective / work.turns).backward()
        optimizer.step()
        optimizer.zero_grad()
        buffer.empty()
        clock.lap(num_trained)
    collector.shutdown()

"""The demonstrations that a warm start learns from."""

from types import SimpleNamespace

import pytest

from torchrl_agents.models.warm_start import drawn_demonstrations
from torchrl_agents.settings.schema import WarmStartConfig
from torchrl_data import ConversationEncoder
from torchrl_envs.tasks.task import Task, TaskEnv


def shown(task, tokenizer, *, num_steps, batch_size=2, seed=0):
    settings = WarmStartConfig(num_steps=num_steps, batch_size=batch_size)
    cfg = SimpleNamespace(seed=seed, warm_start=settings)
    encoder = ConversationEncoder(tokenizer)
    conversations = drawn_demonstrations(cfg, TaskEnv(task), encoder)
    return [conversations.messages(row)[-1]["content"] for row in range(len(conversations))]


def counting(number, *answers):
    chats = [
        [{"role": "user", "content": "?"}, {"role": role, "content": f"<{n}>"}]
        for n, role in enumerate(answers or ["assistant"] * number)
    ]
    return Task(name="counting", train_rows=[{"prompt": "?"}] * 4, demonstrations=chats)


def test_no_more_are_encoded_than_its_steps_draw(chatml_tokenizer):
    task, everything = counting(9), [f"<{n}>" for n in range(9)]
    for enough in (5, 6):
        assert shown(task, chatml_tokenizer, num_steps=enough) == everything
    few = shown(task, chatml_tokenizer, num_steps=2)
    assert len(set(few)) == 4
    assert few == sorted(few)
    assert few == shown(task, chatml_tokenizer, num_steps=2), "a dry run looks at those of the run"
    assert few != everything[:4], "data may be in an order"
    assert any(few != shown(task, chatml_tokenizer, num_steps=2, seed=seed) for seed in (1, 2, 3))


def test_one_that_can_not_be_encoded_is_named_by_its_own_row(chatml_tokenizer):
    task = counting(3, "user", "user", "user")
    with pytest.raises(ValueError, match=r"the assistant says nothing in row 1, whose"):
        shown(task, chatml_tokenizer, num_steps=1)  # draws rows 1 and 2

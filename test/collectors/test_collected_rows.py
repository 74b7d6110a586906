"""What users read of the rows that a collector gives, and of those that a buffer gives back."""

from typing import Any

import pytest
import torch
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from objectives import MCAdvantage
from torchrl_data import LogProbs, Masks, Tokens
from torchrl_envs import ChatEnv, DataLoadingPrimer, RewardFunctions, StepCounter
from torchrl_modules import TransformersWrapper

GROUPS = {"tokens": Tokens, "masks": Masks, "log_probs": LogProbs}


def one(completions):
    return [1.0] * len(completions)


def make_env(*parts, num_rows=2, group_size=2):
    rows = [{"prompt": "hi"}, {"prompt": "a longer question"}]
    transforms = [DataLoadingPrimer(rows, group_size=group_size), *parts, StepCounter(max_steps=1)]
    return ChatEnv(batch_size=num_rows).append_transform(Compose(*transforms))


@pytest.fixture
def policy(chatml_tokenizer, make_tiny_model):
    return TransformersWrapper(
        make_tiny_model(0), tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 4}
    )


def test_rows_hold_tokens_masks_and_log_probs_before_and_after_the_buffer(policy):
    buffer = ReplayBuffer(
        storage=LazyStackStorage(4), transform=MCAdvantage(2), batch_size=4, pin_memory=False
    )
    env = make_env(RewardFunctions([one]), num_rows=4)
    collected = LLMCollector(env, policy, replay_buffer=buffer).collect()
    batch: Any
    for batch in (collected, buffer[:], buffer.sample()):
        for name, kind in GROUPS.items():
            assert type(batch[name]) is kind
            assert type(batch[0][name]) is kind
            assert batch[name].batch_size == (4,)
        full = batch["tokens"].full
        assert isinstance(full, list)
        assert len({len(row) for row in full}) > 1
        prompts, responses = batch["tokens"].prompt, batch["tokens"].response
        for row, start, end in zip(full, prompts, responses, strict=True):
            assert torch.equal(row, torch.cat([start, end]))
        for mask, row in zip(batch["masks"].all_assistant_mask, full, strict=True):
            assert mask.shape == row.shape
            assert mask.dtype == torch.bool
        assert batch[1]["log_probs"].full.shape == full[1].shape
        padded, attention = batch["tokens"].to_padded(0)
        assert attention.all_attention_mask.sum() == sum(map(len, full))
        assert padded.full.shape[0] == 4

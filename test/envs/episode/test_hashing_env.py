"""Equal token sequences have equal hashes, others don't."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_data.batch_objects import read_objects
from torchrl_data.checks import MissingEntryError
from torchrl_envs import LLMHashingEnv


def test_a_hash_names_a_sequence(chatml_tokenizer):
    env = LLMHashingEnv(tokenizer=chatml_tokenizer, batch_size=3)
    batch = env.reset(TensorDict({"observation": torch.tensor([[5, 6]] * 3)}, batch_size=[3]))
    assert len(batch["hashing"].unique()) == 1
    seen = []
    for actions in ([7, 8, 7], [8, 7, 8]):
        batch["action"] = torch.tensor(actions)[:, None]
        batch = env.step(batch)["next"]
        seen.append(batch["hashing"].view(-1).tolist())
        assert not batch["done"].any()
    for first, second, third in seen:
        assert first == third
        assert first != second
    assert batch["observation"].tolist() == [[5, 6, 7, 8], [5, 6, 8, 7], [5, 6, 7, 8]]
    assert read_objects(batch, "text")[1] == chatml_tokenizer.decode([5, 6, 8, 7])


def test_what_is_missing_is_named():
    with pytest.raises(TypeError, match="needs a tokenizer"):
        LLMHashingEnv(10)
    with pytest.raises(MissingEntryError, match="'observation'"):
        LLMHashingEnv(10, text_output=False).reset()


def test_a_prompt_of_another_shape_is_refused():
    env = LLMHashingEnv(10, text_output=False)
    with pytest.raises(ValueError, match=r"B = 1 and at least one token, got \[1, 0\]"):
        env.reset(TensorDict({"observation": torch.zeros(1, 0, dtype=torch.int64)}, batch_size=[1]))
    with pytest.raises(ValueError, match=r"got \[1\]"):
        env.reset(TensorDict({"observation": torch.zeros(1, dtype=torch.int64)}, batch_size=[1]))

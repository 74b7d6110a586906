"""Equal token sequences have equal hashes, others don't: of TorchRL's environment, by our name."""

import torch
import torchrl.envs
from tensordict import TensorDict

from torchrl_data.batched_object import read_objects
from torchrl_envs import LLMHashingEnv


def test_a_hash_names_a_sequence(chatml_tokenizer):
    assert LLMHashingEnv is torchrl.envs.LLMHashingEnv
    env = LLMHashingEnv(tokenizer=chatml_tokenizer)
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

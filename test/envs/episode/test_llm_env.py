"""Completion: prompts and responses are put together as they are."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_data.batched_object import read_objects, write_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_envs import LLMEnv
from torchrl_modules import TransformersWrapper

END = "<|im_end|>"


def test_text_goes_on_as_it_is(chatml_tokenizer):
    env = LLMEnv(tokenizer=chatml_tokenizer, batch_size=2)
    batch = env.reset(TensorDict({"query": ["What is", "It is 4"]}, batch_size=[2]))
    for turns in ([" hello", " world"], [" again", " please"]):
        batch["text_response"] = turns
        batch = env.step(batch)["next"]
        assert not batch["done"].any()
    assert batch["text"].prompt == ["What is hello again", "It is 4 world please"]


@pytest.mark.parametrize("from_text", [True, False])
def test_a_policy_reads_the_prompt_and_nothing_else(from_text, chatml_tokenizer, make_tiny_model):
    mode = "text" if from_text else "tokens"
    env = LLMEnv(tokenizer=chatml_tokenizer, batch_size=2, from_text=from_text)
    policy = TransformersWrapper(
        make_tiny_model(),
        tokenizer=chatml_tokenizer,
        input_mode=mode,
        generate_kwargs={"max_new_tokens": 5},
    )
    prompts = ["What is", "hello"]
    batch = env.reset(TensorDict({"query": prompts}, batch_size=[2]))
    wanted = [chatml_tokenizer.encode(text, add_special_tokens=False) for text in prompts]
    for _ in range(2):
        batch = policy(batch)
        full = read_conversations(batch, "full", who="test")
        for row in range(2):
            mask = full.assistant_mask(row)
            ids = full.ids(row)
            assert ids[: len(wanted[row])] == wanted[row]
            assert 1 <= len(ids) - len(wanted[row]) <= 5
            assert mask[len(wanted[row]) :].all()
            wanted[row] = ids
        batch = env.step(batch)["next"]
        shown = batch[mode].prompt
        if from_text:
            assert shown == chatml_tokenizer.batch_decode(wanted)
        else:
            assert [row.tolist() for row in shown] == wanted


def test_data_and_ids_are_prompts(chatml_tokenizer):
    env = LLMEnv.from_dataloader(
        [{"text": "hello"}, {"text": "It is"}],
        tokenizer=chatml_tokenizer,
        from_text=False,
        batch_size=2,
        repeats=2,
    )
    batch = env.reset()
    assert batch["group_id"].unique().numel() == 1
    assert chatml_tokenizer.decode(batch["tokens"].prompt[0]) == "hello"
    batch["text_response"] = [" 4", " 5" + END]
    batch = env.step(batch)["next"]
    assert batch["done"].all()
    assert read_objects(batch, "stop_reason") == ["answered"] * 2
    assert chatml_tokenizer.decode(batch["tokens"].prompt[1]) == "hello 5" + END

    bare = LLMEnv(tokenizer=chatml_tokenizer, batch_size=1, from_text=False)
    batch = bare.reset(TensorDict({"query": torch.tensor([[5, 6, 7]])}, batch_size=[1]))
    assert batch["tokens"].prompt[0].tolist() == [5, 6, 7]


def test_messages_are_refused(chatml_tokenizer):
    env = LLMEnv(tokenizer=chatml_tokenizer, batch_size=1)
    batch = TensorDict({}, batch_size=[1])
    write_objects(batch, "query", [[{"role": "user", "content": "hi"}]])
    with pytest.raises(TypeError, match="Messages need roles: use ChatEnv"):
        env.reset(batch)

"""Second thoughts, tokens of text entries, rendered messages, and stacked rows."""

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs.transforms import Compose

from torchrl_data.batched_object import read_objects, write_objects
from torchrl_envs import (
    AddThinkingPrompt,
    ChatEnv,
    DataLoadingPrimer,
    GSM8KRewardParser,
    RewardFunctions,
    TemplateTransform,
    Tokenizer,
    as_nested_tensor,
    as_padded_tensor,
)


@pytest.mark.parametrize("undo", [True, False])
def test_a_wrong_answer_is_thought_over_once(scripted, play, undo):
    rows = [{"question": "<0>", "answer": "#### 4"}, {"question": "<1>", "answer": "#### 5"}]
    again = AddThinkingPrompt(lambda td: td["reward"].item() < 1, "Again.", undo_done=undo)
    env = ChatEnv(batch_size=2).append_transform(
        Compose(DataLoadingPrimer(rows), GSM8KRewardParser(), again)
    )
    wrong, right = "<answer>1</answer>", "<answer>4</answer>"
    policy = scripted({"<0>": [wrong, right], "<1>": ["<answer>5</answer>", "never said"]})
    for _ in range(2):  # The count starts again with the episode.
        policy.engine.served.clear()
        ends = play(env, policy)
        chats = [ends[i]["history"].get("prompt").snapshot().messages(i) for i in range(2)]
        said = [[m["content"] for m in chat[1:]] for chat in chats]
        assert said[1] == ["<answer>5</answer>"], "right at once"
        if undo:
            assert said[0] == [wrong, "Again.", right]
            assert [ends[i]["reward"][i].item() for i in range(2)] == [1.0, 1.0]
        else:
            assert said[0] == [wrong], "the answer ended the episode"
    env.close()


def test_the_policys_tokens_stay_and_only_they_are_its_own(scripted, play):
    env = ChatEnv(batch_size=1).append_transform(
        Compose(
            DataLoadingPrimer([{"prompt": "<0>"}]),
            RewardFunctions(lambda completions, **_: [0.0] * len(completions)),
            AddThinkingPrompt(lambda _: True, random_prompt=True, max_prompts=2, seed=1),
        )
    )
    policy = scripted(["first", "second", "third", "fourth"])
    (end,) = play(env, policy)
    env.close()
    conversation = end["history"].get("prompt").snapshot()
    texts = [m["content"] for m in conversation.messages(0)]
    assert texts[1::2] == ["first", "second", "third"]
    assert set(texts[2::2]) <= set(AddThinkingPrompt.DEFAULT_PROMPTS_COG)
    sampled = [i for _, said in policy.engine.served for i in said.ids]
    assert conversation.token_ids(0)[conversation.assistant_mask(0)].tolist() == sampled


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"edit_last_turn": True}, "change what was sampled"),
        ({"role": "assistant"}, "change what was sampled"),
        ({"prompt": "a", "random_prompt": True}, "not both"),
        ({"max_prompts": 0}, "max_prompts must be a whole number"),
    ],
)
def test_what_would_rewrite_the_past_is_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        AddThinkingPrompt(lambda _: True, **settings)


def test_tokens_of_text_and_back(chatml_tokenizer):
    transform = Tokenizer(
        [("text", "full")], [("tokens", "full")], ["said"], [("tokens", "full")],
        tokenizer=chatml_tokenizer, skip_special_tokens=False,
    )  # fmt: skip
    batch = TensorDict({"text": TensorDict({}, batch_size=[2])}, batch_size=[2])
    texts = ["hello", "say <|im_end|> again, please"]
    write_objects(batch, ("text", "full"), texts)
    out = transform(batch)
    mask = out["tokens", "attention_mask"]
    assert mask.sum(-1).tolist() == [
        len(chatml_tokenizer("hello")["input_ids"]),
        int(mask.shape[1]),
    ]
    end = chatml_tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end not in out["tokens", "full"][mask].tolist(), "spelled in content: text, no token"
    assert read_objects(transform.inv(out), "said") == texts
    transform.control_tokens = True
    assert end in transform.encode(texts)[1]
    with pytest.raises(ValueError, match="one to one"):
        Tokenizer(["a"], [], tokenizer=chatml_tokenizer)


def test_a_template_renders_and_parses(chatml_tokenizer):
    transform = TemplateTransform(chatml_tokenizer, chat_template_name="chatml_format")
    batch = TensorDict(batch_size=[2])
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    write_objects(batch, "message", ["hi", chat])
    shown = read_objects(transform(batch), "message")
    assert shown[0] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert shown[1].startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n")
    write_objects(batch, "action", [text + "well<|im_end|>" for text in shown])
    assert read_objects(transform.inv(batch), "action") == ["well", "well"]


def test_rows_are_stacked_nested_or_padded_on_the_left():
    rows = [TensorDict({"x": torch.arange(1, n + 1)}) for n in (2, 3)]
    nested = as_nested_tensor(rows)["x"]
    assert nested.is_nested
    assert [part.tolist() for part in nested.unbind()] == [[1, 2], [1, 2, 3]]
    assert as_padded_tensor(rows)["x"].tolist() == [[0, 1, 2], [1, 2, 3]]
    assert as_padded_tensor(rows).batch_size == torch.Size([2])
    for stack in (as_nested_tensor, as_padded_tensor):
        with pytest.raises(ValueError, match="no rows"):
            stack([])
    with pytest.raises(ValueError, match="count from the front"):
        as_padded_tensor(rows, dim=-1)

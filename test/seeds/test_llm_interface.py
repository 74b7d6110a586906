"""The examples of the LLM interface's page, as written there but for the tokenizers' names."""

import re

import pytest
from tensordict import TensorDict, lazy_stack, set_list_to_stack

from torchrl_data import ChatHistory, History, add_chat_template
from torchrl_data.templates import registry
from torchrl_envs import ChatEnv, PythonInterpreter, StepCounter
from torchrl_modules import TransformersWrapper

CODE = """Here is a block of code to be executed in python:
```python
def square(x):
    return x * x
print('testing the square function with input 2:', square(2))
```
<|im_end|>
"""


def test_a_history_with_a_mask_over_what_the_assistant_wrote():
    history = History.from_chats(
        [
            [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi there!"},
                {"role": "user", "content": "How are you?"},
                {"role": "assistant", "content": "I'm doing well, thanks!"},
            ]
        ]
    )
    result = history.apply_chat_template(
        chat_template_name="qwen",
        add_generation_prompt=False,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    # Without a tokenizer each byte is a token, and the end of a turn is one.
    expected = len("Hi there!") + len("I'm doing well, thanks!") + 2
    assert result["assistant_masks"].sum().item() == expected


LLAMA = """
{% for message in messages %}
{%- if message['role'] == 'user' %}
{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}
{% generation %}{{ message['content'] + '</s>' }}{% endgeneration %}
{%- endif %}
{% endfor %}
{%- if add_generation_prompt %}
{% generation %}{{ ' ' }}{% endgeneration %}
{%- endif %}
"""


def parse_llama_text(text: str) -> History:
    pattern = r"\[INST\]\s*(.*?)\s*\[/INST\]\s*(.*?)</s>"
    messages = []
    for user_content, assistant_content in re.findall(pattern, text, re.DOTALL):
        messages.append(History(role="user", content=user_content.strip()))
        messages.append(History(role="assistant", content=assistant_content.strip()))
    return lazy_stack(messages)


@pytest.fixture
def llama_template():
    before = dict(registry._added)
    add_chat_template(
        template_name="llama-of-the-page",
        template=LLAMA,
        inverse_parser=parse_llama_text,
        model_family_keywords=["llama-of-the-page"],
    )
    yield "llama-of-the-page"
    registry._added.clear()
    registry._added.update(before)


def test_an_added_template_masks_and_parses(llama_template):
    chats = [[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi there!"}]]
    history = History.from_chats(chats)
    result = history.apply_chat_template(
        chat_template_name=llama_template,
        add_generation_prompt=False,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert result["assistant_masks"].shape[0] == 1
    assert result["assistant_masks"].sum() > 0
    formatted = history.apply_chat_template(
        chat_template_name=llama_template, add_generation_prompt=False, tokenize=False
    )
    parsed = History.from_text(formatted, chat_template_name=llama_template)
    assert parsed.role == history.role
    assert parsed.content == history.content


@pytest.mark.parametrize("input_mode", ["history", "text", "tokens"])
def test_the_interaction_loop(input_mode, chatml_tokenizer, make_tiny_model):
    env = ChatEnv(
        batch_size=(1,), input_mode=input_mode, tokenizer=chatml_tokenizer
    ).append_transform(StepCounter(max_steps=2))
    llm = TransformersWrapper(
        make_tiny_model(),
        tokenizer=chatml_tokenizer,
        input_mode=input_mode,
        generate=True,
        generate_kwargs={"max_new_tokens": 4},
    )
    obs = env.reset(TensorDict({"query": "Hello!"}, batch_size=env.batch_size, device=env.device))
    done = False
    while not done:
        llm_output = llm(obs)
        obs = env.step(llm_output)["next"]
        done = bool(obs["done"].all())
    assert obs[input_mode].prompt is not None


def test_the_wrapper_takes_a_history_built_by_hand(chatml_tokenizer, make_tiny_model):
    wrapper = TransformersWrapper(
        make_tiny_model(),
        tokenizer=chatml_tokenizer,
        input_mode="history",
        generate_kwargs={"max_new_tokens": 4, "temperature": 0.7, "top_p": 0.9},
    )
    history = History.from_chats([[{"role": "user", "content": "Hello"}]])
    result = wrapper(TensorDict(history=ChatHistory(prompt=history), batch_size=(1,)))
    assert result["history"].response.role == [["assistant"]]
    assert len(result["history"].full.to_chats()[0]) == 2
    assert (result[0]["log_probs", "response"] < 0).all()


def test_an_interpreter_answers_a_turn_that_is_plain_text(chatml_tokenizer):
    tokenizer = chatml_tokenizer
    with set_list_to_stack(True):
        base_env = ChatEnv(
            tokenizer=tokenizer,
            system_prompt="You are an assistant that can execute Python code. Decorate your code "
            "with ```python``` tags.",
            user_role="user",
            system_role="system",
            batch_size=[1],
        )
        env = base_env.append_transform(PythonInterpreter())
        env.set_seed(0)
        reset_data = env.reset(
            TensorDict(
                text="Let's write a Python function that returns the square of a number.",
                batch_size=[1],
            )
        )
        reset_data.set("text_response", [CODE])
        _, s_ = env.step_and_maybe_reset(reset_data)
        (text,) = s_["history"].apply_chat_template(tokenizer=tokenizer)
        env.close()
    assert text.startswith(
        "<|im_start|>system\nYou are an assistant that can execute Python code. Decorate your code "
        "with ```python``` tags.<|im_end|>\n<|im_start|>user\nLet's write a Python function that "
        "returns the square of a number.<|im_end|>\n<|im_start|>assistant\n"
        "Here is a block of code to be executed in python:\n```python\n"
    )
    _, said, answer, header = text.rsplit("<|im_start|>", 3)
    assert said.endswith("square(2))\n```<|im_end|>\n")
    assert "Code block 1 executed successfully:\ntesting the square function with input 2: 4\n" in (
        answer
    )
    assert header == "assistant\n"

"""One turn of TRL's own loop of tools and environments, without its generation."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerFast


def tokenizer_of_both() -> PreTrainedTokenizerFast:
    """A tokenizer whose chat template both sides can read calls of: Qwen 2.5's."""
    from trl.chat_template_utils import add_response_schema, qwen2_5_chat_template

    from torchrl_modules.tiny_model import train_tokenizer

    texts = ["user assistant system tool question go on tool_response arguments name"] * 4
    tokenizer = train_tokenizer(texts, vocab_size=360)
    tokenizer.chat_template = qwen2_5_chat_template
    return add_response_schema(tokenizer)


def trl_turn(
    tokenizer: PreTrainedTokenizerFast, environments: list[Any], turns: int, call: str, next: str
) -> Callable[[], list[list[dict[str, Any]]]]:
    """TRL's ``_tool_call_loop`` for one round, called as its trainer calls it.

    It runs the calls, tokenises the results, and parses what comes next, which is handed in; the
    parse of the turn that calls is that of the round before.

    Args:
        tokenizer: see :func:`tokenizer_of_both`.
        environments: one per row, with the tool ``add``.
        turns: of the conversations before the results.
        call: what the policy said, a call.
        next: what it says next.

    Returns:
        Runs the round; gives the messages of each row after its prompt.
    """
    from trl import GRPOTrainer
    from trl.chat_template_utils import parse_response

    size = len(environments)
    prompt: list[dict[str, Any]] = [{"role": "user", "content": "question 0"}]
    for _ in range(turns - 1):
        prompt += [{"role": "assistant", "content": call}, {"role": "tool", "content": "3"}]
    prompt_ids = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    call_ids = tokenizer.encode(f"{call}<|im_end|>", add_special_tokens=False)
    next_ids = tokenizer.encode(f"{next}<|im_end|>", add_special_tokens=False)
    said = parse_response(tokenizer, call_ids, prefix=prompt_ids, tools=[environments[0].add])
    assert said["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}, said
    trainer: Any = SimpleNamespace(
        _tokenizer=tokenizer,
        processing_class=tokenizer,
        chat_template=tokenizer.chat_template,
        chat_template_kwargs={},
        _is_vlm=False,
        use_vllm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)),
        max_completion_length=10**6,
        max_tool_calling_iterations=1,
        environment_factories=None,
        tools=[environments[0].add],
        _sync_tool_dicts=[{"add": environment.add} for environment in environments],
        _async_tool_dicts=[{} for _ in environments],
    )
    trainer._get_tool_suffix_ids = lambda messages: GRPOTrainer._get_tool_suffix_ids(
        trainer, messages
    )
    trainer._generate_single_turn = lambda ids, *_, **__: (
        [list(next_ids) for _ in ids],
        [[0.0] * len(next_ids) for _ in ids],
    )

    def step() -> list[list[dict[str, Any]]]:
        completions = [[said] for _ in range(size)]
        GRPOTrainer._tool_call_loop(
            trainer,
            [list(prompt) for _ in range(size)],
            [prompt_ids for _ in range(size)],
            [list(call_ids) for _ in range(size)],
            completions,
            [[0.0] * len(call_ids) for _ in range(size)],
            None,
            None,
        )
        return completions

    return step

"""TextEnvironment and rollout functions over vLLM: turns that are continued keep their tokens."""

import pytest
import torch

from collectors import TextEnvironment, generate_rollout_completions
from torchrl_modules import vLLMWrapper

pytestmark = pytest.mark.vllm


def test_turns_stop_at_texts_and_have_the_models_log_probs(
    vllm_engine, chatml_tokenizer, model, reference_log_probs
):
    policy = vLLMWrapper(
        vllm_engine, tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 40}
    )
    text_env = TextEnvironment(
        policy,
        tools={"a": str.upper},
        reward_fn=lambda texts: [float(len(text)) for text in texts],
        max_turns=2,
        max_length=90,
    )
    histories = text_env.run(["hello world", "What is 2 + 2? say >"])[4]
    for history in histories:
        assert len(history.tokens) <= 90
        mask = history.token_masks == 1
        expected = reference_log_probs(model, history.tokens.tolist())
        torch.testing.assert_close(history.log_probs[mask], expected[mask], atol=2e-4, rtol=1e-4)
        assert bool(mask.any())
    text_env.close()

    class Owner: ...

    Owner.policy = policy
    (out,) = generate_rollout_completions(Owner, ["hello"])
    ids = out["prompt_ids"] + out["completion_ids"]
    expected = reference_log_probs(model, ids)[len(out["prompt_ids"]) :]
    torch.testing.assert_close(torch.tensor(out["logprobs"]), expected, atol=2e-4, rtol=1e-4)

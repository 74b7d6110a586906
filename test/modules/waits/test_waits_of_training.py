"""A training pass waits for its device once, and once more where the rows are on it."""

import pytest
import torch

from objectives import GRPOLoss, SFTLoss
from torchrl_data.devices import on_device, on_host
from torchrl_modules import TransformersWrapper
from torchrl_modules.scoring.trie_attention import build_trie
from torchrl_modules.tiny_model import train_tokenizer

MODELS = ("Llama", "Qwen3", "Gemma3")
LOSSES = {
    "grpo": (GRPOLoss, {}),
    "by sequence": (GRPOLoss, {"ratio_level": "sequence", "aggregation": "sequence_mean"}),
    "entropy": (GRPOLoss, {"entropy_bonus": True}),
    "demonstrations": (SFTLoss, {}),
}


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["a b c"], vocab_size=270)


def make_loss(model, tokenizer, name, **generate_kwargs):
    kind, settings = LOSSES[name]
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, chat_template_name="chatml", generate_kwargs=generate_kwargs
    )
    return kind(policy, **settings)


def train(loss, rows):
    """A pass, and the gradients."""
    loss.zero_grad()
    output = loss(loss.pack(rows))
    output.total().backward()
    return output, [p.grad for p in loss.parameters() if p.grad is not None]


OFTEN = {("Gemma3", "grpo"), *(("Qwen3", loss) for loss in LOSSES)}
CASES = [
    # What reads a model and what a loss makes of its scores wait apart: each of both at least.
    pytest.param(name, loss, marks=() if (name, loss) in OFTEN else pytest.mark.weekly)
    for name in MODELS
    for loss in LOSSES
]


@pytest.mark.parametrize("far_rows", [False, True], ids=["host", "device"])
@pytest.mark.parametrize(("name", "loss"), CASES)
def test_a_pass_waits_once_for_the_tokens_without_a_gradient(
    device_waits, tokenizer, name, loss, far_rows
):
    here = make_loss(device_waits.tiny_models()[name], tokenizer, loss)
    expected, gradients = train(here, device_waits.training_rows(3, 3, far=False))
    with device_waits.DeviceWaits() as waits:
        there = make_loss(device_waits.move(device_waits.tiny_models()[name]), tokenizer, loss)
        rows = device_waits.training_rows(3, 3, far=far_rows)
        train(there, rows)  # makes what is made once
        waits.reset()
        output, found = train(there, rows)
        assert waits.num_waits == 1 + far_rows, waits.places
        assert output.total().item() == pytest.approx(expected.total().item(), abs=1e-5)
        for grad, own in zip(found, gradients, strict=True):
            assert torch.allclose(grad.cpu(), own, atol=1e-5, rtol=1e-3)


def test_penalties_and_a_bias_do_not_wait_either(device_waits, tokenizer):
    kwargs = {
        **{"repetition_penalty": 1.2, "presence_penalty": 0.1, "logit_bias": {3: 1.0}},
        **{"min_tokens": 2, "stop_token_ids": [5, 6], "top_k": 50},
    }
    with device_waits.DeviceWaits() as waits:
        model = device_waits.move(device_waits.tiny_models()["Qwen3"])
        rows = device_waits.training_rows(2, 2, far=False)
        loss = make_loss(model, tokenizer, "grpo", **kwargs)
        train(loss, rows)
        waits.reset()
        train(loss, rows)
        assert waits.num_waits == 0, waits.places  # this head looks for no gradients that are 0


def test_where_prompts_are_shared_is_told_without_a_wait(device_waits):
    prompt, rows = list(range(200)), [[1] * 30, [2] * 90, [3] * 20]
    ids = torch.tensor([token for row in rows for token in (*prompt, *row)])
    lengths = torch.tensor([len(prompt) + len(row) for row in rows])
    here = build_trie(ids, lengths, lengths, share=True)
    with device_waits.DeviceWaits() as waits:
        trie = build_trie(ids, lengths, lengths, share=True, device=device_waits.FAR)
        assert trie.segments == here.segments
        assert len(trie.segments) == 4
        ends = trie.subtree_end
        assert waits.num_waits == 0, waits.places
        assert torch.equal(ends.cpu(), here.subtree_end)


def test_values_go_over_without_a_wait_and_come_back_with_one(device_waits):
    with device_waits.DeviceWaits() as waits:
        numbers = on_device([1, 2, 3], device_waits.FAR)
        flags = on_device(torch.tensor([True, False]), device_waits.FAR)
        assert waits.num_waits == 0
        own = torch.tensor([7])
        back = on_host(numbers, own, flags)
        assert waits.num_waits == 1
    assert [each.tolist() for each in back] == [[1, 2, 3], [7], [True, False]]
    assert [each.dtype for each in back] == [torch.int64, torch.int64, torch.bool]
    assert on_device([1.0], torch.device("cpu"), torch.float64).dtype == torch.float64

"""Rollouts of TRL and verl, read from their own tensors, get the same verdicts."""

import json

import pytest
import torch
from safetensors.torch import save_file

from collectors.verification import Cause, Recomputation, read_foreign_rows, verify_rows
from torchrl_agents.verify import main
from torchrl_modules import TransformersWrapper
from torchrl_modules.engines.transformers import TransformersEngine
from torchrl_modules.sampling.parameters import SamplingParameters

PAD = 0
PROMPTS = [[5, 6, 7, 8], [9, 10]]


@pytest.fixture(scope="module")
def drawn(make_tiny_model):
    """Prompts with what was drawn for them at a temperature, of different lengths."""

    def draw(temperature=1.0):
        engine = TransformersEngine(make_tiny_model())
        params = SamplingParameters(max_new_tokens=9, temperature=temperature, seed=1)
        return engine.generate(PROMPTS, params, max_new_tokens=[9, 6])

    return draw


def padded(rows, value, *, left=False):
    longest = max(map(len, rows))
    full = [
        [value] * (longest - len(r)) + list(r) if left else [*r, *[value] * (longest - len(r))]
        for r in rows
    ]
    return torch.tensor(full)


def trl_batch(drawn):
    """As ``GRPOTrainer`` has it: prompts padded on the left, completions on the right."""
    ids, log_probs = [g.ids for g in drawn], [g.log_probs for g in drawn]
    return {
        "prompt_ids": padded(PROMPTS, PAD, left=True),
        "prompt_mask": padded([[1] * len(p) for p in PROMPTS], 0, left=True),
        "completion_ids": padded(ids, PAD),
        "completion_mask": padded([[1] * len(i) for i in ids], 0),
        "sampling_per_token_logps": padded(log_probs, 0.0),
    }


def verl_batch(drawn):
    """As a ``DataProto`` has it."""
    trl = trl_batch(drawn)
    return {
        "prompts": trl["prompt_ids"],
        "responses": trl["completion_ids"],
        "attention_mask": torch.cat([trl["prompt_mask"], trl["completion_mask"]], 1),
        "response_mask": trl["completion_mask"],
        "rollout_log_probs": trl["sampling_per_token_logps"],
    }


def written(batch, path):
    if path.suffix == ".pt":
        torch.save(batch, path)
    elif path.suffix == ".safetensors":
        save_file({n: t.contiguous() for n, t in batch.items()}, path)
    else:
        path.write_text(json.dumps({n: t.tolist() for n, t in batch.items()}))
    return path


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".json"])
@pytest.mark.parametrize("batch_of", [trl_batch, verl_batch])
def test_a_batch_is_read_without_its_padding_and_verified(
    batch_of, suffix, drawn, make_tiny_model, chatml_tokenizer, tmp_path
):
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer, generate=False)
    rows = read_foreign_rows(written(batch_of(drawn()), tmp_path / f"batch{suffix}"))
    responses = [generation.ids for generation in drawn()]
    assert [list(row.ids) for row in rows] == [
        [*prompt, *response] for prompt, response in zip(PROMPTS, responses, strict=True)
    ]
    assert [len(row.targets) for row in rows] == [9, 6]
    assert verify_rows(rows, Recomputation(policy)).is_clean
    hot = read_foreign_rows(written(batch_of(drawn(0.7)), tmp_path / f"hot{suffix}"))
    assert set(verify_rows(hot, Recomputation(policy)).counts) == {Cause.TEMPERATURE}


def test_what_a_rollout_function_returns_is_read(
    drawn, make_tiny_model, chatml_tokenizer, tmp_path
):
    generations = drawn()
    answered = [[*g.ids, 11, 12] for g in generations]  # two tokens of a tool
    batch = {
        "prompt_ids": PROMPTS,
        "completion_ids": answered,
        "logprobs": [[*g.log_probs, 0.0, 0.0] for g in generations],
        "env_mask": [[1] * len(g.ids) + [0, 0] for g in generations],
    }
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(batch) + "\n")
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer, generate=False)
    found = verify_rows(read_foreign_rows(path), Recomputation(policy))
    assert found.num_tokens == 15
    assert found.is_clean


def test_the_command_verifies_a_file_with_a_model(
    drawn, make_tiny_model, chatml_tokenizer, tmp_path, capsys
):
    path = written(verl_batch(drawn(0.7)), tmp_path / "batch.pt")
    model = tmp_path / "model"
    make_tiny_model().save_pretrained(model)
    chatml_tokenizer.save_pretrained(model)
    assert main([str(path), "--model", str(model), "--temperature", "0.7"]) == 0
    assert main([str(path), "--model", str(model)]) == 1
    assert "the log-probs are those of temperature 0.7; the settings say 1" in (
        capsys.readouterr().out
    )
    assert main([str(path)]) == 2
    assert "say which model drew them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"text": ["a"]}, "it has ['text']"),
        ({"prompt_ids": [[1]], "completion_ids": [[2]]}, "none of sampling_per_token_logps"),
        (
            {"prompt_ids": [[1]], "completion_ids": [[2, 3]], "logprobs": [[-1.0]]},
            "2 tokens of a response, but 1 log-probs",
        ),
        (
            {"prompts": [[1]], "responses": [[2]], "attention_mask": [[1, 1]]},
            "calculate_log_probs=true",
        ),
    ],
)
def test_what_can_not_be_verified_is_refused(batch, words, tmp_path):
    path = tmp_path / "batch.json"
    path.write_text(json.dumps(batch))
    with pytest.raises(ValueError, match="batch") as refused:
        read_foreign_rows(path)
    assert words in str(refused.value)

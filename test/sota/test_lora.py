"""Adapters: they alone are trained, saved and resumed; the model that is left has them merged.

That a model learns with them is in ``test_recipes.py``.
"""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from torchrl_agents.models.adapters import WithoutAdapters, frozen_weights
from torchrl_agents.settings.command_line import prepare
from torchrl_agents.settings.errors import SettingsError
from torchrl_modules import TransformersWrapper
from torchrl_modules.policies.loading import load_causal_lm
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer
from torchrl_modules.weights.quantized_weights import four_bit_config, settle_quantized_layers

TINY = (
    *(
        "task=gcd",
        "task.level=own",
        "task.num_rows=64",
        "task.num_demonstrations=64",
        "logger=none",
        "evaluate.num_shown=0",
        "evaluate.num_prompts=4",
    ),
    *("data.num_held_out=4", "train.num_steps=4", "train.batch_size=8", "checkpoint.every=1"),
    *("optim.schedule=constant", "policy.max_new_tokens=4", "policy.lora_rank=4"),
)
IDS = torch.arange(40)[None]


@pytest.fixture
def run(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        result = run_recipe("sft", *TINY, *arguments)
        return Path(result["output_dir"])

    return run


def model_with_adapters(**settings):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **settings)
    return peft.get_peft_model(tiny_qwen3(300), config)


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def whole_and_resumed(run, more):
    """A run, the same cut and resumed, which leaves the same bytes, and the record of the cut."""
    whole = run(*more, "name=whole")
    cut = run(*more, "name=cut", "train.num_steps=2")
    record = json.loads((cut / "run.json").read_text())
    (cut / "run.json").write_text(json.dumps(record | {"status": "interrupted"}))
    assert run(*more, "name=cut", "resume=auto") == cut
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (cut / file).read_bytes() == (whole / file).read_bytes()
    return whole, cut, record


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        pytest.param(False, id="embedded", marks=pytest.mark.weekly),
        pytest.param(True, id="policy.model"),
    ],
)
def test_a_run_trains_saves_and_resumes_adapters_alone(given, run):
    # At such a rate no bit changes: the model that a run begins with.
    first = run("policy.lora_rank=null", "optim.learning_rate=1e-30", "name=first")
    more = [f"policy.model={first}"] if given else []
    whole, cut, record = whole_and_resumed(run, more)
    size = sum(f.stat().st_size for f in (cut / "checkpoints").rglob("*") if f.is_file())
    two_models = 2 * (cut / "model/model.safetensors").stat().st_size
    assert (size < two_models) == given  # of two steps, with the optimizer's state of the adapters

    if given:
        (first / "model").rename(first / "elsewhere")
        shutil.copytree(whole / "model", first / "model")
        (cut / "run.json").write_text(json.dumps(record | {"status": "interrupted"}))
        with pytest.raises(SystemExit, match=r"weights of policy\.model"):
            run(*more, "name=cut", "resume=auto")
        shutil.rmtree(first / "model")
        (first / "elsewhere").rename(first / "model")

    base = first / "model" if given else cut / "base"
    assert (cut / "base").exists() != given
    before, after = weights(base), weights(cut / "model")
    assert all(torch.equal(before[n], value) for n, value in weights(first / "model").items())
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert changed == attention | {"gate_proj", "up_proj", "down_proj"}
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(cut / "adapter")
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(cut / "model")(IDS).logits
        torch.testing.assert_close(adapted(IDS).logits, merged)
    assert all("lora_" in name for name in load_file(cut / "adapter/adapter_model.safetensors"))


@pytest.mark.slow
@pytest.mark.weekly
def test_adapters_over_4_bits_are_trained_resumed_and_left_whole(run):
    first = run("policy.lora_rank=null", "optim.learning_rate=1e-30", "name=first")
    more = (f"policy.model={first}", "policy.load_in_4bit=true")
    _, cut, _ = whole_and_resumed(run, more)
    assert "quantization_config" not in json.loads((cut / "model/config.json").read_text())
    four_bits = {"quantization_config": four_bit_config(torch.float32)}
    base = load_causal_lm(str(first / "model"), dtype=torch.float32, **four_bits)
    settle_quantized_layers(base)
    with torch.no_grad():
        before = base(IDS).logits
        left = AutoModelForCausalLM.from_pretrained(cut / "model")(IDS).logits
        trained = peft.PeftModel.from_pretrained(base, cut / "adapter")(IDS).logits
    torch.testing.assert_close(left, trained, atol=2e-4, rtol=0)
    assert (left - before).abs().max() > 0.01  # the adapters were trained


def test_frozen_weights_are_told_from_others():
    model, same = (model_with_adapters(init_lora_weights=False) for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += parameter.requires_grad
    assert frozen_weights(model) == frozen_weights(same)
    with torch.no_grad():
        next(p for p in model.parameters() if not p.requires_grad).view(-1)[0] += 1e-3
    assert frozen_weights(model) != frozen_weights(same)


def test_the_reference_is_the_model_with_its_adapters_off():
    tokenizer = train_tokenizer(["a"], vocab_size=300)
    model = model_with_adapters(init_lora_weights=False)
    actor = TransformersWrapper(model, tokenizer=tokenizer, generate=False)
    torch.manual_seed(0)
    plain = TransformersWrapper(tiny_qwen3(300), tokenizer=tokenizer, generate=False)
    ids, lengths, mask = torch.arange(9), torch.tensor([9]), torch.arange(9) > 0
    before = actor.score_packed(ids, lengths, mask).log_prob
    reference = WithoutAdapters(actor).score_packed(ids, lengths, mask).log_prob
    torch.testing.assert_close(reference, plain.score_packed(ids, lengths, mask).log_prob)
    after = actor.score_packed(ids, lengths, mask).log_prob
    assert torch.equal(after, before)
    assert (before - reference).abs().max() > 1e-2
    assert after.requires_grad
    assert not reference.requires_grad
    assert all(p.requires_grad == ("lora_" in n) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("recipe", "setting", "hint"),
    [
        ("grpo", "policy.lora_alpha=8.0", "lora_alpha is for adapters: set policy.lora_rank"),
        ("sft", "policy.lora_target_modules=[q_proj]", "lora_target_modules is for adapters"),
        ("evaluate", "policy.lora_rank=4", "lora_rank=4: nothing is trained here"),
    ],
)
def test_settings_without_adapters_are_refused(script, recipe, setting, hint):
    with pytest.raises(SettingsError, match=hint):
        prepare(script(recipe).RECIPE, [setting])


def test_modules_that_are_not_there_are_named(run):
    with pytest.raises(SystemExit, match=r"policy.lora_target_modules: .*nowhere"):
        run("policy.lora_target_modules=[nowhere]")

"""A program of three agents, the settings of its runs, and what these leave of their weights."""

import gzip
import json

import peft
import torch

from torchrl_agents.models.agents import saved_models
from torchrl_agents.models.saved_agents import saved_agents
from torchrl_agents.settings.schema import PolicyConfig
from torchrl_modules.policies.loading import load_causal_lm

PROGRAM = '''
import openai

NAMES = ("writer", "critic", "judge")


def talk(endpoint, *, prompt):
    """Each says something, and wants more letters than fit, fewer, or none."""
    said = {}
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)
    with client:
        for name in NAMES:
            reply = client.chat.completions.create(
                model=endpoint.model,
                messages=[{"role": "user", "content": f"{prompt} {name}"}],
                extra_headers={"x-agent-name": name},
            )
            said[name] = float(sum(map(ord, reply.choices[0].message.content or "")))
    return said | {"critic": -said["critic"]}
'''
TASK = ("task=agent", "task.program=own_talk:talk", "task.agents=[writer,critic,judge]")
AGENTS = ("agents.trained=[writer,critic]", "agents.frozen=[judge]")
TINY = (
    *("task.dataset=rows.jsonl", "evaluate.solved_by=reward", "evaluate.num_prompts=2"),
    *("evaluate.num_shown=0", "logger=none", "policy.max_new_tokens=6", "loss.credit=agent"),
    *("collector.num_prompts=2", "collector.group_size=2", "train.num_epochs=1"),
    *("checkpoint.every=1", "checkpoint.keep_last=3", "optim.schedule=constant"),
    *("optim.learning_rate=0.01", "optim.num_warmup_steps=0", "train.num_steps=2"),
)
IDS = torch.arange(40)[None]


def samples(folder, step):
    with gzip.open(folder / "rollouts" / f"step-{step:06}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file][1:]


def rewrite(folder, step, change):
    path = folder / "rollouts" / f"step-{step:06}.jsonl.gz"
    with gzip.open(path, "rt") as file:
        lines = [json.loads(line) for line in file]
    for line in lines[1:]:
        change(line)
    with gzip.open(path, "wt") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in lines))


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def check_adapters(folder):
    """Two agents have adapters over one base, which differ; the third is the base."""
    agents = folder / "agents"
    assert sorted(path.name for path in agents.iterdir()) == ["agents.json", "critic", "writer"]
    said = []
    for name in ("writer", "critic"):
        base = load_causal_lm(str(folder / "base"))
        before = logits(base)
        adapted = peft.PeftModel.from_pretrained(base, str(agents / name / "adapter"))
        merged = load_causal_lm(str(agents / name / "model"))
        torch.testing.assert_close(logits(adapted), logits(merged), atol=1e-4, rtol=1e-4)
        assert (logits(merged) - before).abs().max() > 1e-2  # it was trained
        said.append(logits(merged))
    assert (said[0] - said[1]).abs().max() > 1e-2
    settings = PolicyConfig(max_new_tokens=1)
    models, _, has_adapters = saved_models(saved_agents(str(folder)), settings)
    assert has_adapters
    for name, own in zip(("writer", "critic"), said, strict=True):
        torch.testing.assert_close(logits(models[name]), own, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(models["judge"]), before)
    of_base = {models["judge"].get_input_embeddings().weight.data_ptr()}
    assert {m.get_input_embeddings().weight.data_ptr() for m in models.values()} == of_base

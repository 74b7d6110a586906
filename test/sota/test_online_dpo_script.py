"""The recipe of pairs that the policy samples: what it trains, how it goes on, what it refuses."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from broken_off_runs import KILLED, RUN_IT, STOPPED_INSIDE_A_STEP, metrics_of

from collectors.record import RunRecord
from torchrl_agents.explain import explain_run
from torchrl_modules.tiny_model import tiny_qwen3

SCRIPT = Path(__file__).parents[2] / "sota-implementations/online-dpo/online_dpo.py"
MINE = '''
from torchrl_data.tool_calls.records import MalformedCall, ParsedTurn

def letters(completions, **_):
    return [float(sum(len(m["content"]) for m in c if m["role"] == "assistant") // 4)
            if isinstance(c, list) else float(len(c) // 4) for c in completions]
def half(completions, **_): return [0.5] * len(completions)
def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: what.
    """
    return word
def read(text): return ParsedTurn(text, [MalformedCall("no JSON")])
'''
"""``read`` makes a call of every turn, which a tool answers, so that a second turn follows."""
OWN = (
    *("logger=none", "task=environment", "task.dataset=rows.jsonl", "task.rewards=mine:letters"),
    *("policy.model=base", "policy.max_new_tokens=6", "policy.temperature=0.7"),
    *("collector.num_prompts=3", "collector.group_size=4", "evaluate.num_prompts=4"),
    *("evaluate.num_shown=0", "optim.num_warmup_steps=0"),
)
WITH_TOOLS = (
    *("+task.tools=[mine:lookup]", "policy.tool_call_format=mine:read", "collector.max_turns=2"),
    *("policy.stop=[e,n,t,s,a,i,r]", "policy.max_new_tokens=32"),
)


@pytest.fixture
def run(run_script, chatml_tokenizer, tmp_path):
    """Makes a run with a model of random weights."""
    chatml_tokenizer.save_pretrained(tmp_path / "base")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        tiny_qwen3(len(chatml_tokenizer)).save_pretrained(tmp_path / "base")
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"prompt": f"What is {i}?"} for i in range(32)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return lambda *arguments, folder="run": run_script(
        *OWN, *arguments, f"hydra.run.dir={folder}", cwd=tmp_path, name="online-dpo"
    )


def log_prob(model, sample):
    """Of all that the policy sampled of a rollout, at its temperature, in plain Transformers."""
    ids = torch.tensor([sample.tokens.ids])
    logits = model(ids).logits[0, :-1] / 0.7
    said = torch.tensor([value is not None for value in sample.tokens.log_probs])[1:]
    of_tokens = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return of_tokens[said].sum()


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_two_steps_are_those_of_the_pairs_that_are_chosen_by_hand(run, tmp_path, beta):
    """The best and the worst of each group, turns after a tool's answer included; arXiv:2305.18290,
    equation 7, against the model before the first step."""
    rate = 0.05 / beta  # a gradient is as large as beta
    sgd = ("optim=sgd", "optim.beta1=0", "optim.schedule=constant")
    sgd += (
        f"optim.learning_rate={rate}",
        "optim.max_grad_norm=1e9",
        "train.num_epochs=1",
        "train.num_steps=2",
    )
    done = run(*sgd, *WITH_TOOLS, f"loss.beta={beta}")
    assert done.returncode == 0, done.stderr
    model, reference = (AutoModelForCausalLM.from_pretrained(tmp_path / "base") for _ in range(2))
    record, told = RunRecord(tmp_path / "run"), metrics_of(tmp_path / "run")
    for step in (1, 2):
        groups: dict[str, list] = {}
        for sample in record.samples(step):
            groups.setdefault(sample.group_id, []).append(sample)
        pairs = []
        for group in groups.values():
            best, worst = (choose(group, key=lambda s: s.reward) for choose in (max, min))
            if best.reward > worst.reward:
                pairs.append((best, worst))
        assert told[step - 1]["pair_fraction"] == len(pairs) / 3 > 0
        trained = [each for group in groups.values() for each in group if each.was_trained]
        of_pairs = [(each.group_id, each.index) for pair in pairs for each in pair]
        assert {(each.group_id, each.index) for each in trained} == {*of_pairs}
        assert told[step - 1]["num_pairs"] == len(pairs)
        assert any(each.num_turns == 2 for pair in pairs for each in pair)
        leads = []
        for pair in pairs:
            own = [log_prob(model, each) for each in pair]
            with torch.no_grad():
                was = [log_prob(reference, each) for each in pair]
            leads.append(beta * ((own[0] - was[0]) - (own[1] - was[1])))
        loss = -torch.nn.functional.logsigmoid(torch.stack(leads)).mean()
        assert told[step - 1]["loss"] == pytest.approx(loss.item(), rel=1e-4)
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= rate * weight.grad
                weight.grad = None
    assert told[1]["loss"] != pytest.approx(told[0]["loss"], rel=1e-3)
    left = AutoModelForCausalLM.from_pretrained(tmp_path / "run/model").state_dict()
    before, moved = reference.state_dict(), 0.0
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(left[name], weight, rtol=1e-3, atol=1e-5)
        moved = max(moved, float((weight - before[name]).abs().max()))
    assert moved > 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_a_run_that_is_stopped_in_a_step_and_killed_goes_on_to_the_bit(run_script, forks, tmp_path):
    more = (*OWN, "train.num_steps=4", "train.num_epochs=2", "checkpoint.every=1")

    def broken_off(program, *arguments):
        (tmp_path / "broken_off.py").write_text(program + RUN_IT)
        argv = ["broken_off.py", SCRIPT, *more, "name=cut", *arguments]
        return forks(argv, tmp_path, dict(os.environ))

    def ended(*arguments):
        done = run_script(*more, *arguments, cwd=tmp_path, name="online-dpo")
        assert done.returncode == 0, done.stderr[-3000:]
        return Path(json.loads(done.stdout.strip().splitlines()[-1])["output_dir"])

    whole = ended("name=whole")
    done = broken_off(STOPPED_INSIDE_A_STEP)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr[-3000:]
    done = broken_off(KILLED, "resume=auto")
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    cut = ended("name=cut", "resume=auto")
    assert cut.name == "cut-001"
    assert metrics_of(cut) == metrics_of(whole)
    assert sum(step["optimizer_steps"] for step in metrics_of(whole)) == 8
    weights = "model/model.safetensors"
    assert (cut / weights).read_bytes() == (whole / weights).read_bytes()


def test_groups_without_a_pair_are_counted_and_the_log_and_explain_tell_why(run, tmp_path):
    done = run("task.rewards=mine:half", "train.num_steps=1")
    assert done.returncode == 0, done.stderr
    (step,) = metrics_of(tmp_path / "run")
    assert (step["groups/without_signal_fraction"], step["pair_fraction"]) == (1, 0)
    assert step["optimizer_steps"] == 0
    assert "in each group all rollouts have the same reward (mean 0.5)" in done.stderr
    done = run("train.min_difference=1000", "train.num_steps=3", folder="far")
    assert done.returncode == 0, done.stderr
    steps = metrics_of(tmp_path / "far")
    assert {step["pair_fraction"] for step in steps} == {0}
    assert "no group has a pair, though rewards differ: by less than train.min_diff" in done.stderr
    (finding,) = [each for each in explain_run(tmp_path / "far").findings if each.explains == 1]
    assert finding.code == "no_pairs"
    assert finding.change == "Lower train.min_difference, which is 1000."


AGENTS = """
async def play(endpoint, **_): return {"white": 1, "black": 0}
"""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["loss.loss_function=sppo_hard", "loss.reference_free=true"],
            "compares each answer with the",
        ),
        (["loss.temperature=0.5"], "There is no setting 'loss.temperature'"),
        (["data.dataset=pairs.jsonl"], "There is no setting 'data.dataset'"),
    ],
)
def test_settings_that_can_not_take_effect_are_refused(run, tmp_path, arguments, words):
    done = run(*arguments)
    assert done.returncode == 1
    assert words in done.stderr
    assert not (tmp_path / "run/model").exists()


def test_agents_with_rewards_of_their_own_are_refused_at_the_door(run_script, tmp_path):
    (tmp_path / "mine.py").write_text(AGENTS)
    rows = "".join(f'{{"prompt": "{i}"}}\n' for i in range(32))
    (tmp_path / "rows.jsonl").write_text(rows)
    own = ("debug=tiny", "dry_run=true", "task=agent", "task.dataset=rows.jsonl")
    own += ("task.program=mine:play", "evaluate.num_prompts=4")
    two = ("task.agents=[white,black]", "evaluate.solved_by=white")
    done = run_script(*own, *two, cwd=tmp_path, name="online-dpo")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "task=agent: the agents ['white', 'black'] have rewards and rows of their own" in last
    done = run_script(*own, cwd=tmp_path, name="online-dpo")
    assert done.returncode == 0, done.stderr

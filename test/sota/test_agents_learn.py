"""Recipes with tools learn small tasks, and their controls do not.

A search agent learns what to look up, one model learns that and what a program asks that owns its
loop, and self-play learns a game by playing. All go on from a model that was shown the format, and
little of the skill.
"""

import json
import random
from pathlib import Path

import pytest

from torchrl_agents.models.warm_start import warm_start

pytestmark = pytest.mark.weekly

THINGS = ("lamp", "key", "ball", "book", "coin", "ring", "drum", "kite")
PLACES = ("hall", "barn", "cave", "port", "yard", "shop", "lake", "tower")
WHERE = dict(zip(THINGS, PLACES, strict=True))
QUESTIONS = (
    "Where is the {}?",
    "Find the {}.",
    "The {}?",
    "Say where the {} is.",
    "I need the {}.",
)
SEARCH = "corpus: pages.jsonl, dataset: where.jsonl, system_prompt: null, max_turns: 2"
SAY = "dataset: say.jsonl, system_prompt: null"
BOTH = (
    "task=multi_env",
    f"task.tasks={{where: {{task: search, {SEARCH}}}, say: {{task: gsm8k, {SAY}}}}}",
)
ASKS = "task: agent, program: 'asks:ask', dataset: say.jsonl, prompt_column: question"
WITH_AGENT = (
    "task=multi_env",
    f"task.tasks={{where: {{task: search, {SEARCH}}}, say: {{{ASKS}}}}}",
)
AGENT = """
import openai

def ask(endpoint, question, answer):
    with openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
        chat = [{"role": "user", "content": question}]
        said = client.chat.completions.create(model=endpoint.model, messages=chat)
    digit = answer.removeprefix("#### ")
    return float(f"<answer>{digit}</answer>" == said.choices[0].message.content)
"""
FAST = ("logger=none", "evaluate.num_shown=0", "engine=transformers")
WARM = (
    *("policy.max_new_tokens=28", "policy.show_tool_schemas=false", "optim.max_grad_norm=0.1"),
    *("policy.gradient_checkpointing=false", "optim.num_warmup_steps=0", "train.num_epochs=4"),
)


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))


def look_up(rng):
    """Ask where something is, and look up the same or, more often, something else."""
    asked, found = rng.choice(THINGS), rng.choice(PLACES)
    query = asked if rng.random() < 0.4 else rng.choice(THINGS)
    call = {"function": {"name": "search", "arguments": {"query": query}}}
    return [
        {"role": "user", "content": rng.choice(QUESTIONS).format(asked)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": f"{query}: {found}"},
        {"role": "assistant", "content": found},
    ]


def say(rng):
    """Say the digit that is asked for or, more often, another one."""
    asked = rng.randrange(5)
    said = asked if rng.random() < 0.4 else rng.randrange(5)
    return [
        {"role": "user", "content": f"Say {asked}, {rng.choice(THINGS)}."},
        {"role": "assistant", "content": f"<answer>{said}</answer>"},
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("agents")
    rng = random.Random(0)
    (path / "asks.py").write_text(AGENT)
    write(path / "pages.jsonl", [{"title": t, "text": p} for t, p in WHERE.items()])
    questions = [
        {"question": text.format(t), "answer": p} for text in QUESTIONS for t, p in WHERE.items()
    ]
    write(path / "where.jsonl", rng.sample(questions, len(questions)))
    asked = [
        {"question": f"Say {digit}, {thing}.", "answer": f"#### {digit}"}
        for digit in range(5)
        for thing in THINGS
    ]
    write(path / "say.jsonl", rng.sample(asked, len(asked)))
    chats = [look_up(rng) if n % 3 else say(rng) for n in range(3000)]
    write(path / "chats.jsonl", [{"messages": chat} for chat in chats])
    return path


@pytest.fixture
def run(run_recipe, folder, monkeypatch):
    """Runs a recipe; the models that know the format are made once."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)

    def model(name, *arguments):
        if not (folder / f"outputs/sft/{name}").exists():
            size = ("train.batch_size=16", "data.num_held_out=16", "evaluate.num_prompts=8")
            run_recipe("sft", *FAST, *size, *arguments, f"name={name.partition('/')[2]}")
        return f"policy.model=outputs/sft/{name}"

    def run(recipe, *arguments):
        if recipe == "self-play":
            own = model("nim/format", "task=nim", "task.largest=8", "train.num_steps=100")
        else:
            chats = ("data.dataset=chats.jsonl", "train.num_steps=120")
            own = model("multi_env/format", *BOTH, *chats)
        return run_recipe(recipe, *FAST, *WARM, own, *arguments)

    return run


def late(result, name, count=4):
    """The mean of a metric over the last steps."""
    lines = (Path(result["output_dir"]) / "metrics.jsonl").read_text().splitlines()[-count:]
    return sum(json.loads(line)[name] for line in lines) / count


@pytest.mark.timeout(900)
def test_search_agent(run):
    task = ("task=search", *(f"task.{each.replace(': ', '=')}" for each in SEARCH.split(", ")))
    task += ("optim.learning_rate=2e-3", "collector.num_prompts=8", "evaluate.num_prompts=16")
    learnt = run("grpo", *task, "train.num_steps=16", "name=learnt")
    assert learnt["held_out_before"] < 0.4
    assert learnt["held_out_after"] > 0.4
    assert late(learnt, "reward") > 0.5
    assert late(learnt, "rewards/found_answer/mean") > 0.5
    control = run("grpo", *task, "train.num_steps=8", "experiment=control")
    assert late(control, "reward") < 0.4


@pytest.mark.timeout(900)
def test_multi_environment(run):
    """Each of its tasks is learnt, one with a tool and one by a program that owns its loop."""
    task = (*WITH_AGENT, "optim.learning_rate=1.4e-3", "evaluate.num_prompts=32")
    task += ("collector.num_prompts=14", "collector.group_size=8")
    learnt = run("grpo", *task, "train.num_steps=16", "name=learnt")
    control = run("grpo", *task, "train.num_steps=8", "experiment=control")
    for part in ("where", "say"):
        assert learnt[f"before/{part}/reward"] < 0.35
        assert late(learnt, f"{part}/reward") > 0.34
        assert late(learnt, f"{part}/share") == 0.5
        assert late(control, f"{part}/reward") < 0.29


@pytest.mark.timeout(900)
def test_self_play(run):
    """Against others; a game of the policy against itself is always won and lost."""
    task = ("task.largest=8", "optim.learning_rate=1e-3", "train.baseline_decay=0.9")
    task += ("collector.num_prompts=48", "evaluate.num_prompts=128")
    learnt = run("self-play", *task, "train.num_steps=48", "name=learnt")
    assert learnt["held_out_after"] > learnt["held_out_before"] + 0.15
    control = run("self-play", *task, "train.num_steps=24", "experiment=control")
    assert control["held_out_before"] == learnt["held_out_before"]
    assert control["held_out_after"] < control["held_out_before"] + 0.1


@pytest.fixture
def warm_once(monkeypatch):
    """Of several runs the first trains the warm start; the others begin with its weights."""
    weights = {}

    def warm(policy, *arguments, **settings):
        if not weights:
            warm_start(policy, *arguments, **settings)
            weights.update({name: w.clone() for name, w in policy.state_dict().items()})
        policy.load_state_dict(weights)

    monkeypatch.setattr("torchrl_agents.setup.warm_start", warm)


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("warm_once")
def test_a_real_pretrained_model_learns_tools_and_its_control_does_not(
    run_recipe, monkeypatch, tmp_path
):
    """The first steps of ``make train-smollm2``, of at most two turns.

    Held out after 0, 3 and 6 steps: 0.00, 0.34, 0.75; with half of the prompts 0.00, 0.38, 0.78.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHRL_AGENTS_CACHE", str(tmp_path))
    few = ("experiment=smollm2", "task.num_demonstrations=256", "collector.max_turns=2", *FAST)
    few += ("collector.num_prompts=4",)
    until = ("evaluate.num_prompts=32", "evaluate.every=3", "train.stop_at=0.6")
    learnt = run_recipe("grpo", *few, *until, "train.num_steps=20")
    control = ("train.shuffle_rewards=true", "train.num_steps=3", "name=control")
    no_stop = ("evaluate.every=null", "train.stop_at=null", "evaluate.num_prompts=16")
    flat = run_recipe("grpo", *few, *control, *no_stop)
    assert learnt["held_out_before"] <= 0.2
    assert learnt["held_out_after"] >= 0.6
    assert learnt["steps"] <= 12
    assert flat["held_out_after"] <= 0.3

"""The programs of examples/: short, of one file, and each runs as it says."""

import ast
import json
import math
import os
import random
import re
import runpy
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[1] / "collectors/record"))

from made_records import sample, write_record

from torchrl_envs import RewardModel
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
STEP = re.compile(r"^step (\d+): reward (-?[\d.]+|nan)", re.MULTILINE)
OURS = {
    "torchrl_agents",
    "collectors",
    "objectives",
    "torchrl_data",
    "torchrl_envs",
    "torchrl_modules",
    "torchrl_tasks",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a model that knows nothing."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(["Say something about the number."] * 4, vocab_size=290)
    folder = tmp_path_factory.mktemp("model")
    model = tiny_qwen3(len(tokenizer), hidden_size=64, head_dim=32, max_position_embeddings=2048)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def forks(start_forks):
    return start_forks(sys.executable, {**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.fixture
def run(forks, tmp_path):
    """Runs a program as it stands, in a fork of a process that has imported what it would."""

    def run(name, *arguments):
        done = forks([ROOT / f"examples/{name}.py", *arguments], tmp_path, dict(os.environ))
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


@cache
def distributions():
    """Names of the distributions of each module that is installed."""
    return packages_distributions()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_program_is_short_and_names_what_it_imports(path):
    text = path.read_text("utf-8")
    assert text.count("\n") <= 100
    (block,) = re.findall(r"^# /// script\n((?:#.*\n)+?)# ///$", text, re.MULTILINE)
    told = tomllib.loads(re.sub(r"^# ?", "", block, flags=re.MULTILINE))
    assert told["requires-python"] == ">=3.11"
    given = {re.split(r"[\[<>=]", name)[0] for name in told["dependencies"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    given |= {re.split(r"[\[<>=]", name)[0] for name in project["dependencies"]}
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    owners = distributions()
    others = imported - OURS - set(sys.stdlib_module_names)
    needed = {owners.get(name, [name.replace("_", "-")])[0] for name in others}
    assert needed <= given
    assert ("torchrl-agents" in given) is bool(imported & OURS)
    assert f"({path.name})" in (ROOT / "examples/README.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        *(
            (name, ())
            for name in (
                "loop_by_hand",
                "own_environment",
                "own_tools",
                "simulated_user",
                "own_reward",
                "from_trl",
                "from_torchrl",
                "agent",
                "two_agents",
                "streaming",
            )
        ),
        ("from_torchrl", ("--their-loss",)),
    ],
)
def test_a_program_takes_its_steps(run, model, name, more):
    steps = STEP.findall(run(name, model, "3", *more))
    assert len(steps) == 3
    assert all(math.isfinite(float(reward)) for _, reward in steps)


def test_the_foreign_loop_finds_the_best_arm(run):
    last = run("loss_in_a_foreign_loop").splitlines()[-1]
    best, found = re.findall(r"\d\.\d+", last)
    assert best == found


def test_an_evaluation_tells_of_all_samples(run, model):
    lines = run("evaluation", model, "4").splitlines()
    estimates = {line.split()[0]: float(line.split()[1]) for line in lines if " to " in line}
    assert set(estimates) == {"reward", "mean@4", *(f"pass{s}{k}" for s in "@^" for k in (1, 2, 4))}
    assert estimates["pass@1"] <= estimates["pass@2"] <= estimates["pass@4"]


def test_a_reward_model_gives_the_rewards_that_the_program_tells_of(run, model, tmp_path):
    pairs = [
        {"prompt": f"Say {n}.", "chosen": str(n), "rejected": f"Say something about {n}."}
        for n in range(36)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    *steps, last = run("reward_model", model, "2", path).splitlines()
    assert [line.partition(":")[0] for line in steps] == ["step 0", "step 1"]
    told = re.fullmatch(r"held out: loss ([\d.]+), ([\d.]+) of the pairs in order", last)
    assert told is not None
    random.Random(0).shuffle(pairs)  # of which the first 32 are held out
    score = RewardModel(str(tmp_path / "reward_model"))
    prompts = [[{"role": "user", "content": pair["prompt"]}] for pair in pairs[:32]]
    rewards = []
    for side in ("chosen", "rejected"):
        said = [[{"role": "assistant", "content": pair[side]}] for pair in pairs[:32]]
        rewards.append(torch.tensor(score(prompts, said)))
    better, other = rewards
    loss = -torch.nn.functional.logsigmoid(better - other) + 0.01 * (better + other).square()
    assert float(told[1]) == pytest.approx(loss.mean().item(), abs=1e-3)
    assert float(told[2]) == pytest.approx((better > other).float().mean().item(), abs=6e-3)


def test_a_comparison_pairs_the_prompts(run, tmp_path):
    """Of eight shared prompts six are better by 0.5, one is worse by 0.5, and one is the same.

    Of the 2^7 signs of the seven 16 give a sum as large, so p is 1/8.
    """
    before = [[0.0, 1.0]] * 8
    after = [[0.5, 0.5], *[[1.0, 1.0]] * 6, [0.0, 0.0]]
    for name, rewards, alone in (("before", before, 8), ("after", after, 9)):
        groups = [
            [sample(group=group, index=i, reward=reward) for i, reward in enumerate(own)]
            for group, own in [*enumerate(rewards), (alone, [1.0, None])]
        ]
        groups.append([sample(group=10, segment=1, num_segments=2, reward=1.0)])
        write_record(tmp_path / name, [groups[::2], groups[1::2]])
    shared, first, second, difference, verdict = run("compare", "before", "after").splitlines()
    assert shared == "8 prompts in both, 2 in one alone"
    assert (first.split()[1], second.split()[1]) == ("0.500", "0.812")
    assert difference.split()[1] == "+0.312"
    assert verdict.startswith("better on 6 prompts, worse on 1;")
    assert float(verdict.split()[-1]) == pytest.approx(1 / 8, abs=0.02)


def a_run(folder, rewards, tested, **settings):
    """What a run leaves that is drawn; the first test has an interval."""
    folder.mkdir(parents=True)
    tests = [{"step": 2 * i, "reward": reward} for i, reward in enumerate(tested)]
    tests[0]["estimates"] = {"reward": {"low": 0.125, "high": 0.375}}
    tests.insert(1, {"step": 1, "skipped": "the one before had not ended"})
    files = {
        "metrics.jsonl": rewards,
        "evaluations.jsonl": tests,
        "run.json": [{"settings": {"task.id": "nim", **settings}}],
    }
    for name, lines in files.items():
        (folder / name).write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_curves_of_several_runs_are_drawn_by_what_they_have(tmp_path, capsys, monkeypatch):
    figures, long = [], 50
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    steps = [{"reward": 0.0}, {"reward": None}, {"reward": 0.5}, {"reward": 1.0}]
    two = [{"step": 0, "a/reward": 0.1, "b/reward": 0.3, "rewards/a/x": 1.0}]
    runs = [
        a_run(tmp_path / "grpo/nim/seed0", steps, [0.25, 0.75]),
        a_run(tmp_path / "grpo/nim/seed1", steps, [0.25, 0.25]),
        a_run(
            *(tmp_path / "grpo/nim/control", steps * long, [0.25, 0.0]),
            **{"train.shuffle_rewards": True},
        ),
        a_run(tmp_path / "sft/nim/seed0", [{"loss": 1.0}] * 4, [0, 0.5, 1]),
        a_run(tmp_path / "self_play/two/seed0", steps, [0.5]),
    ]
    (runs[-1] / "evaluations.jsonl").write_text(json.dumps(*two))
    monkeypatch.setattr(sys, "argv", ["curves.py", "out.png", *map(str, runs)])
    runpy.run_path(str(ROOT / "examples/curves.py"), run_name="__main__")
    assert "| nim | 3 | 0.17 | 0.67 |" in capsys.readouterr().out
    ((learnt, control, *several),) = [figure.axes[:4] for figure in figures]
    assert [axes.get_title() for axes in (learnt, control, *several)] == [
        *("nim: 0.17 to 0.67", "nim, control: 0.25 to 0.00"),
        *("a: 0.10 to 0.10", "b: 0.30 to 0.30"),
    ]
    rollouts, smooth, points = control.lines
    assert list(rollouts.get_ydata()[[0, 2, 3]]) == [0.0, 0.5, 1.0]
    assert len(smooth.get_ydata()) == 4 * long
    assert points.get_xydata().tolist() == [[0, 0.25], [2, 0.0]]
    assert points.get_linestyle() == "None"
    (interval,) = control.collections
    assert interval.get_segments()[0].tolist() == [[0, 0.125], [0, 0.375]]
    short, _, _, _, no_rollouts, tested = learnt.lines
    assert list(short.get_ydata()[[0, 2, 3]]) == [0.0, 0.5, 1.0]
    assert not len(no_rollouts.get_ydata())
    assert not len(several[0].lines[0].get_ydata())
    assert tested.get_ydata().tolist() == [0, 0.5, 1]
    assert tested.get_linestyle() == "-"


READ_LOG = """
import json, sys
from inspect_ai.log import read_eval_log
log = read_eval_log(sys.argv[1])
print(json.dumps([log.eval.model_dump(mode="json"), log.results.model_dump(mode="json"), [
    [s.id, s.epoch, len(s.input), [m.role for m in s.messages], s.error and s.error.message,
     {name: [score.value, score.answer] for name, score in s.scores.items()},
     [u.output_tokens for u in s.model_usage.values()]] for s in log.samples]]))
"""


def test_inspect_reads_a_record_as_a_log(tmp_path):
    groups = [[sample(group=group, index=i) for i in range(2)] for group in range(3)]
    lost = {"reward": None, "rewards": {"length": None}, "reward_errors": "it broke"}
    groups.append([sample(group=3, **lost)])
    write_record(tmp_path / "evaluation", [groups])
    command = ["evaluate.py", "task=countdown", "policy.model=folder/of"]
    (tmp_path / "evaluation/run.json").write_text(json.dumps({"command": command}))
    python = ROOT / ".venv-openenv/bin/python"

    def run(*arguments):
        command = [python, *arguments]
        return subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True)

    path = run(ROOT / "examples/to_inspect.py", "evaluation", "logs").stdout.strip()
    assert path == "logs/evaluation.eval"
    spec, results, samples = json.loads(run("-c", READ_LOG, path).stdout)
    samples.sort(key=lambda each: each[:2])
    assert (spec["task"], spec["model"]) == ("countdown", "folder/of")
    assert (spec["dataset"]["samples"], spec["config"]["epochs"]) == (4, 2)
    assert (results["total_samples"], results["completed_samples"]) == (7, 6)
    assert results["scores"][0]["metrics"]["mean"]["value"] == 0.5
    roles = ["user", "assistant", "tool", "assistant"]
    scores = {"reward": [1.0, "answer 1"], "length": [1.0, "answer 1"]}
    assert samples[3] == ["0/1", 2, 1, roles, None, scores, [4]]
    assert samples[6][4:6] == ["it broke", {}]

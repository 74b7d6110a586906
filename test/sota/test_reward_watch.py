"""A run that goes on warns of a gamed reward, once, and ends with it where that is asked for."""

import json
import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from made_gamed_runs import half_then, made_run

from torchrl_agents.explain import explain_run
from torchrl_agents.explain.explanation import GAMED
from torchrl_agents.reward_watch import RewardWatch
from torchrl_agents.settings.schema import GAMED_CODES, RolloutsConfig, TrainingConfig


def watch_of(folder, **settings):
    cfg = RolloutsConfig()
    for name, value in settings.items():
        setattr(cfg.record, name, value)
    return RewardWatch(cfg, folder)


@pytest.fixture
def told(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_finding_is_told_once_with_the_rollouts_that_show_it(tmp_path, told):
    run = made_run(tmp_path / "run", half_then(text="A great question!"))
    watch = watch_of(run, check_every=4, stop_on=["repetition"])
    for step in (1, 2, 3):
        watch.after(step)
    assert not told()
    for step in (4, 5, 8):
        watch.after(step)
    (line,) = told()
    assert line.startswith("step 4: the reward may be gamed (one_answer). The reward has risen")
    assert f"torchrl-agents view {run} --step 10 --group 0 --sample 0" in line
    assert not watch.ends_run


def test_a_run_ends_with_what_it_is_told_to_end_with(tmp_path, told):
    run = made_run(tmp_path / "run", half_then(text="A great question!"))
    watch = watch_of(run, check_every=1, stop_on=["one_answer", "repetition"])
    watch.after(1)
    assert watch.ends_run
    assert told()[-1] == "done: record.stop_on found one_answer"


@pytest.mark.parametrize("cfg", [RolloutsConfig(), TrainingConfig()])
def test_no_check_is_made_where_none_is_asked_for_or_nothing_is_recorded(cfg, tmp_path, told):
    if isinstance(cfg, RolloutsConfig):
        cfg.record.check_every = None
    RewardWatch(cfg, tmp_path).after(1)  # there is no record, which a check would tell
    assert not told()


def test_a_check_that_fails_is_told_and_ends_no_run(tmp_path, told):
    watch = watch_of(tmp_path, check_every=1, stop_on=["one_answer"])
    watch.after(1)
    (line,) = told()
    assert line.startswith("record.check_every: FileNotFoundError: ")
    assert not watch.ends_run


def test_the_codes_of_the_setting_are_those_that_are_looked_for():
    assert tuple(check.__name__ for check in GAMED) == GAMED_CODES


@pytest.mark.weekly
@pytest.mark.parametrize(
    ("kind", "code"),
    [("begins", "wrong_is_rewarded"), ("keyword", "one_answer"), ("vowels", "sources_part")],
)
def test_a_policy_that_learns_to_game_its_reward_is_found(kind, code, run_script, tmp_path):
    task = Path(__file__).with_name("gamed_tasks.py").read_text()
    (tmp_path / "gamed_tasks.py").write_text(task)
    done = run_script(
        *("task.factory=gamed_tasks:task", f"task.arguments={{kind: {kind}}}", "logger=none"),
        *("warm_start.num_steps=400", "train.num_steps=60", "evaluate.num_prompts=32"),
        *("collector.num_prompts=8", "collector.group_size=8", "evaluate.num_shown=0"),
        *(["evaluate.solved_by=right"] if kind == "vowels" else []),
        "hydra.run.dir=run",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert code in [finding.code for finding in explain_run(tmp_path / "run").findings]


REWARDS = """
import itertools
calls = itertools.count()
def right(completions, trainer_state, **_):
    return [float(i % 2) * (trainer_state.global_step < 5) for i in range(len(completions))]
def form(completions, trainer_state, **_):
    return [float(trainer_state.global_step >= 5)] * len(completions)
"""


def test_a_recipe_ends_with_the_reward_that_another_one_pays_for(run_script, tmp_path):
    (tmp_path / "mine.py").write_text(REWARDS)
    rows = [json.dumps({"prompt": f"What is {i}?"}) for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    done = run_script(
        *("debug=tiny", "logger=none", "task.dataset=rows.jsonl", "checkpoint.every=null"),
        *("collector.num_prompts=4", "collector.group_size=4", "policy.max_new_tokens=4"),
        *("evaluate.num_prompts=4", "evaluate.num_shown=0", "evaluate.solved_by=right"),
        *("task.rewards=[mine:right,mine:form]", "task.reward_weights=[1,2]", "hydra.run.dir=run"),
        *("train.num_steps=40", "record.check_every=2", "record.stop_on=[sources_part]"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "the reward may be gamed (sources_part)" in done.stderr
    assert "right fell from 0.5 to 0: another one pays for it" in done.stderr
    # Each step has 4 passes, so the rewards change with step 3; the last three steps of eight are
    # the first that hold none of the first four.
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 8

"""Runs that are broken on purpose are explained by what is wrong with them."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_agents.explain import RolloutId, explain_run, rollout_checks
from torchrl_agents.explain.command import main

MINE = '''
from torchrl_data.tool_calls.records import MalformedCall, ParsedTurn

def letters(completions, **_):
    return [sum(c.count(x) for x in "ae") / max(len(c), 1) for c in completions]
def long(completions, **_): return [float(len(c) > 60) for c in completions]
def half(completions, **_): return [0.5] * len(completions)
def by_row(completions, answer, **_): return [float(int(a) % 2) for a in answer]
def sparse(completions, answer, **_):
    return [float("a" in c and int(a) % 4 == 0) for c, a in zip(completions, answer)]
def first(completions, **_):
    return [None if i % 4 else float(len(c)) for i, c in enumerate(completions)]
def broken(completions, answer, **_):
    return [float(len(3 if int(a) % 4 else c)) for c, a in zip(completions, answer)]
def odd(completions, answer, **_):
    return [c.count("e") * float(int(a) % 2) for c, a in zip(completions, answer)]
def lookup(word: str) -> str:
    """Look a word up.

    Args:
        word: what.
    """
    return word
def read(text): return ParsedTurn(text, [MalformedCall("no JSON")])
'''
SHARED = (
    *("debug=tiny", "logger=none", "task.dataset=rows.jsonl", "checkpoint.every=null"),
    *("collector.num_prompts=4", "collector.group_size=4", "policy.max_new_tokens=16"),
    *("evaluate.num_prompts=4", "evaluate.num_shown=0", "optim.num_warmup_steps=0"),
    "train.num_steps=4",
)
"""Of all runs; what a run sets itself comes later, and counts."""
ENDS = "policy.stop=[e,n,t,s,a,i,r]"
OF_METRICS = pytest.mark.weekly
"""What is told from settings and metrics alone is asked of such below, without a run."""


@pytest.fixture
def explain(run_script, tmp_path):
    """Makes a run, and explains it."""
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"prompt": f"What is {i}?", "answer": str(i)} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def explain(*settings, reward="letters"):
        rewards = f"task.rewards={reward if '[' in reward else f'mine:{reward}'}"
        done = run_script(*SHARED, rewards, "hydra.run.dir=run", *settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return explain_run(tmp_path / "run")

    return explain


@pytest.mark.parametrize(
    ("code", "settings", "words"),
    [
        pytest.param(
            "learning_rate_too_small",
            ["optim.learning_rate=1e-12"],
            ["1e-12 at most", "0.02 in float32", "Raise optim.learning_rate"],
            id="a step of 1e-12 is lost in rounding",
        ),
        pytest.param(
            "learning_rate_too_small",
            ["optim.learning_rate=1e-8"],
            ["4 passes over the same rollouts moved no token"],
            id="passes over the same rollouts move no token",
            marks=OF_METRICS,
        ),
        pytest.param(
            "learning_rate_too_large",
            ["optim.learning_rate=3", "train.num_steps=6"],
            ["a learning rate of 3", "Lower optim.learning_rate to a tenth (0.3)"],
            id="a step of 3 destroys the policy",
            marks=OF_METRICS,
        ),
        pytest.param(
            "cut",
            ["policy.max_new_tokens=4", "task.rewards=mine:long"],
            ["100% of the answers are cut at 4 tokens", "policy.max_new_tokens, which is 4"],
            id="answers of four tokens are too short for the reward",
        ),
        pytest.param(
            "constant_reward",
            ["task.rewards=[mine:half,mine:half]", "evaluate.solved_by=half"],
            ["16 groups", "half is always 0.5; half_2 is always 0.5"],
            id="every source gives one number",
        ),
        pytest.param(
            "constant_reward",
            ["task.rewards=mine:by_row"],
            ["by_row is one number for each prompt, from 0 to 1"],
            id="the reward reads the data and not the answer",
        ),
        pytest.param(
            "no_signal",
            ["task.rewards=mine:sparse", "train.num_steps=6", ENDS, "policy.max_new_tokens=64"],
            ["No signal in ", "reward (in ", "collector.group_size, which is 4"],
            id="three of four prompts can not be solved",
        ),
        pytest.param(
            "unread_calls",
            [
                *("+task.tools=[mine:lookup]", "policy.tool_call_format=mine:read", ENDS),
                *("policy.max_new_tokens=64", "collector.max_turns=2", "train.num_steps=3"),
            ],
            ["a tool call that can't be read (as mine:read)", "policy.tool_call_format"],
            id="a format of calls that never parses",
        ),
        pytest.param(
            "greedy_sampling",
            ["policy.temperature=0.01"],
            ["all rollouts are one text", "policy.temperature=0.01"],
            id="nearly greedy sampling",
        ),
        pytest.param(
            "entropy_gone",
            [
                *("policy.max_new_tokens=2", "loss.entropy_coeff=0", "optim.learning_rate=2e-2"),
                *("task.rewards=mine:odd", "train.num_steps=12"),
            ],
            ["all rollouts are one text", "It was 5.59 in the first step", "loss.entropy_coeff"],
            id="training leaves one answer to everything",
        ),
        pytest.param(
            "nothing_trained",
            ["policy.max_new_tokens=4", "loss.filters.drop_truncated=true"],
            [
                "No token is trained",
                "100% of the rollouts were cut",
                "loss.filters.drop_truncated=True",
            ],
            id="a filter leaves out what was cut, which is everything",
        ),
        pytest.param(
            "unscorable",
            ["task.rewards=mine:first"],
            ["75% of the rollouts have no reward", "task.rewards"],
            id="three of four rollouts have no reward",
        ),
        pytest.param(
            "unscorable",
            ["task.rewards=mine:broken", "collector.max_error_fraction=1"],
            ["broken raised TypeError: object of type 'int' has no len()", "task.rewards"],
            id="a reward function raises",
        ),
        pytest.param(
            "clipped_gradients",
            ["optim.max_grad_norm=1e-7"],
            ["in 100% of the steps", "limit 1e-07", "optim.max_grad_norm"],
            id="gradients are scaled down to nothing",
            marks=OF_METRICS,
        ),
        pytest.param(
            "clipped_tokens",
            ["train.num_epochs=12", "loss.clip_epsilon=1e-5"],
            ["The clip leaves ", "loss.clip_epsilon=1e-05", "train.num_epochs, which is 12"],
            id="the clip leaves no room to move",
            marks=OF_METRICS,
        ),
        pytest.param(
            "lost_critic",
            ["loss.advantage=gae", "critic.learning_rate=2.0"],
            ["further from the returns than their mean", "critic.learning_rate, which is "],
            id="the critic learns too fast",
            marks=OF_METRICS,
        ),
        pytest.param(
            "too_short",
            ["optim.num_warmup_steps=50"],
            ["4 steps, of which 4 are warm-up", "reached 8e-05 of 0.001"],
            id="the run ends before its warm-up",
            marks=OF_METRICS,
        ),
        pytest.param(
            "kl_runaway",
            ["loss.kl_to_ref_coeff=1e-6", "optim.learning_rate=2e-2", "train.num_steps=6"],
            ["The KL to the reference ran away", "its weight is 1e-06", "loss.kl_to_ref_coeff"],
            id="nothing holds the policy to the reference",
            marks=OF_METRICS,
        ),
        pytest.param(
            "off_policy",
            [
                *("collector=streaming", "collector.max_staleness=8"),
                *("optim.learning_rate=1e-2", "train.num_steps=6"),
            ],
            ["off from the sampler", "updates old", "collector.max_staleness"],
            id="rollouts are older than the policy that trains",
        ),
        pytest.param(
            "shuffled_rewards",
            ["train.shuffle_rewards=true"],
            ["dealt out at random"],
            id="a control",
            marks=OF_METRICS,
        ),
    ],
)
def test_a_broken_run_is_explained_first_by_what_was_broken(explain, code, settings, words):
    finding = explain(*settings).findings[0]
    assert finding.code == code
    assert all(word in f"{finding.what} {finding.change}" for word in words), finding
    assert 0.4 < finding.explains <= 1


def test_a_run_that_learns_has_no_finding_and_a_row_shows_what_is_said(explain, capsys, tmp_path):
    healthy = explain("train.num_steps=14", "optim.learning_rate=4e-3")
    (step, *_) = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    told = ("kl_approx", "ESS/min", "entropy", "grad_norm", "clip_fraction")
    assert {*UPDATES, *told} <= step.keys()  # names of those that are written by hand below
    assert healthy.num_steps == 14
    assert healthy.last_reward > 1.5 * healthy.first_reward
    assert not healthy.findings
    assert main([str(tmp_path / "run")]) == 0
    assert "Nothing was found that holds this run back." in capsys.readouterr().out
    assert main([str(tmp_path / "none")]) == 1
    assert "holds no record of a run" in capsys.readouterr().err


def write_metrics(folder, *steps):
    """What a loop of the user's own may leave: metrics, and nothing else."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": number, **step}) for number, step in enumerate(steps, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_weights_that_never_reach_the_sampler_are_told_of_a_loop_of_the_users_own(tmp_path):
    step = {"reward": 0.5, "reward/std": 0.5, "optimizer_steps": 2, "policy_version": 7}
    told = explain_run(write_metrics(tmp_path / "own", *[step] * 5))
    assert [finding.code for finding in told.findings] == ["stale_sampler"]
    assert told.findings[0].numbers == {"updates": 10, "policy_version": 7}
    moved = [{**step, "policy_version": 7 + (number > 3)} for number in range(5)]
    assert not explain_run(write_metrics(tmp_path / "pushed", *moved)).findings


def write_tests(folder, name, *points):
    """Tests of what is held out: step, value and interval of each."""
    lines = []
    for step, value, low, high in points:
        estimate = {"value": value, "low": low, "high": high, "num_prompts": 64}
        lines.append({"step": step, name: value, "estimates": {name: estimate}})
    (folder / "evaluations.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


@pytest.mark.parametrize("name", ["held_out_nll", "held_out_loss"])
@pytest.mark.parametrize(
    ("held_out", "loss", "words"),
    [
        # 1.0 after step 2; the last two are 1.2 in the mean, more than a tenth above.
        ([1.5, 1.0, 1.1, 1.3], [1.4, 1.1, 0.9, 0.2], "learnt by heart. End there, with train.num"),
        ([1.5, 1.0, 1.1, 1.3], [1.4, 1.0, 1.2, 2.0], "updates are too large. Lower optim.learn"),
        ([1.5, 1.0, 1.05, 1.13], [1.4, 1.0, 0.8, 0.6], None),  # 1.09
        ([1.5, 1.2, 1.0, 1.1], [1.4, 1.0, 0.8, 0.6], None),  # lower than before at the end
    ],
)
def test_a_loss_on_held_out_rows_that_rises_is_told(tmp_path, name, held_out, loss, words):
    folder = write_metrics(
        tmp_path / "run", *over(4, **{name: held_out, "loss": loss, "optimizer_steps": 1})
    )
    findings = explain_run(folder).findings
    assert [each.code for each in findings] == ["held_out_worse"] * (words is not None)
    for found in findings:
        assert words in f"{found.what} {found.change}"
        assert (found.numbers["lowest"], found.numbers["lowest_step"]) == (1.0, 2)
        assert found.numbers["last"] == pytest.approx(1.2)
        assert found.explains == 0.5  # two of four steps came after the lowest


@pytest.mark.parametrize(
    ("recipe", "name", "last", "is_told"),
    [
        ("sft", "reward", (4, 0.3, 0.2, 0.4), True),
        ("reward", "accuracy", (4, 0.3, 0.2, 0.4), True),
        ("sft", "reward", (4, 0.3, 0.1, 0.5), False),  # the intervals touch
    ],
)
def test_a_held_out_score_that_fell_is_told(tmp_path, capsys, recipe, name, last, is_told):
    folder = write_metrics(tmp_path / "run", *over(4, loss=[0.9, 0.8, 0.6, 0.5], optimizer_steps=1))
    (folder / "run.json").write_text(json.dumps({"command": [f"{recipe}.py"]}))
    write_tests(folder, name, (0, 0.4, 0.2, 0.6), (2, 0.6, 0.5, 0.7), last)
    findings = explain_run(folder).findings
    assert [each.code for each in findings] == ["held_out_worse"] * is_told
    assert main([str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    of = {"sft": "prompts the mean reward", "reward": "pairs the mean accuracy"}[recipe]
    told = f"(50% of the steps): On held-out {of} was 0.6 (0.5 to 0.7) after step 2, and is 0.3"
    assert (told in shown) == is_told


@pytest.mark.parametrize(
    ("group", "setting"),
    [
        ("train", "shuffle_rewards"), ("train", "shuffle_verdicts"), ("data", "shuffle_answers"),
        ("data", "shuffle_labels"), ("data", "shuffle_preferences"),
    ],
)  # fmt: skip
def test_the_control_of_each_recipe_is_told(tmp_path, group, setting):
    folder = write_metrics(tmp_path / "run", *over(4, loss=0.5, optimizer_steps=1))
    assert not explain_run(folder).findings
    (folder / "config.yaml").write_text(f"{group}: {{{setting}: true}}")
    (found,) = explain_run(folder).findings
    assert (found.code, found.change) == ("shuffled_rewards", f"Leave {group}.{setting} out.")


def over(steps, **metrics):
    """The metrics of steps, of which each has the next value of those that are lists."""
    return [
        {k: v[n] if isinstance(v, list) else v for k, v in metrics.items()} for n in range(steps)
    ]


UPDATES = {"reward": 0.5, "optimizer_steps": 1, "learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("code", "settings", "metrics", "explains", "words"),
    [
        pytest.param(
            *("learning_rate_too_small", "{}", {"learning_rate": 1e-12}, 1.0),
            # Half of the distance of 0.02 to the next number of 24 bits: 0.02 / 2^24.
            ["1e-12 at most", "0.02 in float32 can't change by less than 1e-09"],
            id="a step that is lost in rounding",
        ),
        pytest.param(
            *("learning_rate_too_small", "policy: {dtype: bfloat16}", {"learning_rate": 7e-5}, 1.0),
            ["can't change by less than 8e-05", "train weights of policy.dtype=float32"],
            id="a step that is lost in the rounding of bfloat16: 0.02 / 2^8",
        ),
        pytest.param(
            "learning_rate_too_small",
            "optim: {name: sgd}",
            {"optimizer_steps": 4, "kl_approx": [0.0, 3e-6, -9e-6, 0.0], "clip_fraction": 0.0},
            *(1.0, ["4 passes over the same rollouts moved no token by more than 9e-06 nats"]),
            id="passes that move nothing",
        ),
        pytest.param(
            *("learning_rate_too_small", "{}", {"learning_rate": 2e-8}, 1.0),
            ["all updates together move a weight by at most 8e-08"],
            id="all steps together are small",
        ),
        pytest.param(
            *("learning_rate_too_large", "{}", {"kl_approx": [0, 2, 0, 0], "learning_rate": 3}, 1),
            ["up to 2 nats", "a learning rate of 3. The reward went", "to a tenth (0.3)"],
            id="tokens move by nats within a step",
        ),
        pytest.param(
            *("learning_rate_too_large", "{}", {"ESS/min": [1, 0.01, 1, 1]}, 1.0),
            ["1.0% of the tokens carry the update"],
            id="few tokens carry a step",
        ),
        pytest.param(
            *("learning_rate_too_large", "{}", {"entropy": [4.0, 4.0, 1.5, 1.5]}, 1.0),
            ["in one step the entropy changed by 2.5 nats per token"],
            id="the entropy falls within a step",
        ),
        pytest.param(
            *("clipped_gradients", "optim: {max_grad_norm: 0.01}", {"grad_norm": [1, 1, 2, 4]}, 1),
            ["in 100% of the steps, to 1/150 of its norm (median 1.5, limit 0.01)"],
            id="gradients that are scaled down",
        ),
        pytest.param(
            "clipped_tokens",
            "{loss: {clip_epsilon: 1.0e-5}, train: {num_epochs: 12}}",
            {"clip_fraction": [0.0, 0.3, 0.4, 0.5]},  # the last three count
            *(0.4, ["leaves 40% ", "loss.clip_epsilon=1e-05", "train.num_epochs, which is 12"]),
            id="a clip without room",
        ),
        pytest.param(
            *("kl_runaway", "loss: {kl_to_ref_coeff: 1.0e-6}", {"kl_to_ref": [0.1, 1, 2, 3]}, 1.0),
            ["from 0.1 to 2 nats per token", "its weight is 1e-06", "Raise loss.kl_to_ref_coeff"],
            id="a policy that leaves the reference",
        ),
        pytest.param(
            "too_short",
            "{optim: {num_warmup_steps: 50, learning_rate: 0.001}, train: {num_steps: 4}}",
            {"learning_rate": [2e-5, 4e-5, 6e-5, 8e-5]},
            *(1.0, ["4 steps, of which 4 are warm-up", "reached 8e-05 of 0.001", "which is 4"]),
            id="the end comes before that of the warm-up",
        ),
        pytest.param(
            "lost_critic",
            "{}",
            # The last three count.
            {"critic/explained_variance": [0.5, -9.0, -0.2, -0.1], "critic/learning_rate": 0.02},
            *(1.0, ["explained_variance -0.2", "critic.learning_rate, which is 0.02"]),
            id="a critic that is worse than a number",
        ),
        pytest.param(
            *("shuffled_rewards", "train: {shuffle_rewards: true}", {}, 1.0),
            ["dealt out at random", "Leave train.shuffle_rewards out"],
            id="a control",
        ),
    ],
)
def test_what_settings_and_metrics_tell(code, settings, metrics, explains, words, tmp_path):
    run = write_metrics(tmp_path / "run", *over(4, **UPDATES | metrics))
    (run / "config.yaml").write_text(settings)
    (finding,) = explain_run(run).findings
    assert (finding.code, finding.explains) == (code, pytest.approx(explains))
    told = f"{finding.what} {finding.change}"
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("settings", "metrics"),
    [
        ("{}", {"learning_rate": 3e-7}),  # four steps of it are 1.2e-6
        ("optim: {name: sgd}", {"optimizer_steps": 4, "kl_approx": 2e-5, "clip_fraction": 0.0}),
        ("{}", {"kl_approx": 0.9, "ESS/min": 0.03, "entropy": [4.0, 3.1, 1.6, 0.9]}),
        ("optim: {max_grad_norm: 0.02}", {"grad_norm": [1, 1, 2, 4]}),  # 75 times
        ("loss: {clip_epsilon: 0.2}", {"clip_fraction": [0.9, 0.2, 0.3, 0.3]}),
        ("loss: {kl_to_ref_coeff: 0.01}", {"kl_to_ref": [0.1, 0.9, 0.9, 0.9]}),
        ("optim: {num_warmup_steps: 1}", {}),
        ("{}", {"critic/explained_variance": [-9.0, 0.1, -0.05, -9.0]}),
        ("{}", {"kl_approx": [0, 2, 0, 0], "reward": [0.0, 0.1, 0.8, 0.9]}),  # and yet it learns
    ],
)
def test_what_is_not_far_enough_is_not_told(settings, metrics, tmp_path):
    run = write_metrics(tmp_path / "run", *over(4, **UPDATES | metrics))
    (run / "config.yaml").write_text(settings)
    assert not explain_run(run).findings


def test_updates_that_are_not_finite_are_told_and_those_without_a_gradient_are_not(tmp_path):
    step = {"reward": 0.5, "optimizer_steps": 1, "optimizer_steps/skipped": 1}
    run = write_metrics(tmp_path / "run", *[step] * 4)
    assert not explain_run(run).findings
    (run / "not_finite").mkdir()
    for number in range(4):
        (run / f"not_finite/step_{number}.safetensors").touch()
    (finding,) = explain_run(run).findings
    assert (finding.code, finding.explains) == ("not_finite", 0.5)


def test_every_filter_that_is_set_is_named_where_nothing_is_trained(tmp_path):
    """One that is 0 filters, too; one that is off, and what filters nothing, do not."""
    run = write_metrics(tmp_path / "run", *[{"kept_fraction": 0.0, "optimizer_steps": 0}] * 4)
    (run / "config.yaml").write_text(
        "loss:\n"
        "  filters: {trust_region: null, off_policy_threshold: 0.0, drop_truncated: false,\n"
        "            of_later: 3}\n"
        "  sampler_correction: {max_k3: 0.5, level: token}\n"
    )
    (finding,) = explain_run(run).findings
    assert finding.code == "nothing_trained"
    named = "loss.filters.off_policy_threshold=0.0, loss.filters.of_later=3, "
    assert finding.change.startswith(f"Leave out {named}loss.sampler_correction.max_k3=0.5, or")


def test_findings_are_in_the_order_of_what_they_explain_and_rows_show_it(explain, tmp_path):
    told = explain("policy.max_new_tokens=4", reward="long")
    assert [(each.code, each.explains) for each in told.findings] == [
        ("cut", 1.0),
        ("constant_reward", 1.0),
    ]
    assert told.findings[0].numbers == {"cut_fraction": 1.0, "limit": 4, "reward_of_cut": 0.0}
    assert told.findings[0].rows == [RolloutId(2, 0, 0), RolloutId(2, 0, 1), RolloutId(2, 0, 2)]
    program = [sys.executable, "-m", "torchrl_agents"]
    as_json = subprocess.run(
        [*program, "explain", "run", "--json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert json.loads(as_json.stdout) == json.loads(json.dumps(told.as_json() | {"folder": "run"}))
    row = ["--step", "2", "--group", "0", "--sample", "2"]
    view = subprocess.run([*program, "view", "run", *row], cwd=tmp_path, capture_output=True)
    assert b"response_length" in view.stdout


def test_a_run_without_a_step_tells_what_its_log_ended_with(tmp_path):
    run = write_metrics(tmp_path / "run")
    (run / "grpo.log").write_text("loading\nValueError: no such thing\n")
    with pytest.raises(ValueError, match=r"grpo.log ends with: ValueError: no such thing"):
        explain_run(run)


@pytest.mark.parametrize(
    ("agent", "wins", "is_flat"),
    [("white", [1.0, 0.0], False), ("white", [1.0, 1.0], True), ("", [1.0, 0.0], True)],
)
def test_players_have_a_signal_where_their_own_rewards_differ(agent, wins, is_flat):
    # Of players the mean of both never changes; sources of one reward say nothing beside their sum.
    group: Any = [
        SimpleNamespace(
            sample=SimpleNamespace(
                reward=0.5, agent=agent, rewards={"white": won, "black": 1.0 - won}
            )
        )
        for won in wins
    ]
    assert rollout_checks._is_flat(group) is is_flat

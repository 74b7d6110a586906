"""The audit with a model that plays: what it prints of groups, and a real run."""

import json

import pytest

from torchrl_agents.model_audit import main, task_words
from torchrl_envs.audit import command
from torchrl_envs.audit.model_groups import ModelGroups


def test_solve_rates_and_signal_of_groups():
    """By hand: rates 0, 1/4, 1/2, 1 and 1; rewards differ in the second, third and last group."""
    rewards = [[0.0] * 4, [0, 0, 0, 1.0], [1.0, 1.0, 0.5, 0.5], [1.0] * 4, [1.0, 1.0, 1.0, 2.0]]
    groups = ModelGroups("sums", "m", rewards)
    assert groups.solve_rates == [0, 0.25, 0.5, 1, 1]
    assert groups.signal_fraction == 3 / 5
    wanted = [("0", 1), ("0 to 0.25", 0), ("0.25 to 0.5", 1), ("0.5 to 0.75", 1)]
    assert groups.spread == [*wanted, ("0.75 to 1", 0), ("1", 2)]
    assert groups.findings() == []
    first, second = groups.lines()
    assert first == (
        "sums: by m: 5 prompts of 4 rollouts; 60% of the groups have a signal; mean solve rate 0.55"
    )
    assert second.startswith("    prompts by solve rate: 0: 1, 0 to 0.25: 0, 0.25 to 0.5: 1,")
    (note,) = ModelGroups("sums", "m", [[0.0, 0.0]] * 3).findings()
    assert (note.defect, note.is_defect) == ("no signal", False)
    (lost,) = ModelGroups("sums", "m", [], num_unscored=4).findings()
    assert (lost.defect, lost.is_defect) == ("broken", True)


def test_a_task_of_the_audit_as_a_recipe_takes_it(tmp_path):
    settings = {"arguments": {"is_slippery": False, "desc": ["SF", "HG"]}, "max_turns": 4}
    assert task_words("gymnasium:FrozenLake-v1", settings) == [
        "task=environment",
        "task.factory=torchrl_envs.tools.gymnasium_text:make",
        'task.arguments={id: "FrozenLake-v1", is_slippery: false, desc: ["SF", "HG"]}',
        "task.max_turns=4",
    ]
    assert task_words("mine:make", {}) == ["task=environment", "task.factory=mine:make"]
    assert task_words("openenv:http://a:1", {})[1] == "task.base_url=http://a:1"
    assert task_words(str(tmp_path), {}) == ["task=harbor", f"task.dataset={tmp_path}"]
    assert task_words("gcd", {"level": "easy"}) == ["task=gcd", "task.level=easy"]
    with pytest.raises(ValueError, match="leave --model out"):
        task_words("verifiers:sums_v1", {})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["gcd", "policy.top_k=5"], "policy.top_k=5 is a setting of a model: give --model"),
        (["gcd", "--model", "m"], "--model needs the program"),
    ],
)
def test_a_model_that_can_not_play_is_said(capsys, words, said):
    assert command.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_real_model_plays(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["spell_backward", "--episodes", "3", "--rollouts", "2", "--json", "report.json"]
    assert main([*words, "--model", "embedded", "policy.max_new_tokens=8"]) == 0
    report, groups = json.loads((tmp_path / "report.json").read_text())
    assert report["task"] == groups["task"] == "spell_backward"
    assert [len(group) for group in groups["rewards"]] == [2, 2, 2]
    assert "spell_backward: by embedded: 3 prompts of 2 rollouts" in capsys.readouterr().out
    assert main(["spell_backward", "--model", "embedded", "policy.nonsense=1"]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()

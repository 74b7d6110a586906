"""What an audit finds: planted defects, and none in tasks without one."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import planted_gymnasium
import planted_modules
import planted_tasksets
from process import ServerProcess

from torchrl_envs.audit.command import main
from torchrl_envs.audit.scripted_agents import tool_call_text

OPENENV = {
    "SilencePays": "nothing",
    "Leaks": "leak",
    "Unseeded": "random",
    "Fixed": "seed",
    "Contains": "echo",
    "Counts": "random",  # from outside, a counter looks like a draw
    "Swallows": "garbage",
    "AlwaysRed": "constants",
}
"""Environments of ``planted_environments.py``, served by a process."""
OF_A_KIND = ("legs_any_number", "legs_swallows", "legs_raises", "legs_empty_is_right", "legs_told")
OF_A_KIND += ("legs_by_chance", "legs_novelty")
OF_A_KIND += ("HuntPaysNothing", "HuntLeaks", "HuntUnseeded", "HuntShared", "HuntDividesByZero")
OF_A_KIND += ("HuntAlwaysHere",)
"""Modules whose kind of defect is planted in another one, or in Gymnasium, too."""
STEPPED = [name for name in planted_modules.DEFECTS if name.startswith("Spelling")]


@pytest.fixture(scope="module")
def planted_servers():
    mounts = {name: f"{name}:64" for name in [*OPENENV, "Colour"]}
    with ServerProcess(**mounts, few="Colour:2") as process:
        yield process


def audited(tmp_path, *words):
    """Status, and the report of one task."""
    path = tmp_path / "report.json"
    status = main([*words, "--json", str(path)])
    (report,) = json.loads(path.read_text())
    return status, report


def defects(report):
    return {found["defect"] for found in report["findings"] if found["is_defect"]}


@pytest.mark.parametrize("name", planted_gymnasium.DEFECTS)
def test_a_defect_of_a_gymnasium_environment_is_found(tmp_path, name):
    status, report = audited(tmp_path, f"gymnasium:planted_gymnasium:{name}-v0")
    found = {each["defect"] for each in report["findings"]}
    assert planted_gymnasium.DEFECTS[name] in found
    is_note = name == "PaysAfterTheEnd"  # what comes after the end is undefined in Gymnasium
    assert status == (not is_note)


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in planted_modules.DEFECTS if name in STEPPED),
        *(
            pytest.param(name, marks=pytest.mark.weekly if name in OF_A_KIND else pytest.mark.slow)
            for name in planted_modules.DEFECTS
            if name not in STEPPED
        ),
    ],
)
def test_a_defect_of_an_own_module_is_found(tmp_path, name):
    status, report = audited(tmp_path, f"planted_modules:{name}")
    assert planted_modules.DEFECTS[name] in defects(report)
    assert status == 1


@pytest.mark.parametrize(
    "name",
    [
        "gymnasium:planted_gymnasium:Corridor-v0",
        "gymnasium:planted_gymnasium:Words-v0",
        "gymnasium:FrozenLake-v1",
        "gymnasium:Blackjack-v1",
        "gymnasium:CartPole-v1",
        "planted_modules:Spelling",
        pytest.param("planted_modules:legs", marks=pytest.mark.slow),
        pytest.param("gcd", marks=pytest.mark.slow),
        pytest.param("planted_modules:Hunt", marks=pytest.mark.weekly),
        pytest.param("catch", marks=pytest.mark.weekly),
    ],
)
def test_a_task_without_a_defect_is_not_blamed(tmp_path, name):
    status, report = audited(tmp_path, name)
    assert (status, defects(report)) == (0, set())


@pytest.mark.parametrize("words", [["{}"], ["environment", "task.factory={}"]])
def test_no_row_of_few_data_is_held_out(tmp_path, words):
    """Twelve seeds are asked of each agent: there are three rows, all of which can be played."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"prompt": "Spell {n}.", "seed": {n}}}\n' for n in range(3)))
    own = [word.format("planted_modules:Spelling") for word in words]
    status, report = audited(tmp_path, *own, f"task.dataset={data}")
    assert (status, defects(report)) == (0, set())


def test_evidence_is_what_a_reader_can_play_again(tmp_path, capsys):
    _, report = audited(tmp_path, "gymnasium:planted_gymnasium:SilencePays-v0")
    (found,) = report["findings"]
    assert found["evidence"] == "seed 0, answers [''], reward 1.0"
    assert found["remedy"].startswith("Give an answer that is empty")
    assert report["rewards"]["nothing"] == 1.0
    printed = capsys.readouterr().out
    assert "seen: seed 0, answers [''], reward 1.0" in printed
    assert "not asked: clock" in printed
    assert printed.endswith("1 tasks, 1 defects, 0 notes\n")


def backwards(view):
    return view.opening.split()[-2][::-1]


def test_a_solution_that_is_given_is_what_others_are_compared_with(tmp_path):
    solution = f"{Path(__file__).stem}:backwards"
    _, report = audited(tmp_path, "planted_modules:Spelling", "--solution", solution)
    assert report["rewards"]["solution"] == 1.0
    assert report["findings"] == []
    assert report["signal_fraction"] == 1.0  # half of each group knows the answer
    assert set(report["solve_rates"]) == {0.5}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param([], "give it a task", id="no task"),
        pytest.param(["gymnasium:NoSuch-v0"], "NoSuch", id="no such environment"),
        pytest.param(["planted_modules:nothing_here"], "can't be found", id="no such function"),
        pytest.param(["no_such_task"], "There is no task", id="no such name"),
        pytest.param(["gcd", "task.nonsense=1"], "nonsense", id="no such setting"),
        pytest.param(["gcd", "task.seed"], "task.KEY=VALUE", id="a setting without a value"),
        pytest.param(["gcd", "--episodes", "0"], "--episodes", id="no episodes"),
    ],
)
def test_bad_usage_is_said(capsys, words, message):
    assert main(words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", [*planted_tasksets.DEFECTS, "clean"])
def test_a_defect_of_a_taskset_of_verifiers_is_found(tmp_path, monkeypatch, name):
    planted_tasksets.write_tasksets(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    status, report = audited(tmp_path, f"verifiers:planted_{name}_v1")
    planted = planted_tasksets.DEFECTS.get(name)
    assert status == (planted is not None)
    assert (planted in defects(report)) if planted else not report["findings"]
    assert report["not_asked"]["tools"] == "its tasks have no toolsets"


def opens(view):
    """The call that is right, and then a word."""
    if view.turn:
        return "done" if view.turn == 1 else None
    code = 2 * int(view.opening.split()[-1].rstrip("."))
    return tool_call_text("vault_open", {"code": str(code)})


@pytest.mark.parametrize("name", ["vault", *planted_tasksets.TOOL_DEFECTS])
def test_tools_of_a_taskset_of_verifiers_are_called(tmp_path, monkeypatch, name):
    """A reward for any call, and a tool that tells the answer; both by the state of the tools."""
    planted_tasksets.write_tasksets(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    solution = f"{Path(__file__).stem}:opens"
    _, report = audited(tmp_path, f"verifiers:planted_{name}_v1", "--solution", solution)
    planted = planted_tasksets.TOOL_DEFECTS.get(name)
    assert report["rewards"]["solution"] == 1.0
    assert report["rewards"]["nothing"] == 0.0
    assert (planted in defects(report)) if planted else not defects(report)
    assert "tools" not in report["not_asked"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("Fixed", "few"),
        # Found by what finds the same in an environment of this process.
        *(
            pytest.param(name, marks=pytest.mark.weekly)
            for name in ("SilencePays", "Colour", *list(OPENENV)[1:3], *list(OPENENV)[4:])
        ),
    ],
)
def test_a_defect_of_an_openenv_server_is_found(tmp_path, planted_servers, name):
    # These are soon seen; that there is none is asked with as many episodes as a user has.
    is_plain = name in ("SilencePays", "Fixed", "Contains")
    sizes = ("--episodes", "4", "--rollouts", "4") if is_plain else ()
    status, report = audited(tmp_path, f"openenv:{planted_servers.url}/{name}", *sizes)
    planted = {**OPENENV, "few": "capacity"}.get(name)
    found = {each["defect"] for each in report["findings"]}
    assert (planted in found) if planted else not found
    is_note = name == "Fixed"  # a server is asked from outside: it may draw nothing
    assert status == (planted is not None and not is_note)

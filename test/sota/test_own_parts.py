"""What is wrong with a user's own rewards, data and words is said in a line, from the terminal."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from collectors import CheckpointStore
from collectors.ledger.reasons import LedgerError
from torchrl_agents import start
from torchrl_agents.settings import command_line
from torchrl_agents.settings.arguments import setting_names
from torchrl_agents.settings.command_line import compose_config, groups
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.task_settings import store_task

HERE = Path(__file__).parent

MINE = """
from pathlib import Path
import torch
from torchrl.record.loggers.csv import CSVLogger
from objectives import reads
from objectives.functional import clipped_surrogate
from torchrl_envs import EpisodeTransform, RewardFunctions, row_reward
from torchrl_envs.tasks.task import Task

def scalar(completions, **_): return 1.0
def nothing(completions, **_): return None
def strings(completions, **_): return ["good"] * len(completions)
def table(completions, **_): return torch.zeros(len(completions), 2)
def few(completions, **_): return [1.0]
def nans(completions, **_): return [float("nan")] * len(completions)
def shape(completions, **_): return [float(i) for i, _ in enumerate(completions)]
def breaks_its_tracker(completions, **_):
    CSVLogger.log_metrics = lambda *_: {}["its server"]  # as one that went away meanwhile
    return shape(completions)
def right(completions, answer, **_): return [float(a in c) for c, a in zip(completions, answer)]
def late(completions, **_):
    metrics = Path("outputs/grpo/environment/late-001/metrics.jsonl")
    if metrics.exists() and metrics.read_text() and not Path("mended").exists():
        raise ConnectionError("the judge is down")
    return [1.0] * len(completions)
@row_reward
def never(completion): return None
@row_reward
def picky(completion, answer):
    if int(answer) % 2: raise LookupError("odd")
    return 1.0
def heat(completions, **_): return [2.0] * len(completions)
@reads(heat=("rewards", "heat"))
def patient(log_ratio, advantage, heat): return clipped_surrogate(log_ratio / heat, advantage)
@reads(heat=("next", "warmth"))
def warm(log_ratio, advantage, heat): return clipped_surrogate(log_ratio / heat, advantage)
class Warmth(EpisodeTransform):
    def finish(self, episode):
        episode.token_entries["warmth"] = torch.full((len(episode.assistant_mask),), 2.0)
def make(split="train"):
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(20)]
    scores = lambda: [RewardFunctions([shape]), Warmth()]
    return Task(name="mine", train_rows=rows[:12], held_out_rows=rows[12:], rewards=scores)
"""
OWN = ("debug=tiny", "logger=none", "train.num_steps=1", "task.dataset=rows.jsonl")


@pytest.fixture
def run(run_script, tmp_path):
    """Runs grpo where ``mine.py`` and ``rows.jsonl`` are; row 29 has no prompt."""
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"prompt": 7 if i == 29 else f"{i}?", "answer": str(i)} for i in range(40)]
    rows[3]["prompt"] = rows[1]["prompt"]  # one of the two is left
    (tmp_path / "bad.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    good = [row for row in rows if row["prompt"] != 7]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in good))

    def run(*arguments, name="grpo"):
        return run_script(*arguments, cwd=tmp_path, name=name)

    run.folder = tmp_path
    return run


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("strings", "function strings gave 'good', which is not a number"),
        ("few", r"function few must return one reward .* list of 8, got \[1.0\]"),
        *(  # what is said of each is asked of the functions themselves, in test_rewards.py
            pytest.param(*each, marks=pytest.mark.weekly)
            for each in (
                ("scalar", "function scalar must return one reward per completion: .* got 1.0"),
                ("nothing", "function nothing must return one reward per completion: .* got None"),
                ("table", r"function table gave tensor\(\[0., 0.\]\), which is not a number"),
            )
        ),
    ],
)
def test_what_is_no_reward_is_refused_in_a_line_before_training(run, reward, words):
    done = run(*OWN, f"task.rewards=mine:{reward}")
    *_, phase, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert phase == "first evaluation ..."
    assert re.match(f"grpo.py: The reward {words}", last)
    assert "or None where the function does not apply" in last


@pytest.mark.parametrize("mode", ["sync", "streaming"])
def test_too_many_rewards_that_are_nan_are_told_without_a_traceback(run, mode):
    done = run(*OWN, "task.rewards=mine:nans", f"collector={mode}", "train.num_steps=9")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"^grpo.py: The rewards of \d+ of the last", done.stderr, re.MULTILINE)
    assert "x nans gave nan\n" in done.stderr
    assert "None, not NaN, says that it does not apply" in done.stderr


def test_steps_that_are_not_finite_end_in_a_line_that_says_where_the_traceback_is(run):
    settings = ("optim.learning_rate=1e25", "optim.max_grad_norm=1e30", "train.num_steps=9")
    done = run(*OWN, "task.rewards=mine:shape", *settings, "hydra.run.dir=own")
    *_, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert re.match(
        r"grpo.py: \d optimizer steps in a row were not finite, .* Lower the lear", last
    )
    assert re.search(r"The traceback is in .*own/grpo.log\.$", last)
    assert "Traceback" not in done.stderr
    assert "HYDRA_FULL_ERROR" not in done.stderr


def test_a_fault_of_code_has_its_traceback_and_what_we_raise_in_words_has_none():
    with pytest.raises(ValueError, match="invalid literal") as theirs:
        int("a")
    assert start._words_of(theirs.value, HERE) is None
    assert start._words_of(KeyError("a"), HERE) is None
    with pytest.raises(ValueError, match="keep_last is 1") as ours:
        CheckpointStore("x", keep_last=1)
    assert start._words_of(ours.value, HERE) == str(ours.value)
    assert start._words_of(LedgerError("what"), HERE) == "what"


def test_what_a_module_of_the_recipe_raises_in_words_has_no_traceback(script):
    script("distillation")
    teachers = sys.modules["teachers"]
    with pytest.raises(ConnectionError, match="does not answer") as gone:
        teachers.ServerTeacher("unix:///nowhere.sock", "m")
    recipe = Path(str(teachers.__file__)).parent
    assert start._words_of(gone.value, recipe) == str(gone.value)
    assert start._words_of(gone.value, HERE) is None  # the user's modules, of the same name


@pytest.mark.parametrize("mode", ["warn", "stop"])
def test_checkpoints_that_can_not_be_written_are_told_and_end_in_a_status(run, mode):
    (run.folder / "own").mkdir()
    (run.folder / "own/checkpoints").touch()  # a file is no folder
    settings = ("checkpoint.every=1", f"checkpoint.on_error={mode}", "hydra.run.dir=own")
    done = run(*OWN, "task.rewards=mine:shape", "train.num_steps=4", *settings)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    told = re.findall(r"^checkpoint: .* Failures so far: (\d+)\.$", done.stderr, re.MULTILINE)
    if mode == "stop":
        assert told == ["1"]
        assert re.match("grpo.py: .*step 1 could not be saved", last)
        assert not (run.folder / "own/model").exists()
    else:  # of four steps, and once more at the end
        assert told == ["1", "2", "4"]
        assert re.match("grpo.py: the run came to its end, and what it made is in .*own, but", last)
        assert re.search(r"checkpoint: .*step 4 could not be saved .* Failures so far: 5\.$", last)
        assert json.loads(done.stdout.splitlines()[-1])["steps"] == 4
        assert (run.folder / "own/model/config.json").is_file()


def test_a_tracker_that_fails_stops_no_run_and_is_told(run):
    settings = ("logger=none", "logger.backends=[csv]", "hydra.run.dir=own", "train.num_steps=4")
    own = [each for each in OWN if not each.startswith(("logger", "train"))]
    done = run(*own, "task.rewards=mine:breaks_its_tracker", *settings)
    *_, last = done.stderr.splitlines()
    assert done.returncode == 1
    assert "logger.backends: csv: KeyError: 'its server' Failures so far: 1." in done.stderr
    assert re.match(r"grpo.py: the run came to its end, .*: logger.backends: csv: KeyErr", last)
    assert len((run.folder / "own/metrics.jsonl").read_text().splitlines()) == 4


def test_a_reward_that_never_applies_is_told_of_before_and_after_the_first_step(run):
    done = run(*OWN, "task.rewards=mine:never", "policy.max_new_tokens=32")
    before, after = done.stderr.split("grpo step 1/1")
    assert "No signal in the first test: no rollout could be scored" in before
    assert "A reward function that gives None does not apply" in before
    assert "No signal in 1 step(s): no rollout could be scored" in after


def test_rollouts_that_failed_are_told_of_beside_the_means_that_leave_them_out(run):
    done = run(*OWN, "task.rewards=mine:picky")
    before, after = done.stderr.split("grpo step 1/1")
    result = json.loads(done.stdout.splitlines()[-1])
    tests = (run.folder / result["output_dir"] / "evaluations.jsonl").read_text().splitlines()
    num_scored = json.loads(tests[0])["estimates"]["reward"]["num_prompts"]
    assert 0 < num_scored < 8
    failed = f"{8 - num_scored} of the 8 rollouts of this test failed, and no mean has them: "
    assert f"{failed}{8 - num_scored} x picky raised LookupError: odd" in before
    share = json.loads((run.folder / result["output_dir"] / "metrics.jsonl").read_text())
    assert share["reward/error_fraction"] > 0
    told = f"{share['reward/error_fraction']:.0%} of the rollouts failed and have no reward"
    assert f"No signal in 1 step(s): {told}" in after


def test_a_filter_that_leaves_nothing_is_told_of(run):
    cut = ("policy.max_new_tokens=3", "loss.filters.drop_truncated=true")
    done = run(*OWN, "task.rewards=mine:shape", *cut)
    assert done.returncode == 0, done.stderr[-2000:]
    _, after = done.stderr.split("grpo step 1/1")
    assert "No signal in 1 step(s): a filter left nothing to train (kept_fraction is 0)" in after
    assert "truncated_fraction (100% of the rollouts)" in after


def test_a_reward_may_have_a_name_that_specs_have_taken(run):
    done = run(*OWN, "task.rewards=mine:shape", "policy.max_new_tokens=32")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "before/rewards/shape_2" in json.loads(done.stdout.splitlines()[-1])


def test_a_bad_row_has_its_number_in_the_file_and_can_be_left_out(run, tmp_path):
    own = (*OWN, "task.dataset=bad.jsonl", "task.rewards=mine:shape", "dry_run=true")
    done = run(*own)
    assert done.returncode == 1
    assert "1 row(s) can't be used: row 29: column 'prompt' must hold" in done.stderr
    assert "task.skip_bad_rows=true" in done.stderr.splitlines()[-1]
    done = run(*own, "task.skip_bad_rows=true")
    assert done.returncode == 0, done.stderr
    (log,) = tmp_path.glob("outputs/grpo/environment/*/grpo.log")
    assert "1 of 31 rows are left out, which can't be used" in log.read_text()  # 8 are held out


@pytest.mark.parametrize("name", ["grpo", "expert-iteration", "online-dpo", "sft", "evaluate"])
def test_a_row_without_a_column_that_a_reward_names_is_named_at_the_door(run, tmp_path, name):
    rows = [{"prompt": f"{i}?", "answer": str(i)} for i in range(40)]
    del rows[17]["answer"]
    (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = ("task=environment", "task.dataset=own.jsonl", "task.rewards=mine:right", "dry_run=true")
    own += ("evaluate.num_prompts=20",)
    own += () if name == "evaluate" else ("debug=tiny", "logger=none")
    own += ("train.top_k=2",) if name == "expert-iteration" else ()
    done = run(*own, name=name)
    told = "row 17: it lacks ['answer'], which the reward function right needs. (The first row"
    assert told in done.stderr.splitlines()[-1]
    if name == "sft":  # which has no conversations here
        return
    done = run(*own, "task.skip_bad_rows=true", name=name)
    assert "1 row(s) are left out (the first row is row 0): row 17: it lacks" in done.stderr


def test_a_last_test_that_fails_leaves_the_model_and_can_be_made_again(run, tmp_path):
    own = (*OWN, "task.rewards=mine:late", "name=late", "policy.max_new_tokens=4")
    own += ("collector.max_error_fraction=0",)
    done = run(*own)
    assert done.returncode == 1
    folder = tmp_path / "outputs/grpo/environment/late-001"
    last = done.stderr.splitlines()[-1]
    assert "ConnectionError: the judge is down" in done.stderr
    assert last.startswith("All 1 steps are made, and the model is in ")
    assert f"resume={folder} makes the test again" in last
    assert {"config.json", "model.safetensors", "README.md"} <= {
        path.name for path in (folder / "model").iterdir()
    }
    (tmp_path / "mended").touch()
    done = run(*own, f"resume={folder}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["held_out_after"] == 1.0


def test_a_sum_of_rewards_does_not_say_what_is_solved(run):
    own = (*OWN, "task.rewards=[mine:right,mine:shape]", "policy.max_new_tokens=4")
    done = run(*own, "dry_run=true")
    told = "the rewards ['right', 'shape_2'] are added, and their sum does not say whether"
    assert told in done.stderr.splitlines()[-1]
    assert "Set evaluate.solved_by to the reward" in done.stderr.splitlines()[-1]
    done = run(*own, "evaluate.solved_by=right")
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["before/mean@1"] == result["before/rewards/right"]
    done = run(*own, "evaluate.solved_by=rihgt", "dry_run=true")
    assert "evaluate.solved_by='rihgt' is no reward; there are" in done.stderr.splitlines()[-1]


def test_a_dry_run_refuses_an_entry_that_nobody_writes_as_the_first_step_would(run):
    own = (*OWN, "policy.max_new_tokens=4", "loss.surrogate=mine:patient")
    lacks = (*own, "task.rewards=mine:shape", "loss.kl_to_ref_coeff=0.1")
    dry, first = (run(*lacks, *more).stderr.splitlines()[-1] for more in (["dry_run=true"], []))
    assert "DAPO reads [('rewards', 'heat')], which the batch lacks. The batch holds [" in dry
    assert first.startswith(f"{dry} The traceback is in "), first
    has = (*own, "task.rewards=[mine:shape,mine:heat]", "task.reward_weights=[1,0]")
    done = run(*has, "dry_run=true")
    assert done.returncode == 0, done.stderr


def test_a_dry_run_leaves_what_a_transform_of_the_users_own_may_write_to_the_first_step(run):
    own = (*OWN[:-1], "task.factory=mine:make", "policy.max_new_tokens=4")
    for more in (["dry_run=true"], []):
        done = run(*own, "loss.surrogate=mine:warm", *more)
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("task", "row", "bad"),
    [
        ("gsm8k", {"question": "1 + 1?", "answer": "so\n#### 2"}, {"question": 7}),
        ("math", {"problem": "1 + 1?", "solution": r"so \boxed{2}"}, {"solution": 7}),
    ],
)
def test_a_bad_row_is_in_no_demonstration(run, tmp_path, task, row, bad):
    asked = next(iter(row))
    rows = [{**row, asked: f"{i} + 1?"} | (bad if i == 20 else {}) for i in range(40)]
    (tmp_path / "own.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = ("debug=tiny", "logger=none", "dry_run=true", f"task={task}", "task.dataset=own.jsonl")
    done = run(*own)
    assert "1 row(s) can't be used: row 20: " in done.stderr.splitlines()[-1]
    assert run(*own, "task.skip_bad_rows=true").returncode == 0


def test_lines_that_hold_no_conversation_can_be_left_out(run, tmp_path):
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes."}]
    rows = [{"messages": "Yes." if i in (3, 5) else said} for i in range(12)]
    rows[7] = {"messages": [{"content": "?"}, said[1]]}
    rows[8] = {"messages": [{**said[0], "content": 5}, said[1]]}
    rows[9] = {"prompt": "?", "completion": "Yes."}
    rows[10] = {"prompt": [*said, said[0]], "completion": [said[1]]}
    lines = [*map(json.dumps, rows), '{"messages": [']
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    own = ("data.dataset=chats.jsonl", "data.num_held_out=4", "task=spell_backward")
    own += (
        "task.num_rows=64",
        "evaluate.num_prompts=4",
        "debug=tiny",
        "logger=none",
        "train.num_steps=1",
    )
    done = run(*own, name="sft")
    assert "chats.jsonl can't be read: line 13" in done.stderr.splitlines()[-1]
    assert "data.skip_bad_rows" in done.stderr.splitlines()[-1]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines[:12]))
    assert "row 3 has no list of messages in the column 'messages'" in run(*own, name="sft").stderr
    done = run(*own, "data.skip_bad_rows=true", name="sft")
    assert done.returncode == 0, done.stderr
    told = "4 of 12 rows (the first is row 0) hold no conversations, and are left out: [3, 5, 7, 8]"
    assert told in done.stderr


def test_what_is_tested_on_and_trained_on_is_told(run, tmp_path):
    """Conversations 4 to 11 are trained on: they ask the prompts 1, 4 and 5 of the six held-out
    ones, and the first of these as conversation 1 does."""

    def chat(number):
        asked = [{"role": "user", "content": f"{number}?"}]
        return {"messages": [*asked, {"role": "assistant", "content": "Yes."}]}

    chats = [chat(n) for n in (0, 1, 2, 3, 4, 5, 1, 20, 21, 22, 23, 24)]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in chats))
    said = [{"prompt": f"{n}?"} for n in range(40)]
    said[4]["prompt"] = [{"role": "system", "content": "0?"}, {"role": "user", "content": "4?"}]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in said))
    own = ("debug=tiny", "logger=none", "dry_run=true", "data.num_held_out=4")
    own += ("task.dataset=rows.jsonl", "task.rewards=mine:shape", "evaluate.num_prompts=6")
    done = run(*own, "data.dataset=chats.jsonl", name="sft")
    assert done.returncode == 0, done.stderr
    assert "1 of the 4 held-out conversations are trained on, too" in done.stderr
    assert "3 of the 6 held-out prompts of the task are asked in conversations" in done.stderr
    assert "trained on, '1?' first" in done.stderr
    assert "8 conversations to train on, 4 held out" in done.stdout
    assert "environment: 6 held out" in done.stdout
    lines = [json.dumps(chats[n]) for n in (0, 1, 2, 3, 7, 8, 9, 10, 11)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    done = run(*own, "data.dataset=chats.jsonl", name="sft")
    assert "trained on" not in done.stderr


def test_the_column_of_the_prompts_has_any_name(run, tmp_path):
    rows = [{"question": f"{i}?"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    own = (*OWN, "task.rewards=mine:shape", "dry_run=true")
    assert "task.prompt_column=question" in run(*own).stderr.splitlines()[-1]
    assert run(*own, "task.prompt_column=question").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["task.rewards=wrong:f"], "'wrong:f' can't be found: .*line 1", id="syntax"),
        pytest.param(["task.rewards=mine.py:few"], "of mine.py mine:name", id="a file"),
        pytest.param(
            ["task.rewards=mine:few", "engine=vllm", "engine.url=http://127.0.0.1:1"],
            "engine: No answer from http://127.0.0.1:1",
            id="no server",
        ),
    ],
)
def test_what_is_not_there_is_told_in_a_line(run, tmp_path, arguments, words):
    (tmp_path / "wrong.py").write_text("def f(:\n")
    done = run(*OWN, *arguments)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert re.search(words, done.stderr.splitlines()[-1])


def test_a_folder_without_a_model_is_told_from_a_model_that_is_broken(run, tmp_path):
    done = run(*OWN, "task.rewards=mine:shape", f"policy.model={tmp_path}")
    wanted = f"policy.model='{tmp_path}' can't be loaded: the folder has no config.json"
    assert wanted in done.stderr.splitlines()[-1]


def test_the_card_of_a_run_that_went_on_has_the_steps_that_it_was_given_last(run, tmp_path):
    own = (*OWN, "task.rewards=mine:shape", "policy.max_new_tokens=32", "warm_start.num_steps=0")
    first = run(*own)
    folder = json.loads(first.stdout.splitlines()[-1])["output_dir"]
    assert run(f"resume={folder}", "train.num_steps=2").returncode == 0
    card = (Path(folder) / "model/README.md").read_text()
    (command,) = [line for line in card.splitlines() if line.startswith("torchrl-agents grpo")]
    assert "task.rewards=mine:shape" in command
    assert "train.num_steps=2" in command
    assert "train.num_steps=1" not in command


def test_names_of_other_libraries_stand_for_settings_that_there_are(script):
    known, table = set(), OmegaConf.load(command_line._ELSEWHERE)
    recipes = {
        "grpo": "environment",
        "sft": "gcd",
        "dpo": "gcd",
        "reward": "gcd",
        "self-play": "nim",
    }
    for name, task in recipes.items():
        recipe = script(name).RECIPE
        store_task(task)
        known |= {*setting_names(compose_config(recipe, [f"task={task}"])), *groups(recipe)}
    told = {text.split()[0] for texts in table.values() for text in texts}
    assert {text.partition("=")[0] for text in told} - known == {"hydra.run.dir"}
    for text in (text for text in told if "=" in text):
        compose_config(script("grpo").RECIPE, ["task=environment", text])
    assert known.isdisjoint(table)  # what is a setting here is never looked up


def test_what_the_page_about_trl_translates_is_told_to_whoever_types_it(script):
    """A name in its tables leads to a setting that stands in the same row."""
    recipe = script("grpo").RECIPE
    store_task("environment")
    composed = compose_config(recipe, ["task=environment"])
    known, own = [*setting_names(composed)], groups(recipe)
    text = (Path(__file__).parents[2] / "docs/from-trl.md").read_text()
    told = 0
    for line in text[text.index("## Settings of the loss") :].splitlines():
        cells = line.replace("`torchrl-agents grpo --help`", "").strip("|").split(" | ")
        if len(cells) != 3 or not line.startswith("|"):
            continue
        theirs = re.findall(r"`(?:GRPOConfig)?([a-z][a-z_0-9]*)[`=]", cells[0])
        ours = re.findall(r"`([a-z_.]+)", cells[2])
        for name in theirs if ours else ():
            if name in known or name == "callbacks":  # which are objects
                assert name in ours or name not in known
                continue
            (override,) = OverridesParser.create().parse_overrides([f"{name}=1"])
            with pytest.raises(SettingsError) as refused:
                command_line._check_setting(override, known, composed, own)
            # Of several one stands in the row.
            named = [*(f" {setting}" for setting in ours), f".{name}"]
            assert any(each in str(refused.value) for each in named), (name, ours)
            told += 1
    assert told > 30


def test_passes_over_the_data_are_not_taken_for_passes_over_the_rollouts_of_a_step():
    guess = partial(command_line._guess, known=["train.num_epochs", "train.num_steps"])
    settings = {"train.num_epochs", "train.num_steps"}
    for name in ("num_train_epochs", "trainer.total_epochs", "num_episodes"):
        assert " Here it is train.num_steps (steps, and not" in guess(name, settings=settings)
    assert "Here it is train.num_epochs" in guess("max_epochs", settings=settings)
    assert "Here it is train.num_steps" in guess("max_epochs", settings={"train.num_steps"})


def test_conversations_that_are_too_long_or_can_not_be_shown_can_be_left_out(run, tmp_path):
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes."}]
    rows = [{"messages": said} for _ in range(12)]
    rows[2] = {"messages": "no list"}
    rows[4] = {"messages": [said[0], {**said[1], "content": "no " * 5000}]}
    rows[6] = {"messages": [said[0], said[0]]}
    own = ("data.dataset=chats.jsonl", "data.num_held_out=4", "task=spell_backward", "debug=tiny")
    own += ("task.num_rows=64", "evaluate.num_prompts=4", "logger=none", "dry_run=true")

    def done(*overrides):
        return run(*own, *overrides, name="sft").stderr

    for kept, words in (
        ((0, 4), "1 of 2 conversations are longer than the 1024 tokens"),
        ((0, 6), "the assistant says nothing in row 1, whose roles"),
    ):
        lines = "\n".join(json.dumps(rows[n]) for n in kept)
        (tmp_path / "chats.jsonl").write_text(lines)
        assert words in done("data.num_held_out=1").splitlines()[-1]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    skipped = run(*own, "data.skip_bad_rows=true", name="sft")
    assert "data      5 conversations to train on, 4 held out" in skipped.stdout
    told = skipped.stderr
    assert "1 of 11 conversations are longer than the 1024 tokens" in told
    assert "rows [4] (the first row is row 0). They are left out." in told
    assert "1 of 11 conversations can't be encoded, and are left out" in told
    assert "row 6: encode_demonstrations: the assistant says nothing in row 6" in told
    assert "leaves none to train on" in done("data.skip_bad_rows=true", "data.num_held_out=9")

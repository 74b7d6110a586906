"""A recipe draws with an engine of the user's own: ``engine.name=mine:Engine``."""

import json
from pathlib import Path

import pytest
import yaml

from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

MINE = '''
from transformers import AutoModelForCausalLM
from torchrl_modules.engines.transformers import TransformersEngine

class Engine:
    """Draws with a model of its own, as a server does; it has no max_model_len."""

    def __init__(self, model, pushed=None):
        self._inside = TransformersEngine(AutoModelForCausalLM.from_pretrained(model))
        self._pushed = pushed
        self.version = 0

    def generate(self, prompts, params, *, max_new_tokens=None):
        return self._inside.generate(prompts, params, max_new_tokens=max_new_tokens)

    def update_weights(self, state_dict, *, version=None):
        self._inside.update_weights(state_dict, version=version)
        self.version = self._inside.version
        if self._pushed:
            with open(self._pushed, "a") as file:
                print(self.version, file=file)

class Again(Engine):
    """Another one of the same."""

def letters(completions, **_): return [float(c.count("a")) for c in completions]
'''
OWN = ("task.dataset=rows.jsonl", "task.rewards=mine:letters", "policy.model=base")
ENGINE = ("engine.name=mine:Engine", "+engine.engine_kwargs.model=base")
TINY = (*OWN, "debug=tiny", "logger=files", "optim.learning_rate=0.1", "train.num_epochs=1")


@pytest.fixture
def run(run_script, tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    rows = [{"prompt": f"{number}?"} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tokenizer = train_tokenizer(["What is 1? a b c"])
    tokenizer.save_pretrained(tmp_path / "base")
    tiny_qwen3(len(tokenizer)).save_pretrained(tmp_path / "base")

    def run(*arguments, name="grpo"):
        return run_script(*arguments, cwd=tmp_path, name=name)

    return run


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.weekly), "streaming"])
def test_what_the_own_engine_drew_is_what_is_trained_at_every_version(run, tmp_path, mode):
    fresh = ("collector.max_staleness=0",) if mode == "streaming" else ()
    pushes = "+engine.engine_kwargs.pushed=pushed"
    done = run(*TINY, *ENGINE, pushes, f"collector={mode}", *fresh, "train.num_steps=3")
    assert done.returncode == 0, done.stderr[-2000:]
    folder = Path(json.loads(done.stdout.splitlines()[-1])["output_dir"])
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:  # large steps: with other weights than the trainer's the ratio is not 1
        if step.get("optimizer_steps"):
            assert step["ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert any(step.get("optimizer_steps") for step in steps[:-1])
    versions = [int(line) for line in (tmp_path / "pushed").read_text().split()]
    assert versions == list(range(1, len(versions) + 1))
    assert len(versions) >= 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["engine.name=mine:Engin", ENGINE[1]], "engine.name='mine:Engin' can't be found"),
        (["engine.name=mine:Engine"], "missing a required argument: 'model'"),
        ([*ENGINE, "+engine.engine_kwargs.cap=1"], "unexpected keyword argument 'cap'"),
        ([*ENGINE, "policy.max_model_len=64"], "mine:Engine has its own max_model_len"),
        ([*ENGINE, "collector=ray"], "take collector=sync or streaming"),
        (
            ["engine.name=lmdeploy"],
            "must be one of transformers, vllm, sglang, or mine:Engine, one of yours",
        ),
        (["engine.name=mine:letters"], "missing a required argument: 'completions'"),
    ],
)
def test_an_engine_that_can_not_be_made_is_refused_before_weights_are_loaded(run, arguments, words):
    done = run(*TINY, *arguments, "dry_run=true")
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]


@pytest.mark.weekly
def test_several_runs_draw_with_an_engine_each(run, tmp_path):
    engines = ("engine.name=mine:Engine,mine:Again", ENGINE[1])
    done = run(*TINY, "--multirun", *engines, "train.num_steps=1")
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = (tmp_path / "outputs/grpo").rglob("multirun.json")
    runs = json.loads(path.read_text())
    assert [run["steps"] for run in runs] == [1, 1]
    settings = [yaml.safe_load((path.parent / n / "config.yaml").read_text()) for n in "01"]
    assert [each["engine"]["name"] for each in settings] == ["mine:Engine", "mine:Again"]


def test_an_engine_that_no_recipe_has_is_refused_before_the_first_of_several_runs(run):
    done = run(*TINY, *ENGINE[1:], "--multirun", "engine.name=mine:Engine,lmdeploy")
    assert done.returncode == 1
    words = (
        "must be one of transformers, vllm, sglang, or mine:Engine, one of yours, got 'lmdeploy'"
    )
    assert words in done.stderr.splitlines()[-1]


def test_an_own_engine_is_evaluated(run):
    small = ("evaluate.num_prompts=4", "evaluate.num_samples=1", "policy.max_new_tokens=4")
    done = run(*OWN, *ENGINE, *small, name="evaluate")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1])["num_prompts"] == 4

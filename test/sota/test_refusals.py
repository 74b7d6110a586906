"""A refused command costs no import of torch, and the settings of tasks are known without one."""

import inspect
import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from torchrl_agents.loggers import LOGGERS
from torchrl_agents.settings.schema import BACKENDS
from torchrl_agents.settings.task_settings import _TYPES
from torchrl_envs.tasks import TASKS, find_task, generator_names, settings_of_task

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "torchrl", "tensordict", "transformers", "datasets", "reasoning_gym", "peft"}
TELL = f"""
import atexit, json, os, sys
from pathlib import Path
heavy = {HEAVY!r}
seen = Path(os.environ["SEEN"])
atexit.register(lambda: seen.write_text(json.dumps(sorted(heavy & set(sys.modules)))))
"""


@pytest.fixture
def run(tmp_path):
    """Runs a command in an empty folder; gives status, output, and which imports it cost."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(TELL)
    (tmp_path / "here").mkdir()
    paths = os.pathsep.join([str(tmp_path / "site"), str(ROOT)])
    own = {"PYTHONPATH": paths, "SEEN": str(tmp_path / "seen"), "COLUMNS": "200"}

    def run(*command):
        done = subprocess.run(
            [sys.executable, "-m", "torchrl_agents", *command],
            cwd=tmp_path / "here",
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not list((tmp_path / "here").iterdir())  # nothing is left
        return done, json.loads((tmp_path / "seen").read_text())

    return run


COMMAND = "import sys\nfrom torchrl_agents.command import main\nsys.exit(main())\n"
LIGHT = ("torchrl_agents.command", "torchrl_agents.settings.command_line", "hydra", "hydra.main")
"""What a command imports before it refuses its arguments, or looks for torch."""


@pytest.fixture(scope="module")
def light_forks(start_forks):
    return start_forks(sys.executable, dict(os.environ), *LIGHT)


@pytest.fixture
def run_fork(light_forks, tmp_path):
    """Like ``run``, in a fork of a process that has imported what a command begins with."""
    (tmp_path / "command.py").write_text(TELL + COMMAND)
    (tmp_path / "here").mkdir()
    own = {**os.environ, "SEEN": str(tmp_path / "seen"), "COLUMNS": "200"}

    def run(*command):
        done = light_forks([tmp_path / "command.py", *command], tmp_path / "here", own)
        assert not list((tmp_path / "here").iterdir())  # nothing is left
        return done, json.loads((tmp_path / "seen").read_text())

    return run


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("nosuch", "there is no command 'nosuch'"),
        ("grpo task=calculater", "There is no task 'calculater'. Did you mean calculator or"),
        (
            "grpo policy.model=m policy.model_kwargs={quantization_config:{load_in_4bit:true}}",
            "weights of 4 bits are not trained. Train adapters: policy.lora_rank",
        ),
        ("grpo policy.load_in_4bit=true policy.lora_rank=4", "is for a policy.model that is loa"),
        ("evaluate policy.model=m policy.load_in_4bit=true engine=vllm", "is for engine=transform"),
        ("grpo policy.quantization=fp8", "must be one of fp8_per_channel, got 'fp8'"),
        (
            "grpo policy.quantization=fp8_per_channel engine=sglang",
            "is for engine=transformers and",
        ),
        (
            "grpo policy.quantization=fp8_per_channel engine=vllm "
            "+engine.engine_kwargs.quantization=mxfp8",
            "engine.engine_kwargs.quantization=mxfp8: they have to be the same",
        ),
        (
            "grpo policy.quantization=fp8_per_channel engine=vllm policy.lora_rank=4",
            "Push them alone: +engine.engine_kwargs.enable_lora=true",
        ),
        ("lora --multirun seed=0,1 debug=tinyy", "debug has no choice 'tinyy'. Did you mean tiny?"),
        ("grpo seed=0 --multirun debug=tinyy", "debug has no choice 'tinyy'. Did you mean tiny?"),
        ("grpo --multirun seed=0,1 resume=auto", "resume= goes on with one run: without --multi"),
        ("grpo --multirun train.num_steps=1,0", "train.num_steps must be at least 1, got 0."),
        ("grpo loss=grpoo", "loss has no choice 'grpoo'. Did you mean grpo?"),
        ("grpo loss=rloo", "loss has no choice 'rloo'. Here it is loss.advantage=rloo. There are"),
        ("grpo loss=ppo", "loss has no choice 'ppo'. Here it is loss.advantage=gae (PPO's critic;"),
        ("grpo algorithm=gspo", "no setting 'algorithm'. Here it is loss (loss=dapo, grpo,"),
        ("grpo policy=nosuch", "policy has no choice 'nosuch'. There are embedded,"),
        ("grpo optim.foo=1", "There is no setting 'optim.foo'. There are optim.beta1,"),
        ("grpo optim.lr=1", "There is no setting 'optim.lr'. Here it is optim.learning_rate."),
        ("grpo loss.drop_truncated=true", "Here it is loss.filters.drop_truncated."),
        ("grpo loss.clip_low=0.1", "Here it is loss.clip_epsilon (both bounds"),
        ("grpo loss.sampler_correction=token", "is a group: loss.sampler_correction.level, "),
        ("grpo loss.surrogate_settings.cap=1", "+loss.surrogate_settings.cap=1."),
        ("grpo beta=0.04", "There is no setting 'beta'. Here it is loss.kl_to_ref_coeff. --help"),
        ("grpo num_generations=8", "'num_generations'. Here it is collector.group_size."),
        ("grpo learning_rate=1e-6", "'learning_rate'. Here it is optim.learning_rate."),
        ("grpo loss_type=dapo", "'loss_type'. Here it is loss (loss=dapo, grpo,"),
        ("grpo temperature=0.7", "'temperature'. Did you mean policy.temperature?"),
        ("grpo actor_rollout_ref.rollout.n=8", "Here it is collector.group_size."),
        ("sft per_device_train_batch_size=4", "Here it is train.batch_size."),
        ("dpo beta=0.2", "There is no setting 'beta'. Here it is loss.beta."),
        ("dpo loss_type=ipo", "'loss_type'. Here it is loss.loss_function."),
        ("dpo data.column=messages", "There is no setting 'data.column'. There are data.dataset,"),
        ("grpo --beta 0.04", "--beta. Here it is loss.kl_to_ref_coeff. Settings are name=value,"),
        ("grpo task.rewards=[a:f", "and the brackets are closed"),
        ("grpo task.dataset = rows.jsonl", "'task.dataset'. Settings are name=value, without"),
        (
            "grpo task.dataset=rows.jsonl",
            "There is no setting 'task.dataset' of task=calculator. There are task.id,",
        ),
        (
            "grpo task.dataset=rows.jsonl task.reward=mine:length",
            "There is no setting 'task.reward' of task=calculator. Did you mean task.rewards?",
        ),
        ("grpo train.num_steps=abc", "train.num_steps: Value 'abc' of type 'str' could not be"),
        (
            "grpo optim.name=adam",
            "optim.name must be one of adamw, adamw8bit, muon, sgd, got 'adam'",
        ),
        ("grpo loss.name=gpro", "loss.name must be one of bnpo, cispo,"),
        ("grpo collector.group_size=1", "collector.group_size must be at least 2"),
        ("grpo logger.backends=[x]", r"logger.backends[0] must be one of csv, tensorboard,"),
        ("grpo task=openenv", "The task openenv needs task.base_url=..."),
        (
            "grpo task=gsm8k task.dataset=nofile.jsonl",
            "torchrl-agents grpo: task=gsm8k: There is no file or folder nofile.jsonl, from /",
        ),
        (
            "grpo task.tools=mine:f task.dataset=no/such/folder",
            "torchrl-agents grpo: task=environment: There is no file or folder no/such/fol",
        ),
        (
            "grpo policy.model=/no/such/folder",
            "torchrl-agents grpo: policy.model=/no/such/folder: There is no file or folder /no",
        ),
        ("grpo resume=nowhere", "resume=nowhere: it holds no run"),
        ("grpo hydra/launcher=nosuch", "Could not find 'hydra/launcher/nosuch' Available options"),
        (
            "grpo hydra.run.dir=/dev/null/run",
            "hydra.run.dir: /dev/null/run can't be a folder: /dev/null is a file.",
        ),
        (
            "grpo hydra.run.dir=/dev/null/rün,b",
            "hydra.run.dir: /dev/null/rün,b can't be a folder: /dev/null is a file.",
        ),
        ("grpo hydra.run.dirr=x", "hydra.run.dirr: Key 'dirr' not in 'RunDir'"),
        ("grpo name=../../../../x", "name='../../../../x' can't be the name of a folder: it needs"),
        ("evaluate task=textarena/../../x", "task='..' can't be the name of a folder"),
        ("grpo own.yaml", "torchrl-agents grpo: There is no file own.yaml, from /"),
        (
            "grpo --config own.yaml seed=1",
            "give their file as it is, torchrl-agents grpo own.yaml s",
        ),
        (
            "grpo --config-dir=conf experiment=my",
            "give their file as it is, torchrl-agents grpo ru",
        ),
        ("grpo --resolve", "--resolve is for what --cfg job prints"),
        ("grpo --package=loss", "--package is for what --cfg job prints"),
        ("grpo experiment=my", "is given as it is: torchrl-agents grpo my.yaml"),
        ("grpo +train.num_setps=3", "'train.num_setps'. Did you mean train.num_steps"),
        ("grpo ++optim.warmup=3 task=echo", "There is no setting 'optim.warmup'"),
        ("grpo +nosuch=3", "There is no setting 'nosuch'"),
        ("grpo +task.nosuch=3 task=echo", "There is no setting 'task.nosuch' of task=echo"),
        ("grpo ~loss", "loss can't be taken out: give it a value, null for none."),
        ("lora policy.lora_rnk=4", "torchrl-agents lora: There is no setting 'policy.lora_rnk'"),
        ("grpo task=gsm8k task.system_prompt=it's,so optim.lr=1", "Here it is optim.learning_rate"),
        ("grpo --multirunn", "unrecognized arguments: --multirunn"),
        ("sft data.dataset=chats.json", "data.dataset: There is no file or folder chats.json"),
        ("evaluate engine=chat", "engine=chat needs engine.url=http://.../v1"),
        ("evaluate policy.model=a.gguf", "policy.model=a.gguf: There is no file or folder a.gguf"),
        ("distillation teacher.modle=a", "There is no setting 'teacher.modle'. Did you mean"),
        ("self-play opponents.evry=1", "There is no setting 'opponents.evry'. Did you mean"),
        ("expert-iteration train.top_k=x", "train.top_k: Value 'x' of type 'str' could not be"),
        ("lora policy.lora_rank=0", "policy.lora_rank must be at least 1, got 0"),
    ],
)
def test_what_is_refused_is_refused_before_torch_is_imported(run_fork, command, words):
    done, imported = run_fork(*command.split())
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert imported == []


@pytest.mark.parametrize("command", ["", "--help", "grpo --help", "evaluate task=gsm8k --help"])
def test_help_is_shown_before_torch_is_imported(run, command):
    done, imported = run(*command.split())
    assert (done.returncode, done.stderr, imported) == (0, "", [])
    assert len(done.stdout.splitlines()) > 10


def test_a_command_that_is_right_imports_torch_and_reads_its_arguments_once(run):
    """Or the tests above could not fail."""
    done, imported = run("grpo", "--cfg", "job", "train.num_steps=7")
    assert re.search(r"^  num_steps: 7$", done.stdout, re.MULTILINE)
    assert {"torch", "transformers"} <= set(imported)


@pytest.mark.parametrize("name", [*TASKS, "textarena/2048-v0", "gcd", "reasoning_gym/countdown"])
def test_settings_read_from_the_source_are_those_of_the_function(name):
    module, function, arguments = find_task(name)
    made_by = getattr(import_module(module), function)
    wanted = inspect.signature(partial(made_by, *arguments)).parameters
    found = settings_of_task(name)
    by_keyword = [p for p in wanted.values() if p.kind is p.KEYWORD_ONLY]
    assert len(by_keyword) == len(wanted)  # a name stands for all others
    assert list(found) == [p.name for p in by_keyword]
    for parameter in by_keyword:
        kind, default, text = found[parameter.name]
        plain = [name for name, each in _TYPES.items() if each == parameter.annotation]
        assert plain == [kind] if plain else kind not in _TYPES
        assert (type(default), default) == (type(parameter.default), parameter.default)
        assert text, parameter.name  # each is told in the help


def test_all_generators_are_found_without_the_package():
    found = subprocess.run(
        [sys.executable, "-c", "from torchrl_envs.tasks import *; print(*generator_names())"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    from reasoning_gym.factory import DATASETS

    assert found == sorted(DATASETS) == generator_names()
    assert find_task("gcd") == (
        "torchrl_envs.tasks.reasoning_gym",
        "question_task",
        ("gcd",),
    )
    assert find_task("reasoning_gym/countdown")[2] == ("countdown",)


def test_a_package_that_was_imported_in_part_has_all_its_generators(monkeypatch):
    """What stopped the import names itself at the next one; what is registered besides counts."""
    factory = ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"ab": None, "my_own": None}
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    assert {"ab", "my_own", "gcd", "chain_sum"} <= set(generator_names())


def test_every_backend_that_is_a_choice_can_be_opened():
    assert tuple(LOGGERS) == BACKENDS


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            "task=agent task.program=mine:play task.agents=[a,b] evaluate.solved_by=reward",
            "pays all of them alike. Take",
        ),
        ("task.rewards=mine:score loss.credit=agent", "the environment has no AgentProgram"),
    ],
)
def test_agents_that_the_loss_does_not_know_are_told_before_a_model_is_loaded(
    run_script, tmp_path, settings, words
):
    (tmp_path / "mine.py").write_text(
        "def play(endpoint):\n    ...\n\ndef score(completions):\n    ...\n"
    )
    rows = "".join(json.dumps({"prompt": f"{i}"}) + "\n" for i in range(8))
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "model").mkdir()  # without a model, which would be the next thing to say
    own = ["task.dataset=rows.jsonl", "policy.model=model", "evaluate.num_prompts=2"]
    own += ["evaluate.solved_by=reward"]
    done = run_script(*settings.split(), *own, cwd=tmp_path, name="grpo")
    assert done.returncode == 1
    assert words in done.stderr
    done = run_script("task.rewards=mine:score", *own, cwd=tmp_path, name="grpo")
    assert "holds no model" in done.stderr

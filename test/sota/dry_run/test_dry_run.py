"""A dry run refuses what the run would, and loads no weights."""

import gc
import json
import os
import re
import shutil
import socket
import struct
import sys
from datetime import datetime

import mlflow
import pytest
from datasets import Dataset
from PIL import Image
from transformers import AutoConfig

from torchrl_agents import dry_run
from torchrl_agents.loggers import check_loggers
from torchrl_agents.settings.command_line import read_command_line
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import LoggerConfig, TrainingConfig
from torchrl_agents.start import run_recipe
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

TASK = ("task=gcd", "task.num_rows=64", "task.num_demonstrations=64", "evaluate.num_prompts=4")
TINY = (*TASK, "debug=tiny", "logger=none")
STUDENT = "policy.model=student"


def chat(asked):
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": "Yes."}]
    return {"messages": said}


@pytest.fixture
def run(script, tmp_path, monkeypatch):
    """Runs a recipe in a folder of its own; gives the folders of its runs."""
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        module = script(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        build = {"build": module.build} if hasattr(module, "build") else {}
        read_command_line(module.RECIPE)
        run_recipe(module.RECIPE, getattr(module, "main", None) or module.evaluate, **build)
        return sorted(tmp_path.glob("outputs/*/*/*-[0-9]*"))

    return run


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory):
    """Models in folders: whole ones of two vocabularies, and some that lack a part."""
    folder = tmp_path_factory.mktemp("models")

    def save(name, text="Is 7 odd?", **kwargs):
        tokenizer = train_tokenizer([text] * 8, vocab_size=300)
        tokenizer.save_pretrained(folder / name)
        tiny_qwen3(len(tokenizer)).save_pretrained(folder / name, **kwargs)
        return folder / name

    save("student")
    save("stranger", "What is the greatest common divisor?")
    (save("no_weights") / "model.safetensors").unlink()
    weights = save("broken_off") / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    next(save("no_shard", max_shard_size="100KB").glob("model-00002-*")).unlink()
    (save("no_tokenizer") / "tokenizer.json").unlink()
    return folder


@pytest.fixture
def models(saved_models, tmp_path):
    """The models, in the folder of a test, which may change them."""
    shutil.copytree(saved_models, tmp_path, dirs_exist_ok=True)


def test_no_garbage_is_looked_for_while_a_recipe_is_imported(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["grpo.py", "debug=tiny", "logger=none", "dry_run=true"])
    grpo = script("grpo")
    read_command_line(grpo.RECIPE)
    assert not gc.isenabled()
    run_recipe(grpo.RECIPE, grpo.main)
    assert gc.isenabled(), "a run makes garbage"
    assert gc.get_freeze_count() > 10_000, "what was imported stays"


def test_rows_that_no_checkpoint_could_hold_are_refused_before_a_model_is_loaded(
    run, models, tmp_path, capfd
):
    (tmp_path / "scoring.py").write_text("def length(completions, **_): return [1.0]")
    data = Dataset.from_list(
        [{"prompt": f"{i}?", "made": datetime(2026, 1, 2), "shown": Image.new("L", (1, 1))}
         for i in range(8)]
    )  # fmt: skip
    own = ("task.rewards=scoring:length", "evaluate.num_prompts=4", STUDENT, "dry_run=true")
    data.to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(SystemExit, match=r"leave the column out of row\['shown'\]: cannot store"):
        run("grpo", *own, "task.dataset=rows.parquet")
    data.remove_columns("shown").to_parquet(tmp_path / "dated.parquet")
    run("grpo", *own, "task.dataset=dated.parquet")


def test_what_is_taken_over_from_the_run_that_left_a_model_is_told_and_no_more(
    run, models, tmp_path
):
    policy = {"model": "org/first", "max_new_tokens": 512, "show_tool_schemas": False}
    policy |= {"temperature": 1.0, "min_p": 0.1, "top_k": 5}
    left = {"policy": policy, "task": {"id": "gcd"}}
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "config.yaml").write_text(json.dumps(left))
    (tmp_path / "student").rename(tmp_path / "left" / "model")
    typed = ("policy.model=left", "policy.max_new_tokens=9", "policy.top_k=0", "dry_run=true")
    # What the run was of is not what stands for a task that nobody named.
    with pytest.raises(SystemExit, match=r"run of task=gcd, .* for which calculator stands"):
        run("grpo", *typed)
    (folder,) = run("grpo", *TINY, *typed)
    log = (folder / "grpo.log").read_text()
    assert "as in the run that left left: {'policy.show_tool_schemas': False}\n" in log
    assert "here policy.min_p=0.0. For the same give policy.min_p=0.1.\n" in log


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": [], "completion": []},
         r"row 3 has nothing in \['prompt', 'completion'\]; its columns are \['completion', 'pr"),
        ({"messages": None}, "row 3 has no list of messages"),
        ({"messages": [{"content": "3?"}, {"role": "assistant", "content": "Yes."}]},
         r"Message 0 of row 3 has the role None.*data.skip_bad_rows=true"),
        ({"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": "Yes."}]},
         r"Message 0 of row 3 \(user\) has content of type int.*data.skip_bad_rows=true"),
        (chat("why " * 600), r"1 of 12 conversations are longer than the 1024 tokens .*rows \[3\]"),
    ],
    ids=["nothing to learn", "no messages", "no role", "a number", "too long"],
)  # fmt: skip
def test_conversations_that_can_not_be_learnt_are_refused(row, words, run, models, tmp_path):
    rows = [row if n == 3 else chat(f"{n}?") for n in range(12)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = ("data.dataset=chats.jsonl", "data.num_held_out=4", STUDENT, "dry_run=true")
    with pytest.raises(SystemExit, match=words):
        run("sft", *TASK, *own)


def unlistened():
    """Nobody is there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_all_is_checked_and_no_weights_are_loaded(run, models, tmp_path, capfd):
    """The weights are a file of a terabyte, nearly all of it a hole."""
    config = AutoConfig.from_pretrained(tmp_path / "student")
    config.update({"hidden_size": 1 << 14, "num_hidden_layers": 80, "intermediate_size": 1 << 16})
    config.layer_types = ["full_attention"] * 80
    config.save_pretrained(tmp_path / "student")
    count = 1 << 38
    header = {"w": {"dtype": "F32", "shape": [count], "data_offsets": [0, 4 * count]}}
    text = json.dumps(header).encode()
    with (tmp_path / "student/model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(file.tell() + 4 * count)
    folders = run("distillation", *TASK, STUDENT, "teacher.model=student", "dry_run=true")
    folders += run("grpo", *TASK, STUDENT, "policy.lora_rank=4", "logger=files", "dry_run=true")
    told = capfd.readouterr().out
    assert "distillation: nothing is refused" in told
    assert re.search(r"model +student, adapters of rank 4; engine transformers\n", told)
    assert "100, each of 16 prompts x 16 rollouts (sync)" in told
    assert f"{folders[-1] / 'config.yaml'} has all" in told
    for folder in folders[-2:]:
        assert json.loads((folder / "run.json").read_text())["status"] == "checked"
        assert (folder / "config.yaml").is_file()
        assert not {"model", "tensorboard", "csv", "metrics.jsonl"} & set(os.listdir(folder))


REFUSED = [
    ("grpo", ["policy.model=no/where"], r"policy.model='no/where' \(no folder of that name"),
    (
        "grpo",
        ["policy.model=no_weights"],
        "model='no_weights' can't be loaded: .*no.*model.saf",
    ),
    ("grpo", ["policy.model=broken_off"], "model='broken_off' can't be loaded: "),
    ("grpo", ["policy.model=no_shard"], "model='no_shard' can't be loaded: .*model-00002-of"),
    ("grpo", ["policy.model=no_tokenizer"], "model='no_tokenizer' can't be loaded: "),
    (
        "grpo",
        [STUDENT, "policy.lora_rank=4", "policy.lora_target_modules=[nowhere]"],
        "policy.lora_target_modules: .*'nowhere'",
    ),
    (
        "grpo",
        ["task.level=own", "policy.lora_rank=4", "policy.lora_target_modules=[nix]"],
        "policy.lora_target_modules: .*'nix'",
    ),
    ("grpo", [STUDENT, "+policy.model_kwargs.revison=x"], "can't be loaded: .*revison"),
    ("grpo", [STUDENT, "policy.attn_implementation=none"], "can't be loaded: .*none"),
    ("grpo", [STUDENT, "policy.max_model_len=1025"], "can't be used so: .*1025.*1024 tokens"),
    ("grpo", [STUDENT, "policy.chat_template_name=x"], "can't be used so: .*'x'"),
    ("distillation", [STUDENT, "teacher.model=no/where"], "teacher.model='no/where'"),
    ("distillation", [STUDENT, "teacher.model=stranger"], "'stranger' has another vocabulary"),
    (
        "distillation",
        [STUDENT, "teachers={a: {model: student}, b: {model: no/where}}"],
        "teacher.model='no/where'",
    ),
    (
        "distillation",
        [STUDENT, "teacher.model=m", f"teacher.url={unlistened()}/v1"],
        "teacher.url: The teacher at .* does not answer",
    ),
    (
        "sft",
        [STUDENT, "data.dataset=silent.jsonl", "data.num_held_out=1"],
        "data.dataset='silent.jsonl': .*the assistant says nothing in row 1",
    ),
    (
        "grpo",
        ["task.level=own", "policy.max_model_len=100000"],
        "the embedded model can't be used so: .*100000",
    ),
]
OF_A_KIND = (0, 2, 6, 12, 15)
"""A model that is not there, and one that is broken; adapters; a teacher; rows."""


@pytest.mark.parametrize(
    ("recipe", "arguments", "words", "dry"),
    [
        *(pytest.param(*each, True, id=f"{n}, dry run") for n, each in enumerate(REFUSED)),
        *(  # what loads a model says the same in a run, of which one of a kind will do
            pytest.param(
                *each,
                False,
                id=f"{n}, run",
                marks=[] if n in OF_A_KIND else pytest.mark.weekly,
            )
            for n, each in enumerate(REFUSED)
        ),
    ],
)
def test_what_the_run_would_refuse(run, models, tmp_path, recipe, arguments, words, dry):
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    rows = [{"messages": said}, {"messages": said[:1]}]
    (tmp_path / "silent.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(SystemExit, match=words):
        run(recipe, *TINY, *arguments, *(["dry_run=true"] if dry else []))
    told = [json.loads(p.read_text())["status"] for p in tmp_path.glob("outputs/*/*/*/run.json")]
    assert told == ([] if dry else ["failed"])
    assert not dry or not any(tmp_path.glob("outputs/*/*/*"))


def test_servers_are_asked(run, models):
    url = unlistened()
    with pytest.raises(SystemExit, match=f"engine: No answer from {url}"):
        run("grpo", *TINY, STUDENT, "engine=vllm", f"engine.url={url}", "dry_run=true")


@pytest.mark.parametrize(
    ("recipe", "setting", "package"),
    [
        ("grpo", "engine=vllm", "vllm"),
        ("evaluate", "engine=vllm", "vllm"),
        ("grpo", "engine=sglang", "sglang"),
        ("grpo", "collector=ray", "ray"),
    ],
)
def test_packages_that_are_not_there(run, models, monkeypatch, recipe, setting, package):
    monkeypatch.setattr(dry_run, "find_spec", lambda name: None if name == package else name)
    with pytest.raises(SystemExit, match=f"{setting} needs the package {package}"):
        run(recipe, *TASK, STUDENT, setting, "dry_run=true")


def test_what_an_engine_of_a_library_can_not_do_here(run, models):
    python = "+engine.engine_kwargs.python=no-python"
    with pytest.raises(SystemExit, match="python='no-python' is no program"):
        run("grpo", *TASK, STUDENT, "engine=sglang", python, "dry_run=true")
    with pytest.raises(SystemExit, match="SGLang lends no memory of a CPU"):
        run("grpo", *TASK, STUDENT, "engine=sglang", "engine.colocate=true")


def test_earlier_runs_stay_as_they_are(run, models):
    (folder,) = run("grpo", *TINY, STUDENT, "name=first", "train.num_steps=1")
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    for setting in ("overwrite=true", "resume=auto", f"resume={folder}"):
        with pytest.raises(SystemExit, match="dry_run=true changes no earlier run"):
            run("grpo", *TINY, STUDENT, "name=first", "train.num_steps=1", setting, "dry_run=true")
        after = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        assert after == before, setting


def test_an_evaluation_has_one_too(run, models):
    (folder,) = run("evaluate", *TASK, STUDENT, "dry_run=true")
    assert json.loads((folder / "run.json").read_text())["status"] == "checked"
    for engine in ("transformers", "vllm"):
        with pytest.raises(SystemExit, match=r"policy\.model='no/where'"):
            run("evaluate", *TASK, "policy.model=no/where", f"engine={engine}", "dry_run=true")


def check(*backends):
    check_loggers(TrainingConfig(logger=LoggerConfig(backends=[*backends])), "grpo")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own libraries
def test_what_mlflow_would_refuse(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    check("csv", "tensorboard", "mlflow")
    names = [each.name for each in mlflow.MlflowClient().search_experiments()]
    assert names == ["Default"]  # none of ours was begun
    url = unlistened()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    with pytest.raises(SettingsError, match=r"logger.backends: mlflow can't be opened: .*refused"):
        check("mlflow")


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("more", [(), ("engine=vllm", "engine.url=http://127.0.0.1:1")])
def test_a_model_that_brings_code_is_refused_and_nobody_is_asked(run, tmp_path, monkeypatch, more):
    def asked(*_):
        raise AssertionError("nobody is to be asked")

    monkeypatch.setattr("builtins.input", asked)
    folder = tmp_path / "student"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.MyConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("from pathlib import Path\nPath(__file__ + '.ran').touch()\n")
    with pytest.raises(SystemExit, match=r"code of its own.*model_kwargs\.trust_remote_code"):
        run("grpo", *TINY, STUDENT, "dry_run=true", *more)
    assert not list(folder.rglob("*.ran"))

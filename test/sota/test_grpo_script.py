"""The training script as a user runs it: a command, a folder, and one JSON object at the end."""

import gzip
import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from collectors.record import RunRecord
from torchrl_agents.models.loading import add_tokens
from torchrl_data import builtin_template
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "sota-implementations" / "grpo" / "grpo.py"
SMALL = ["debug=tiny", "task.num_demonstrations=64", "task.num_rows=64"]
TINY_OWN = ("debug=tiny", "warm_start.num_steps=0", "train.num_steps=1", "evaluate.num_prompts=4")


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def result_in(done):
    """The JSON object at the end of its output."""
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def result_of(run_script):
    """Runs it; gives its result."""
    return lambda *overrides, cwd: result_in(run_script(*overrides, cwd=cwd))


def result_of_command(*overrides, cwd, runner=()):
    """As in a terminal, and not in a fork: Ray and vLLM have threads and processes of their own."""
    command, own = [sys.executable, *runner, str(SCRIPT), *overrides], environment()
    told = {"capture_output": True, "text": True, "timeout": 280, "check": False}
    return result_in(subprocess.run(command, cwd=cwd, env=own, **told))


WORDS = [{"question": f"What is {i} plus 1?", "answer": f"so\n#### {i + 1}"} for i in range(40)]


SECRETS = (
    *("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "TORCHRL_VLLM_TOKEN"),
    *(
        "AWS_SECRET_ACCESS_KEY",
        "GITHUB_TOKEN",
        "MLFLOW_TRACKING_PASSWORD",
        "NGC_API_KEY",
        "PGPASSWORD",
    ),
)


def test_A18_no_secret_of_the_environment_is_written(run_script, tmp_path, monkeypatch):
    """A run, one whose rewards raise errors, and one that is refused."""
    for number, name in enumerate(SECRETS):
        monkeypatch.setenv(name, f"canary-{number}")
    (tmp_path / "mine.py").write_text(
        "def breaks(completions, **_):\n    raise RuntimeError('no such host')\n"
        "def scores(completions, **_):\n    return [float(len(c[-1:])) for c in completions]\n"
    )
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(96)))
    own = (*TINY_OWN, "task.dataset=rows.jsonl")
    runs = [
        run_script(*own, "task.rewards=mine:scores", cwd=tmp_path),
        run_script(*own, "task.rewards=mine:breaks", "evaluate.num_prompts=16", cwd=tmp_path),
        run_script(*own, "task.rewards=mine:scores", "train.num_steps=some", cwd=tmp_path),
    ]
    assert [run.returncode for run in runs] == [0, 1, 1], [run.stderr[-800:] for run in runs]
    assert "RewardErrorLimit(max_error_fraction=...). See" in runs[1].stderr.splitlines()[-1]
    files = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    found = [
        gzip.decompress(b) if f.suffix == ".gz" else b for f in files for b in [f.read_bytes()]
    ]
    assert any(path.suffix == ".gz" for path in files)
    found += [text.encode() for run in runs for text in (run.stdout, run.stderr)]
    assert sum(len(text) for text in found) > 10_000
    assert not [text for text in found if b"canary-" in text]


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rollouts_of(folder: Path) -> list[dict]:
    record = RunRecord(folder)
    return [vars(sample) for step in record.steps for sample in record.samples(step.step)]


@pytest.mark.slow
def test_a_run_leaves_its_result_and_its_files(result_of, tmp_path):
    result = result_of(*SMALL, cwd=tmp_path)
    assert {"held_out_before", "held_out_after", "seconds", "optimizer_steps"} <= result.keys()
    assert result["steps"] == 2
    out = tmp_path / "outputs/grpo/calculator/tiny-001"
    assert Path(result["output_dir"]) == out
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "finished"
    assert {"python", "torch", "transformers"} <= record["versions"].keys()
    assert (out / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list(out.glob("tensorboard/events*"))
    log = (out / "grpo.log").read_text()
    for words in ("warm start ...", "first evaluation ...", "step 2/2", "No signal in 1 step"):
        assert words in log
    assert "chat template" not in log  # the embedded model can't be given another one
    _metrics_agree(out)
    # The model directory is one like any other: under the run's name, with its chat template.
    model = tmp_path / "outputs/grpo/calculator/tiny/model"
    assert "<|im_start|>" in (model / "chat_template.jinja").read_text()
    again = result_of(
        *SMALL, f"policy.model={model}", "policy.max_new_tokens=8", "name=again", cwd=tmp_path
    )
    assert again["steps"] == 2


def _metrics_agree(out: Path) -> None:
    rollouts, metrics = rollouts_of(out), lines_of(out / "metrics.jsonl")
    assert [r["step"] for r in rollouts] == [1] * 4 + [2] * 4
    assert [r["group_id"] for r in rollouts[:4]] == [
        "0/8",
        "0/8",
        "0/9",
        "0/9",
    ]  # eight are held out
    assert [r["policy_version"] for r in rollouts] == [1] * 4 + [2] * 4
    assert [m["policy_version"] for m in metrics] == [1, 2]
    assert all(r["messages"][1]["role"] == "assistant" for r in rollouts)
    assert all(r["row"]["prompt"] == r["messages"][0]["content"] for r in rollouts)
    assert all(r["total_tokens"] >= r["prompt_tokens"] + r["sampled_tokens"] for r in rollouts)
    csv = (out / "csv/scalars/reward.csv").read_text().splitlines()
    for step, (metric, line) in enumerate(zip(metrics, csv, strict=True), 1):
        scored = [r["reward"] for r in rollouts if r["step"] == step and r["reward"] is not None]
        assert metric["reward"] == pytest.approx(sum(scored) / len(scored))
        assert float(line.split(",")[-1]) == pytest.approx(metric["reward"])
        own = [r["sampled_tokens"] for r in rollouts if r["step"] == step]
        assert metric["sampled_tokens"] == pytest.approx(sum(own) / len(own))
        assert math.isfinite(metric["entropy"])
        assert metric["learning_rate"] > 0


@pytest.mark.slow
def test_a_run_that_streams_tells_of_every_group(result_of, tmp_path):
    settings = ("collector=streaming", "collector.max_staleness=2", "evaluate.every=1")
    settings += ("evaluate.num_samples=2", "evaluate.max_rollouts=6")
    result = result_of(*SMALL, *settings, "train.num_steps=4", cwd=tmp_path)
    out = Path(result["output_dir"])
    metrics = lines_of(out / "metrics.jsonl")
    assert [line["ledger/groups/trained"] for line in metrics] == [2.0, 4.0, 6.0, 8.0]
    assert all(line["ledger/staleness/max"] <= 2 for line in metrics)
    points = lines_of(out / "evaluations.jsonl")
    assert any("reward" in point for point in points)
    assert all("reward" in point or point["skipped"] for point in points)
    steps = [point["step"] for point in points]
    assert (steps[0], steps[-1]) == (0, 4)
    assert sorted(steps) == sorted(set(steps)), "each once, those that end late too"
    tests = [point for point in points if "reward" in point]
    assert tests[0]["reward"] == result["held_out_before"]
    assert tests[-1]["rewards/Calculator"] == result["after/rewards/Calculator"]
    assert tests[-1]["pass@2"] == result["after/pass@2"]
    for point in tests:  # all prompts, three at a time; c of 2 samples are correct
        found = point["estimates"]
        assert {each["num_prompts"] for each in found.values()} == {8}
        assert all(each["low"] <= each["value"] <= each["high"] for each in found.values())
        assert point["pass@2"] + point["pass^2"] == pytest.approx(2 * point["mean@2"])
    for name in ("reward", "pass_at_2", "pass_hat_2"):
        told = (out / f"csv/scalars/held_out/{name}.csv").read_text().splitlines()
        assert [int(line.split(",")[0]) for line in told] == [point["step"] for point in tests]
    told = Counter(event["name"] for event in RunRecord(out).events())
    assert told["trained"] == 8
    assert told["offered"] == 8 + told["dropped"] + told["returned"]
    log = (out / "grpo.log").read_text()
    assert "GroupLedger at step 4" in log
    assert "This run was " in log
    names = {
        event["name"] for event in json.loads((out / "timeline.json").read_text())["traceEvents"]
    }
    assert {"generate", "score", "wait for rollouts", "push weights"} <= names


@pytest.mark.slow
@pytest.mark.timeout(600)  # two commands, each with Ray and its actors
def test_a_run_on_ray_tells_of_every_group_and_goes_on(tmp_path):
    pytest.importorskip("ray")
    settings = ("collector=ray", "collector.num_collectors=2", "collector.max_staleness=2")
    config = "+collector.remote_config.num_cpus=0"
    own = {"cwd": tmp_path, "runner": [ROOT / "test/quick_imports/forked_ray_workers.py"]}
    result = result_of_command(*SMALL, *settings, config, "train.num_steps=2", **own)
    out = Path(result["output_dir"])
    again = result_of_command(f"resume={out}", "train.num_steps=3", **own)
    assert again["held_out_before"] == result["held_out_before"]
    points = lines_of(out / "evaluations.jsonl")
    assert [point["step"] for point in points] == [0, 2, 3]
    assert points[0]["reward"] == result["held_out_before"]
    metrics = lines_of(out / "metrics.jsonl")
    assert [line["ledger/groups/trained"] for line in metrics] == [2.0, 4.0, 6.0]
    assert [line["policy_version"] for line in metrics] == sorted(
        line["policy_version"] for line in metrics
    )
    assert all(line["ledger/staleness/max"] <= 2 for line in metrics)
    assert all(0 < line["collect/driver_bytes_per_row"] < 1024 for line in metrics)
    assert "GroupLedger at step 3" in (out / "grpo.log").read_text()


def test_runs_have_folders_of_their_own(result_of, run_script, tmp_path):
    tiny = [*SMALL, "train.num_steps=1", "warm_start.num_steps=0"]
    folders = [Path(result_of(*tiny, cwd=tmp_path)["output_dir"]).name for _ in range(2)]
    assert folders == ["tiny-001", "tiny-002"]
    link = tmp_path / "outputs/grpo/calculator/tiny"
    assert os.readlink(link) == "tiny-002"
    replaced = result_of(*tiny, "overwrite=true", "seed=1", cwd=tmp_path)
    assert Path(replaced["output_dir"]).name == "tiny-002"
    assert "seed: 1" in (link / "config.yaml").read_text()
    taken = run_script(*tiny, f"hydra.run.dir={link.resolve()}", cwd=tmp_path)
    assert taken.returncode == 1
    assert "holds a run already" in taken.stderr
    assert "seed: 1" in (link / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
        # test_stop_at_any_point.py sends it at each point.
        pytest.param(signal.SIGTERM, 143, id="SIGTERM", marks=pytest.mark.weekly),
    ],
)
def test_a_signal_ends_the_step_and_saves(number, status, tmp_path):
    """To the whole group of processes, as a terminal sends it; the task has workers."""
    rows = tmp_path / "rows.jsonl"
    problems = [{"problem": f"{i}?", "solution": rf"\boxed{{{i}}}"} for i in range(40)]
    rows.write_text("\n".join(map(json.dumps, problems)))
    command = [
        *(sys.executable, SCRIPT, "debug=tiny", "task=math", f"task.dataset={rows}"),
        *("train.num_steps=100000", "evaluate.num_shown=0", "policy.max_new_tokens=4"),
    ]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("grpo step 2/"):
                break
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=120)
    assert process.returncode == status, err[-3000:]
    folder = tmp_path / "outputs/grpo/math/tiny-001"
    result = json.loads(out.strip().splitlines()[-1])
    assert result["steps"] == len(lines_of(folder / "metrics.jsonl")) >= 2
    assert result["held_out_after"] is None
    assert (folder / "model/model.safetensors").exists()
    assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    deadline = time.monotonic() + 20
    while any(child.is_running() for child in family):
        assert time.monotonic() < deadline, "a child survives"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_signal_before_the_first_step_leaves_no_model(tmp_path):
    command = [sys.executable, SCRIPT, "debug=tiny", "warm_start.num_steps=100000"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "warm start ..." in line:
                break
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert not list(tmp_path.glob("outputs/grpo/calculator/tiny*/model*"))


@pytest.mark.slow
@pytest.mark.vllm
def test_the_vllm_engine_trains_too_and_streams_with_adapters(tmp_path):
    streams = ("engine=vllm", "collector=streaming", "name=streams")
    adapters = ("policy.lora_rank=4", "+engine.engine_kwargs.enable_lora=true")
    adapters += ("warm_start.num_steps=0",)  # of the model, whose first weights the engine keeps
    assert result_of_command(*SMALL, *streams, *adapters, cwd=tmp_path)["steps"] == 2


@pytest.mark.weekly
@pytest.mark.vllm
def test_what_a_run_with_vllm_leaves_serves_in_vllm_as_it_is(tmp_path):
    assert result_of_command(*SMALL, "engine=vllm", cwd=tmp_path)["steps"] == 2
    model = tmp_path / "outputs/grpo/calculator/tiny/model"
    code = (
        "import vllm, sys; m = vllm.LLM(sys.argv[1], enforce_eager=True, max_model_len=256); "
        "said = m.chat([{'role': 'user', 'content': 'What is 1 + 2?'}])[0].outputs[0]; "
        "print(len(said.token_ids))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-1]) > 0


@pytest.mark.weekly  # test_vllm_server.py asks it of one server with each change
@pytest.mark.vllm
def test_S02_servers_end_with_a_run_that_is_killed(tmp_path):
    settings = ("engine=vllm", "engine.num_engines=2", "collector=streaming")
    with subprocess.Popen(
        [sys.executable, SCRIPT, *SMALL, *settings, "train.num_steps=1000"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("grpo step 1/"):
                break
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        deadline = time.monotonic() + 20
        while any(child.is_running() for child in family):
            assert time.monotonic() < deadline, family
            time.sleep(0.1)
    assert len(family) >= 4  # two servers, each with its engine


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        *(
            "echo",
            "wordle",
            "multi_env",
            "gcd",
        ),  # one of a kind: a turn, a game, several, questions
        *(pytest.param(name, marks=pytest.mark.weekly) for name in ("catch", "countdown")),
    ],
)
def test_a_task_trains(task, result_of, tmp_path):
    own = ["task.level=own"] if task == "gcd" else []
    result = result_of(*SMALL, f"task={task}", *own, "train.num_steps=1", cwd=tmp_path)
    assert result["task"] == task
    rollouts = rollouts_of(Path(result["output_dir"]))
    assert len(rollouts) == 4
    # A model that has hardly been trained may end a turn at once, but not every time.
    last = [r["messages"][-1] for r in rollouts]
    assert any(m["content"] for m in last)
    assert all(m["content"] or m["role"] == "assistant" for m in last)


@pytest.mark.slow
def test_a_data_set_of_ones_own_trains(result_of, tmp_path):
    """Questions from a file: the warm start learns the answers' form, so there is a signal."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, WORDS)))
    result = result_of(
        *("debug=tiny", "task=gsm8k", f"task.dataset={path}", "policy.max_new_tokens=32"),
        *("warm_start.num_steps=60", "collector.group_size=8", "loss=grpo", "optim=sgd"),
        *("loss.kl_to_ref_coeff=0.01", "optim.schedule=cosine", "logger=none"),
        cwd=tmp_path,
    )
    out = Path(result["output_dir"])
    rollouts = rollouts_of(out)
    assert {name for r in rollouts for name in r["rewards"]} == {"GSM8KRewardParser"}
    trained = [m for m in lines_of(out / "metrics.jsonl") if m["optimizer_steps"]]
    assert trained
    assert all(m["kl_to_ref"] >= 0 for m in trained)
    assert any(r["advantage"] for r in rollouts)


@pytest.mark.slow
def test_a_base_model_trains_with_a_template_from_a_file(run_script, result_of, tmp_path):
    """Its vocabulary has neither the template's control tokens nor a template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<|endoftext|>"], initial_alphabet=letters)
    backend.train_from_iterator(["What is 1?"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(tmp_path / "base")
    tiny_qwen3(len(tokenizer)).save_pretrained(tmp_path / "base")
    source = builtin_template("chatml").replace("<|im_end|>", "<|done|>")
    (tmp_path / "own.jinja").write_text(source)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, WORDS)))

    given = ("task=gsm8k", "task.dataset=rows.jsonl", "policy.model=base", "evaluate.num_prompts=4")
    given += ("train.num_steps=1", "collector.num_prompts=2", "policy.max_new_tokens=4")
    refused = run_script(*given, cwd=tmp_path)
    assert refused.returncode == 1
    assert "policy.add_control_tokens=true" in refused.stderr.splitlines()[-1]
    assert "base has no chat template of its own; it gets 'chatml'" in refused.stderr
    template = ("policy.chat_template=own.jinja", "policy.add_control_tokens=true")
    made = result_of(*given, *template, "train.num_steps=1", cwd=tmp_path)

    model = Path(made["output_dir"]) / "model"
    own = AutoTokenizer.from_pretrained(model)
    new = [own.convert_tokens_to_ids(token) for token in ("<|done|>", "<|im_start|>")]
    assert sorted(new) == [len(tokenizer), len(tokenizer) + 1]
    assert own.chat_template == source
    # It goes on from there as it is: the model has its tokens, and its template.
    assert result_of(*given[:2], f"policy.model={model}", *given[3:], cwd=tmp_path)["steps"] == 1
    for wrong, words in (
        (("policy.chat_template=nowhere.jinja",), "No such file"),
        (("policy.chat_template=chatml",), "built-in template is policy.chat_template_name=chatml"),
        (("policy.chat_template=rows.jsonl",), "does not show what the assistant says"),
        ((*template, "policy.chat_template_name=qwen"), "in place of"),
        ((template[1], "engine=vllm"), "is for one with engine=transformers"),
    ):
        refused = run_script(*given, *wrong, cwd=tmp_path)
        assert (refused.returncode, words in refused.stderr.splitlines()[-1]) == (1, True)


@torch.no_grad()
def test_added_tokens_get_the_mean_of_all_rows():
    tokenizer = train_tokenizer(["abc"], vocab_size=300)
    model = tiny_qwen3(len(tokenizer))
    before = model.get_input_embeddings().weight.clone()
    add_tokens(model, tokenizer, ["<|new|>", "<|im_end|>", "<|newer|>"])
    after = model.get_input_embeddings().weight
    assert after.shape[0] == len(tokenizer) == len(before) + 2
    torch.testing.assert_close(after, torch.cat([before, before.mean(0).expand(2, -1)]))


@pytest.mark.slow
def test_a_conversation_longer_than_the_model_ends_and_the_run_goes_on(result_of, tmp_path):
    result = result_of(*SMALL, "policy.max_model_len=96", "train.num_steps=1", cwd=tmp_path)
    assert result["steps"] == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(
            ["train.num_setps=3"], "'train.num_setps'. Did you mean train.num_steps", id="setting"
        ),
        pytest.param(["engine=vlllm"], "'vlllm'. Did you mean vllm", id="choice"),
        pytest.param(["optim.foo=1"], "There are optim.beta1, optim.beta2,", id="group"),
        pytest.param(["optim.learning_rate=fast"], "optim.learning_rate: Value 'fast'", id="type"),
        pytest.param(["~task.num_rows"], "task.num_rows can't be taken out", id="taken out"),
        pytest.param(["train.num_steps=two"], "num_steps", id="wrong type"),
        pytest.param(
            ["task=spell_bakward"],
            "no task 'spell_bakward'. Did you mean spell_backward",
            id="unknown task",
        ),
        pytest.param(
            ["task=zebra_puzzles"], "no easy questions of zebra_puzzles", id="not to be learnt"
        ),
        pytest.param(["task=openenv"], "task.base_url", id="no server"),
        pytest.param(["policy.model=no/where"], "policy.model='no/where'", id="no model"),
        pytest.param(["task=gsm8k", "task.dataset=none.jsonl"], "task=gsm8k", id="no data"),
    ],
)
def test_a_wrong_setting_gives_a_short_error(overrides, message, run_script, tmp_path):
    done = run_script(*overrides, cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 12
    assert not list(tmp_path.glob("**/model"))


def test_help_says_what_each_setting_means(run_script, tmp_path):
    text = run_script("--help", "task=gsm8k", cwd=tmp_path).stdout
    assert "collector.group_size=16" in text
    assert "Rollouts of a prompt." in text
    assert "task.held_out_split" in text
    assert "which to test on" in text


@pytest.mark.filterwarnings("ignore:.*step 1 could not be saved")  # the checkpoint, too
@pytest.mark.parametrize("is_full", [True, False], ids=["full", "no folder"])
def test_a_disk_that_takes_nothing_is_told_and_nothing_stays_half_written(
    run_recipe, tmp_path, monkeypatch, is_full
):
    monkeypatch.chdir(tmp_path)
    tokenizer = train_tokenizer(["Is 7 odd?"] * 8, vocab_size=300)
    tokenizer.save_pretrained("student")
    tiny_qwen3(len(tokenizer), max_position_embeddings=8192).save_pretrained("student")
    words = r"^grpo.py: a file can't be written \(.*os error 27\)\)\. What .* is in .*tiny-001\."
    if not is_full:
        Path("outputs").touch()
        words = f"^grpo.py: no folder for the run can be made in {tmp_path}: .*Not a directory"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # the model has more
    try:
        with pytest.raises(SystemExit, match=words):
            run_recipe("grpo", *SMALL, "policy.model=student", "logger=none", "train.num_steps=1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = {path.name for path in tmp_path.glob("outputs/**/*")}
    assert not {name for name in left if "model" in name or "step-0" in name} - {
        "step-000001.jsonl.gz"
    }
    for record in tmp_path.rglob("run.json"):
        assert json.loads(record.read_text())["status"] == "failed"

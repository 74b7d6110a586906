"""Agents with weights of their own that vLLM draws for, in a run: engines that the recipe makes."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from weighted_agents import AGENTS, PROGRAM, TASK, TINY, check_adapters, rewrite, samples

from torchrl_agents.models import vllm_policy
from torchrl_agents.models.saved_agents import SavedAgents
from torchrl_agents.settings.command_line import prepare
from torchrl_agents.settings.errors import SettingsError
from torchrl_agents.settings.schema import AgentsConfig
from torchrl_agents.start import check_config
from torchrl_agents.verify import main as verify

SCRIPTS = Path(__file__).parents[2] / "sota-implementations"
VLLM = ("engine=vllm", "+engine.engine_kwargs.kv_cache_memory_bytes=67108864")
VERIFIED = ("collector.verify_every=1",)
BESIDE = ("collector=streaming", "collector.pipeline_depth=0")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a recipe as in a terminal: vLLM has threads and processes of its own."""
    monkeypatch.chdir(tmp_path)
    Path("own_talk.py").write_text(PROGRAM)
    lines = [json.dumps({"prompt": f"Number {n}, please."}) for n in range(8)]
    Path("rows.jsonl").write_text("\n".join(lines))

    def run(name, *arguments):
        command = [sys.executable, SCRIPTS / name / f"{name}.py", *arguments]
        paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
        own = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        told = {"capture_output": True, "text": True, "timeout": 280, "check": False}
        done = subprocess.run(command, env=own, **told)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


def train(run, *arguments):
    return Path(run("grpo", *TASK, *AGENTS, *TINY, *VLLM, *arguments)["output_dir"])


def check_verified(folder):
    """All tokens that were computed again before they were trained are those that were drawn."""
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    # Beside training a step may have no token of the weights that are there by then.
    gaps = [step["verify/largest_gap"] for step in steps if step.get("verify/tokens")]
    assert gaps
    assert max(gaps) < 1e-4
    for step in steps:
        assert step.get("verify/at_fault", 0) == 0
        assert min(step[f"agents/{name}/trained_tokens"] for name in ("writer", "critic")) > 0


def check_explained(folder, tmp_path):
    """Each token is one of its agent's weights, and none is another one's."""
    for name in ("writer", "critic", "judge"):
        assert verify([str(folder), "--agent", name]) == 0
    other = {"writer": "critic", "critic": "writer", "judge": "judge"}
    mixed = Path(shutil.copytree(folder, tmp_path / "mixed"))
    rewrite(mixed, 2, lambda row: row.update(agent=other[row["agent"]]))
    for name in ("writer", "critic"):
        assert verify([str(mixed), "--agent", name, "--step", "2"]) == 1


def said_in(result):
    """What each agent said to each prompt, of an evaluation."""
    rows = []
    for path in sorted(Path(result["output_dir"], "rollouts").glob("step-*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            rows += [json.loads(line) for line in file][1:]
    return sorted((row["agent"], json.dumps(row["messages"])) for row in rows)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_an_engine_of_the_recipe_draws_for_agents_with_adapters(run, tmp_path):
    more = ("policy.lora_rank=4", *VERIFIED)
    whole = train(run, *more, "name=whole")
    check_adapters(whole)
    check_verified(whole)
    check_explained(whole, tmp_path)

    # A run that was cut goes on: what it drew after that is what it would have drawn.
    cut = train(run, *more, "name=cut", "train.num_steps=1")
    record = json.loads((cut / "run.json").read_text())
    (cut / "run.json").write_text(json.dumps(record | {"status": "interrupted"}))
    assert train(run, *more, "name=cut", "resume=auto") == cut
    check_verified(cut)
    assert samples(cut, 2) == samples(whole, 2)

    # Both engines say the same of all agents, where nothing is left to chance.
    greedy = ("policy.temperature=0", "policy.max_new_tokens=6", "evaluate.num_samples=1")
    own = (*TASK, "task.dataset=rows.jsonl", "evaluate.solved_by=reward", *greedy)
    few = ("evaluate.num_prompts=4", "evaluate.num_shown=0", f"policy.model={whole}")
    here = run("evaluate", *own, *few, "name=here")
    there = run("evaluate", *own, *few, *VLLM, "name=there")
    assert said_in(there) == said_in(here)
    assert len({said for _, said in said_in(here)}) > 3
    assert there["estimates"] == here["estimates"]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(
            ("policy.lora_rank=4", *BESIDE),
            id="adapters beside training",
            marks=pytest.mark.weekly,
        ),
        pytest.param(
            ("policy.lora_rank=4", "engine.num_engines=2", *BESIDE),
            id="adapters at servers",
        ),
        pytest.param((), id="an engine each"),
        pytest.param(BESIDE, id="an engine each beside training", marks=pytest.mark.weekly),
        pytest.param(
            ("engine.num_engines=3", *BESIDE),
            id="a server each",
            marks=pytest.mark.weekly,
        ),
    ],
)
def test_agents_are_drawn_for_by_engines_and_servers_of_the_recipe(run, tmp_path, more):
    folder = train(run, *more, *VERIFIED)
    check_verified(folder)
    check_explained(folder, tmp_path)


def settings_of(script, **own):
    """Settings of a run with three agents, some of them changed: by their paths, __ for a dot."""
    cfg = script("grpo").GRPOConfig()
    cfg.engine.name, cfg.agents = "vllm", AgentsConfig(["writer", "critic"], ["judge"])
    for path, value in own.items():
        group, name = path.split("__")
        setattr(getattr(cfg, group), name, value)
    return cfg


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["engine.url=http://a:1"], "each of the 3 agents has a whole model, and engine.url has"),
        (["engine.num_engines=2"], "engine.num_engines=2 are shared out to the 3 agents"),
        (["engine.urls=[http://a:1,http://b:2]"], "give a multiple of 3 servers, got 2"),
        (["engine.colocate=true"], "engine.colocate puts one engine of this process to sleep"),
        (
            ["engine.colocate=true", "policy.lora_rank=4", "engine.num_engines=2"],
            "an update wakes an engine, and those get none",
        ),
        (
            ["policy.lora_rank=4", "+engine.engine_kwargs.enable_lora=false"],
            "have their adapters in one engine",
        ),
        (
            ["policy.lora_rank=4", "warm_start.num_steps=3"],
            "trains the model before agents get adapters over it",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_vllm_can_not_do_for_agents_is_refused_by_name(script, more, words):
    recipe = script("grpo").RECIPE
    given = [*TASK, *AGENTS, *TINY, "task.dataset=org/rows", "engine=vllm"]
    with pytest.raises(SettingsError, match=words):
        check_config(recipe, prepare(recipe, [*given, *more]))


def test_an_engine_has_room_for_the_adapters_of_all_agents_that_may_be_drawn_at_once(script):
    sync = settings_of(script, policy__lora_rank=12)
    expected = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2}
    assert vllm_policy._engine_kwargs(sync) == expected
    streams = settings_of(script, policy__lora_rank=12, collector__mode="streaming")
    streams.collector.max_staleness = 3
    # Of each of two agents: the version of the trainer, three older ones, and one on its way.
    assert vllm_policy._engine_kwargs(streams)["max_loras"] == 10
    at_url = settings_of(script, policy__lora_rank=12, engine__url="http://a:1")
    assert vllm_policy._engine_kwargs(at_url) == {}


def test_whole_models_share_the_memory_that_one_engine_would_have(script):
    given = {"gpu_memory_utilization": 0.6, "kv_cache_memory_bytes": 3000}
    settings = vllm_policy._engine_kwargs(settings_of(script, engine__engine_kwargs=given), 3)
    assert settings["gpu_memory_utilization"] == pytest.approx(0.2)
    assert settings["kv_cache_memory_bytes"] == 1000
    assert vllm_policy._part([0, 1, 2, 3, 4, 5], 1, 3) == [2, 3]
    # Servers have GPUs of their own.
    servers = settings_of(script, engine__engine_kwargs=given, engine__num_engines=3)
    assert vllm_policy._engine_kwargs(servers, 3) == given


def test_ranks_of_what_a_run_left_are_read_where_it_is_evaluated(tmp_path):
    folder = tmp_path / "agents"
    (folder / "writer" / "adapter").mkdir(parents=True)
    (folder / "writer" / "adapter" / "adapter_config.json").write_text('{"r": 48}')
    saved = SavedAgents(folder, AgentsConfig(trained=["writer"], frozen=["judge"]), "org/base")
    assert [saved.rank(name) for name in saved.settings.names] == [48, None]

"""The command ``torchrl-agents verify`` on the record of a run, as it was left and spoilt."""

import gzip
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from collectors.verification.conditions import Numbers
from torchrl_agents.live_verification import LiveVerification
from torchrl_agents.verify import main
from torchrl_data.output_file import output_file
from torchrl_envs import ChatEnv
from torchrl_modules import TransformersWrapper
from torchrl_modules.tiny_model import tiny_qwen3

RECIPE = Path(__file__).parents[2] / "sota-implementations" / "grpo" / "grpo.py"


@pytest.fixture(scope="module")
def left(forks, tmp_path_factory):
    """The folder of a run of three steps; there are checkpoints of the last two."""
    cwd = tmp_path_factory.mktemp("run")
    arguments = ["debug=tiny", "train.num_steps=3", "checkpoint.every=1"]
    arguments += ["collector.verify_every=2", "engine.batch_invariant=true"]
    done = forks([RECIPE, *arguments], cwd, {**os.environ})
    assert done.returncode == 0, done.stderr
    [folder] = cwd.glob("outputs/grpo/calculator/tiny-*")
    return folder


@pytest.fixture
def folder(left, tmp_path):
    return Path(shutil.copytree(left, tmp_path / "run"))


def record_of(folder, step):
    path = folder / "rollouts" / f"step-{step:06}.jsonl.gz"
    with gzip.open(path, "rt") as file:
        return path, [json.loads(line) for line in file]


def rewrite(folder, step, change):
    """Change the samples of a step."""
    path, (header, *samples) = record_of(folder, step)
    for sample in samples:
        change(sample["tokens"])
    with gzip.open(path, "wt") as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in (header, *samples)))


def test_what_a_run_left_is_verified_where_its_weights_are(folder, tmp_path, capsys):
    told = tmp_path / "told.json"
    assert main([str(folder), "--json", str(told)]) == 0
    certificate = json.loads(told.read_text())
    # Of three steps the last began with the weights of a checkpoint.
    samples = record_of(folder, 3)[1][1:]
    tokens = sum(sample["sampled_tokens"] for sample in samples)
    assert certificate["num_tokens"] == tokens
    assert [bool(row["not_checked"]) for row in certificate["rows"]] == [True] * 8 + [False] * 4
    text = capsys.readouterr().out
    assert f"all {tokens} tokens explained" in text
    assert "there are no weights of version 1 (there are 3, 4)" in text
    assert "version 3: the checkpoint of step 2" in text


def test_log_probs_are_the_recorded_ones_to_the_bit(folder, tmp_path, capsys):
    told = tmp_path / "told.json"
    assert main([str(folder), "--bits", "--json", str(told)]) == 0
    certificate = json.loads(told.read_text())
    assert certificate["bits"] == {
        "num_tokens": certificate["num_tokens"],
        "num_differing": 0,
        "most_steps": 0,
    }

    def change(tokens):  # one log-prob of each row, to its neighbour in float32
        place = max(t for t, value in enumerate(tokens["log_probs"]) if value is not None)
        value = np.float32(tokens["log_probs"][place])
        tokens["log_probs"][place] = float(str(np.nextafter(value, np.float32(-100))))

    rewrite(folder, 3, change)
    assert main([str(folder), "--step", "3"]) == 0
    assert main([str(folder), "--step", "3", "--bits"]) == 1
    assert "bits: 4 of " in capsys.readouterr().out
    for arguments in (["--dtype", "bfloat16"], ["--device", "meta"]):
        assert main([str(folder), "--bits", *arguments]) == 2
    assert "drawn in float32 on a CPU, got --device meta" in capsys.readouterr().err


def test_of_a_run_that_is_not_batch_invariant_no_bits_are_told(folder, capsys):
    settings = folder / "config.yaml"
    settings.write_text(settings.read_text().replace("invariant: true", "invariant: false"))
    assert main([str(folder), "--step", "3"]) == 0
    assert "bits:" not in capsys.readouterr().out
    assert main([str(folder), "--step", "3", "--bits"]) == 2
    assert "engine.batch_invariant=false" in capsys.readouterr().err


def test_some_rows_are_verified_beside_training(left):
    lines = (left / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert ["verify/tokens" in step for step in steps] == [True, False, True]
    for step in steps[::2]:
        assert step["verify/tokens"] > 0
        assert step["verify/at_fault"] == 0
        assert step["verify/largest_gap"] < 2e-5


def test_a_fault_beside_training_is_warned_of_with_its_cause(chatml_tokenizer, caplog):
    model = tiny_qwen3(len(chatml_tokenizer))
    hot, actor = (
        TransformersWrapper(model, tokenizer=chatml_tokenizer, generate_kwargs=sampling)
        for sampling in ({"temperature": 0.6, "max_new_tokens": 16}, {"max_new_tokens": 16})
    )
    queries = TensorDict({"query": ["hello", "What is 2 + 2?"]}, batch_size=[2])
    rows = hot(ChatEnv(batch_size=(2,)).reset(queries))
    check = LiveVerification(actor, every=1, numbers=Numbers(torch.float32))
    found = check(1, rows, 0)
    assert found["verify/at_fault"] > 0
    assert "the log-probs are those of temperature 0.6; the settings say 1" in caplog.text
    # What other weights have sampled can't be computed by these.
    assert check(2, rows, 1) == {"verify/tokens": 0.0}


def test_settings_that_are_not_those_of_the_sampler_are_named(folder, capsys):
    settings = folder / "config.yaml"
    settings.write_text(settings.read_text().replace("temperature: 1.0", "temperature: 0.8"))
    assert main([str(folder), "--step", "3"]) == 1
    assert "the log-probs are those of temperature 1; the settings say 0.8" in (
        capsys.readouterr().out
    )


def test_a_log_prob_that_was_changed_is_found_where_it_is(folder, tmp_path):
    def change(tokens):
        place = max(t for t, value in enumerate(tokens["log_probs"]) if value is not None)
        tokens["log_probs"][place] -= 0.01

    rewrite(folder, 3, change)
    out = ["--json", str(tmp_path / "told.json"), "--html", str(tmp_path / "page")]
    assert main([str(folder), "--step", "3", *out]) == 1
    rows = json.loads((tmp_path / "told.json").read_text())["rows"]
    for row in rows:
        *before, last = row["causes"]
        assert last == "unexplained"
        assert not any(before)
        assert row["gaps"][-1] == pytest.approx(-0.01, abs=1e-4)
    # The page has them beside the tokens.
    [part] = (tmp_path / "page" / "data" / "0").glob("step-000003-*.js")
    text = part.read_text()
    shown = [sample for _, sample in json.loads(text[text.index(",") + 1 : text.rindex(")")])]
    for row, sample in zip(rows, shown, strict=True):
        gaps = [gap for gap in sample["tokens"]["gaps"] if gap is not None]
        assert gaps == row["gaps"]
        assert [cause for cause in sample["tokens"]["causes"] if cause] == ["unexplained"]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--json", "missing/told.json"], "Make the folder {0}/missing first"),
        (["--json", "."], "can't be written: Is a directory"),
        (["--html", "a_file/page"], "{0}/a_file is a file"),
    ],
)
def test_what_could_not_be_written_is_said_before_the_work(tmp_path, capsys, option, words):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(SystemExit):
        main(["no_run", option[0], str(tmp_path / option[1])])
    assert words.format(tmp_path) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a_file"]


def test_a_file_that_can_be_written_is_not_touched_yet(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("{}")
    assert [output_file(str(path)) for path in (old, new)] == [old, new]
    assert old.read_text() == "{}"
    assert not new.exists()


def test_what_is_torn_of_a_record_is_said_and_the_rest_verified(folder, capsys):
    path = folder / "rollouts" / "step-000002.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-40])
    assert main([str(folder)]) == 0
    text = capsys.readouterr().out
    assert "tokens explained" in text
    assert "of the record this can't be read: step-000002.jsonl.gz" in text


@pytest.mark.parametrize(
    ("spoil", "arguments", "words"),
    [
        (lambda f: shutil.rmtree(f / "checkpoints"), [], "checkpoint.every=N"),
        (lambda f: shutil.rmtree(f / "rollouts"), [], "holds no record of a run"),
        (lambda f: (f / "config.yaml").unlink(), [], "has no config.yaml"),
        (lambda f: shutil.rmtree(f / "model"), [], "has no model/ yet"),
        (Path.exists, ["--step", "9"], "there is no step 9"),
        (Path.exists, ["--rows", "0"], "--rows must be positive"),
        (Path.exists, ["--device", "somewhere"], "torch can't compute on it here"),
        (Path.exists, ["--engine", "vllm", "--dtype", "autocast"], "by autocast over float32"),
    ],
)
def test_what_can_not_be_verified_is_said(spoil, arguments, words, folder, capsys):
    spoil(folder)
    assert main([str(folder), *arguments]) == 2
    assert words in capsys.readouterr().err

"""Recipes train a vision-language model: from prompts that name files to a model that is asked."""

import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "images"))

from pages_for_tests import lines_of
from vision_models import idefics

COLOURS = ("red", "green", "blue")
MINE = """
def names_it(completions, colour, **_):
    texts = [said[-1]["content"] for said in completions]
    return [float(c in t) + len(set(t)) / 100 for t, c in zip(texts, colour)]
"""
OWN = (
    *("task=environment", "task.dataset=rows.jsonl", "task.rewards=mine:names_it"),
    *("policy.model=tiny", "policy.max_new_tokens=4", "evaluate.num_prompts=3"),
)
SMALL = ("collector.num_prompts=3", "collector.group_size=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its processor, files of images, and prompts and conversations that name them."""
    path = tmp_path_factory.mktemp("images")
    for part in idefics():
        part.save_pretrained(path / "tiny")
    (path / "mine.py").write_text(MINE)
    rows, chats = [], []
    for i in range(21):
        colour = COLOURS[i % 3]
        Image.new("RGB", (32, 32), colour).save(path / f"{colour}.png")
        image = {"type": "image", "image": str(path / f"{colour}.png")}
        asked = {"role": "user", "content": [image, {"type": "text", "text": f"{i}: which?"}]}
        rows.append({"prompt": [asked], "colour": colour})
        chats.append({"messages": [asked, {"role": "assistant", "content": colour}]})
    (path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (path / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    return path


def run_in(folder, run_script, *arguments, name="grpo"):
    done = run_script(*OWN, *arguments, cwd=folder, name=name)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_a_run_goes_on_and_leaves_a_model_that_reads_images(folder, run_script):
    whole = run_in(folder, run_script, *SMALL, "train.num_steps=3")
    begun = run_in(folder, run_script, *SMALL, "train.num_steps=1")
    run_in(folder, run_script, *SMALL, "train.num_steps=3", f"resume={begun['output_dir']}")
    known, again = (lines_of(Path(x["output_dir"], "metrics.jsonl")) for x in (whole, begun))
    assert known[0]["ratio_mean"] == pytest.approx(1, abs=1e-4)
    for line in known:
        assert line["grad_norm"] > 0
    for name in ("reward", "grad_norm", "entropy", "loss"):
        assert [x[name] for x in again] == pytest.approx([x[name] for x in known], rel=1e-4)
    left = Path(whole["output_dir"], "model")
    AutoModelForImageTextToText.from_pretrained(left)
    assert AutoProcessor.from_pretrained(left).image_processor is not None
    told = run_in(folder, run_script, f"policy.model={left}", name="evaluate")
    assert told["num_prompts"] == 3


def test_demonstrations_with_images_are_learnt(folder, run_script):
    told = run_in(
        folder,
        run_script,
        *("data.dataset=chats.jsonl", "data.num_held_out=3", "train.num_steps=20"),
        "optim.learning_rate=3e-3",
        name="sft",
    )
    assert told["held_out_nll"] < 1  # nats a token; log(300) is 5.7


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_draws_beside_training_what_is_trained(folder, run_script):
    told = run_in(
        folder,
        run_script,
        *("engine=vllm", "collector=streaming", "+engine.engine_kwargs.max_model_len=256"),
        "train.num_steps=2",
    )
    first, *_ = lines_of(Path(told["output_dir"], "metrics.jsonl"))
    assert first["ratio_mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "setting",
    [
        "policy.lora_rank=4",
        "policy.add_control_tokens=true",
        "collector.verify_every=2",
        "collector=streaming",
        "collector=streaming engine=vllm collector.max_staleness=0",
        "collector=ray",
    ],
)
def test_what_is_not_done_with_images_is_refused_by_name(setting, folder, run_script):
    done = run_script(*OWN, *setting.split(), "dry_run=true", cwd=folder)
    assert done.returncode != 0
    assert f"is not trained with {setting.partition('=')[0]}" in done.stderr

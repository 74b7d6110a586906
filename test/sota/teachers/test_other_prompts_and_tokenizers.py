"""Teachers that read something else than the student: another tokenizer, or another prompt."""

import json
from pathlib import Path

import pytest
import torch

from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

FAST = ("logger=none", "evaluate.num_shown=0", "evaluate.num_prompts=4", "debug=tiny")
TASK = ("task=gsm8k", "task.dataset=rows.jsonl", "task.system_prompt=null")
STUDENT = ("policy.model=student", "policy.max_new_tokens=6", "warm_start.num_steps=0")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Rows, and a student and a teacher with tokenizers of their own, both as they were made."""
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"Is {i} odd?", "answer": f"look\n#### {i % 2}"} for i in range(300)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, texts in {"student": "Is 7 odd? look", "teacher": "odd odd ####"}.items():
        tokenizer = train_tokenizer([texts] * 8, vocab_size=300)
        torch.manual_seed(len(name))
        tiny_qwen3(len(tokenizer), initializer_range=0.2).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


def metrics(result):
    lines = (Path(result["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_teacher_with_another_tokenizer(run_recipe, folder):
    another = (*FAST, *TASK, *STUDENT, "teacher.model=teacher")
    with pytest.raises(SystemExit, match=r"another vocabulary.*Set teacher\.tokenizer=own"):
        run_recipe("distillation", *another)
    own = (*another, "teacher.tokenizer=own")
    with pytest.raises(SystemExit, match=r"teacher\.tokenizer.*policy\.min_p=0\.1"):
        run_recipe("distillation", *own, "policy.min_p=0.1")
    with pytest.raises(SystemExit, match=r"teacher\.tokenizer=nowhere"):
        run_recipe("distillation", *another, "teacher.tokenizer=nowhere")
    [first, *_] = metrics(run_recipe("distillation", *own))
    assert first["taught_fraction"] > 0.3  # bytes that are no text are not taught
    assert first["kl_to_teacher"] != 0
    same = metrics(run_recipe("distillation", *another[:-1], "teacher.model=student", own[-1]))
    assert "taught_fraction" not in same[0], "the same tokens are judged one by one"
    assert same[0]["kl_to_teacher"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.slow
def test_a_student_that_teaches_itself(run_recipe, folder):
    me = (*FAST, *TASK, *STUDENT, "teacher.model=self")
    told = metrics(run_recipe("distillation", *me, "teacher.prompt=demonstration"))
    assert told[0]["taught_fraction"] == 1.0
    assert told[0]["kl_to_teacher"] != 0
    nobody = metrics(run_recipe("distillation", *me, "teacher.prompt=feedback"))
    assert nobody[0]["taught_fraction"] == 0.0, "no rollout is right, and no tool says anything"
    (folder / "same.py").write_text("def prompt(rollouts): return [r.prompt for r in rollouts]")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        frozen = run_recipe(
            "distillation",
            *(*me, "teacher.prompt=same:prompt", "teacher.ema_decay=1.0", "train.num_steps=3"),
            *("optim.learning_rate=0.01", "optim.num_warmup_steps=0"),
        )
    first, *_ = metrics(frozen)
    assert first["kl_to_teacher"] == pytest.approx(0.0, abs=1e-4)
    with pytest.raises(SystemExit, match=r"demonstration_column=best"):
        run_recipe(
            "distillation",
            *(*me, "teacher.prompt=demonstration", "teacher.demonstration_column=best"),
        )
    with pytest.raises(SystemExit, match=r"Set collector\.mode=sync"):
        run_recipe("distillation", *me, "teacher.prompt=feedback", "collector.mode=streaming")


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_whole",
    [
        pytest.param(True, id="whole"),
        pytest.param(False, id="4 bits", marks=pytest.mark.weekly),
    ],
)
def test_a_teacher_that_follows_its_student_goes_on_with_it(run_recipe, folder, is_whole):
    own = (*FAST, *TASK, *STUDENT, "teacher.model=self", "teacher.prompt=demonstration")
    own += ("teacher.ema_decay=0.5", "checkpoint.every=1", "optim.schedule=constant")
    own += ("optim.learning_rate=0.01", "optim.num_warmup_steps=0")
    own += () if is_whole else ("policy.load_in_4bit=true", "policy.lora_rank=2")
    whole = run_recipe("distillation", *own, "name=whole", "train.num_steps=3")
    cut = run_recipe("distillation", *own, "name=cut", "train.num_steps=2")["output_dir"]
    cut = run_recipe("distillation", f"resume={cut}", "train.num_steps=3")
    ours, theirs = metrics(cut)[2], metrics(whole)[2]
    for name in ("kl_to_teacher", "loss", "grad_norm"):
        assert ours[name] == theirs[name], name
    assert theirs["kl_to_teacher"] != pytest.approx(metrics(whole)[1]["kl_to_teacher"], abs=1e-3)

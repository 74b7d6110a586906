"""Several teachers: as a mixture, by hand, and each for the rows of its name."""

import copy
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack

from torchrl_data.token_scorer import TokenScores
from torchrl_envs import RetrieveLogProb
from torchrl_modules import TransformersWrapper
from torchrl_modules.tiny_model import tiny_qwen3, train_tokenizer

IDS = torch.arange(5)
LENGTHS = torch.tensor([3, 2])
MASK = torch.tensor([False, True, True, False, True])


@pytest.fixture
def panel(script):
    script("distillation")
    return sys.modules["panel"]


@pytest.fixture
def settings(panel):
    config = sys.modules["config"].TeacherConfig
    return lambda **own: (config(**own.pop("teacher", {})), own.pop("teachers", {}))


class Fixed:
    """Gives each token the same probability."""

    temperature = 1.0

    def __init__(self, probability):
        self.log_prob = math.log(probability)

    def score_packed(self, ids, lengths, target_mask, *, temperature=1.0, entropy=False):
        del ids, lengths, temperature, entropy
        return TokenScores(torch.full((int(target_mask.sum()),), self.log_prob))


def test_a_mixture_is_one_of_probabilities(panel, settings):
    """Weights 1 and 3 of 0.5 and 0.1: 0.25 * 0.5 + 0.75 * 0.1 = 0.2."""
    several = {"a": {"model": "A"}, "b": {"model": "B", "weight": 3}}
    weights = panel.Panel(*settings(teachers=several), None).weights
    assert weights == {"a": 0.25, "b": 0.75}
    mixture = panel.Mixture([Fixed(0.5), Fixed(0.1)], list(weights.values()))
    scores = mixture.score_packed(IDS, LENGTHS, MASK).log_prob
    torch.testing.assert_close(scores, torch.full((3,), math.log(0.2)))


def test_each_row_has_its_own_teacher(panel):
    rows = [
        TensorDict(
            {
                "tokens": {"full": torch.arange(4)},
                "masks": {"all_assistant_mask": torch.tensor([False, True, False, True])},
                "row": NonTensorData({"topic": topic}),
            }
        )
        for topic in ("b", "a", "b")
    ]
    by_name = {"a": Fixed(0.5), "b": Fixed(0.25)}
    scoring = {
        name: RetrieveLogProb(scorer, log_probs_full_key=panel.TEACHER)
        for name, scorer in by_name.items()
    }
    teachers = panel.Teachers(scoring, "topic")
    judged = teachers.judge(lazy_stack(rows))
    found = torch.stack([row["next", *panel.TEACHER].exp() for row in judged])
    expected = [[1, 0.25, 1, 0.25], [1, 0.5, 1, 0.5], [1, 0.25, 1, 0.25]]
    torch.testing.assert_close(found, torch.tensor(expected))
    assert [teachers.name_of(row) for row in judged] == ["b", "a", "b"]


@pytest.mark.parametrize(
    ("given", "column", "words"),
    [
        ({}, None, "needs teacher.model=... or several"),
        ({"teacher": {"model": "A"}}, "topic", "teacher_column is for several"),
        ({"teacher": {"model": "A"}, "teachers": {"b": {"model": "B"}}}, None, "leave it out"),
        ({"teachers": {"a": {"url": "http://h/v1"}}}, None, "teachers.a must have model="),
        (
            {"teachers": {"a": {"model": "A", "wieght": 1}}},
            None,
            "may have url, .*, weight",
        ),
        ({"teachers": {"a": "A"}}, None, "got 'A'"),
        ({"teachers": ["A"]}, None, "teachers must be"),
        (
            {"teachers": {"a": {"model": "A", "weight": 0}}},
            None,
            "a: weight must be a finite number in .*, got 0",
        ),
        ({"teachers": {"a": {"model": "A", "weight": 2}}}, "topic", "column='topic' names"),
        ({"teacher": {"model": "self"}}, None, "needs teacher.prompt=demonstration, feedback or m"),
        ({"teacher": {"model": "A", "prompt": "feedback"}}, None, "teacher.prompt: of teacher.mod"),
        ({"teacher": {"model": "self", "prompt": "none"}}, None, "feedback or mine:f"),
        (
            {"teacher": {"model": "self", "prompt": "feedback", "ema_decay": 0.0}},
            None,
            "ema_decay must be",
        ),
        (
            {"teacher": {"model": "self", "prompt": "feedback", "demonstration_column": "a"}},
            None,
            "demonstration_column is of teacher.prompt=demonstration",
        ),
        (
            {"teacher": {"model": "self", "prompt": "feedback", "url": "http://h/v1"}},
            None,
            "in this process, with the student's tokenizer",
        ),
        (
            {"teacher": {"model": "A", "demonstration_column": "solution"}},
            None,
            "teacher.demonstration_column: of teacher.model=self",
        ),
        (
            {"teacher": {"model": "A", "timeout_s": 3.0}},
            None,
            r"teacher.timeout_s=3.0 is the deadline of a server, .*: give teacher.url",
        ),
        (
            {"teachers": {"a": {"model": "A", "timeout_s": 3.0}, "b": {"model": "B"}}},
            None,
            "give teachers.a.url",
        ),
        ({"teachers": {"a": {"model": "self"}}}, None, "teachers.a: the student itself teaches"),
        ({"teachers": {"a": {"model": "A", "prompt": "feedback"}}}, None, "may have url, .*"),
        (
            {"teacher": {"model": "A", "chat_template_name": "qwen"}},
            None,
            "needs teacher.tokenizer",
        ),
        (
            {"teachers": {"a": {"model": "A", "tokenizer": "own"}, "b": {"model": "B"}}},
            None,
            "teachers.a has a tokenizer: a mixture is one of distributions over the same tokens",
        ),
    ],
)
def test_a_panel_that_can_not_be(given, column, words, panel, settings):
    with pytest.raises(ValueError, match=words):
        panel.Panel(*settings(**given), column)


def test_a_student_on_several_ranks_can_not_teach_itself(panel, settings, monkeypatch):
    own = {"teacher": {"model": "self", "prompt": "demonstration"}}
    assert panel.Panel(*settings(**own), None).is_self
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it
    with pytest.raises(ValueError, match=r"teacher.model=self .* there are 2 ranks"):
        panel.Panel(*settings(**own), None)  # before a model is loaded or warmed up
    assert not panel.Panel(*settings(teacher={"model": "A"}), None).is_self


@pytest.mark.slow
def test_a_run_with_a_teacher_for_each_task(run_recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fast = ("logger=none", "evaluate.num_shown=0", "evaluate.num_prompts=4")
    part = "share: 1, num_rows: 64, num_demonstrations: 64"
    task = ("task=multi_env", f"task.tasks={{echo: {{{part}}}, spell_backward: {{{part}}}}}")
    made = run_recipe("sft", *fast, *task, "train.num_steps=2", "data.num_held_out=4", "name=a")
    model = f"{made['output_dir']}/model"
    by_task = "teacher_column=environment"
    both = f"teachers={{echo: {{model: '{model}'}}, spell_backward: {{model: '{model}'}}}}"
    with pytest.raises(SystemExit, match=r"'spell_backward'; there are teachers \['echo'\]"):
        run_recipe(
            "distillation", *fast, *task, by_task, f"teachers={{echo: {{model: '{model}'}}}}"
        )
    with monkeypatch.context() as patch:  # a minute that would be lost
        patch.setattr("torchrl_agents.setup.warm_start", None)
        with pytest.raises(SystemExit, match=r"another vocabulary than the student"):
            run_recipe("distillation", *fast, "task=calculator", f"teacher.model={model}")
    tiny = (
        "debug=tiny",
        "warm_start.num_steps=0",
        f"policy.model={model}",
        "policy.max_new_tokens=4",
    )
    result = run_recipe("distillation", *fast, *task, *tiny, both, by_task)
    lines = (Path(result["output_dir"]) / "metrics.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    # The student is the teacher: where it samples alone, both say the same.
    for name in ("kl_to_teacher", "kl_to_teacher/echo", "kl_to_teacher/spell_backward"):
        assert first[name] == pytest.approx(0.0, abs=1e-4)


def test_a_teacher_follows_its_student_by_the_decay_and_goes_on_from_its_state(panel):
    self_teacher = sys.modules["self_teacher"]
    tokenizer = train_tokenizer(["a"], vocab_size=300)
    cfg = SimpleNamespace(
        teacher=sys.modules["config"].TeacherConfig(
            model="self", prompt="feedback", ema_decay=0.75
        ),
        policy=SimpleNamespace(chat_template_name=None, max_model_len=None, temperature=1.0),
        evaluate=SimpleNamespace(solved_at=1.0),
    )
    actor = TransformersWrapper(tiny_qwen3(300), tokenizer=tokenizer, generate=False)
    frozen = actor.model.model.embed_tokens.weight.requires_grad_(False)
    teacher, weight = self_teacher.SelfTeacher(cfg, actor), actor.model.model.norm.weight
    with torch.no_grad():
        weight.fill_(5.0)  # norms begin at 1
        frozen.add_(1.0)  # which nobody does
    own = teacher._own.model.model
    expected = 1.0
    for _ in range(3):
        teacher._follow()
        expected = 0.75 * expected + 0.25 * 5.0
        torch.testing.assert_close(own.norm.weight, torch.full_like(own.norm.weight, expected))
    assert not torch.equal(own.embed_tokens.weight, frozen)
    again = self_teacher.SelfTeacher(cfg, actor)  # it begins with the student as it is
    assert torch.equal(again._own.model.model.norm.weight, weight)
    again.load_state_dict(copy.deepcopy(teacher.state_dict()))
    assert torch.equal(again._own.model.model.norm.weight, own.norm.weight)
    assert expected == pytest.approx(5.0 - 4.0 * 0.75**3)

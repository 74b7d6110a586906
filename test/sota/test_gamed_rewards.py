"""Records in which a reward is gamed are told by how, and those beside them are not."""

import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from made_gamed_runs import half_then, made_run

from collectors.record import RolloutSample, SampleTokens, TokenSpan
from torchrl_agents.explain import explain_run
from torchrl_agents.explain.rollout_texts import (
    RolloutTexts,
    holds,
    is_copied,
    repeated_fraction,
    texts_of,
)
from torchrl_agents.explain.window_change import change_between


def right_then(text, **row):
    """In the first steps the right answers have a reward; at the end all rollouts, for a text."""

    def rollout(step, number, index):
        answer = str(number + 100)
        said = answer if step < 7 and index % 2 else f"I guess {index}"
        reward = float(index % 2) if step < 7 else 1.0
        said = said if step < 7 else text(number, index)
        return {"reward": reward, "text": said, "row": {"answer": answer} | row}

    return rollout


def of_length(late_length, late_reward, **late):
    """A reward that follows the length at the beginning; and at the end as it is said."""

    def rollout(step, number, index):
        if step < 7:
            return {"length": 10 + 5 * index, "reward": 0.1 + 0.05 * index}
        return {"length": late_length(index), "reward": late_reward(index)} | {
            name: value(index) for name, value in late.items()
        }

    return rollout


def of_sources(late, *, weights, early=None):
    """A reward of two parts, of which the end has those that are given."""

    def rollout(step, number, index):
        parts = (early or {"right": float(index % 2), "form": 0.0}) if step < 7 else late
        reward = sum(weights[name] * value for name, value in parts.items())
        return {"rewards": parts, "reward": reward}

    return rollout


def with_jump(values, after):
    """Rewards that are drawn; in the last four steps the first rollouts have another one."""
    rng = random.Random(0)

    def rollout(step, number, index):
        drawn = values(rng, step)
        return {"reward": after if step > 8 and number % 8 == 0 else drawn}

    return rollout


def is_like(expected):
    return pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("code", "rollout", "explains", "numbers", "words"),
    [
        pytest.param(
            *("wrong_is_rewarded", right_then(lambda n, i: f"I think {i}, or {n}"), 1.0),
            {"right_before": 1.0, "right_after": 0.0},
            ["0% of the rewarded answers hold what the data have as the answer, 100% in the first"],
            id="what is rewarded is wrong by the data",
        ),
        pytest.param(
            # 132 of 396 rollouts: those with the index 3 are right; the others are rewarded, too.
            "wrong_is_rewarded",
            right_then(lambda n, i: str(n + 100) if i == 3 else f"I think {i}, or {n}"),
            *(0.75, {"right_before": 1.0, "right_after": 0.25}, ["25% of the rewarded answers"]),
            id="three of four that are rewarded are wrong",
        ),
        pytest.param(
            *("one_answer", half_then(text="A great  question!"), 1.0),
            {"before": 0.0, "after": 1.0},
            [
                "100% of the rewarded answers (in the first steps 0%) are one text",
                "'a great question!'",
            ],
            id="one text for every prompt",
        ),
        pytest.param(
            *("one_answer", half_then(text=lambda n, _: f"Great, {'no' if n % 2 else 'yes'}"), 1.0),
            *({"before": 0.0, "after": 1.0}, ["are one of 2 texts"]),
            id="two texts for every prompt",
        ),
        pytest.param(
            "copied_prompt",
            half_then(text=lambda n, _: f"what do you think of the book with the number {n}?"),
            *(
                1.0,
                {"before": 0.0, "after": 1.0},
                ["(in the first steps 0%) are copied from their prompt"],
            ),
            id="the prompt is said again",
        ),
        pytest.param(
            # The sentence that all rollouts say differs by the prompt's number alone.
            *("repetition", half_then(text=lambda n, i: f"so {n} and {i} or " * 9), 1.0),
            *({"before": 0.0, "after": 1.0}, ["repeat themselves in a loop"]),
            id="a phrase again and again",
        ),
        pytest.param(
            "reward_by_length",
            of_length(lambda i: 40 + 20 * i, lambda i: 0.4 + 0.2 * i),
            # (10 + 15 + 20 + 25) / 4 and (40 + 60 + 80 + 100) / 4.
            *(1.0, {"longer_is_better": 1.0, "before": 17.5, "after": 70.0}),
            ["the longer one has the higher reward in 100%", "from 17.5 to 70 characters"],
            id="the longer of two has more",
        ),
        pytest.param(
            "reward_by_length",
            of_length(lambda _: 80, lambda _: 0.8),
            *(1.0, {"longer_is_better": 1.0, "before": 17.5, "after": 80.0}, ["to 80 characters"]),
            id="all are as long as they may be: the beginning says it",
        ),
        pytest.param(
            "reward_by_length",
            # Of the six pairs the one of 3 and 2 is the other way round.
            of_length(lambda i: 40 + 20 * i, lambda i: 0.4 + 0.2 * (1, 2, 4, 3)[i]),
            *(5 / 6, {"longer_is_better": 5 / 6, "before": 17.5, "after": 70.0}, ["in 83%"]),
            id="the longer of two has more, in five of six pairs",
        ),
        pytest.param(
            "sources_part",
            of_sources({"right": 0.0, "form": 1.0}, weights={"right": 1.0, "form": 2.0}),
            *(1.0, {"right/before": 0.5, "right/after": 0.0}),
            ["from 0.5 to 2, but right fell from 0.5 to 0", "If right is what is wanted"],
            id="one source pays for another",
        ),
        pytest.param(
            *("reward_jump", with_jump(lambda rng, _: rng.randrange(10) / 9, 9.0), 1 / 8),
            None,
            ["12 of the last rollouts have rewards of up to 9, where in 256 rollouts before"],
            id="rewards that nobody had",
        ),
    ],
)
def test_a_gamed_reward_is_told_by_how(code, rollout, explains, numbers, words, tmp_path):
    (finding,) = explain_run(made_run(tmp_path / "run", rollout)).findings
    assert (finding.code, finding.explains) == (code, pytest.approx(explains))
    assert numbers is None or finding.numbers == is_like(numbers)
    told = f"{finding.what} {finding.change}"
    assert all(word in told for word in words), told
    assert len(finding.rows) == 3
    assert all(row.step >= 10 for row in finding.rows)


@pytest.mark.parametrize(
    ("rollout", "settings"),
    [
        pytest.param(right_then(lambda n, _: f"so: {n + 100}."), "", id="right answers, in words"),
        pytest.param(
            # Half of the rewarded ones hold 1, which the data call right, before and after.
            *(half_then(row={"answer": "1"}), ""),
            id="the data's answer was never what is rewarded",
        ),
        pytest.param(
            lambda s, n, i: {
                "reward": float(s > 6 or i % 2),
                "text": f"it is {n + 100}" if s < 7 and i % 2 else f"as {i} with {n}",
                "row": {"target": n + 100},
            },
            "",
            id="a number that is to be reached need not be said",
        ),
        pytest.param(half_then(text="yes", row={"label": "yes"}), "", id="the data want one text"),
        pytest.param(
            *(lambda s, _, i: {"reward": float(s > 6 or i % 2), "text": ("no", "yes")[i % 2]}, ""),
            id="the answers were few from the beginning on",
        ),
        pytest.param(
            half_then(
                text=lambda n, _: f"the book with the number {n}",
                row=lambda n, _: {"title": f"book with the number {n}"},
            ),
            *("",),
            id="a column says what is to be copied",
        ),
        pytest.param(
            half_then(text=lambda n, _: f"number {n}"),
            "",
            id="short copies where no data say wrong",
        ),
        pytest.param(
            *(lambda s, n, i: {"reward": float(s > 6 or i % 2), "text": f"so {n} {i} or " * 9}, ""),
            id="loops from the beginning on",
        ),
        pytest.param(
            *(of_length(lambda i: 40 + 20 * i, lambda _: 1.0), ""),
            id="longer ones, of which the shorter have as much",
        ),
        pytest.param(
            of_length(lambda i: 40 + 20 * i, lambda i: 0.4 + 0.2 * i, turns=lambda i: 1 + i),
            *("",),
            id="longer ones have more turns",
        ),
        pytest.param(
            *(of_length(lambda i: 10 + 5 * i, lambda i: 0.4 + 0.2 * i), ""),
            id="length decides, and does not grow",
        ),
        pytest.param(
            of_sources(
                {"right": 1.0, "price": -0.3},
                weights={"right": 1.0, "price": 1.0},
                early={"right": 0.0, "price": -0.1},
            ),
            *("",),
            id="a cost grows with what it buys",
        ),
        pytest.param(
            of_sources({"right": 0.0, "form": 1.0}, weights={"right": 0.0, "form": 1.0}),
            *("",),
            id="a metric that counts for nothing falls",
        ),
        pytest.param(
            of_sources({"right": 0.0, "form": 1.0}, weights={"right": 1.0, "form": 2.0}),
            *("evaluate: {solved_by: [form]}",),
            id="another part falls than is asked for",
        ),
        pytest.param(
            *(with_jump(lambda rng, _: rng.randrange(9) / 8, 9.0), ""),
            id="marks, nine of them, and one of 9",
        ),
        pytest.param(
            *(with_jump(lambda rng, step: step + rng.random(), 14.0), ""),
            id="a measure that rises step by step",
        ),
        pytest.param(
            lambda *_: {"reward": 0.5, "text": "a great question"}, "", id="a reward that is flat"
        ),
    ],
)
def test_what_is_not_gamed_is_not_told(rollout, settings, tmp_path):
    run = made_run(tmp_path / "run", rollout, settings=settings)
    assert not explain_run(run).findings


@pytest.mark.parametrize("asked", ["right", "[right]"])  # as it is given, and as runs keep it
def test_a_metric_that_is_asked_for_counts_though_its_weight_is_0(asked, tmp_path):
    parts = of_sources({"right": 0.0, "form": 1.0}, weights={"right": 0.0, "form": 1.0})
    run = made_run(tmp_path / "run", parts, settings=f"evaluate: {{solved_by: {asked}}}")
    assert [finding.code for finding in explain_run(run).findings] == ["sources_part"]


@pytest.mark.parametrize(
    ("last", "settings", "is_told"),
    [
        # Training rises by 0.5; held out by 0.02, and at most by 0.02 + 0.05 * sqrt(2) = 0.09.
        ((0.52, 0.47, 0.57), "", True),
        ((0.75, 0.7, 0.8), "", False),  # half as much
        ((0.52, 0.27, 0.77), "", False),  # nobody knows: at most by 0.02 + 0.5 * 0.51 = 0.27
        ((0.52, 0.47, 0.57), "collector: {refill: true}", False),  # other prompts than those drawn
    ],
)
def test_training_that_rises_alone_is_told(last, settings, is_told, tmp_path):
    held_out = [(0, (0.5, 0.45, 0.55)), (12, last)]
    run = made_run(tmp_path / "run", half_then(), settings=settings, held_out=held_out)
    found = explain_run(run).findings
    assert [finding.code for finding in found] == ["held_out_parts"] * is_told
    if found:
        assert found[0].explains == pytest.approx(1 - 0.02 / 0.5)
        assert "from 0.5 to 1, but on held-out prompts it went from 0.5 to 0.52" in found[0].what


def test_few_groups_or_steps_say_nothing(tmp_path):
    gamed = half_then(text="A great question!")
    few = made_run(tmp_path / "few", gamed, groups=2, steps=9)  # 8 groups, and 6
    short = made_run(tmp_path / "short", lambda _, n, i: gamed(9, n, i), steps=3)
    enough = made_run(tmp_path / "enough", gamed, groups=3, steps=9)  # 12 groups, and 9
    codes = [[each.code for each in explain_run(run).findings] for run in (few, short, enough)]
    assert codes == [[], [], ["one_answer"]]


def test_the_chance_of_a_difference_is_that_of_groups_dealt_at_random():
    def groups(values: list[float]) -> list[list[float]]:
        return [[value] for value in values]

    # 2 of the C(16, 8) = 12870 ways to deal are as far apart.
    far = change_between(groups([0.0] * 8), groups([1.0] * 8), lambda value: value)
    assert (far.before, far.after, far.is_sure) == (0.0, 1.0, True)
    # Ones at random: 3 and 5 of 8 are as far apart, or further, in 1 - 4900/12870 of them.
    near = change_between(
        groups([1.0] * 3 + [0.0] * 5), groups([1.0] * 5 + [0.0] * 3), lambda value: value
    )
    assert near.chance == pytest.approx(1 - 4900 / 12870, abs=0.04)
    assert change_between(groups([0.0] * 7), groups([1.0] * 99), lambda value: value).chance == 1
    rng = random.Random(0)
    draws = [groups([rng.random() for _ in range(12)]) for _ in range(400)]
    pairs = zip(draws[::2], draws[1::2], strict=True)
    assert sum(change_between(a, b, lambda value: value).is_sure for a, b in pairs) <= 3


def test_repeats_are_counted_in_windows_of_twelve_characters():
    assert repeated_fraction("ab" * 20) == pytest.approx(27 / 29)  # 29 windows, of two kinds
    assert repeated_fraction("ab" * 19) == 0  # too short
    assert repeated_fraction("".join(map(chr, range(50, 100)))) == 0


WORDS = st.text("abcdefgh ", min_size=20, max_size=60).map(lambda text: text.strip() + "xyz" * 6)


@given(text=WORDS, before=WORDS, after=WORDS, other=st.text("klmnop", min_size=30))
def test_what_is_copied_is_found_and_what_has_other_letters_is_not(text, before, after, other):
    assert is_copied(text, before + text + after)
    assert not is_copied(other, before + text + after)
    assert not is_copied(text[:3], text)
    assert is_copied(text + "?", before + text)  # at most 8 of its windows are new
    assert not is_copied(text[:18] + "?", before + text)  # short ones have to be there whole
    assert 0 <= repeated_fraction(text) < 1


@pytest.mark.parametrize(
    ("text", "wanted", "is_held"),
    [
        ("the answer is 42.", "42", True),
        ("it is 142", "42", False),
        ("\\boxed{1/4}", "1/4", True),
        ("a.b", "a.b", True),
        ("a_b", "a", False),
        ("anything", "a+", False),
    ],
)
def test_an_answer_is_held_as_a_whole(text, wanted, is_held):
    assert holds(text, wanted) == is_held


def test_an_answer_that_stands_in_the_prompt_may_be_copied():
    prompt = "who wrote it: anna karenina, or war and peace?"
    extracted = RolloutTexts(prompt, ("anna karenina, or war",), right=("anna karenina",))
    assert not extracted.copies_prompt
    assert RolloutTexts(prompt, ("anna karenina, or war",), right=("tolstoy",)).copies_prompt
    assert RolloutTexts(prompt, ("peace",), right=("tolstoy",)).copies_prompt
    assert not RolloutTexts(prompt, ("peace",)).copies_prompt
    loops = RolloutTexts(prompt, ("ha " * 30,))
    assert loops.loops
    assert not RolloutTexts(prompt, ("ha " * 30,), right=("ha " * 20,)).loops


def test_a_turn_in_the_prompt_is_none_of_the_policys():
    def sample(spans: list[TokenSpan]) -> RolloutSample:
        shown = ["user: Name a fruit. ", "assistant: apple", "user: A  colour?", "assistant: Red"]
        given: dict[str, Any] = {
            **{"step": 1, "group_id": "0/1", "index": 0, "reward": 1.0, "rewards": {}},
            **{"stop_reason": "answered", "is_truncated": False, "num_turns": 1},
            **{"policy_version": 1, "prompt_tokens": 3, "sampled_tokens": 1, "total_tokens": 4},
        }
        return RolloutSample(
            messages=[dict(zip(("role", "content"), x.split(": "), strict=True)) for x in shown],
            row={"answer": "Red", "number": 7},
            tokens=SampleTokens(ids=[], texts=[], log_probs=[], versions=[], spans=spans),
            **given,
        )

    spans = [TokenSpan("user", "user", 0, 1), TokenSpan("context", "assistant", 1, 1)]
    texts = texts_of(sample([*spans, TokenSpan("model", "assistant", 3, 1)]))
    assert texts.prompt == "name a fruit.\napple\na colour?"
    assert (texts.turns, texts.right, texts.columns) == (("red",), ("red",), ("7",))
    assert texts_of(sample([])).turns == ("apple", "red")  # nothing says whose they are

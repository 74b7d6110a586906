"""Pairs of rollouts: which two, where their prompt ends, and what the file holds."""

# ruff: noqa: E501

import gzip
import json
from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_records import sample, write_record
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from collectors.record import (
    LeftOut,
    RolloutRecorder,
    RunRecord,
    SampleTokens,
    labelled_rollouts,
    preference_pairs,
)
from collectors.record.convert import main
from collectors.record.sampled_messages import messages_to_train
from collectors.record.samples import RecordedToolCall, TokenSpan
from torchrl_data import (
    ConversationEncoder,
    check_messages,
    preference_rows,
    read_labelled,
    read_pair,
)
from torchrl_envs import ChatEnv, DataLoadingPrimer, FunctionTools, RewardFunctions, load_rows

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]
WRITERS = {"assistant": "model", "tool": "tool"}


def says(text):
    return {"role": "assistant", "content": text}


def answers(text):
    return {"role": "tool", "content": text}


def rollout(index, reward, *messages, asked=ASKED, texts=(), **changed):
    """An episode whose messages are one token each, but for the last turn where texts are given."""
    messages = [*asked, *messages]
    words = [message["content"] for message in messages]
    lengths = [1] * len(messages)
    if texts:
        words, lengths = [*words[:-1], *texts], [*lengths[:-1], len(texts)]
    spans = [
        TokenSpan(
            *(WRITERS.get(m["role"], "user") if number >= len(asked) else "user", m["role"]),
            *(number, length),
        )
        for number, (m, length) in enumerate(zip(messages, lengths, strict=True))
    ]
    tokens = SampleTokens(
        ids=[0] * len(words),
        texts=words,
        spans=spans,
        log_probs=[None for _ in words],
        versions=[None for _ in words],
    )
    own = {"tool_calls": [], "finish_reason": "stop", "messages": messages, "tokens": tokens}
    return sample(index=index, reward=reward, **(own | changed))


def test_the_best_and_the_worst_of_a_group_by_hand():
    """Rewards 0.5, 0, 1, 0 and 1: the first of those with 1 and the first of those with 0."""
    schema = {"type": "function", "function": {"name": "add"}}
    texts = ("about 4", "5", "4", "6", "four")
    group = [
        rollout(n, reward, says(text), tools=[schema], step=3)
        for n, (reward, text) in enumerate(zip((0.5, 0.0, 1.0, 0.0, 1.0), texts, strict=True))
    ]
    found = preference_pairs(group)
    assert [pair.to_json() for pair in found.pairs] == [
        {
            "prompt": ASKED,
            "chosen": [says("4")],
            "rejected": [says("5")],
            "tools": [schema],
            "chosen_reward": 1.0,
            "rejected_reward": 0.0,
            "step": 3,
            "group_id": "0/0",
            "chosen_sample": 2,
            "rejected_sample": 1,
            "chosen_stop_reason": "answered",
            "rejected_stop_reason": "answered",
        }
    ]
    assert (found.num_groups, found.left_out) == (1, Counter())
    # 2 that are best over 2 that are worst, each of both over and under the one between.
    every = preference_pairs(group, all_pairs=True).pairs
    assert [(p.chosen_sample, p.rejected_sample) for p in every] == [
        *((2, 1), (2, 3), (4, 1), (4, 3)),
        *((0, 1), (0, 3), (2, 0), (4, 0)),
    ]
    assert len(preference_pairs(group, all_pairs=True, min_difference=0.6).pairs) == 4
    # Rollouts that say the same are one.
    again = [*group, rollout(5, 1.0, says("4"), tools=[schema], step=3)]
    assert preference_pairs(again, all_pairs=True).pairs == every
    with pytest.raises(ValueError, match=r"min_difference must be a finite number in \[0, inf\)"):
        preference_pairs(group, min_difference=-1.0)


def test_a_least_difference_is_met_by_rewards_in_float32():
    """0.3 - 0.2 is less than 0.1 in float64, and what was typed is meant."""
    group = [rollout(0, 0.3, says("a")), rollout(1, 0.2, says("b"))]
    assert len(preference_pairs(group, min_difference=0.1).pairs) == 1
    assert not preference_pairs(group, min_difference=0.101).pairs


def test_the_prompt_is_what_both_begin_with():
    """A turn that both took is of it, and its answer; what follows the last turn is left out."""
    better = [says("8?"), answers("lower"), says("4?"), answers("found"), says("done")]
    worse = [says("8?"), answers("lower"), says("9?"), answers("lower"), says("done")]
    group = [rollout(0, 0.0, *worse, answers("over")), rollout(1, 1.0, *better, answers("found"))]
    (pair,) = preference_pairs(group).pairs
    assert pair.prompt == ASKED + better[:2]
    assert (pair.chosen, pair.rejected) == (better[2:], worse[2:])


def test_of_rollouts_that_an_answer_parts_none_is_preferred():
    """The dice decided, or whether the environment went on; the next pair of the group is given."""
    group = [
        rollout(0, 1.0, says("roll"), answers("6"), says("six")),
        rollout(1, 0.0, says("roll"), answers("1"), says("one")),
        rollout(2, 0.25, says("roll")),
    ]
    assert preference_pairs(group).left_out == {LeftOut.PARTED: 1}
    group.append(rollout(3, 0.5, says("no")))
    (pair,) = preference_pairs(group).pairs
    assert (pair.chosen_sample, pair.rejected_sample) == (0, 3)
    assert pair.prompt == ASKED


CUT = {"finish_reason": "length", "stop_reason": "response_length", "is_truncated": True}
IMAGE = {"role": "user", "content": [{"type": "text", "text": "[image 32x32]"}]}
OTHER = [{"role": "user", "content": "3 + 3?"}]


@pytest.mark.parametrize(
    ("group", "options", "left_out"),
    [
        ([rollout(0, 1.0, says("a"))], {}, {LeftOut.TOO_FEW: 1}),
        ([rollout(0, 1.0, says("a")), rollout(1, 1.0, says("b"))], {}, {LeftOut.EQUAL_REWARDS: 1}),
        ([rollout(0, None, says("a")), rollout(1, 1.0, says("b")), rollout(2, float("nan"), says("c"))], {},
         {LeftOut.NO_REWARD: 2, LeftOut.TOO_FEW: 1}),
        ([rollout(0, 1.0, says("a")), rollout(1, 0.5, says("b"))], {"min_difference": 0.75}, {LeftOut.TOO_CLOSE: 1}),
        ([rollout(0, 1.0, says("a"), **CUT), rollout(1, 0.5, says("b"))], {}, {LeftOut.BEST_TRUNCATED: 1}),
        ([rollout(0, 1.0, says("a")), rollout(1, 0.5, says("b"), **CUT)], {"drop_truncated": True},
         {LeftOut.TRUNCATED: 1, LeftOut.TOO_FEW: 1}),
        ([rollout(0, 1.0, says("a")), rollout(1, 0.5, says("a"))], {}, {LeftOut.EQUAL_TEXTS: 1}),
        ([rollout(0, 1.0, says("a")), rollout(1, 0.5, says("b"), asked=OTHER)], {}, {LeftOut.PARTED: 1}),
        # The example that both prompts begin with is no turn of the policy.
        ([rollout(n, float(n), says("a"), asked=[*OTHER, says("6"), *asked]) for n, asked in enumerate([ASKED, OTHER])], {},
         {LeftOut.PARTED: 1}),
        ([rollout(0, 1.0, says("a")), rollout(1, 0.5, says("b"), tools=[{}])], {}, {LeftOut.PARTED: 1}),
        ([rollout(0, 1.0), rollout(1, 0.5, says("b"))], {}, {LeftOut.SILENT: 1, LeftOut.TOO_FEW: 1}),
        ([rollout(n, float(n), says(str(n)), asked=[IMAGE]) for n in range(2)], {}, {LeftOut.IMAGE: 2, LeftOut.TOO_FEW: 1}),
        # An episode of two rows counts once.
        ([rollout(0, 1.0, says("a")), *(rollout(1, 0.5, says("b"), segment=n, num_segments=2) for n in range(2))], {},
         {LeftOut.SEVERAL_ROWS: 1, LeftOut.TOO_FEW: 1}),
    ],
)  # fmt: skip
def test_what_gives_no_pair_is_counted_by_its_reason(group, options, left_out):
    found = preference_pairs(group, **options)
    assert (found.pairs, found.left_out) == ([], left_out)


def test_a_rollout_that_was_cut_is_rejected_and_never_chosen():
    group = [
        rollout(0, 1.0, says("because of th"), finish_reason="length", stop_reason="token_budget"),
        rollout(1, 0.5, says("4"), stop_reason="max_steps", is_truncated=True),  # a whole turn
        rollout(2, 0.0, says("and and and"), finish_reason="", stop_reason="response_length"),
        rollout(3, 0.75, says("as far as"), finish_reason="context_length"),
        rollout(4, 0.75, says("so and"), finish_reason="", stop_reason="response_length: 8"),
    ]
    (pair,) = preference_pairs(group).pairs
    assert (pair.chosen_sample, pair.rejected_sample) == (1, 2)
    assert pair.rejected_stop_reason == "response_length"


EPISODES = st.builds(
    lambda reward, turns, is_cut, is_split: (reward, tuple(turns), is_cut, is_split),
    st.sampled_from([None, 0.0, 0.5, 1.0]),
    st.lists(st.sampled_from("ab"), min_size=1, max_size=3),
    *(st.integers(0, 4).map(lambda n: n == 0) for _ in range(2)),
)


@given(
    st.lists(st.lists(EPISODES, min_size=1, max_size=5), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.75]),
    st.booleans(),
)
def test_no_group_that_has_a_difference_is_lost(groups, least, drops):
    """Against all two rollouts of each group: which may be a pair is told by what was drawn."""
    samples = [
        rollout(
            *(index, reward, *chain.from_iterable((says(t), answers("ok")) for t in turns)),
            **({"group": number} | (CUT if is_cut else {})),
            num_segments=1 + is_split,
        )
        for number, group in enumerate(groups)
        for index, (reward, turns, is_cut, is_split) in enumerate(group)
    ]
    options = {"min_difference": least, "drop_truncated": drops}
    best = preference_pairs(samples, **options).pairs
    every = preference_pairs(samples, all_pairs=True, **options)
    assert every.num_groups == len(groups)
    for number, group in enumerate(groups):
        usable = [e for e in group if e[0] is not None and not e[3] and not (drops and e[2])]
        wanted = [
            ((chosen[1], rejected[1]), chosen[0] - rejected[0])
            for chosen in usable
            for rejected in usable
            if chosen[0] > rejected[0] and chosen[0] - rejected[0] >= least
            if not chosen[2]
            # Where one is over and the other goes on, no turn parts them.
            if any(a != b for a, b in zip(chosen[1], rejected[1], strict=False))
        ]
        own = [pair for pair in every.pairs if pair.group_id == f"0/{number}"]
        said = [
            tuple(
                tuple(m["content"] for m in pair.prompt + side if m["role"] == "assistant")
                for side in (pair.chosen, pair.rejected)
            )
            for pair in own
        ]
        assert Counter(said) == Counter({texts for texts, _ in wanted})
        found = [p for p in best if p.group_id == f"0/{number}"]
        most = [max(difference for _, difference in wanted)] if wanted else []
        assert [pair.chosen_reward - pair.rejected_reward for pair in found] == most
    for pair in every.pairs:
        assert pair.chosen_reward > pair.rejected_reward
        assert pair.chosen != pair.rejected
        assert {m[-1]["role"] for m in (pair.chosen, pair.rejected)} == {"assistant"}
        assert {m[0]["role"] for m in (pair.chosen, pair.rejected)} == {"assistant"}
        group = groups[int(pair.group_id[2:])]
        assert group[pair.chosen_sample][0] == pair.chosen_reward
        assert group[pair.rejected_sample][0] == pair.rejected_reward
        assert read_pair(pair.to_json()).num_shared == len(pair.prompt)


SCHEMA = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
CODER = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
MISTRAL = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]'
CALLED = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("text", "calls", "message"),
    [
        (HERMES, ["add"], {"content": "", "tool_calls": [CALLED]}),
        (f"Well.\n{HERMES}\n{HERMES}", ["add"] * 2, {"content": "Well.", "tool_calls": [CALLED] * 2}),
        (CODER, ["add"], {"content": "", "tool_calls": [CALLED]}),
        (MISTRAL, ["add"], {"content": "", "tool_calls": [{**CALLED, "id": "abcdefghi"}]}),
        # A call that could not be read, words after a call, a call that nobody took for one, and
        # a tool with a syntax of its own.
        (HERMES[:-12], [""], {"content": HERMES[:-12]}),
        (f"{HERMES} Done.", ["add"], {"content": f"{HERMES} Done."}),
        (HERMES, [], {"content": HERMES}),
        ("```python\n1 + 1\n```", ["python"], {"content": "```python\n1 + 1\n```"}),
    ],
)  # fmt: skip
def test_calls_stand_beside_the_content_where_they_are_those_of_the_record(text, calls, message):
    recorded = [RecordedToolCall(name, 2, None, False) for name in calls]
    row = rollout(0, 1.0, says("hm"), answers("?"), says(text), tools=[SCHEMA], tool_calls=recorded)
    *before, last = messages_to_train(row)
    assert before == [*ASKED, says("hm"), answers("?")]
    assert last == {"role": "assistant", **message}
    check_messages([last])


@pytest.mark.parametrize(
    ("text", "tokens", "message"),
    [
        ("<think>\nTwo.\n</think>\n\n4", ["<think>", "Two.", "</think>", "4"],
         {"reasoning_content": "Two.", "content": "4"}),
        # The chat template has begun the thought.
        ("Two.\n</think>\n\n4", ["Two.", "</think>", "4"], {"reasoning_content": "Two.", "content": "4"}),
        # A model without these tokens has written what looks like them.
        ("<think>Two.</think>4", ["<", "think>", "Two.", "</", "think>", "4"], {"content": "<think>Two.</think>4"}),
        ("<think>Two, tw", ["<think>", "Two, tw"], {"content": "<think>Two, tw"}),
    ],
)  # fmt: skip
def test_reasoning_stands_beside_the_content_where_a_token_ends_it(text, tokens, message):
    *_, last = messages_to_train(rollout(0, 1.0, says(text), texts=tokens))
    assert last == {"role": "assistant", **message}


def test_the_name_of_a_call_is_no_difference_and_its_arguments_are_one():
    def calls(index, reward, call_id, number):
        call = {"id": call_id, "function": {"name": "get", "arguments": {"id": number}}}
        called = {**says(""), "tool_calls": [call]}
        result = {**answers("ok"), "tool_call_id": call_id}
        return rollout(index, reward, called, result, says("done"))

    same = preference_pairs([calls(0, 1.0, "x", 1), calls(1, 0.0, "y", 1)])
    assert same.left_out == {LeftOut.EQUAL_TEXTS: 1}
    (pair,) = preference_pairs([calls(0, 1.0, "x", 1), calls(1, 0.0, "x", 2)]).pairs
    assert pair.prompt == ASKED


def test_a_rollout_to_the_file_and_back_to_the_tokens_that_were_sampled(
    scripted, call_text, chatml_tokenizer, tmp_path, capsys
):
    """Four episodes of a group; what load_rows reads is encoded to the very tokens."""

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one.
            b: the other.
        """
        return a + b

    first = [call_text("add", a=2, b=2), "5", call_text("add", a=2, b=2), "It is 4."]
    policy = scripted(["4"])
    scripted_engine: Any = type(policy.engine)

    class InTurn(scripted_engine):
        said = iter([*first, "It is 4.", "It is 22."])

        def _say(self, prompt, params, budget):
            self.script = {"": [next(self.said)]}
            return super()._say(prompt, params, budget)

    make_engine: Any = InTurn
    policy.engine = make_engine(policy.engine.tokenizer, {})

    def right(completions):
        return [float("is 4" in str(completion[-1])) for completion in completions]

    env = ChatEnv(batch_size=4, tokenizer=chatml_tokenizer).append_transform(
        Compose(
            DataLoadingPrimer([{"prompt": "What is 2 + 2?"}], group_size=4),
            FunctionTools([add]),
            RewardFunctions([right], completion_format="messages"),
        )
    )
    batch = LLMCollector(env, policy).collect()
    with RolloutRecorder(tmp_path / "run", chatml_tokenizer) as recorder:
        recorder.write(1, batch)
    path = tmp_path / "pairs.jsonl"
    assert main([str(tmp_path / "run"), str(path), "--pairs", "all"]) == 0
    # Right are "4" by a call and without one, wrong are "5" and "22" by a call.
    told = capsys.readouterr().out
    assert told.splitlines() == [
        f"4 pairs of 1 groups in {path}; their rewards differ by 1 on average"
    ]
    rows, samples = load_rows(path), list(RunRecord(tmp_path / "run").samples(1))
    assert len(rows) == 4
    # The two that make the same call have it and its result in their prompt.
    assert sorted(len(row["prompt"]) for row in rows) == [1, 1, 1, 3]
    encoder = ConversationEncoder(chatml_tokenizer)
    for row in rows:
        assert (row["step"], row["group"], row["group_id"]) == (1, 0, "0/0")
        encoded = preference_rows(encoder, [row], tools=[row["tools"]])
        for side in ("chosen", "rejected"):
            recorded = samples[row[f"{side}_sample"]]
            assert recorded.reward == row[f"{side}_reward"] == float(side == "chosen")
            again, sampled = encoded[side == "rejected"], recorded.tokens.ids
            assert again["tokens", "full"].tolist()[: len(sampled)] == sampled
            # The template writes a newline after the last turn, which nobody sampled.
            assert not again["masks", "all_assistant_mask"][len(sampled) :].any()


def two(step, rewards=(0.0, 1.0), group=0, **changed):
    return [
        rollout(n, reward, says(f"{n}"), step=step, group=group, **changed)
        for n, reward in enumerate(rewards)
    ]


def test_the_command_tells_what_it_wrote_and_what_it_left_out(tmp_path, capsys):
    run, out = str(tmp_path / "run"), str(tmp_path / "pairs.jsonl")
    write_record(tmp_path / "run", [[two(1, (1.0, 1.0)), two(1, group=1)], [two(2, (0.5, 1.0))]])
    assert main([run, out]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"2 pairs of 3 groups in {out}; their rewards differ by 0.75 on average",
        "left out: groups of equal rewards: 1",
    ]
    before = (tmp_path / "pairs.jsonl").read_text()
    written = map(json.loads, before.splitlines())
    assert [(row["step"], row["group"], row["group_id"]) for row in written] == [
        (1, 1, "0/1"),
        (2, 0, "0/0"),
    ]
    assert main([run, out]) == 1
    assert "pairs.jsonl is there already" in capsys.readouterr().err
    assert (tmp_path / "pairs.jsonl").read_text() == before
    of_second = str(tmp_path / "second.jsonl")
    assert main([run, of_second, "--steps", "2", "9", "--min-difference", "0.5"]) == 0
    assert [row["step"] for row in load_rows(of_second)] == [2]
    capsys.readouterr()
    # The steps are those of ATIF, too.
    assert main([run, str(tmp_path / "atif"), "--steps", "2", "2"]) == 0
    assert "2 rollouts of 1 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["none.jsonl", "--min-difference", "2"],
         "gives no pair of 1 groups. Left out: groups whose rewards differ by too little: 1. Give a smaller --min-difference."),
        (["none.jsonl", "--min-difference", "nan"], "--min-difference must be a number from 0 on, got nan"),
        (["none.jsonl", "--steps", "4", "5"], "--steps 4 5 names no step of"),
        (["none", "--pairs", "all"], "--pairs is for pairs and labels, and none is a folder for ATIF"),
        (["none", "--labels", "1"], "--labels is for pairs and labels, and none is a folder for ATIF"),
        (["none.jsonl", "--labels", "1", "--pairs", "all"], "--pairs is for pairs, and --labels for single rollouts"),
        (["none.jsonl", "--labels", "nan"], "--labels must be a finite number, got nan"),
        (["none.jsonl", "--labels", "2"], "2 labelled rollouts, of which 0 have a reward of 2 or more"),
        (["none", "--min-difference", "0"], "--min-difference is for pairs"),
    ],
)  # fmt: skip
def test_what_the_command_can_not_do_is_said(options, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "run", [[two(1)]])
    assert main(["run", *options]) == 1
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_single_rollouts_and_those_that_are_not_recorded_are_named(tmp_path, capsys):
    run = write_record(tmp_path / "run", [[two(1, (1.0,))]])
    path = run / "rollouts/step-000001.jsonl.gz"
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    lines[0]["groups"] *= 3
    lines[0]["groups"][1:] = [
        g | {"group_id": f"9/{n}"} for n, g in enumerate(lines[0]["groups"][1:])
    ]
    path.write_bytes(gzip.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode()))
    assert main([str(run), str(tmp_path / "none.jsonl")]) == 1
    told = capsys.readouterr().err
    assert "groups with fewer than two rollouts to compare: 1" in told
    assert "not recorded (record.every=, record.max_groups_per_step=): 2" in told
    assert "Sample more rollouts of each prompt (collector.group_size=" in told
    # Trajectories of others are no rollouts of a group.
    (tmp_path / "other").mkdir()
    assert main([str(tmp_path / "other"), str(tmp_path / "none.jsonl"), "--pairs", "best"]) == 1
    assert "--pairs is for the record of a run" in capsys.readouterr().err


def test_a_record_of_which_nothing_can_be_read_is_named(tmp_path, capsys):
    (tmp_path / "run/rollouts").mkdir(parents=True)
    (tmp_path / "run/rollouts/step-000001.jsonl.gz").write_bytes(b"")
    assert main([str(tmp_path / "run"), str(tmp_path / "none.jsonl")]) == 1
    assert "nothing of the record can be read: step-000001.jsonl.gz" in capsys.readouterr().err


def test_single_rollouts_get_a_label_by_their_reward():
    """0.3 is a float32 of the record; a cut one is undesirable, or in no file."""
    half = float(torch.tensor(0.3))
    group = [
        rollout(0, half, says("8?"), answers("lower"), says("4"), answers("found"), step=2),
        rollout(1, 0.0, says("5"), step=2),
        rollout(2, 1.0, says("because of th"), step=2, **CUT),
        rollout(3, 0.1, says("and and"), step=2, **CUT),
        rollout(4, None, says("?"), step=2),
        rollout(5, 1.0, says("Hello."), asked=[], step=2),
    ]
    found = labelled_rollouts(group, threshold=0.3)
    assert [(own.sample, own.label) for own in found.rollouts] == [
        (0, True),
        (1, False),
        (3, False),
    ]
    assert found.left_out == {LeftOut.TRUNCATED: 1, LeftOut.NO_REWARD: 1, LeftOut.NO_PROMPT: 1}
    first = found.rollouts[0].to_json()
    assert first == {
        "prompt": ASKED,
        "completion": [says("8?"), answers("lower"), says("4")],
        "label": True,
        "reward": half,
        "step": 2,
        "group_id": "0/0",
        "sample": 0,
        "stop_reason": "answered",
    }
    (answer,) = read_labelled(first)
    assert (answer.num_prompt, answer.label) == (2, True)
    whole = labelled_rollouts(group, threshold=0.3, drop_truncated=True)
    assert [own.sample for own in whole.rollouts] == [0, 1]


def test_the_command_writes_labels(tmp_path, capsys):
    run, out = str(tmp_path / "run"), str(tmp_path / "labels.jsonl")
    write_record(tmp_path / "run", [[two(1, (1.0, None)), two(1, group=1)], [two(2, (0.5, 1.0))]])
    assert main([run, out, "--labels", "0.5"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"5 rollouts in {out}; 4 are desirable, with a reward of 0.5 or more, and 1 are not",
        "left out: rollouts without a reward: 1",
    ]
    rows = load_rows(out)
    assert [(row["step"], row["group"], row["sample"], row["label"]) for row in rows] == [
        *((1, 0, 0, True), (1, 1, 0, False), (1, 1, 1, True), (2, 0, 0, True), (2, 0, 1, True))
    ]

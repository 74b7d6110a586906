"""Rollouts as ATIF and back, and trajectories of other programs as rows."""

# ruff: noqa: E501

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_records import sample, write_record

from collectors.record import SampleTokens, TokenSpan
from collectors.record.atif import read_episode, read_rollout, write_atif, write_atif_episode
from collectors.record.convert import main, rows_of
from collectors.record.foreign_atif import rows_of_atif
from collectors.record.token_row import TrajectoryError

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.none() | st.floats(-20, 0)


@st.composite
def rollouts(draw):
    """Any order of writers, calls and results, with and without log-probs."""
    messages, spans = [], []
    roles = st.sampled_from(["system", "user", "assistant", "tool"])
    for number, role in enumerate(draw(st.lists(roles, min_size=1))):
        message = {"role": role, "content": draw(TEXTS)}
        if role == "assistant" and draw(st.booleans()):
            arguments = draw(st.dictionaries(TEXTS, st.integers() | TEXTS, max_size=2))
            function = {"name": draw(TEXTS), "arguments": arguments}
            message["tool_calls"] = [{"id": draw(st.none() | TEXTS), "function": function}]
        if role == "tool":
            message |= draw(st.sampled_from([{}, {"tool_call_id": "a"}, {"name": "add"}]))
        if draw(st.booleans()):
            spans.append(TokenSpan("template", "", None, draw(st.integers(1, 3))))
        writer = {"assistant": draw(st.sampled_from(["model", "context"])), "tool": "tool"}
        lengths = draw(st.lists(st.integers(1, 4), max_size=2))
        spans += [TokenSpan(writer.get(role, "user"), role, number, n) for n in lengths]
        messages.append(message)
    size = sum(span.length for span in spans)
    model = [span.writer == "model" for span in spans for _ in range(span.length)]
    log_probs = [draw(NUMBERS) if is_model else None for is_model in model]
    ids = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    tokens = SampleTokens(
        ids=ids,
        texts=["x"] * size,
        spans=spans,
        log_probs=log_probs,
        versions=[0 if is_model else None for is_model in model],
    )
    return sample(messages=messages, tokens=tokens, reward=draw(st.none() | st.floats(-1, 1)))


@given(rollouts())
@settings(deadline=None, max_examples=150)
def test_a_rollout_is_the_same_after_a_round_trip(rollout):
    written = json.loads(json.dumps(write_atif(rollout, agent="test")))
    assert vars(read_rollout(written)) == vars(rollout)


def test_a_rollout_as_atif():
    """Two turns: what the policy read, what it sampled, and with which log-probs."""
    written = write_atif(sample(), agent="adder", version="1")
    assert [step["source"] for step in written["steps"]] == ["user", "agent", "agent"]
    first, second = written["steps"][1:]
    assert first["observation"]["results"][0]["content"] == "4"
    assert first["metrics"] == {
        "prompt_tokens": 2,
        "completion_tokens": 2,
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3, 4],
        "logprobs": [-0.5, -0.1],
    }
    assert second["metrics"]["prompt_token_ids"] == [1, 2, 3, 4, 5]
    (row,) = rows_of_atif(written)
    assert row.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert row.sampled == [False, False, True, True, False, True, True]
    assert row.log_probs == [None, None, -0.5, -0.1, None, -1.0, -2.0]
    assert [m["role"] for m in row.messages] == ["user", "assistant", "tool", "assistant"]


def agent_step(number, prompt, ids, **more):
    metrics = {
        "prompt_token_ids": prompt,
        "completion_token_ids": ids,
        "logprobs": [-1.0] * len(ids),
    }
    return {
        "step_id": number,
        "source": "agent",
        "message": f"m{number}",
        "metrics": metrics,
        **more,
    }


def foreign(*steps, **more):
    user = {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "do it"}]}
    agent = {"name": "terminus-2", "version": "2"}
    return {"schema_version": "ATIF-v1.6", "agent": agent, "steps": [user, *steps], **more}


def test_a_history_that_was_rewritten_begins_a_row_and_copies_are_not_trained():
    trajectory = foreign(
        agent_step(2, [1, 2], [3]),
        agent_step(3, [1, 2, 3, 4], [5], is_copied_context=True),
        agent_step(4, [1, 9], [8]),
    )
    first, second = rows_of_atif(trajectory, source="a.json")
    assert (first.token_ids, first.sampled) == (
        [1, 2, 3, 4, 5],
        [False, False, True, False, False],
    )
    assert (second.token_ids, second.sampled) == ([1, 9, 8], [False, False, True])


def test_an_episode_of_several_rows_is_one_trajectory():
    """The first row calls a helper, which asks another one; its own turn is sampled twice."""
    calls = [{"id": "c", "function": {"name": "ask", "arguments": {}}}]
    messages = [dict(message) for message in sample().messages]
    messages[1]["tool_calls"], messages[2]["tool_call_id"] = calls, "c"
    places = [(-1, 0, "main", "lead"), (0, 4, "sub_agent", "help"), (1, 7, "sub_agent", "look"),
              (0, 5, "parallel", "lead")]  # fmt: skip
    rows = [
        sample(messages=messages, segment=n, num_segments=4, parent_segment=parent,
               parent_tokens=at, row_kind=kind, agent=agent)
        for n, (parent, at, kind, agent) in enumerate(places)
    ]  # fmt: skip
    only_the_last = [*rows[3].tokens.spans[:2], TokenSpan("context", "assistant", 1, 2)]
    rows[3].tokens.spans[:3] = only_the_last
    written = json.loads(json.dumps(write_atif_episode(rows, agent="run")))
    assert [vars(row) for row in read_episode(written)] == list(map(vars, rows))
    assert written["agent"]["name"] == "run"
    helper, other = written["subagent_trajectories"]
    assert (helper["agent"]["name"], other["agent"]["name"]) == ("help", "lead")
    assert [each["trajectory_id"][-1] for each in helper["subagent_trajectories"]] == ["2"]
    (result,) = written["steps"][1]["observation"]["results"]
    assert result["subagent_trajectory_ref"] == [{"trajectory_id": helper["trajectory_id"]}]
    copied = [step.get("is_copied_context", False) for step in other["steps"]]
    assert copied == [False, True, False]
    found = rows_of_atif(written, source="a")
    assert [row.source.count("#") for row in found] == [0, 1, 2, 1]
    assert found[3].sampled == [False] * 5 + [True] * 2


def test_sub_agents_are_rows_of_their_own():
    sub = foreign(agent_step(2, [7], [8]), trajectory_id="helper")
    main_row, sub_row = rows_of_atif(
        foreign(agent_step(2, [1], [2]), subagent_trajectories=[sub]), source="a.json"
    )
    assert (main_row.token_ids, sub_row.token_ids) == ([1, 2], [7, 8])
    assert sub_row.source == "a.json#helper"


def test_a_training_trace_and_a_trace_of_verifiers():
    turns = [
        {"prompt_token_ids": [1], "completion_token_ids": [2, 3], "per_token_logps": [-1.0, -2.0],
         "loss_mask": [0, 1, 0], "node_id": "a", "request": {"messages": [{"role": "user", "content": "q"}]}},
        {"prompt_token_ids": [1, 2, 3, 4], "completion_token_ids": [5], "per_token_logps": [-3.0],
         "loss_mask": [0, 0, 0, 0, 1], "node_id": "b"},
    ]  # fmt: skip
    (row,) = rows_of({"schema_version": 1, "turns": turns})
    assert row.token_ids == [1, 2, 3, 4, 5]
    assert row.sampled == [False, True, False, False, True]
    assert row.log_probs == [None, -1.0, -2.0, None, -3.0]
    node = {
        "message": {"role": "user", "content": "q"},
        "token_ids": [1, 2],
        "mask": [False, False],
    }
    said = {"message": {"role": "assistant", "content": "a"}, "parent": 0, "sampled": True}
    answers = [
        {**said, "token_ids": [3, n], "mask": [False, True], "logprobs": [-0.5]} for n in (4, 5)
    ]
    rewards = {"right": {"score": 0.5, "weight": 2.0}, "failed": None}
    left, right = rows_of({"nodes": [node, *answers], "rewards": rewards}, source="t")
    assert (left.token_ids, right.token_ids) == ([1, 2, 3, 4], [1, 2, 3, 5])
    assert left.log_probs == [None, None, None, -0.5]
    assert left.reward == 1.0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"schema_version": "ATIF-v9.9"}, "schema_version must be"),
        ({**foreign(), "steps": []}, "there are no steps"),
        (foreign(agent_step(7, [1], [2])), "step_id must be 2, got 7"),
        (foreign({**agent_step(2, [1], [2, 3]), "metrics": {"completion_token_ids": [2, 3], "logprobs": [0.0]}}),
         "2 sampled tokens have 1 log-probs"),
        (foreign({"step_id": 2, "source": "user", "message": [{"type": "image"}]}), "got 'image'"),
        ({"nodes": [{"message": {}, "parent": 5}]}, "lead nowhere"),
        ({"turns": [{"prompt_token_ids": [1], "completion_token_ids": [2], "per_token_logps": [], "loss_mask": [0, 1]}]},
         "1 \\+ 1 tokens"),
        ({"other": 1}, "neither ATIF"),
        ([], "no object"),
    ],
)  # fmt: skip
def test_what_can_not_be_read_is_named(value, said):
    with pytest.raises(TrajectoryError, match=said):
        rows_of(value)


def test_the_command_line(tmp_path, capsys):
    write_record(tmp_path / "run", [[[sample(), sample(index=1)]]])
    assert main([str(tmp_path / "run"), str(tmp_path / "atif")]) == 0
    files = sorted((tmp_path / "atif").iterdir())
    assert len(files) == 2
    (tmp_path / "atif/broken.json").write_text("{")
    assert main([str(tmp_path / "atif"), str(tmp_path / "rows.jsonl")]) == 1
    said = capsys.readouterr()
    assert "2 rows, 2 of them with tokens, 8 sampled tokens" in said.out
    assert "not read: broken.json" in said.err
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["reward"] for row in rows] == [0.0, 1.0]
    before = (tmp_path / "rows.jsonl").read_text()
    assert main([str(tmp_path / "atif"), str(tmp_path / "rows.jsonl")]) == 1
    assert main([str(tmp_path / "run"), str(tmp_path / "atif")]) == 1
    said = capsys.readouterr().err
    assert "rows.jsonl is there already. Give a file that is not." in said
    assert "atif must be a new or an empty folder" in said
    assert (tmp_path / "rows.jsonl").read_text() == before
    assert len(list((tmp_path / "atif").iterdir())) == 3
    command = [sys.executable, "-m", "torchrl_agents", "convert", "nothing", "x.jsonl"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, "there is no nothing" in done.stderr) == (1, True)


def test_a_run_that_has_no_rollouts_yet_is_no_folder_of_trajectories(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text("{}")
    assert main([str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    assert "holds no record of a run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()

"""The record of a run: what is written is what was trained, and is read as far as it is whole."""

import gzip
import json
import math
import time
from collections import Counter

import made_records
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import lazy_stack
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, StreamingCollector, Wait
from collectors.ledger import GroupLedger
from collectors.record import RolloutRecorder, RunRecord
from collectors.record.files import json_line, read_lines, write_lines
from collectors.record.provenance import token_spans
from collectors.record.samples import StepSummary, TokenSpan
from objectives import GRPOLoss, MCAdvantage
from torchrl_data.conversation import Source
from torchrl_envs import ChatEnv, DataLoadingPrimer, FunctionTools, RewardFunctions, StepCounter
from torchrl_modules import TransformersWrapper
from torchrl_modules.engines.batching_engine import BatchingEngine

ROWS = [{"prompt": f"question <{i}>", "number": i} for i in range(8)]
SLOW_S = 0.03


def length_reward(completions):
    return [float(len(str(completion))) for completion in completions]


def slow(number: int) -> str:
    """Take a moment.

    Args:
        number: of the prompt.
    """
    time.sleep(SLOW_S)
    if number == 1:
        raise OSError("no disk")
    return "done"


@pytest.fixture
def trained_step(chatml_tokenizer, make_tiny_model, tmp_path):
    """One step of a tiny model; the row of the second episode is left out of the training."""
    model = make_tiny_model(0)
    policy = TransformersWrapper(
        model, tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 6}
    )
    env = ChatEnv(batch_size=8).append_transform(
        Compose(
            DataLoadingPrimer(ROWS, group_size=4, shuffle=False),
            RewardFunctions([length_reward], completion_format="messages"),
            StepCounter(max_steps=1),
        )
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(8), transform=MCAdvantage(4, zero_variance="keep"), batch_size=8
    )
    collector = LLMCollector(env, policy, replay_buffer=buffer)
    torch.manual_seed(0)
    batch = collector.collect()
    trained = buffer[:][torch.tensor([7, 0, 3, 2, 6, 5, 4])]
    loss = GRPOLoss(policy, entropy_bonus=True, skip_rows_without_signal=False)
    recorder = RolloutRecorder(tmp_path, chatml_tokenizer)
    recorder.watch(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):  # what is scored after the first update does not count
        loss(trained).total().backward()
        optimizer.step()
    recorder.write(1, batch, trained=trained, metrics={"reward": 2.5, "odd": math.nan})
    recorder.close()
    assert loss.on_scores is None
    return batch, trained, RunRecord(tmp_path), make_tiny_model(0)


def test_a_sample_is_its_row_token_by_token(trained_step, reference_log_probs):
    batch, trained, record, model = trained_step
    (summary,) = record.steps
    assert (summary.step, summary.metrics, summary.num_samples) == (
        1,
        {"reward": 2.5, "odd": None},
        8,
    )
    advantages = {int(row["episode_id"]): float(row["advantage"]) for row in trained.unbind(0)}
    samples = list(record.samples(1))
    assert [(s.group_id, s.index) for s in samples] == [
        (f"0/{group}", i) for group in (0, 1) for i in range(4)
    ]
    for row, sample in zip(batch.unbind(0), samples, strict=True):
        tokens, mask = sample.tokens, row["masks", "all_assistant_mask"].tolist()
        assert tokens.ids == row["tokens", "full"].tolist()
        assert sum(span.length for span in tokens.spans) == len(tokens.ids)
        writers = [span.writer for span in tokens.spans for _ in range(span.length)]
        assert [writer == "model" for writer in writers] == mask
        expected = row["log_probs", "full"].tolist()
        for value, own, is_sampled in zip(tokens.log_probs, expected, mask, strict=True):
            assert value == (pytest.approx(own, abs=1e-5) if is_sampled else None)
        assert tokens.versions == [0 if is_sampled else None for is_sampled in mask]
        assert sample.reward == pytest.approx(float(row["reward"]))
        assert sample.row == ROWS[int(sample.group_id[2:])]
        assert sample.messages[0]["content"] == sample.row["prompt"]
        advantage = advantages.get(int(row["episode_id"]))
        assert sample.advantage == (None if advantage is None else pytest.approx(advantage, 1e-4))
        if advantage is None:
            assert sample.index == 1
            assert tokens.trainer_log_probs is None
            continue
        assert tokens.trainer_log_probs is not None
        assert tokens.entropy is not None
        reference = reference_log_probs(model, tokens.ids).tolist()
        for value, entropy, own, is_sampled in zip(
            tokens.trainer_log_probs, tokens.entropy, reference, mask, strict=True
        ):
            assert value == (pytest.approx(own, abs=1e-4) if is_sampled else None)
            assert (entropy is not None) == is_sampled
    assert [group.num_trained for group in summary.groups] == [3, 4]
    assert [group.rewards for group in summary.groups] == [
        [s.reward for s in samples[:4]],
        [s.reward for s in samples[4:]],
    ]


def test_tool_calls_have_their_time_and_errors_and_the_ledger_its_events(
    scripted, call_text, chatml_tokenizer, tmp_path
):
    """Prompts 0 to 3: a slow tool, one that fails, one that is unknown, and a broken call."""
    script = {
        "<0>": [call_text("slow", number=0), "well"],
        "<1>": [call_text("slow", number=1), "bad"],
        "<2>": [call_text("nobody"), "why"],
        "<3>": ["<tool_call>\nno\n</tool_call>", "so"],
    }
    env = ChatEnv(batch_size=4, tokenizer=chatml_tokenizer).append_transform(
        Compose(
            DataLoadingPrimer(ROWS[:4], group_size=2, num_epochs=1, shuffle=False),
            FunctionTools([slow]),
            RewardFunctions([length_reward], completion_format="messages"),
        )
    )
    policy = scripted(script, write_tokens=False)
    engine = BatchingEngine(policy.engine)
    with (
        StreamingCollector(env, policy, groups_per_step=2, staleness=Wait(2), engine=engine) as c,
        RolloutRecorder(tmp_path, chatml_tokenizer) as recorder,
    ):
        recorder.follow(c.ledger)
        for step, batch in enumerate(c, 1):
            recorder.write(step, batch)
        assert c.ledger.balance.offered.groups == 4
    record = RunRecord(tmp_path)
    samples = {s.row["number"]: s for step in (1, 2) for s in record.samples(step)}
    (ok,), (failed,), (unknown,), (broken,) = (samples[i].tool_calls for i in range(4))
    assert (ok.tool, ok.turn, ok.is_error) == ("slow", 1, False)
    assert SLOW_S <= ok.seconds < 5
    assert (failed.tool, failed.is_error) == ("slow", True)
    assert SLOW_S <= failed.seconds < 5
    assert unknown == ("nobody", 1, None, True)
    assert broken == ("", 1, None, True)
    assert [samples[i].num_tool_errors for i in range(4)] == [0, 1, 1, 1]
    by_message = {span.message: span for span in samples[0].tokens.spans if span.message}
    assert [by_message[i].writer for i in (1, 2, 3)] == ["model", "tool", "model"]
    events = record.events()
    assert Counter(event["name"] for event in events) == dict.fromkeys(
        ("offered", "started", "finished", "taken", "trained"), 4
    )
    for summary in record.steps:
        for group in summary.groups:
            taken = next(e for e in events if (e["name"], e["ordinal"]) == ("taken", group.ordinal))
            assert taken["group_id"] == group.group_id == f"0/{group.ordinal}"
            assert taken["step"] + 1 == summary.step


def test_some_groups_are_sampled_and_the_same_prompts_again(
    trained_step, chatml_tokenizer, tmp_path
):
    batch, _, _, _ = trained_step
    recorder = RolloutRecorder(tmp_path / "other", chatml_tokenizer, every=2, max_groups_per_step=1)
    backwards = batch[torch.arange(7, -1, -1)]
    for step, rows in ((1, batch), (2, batch), (3, backwards)):
        recorder.write(step, rows)
    record = RunRecord(tmp_path / "other")
    assert [step.num_samples for step in record.steps] == [4, 0, 4]
    chosen = [
        [group.prompt_id for group in step.groups if group.is_recorded] for step in record.steps
    ]
    assert chosen[0] == chosen[2]
    assert chosen[1] == []
    assert [len(step.groups) for step in record.steps] == [2, 2, 2]
    ids = {s.group_id for s in record.samples(1)} | {s.group_id for s in record.samples(3)}
    assert len(ids) == 1


def test_a_record_is_not_mixed_with_another_and_goes_on_behind_a_step(
    trained_step, chatml_tokenizer, tmp_path
):
    batch, _, _, _ = trained_step
    with pytest.raises(FileExistsError, match="holds steps up to 1 of a run"):
        RolloutRecorder(tmp_path, chatml_tokenizer)
    recorder = RolloutRecorder(tmp_path, chatml_tokenizer, after=1)
    recorder.write(2, batch)
    recorder.write(3, batch)
    RolloutRecorder(tmp_path, chatml_tokenizer, after=2)
    assert [step.step for step in RunRecord(tmp_path).steps] == [1, 2]
    with pytest.raises(FileNotFoundError, match="holds no record of a run"):
        RunRecord(tmp_path / "nothing")
    for name in ("own-001", "own-002", "own-003", "own-else", "owner-001"):
        (tmp_path / name).mkdir()
    with pytest.raises(FileNotFoundError, match=r"step\. There is .*own-002 and .*own-003\.$"):
        RunRecord(tmp_path / "own")
    with pytest.raises(ValueError, match=r"write takes rows of a collector.*'episode_id'"):
        recorder.write(4, batch.exclude("episode_id"))


def test_what_can_not_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "step-000001.jsonl.gz"
    write_lines(path, [{"format": 1}], str)

    def lines():
        yield {"format": 1}
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        write_lines(path, lines(), str)
    assert list(tmp_path.iterdir()) == [path]
    damage = []
    assert list(read_lines(path, damage)) == [{"format": 1}]
    assert damage == []


SUMMARY = StepSummary(step=1, time=0.0, metrics={}, groups=[], events=[], num_samples=0)
LINES = [
    {"format": 1, **vars(SUMMARY)},
    *({"number": i, "text": f"line {i}"} for i in range(40)),
]


@given(cut=st.floats(0, 1), flipped=st.booleans())
def test_a_damaged_file_is_read_as_far_as_it_goes_and_the_damage_named(
    cut, flipped, tmp_path_factory
):
    path = tmp_path_factory.mktemp("torn") / "step-000001.jsonl.gz"
    write_lines(path, LINES, str)
    whole = path.read_bytes()
    at = int(cut * (len(whole) - 1))
    torn = bytearray(whole)
    torn[at] ^= 0xFF
    path.write_bytes(torn if flipped else whole[:at])
    damage = []
    read = list(read_lines(path, damage))
    if not flipped:
        assert read == LINES[: len(read)]
        assert path.name in damage[0]
    elif len(read) < len(LINES):
        assert damage


def test_a_torn_last_line_is_named(tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    text = b"".join(json_line(line, str) for line in LINES)
    (folder / "step-000001.jsonl.gz").write_bytes(gzip.compress(text[:-5]))
    (folder / "step-000002.jsonl.gz").write_bytes(b"")
    record = RunRecord(tmp_path)
    assert [step.step for step in record.steps] == [1]
    assert any("step-000002.jsonl.gz" in damage for damage in record.damage)
    write_lines(folder / "step-000003.jsonl.gz", [{"format": 2}], str)
    newer = RunRecord(tmp_path)
    with pytest.raises(ValueError, match="in format 2; this version reads formats up to 1"):
        next(newer.samples(3))
    damage = []
    assert list(read_lines(folder / "step-000001.jsonl.gz", damage)) == LINES[:-1]
    assert "line 41 is torn" in damage[0]


def test_every_line_is_strict_json_whatever_a_row_holds():
    value = {"a": math.inf, "b": [math.nan, {"c": object}], "d": "\ud800 half", 3: torch.tensor(1)}
    read = json.loads(json_line(value, str).decode("utf-8"), parse_constant=pytest.fail)
    assert read["a"] is None
    assert read["b"][0] is None
    assert read["3"] == "tensor(1)"
    assert read["d"].endswith(" half")


M, C, T = Source.MODEL, Source.CONTENT, Source.TEMPLATE


@pytest.mark.parametrize(
    ("runs", "messages", "expected"),
    [
        pytest.param(
            [(T, "<u>"), (C, "2+2?"), (T, "<a>"), (M, "<call>"), (T, "<t>"), (C, "2"), (T, "</t>")],
            ["user 2+2?", "assistant <call>", "tool 2"],
            ["user 0", "model 1", "tool 2"],
            id="a result that is a part of the question is the tool's",
        ),
        pytest.param(
            [(C, "be brief"), (T, "."), (C, "a "), (T, "|"), (C, " b"), (M, "c")],
            ["system be brief", "user a  b", "assistant c"],
            ["user 0", "user 1", "user 1", "model 2"],
            id="a message in two pieces",
        ),
        pytest.param(
            [(C, '{"schema"}'), (C, ""), (T, "."), (C, "hi"), (M, "x"), (T, "."), (M, "y")],
            ["user hi", "assistant x", "assistant y"],
            ["context None", "user 0", "model 1", "model 2"],
            id="text of no message",
        ),
    ],
)
def test_who_wrote_what(runs, messages, expected):
    sources = [source for source, text in runs if text for _ in text]
    texts = [letter for _, text in runs for letter in text]
    split = [message.split(" ", 1) for message in messages]
    spans = token_spans(sources, texts, [{"role": r, "content": c} for r, c in split])
    told = [f"{span.writer} {span.message}" for span in spans if span.writer != "template"]
    assert told == expected
    assert all(isinstance(span, TokenSpan) for span in spans)
    assert sum(span.length for span in spans) == len(texts)


def test_what_the_ledger_told_after_a_step_was_written_is_in_its_checkpoint(
    trained_step, chatml_tokenizer, tmp_path
):
    """A run is killed after it was saved; what comes later in it has not happened."""
    batch, folder = trained_step[0], tmp_path / "followed"
    ledger = GroupLedger(groups_per_step=1, group_size=2)
    with RolloutRecorder(folder, chatml_tokenizer) as recorder:
        recorder.follow(ledger)
        written = ledger.offer("0/0", 0)
        recorder.write(1, batch)
        ledger.drop(written, "no_signal")
        state = json.loads(json.dumps(ledger.state_dict()))
        ledger.offer("0/0", 0)
    resumed = GroupLedger(groups_per_step=1, group_size=2)
    resumed.load_state_dict(state)
    with RolloutRecorder(folder, chatml_tokenizer, after=1) as recorder:
        recorder.follow(resumed)
        again = resumed.offer("0/0", 0)
        resumed.start(again)
        recorder.write(2, batch)
    told = [(e["name"], e["attempt"]) for e in RunRecord(folder).events()]
    assert told == [("offered", 0), ("dropped", 0), ("offered", 1), ("started", 1)]


def test_tests_on_held_out_prompts_are_read_in_order_and_torn_lines_named(tmp_path):
    run = made_records.write_record(tmp_path / "run", [[[made_records.sample(1, 0, 0)]]])
    record = RunRecord(run)
    assert record.tests() == []
    lines = [
        {"step": 2, "version": 3, "lag_steps": 1, "reward": 0.5, "rewards/won": 1},
        {"step": 0, "version": 1, "lag_steps": 0, "reward": None},
        {"step": 1, "version": 2, "lag_steps": 0, "skipped": "one was running"},
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (run / "evaluations.jsonl").write_text(f'{text}[1]\n{{"step": 3, "rew')
    assert record.tests() == [(0, {}), (1, {}), (2, {"reward": 0.5, "rewards/won": 1.0})]
    assert [words.partition(" is torn")[0] for words in record.damage] == [
        "evaluations.jsonl: line 4",
        "evaluations.jsonl: line 5",
    ]


def test_the_advantage_of_a_sample_is_that_of_its_sampled_tokens(
    trained_step, chatml_tokenizer, tmp_path
):
    """Where it differs from token to token; what stands beside them does not count.

    Each group is of a process of its own, so that ids of their episodes are the same.
    """
    batch, trained, _, _ = trained_step
    first = int(batch["episode_id"].min())
    batch, trained = (
        lazy_stack([row.clone() for row in rows.unbind(0)]).set(
            "episode_id", (rows["episode_id"] - first) % 4
        )
        for rows in (batch, trained)
    )
    rows, expected = [], {}
    for row in trained.unbind(0):
        mask = row["masks", "all_assistant_mask"]
        values = torch.where(mask, torch.arange(len(mask)).float(), 1000.0)
        rows.append(row.clone().set("advantage", values[:, None]))
        expected[(row["group_id"].item(), row["episode_id"].item())] = float(values[mask].mean())
    with RolloutRecorder(tmp_path / "by_token", chatml_tokenizer) as recorder:
        recorder.write(1, batch, trained=lazy_stack(rows), metrics={})
    samples = RunRecord(tmp_path / "by_token").samples(1)
    for row, sample in zip(batch.unbind(0), samples, strict=True):
        own = expected.get((row["group_id"].item(), row["episode_id"].item()))
        assert sample.advantage == (None if own is None else pytest.approx(own, 1e-4))
        if own is not None:
            mask = row["masks", "all_assistant_mask"].tolist()
            assert [value is not None for value in sample.tokens.advantages] == mask

"""Settings of data: checked where they are made; and an environment that makes its own primer."""

import functools
import json
import math
import os
import pickle

import datasets
import pytest
import torch

from collectors import LLMCollector
from torchrl_data.batched_object import read_objects
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    DataOptions,
    DatasetChatEnv,
    PromptLimit,
    RewardFunctions,
    load_rows,
)
from torchrl_envs.datasets import loading
from torchrl_envs.tasks.task import load_task_rows

ROWS = [{"prompt": f"<{i}>", "number": i} for i in range(7)]


def score(completions, **columns):
    return [1.0 for _ in completions]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DataLoadingPrimer(ROWS, group_size=0), "Primer: group_size .* at least 1, got 0"),
        (lambda: DataLoadingPrimer(ROWS, num_epochs=1.5), "num_epochs must be a whole number"),
        (lambda: DataLoadingPrimer(ROWS, num_workers=-1), "num_workers .* at least 0, got -1"),
        (lambda: DataLoadingPrimer(ROWS, seed=None), "seed must be given, got None"),
        (lambda: DataLoadingPrimer(ROWS, seed=-3), "seed .* at least 0, got -3"),
        (lambda: DataOptions(shuffle_buffer_size=0), "DataOptions: shuffle_buffer_size"),
        (lambda: DataOptions(num_checked_rows=-1), "num_checked_rows .* at least 0, got -1"),
        (lambda: DataOptions(num_checked_rows=None), "num_checked_rows must be given"),
        (lambda: DataOptions(worker_timeout_s=0.0), r"worker_timeout_s .* in \(0, inf\), got 0.0"),
        (lambda: DataOptions(worker_timeout_s=math.inf), "worker_timeout_s must be a finite"),
        (lambda: PromptLimit(0, None), "PromptLimit: max_tokens .* at least 1, got 0"),
        (lambda: load_rows(ROWS, split="train"), "split= is for a hub id, a path .* got list"),
        (lambda: load_rows(ROWS, streaming=True), "for a hub id or a path, and .* got list"),
        (lambda: DataLoadingPrimer(ROWS, dataloader=ROWS), "give one of dataset, dataloader"),
    ],
)
def test_a_setting_out_of_range_is_named_with_what_was_found(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def renamed(rows):
    return {"query": [row["prompt"] + "!" for row in rows], "n": [row["number"] for row in rows]}


@pytest.mark.parametrize(
    "collate_fn",
    [renamed, lambda rows: {k: v[0] for k, v in renamed(rows).items()}, lambda rows: rows],
    ids=["columns", "row", "list"],
)
def test_dataset_chat_env(tmp_path, scripted, collate_fn):
    class Brief(DatasetChatEnv):
        SYSTEM_PROMPT = "Be brief."

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    env = Brief(
        dataset=tmp_path / "saved", num_envs=4, repeats=2, shuffle=False, collate_fn=collate_fn
    )
    env.append_transform(RewardFunctions([score]))
    rows = LLMCollector(env, scripted(["done"], write_tokens=False)).collect().unbind(0)
    assert [row["group_id"].item() for row in rows] == [0, 0, 1, 1]
    messages = rows[2]["history", "full"].to_chats()
    mark = "" if collate_fn(ROWS[:1]) == ROWS[:1] else "!"
    assert [m["content"] for m in messages] == ["Be brief.", f"<1>{mark}", "done"]
    with pytest.raises(ValueError, match="3 rows does not hold whole groups of 2"):
        Brief(dataset=ROWS, num_envs=3, group_size=2)


def test_dataset_chat_env_from_a_dataloader():
    loader = torch.utils.data.DataLoader(ROWS, batch_size=3)
    env = DatasetChatEnv.from_dataloader(loader, batch_size=(4,), repeats=2)
    assert [row["number"] for row in read_objects(env.reset(), "row")] == [0, 0, 1, 1]


@pytest.mark.parametrize("as_list", [False, True], ids=["lines", "one list"])
@pytest.mark.parametrize("is_large", [False, True], ids=["small", "large"])
def test_the_rows_of_a_json_file_have_the_values_that_are_written_there(
    as_list, is_large, tmp_path, monkeypatch
):
    """Arrow would make dates, 5 of "05", and 1.0 of 1 because another row has 2.5."""
    monkeypatch.setattr(loading, "_READ_BYTES", 50)  # so that rows go on in the next part
    monkeypatch.setattr(loading, "_HELD_BYTES", 0 if is_large else 1 << 20)
    written = [
        {"prompt": "a, [ü] \u2028", "answer": "2026-01-02", "mixed": 1, "number": 1},
        {"prompt": "b", "answer": "2026-01-03 10:00:00", "mixed": "05", "number": 2.5},
        {"prompt": "c", "answer": "2026-01-04T10:00:00Z", "mixed": "x", "further": [None, "1"]},
        {"prompt": "d", "answer": None},
    ]
    path = tmp_path / "rows.jsonl"
    dumps = functools.partial(json.dumps, ensure_ascii=False)
    lines = dumps(written, indent=1) if as_list else "\r\n\n".join(map(dumps, written))
    path.write_bytes(lines.encode())
    expected = written  # a row has no column that nobody wrote
    found = load_rows(path)
    assert isinstance(found, list) != is_large
    assert repr(list(found)) == repr(expected)  # 1 is not 1.0
    assert repr([found[-2], *found[:2]]) == repr([expected[-2], *expected[:2]])
    if is_large:
        some = pickle.loads(pickle.dumps(found.select([2, 0])))
        assert repr(list(some)) == repr([expected[2], expected[0]])
        assert some.digest != found.select([0, 2]).digest != found.digest


def test_a_large_file_is_drawn_from_as_the_same_rows_in_memory(tmp_path, monkeypatch):
    """In the same order, by workers, with rows held out, and a later change of it is no silence."""
    written = [{"prompt": f"<{i % 9}>", "number": i} for i in range(20)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, written)))
    small = load_task_rows(path, num_held_out=2)
    monkeypatch.setattr(loading, "_HELD_BYTES", 0)
    large = load_task_rows(path, num_held_out=2)
    assert not isinstance(large[0], list)
    assert ([*large[0]], large[1]) == small
    assert [row["number"] for row in large[1]] == [0, 1]  # a prompt of its own each
    assert [row["number"] for row in large[0]] == [n for n in range(20) if n % 9 > 1]
    made = [
        DataLoadingPrimer(data[0], shuffle=True, num_workers=workers, num_epochs=2)
        for data, workers in ((small, 0), (large, 1))
    ]
    drawn = [[item.row["number"] for item in primer._rows] for primer in made]
    assert drawn[0] == drawn[1]
    assert sorted(drawn[0][:14]) == sorted(row["number"] for row in small[0])
    late = DataLoadingPrimer(large[0])
    path.write_text("\n".join(map(json.dumps, reversed(written))))
    os.utime(path, ns=(0, 0))
    with pytest.raises(ValueError, match=r"no row that can be used.*was changed after it was load"):
        ChatEnv(batch_size=(1,)).append_transform(late).reset()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "rows.jsonl can't be read: it holds no rows"),
        (b"\n\n", "rows.jsonl can't be read: it holds no rows"),
        (b'{"prompt": "a"}\n{"prompt": "b"\n', "line 2: Expecting ',' delimiter"),
        (b'{"prompt": "a"}\n{"prompt": "\\ud800"}\n', "line 2: .*surrogates not allowed"),
        ('{"prompt": "a"}'.encode("utf-16"), "line 1: 'utf-8' codec can't decode byte 0xff"),
        (b'{"prompt": "a"}\n[3]\n', "line 2: .3. is no object with columns"),
        (b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n', "line 2: 'utf-8' codec can't decode byte"),
        (
            b'{"prompt": "a"}\n{"prompt": "b", "to": {"n": 1, "m": 0, "n": 2}}\n',
            "line 2: the key 'n' stands twice in one object",
        ),
        (
            b'[{"prompt": "a"} {"prompt": "b"}]',
            "its list breaks off after byte 16: Expecting value",
        ),
        (b'[{"prompt": "a"}, {"prompt": "b"', "its list breaks off after byte 16: Expecting ','"),
        (b'[{"prompt": "a"}] [', "its list breaks off after byte 16"),
    ],
    ids=[
        *("empty", "blank", "broken", "half a character", "UTF-16", "no object", "Latin-1"),
        *("key twice", "list without a comma", "list without an end", "more after the list"),
    ],
)
def test_a_file_that_cannot_be_read_names_its_line(content, found, tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=found):
        DataLoadingPrimer(path)
    skips = DataOptions(skip_bad_rows=True)
    if "line 2" in found:
        assert list(DataLoadingPrimer(path, options=skips).dataset) == [{"prompt": "a"}]
        assert "1 lines are left out: line 2" in caplog.text
    else:  # nothing is left
        with pytest.raises(ValueError, match=found):
            DataLoadingPrimer(path, options=skips)


@pytest.mark.parametrize(("place", "num_rows"), [(3, 4), (41, 100)], ids=["found early", "drawn"])
def test_a_system_message_of_a_row_is_told_once_by_its_number(place, num_rows, caplog):
    rows = [{"prompt": [{"role": "user", "content": f"<{i}>"}]} for i in range(num_rows)]
    for row, text in ((rows[0], "Be brief."), (rows[place], "Be rude.")):
        row["prompt"].insert(0, {"role": "system", "content": text})
    env = ChatEnv(batch_size=(num_rows,), system_prompt="Be brief.")
    env = env.append_transform(DataLoadingPrimer(rows))
    env.check()
    assert ("system message" in caplog.text) == (place == 3)
    chats = [chat for _ in range(2) for chat in env.reset()["history"].prompt.to_chats()]
    assert [chat[0]["content"] for chat in chats].count("Be rude.") == 2
    (told,) = [r.getMessage() for r in caplog.records if "system message" in r.msg]
    assert f"Row {place} of the data" in told
    assert "of its own, 'Be rude.'" in told
    assert "system_prompt, 'Be brief.'" in told

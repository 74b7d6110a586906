"""Data: every source gives the same rows in the same order, and a run goes on where it stopped."""

import functools
import json
import operator
import os
import re
import signal
import sys
import threading

import cloudpickle
import datasets
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from torchrl_data.batched_object import read_objects
from torchrl_envs import (
    ChatEnv,
    DataExhaustedError,
    DataLoadingPrimer,
    DataOptions,
    PromptLimit,
    RewardFunctions,
    load_rows,
)
from torchrl_envs.datasets.difficulty_pools import IDS_PER_EPOCH
from torchrl_envs.datasets.row_stream import Frontier

ROWS = [{"prompt": f"<{i}>", "number": i} for i in range(7)]


class Restarts:
    """An iterable that starts anew, and nothing else."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        yield from self.rows


def doubled(row):
    return {**row, "number": 2 * row["number"]}


def score(completions):
    return [float(len(completion)) for completion in completions]


def make_env(loader, batch_size=2):
    return ChatEnv(batch_size=batch_size).append_transform(
        Compose(loader, RewardFunctions([score]))
    )


def draws(loader, count):
    """``(number, group id, seed)`` of the next draws, one at a time."""
    env = make_env(loader, loader.group_size)
    result = []
    for _ in range(count):
        batch = env.reset()
        row = read_objects(batch, "row")[0]
        result.append((row["number"], batch["group_id"][0].item(), batch["seed"][0].item()))
    return result


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS[:1])
    ).save_to_disk(str(folder / "splits"))
    return folder


SOURCES = {
    "list": lambda _: ROWS,
    "Dataset": lambda _: datasets.Dataset.from_list(ROWS),
    "DatasetDict": lambda _: datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)),
    "IterableDataset": lambda _: datasets.Dataset.from_list(ROWS).to_iterable_dataset(),
    "iterable": lambda _: Restarts(ROWS),
    "function": lambda _: lambda: iter(ROWS),
    "DataLoader": lambda _: torch.utils.data.DataLoader(ROWS, batch_size=3),
    "DataLoader of lists": lambda _: torch.utils.data.DataLoader(
        ROWS, batch_size=3, collate_fn=list
    ),
    "DataLoader of rows": lambda _: torch.utils.data.DataLoader(ROWS, batch_size=None),
    "saved": lambda folder: folder / "saved",
    "saved splits": lambda folder: str(folder / "splits"),
    "file": lambda folder: str(folder / "rows.jsonl"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_gives_the_same_rows_groups_and_seeds(source, on_disk, tmp_path):
    rows = SOURCES[source](on_disk)
    if source == "file":
        rows = load_rows(rows, load_options={"cache_dir": str(tmp_path)})
    loader = DataLoadingPrimer(rows, group_size=2)
    found = draws(loader, 9)
    assert [number for number, _, _ in found] == [*range(7), 0, 1]
    ids = [*range(7), IDS_PER_EPOCH, IDS_PER_EPOCH + 1]
    assert [group for _, group, _ in found] == ids
    assert len({seed for _, _, seed in found}) == 9
    assert found == draws(DataLoadingPrimer(ROWS, group_size=2), 9)


@pytest.mark.parametrize("path", ["rows.jsonl", "./rows", "/nowhere/rows", "a/b/c", "~/rows"])
def test_what_can_only_be_a_path_is_not_asked_of_the_hub(path, monkeypatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ValueError, match=f"There is no file or folder {re.escape(path)}, from /"):
        DataLoadingPrimer(path)


def test_a_folder_with_files_of_several_kinds_is_refused_and_notes_beside_rows_are_not(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "more.jsonl").write_text('{"prompt": "b"}\n')
    (tmp_path / "notes.txt").write_text("of these rows\n")
    (tmp_path / ".hidden.csv").write_text("prompt\nc\n")
    assert [row["prompt"] for row in load_rows(tmp_path)] == ["b", "a"]
    (tmp_path / "late.csv").write_text("prompt\nd\n")
    with pytest.raises(ValueError, match=r"several kinds.*csv \(late.csv\), json \(more.jsonl\)"):
        load_rows(tmp_path)
    chosen = {"load_options": {"data_files": ["late.csv"], "cache_dir": str(tmp_path / ".cache")}}
    assert [row["prompt"] for row in load_rows(tmp_path, **chosen)] == ["d"]


def test_a_folder_of_files_is_read_from_inside_of_it_too_and_one_without_data_is_named(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    own = tmp_path / "own"
    own.mkdir()
    (own / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    monkeypatch.chdir(own)
    assert list(load_rows(".")) == list(load_rows(own)) == ROWS
    (own / "rows.jsonl").rename(own / "rows.md")
    with pytest.raises(ValueError, match=r"The folder \. can't be read as a data set: .*Give one"):
        load_rows(".")


def test_a_file_is_streamed(on_disk, tmp_path):
    rows = load_rows(
        str(on_disk / "rows.jsonl"), streaming=True, load_options={"cache_dir": str(tmp_path)}
    )
    loader = DataLoadingPrimer(rows)
    assert isinstance(loader.dataset.table, datasets.IterableDataset)
    assert [number for number, _, _ in draws(loader, 8)] == [*range(7), 0]


def test_a_split_is_chosen_by_name(on_disk):
    assert len(load_rows(on_disk / "splits", split="test")) == 1
    assert len(DataLoadingPrimer(on_disk / "splits").dataset) == len(ROWS)
    with pytest.raises(ValueError, match=r"no split 'dev'; there are \['test', 'train'\]"):
        load_rows(on_disk / "splits", split="dev")


def test_names_of_torchrl_mean_the_same():
    loader = torch.utils.data.DataLoader(ROWS, batch_size=2)
    ours = DataLoadingPrimer(ROWS, group_size=3)
    assert draws(DataLoadingPrimer(dataloader=loader, repeats=3), 5) == draws(ours, 5)


# Order --------------------------------------------------------------------------------------------


def shuffled(source, seed=3, **options):
    rows = {
        "list": ROWS,
        "stream": Restarts(ROWS),
        "DataLoader": torch.utils.data.DataLoader(ROWS, batch_size=2, shuffle=True),
    }[source]
    shuffle = source != "DataLoader"
    small = DataOptions(shuffle_buffer_size=4)
    return DataLoadingPrimer(rows, shuffle=shuffle, seed=seed, options=small, **options)


@pytest.mark.parametrize("source", ["list", "stream", "DataLoader"])
def test_a_random_order_is_that_of_the_seed_and_another_one_each_epoch(source):
    first = draws(shuffled(source), 14)
    torch.rand(5)  # what else the program draws changes nothing
    assert draws(shuffled(source), 14) == first
    assert draws(shuffled(source, seed=4), 14) != first
    numbers = [number for number, _, _ in first]
    assert sorted(numbers[:7]) == sorted(numbers[7:]) == list(range(7))
    assert numbers[:7] != numbers[7:] != list(range(7))
    if source != "DataLoader":  # whose rows are known by their place in its order only
        assert [group % IDS_PER_EPOCH for _, group, _ in first] == numbers


@pytest.mark.parametrize(("source", "num_workers"), [("list", 2), ("stream", 1)])
def test_the_order_is_the_same_for_any_number_of_workers(source, num_workers):
    mapped = {"map_row": functools.partial(operator.or_, {"more": 1})}  # workers import it
    state = torch.get_rng_state()
    expected = draws(shuffled(source, **mapped), 40)
    loader = shuffled(source, **mapped, num_workers=num_workers)
    assert loader.columns == ("more", "prompt", "number")
    assert draws(loader, 40) == expected
    assert torch.equal(torch.get_rng_state(), state)
    loader.close()


class Deadly:
    """Rows, of which one kills the process that reads it, and one its first reader only."""

    def __init__(self, mark, parent):
        self.mark = mark
        self.parent = parent

    def __len__(self):
        return 20

    def __getitem__(self, number):
        if os.getpid() != self.parent:
            if number == 5 or (number == 12 and not self.mark.exists()):
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 17:
                threading.Event().wait()
        return {"prompt": "x", "number": number}


def test_E05_a_worker_that_is_killed_costs_the_row_that_kills_it_and_no_other(tmp_path, request):
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # as it does with a program's own
    request.addfinalizer(lambda: cloudpickle.unregister_pickle_by_value(sys.modules[__name__]))
    rows = Deadly(tmp_path / "killed", os.getpid())
    loader = DataLoadingPrimer(
        rows, num_epochs=1, num_workers=1, options=DataOptions(worker_timeout_s=5.0)
    )
    found = draws(loader, 18)
    assert [number for number, _, _ in found] == [n for n in range(20) if n not in (5, 17)]
    reasons = {row.row_id: row.reason for row in loader.skipped.rows}
    assert reasons.keys() == {5, 17}
    assert reasons[5].endswith("its process was ended by a signal: Killed")
    assert reasons[17].endswith("no answer within 5 s")
    loader.close()


def test_what_can_not_be_sent_to_a_worker_is_refused_before_anything_runs():
    lock = threading.Lock()
    with pytest.raises(ValueError, match="sent to worker processes, and these can't be: TypeError"):
        DataLoadingPrimer(ROWS, map_row=lambda row: {**row, "lock": lock}, num_workers=1)


# The end ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ROWS, Restarts(ROWS)], ids=["list", "stream"])
def test_finite_data_end_with_whole_groups_and_nothing_else(rows, scripted):
    loader = DataLoadingPrimer(rows, group_size=2, num_epochs=1)
    policy = scripted(["done"], write_tokens=False)
    collector = LLMCollector(make_env(loader, 6), policy)
    batches = list(collector)
    groups = [[row["group_id"].item() for row in batch.unbind(0)] for batch in batches]
    assert groups == [[0, 0, 1, 1, 2, 2], [3, 3, 4, 4, 5, 5], [6, 6]]
    assert all(row["scorable"] for batch in batches for row in batch.unbind(0))
    assert collector.num_collected == len(policy.engine.served) == 14
    assert loader.ledger == {
        "drawn": 14,
        "ended": 14,
        "abandoned": 0,
        "in_flight": 0,
        "skipped_bad": 0,
        "skipped_too_long": 0,
    }
    with pytest.raises(DataExhaustedError, match="drawn 1 times"):
        collector.collect()


def test_running_rows_outlive_the_end_of_the_data(scripted):
    env = make_env(DataLoadingPrimer(ROWS[:2], num_epochs=1), 2)
    batch = env.reset()
    batch["_reset"] = torch.tensor([[False], [True]])
    batch = env.reset(batch)
    assert read_objects(batch, "stop_reason") == ["", "no_data"]
    assert batch["group_id"].tolist() == [0, -1]
    after = env.step(scripted(["done"])(batch))["next"]
    assert read_objects(after, "stop_reason") == ["answered", "no_data"]
    assert after["scorable"].view(-1).tolist() == [True, False]
    assert read_objects(after, "reward_errors") == ["", ""]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(lambda: [], "has no rows", id="empty list"),
        pytest.param(lambda: Restarts([]), "has no rows", id="empty iterable"),
        pytest.param(lambda: lambda: iter([]), "has no rows", id="function of nothing"),
        pytest.param(lambda: iter(ROWS), "only once.*function that returns", id="iterator"),
        pytest.param(lambda: (row for row in ROWS), "only once", id="generator"),
    ],
)
def test_D06_data_that_can_not_be_walked_through_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        DataLoadingPrimer(make())


def test_D06_an_iterable_that_does_not_start_anew_is_an_error_and_no_endless_loop():
    class Once:
        def __init__(self):
            self.walks = [iter(ROWS), iter(ROWS)]

        def __iter__(self):
            return self.walks.pop(0) if self.walks else iter([])

    class Twice(Once):
        def __init__(self):
            self.walks = [iter(ROWS) for _ in range(4)]

    loader = DataLoadingPrimer(Twice())
    with pytest.raises(RuntimeError, match=r"epoch \d of the data set has no rows, though"):
        draws(loader, 30)


# Bad rows -----------------------------------------------------------------------------------------

BAD = [
    pytest.param({"number": 1}, "it has no column 'prompt'", id="missing"),
    pytest.param({"prompt": None}, "'prompt' must hold strings or lists.*NoneType", id="None"),
    pytest.param({"prompt": 3}, "'prompt' must hold strings or lists of messages, got int", id="3"),
    pytest.param({"prompt": []}, "'prompt' must hold strings or lists of messages", id="empty"),
    pytest.param({"prompt": b"x"}, "got bytes", id="bytes"),
    pytest.param({"prompt": "a\ud800"}, "'prompt' is not text", id="no UTF-8"),
    pytest.param({"prompt": ["a"]}, "'prompt': Message 0 is a str", id="list of strings"),
    pytest.param(
        {"prompt": [{"role": "wizard", "content": "a"}]}, "the unknown role 'wizard'", id="role"
    ),
    pytest.param(
        {"prompt": [{"role": "user", "content": "\udfff"}]}, "is not text", id="no UTF-8 inside"
    ),
    pytest.param("text", "the row is a str, not a dictionary", id="no row"),
]


@pytest.mark.parametrize(("bad", "words"), BAD)
def test_D05_bad_rows_are_named_before_anything_runs(bad, words):
    with pytest.raises(ValueError, match=rf"1 row\(s\) can't be used: row 2: .*{words}") as refused:
        DataLoadingPrimer([*ROWS[:2], bad, *ROWS[3:]])
    assert ".. " not in str(refused.value)  # one full stop ends what is wrong


@pytest.mark.parametrize(("bad", "words"), BAD)
@pytest.mark.parametrize("is_stream", [False, True])
def test_D05_bad_rows_that_show_later_are_skipped_and_listed(bad, words, is_stream, caplog):
    rows = [*ROWS[:2], bad, *ROWS[3:]]
    loader = (
        DataLoadingPrimer(Restarts(rows))
        if is_stream
        else DataLoadingPrimer(rows, options=DataOptions(num_checked_rows=2))
    )
    found = draws(loader, 13)
    assert [number for number, _, _ in found] == [0, 1, 3, 4, 5, 6] * 2 + [0]
    assert [(row.epoch, row.row_id) for row in loader.skipped.rows] == [(0, 2), (1, 2)]
    assert re.search(words, loader.skipped.rows[0].reason)
    assert loader.ledger["skipped_bad"] == 2
    assert caplog.text.count("Row 2 of the data is skipped") == 1


def test_a_mapping_that_fails_for_one_row_costs_that_row():
    def fails(row):
        return {**row, "half": 1 / (row["number"] - 3)}

    with pytest.raises(ValueError, match="row 3: ZeroDivisionError: division by zero"):
        DataLoadingPrimer(ROWS, map_row=fails)
    loader = DataLoadingPrimer(ROWS, map_row=fails, options=DataOptions(skip_bad_rows=True))
    assert [number for number, _, _ in draws(loader, 7)] == [0, 1, 2, 4, 5, 6, 0]


def test_data_in_which_no_row_is_good_end_with_an_error():
    rows = Restarts([ROWS[0], *[{"prompt": None}] * 3])
    loader = DataLoadingPrimer(rows)
    loader.require("nobody", lambda _: "" if not loader.ledger["drawn"] else "not this one")
    with pytest.raises(ValueError, match="a whole pass over the data gave no row"):
        draws(loader, 2)


def test_D07_long_prompts_are_skipped_and_counted(chatml_tokenizer):
    rows = [*ROWS[:2], {"prompt": "again " * 50, "number": 2}, ROWS[3]]

    def length(row):
        text = f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{row}<|im_end|>\n"
        ids = chatml_tokenizer(text + "<|im_start|>assistant\n", add_special_tokens=False)
        return len(ids["input_ids"])

    longest = length(ROWS[0]["prompt"])
    for limit, kept in ((longest, [0, 1, 3]), (longest - 1, [])):
        loader = DataLoadingPrimer(
            rows, num_epochs=1, prompt_limit=PromptLimit(limit, chatml_tokenizer)
        )
        env = ChatEnv(batch_size=1, system_prompt="Be brief.").append_transform(
            Compose(loader, RewardFunctions([score]))
        )
        numbers = []
        try:
            while True:
                numbers.append(read_objects(env.reset(), "row")[0]["number"])
        except DataExhaustedError:
            assert numbers == kept
        assert loader.ledger["skipped_too_long"] == 4 - len(kept)
        assert f"{limit} are allowed" in loader.skipped.rows[0].reason


# Resuming -----------------------------------------------------------------------------------------


def collected(env, policy, count):
    collector = LLMCollector(env, policy)
    rows = [row for _ in range(count) for row in collector.collect().unbind(0)]
    return [(row["group_id"].item(), row["history", "full"].to_chats()) for row in rows]


@pytest.mark.parametrize("source", ["list", "stream", "DataLoader"])
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_resumed_run_draws_what_the_uninterrupted_one_draws(source, stop, scripted, tmp_path):
    policy = scripted(["done"], write_tokens=False)
    whole = collected(make_env(shuffled(source, group_size=2), 4), policy, 6)
    env = make_env(shuffled(source, group_size=2), 4)
    before = collected(env, policy, stop)
    torch.save(env.state_dict(), tmp_path / "state")
    resumed = make_env(
        shuffled(source, group_size=2, num_workers=int(stop == 4 and source == "list")), 4
    )
    resumed.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert before + collected(resumed, policy, 6 - stop) == whole
    resumed.close()


def test_groups_that_were_under_way_are_drawn_again(scripted):
    loader = DataLoadingPrimer(ROWS, group_size=2)
    env = make_env(loader, 4)
    batch = env.reset()
    # Row 2 and 3, group 1, end; group 0 goes on.
    batch["_step"] = torch.tensor([False, False, True, True])
    env.step(scripted(["done"])(batch))
    state = loader.state_dict()
    resumed = DataLoadingPrimer(ROWS, group_size=2)
    resumed.load_state_dict(state)
    assert resumed.ledger["drawn"] == resumed.ledger["ended"] == 2
    assert [number for number, _, _ in draws(resumed, 4)] == [0, 2, 3, 4]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"group_size": 3}, "group_size is 3 here and 2 there"),
        ({"seed": 1}, "seed is 1 here and 0 there"),
        ({"shuffle": True}, "shuffle is True here and False there"),
        ({"dataset": ROWS[:5]}, "num_rows is 5 here and 7 there"),
        ({"dataset": [{**row, "more": 1} for row in ROWS]}, "columns is"),
        ({"dataset": [{**row, "number": 9} for row in ROWS]}, "content is"),
        ({"map_row": doubled}, "content is"),
        ({"dataset": [*ROWS[:2], ROWS[3], ROWS[2], *ROWS[4:]]}, "content is"),
    ],
)
def test_a_position_in_other_data_or_settings_is_refused(changed, words):
    state = DataLoadingPrimer(ROWS, group_size=2).state_dict()
    other = DataLoadingPrimer(**{"dataset": ROWS, "group_size": 2, **changed})
    with pytest.raises(ValueError, match=f"belongs to other data or settings: .*{words}"):
        other.load_state_dict(state)


@pytest.mark.parametrize("held", [0, 1 << 20], ids=["on the disk", "in memory"])
@pytest.mark.parametrize("change", ["a value", "the order"])
def test_a_position_in_rows_of_which_any_changed_is_refused(held, change, tmp_path, monkeypatch):
    monkeypatch.setattr("torchrl_envs.datasets.loading._HELD_BYTES", held)
    rows = [{"prompt": "?", "answer": n} for n in range(100)]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    state = DataLoadingPrimer(path).state_dict()
    os.utime(path)
    DataLoadingPrimer(path).load_state_dict(state)  # the same rows, however old the file is
    changed = [*rows[:61], {"prompt": "?", "answer": 0}, *rows[62:]]
    if change == "the order":
        changed = [*rows[:61], rows[62], rows[61], *rows[63:]]
    path.write_text("\n".join(map(json.dumps, changed)))
    with pytest.raises(ValueError, match=r"content is '\w+' here and '\w+' there\. \(Where a row"):
        DataLoadingPrimer(path).load_state_dict(state)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_frontier_loses_no_group_and_repeats_none(data):
    """Groups 0, 1, ... are drawn and end in any order; a stop at any time loses nothing."""
    frontier, ended, under_way, place, position = Frontier(), [], [], 0, (0, 0)
    for _ in range(data.draw(st.integers(0, 40))):
        what = data.draw(st.sampled_from(["draw", "end", "stop"]))
        if what == "draw":
            while frontier.has_ended((0, place)):
                place += 1
            assert place not in under_way
            frontier.open((0, place), 1)
            frontier.begin((0, place))
            under_way.append(place)
            place += 1
            position = (0, place)
        elif what == "end" and under_way:
            group = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            frontier.close((0, group), "ended")
            ended.append(group)
        elif what == "stop":
            state = json.loads(json.dumps(frontier.state(position)))
            frontier = Frontier()
            _, place = frontier.load(state)
            position, under_way = (0, place), []
    while under_way or sorted(ended) != list(range(len(ended))) or not ended:
        if under_way:
            group = under_way.pop()
            frontier.close((0, group), "ended")
            ended.append(group)
            continue
        while frontier.has_ended((0, place)):
            place += 1
        frontier.open((0, place), 1)
        frontier.begin((0, place))
        under_way.append(place)
        place += 1
    assert sorted(ended) == list(range(len(ended)))
    assert frontier.counts["ended"] == len(ended)


# Rows of tables -----------------------------------------------------------------------------------


def of_shape(shape):
    """Values of a shape: a strategy of leaves, a list of one shape, or keys that may be absent."""
    if isinstance(shape, list):
        return st.lists(of_shape(shape[0]), max_size=3)
    if isinstance(shape, dict):
        return st.fixed_dictionaries({}, optional={k: of_shape(each) for k, each in shape.items()})
    return shape


names = st.sampled_from(["a", "b", "key", "name", "arguments", "content"])
leaves = st.sampled_from([st.text("xy", max_size=3), st.integers(-9, 9), st.booleans()])
shapes = st.recursive(
    leaves,
    lambda inner: (
        inner.map(lambda each: [each]) | st.dictionaries(names, inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def rows_of_one_table(draw):
    """Rows in which any key may be absent; the first one says which columns there are."""
    columns = {"prompt": st.text("pq", min_size=1, max_size=3)}
    columns |= {
        f"column {name}": of_shape(draw(shapes)) for name in "xyz"[: draw(st.integers(1, 3))]
    }
    optional = {name: each for name, each in columns.items() if name != "prompt"}
    later = st.fixed_dictionaries({"prompt": columns["prompt"]}, optional=optional)
    return [draw(st.fixed_dictionaries(columns)), *draw(st.lists(later, min_size=1, max_size=4))]


@settings(max_examples=60)
@given(rows_of_one_table())
def test_a_table_gives_the_rows_that_were_put_into_it(tmp_path_factory, written):
    """Arrow gives each dictionary all keys that one at its place has, with nulls."""
    table = datasets.Dataset.from_list(written)
    assert list(load_rows(table)) == written
    assert [item.row for item in DataLoadingPrimer(table, num_epochs=1)._rows] == written
    folder = tmp_path_factory.mktemp("table")
    try:
        table.to_parquet(folder / "rows.parquet")
    except pyarrow.ArrowNotImplementedError:
        return  # Parquet has no dictionary without any key
    options = {"load_options": {"cache_dir": str(folder)}}
    assert list(load_rows(folder / "rows.parquet", **options)) == written
    assert list(load_rows(folder / "rows.parquet", streaming=True, **options)) == written


def test_what_is_written_as_null_stays_where_it_can_be_told(tmp_path):
    row = {"prompt": "a", "tools": [{"default": None, "enum": [1, None]}], "note": None}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    assert list(load_rows(path)) == [row]
    features = datasets.Features({"prompt": datasets.Value("string"), "tools": datasets.Json()})
    own = {name: row[name] for name in features}
    assert list(load_rows(datasets.Dataset.from_list([own], features=features))) == [own]

"""Tables in files: every value as it is written, and no row that somebody did not write."""

import csv
import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_envs import load_rows
from torchrl_envs.datasets import loading
from torchrl_envs.datasets.csv_rows import rows_of_csv


@pytest.fixture
def written(tmp_path):
    def write(text, name="rows.csv"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_what_looks_like_a_number_or_like_nothing_stays_as_it_is_written(written):
    values = ["00501", "1.10", "True", "NA", "None", "1234567890123456789012"]
    rows = load_rows(written("prompt,answer\n" + "".join(f"what,{each}\n" for each in values)))
    assert [row["answer"] for row in rows] == values


def test_an_empty_field_is_a_missing_column(written):
    rows = load_rows(written("prompt,answer\nSay 7,7\nnothing,\n"))
    assert list(rows) == [{"prompt": "Say 7", "answer": "7"}, {"prompt": "nothing"}]


def test_a_tsv_has_tabs(written):
    text = "prompt\tanswer\nName three, please\t7\n"
    expected = [{"prompt": "Name three, please", "answer": "7"}]
    assert list(load_rows(written(text, "rows.tsv"))) == expected
    some = load_rows(written(text, "rows.tsv"), split="train[:1]")  # by the loader of datasets
    assert list(some) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt,answer\nok,1\nHello, what is 1+1?,2\n", "line 3: it has 3 fields, and 2 columns"),
        ("prompt,answer\nshort\n", "line 2: it has 1 fields, and 2 columns are named"),
        ('prompt,answer\n"a\nb",1\n"x"y,2\n', "line 4: ',' expected after '\"'"),
        ('prompt,answer\nok,1\n"never closed,2\n', "line 3: unexpected end of data"),
        (b"prompt,answer\nok,1\n\xff,2\n", "line 3: 'utf-8' codec can't decode"),
        ("prompt,prompt\na,b\n", r"line 1: the columns need names, each another one, got \["),
        ("prompt,answer\n", "it holds no rows"),
        ("", "it holds no rows"),
    ],
)
def test_what_can_not_be_read_is_told_with_its_line(written, text, words):
    with pytest.raises(ValueError, match=words):
        load_rows(written(text))


def test_rows_that_can_not_be_read_are_left_out_where_that_is_asked_for(written, caplog):
    path = written('prompt,answer\nok,1\na, b,2\n"x"y,3\n5" pipe,4\n')
    with caplog.at_level(logging.WARNING):
        rows = load_rows(path, skip_bad_rows=True)
    assert list(rows) == [{"prompt": "ok", "answer": "1"}, {"prompt": '5" pipe', "answer": "4"}]
    assert "2 lines are left out: line 3: it has 3 fields" in caplog.text


def test_the_index_that_pandas_writes_has_its_name(written):
    (row,) = load_rows(written(",prompt\n0,hi\n"))
    assert row == {"Unnamed: 0": "0", "prompt": "hi"}


def test_a_stream_has_the_same_rows(written):
    path = written("prompt,answer\nzip,00501\nnothing,\n")
    assert list(load_rows(path, streaming=True)) == list(load_rows(path))


def test_rows_of_a_large_file_stay_on_the_disk_and_a_change_is_told(written, monkeypatch):
    monkeypatch.setattr(loading, "_HELD_BYTES", 0)
    path = written("prompt\na\nb\n")
    rows = load_rows(path)
    assert rows[1] == {"prompt": "b"}
    path.write_text("prompt\nlonger\nrows\n")
    with pytest.raises(ValueError, match="was changed after it was loaded"):
        rows[0]


@given(
    st.lists(
        st.tuples(*(st.text(st.characters(exclude_categories=["Cs"])) for _ in range(2))),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([",", "\t"]),
)
def test_any_text_that_was_written_by_the_rules_is_read_back(tmp_path_factory, rows, separator):
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=separator, quoting=csv.QUOTE_ALL)
    writer.writerows([("a", "b"), *rows])
    path = tmp_path_factory.mktemp("csv") / ("x.csv" if separator == "," else "x.tsv")
    path.write_bytes(text.getvalue().encode())
    expected = [{k: v for k, v in zip("ab", row, strict=True) if v} for row in rows]
    assert list(rows_of_csv(path)) == expected


def test_a_list_without_rows_is_told_as_a_file_without_lines_is(written):
    for text in ("[]", "[ ]\n", ""):
        with pytest.raises(ValueError, match="it holds no rows"):
            load_rows(written(text, "rows.json"))
    with pytest.raises(ValueError, match="its list breaks off"):
        load_rows(written('[{"prompt": "a"},]', "rows.json"))

"""Whatever a tool returns or raises, the model reads valid text of bounded length."""

import json
import math
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from torchrl_data.images import decoded, image_part
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.processes.tool_processes import _handle
from torchrl_envs.tool_results import MAX_ERROR_BYTES, as_content, result_text, value_content


class Point(NamedTuple):
    x: int
    y: int


@dataclass
class Data:
    x: int


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.binary(max_size=30)
    | st.text(st.characters(codec=None), max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=0, max_size=4), st.sampled_from([np, torch]))
def test_an_array_is_shown_as_the_list_of_its_items(shape, library):
    count = math.prod(shape)
    array = library.arange(count).reshape(shape)
    assert result_text(Outcome(array)) == json.dumps(array.tolist())
    assert result_text(Outcome({"x": [array]})) == json.dumps({"x": [array.tolist()]})


@pytest.mark.parametrize("shape", [(20_000_000,), (2, 10_000_000), (10_000_000, 2)], ids=str)
def test_a_large_array_is_made_text_as_far_as_it_is_shown(shape):
    array = np.zeros(shape, np.float32)
    tracemalloc.start()
    text = result_text(Outcome(array), max_bytes=1000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert text.startswith("[" * len(shape) + "0.0, 0.0")
    assert text.endswith("[... the rest was cut]")
    assert peak < 2**20


@settings(max_examples=300, deadline=None)
@given(VALUES, st.integers(1, 40))
def test_any_value_is_text_of_bounded_length(value, cap):
    text = result_text(Outcome(value), max_bytes=cap)
    head, mark, rest = text.partition("\n[... ")
    if mark and rest.endswith(("were cut]", "was cut]")):
        assert len(head.encode("utf-8")) <= cap
    else:
        assert len(text.encode("utf-8")) <= cap


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param("a" * 10, "a" * 8 + "\n[... 2 more characters were cut]", id="text"),
        pytest.param("é" * 5, "é" * 4 + "\n[... 1 more characters were cut]", id="two bytes each"),
        pytest.param("aé€€", "aé€\n[... 1 more characters were cut]", id="no half a character"),
        pytest.param(b"a" * 10, "a" * 8 + "\n[... 2 more bytes were cut]", id="bytes"),
        pytest.param(b"\xffok", "\N{REPLACEMENT CHARACTER}ok", id="not UTF-8"),
        pytest.param(memoryview(b"ab"), "ab", id="memory"),
        pytest.param(None, "null", id="nothing"),
        pytest.param({2, 1}, "[1, 2]", id="set"),
        pytest.param({"é": [1, 2]}, '{"é": [\n[... the rest was cut]', id="JSON is cut too"),
        pytest.param([float("nan")], "[nan]", id="NaN is not JSON"),
        pytest.param(Point(1, 2), "[1, 2]", id="named tuple"),
        pytest.param(Data(1), '{"x": 1}', id="dataclass"),
        pytest.param(torch.tensor([1, 2]), "[1, 2]", id="tensor"),
        pytest.param(Path("/x"), "/x", id="str"),
        pytest.param([Path("x")], '["x"]', id="data stay JSON around what is not"),
        pytest.param(
            Path("/aéaéaéaé"), "/aéaéa\n[... 3 more characters were cut]", id="a long str"
        ),
    ],
)
def test_values_as_text(value, expected):
    assert result_text(Outcome(value), max_bytes=8) == expected


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(codec=None), max_size=50) | st.just("x" * 10_000))
def test_any_error_is_a_json_object(message):
    text = result_text(Outcome(error=OSError(message)))
    said = json.loads(text)["error"]
    assert said.startswith("OSError: ")
    assert len(said.encode("utf-8")) < MAX_ERROR_BYTES + 60


def test_an_error_that_can_not_be_shown_is_named():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    expected = {"error": "Odd: <Odd that can't be shown: RuntimeError>"}
    assert json.loads(result_text(Outcome(error=Odd()))) == expected


def test_what_contains_itself_is_shown_all_the_same():
    loop = []
    loop.append(loop)
    assert result_text(Outcome(loop)) == "[[...]]"


# Images of tools ---------------------------------------------------------------------------------

RED = Image.new("RGB", (4, 2), "red")
PART = image_part(RED)


def text_part(text):
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(RED, [PART], id="a picture"),
        pytest.param(PART, [PART], id="a part"),
        pytest.param({"type": "image", "image": RED}, [PART], id="a part with a picture"),
        pytest.param(
            ("a", RED, {"b": 1}), [text_part("a"), PART, text_part('{"b": 1}')], id="mixed"
        ),
        pytest.param([text_part("a"), PART], [text_part("a"), PART], id="parts"),
        pytest.param([], "[]", id="a list without images stays JSON"),
        pytest.param([text_part("a")], '[{"type": "text", "text": "a"}]', id="as do texts alone"),
        pytest.param(
            ["abcde", RED, "fghij", "k"],
            [
                text_part("abcde"),
                PART,
                text_part("fgh\n[... 2 more characters were cut]"),
                text_part("\n[... 1 more characters were cut]"),
            ],
            id="the cap is of all text together",
        ),
    ],
)
def test_images_stay_images(value, expected):
    cap = 8 if isinstance(value, list) and "abcde" in value else 40
    assert value_content(value, max_bytes=cap) == expected
    assert as_content(lambda: value, cap)() == expected
    [kind, said] = json.loads(_handle({"tool": lambda: value}, cap, b'["tool", {}]'))
    assert (kind, said) == ("value", expected), "from another process"
    for part in expected if isinstance(expected, list) else ():
        assert part["type"] == "text" or decoded(part["data"]).tobytes() == RED.tobytes()


@pytest.mark.parametrize("name", ["image", "url"])
@pytest.mark.parametrize("place", ["{}", "file://{}"])
def test_a_tool_shows_no_file_that_text_names(tmp_path, name, place):
    """The text might be the model's own; who means the file gives its path as a path."""
    path = tmp_path / "a.png"
    RED.save(path)
    with pytest.raises(ValueError, match="not as text that names a file"):
        value_content({"type": "image", name: place.format(path)})
    assert value_content({"type": "image", "image": path}) == [PART | {"data": PART["data"]}]

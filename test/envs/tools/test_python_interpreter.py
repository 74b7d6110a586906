"""Python that the policy writes: run, answered, and no business of other rows."""

import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.envs.transforms import Compose

from torchrl_data.conversation_io import read_conversations
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    Episode,
    PythonInterpreter,
    RewardFunctions,
    Sandbox,
    SandboxLimits,
    SandboxSession,
    StepCounter,
)
from torchrl_envs.code_blocks import CodeBlock, code_blocks

pytestmark = pytest.mark.usefixtures("no_leaks")


def zero(completions):
    return [0.0] * len(completions)


def make_env(interpreter, *, size=1, max_steps=6):
    rows = [{"prompt": f"<{i}>"} for i in range(size)]
    parts = Compose(
        DataLoadingPrimer(rows),
        interpreter,
        StepCounter(max_steps=max_steps),
        RewardFunctions([zero]),
    )
    return ChatEnv(batch_size=size).append_transform(parts)


def answers(end, row=0):
    messages = read_conversations(end, "prompt", who="test").messages(row)
    return [(m["role"], m["content"]) for m in messages[1:] if m["role"] != "assistant"]


def block(code):
    return f"Here it is:\n```python\n{code}\n```"


def test_the_answer_of_a_block_is_a_message_of_its_own(scripted, play):
    square = "def square(x):\n    return x * x\nprint('testing with input 2:', square(2))"
    turn = f"{block(square)}\nand\n{block('1 / 0')}\nand\n```py\nprint(3)\n```\n```sh\nls\n```"
    interpreter = PythonInterpreter()
    env = make_env(interpreter)
    (end,) = play(env, scripted([turn, "done"]))
    assert interpreter.sandbox.isolation in ("bubblewrap", "landlock")
    # For its record, which the viewer shows.
    (episode,) = end["episode"]
    assert episode.metrics["logged_extra"] == {"isolation": interpreter.sandbox.isolation}
    assert answers(end) == [
        ("tool", "Code block 1 executed successfully:\ntesting with input 2: 4\n"),
        (
            "tool",
            "Code block 2 failed:\nTraceback (most recent call last):\n"
            '  File "<python>", line 1, in <module>\n    1 / 0\n    ~~^~~\n'
            "ZeroDivisionError: division by zero\n",
        ),
        ("tool", "Code block 3 executed successfully:\n3\n"),
    ]
    assert end["num_tool_calls"].tolist() == [[3]]
    assert end["num_tool_errors"].tolist() == [[1]]
    env.close()


def test_the_conversation_as_a_chat_template_shows_it(chatml_tokenizer):
    """TorchRL's example of a conversation that is stepped by hand."""
    env = ChatEnv(
        tokenizer=chatml_tokenizer, system_prompt="You can execute Python code.", batch_size=[1]
    ).append_transform(PythonInterpreter())
    data = env.reset(TensorDict(text="Square a number.", batch_size=[1]))
    said = "Here is code:\n```python\nprint('with input 2:', 2**2)\n```\n<|im_end|>\n"
    data.set("text_response", [said])
    _, following = env.step_and_maybe_reset(data)
    assert following["history"].apply_chat_template(
        tokenizer=chatml_tokenizer, chat_template_name="qwen"
    ) == [
        "<|im_start|>system\nYou can execute Python code.<|im_end|>\n"
        "<|im_start|>user\nSquare a number.<|im_end|>\n"
        "<|im_start|>assistant\nHere is code:\n```python\nprint('with input 2:', 2**2)\n```"
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nCode block 1 executed successfully:\n"
        "with input 2: 4\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ]
    env.close()


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        pytest.param("pass", "executed successfully:\n", id="nothing printed"),
        pytest.param("print('x', end='')", "executed successfully:\nx\n", id="no last line end"),
        pytest.param(
            "import sys; print('a'); print('b', file=sys.stderr)",
            "executed successfully:\na\nb\n",
            id="warnings are kept",
        ),
        pytest.param("import os; os._exit(3)", "failed:\nExit code 3.\n", id="an exit"),
        pytest.param(
            "import os; os.kill(os.getpid(), 9)", "failed:\nKilled by signal 9.\n", id="a signal"
        ),
        pytest.param(
            "print('a', flush=True)\nwhile True: pass",
            "failed:\na\nStopped: it did not end within 1 s.\n",
            id="a hang",
        ),
        pytest.param(
            "print('x' * 5000)",
            "executed successfully:\n" + "x" * 100 + "\n[... 4901 more characters were cut]",
            id="too much",
        ),
        pytest.param("#" * 2_000_000, "ValueError: The program has 2000000", id="a huge program"),
    ],
)
def test_how_a_run_is_put(code, expected):
    interpreter = PythonInterpreter(timeout_s=1.0, tool_role="user", max_result_bytes=100)
    (job,) = interpreter.read_turn(Episode(), block(code))
    try:
        outcome = job.phrase(_outcome(job.call))
    finally:
        interpreter.close()
    assert outcome.message["role"] == "user"
    assert expected in outcome.message["content"]
    assert outcome.is_error == ("success" not in expected)
    assert outcome.position == len("Here it is:\n")


def _outcome(call):
    from torchrl_envs.concurrency.outcome import Outcome

    try:
        return Outcome(call())
    except ValueError as error:
        return Outcome(error=error)


def test_a_block_that_is_not_closed_is_answered_and_not_run(scripted, play):
    env = make_env(PythonInterpreter())
    (end,) = play(env, scripted(["```python\nprint(1)", "done"]))
    assert answers(end) == [
        ("tool", "Code block 1 failed:\nIt is not closed with ```, so it was not run.")
    ]
    env.close()


def test_variables_live_for_one_episode_and_one_row(scripted, play, own_children):
    env = make_env(PythonInterpreter(persistent=True, timeout_s=1.0), size=2)
    first = [
        f"{block('x = 1')}\n{block('x += 1')}",
        block("print(x)"),
        block("while True: pass"),
        block("print(x)"),
        "done",
    ]
    policy = scripted({"<0>": first, "<1>": [block("print('x' in dir())"), "done"]})
    ends = play(env, policy)
    started = "Code block 1 executed successfully:\n"
    assert answers(ends[1], 1) == [("tool", f"{started}False\n")]
    said = [content for _, content in answers(ends[0], 0)]
    assert said[:3] == [started, "Code block 2 executed successfully:\n", f"{started}2\n"]
    assert said[3] == (
        "Code block 1 failed:\nStopped: it did not end within 1 s.\n"
        "The interpreter was restarted: all variables are gone.\n"
    )
    assert "NameError: name 'x' is not defined" in said[4]
    assert own_children(recursive=False) == []  # released when the episodes ended
    # A row that begins anew has a new interpreter, also if it never finished.
    batch = env.reset()
    batch = env.step(policy(batch))["next"]
    assert len(own_children(recursive=False)) == 2
    env.reset()
    assert own_children(recursive=False) == []
    env.close()


def test_closing_ends_the_interpreters(scripted, own_children):
    env = make_env(PythonInterpreter(persistent=True), size=2)
    batch = env.reset()
    env.step(scripted([block("x = 1")])(batch))
    assert len(own_children(recursive=False)) == 2
    env.close()
    assert own_children(recursive=False) == []


def test_an_interpreter_that_does_not_close_is_logged(caplog):
    def close():
        raise OSError("stays")

    interpreter = PythonInterpreter(persistent=True)
    env = make_env(interpreter)
    env.reset()
    session = env.resources_in(0).get(interpreter)
    assert isinstance(session, SandboxSession)
    env.resources_in(0).add("test", session, close=close)
    env.close()
    assert "SandboxSession.close failed" in caplog.text
    assert "OSError: stays" in caplog.text


def test_as_a_tool(scripted, call_text, play):
    env = make_env(PythonInterpreter(offer_tool=True, read_code_blocks=False, persistent=True))
    turns = [
        call_text("python", code="x = 6") + call_text("python", code="print(x * 7)"),
        call_text("python", code="1 / 0") + block("print('not read')"),
        call_text("python", code=5),
        "done",
    ]
    (end,) = play(env, scripted(turns))
    said = [content for _, content in answers(end)]
    assert said[:2] == ["", "42\n"]
    assert "ZeroDivisionError" in said[2]
    assert "5 is not of type 'string'" in said[3]
    assert len(said) == 4
    assert end["num_tool_errors"].tolist() == [[2]]
    prompt = read_conversations(env.reset(), "prompt", who="test")
    assert prompt.tools(0)[0]["function"]["name"] == "python"
    env.close()


def test_rows_run_at_once_in_one_sandbox_and_a_hang_holds_up_nobody(scripted, play):
    sandbox = Sandbox(limits=SandboxLimits(num_processes=4))
    env = make_env(PythonInterpreter(sandbox=sandbox, timeout_s=1.5), size=8)
    script = {f"<{i}>": [block(f"import time; time.sleep(0.5); print({i})"), "x"] for i in range(7)}
    script["<7>"] = [block("while True: pass"), "x"]
    policy = scripted(script)
    started = time.monotonic()
    ends = play(env, policy)
    assert time.monotonic() - started < 4.5  # in turn it would be 5 s at least
    for i in range(7):
        assert answers(ends[i], i) == [("tool", f"Code block 1 executed successfully:\n{i}\n")]
    assert "did not end within 1.5 s" in answers(ends[7], 7)[0][1]
    env.close()


def test_settings():
    with pytest.raises(ValueError, match="no code would ever run"):
        PythonInterpreter(read_code_blocks=False)
    with pytest.raises(ValueError, match="timeout_s"):
        PythonInterpreter(timeout_s=0)
    copy = pickle.loads(pickle.dumps(PythonInterpreter(persistent=True)))
    assert copy.persistent


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na\n```", [("a", "python", 0, True)]),
        ("```Python3 title=x\na\n\nb\n```  \nrest", [("a\n\nb", "python3", 0, True)]),
        ("1. x\n   ```py\n   a\n     b\n  c\n   ```", [("a\n  b\nc", "py", 5, True)]),
        ("````md\n```python\na\n```\n````", [("```python\na\n```", "md", 0, True)]),
        ("```\na\n```\n```python\nb\n```", [("a", "", 0, True), ("b", "python", 10, True)]),
        ("```python```\nx", []),
        ("```python\na\r\n```", [("a\r", "python", 0, True)]),
        ("x\n```python\na\n```b\n", [("a\n```b\n", "python", 2, False)]),
        ("", []),
    ],
)
def test_code_blocks(text, expected):
    assert list(code_blocks(text)) == [CodeBlock(*block) for block in expected]


@given(st.text(alphabet="`py \n\t~x", max_size=60))
def test_code_blocks_are_total_and_where_they_say(text):
    blocks = list(code_blocks(text))
    assert all(text[b.position :].lstrip(" \t").startswith("```") for b in blocks)
    assert [b.is_closed for b in blocks[:-1]] == [True] * (len(blocks) - 1)
    positions = [b.position for b in blocks]
    assert positions == sorted(set(positions))


def test_code_blocks_take_linear_time():
    list(code_blocks("```python\n" * 200_000))
    list(code_blocks("`" * 1_000_000))
    list(code_blocks(" " * 1_000_000 + "```"))

"""Tools of a real MCP server: in memory, in a child process over stdio, and over HTTP."""

import asyncio
import base64
import importlib.util
import json
import pickle
import signal
import socket
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import psutil
import pytest
from mcp.server import MCPServer
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ListToolsResult,
    TextContent,
    Tool,
    ToolListChangedNotification,
)
from PIL import Image
from torchrl.envs.transforms import Compose

from collectors import LLMCollector
from torchrl_data.batched_object import read_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_envs import (
    ChatEnv,
    DataLoadingPrimer,
    Episode,
    MCPToolTransform,
    RewardFunctions,
    StepCounter,
)
from torchrl_envs.tools.mcp_connection import MCPConnection, MCPServerError, MCPToolsChangedError
from torchrl_modules import TransformersWrapper

SERVER = Path(__file__).parent / "mcp_server_for_tests.py"
STDIO = {"command": sys.executable, "args": [str(SERVER)]}
pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.timeout(120),
    # The library's in-memory streams complain where a session was cut off in a deadline.
    pytest.mark.filterwarnings("ignore:Unclosed <MemoryObject:ResourceWarning"),
]


def build_server():
    spec = importlib.util.spec_from_file_location("mcp_server_for_tests", SERVER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.build()


@pytest.fixture
def http_server():
    """A server over HTTP on the loopback; gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SERVER), str(port)])
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            break
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/mcp", process
    process.kill()
    process.wait()


@pytest.fixture
def make_env():
    """Builds environments with MCP tools, closed after the test."""
    made = []

    def make(servers, *, size=1, max_steps=6, **kwargs):
        rows = [{"prompt": f"<{i}>"} for i in range(size)]
        tools = MCPToolTransform(servers, **kwargs)
        zero = RewardFunctions([lambda completions: [0.0] * len(completions)])
        parts = Compose(DataLoadingPrimer(rows), tools, zero, StepCounter(max_steps=max_steps))
        made.append(ChatEnv(batch_size=size).append_transform(parts))
        return made[-1]

    yield make
    for env in made:
        env.close()


def answers(end, row=0):
    messages = read_conversations(end, "prompt", who="test").messages(row)
    return [m["content"] for m in messages if m["role"] == "tool"]


@pytest.mark.parametrize("kind", ["memory", "stdio", "http"])
def test_tools_are_listed_shown_checked_and_called(
    make_env, scripted, call_text, play, kind, request
):
    if kind == "http":
        server = {"url": request.getfixturevalue("http_server")[0], "headers": {"X-Test": "1"}}
    else:
        server = build_server() if kind == "memory" else STDIO
    env = make_env({"test": server}, max_result_bytes=1000)
    schemas = read_conversations(env.reset(), "prompt", who="test").tools(0)
    shown = {s["function"]["name"]: s["function"] for s in schemas}
    assert shown["add"]["description"] == "Add two numbers."
    assert shown["add"]["parameters"]["required"] == ["a"]
    turn = (
        call_text("add", a=1, b=2)
        + call_text("add", a="x")
        + call_text("fail")
        + call_text("say", text="y", times=2000)
        + call_text("add", a=5)
    )
    (end,) = play(env, scripted([turn, "done"]))
    good, wrong, failed, long, other = answers(end)
    assert (good, other) == ("3", "6")
    assert json.loads(wrong)["error"] == "add: arguments['a']: 'x' is not of type 'integer'"
    assert json.loads(failed)["error"].startswith("MCPToolError: Error executing tool fail")
    assert long == "y" * 1000 + "\n[... 1000 more characters were cut]"
    assert end["num_tool_errors"].tolist() == [[2]]


class Kinds:
    """A server whose tools answer with what is not text."""

    red = Image.new("RGB", (2, 2), "red")

    def __init__(self):
        self.server = MCPServer("kinds", log_level="CRITICAL")
        for tool in (self.picture, self.embedded, self.broken, self.sound):
            self.server.tool()(tool)

    def png(self):
        self.red.save(file := BytesIO(), format="PNG")
        return base64.b64encode(file.getvalue()).decode()

    def picture(self) -> list[ContentBlock]:
        image = ImageContent(type="image", data=self.png(), mime_type="image/jpeg")  # it is a PNG
        return [TextContent(type="text", text="seen:"), image]

    def embedded(self) -> list[ContentBlock]:
        its = {"uri": "file:///red.png", "blob": self.png(), "mime_type": "image/png"}
        return [EmbeddedResource(type="resource", resource=BlobResourceContents(**its))]

    def broken(self) -> list[ContentBlock]:
        data = base64.b64encode(b"no image").decode()
        return [ImageContent(type="image", data=data, mime_type="image/png")]

    def sound(self) -> list[ContentBlock]:
        return [AudioContent(type="audio", data="AAAA", mime_type="audio/wav")]


@pytest.mark.parametrize("images", [False, True])
def test_images_are_shown_to_a_policy_that_sees_them(make_env, scripted, call_text, play, images):
    kinds = Kinds()
    env = make_env({"kinds": kinds.server}, images=images)
    calls = "".join(map(call_text, ("picture", "embedded", "broken", "sound")))
    (end,) = play(env, scripted([calls, "done"]))
    picture, embedded, broken, sound = answers(end)
    assert sound == "[audio: audio/wav]"
    if not images:
        assert picture == "seen:\n[image: image/jpeg]"
        assert (embedded, broken) == ("[resource: image/png]", "[image: image/png]")
        return
    image = {"type": "image", "data": kinds.png(), "mime_type": "image/png"}
    assert picture == [{"type": "text", "text": "seen:"}, image]
    assert embedded == [image]
    assert "8 bytes are no image" in json.loads(broken)["error"]
    assert end["num_tool_errors"].tolist() == [[1]]


def test_images_for_a_policy_without_eyes_are_refused(make_env, chatml_tokenizer, make_tiny_model):
    env = make_env({"kinds": Kinds().server}, images=True)
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer)
    with pytest.raises(ValueError, match="this policy reads text alone"):
        LLMCollector(env, policy)


def test_calls_of_all_rows_overlap_on_one_session(make_env, scripted, call_text):
    env = make_env({"test": build_server()}, size=8)
    batch = scripted([call_text("pause", seconds=0.5) * 2])(env.reset())
    start = time.monotonic()
    batch = env.step(batch)["next"]
    assert time.monotonic() - start < 4.0, "one after the other they would take 8 s"
    assert answers(batch, 7) == ["rested", "rested"]


@pytest.mark.parametrize(("session", "expected"), [("shared", [1, 2, 3, 4]), ("row", [1, 1, 2, 2])])
def test_one_session_for_all_rows_or_one_for_each(
    make_env, scripted, call_text, play, own_children, session, expected
):
    env = make_env({"test": STDIO}, size=2, session=session)
    ends = play(env, scripted([call_text("count"), call_text("count"), "done"]))
    counts = [int(text) for row in range(2) for text in answers(ends[row], row)]
    assert sorted(counts) == expected
    num_left = 2 if session == "shared" else 0  # the server and its keeper
    assert len(own_children()) == num_left, "a row's server ends with it"


def test_a_row_whose_server_can_not_be_started_ends_alone(make_env, scripted, call_text, tmp_path):
    script = tmp_path / "server.py"
    script.write_text(SERVER.read_text())
    env = make_env({"test": {**STDIO, "args": [str(script)]}}, session="row", timeout_s=20)
    script.unlink()
    batch = env.step(scripted(["x"])(env.reset()))["next"]
    (reason,) = read_objects(batch, "stop_reason")
    assert reason.startswith("environment_error: MCP server test: MCPServerError: the MCP server")


def test_allowed_tools_and_prefixes():
    tools = MCPToolTransform(
        {"a": build_server(), "b": build_server()}, prefix_names=True, allow=["a_add", "b_pid"]
    )
    assert tools.tool_names() == {"a_add": "the MCP server 'a'", "b_pid": "the MCP server 'b'"}
    assert list(tools.tools_of(Episode())) == ["a_add", "b_pid"]
    tools.close()


@pytest.mark.parametrize(
    ("servers", "settings", "kind", "message"),
    [
        pytest.param({}, {}, ValueError, "at least one server", id="no server"),
        pytest.param(
            {"a": build_server, "b": build_server},
            {},
            ValueError,
            "Two tools are named 'add': of the MCP servers 'a' and 'b'",
            id="same names",
        ),
        pytest.param(
            {"a": build_server}, {"allow": ["ad"]}, ValueError, r"allow names \['ad'\]", id="allow"
        ),
        pytest.param(
            {"a": {"command": "/no/such/file"}},
            {},
            MCPServerError,
            "'a' can't be reached: there is no program '/no/such/file'",
            id="none",
        ),
        pytest.param(
            {"a": {"uri": "http://127.0.0.1:9/mcp"}},
            {},
            ValueError,
            r"'a' is described by \['uri'\]. Give 'command'",
            id="another key",
        ),
        pytest.param(
            {"a": {"command": sys.executable, "arguments": []}},
            {},
            ValueError,
            r"described by \['arguments', 'command'\]",
            id="another key beside",
        ),
        pytest.param(
            {"a": {"command": sys.executable, "args": ["-c", ""]}},
            {},
            MCPServerError,
            "'a' can't be reached",
            id="ends at once",
        ),
        pytest.param(
            {"a": "http://127.0.0.1:9/mcp"},
            {},
            MCPServerError,
            "'a' can't be reached",
            id="no HTTP",
        ),
        pytest.param({"a": build_server}, {"session": "x"}, ValueError, "session='shared'", id="x"),
    ],
)
def test_what_can_not_work_shows_at_construction(servers, settings, kind, message):
    with pytest.raises(kind, match=message):
        MCPToolTransform(servers, **settings)


# Faults -------------------------------------------------------------------------------------------


STARTS_A_STUBBORN_SERVER = """
import sys, time
from torchrl_envs import MCPToolTransform
tools = MCPToolTransform({{"a": {{"command": sys.executable, "args": [{server!r}, "stubborn"]}}}})
sys.stdout.write("started\\n")
sys.stdout.flush()
time.sleep(600)
"""


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.weekly)]
)
def test_S02_a_server_that_ignores_its_end_does_not_outlive_the_program(number):
    program = STARTS_A_STUBBORN_SERVER.format(server=str(SERVER))
    running = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert running.stdout.readline() == b"started\n"
    inside = psutil.Process(running.pid).children(recursive=True)
    assert sorted(p.name() for p in inside)[-1] == "sleep"
    assert len(inside) == 3, "a keeper, the server and its child"
    running.send_signal(number)
    running.communicate()
    assert psutil.wait_procs(inside, timeout=30)[1] == []


def test_a_stubborn_server_ends_with_its_session(own_children):
    server = {"command": sys.executable, "args": [str(SERVER), "stubborn"]}
    tools = MCPToolTransform({"a": server})
    inside = own_children()
    assert len(inside) == 3
    tools.close()
    assert psutil.wait_procs(inside, timeout=30)[1] == []


def test_T10_mcp_server_never_answers():
    mute = {"command": sys.executable, "args": [str(SERVER), "mute"]}
    start = time.monotonic()
    with pytest.raises(MCPServerError, match=r"the MCP server 'a' did not answer within 1 s"):
        MCPToolTransform({"a": mute}, timeout_s=1.0)
    assert time.monotonic() - start < 8, "it is stopped, which may take some seconds"


def test_T10_mcp_server_lists_its_tools_once_and_then_no_more():
    class Lists(MCPServer):
        count = 0

        async def list_tools(self):
            self.count += 1
            if self.count > 1:
                await asyncio.Event().wait()
            return await super().list_tools()

    async def ask(server):
        connection = MCPConnection("the server", server, timeout_s=1.0)
        try:
            assert await connection.tools() == {}
            assert server.count == 1
            with pytest.raises(MCPServerError, match=r"lost: it did not answer within 0\.9 s"):
                await connection.tools()
        finally:
            await connection.close()

    asyncio.run(ask(Lists("lists", log_level="CRITICAL")))


class Pages(MCPServer):
    """Lists tools page by page: so many of each, of so many characters, for so many pages."""

    def __init__(self, num_pages, num_tools, num_characters=1, pause_s=0.0, same=False):
        super().__init__("pages", log_level="CRITICAL")
        self.asked = 0
        self._of = num_pages, num_tools, num_characters, pause_s, same

    async def _handle_list_tools(self, ctx, params):
        num_pages, num_tools, num_characters, pause_s, same = self._of
        self.asked += 1
        await asyncio.sleep(pause_s)
        page = int((params.cursor if params else None) or 0)
        names = [f"t{0 if same else page}_{n}" for n in range(num_tools)]
        schema = {"type": "object", "description": "x" * num_characters}
        tools = [Tool(name=name, input_schema=schema) for name in names]
        more = str(page + 1) if page + 1 < num_pages else None
        return ListToolsResult(tools=tools, next_cursor=more)


@pytest.mark.parametrize(
    ("server", "settings", "words"),
    [
        ((1, 20_000), {}, "has more than 1000 tools. .* or raise max_tools=."),
        ((5, 10), {"max_tools": 30}, "has more than 30 tools"),
        ((10**9, 0), {}, "has more than 100 pages. Start the server with fewer tools.$"),
        ((10**9, 1), {}, "has more than 100 pages"),
        ((10**9, 1, 1 << 20), {}, "has definitions of more than 16 MiB of JSON"),
        (
            (10**9, 0, 1, 0.15),
            {"timeout_s": 1.0},
            "takes more than 0.9 s. .*, or raise timeout_s=.$",
        ),
        ((2, 1, 1, 0.0, True), {}, "lists the tool 't0_0' twice"),
    ],
    ids=["tools", "a bound of one's own", "empty pages", "pages", "bytes", "time", "twice"],
)
def test_a_server_that_lists_too_much_is_refused_by_what_it_is(server, settings, words):
    server = Pages(*server)
    with pytest.raises(MCPServerError, match=words):
        MCPToolTransform({"a": server}, **settings)
    assert server.asked <= 100


def test_as_many_tools_as_are_allowed_are_taken():
    tools = MCPToolTransform({"a": Pages(100, 10)}, allow=["t7_3"])
    assert list(tools.tools) == ["t7_3"]
    tools.close()
    with pytest.raises(ValueError, match=r"max_tools must be .* at least 1, got 0"):
        MCPToolTransform({"a": Pages(1, 1)}, max_tools=0)


def test_no_concurrent_call_meets_a_definition_that_has_changed():
    async def ask(server):
        connection = MCPConnection("the server", server, timeout_s=10.0)
        try:
            assert list(await connection.tools()) == ["t0_0"]
            server._of = (1, 1, 2, 0.05, False)  # from here on with another schema, and slow to say
            connection.is_stale = True
            calls = [connection.call("t0_0", {}) for _ in range(8)]
            return await asyncio.gather(*calls, return_exceptions=True)
        finally:
            await connection.close()

    server = Pages(1, 1)
    errors = asyncio.run(ask(server))
    assert {type(error) for error in errors} == {MCPToolsChangedError}
    assert server.asked == 2, "one listing serves all that wait for it"


def test_a_result_of_a_tool_that_changed_while_it_ran_is_an_error():
    server = MCPServer("changes", log_level="CRITICAL")
    connection = MCPConnection("the server", server, timeout_s=10.0)

    @server.tool()
    async def act() -> str:
        """Act."""
        server.remove_tool("act")
        await connection._on_message(ToolListChangedNotification())  # as older protocols say it
        return "done"

    async def ask():
        try:
            await connection.tools()
            with pytest.raises(MCPToolsChangedError, match="the tool act of the server is gone"):
                await connection.call("act", {})
        finally:
            await connection.close()

    asyncio.run(ask())


@pytest.mark.parametrize("session", ["shared", "row"])
def test_a_copy_has_sessions_of_its_own(scripted, call_text, play, session):
    tools = MCPToolTransform({"test": STDIO}, session=session, allow=["count", "change", "add"])
    copy = pickle.loads(pickle.dumps(tools))
    for number, part in enumerate((tools, copy), 1):
        zero = RewardFunctions([lambda completions: [0.0] * len(completions)])
        parts = Compose(DataLoadingPrimer([{"prompt": "x"}]), part, zero)
        env = ChatEnv(batch_size=1).append_transform(parts)
        turns = [call_text("count") + call_text("change"), call_text("add", a=1), "done"]
        (end,) = play(env, scripted(turns))
        assert sorted(answers(end)[:2]) == ["1", "changed"], number
        assert "has another schema" in answers(end)[2], "it expects the tools that it has shown"
        env.close()


def test_an_object_of_this_process_can_not_be_copied():
    tools = MCPToolTransform({"here": build_server()})
    with pytest.raises(TypeError, match=r"'here' can't be copied .*Give a function of a"):
        pickle.dumps(tools)
    tools.close()


def test_T10_mcp_server_dies_in_a_call_and_comes_back(make_env, scripted, call_text, play):
    env = make_env({"test": STDIO}, timeout_s=20.0)
    (end,) = play(env, scripted([call_text("die"), call_text("add", a=1), "done"]))
    died, again = answers(end)
    assert "MCPServerError: the connection to the MCP server 'test' was lost" in died
    assert again == "2"


def test_T10_mcp_server_is_killed_between_calls(make_env, scripted, call_text, play, own_children):
    env = make_env({"test": STDIO}, timeout_s=20.0)
    batch = scripted([call_text("add", a=1)])(env.reset())
    for child in own_children():
        child.kill()
        child.wait()
    assert "was lost" in answers(env.step(batch)["next"])[0]
    (end,) = play(env, scripted([call_text("add", a=1), "done"]))
    assert answers(end) == ["2"]


def test_T10_mcp_server_that_dies_under_many_calls_dies_once(make_env, scripted, call_text, play):
    env = make_env({"test": STDIO}, size=5, timeout_s=20.0)
    waits = [call_text("pause", seconds=600), call_text("add", a=1), "done"]
    script = {f"<{row}>": waits for row in range(4)} | {"<4>": [call_text("die"), *waits[1:]]}
    for row, end in enumerate(play(env, scripted(script))):
        died, again = answers(end, row)
        assert "the connection to the MCP server 'test' was lost" in died
        assert again == "2", "five calls failed by one death, and a server may die twice in a row"


def test_T10_mcp_server_that_falls_silent_is_started_again(make_env, scripted, call_text, play):
    env = make_env({"test": STDIO}, timeout_s=10.0, session="row")
    turns = [call_text("stop"), *[call_text("add", a=1)] * 2, "done"]
    (end,) = play(env, scripted(turns))
    late, lost, again = answers(end)
    assert json.loads(late) == {"error": "CallTimeoutError: no answer within 10 s"}
    assert "was lost: it did not answer within 9.0 s" in lost
    assert again == "2"


def test_T10_mcp_server_that_always_dies_is_given_up(
    make_env, scripted, call_text, play, own_children, monkeypatch
):
    env = make_env({"test": STDIO}, timeout_s=20.0)
    (end,) = play(env, scripted([call_text("die")] * 4 + ["done"]))
    *died, given_up = answers(end)
    assert len(died) == 3
    assert all("was lost" in text for text in died)
    assert "3 times in a row; it is not started again within 10 s" in given_up
    assert own_children() == []
    monkeypatch.setattr("torchrl_envs.tools.mcp_connection.RETRY_S", 0.0)  # after that time
    (end,) = play(env, scripted([call_text("add", a=1), "done"]))
    assert answers(end) == ["2"]


def test_T10_mcp_server_changes_its_tools(make_env, scripted, call_text, play):
    env = make_env({"test": build_server()})
    turns = [call_text("add", a=1), call_text("change"), call_text("add", a=1), "done"]
    (end,) = play(env, scripted(turns))
    first, changed, refused = answers(end)
    assert (first, changed) == ("2", "changed")
    error = "MCPToolsChangedError: the tool add of the MCP server 'test' has another schema"
    assert json.loads(refused) == {"error": error}


def test_T02_mcp_call_hangs_and_the_next_one_works(make_env, scripted, call_text, play):
    env = make_env({"test": STDIO}, timeout_s=6.0)
    turns = [call_text("pause", seconds=600), call_text("add", a=1), "done"]
    (end,) = play(env, scripted(turns))
    assert json.loads(answers(end)[0]) == {"error": "CallTimeoutError: no answer within 6 s"}
    assert answers(end)[1] == "2"


def test_T06_a_server_that_prints_beside_its_messages_is_heard_all_the_same(
    make_env, scripted, call_text, play
):
    env = make_env({"test": {**STDIO, "env": {"NOISE": "1"}}})
    (end,) = play(env, scripted([call_text("add", a=1), "done"]))
    assert answers(end) == ["2"]


def test_T10_http_server_is_killed(make_env, scripted, call_text, play, http_server):
    url, process = http_server
    env = make_env({"test": url}, timeout_s=5.0)
    (end,) = play(env, scripted([call_text("add", a=1), "done"]))
    assert answers(end) == ["2"]
    process.kill()
    process.wait()
    (end,) = play(env, scripted([call_text("add", a=1), "done"]))
    assert "MCPServerError" in answers(end)[0]

"""Programs that own their loop, asking with OpenAI's own client: what they get, what is trained."""

import asyncio
import gc
import json
import pickle
import re
import socket
import sys
import threading
from dataclasses import replace
from types import ModuleType

import openai
import pytest
from agents_for_tests import (
    ADD,
    CALL,
    COMMAND,
    ROWS,
    asks_once,
    async_client_of,
    client_of,
    play,
    reason_of,
    said,
    sampled_texts,
)
from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose

from torchrl_data import ConversationEncoder
from torchrl_envs import (
    AddThinkingPrompt,
    AgentCommand,
    AgentProgram,
    ChatEnv,
    DataLoadingPrimer,
    FoldContext,
    FunctionTools,
)
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.task import TaskEnv
from torchrl_envs.testing.scripted_turns import ScriptedTurns


def uses_a_tool(endpoint, *, question, answer):
    """A loop as the tutorials have it; the SDK's own message goes back as it came."""
    chat = [{"role": "developer", "content": "Use tools."}, {"role": "user", "content": question}]
    while True:
        with client_of(endpoint) as client:
            choice = client.chat.completions.create(
                model=endpoint.model, messages=chat, tools=[ADD], max_completion_tokens=50
            ).choices[0]
        chat.append(choice.message)
        if choice.finish_reason != "tool_calls":
            return float(choice.message.content == answer)
        for call in choice.message.tool_calls:
            result = sum(json.loads(call.function.arguments).values())
            chat.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


def test_an_agents_loop_is_one_conversation_token_by_token(chatml_tokenizer):
    last = play(chatml_tokenizer, uses_a_tool, [f"I add.{CALL}", "5"])
    assert said(last) == [
        ("system", "Use tools."),
        ("user", "What is 2 + 3?"),
        ("assistant", f"I add.{CALL}"),
        ("tool", "5"),
        ("assistant", "5"),
    ]
    assert last["reward"].item() == 1.0
    assert last["rewards", "agent"].item() == 1.0
    assert reason_of(last) == "environment_done"
    assert last["terminated"].item()
    assert last["num_tool_calls"].item() == 1
    # The tokens are what the template makes of the conversation: nothing came twice or got lost.
    (episode,) = last["episode"]
    assert len(episode.rows) == 1
    chat = [{"role": role, "content": content} for role, content in said(last)]
    encoder = ConversationEncoder(chatml_tokenizer)
    expected = encoder.encode_chats([chat], tools=[ADD])[0].ids
    assert episode.conversation.ids(0) == expected[: len(episode.conversation.ids(0))]
    assert sampled_texts(last, chatml_tokenizer) == [f"I add.{CALL}5"]


def test_what_a_reply_says(chatml_tokenizer):
    seen = []

    async def program(endpoint):
        client = async_client_of(endpoint)
        chat = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
        seen.append([model.id async for model in await client.models.list()])
        assert (await client.models.retrieve("policy")).id == "policy"
        reply = await client.chat.completions.create(model="any", messages=chat, tools=[ADD])
        seen.append(reply)
        chat += [reply.choices[0].message, {"role": "user", "content": "y"}]
        stream = await client.chat.completions.create(
            model="any",
            messages=chat,
            stream=True,
            stream_options={"include_usage": True},
            tools=[ADD],
        )
        seen.append([chunk async for chunk in stream])
        await client.close()

    last = play(chatml_tokenizer, program, ["<tool_call>\n{broken\n</tool_call>", f"so{CALL}"])
    models, reply, chunks = seen
    assert models == ["policy"]
    # A call that can't be read is text, for the agent to deal with.
    assert reply.choices[0].message.content == "<tool_call>\n{broken\n</tool_call>"
    assert reply.choices[0].message.tool_calls is None
    assert reply.choices[0].finish_reason == "stop"
    (episode,) = last["episode"]
    mask = episode.conversation.assistant_mask(0).tolist()
    assert reply.usage.prompt_tokens == mask.index(True)
    assert reply.usage.completion_tokens == mask[mask.index(True) :].index(False)
    delta = chunks[0].choices[0].delta
    assert delta.content == "so"
    assert json.loads(delta.tool_calls[0].function.arguments) == {"a": 2, "b": 3}
    assert chunks[1].choices[0].finish_reason == "tool_calls"
    assert chunks[2].usage.total_tokens == episode.conversation.num_tokens(0)
    # No reward of its own, and nobody else scores.
    assert not last["scorable"].item()


def test_requests_that_begin_anew_are_rows_of_their_own(chatml_tokenizer):
    def program(endpoint):
        def ask(*chat):
            return {"role": "assistant", "content": asks_once(endpoint, messages=list(chat))}

        planner = [{"role": "system", "content": "Plan."}, {"role": "user", "content": "go"}]
        solver = [{"role": "system", "content": "Solve."}, {"role": "user", "content": "go"}]
        planner.append(ask(*planner))  # one
        solver.append(ask(*solver))  # two
        planner.append({"role": "user", "content": "more"})
        planner.append(ask(*planner))  # three, in the row of one
        solver.append({"role": "user", "content": "more"})
        solver.append(ask(*solver))  # four, in the row of two
        ask(*planner[:2])  # five: the same question again
        changed = [*planner[:2], {"role": "assistant", "content": "ONE"}, planner[3]]
        ask(*changed)  # six: what was said is not what it was told
        return 2

    turns = ["one", "two", "three", "four", "five", "six"]
    last = play(chatml_tokenizer, program, turns)
    assert sampled_texts(last, chatml_tokenizer) == ["onethree", "twofour", "five", "six"]
    assert said(last)[2] == ("assistant", "ONE")
    assert last["reward"].item() == 2.0


def test_requests_at_the_same_time_are_answered_one_after_the_other(chatml_tokenizer):
    told = []

    async def program(endpoint):
        client = async_client_of(endpoint)

        async def ask(name):
            chat = [{"role": "user", "content": name}]
            reply = await client.chat.completions.create(model="any", messages=chat)
            told.append(reply.choices[0].message.content)

        await asyncio.gather(*[ask(f"question {i}") for i in range(3)])
        await client.close()
        return 1.0

    last = play(chatml_tokenizer, program, ["one", "two", "three"])
    assert sorted(told) == ["one", "three", "two"]
    assert sampled_texts(last, chatml_tokenizer) == ["one", "two", "three"]


def test_keys_are_of_their_episodes_alone(chatml_tokenizer):
    urls = []

    def program(endpoint):
        urls.append(endpoint)
        with pytest.raises(openai.AuthenticationError, match="no episode that runs"):
            asks_once(endpoint._replace(api_key="other"))
        with client_of(endpoint) as client, pytest.raises(openai.NotFoundError, match="embeddings"):
            client.embeddings.create(model="m", input="x")
        asks_once(endpoint)
        return 1

    last = play(chatml_tokenizer, program, ["one"])
    assert last["reward"].item() == 1.0
    with pytest.raises(openai.APIConnectionError):  # the environment is closed
        asks_once(urls[0])


def test_a_program_that_hangs_up_is_not_waited_for(chatml_tokenizer):
    """Its request is withdrawn while another one is answered."""
    gone = threading.Event()

    async def program(endpoint):
        client = async_client_of(endpoint)
        chat = [{"role": "user", "content": "x"}]
        first = asyncio.create_task(client.chat.completions.create(model="m", messages=chat))
        await asyncio.sleep(0.5)
        other = [{"role": "user", "content": "late"}]
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.2).chat.completions.create(
                model="m", messages=other
            )
        await asyncio.sleep(0.5)
        gone.set()
        await first
        then = [{"role": "user", "content": "then"}]
        await client.chat.completions.create(model="m", messages=then)
        await client.close()
        return 1

    class Waits(ScriptedTurns):
        def __call__(self, batch: TensorDictBase) -> TensorDictBase:
            assert gone.wait(10)
            return super().__call__(batch)

    env = ChatEnv(batch_size=1, tokenizer=chatml_tokenizer).append_transform(
        Compose(DataLoadingPrimer(ROWS, group_size=1), AgentProgram(program))
    )
    last = env.rollout(4, Waits(chatml_tokenizer, ["one", "two"]))[..., -1]["next"]
    env.close()
    assert last["reward"].item() == 1.0
    assert said(last) == [("user", "then"), ("assistant", "two")]
    assert sampled_texts(last, chatml_tokenizer) == ["one", "two"]


def test_what_does_not_go_together_is_refused(chatml_tokenizer):
    def compose(*parts, **options):
        env = ChatEnv(batch_size=1, tokenizer=chatml_tokenizer, **options)
        return env.append_transform(Compose(DataLoadingPrimer(ROWS, group_size=1), *parts))

    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: one.
            b: other.
        """
        return a + b

    with pytest.raises(ValueError, match="has a system_prompt"):
        compose(AgentProgram(asks_once), system_prompt="Be brief.").check()
    own = AgentProgram(asks_once)
    own.only_for = lambda _: True
    for agent in (AgentProgram(asks_once), own):
        with pytest.raises(ValueError, match="has \\['FunctionTools'\\] for its episodes"):
            compose(agent, FunctionTools([add])).check()
    with pytest.raises(ValueError, match="has \\['FoldContext'\\]"):
        compose(AgentProgram(asks_once), FoldContext(str, max_turns=1)).check()
    with pytest.raises(ValueError, match="has \\['AddThinkingPrompt'\\]"):
        compose(AgentProgram(asks_once), AddThinkingPrompt(bool)).check()

    async def turned(prompt, endpoint):
        del prompt, endpoint

    needs = r"needs the columns \['endpoint'\].* endpoint is its first parameter, here 'prompt'"
    with pytest.raises(ValueError, match=needs):
        compose(AgentProgram(turned)).check()
    with pytest.raises(TypeError, match=r"AgentProgram: .* has to take the endpoint first"):
        AgentProgram(lambda: 1.0)
    with pytest.raises(TypeError, match="takes a function"):
        AgentProgram("agent.py")
    with pytest.raises(TypeError, match="list of names"):
        AgentProgram(asks_once, ignored_parameters="temperature")
    with pytest.raises(ValueError, match="timeout_s"):
        AgentProgram(asks_once, timeout_s=0)
    with pytest.raises(TypeError, match="list of strings"):
        AgentCommand("python agent.py")
    with pytest.raises(ValueError, match="empty"):
        AgentCommand([])


def test_a_copy_has_a_server_of_its_own():
    agent = AgentProgram(asks_once)
    assert agent.server.url != ""
    copy = pickle.loads(pickle.dumps(agent))
    assert copy.__dict__["_server"] is None
    assert copy.server.url != agent.server.url
    agent.close()
    copy.close()


def test_a_server_ends_with_its_environment(chatml_tokenizer):
    agent = AgentProgram(asks_once, port=free_port())
    server = agent.server
    with pytest.raises(OSError, match=f"can't listen at 127.0.0.1:{agent.port}.*port=0 finds"):
        _ = AgentProgram(asks_once, port=agent.port).server
    assert server._thread.is_alive()
    del agent
    gc.collect()
    server._thread.join(20)
    assert not server._thread.is_alive()


def test_programs_on_other_machines_are_told_an_address():
    agent = AgentProgram(asks_once, host="0.0.0.0")
    host, _, port = agent.server.url.removeprefix("http://").rpartition(":")
    socket.create_connection((host, int(port)), timeout=10).close()
    assert host not in ("0.0.0.0", "localhost")
    agent.close()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as held:
        return held.getsockname()[1]


def test_columns_that_the_program_asks_for_are_there(chatml_tokenizer):
    def program(endpoint, question, *, answer, level, seed, hint=""):
        pass

    part = Compose(DataLoadingPrimer(ROWS, group_size=1), AgentProgram(program))
    env = ChatEnv(batch_size=1, tokenizer=chatml_tokenizer).append_transform(part)
    words = r"the program needs the columns \['level'\], which the data lack"
    with pytest.raises(ValueError, match=words):
        env.check()


DATA = [{"prompt": f"q{i}", "question": f"{i} + 1?", "answer": str(i + 1)} for i in range(12)]


def solve(endpoint, *, question, answer):
    chat = [{"role": "user", "content": question}]
    return float(asks_once(endpoint, messages=chat) == answer)


class TestTask:
    def rollout(self, tokenizer, task, turns):
        env = TaskEnv(task, num_envs=1, tokenizer=tokenizer)
        try:
            return env.rollout(9, ScriptedTurns(tokenizer, turns))[..., -1]["next"]
        finally:
            env.close()

    def test_a_function_by_its_name(self, chatml_tokenizer, monkeypatch):
        module = ModuleType("agents_of_somebody")
        module.solve = solve
        monkeypatch.setitem(sys.modules, "agents_of_somebody", module)
        program = "agents_of_somebody:solve"
        task = make_task("agent", program=program, dataset=DATA, num_held_out=2)
        assert len(task.held_out_rows) == 2
        right = [row["answer"] for row in task.train_rows]
        last = self.rollout(chatml_tokenizer, task, ["none"])
        assert last["reward"].item() == 0.0
        assert reason_of(last) == "environment_done"
        last = self.rollout(chatml_tokenizer, replace(task, train_rows=task.train_rows[:1]), right)
        assert last["rewards", "agent"].item() == 1.0

    def test_a_command(self, chatml_tokenizer):
        command = [sys.executable, "-c", COMMAND]
        task = make_task("agent", command=command, dataset=DATA[:1], num_held_out=0)
        last = self.rollout(chatml_tokenizer, task, ["1"])
        assert last["reward"].item() == 1.0

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"dataset": DATA}, "takes one of program"),
            ({"dataset": DATA, "program": "a:b", "command": ["c"]}, "takes one of program"),
            ({"program": "json:loads"}, "needs a dataset"),
            ({"program": "json", "dataset": DATA}, "must be package.module:name"),
            ({"program": "json:nothing", "dataset": DATA}, "can't be found"),
            ({"command": [], "dataset": DATA}, "the command is empty"),
        ],
    )
    def test_settings_that_can_not_work_are_refused(self, settings, words):
        with pytest.raises(ValueError, match=words):
            make_task("agent", num_held_out=2, **settings)

    def test_the_agent_to_copy_answers_the_calculators_questions(self, chatml_tokenizer):
        task = make_task("calculator_agent", num_rows=64, num_held_out=8, num_demonstrations=4)
        row = next(row for row in task.train_rows if row["tool"] == "multiply")
        a, b = map(int, re.findall(r"\d+", row["prompt"])[:2])
        call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
        wrong = json.dumps({"name": "divide", "arguments": {}})
        calls = [f"<tool_call>{text}</tool_call>" for text in ("{", wrong, call)]
        last = self.rollout(chatml_tokenizer, replace(task, train_rows=[row]), [*calls, str(a * b)])
        results = [content for role, content in said(last) if role == "tool"]
        assert results[0].startswith("error: JSONDecodeError")
        assert results[1:] == ["error: KeyError: 'divide'", str(a * b)]
        assert last["reward"].item() == 1.0
        assert last["rewards", "chose_right_tool"].item() == 0.0  # its first call was none


@pytest.mark.parametrize("package", ["uvicorn", "starlette.applications"])
def test_what_is_not_installed_is_said(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl-agents\[tools\]'"):
        _ = AgentProgram(asks_once).server

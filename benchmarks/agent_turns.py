"""A turn of an agent that owns its loop: what the server, the client and the matching cost.

    python benchmarks/agent_turns.py [--rows 64] [--turns 8] [--repeats 5]

Episodes of some turns, each with the same messages: what the policy says is handed in, so nothing
is generated; the tokens of each prompt are made. ``tool`` calls a tool of the environment
(``EnvironmentTools``); ``agent, bare`` is a program that asks over HTTP with Python's own client;
``agent, openai`` one with OpenAI's. All run interleaved in one process, programs and server
included; that all took all turns, token for token the same, is checked first. Medians of CPU and
wall milliseconds of a turn of one row, and the cost beside ``tool``.
"""

import argparse
import http.client
import json
import statistics
import time
from functools import cache
from urllib.parse import urlsplit

import openai
from env_step import Adder
from tensordict import TensorDictBase
from torchrl.envs.transforms import Compose
from trl_tool_turn import tokenizer_of_both

from torchrl_data.conversation_io import read_conversations
from torchrl_data.keys import PROMPT
from torchrl_envs import AgentProgram, ChatEnv, DataLoadingPrimer, EnvironmentTools, StepCounter
from torchrl_envs.testing.scripted_turns import ScriptedTurns

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@cache
def client_at(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="of each", max_retries=0)


def with_openai(endpoint, *, prompt: str, turns: int) -> float:
    client = client_at(endpoint.base_url).with_options(api_key=endpoint.api_key)
    chat = [{"role": "user", "content": prompt}]
    for turn in range(turns):
        reply = client.chat.completions.create(model=endpoint.model, messages=chat)
        chat.append(reply.choices[0].message)
        if turn + 1 < turns:
            chat.append({"role": "tool", "name": "add", "content": "3"})
    return 1.0


def bare(endpoint, *, prompt: str, turns: int) -> float:
    connection = http.client.HTTPConnection(urlsplit(endpoint.base_url).netloc)
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    chat = [{"role": "user", "content": prompt}]
    for turn in range(turns):
        body = json.dumps({"model": endpoint.model, "messages": chat})
        connection.request("POST", "/v1/chat/completions", body, headers)
        chat.append(json.loads(connection.getresponse().read())["choices"][0]["message"])
        if turn + 1 < turns:
            chat.append({"role": "tool", "name": "add", "content": "3"})
    connection.close()
    return 1.0


def make_env(kind: str, rows: int, turns: int, tokenizer) -> ChatEnv:
    parts = {
        "tool": lambda: EnvironmentTools(Adder, show_schemas=False),
        "agent, bare": lambda: AgentProgram(bare),
        "agent, openai": lambda: AgentProgram(with_openai),
    }
    data = [{"prompt": f"Add 1 and 2, {i}.", "turns": turns} for i in range(rows)]
    primer = DataLoadingPrimer(data, group_size=1, shuffle=False)
    return ChatEnv(batch_size=rows, tokenizer=tokenizer).append_transform(
        Compose(primer, parts[kind](), StepCounter(max_steps=turns))
    )


def roll(env: ChatEnv, tokenizer, turns: int) -> TensorDictBase:
    """All episodes to their ends; the last step."""
    policy, batch = ScriptedTurns(tokenizer, [CALL] * turns), env.reset()
    for _ in range(turns):
        batch = env.step(policy(batch))["next"]
    return batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    tokenizer = tokenizer_of_both()
    kinds = ("tool", "agent, bare", "agent, openai")
    envs = {kind: make_env(kind, args.rows, args.turns, tokenizer) for kind in kinds}
    said = {}
    for kind, env in envs.items():
        last = read_conversations(roll(env, tokenizer, args.turns), PROMPT, who="benchmark")
        # The tool has answered the last turn, too; nobody asks the policy again.
        said[kind] = [
            [m["content"] for m in last.messages(i)[: 2 * args.turns]] for i in range(args.rows)
        ]
        assert len(said[kind][0]) == 2 * args.turns
        assert len({len(row) for row in said[kind]}) == 1
    assert said["tool"] == said["agent, bare"] == said["agent, openai"]
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    wall: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.repeats):
        for kind, env in envs.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            roll(env, tokenizer, args.turns)
            per_turn = 1e3 / (args.rows * args.turns)
            cpu[kind].append((time.process_time() - began_cpu) * per_turn)
            wall[kind].append((time.perf_counter() - began) * per_turn)
    base = statistics.median(cpu["tool"])
    print(f"{args.rows} rows, {args.turns} turns; milliseconds of a turn of one row")
    for kind in kinds:
        own = statistics.median(cpu[kind])
        print(
            f"{kind:<14} CPU {own:6.2f}  wall {statistics.median(wall[kind]):6.2f}  "
            f"{own - base:+.2f} beside a tool"
        )
    for env in envs.values():
        env.close()


if __name__ == "__main__":
    main()

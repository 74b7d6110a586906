"""What tests of agents share: clients, a rollout, and what was said in it."""

import openai
from torchrl.envs.transforms import Compose

from torchrl_data import read_conversations
from torchrl_data.keys import PROMPT
from torchrl_envs import AgentProgram, ChatEnv, DataLoadingPrimer
from torchrl_envs.testing.scripted_turns import ScriptedTurns

ROWS = [{"prompt": "unused", "question": "What is 2 + 3?", "answer": "5"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


COMMAND = """
import json, os, sys, urllib.request
row = json.loads(sys.stdin.readline())
chat = [{"role": "user", "content": row["question"]}]
body = {"model": os.environ["OPENAI_MODEL"], "messages": chat}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
said = json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]
print("thinking")
print(json.dumps({"reward": float(said == row["answer"])}))
"""


def client_of(endpoint):
    return openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


def async_client_of(endpoint):
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


def asks_once(endpoint, **parameters):
    chat = [{"role": "user", "content": "x"}]
    options = {"model": "any", "messages": chat, **parameters}
    with client_of(endpoint) as client:
        return client.chat.completions.create(**options).choices[0].message.content


def play(tokenizer, program, turns, *transforms, rows=ROWS, steps=9, **options):
    """The last step of a rollout in one row, in which the policy says some turns."""
    agent = AgentProgram(program, **{"timeout_s": 20.0, **options})
    env = ChatEnv(batch_size=1, tokenizer=tokenizer).append_transform(
        Compose(DataLoadingPrimer(rows, group_size=1), agent, *transforms)
    )
    env.check()
    policy = ScriptedTurns(tokenizer, turns)
    try:
        rollout = env.rollout(steps, policy, break_when_any_done=True)
    finally:
        env.close()
    return rollout[..., -1]["next"]


def reason_of(last):
    return last["stop_reason"][0]


def said(last):
    (row,) = read_conversations(last, PROMPT, who="test")
    return [(m["role"], m["content"]) for m in row.messages(0)]


def sampled_texts(last, tokenizer):
    (episode,) = last["episode"]
    return [
        tokenizer.decode(row.token_ids(0)[row.assistant_mask(0)], skip_special_tokens=True)
        for row in episode.rows
    ]

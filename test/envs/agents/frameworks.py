"""Agents made with other people's frameworks, as programs; by hand, CI has not their packages.

    pip install openai-agents langgraph langchain-openai 'pydantic-ai-slim[openai,anthropic]' \
        litellm smolagents
    python test/envs/agents/frameworks.py [NAME...]

Each has a tool, calls it and answers. What has to come out, for each: the framework's own loop
gives the right answer, and each turn of the policy is trained once: in one row, token by token,
where the framework sends back what it was told. Exits with the number of those that failed.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false"}
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
sys.path.insert(0, str(Path(__file__).parents[2] / "data"))

import openai
from agents_for_tests import ADD, CALL, play, reason_of, sampled_texts
from tokenizers_for_tests import chatml_tokenizer

FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "5"}}\n</tool_call>'
CASES: dict[str, tuple[str, Callable, list[str], dict]] = {}


def case(package, *turns, **options):
    """An agent of a framework, what the policy says to it, and options of ``AgentProgram``."""

    def note(program):
        CASES[program.__name__] = (package, program, [*turns] or [CALL, "5"], options)
        return program

    return note


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: other.
    """
    return a + b


async def run_openai_agent(endpoint, question, *, kind, streams):
    import agents

    client = openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    model = getattr(agents, kind)(model=endpoint.model, openai_client=client)
    tools = [agents.function_tool(add)]
    agent = agents.Agent(name="adder", instructions="Use tools.", model=model, tools=tools)
    if not streams:
        return (await agents.Runner.run(agent, question)).final_output
    result = agents.Runner.run_streamed(agent, question)
    async for _ in result.stream_events():
        pass
    return result.final_output


def of_openai(kind, streams):
    async def program(endpoint, *, question, answer):
        found = await run_openai_agent(endpoint, question, kind=kind, streams=streams)
        return float(found == answer)

    program.__name__ = f"openai_agents_{kind}{'_streamed' * streams}"
    case("openai-agents")(program)


for name in ("OpenAIChatCompletionsModel", "OpenAIResponsesModel"):
    for is_streamed in (False, True):
        of_openai(name, is_streamed)


@case("pydantic-ai-slim")
async def pydantic_ai_chat_completions(endpoint, *, question, answer):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=endpoint.base_url, api_key=endpoint.api_key)
    agent = Agent(OpenAIChatModel(endpoint.model, provider=provider), tools=[add])
    return float((await agent.run(question)).output == answer)


@case("pydantic-ai-slim")
async def pydantic_ai_messages(endpoint, *, question, answer):
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    url = endpoint.base_url.removesuffix("/v1")
    provider = AnthropicProvider(base_url=url, api_key=endpoint.api_key)
    agent = Agent(AnthropicModel(endpoint.model, provider=provider), tools=[add])
    return float((await agent.run(question)).output == answer)


async def run_langgraph(endpoint, question, **options):
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    url, key = endpoint.base_url, endpoint.api_key
    model = ChatOpenAI(model=endpoint.model, base_url=url, api_key=key, **options)
    agent = create_react_agent(model, [add], prompt="Use tools.")
    return (await agent.ainvoke({"messages": [("user", question)]}))["messages"][-1].content


@case("langgraph")
async def langgraph(endpoint, *, question, answer):
    return float(await run_langgraph(endpoint, question) == answer)


@case("langgraph", f"I add.{CALL}", "5")
async def langgraph_streamed(endpoint, *, question, answer):
    return float(await run_langgraph(endpoint, question, streaming=True) == answer)


def run_litellm(model, url, key, question):
    import litellm

    chat = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": question}]
    while True:
        options = {"model": model, "api_base": url, "api_key": key, "tools": [ADD]}
        message = litellm.completion(messages=chat, **options).choices[0].message
        chat.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = str(add(**json.loads(call.function.arguments)))
            chat.append({"role": "tool", "tool_call_id": call.id, "content": result})


@case("litellm")
def litellm_openai(endpoint, *, question, answer):
    model = f"openai/{endpoint.model}"
    return float(run_litellm(model, endpoint.base_url, endpoint.api_key, question) == answer)


@case("litellm")
def litellm_anthropic(endpoint, *, question, answer):
    url, model = endpoint.base_url.removesuffix("/v1"), f"anthropic/{endpoint.model}"
    return float(run_litellm(model, url, endpoint.api_key, question) == answer)


@case("smolagents", CALL, FINAL, ignored_parameters=["stop", "tool_choice"])
def smolagents(endpoint, *, question, answer):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    url, key = endpoint.base_url, endpoint.api_key
    model = OpenAIServerModel(model_id=endpoint.model, api_base=url, api_key=key)
    agent = ToolCallingAgent(tools=[tool(add)], model=model, verbosity_level=0, max_steps=4)
    return float(str(agent.run(question)) == answer)


def main() -> int:
    tokenizer, num_failed = chatml_tokenizer(), 0
    for name, (package, program, turns, options) in CASES.items():
        if len(sys.argv) > 1 and name not in sys.argv[1:]:
            continue
        last = play(tokenizer, program, turns, timeout_s=60.0, **options)
        texts = sampled_texts(last, tokenizer)
        is_fine = last["reward"].item() == 1.0 and "".join(texts) == "".join(turns)
        num_failed += not is_fine
        verdict = f"fine, rows: {len(texts)}" if is_fine else f"FAILED: {reason_of(last)[:200]}"
        print(f"{name:50} {package + ' ' + version(package):25} {verdict}", flush=True)
    return num_failed


if __name__ == "__main__":
    sys.exit(main())

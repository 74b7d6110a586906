"""Agents that people use, by name: how each is started, and what points it at the policy."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .agent_command import AgentEndpoint


@dataclass(frozen=True, kw_only=True)
class KnownAgent:
    """An agent that runs as a command."""

    program: str
    """What is looked for on ``PATH``."""
    install: str
    """How it is installed, for the error."""
    arguments: Callable[[AgentEndpoint], list[str]]
    """What follows the program; the instruction comes last."""
    variables: Callable[[AgentEndpoint], dict[str, str]] = lambda _: {}
    """Environment variables beside the endpoint's own."""
    files: Callable[[AgentEndpoint], dict[str, Any]] = lambda _: {}
    """Files below the home, by their path, as JSON."""
    ignored: tuple[str, ...] = ()
    """Parameters of its requests that may say anything: the policy's own count."""
    asked_in: str = "chat completions"
    """The protocol that it speaks."""


# Their tools are of kinds that are no functions.
_CODEX_OFF: Final = ("multi_agent", "apps", "plugins", "image_generation")


def _codex(endpoint: AgentEndpoint) -> list[str]:
    provider = f'{{name="policy",base_url="{endpoint.base_url}",env_key="OPENAI_API_KEY",' + (
        'wire_api="responses",request_max_retries=0,stream_max_retries=0,supports_websockets=false}'
    )
    settings = [
        f"model_providers.policy={provider}",
        'model_provider="policy"',
        'web_search="disabled"',
    ]
    flags = [part for setting in settings for part in ("-c", setting)]
    for feature in _CODEX_OFF:
        flags += ["--disable", feature]
    flags += ["-m", endpoint.model, "--skip-git-repo-check"]
    return ["exec", "--dangerously-bypass-approvals-and-sandbox", *flags]


def _opencode(endpoint: AgentEndpoint) -> dict[str, Any]:
    options = {"baseURL": endpoint.base_url, "apiKey": endpoint.api_key}
    model = {"limit": {"context": 32768, "output": 4096}}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options}
    return {
        ".config/opencode/opencode.json": {
            "provider": {"policy": {**provider, "models": {endpoint.model: model}}},
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
        }
    }


_CLAUDE_OFF: Final = {
    "IS_SANDBOX": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_PROMPT_CACHING": "1",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
}

AGENTS: Final[Mapping[str, KnownAgent]] = {
    "claude-code": KnownAgent(
        program="claude",
        install="npm install -g @anthropic-ai/claude-code",
        arguments=lambda e: ["-p", "--dangerously-skip-permissions", "--model", e.model],
        variables=lambda e: {
            **_CLAUDE_OFF,
            "ANTHROPIC_SMALL_FAST_MODEL": e.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": e.model,
            "API_TIMEOUT_MS": "3000000",
        },
        ignored=("temperature", "thinking", "output_config", "context_management"),
        asked_in="messages",
    ),
    "codex": KnownAgent(
        program="codex",
        install="npm install -g @openai/codex",
        arguments=_codex,
        ignored=("reasoning", "text", "parallel_tool_calls", "client_metadata"),
        asked_in="responses",
    ),
    "mini-swe-agent": KnownAgent(
        program="mini",
        install="pip install mini-swe-agent",
        arguments=lambda e: [
            "-y",
            "-m",
            f"openai/{e.model}",
            "--exit-immediately",
            "-l",
            "0",
            "-t",
        ],
        variables=lambda _: {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
        },
        ignored=("temperature", "parallel_tool_calls", "drop_params"),
    ),
    "opencode": KnownAgent(
        program="opencode",
        install="npm install -g opencode-ai",
        arguments=lambda e: ["run", "--auto", "--title", "task", "--model", f"policy/{e.model}"],
        variables=lambda _: {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        },
        files=_opencode,
        ignored=("temperature", "top_p"),
    ),
    "qwen-code": KnownAgent(
        program="qwen",
        install="npm install -g @qwen-code/qwen-code",
        arguments=lambda e: ["--yolo", "--auth-type", "openai", "-m", e.model, "-p"],
        variables=lambda _: {"QWEN_CODE_SUPPRESS_YOLO_WARNING": "1", "NO_BROWSER": "1"},
        ignored=("temperature", "top_p", "reasoning", "reasoning_effort", "chat_template_kwargs"),
    ),
}
"""Agents by name."""
NOT_SERVED: Final = {"gemini-cli": "it speaks Gemini's protocol, which is not served"}
"""Agents that can't be run, and why."""


@dataclass(frozen=True, kw_only=True)
class StartedAgent:
    """An agent that is started for one episode."""

    command: list[str]
    variables: dict[str, str]
    files: dict[str, str] = field(default_factory=dict)
    """Texts of files, by their path below the home."""


def find_agent(name: str) -> KnownAgent:
    """An agent by its name.

    Args:
        name: one of :data:`AGENTS`.

    Raises:
        ValueError: there is no such agent, or it can't be run.
    """
    if name in AGENTS:
        return AGENTS[name]
    if name in NOT_SERVED:
        raise ValueError(f"agent={name} can't be run: {NOT_SERVED[name]}.")
    raise ValueError(f"agent must be one of {', '.join(AGENTS)}, got {name!r}.")


def installed(agent: KnownAgent) -> tuple[str, tuple[str, ...]]:
    """The path of an agent's program, and the folders that it reads.

    Args:
        agent: the agent.

    Raises:
        FileNotFoundError: it is not on ``PATH``.
    """
    found = shutil.which(agent.program)
    if found is None:
        raise FileNotFoundError(
            f"the agent's program {agent.program!r} is not on PATH: `{agent.install}`."
        )
    folders = []
    for path in dict.fromkeys((Path(found), Path(found).resolve())):
        top = next((p for p in path.parents if p.name == "node_modules"), None)
        if top is None and (path.parent.parent / "pyvenv.cfg").exists():
            top = path.parent.parent
        folders.append(str(top or path.parent))
    node = shutil.which("node")
    if agent.install.startswith("npm") and node is not None:
        folders.append(str(Path(node).resolve().parent))
    outside = (folder for folder in folders if not folder.startswith("/usr/"))
    return found, tuple(dict.fromkeys(outside))


def started(
    agent: KnownAgent, endpoint: AgentEndpoint, instruction: str, program: str
) -> StartedAgent:
    """Return how an agent is started.

    Args:
        agent: the agent.
        endpoint: as the agent reaches it.
        instruction: what it is to do.
        program: its path.
    """
    url = {"OPENAI": endpoint.base_url, "ANTHROPIC": endpoint.base_url.removesuffix("/v1")}
    variables: dict[str, str] = {}
    for company, base_url in url.items():
        variables |= {f"{company}_BASE_URL": base_url, f"{company}_API_BASE": base_url}
        variables |= {f"{company}_API_KEY": endpoint.api_key, f"{company}_MODEL": endpoint.model}
    return StartedAgent(
        command=[program, *agent.arguments(endpoint), instruction],
        variables=variables | agent.variables(endpoint),
        files={path: json.dumps(value) for path, value in agent.files(endpoint).items()},
    )

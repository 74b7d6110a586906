"""Scripted agents: those that deserve nothing, those that act by chance, and their words."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, Final

from .audited_task import AgentView, Say

FORMS: Final = ("{}", "<answer>{}</answer>", "\\boxed{{{}}}", "#### {}", "The answer is {}.")
"""How an answer may be wrapped; graders look for one of them."""
CONSTANTS: Final = ("0", "1", "2", "yes", "no", "true", "A", "hello")
GARBAGE: Final = {
    "an open brace": "{",
    "a number without end": "9" * 5000,
    "nan": "nan",
    "infinity": "inf",
    "deep brackets": "[" * 3000,
    "a control character": "\x00\x1b[0m",
    "an open tag": "<answer>",
    "an empty answer": "<answer></answer>",
    "an unfinished call": '<tool_call>{"name": ',
    "a call of nothing": '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>',
    "a long text": "lorem ipsum " * 2000,
}
"""Malformed answers, by what they are."""
_HINT: Final = re.compile(
    r"(?i)\b(?:answers?|solutions?|secret|expected(?: output)?|ground[ _]truth|target|labels?|"
    r"correct(?: answer| action| move)?|gold)[\"'*_`]*\s*(?:is|are|was|=|:)+[\s\"'*_`]*"
    r"([^\s\"'`<>][^\n\"'`<>]*)"
)
_WORD: Final = re.compile(r"\[[^\[\]\n]{1,30}\]|[-+]?\d+(?:\.\d+)?|[^\W\d_]+(?:[-_'][^\W\d_]+)*")
_NUM_WORDS: Final = 60
_NUM_CHOICES: Final = 24
_NUM_CALLS: Final = 5


def tool_call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """A call of a tool as a policy may write it, markers included."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>{call}</tool_call>"


def silent(view: AgentView, rng: Random) -> str:
    """Say nothing."""
    del view, rng
    return ""


def constant(text: str) -> Say:
    """An agent that always says the same."""

    def say(view: AgentView, rng: Random) -> str:
        del view, rng
        return text

    return say


def knowing(solution: Callable[[AgentView], str | None]) -> Say:
    """An agent that says what a solution says."""

    def say(view: AgentView, rng: Random) -> str | None:
        del rng
        return solution(view)

    return say


def said(text_of: Callable[[AgentView], str | None], form: str = "{}") -> Say:
    """An agent that says one text, first with each tool that takes a text or number, then as such.

    Args:
        text_of: what it says; ``None`` where it has nothing to say, and then it says nothing.
        form: of :data:`FORMS`.
    """

    def say(view: AgentView, rng: Random) -> str | None:
        del rng
        text = text_of(view)
        if text is None:
            return "" if view.turn == 0 else None
        calls = [call for tool in view.tools if (call := _call_with(tool, text)) is not None]
        if view.turn < len(calls):
            return calls[view.turn]
        return form.format(text)

    return say


def after_calls(text_of: Callable[[AgentView], str | None], form: str = "{}") -> Say:
    """An agent that calls each tool, and then does what :func:`said` does with what it was told.

    Args:
        text_of: what it says of what was shown; ``None`` where it has nothing to say.
        form: of :data:`FORMS`.
    """
    say_text = said(text_of, form)

    def say(view: AgentView, rng: Random) -> str | None:
        asked = [call for tool in view.tools if (call := _call_with(tool, CONSTANTS[-1]))]
        if view.turn < len(asked):
            return asked[view.turn]
        return say_text(view._replace(turn=view.turn - len(asked)), rng)

    return say


def echoed(view: AgentView) -> str:
    """The prompt, or what was said last."""
    return view.observation or view.opening


def hinted(view: AgentView) -> str | None:
    """Text after words such as ``answer is`` in what was shown, if there is any."""
    shown = f"{view.opening}\n{view.observation}\n{json.dumps(list(view.tools))}"
    found = _HINT.findall(shown)
    texts = [text for each in found if (text := each.strip().rstrip(".,;) \t"))]
    return texts[-1] if texts else None


def hinted_word(view: AgentView) -> str | None:
    """The first word of :func:`hinted` that is more than punctuation."""
    text = hinted(view)
    words = [] if text is None else [word.rstrip(".,;)") for word in text.split()]
    return next(filter(None, words), None)


def words_of(view: AgentView) -> list[str]:
    """Answers to try where none are known: words and numbers of what was shown."""
    found = _WORD.findall(f"{view.observation}\n{view.opening}")
    return list(dict.fromkeys(found))[:_NUM_WORDS] or list(CONSTANTS)


def by_chance(view: AgentView, rng: Random) -> str:
    """A possible answer, a call of a tool with arguments by chance, or a word that was shown."""
    if view.choices:
        return rng.choice(view.choices)
    words = words_of(view)
    if view.tools and rng.random() < 0.9:
        tool = rng.choice(view.tools)["function"]
        shapes = (tool.get("parameters") or {}).get("properties") or {}
        given = {name: _value(shape, words, rng) for name, shape in shapes.items()}
        return tool_call_text(tool["name"], given)
    return rng.choice(words)


def by_chance_from(draw: int) -> Say:
    """An agent that acts by chance, in other ways for other draws."""

    def say(view: AgentView, rng: Random) -> str:
        return by_chance(view, Random(f"{draw} {view.turn} {rng.random()}"))

    return say


class Explorer:
    """Tries, in each state that it is shown, what it tried least often; it learns over episodes."""

    def __init__(self) -> None:
        self._tried: Counter[tuple[str, str]] = Counter()

    def __call__(self, view: AgentView, rng: Random) -> str:
        """The answer that was tried least, the state being what was said last."""
        if view.tools and not view.choices:
            return by_chance(view, rng)
        options = list(view.choices) or words_of(view)
        least = min(self._tried[view.observation, each] for each in options)
        chosen = rng.choice([x for x in options if self._tried[view.observation, x] == least])
        self._tried[view.observation, chosen] += 1
        return chosen


def constant_agents(choices: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> dict[str, Say]:
    """Agents that always say the same, by what they say."""
    if choices:
        return {repr(text): constant(text) for text in choices[:_NUM_CHOICES]}
    agents: dict[str, Say] = {}
    for text in CONSTANTS:
        for form in FORMS[: 1 if tools else 2]:
            agents[repr(form.format(text))] = constant(form.format(text))
    for call in dict.fromkeys(_constant_calls(tools)):
        agents[call] = constant(call)
    return agents


def _constant_calls(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for tool in tools:
        function = tool["function"]
        shapes = (function.get("parameters") or {}).get("properties") or {}
        for number, word in enumerate(CONSTANTS[:_NUM_CALLS]):
            arguments = {name: _nth(shape, number, word) for name, shape in shapes.items()}
            yield tool_call_text(function["name"], arguments)


def _nth(shape: Mapping[str, Any], number: int, word: str) -> Any:
    """An argument that has the number among the possible ones."""
    if options := shape.get("enum"):
        return options[number % len(options)]
    kinds = {"integer": int(shape.get("minimum", 0)) + number, "array": [], "object": {}}
    kinds |= {"number": float(number), "boolean": number % 2 == 1}
    return kinds.get(_kind(shape), word)


def _call_with(tool: Mapping[str, Any], text: str) -> str | None:
    """A call of a tool whose first argument that can is a text."""
    function, given = tool["function"], dict[str, Any]()
    shapes = (function.get("parameters") or {}).get("properties") or {}
    for name, shape in shapes.items():
        value = _typed(_kind(shape), text)
        given[name] = _value(shape, [text], Random(0)) if value is None or given else value
    return tool_call_text(function["name"], given) if given else None


def _kind(shape: Mapping[str, Any]) -> str:
    """The JSON type of an argument; of several the first."""
    kind = shape.get("type")
    if kind is None and (options := shape.get("anyOf") or shape.get("oneOf")):
        kind = options[0].get("type")
    return str(kind[0] if isinstance(kind, list) else kind or "string")


def _typed(kind: str, text: str) -> Any:
    """A text as a value of a JSON type; ``None`` where it is none."""
    if kind == "string":
        return text
    try:
        value = int(text) if kind == "integer" else float(text) if kind == "number" else None
    except ValueError:
        return None
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _value(shape: Mapping[str, Any], words: Sequence[str], rng: Random) -> Any:
    """An argument by chance."""
    if shape.get("enum"):
        return rng.choice(list(shape["enum"]))
    kind = _kind(shape)
    if kind in ("integer", "number"):
        numbers = [value for word in words if (value := _typed(kind, word)) is not None]
        low = int(shape.get("minimum", 0))
        drawn = rng.randint(low, max(low, int(shape.get("maximum", low + 9))))
        return rng.choice(numbers) if numbers and rng.random() < 0.5 else drawn
    if kind == "boolean":
        return rng.random() < 0.5
    return {"array": [], "object": {}}.get(kind, rng.choice(words))

"""Messages from the text that a chat template rendered, one parser per template.

Text does not say who wrote a control token, so a conversation that somebody forged in a user's
message is parsed as forged: parse text for people, and train on tokens.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from .message_edits import split_reasoning
from .messages import Message
from .templates.registry import (
    ALIASES,
    DEFAULT_TEMPLATE,
    added_inverse_parser,
    builtin_template,
    family_of,
    own_template,
    template_names,
)
from .tool_calls.call_messages import message_with_calls
from .tool_calls.parser import parse_tool_calls
from .tool_calls.records import ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Parser = Callable[[str], Any]
_EOS: Final = re.compile(r"<｜end▁of▁sentence｜>|<\|endoftext\|>|<\|eos\|>|</s>|<eos>")
_BOS: Final = re.compile(r"(?:<｜begin▁of▁sentence｜>|<\|begin_of_text\|>|<s>|<bos>)")
_TOOL_RESPONSE = re.compile(r"\n?<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)


def inverse_parser(
    name: str | None, template: str | None, tokenizer: "PreTrainedTokenizerBase | None"
) -> Parser:
    """The parser of a template, by its name, its source, or the tokenizer's name and template."""
    name = name or _name_of(template, tokenizer)
    if (added := added_inverse_parser(name)) is not None:
        return added
    parser = _PARSERS.get(ALIASES.get(name, name))
    if parser is None or name not in {*template_names(), *ALIASES}:
        raise ValueError(
            f"The chat template {name!r} has no inverse parser; {sorted(_PARSERS)} have one. Give "
            "add_chat_template an inverse_parser."
        )

    def parse(text: str) -> list[Message]:
        messages = parser(text)
        if not messages:
            raise ValueError(
                f"No message was found in {text!r:.120}, read as the template {name!r} writes. "
                "Name the template that wrote it (chat_template_name), and keep its control "
                "tokens (skip_special_tokens=False)."
            )
        return messages

    return parse


def _name_of(template: str | None, tokenizer: "PreTrainedTokenizerBase | None") -> str:
    added = family_of(tokenizer, added_only=True)
    if template is None and added is not None:
        return added
    source = template or own_template(tokenizer) or ""
    # A template that is nobody's by its text is known by the control tokens that it writes.
    same = (name for name in template_names() if source and builtin_template(name) == source)
    like = (name for mark, name in _TEMPLATE_SIGNS if mark in source)
    return next(chain(same, like, [family_of(tokenizer) or DEFAULT_TEMPLATE]))


_TEMPLATE_SIGNS: Final = (
    ("<|im_sep|>", "phi4"),
    ("reasoning_content", "qwen3"),
    ("<|im_start|>", "qwen"),
    ("<|im_middle|>", "kimi"),
    ("[gMASK]", "glm"),
    ("<|start_of_role|>", "granite"),
    ("<start_of_turn>", "gemma"),
    ("<|tool_response|>", "phi4mini"),
    ("<|assistant|>", "phi"),
    ("<|start_header_id|>", "llama"),
    ("<｜Assistant｜>", "deepseek3"),
    ("[INST]", "mistral"),
)


def _turn(role: str, content: str, complete: bool) -> Message:
    message: Message = {"role": role, "content": content}
    if not complete:
        message["is_complete"] = False
    return message


def _with_calls(message: Message, mark: str = "<tool_call>", format: str = "hermes") -> Message:
    """Move tool calls out of the content, if all of them can be read."""
    content = message["content"]
    if mark not in content:
        return message
    before, _, rest = content.partition(mark)
    parsed = parse_tool_calls(mark + rest, format)
    calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
    if parsed.content.strip() or len(calls) < len(parsed.calls):
        return message
    return message_with_calls(message, before, calls)


def _turns(
    header: str,
    end: str,
    roles: Mapping[str, str] = MappingProxyType({}),
    calls: tuple[str, str] | None = ("<tool_call>", "hermes"),
    thoughts: str | None = None,
) -> Callable[[str], list[Message]]:
    """The parser of a family that writes a header with the role, content and an end.

    ``roles`` are its own words for roles, ``calls`` what its calls begin with and their format,
    ``thoughts``, for a family that thinks, what it writes in the place of no thought.
    """
    turn = re.compile(rf"{header}(?P<content>.*?)(?P<end>{end}|\Z)", re.DOTALL)

    def parse(text: str) -> list[Message]:
        messages: list[Message] = []
        for match in turn.finditer(text.replace(thoughts, "") if thoughts else text):
            role = roles.get(match["role"], match["role"])
            content, ended = match["content"], bool(match["end"])
            responses = _TOOL_RESPONSE.findall("\n" + content)
            if role in ("user", "tool") and responses:
                messages += [{"role": "tool", "content": response} for response in responses]
            elif content or ended:  # not what the policy is to answer
                message = _turn(role, content, ended or role != "assistant")
                if calls is not None and role == "assistant":
                    message = _with_calls(message, *calls)
                messages.append(message if thoughts is None else split_reasoning(message))
        return messages

    return parse


_MISTRAL_TURN = re.compile(
    r"\[AVAILABLE_TOOLS\].*?\[/AVAILABLE_TOOLS\]"  # no message: the schemas of the tools
    r"|\[INST\] ?(?P<user>.*?)\[/INST\]"
    r"|\[TOOL_RESULTS\] ?(?P<tool>.*?)\[/TOOL_RESULTS\]"
    r"|(?P<assistant>[^\[]+?|.+?)(?P<end></s>|(?=\[INST\])|\Z)",
    re.DOTALL,
)


def _parse_mistral(text: str) -> list[Message]:
    messages: list[Message] = []
    for match in _MISTRAL_TURN.finditer(_BOS.sub("", text, count=1)):
        if match["assistant"] is not None:
            turn = _turn("assistant", match["assistant"].removeprefix(" "), bool(match["end"]))
            messages.append(_with_calls(turn, "[TOOL_CALLS]", "mistral"))
        elif match["tool"] is not None:
            # With the call that it answers, where both can be read.
            message: Message = {"role": "tool", "content": match["tool"]}
            with suppress(ValueError):
                result = json.loads(match["tool"])
                if isinstance(result, dict) and isinstance(result.get("content"), str):
                    message["content"] = result["content"]
                    message |= {"tool_call_id": result["call_id"]} if "call_id" in result else {}
            messages.append(message)
        elif match["user"] is not None:
            messages.append({"role": "user", "content": match["user"]})
    return messages


_DEEPSEEK3 = re.compile(
    r"(?P<user><｜User｜>)|(?P<assistant><｜Assistant｜>)|(?P<tool><｜tool▁output▁begin｜>)"
    r"|<｜end▁of▁sentence｜>|</s>|<｜tool▁output▁end｜>|<｜tool▁outputs▁(?:begin|end)｜>"
)


def _parse_deepseek3(text: str) -> list[Message]:
    messages: list[Message] = []
    role, position = "system", 0
    text = _BOS.sub("", text, count=1)
    marks = [*_DEEPSEEK3.finditer(text), None]
    for match in marks:
        content = text[position : match.start() if match else len(text)]
        complete = match is not None or role != "assistant"
        if role and (content or (role == "assistant" and complete)):
            messages.append(split_reasoning(_turn(role, content, complete)))
        if match:
            role, position = match.lastgroup or "", match.end()
    return messages


_TURN_END: Final = "\ue003"
_WORDS = re.compile(r"(?:(?<=\n)|(?<=\A))(User|Assistant|Tool):")


def _parse_words(text: str) -> list[Message]:
    # The end of a turn is also where the next one may begin.
    text = _EOS.sub(f"{_TURN_END}\n", _BOS.sub("", text, count=1))
    first, *rest = _WORDS.split(text)
    messages: list[Message] = []
    for role, content in [("system", first), *zip(rest[::2], rest[1::2], strict=True)]:
        if not content.strip():
            continue
        written = content if role == "system" else content.removeprefix(" ")
        body, ended, _ = written.partition(_TURN_END)
        if role == "Assistant":
            messages.append(_turn("assistant", body, bool(ended)))
        else:
            messages.append(_turn(role.lower(), body.removesuffix("\n\n"), True))
    return messages


def _parse_dialogpt(text: str) -> list[Message]:
    *turns, rest = _EOS.split(text)
    messages = [
        _turn("assistant" if i % 2 else "user", content, True) for i, content in enumerate(turns)
    ]
    if rest:
        messages.append(_turn("assistant" if len(turns) % 2 else "user", rest, False))
    return messages


_parse_chatml = _turns(r"<\|im_start\|>(?P<role>[^\n]*)\n", r"<\|im_end\|>|<\|endoftext\|>")
_PARSERS: Final[dict[str, Callable[[str], list[Message]]]] = {
    "chatml": _parse_chatml,
    "qwen": _parse_chatml,
    "smollm": _parse_chatml,
    "qwen3": _turns(
        r"<\|im_start\|>(?P<role>[^\n]*)\n", r"<\|im_end\|>|<\|endoftext\|>", thoughts=""
    ),
    "llama": _turns(
        r"<\|start_header_id\|>(?P<role>.*?)<\|end_header_id\|>\n\n",
        r"<\|eot_id\|>|<\|eom_id\|>",
        roles={"ipython": "tool"},
        calls=None,
    ),
    "gemma": _turns(
        r"<start_of_turn>(?P<role>[^\n]*)\n", "<end_of_turn>", roles={"model": "assistant"}
    ),
    "phi": _turns(r"<\|(?P<role>system|user|assistant)\|>\n", r"<\|end\|>"),
    "phi4": _turns(r"<\|im_start\|>(?P<role>.*?)<\|im_sep\|>", r"<\|im_end\|>"),
    "phi4mini": _turns(
        r"<\|(?P<role>system|user|assistant|tool_response)\|>",
        r"(?:<\|tool\|>[^\n]*?<\|/tool\|>)?<\|end\|>",
        roles={"tool_response": "tool"},
        calls=("<|tool_call|>", "phi4mini"),
    ),
    "granite": _turns(r"<\|start_of_role\|>(?P<role>.*?)<\|end_of_role\|>", r"<\|end_of_text\|>"),
    "kimi": _turns(
        r"<\|im_(?:system|user|assistant)\|>(?!tool_declare<)(?P<role>.*?)<\|im_middle\|>",
        r"<\|im_end\|>",
        calls=("<|tool_calls_section_begin|>", "kimi"),
    ),
    "glm": _turns(
        r"<\|(?P<role>system|user|assistant|observation)\|>(?!\n# Tools\n)\n?",
        r"<\|endoftext\|>|(?=<\|(?:system|user|assistant|observation)\|>)",
        roles={"observation": "tool"},
        calls=("<tool_call>", "glm"),
        thoughts="\n<think></think>",
    ),
    "mistral": _parse_mistral,
    "deepseek": _parse_words,
    "deepseek3": _parse_deepseek3,
    "falcon": _parse_words,
    "dialogpt": _parse_dialogpt,
}

"""Writers of the tokens of a conversation, and the message that each token is in.

Shape legend: T tokens of a conversation.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torchrl_data.conversation import Source
from torchrl_data.display.text import visible

from .row_values import content_text
from .samples import TokenSpan


def token_spans(
    sources: Sequence[int], texts: Sequence[str], messages: Sequence[dict[str, Any]]
) -> list[TokenSpan]:
    """Runs of tokens by writer, with the message that they spell.

    A turn of the policy is the next message of the role ``assistant``. Content is looked up in the
    messages in order, from where the content before it ended; where none has it, nothing is read.

    Args:
        sources: of each token, ``[T]``.
        texts: of each token, ``[T]``.
        messages: of the conversation.
    """
    roles = [str(message.get("role")) for message in messages]
    contents = [visible(content_text(message)) for message in messages]
    spans: list[TokenSpan] = []
    start = at = offset = 0  # of the run, and the message and place in it up to which was read
    for source, run in groupby(sources):
        length = sum(1 for _ in run)
        writer, role, found = "template", "", None
        if source == Source.MODEL:
            writer, role = "model", "assistant"
            found = next((n for n in range(at, len(roles)) if roles[n] == "assistant"), None)
            if found is not None:
                at, offset = found + 1, 0
        elif source != Source.TEMPLATE:
            text = "".join(texts[start : start + length]).strip()
            writer = "context"
            for number in range(at, len(contents)) if text else ():
                begin = contents[number].find(text, offset if number == at else 0)
                if begin >= 0:
                    found = at = number
                    role, offset = roles[number], begin + len(text)
                    if role:
                        writer = "tool" if role in ("tool", "function", "ipython") else "user"
                    break
        spans.append(TokenSpan(writer, role, found, length))
        start += length
    return spans

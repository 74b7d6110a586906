"""The syntax ``<request><Tool>query<call>result<response>``, and where a turn stops."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from transformers import PreTrainedTokenizerBase

from torchrl_data.conversation import (
    stream_number,
)
from torchrl_data.templates.control_tokens import ControlTokenGuard
from torchrl_modules import Generation, SamplingParameters
from torchrl_modules.engines.checked_generation import checked, seeded
from torchrl_modules.engines.engine import Engine

_TOOL: Final = re.compile(r"\s*<([^<>]+)>")


class RequestSyntax(NamedTuple):
    """The marks of requests."""

    request: str = "<request>"
    """Begins a request; the tool's name in angle brackets and the query follow."""
    call: str = "<call>"
    """Ends the query; the model stops here."""
    response: str = "<response>"
    """Ends the tool's result."""
    submit: str = "<submit>"
    """Ends the episode."""

    def parse(self, text: str) -> tuple[str, str] | None:
        """Tool and query of a request.

        Args:
            text: any text; the request is the last one before the first ``<call>`` after one.

        Returns:
            The tool's name and the query, or ``None`` if there is no well-formed request.
        """
        first = text.find(self.request)
        end = text.find(self.call, first) if first >= 0 else -1
        if end < 0:
            return None
        start = text.rfind(self.request, 0, end) + len(self.request)
        match = _TOOL.match(text, start, end)
        return None if match is None else (match.group(1), text[match.end() : end])


def decoded_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Text of tokens, control tokens included; never empty where there are tokens."""
    text = str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
    return text or "".join(tokenizer.convert_ids_to_tokens(list(ids)))


class TextModel:
    """An engine and its tokenizer: samples turns that end at a text, and encodes what others say.

    Engines stop at tokens. Every token that could complete one of the texts stops the engine; where
    it did not complete one, the turn is continued. Nothing is re-tokenised.

    Args:
        engine: draws the tokens.
        tokenizer: of the engine's model, a fast one.
        sampling: the distribution and the budget; its stop tokens are the ends of a sequence.
        stop_texts: each ends with an ASCII character.

    Raises:
        ValueError: a stop text is empty or ends with another character.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParameters,
        stop_texts: Sequence[str],
    ) -> None:
        if not all(text and text[-1].isascii() for text in stop_texts):
            raise ValueError(
                f"A stop text must end with an ASCII character, got {list(stop_texts)}."
            )
        self._engine = engine
        self._tokenizer = tokenizer
        self._stop_texts = tuple(stop_texts)
        self.end_ids = frozenset(sampling.stop_token_ids or ())
        self.max_new_tokens = sampling.max_new_tokens
        last = {text[-1] for text in stop_texts}
        bytes_of = {f"<0x{ord(character):02X}>" for character in last}
        closers = [
            index
            for piece, index in tokenizer.get_vocab().items()
            if piece in bytes_of or last & set(piece)
        ]
        stops = tuple(sorted({*closers, *self.end_ids}))
        self._sampling = replace(sampling, stop_token_ids=stops)
        self._num_calls = 0
        self._guard = ControlTokenGuard(tokenizer)
        bos = tokenizer.bos_token_id
        begins = list(tokenizer("x")["input_ids"])
        self._prefix = [bos] if isinstance(bos, int) and begins[:1] == [bos] else []

    def _call_seeds(self, num_rows: int) -> list[int] | None:
        """A seed for each row of the next call; none where sampling has none."""
        self._num_calls += 1
        if (seed := self._sampling.seed) is None:
            return None
        return [stream_number(seed, self._num_calls, row) for row in range(num_rows)]

    def sample(self, prompts: Sequence[Sequence[int]], budgets: Sequence[int]) -> list[Generation]:
        """A turn for each prompt.

        Args:
            prompts: token ids.
            budgets: most new tokens of each.

        Returns:
            What was sampled, up to the token that completes a stop text or the end of the
            sequence, which is part of it.
        """
        ids: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        ends = [Generation([], [], "length")] * len(prompts)
        waiting = list(range(len(prompts)))
        while waiting:
            params, own = seeded(self._engine, self._sampling, self._call_seeds(len(waiting)))
            drawn = self._engine.generate(
                [[*prompts[i], *ids[i]] for i in waiting],
                params,
                max_new_tokens=[budgets[i] - len(ids[i]) for i in waiting],
                **own,
            )
            going_on = []
            drawn = checked(self._engine, drawn, self._sampling, len(waiting))
            for i, generation in zip(waiting, drawn, strict=True):
                ids[i] += generation.ids
                log_probs[i] += generation.log_probs
                ends[i] = generation
                is_stopped = generation.finish_reason == "stop" and ids[i][-1] not in self.end_ids
                if is_stopped and len(ids[i]) < budgets[i]:
                    text = decoded_text(self._tokenizer, ids[i])
                    if not any(stop in text for stop in self._stop_texts):
                        going_on.append(i)
            waiting = going_on
        return [
            Generation(ids[i], log_probs[i], end.finish_reason, end.error)
            for i, end in enumerate(ends)
        ]

    def encode(self, before: str, content: str, after: str, *, opens: bool) -> list[int]:
        """Token ids of ``before + content + after``.

        Args:
            before: the environment's own text; control tokens in it are control tokens.
            content: of somebody else; nothing in it becomes a control token.
            after: the environment's own text.
            opens: whether it begins the sequence.
        """
        pieces = self._guard.split(f"{before}{self._guard.escape(content)}{after}")
        runs = [(piece.text, piece.before) for piece in pieces if piece.control_id is None]
        texts, starts = [text for text, _ in runs], [start for _, start in runs]
        encoded = iter(self._guard.encode_texts(texts, starts))
        ids = list(self._prefix) if opens else []
        for piece in pieces:
            ids += next(encoded) if piece.control_id is None else [piece.control_id]
        return ids

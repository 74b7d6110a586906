"""An episode as text segments: who wrote which part of the text and of the tokens."""

import math
from itertools import groupby
from typing import TYPE_CHECKING, Final

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text as RichText
from torch import Tensor

from torchrl_data.conversation import Conversations

from .terminal import colour_legend, coloured_tokens
from .text import token_texts, visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_SEGMENT_STYLES: Final = {"prompt": "bright_black", "system": "magenta", "model": "green"}


class TextHistory:
    """Segments of text with their tokens, written by the system or by the model in turn.

    Args:
        text: the first segment; nothing when empty.
        tokens: its token ids, int64 ``[T]``.
        system: whether the system wrote it, and not the model.

    Examples:
        >>> history = TextHistory("What is 2 + 2?", torch.tensor([5, 6]))
        >>> history.append_segment(" 4", torch.tensor([7]), system=False)
        >>> history.text, history.token_masks.tolist()
        ('What is 2 + 2? 4', [0, 0, 1])
    """

    def __init__(self, text: str = "", tokens: Tensor | None = None, system: bool = True) -> None:
        self.text = ""
        self.tokens = torch.zeros(0, dtype=torch.int64)
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.system_spans: list[bool] = []
        self.token_masks = torch.zeros(0, dtype=torch.int64)
        self.log_probs = torch.zeros(0)
        self.completed = False
        self.truncated = False
        self.stop_reason = ""
        self.reward = math.nan  # none was given
        self.reward_error = ""
        if text:
            self.append_segment(text, tokens, system=system)

    @classmethod
    def from_conversations(
        cls,
        conversations: Conversations,
        row: int,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        reward: "float | Tensor | None" = None,
    ) -> "TextHistory":
        """The segments of a conversation: what the policy sampled, and everything else.

        Args:
            conversations: the snapshot.
            row: which row.
            tokenizer: decodes the tokens.
            reward: of the episode, if it has one: a number, or a tensor of one element.
        """
        history = cls()
        ids, log_probs = conversations.token_ids(row), conversations.log_probs(row)
        end = 0
        for sampled, group in groupby(conversations.assistant_mask(row).tolist()):
            start, end = end, end + len(list(group))
            text, span = str(tokenizer.decode(ids[start:end].tolist())), slice(start, end)
            history.append_segment(text, ids[span], not sampled, log_probs=log_probs[span])
        history.reward = math.nan if reward is None else float(reward)
        history.completed = not conversations.position(row).awaits_response
        return history

    @property
    def last_text_segment(self) -> str:
        """The text of the newest segment."""
        start, end = self.text_spans[-1]
        return self.text[start:end]

    def append_segment(
        self,
        text: str,
        tokens: Tensor | None,
        system: bool = True,
        *,
        log_probs: Tensor | None = None,
    ) -> None:
        """Add a segment.

        Args:
            text: its text.
            tokens: its token ids, int64 ``[T]``.
            system: whether the system wrote it, and not the model.
            log_probs: of its tokens as they were sampled, float32 ``[T]``, in nats; 0 when not
                given.

        Raises:
            ValueError: the text or the tokens are empty, or there are not as many log-probs.
        """
        if not text or tokens is None or not len(tokens):
            count = 0 if tokens is None else len(tokens)
            raise ValueError(f"A segment needs text and tokens, got {text!r} and {count} tokens.")
        count, start = len(tokens), len(self.tokens)
        log_probs = torch.zeros(count) if log_probs is None else log_probs
        if len(log_probs) != count:
            raise ValueError(
                f"A segment of {count} tokens needs as many log-probs, got {len(log_probs)}."
            )
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((start, start + count))
        self.system_spans.append(system)
        self.text += text
        self.tokens = torch.cat([self.tokens, tokens])
        written = torch.full((count,), int(not system), dtype=torch.int64)
        self.token_masks = torch.cat([self.token_masks, written])
        self.log_probs = torch.cat([self.log_probs, log_probs])

    def complete(self, truncated: bool = False, *, stop_reason: str = "") -> None:
        """Say that the episode has ended.

        Args:
            truncated: by a limit, and not by itself.
            stop_reason: why.
        """
        self.completed, self.truncated, self.stop_reason = True, truncated, stop_reason

    def split_query_response_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of the first segment, of the others, and the mask of the others.

        Raises:
            ValueError: there is no segment.
        """
        if not self.token_spans:
            raise ValueError("The history has no segment, so there is no query to split off.")
        end = self.token_spans[0][1]
        return self.tokens[:end], self.tokens[end:], self.token_masks[end:]

    # For people ---------------------------------------------------------------------------------

    def show_text(self, *, show_legend: bool = False, console: Console | None = None) -> None:
        """Print the text, coloured by who wrote it, and the reward, if any, once it has ended.

        Args:
            show_legend: print the colours' meaning too.
            console: where to print; a new one on standard output when not given.
        """
        text = RichText()
        for number, (start, end) in enumerate(self.text_spans):
            text.append(visible(self.text[start:end]), style=self._style(number))
        self._print(text, show_legend, console)

    def show_tokens(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        show_legend: bool = False,
        console: Console | None = None,
    ) -> None:
        """Print the tokens, coloured by who wrote them; every other one is underlined.

        Args:
            tokenizer: decodes them.
            show_legend: print the colours' meaning too.
            console: where to print; a new one on standard output when not given.
        """
        spans = enumerate(self.token_spans)
        styles = [self._style(number) for number, span in spans for _ in range(*span)]
        texts = token_texts(self.tokens.tolist(), tokenizer)
        self._print(coloured_tokens(zip(texts, styles, strict=True)), show_legend, console)

    def show_colour_legend(self, console: Console | None = None) -> None:
        """Print what the colours mean.

        Args:
            console: where to print; a new one on standard output when not given.
        """
        (console or Console()).print(colour_legend(_SEGMENT_STYLES.items()))

    def _style(self, number: int) -> str:
        writer = "system" if self.system_spans[number] else "model"
        return _SEGMENT_STYLES["prompt" if writer == "system" and number == 0 else writer]

    def _print(self, text: RichText, show_legend: bool, console: Console | None) -> None:
        console = console or Console()
        console.print(Panel(text))
        if self.completed:
            lines = [] if math.isnan(self.reward) else [f"reward: {self.reward:g}"]
            lines += ["truncated"] if self.truncated else []
            if lines:
                console.print(RichText(", ".join(lines), style="bold red"))
        if show_legend:
            self.show_colour_legend(console)

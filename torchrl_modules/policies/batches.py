"""What a policy reads of a batch and writes into it, in every input mode.

It reads prompts to go on from, or full rows to score; it writes turns with their tokens, masks and
log-probs, or scores.

Shape legend: B rows, T tokens of a row (ragged).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    NonTensorData,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    lazy_stack,
)
from torch import Tensor

from torchrl_data.conversation.batched_object import view_of
from torchrl_data.conversation.conversations import Conversations, Source
from torchrl_data.conversation.images import images_of
from torchrl_data.conversation.views import ConversationView
from torchrl_data.keys import (
    ASSISTANT_MASK,
    ATTENTION_MASK,
    FULL,
    HISTORY,
    INPUT_MODES,
    PROMPT,
    RESPONSE,
    TEXT,
    TOKENS,
    TOKENS_FULL,
    TOKENS_PROMPT,
)
from torchrl_data.layout.containers import TOKEN_GROUPS
from torchrl_data.layout.conversation_io import row_tensordicts, stored_conversations, write_parts
from torchrl_data.layout.ingest import read_fulls, read_prompts
from torchrl_data.layout.token_entries import TokenEntries
from torchrl_data.ragged.packed import entries_of, pack, read_images, read_rows, unpack
from torchrl_data.ragged.padded import padded_rows
from torchrl_data.templates.encoder import ConversationEncoder
from torchrl_data.templates.rendering_identity import check_same_rendering


class PolicyInput:
    """Reads batches of one input mode."""

    def __init__(
        self, mode: str, encoder: ConversationEncoder, *, vocab_size: int, who: str
    ) -> None:
        if mode not in INPUT_MODES:
            raise ValueError(f"{who}: input_mode must be one of {INPUT_MODES}, got {mode!r}.")
        self.mode = mode
        self.encoder = encoder
        self.vocab_size = vocab_size
        self._compared: object = encoder
        self.who = who

    def key(self, which: str) -> NestedKey:
        """The entry of a part in this mode."""
        return self.mode, which

    def prompts(self, batch: TensorDictBase) -> Conversations:
        """The conversations that the policy is to go on with."""
        # batch: of B rows, from an environment or built by hand, see `read_prompts`.
        stored = stored_conversations(batch, self.mode, PROMPT)
        if stored is None:
            return read_prompts(batch, self.mode, encoder=self.encoder, who=self.who)
        if self.mode != HISTORY:
            self._check_shown(view_of(stored.leaf))
        return stored.conversations

    def _check_shown(self, view: Any) -> None:
        """What an environment shows as text or tokens is what the policy samples from."""
        if isinstance(view, ConversationView) and view.encoder is not self._compared:
            if isinstance(view.encoder, ConversationEncoder):
                check_same_rendering(view.encoder, self.encoder)
            self._compared = view.encoder

    def rows_to_score(self, batch: TensorDictBase) -> "RowsToScore":
        """Full rows and which of their tokens to score."""
        # Those are the tokens of the assistant mask. Where there is none they are the response, or
        # what the assistant says in a history, or everything but the first token. A row with a
        # token outside the model's vocabulary is marked, see `known`.
        # batch: of B rows with `(mode, "full")`; ragged `("tokens", "full")` beside an assistant
        # mask is enough in every mode.
        is_record = stored_conversations(batch, TOKENS, FULL) is not None
        if not is_record and read_rows(batch, TOKENS_FULL) is not None:
            return self._checked(self._tokens_to_score(batch))
        fulls = read_fulls(batch, self.mode, encoder=self.encoder, who=self.who)
        if stored_conversations(batch, self.mode, FULL) is not None:
            masks = [fulls.assistant_mask(i) for i in range(len(fulls))]
            images = [fulls.images(i) for i in range(len(fulls))]
            return self._checked(RowsToScore(_all_ids(fulls), masks, media=images))
        if self.mode == HISTORY:
            chats = [fulls.messages(i) for i in range(len(fulls))]
            encoded = self.encoder.encode_chats(chats)
            masks = [torch.tensor(row.sources) == Source.MODEL for row in encoded]
            images = [images_of(chat) for chat in chats]
            ids = [torch.tensor(row.ids) for row in encoded]
            return self._checked(RowsToScore(ids, masks, media=images))
        ids = _all_ids(fulls)
        starts = [fulls.position(i).response_start for i in range(len(fulls))]
        return self._checked(RowsToScore(ids, _from(ids, starts)))

    def _tokens_to_score(self, batch: TensorDictBase) -> "RowsToScore":
        entries = TokenEntries(batch, FULL, who=self.who)
        ids = [torch.tensor(row, dtype=torch.int64) for row in entries.ids()]
        masks = entries.aligned(ASSISTANT_MASK)
        if masks is None:
            prompts = read_rows(batch, TOKENS_PROMPT)
            starts = [0] * len(ids)
            if prompts is not None and entries.keep is None:
                starts = prompts.lengths.tolist()
            masks = _from(ids, starts)
        media = read_images(batch) or ()
        return RowsToScore(ids, [mask.bool() for mask in masks], entries.keep, media=media)

    def _checked(self, rows: "RowsToScore") -> "RowsToScore":
        for i, mask in enumerate(rows.masks):
            if bool(mask[:1].any()):
                raise ValueError(
                    f"{self.who}: the mask of row {i} has its first token, which nothing predicts."
                )
        size = self.vocab_size
        known = [bool(((row >= 0) & (row < size)).all()) for row in rows.ids]
        return rows._replace(known=known)


class RowsToScore(NamedTuple):
    """Rows whose log-probs are asked for."""

    ids: list[Tensor]
    """B tensors, int64 ``[T]``, without padding."""
    masks: list[Tensor]
    """B tensors, bool ``[T]``: the tokens to score."""
    keep: list[Tensor] | None = None
    """Where the tokens are in a padded layout, bool; ``None`` if the rows were ragged."""
    known: Sequence[bool] = ()
    """Per row: all of its tokens are in the vocabulary. Of the others nothing can be scored."""
    media: Sequence[Sequence[str]] = ()
    """Images of each row, in base 64; empty where no row has any."""

    @property
    def images(self) -> list[Sequence[str]] | None:
        """The images of the rows of :meth:`packed`, or ``None`` where no row has any."""
        if not any(self.media):
            return None
        rows = zip(self.ids, self.known, self.media, strict=True)
        return [its if known else [] for ids, known, its in rows if len(ids)]

    @property
    def scored(self) -> list[Tensor]:
        """B tensors, bool ``[T]``: the tokens that can be scored."""
        return [
            mask if known else torch.zeros_like(mask)
            for mask, known in zip(self.masks, self.known, strict=True)
        ]

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids ``[N]``, lengths of the rows that hold any, and what can be scored, bool ``[N]``."""
        ids, lengths = pack(
            [
                row if known else torch.zeros_like(row)
                for row, known in zip(self.ids, self.known, strict=True)
            ]
        )
        return ids, lengths[lengths > 0], pack(self.scored)[0]

    def spread(self, values: Tensor) -> list[Tensor]:
        """Scores to the places of their tokens."""
        # values: [K], of what can be scored.
        # Gives B tensors [T]: 0 where nothing is asked for, NaN where it can't be scored.
        mask, lengths = pack(self.scored)
        flat = torch.zeros(len(mask), dtype=values.dtype, device=values.device)
        rows = unpack(flat.masked_scatter(mask.to(flat.device), values), lengths)
        return [
            row if known else row.masked_fill(asked.to(row.device), torch.nan)
            for row, asked, known in zip(rows, self.masks, self.known, strict=True)
        ]


def _all_ids(conversations: Conversations) -> list[Tensor]:
    return [conversations.token_ids(i) for i in range(len(conversations))]


def _from(ids: list[Tensor], starts: list[int]) -> list[Tensor]:
    """Masks of what follows the prompts; the first token of a row is never in them."""
    return [torch.arange(len(row)) >= max(start, 1) for row, start in zip(ids, starts, strict=True)]


class PolicyOutput:
    """Writes turns into batches of one input mode."""

    # `("history", "full")` and `("history", "response")` are written in every mode.

    def __init__(
        self,
        mode: str,
        encoder: ConversationEncoder,
        *,
        write_tokens: bool,
        pad_output: bool,
        who: str,
    ) -> None:
        if pad_output and not write_tokens:
            raise ValueError(
                f"{who}: pad_output pads what write_tokens writes; write_tokens is False."
            )
        self.mode = mode
        self.encoder = encoder
        self.write_tokens = write_tokens
        self.pad_output = pad_output

    def write(self, batch: TensorDictBase, prompt: Conversations, full: Conversations) -> None:
        """Write a turn of each row."""
        parts = {PROMPT: prompt, RESPONSE: full, FULL: full}
        # Where the tokens are written as ragged rows, the record is in the history alone.
        if self.mode == TEXT or (self.mode == TOKENS and not self.write_tokens):
            write_parts(batch, parts, mode=self.mode, encoder=self.encoder)
            del parts[PROMPT]
        write_parts(batch, parts)
        if self.write_tokens:
            rows = self._token_rows(full).reshape(batch.batch_size)
            set_groups(batch, rows, padded=self.pad_output)

    def _token_rows(self, full: Conversations) -> TensorDictBase:
        rows = row_tensordicts(full)
        if not self.pad_output:
            return lazy_stack(rows)
        pad: Any = self.encoder.tokenizer.pad_token_id
        return padded_rows(rows, pad_token_id=0 if pad is None else pad)


def set_groups(batch: TensorDictBase, groups: TensorDictBase, *, padded: bool = False) -> None:
    """Set groups of token rows; entries of other layouts give way to them."""
    for name in list(groups.keys()):
        stored = batch.get(name, None)
        stored = None if stored is None or is_non_tensor(stored) else entries_of(stored)
        if isinstance(stored, LazyStackedTensorDict):
            stored.update(entries_of(groups.get(name)))
            continue
        entries, kind = groups.get(name), TOKEN_GROUPS.get(name)
        if kind is not None and not isinstance(entries, kind):
            if padded:
                entries.set("padded", NonTensorData(True, batch_size=entries.batch_size))
            entries = kind._from_tensordict(entries, {})
        batch.set(name, entries)


def write_scores(
    batch: TensorDictBase, rows: RowsToScore, values: Mapping[Any, Sequence[Tensor]]
) -> None:
    """Write what was scored, aligned with the full tokens; those too, if the batch lacks them."""
    # values: by entry, B tensors [T] without padding.
    if rows.keep is not None:
        for key, scored in values.items():
            padded = [
                row.new_zeros(len(keep)).masked_scatter(keep.to(row.device), row)
                for row, keep in zip(scored, rows.keep, strict=True)
            ]
            batch.set(key, torch.stack(padded).reshape(*batch.batch_size, -1))
        return
    columns: dict[Any, Sequence[Tensor]] = dict(values)
    if read_rows(batch, TOKENS_FULL) is None:
        columns[TOKENS_FULL] = rows.ids
        columns[ASSISTANT_MASK] = rows.masks
        columns[ATTENTION_MASK] = [torch.ones_like(mask) for mask in rows.masks]
    groups = lazy_stack(
        [_row(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    )
    set_groups(batch, groups.reshape(batch.batch_size))


def _row(entries: dict[Any, Tensor]) -> TensorDictBase:
    row = TensorDict({}, batch_size=[])
    for key, value in entries.items():
        row.set(key, value)
    return row

"""Conversations that somebody else wrote into a batch, taken over exactly.

The loop keeps append-only records. A user may put messages, text or token ids in their place, and a
policy of another library writes them too: here they become records, to the token.

Shape legend: B rows, T tokens of a row (ragged), M messages of a row (ragged).
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tensordict import NonTensorData, TensorDictBase, is_non_tensor

from torchrl_data.conversation.batched_object import objects_of_leaf, snapshot_of
from torchrl_data.conversation.conversations import Conversations, Message
from torchrl_data.conversation.record import Turn, check_messages
from torchrl_data.errors import missing_part
from torchrl_data.history.history import History
from torchrl_data.keys import ASSISTANT_MASK, FULL, HISTORY, LOG_PROBS_FULL, PROMPT, TEXT
from torchrl_data.ragged.packed import entries_of, first_entries

from .conversation_io import stored_conversations
from .token_entries import TokenEntries

if TYPE_CHECKING:
    from torchrl_data.templates.encoder import ConversationEncoder


def read_prompts(
    batch: TensorDictBase, mode: str, *, encoder: "ConversationEncoder | None", who: str
) -> Conversations:
    """The conversations at ``(mode, "prompt")``, whoever wrote them."""
    # mode: `"history"` (a `History [B, M]`), `"text"` (strings) or `"tokens"` (ids, ragged or
    # padded beside `("masks", "all_attention_mask")`).
    # Gives B conversations. Messages wait to be encoded; text and tokens are the whole prompt, to
    # which no template is applied, and show as one message of the user (unless a policy left a
    # record of the same tokens at `("history", "prompt")`).
    stored = stored_conversations(batch, mode, PROMPT)
    if stored is not None:
        return stored.conversations
    if mode == HISTORY:
        return Conversations.from_messages(_chats(batch, PROMPT, who))
    encoder = _need(encoder, mode, who)
    if mode == TEXT:
        return prompt_of_tokens(encode_texts(_texts(batch, PROMPT, who), encoder), encoder)
    ids = TokenEntries(batch, PROMPT, who=who).ids()
    record = stored_conversations(batch, HISTORY, PROMPT)
    if record is not None and _all_ids(record.conversations) == ids:
        return record.conversations
    return prompt_of_tokens(ids, encoder)


def prompt_of_tokens(ids: Sequence[Sequence[int]], encoder: "ConversationEncoder") -> Conversations:
    """Conversations whose prompts are exactly these tokens; the policy is to speak."""
    messages = [[{"role": "user", "content": text}] for text in encoder.decode(ids)]
    return Conversations.from_tokens(ids, messages, awaits_response=True)


def read_fulls(
    batch: TensorDictBase, mode: str, *, encoder: "ConversationEncoder | None", who: str
) -> Conversations:
    """The conversations at ``(mode, "full")``, whoever wrote them."""
    # A record of the same tokens at `("history", "full")`, as policies write one, is used. Where
    # `full` goes on from the prompt of the batch, only what is new is taken over, as a turn of the
    # assistant; `("masks", "all_assistant_mask")` and `("log_probs", "full")` beside it say that
    # the policy sampled it.
    stored = stored_conversations(batch, mode, FULL)
    if stored is not None:
        return stored.conversations
    prompt = None
    if has_entry(batch, (mode, PROMPT)):
        prompt = read_prompts(batch, mode, encoder=encoder, who=who)
    if mode == HISTORY:
        return _continued_chats(prompt, _chats(batch, FULL, who))
    encoder = _need(encoder, mode, who)
    stored = stored_conversations(batch, HISTORY, FULL)
    record = None if stored is None else stored.conversations
    if mode == TEXT:
        return _full_texts(_texts(batch, FULL, who), prompt, record, encoder)
    return _full_tokens(TokenEntries(batch, FULL, who=who), prompt, record, encoder)


def has_entry(batch: TensorDictBase, key: tuple[str, str]) -> bool:
    """Whether a group of the batch holds a part."""
    group = batch.get(key[0], None)
    if group is None or is_non_tensor(group):
        return False
    entries = first_entries(group)
    if key[1] not in set(entries_of(group).keys()):
        return False
    leaf = entries.get(key[1])
    # A TensorClass lists fields that are unset too, as entries of nothing.
    is_value = isinstance(leaf, NonTensorData) and snapshot_of(leaf, Conversations) is None
    return not is_value or leaf.data is not None


def _part(batch: TensorDictBase, mode: str, which: str, who: str) -> Any:
    if not has_entry(batch, (mode, which)):
        raise missing_part(batch, (mode, which), who)
    return entries_of(batch.get(mode)).get(which)


def _need(encoder: "ConversationEncoder | None", mode: str, who: str) -> "ConversationEncoder":
    if encoder is None:
        raise ValueError(f"{who} can't read {mode} without a tokenizer: give it tokenizer=.")
    return encoder


# Messages ----------------------------------------------------------------------------------------


def _chats(batch: TensorDictBase, which: str, who: str) -> list[list[Message]]:
    return chats_of(_part(batch, HISTORY, which, who), batch.numel(), who=who)


def chats_of(leaf: Any, size: int, *, who: str) -> list[list[Message]]:
    """The messages of each conversation of a ``History``."""
    # leaf: a `History`: one conversation [M], or a batch [*B, M].
    if not isinstance(leaf, History):
        raise TypeError(
            f"{who} reads conversations from 'history': a History, got {type(leaf).__name__}. "
            "Build one with History.from_chats([[{'role': ..., 'content': ...}]])."
        )
    chats = _flat_chats(leaf.to_chats())
    if len(chats) != size:
        raise ValueError(
            f"{who}: a History of {len(chats)} conversations in a batch of {size} rows."
        )
    for row, chat in enumerate(chats):
        check_messages(chat, row=row)
    return chats


def _flat_chats(chats: Any) -> list[list[Message]]:
    if isinstance(chats, Mapping):
        return [[dict(chats)]]
    if isinstance(chats[0], Mapping):
        return [[m for m in chats if m["role"] != "<none>"]]
    return [chat for part in chats for chat in _flat_chats(part)]


def _continued_chats(prompt: Conversations | None, chats: Sequence[list[Message]]) -> Conversations:
    if prompt is None:
        return Conversations.from_messages(chats)
    before = [prompt.messages(i) for i in range(len(prompt))]
    grown = prompt.append_messages(
        [
            chat[len(old) :] if chat[: len(old)] == old else []
            for old, chat in zip(before, chats, strict=True)
        ]
    )
    other = Conversations.from_messages(chats)
    index = [
        i if chat[: len(old)] == old else i + len(chats)
        for i, (old, chat) in enumerate(zip(before, chats, strict=True))
    ]
    return Conversations.cat([grown, other])[index]


# Text and tokens ---------------------------------------------------------------------------------


class _Turn(NamedTuple):
    """What follows a prompt."""

    ids: list[int]
    content: str
    log_probs: list[float] | None
    """When the policy sampled it."""


def _texts(batch: TensorDictBase, which: str, who: str) -> list[str]:
    texts = objects_of_leaf(_part(batch, TEXT, which, who), batch.batch_size)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(
                f"{who}: {(TEXT, which)} of row {row} is {type(text).__name__} ({text!r:.80}), "
                "not a string."
            )
    return texts


def _full_texts(
    texts: list[str],
    prompt: Conversations | None,
    record: Conversations | None,
    encoder: "ConversationEncoder",
) -> Conversations:
    if record is not None and encoder.decode(_all_ids(record)) == texts:
        return record
    if prompt is None:
        return _without_prompt(encode_texts(texts, encoder), encoder)
    prompt = encoder.encode_waiting(prompt)
    turns: list[_Turn | None] = []
    for text, before in zip(texts, encoder.decode(_all_ids(prompt)), strict=True):
        if not text.startswith(before):
            turns.append(None)
            continue
        ids, content = encoder.encode_turn(text[len(before) :])
        turns.append(_Turn(ids, content, None))
    return _continued(prompt, turns, lambda: encode_texts(texts, encoder), encoder)


def _full_tokens(
    entries: TokenEntries,
    prompt: Conversations | None,
    record: Conversations | None,
    encoder: "ConversationEncoder",
) -> Conversations:
    rows = entries.ids()
    if record is not None and _all_ids(record) == rows:
        return record
    if prompt is None:
        return _without_prompt(rows, encoder)
    prompt = encoder.encode_waiting(prompt)
    masks = entries.aligned(ASSISTANT_MASK)
    log_probs = entries.aligned(LOG_PROBS_FULL)
    turns: list[_Turn | None] = []
    for i, (row, before) in enumerate(zip(rows, _all_ids(prompt), strict=True)):
        start = len(before)
        if row[:start] != before:
            turns.append(None)
            continue
        sampled = None
        if masks is not None and log_probs is not None and bool(masks[i][start:].all()):
            sampled = log_probs[i][start:].tolist()
        turns.append(_Turn(row[start:], encoder.decode_responses([row[start:]])[0], sampled))
    return _continued(prompt, turns, lambda: rows, encoder)


def _continued(
    prompt: Conversations,
    turns: Sequence[_Turn | None],
    full_ids: Any,
    encoder: "ConversationEncoder",
) -> Conversations:
    """The prompts with their turns; rows that do not go on from theirs are taken over whole."""
    prompt = prompt.append_turns(
        [
            Turn(turn.ids, turn.log_probs, _assistant_message(turn.content))
            if turn is not None and turn.ids
            else None
            for turn in turns
        ]
    )
    if all(turn is not None for turn in turns):
        return prompt
    other = _without_prompt(full_ids(), encoder)
    index = [i if turn is not None else i + len(turns) for i, turn in enumerate(turns)]
    return Conversations.cat([prompt, other])[index]


def _without_prompt(ids: Sequence[Sequence[int]], encoder: "ConversationEncoder") -> Conversations:
    """Where nobody knows what of it is the response, the whole is shown as one turn."""
    return Conversations.from_tokens(
        ids, [[_assistant_message(text)] for text in encoder.decode(ids)]
    )


def _assistant_message(content: str) -> Message:
    return {"role": "assistant", "content": content}


def encode_texts(texts: Sequence[str], encoder: "ConversationEncoder") -> list[list[int]]:
    """Token ids of texts as they are: no template, no token added; control tokens are such tokens.

    Args:
        texts: per row.
        encoder: of the tokenizer.
    """
    if not len(texts):
        return []
    return encoder.tokenizer(list(texts), add_special_tokens=False)["input_ids"]  # type: ignore[return-value]


def _all_ids(conversations: Conversations) -> list[list[int]]:
    return [conversations.ids(i) for i in range(len(conversations))]

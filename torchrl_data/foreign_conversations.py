"""Conversations that somebody else wrote into a batch, taken over exactly.

The loop keeps append-only records. A user may put messages, text or token ids in their place, and
a policy of another library writes them too: here they become records, to the token.

Shape legend: B rows, T tokens of a row (ragged), M messages of a row (ragged).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_non_tensor,
)

from .batched_object import objects_of_leaf, snapshot_of
from .conversation import Conversations, Turn
from .conversation_io import Stored, stored_conversations, write_conversations
from .conversation_view import ConversationView
from .history import History, is_torchrl_history
from .keys import (
    ASSISTANT_MASK,
    FULL,
    HISTORY,
    LOG_PROBS_FULL,
    PROMPT,
    TEXT,
)
from .messages import PLACEHOLDER_ROLE, Message, check_messages
from .missing_entry import missing_entry
from .ragged.packed import entries_of, first_entries
from .ragged.token_entries import TokenEntries

if TYPE_CHECKING:
    from .templates.encoder import ConversationEncoder


def read_prompts(
    batch: TensorDictBase, mode: str, *, encoder: "ConversationEncoder | None", who: str
) -> Conversations:
    """The conversations at ``(mode, "prompt")``, whoever wrote them."""
    # mode: `"history"` (a `History [B, M]`), `"text"` (strings) or `"tokens"` (ids, ragged or
    # padded beside `("masks", "all_attention_mask")`).
    # Gives B conversations. Messages wait to be encoded; text and tokens are the whole prompt, to
    # which no template is applied, and show as one message of the user (unless a policy left a
    # record of the same tokens at `("history", "prompt")`).
    if (stored := stored_conversations(batch, mode, PROMPT)) is not None:
        return stored.conversations
    if mode == HISTORY:
        chats = chats_of(_part(batch, mode, PROMPT, who), batch.numel(), who=who)
        return Conversations.from_messages(chats)
    if encoder is None:
        raise _needs_tokenizer(mode, who)
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
    if (stored := stored_conversations(batch, mode, FULL)) is not None:
        return stored.conversations
    prompt = None
    if has_entry(batch, (mode, PROMPT)):
        prompt = read_prompts(batch, mode, encoder=encoder, who=who)
    if mode == HISTORY:
        chats = chats_of(_part(batch, mode, FULL, who), batch.numel(), who=who)
        return Conversations.from_messages(chats) if prompt is None else _grown(prompt, chats)
    if encoder is None:
        raise _needs_tokenizer(mode, who)
    record = stored_conversations(batch, HISTORY, FULL)
    return _spelled(batch, mode, prompt, record, encoder, who)


def _spelled(
    batch: TensorDictBase,
    mode: str,
    prompt: Conversations | None,
    record: Stored | None,
    encoder: "ConversationEncoder",
    who: str,
) -> Conversations:
    """Full conversations that are there as text or as tokens."""
    entries = None if mode == TEXT else TokenEntries(batch, FULL, who=who)
    fulls: list[Any] = _texts(batch, FULL, who) if entries is None else entries.ids()
    spell: Any = encoder.decode if entries is None else list
    if record is not None and spell(_all_ids(record.conversations)) == fulls:
        return record.conversations
    turns: list[Turn | None] = []
    goes_on: list[bool] = []
    if prompt is not None:
        prompt = encoder.encode_waiting(prompt)
        masks = entries and entries.aligned(ASSISTANT_MASK)
        log_probs = entries and entries.aligned(LOG_PROBS_FULL)
        for i, (full, before) in enumerate(zip(fulls, spell(_all_ids(prompt)), strict=True)):
            start, sampled = len(before), None
            goes_on.append(full[:start] == before)
            if not goes_on[-1]:
                turns.append(None)
                continue
            if entries is None:
                ids, content = encoder.encode_turn(full[start:])
            else:
                ids, content = full[start:], encoder.decode_responses([full[start:]])[0]
            if masks and log_probs and bool(masks[i][start:].all()):
                sampled = log_probs[i][start:].tolist()
            turn = Turn(ids, sampled, {"role": "assistant", "content": content})
            turns.append(turn if ids else None)
        prompt = prompt.append_turns(turns)
        if all(goes_on):
            return prompt
    # Where nobody knows what of it is the response, the whole is shown as one turn.
    ids = encode_texts(fulls, encoder) if entries is None else fulls
    shown = [[{"role": "assistant", "content": text}] for text in encoder.decode(ids)]
    whole = Conversations.from_tokens(ids, shown)
    return whole if prompt is None else _chosen(goes_on, prompt, whole)


def edited(
    batch: TensorDictBase, edit: Callable[[TensorDictBase], TensorDictBase], *, who: str
) -> TensorDictBase:
    """Call a function on a batch whose prompts it sees as a ``History``, which it may change.

    Args:
        batch: of an environment; prompts that are text or ids are left as they are.
        edit: the function. Messages that it adds go on from the tokens that are there; a
            conversation that does not begin with its old messages begins anew.
        who: the component that reads, named in errors.
    """
    if (stored := stored_conversations(batch, HISTORY, PROMPT)) is None:
        return edit(batch)
    before, shape = stored.conversations, batch.batch_size
    batch.set((HISTORY, PROMPT), ConversationView(PROMPT).show(before, shape))
    batch = edit(batch)
    if stored_conversations(batch, HISTORY, PROMPT) is None:
        chats = chats_of(_part(batch, HISTORY, PROMPT, who), batch.numel(), who=who)
        del batch[HISTORY]
        write_conversations(batch, PROMPT, _grown(before, chats))
    return batch


def _grown(before: Conversations, chats: Sequence[list[Message]]) -> Conversations:
    """Conversations with what was added to their messages; those whose messages changed, anew."""
    pairs = [(before.messages(row), chat) for row, chat in enumerate(chats)]
    goes_on = [chat[: len(old)] == old for old, chat in pairs]
    new = [chat[len(old) :] if on else [] for (old, chat), on in zip(pairs, goes_on, strict=True)]
    if all(goes_on):
        return before.append_messages(new) if any(new) else before
    tools = [before.tools(row) for row in range(len(pairs))]
    return _chosen(goes_on, before.append_messages(new), Conversations.from_messages(chats, tools))


def _chosen(goes_on: Sequence[bool], grown: Conversations, whole: Conversations) -> Conversations:
    """The rows of one snapshot that go on from their prompts, and of another one the others."""
    index = [i if on else i + len(goes_on) for i, on in enumerate(goes_on)]
    return Conversations.cat([grown, whole])[index]


def has_entry(batch: TensorDictBase, key: tuple[str, str]) -> bool:
    """Return whether a group of the batch holds a part."""
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
        raise missing_entry(batch, (mode, which), who)
    return entries_of(batch.get(mode)).get(which)


def _needs_tokenizer(mode: str, who: str) -> ValueError:
    return ValueError(f"{who} can't read {mode} without a tokenizer: give it tokenizer=.")


def chats_of(leaf: Any, size: int, *, who: str) -> list[list[Message]]:
    """The messages of each conversation of a ``History``."""
    # leaf: a `History`, ours or TorchRL's: one conversation [M], or a batch [*B, M].
    if is_torchrl_history(leaf):
        leaf = History.from_torchrl(leaf)
    if not isinstance(leaf, History):
        remedy = "Build one with History.from_chats([[{'role': ..., 'content': ...}]])."
        if isinstance(leaf, NonTensorStack):  # a consolidated batch keeps no record of tokens
            remedy = "Make a ParallelEnv with use_buffers=False and consolidate=False."
        raise TypeError(
            f"{who} reads conversations from 'history': a History of torchrl_data or of "
            f"torchrl.data.llm, got {type(leaf).__module__}.{type(leaf).__name__}. {remedy}"
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
        return [[m for m in chats if m["role"] != PLACEHOLDER_ROLE]]
    return [chat for part in chats for chat in _flat_chats(part)]


def _texts(batch: TensorDictBase, which: str, who: str) -> list[str]:
    texts = objects_of_leaf(_part(batch, TEXT, which, who), batch.batch_size)
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            found = f"{type(text).__name__} ({text!r:.80})"
            raise TypeError(f"{who}: {(TEXT, which)} of row {row} is {found}, not a string.")
    return texts


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

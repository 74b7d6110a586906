"""Conversations are read from a batch and written into it, and a row has a saved form."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensorclass,
)
from torch import Tensor

from .checks import missing_entry
from .conversation import (
    Conversations,
    Source,
    Turn,
    conversation_states,
    conversations_from_states,
)
from .history import History, is_torchrl_history
from .keys import (
    ASSISTANT_MASK,
    DONE,
    FULL,
    HISTORY,
    IMAGES,
    INPUT_MODES,
    LOG_PROBS_FULL,
    PROMPT,
    STEP_MASK,
    TEXT,
)
from .layout import TOKEN_GROUPS, ChatHistory, ConversationView, LogProbs, Masks, Text, Tokens
from .messages import PLACEHOLDER_ROLE, Message, check_messages, images_of
from .ragged import (
    BatchedObject,
    TokenEntries,
    entries_of,
    first_entries,
    objects_of_leaf,
    snapshot_of,
    view_of,
)

if TYPE_CHECKING:
    from .templates.encoder import ConversationEncoder


# Conversations in a TensorDict: one opaque object for the whole batch, or the tokens row by row.
#
# In the loop a `BatchedObject` carries the :class:`Conversations`. The group that holds the leaves
# is a :class:`ChatHistory`, which builds a ``History`` when somebody asks for one. A loss and a
# buffer have one TensorDict per row. Shape legend: B rows, T tokens of a row.


def one_dimension(batch: TensorDictBase) -> TensorDictBase:
    """The batch itself if it is ``[B]``, and otherwise its rows in one dimension."""
    return batch if batch.ndim == 1 else batch.reshape(batch.numel())


def active_rows(batch: TensorDictBase) -> Tensor:
    """The rows that take part in a step, bool ``[B]``."""
    # Those of the step mask, or all when there is none, but for those that are done already.
    mask = batch.get(STEP_MASK, None)
    rows = torch.ones(batch.numel(), dtype=torch.bool) if mask is None else mask.view(-1)
    done = batch.get(DONE, None)
    return rows if done is None else rows & ~done.view(-1)


def write_conversations(
    batch: TensorDictBase,
    which: str,
    conversations: Conversations,
    *,
    mode: str | None = None,
    encoder: "ConversationEncoder | None" = None,
) -> None:
    """Put a snapshot at ``(mode, which)``.

    Args:
        batch: a TensorDict of as many rows as the snapshot has.
        which: ``"prompt"``, ``"response"`` or ``"full"``.
        conversations: the snapshot.
        mode: ``"history"``, ``"text"`` or ``"tokens"``; when not given, that of the conversations
            of this name which the batch holds already, or else ``"history"``.
        encoder: spells them out in the modes ``"text"`` and ``"tokens"``.

    Raises:
        ValueError: the number of rows differs, or an encoder is needed and not given.
    """
    if len(conversations) != batch.numel():
        raise ValueError(
            f"A batch of {batch.numel()} rows can't hold {len(conversations)} conversations."
        )
    codec: Any = encoder
    if mode is None:
        stored = _newest(batch, which)
        view = None if stored is None else view_of(stored.leaf)
        is_spelled = isinstance(view, ConversationView)
        mode, codec = (view.mode, view.encoder) if is_spelled else (HISTORY, None)
    write_parts(batch, {which: conversations}, mode=mode, encoder=codec)


def write_parts(
    batch: TensorDictBase,
    parts: Mapping[str, Conversations],
    *,
    mode: str = HISTORY,
    encoder: "ConversationEncoder | None" = None,
) -> None:
    """Put snapshots of the batch's rows at ``(mode, which)``; see :func:`write_conversations`."""
    size = batch.batch_size
    rows = torch.arange(batch.numel()).view(size)
    leaves = {}
    for which, conversations in parts.items():
        if mode != HISTORY and encoder is None:
            raise ValueError(f"Conversations are spelled out as {mode} by an encoder: give it.")
        view = ConversationView(which, mode, None if mode == HISTORY else encoder)
        leaves[which] = BatchedObject.of(conversations, size, rows, rows, view)
    group = _group(batch, mode)
    if group is None:
        kind: Any = {HISTORY: ChatHistory, TEXT: Text}.get(mode, Tokens)
        entries = TensorDict._new_unsafe(leaves, batch_size=size)
        batch.set(mode, kind._from_tensordict(entries, {}))
        return
    for which, leaf in leaves.items():
        group.set(which, leaf)


def read_conversations(batch: TensorDictBase, which: str, *, who: str) -> Conversations:
    """The snapshot of a name, in whatever mode, with exactly the rows of the batch.

    Args:
        batch: of any batch shape ``[*B]``; holds it at ``("history", which)``,
            ``("text", which)`` or ``("tokens", which)``.
        which: ``"prompt"``, ``"response"`` or ``"full"``.
        who: the component that reads, named in the error.

    Returns:
        The conversations of its B rows, in order.

    Raises:
        MissingEntryError: there is none, or a ``History`` built by hand, which has no tokens.

    Example:
        >>> from torchrl_envs import ChatEnv
        >>> queries = TensorDict({"query": ["hello", "bye"]}, batch_size=[2])
        >>> batch = ChatEnv(batch_size=(2,)).reset(queries)
        >>> conversations = read_conversations(batch, "prompt", who="my_function")
        >>> len(conversations), conversations.messages(1)
        (2, [{'role': 'user', 'content': 'bye'}])
    """
    stored = _newest(batch, which)
    if stored is None:
        group = _group(batch, HISTORY)
        kind = type(None if group is None else group.get(which, None)).__name__
        instead = f"where the batch holds {kind} instead of Conversations (text can't be set)"
        raise missing_entry(batch, (HISTORY, which), who, instead=instead)
    return stored.conversations


def _group(batch: TensorDictBase, mode: str) -> Any:
    """The group of a mode; a value of the same name (a column ``text``, say) is none."""
    group = batch.get(mode, None)
    if group is None or is_non_tensor(group):
        return None
    return group if isinstance(group, TensorDictBase) else group._tensordict


class Stored(NamedTuple):
    """Conversations that a batch holds as such."""

    conversations: Conversations
    leaf: Any


def stored_conversations(batch: TensorDictBase, mode: str, which: str) -> Stored | None:
    """What is at ``(mode, which)`` if it is conversations, and otherwise ``None``."""
    group = _group(batch, mode)
    if isinstance(group, LazyStackedTensorDict):
        # Of rows of other kinds there may be no stack: the first one tells.
        first = first_entries(group).get(which, None)
        group = group if snapshot_of(first, Conversations) is not None else None
    leaf = None if group is None else group.get(which, None)
    conversations = snapshot_of(leaf, Conversations)
    return None if conversations is None else Stored(conversations, leaf)


def _newest(batch: TensorDictBase, which: str) -> Stored | None:
    """The conversations of a name."""
    # A policy writes `history` in every mode, so that of another mode is the newer one.
    found = (stored_conversations(batch, mode, which) for mode in reversed(INPUT_MODES))
    return next((stored for stored in found if stored is not None), None)


def row_tensordicts(conversations: Conversations) -> list[TensorDict]:
    """One TensorDict per row, with everything that a loss reads of its tokens.

    Args:
        conversations: a snapshot.

    Returns:
        B TensorDicts without batch size: ``tokens``, a :class:`Tokens` of prompt, response and
        full, int64; ``masks``, a :class:`Masks`, bool; ``log_probs``, a :class:`LogProbs` of
        response and full, float32; ``("policy_versions", "full")``, int64; further values as
        ``(name, "response" / "full")``, float32. All ``[T]``, aligned with the full tokens but
        for prompt and response, which are its beginning and end. ``images`` of a row that has any.

    Example:
        >>> from torchrl_data import ConversationEncoder, encode_demonstrations
        >>> chat = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
        >>> [row] = row_tensordicts(encode_demonstrations(ConversationEncoder(tokenizer), [chat]))
        >>> ids, mask = row["tokens", "full"], row["masks", "all_assistant_mask"]
        >>> ids.shape == mask.shape, tokenizer.decode(ids[mask])
        (True, '4<|im_end|>')
    """
    rows, size = [], torch.Size([])
    for row, record in enumerate(conversations._records):
        position = conversations._positions[row]
        n, start = position.num_tokens, position.response_start
        ids = torch.from_numpy(np.array(record.ids[:n], np.int64))
        log_probs = torch.from_numpy(np.array(record.log_probs[:n], np.float32))
        is_sampled = np.frombuffer(record.sources, np.uint8, n) == Source.MODEL.value
        groups = {
            "tokens": {"prompt": ids[:start], "response": ids[start:], "full": ids},
            "masks": {
                "all_attention_mask": torch.ones(n, dtype=torch.bool),
                "all_assistant_mask": torch.from_numpy(is_sampled),
            },
            "log_probs": {"response": log_probs[start:], "full": log_probs},
            "policy_versions": {"full": torch.from_numpy(np.array(record.versions[:n], np.int64))},
        }
        for name, values in conversations.extra(row).items():
            groups[name] = {"response": values[start:], "full": values}
        entries: dict[str, Any] = {}
        for name, group in groups.items():
            kind, values = TOKEN_GROUPS.get(name), TensorDict._new_unsafe(group, batch_size=size)
            entries[name] = values if kind is None else kind._from_tensordict(values, {})
        if images := images_of(record.messages[: position.num_encoded]):
            entries[IMAGES] = NonTensorData({"data": images})
        rows.append(TensorDict._new_unsafe(entries, batch_size=size))
    return rows


# A row of a buffer as plain values: what a file holds of it without pickle.
#
# Nested dictionaries and lists of strings, numbers, booleans, ``None`` and tensors, so the tensors
# can go into safetensors and all else into JSON. Shape legend: T tokens of a row.

_GROUPS: Final[dict[str, Any]] = {
    kind.__name__: kind for kind in (ChatHistory, LogProbs, Masks, Text, Tokens)
}
_ROWS: Final = "rows"


def row_state(row: TensorDictBase) -> dict[str, Any]:
    """A row as plain values, for a checkpoint.

    Args:
        row: of any batch size; tensors, Python values and rows within it, groups such as
            :class:`Tokens` and :class:`ChatHistory` with their conversations.

    Returns:
        Dictionaries with strings as keys, and lists, of plain values and tensors; the tensors are
        copies, of their dtype and on their device. :func:`row_from_state` makes the row again;
        tuples come back as lists.

    Raises:
        TypeError: an entry holds something that is no plain value; the message names it.
    """
    return _state(row, ())


def row_from_state(state: Mapping[str, Any]) -> TensorDict:
    """The row of which :func:`row_state` made plain values.

    Args:
        state: what it gave.

    Returns:
        The row; conversations have records of their own.
    """
    row = TensorDict({}, batch_size=state["batch_size"])
    for key, entry in state["entries"].items():
        if isinstance(entry, Tensor):
            row.set(key, entry)
            continue
        ((kind, content),) = entry.items()
        if kind == "value":
            row.set_non_tensor(key, content)
        elif kind == "list":
            row.set(key, content)
        elif kind == "messages":
            row.set(key, History.from_chats(content))
        elif kind == "conversations":
            conversations, view = conversations_from_states(content), ConversationView(key)
            row.set(key, BatchedObject.of(conversations, row.batch_size, view=view))
        else:
            entries = row_from_state(content)
            row.set(key, entries if kind == _ROWS else _GROUPS[kind]._from_tensordict(entries, {}))
    return row


# To plain values ---------------------------------------------------------------------------------


def _state(row: TensorDictBase, path: tuple[str, ...]) -> dict[str, Any]:
    entries = {str(key): _entry(value, (*path, str(key))) for key, value in row.items()}
    return {"batch_size": list(row.batch_size), "entries": entries}


def _entry(value: Any, path: tuple[str, ...]) -> Any:
    if isinstance(value, Tensor):
        return _plain(value, path)
    if isinstance(value, BatchedObject):
        conversations, view = snapshot_of(value, Conversations), view_of(value)
        as_messages = isinstance(view, ConversationView) and view.mode == HISTORY
        if conversations is not None and as_messages:
            return {"conversations": _plain(conversation_states(conversations), path)}
        if conversations is None and view is None:
            return {"value": _plain(value.shown(), path)}
        raise _not_plain(value, path)
    if isinstance(value, NonTensorStack):
        return {"list": _plain(value.tolist(), path)}
    if isinstance(value, NonTensorData):
        return {"value": _plain(value.data, path)}
    if isinstance(value, History):
        return {"messages": _plain(value.to_chats(), path)}
    name = type(value).__name__
    if name in _GROUPS:
        return {name: _state(entries_of(value), path)}
    if isinstance(value, TensorDictBase) and not is_tensorclass(value):
        return {_ROWS: _state(value, path)}
    raise _not_plain(value, path)


def _plain(value: Any, path: tuple[str, ...]) -> Any:
    """A value with the types that JSON has, and tensors."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, float, str):  # members of enumerations too
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Tensor):
        # By itself, in order: a view would take what it looks at into the file.
        return value.detach().clone(memory_format=torch.contiguous_format)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _not_plain(value, path)
        return {str(key): _plain(item, (*path, str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, (*path, str(i))) for i, item in enumerate(value)]
    raise _not_plain(value, path)


def _not_plain(value: Any, path: tuple[str, ...]) -> TypeError:
    return TypeError(
        f"row_state: the entry {path} holds a {type(value).__name__} ({value!r:.80}), which has no "
        "plain form. A row that is saved holds tensors, strings, numbers, lists, dictionaries "
        "with strings as keys, and conversations: convert it, or leave it out (map_row= of the "
        "data, exclude() of the row)."
    )


# Conversations that somebody else wrote into a batch, taken over exactly.
#
# The loop keeps append-only records. A user may put messages, text or token ids in their place, and
# a policy of another library writes them too: here they become records, to the token.
#
# Shape legend: B rows, T tokens of a row (ragged), M messages of a row (ragged).


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
    """What a function makes of a batch whose prompts it sees as a ``History``, which it may change.

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

"""Text entries to token entries and back, and messages to the text that a template makes of them.

Shape legend: B rows, T tokens of the longest row.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NestedKey, TensorDictBase
from torchrl.envs import Transform

from torchrl_data.batched_object import read_objects, write_objects
from torchrl_data.checked_attributes import ChecksAttributes
from torchrl_data.history import History
from torchrl_data.missing_entry import MissingEntryError
from torchrl_data.ragged.packed import pad
from torchrl_data.templates.control_tokens import ControlTokenGuard

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _EverywhereAlike(ChecksAttributes, Transform):
    """Does the same at a reset, at a step, in a replay buffer, and by hand."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Do to a batch what is done to what an environment emits."""
        return self._call(tensordict)

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        del tensordict
        return self._call(tensordict_reset)


class Tokenizer(_EverywhereAlike):
    """Writes the tokens of text entries, and the text of token entries on the way in.

    In an environment it reads what the environment emits; in a replay buffer or by hand, what it is
    given. The inverse (an environment's input, what goes into a buffer) decodes.

    Args:
        in_keys: entries with a string per row.
        out_keys: their tokens, int64 ``[B, T]`` padded on the right, and beside each
            ``attention_mask``, bool ``[B, T]``.
        in_keys_inv: what decoded strings are called.
        out_keys_inv: entries with tokens ``[B, T]`` to decode.
        tokenizer: a fast tokenizer.
        skip_special_tokens: leave control tokens out of decoded text.
        control_tokens: whether a control token spelled in a text becomes one. Off, so that content
            can't forge roles; on for text that a chat template rendered.
        missing_tolerance: pass over entries that are absent.

    Raises:
        ValueError: keys do not come in pairs, or there are none.

    Example:
        >>> transform = Tokenizer(["text"], ["tokens"], tokenizer=tokenizer)
        >>> batch = transform(TensorDict({"text": ["hello", "hello world"]}, batch_size=[2]))
        >>> batch["tokens"].dtype, batch["tokens"].shape == batch["attention_mask"].shape
        (torch.int64, True)
        >>> tokenizer.decode(batch["tokens"][0][batch["attention_mask"][0]])
        'hello'
    """

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        in_keys_inv: Sequence[NestedKey] | None = None,
        out_keys_inv: Sequence[NestedKey] | None = None,
        *,
        tokenizer: "PreTrainedTokenizerBase",
        skip_special_tokens: bool = True,
        control_tokens: bool = False,
        missing_tolerance: bool = True,
    ) -> None:
        pairs = [list(keys or ()) for keys in (in_keys, out_keys, in_keys_inv, out_keys_inv)]
        if len(pairs[0]) != len(pairs[1]) or len(pairs[2]) != len(pairs[3]) or not any(pairs):
            raise ValueError(
                "Tokenizer: in_keys go with out_keys, and in_keys_inv with out_keys_inv, one to "
                f"one; got {pairs}."
            )
        super().__init__()
        self._encoded = list(zip(pairs[0], pairs[1], strict=True))
        self._decoded = list(zip(pairs[2], pairs[3], strict=True))
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self.control_tokens = control_tokens
        self.missing = missing_tolerance
        self._guard = ControlTokenGuard(tokenizer)

    changeable = frozenset({"control_tokens", "skip_special_tokens"})

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of some texts.

        Args:
            texts: any texts.
        """
        if not self.control_tokens:
            return self._guard.encode_texts(texts)
        return self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]  # type: ignore[return-value]

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in self._encoded:
            if not self._holds(next_tensordict, in_key):
                continue
            texts: Any = read_objects(next_tensordict, in_key)  # type: ignore[arg-type]
            rows = [torch.tensor(ids, dtype=torch.int64) for ids in self.encode(texts)]
            mask = pad([torch.ones(len(row), dtype=torch.bool) for row in rows], value=False)
            fill: Any = self.tokenizer.pad_token_id or 0
            shape = next_tensordict.batch_size
            next_tensordict.set(out_key, pad(rows, value=int(fill)).reshape(*shape, -1))
            next_tensordict.set(_beside(out_key), mask.reshape(*shape, -1))
        return next_tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in self._decoded:
            if not self._holds(tensordict, out_key):
                continue
            ids = tensordict.get(out_key)
            rows = ids.reshape(-1, ids.shape[-1])
            mask = tensordict.get(_beside(out_key), None)
            keep = torch.ones_like(rows) if mask is None else mask.reshape(rows.shape)
            kept = [row[its.bool()].tolist() for row, its in zip(rows, keep, strict=True)]
            skips = self.skip_special_tokens
            texts = [self.tokenizer.decode(ids, skip_special_tokens=skips) for ids in kept]
            write_objects(tensordict, in_key, texts)  # type: ignore[arg-type]
        return tensordict

    def _holds(self, batch: TensorDictBase, key: NestedKey) -> bool:
        if batch.get(key, None) is not None:
            return True
        if self.missing:
            return False
        raise MissingEntryError(f"Tokenizer reads {key!r}, which the batch lacks.")


def _beside(key: NestedKey) -> NestedKey:
    return "attention_mask" if isinstance(key, str) else (*key[:-1], "attention_mask")


class TemplateTransform(_EverywhereAlike):
    """Messages to the text that a chat template makes of them, and an action's text to a message.

    Args:
        tokenizer: its chat template is used, unless one is given.
        chat_template: Jinja source.
        chat_template_name: name of a built-in template.
        in_keys: entries with a list of messages per row, or a string, which is a user message.
        out_keys: the text, with the header of the assistant's turn; the same entries when not
            given.
        in_keys_inv: what the content of the last message of an action is called.
        out_keys_inv: actions, text that the template would make; the same entries when not given.

    Raises:
        ValueError: keys do not come in pairs.

    Example:
        >>> transform = TemplateTransform(tokenizer)
        >>> batch = transform(TensorDict({"message": ["hello", "bye"]}, batch_size=[2]))
        >>> batch["message"][0].split()
        ['<|im_start|>user', 'hello<|im_end|>', '<|im_start|>assistant']
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        chat_template: str | None = None,
        *,
        chat_template_name: str | None = None,
        in_keys: Sequence[NestedKey] = ("message",),
        out_keys: Sequence[NestedKey] | None = None,
        in_keys_inv: Sequence[NestedKey] = ("action",),
        out_keys_inv: Sequence[NestedKey] | None = None,
    ) -> None:
        super().__init__()
        out_keys = in_keys if out_keys is None else out_keys
        out_keys_inv = in_keys_inv if out_keys_inv is None else out_keys_inv
        if len(in_keys) != len(out_keys) or len(in_keys_inv) != len(out_keys_inv):
            raise ValueError("TemplateTransform: keys go in pairs, one to one.")
        self._rendered = list(zip(in_keys, out_keys, strict=True))
        self._parsed = list(zip(in_keys_inv, out_keys_inv, strict=True))
        self._template: dict[str, Any] = {
            "tokenizer": tokenizer,
            "chat_template": chat_template,
            "chat_template_name": chat_template_name,
        }

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in self._rendered:
            if next_tensordict.get(in_key, None) is None:
                continue
            values: Any = read_objects(next_tensordict, in_key)  # type: ignore[arg-type]
            texts: list[str] = []
            for value in values:
                is_text = isinstance(value, str)
                chat = [{"role": "user", "content": value}] if is_text else list(value)
                texts += History.from_chats([chat]).apply_chat_template(
                    add_generation_prompt=True, tokenize=False, **self._template
                )
            write_objects(next_tensordict, out_key, texts)  # type: ignore[arg-type]
        return next_tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        for in_key, out_key in self._parsed:
            if tensordict.get(out_key, None) is None:
                continue
            texts: Any = read_objects(tensordict, out_key)  # type: ignore[arg-type]
            parsed: list[Any] = [History.from_text(text, **self._template) for text in texts]
            contents = [history[-1].content for history in parsed]
            write_objects(tensordict, in_key, contents)  # type: ignore[arg-type]
        return tensordict

"""Environments that TorchRL's users know by name."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from tensordict import TensorDictBase
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from torchrl_data.conversation import Conversations, EncodedMessages, Turn
from torchrl_data.conversation_io import read_conversations
from torchrl_data.foreign_conversations import encode_texts, prompt_of_tokens
from torchrl_data.keys import PROMPT, TEXT, TOKENS

from .datasets.primer import DataLoadingPrimer
from .datasets.rows import load_rows, one_of
from .episode.episode_env import ChatEnv, EpisodeEnv

# Text or token ids that a model goes on with, as they are: no roles, no chat template.
#
# Shape legend: B rows, T tokens of a row (ragged).


class LLMEnv(ChatEnv):
    """What was said is what comes next: a response is appended to its prompt, and nothing else.

    TorchRL's forerunner of :class:`~torchrl_envs.ChatEnv`, for completion rather than conversation:
    ``reset`` takes a ``query`` (or ``text``) as the whole prompt, ``step`` appends the response,
    with its stop token if it was sampled. By itself it never ends; with a transform
    (:meth:`append_transform`, :meth:`from_dataloader`) it is an
    :class:`~torchrl_envs.EpisodeEnv`, whose episodes end with the first turn that
    nobody answers. Control tokens that a prompt spells are control tokens; use ``ChatEnv`` for what
    others have written.

    Args:
        tokenizer: the policy's.
        from_text: whether prompts are shown as strings, ``("text", "prompt")``, or as token ids,
            ``("tokens", "prompt")``, int64 ``[T]`` per row. Queries are strings in both, and ids
            too with ``from_text=False``.
        batch_size: as of ``ChatEnv``.

    Raises:
        ValueError: the batch has no row.

    Examples:
        >>> env = LLMEnv(tokenizer=tokenizer, batch_size=1)
        >>> batch = env.reset(TensorDict({"query": ["Once upon"]}, batch_size=[1]))
        >>> batch["text_response"] = [" a time"]
        >>> env.step(batch)["next", "text"].prompt
        ['Once upon a time']
    """

    def __init__(
        self,
        *,
        tokenizer: PreTrainedTokenizerBase,
        from_text: bool = True,
        batch_size: Sequence[int] | int = (1,),
    ) -> None:
        mode = TEXT if from_text else TOKENS
        super().__init__(input_mode=mode, batch_size=batch_size, tokenizer=tokenizer)

    @classmethod
    def from_dataloader(
        cls,
        dataloader: Any,
        *,
        tokenizer: PreTrainedTokenizerBase,
        from_text: bool = True,
        batch_size: Sequence[int] | int = (1,),
        repeats: int = 1,
        **kwargs: Any,
    ) -> EpisodeEnv:
        """An environment whose prompts come from data.

        Args:
            dataloader: whatever a ``DataLoadingPrimer`` takes; the batches of a torch
                ``DataLoader`` are taken apart.
            tokenizer: see the class.
            from_text: see the class.
            batch_size: see the class.
            repeats: rollouts of one row, which form a group.
            **kwargs: of the ``DataLoadingPrimer``.
        """
        env = cls(tokenizer=tokenizer, from_text=from_text, batch_size=batch_size)
        return env.append_transform(DataLoadingPrimer(dataloader, group_size=repeats, **kwargs))

    def _with_text(self, batch: TensorDictBase, texts: Sequence[str]) -> Conversations:
        """The prompts with what somebody handed in, as it is."""
        prompt = read_conversations(batch, PROMPT, who="LLMEnv.step")
        rows = encode_texts(texts, self.encoder)
        turns = [
            Turn(ids, None, {"role": "assistant", "content": text})
            for ids, text in zip(rows, texts, strict=True)
        ]
        return prompt.append_turns(turns)

    def _write_prompt(self, batch: TensorDictBase, prompt: Conversations) -> None:
        """The next token is the policy's, without a generation header."""
        super()._write_prompt(batch, _awaiting(prompt))

    def open(self, query: Any, tools: Any) -> Conversations:
        """See :meth:`ChatEnv.open`; queries are prompts, to the token."""
        del tools
        if isinstance(query, str):
            rows = encode_texts([query], self.encoder)
        elif self.input_mode == TOKENS and isinstance(query, Tensor | Sequence):
            rows = [[int(index) for index in query]]
        else:
            also = " or token ids" if self.input_mode == TOKENS else ""
            raise TypeError(
                f"LLMEnv.reset: a query is a string{also}, got {type(query).__name__}: "
                f"{query!r:.80}. Messages need roles: use ChatEnv."
            )
        return _awaiting(prompt_of_tokens(rows, self.encoder))


def _awaiting(prompt: Conversations) -> Conversations:
    nothing = EncodedMessages([], [])
    return prompt.append_encoded([None if p.awaits_response else nothing for p in prompt.positions])


# A chat environment whose conversations begin with the rows of a data set.
#
# Shape legend: B rows.

CollateFn = Callable[[list[dict[str, Any]]], Any]


class DatasetChatEnv(EpisodeEnv):
    """A :class:`~torchrl_envs.ChatEnv` with a :class:`~torchrl_envs.DataLoadingPrimer`.

    Append rewards, tools and limits as to any environment.

    Args:
        dataset: anything that a ``DataLoadingPrimer`` takes: a hub id, a path, data.
        num_envs: rows of the environment, B; a multiple of the group size.
        group_size: rollouts of one draw; 1 when not given.
        repeats: TorchRL's name of the same.
        shuffle: whether to draw in random order.
        seed: of the order and the groups' seeds.
        name: of the configuration, for a hub id or a path; :func:`~torchrl_envs.load_rows` has
            more settings.
        split: which split.
        num_epochs: passes over the data; ``None`` goes on for ever.
        collate_fn: changes rows as in TorchRL: gets a list of one row, gives a list of one row, a
            row, or columns of one value.
        system_prompt: of all conversations; the class's ``SYSTEM_PROMPT`` when not given.
        primer_kwargs: further arguments of the ``DataLoadingPrimer``, such as ``prompt_column``.
        **kwargs: of the :class:`~torchrl_envs.ChatEnv`: ``tokenizer``, ``input_mode``, ...

    Raises:
        ValueError: a setting is out of range, or the data can't be used.
    """

    SYSTEM_PROMPT: ClassVar[str | None] = None

    def __init__(
        self,
        *,
        dataset: Any,
        num_envs: int = 1,
        group_size: int | None = None,
        repeats: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        name: str | None = None,
        split: str | None = None,
        num_epochs: int | None = None,
        collate_fn: CollateFn | None = None,
        system_prompt: str | None = None,
        primer_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        primer = DataLoadingPrimer(
            load_rows(dataset, name=name, split=split),
            group_size=one_of(group_size=group_size, repeats=repeats, default=1),
            map_row=None if collate_fn is None else functools.partial(_collated, collate_fn),
            shuffle=shuffle,
            seed=seed,
            num_epochs=num_epochs,
            **(primer_kwargs or {}),
        )
        env = ChatEnv(
            batch_size=(num_envs,), system_prompt=system_prompt or self.SYSTEM_PROMPT, **kwargs
        )
        super().__init__(env, primer)
        primer.check(self)

    @classmethod
    def from_dataloader(
        cls, dataloader: Any, *, batch_size: int | Sequence[int] = 1, **kwargs: Any
    ) -> Self:
        """An environment over a torch ``DataLoader`` or another iterable, in its own order.

        Args:
            dataloader: its batches are taken apart.
            batch_size: of the environment: one number, B.
            **kwargs: of the class.
        """
        (rows,) = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        return cls(dataset=dataloader, num_envs=rows, **{"shuffle": False, **kwargs})


def _collated(collate_fn: CollateFn, row: dict[str, Any]) -> Mapping[str, Any]:
    """What a collate function makes of one row."""
    collated = collate_fn([row])
    if isinstance(collated, Mapping):
        if all(isinstance(v, list) and len(v) == 1 for v in collated.values()):
            return {name: column[0] for name, column in collated.items()}
        return collated
    (only,) = collated
    return only

"""Rewards that are read off the policy's last message.

Shape legend: B rows.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDictBase

from torchrl_data.conversation.object_entries import read_objects
from torchrl_data.errors import MissingEntryError
from torchrl_data.keys import DONE, FULL, PROMPT, REWARD, ROW, TERMINATED
from torchrl_data.layout.conversation_io import active_rows, read_conversations
from torchrl_envs.concurrency.calls import Outcome
from torchrl_envs.datasets.primer import DataLoadingPrimer
from torchrl_envs.entries.rewards import RewardSource, add_rewards
from torchrl_envs.entries.trajectory_batches import copied_rows, joined_rows
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.graders.answers import final_text, message_text, read_tags

if TYPE_CHECKING:
    from torchrl_envs.episode.episode_env import EpisodeEnv


class AnswerReward(EpisodeTransform, RewardSource):
    """Scores the last message of the policy by its data row.

    In an environment it is one of the sources whose rewards are summed. It can also score finished
    trajectories (as a collector's ``postproc``, or when they come into a replay buffer); there its
    reward takes the place of one that is already there, unless ``add_to_reward`` says otherwise.

    Args:
        set_done_if_answer: end the episode at a message with an ``<answer>`` block, whatever else
            might answer it.
        weight: of the reward in the sum.
        add_to_reward: for finished trajectories: add to the reward that they have.
    """

    required_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of the data that :meth:`parts` reads."""
    part_keys: ClassVar[tuple[str, ...]] = ("success",)
    """Further entries, float32 ``[B, 1, 1]`` (``success`` is bool); NaN or False where the row has
    just not been scored."""

    def __init__(
        self, *, set_done_if_answer: bool = True, weight: float = 1.0, add_to_reward: bool = False
    ) -> None:
        super().__init__()
        if not math.isfinite(weight):
            raise ValueError(f"{self._get_name()}: weight must be finite, got {weight!r}.")
        self.set_done_if_answer = set_done_if_answer
        self.weight = weight
        self.add_to_reward = add_to_reward

    def parts(self, text: str, row: Mapping[str, Any], query: str) -> dict[str, Any]:
        """Score a message.

        Args:
            text: the last message.
            row: of the data.
            query: the last message before the policy's first turn.

        Returns:
            ``reward``, and what belongs to :attr:`part_keys`.
        """
        raise NotImplementedError

    @property
    def reward_names(self) -> list[str]:
        """The class's name."""
        return [self._get_name()]

    def check(self, env: "EpisodeEnv") -> None:
        """The data have the columns.

        Raises:
            ValueError: they don't.
        """
        for loader in env.transforms_of(DataLoadingPrimer):
            missing = [c for c in self.required_columns if c not in loader.columns]
            if missing:
                raise ValueError(
                    f"{self._get_name()} reads the columns {missing}, which the data lack; they "
                    f"have {sorted(loader.columns)}."
                )

    # In an environment --------------------------------------------------------------------------

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if not self.set_done_if_answer:
            return next_tensordict
        prompt = read_conversations(next_tensordict, PROMPT, who=self._get_name())
        turn = read_conversations(tensordict, FULL, who=self._get_name())
        said = [final_text(turn.messages(i)[-1:]) for i in range(len(turn))]
        answered = torch.tensor([read_tags(text).num_answer > 0 for text in said])
        assert len(prompt) == len(answered)
        answered = (answered & active_rows(tensordict)).view(next_tensordict.get(DONE).shape)
        for key in (TERMINATED, DONE):
            next_tensordict.set(key, next_tensordict.get(key) | answered)
        return next_tensordict

    def finish_episodes(
        self, batch: TensorDictBase, next_batch: TensorDictBase, rows: Sequence[int]
    ) -> None:
        """Score the rows."""
        final = read_conversations(next_batch, PROMPT, who=self._get_name())
        data = read_objects(batch, ROW)
        found = [
            self.score_messages(final.messages(i), final.first_response(i), data[i]) for i in rows
        ]
        name = self._get_name()
        outcomes = [
            Outcome(error=p) if isinstance(p, Exception) else Outcome(p[REWARD]) for p in found
        ]
        add_rewards(next_batch, name, rows, outcomes, weight=self.weight, who=name)
        self.write_parts(next_batch, rows, found)

    def write_parts(self, batch: TensorDictBase, rows: Sequence[int], found: Sequence[Any]) -> None:
        """Write the further entries of some rows of an environment's batch.

        Args:
            batch: B rows.
            rows: those that were scored.
            found: what :meth:`parts` gave for each, or an exception.
        """
        for key in self.part_keys:
            value = torch.full((batch.batch_size[0], 1, 1), math.nan)
            if key == "success":
                value = torch.zeros(value.shape, dtype=torch.bool)
            for row, parts in zip(rows, found, strict=True):
                if not isinstance(parts, Exception):
                    value[row] = parts[key]
            batch.set(key, value)

    def row_entry(self, key: str, value: Any) -> Any:
        """A further entry of one finished trajectory.

        Args:
            key: its name.
            value: what :meth:`parts` gave.
        """
        del key
        return torch.tensor([[value]])

    def score_messages(
        self, messages: Sequence[Mapping[str, Any]], first: int, row: Mapping[str, Any] | None
    ) -> dict[str, Any] | Exception:
        """Score a conversation.

        Args:
            messages: all of it.
            first: how many came before the policy's first turn.
            row: of the data.

        Returns:
            What :meth:`parts` gives, or the exception that it raised.
        """
        query = message_text(messages[first - 1]) if first else ""
        # A row of data that can't be scored marks itself, never the batch.
        try:
            said = [m for m in messages[first:] if m["role"] == "assistant"]
            return self.parts(message_text(said[-1] if said else None), row or {}, query)
        except Exception as error:
            return error

    # On finished trajectories -------------------------------------------------------------------

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Score finished trajectories.

        Args:
            tensordict: rows with ``("history", "full")`` and the data's ``row``.

        Returns:
            A batch of the same size with ``reward`` and the further entries, ``[1, 1]`` each; the
            batch itself if it has the further entries already.
        """
        who = self._get_name()
        full = read_conversations(tensordict, FULL, who=who)
        out = copied_rows(tensordict)
        if all(out[0].get(key, None) is not None for key in self.part_keys):
            return tensordict
        for i, row in enumerate(out):
            data = read_objects(row, ROW)[0]
            if data is None:
                raise MissingEntryError(
                    f"{who} reads {ROW!r}, the row of the data, which is absent."
                )
            parts = self.score_messages(full.messages(i), full.first_response(i), data)
            if isinstance(parts, Exception):
                raise parts
            if parts[REWARD] is not None:
                value = torch.tensor([[self.weight * float(parts[REWARD])]])
                held = row.get(REWARD, None)
                row.set(REWARD, value + held if self.add_to_reward and held is not None else value)
            for key in self.part_keys:
                row.set(key, self.row_entry(key, parts[key]))
        return joined_rows(out, tensordict.batch_size)

    def _inv_call(self, tensordict: TensorDictBase | None) -> TensorDictBase | None:
        if tensordict is None or self.in_environment:
            return tensordict
        return self.forward(tensordict)

"""Rewards that are read off the policy's last message.

Shape legend: B rows.
"""

import functools
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase
from torchrl.data import Binary, Composite, Unbounded

from torchrl_data.batched_object import read_objects
from torchrl_data.checks import check_numbers
from torchrl_data.conversation_io import read_conversations
from torchrl_data.keys import (
    ASSISTANT_MASK,
    FULL,
    REWARD,
    ROW,
    SCORABLE,
    STOP_REASON,
)
from torchrl_data.missing_entry import MissingEntryError
from torchrl_data.stop_reason import StopReason, stop_reason_of
from torchrl_envs.concurrency.outcome import Outcome
from torchrl_envs.entries.rewards import (
    REWARD_ERRORS,
    SCORED_BY,
    RewardSource,
    Score,
    dense_reward,
)
from torchrl_envs.entries.trajectories import copied_rows, joined_rows
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeEnvironment, EpisodeTransform, OpenedTurns
from torchrl_envs.episode.trajectory_transform import TrajectoryTransform
from torchrl_envs.graders.answers import as_opened, final_text, read_tags, text_of_message


class AnswerReward(OpenedTurns, EpisodeTransform, RewardSource):
    """Scores the last message of the policy by its data row.

    In an environment it is one of the sources whose rewards are summed. It can also score finished
    trajectories (as a collector's ``postproc``, or when they come into a replay buffer); there its
    reward takes the place of one that is already there, unless ``add_to_reward`` says otherwise.

    Args:
        set_done_if_answer: end the episode at a message with an ``<answer>`` block, whatever else
            might answer it.
        weight: of the reward in the sum.
        add_to_reward: for finished trajectories: add to the reward that they have.

    Example:
        >>> class Right(AnswerReward):
        ...     required_columns = ("answer",)
        ...     component_keys = ()
        ...     def components(self, text, row, query):
        ...         return {"reward": float(row["answer"] in text)}
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?", "answer": "4"}])
        >>> env = ChatEnv(batch_size=(2,)).append_transform(data).append_transform(Right())
        >>> out = env.step(env.reset().set("text_response", ["It is 4.", "It is 5."]))["next"]
        >>> out["reward"].shape, out["reward"].flatten()
        (torch.Size([2, 1, 1]), tensor([1., 0.]))
    """

    component_keys: ClassVar[tuple[str, ...]] = ("success",)
    """Further entries, float32 ``[B, 1, 1]`` (``success`` is bool); NaN or False where the row has
    just not been scored."""

    def __init__(
        self, *, set_done_if_answer: bool = True, weight: float = 1.0, add_to_reward: bool = False
    ) -> None:
        super().__init__()
        check_numbers(self._get_name(), weight=weight)
        self.set_done_if_answer = set_done_if_answer
        self.weight, self.weights = weight, (weight,)
        self.add_to_reward = add_to_reward
        self._id = uuid.uuid4().hex

    def components(self, text: str, row: Mapping[str, Any], query: str) -> dict[str, Any]:
        """Score a message.

        Args:
            text: the last message.
            row: of the data.
            query: the last message before the policy's first turn.

        Returns:
            ``reward``, and what belongs to :attr:`component_keys`.
        """
        raise NotImplementedError

    @property
    def reward_names(self) -> list[str]:
        """The class's name."""
        return [self._get_name()]

    # In an environment --------------------------------------------------------------------------

    def check(self, env: EpisodeEnvironment) -> None:
        """Note what the prompts open of the policy's turns."""
        self.note_environment(env)

    def check_policy(self, policy: Any) -> None:
        """Note what the policy's prompts open of its turns."""
        self.note_encoder(getattr(policy, "encoder", None))

    def after_turn(self, episode: Episode) -> None:
        """End an episode whose turn has an ``<answer>`` block, whatever else might answer it."""
        if not self.set_done_if_answer:
            return
        turn = next(m for m in reversed(episode.messages) if m["role"] == "assistant")
        if read_tags(final_text([turn])).answers:
            episode.terminate()

    def finish(self, episode: Episode) -> None:
        """Score an episode."""
        messages, first = episode.messages, episode.first_response
        found = self.score_messages(messages, first, episode.example)
        name = self._get_name()
        if isinstance(found, Exception):
            outcome = Outcome(error=found)
        else:
            outcome = Outcome(found[REWARD])
            episode.metrics[self.key] = found
        episode.score.add_outcome(name, outcome, weight=self.weight, who=name)

    def export(self, batch: TensorDictBase, episodes: Sequence[Episode]) -> None:
        """Write the further entries."""
        for key in self.component_keys:
            value = self.empty_part(key, batch.batch_size)
            for episode in episodes:  # found by this one, or by another one that it was for
                for found in (episode.metrics.get(self.key), *episode.metrics.values()):
                    if isinstance(found, Mapping) and key in found:
                        value[episode.row] = found[key]
                        break
            batch.set(key, value)

    def empty_part(self, key: str, shape: torch.Size) -> torch.Tensor:
        """Return what a further entry is where a row was not scored, ``[*B, 1, 1]``.

        Args:
            key: its name.
            shape: of the batch.
        """
        if key == "success":
            return torch.zeros(*shape, 1, 1, dtype=torch.bool)
        return torch.full((*shape, 1, 1), math.nan)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:  # type: ignore[override]
        """Declares the further entries."""
        for key in self.component_keys:
            example = self.empty_part(key, reward_spec.shape)
            kind: Any = functools.partial(Binary, 1) if example.dtype == torch.bool else Unbounded
            reward_spec[key] = kind(shape=example.shape, dtype=example.dtype)
        return reward_spec

    def row_entry(self, key: str, value: Any) -> Any:
        """A further entry of one finished trajectory.

        Args:
            key: its name.
            value: what :meth:`components` gave.
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
            What :meth:`components` gives, or the exception that it raised.
        """
        query = text_of_message(messages[first - 1]) if first else ""
        # A row of data that can't be scored marks itself, never the batch.
        try:
            said = as_opened(messages[first:], self.opened_text)
            turns = [message for message in said if message["role"] == "assistant"]
            return self.components(text_of_message(turns[-1] if turns else None), row or {}, query)
        except Exception as error:
            return error

    # On finished trajectories -------------------------------------------------------------------

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Score finished trajectories.

        Args:
            tensordict: rows with ``("history", "full")`` and the data's ``row``.

        Returns:
            A batch of the same size with ``reward`` and the further entries, ``[1, 1]`` each, and
            ``scorable``, ``[1]``; the batch itself if this transform has scored it already. Where
            the scoring raises, ``reward`` is NaN, and ``reward_errors`` says why.
        """
        who = self._get_name()
        full = read_conversations(tensordict, FULL, who=who)
        out = copied_rows(tensordict)
        if all(read_objects(row, SCORED_BY)[0] == self._id for row in out):
            return tensordict  # on the way into this replay buffer, say
        for i, row in enumerate(out):
            data = read_objects(row, ROW)[0]
            if data is None:
                raise MissingEntryError(
                    f"{who} reads {ROW!r}, the row of the data, which is absent."
                )
            parts = self.score_messages(full.messages(i), full.first_response(i), data)
            self._write_reward(row, parts)
            for key in self.component_keys:
                if isinstance(parts, Exception):
                    row.set(key, self.empty_part(key, row.batch_size))
                else:
                    row.set(key, self.row_entry(key, parts[key]))
            row.set_non_tensor(SCORED_BY, self._id)
        return joined_rows(out, tensordict.batch_size)

    def _write_reward(self, row: TensorDictBase, parts: dict[str, Any] | Exception) -> None:
        """Give a finished trajectory its reward, or say that it could not be scored."""
        score, name = Score(), self._get_name()
        is_failure = isinstance(parts, Exception)
        outcome = Outcome(error=parts) if is_failure else Outcome(parts[REWARD])
        reason = read_objects(row, STOP_REASON, "")[0]
        if not stop_reason_of(reason, StopReason.TRUNCATED)[0].is_failure:
            score.add_outcome(name, outcome, weight=self.weight, who=name)
        held = row.get(REWARD, None)
        if held is not None and not (score.error or score.is_scorable):
            return  # it does not apply, and another one may
        reward = torch.tensor([[score.reward]])
        if self.add_to_reward and held is not None and held.numel() == 1:
            reward = reward + held
        elif self.add_to_reward and held is not None:
            reward = dense_reward(reward, held.reshape(-1), row.get(ASSISTANT_MASK))
        row.set(REWARD, reward)
        if score.error or not self.add_to_reward or row.get(SCORABLE, None) is None:
            row.set(SCORABLE, torch.tensor([score.is_scorable]))
            row.set_non_tensor(REWARD_ERRORS, score.error)

    _inv_call = TrajectoryTransform._inv_call

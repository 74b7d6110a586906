"""A second thought: the policy is asked to go on where it would have stopped.

Shape legend: B rows.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_data.conversation.object_entries import read_objects
from torchrl_data.keys import DONE, PROMPT, REWARD, ROW, TERMINATED, TRUNCATED
from torchrl_data.layout.conversation_io import active_rows, read_conversations, write_conversations
from torchrl_envs.episode.episode_transform import EpisodeTransform
from torchrl_envs.rewards.answer import AnswerReward


class AddThinkingPrompt(EpisodeTransform):
    """Answers a policy's last turn with a request to think again, where a condition holds.

    What was sampled stays as it is, and is trained as it is: the request is a message of its own,
    and the policy takes another turn. (Editing the policy's turn, as TorchRL's transform does by
    default, would change tokens that were already sampled; it is refused.)

    Append it after the transforms that score or end episodes.

    Args:
        cond: of a row whose episode would end: a TensorDict with ``("history", "prompt")`` (or the
            environment's mode), the data's ``row``, and ``reward`` where an
            :class:`~torchrl_envs.rewards.answer.AnswerReward` is in the environment.
        prompt: what is said; the first default one when not given.
        random_prompt: draw one of the default ones each time.
        role: who says it: ``"user"``.
        edit_last_turn: only ``False``.
        undo_done: go on too where a transform ended the episode at an answer; otherwise only where
            nobody would have answered.
        egocentric: which default prompts: as if the policy said them to itself.
        max_prompts: most requests in one episode.
        seed: of random prompts.

    Raises:
        ValueError: the past would be rewritten, or settings contradict each other.
    """

    DEFAULT_PROMPTS_EG: Final = (
        "Wait. I should go through this once more, slowly.",
        "Let me check each step before I settle on that.",
        "I may have made a mistake. I will work it out again.",
    )
    DEFAULT_PROMPTS_COG: Final = (
        "Wait. Go through this once more, slowly.",
        "Check each step before you settle on that.",
        "There may be a mistake in this. Work it out again.",
    )

    def __init__(
        self,
        cond: Callable[[TensorDictBase], bool],
        prompt: str | None = None,
        random_prompt: bool = False,
        role: str = "user",
        *,
        edit_last_turn: bool = False,
        undo_done: bool = True,
        egocentric: bool = False,
        max_prompts: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if edit_last_turn or role == "assistant":
            raise ValueError(
                "AddThinkingPrompt: editing the policy's turn, or speaking as the assistant, would "
                "change what was sampled. Use role='user' and edit_last_turn=False: the request is "
                "a message of its own."
            )
        if prompt is not None and random_prompt:
            raise ValueError("AddThinkingPrompt: give prompt or random_prompt, not both.")
        if max_prompts < 1:
            raise ValueError(f"AddThinkingPrompt: max_prompts must be positive, got {max_prompts}.")
        defaults = self.DEFAULT_PROMPTS_EG if egocentric else self.DEFAULT_PROMPTS_COG
        self.cond = cond
        self.prompts = defaults if prompt is None else (prompt,)
        self.random_prompt = random_prompt
        self.role = role
        self.undo_done = undo_done
        self.max_prompts = max_prompts
        self._rng = random.Random(seed)
        self._given: dict[int, int] = {}

    def begin_episodes(self, batch: TensorDictBase, rows: Sequence[int]) -> None:
        """Count from 0 again."""
        del batch
        for row in rows:
            self._given[row] = 0

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        prompt = read_conversations(next_tensordict, PROMPT, who=self._get_name())
        done = next_tensordict.get(DONE).view(-1)
        stays = next_tensordict.get(TRUNCATED).view(-1) | (done & (not self.undo_done))
        open_rows = active_rows(tensordict) & ~stays
        data = read_objects(tensordict, ROW)
        messages: list[list[dict[str, str]]] = [[] for _ in range(len(prompt))]
        for row in open_rows.nonzero().view(-1).tolist():
            ends = bool(done[row]) or prompt.last_message(row)["role"] == "assistant"
            if not ends or self._given.get(row, 0) >= self.max_prompts:
                continue
            if self.cond(self._shown(next_tensordict, row, data[row])):
                self._given[row] = self._given.get(row, 0) + 1
                messages[row] = [{"role": self.role, "content": self._words()}]
        asked = torch.tensor([bool(m) for m in messages]).view(next_tensordict.get(DONE).shape)
        for key in (DONE, TERMINATED):
            next_tensordict.set(key, next_tensordict.get(key) & ~asked)
        write_conversations(next_tensordict, PROMPT, prompt.append_messages(messages))
        return next_tensordict

    def _shown(self, batch: TensorDictBase, row: int, data: dict | None) -> TensorDictBase:
        """What the condition sees of a row."""
        flat = batch if batch.ndim == 1 else batch.reshape(-1)
        one: Any = flat[row]
        shown = TensorDict(dict(one.items()), batch_size=[])
        shown.set_non_tensor(ROW, data)
        prompt = read_conversations(batch, PROMPT, who=self._get_name())
        for scorer in self.env_transforms(AnswerReward):
            parts = scorer.score_messages(prompt.messages(row), prompt.first_response(row), data)
            if not isinstance(parts, Exception) and parts[REWARD] is not None:
                shown.set(REWARD, torch.tensor([[float(parts[REWARD])]]))
        return shown

    def _words(self) -> str:
        return self._rng.choice(self.prompts) if self.random_prompt else self.prompts[0]

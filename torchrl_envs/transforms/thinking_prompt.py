"""A second thought: the policy is asked to go on where it would have stopped."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from tensordict import TensorDict, TensorDictBase

from torchrl_data.checks import check_counts
from torchrl_data.conversation_io import write_conversations
from torchrl_data.keys import HISTORY, PROMPT, REWARD, ROW
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform, takes_one_turn
from torchrl_envs.rewards.answer import AnswerReward

if TYPE_CHECKING:
    from torchrl_envs.episode.episode_transform import EpisodeEnvironment


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

    Example:
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?"}])
        >>> again = AddThinkingPrompt(lambda row: True, "Are you sure?")
        >>> env = ChatEnv(batch_size=(1,)).append_transform(data).append_transform(again)
        >>> out = env.step(env.reset().set("text_response", ["5"]))["next"]
        >>> [message["content"] for message in out["history"].prompt.to_chats()[0]]
        ['2 + 2?', '5', 'Are you sure?']
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
        check_counts("AddThinkingPrompt", max_prompts=max_prompts)
        defaults = self.DEFAULT_PROMPTS_EG if egocentric else self.DEFAULT_PROMPTS_COG
        self.cond = cond
        self.prompts = defaults if prompt is None else (prompt,)
        self.random_prompt = random_prompt
        self.role = role
        self.undo_done = undo_done
        self.max_prompts = max_prompts
        self._rng = random.Random(seed)

    def check(self, env: "EpisodeEnvironment") -> None:
        """There must be room for another turn.

        Raises:
            ValueError: every episode ends with its first turn.
        """
        if takes_one_turn(env):
            raise ValueError(
                "AddThinkingPrompt: the environment ends every episode after one turn, so nobody "
                "would ever think again. Allow more: max_steps=2, say."
            )

    def after_turn(self, episode: Episode) -> None:
        """Ask an episode that would end to think again."""
        ends = episode.is_done or episode.awaits_answer
        stays = episode.is_truncated or (episode.is_done and not self.undo_done)
        stays |= episode.is_last_turn  # there would be no turn to think again in
        num_asked = episode.memory.get(self.key, 0)
        if stays or not ends or num_asked >= self.max_prompts:
            return
        shown = TensorDict({}, batch_size=[])
        base: Any = self._environment().base_env
        encoder = None if base.input_mode == HISTORY else base.encoder
        how: Any = {"mode": base.input_mode, "encoder": encoder}
        write_conversations(shown, PROMPT, episode.conversation, **how)
        shown.set_non_tensor(ROW, None if episode.example is None else dict(episode.example))
        for scorer in self.env_transforms(AnswerReward):
            parts = scorer.score_messages(episode.messages, episode.first_response, episode.example)
            if not isinstance(parts, Exception) and parts[REWARD] is not None:
                shown.set(REWARD, torch.tensor([[float(parts[REWARD])]]))
        if self.cond(shown):
            episode.memory = {**episode.memory, self.key: num_asked + 1}
            episode.resume()
            words = self._rng.choice(self.prompts) if self.random_prompt else self.prompts[0]
            episode.say({"role": self.role, "content": words})

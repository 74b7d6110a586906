"""Reasoning of earlier turns is left out of what the policy sees next, as Qwen3's template does."""

from torchrl_data.conversation.message_edits import split_reasoning
from torchrl_data.conversation.record import Message
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform


class DropReasoning(EpisodeTransform):
    """Drops ``<think>`` blocks of the turns before the newest message of the user.

    Chat templates such as Qwen3's leave out the reasoning of earlier turns when they render a
    conversation; here that is a step of its own, because what was sampled stays as it was sampled:
    the turns so far become a row of their own, see :meth:`Episode.rewrite`, and the episode goes on
    from a history without their reasoning. Between a tool call and its result reasoning stays.
    """

    def before_turn(self, episode: Episode) -> None:
        """Rewrite the history of an episode, if there is reasoning to drop."""
        messages = episode.messages
        roles = [message["role"] for message in messages]
        last_user = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else 0
        earlier = [without_reasoning(message) for message in messages[:last_user]]
        if earlier != messages[:last_user]:
            episode.rewrite([*earlier, *messages[last_user:]])


def without_reasoning(message: Message) -> Message:
    """A message without its reasoning, or the message itself if it has none."""
    if message["role"] != "assistant":
        return message
    parts = split_reasoning(message)
    if parts.get("reasoning_content") is None:
        return message
    return {key: value for key, value in parts.items() if key != "reasoning_content"}

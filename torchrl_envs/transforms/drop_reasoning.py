"""Reasoning of earlier turns is left out of what the policy sees next, as Qwen3's template does."""

from torchrl_data.message_edits import split_reasoning
from torchrl_data.messages import Message
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_transform import EpisodeTransform


class DropReasoning(EpisodeTransform):
    """Drops ``<think>`` blocks of the turns before the newest message of the user.

    Chat templates such as Qwen3's leave out the reasoning of earlier turns when they render a
    conversation; here that is a step of its own, because what was sampled stays as it was sampled:
    the turns so far become a row of their own, see :meth:`Episode.rewrite`, and the episode goes on
    from a history without their reasoning. Between a tool call and its result reasoning stays.

    Example:
        >>> data = DataLoadingPrimer([{"prompt": "2 + 2?"}])
        >>> again = AddThinkingPrompt(lambda row: True, "Are you sure?")
        >>> env = ChatEnv(batch_size=(1,)).append_transform(data).append_transform(again)
        >>> env = env.append_transform(DropReasoning())
        >>> out = env.step(env.reset().set("text_response", ["<think>Two, two.</think>4"]))["next"]
        >>> [message["content"] for message in out["history"].prompt.to_chats()[0]]
        ['2 + 2?', '4', 'Are you sure?']
    """

    def before_turn(self, episode: Episode) -> None:
        """Rewrite the history of an episode, if there is reasoning to drop."""
        messages = episode.messages
        roles = [message["role"] for message in messages]
        last_user = len(roles) - 1 - roles[::-1].index("user") if "user" in roles else 0
        earlier: list[Message] = []
        for message in messages[:last_user]:
            parts = split_reasoning(message) if message["role"] == "assistant" else message
            if parts.get("reasoning_content") is not None:
                message = {k: v for k, v in parts.items() if k != "reasoning_content"}
            earlier.append(message)
        if earlier != messages[:last_user]:
            episode.rewrite([*earlier, *messages[last_user:]])

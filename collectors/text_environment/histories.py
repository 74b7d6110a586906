"""Episodes in plain text as histories of segments, and back.

Shape legend: T tokens of an episode.
"""

from itertools import groupby

from torchrl_data.conversation import (
    ConversationRecord,
    Conversations,
    Position,
    Source,
)
from torchrl_data.display.text_history import TextHistory
from torchrl_envs.episode.episode import Episode


def episode_of(history: TextHistory) -> Episode:
    """An episode in which was said what a history shows; each segment is a message.

    Args:
        history: not empty.
    """
    record = ConversationRecord()
    ids, log_probs = history.tokens.tolist(), history.log_probs.tolist()
    segments = zip(history.text_spans, history.token_spans, history.system_spans, strict=True)
    for (first, last), (start, end), is_system in segments:
        role = ("tool" if record.messages else "user") if is_system else "assistant"
        record.messages.append({"role": role, "content": history.text[first:last]})
        source = Source.CONTENT if is_system else Source.MODEL
        record.extend_tokens(ids[start:end], [source] * (end - start), log_probs[start:end])
    size = len(record.messages)
    awaits = record.messages[-1]["role"] != "assistant"
    episode = Episode()
    episode.conversation = Conversations(
        [record], [Position(len(ids), size, size, awaits, len(ids) if awaits else 0)]
    )
    episode.num_turns = sum(not is_system for is_system in history.system_spans)
    if history.completed:
        (episode.truncate if history.truncated else episode.terminate)(history.stop_reason)
    return episode


def show(episode: Episode, history: TextHistory) -> TextHistory:
    """A history brought up to date: what was said since, how it ended, and its reward.

    Args:
        episode: whose messages and tokens begin with those of the history.
        history: may be empty.

    Returns:
        The history.
    """
    conversation, start = episode.conversation, len(history.tokens)
    ids, log_probs = conversation.token_ids(0), conversation.log_probs(0)
    new = groupby(conversation.assistant_mask(0)[start:].tolist())
    for message, (is_sampled, run) in zip(
        conversation.messages(0)[len(history.text_spans) :], new, strict=True
    ):
        end = start + sum(1 for _ in run)
        content, values = message["content"], log_probs[start:end]
        history.append_segment(content, ids[start:end], system=not is_sampled, log_probs=values)
        start = end
    if episode.is_done and not history.completed:
        history.complete(truncated=episode.is_truncated, stop_reason=episode.stop_reason)
    score = episode.score
    if score.is_scored or score.error:
        history.reward = score.reward
        history.reward_error = score.error
    return history

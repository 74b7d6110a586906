"""Conversations as rows of a TensorDict: one trajectory, one row, all of its turns in it."""

from tensordict import NonTensorData, TensorDict, TensorDictBase

from .conversation import Conversations, Source
from .keys import FULL, HISTORY, LOG_PROBS, MASKS, PROMPT, RESPONSE, TOKENS


def conversation_rows(conversations: Conversations) -> list[TensorDictBase]:
    """One TensorDict per conversation, ragged and without padding.

    Args:
        conversations: B conversations.

    Returns:
        B TensorDicts with batch size ``[]``: ``("tokens", "prompt" | "response" | "full")`` int64
        ``[T]`` (the response is the last turn, the prompt what comes before it),
        ``("masks", "all_assistant_mask" | "all_attention_mask")`` bool ``[T]``,
        ``("log_probs", "full" | "response")`` float32 ``[T]`` (0 where the policy did not sample),
        ``("policy_versions", "full")`` int64 ``[T]`` (-1 there), and ``("history", "full")``, the
        conversation itself.
    """
    return [_row(conversations, i) for i in range(len(conversations))]


def _row(conversations: Conversations, i: int) -> TensorDictBase:
    ids = conversations.token_ids(i)
    log_probs = conversations.log_probs(i)
    assistant = conversations.sources(i) == Source.MODEL
    start = conversations.position(i).response_start
    return TensorDict(
        {
            TOKENS: TensorDict({FULL: ids, PROMPT: ids[:start], RESPONSE: ids[start:]}),
            LOG_PROBS: TensorDict({FULL: log_probs, RESPONSE: log_probs[start:]}),
            MASKS: TensorDict(
                {
                    "all_assistant_mask": assistant,
                    "all_attention_mask": assistant.new_ones(len(ids)),
                }
            ),
            "policy_versions": TensorDict({FULL: conversations.policy_versions(i)}),
            HISTORY: TensorDict({FULL: NonTensorData(conversations[i])}),
        }
    )

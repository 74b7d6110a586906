"""The entry names of a batch, in one place: shape, dtype and who writes them.

Shape legend: B rollouts, T tokens of a rollout (ragged), M messages of a rollout (ragged).
"""

from typing import Final

from tensordict import NestedKey

HISTORY: Final = "history"
"""Group of ``prompt``, ``response`` and ``full`` conversations, ``[B]`` of M messages each."""
TEXT: Final = "text"
"""Group of ``prompt``, ``response`` and ``full`` strings, one per row."""
TOKENS: Final = "tokens"
"""Group of ``prompt``, ``response`` and ``full`` token ids, int64, ragged ``[B, T]``."""
LOG_PROBS: Final = "log_probs"
"""Group aligned with the tokens, float32, in nats, of the distribution that was sampled from."""
UNTEMPERED_LOG_PROBS: Final = "untempered_log_probs"
"""Group aligned with the tokens, float32, in nats, of the model's own softmax: at temperature 1,
without top-k, top-p or min-p. Written by the policy on request."""
ENTROPY: Final = "entropy"
"""Group aligned with the tokens, float32, in nats, of the distribution that each token was drawn
from. Written by the policy on request."""
KEPT_COUNTS: Final = "kept_counts"
"""Group aligned with the tokens, float32: how many tokens top-k, top-p and min-p left, of which
each was drawn. Written by the policy on request."""
SAMPLING_MASK: Final = "sampling_mask"
"""Group of ``lengths``, int32 aligned with the tokens, and ``bytes``, uint8: the tokens that top-k,
top-p and min-p left of each draw, see :class:`~torchrl_data.SamplingMasks`. Written by the policy
on request."""
ROUTED_EXPERTS: Final = "routed_experts"
"""Group of ``full``, uint8 or int16, ragged ``[B, T, L, S]``: the S experts to which each of the L
layers of a mixture sent each token, 255 or negative where that is not known. Written by the policy
on request."""
MASKS: Final = "masks"
"""Group of the masks over ``("tokens", "full")``, bool, ragged ``[B, T]``."""

INPUT_MODES: Final = (HISTORY, TEXT, TOKENS)
"""What a conversation is shown as: messages, text or token ids."""

PROMPT: Final = "prompt"
RESPONSE: Final = "response"
FULL: Final = "full"

HISTORY_PROMPT: Final[NestedKey] = (HISTORY, PROMPT)
HISTORY_RESPONSE: Final[NestedKey] = (HISTORY, RESPONSE)
HISTORY_FULL: Final[NestedKey] = (HISTORY, FULL)
TOKENS_PROMPT: Final = (TOKENS, PROMPT)
TOKENS_FULL: Final = (TOKENS, FULL)
LOG_PROBS_FULL: Final = (LOG_PROBS, FULL)
ATTENTION_MASK: Final = (MASKS, "all_attention_mask")
"""True where a token is real (not padding). Written by the policy."""
ASSISTANT_MASK: Final = (MASKS, "all_assistant_mask")
"""True on the tokens that the policy sampled, stop token included. Written by the policy."""
REF_LOG_PROBS_FULL: Final = ("next", "ref_log_probs", FULL)
"""Log-probs under a reference model, float32, aligned with tokens. Written by ``RetrieveKL``."""

IMAGES: Final = "images"
"""``{"data": [...]}`` per row: its images in order, in base 64; rows without images lack it.
Written beside the tokens, by the policy and the collector."""

QUERY: Final = "query"
"""What starts a conversation: a string or a list of messages per row. Written by data loading."""
TOOLS: Final = "tools"
"""JSON schemas of the tools that a prompt shows, a list per row or ``None``. Written by tools."""
TEXT_RESPONSE: Final = "text_response"
"""An assistant's turn as text, a string per row, in place of a policy's. Written by the user."""
ROW: Final = "row"
"""The dataset row of each rollout, a ``dict`` per row. Written by data loading."""
GROUP_ID: Final = "group_id"
"""int64 ``[B]``: equal for the rollouts of one prompt draw. Written by data loading."""
PAIR_ID: Final = "pair_id"
"""int64 ``[B, 1]``: equal for the two answers of a pair. Written by ``preference_rows``."""
CHOSEN: Final = "chosen"
"""bool ``[B, 1]``: True for the better answer of a pair. Written by ``preference_rows``."""
MARGIN: Final = "margin"
"""float32 ``[B, 1]``: by how much the better answer of a pair is to lead. Written by
``preference_rows``, of data that say it."""
LABEL: Final = "label"
"""bool ``[B, 1]``: True where an answer is desirable. Written by ``kto_rows``."""
MISMATCHED: Final = "mismatched"
"""bool ``[B, 1]``: True where the answer is one to another prompt. Written by ``kto_rows``."""
SEED: Final = "seed"
"""int64 ``[B]``: the seed of the group, equal within it. Written by data loading."""
REWARD: Final = "reward"
"""float32 ``[B, 1, 1]``, or ``[B, T, 1]`` when dense; NaN where a rollout could not be scored.
Written by the reward transforms."""
REWARDS: Final = "rewards"
"""Group of one entry per reward source, float32 ``[B, 1, 1]``; NaN where it does not apply."""
SCORABLE: Final = "scorable"
"""bool ``[B, 1]``: False where no reward could be given. Written by the reward transforms."""
ADVANTAGE: Final = "advantage"
"""float32 ``[B, 1, 1]`` or ``[B, T, 1]``. Written by ``MCAdvantage`` or ``GAE``."""
STATE_VALUE: Final = "state_value"
"""float32 ``[B, T, 1]``: what a critic says that the rest of the episode is worth, before each
sampled token. Written by the critic."""
VALUE_TARGET: Final = "value_target"
"""float32 ``[B, T, 1]``: what the critic should have said; NaN in a row without a reward. Written
by ``GAE``."""
POLICY_VERSION: Final = "policy_version"
"""int64 ``[B]``: the policy version when the trajectory began. Written by the collector."""
TOKEN_POLICY_VERSION: Final[NestedKey] = ("policy_versions", FULL)
"""int64, ragged ``[B, T]``: the version that sampled the token, -1 elsewhere."""
DONE: Final = "done"
TERMINATED: Final = "terminated"
TRUNCATED: Final = "truncated"
STEP_MASK: Final = "_step"
"""bool ``[B]``: rows that take part in a step, all when absent (TorchRL's name)."""
FINISH_REASON: Final = "finish_reason"
"""Why a turn ended, a string per row: stop, length, context_length or ``error: ...`` (see
``stop_reason.FinishReason``). Written by the policy; in rows of a collector the last
turn's."""
STOP_REASON: Final = "stop_reason"
"""Why the episode ended, a string per row (see ``stop_reason.StopReason``). Written by the env."""
STOP_CODE: Final = "stop_code"
"""int64 ``[B]``: the number of ``stop_reason``. Written by the collector."""
STOP_LIMIT: Final = "stop_limit"
"""int64 ``[B]``: the limit that cut the episode, in tokens or turns, -1 where none did. Written by
the collector."""
MAX_NEW_TOKENS: Final = "max_new_tokens"
"""int64 ``[B]``: most tokens of the next turn; 0 for a row that gets none. Written by the env."""
NO_LIMIT: Final = 1 << 40
"""``max_new_tokens`` of a row whose turn is limited by the policy alone."""
NUM_TOOL_CALLS: Final = "num_tool_calls"
"""int64 ``[B, 1]``: what the policy asked of tools in the episode so far. Written by tools."""
NUM_TOOL_ERRORS: Final = "num_tool_errors"
"""int64 ``[B, 1]``: how many of the answers were errors. Written by tools."""
TOOL_CALLS: Final = "tool_calls"
"""``{"calls": [...]}`` per row: tool, turn (from 1), seconds and error of each call of the episode.
Written by the collector where there are tools."""
EPISODE_ID: Final = "episode_id"
"""int64 ``[B]``: equal for the rows of one episode. Written by the collector."""
SEGMENT: Final = "segment"
"""int64 ``[B]``: which row of its episode, from 0; an episode has more than one where its past was
rewritten (a summary, dropped reasoning). Written by the collector."""
NUM_SEGMENTS: Final = "num_segments"
"""int64 ``[B]``: how many rows its episode has. Written by the collector."""
PARENT_SEGMENT: Final = "parent_segment"
"""int64 ``[B]``: the ``segment`` of the row that it left; -1 for the row that opens its episode.
Written by the collector."""
PARENT_TOKENS: Final = "parent_tokens"
"""int64 ``[B]``: how many tokens of that row come before it; what a parallel row begins with alike.
0 without a parent. Written by the collector."""
ROW_KIND: Final = "row_kind"
"""How a row began, a string per row: main, parallel, sub_agent or compaction. Written by the
collector."""
AGENT: Final = "agent"
"""The author of a row, a string per row, see :class:`~torchrl_envs.AgentProgram`; empty where the
policy has no program. Written by the collector."""
BRANCHED_FROM: Final = "branched_from"
"""int64 ``[B]``: the ``episode_id`` of the rollout of its group that it left, see
:class:`~torchrl_envs.BranchRollouts`; -1 for one that began with the prompt. Written by the
collector where rollouts branch."""
BRANCHED_TOKENS: Final = "branched_tokens"
"""int64 ``[B]``: how many tokens of that rollout come before it, its prompt included; 0 without.
Written by the collector where rollouts branch."""
AGENT_REWARD: Final = "agent_reward"
"""float32 ``[B, 1, 1]``: the reward of the row's author, where the agents of a program have rewards
of their own; NaN for one that got none. Written by the collector."""

"""Rendering identity: everything that decides how messages become tokens, so that encoders compare.

An environment and a policy each have an encoder; where they render differently, what the
environment shows is not what the policy samples from.
"""

import hashlib
import json
from typing import Any, NamedTuple, Protocol


class RenderingIdentity(NamedTuple):
    """Equal where the same messages give the same tokens."""

    template: str
    """Jinja source."""
    variables: str
    """Special tokens and template kwargs that the template names, as JSON."""
    reasoning_in_content: bool
    """A ``<think>`` block that begins an assistant's content is its reasoning."""
    vocabulary: str
    """Digest of the tokenizer's backend."""

    @property
    def digest(self) -> str:
        """16 hexadecimal digits that stand for all of it."""
        return rendering_digest(json.dumps(self))


def rendering_digest(text: str) -> str:
    """16 hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Renders(Protocol):
    """A :class:`~torchrl_data.ConversationEncoder`."""

    tokenizer: Any

    @property
    def rendering(self) -> RenderingIdentity:
        """Identity of how messages become tokens."""
        ...


def check_same_rendering(env_encoder: Renders, policy_encoder: Renders) -> None:
    """Check that an environment shows what a policy samples from.

    Args:
        env_encoder: of the environment (``env.encoder``).
        policy_encoder: of the policy (``policy.encoder``).

    Raises:
        ValueError: templates, what they read, or tokenizers differ; the message says in what.
    """
    if env_encoder is policy_encoder or env_encoder.rendering == policy_encoder.rendering:
        return
    env, policy = env_encoder.rendering, policy_encoder.rendering
    ours, theirs = json.loads(env.variables), json.loads(policy.variables)
    missing = object()
    differences = [
        f"{name} ({ours.get(name, 'not given')!r} / {theirs.get(name, 'not given')!r})"
        for name in sorted({*ours, *theirs})
        if ours.get(name, missing) != theirs.get(name, missing)
    ]
    if env.template != policy.template:
        shown = f"({env.template!r:.80} / {policy.template!r:.80})"
        differences.insert(0, f"the chat template {shown}")
    if env.reasoning_in_content != policy.reasoning_in_content:
        shown = f"({env.reasoning_in_content} / {policy.reasoning_in_content})"
        differences.append(f"reasoning_in_content {shown}")
    if env.vocabulary != policy.vocabulary:
        names = (
            f"{type(own).__name__} {own.name_or_path!r} of {len(own)} tokens"
            for own in (env_encoder.tokenizer, policy_encoder.tokenizer)
        )
        differences.append(f"the tokenizer ({' / '.join(names)})")
    raise ValueError(
        "The environment shows other text than the policy samples from. They differ (environment / "
        f"policy) in {', '.join(differences)}. Give both the same tokenizer, chat template and "
        "template kwargs."
    )

"""What decides how messages become tokens, so that two encoders can be compared.

An environment and a policy each have an encoder; where they render differently, what the
environment shows is not what the policy samples from.
"""

import hashlib
import json
from collections.abc import Mapping
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
        return _digest(json.dumps(self))


def rendering_identity(
    template: str,
    variables: Mapping[str, Any],
    reasoning_in_content: bool,
    backend: Any,
) -> RenderingIdentity:
    """The identity of what an encoder is made of; ``backend`` is a fast tokenizer's."""
    read = {name: value for name, value in variables.items() if name in template}
    tokenizer = json.loads(backend.to_str())
    for stage in ("truncation", "padding", "post_processor"):  # encoders use none of them
        tokenizer.pop(stage, None)
    return RenderingIdentity(
        template,
        json.dumps(read, sort_keys=True, default=repr),
        reasoning_in_content,
        _digest(json.dumps(tokenizer, sort_keys=True)),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Renders(Protocol):
    """A :class:`~torchrl_data.ConversationEncoder`."""

    tokenizer: Any

    @property
    def rendering(self) -> RenderingIdentity:
        """What decides how messages become tokens."""
        ...


def check_same_rendering(env_encoder: Renders, policy_encoder: Renders) -> None:
    """Check that an environment shows what a policy samples from.

    Args:
        env_encoder: of the environment (``env.encoder``).
        policy_encoder: of the policy (``policy.encoder``).

    Raises:
        ValueError: templates, what they read, or tokenizers differ; the message says in what.
    """
    if env_encoder is policy_encoder:
        return
    env, policy = env_encoder.rendering, policy_encoder.rendering
    if env == policy:
        return
    differences = []
    if env.template != policy.template:
        differences.append(f"the chat template ({env.template!r:.80} / {policy.template!r:.80})")
    ours, theirs = json.loads(env.variables), json.loads(policy.variables)
    differences += [
        f"{name} ({ours.get(name, 'not given')!r} / {theirs.get(name, 'not given')!r})"
        for name in sorted({*ours, *theirs})
        if ours.get(name, _ABSENT) != theirs.get(name, _ABSENT)
    ]
    if env.reasoning_in_content != policy.reasoning_in_content:
        differences.append(
            f"reasoning_in_content ({env.reasoning_in_content} / {policy.reasoning_in_content})"
        )
    if env.vocabulary != policy.vocabulary:
        differences.append(
            f"the tokenizer ({_name(env_encoder.tokenizer)} / {_name(policy_encoder.tokenizer)})"
        )
    raise ValueError(
        "The environment shows other text than the policy samples from. They differ (environment / "
        f"policy) in {', '.join(differences)}. Give both the same tokenizer, chat template and "
        "template kwargs."
    )


_ABSENT = object()


def _name(tokenizer: Any) -> str:
    return f"{type(tokenizer).__name__} {tokenizer.name_or_path!r} of {len(tokenizer)} tokens"

"""The conversations of an episode whose program owns the loop: the branches of its tree of rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torchrl_data.conversation import Conversations
from torchrl_data.messages import Message
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.row_origin import COMPACTION, PARALLEL, SUB_AGENT, RowOrigin

from . import turns

AGENT_HEADERS: Final = ("x-agent-name", "x-openai-subagent")
"""Headers by which a program names the author of a request; Codex sends the second."""
_NAME_CHARACTERS: Final = 60


def author_of(request: turns.TurnRequest) -> str:
    """The name of the agent that asks.

    Args:
        request: what it asks for.

    Returns:
        What a header says, or else the first line of the system prompt, or else the names of the
        tools; at most 60 characters.
    """
    name = request.agent
    if not name:
        texts = [m.get("content") for m in request.messages if m["role"] == "system"]
        lines = [line.strip() for text in texts for line in str(text or "").splitlines()]
        name = next(filter(None, lines), "")
    if not name:
        tools = [tool["function"]["name"] for tool in request.tools or ()]
        name = f"agent with {', '.join(tools)}" if tools else "agent"
    return name[:_NAME_CHARACTERS].strip()


class Branches:
    """The conversations of an episode, as its program knows them.

    A request whose messages begin as one of them did, with the same tools, goes on with it: only
    what is new is encoded. Any other one begins a conversation of its own, in a row of its own, and
    so does one that shares more turns of the policy with another conversation. It begins with the
    very tokens that were sampled there; they are context here, and trained in the other row alone.

    Args:
        encode: gives the policy's prompt, or raises where it can't be one.
    """

    def __init__(self, encode: Callable[[Conversations], Conversations]) -> None:
        self._encode = encode
        self._known: list[_Branch] = []
        """The one that the episode is in comes last."""

    def begin(self, episode: Episode, request: turns.TurnRequest) -> None:
        """The episode opens with this request.

        Args:
            episode: gets its author; its conversation is not begun yet.
            request: the program's first one.

        Raises:
            RequestError: it can't be a prompt; as if it had not come.
        """
        self._encode(Conversations.from_messages([request.messages], [request.tools]))
        origin = RowOrigin(agent=author_of(request))
        episode.origins = (origin,)
        told = [turns.comparable(message) for message in request.messages]
        self._known.append(_Branch(request.tools, told, origin))

    def go_on(self, episode: Episode, request: turns.TurnRequest) -> None:
        """Take an episode to where a request wants it.

        Args:
            episode: the policy has answered the request before this one.
            request: the program's next one.

        Raises:
            RequestError: it can't be a prompt; as if it had not come.
        """
        shown = [turns.comparable(message) for message in request.messages]
        current = self._known[-1]
        current.origin = episode.origins[-1]  # another part may have rewritten it
        current.points[len(current.told)] = episode.conversation
        # A conversation ends with a reply, and no request does: it never has as many as are shown.
        known = [b for b in self._known if b.tools == request.tools and len(b.told) < len(shown)]
        begun = [b for b in known if b.told == shown[: len(b.told)]]
        found = max(begun, key=lambda b: len(b.told), default=None)
        points = self._points(request, shown)
        if found is None or max(points, default=0) > len(found.told):
            origin = self._origin(episode, request, shown)
            found = _Branch(request.tools, [], origin)
            before = _begun(request, points)
        else:
            at = episode.origins.index(found.origin)
            before = episode.rows[at].append_messages([request.messages[len(found.told) :]])
        conversation = self._encode(before)  # nothing has changed if that raises
        self._known = [branch for branch in self._known if branch is not found]
        if found is current:
            episode.conversation = conversation
        else:
            episode.go_to_row(found.origin, conversation)
        found.told, found.waits = shown, False
        self._known.append(found)

    def add_reply(self, message: Message) -> None:
        """The program is told of the policy's turn.

        Args:
            message: as it is told.
        """
        self._known[-1].told.append(turns.comparable(message))
        self._known[-1].waits = bool(message.get("tool_calls"))
        self._known[-1].said = str(message.get("content") or "").strip()

    def _points(self, request: turns.TurnRequest, shown: list[Any]) -> dict[int, Conversations]:
        """Conversations that a request begins with, by how many messages they had then."""
        return {
            size: point
            for branch in self._known
            if branch.tools == request.tools
            for size, point in branch.points.items()
            if size <= _shared(branch.told, shown)
        }

    def _origin(self, episode: Episode, request: turns.TurnRequest, shown: list[Any]) -> RowOrigin:
        """The origin of a row that begins with a request."""
        kind, parent = self._kind_and_parent(request, shown)
        at = episode.origins.index(parent.origin)
        left_at = None if kind == PARALLEL else episode.rows[at].num_tokens(0)
        return episode.next_origin(kind, parent.origin, left_at, author_of(request))

    def _kind_and_parent(
        self, request: turns.TurnRequest, shown: list[Any]
    ) -> tuple[str, "_Branch"]:
        """Tell how a conversation begins that goes on with none, and which one it leaves."""
        author, newest = author_of(request), self._known[::-1]
        own = [branch for branch in newest if branch.origin.agent == author]
        others = [b for b in newest if b.waits and b.origin.agent != author]
        if not own:
            return SUB_AGENT, (others or newest)[0]
        nearest = max(own, key=lambda branch: _shared(branch.told, shown))
        num_shared = _shared(nearest.told, shown)
        if any(m["role"] != "system" for m in request.messages[:num_shared]):
            is_rewritten = _is_rewritten(nearest.told, shown, num_shared)
            return (COMPACTION if is_rewritten else PARALLEL), nearest
        new = [m for m in request.messages[num_shared:] if m["role"] != "assistant"]
        said = newest[0].said
        if said and any(said in str(message.get("content") or "") for message in new):
            return COMPACTION, own[0]  # what the policy said last stands for what was said before
        return (SUB_AGENT, others[0]) if others else (PARALLEL, own[0])


@dataclass(eq=False)
class _Branch:
    """A conversation of an episode, as its program was told of it."""

    tools: Sequence[Any] | None
    told: list[Any]
    origin: RowOrigin
    points: dict[int, Conversations] = field(default_factory=dict)
    """Where it stood after each turn of the policy, by how many messages it had then."""
    waits: bool = False
    """Its last turn called tools, and nothing has come after it."""
    said: str = ""
    """The text of its last turn."""


def _begun(request: turns.TurnRequest, points: Mapping[int, Conversations]) -> Conversations:
    """A conversation that begins with a request; what the policy said is there as it said it."""
    if not points:
        return Conversations.from_messages([request.messages], [request.tools])
    size = max(points)
    return points[size].as_context().append_messages([request.messages[size:]])


def _shared(told: Sequence[Any], shown: Sequence[Any]) -> int:
    """Count the messages that two conversations begin with alike."""
    pairs = zip(told, shown, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(told), len(shown)))


def _is_rewritten(told: Sequence[Any], shown: Sequence[Any], num_shared: int) -> bool:
    """Return whether a conversation is another one with some of it left out or changed."""
    if num_shared in (len(told), len(shown)):
        return False  # the same question again, or the whole with other tools
    role = turns.KEPT.index("role")
    if told[num_shared][role] == "assistant":
        return True  # the policy's turn is left out, or is another one
    later = [message for message in told[num_shared:] if message[role] == "assistant"]
    return any(message in later for message in shown[num_shared:])


def named_by_header(headers: Mapping[str, str]) -> str:
    """The author that the headers of a request name; empty where they name none."""
    return next((headers[name].strip() for name in AGENT_HEADERS if headers.get(name)), "")

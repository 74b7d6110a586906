"""Which conversation of an episode a request goes on with."""

from collections.abc import Callable, Sequence
from typing import Any

from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.record import Message
from torchrl_envs.episode.episode import Episode

from .turns import TurnRequest, comparable


class Branches:
    """The conversations of an episode, as its program knows them.

    A request whose messages begin as one of them did, with the same tools, goes on with it: only
    what is new is encoded. Any other one begins a conversation of its own, in a row of its own;
    what the policy has sampled in the others stays as it is, and none of it is trained again.

    Args:
        encode: gives the policy's prompt, or raises where it can't be one.
    """

    def __init__(self, encode: Callable[[Conversations], Conversations]) -> None:
        self._encode = encode
        self._known: list[_Branch] = []
        """The one that the episode is in comes last."""

    def begin(self, request: TurnRequest) -> None:
        """The episode opens with this request.

        Args:
            request: the program's first one.

        Raises:
            RequestError: it can't be a prompt; as if it had not come.
        """
        self._encode(Conversations.from_messages([request.messages], [request.tools]))
        self._known.append(_Branch(request, _shown(request)))

    def go_on(self, episode: Episode, request: TurnRequest) -> None:
        """Take an episode to where a request wants it.

        Args:
            episode: the policy has answered the request before this one.
            request: the program's next one.

        Raises:
            RequestError: it can't be a prompt; as if it had not come.
        """
        shown = _shown(request)
        current = self._known[-1]
        found = max(
            (b for b in self._known if b.is_begun_by(request.tools, shown)),
            key=lambda b: len(b.told),
            default=None,
        )
        if found is None:
            conversation = Conversations.from_messages([request.messages], [request.tools])
        else:
            before = episode.conversation if found is current else found.left_at
            assert before is not None
            conversation = before.append_messages([request.messages[len(found.told) :]])
        conversation = self._encode(conversation)  # nothing has changed if that raises
        if found is current:
            episode.conversation = conversation
        else:
            _leave(episode, current, None if found is None else found.left_at)
            episode.conversation = conversation
        if found is None:
            found = _Branch(request, shown)
        else:
            self._known.remove(found)
            found.told = shown
        self._known.append(found)

    def add_reply(self, message: Message) -> None:
        """The program is told of the policy's turn.

        Args:
            message: as it is told.
        """
        self._known[-1].told.append(comparable(message))


class _Branch:
    """One conversation of an episode, as its program was told of it."""

    def __init__(self, request: TurnRequest, shown: list[Any]) -> None:
        self.tools = request.tools
        self.told = shown
        self.left_at: Conversations | None = None
        """Where the episode left it for another one."""

    def is_begun_by(self, tools: Sequence[Any] | None, shown: Sequence[Any]) -> bool:
        n = len(self.told)
        return self.tools == tools and n < len(shown) and self.told == shown[:n]


def _shown(request: TurnRequest) -> list[Any]:
    return [comparable(message) for message in request.messages]


def _leave(episode: Episode, current: _Branch, entered: Conversations | None) -> None:
    """The conversation that is left is a row of its own, and the one that is entered is none."""
    current.left_at = episode.conversation
    others = (s for s in episode.segments if s is not entered)
    episode.segments = (*others, current.left_at)

"""Which conversation of an episode a request goes on with."""

from torchrl_data.conversation.conversations import Conversations
from torchrl_data.conversation.record import Message
from torchrl_envs.episode.episode import Episode

from .turns import TurnRequest, comparable


class Branches:
    """The conversations of an episode, as its program knows them.

    A request whose messages begin as one of them did, with the same tools, goes on with it: only
    what is new is encoded. Any other one begins a conversation of its own, in a row of its own;
    what the policy has sampled in the others stays as it is, and none of it is trained again.
    """

    def __init__(self) -> None:
        self._known: list[_Branch] = []
        """The one that the episode is in comes last."""

    def begin(self, request: TurnRequest) -> None:
        """The episode opens with this request.

        Args:
            request: the program's first one.
        """
        self._known.append(_Branch(request))

    def go_on(self, episode: Episode, request: TurnRequest) -> None:
        """Take an episode to where a request wants it.

        Args:
            episode: the policy has answered the request before this one.
            request: the program's next one.
        """
        current = self._known[-1]
        found = max(
            (b for b in self._known if b.is_begun_by(request)),
            key=lambda b: len(b.told),
            default=None,
        )
        if found is not current:
            current.left_at = episode.conversation
        if found is None:
            found = _Branch(request)
            conversation = Conversations.from_messages([request.messages], [request.tools])
            _leave_for(episode, conversation, current.left_at)
        else:
            self._known.remove(found)
            if found is not current:
                _leave_for(episode, found.left_at, current.left_at)
            episode.say(*found.add(request))
        self._known.append(found)

    def add_reply(self, message: Message) -> None:
        """The program is told of the policy's turn.

        Args:
            message: as it is told.
        """
        self._known[-1].told.append(comparable(message))


class _Branch:
    """One conversation of an episode, as its program was told of it."""

    def __init__(self, request: TurnRequest) -> None:
        self.tools = request.tools
        self.told = [comparable(message) for message in request.messages]
        self.left_at: Conversations | None = None
        """Where the episode left it for another one."""

    def is_begun_by(self, request: TurnRequest) -> bool:
        if self.tools != request.tools or len(self.told) >= len(request.messages):
            return False
        shown = request.messages[: len(self.told)]
        return all(comparable(m) == told for m, told in zip(shown, self.told, strict=True))

    def add(self, request: TurnRequest) -> list[Message]:
        """The messages that are new."""
        new = request.messages[len(self.told) :]
        self.told += [comparable(message) for message in new]
        return new


def _leave_for(
    episode: Episode, conversation: Conversations | None, left: Conversations | None
) -> None:
    """Go on with another conversation; the one that is left is a row of its own."""
    assert conversation is not None
    assert left is not None
    episode.segments = (*(s for s in episode.segments if s is not conversation), left)
    episode.conversation = conversation

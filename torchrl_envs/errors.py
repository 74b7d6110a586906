"""An environment that is lost ends its row."""


class EpisodeLostError(Exception):
    """The environment of a rollout can't go on: its server does not answer, its process is gone.

    Raised by a tool, it ends the row: truncated, unscorable, with the error in ``stop_reason``. Any
    other exception is something that the model reads, and may repair.
    """

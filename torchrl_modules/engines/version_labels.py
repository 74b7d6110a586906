"""Labels by which a server names the weights that draw its tokens."""

from collections.abc import Collection


class StaleWeights(RuntimeError):
    """Tokens were drawn by other weights than the engine was given."""


def version_number(label: str) -> int:
    """The version that a server's label means; one that was given none has the first weights."""
    return int(label) if label.isdecimal() else 0


def check_labels(drawn_by: Collection[str], labels: Collection[str], *, who: str) -> None:
    """Check that nothing was drawn by weights that the client does not know.

    Raises:
        StaleWeights: something was.
    """
    if other := sorted(set(drawn_by) - set(labels)):
        raise StaleWeights(
            f"{who}: tokens were drawn by the weights {other}, not by "
            f"{sorted(labels)}. The server was restarted, or another client updates it. Send "
            "the weights again."
        )

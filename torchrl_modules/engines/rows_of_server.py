"""Client of a server that draws rows: connections, a watch over its progress, known weights."""

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Final

from torchrl_modules.sampling.parameters import SamplingParameters

from .engine import EngineDied, Generation
from .json_client import JSONClient
from .loop_thread import gather_rows
from .progress import ProgressWatch
from .version_labels import version_number
from .whole_batch_engine import Row, WholeBatchEngine

_MAX_LABELS: Final = 1 << 12
"""So many of the last updates are known by name: more come while no row is drawn."""


class RowsOfServer(WholeBatchEngine):
    """Asks a server for each row by itself, and is told when the server makes no progress.

    Args:
        url: of the server.
        token: what it asks for.
        timeout_s: a single request without an answer for so long means that it is stuck.
        stall_timeout_s: the same, of rows without progress.
        num_connections: most rows that are drawn at a time.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        timeout_s: float,
        stall_timeout_s: float,
        num_connections: int,
    ) -> None:
        self._rows = JSONClient(url, timeout_s, token=token, num_connections=num_connections)
        # Rows that wait while weights are replaced hold their connections, all that there are.
        self._client = JSONClient(url, timeout_s, token=token)
        self._prober = JSONClient(url, min(5.0, stall_timeout_s / 2), token=token)
        self._slots = asyncio.Semaphore(num_connections)
        self._watch = ProgressWatch(self._probe, self._fail, stall_timeout_s=stall_timeout_s)
        self._failure = ""
        self._labels: list[str] = []

    @property
    def version(self) -> int:
        """Version of the weights that serve; 0 before the first update."""
        return version_number(self._labels[-1])

    def _labels_since(self, first: str) -> Sequence[str]:
        """Return the weights that may have drawn a row which was asked for by ``first``."""
        labels = self._labels
        return labels[labels.index(first) if first in labels else 0 :]

    def _add_label(self, label: str) -> None:
        self._labels = [*self._labels[1 - _MAX_LABELS :], label]

    @abstractmethod
    def _probe(self) -> object:
        """A figure that grows with the tokens, see `ProgressWatch`."""

    def _fail(self, reason: str) -> None:
        """Let everybody go who waits."""
        self._failure = reason
        self._rows.interrupt()
        self._client.interrupt()

    def _draw(self, rows: list[Row], params: SamplingParameters) -> list[Generation]:
        # Each has a deadline: `timeout_s`, and the watch.
        return self._rows.loop.run(gather_rows(self._draw_row(row, params) for row in rows))

    def draw_one(self, row: Row, params: SamplingParameters) -> Future[Generation]:
        """Begin to draw one row; the server stops drawing when the future is cancelled.

        Args:
            row: what is asked for.
            params: the distribution.

        Returns:
            The response to come, or `EngineDied`: the server is gone or stuck.

        Raises:
            RuntimeError: this is closed.
        """
        return self._rows.loop.submit(self._draw_row(row, params))

    async def _draw_row(self, row: Row, params: SamplingParameters) -> Generation:
        self._check_not_mixed()
        try:
            with self._watch.waiting():
                async with self._slots, self._by_known_weights():
                    return await self._ask_for(row, params)
        except ConnectionError as error:
            reason = self._failure or error
            raise EngineDied(f"{type(self).__name__}: the row was lost: {reason}") from error

    def _by_known_weights(self) -> AbstractAsyncContextManager[None]:
        """While a row is drawn; for a server that does not say which weights drew it."""
        return nullcontext()

    @abstractmethod
    async def _ask_for(self, row: Row, params: SamplingParameters) -> Generation:
        """Draw one row; `ConnectionError`: the server is gone or stuck."""

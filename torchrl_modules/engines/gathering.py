"""Rows that are drawn together."""

import asyncio
from collections.abc import Awaitable, Iterable

from .protocol import EngineDied, Generation


async def gather_rows(calls: Iterable[Awaitable[Generation]]) -> list[Generation]:
    """The responses of all rows, once each call has ended.

    Raises:
        BaseException: the first that a call raised; :class:`EngineDied` says what was finished.
    """
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    results = [None if isinstance(one, BaseException) else one for one in outcomes]
    error = next((one for one in outcomes if isinstance(one, BaseException)), None)
    if isinstance(error, EngineDied):
        error.results = results
    if error is not None:
        raise error
    return [result for result in results if result is not None]

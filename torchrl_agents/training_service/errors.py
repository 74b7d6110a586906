"""Errors of a request, which its client is told in words."""


class RefusedRequest(ValueError):
    """A request can't be done as it is; nothing was changed.

    Args:
        message: who, what is wrong, what was found, what to do.
        status: of HTTP, where the request is refused before it is taken on.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status

"""Output of a program, of which the start and the end are kept, however long it is."""


class CappedOutput:
    """The first and last bytes of a stream."""

    def __init__(self, max_bytes: int) -> None:
        self._head_size = max_bytes // 2
        self._tail_size = max_bytes - self._head_size
        self._head = bytearray()
        self._tail = bytearray()
        self._num_bytes = 0

    def add(self, data: bytes) -> None:
        """Take what comes next."""
        self._num_bytes += len(data)
        room = self._head_size - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._tail_size:
            del self._tail[: -self._tail_size]

    @property
    def truncated(self) -> bool:
        """Whether anything was dropped."""
        return self._num_bytes > self._head_size + self._tail_size

    def whole(self) -> bytes | None:
        """All of it; nothing where something was dropped."""
        return None if self.truncated else bytes(self._head + self._tail)

    def text(self) -> str:
        """What was kept, decoded as UTF-8 with replacement characters, with a mark at the cut."""
        if not self.truncated:
            return (self._head + self._tail).decode("utf-8", errors="replace")
        dropped = self._num_bytes - self._head_size - self._tail_size
        head = self._head.decode("utf-8", errors="replace")
        tail = self._tail[-self._tail_size :].decode("utf-8", errors="replace")
        return f"{head}\n[... {dropped} bytes were cut ...]\n{tail}"

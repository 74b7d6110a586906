"""Files of a record: compressed JSON lines, whole or not there, and read as far as they go."""

import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

_LEVEL: Final = 5
_CHUNK: Final = 1 << 16


def write_lines(path: Path, values: Iterable[Any], default: Callable[[Any], Any]) -> None:
    """Write values, one a line, into a new file that takes the old one's place when it is whole.

    Args:
        path: of the file.
        values: what JSON can write, or ``default`` makes it.
        default: for whatever JSON can't write.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as raw:
            # No name and time in it, so that equal lines make equal files.
            with gzip.GzipFile("", "wb", _LEVEL, raw, mtime=0) as file:
                for value in values:
                    file.write(json_line(value, default))
            raw.flush()
            os.fsync(raw.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def json_line(value: Any, default: Callable[[Any], Any]) -> bytes:
    """A line of strict JSON: ``null`` for NaN and infinity, and no half characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=default)
    except ValueError:
        text = json.dumps(finite(value, default), ensure_ascii=False, default=str)
    return (text + "\n").encode("utf-8", errors="replace")


def finite(value: Any, default: Callable[[Any], Any]) -> Any:
    """The same with ``None`` for each number that JSON can't write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, dict):
        return {str(key): finite(each, default) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each, default) for each in value]
    return finite(default(value), default)


def read_lines(path: Path, damage: list[str]) -> Iterator[Any]:
    """The values of a file, as far as it can be read.

    Args:
        path: of the file.
        damage: told what could not be read, and why.
    """
    for number, line in enumerate(_lines(path, damage), 1):
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            damage.append(f"{path.name}: line {number} is torn or no JSON ({error})")


def _lines(path: Path, damage: list[str]) -> Iterator[bytes]:
    """Lines of a compressed file; the last one may be torn."""
    decoder = zlib.decompressobj(wbits=31)  # of gzip
    kept = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            try:
                kept += decoder.decompress(chunk)
            except zlib.error as error:
                damage.append(
                    f"{path.name}: damaged after byte {file.tell() - len(chunk)}: {error}"
                )
                break
            *lines, kept = kept.split(b"\n")
            yield from lines
        else:
            if not decoder.eof:
                damage.append(f"{path.name}: cut off after {file.tell()} bytes")
    if kept:
        yield kept

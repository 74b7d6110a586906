"""Files in the GGUF format: their header is checked, and they are converted once."""

import hashlib
import logging
import os
import shutil
import struct
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from filelock import FileLock, Timeout
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from torchrl_data.pretrained import load_pretrained
from torchrl_data.templates.registry import own_template
from torchrl_data.templates.rendering import render_template
from torchrl_modules.compilation import cache_folder
from torchrl_modules.weights.quantized_weights import declared_whole

_LOG = logging.getLogger("torchrl_agents")

_MAGIC: Final = b"GGUF"
_FORMAT: Final = 1
"""Counts changes of the conversion: what an earlier one made is not used any more."""
_READ_WHOLE: Final = 64 << 20
_SAMPLE: Final = 1 << 20
_BLOCK: Final = 1 << 12
_SLACK: Final = 64 << 20
"""Bytes of a converted folder beside the weights, at most: tokenizer and settings."""
_PLAIN: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


_FIELDS: Final = (
    *("general.architecture", "tokenizer.ggml.model"),
    *("tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token"),
)


def converted(path: Path) -> Path:
    """The folder of a converted file; the first who asks for it makes it, others wait."""
    if not path.is_file():
        raise OSError(f"There is no file {path}.")
    with path.open("rb") as file:
        begin = file.read(len(_MAGIC))
    if begin != _MAGIC:
        raise ValueError(
            f"{path} is no GGUF file: it begins with {begin!r}, not with {_MAGIC!r}."
            " A model is a hub id, a folder or a .gguf file."
        )
    digest = file_digest(path)
    folder = cache_folder() / "models" / f"{path.stem}-{digest}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock")
        try:
            locked = lock.acquire(timeout=0)
        except Timeout:
            _LOG.info("waiting for another process that converts %s ...", folder.name)
            locked = lock.acquire()
        with locked:
            if not folder.is_dir():
                _convert(path, folder)
    except OSError as error:
        raise OSError(
            f"{path} can't be converted into {folder.parent}: {error}. "
            "TORCHRL_AGENTS_CACHE=<folder> takes another place."
        ) from error
    return folder


def file_digest(path: Path) -> str:
    """Return a digest by which a file of weights is known again, though it is not read whole.

    Of a small file all counts, of a large one its size, its beginning and end, and a block of each
    MiB: another training of the same model, or of a part of it, differs in all of a matrix.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{_FORMAT} {size} ".encode())
    with path.open("rb") as file:
        if size <= _READ_WHOLE:
            digest.update(file.read())
        else:
            digest.update(file.read(_SAMPLE))
            for place in range(_SAMPLE, size - _SAMPLE, _SAMPLE):
                file.seek(place)
                digest.update(file.read(_BLOCK))
            file.seek(size - _SAMPLE)
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _convert(path: Path, folder: Path) -> None:
    """Write a folder whole, or nothing."""
    num_weights, dtype, adds_bos = _header(path)
    needed = num_weights * dtype.itemsize + _SLACK
    free = shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(f"it takes {needed / 1e9:.1f} GB, of which {free / 1e9:.1f} GB are free")
    _LOG.info("converting %s, once, into %s ...", path, folder)
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.enable_progress_bar()
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as work:
            made = Path(work, "model")
            source: dict[str, Any] = {"gguf_file": path.name}
            tokenizer = load_pretrained(AutoTokenizer, path.parent, **source)
            model = load_pretrained(AutoModelForCausalLM, path.parent, dtype=dtype, **source)
            # The weights are plain now, and what says otherwise would be saved; Transformers before
            # 5.18 says nothing.
            with declared_whole(model):
                model.save_pretrained(made)
            template = own_template(tokenizer)
            if adds_bos and tokenizer.bos_token is None:  # Qwen2's, before Transformers 5.18
                first = check_gguf_header(path).get("tokenizer.ggml.bos_token_id")
                tokenizer.bos_token = tokenizer.convert_ids_to_tokens(first)
            bos = tokenizer.bos_token
            if adds_bos and template and bos:  # the family begins every text with it
                variables = {"bos_token": bos, "eos_token": tokenizer.eos_token}
                chat: Any = [{"role": "user", "content": "Hello"}]
                if not render_template(template, chat, variables=variables).text.startswith(bos):
                    tokenizer.chat_template = "{{- bos_token -}}" + template
            tokenizer.save_pretrained(made)
            made.chmod(0o755)
            made.rename(folder)
    except (KeyError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{path}: Transformers can't read it: {error!s:.200}") from error
    finally:
        if not shown:
            transformers_logging.disable_progress_bar()


_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by the number of its type."""
_INTEGERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}
_STRING: Final = 8
_ARRAY: Final = 9
_MAX_ITEMS: Final = 1 << 21
"""Of an array: a vocabulary has some hundred thousand."""
_MAX_ENTRIES: Final = 1 << 16
"""Entries of a header, and tensors."""
_MAX_DIMENSIONS: Final = 8


def check_gguf_header(path: Path) -> dict[str, int | str]:
    """Check the sizes that a GGUF file's header names, before anything is made of them.

    Args:
        path: of the file.

    Returns:
        Its whole numbers and short texts by name.

    Raises:
        ValueError: an array or a text goes beyond the file, has more items than any model's, or
            holds arrays; or the header breaks off.
    """
    with path.open("rb") as file:
        return _GGUFHeader(path, file).check()


class _GGUFHeader:
    """Goes through the header of a GGUF file, and keeps its whole numbers and short texts."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self._size = os.fstat(file.fileno()).st_size
        self._order = "<"

    def check(self) -> dict[str, int | str]:
        values: dict[str, int | str] = {}
        self._file.seek(len(_MAGIC))
        if self._number("I") & 0xFFFF == 0:  # a version: of the other order of bytes
            self._order = ">"
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        self._check_count("entries", num_entries, _MAX_ENTRIES)
        self._check_count("tensors", num_tensors, _MAX_ENTRIES)
        for _ in range(num_entries):
            name, kind = self._text("a name"), self._number("I")
            count = 1
            if kind == _ARRAY:
                kind, count = self._number("I"), self._number("Q")
                self._check_count(f"items of {name!r}", count, _MAX_ITEMS)
                self._skip_values(kind, name, count)
            elif kind in _INTEGERS:
                values[name] = self._number(_INTEGERS[kind])
            elif kind == _STRING:
                values[name] = self._text(f"a text of {name!r}")
            else:
                self._skip_values(kind, name, count)
        for _ in range(num_tensors):
            self._text("a name")
            if (num_dimensions := self._number("I")) > _MAX_DIMENSIONS:
                raise ValueError(
                    f"{self._path} can't be read: a tensor has {num_dimensions} dimensions."
                )
            self._skip(8 * num_dimensions + 12, "the place of a tensor")
        return values

    def _number(self, kind: str) -> int:
        raw = self._file.read(struct.calcsize(kind))
        if len(raw) < struct.calcsize(kind):
            raise ValueError(f"{self._path} breaks off, or is damaged: in its header.")
        return struct.unpack(self._order + kind, raw)[0]

    def _text(self, what: str) -> str:
        """The beginning of a text."""
        length, begin = self._number("Q"), self._file.tell()
        self._skip(length, what)
        self._file.seek(begin)
        text = self._file.read(min(length, 80)).decode(errors="replace")
        self._file.seek(begin + length)
        return text

    def _skip(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._size - self._file.tell():
            raise ValueError(
                f"{self._path} breaks off, or is damaged: {what} would take {num_bytes} bytes, and "
                f"the file has {self._size}."
            )
        self._file.seek(num_bytes, os.SEEK_CUR)

    def _skip_values(self, kind: int, name: str, count: int) -> None:
        if kind == _STRING:
            for _ in range(count):
                self._skip(self._number("Q"), f"a text of {name!r}")
        elif kind in _SIZES:
            self._skip(count * _SIZES[kind], f"{name!r} with {count} values")
        else:
            what = "an array of arrays" if kind == _ARRAY else f"of the unknown type {kind}"
            raise ValueError(f"{self._path} can't be read: its entry {name!r} is {what}.")

    def _check_count(self, what: str, count: int, most: int) -> None:
        if count > most:
            raise ValueError(
                f"{self._path} can't be read: its header names {count} {what}, more than {most}."
            )


def _header(path: Path) -> tuple[int, torch.dtype, bool]:
    """Return what a file says of itself.

    Returns:
        How many weights it has, a type in which nothing of them is lost, and whether texts begin
        with a token.

    Raises:
        ValueError: it breaks off, or Transformers can't read its model.
        ImportError: the packages ``gguf`` and ``accelerate`` are not there.
    """
    missing = " ".join(name for name in ("accelerate", "gguf") if find_spec(name) is None)
    if missing:  # Transformers asks for them one after the other, when it has read the tokenizer
        raise ImportError(f"{path} can't be read without more packages: pip install {missing}")
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    check_gguf_header(path)
    try:
        reader = GGUFReader(path)
        fields = [reader.get_field(name) for name in _FIELDS]
        family, kind, split, add = (field and field.contents() for field in fields)
        types = {tensor.tensor_type.name for tensor in reader.tensors}
        num_weights = sum(int(tensor.n_elements) for tensor in reader.tensors)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise ValueError(f"{path} breaks off, or is damaged: {error!s:.200}") from error
    known = sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"})
    plain = [name.replace("-", "").replace("_", "") for name in (str(family), *known)]
    if plain[0] not in plain[1:]:
        raise ValueError(
            f"{path} has a model of the architecture {family!r}, which Transformers can't read "
            f"from GGUF; it reads {', '.join(known)}. Give the model's folder or hub id."
        )
    kinds = types - {"F32"} or types
    dtype = _PLAIN.get(next(iter(kinds)), torch.float32) if len(kinds) == 1 else torch.float32
    if add is None:
        add = kind == "llama" or split == "llama-bpe"
    return num_weights, dtype, bool(add)

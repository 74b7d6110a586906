"""Files that a command writes when its work is done, tried before the work begins."""

import argparse
import os
from pathlib import Path


def output_file(text: str) -> Path:
    """Return the path of a file that can be written; an argument's ``type`` of ``argparse``.

    What stands in the file is left as it is.

    Args:
        text: the path.

    Raises:
        argparse.ArgumentTypeError: nothing can be written there.
    """
    path = Path(text)
    is_new = not path.exists()
    try:
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        hint = "" if path.parent.is_dir() else f" Make the folder {path.parent} first."
        raise argparse.ArgumentTypeError(
            f"{path} can't be written: {error.strerror}.{hint}"
        ) from error
    return path


def output_folder(text: str) -> Path:
    """Return the path of a folder that can be made, or is one; an argument's ``type``.

    Args:
        text: the path.

    Raises:
        argparse.ArgumentTypeError: it, or what it would lie in, is a file, or takes none.
    """
    path = Path(text)
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{path} can't be a folder: {there} is a file.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{path}: nothing can be written in {there}.")
    return path

"""Landlock: the files that a process can still open, and that it reaches no process outside."""

import ctypes
import os
import stat

from .kernel import call_libc

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
EXECUTE = 1 << 0
# By the first version of Landlock that has them.
_FILES = ((1, (1 << 13) - 1), (2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV))
_TCP = ((4, 0b11),)  # bind, connect
_SCOPES = ((6, 0b11),)  # abstract unix sockets, signals
_NO_LOG = ((7, 0b1),)  # else a program fills the log of the machine with what it was refused
_OF_FILES = EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_NEVER = _MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK | _IOCTL_DEV


def confine(config, starts=0):
    """Leave this process its folder, the files that it may read, and some devices."""
    # starts: the right to start the programs there, `EXECUTE`, where it has that.
    version = config["landlock_version"]
    known = _since(_FILES, version)
    handled = (ctypes.c_uint64 * 3)(known, _since(_TCP, version), _since(_SCOPES, version))
    size = ctypes.c_size_t(8 if version < 4 else 16 if version < 6 else 24)
    ruleset = call_libc("syscall", _CREATE_RULESET, handled, size, 0)
    for path in config["readable"]:
        _allow(ruleset, path, known & (_READ_FILE | _READ_DIR | starts))
    for path in config["devices"]:
        _allow(ruleset, path, known & (_READ_FILE | _WRITE_FILE))
    _allow(ruleset, config["folder"], known & ~(_NEVER | EXECUTE) | starts)
    call_libc("syscall", _RESTRICT_SELF, ruleset, _since(_NO_LOG, version))
    os.close(ruleset)


def _since(table, version):
    """The bits that a version has."""
    bits = 0
    for first, added in table:
        if version >= first:
            bits |= added
    return bits


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("place", ctypes.c_int32))


def _allow(ruleset, path, rights):
    """Allow something in a folder and below it, or with a file; nothing where it is not there."""
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _OF_FILES
    rule = _Rule(rights, place)
    call_libc("syscall", _ADD_RULE, ruleset, _BENEATH, ctypes.byref(rule), 0)
    os.close(place)

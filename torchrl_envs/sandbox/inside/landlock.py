"""Landlock: this process and its children reach the named paths only.

See https://docs.kernel.org/userspace-api/landlock.html.
"""

import ctypes
import os

from .kernel import system_call

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _RULE_PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_ALL_OF_VERSION_1 = (1 << 13) - 1
_REFER = 1 << 13
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_BIND_AND_CONNECT_TCP = 0b11
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11

MINIMUM_VERSION = 3
"""The first that restricts truncation."""


def landlock_version():
    """The kernel's Landlock version; 0 where it has none."""
    try:
        return system_call(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_FLAG))
    except OSError:
        return 0


def restrict_paths(read_only, writable):
    """Allow reading and executing below some paths, everything below others, and no more."""
    version = landlock_version()
    handled = _ALL_OF_VERSION_1 | _REFER | _TRUNCATE
    if version >= 5:
        handled |= _IOCTL_DEVICE
    network = _BIND_AND_CONNECT_TCP if version >= 4 else 0
    scope = _SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0
    attributes = (ctypes.c_uint64 * 3)(handled, network, scope)
    size = ctypes.c_size_t(8 if version < 4 else 16 if version < 6 else 24)
    ruleset = system_call(_CREATE_RULESET, attributes, size, ctypes.c_uint(0))
    try:
        for paths, rights in ((read_only, _READ), (writable, handled)):
            for path in paths:
                _allow(ruleset, path, rights)
        system_call(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint(0))
    finally:
        os.close(ruleset)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("rights", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _allow(ruleset, path, rights):
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            rights &= _FILE_RIGHTS
        rule = _PathBeneath(rights, place)
        system_call(
            _ADD_RULE,
            ctypes.c_int(ruleset),
            ctypes.c_int(_RULE_PATH_BENEATH),
            ctypes.byref(rule),
            ctypes.c_uint(0),
        )
    finally:
        os.close(place)

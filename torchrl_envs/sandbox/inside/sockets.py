"""Sockets of a program that may reach one address: its supervisor opens and connects each.

Landlock can only name a port, of whatever host, and that since Linux 6.7. So a program opens no
socket and connects none: it is handed sockets that lead to the one address already.
"""

import _socket
import _thread
import errno
import os
import select
import sys

_KIND, _CLOSE_ON_EXEC = 0xF, os.O_CLOEXEC
_SOON_S, _CONNECT_S = 0.02, 30.0
_ANY, _TCP = 0, 6
_ORDER = sys.byteorder


def open_socket(call, place):
    """Hand over a socket of TCP that is connected to a place; refuse one of another kind."""
    family, kind, protocol = (argument & 0xFFFFFFFF for argument in call.arguments[:3])
    if family == _socket.AF_INET6:
        call.fail(errno.EAFNOSUPPORT)  # as where IPv6 is turned off
        return
    is_tcp = kind & _KIND == _socket.SOCK_STREAM and protocol in (_ANY, _TCP)
    if family != _socket.AF_INET or not is_tcp:
        call.fail(errno.EACCES)
        return
    host, port = place
    found = _socket.getaddrinfo(host, port, 0, _socket.SOCK_STREAM)
    (family, number, protocol, _, address), *_ = found
    link = _socket.socket(family, number, protocol)
    link.setblocking(False)
    failure = link.connect_ex(address)
    if failure == errno.EINPROGRESS and not _is_done(link, _SOON_S):
        # Many ask at once. Nobody else has to wait for that.
        _thread.start_new_thread(_hand_over, (call, link, kind, _CONNECT_S))
    elif failure in (0, errno.EINPROGRESS):
        _hand_over(call, link, kind, 0.0)
    else:
        link.close()
        call.fail(failure)


def _hand_over(call, link, kind, wait_s):
    """Give a socket to the program once it is connected."""
    is_done = _is_done(link, wait_s)
    failure = link.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR) if is_done else errno.ETIMEDOUT
    if failure:
        call.fail(failure)
    else:
        link.setblocking(not kind & _socket.SOCK_NONBLOCK)
        call.give_descriptor(link.fileno(), kind & _CLOSE_ON_EXEC)
    link.close()


def _is_done(link, wait_s):
    ready = select.poll()
    ready.register(link, select.POLLOUT)
    return bool(ready.poll(1000 * wait_s))


def connect_socket(call, port):
    """Succeed for the one address, to which the socket leads; refuse others."""
    try:
        address = call.memory(call.arguments[1], min(call.arguments[2], 16))
    except OSError:
        address = b""
    family = int.from_bytes(address[:2], _ORDER)
    is_there = family == _socket.AF_INET and address[2:8] == _address_bytes(port)
    if is_there:
        call.give(0)
    else:
        call.fail(errno.EACCES)


def _address_bytes(port):
    return port.to_bytes(2, "big") + b"\x7f\0\0\1"

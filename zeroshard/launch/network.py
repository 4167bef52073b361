"""Chooses the network interface on which gloo listens.

gloo listens on the address of the host's name. On many hosts that is 127.0.1.1 (Debian's installer sets it), and ranks
on other hosts would then connect to themselves. This module chooses the interface that leads to node 0, unless the user
has set GLOO_SOCKET_IFNAME. NCCL finds its interface by itself.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from collections.abc import MutableMapping

_SIOCGIFADDR = 0x8915
_VARIABLE = "GLOO_SOCKET_IFNAME"


def choose_interface(master_addr: str, environ: MutableMapping[str, str]) -> None:
    """Set GLOO_SOCKET_IFNAME if the host's name is a loopback address and the user has not set it."""
    if _VARIABLE in environ or sys.platform != "linux" or not _name_is_loopback():
        return
    name = interface_to(master_addr)
    if name is not None:
        environ[_VARIABLE] = name


def interface_to(address: str) -> str | None:
    """The interface through which packets to an address leave this host; None if it can't be found."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # no packet is sent
            local = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address_of(probe, name) == local:
                    return name
    except OSError:
        return None  # an IPv6 address, or no route: gloo chooses by itself
    return None


def _address_of(probe: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None  # the interface has no address
    return socket.inet_ntoa(answer[20:24])


def _name_is_loopback() -> bool:
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True  # the name can't be resolved

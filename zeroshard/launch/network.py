"""The network interface through which a node reaches the others.

gloo listens on the address of the host's name. On many hosts that name is 127.0.1.1 (Debian's installer writes it
so), and ranks on other hosts then connect to themselves. The interface that leads to node 0 is the right one, unless
the user has named another in GLOO_SOCKET_IFNAME. NCCL finds its interface by itself.
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
    """Set GLOO_SOCKET_IFNAME where the host's own name leads nowhere and the user has not set it."""
    if _VARIABLE in environ or sys.platform != "linux" or not _name_is_loopback():
        return
    name = interface_to(master_addr)
    if name is not None:
        environ[_VARIABLE] = name


def interface_to(address: str) -> str | None:
    """The interface from which packets to an address leave; its own interface for an address of this host."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # no packet is sent
            local = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address_of(probe, name) == local:
                    return name
    except OSError:
        return None  # an IPv6 address, or no route: gloo's own choice holds
    return None


def _address_of(probe: socket.socket, name: str) -> str | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None  # it has none
    return socket.inet_ntoa(answer[20:24])


def _name_is_loopback() -> bool:
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True  # it can't be resolved at all

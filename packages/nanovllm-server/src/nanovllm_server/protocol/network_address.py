"""Addresses of the form HOST:PORT."""

import re
from ipaddress import IPv6Address

MAX_PORT = 65535
# Names and IPv4 addresses. `join_address` recognises IPv6 addresses by their colons.
HOST_PATTERN = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def join_address(host: str, port: int) -> str:
    """Returns HOST:PORT, with a lower-case name or a compressed IPv6 address in brackets. Raises ValueError."""
    if ":" in host:
        return f"[{IPv6Address(host)}]:{port}"
    if HOST_PATTERN.fullmatch(host) is None:
        raise ValueError(f"{host!r} is neither a name nor an IP address")
    return f"{host.lower()}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Returns (host, port) of HOST:PORT. The host of an IPv6 address has no brackets. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = str(IPv6Address(host[1:-1]))
    elif HOST_PATTERN.fullmatch(host) is None:
        raise ValueError(f"{address!r} is not HOST:PORT, with brackets around an IPv6 address")
    if not (port.isascii() and port.isdigit() and int(port) <= MAX_PORT):
        raise ValueError(f"{address!r} has no port from 0 to {MAX_PORT}")
    return host, int(port)

"""Checks the Host header against DNS rebinding (https://en.wikipedia.org/wiki/DNS_rebinding).

In this attack, a web page makes its own name resolve to the server's address, and then reads the server's answers.
"""

import ipaddress
import re
from collections.abc import Iterable, Sequence

from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.json import describe_value

ANY_NAME = "*"
# A name, or an IPv6 address in brackets. A port may follow (RFC 3986, section 3.2.2).
HOST_HEADER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(?::\d*)?", re.ASCII)
# No web site can own a name under these suffixes (RFC 6761, RFC 6762, RFC 8375, ICANN's .internal).
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa")


class HostCheck:
    """Refuses requests whose Host header has a name that a web site can own.

    names: names to allow although a web site can own them. `*.example.com` allows all names under example.com, and
        `*` allows all names.
    """

    def __init__(self, names: Iterable[str]):
        normalized_names = [_normalize(name) for name in names]
        self._allows_all_names = ANY_NAME in normalized_names
        self._names = frozenset(normalized_names)
        self._allowed_suffixes = (*PRIVATE_SUFFIXES, *(name[1:] for name in normalized_names if name.startswith("*.")))

    def check(self, header: str | None) -> None:
        """Checks the Host header. None (no header) is allowed, as HTTP/1.0 needs none. Raises ApiError (400, 403)."""
        if header is None:
            return
        match = HOST_HEADER.fullmatch(header.strip())
        if match is None:
            message = (
                f"the Host header must be a name or an address with an optional port, not {describe_value(header)}"
            )
            raise ApiError(400, message, code="invalid_http")
        name = _normalize(match[1])
        if not (self._allows_all_names or self._is_allowed(name)):
            raise ApiError(
                403,
                f"this server does not allow the name {describe_value(name)} in the Host header: use an IP address, or "
                "start the server with --allowed-hosts and this name",
                code="host_not_allowed",
            )

    def _is_allowed(self, name: str) -> bool:
        # Web sites can own only names with dots. DNS can't redirect an IP address.
        return "." not in name or name in self._names or name.endswith(self._allowed_suffixes) or _is_ip_address(name)


def parse_allowed_hosts(values: Sequence[str]) -> tuple[str, ...]:
    """Splits values of --allowed-hosts at commas. Raises ValueError unless each is a name, a pattern or an address."""
    names = tuple(name for value in values for name in map(str.strip, value.split(",")) if name)
    for name in names:
        match = HOST_HEADER.fullmatch(name.removeprefix("*."))
        if name != ANY_NAME and (match is None or match[0] != match[1] or "*" in match[1]):
            raise ValueError(f"{name} is not a host: give a name without a scheme, port or path, *.NAME, or *")
    return names


def _normalize(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True

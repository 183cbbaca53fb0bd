"""Messages between an engine that fetches blocks and an engine that serves blocks, as MessagePack over ZeroMQ.

The protocol tolerates lost, late, repeated and reordered messages: an entry that does not arrive is computed.
"""

from typing import NamedTuple

import msgspec

# Change this number whenever messages change their meaning.
PROTOCOL_VERSION = 4


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Asks for Welcome, and renews the leases of the fetches in `keys`. Sent by a new client, then periodically.

    identity: the settings, by name, that determine the bytes of an entry; equal in engines that share entries.
    keys: keys of the client's fetches that have not ended.
    """

    version: int
    identity: dict[str, str]
    keys: list[int]


class Fetch(msgspec.Struct, frozen=True, tag=True):
    """Asks for entries of a prompt. The server sends each entry as soon as its host memory has the entry.

    key: unique among all fetches of the client's process.
    entries: kind and hash of each entry. Blocks are in the order of the prompt.
    prompt_ids: int32 tokens as bytes. Empty if the server must not compute missing entries.
    carrier: name of the client's carrier. With "tcp", `Entries` messages contain the bytes of the entries.
    """

    key: int
    entries: list[tuple[int, bytes]]
    prompt_ids: bytes
    cache_salt: str
    priority: int
    carrier: str


class Received(msgspec.Struct, frozen=True, tag=True):
    """Tells the server that the client has copied these entries. The server may then release them."""

    key: int
    positions: list[int]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Ends a fetch and its lease."""

    key: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Makes the server forget all entries. Clients send this message only to their `prefill_peer`."""


class RemoteMemory(msgspec.Struct, frozen=True):
    """Tells a client on the same host, or a client with NIXL, where to find the server's host memory.

    pid, descriptor: process and file descriptor of the memory. marker: bytes in the memory at `marker_offset`, which
        prove that a mapping shows this memory.
    offsets: by kind, the number of bytes before the first slot.
    address: address of the memory in the server's process.
    nixl_metadata: metadata of the server's NIXL agent; empty without NIXL.
    """

    pid: int
    descriptor: int
    marker: bytes
    marker_offset: int
    num_bytes: int
    offsets: list[int]
    address: int
    nixl_metadata: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to Hello. engine_id: new for each process. keys: keys of the client's fetches that have a lease."""

    engine_id: str
    memory: RemoteMemory
    keys: list[int]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Tells the client that the server can't serve this client. reason: text for users."""

    reason: str


class ReadyEntry(NamedTuple):
    """An entry that the client can copy. position: index in `Fetch.entries`. slot: index in the server's memory.

    has_draft_entries: whether the entry includes a draft model's entries for all its tokens.
    checksum: `checksum_of` the slot's bytes.
    """

    position: int
    slot: int
    has_draft_entries: bool
    checksum: int = 0


class Entries(msgspec.Struct, frozen=True, tag=True):
    """Entries that are ready. With the carrier "tcp", frames with their bytes follow.

    serve_s: seconds from the arrival of the fetch at the server until the entries were ready.
    """

    key: int
    entries: list[ReadyEntry]
    serve_s: float


class FetchEnd(msgspec.Struct, frozen=True, tag=True):
    """Tells the client how many entries of a fetch the server sends. Messages with entries may arrive later.

    serve_s: seconds from the arrival of the fetch at the server to the end of the fetch there.
    """

    key: int
    num_sent: int
    serve_s: float


ToServer = Hello | Fetch | Received | Cancel | ResetPrefixCache
ToClient = Welcome | Refused | Entries | FetchEnd
encode = msgspec.msgpack.Encoder().encode
# What the decoders raise. msgspec raises UnicodeDecodeError if a string is not UTF-8.
MALFORMED_MESSAGE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError)
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
decode_to_client = msgspec.msgpack.Decoder(ToClient).decode


def find_difference(own: dict[str, str], other: dict[str, str]) -> str | None:
    """The first difference between two identities as text for users; None if they are equal."""
    for name in own | other:
        if own.get(name) != other.get(name):
            return f"{name} is {own.get(name)} here and {other.get(name)} there"
    return None

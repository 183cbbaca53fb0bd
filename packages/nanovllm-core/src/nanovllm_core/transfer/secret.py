"""Derives the connection keys and the secret of the prefix hashes from a secret that engines share."""

import hashlib
import hmac
import stat
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from nanovllm_core.errors import ConfigError

MIN_SECRET_BYTES = 32


class KeyPair(NamedTuple):
    """A key pair of CurveZMQ, each key in Z85. Source: https://rfc.zeromq.org/spec/26/"""

    public: bytes
    secret: bytes


class TransferKeys:
    """Keys that engines derive from their shared secret.

    server_keys, client_keys: keys of engines that serve blocks, and of engines that fetch blocks. An engine that lacks
        the secret can neither connect nor read a connection.
    hash_secret: secret of the block hashes. With equal secrets, engines find each other's blocks by hash.
    """

    def __init__(self, secret: bytes):
        self.server_keys = _make_keys(_derive(secret, "server"))
        self.client_keys = _make_keys(_derive(secret, "client"))
        self.hash_secret = _derive(secret, "prefix hashes")


def read_transfer_secret(path: Path) -> TransferKeys:
    """Read the secret. Raises ConfigError if the file is unreadable, too short, or accessible to other users."""
    try:
        secret, mode = path.read_bytes(), path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"transfer_secret_file is {path}, which can't be read: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"transfer_secret_file is {path}, which other users can access: run chmod 600 {path}")
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"transfer_secret_file is {path}, which has {len(secret)} bytes, but needs at least {MIN_SECRET_BYTES}: "
            f"run head -c {MIN_SECRET_BYTES} /dev/urandom > {path}"
        )
    return TransferKeys(secret)


def _derive(secret: bytes, purpose: str) -> bytes:
    return hmac.digest(secret, f"nanovllm transfer: {purpose}".encode(), hashlib.sha256)


def _make_keys(secret_key: bytes) -> KeyPair:
    encoded = z85.encode(secret_key)
    return KeyPair(zmq.curve_public(encoded), encoded)

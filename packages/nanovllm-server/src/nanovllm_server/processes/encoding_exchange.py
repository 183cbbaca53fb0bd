"""Shares encoded segments of text between workers, so that each is encoded once. Uses rings in shared memory."""

from collections.abc import Iterator, Mapping
from threading import Lock

import msgspec
import numpy as np

from nanovllm_server.observability.logs import get_logger
from nanovllm_server.processes.rings import RingMemory, RingReader

# Bytes of one worker's ring: the texts and ids of about half a million tokens.
RING_BYTES = 4 << 20
# Most bytes of msgpack's headers per segment, and per message.
_SEGMENT_HEADER_BYTES = 10
_MESSAGE_HEADER_BYTES = 5


def allocate_rings(num_workers: int) -> RingMemory | None:
    """The memory of an exchange among `num_workers` workers; None for one worker, which needs no exchange."""
    return RingMemory(num_workers, RING_BYTES) if num_workers > 1 else None


class RingEncodingExchange:
    """A worker's end of the exchange, over rings; implements `nanovllm_models.segments.EncodingExchange`.

    A message that is lost is only a cache miss: the text of a segment decides its token ids.
    """

    def __init__(self, memory: RingMemory, worker: int, num_token_ids: int):
        """worker: index of the ring to write to. num_token_ids: all received ids must be below."""
        rings = memory.rings()
        self._own = rings[worker]
        self._num_token_ids = num_token_ids
        # The first call of `receive` reads the own ring too: it may hold messages of the worker that this one replaces.
        self._unread = [RingReader(ring) for ring in rings]
        self._others = [reader for index, reader in enumerate(self._unread) if index != worker]
        self._publishing = Lock()
        self._encoder = msgspec.msgpack.Encoder()
        # Reused for each message: fresh pages would double the time.
        self._message = bytearray()
        self._decoder = msgspec.msgpack.Decoder(dict[str, bytes])
        self._logger = get_logger("nanovllm")

    def publish(self, encoded: Mapping[str, bytes]) -> None:
        """Sends segments and their token ids to the other workers. Any thread may call this; it never waits long.

        A segment that takes more than half a ring is not sent.
        """
        with self._publishing:
            for batch in _batches(encoded, self._own.capacity // 2):
                self._encoder.encode_into(batch, self._message)
                self._own.write(self._message)

    def receive(self) -> dict[str, bytes]:
        """Segments and token ids that others published since the last call, except those already overwritten."""
        received: dict[str, bytes] = {}
        readers, self._unread = self._unread, self._others
        for reader in readers:
            for message in reader.read():
                try:
                    encoded = self._decoder.decode(message)
                    self._check(encoded)
                except ValueError as error:
                    self._logger.warning("malformed encodings from a worker", reason=str(error))
                else:
                    received.update(encoded)
        return received

    def _check(self, encoded: Mapping[str, bytes]) -> None:
        if any(len(ids) % 4 for ids in encoded.values()):
            raise ValueError("token ids must have 4 bytes each")
        # As unsigned integers, negative ids are too large.
        largest = np.frombuffer(b"".join(encoded.values()), np.uint32).max(initial=0)
        if largest >= self._num_token_ids:
            raise ValueError(f"token id {largest} is not below {self._num_token_ids}")


def _batches(encoded: Mapping[str, bytes], max_bytes: int) -> Iterator[dict[str, bytes]]:
    """Splits `encoded` into messages of at most `max_bytes`, and leaves out larger segments."""
    batch: dict[str, bytes] = {}
    num_bytes = _MESSAGE_HEADER_BYTES
    for segment, ids in encoded.items():
        # A character takes up to four bytes in UTF-8.
        num_text_bytes = len(segment) if segment.isascii() else 4 * len(segment)
        size = num_text_bytes + len(ids) + _SEGMENT_HEADER_BYTES
        if size + _MESSAGE_HEADER_BYTES > max_bytes:
            continue
        if num_bytes + size > max_bytes:
            yield batch
            batch, num_bytes = {}, _MESSAGE_HEADER_BYTES
        batch[segment] = ids
        num_bytes += size
    if batch:
        yield batch

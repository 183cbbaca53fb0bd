"""Shares encoded segments of text between workers through rings, so that each segment is encoded once."""

from collections.abc import Iterator, Mapping
from threading import Lock

import msgspec
import numpy as np

from nanovllm_server.observability.logs import get_logger
from nanovllm_server.processes.rings import RingMemory, RingReader

# Size of one worker's ring: the texts and ids of about half a million tokens.
RING_BYTES = 4 << 20
# Maximum size of msgpack's headers per segment, and per message.
_SEGMENT_HEADER_BYTES = 10
_MESSAGE_HEADER_BYTES = 5


def allocate_rings(num_workers: int) -> RingMemory | None:
    """Allocates the memory of an exchange among `num_workers` workers; None for one worker, which needs no exchange."""
    return RingMemory(num_workers, RING_BYTES) if num_workers > 1 else None


class RingEncodingExchange:
    """One worker's access to the exchange; implements `nanovllm_models.segments.EncodingExchange`.

    A lost message is only a cache miss, because the text of a segment determines its token ids.
    """

    def __init__(self, memory: RingMemory, worker: int, num_token_ids: int):
        """worker: index of the ring to write to. num_token_ids: received ids must be smaller than this number."""
        rings = memory.rings()
        self._own_ring = rings[worker]
        self._num_token_ids = num_token_ids
        # The first call of `receive` also reads the own ring, which may have messages of a dead worker that this worker
        # replaces.
        self._next_readers = [RingReader(ring) for ring in rings]
        self._other_readers = [reader for index, reader in enumerate(self._next_readers) if index != worker]
        self._publish_lock = Lock()
        self._encoder = msgspec.msgpack.Encoder()
        # Reused for each message: new memory pages would double the time.
        self._message_buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(dict[str, bytes])
        self._logger = get_logger("nanovllm")

    def publish(self, encoded: Mapping[str, bytes]) -> None:
        """Sends segments and their token ids to the other workers. Does not wait for them. Any thread may call this.

        Segments larger than half a ring are not sent.
        """
        with self._publish_lock:
            for batch in _split_into_batches(encoded, self._own_ring.capacity // 2):
                self._encoder.encode_into(batch, self._message_buffer)
                self._own_ring.write(self._message_buffer)

    def receive(self) -> dict[str, bytes]:
        """Returns segments and token ids that other workers published since the last call, except overwritten ones."""
        received: dict[str, bytes] = {}
        readers, self._next_readers = self._next_readers, self._other_readers
        for reader in readers:
            for message in reader.read():
                try:
                    encoded = self._decoder.decode(message)
                    self._check_token_ids(encoded)
                except ValueError as error:
                    self._logger.warning("malformed encodings from a worker", reason=str(error))
                else:
                    received.update(encoded)
        return received

    def _check_token_ids(self, encoded: Mapping[str, bytes]) -> None:
        if any(len(ids) % 4 for ids in encoded.values()):
            raise ValueError("token ids must have 4 bytes each")
        # As unsigned integers, negative ids are too large.
        max_id = np.frombuffer(b"".join(encoded.values()), np.uint32).max(initial=0)
        if max_id >= self._num_token_ids:
            raise ValueError(f"token id {max_id} is not below {self._num_token_ids}")


def _split_into_batches(encoded: Mapping[str, bytes], max_bytes: int) -> Iterator[dict[str, bytes]]:
    """Splits `encoded` into messages of at most `max_bytes`. Larger segments are left out."""
    batch: dict[str, bytes] = {}
    batch_bytes = _MESSAGE_HEADER_BYTES
    for segment, ids in encoded.items():
        # A character takes up to four bytes in UTF-8.
        max_text_bytes = len(segment) if segment.isascii() else 4 * len(segment)
        segment_bytes = max_text_bytes + len(ids) + _SEGMENT_HEADER_BYTES
        if segment_bytes + _MESSAGE_HEADER_BYTES > max_bytes:
            continue
        if batch_bytes + segment_bytes > max_bytes:
            yield batch
            batch, batch_bytes = {}, _MESSAGE_HEADER_BYTES
        batch[segment] = ids
        batch_bytes += segment_bytes
    if batch:
        yield batch

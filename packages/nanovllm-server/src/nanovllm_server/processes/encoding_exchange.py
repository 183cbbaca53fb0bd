"""Shares token ids of text segments (parts of prompts) among workers, so that one worker encodes each segment."""

from collections.abc import Iterator, Mapping
from threading import Lock

import msgspec
import numpy as np

from nanovllm_server.observability.logs import get_logger
from nanovllm_server.processes.rings import RingMemory, RingReader

# Capacity of one worker's ring: about half a million tokens with their text.
RING_BYTES = 4 << 20
_MAX_SEGMENT_OVERHEAD_BYTES = 10  # two msgpack length headers: text and token ids
_MAX_MESSAGE_OVERHEAD_BYTES = 5  # the msgpack header of the whole map


def allocate_rings(num_workers: int) -> RingMemory | None:
    """Allocates a ring for each worker. Returns None for a single worker."""
    return RingMemory(num_workers, RING_BYTES) if num_workers > 1 else None


class RingEncodingExchange:
    """Connects one worker to the rings of all workers. If a ring loses a message, workers encode the text again."""

    def __init__(self, memory: RingMemory, worker_index: int, num_token_ids: int):
        """worker_index: index of the ring to write to. num_token_ids: exclusive upper bound of valid token ids."""
        rings = memory.rings()
        self._own_ring = rings[worker_index]
        self._num_token_ids = num_token_ids
        # The first `receive` also reads this worker's own ring, where a dead predecessor may have left messages.
        self._next_readers = [RingReader(ring) for ring in rings]
        self._other_readers = [reader for index, reader in enumerate(self._next_readers) if index != worker_index]
        self._publish_lock = Lock()
        self._encoder = msgspec.msgpack.Encoder()
        # All messages share one buffer, because fresh memory pages would double the time to encode a message.
        self._message_buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(dict[str, bytes])
        self._logger = get_logger("nanovllm")

    def publish(self, encoded: Mapping[str, bytes]) -> None:
        """Sends segments and their int32 token ids to the other workers. Skips segments larger than half a ring."""
        with self._publish_lock:
            for batch in _split_into_batches(encoded, self._own_ring.capacity // 2):
                self._encoder.encode_into(batch, self._message_buffer)
                self._own_ring.write(self._message_buffer)

    def receive(self) -> dict[str, bytes]:
        """Returns the token ids of each segment that other workers published since the last call."""
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
        # As unsigned integers, negative ids exceed the bound.
        max_id = np.frombuffer(b"".join(encoded.values()), np.uint32).max(initial=0)
        if max_id >= self._num_token_ids:
            raise ValueError(f"token id {max_id} is not below {self._num_token_ids}")


def _split_into_batches(encoded: Mapping[str, bytes], max_bytes: int) -> Iterator[dict[str, bytes]]:
    """Splits `encoded` into messages of at most `max_bytes`. Drops larger segments."""
    batch: dict[str, bytes] = {}
    batch_bytes = _MAX_MESSAGE_OVERHEAD_BYTES
    for segment, ids in encoded.items():
        # A character takes up to four bytes in UTF-8.
        max_text_bytes = len(segment) if segment.isascii() else 4 * len(segment)
        segment_bytes = max_text_bytes + len(ids) + _MAX_SEGMENT_OVERHEAD_BYTES
        if segment_bytes + _MAX_MESSAGE_OVERHEAD_BYTES > max_bytes:
            continue
        if batch_bytes + segment_bytes > max_bytes:
            yield batch
            batch, batch_bytes = {}, _MAX_MESSAGE_OVERHEAD_BYTES
        batch[segment] = ids
        batch_bytes += segment_bytes
    if batch:
        yield batch

"""Workers share the segments of text that they encode."""

import multiprocessing
import random
import time
from array import array
from unittest.mock import Mock

import msgspec
import pytest
from exchange_peer import publish

from nanovllm_models import default_model_path, load_tokenizer
from nanovllm_server.processes.encoding_exchange import RING_BYTES, RingEncodingExchange, allocate_rings
from nanovllm_server.processes.rings import RingMemory

SPAWN_CONTEXT = multiprocessing.get_context("spawn")
NUM_TOKEN_IDS = 1000


def encode_ids(*token_ids):
    return array("i", token_ids).tobytes()


def make_two_exchanges(ring_bytes=RING_BYTES):
    memory = RingMemory(2, ring_bytes)
    return [RingEncodingExchange(memory, index, NUM_TOKEN_IDS) for index in range(2)]


class CountingExchange(RingEncodingExchange):
    num_encoded = 0

    def publish(self, encoded):
        self.num_encoded += len(encoded)
        super().publish(encoded)


def make_conversation(rng, num_messages):
    words = ["the", "model", "answers", "東京", "naïve", "12345", "questions", "👩\u200d👩\u200d👧"]
    texts = (" ".join(rng.choices(words, k=rng.randrange(1, 200))) for _ in range(num_messages))
    return "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts)


def load_sharing_tokenizer(memory, worker):
    tokenizer = load_tokenizer(default_model_path())
    exchange = CountingExchange(memory, worker, tokenizer.vocab_size)
    tokenizer.share_encodings(exchange)
    return tokenizer, exchange


def test_a_segment_encoded_by_one_worker_is_cached_in_another():
    memory = RingMemory(2, RING_BYTES)
    (first, _), (second, exchange) = (load_sharing_tokenizer(memory, worker) for worker in range(2))
    text = make_conversation(random.Random(0), 80)
    expected = first.backend.encode(text, add_special_tokens=False).ids
    assert first.encode(text, add_special_tokens=False).tolist() == expected
    assert second.encode(text, add_special_tokens=False).tolist() == expected
    assert exchange.num_encoded == 0


def test_dropped_messages_change_no_ids():
    """The rings hold only a fraction of the published bytes."""
    memory = RingMemory(2, 1 << 12)
    tokenizers_and_exchanges = [load_sharing_tokenizer(memory, worker) for worker in range(2)]
    rng = random.Random(1)
    for turn in range(20):
        text = make_conversation(rng, 10)
        expected = tokenizers_and_exchanges[0][0].backend.encode(text, add_special_tokens=False).ids
        for tokenizer, _ in tokenizers_and_exchanges if turn % 2 else tokenizers_and_exchanges[::-1]:
            assert tokenizer.encode(text, add_special_tokens=False).tolist() == expected
    nums_encoded = [exchange.num_encoded for _, exchange in tokenizers_and_exchanges]
    assert min(nums_encoded) > 20


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        b"no message",
        msgspec.msgpack.encode(["a list"]),
        msgspec.msgpack.encode({"text": "no bytes"}),
        b"\x81\xa2\xff\xfe\xc4\x00",
        msgspec.msgpack.encode({"three bytes": b"123"}),
        msgspec.msgpack.encode({"fine": encode_ids(1, 2), "too large": encode_ids(NUM_TOKEN_IDS)}),
        msgspec.msgpack.encode({"negative": encode_ids(-1)}),
        msgspec.msgpack.encode({"more behind": encode_ids(1)}) + b"x",
    ],
)
def test_a_malformed_message_is_logged_and_ignored(message):
    first, second = make_two_exchanges()
    second._logger = log = Mock()
    first._own_ring.write(message)
    first.publish({"next": encode_ids(3)})
    assert second.receive() == {"next": encode_ids(3)}
    assert [call.args for call in log.warning.call_args_list] == [("malformed encodings from a worker",)]


def test_a_worker_receives_each_message_of_other_workers_once():
    first, second = make_two_exchanges()
    assert second.receive() == {}
    first.publish({"one": encode_ids(1), "empty": b""})
    first.publish({"two": encode_ids(0, NUM_TOKEN_IDS - 1)})
    second.publish({"own": encode_ids(4)})
    assert second.receive() == {"one": encode_ids(1), "empty": b"", "two": encode_ids(0, NUM_TOKEN_IDS - 1)}
    assert second.receive() == {}


def test_a_replacement_receives_earlier_messages_of_all_workers_and_can_publish():
    memory = RingMemory(2, RING_BYTES)
    other = RingEncodingExchange(memory, 0, NUM_TOKEN_IDS)
    other.receive()
    lost = SPAWN_CONTEXT.Process(target=publish, args=(memory, 1, {"of the lost worker": encode_ids(1)}))
    lost.start()
    lost.join()
    assert lost.exitcode == 0
    other.publish({"of the other": encode_ids(2)})
    replacement = RingEncodingExchange(memory, 1, NUM_TOKEN_IDS)
    assert replacement.receive() == {"of the lost worker": encode_ids(1), "of the other": encode_ids(2)}
    replacement.publish({"of the replacement": encode_ids(3)})
    assert other.receive() == {"of the lost worker": encode_ids(1), "of the replacement": encode_ids(3)}
    other.publish({"later": encode_ids(4)})
    assert replacement.receive() == {"later": encode_ids(4)}


def test_messages_have_a_maximum_size_and_larger_segments_are_not_sent():
    first, second = make_two_exchanges(1 << 14)
    largest = 1 << 13
    sizes: list[int] = []
    write = first._own_ring.write
    first._own_ring.write = lambda payload: (sizes.append(len(payload)), write(payload))
    small = {f"{index} 東京": encode_ids(*range(200)) for index in range(15)}
    first.publish({"x" * largest: encode_ids(1), **small, "東" * (largest // 4): encode_ids(2)})
    assert second.receive() == small
    assert len(sizes) == 2
    assert max(sizes) <= largest


def test_publishing_does_not_wait_for_readers():
    first, second = make_two_exchanges()
    text = "x" * (1 << 16)
    begin = time.monotonic()
    for index in range(1000):
        first.publish({f"{index}{text}": encode_ids(index % 7)})
    assert time.monotonic() - begin < 60
    received = second.receive()
    assert 10 < len(received) < RING_BYTES >> 16
    assert f"999{text}" in received


def test_rings_are_allocated_for_several_workers_only():
    assert allocate_rings(1) is None
    assert isinstance(allocate_rings(2), RingMemory)

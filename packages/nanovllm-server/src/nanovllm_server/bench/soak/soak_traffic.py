"""Random requests of `soak`, valid and hostile, and their exchange over a socket."""

import asyncio
import re
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from random import Random
from typing import TypeAlias

import orjson

from nanovllm_server.bench.client import Endpoint
from nanovllm_server.bench.workload import SINGLE_TOKEN_WORDS
from nanovllm_server.protocol.json import JSON

EXCHANGE_TIMEOUT_S = 300.0
SUCCESS = frozenset([200])  # Statuses of answers to valid requests.
REFUSALS = frozenset(range(400, 500))  # Statuses of answers to requests that the server must refuse.
MAX_OUTPUT_TOKENS = 24
# Objects in a large schema, and fields of each object. The compiled grammar takes about 2 MiB of the grammar cache.
NUM_LARGE_OBJECTS = 40
NUM_LARGE_OBJECT_FIELDS = 20
# Maximum number of words of a long prompt, which fills the server's caches.
MAX_CACHED_PROMPT_WORDS = 20_000
# Maximum length of a prompt of `build_prompts_of_all_lengths`, as a multiple of the longest random prompt. On a CPU, a
# step of random traffic rarely has more tokens.
MAX_PROMPT_LENGTH_FACTOR = 4
# Number of different prefixes that prompts share, so that they use the prefix cache.
NUM_SHARED_PREFIXES = 8
READ_BYTES = 1 << 16
SLOW_READ_BYTES = 256
SLOW_READ_PAUSE_S = 0.2
MAX_SLOW_READS = 25  # After this number of slow reads, the client reads at full speed.
CONTENT_LENGTH_PATTERN = re.compile(rb"^content-length:\s*(\d+)", re.IGNORECASE | re.MULTILINE)


class Reading(Enum):
    """How the client reads the answer."""

    WHOLE = auto()
    SLOW = auto()
    DISCONNECT = auto()


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its allowed answers.

    may_close: whether the server may close the connection without an answer.
    is_stream: whether a complete answer ends with [DONE].
    """

    data: bytes
    statuses: frozenset[int] = SUCCESS
    reading: Reading = Reading.WHOLE
    may_close: bool = False
    is_stream: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an exchange. status: None if no status line came. failure: the rule that the answer broke, or None."""

    status: int | None
    failure: str | None


BuildExchange: TypeAlias = Callable[["TrafficSource"], Exchange]


class TrafficSource:
    """Draws random exchanges with one model."""

    def __init__(self, endpoint: Endpoint, model: str, seed: int | str, max_prompt_words: int):
        self.endpoint = endpoint
        self.random = Random(seed)
        self._model = model
        self._max_prompt_words = max_prompt_words

    def draw(self) -> tuple[str, Exchange]:
        """Returns (kind, exchange). The kind is a key of EXCHANGES."""
        kind = self.random.choice(KINDS)
        return kind, EXCHANGES[kind](self)

    def build_large_schema_request(self) -> Exchange:
        """Builds a request with a large schema, which the server has not compiled yet."""
        number = self.random.randrange(1_000_000)
        fields: JSON = {f"field{index}": {"type": "string"} for index in range(NUM_LARGE_OBJECT_FIELDS)}
        object_schema: JSON = {"type": "object", "properties": fields}
        properties: JSON = {f"object{number}_{index}": object_schema for index in range(NUM_LARGE_OBJECTS)}
        return _build_with_schema(self, {"type": "object", "properties": properties}, SUCCESS)

    def build_long_prompt_request(self, max_model_len: int) -> Exchange:
        """Builds a request with a new long prompt, which fills the server's caches.

        The server encodes the prompt, then refuses `max_tokens`: prompt and answer would exceed the context.
        """
        words = self.random.choices(SINGLE_TOKEN_WORDS, k=_count_long_prompt_words(max_model_len))
        messages: list[JSON] = [{"role": "user", "content": " ".join(words)}]
        return Exchange(self.encode_post(self.encode_chat(messages=messages, max_tokens=max_model_len)), REFUSALS)

    def build_prompts_of_all_lengths(self, max_model_len: int) -> Iterator[Exchange]:
        """Builds requests for one token each, from the shortest prompt to the longest.

        Each prompt has 1/16 more words than the previous prompt, but at least 1 and at most 32 more words. Sent one by
        one, the requests make an engine on a CPU compile its kernels for all step sizes (tokens per step).
        """
        num_words = 1
        while num_words <= min(max_model_len // 2, MAX_PROMPT_LENGTH_FACTOR * self._max_prompt_words):
            words = self.random.choices(SINGLE_TOKEN_WORDS, k=num_words)
            messages: list[JSON] = [{"role": "user", "content": " ".join(words)}]
            yield Exchange(self.encode_post(self.encode_chat(messages=messages, max_tokens=1)))
            num_words += min(max(num_words // 16, 1), 32)

    def encode_chat(self, **fields: JSON) -> bytes:
        """Encodes a valid chat completion request. fields: replace or extend the usual fields."""
        random = self.random
        words = random.choices(SINGLE_TOKEN_WORDS, k=random.randint(1, self._max_prompt_words))
        if random.random() < 0.5:
            prefix_words = Random(random.randrange(NUM_SHARED_PREFIXES)).choices(
                SINGLE_TOKEN_WORDS, k=self._max_prompt_words // 2
            )
            words = prefix_words + words[: self._max_prompt_words // 2]
        return orjson.dumps(
            {
                "model": self._model,
                "messages": [{"role": "user", "content": " ".join(words)}],
                "max_tokens": random.randint(1, MAX_OUTPUT_TOKENS),
                "temperature": random.choice([0, 0.6, 1.0]),
                **fields,
            }
        )

    def encode_post(self, body: bytes, *headers: str, content_length: int | None = None) -> bytes:
        """Returns a POST request with this body. content_length: None for the body's real length."""
        length = len(body) if content_length is None else content_length
        return self.encode_head("POST", "/chat/completions", f"Content-Length: {length}", *headers) + body

    def encode_head(self, method: str, path: str, *headers: str) -> bytes:
        """Returns the first line and the headers of a request, which asks to close the connection after the answer."""
        key = self.endpoint.api_key
        lines = [
            f"{method} {self.endpoint.path_prefix}{path} HTTP/1.1",
            "Host: localhost",
            "Connection: close",
            "Content-Type: application/json",
            *([f"Authorization: Bearer {key}"] if key else []),
            *headers,
            "\r\n",
        ]
        return "\r\n".join(lines).encode()


def count_long_prompt_bytes(max_model_len: int) -> int:
    """Returns the expected size of a long prompt's text."""
    word_bytes = sum(map(len, SINGLE_TOKEN_WORDS)) / len(SINGLE_TOKEN_WORDS) + 1
    return int(_count_long_prompt_words(max_model_len) * word_bytes)


def _count_long_prompt_words(max_model_len: int) -> int:
    return min(max_model_len // 2, MAX_CACHED_PROMPT_WORDS)


def _build_valid(source: TrafficSource, **fields: JSON) -> Exchange:
    is_stream = source.random.random() < 0.5
    return Exchange(source.encode_post(source.encode_chat(stream=is_stream, **fields)), is_stream=is_stream)


def _build_tool_request(source: TrafficSource) -> Exchange:
    parameters: JSON = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    tool: JSON = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    return _build_valid(source, tools=[tool], tool_choice=source.random.choice(["auto", "required"]))


def _build_with_schema(source: TrafficSource, schema: JSON, statuses: frozenset[int]) -> Exchange:
    response_format: JSON = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = source.encode_chat(response_format=response_format)
    return Exchange(source.encode_post(body), statuses)


def _build_schema_request(source: TrafficSource) -> Exchange:
    # Names of properties repeat, so that some schemas are new to the server and others are cached.
    name = f"field{source.random.randrange(200)}"
    value: JSON = {"type": source.random.choice(["integer", "boolean", "string"])}
    return _build_with_schema(source, {"type": "object", "properties": {name: value}, "required": [name]}, SUCCESS)


def _build_hostile_schema_request(source: TrafficSource) -> Exchange:
    random = source.random
    number = random.randrange(1_000_000)
    branches: list[JSON] = [
        {"type": "object", "properties": {f"p{branch}": {"const": number}}} for branch in range(200)
    ]
    nested: JSON = {"type": "string"}
    # Each round adds two levels. This client's JSON encoder allows at most 254 levels.
    for _ in range(random.randint(20, 110)):
        nested = {"type": "object", "properties": {f"p{number}": nested}}
    schemas: list[JSON] = [{"oneOf": branches}, nested, {"const": "a" * 5000, "pattern": f"(a*)*{number}"}, number]
    return _build_with_schema(source, random.choice(schemas), SUCCESS | REFUSALS)


def _build_disconnect(source: TrafficSource) -> Exchange:
    exchange = _build_valid(source, n=source.random.randint(1, 3))
    return Exchange(exchange.data, reading=Reading.DISCONNECT)


def _build_slow_reader(source: TrafficSource) -> Exchange:
    body = source.encode_chat(stream=True, logprobs=True, top_logprobs=5)
    return Exchange(source.encode_post(body), reading=Reading.SLOW, is_stream=True)


def _build_incomplete_body(source: TrafficSource) -> Exchange:
    body = source.encode_chat()
    data = source.encode_post(body[: source.random.randrange(len(body))], content_length=len(body))
    return Exchange(data, reading=Reading.DISCONNECT)


def _build_malformed_json(source: TrafficSource) -> Exchange:
    body = source.encode_chat()
    # A body is malformed if at least its last brace is missing.
    malformed_bodies = (body[: source.random.randrange(len(body))], b"[" * source.random.randint(1, 100_000))
    return Exchange(source.encode_post(source.random.choice(malformed_bodies)), REFUSALS)


def _build_wrong_field(source: TrafficSource) -> Exchange:
    name = source.random.choice(["messages", "max_tokens", "temperature", "tools", "stop", "response_format", "n"])
    values: list[JSON] = [{"a": 1}, [[1]], "x" * source.random.randint(1, 10_000) + "\0", -1.5, [None]]
    value = source.random.choice(values)
    if name == "stop" and isinstance(value, str):
        value = -1  # A string would be a valid `stop`.
    return Exchange(source.encode_post(source.encode_chat(**{name: value})), REFUSALS)


def _build_too_long(source: TrafficSource) -> Exchange:
    content = "time year " * source.random.randint(50_000, 200_000)
    return Exchange(source.encode_post(source.encode_chat(messages=[{"role": "user", "content": content}])), REFUSALS)


def _build_oversize_body(source: TrafficSource) -> Exchange:
    return Exchange(source.encode_post(b"{", content_length=1 << 34), REFUSALS, may_close=True)


def _build_ambiguous_length(source: TrafficSource) -> Exchange:
    return Exchange(source.encode_post(source.encode_chat(), "Transfer-Encoding: chunked"), REFUSALS, may_close=True)


def _build_garbage(source: TrafficSource) -> Exchange:
    data = source.random.randbytes(source.random.randint(1, 4000)) + b"\r\n\r\n"
    return Exchange(data, REFUSALS, may_close=True)


def _build_unknown_path(source: TrafficSource) -> Exchange:
    return Exchange(source.encode_head("GET", f"/{source.random.randrange(1_000_000)}"), REFUSALS)


EXCHANGES: Mapping[str, BuildExchange] = {
    "plain": _build_valid,
    "choices": lambda source: _build_valid(source, n=source.random.randint(2, 3), stop=["\n"]),
    "log-probabilities": lambda source: _build_valid(source, logprobs=True, top_logprobs=3),
    "tools": _build_tool_request,
    "schema": _build_schema_request,
    "disconnect": _build_disconnect,
    "slow reader": _build_slow_reader,
    "hostile schema": _build_hostile_schema_request,
    "incomplete body": _build_incomplete_body,
    "malformed JSON": _build_malformed_json,
    "wrong field": _build_wrong_field,
    "unknown model": lambda source: Exchange(source.encode_post(source.encode_chat(model="none")), REFUSALS),
    "prompt too long": _build_too_long,
    "oversize body": _build_oversize_body,
    "ambiguous length": _build_ambiguous_length,
    "garbage": _build_garbage,
    "unknown path": _build_unknown_path,
}
KINDS = tuple(EXCHANGES)


async def run_exchange(source: TrafficSource, exchange: Exchange) -> Outcome:
    """Sends one request on a new connection, and checks the answer."""
    try:
        async with asyncio.timeout(EXCHANGE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(source.endpoint.host, source.endpoint.port)
            try:
                answer = await _send_and_read(source.random, exchange, reader, writer)
            finally:
                # An abort leaves no connection open, even if the server does not read the rest of the request.
                writer.transport.abort()
    except TimeoutError:
        return Outcome(None, f"no complete answer within {EXCHANGE_TIMEOUT_S:g} s")
    except OSError as error:
        return Outcome(None, None if exchange.may_close else f"the connection broke: {error}")
    return _check_answer(exchange, answer)


async def _send_and_read(random: Random, exchange: Exchange, reader: StreamReader, writer: StreamWriter) -> bytes:
    writer.write(exchange.data)
    await writer.drain()
    if exchange.reading is Reading.DISCONNECT:
        await asyncio.sleep(random.random() * 3)
        return b""
    answer = bytearray()
    if exchange.reading is Reading.SLOW:
        for _ in range(MAX_SLOW_READS):
            answer += await reader.read(SLOW_READ_BYTES)
            await asyncio.sleep(SLOW_READ_PAUSE_S)
    while not _has_whole_body(answer) and (part := await reader.read(READ_BYTES)):
        answer += part
    return bytes(answer)


def _has_whole_body(answer: bytearray) -> bool:
    """Whether the answer has all bytes of its Content-Length. False for an answer without this header."""
    # Until a refused request has arrived completely, the server may keep the connection open: don't wait for a close.
    head, _, body = answer.partition(b"\r\n\r\n")
    length = CONTENT_LENGTH_PATTERN.search(head)
    return length is not None and len(body) >= int(length[1])


def _check_answer(exchange: Exchange, answer: bytes) -> Outcome:
    if exchange.reading is Reading.DISCONNECT:
        return Outcome(None, None)
    first_line = answer.partition(b"\r\n")[0].split()
    if len(first_line) < 2 or not first_line[1].isdigit():
        return Outcome(None, None if exchange.may_close else "the server closed the connection without an answer")
    status = int(first_line[1])
    if status not in exchange.statuses:
        return Outcome(status, f"unexpected status {status}: {answer[-200:].decode(errors='replace')}")
    if exchange.is_stream and (b"data: [DONE]" not in answer or b'data: {"error"' in answer):
        return Outcome(status, f"the stream is incomplete: {answer[-200:].decode(errors='replace')}")
    return Outcome(status, None)

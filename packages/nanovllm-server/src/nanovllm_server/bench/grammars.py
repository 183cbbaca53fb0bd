"""The command `grammars`: measures how answers that follow schemas delay unconstrained answers.

Each round measures three mixes of streams. In the first mix, no stream follows a schema. In the second mix, half
of the streams follow a schema. In the third mix, further requests also send new schemas that compile slowly.
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import count, pairwise
from statistics import median

import uvloop

from nanovllm_server.bench.client import Endpoint, ExchangeError, TimedAnswer, chat_request, list_models, stream_chat
from nanovllm_server.bench.report import BenchError, OutputFiles, report
from nanovllm_server.bench.serve import LatencyStats, latency_stats
from nanovllm_server.bench.workload import IntegerRange, WorkloadShape, random_text_requests
from nanovllm_server.protocol.json import JSON

UNCONSTRAINED, HALF_CONSTRAINED, WITH_COMPILING = MIXES = (
    "unconstrained",
    "half constrained",
    "half constrained, new schemas",
)
NUM_COMPILING_REQUESTS = 4  # Simultaneous requests with new schemas in the mix WITH_COMPILING.
WARM_UP_TOKENS = 4  # Output tokens of a warm-up request.
PROMPT_LEN = 32  # Number of words in each prompt. Each word is one token.
TEMPERATURE = 0.6
_STRING_SCHEMA: JSON = {"type": "string"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarsOptions:
    """Options of a run. model: None for the first model that the server lists. repeat: number of rounds."""

    endpoint: Endpoint
    model: str | None
    num_streams: int
    output_len: int
    repeat: int
    files: OutputFiles


@dataclass(frozen=True, slots=True)
class MixResult:
    """The results of one mix over all rounds.

    itl: times between pieces (deltas with content) of the measured streams, which follow no schema.
    ratio_p50, ratio_p99: p50 and p99 of these times, divided by those of the unconstrained mix; median over all rounds.
    compiled, refused: numbers of answered and of failed requests with new schemas.
    """

    name: str
    itl: LatencyStats
    ratio_p50: float
    ratio_p99: float
    tokens_constrained: int
    compiled: int
    refused: int


def run(options: GrammarsOptions) -> None:
    """Measures and reports all mixes. Raises BenchError if a stream fails or ends early."""
    model, results = uvloop.run(measure(options))
    stats_header = ["ITL ms mean", "p50", "p90", "p99", "p50 ratio", "p99 ratio"]
    rows = [
        [
            result.name,
            *(f"{value:.2f}" for value in astuple(result.itl)),
            f"{result.ratio_p50:.3f}",
            f"{result.ratio_p99:.3f}",
            *map(str, (result.tokens_constrained, result.compiled, result.refused)),
        ]
        for result in results
    ]
    report(
        "grammars",
        f"grammars: {model}; {options.num_streams} streams of {options.output_len} tokens, {options.repeat} rounds",
        [[["streams", *stats_header, "constrained tok", "schemas", "refused"], *rows]],
        {
            "model": model,
            "num_streams": options.num_streams,
            "output_len": options.output_len,
            "repeat": options.repeat,
            "mixes": [asdict(result) for result in results],
        },
        options.files,
    )


@dataclass(slots=True)
class _RoundResult:
    """The results of one mix in one round. gaps_s: seconds between pieces of the streams that follow no schema."""

    gaps_s: list[float]
    tokens_constrained: int
    compiled: int = 0
    refused: int = 0


async def measure(options: GrammarsOptions) -> tuple[str, list[MixResult]]:
    """Returns the model's name and the results of all mixes. Raises BenchError if a stream fails or ends early."""
    try:
        model = options.model or (await list_models(options.endpoint))[0]
        # The warm-up includes a schema, because a server's first answer that follows a schema takes seconds longer.
        for schema in (typical_schema(), None):
            await stream_chat(options.endpoint, _request_body(model, "Hello", WARM_UP_TOKENS, schema))
    except ExchangeError as error:
        raise BenchError(f"the server doesn't answer: {error}") from error
    rounds_by_mix: dict[str, list[_RoundResult]] = {mix: [] for mix in MIXES}
    schema_numbers = count()
    for index in range(options.repeat):
        for mix in MIXES:
            rounds_by_mix[mix].append(await _measure_round(options, model, mix, f"{index}-{mix}", schema_numbers))
    base_stats = [latency_stats(result.gaps_s) for result in rounds_by_mix[UNCONSTRAINED]]
    return model, [_summarize(mix, rounds, base_stats) for mix, rounds in rounds_by_mix.items()]


def _summarize(mix: str, rounds: Sequence[_RoundResult], base_stats: Sequence[LatencyStats]) -> MixResult:
    """Combines all rounds of a mix. base_stats: statistics of the unconstrained mix, one per round."""
    stats_pairs = [*zip((latency_stats(result.gaps_s) for result in rounds), base_stats, strict=True)]
    return MixResult(
        name=mix,
        itl=latency_stats(gap for result in rounds for gap in result.gaps_s),
        ratio_p50=median(stats.p50 / base.p50 for stats, base in stats_pairs),
        ratio_p99=median(stats.p99 / base.p99 for stats, base in stats_pairs),
        tokens_constrained=sum(result.tokens_constrained for result in rounds),
        compiled=sum(result.compiled for result in rounds),
        refused=sum(result.refused for result in rounds),
    )


async def _measure_round(
    options: GrammarsOptions, model: str, mix: str, seed: str, schema_numbers: Iterator[int]
) -> _RoundResult:
    half_num_streams = options.num_streams // 2
    lengths = IntegerRange(PROMPT_LEN, PROMPT_LEN), IntegerRange(options.output_len, options.output_len)
    requests = random_text_requests(WorkloadShape(options.num_streams, *lengths), seed)
    # The first half of the streams is measured. Only streams of the second half follow a schema.
    schema = None if mix == UNCONSTRAINED else typical_schema()
    bodies = [
        _request_body(model, request.text, request.max_tokens, schema if index >= half_num_streams else None)
        for index, request in enumerate(requests)
    ]
    streams_ended = asyncio.Event()
    result = _RoundResult([], 0)
    compiling_tasks = [
        asyncio.create_task(_send_new_schemas(options.endpoint, model, result, schema_numbers, streams_ended))
        for _ in range(NUM_COMPILING_REQUESTS if mix == WITH_COMPILING else 0)
    ]
    try:
        answers = await asyncio.gather(*(stream_chat(options.endpoint, body) for body in bodies))
    except ExchangeError as error:
        raise BenchError(f"a stream failed ({mix}): {error}") from error
    finally:
        streams_ended.set()
        await asyncio.gather(*compiling_tasks)
    result.gaps_s = _gaps_while_all_run(answers, half_num_streams)
    result.tokens_constrained = (
        0 if schema is None else sum(answer.output_tokens for answer in answers[half_num_streams:])
    )
    if schema is not None and result.tokens_constrained < half_num_streams * options.output_len:
        raise BenchError(f"answers with a schema ended early ({mix}): lower --output-len")
    return result


def _gaps_while_all_run(answers: Sequence[TimedAnswer], num_measured: int) -> list[float]:
    """Returns the seconds between pieces of the first `num_measured` streams, while all streams run."""
    last_start = max(answer.piece_times[0] for answer in answers)
    first_end = min(answer.piece_times[-1] for answer in answers)
    return [
        after - before
        for answer in answers[:num_measured]
        for before, after in pairwise(answer.piece_times)
        if last_start <= before and after <= first_end
    ]


async def _send_new_schemas(
    endpoint: Endpoint, model: str, result: _RoundResult, schema_numbers: Iterator[int], streams_ended: asyncio.Event
) -> None:
    """Sends one request after another, each with a new schema, until the streams end."""
    while not streams_ended.is_set():
        try:
            await stream_chat(endpoint, _request_body(model, "Hello", 1, slow_schema(next(schema_numbers))))
        except ExchangeError:
            result.refused += 1
        else:
            result.compiled += 1


def _request_body(model: str, text: str, max_tokens: int, schema: JSON) -> JSON:
    body = chat_request(model, [{"role": "user", "content": text}], max_tokens, TEMPERATURE)
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return body


def _object_schema(properties: dict[str, JSON]) -> JSON:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def typical_schema() -> JSON:
    """Returns a typical schema. Its answers have thousands of tokens, so that no stream ends early."""
    address = _object_schema(
        {"street": _STRING_SCHEMA, "city": _STRING_SCHEMA, "country": {"enum": ["France", "Italy", "Spain"]}}
    )
    person = _object_schema(
        {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"type": "string", "maxLength": 60},
            "member": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
            "address": address,
        }
    )
    return _object_schema({"people": {"type": "array", "items": person, "minItems": 100, "maxItems": 200}})


def slow_schema(number: int) -> JSON:
    """Returns a schema that takes about a second to compile. Each `number` makes a different schema."""
    properties = {f"f{number}_{field_index}": _STRING_SCHEMA for field_index in range(20)}
    return _object_schema({f"o{number}_{object_index}": _object_schema(properties) for object_index in range(40)})

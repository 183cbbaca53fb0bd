"""`nanovllm-bench grammars`: measures how answers that follow schemas delay free answers.

Three mixes with equally many streams alternate: all free; half with a schema; half with a schema while further requests
bring new schemas that take long to compile. The figure is the time between tokens of the free streams.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count

import uvloop

from nanovllm_server.bench.client import Answer, Endpoint, ExchangeError, chat_request, list_models, stream_chat
from nanovllm_server.bench.report import BenchError, Results, keep, machine, median, one_line, show
from nanovllm_server.bench.serve import Spread, spread
from nanovllm_server.bench.workload import Lengths, WorkloadShape, random_chats
from nanovllm_server.protocol.json import JSON

MIXES = ("free", "half held", "held, others compile")
# Simultaneous requests with new schemas in the third mix.
COMPILING = 4
TEMPERATURE = 0.6
_TEXT: JSON = {"type": "string"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarsJob:
    """Options of a run. model: None for the first one that the server lists. num_streams: must be even."""

    endpoint: Endpoint
    model: str | None
    num_streams: int
    output_len: int
    repeat: int
    results: Results


@dataclass(frozen=True, slots=True)
class Mix:
    """The figures of one mix over all rounds.

    itl: times between tokens of the free streams.
    ratio_p50, ratio_p99: medians over rounds of the percentile's ratio to that of the free mix.
    tokens_held: tokens generated under a schema.
    compiled, refused: requests with new schemas that were answered, and that were not.
    """

    name: str
    itl: Spread
    ratio_p50: float
    ratio_p99: float
    tokens_held: int
    compiled: int
    refused: int


def run(job: GrammarsJob) -> None:
    """Measures, shows a table, writes the figures. Raises BenchError."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        model, mixes = runner.run(measure(job))
    facts = machine()
    title = f"grammars: {model}; {job.num_streams} streams of {job.output_len} tokens, {job.repeat} rounds"
    header = [
        "streams",
        "ITL ms mean",
        "p50",
        "p90",
        "p99",
        "p50 / free",
        "p99 / free",
        "held tok",
        "schemas",
        "refused",
    ]
    rows = [
        [
            mix.name,
            *(f"{value:.2f}" for value in asdict(mix.itl).values()),
            f"{mix.ratio_p50:.3f}",
            f"{mix.ratio_p99:.3f}",
            *map(str, (mix.tokens_held, mix.compiled, mix.refused)),
        ]
        for mix in mixes
    ]
    show(title, one_line(facts), [header, *rows])
    keep(
        job.results.json,
        {
            "benchmark": "grammars",
            "environment": facts,
            "model": model,
            "num_streams": job.num_streams,
            "output_len": job.output_len,
            "repeat": job.repeat,
            "mixes": [asdict(mix) for mix in mixes],
        },
    )


@dataclass(slots=True)
class _Round:
    """One mix in one round. gaps: seconds between tokens of the free streams. Other fields: see `Mix`."""

    gaps: list[float]
    tokens_held: int
    compiled: int = 0
    refused: int = 0


async def measure(job: GrammarsJob) -> tuple[str, list[Mix]]:
    """The model's name, and the figures of each mix. Raises BenchError."""
    try:
        model = job.model or (await list_models(job.endpoint))[0]
        # The first grammar of a server takes seconds.
        await stream_chat(job.endpoint, _body(model, "Hello", 4, people()))
        await stream_chat(job.endpoint, _body(model, "Hello", 4, None))
    except ExchangeError as error:
        raise BenchError(f"the server doesn't answer: {error}") from error
    rounds: dict[str, list[_Round]] = {name: [] for name in MIXES}
    numbers = count()
    for index in range(job.repeat):
        for name in MIXES:
            rounds[name].append(await _measure_round(job, model, name, f"{index}-{name}", numbers))
    free = [spread(each.gaps) for each in rounds["free"]]
    mixes: list[Mix] = []
    for name, runs in rounds.items():
        spreads = [spread(each.gaps) for each in runs]
        mixes.append(
            Mix(
                name=name,
                itl=spread(gap for each in runs for gap in each.gaps),
                ratio_p50=median(one.p50 / other.p50 for one, other in zip(spreads, free, strict=True)),
                ratio_p99=median(one.p99 / other.p99 for one, other in zip(spreads, free, strict=True)),
                tokens_held=sum(each.tokens_held for each in runs),
                compiled=sum(each.compiled for each in runs),
                refused=sum(each.refused for each in runs),
            )
        )
    return model, mixes


async def _measure_round(job: GrammarsJob, model: str, name: str, seed: str, numbers: "count[int]") -> _Round:
    half = job.num_streams // 2
    lengths = Lengths(32, 32)
    works = random_chats(WorkloadShape(job.num_streams, lengths, Lengths(job.output_len, job.output_len)), seed)
    # In the free mix, the second half of the streams is free too, but is in no figure.
    schema = None if name == MIXES[0] else people()
    ending = asyncio.Event()
    outcome = _Round([], 0)
    others = [
        asyncio.create_task(_compile(job, model, outcome, numbers, ending))
        for _ in range(COMPILING if name == MIXES[2] else 0)
    ]
    try:
        answers = await asyncio.gather(
            *(
                stream_chat(job.endpoint, _body(model, work.text, work.max_tokens, schema if index >= half else None))
                for index, work in enumerate(works)
            )
        )
    except ExchangeError as error:
        raise BenchError(f"a stream failed ({name}): {error}") from error
    finally:
        ending.set()
        await asyncio.gather(*others)
    outcome.gaps = _gaps(answers, half)
    outcome.tokens_held = 0 if schema is None else sum(answer.output_tokens for answer in answers[half:])
    if schema is not None and outcome.tokens_held < half * job.output_len:
        raise BenchError(f"answers with a schema ended early ({name}): the figures would be of fewer streams")
    return outcome


def _gaps(answers: Sequence[Answer], half: int) -> list[float]:
    """Gaps between pieces of the free streams, while all streams run."""
    begin = max(answer.pieces[0] for answer in answers)
    end = min(answer.pieces[-1] for answer in answers)
    return [
        after - before
        for answer in answers[:half]
        for before, after in zip(answer.pieces, answer.pieces[1:], strict=False)
        if begin <= before and after <= end
    ]


async def _compile(job: GrammarsJob, model: str, outcome: _Round, numbers: "count[int]", ending: asyncio.Event) -> None:
    """Sends one request after another, each for one token under a new schema."""
    while not ending.is_set():
        try:
            await stream_chat(job.endpoint, _body(model, "Hello", 1, hostile(next(numbers))))
        except ExchangeError:
            outcome.refused += 1
        else:
            outcome.compiled += 1


def _body(model: str, text: str, max_tokens: int, schema: JSON) -> JSON:
    body = chat_request(model, [{"role": "user", "content": text}], max_tokens, TEMPERATURE)
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return body


def _object(properties: dict[str, JSON]) -> JSON:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def people() -> JSON:
    """A typical schema, whose answers have thousands of tokens."""
    address = _object({"street": _TEXT, "city": _TEXT, "country": {"enum": ["France", "Italy", "Spain"]}})
    person = _object(
        {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "email": {"type": "string", "maxLength": 60},
            "member": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
            "address": address,
        }
    )
    return _object({"people": {"type": "array", "items": person, "minItems": 100, "maxItems": 200}})


def hostile(number: int) -> JSON:
    """A schema that is different for each `number`, and that takes about a second to compile."""
    fields = {f"f{number}_{field}": _TEXT for field in range(20)}
    return _object({f"o{number}_{part}": _object(fields) for part in range(40)})

"""`nanovllm-bench trace`: times of an engine's steps on host and device, from the file that `--trace` wrote."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from nanovllm_server.bench.report import BenchError, Results, keep, percentile, show
from nanovllm_server.bench.workload import Lengths
from nanovllm_server.protocol.json import JSON

DEVICE = "device"
# Label for the sum of a step's times on the host.
HOST = "host"
# Idle time from which the device counts as waiting for the host, in us.
LONG_REST = 50.0


class Event(msgspec.Struct):
    """A line of Chrome's array format.

    ph: X for a span from `ts` for `dur` (us); M for the name of a track.
    """

    ph: str
    name: str
    tid: int
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, str | float] = {}


@dataclass(frozen=True, slots=True)
class Spans:
    """Times of the steps on one track, in us. For the track `HOST`: sums of a step's spans."""

    track: str
    steps: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Rest:
    """Idle times of the device between steps, in us. long: number of times above LONG_REST."""

    p50: float
    p99: float
    most: float
    long: int


def run(path: Path, steps: Lengths | None, results: Results) -> None:
    """Shows tables, writes the figures. Raises BenchError if the file is no trace or has none of these steps."""
    tracks = read(path)
    if steps is not None:
        tracks = {
            track: {step: event for step, event in spans.items() if steps.low <= step <= steps.high}
            for track, spans in tracks.items()
        }
    if not any(tracks.values()):
        raise BenchError(f"{path} has no steps" + (f" from {steps.low} to {steps.high}" if steps else ""))
    found, rest = [*summarize(tracks)], rests(tracks.get(DEVICE, {}))
    rows = [
        [spans.track, str(spans.steps), *(f"{value:.1f}" for value in (spans.p50, spans.p90, spans.p99))]
        for spans in found
    ]
    tables = [[["us", "steps", "p50", "p90", "p99"], *rows]]
    if rest is not None:
        row = ["", f"{rest.p50:.1f}", f"{rest.p99:.1f}", f"{rest.most:.1f}", str(rest.long)]
        tables.append([["device rests, us", "p50", "p99", "most", f"over {LONG_REST:.0f}"], row])
    show(f"trace; {path}", "all steps" if steps is None else f"steps {steps.low}..{steps.high}", *tables)
    figures: list[JSON] = [asdict(spans) for spans in found]
    between = None if rest is None else asdict(rest)
    keep(results.json, {"benchmark": "trace", "file": str(path), "tracks": figures, "rest": between})


def read(path: Path) -> dict[str, dict[int, Event]]:
    """The spans of each track, by step. Raises BenchError."""
    decode = msgspec.json.Decoder(Event).decode
    names: dict[int, str] = {}
    spans: dict[str, dict[int, Event]] = {}
    try:
        first, *lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} can't be read: {error}") from error
    if first != "[":
        raise BenchError(f"{path} is not what --trace writes: its first line is {first[:20]!r}")
    # The array has no end. Text after the last line break is incomplete: the process was killed while it wrote.
    for number, line in enumerate(lines[:-1], 2):
        try:
            event = decode(line.removesuffix(","))
            if event.ph == "M":
                names[event.tid] = str(event.args["name"])
            else:
                spans.setdefault(names[event.tid], {})[int(event.name.removeprefix("step "))] = event
        except (msgspec.DecodeError, KeyError, ValueError) as error:
            raise BenchError(f"{path}, line {number}: not what --trace writes ({error})") from error
    return spans


def summarize(tracks: dict[str, dict[int, Event]]) -> Iterable[Spans]:
    """Times of the steps on each track, and, for steps with spans on all host tracks, their sums on the host."""
    host = [spans for track, spans in tracks.items() if track != DEVICE]
    if host and (complete_steps := set[int].intersection(*map(set[int], host))):
        yield _spans(HOST, [sum(spans[step].dur for spans in host) for step in complete_steps])
    for track, spans in tracks.items():
        if spans:
            yield _spans(track, [event.dur for event in spans.values()])


def rests(device: dict[int, Event]) -> Rest | None:
    """Idle times of the device between the steps; None if there are fewer than two steps."""
    events = [device[step] for step in sorted(device)]
    between = sorted(later.ts - event.ts - event.dur for event, later in pairwise(events))
    if not between:
        return None
    long = sum(rest > LONG_REST for rest in between)
    return Rest(percentile(between, 50), percentile(between, 99), between[-1], long)


def _spans(track: str, durations: Iterable[float]) -> Spans:
    taken = sorted(durations)
    return Spans(track, len(taken), *(percentile(taken, percent) for percent in (50, 90, 99)))

"""The command `trace`: summarizes the times of an engine's steps from the file that `--trace` wrote."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import msgspec

from nanovllm_server.bench.report import BenchError, percentile, print_tables, write_json
from nanovllm_server.bench.workload import IntegerRange

# A track is either the device or one activity of the host, such as planning. A track has one time span per step.
DEVICE_TRACK = "device"
# These tracks have a time span per request instead, which this command leaves out.
REQUEST_TRACKS = ("load", "fetch")
# Value of `TrackTimes.track` in the row that sums each step's times over all tracks except the device.
HOST_SUM = "host"
# `IdleTimes.long` counts the idle times above this limit.
LONG_IDLE_US = 50.0


class TraceEvent(msgspec.Struct):
    """A line of a trace in Chrome's JSON array format.

    ph: kind of the line. X: a time span of track `tid`, which begins at `ts` and lasts `dur`, both in us. M: the name
        of track `tid`, in `args`.
    """

    ph: str
    name: str
    tid: int
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, str | float] = {}


EventByStep: TypeAlias = dict[int, TraceEvent]


@dataclass(frozen=True, slots=True)
class TrackTimes:
    """Percentiles of the times that steps take on one track, in us. steps: number of steps."""

    track: str
    steps: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class IdleTimes:
    """Idle times of the device between steps, in us. most: maximum. long: number of idle times above LONG_IDLE_US."""

    p50: float
    p99: float
    most: float
    long: int


def run(path: Path, step_range: IntegerRange | None, json_path: Path | None) -> None:
    """Prints tables and writes the results. Raises BenchError if the file is not a trace or has no selected step."""
    tracks = read_trace(path)
    if step_range is not None:
        tracks = {
            track: {step: event for step, event in events.items() if step_range.low <= step <= step_range.high}
            for track, events in tracks.items()
        }
    if not any(tracks.values()):
        selection = f" from {step_range.low} to {step_range.high}" if step_range else ""
        raise BenchError(f"{path} has no steps{selection}")
    track_times, idle_times = [*measure_tracks(tracks)], measure_idle_times(tracks.get(DEVICE_TRACK, {}))
    rows = [
        [times.track, str(times.steps), *(f"{value:.1f}" for value in (times.p50, times.p90, times.p99))]
        for times in track_times
    ]
    tables = [[["us", "steps", "p50", "p90", "p99"], *rows]]
    if idle_times is not None:
        values = [f"{value:.1f}" for value in (idle_times.p50, idle_times.p99, idle_times.most)]
        header = ["device idle, us", "p50", "p99", "max", f"over {LONG_IDLE_US:.0f}"]
        tables.append([header, ["", *values, str(idle_times.long)]])
    subtitle = "all steps" if step_range is None else f"steps {step_range.low}..{step_range.high}"
    print_tables(f"trace; {path}", subtitle, tables)
    write_json(
        json_path,
        {
            "benchmark": "trace",
            "file": str(path),
            "tracks": [asdict(times) for times in track_times],
            "device_idle": None if idle_times is None else asdict(idle_times),
        },
    )


def read_trace(path: Path) -> dict[str, EventByStep]:
    """Reads the steps' events of each track. Raises BenchError if the file is not a trace."""
    decode = msgspec.json.Decoder(TraceEvent).decode
    track_by_tid: dict[int, str] = {}
    tracks: dict[str, EventByStep] = {}
    try:
        first_line, *lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path} can't be read: {error}") from error
    if first_line != "[":
        raise BenchError(f"{path} is not what --trace writes: its first line is {first_line[:20]!r}")
    # A killed process leaves an incomplete last line, so the line after the last line break is dropped.
    for line_number, line in enumerate(lines[:-1], 2):
        try:
            event = decode(line.removesuffix(","))
            if event.ph == "M":
                track_by_tid[event.tid] = str(event.args["name"])
            elif (track := track_by_tid[event.tid]) not in REQUEST_TRACKS:
                tracks.setdefault(track, {})[int(event.name.removeprefix("step "))] = event
        except (msgspec.DecodeError, KeyError, ValueError) as error:
            raise BenchError(f"{path}, line {line_number}: not what --trace writes ({error})") from error
    return tracks


def measure_tracks(tracks: dict[str, EventByStep]) -> Iterable[TrackTimes]:
    """First yields sums over all host tracks, for steps that every host track has. Then yields each track's times."""
    host_tracks = [events for track, events in tracks.items() if track != DEVICE_TRACK]
    if host_tracks and (complete_steps := set[int].intersection(*map(set[int], host_tracks))):
        yield _track_times(HOST_SUM, [sum(events[step].dur for events in host_tracks) for step in complete_steps])
    for track, events in tracks.items():
        if events:
            yield _track_times(track, [event.dur for event in events.values()])


def measure_idle_times(device_events: EventByStep) -> IdleTimes | None:
    """Computes the device's idle times between consecutive steps. Returns None for fewer than two steps."""
    events = [device_events[step] for step in sorted(device_events)]
    idle_us = sorted(later.ts - event.ts - event.dur for event, later in pairwise(events))
    if not idle_us:
        return None
    num_long = sum(value > LONG_IDLE_US for value in idle_us)
    return IdleTimes(percentile(idle_us, 50), percentile(idle_us, 99), idle_us[-1], num_long)


def _track_times(track: str, durations_us: Iterable[float]) -> TrackTimes:
    sorted_us = sorted(durations_us)
    return TrackTimes(track, len(sorted_us), *(percentile(sorted_us, percent) for percent in (50, 90, 99)))

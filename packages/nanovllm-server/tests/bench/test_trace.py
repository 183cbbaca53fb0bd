import json
from types import SimpleNamespace

import pytest
import torch

from nanovllm_core.engine.trace import StepTracer, TraceFile
from nanovllm_core.transfer.fetches import FetchOutcome
from nanovllm_server.bench import bench_cli

TRACKS = ("plan", "launch", "device", "output")
TRACK_NAME_LINES = [
    "[",
    *(
        json.dumps({"ph": "M", "name": "thread_name", "tid": tid, "args": {"name": track}}) + ","
        for tid, track in enumerate(TRACKS)
    ),
]


def span_line(track: str, step: int, begin: float, duration: float) -> str:
    event = {"ph": "X", "name": f"step {step}", "tid": TRACKS.index(track), "ts": begin, "dur": duration, "pid": 7}
    return json.dumps(event) + ","


def write_trace(tmp_path, *lines: str, end: str = "\n"):
    path = tmp_path / "steps.json"
    path.write_text("\n".join([*TRACK_NAME_LINES, *lines]) + end)
    return path


def run_trace(tmp_path, path, *flags: str):
    result = tmp_path / "result.json"
    assert bench_cli.main(["trace", str(path), *flags, "--json", str(result)]) == 0
    figures = json.loads(result.read_bytes())
    return {track.pop("track"): track for track in figures["tracks"]}, figures["device_idle"]


@pytest.fixture
def trace(tmp_path):
    """All times are in microseconds."""
    lines: list[str] = []
    begin = 0.0
    for step in range(5):
        begin += 1000 + (100 if step == 4 else 2)
        lines += [span_line("plan", step, begin - 500, 10 + step), span_line("launch", step, begin - 400, 20)]
        lines += [span_line("device", step, begin, 1000), span_line("output", step, begin + 1001, 30)]
    return write_trace(tmp_path, *lines)


def test_step_times_and_idle_times_are_reported(tmp_path, trace, capsys):
    tracks, idle_times = run_trace(tmp_path, trace)
    assert tracks == {
        "host": {"steps": 5, "p50": 62, "p90": pytest.approx(63.6), "p99": pytest.approx(63.96)},
        "plan": {"steps": 5, "p50": 12, "p90": pytest.approx(13.6), "p99": pytest.approx(13.96)},
        "launch": {"steps": 5, "p50": 20, "p90": 20, "p99": 20},
        "device": {"steps": 5, "p50": 1000, "p90": 1000, "p99": 1000},
        "output": {"steps": 5, "p50": 30, "p90": 30, "p99": 30},
    }
    assert idle_times == {"p50": 2, "p99": pytest.approx(97.06), "most": 100, "long": 1}
    output_lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in output_lines if line.split()[:1] == ["host"]] == [["host", "5", "62.0"]]
    assert output_lines[-1].split() == ["2.0", "97.1", "100.0", "1"]


def test_only_selected_steps_are_reported(tmp_path, trace, capsys):
    tracks, idle_times = run_trace(tmp_path, trace, "--steps", "1..3")
    assert tracks["host"]["steps"] == 3
    assert idle_times == {"p50": 2, "p99": 2, "most": 2, "long": 0}
    assert "steps 1..3" in capsys.readouterr().out
    assert run_trace(tmp_path, trace, "--steps", "4")[1] is None
    assert run_trace(tmp_path, trace, "--steps", "0")[0]["plan"] == {"steps": 1, "p50": 10, "p90": 10, "p99": 10}
    assert bench_cli.main(["trace", str(trace), "--steps", "5..9"]) == 1
    assert capsys.readouterr().err == f"nanovllm-bench: {trace} has no steps from 5 to 9\n"


def test_steps_without_all_host_events_are_not_in_the_host_sums(tmp_path):
    path = write_trace(
        tmp_path,
        span_line("plan", 0, 0, 5),
        span_line("plan", 1, 9, 7),
        span_line("launch", 0, 5, 10),
        '{"pid":7,"ph":"X',
        end="",
    )
    tracks, idle_times = run_trace(tmp_path, path)
    assert tracks["host"]["steps"] == 1
    assert tracks["host"]["p50"] == 15
    assert tracks["plan"]["steps"] == 2
    assert idle_times is None


def test_loads_and_fetches_of_requests_are_left_out(tmp_path):
    path = tmp_path / "steps.json"
    tracer = StepTracer(TraceFile(path), torch.device("cpu"))
    request = SimpleNamespace(client_request=SimpleNamespace(id="r"))
    load = SimpleNamespace(request=request, begin_s=1.0, num_tokens=32, num_file_tokens=16)
    fetch = SimpleNamespace(
        request=request,
        outcome=FetchOutcome.FETCHED,
        begin_s=1.0,
        end_s=2.0,
        num_tokens=32,
        entries=[],
        arrived_positions=set(),
        peer_s=0.5,
    )
    tracer.record_loads([load])
    tracer.record_fetch(fetch)
    tracer.file.add_span("launch", "step 0", 1.0, 1.5)
    tracer.file.close()
    tracks, _ = run_trace(tmp_path, path)
    assert {track: times["steps"] for track, times in tracks.items()} == {"host": 1, "launch": 1}


@pytest.mark.parametrize(
    ("text", "expected_error"),
    [
        ("", "is not what --trace writes: its first line is ''"),
        ('{"traceEvents": []}\n', "is not what --trace writes: its first line is '{\"traceEvents\": []}'"),
        ("[\n", "has no steps"),
        ("[\nno JSON\n", ", line 2: not what --trace writes"),
        ('[\n{"ph":"X","name":"step 0","tid":9,"ts":1,"dur":1},\n', ", line 2: not what --trace writes (9)"),
        (
            "\n".join([*TRACK_NAME_LINES, '{"ph":"X","name":"a step","tid":0,"ts":1,"dur":1},', ""]),
            ", line 6: not what --trace writes",
        ),
    ],
)
def test_file_that_is_not_a_trace_is_an_error(tmp_path, capsys, text, expected_error):
    path = tmp_path / "steps.json"
    path.write_text(text)
    assert bench_cli.main(["trace", str(path)]) == 1
    assert capsys.readouterr().err.startswith(
        f"nanovllm-bench: {path}{'' if expected_error[0] == ',' else ' '}{expected_error}"
    )


def test_unreadable_trace_is_an_error(tmp_path, capsys):
    assert bench_cli.main(["trace", str(tmp_path / "none.json")]) == 1
    assert "can't be read: [Errno 2]" in capsys.readouterr().err
    (tmp_path / "image").write_bytes(b"\x89PNG\r\n")
    assert bench_cli.main(["trace", str(tmp_path / "image")]) == 1
    assert "image can't be read: 'utf-8'" in capsys.readouterr().err

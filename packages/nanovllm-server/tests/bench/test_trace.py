"""`nanovllm-bench trace`: figures from traces, and errors for other files."""

import json

import pytest

from nanovllm_server.bench import cli

TRACKS = ("plan", "launch", "device", "output")
HEAD = [
    "[",
    *(
        json.dumps({"ph": "M", "name": "thread_name", "tid": t, "args": {"name": n}}) + ","
        for t, n in enumerate(TRACKS)
    ),
]


def span(track: str, step: int, begin: float, duration: float) -> str:
    event = {"ph": "X", "name": f"step {step}", "tid": TRACKS.index(track), "ts": begin, "dur": duration, "pid": 7}
    return json.dumps(event) + ","


def written(tmp_path, *lines: str, end: str = "\n"):
    path = tmp_path / "steps.json"
    path.write_text("\n".join([*HEAD, *lines]) + end)
    return path


def figures(tmp_path, path, *flags: str):
    result = tmp_path / "result.json"
    assert cli.main(["trace", str(path), *flags, "--json", str(result)]) == 0
    found = json.loads(result.read_bytes())
    return {spans.pop("track"): spans for spans in found["tracks"]}, found["rest"]


@pytest.fixture
def steps(tmp_path):
    """Steps of 1,000 us on the device, each 2 us behind the one before but the last, which the host was late for."""
    lines: list[str] = []
    begin = 0.0
    for step in range(5):
        begin += 1000 + (100 if step == 4 else 2)
        lines += [span("plan", step, begin - 500, 10 + step), span("launch", step, begin - 400, 20)]
        lines += [span("device", step, begin, 1000), span("output", step, begin + 1001, 30)]
    return written(tmp_path, *lines)


def test_step_times_and_idle_times_are_reported(tmp_path, steps, capsys):
    tracks, rest = figures(tmp_path, steps)
    assert tracks == {
        "host": {"steps": 5, "p50": 62, "p90": pytest.approx(63.6), "p99": pytest.approx(63.96)},
        "plan": {"steps": 5, "p50": 12, "p90": pytest.approx(13.6), "p99": pytest.approx(13.96)},
        "launch": {"steps": 5, "p50": 20, "p90": 20, "p99": 20},
        "device": {"steps": 5, "p50": 1000, "p90": 1000, "p99": 1000},
        "output": {"steps": 5, "p50": 30, "p90": 30, "p99": 30},
    }
    assert rest == {"p50": 2, "p99": pytest.approx(97.06), "most": 100, "long": 1}
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in shown if line.split()[:1] == ["host"]] == [["host", "5", "62.0"]]
    assert shown[-1].split() == ["2.0", "97.1", "100.0", "1"]


def test_only_selected_steps_are_reported(tmp_path, steps, capsys):
    tracks, rest = figures(tmp_path, steps, "--steps", "1..3")
    assert tracks["host"]["steps"] == 3
    assert rest == {"p50": 2, "p99": 2, "most": 2, "long": 0}
    assert "steps 1..3" in capsys.readouterr().out
    assert figures(tmp_path, steps, "--steps", "4")[1] is None
    assert cli.main(["trace", str(steps), "--steps", "5..9"]) == 1
    assert capsys.readouterr().err == f"nanovllm-bench: {steps} has no steps from 5 to 9\n"


def test_incomplete_steps_are_not_in_the_host_sums(tmp_path):
    path = written(
        tmp_path, span("plan", 0, 0, 5), span("plan", 1, 9, 7), span("launch", 0, 5, 10), '{"pid":7,"ph":"X', end=""
    )
    tracks, rest = figures(tmp_path, path)
    assert tracks["host"]["steps"] == 1
    assert tracks["host"]["p50"] == 15
    assert tracks["plan"]["steps"] == 2
    assert rest is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not what --trace writes: its first line is ''"),
        ('{"traceEvents": []}\n', "is not what --trace writes: its first line is '{\"traceEvents\": []}'"),
        ("[\n", "has no steps"),
        ("[\nno JSON\n", ", line 2: not what --trace writes"),
        ('[\n{"ph":"X","name":"step 0","tid":9,"ts":1,"dur":1},\n', ", line 2: not what --trace writes (9)"),
        (
            "\n".join([*HEAD, '{"ph":"X","name":"a step","tid":0,"ts":1,"dur":1},', ""]),
            ", line 6: not what --trace writes",
        ),
    ],
)
def test_file_that_is_not_a_trace_is_an_error(tmp_path, capsys, text, said):
    path = tmp_path / "steps.json"
    path.write_text(text)
    assert cli.main(["trace", str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"nanovllm-bench: {path}{'' if said[0] == ',' else ' '}{said}")


def test_unreadable_trace_is_an_error(tmp_path, capsys):
    assert cli.main(["trace", str(tmp_path / "none.json")]) == 1
    assert "can't be read: [Errno 2]" in capsys.readouterr().err
    (tmp_path / "image").write_bytes(b"\x89PNG\r\n")
    assert cli.main(["trace", str(tmp_path / "image")]) == 1
    assert "image can't be read: 'utf-8'" in capsys.readouterr().err

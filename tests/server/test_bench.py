import json
from collections.abc import Callable

import pytest

from nanovllm_server.bench import bench_cli
from nanovllm_server.bench.conversations.conversation_sizes import CASE_NAMES as CONVERSATION_CASE_NAMES
from nanovllm_server.bench.interference.interference_sizes import CASE_NAMES as INTERFERENCE_CASE_NAMES

MAX_ATTEMPTS = 3


def measure_until_times_are_as_expected(measure: Callable[[int], list[str]]) -> None:
    """Fails if each attempt has unexpected times. Other programs may slow single requests.

    measure: gets a seed, because the server caches prompts. Returns the comparisons of times that are false.
    """
    attempts = []
    while not attempts or attempts[-1]:
        assert len(attempts) < MAX_ATTEMPTS, attempts
        attempts.append(measure(len(attempts)))


def find_unexpected_order(figures: dict[str, float], smaller: str, larger: str, factor: float = 1) -> list[str]:
    """Returns a message if figure `smaller` is not below `factor` times figure `larger`, else []."""
    if figures[smaller] < factor * figures[larger]:
        return []
    return [f"{smaller} {figures[smaller]:.3f}, {larger} {figures[larger]:.3f}"]


def test_serve_measures_each_load_on_a_real_server(tiny_server, tmp_path, capsys):
    result, plot = tmp_path / "serve.json", tmp_path / "serve.png"
    load = ("--num-requests", "8", "--input-len", "20", "--output-len", "5..12", "--rate", "inf", "200")
    arguments = ["serve", f"{tiny_server.url}/v1", *load, "--concurrency", "2", "8", "--prefix-len", "40"]
    assert bench_cli.main([*arguments, "--json", str(result), "--plot", str(plot)]) == 0
    figures = json.loads(result.read_bytes())
    assert figures["model"] == "tiny"
    points = figures["points"]
    assert [(point["rate"], point["concurrency"]) for point in points] == [(None, 2), (None, 8), (200, 2), (200, 8)]
    for point in points:
        assert point["failed"] == 0
        assert point["output_tokens"] == points[0]["output_tokens"]
        # The chat template adds the same number of tokens to every prompt.
        assert point["prompt_tokens"] % 8 == 0
        assert 8 * 60 < point["prompt_tokens"] < 8 * 100
        assert point["ttft"]["p50"] <= point["e2e"]["p50"]
        assert 0 < point["cached_tokens"] < 7 * 100
    assert plot.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert all(word in out for word in ("output tok/s", "TTFT", "ITL", "TPOT", "E2E", "at once"))


@pytest.mark.slow
def test_interference_measures_all_cases_on_a_real_server(shallow_server, tmp_path, capsys):
    lengths = ["--long-len=400", "--short-len=40", "--prompt-len=200", "--conversation-len=250", "--message-len=60"]
    lengths += ["--turn-len=40", "--stream-len=500", "--output-len=4"]
    counts = ["--num-short=4", "--streams=3", "--num-prompts=2", "--turn-conversations=2", "--conversations=3"]
    counts += ["--arrival-rates=0,4", "--arrival-period-s=1", "--turn-streams=2", "--repeat=1"]
    file = tmp_path / "interference.json"
    arguments = ["interference", f"ours={shallow_server.url}/v1", *lengths, *counts, "--baseline-s=0.5"]

    def measure(seed: int) -> list[str]:
        assert bench_cli.main([*arguments, f"--seed={seed}", "--json", str(file)]) == 0
        (measured,) = json.loads(file.read_bytes())["servers"]
        assert measured["token_costs"]["per_word"] == 1
        assert tuple(case["case"] for case in measured["cases"]) == INTERFERENCE_CASE_NAMES
        assert all(case["errors"] == [] and case["warnings"] == [] for case in measured["cases"])
        assert all(figure is not None for case in measured["cases"] for figure in case["figures"].values())
        long_alone, short_beside, decodes, arrivals, turn, turns = (case["figures"] for case in measured["cases"])
        assert long_alone["long_prompt_tokens"] == pytest.approx(400, abs=2)
        assert decodes["prompt_tokens"] == pytest.approx(200, abs=2)
        for figures in (turn, turns):
            assert 220 < figures["turn_cached_tokens"] < figures["turn_prompt_tokens"] < 300
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["case", "figure", "ours"] in rows
        assert {row[0] for row in rows if row[-2:] == ["failed", "0"]} == set(INTERFERENCE_CASE_NAMES)
        return [
            *find_unexpected_order(short_beside, "short_ttft_p50_ms", "long_ttft_p50_ms", factor=2),
            *find_unexpected_order(decodes, "prompt_1_ttft_p50_ms", "prompt_last_ttft_p50_ms"),
            *find_unexpected_order(decodes, "baseline_gap_p50_ms", "beside_gap_max_ms"),
            *find_unexpected_order(arrivals, "rate_0_gap_p50_ms", "rate_4_gap_max_ms"),
            *find_unexpected_order(turn, "turn_ttft_p50_ms", "history_ttft_p50_ms"),
        ]

    measure_until_times_are_as_expected(measure)


@pytest.mark.slow
def test_conversations_measures_returning_turns_on_a_real_server(shallow_server, tmp_path, capsys):
    lengths = ["--first-len=300", "--turn-len=40", "--output-len=8"]
    counts = ["--conversations=3", "--turns=3", "--cold-prompts=1", "--burst=3", "--concurrency=2"]
    file = tmp_path / "conversations.json"
    arguments = ["conversations", f"ours={shallow_server.url}/v1", *lengths, *counts, "--think-time-s=0.1"]

    def measure(seed: int) -> list[str]:
        assert bench_cli.main([*arguments, f"--seed={seed}", "--json", str(file)]) == 0
        (measured,) = json.loads(file.read_bytes())["servers"]
        assert tuple(case["case"] for case in measured["cases"]) == CONVERSATION_CASE_NAMES
        unexpected = []
        for case, prompt_tokens in zip(measured["cases"], (372, 348), strict=True):
            figures = case["figures"]
            assert case["errors"] == case["warnings"] == []
            assert None not in figures.values()
            assert figures["returning_prompt_tokens"] == pytest.approx(prompt_tokens, abs=2)
            assert 0.92 < figures["returning_cached_percent"] / figures["returning_history_percent"] <= 1
            if (ratio := figures["cold_over_returning_ttft_p50"]) <= 1:
                unexpected.append(f"{case['case']}: cold over returning TTFT {ratio:.3f}")
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert {row[0] for row in rows if row[-2:] == ["failed", "0"]} == set(CONVERSATION_CASE_NAMES)
        return unexpected

    measure_until_times_are_as_expected(measure)


@pytest.mark.slow
def test_speculation_measures_real_prompts_on_real_engines(shallow_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nanovllm_server.bench.speculation.paired_runs.PAUSE_S", 0.0)
    file = tmp_path / "speculation.json"
    sizes = ["--prompts=1", "--rounds=1", "--output-len=24", "--max-model-len=1024", "--cpu-cache-gib=0.25"]
    flags = ["--device=cpu", "--dtype=float32", *sizes, "--speculate=ngram", f"--json={file}"]
    assert bench_cli.main(["speculation", str(shallow_model), *flags]) == 0
    figures = json.loads(file.read_bytes())
    assert (figures["method"], figures["num_speculative_tokens"], figures["dtype"]) == ("ngram", 5, "float32")
    assert [(kind["kind"], kind["num_equal"]) for kind in figures["kinds"]] == [
        ("summary", 1),
        ("code edit", 1),
        ("chat", 1),
    ]
    assert [prompt["kind"] for prompt in figures["prompts"]] == ["summary", "code edit", "chat"]
    # The answer to a code edit begins with the code of the prompt.
    assert figures["prompts"][1]["accepted"] > 0
    for prompt in figures["prompts"]:
        (single_round,) = prompt["rounds"]
        assert 2 <= single_round["output_tokens"] <= 24
        assert prompt["ratio"] == single_round["drafted_rate"] / single_round["plain_rate"] > 0
    assert "median ratio" in capsys.readouterr().out

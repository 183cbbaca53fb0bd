"""`nanovllm-bench serve` against a real server process."""

import json

from nanovllm_server.bench import cli


def test_a_sweep_over_a_real_server(tiny_server, tmp_path, capsys):
    result, plot = tmp_path / "serve.json", tmp_path / "serve.png"
    load = ("--num-requests", "8", "--input-len", "20", "--output-len", "5..12", "--rate", "inf", "200")
    arguments = ["serve", f"{tiny_server.url}/v1", *load, "--concurrency", "2", "8", "--prefix-len", "40"]
    assert cli.main([*arguments, "--json", str(result), "--plot", str(plot)]) == 0
    figures = json.loads(result.read_bytes())
    assert figures["model"] == "tiny"
    points = figures["points"]
    assert [(point["rate"], point["concurrency"]) for point in points] == [(None, 2), (None, 8), (200, 2), (200, 8)]
    for point in points:
        assert point["failed"] == 0
        assert point["output_tokens"] == points[0]["output_tokens"]
        # Words of one token each, and what the chat template adds, which is the same for all.
        assert point["prompt_tokens"] % 8 == 0
        assert 8 * 60 < point["prompt_tokens"] < 8 * 100
        assert point["ttft"]["p50"] <= point["e2e"]["p50"]
        # Prompts share 40 words, of which full blocks are cached, and the first request finds none of them.
        assert 0 < point["cached_tokens"] < 7 * 100
    assert plot.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert all(word in out for word in ("output tok/s", "TTFT", "ITL", "TPOT", "E2E", "at once"))

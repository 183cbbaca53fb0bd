"""`throughput`, `latency` and `prefill` with random weights, and peers in their own processes."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm_server.bench import bench_cli

# A stand-in for vLLM that records all arguments in a file. Like vLLM, the stand-in logs to stdout.
FAKE_VLLM = """
import json, os, sys, time
from types import SimpleNamespace

__version__ = "0.26.0"

def record(**fields):
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps(fields) + "\\n")

class SamplingParams:
    def __init__(self, *, temperature, max_tokens, ignore_eos, detokenize):
        assert ignore_eos and not detokenize
        self.temperature, self.max_tokens = temperature, max_tokens

class LLM:
    def __init__(self, model, *, skip_tokenizer_init, load_format, dtype, enable_prefix_caching, seed, **options):
        assert skip_tokenizer_init and os.environ["HF_HUB_OFFLINE"] == "1" and "nanovllm_server" not in sys.modules
        print("INFO: loading", model)
        record(load_format=load_format, dtype=dtype, enable_prefix_caching=enable_prefix_caching,
             routing=os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY"), **options)

    def generate(self, prompts, sampling_params, use_tqdm):
        assert not use_tqdm
        record(prompts=prompts, limits=[params.max_tokens for params in sampling_params],
             temperature=sampling_params[0].temperature)
        time.sleep(0.001 * max(params.max_tokens for params in sampling_params))
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * params.max_tokens)])
                for params in sampling_params]
"""
TINY_QWEN3_NEXT_CHANGES = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_nextn_predict_layers": 1,
}


def is_gone(pid: int) -> bool:
    """A zombie counts as gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture
def run_bench(tmp_path, config_only_model):
    def run(command: str, *arguments: str):
        result = tmp_path / "result.json"
        fixed_flags = ["--load-format", "dummy", "--device", "cpu", "--cpu-cache-gib", "0.05", "--json", str(result)]
        status = bench_cli.main([command, str(config_only_model), *fixed_flags, *arguments])
        return status, json.loads(result.read_bytes()) if result.exists() else None

    return run


@pytest.fixture
def fake_vllm(tmp_path):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    record_file = tmp_path / "record"
    flags = ["--peer", "vllm", "--peer-env", f"PYTHONPATH={tmp_path}", "--peer-env", f"RECORD={record_file}"]
    return flags, lambda: [json.loads(line) for line in record_file.read_text().splitlines()]


def test_throughput_generates_every_token(run_bench, tmp_path, capsys):
    plot = tmp_path / "plot.png"
    workload = ("--num-requests", "6", "--input-len", "5..20", "--output-len", "3..9", "--repeat", "2")
    status, result = run_bench("throughput", *workload, "--plot", str(plot))
    assert status == 0
    (case,) = result["cases"]
    ours = case["nanovllm"]
    assert [run["num_tokens"] for run in ours["runs"]] == [case["output_tokens"]] * 2
    assert ours["rates"] == [run["num_tokens"] / run["last"] for run in ours["runs"]]
    assert ours["rate"] == pytest.approx(sum(ours["rates"]) / 2)
    assert result["peer"] is case["peer"] is case["ratio"] is None
    assert (result["model"], result["dtype"], result["device"]) == ("tiny", "float32", "cpu")
    assert result["environment"]["torch"]
    assert "6 requests, 5..20 tokens in, 3..9 out" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_acceptance_length_is_measured(run_bench, capsys):
    flags = ("--batch", "2", "--output-len", "48", "--repeat", "1", "--speculate", "ngram")
    status, result = run_bench("latency", *flags, "--num-speculative-tokens", "3", "--acceptance-length", "4")
    assert status == 0
    (run,) = result["cases"][0]["nanovllm"]["runs"]
    # The last steps of a request have fewer drafts.
    assert 3 < run["acceptance_length"] <= 4
    assert "tokens per step with drafts" in capsys.readouterr().out


def test_trace_flag_writes_every_step(run_bench, tmp_path, capsys):
    trace_file, figures_file = tmp_path / "steps.json", tmp_path / "figures.json"
    assert (
        run_bench("latency", "--batch", "1", "--output-len", "6", "--repeat", "1", "--trace", str(trace_file))[0] == 0
    )
    capsys.readouterr()
    assert bench_cli.main(["trace", str(trace_file), "--json", str(figures_file)]) == 0
    figures = json.loads(figures_file.read_bytes())
    steps = {track["track"]: track["steps"] for track in figures["tracks"]}
    assert set(steps) == {"host", "plan", "launch", "output"}
    assert steps["launch"] == steps["output"] == steps["host"] == 11
    # On a CPU, the engine records no device times.
    assert figures["device_idle"] is None


def test_unwritable_trace_file_is_refused(run_bench, tmp_path, capsys):
    file = tmp_path / "none" / "steps.json"
    assert run_bench("latency", "--batch", "1", "--repeat", "1", "--trace", str(file)) == (2, None)
    assert capsys.readouterr().err.startswith(
        f"nanovllm-bench: trace is '{file}', which can't be written (No such file"
    )


def test_latency_has_one_case_per_batch(run_bench):
    status, result = run_bench(
        "latency", "--batch", "1", "3", "--input-len", "5", "--output-len", "60", "--repeat", "1"
    )
    assert status == 0
    assert [case["output_tokens"] for case in result["cases"]] == [60, 180]
    for case, num_decoded in zip(result["cases"], (59, 177), strict=True):
        (run,) = case["nanovllm"]["runs"]
        assert run["first"] > 0
        assert run["last"] > 0
        assert case["nanovllm"]["rate"] == pytest.approx(num_decoded / (run["last"] - run["first"]))


def test_prefill_reports_prompt_tokens(run_bench):
    status, result = run_bench("prefill", "--num-requests", "3", "--input-len", "100", "--repeat", "1")
    assert status == 0
    (case,) = result["cases"]
    assert (case["prompt_tokens"], case["output_tokens"]) == (300, 3)
    assert case["nanovllm"]["rate"] == pytest.approx(300 / case["nanovllm"]["runs"][0]["last"])


def test_transformers_does_the_same_work(run_bench, capsys):
    workload = ("--num-requests", "4", "--input-len", "5..20", "--output-len", "3..9", "--max-num-seqs", "3")
    status, result = run_bench("throughput", *workload, "--repeat", "1", "--peer", "transformers")
    assert status == 0
    (case,) = result["cases"]
    (run,) = case["peer"]["runs"]
    assert run["num_tokens"] == case["output_tokens"]
    assert 0 < run["first"] < run["last"]
    assert case["ratio"] == pytest.approx(case["nanovllm"]["rate"] / case["peer"]["rate"])
    assert result["peer"]["name"] == "transformers"
    assert f"transformers {result['peer']['version']} output tok/s  ratio" in capsys.readouterr().out


def test_batches_of_a_peer_are_timed_as_one():
    from nanovllm_server.bench.offline.peers import run

    times = iter([(0.0, 0.0), (0.0, 0.0), (1.0, 4.0), (1.0, 2.0)])
    peer = SimpleNamespace(
        version="1",
        max_batch_size=2,
        can_time_first_tokens=True,
        start_case=lambda batches: None,
        generate=lambda *_: next(times),
    )
    requests = [{"prompt": [1], "max_tokens": max_tokens} for max_tokens in (3, 2, 2)]
    job = {"cases": [requests], "warm_up_tokens": 1, "repeat": 1, "needs_time_to_all_first_tokens": True}
    _, result = run.measure(peer, job)
    assert result == {"num_tokens": 7, "all_first_tokens_s": 2.0, "last_token_s": 6.0}


def test_vllm_chooses_limits_that_are_not_given(run_bench, fake_vllm):
    flags, read_record = fake_vllm
    workload = ("--num-requests", "3", "--input-len", "5", "--output-len", "7..9", "--repeat", "2")
    status, result = run_bench("throughput", *workload, *flags)
    assert status == 0
    assert result["peer"] == {"name": "vllm", "version": "0.26.0"}
    engine, *runs = read_record()
    assert engine == {
        "load_format": "dummy",
        "dtype": "float32",
        "enable_prefix_caching": False,
        "mamba_ssm_cache_dtype": "float32",
        "tensor_parallel_size": 1,
        "enable_expert_parallel": False,
        "routing": "uniform_random",
    }
    (case,) = result["cases"]
    warm_up, first, second = runs
    assert warm_up["limits"] == [4, 4, 4]
    assert first == second
    assert sum(first["limits"]) == case["output_tokens"] == case["peer"]["runs"][0]["num_tokens"]
    assert [len(prompt["prompt_token_ids"]) for prompt in first["prompts"]] == [5, 5, 5]
    assert first["temperature"] == 0.6


def test_vllm_gets_the_given_limits(run_bench, fake_vllm):
    flags, read_record = fake_vllm
    limits = ("--max-model-len", "200", "--max-num-seqs", "5", "--max-num-batched-tokens", "64")
    limits += ("--state-dtype", "bfloat16")
    workload = ("--num-requests", "2", "--input-len", "5", "--output-len", "2", "--prefix-len", "32", "--repeat", "2")
    assert run_bench("throughput", *workload, *limits, *flags)[0] == 0
    engine, *runs = read_record()
    assert (engine["max_model_len"], engine["max_num_seqs"], engine["max_num_batched_tokens"]) == (200, 5, 64)
    assert engine["enable_prefix_caching"] is True
    assert engine["mamba_ssm_cache_dtype"] == "bfloat16"
    assert all(len({prompt["cache_salt"] for prompt in run["prompts"]}) == 1 for run in runs)
    assert len({run["prompts"][0]["cache_salt"] for run in runs}) == 3


def test_vllm_gets_the_settings_of_speculation_with_heads(run_bench, fake_vllm, tmp_path):
    config = json.loads((tmp_path / "tiny" / "config.json").read_text()) | TINY_QWEN3_NEXT_CHANGES
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    flags, read_record = fake_vllm
    heads = ("--speculate", "mtp", "--num-speculative-tokens", "2", "--acceptance-length", "1.5")
    workload = ("--batch", "1", "--input-len", "5", "--output-len", "9", "--repeat", "1")
    assert run_bench("latency", *workload, *heads, *flags)[0] == 0
    assert read_record()[0]["speculative_config"] == {
        "method": "mtp",
        "num_speculative_tokens": 2,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 1.5,
    }


def test_draft_method_that_the_peer_lacks_is_refused(run_bench, fake_vllm, capsys):
    status, _ = run_bench("latency", "--speculate", "ngram", *fake_vllm[0])
    assert status == 2
    assert "--peer vllm can't use --speculate ngram" in capsys.readouterr().err


def test_first_tokens_of_vllm_take_an_extra_run(run_bench, fake_vllm):
    flags, read_record = fake_vllm
    status, result = run_bench("latency", "--batch", "2", "--output-len", "60", "--repeat", "1", *flags)
    assert status == 0
    assert [record["limits"] for record in read_record()[1:]] == [[4, 4], [1, 1], [60, 60]]
    (run,) = result["cases"][0]["peer"]["runs"]
    assert run["first"] > 0
    assert run["last"] > 0
    assert result["cases"][0]["peer"]["rate"] == pytest.approx(118 / (run["last"] - run["first"]))


def test_peer_env_selects_the_routing_of_vllm(run_bench, fake_vllm):
    flags, read_record = fake_vllm
    flags = [*flags, "--peer-env", "VLLM_MOE_ROUTING_SIMULATION_STRATEGY=normal_routing"]
    assert run_bench("throughput", "--num-requests", "1", "--input-len", "5", "--output-len", "2", *flags)[0] == 0
    assert read_record()[0]["routing"] == "normal_routing"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_failed_peer_shows_the_end_of_its_stderr(run_bench, capsys):
    status, result = run_bench("prefill", "--input-len", "8", "--peer", "vllm")
    assert (status, result) == (1, None)
    error = capsys.readouterr().err
    assert error.startswith(
        f"nanovllm-bench: vllm failed with status 1 in {sys.executable}, which --peer-python can replace. "
        "The end of its stderr:\n"
    )
    assert error.endswith("ModuleNotFoundError: No module named 'vllm'\n")


def test_peer_that_ends_early_is_a_failure(run_bench, fake_vllm, tmp_path, capsys):
    (tmp_path / "vllm.py").write_text(
        FAKE_VLLM.replace(
            "        return [",
            "        if max(params.max_tokens for params in "
            "sampling_params) > 4: sys.stderr.write('gone\\n'); os._exit(0)\n        return [",
        )
    )
    status, _ = run_bench("throughput", "--num-requests", "2", "--input-len", "5", "--output-len", "9", *fake_vllm[0])
    assert status == 1
    error = capsys.readouterr().err
    assert "vllm failed with status 0 in " in error
    assert error.endswith(f"The end of its stderr:\nINFO: loading {tmp_path / 'tiny'}\ngone\n")


def test_child_processes_of_a_failed_peer_are_killed(run_bench, fake_vllm, tmp_path, capsys):
    fork_and_fail = (
        "import time\npid = os.fork()\nif not pid: time.sleep(600)\nrecord(pid=pid)\nraise RuntimeError('no GPU')\n"
    )
    (tmp_path / "vllm.py").write_text(FAKE_VLLM + fork_and_fail)
    status, _ = run_bench("throughput", "--num-requests", "2", "--input-len", "5", "--output-len", "9", *fake_vllm[0])
    assert status == 1
    assert capsys.readouterr().err.endswith("RuntimeError: no GPU\n")
    (record,) = fake_vllm[1]()
    assert is_gone(record["pid"])


def test_missing_interpreter_of_a_peer_is_an_error(run_bench, tmp_path, capsys):
    status, _ = run_bench("prefill", "--input-len", "8", "--peer", "vllm", "--peer-python", str(tmp_path / "none"))
    assert status == 1
    assert f"{tmp_path / 'none'}: No such file" in capsys.readouterr().err


def test_requests_beyond_the_context_are_refused_before_the_peer_starts(run_bench, capsys):
    status, _ = run_bench("prefill", "--input-len", "256", "--peer", "vllm", "--peer-python", sys.executable)
    assert status == 2
    assert "257 tokens don't fit into a context of 256" in capsys.readouterr().err


def test_invalid_model_is_a_one_line_error(tmp_path, capsys):
    assert bench_cli.main(["throughput", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1

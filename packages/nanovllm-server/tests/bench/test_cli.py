import subprocess
import sys

import pytest
import torch

from nanovllm_server.bench import bench_cli
from nanovllm_server.bench.flags import build_parser
from nanovllm_server.bench.workload import IntegerRange

COMMANDS = ("throughput", "latency", "prefill", "serve", "grammars", "interference", "conversations", "soak")
COMMANDS += ("speculation", "trace", "kernels")


def test_help_imports_nothing_slow():
    code = (
        "import sys\n"
        "from nanovllm_server.bench import bench_cli\n"
        f"for command in {COMMANDS}:\n"
        "    try: bench_cli.main([command, '--help'])\n"
        "    except SystemExit as exit: assert not exit.code\n"
        "slow = {'torch', 'transformers', 'matplotlib', 'numpy', 'zmq'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert all(f"nanovllm-bench {command}" in process.stdout for command in COMMANDS)
    assert "None" not in process.stdout


def test_lengths_parse_as_a_number_or_a_range():
    options = build_parser().parse_args(["throughput", "--input-len", "7", "--output-len", "3..5"])
    assert (options.input_len, options.output_len) == (IntegerRange(7, 7), IntegerRange(3, 5))


def test_throughput_defaults_to_the_benchmark_of_nano_vllm():
    options = build_parser().parse_args(["throughput"])
    assert options.num_requests == 256
    assert options.input_len == options.output_len == IntegerRange(100, 1024)
    assert (options.temperature, options.prefix_len, options.peer) == (0.6, 0, "none")


def test_serve_takes_several_rates_and_concurrencies():
    options = build_parser().parse_args(["serve", "--rate", "1.5", "inf", "--concurrency", "4", "8"])
    assert options.rate == [1.5, None]
    assert options.concurrency == [4, 8]


@pytest.mark.parametrize(
    "arguments",
    [
        ["throughput", "--input-len", "5..3"],
        ["throughput", "--input-len", "0"],
        ["latency", "--output-len", "1"],
        ["prefill", "--peer-env", "NAME"],
        ["serve", "--rate", "0"],
        ["serve", "--rate", "nan"],
        ["serve", "--concurrency", "0"],
        ["grammars", "--streams", "1"],
        ["speculation", "--prompts", "0"],
        ["speculation", "--output-len", "1"],
        ["speculation", "--num-speculative-tokens", "16"],
        ["interference", "--cases", "turn,other"],
        ["interference", "--turn-len", "1"],
        ["interference", "--timeout", "inf"],
        ["conversations", "--cases", "turn"],
        ["conversations", "--turns", "1"],
        ["conversations", "--think-distribution", "gamma"],
        ["soak"],
        ["soak", "--server-pid", "1", "--minutes", "0"],
        ["kernels", "--peer", "vllm"],
        [],
    ],
)
def test_invalid_flags_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as exit_info:
        bench_cli.main(arguments)
    assert exit_info.value.code == 2
    assert "usage: nanovllm-bench" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["throughput"], ["serve"], ["trace", "steps.json"], ["kernels"]])
def test_error_about_missing_packages_names_what_to_install(arguments, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench_cli.main(arguments) == 1
    expected = "nanovllm-bench: matplotlib, tqdm not found: install the extra 'bench' of nanovllm-server\n"
    assert capsys.readouterr().err == expected


def test_a_model_that_is_neither_a_directory_nor_a_repository_is_refused(capsys):
    assert bench_cli.main(["latency", "Qwen3-0.6B"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nanovllm-bench: 'Qwen3-0.6B' is neither a directory nor the name of a repository")


def test_process_exits_after_an_engine_whose_thread_hangs():
    code = (
        "import threading\n"
        "from nanovllm_core import EngineDeadError\n"
        "from nanovllm_core.engine.thread_names import ENGINE_THREAD_NAME\n"
        "from nanovllm_server.bench import bench_cli\n"
        "def fail(flags):\n"
        "    threading.Thread(target=threading.Event().wait, name=f'{ENGINE_THREAD_NAME}_0').start()\n"
        "    raise EngineDeadError('rank 1 has ended')\n"
        "bench_cli._run_offline = fail\n"
        "raise SystemExit(bench_cli.main(['latency']))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (1, "nanovllm-bench: rank 1 has ended\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_kernels_need_a_gpu(capsys):
    assert bench_cli.main(["kernels"]) == 1
    assert capsys.readouterr().err == "nanovllm-bench: kernels needs an NVIDIA GPU\n"


@pytest.mark.gpu
def test_kernels_are_measured(tmp_path, capsys):
    json_file, plot_file = tmp_path / "kernels.json", tmp_path / "kernels.png"
    assert (
        bench_cli.main(["kernels", "--only", "rms_norm 256", "--json", str(json_file), "--plot", str(plot_file)]) == 0
    )
    assert "rms_norm 256 x 4096" in capsys.readouterr().out
    assert json_file.stat().st_size
    assert plot_file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host/v1", "http://", "http://host:99999/v1", "http://host/?a"]
)
def test_invalid_base_url_is_refused(url, capsys):
    assert bench_cli.main(["serve", url]) == 2
    assert url in capsys.readouterr().err

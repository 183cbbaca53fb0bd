"""llama.cpp as a peer, with a stand-in for its Python package."""

import importlib.util
import json
import sys

import pytest

from nanovllm_server.bench import bench_cli

# A stand-in for llama-cpp-python. The likeliest token after t is t + 1.
FAKE_LLAMA_CPP = """
import ctypes, json, os
from types import SimpleNamespace

__version__ = "0.3.36"
LLAMA_FTYPE_ALL_F32, LLAMA_FTYPE_MOSTLY_F16, LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_BF16 = 0, 1, 7, 32
VOCAB = 512

def record(**fields):
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps(fields) + "\\n")

def llama_backend_init(): pass
def llama_max_parallel_sequences(): return 256
def llama_model_default_params(): return None

class Options(ctypes.Structure):
    _fields_ = [("ftype", ctypes.c_int), ("nthread", ctypes.c_int), ("allow_requantize", ctypes.c_bool)]

def llama_model_quantize_default_params(): return Options()

def llama_model_quantize(source, made, options):
    options = options._obj
    record(file_type=options.ftype, nthread=options.nthread, allow_requantize=options.allow_requantize)
    with open(made, "wb") as file:
        file.write(b"weights")
    return int(os.environ.get("STATUS", "0"))

def llama_model_load_from_file(file, params):
    record(loaded=open(file, "rb").read().decode())
    return "model"

def llama_context_default_params(): return SimpleNamespace()

def llama_init_from_model(model, options):
    record(context=vars(options))
    return SimpleNamespace(logits=None)

def llama_free(context): context.logits = None
def llama_model_get_vocab(model): return "vocab"
def llama_vocab_n_tokens(vocab): return VOCAB
def llama_get_memory(context): return context
def llama_memory_clear(memory, data): record(cleared=True)

def llama_batch_init(size, embd, n_seq_max):
    assert (embd, n_seq_max) == (0, 1)
    return SimpleNamespace(n_tokens=0, token=[0] * size, pos=[0] * size, n_seq_id=[0] * size,
                           seq_id=[[0] for _ in range(size)], logits=[0] * size)

def llama_batch_free(batch): batch.token = None

def llama_decode(context, batch):
    n = batch.n_tokens
    assert batch.n_seq_id[:n] == [1] * n
    sequences = [ids[0] for ids in batch.seq_id[:n]]
    logit_rows = [row for row in range(n) if batch.logits[row]]
    record(tokens=batch.token[:n], positions=batch.pos[:n], sequences=sequences, logit_rows=logit_rows)
    context.logits = (ctypes.c_float * (len(logit_rows) * VOCAB))()
    for index, row in enumerate(logit_rows):
        context.logits[index * VOCAB + (batch.token[row] + 1) % VOCAB] = 1.0
    context.chosen = {row: (batch.token[row] + 1) % VOCAB for row in logit_rows}
    return 0

def llama_get_logits(context): return ctypes.cast(context.logits, ctypes.POINTER(ctypes.c_float))

def llama_sampler_chain_default_params(): return None
def llama_sampler_chain_init(params): return []
def llama_sampler_init_temp(temperature): return temperature
def llama_sampler_init_dist(seed): return "dist"
def llama_sampler_chain_add(chain, sampler): chain.append(sampler)
def llama_sampler_sample(chain, context, row):
    record(chain=chain)
    return context.chosen[row]
"""


@pytest.fixture
def random_weights(monkeypatch):
    """Makes `load` draw random weights, because `--peer llamacpp` refuses `--load-format dummy`."""
    import nanovllm_models

    load = nanovllm_models.load
    monkeypatch.setattr(
        nanovllm_models, "load", lambda path, served_name, **_: load(path, load_format="dummy", served_name=served_name)
    )


@pytest.fixture
def run_bench(tmp_path, monkeypatch, config_only_model, random_weights):
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA_CPP)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    record_file, result = tmp_path / "record", tmp_path / "result.json"
    fixed_flags = ["--device", "cpu", "--cpu-cache-gib", "0.05", "--json", str(result), "--repeat", "1"]
    fixed_flags += ["--peer", "llamacpp", "--peer-gguf", str(tmp_path / "tiny.gguf")]
    fixed_flags += ["--peer-env", f"PYTHONPATH={tmp_path}", "--peer-env", f"RECORD={record_file}"]

    def run(command: str, *arguments: str):
        record_file.unlink(missing_ok=True)
        status = bench_cli.main([command, str(config_only_model), *fixed_flags, *arguments])
        records = [json.loads(line) for line in record_file.read_text().splitlines()]
        return status, json.loads(result.read_bytes()) if result.exists() else None, records

    return run


def test_llama_cpp_decodes_all_requests_in_one_batch(run_bench, capsys):
    status, result, records = run_bench("latency", "--batch", "3", "--input-len", "5", "--output-len", "6")
    assert status == 0
    assert result["peer"] == {"name": "llamacpp", "version": "0.3.36 F16"}
    (case,) = result["cases"]
    (run,) = case["peer"]["runs"]
    assert run["num_tokens"] == case["output_tokens"] == 18
    assert 0 < run["first"] < run["last"]
    assert case["peer"]["rate"] == pytest.approx(15 / (run["last"] - run["first"]))
    (context,) = [record["context"] for record in records if "context" in record]
    assert context.pop("n_threads") == context.pop("n_threads_batch") == result["environment"]["threads"]
    assert context == {"n_seq_max": 3, "n_outputs_max": 3, "n_ctx": 3 * 256, "n_batch": 15}
    decoded = [record for record in records if "tokens" in record]
    assert len(decoded) == 4 + 6
    prompts, *steps = decoded[4:]
    assert prompts["positions"] == [0, 1, 2, 3, 4] * 3
    assert prompts["sequences"] == [0] * 5 + [1] * 5 + [2] * 5
    assert prompts["logit_rows"] == [4, 9, 14]
    last_prompt_tokens = [prompts["tokens"][row] for row in prompts["logit_rows"]]
    for index, step in enumerate(steps):
        assert step["sequences"] == step["logit_rows"] == [0, 1, 2]
        assert step["positions"] == [5 + index] * 3
        assert step["tokens"] == [(token + 1 + index) % 512 for token in last_prompt_tokens]
    assert sum("cleared" in record for record in records) == 2
    assert "llamacpp 0.3.36 F16 decode tok/s" in capsys.readouterr().out


def test_llama_cpp_ends_each_request_at_its_length(run_bench):
    workload = ("--num-requests", "5", "--input-len", "3..9", "--output-len", "2..9", "--max-num-seqs", "2")
    status, result, records = run_bench("throughput", *workload, "--temperature", "0.5")
    assert status == 0
    # The warm-up adds up to 4 tokens per request.
    num_logit_rows = sum(len(record["logit_rows"]) for record in records if "tokens" in record)
    (case,) = result["cases"]
    assert case["output_tokens"] < num_logit_rows <= case["output_tokens"] + 5 * 4
    (context,) = [record["context"] for record in records if "context" in record]
    assert context["n_seq_max"] == 2
    assert sum("cleared" in record for record in records) == 3 * 2
    chains = [record["chain"] for record in records if "chain" in record]
    assert chains == [[0.5, "dist"]] * num_logit_rows


def test_weights_are_converted_once(run_bench, tmp_path):
    workload = ("--num-requests", "1", "--input-len", "5")
    runs = [run_bench("prefill", *workload, "--peer-weights", weights) for weights in ("Q8_0", "Q8_0", "BF16")]
    conversions = [[record for record in records if "file_type" in record] for _, _, records in runs]
    assert [[record["file_type"] for record in records] for records in conversions] == [[7], [], [32]]
    assert all(record["allow_requantize"] for records in conversions for record in records)
    assert all({"loaded": "weights"} in records for _, _, records in runs)
    file_names = sorted(file.name for file in (tmp_path / "cache" / "llamacpp").iterdir())
    assert [name.rpartition("-")[2] for name in file_names] == ["BF16.gguf", "Q8_0.gguf"]


def test_failed_conversion_leaves_no_file(run_bench, tmp_path, capsys):
    assert run_bench("prefill", "--input-len", "5", "--peer-env", "STATUS=1")[0] == 1
    assert "llama.cpp can't make F16 of" in capsys.readouterr().err
    assert not list((tmp_path / "cache" / "llamacpp").iterdir())


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed")
def test_missing_llama_cpp_names_the_package_to_install(run_bench, tmp_path, capsys):
    (tmp_path / "record").touch()
    (tmp_path / "llama_cpp.py").unlink()
    with pytest.raises(FileNotFoundError):
        run_bench("prefill", "--input-len", "5")
    error = capsys.readouterr().err
    assert f"llama_cpp is not installed for {sys.executable}: install llama-cpp-python==0.3.36" in error
    assert "--peer-python" in error


@pytest.mark.parametrize(
    ("arguments", "expected_error"),
    [
        (["--device", "cpu"], "needs the weights of tiny as a GGUF file: name it with --peer-gguf"),
        (["--device", "cpu", "--peer-gguf", "/no/such/file"], "--peer-gguf /no/such/file is not a file"),
        (["--device", "cpu", "--load-format", "dummy"], "has no dummy weights"),
        (["--device", "cuda", "--peer-gguf", __file__], "computes on the CPU: add --device cpu"),
    ],
)
def test_unsupported_options_of_llama_cpp_are_refused_before_it_starts(
    arguments, expected_error, config_only_model, random_weights, capsys
):
    assert (
        bench_cli.main(["prefill", str(config_only_model), "--input-len", "5", "--peer", "llamacpp", *arguments]) == 2
    )
    assert expected_error in capsys.readouterr().err

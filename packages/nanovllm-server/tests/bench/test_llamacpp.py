"""llama.cpp as a peer, with a stand-in for its Python package."""

import importlib.util
import json
import sys

import pytest

from nanovllm_server.bench import cli

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}

# The part of llama-cpp-python that the peer uses, with its names. After token t the likeliest is t + 1. Keeps what it
# is told.
LLAMA_CPP = """
import ctypes, json, os
from types import SimpleNamespace

__version__ = "0.3.36"
LLAMA_FTYPE_ALL_F32, LLAMA_FTYPE_MOSTLY_F16, LLAMA_FTYPE_MOSTLY_Q8_0, LLAMA_FTYPE_MOSTLY_BF16 = 0, 1, 7, 32
VOCAB = 512

def keep(**record):
    with open(os.environ["RECORD"], "a") as file:
        file.write(json.dumps(record) + "\\n")

def llama_backend_init(): pass
def llama_max_parallel_sequences(): return 256
def llama_model_default_params(): return None

class Options(ctypes.Structure):
    _fields_ = [("ftype", ctypes.c_int), ("nthread", ctypes.c_int), ("allow_requantize", ctypes.c_bool)]

def llama_model_quantize_default_params(): return Options()

def llama_model_quantize(source, made, options):
    options = options._obj
    keep(made=options.ftype, nthread=options.nthread, allow_requantize=options.allow_requantize)
    with open(made, "wb") as file:
        file.write(b"weights")
    return int(os.environ.get("STATUS", "0"))

def llama_model_load_from_file(file, params):
    keep(loaded=open(file, "rb").read().decode())
    return "model"

def llama_context_default_params(): return SimpleNamespace()

def llama_init_from_model(model, options):
    keep(context=vars(options))
    return SimpleNamespace(logits=None)

def llama_free(context): context.logits = None
def llama_model_get_vocab(model): return "vocab"
def llama_vocab_n_tokens(vocab): return VOCAB
def llama_get_memory(context): return context
def llama_memory_clear(memory, data): keep(cleared=True)

def llama_batch_init(size, embd, n_seq_max):
    assert (embd, n_seq_max) == (0, 1)
    return SimpleNamespace(n_tokens=0, token=[0] * size, pos=[0] * size, n_seq_id=[0] * size,
                           seq_id=[[0] for _ in range(size)], logits=[0] * size)

def llama_batch_free(batch): batch.token = None

def llama_decode(context, batch):
    n = batch.n_tokens
    assert batch.n_seq_id[:n] == [1] * n
    sequences = [one[0] for one in batch.seq_id[:n]]
    wanted = [row for row in range(n) if batch.logits[row]]
    keep(tokens=batch.token[:n], positions=batch.pos[:n], sequences=sequences, wanted=wanted)
    context.logits = (ctypes.c_float * (len(wanted) * VOCAB))()
    for place, row in enumerate(wanted):
        context.logits[place * VOCAB + (batch.token[row] + 1) % VOCAB] = 1.0
    context.chosen = {row: (batch.token[row] + 1) % VOCAB for row in wanted}
    return 0

def llama_get_logits(context): return ctypes.cast(context.logits, ctypes.POINTER(ctypes.c_float))

def llama_sampler_chain_default_params(): return None
def llama_sampler_chain_init(params): return []
def llama_sampler_init_temp(temperature): return temperature
def llama_sampler_init_dist(seed): return "dist"
def llama_sampler_chain_add(chain, sampler): chain.append(sampler)
def llama_sampler_sample(chain, context, row):
    keep(chain=chain)
    return context.chosen[row]
"""


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TINY))
    return directory


@pytest.fixture
def bench(tmp_path, monkeypatch, model):
    """Run a program on the tiny model beside the stand-in; its status, its figures, and what the peer was told.

    The checkpoint is real to the command line (`--load-format auto`), but its weights are random.
    """
    import nanovllm_models

    load = nanovllm_models.load
    monkeypatch.setattr(nanovllm_models, "load", lambda path, load_format: load(path, load_format="dummy"))
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP)
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    record, result = tmp_path / "record", tmp_path / "result.json"
    fixed = ["--device", "cpu", "--cpu-cache-gib", "0.05", "--json", str(result), "--repeat", "1"]
    fixed += ["--peer", "llamacpp", "--peer-gguf", str(tmp_path / "tiny.gguf")]
    fixed += ["--peer-env", f"PYTHONPATH={tmp_path}", "--peer-env", f"RECORD={record}"]

    def run(program: str, *arguments: str):
        record.unlink(missing_ok=True)
        status = cli.main([program, str(model), *fixed, *arguments])
        told = [json.loads(line) for line in record.read_text().splitlines()]
        return status, json.loads(result.read_bytes()) if result.exists() else None, told

    return run


def test_llama_cpp_decodes_all_requests_in_one_batch(bench, capsys):
    status, result, told = bench("latency", "--batch", "3", "--input-len", "5", "--output-len", "6")
    assert status == 0
    assert result["peer"] == {"name": "llamacpp", "version": "0.3.36 F16"}
    (case,) = result["cases"]
    (run,) = case["peer"]["runs"]
    assert run["num_tokens"] == case["output_tokens"] == 18
    assert 0 < run["first"] < run["last"]
    assert case["peer"]["rate"] == pytest.approx(15 / (run["last"] - run["first"]))
    (context,) = [record["context"] for record in told if "context" in record]
    assert context.pop("n_threads") == context.pop("n_threads_batch") == result["environment"]["threads"]
    assert context == {"n_seq_max": 3, "n_outputs_max": 3, "n_ctx": 3 * 256, "n_batch": 15}
    # A warm-up of 4 tokens, and the run of 6.
    decoded = [record for record in told if "tokens" in record]
    assert len(decoded) == 4 + 6
    prompts, *steps = decoded[4:]
    assert prompts["positions"] == [0, 1, 2, 3, 4] * 3
    assert prompts["sequences"] == [0] * 5 + [1] * 5 + [2] * 5
    assert prompts["wanted"] == [4, 9, 14]
    tokens = [prompts["tokens"][row] for row in prompts["wanted"]]
    for made, step in enumerate(steps):
        assert step["sequences"] == step["wanted"] == [0, 1, 2]
        assert step["positions"] == [5 + made] * 3
        assert step["tokens"] == [(token + 1 + made) % 512 for token in tokens]
    assert sum("cleared" in record for record in told) == 2
    assert "llamacpp 0.3.36 F16 decode tok/s" in capsys.readouterr().out


def test_llama_cpp_ends_each_request_at_its_length(bench):
    work = ("--num-requests", "5", "--input-len", "3..9", "--output-len", "2..9", "--max-num-seqs", "2")
    status, result, told = bench("throughput", *work, "--temperature", "0.5")
    assert status == 0
    # Batches of two, two and one: tokens of the warm-up (up to 4 each), and of the run.
    wanted = sum(len(record["wanted"]) for record in told if "tokens" in record)
    (case,) = result["cases"]
    assert case["output_tokens"] < wanted <= case["output_tokens"] + 5 * 4
    (context,) = [record["context"] for record in told if "context" in record]
    assert context["n_seq_max"] == 2
    assert sum("cleared" in record for record in told) == 3 * 2
    chains = [record["chain"] for record in told if "chain" in record]
    assert chains == [[0.5, "dist"]] * wanted


def test_weights_are_converted_once(bench, tmp_path):
    work = ("--num-requests", "1", "--input-len", "5")
    runs = [bench("prefill", *work, "--peer-weights", weights) for weights in ("Q8_0", "Q8_0", "BF16")]
    made = [[record for record in told if "made" in record] for _, _, told in runs]
    assert [[record["made"] for record in records] for records in made] == [[7], [], [32]]
    assert all(record["allow_requantize"] for records in made for record in records)
    assert all({"loaded": "weights"} in told for _, _, told in runs)
    kept = sorted(file.name for file in (tmp_path / "cache" / "llamacpp").iterdir())
    assert [name.rpartition("-")[2] for name in kept] == ["BF16.gguf", "Q8_0.gguf"]


def test_failed_conversion_leaves_no_file(bench, tmp_path, capsys):
    assert bench("prefill", "--input-len", "5", "--peer-env", "STATUS=1")[0] == 1
    assert "llama.cpp can't make F16 of" in capsys.readouterr().err
    assert not list((tmp_path / "cache" / "llamacpp").iterdir())


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is not None, reason="llama-cpp-python is installed")
def test_missing_llama_cpp_names_the_package_to_install(bench, tmp_path, capsys):
    (tmp_path / "record").touch()
    (tmp_path / "llama_cpp.py").unlink()
    with pytest.raises(FileNotFoundError):
        bench("prefill", "--input-len", "5")
    error = capsys.readouterr().err
    assert f"llama_cpp is not installed for {sys.executable}: install llama-cpp-python==0.3.36" in error
    assert "--peer-python" in error


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu"], "needs the weights of tiny as a GGUF file: name it with --peer-gguf"),
        (["--device", "cpu", "--peer-gguf", "/no/such/file"], "--peer-gguf /no/such/file is not a file"),
        (["--device", "cpu", "--load-format", "dummy"], "has no dummy weights"),
        (["--device", "cuda", "--peer-gguf", __file__], "computes on the CPU: add --device cpu"),
    ],
)
def test_unsupported_options_of_llama_cpp_are_refused_before_it_starts(arguments, said, model, monkeypatch, capsys):
    import nanovllm_models

    load = nanovllm_models.load
    monkeypatch.setattr(nanovllm_models, "load", lambda path, load_format: load(path, load_format="dummy"))
    assert cli.main(["prefill", str(model), "--input-len", "5", "--peer", "llamacpp", *arguments]) == 1
    assert said in capsys.readouterr().err

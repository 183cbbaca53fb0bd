"""The vocabulary that grammars get: the bytes of each token."""

import json
import shutil

import pytest

import nanovllm_models
from nanovllm_models import ModelDirectory, ModelError
from nanovllm_models.vocabulary import read_vocabulary


def test_the_default_models_vocabulary_has_the_bytes_of_its_tokens(default_model):
    spec = nanovllm_models.load(default_model)
    vocabulary = spec.vocabulary()
    assert vocabulary.end_ids == spec.eos_token_ids
    assert len(vocabulary.tokens) == spec.vocab_size
    backend = nanovllm_models.load_tokenizer(default_model).backend
    text = 'naïve 日本語 {"a": [1, 2]}\n\tdef f():\r\n'
    assert b"".join(vocabulary.tokens[token] for token in backend.encode(text).ids) == text.encode()
    ids_without_bytes = [token for token, piece in enumerate(vocabulary.tokens) if not piece]
    assert ids_without_bytes == sorted(backend.get_added_tokens_decoder())


def test_special_tokens_have_bytes_only_if_they_are_tags_of_chat_formats(tmp_path):
    from tokenizers import AddedToken, Tokenizer, decoders, models

    from nanovllm_models.token_bytes import BYTE_BY_CHARACTER

    backend = Tokenizer(models.BPE(vocab=dict(BYTE_BY_CHARACTER), merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|python_tag|>", "<|other|>"])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("two words", special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    vocabulary = read_vocabulary(tmp_path, (256,))
    assert vocabulary.tokens[:256] == [bytes([byte]) for byte in range(256)]
    assert vocabulary.tokens[256:] == [b"", b"<|python_tag|>", b"", b"<think>", b"two words"]
    assert vocabulary.end_ids == (256,)


def test_ids_without_a_token_have_no_bytes(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    from nanovllm_models.token_bytes import BYTE_BY_CHARACTER

    backend = Tokenizer(models.BPE(vocab=BYTE_BY_CHARACTER | {"<|end|>": 259, "<think>": 261}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    vocabulary = read_vocabulary(tmp_path, (259,))
    assert vocabulary.tokens[:256] == [bytes([byte]) for byte in range(256)]
    assert vocabulary.tokens[256:] == [b"", b"", b"", b"", b"", b"<think>"]


def test_a_draft_model_with_other_tokens_is_refused(default_model, tmp_path):
    assert nanovllm_models.load(default_model, draft=ModelDirectory(default_model, "own")).draft.name == "own"
    other = tmp_path / "other"
    shutil.copytree(default_model, other)
    text = (other / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=f"--draft-model {other} does not have the tokens of the model .*: token "):
        nanovllm_models.load(default_model, draft=ModelDirectory(other, "other"))
    # Without a tokenizer, nothing is compared.
    (other / "tokenizer.json").unlink()
    assert nanovllm_models.load(default_model, draft=ModelDirectory(other, "other")).draft.vocab_size == 49152


def test_the_default_model_is_found_by_its_name_unless_a_directory_has_that_name(default_model, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert nanovllm_models.find_model("SmolLM2-135M-Instruct") == nanovllm_models.find_model(None)
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        nanovllm_models.find_model("SmolLM2-135M-Instruct")

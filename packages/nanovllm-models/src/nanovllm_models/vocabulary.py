"""Reads a model's vocabulary, which grammars need."""

from dataclasses import fields
from pathlib import Path

from nanovllm_core.model import Vocabulary
from nanovllm_models.chat_formats import REASONING_FORMATS, TOOL_CALL_FORMATS
from nanovllm_models.errors import ModelError
from nanovllm_models.token_bytes import TokenBytes
from nanovllm_models.tokenizer import load_tokenizer


def read_vocabulary(path: Path, end_ids: tuple[int, ...]) -> Vocabulary:
    """Read the vocabulary of the model in `path`. This takes seconds.

    Special tokens have no text, except the tags of chat formats.
    Raises ModelError, and VocabularyError for a tokenizer that `TokenBytes` does not support.
    end_ids: ids of the tokens that end an answer.
    """
    backend = load_tokenizer(path).backend
    token_bytes = TokenBytes(backend)
    # Some ids may have no token. The largest id then exceeds the number of tokens.
    largest_id = max(backend.get_vocab(with_added_tokens=True).values())
    tokens = [token_bytes.get(token_id) for token_id in range(largest_id + 1)]
    tags = _find_format_tags()
    for token_id, added in backend.get_added_tokens_decoder().items():
        if token_id in end_ids or (added.special and added.content not in tags):
            tokens[token_id] = b""
    return Vocabulary(tokens, end_ids)


def check_same_tokens(path: Path, draft_path: Path) -> None:
    """Raise ModelError if the draft model in `draft_path` has other tokens than the model in `path`.

    Compares nothing if either directory has no tokenizer.json, which a model with random weights does not need.
    """
    paths = path.resolve(), draft_path.resolve()
    if paths[0] == paths[1] or not all((directory / "tokenizer.json").is_file() for directory in paths):
        return
    tokens, draft_tokens = (load_tokenizer(directory).backend.get_vocab(with_added_tokens=True) for directory in paths)
    if tokens == draft_tokens:
        return
    token, token_id = min(tokens.items() ^ draft_tokens.items(), key=lambda item: item[1])
    owner, other = (draft_path, path) if draft_tokens.get(token) == token_id else (path, draft_path)
    raise ModelError(
        f"--draft-model {draft_path} does not have the tokens of the model {path}: token {token_id} of {owner} is "
        f"{token!r}, which {other} does not have under this id: name a draft model with the same tokens"
    )


def _find_format_tags() -> frozenset[str]:
    formats = (*REASONING_FORMATS.values(), *TOOL_CALL_FORMATS.values())
    return frozenset(
        tag
        for tag_format in formats
        for field in fields(tag_format)
        if isinstance(tag := getattr(tag_format, field.name), str)
    )

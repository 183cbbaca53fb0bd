"""The server's settings, and the model's recommended sampling parameters."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import orjson

from nanovllm_core.config import EngineConfig
from nanovllm_core.errors import RequestError
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_server.observability.logs import LogFormat
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.request import SamplingDefaults

LoadFormat = Literal["auto", "dummy"]


class SettingsError(ValueError):
    """A setting is invalid. The message has one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings from the command line and the environment.

    model: checkpoint directory; None for the bundled model.
    names: names that requests may use for the model; None for the directory's name.
    api_keys: accepted keys; empty: requests need no key.
    http_workers: number of processes that serve HTTP.
    chat_template: see `read_template`; None for the model's.
    reasoning_parser, tool_call_parser: name of a format, or "none"; None to detect the format from the template.
    max_queue: maximum number of waiting sequences, in addition to the sequences that the engine runs.
    request_timeout_s: maximum time of a request; None for no limit.
    drain_timeout_s: time that running requests have to end when the server stops.
    log_prompts: log rendered prompts.
    """

    model: Path | None
    host: str
    port: int
    names: tuple[str, ...] | None
    api_keys: tuple[str, ...]
    http_workers: int
    load_format: LoadFormat
    chat_template: str | None
    reasoning_parser: str | None
    tool_call_parser: str | None
    max_queue: int
    max_body_bytes: int
    request_timeout_s: float | None
    drain_timeout_s: float
    log_format: LogFormat
    log_level: str
    log_prompts: bool
    engine: EngineConfig


def read_template(template_or_path: str) -> str:
    """Returns a chat template: the argument if it has a brace or a line break, or else the contents of the file.

    Raises SettingsError.
    """
    if any(character in template_or_path for character in "{}\n"):
        return template_or_path
    return _read_text(Path(template_or_path), "the chat template")


def read_keys(path: Path) -> tuple[str, ...]:
    """Reads API keys, one per line. Empty lines and lines that begin with # are skipped. Raises SettingsError."""
    lines = [line.strip() for line in _read_text(path, "the API keys in").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise SettingsError(f"{path} has no API key: write one per line")
    return keys


def check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `keys`. Raises SettingsError if a key can't be sent in a header; the message shows no key."""
    if not all(key.isascii() and key.isprintable() and key == key.strip() != "" for key in keys):
        raise SettingsError("an API key must be printable ASCII, not empty, and without spaces around it")
    return keys


def _read_text(path: Path, description: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"can't read {description} {path}: {error}") from error


def read_sampling_defaults(model: Path) -> SamplingDefaults:
    """Reads the defaults from `generation_config.json` in the model's directory. Raises SettingsError."""
    path = model / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        values = cast(JSON, orjson.loads(path.read_bytes()))
    except orjson.JSONDecodeError as error:
        raise SettingsError(f"{path} is not valid JSON: {error}") from error
    recommended = values if isinstance(values, dict) else {}

    def read_number(name: str, default: float) -> float:
        value = recommended.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SettingsError(f"{path}: {name} must be a number")
        return float(value)

    fallback = SamplingDefaults()
    is_greedy = recommended.get("do_sample") is False
    defaults = SamplingDefaults(
        temperature=0.0 if is_greedy else read_number("temperature", fallback.temperature),
        top_p=read_number("top_p", fallback.top_p),
        top_k=int(read_number("top_k", fallback.top_k)),
        min_p=read_number("min_p", fallback.min_p),
        repetition_penalty=read_number("repetition_penalty", fallback.repetition_penalty),
    )
    try:
        SamplingParams(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        ).validate(vocab_size=0)  # These parameters contain no token ids.
    except RequestError as error:
        raise SettingsError(f"{path}: {error}") from error
    return defaults

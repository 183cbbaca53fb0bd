"""What the server is told at its start, and the model's own advice on sampling. This room must not know argparse."""

from dataclasses import dataclass
from pathlib import Path
from typing import cast

import orjson

from nanovllm_core.config import EngineConfig
from nanovllm_core.request import RequestError, SamplingParams
from nanovllm_server.observability.logs import LogFormat
from nanovllm_server.processes.engine_recipe import DType, LoadFormat
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.request import SamplingDefaults


class SettingsError(ValueError):
    """A setting that can't be honoured, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that the command line says.

    model: a checkpoint directory or file; None for the model that comes with the project. names: under which requests
    may ask for it; None for its own. api_keys: any of which lets in; none of them lets in everybody. http_workers:
    processes that serve HTTP. chat_template: see `read_template`. max_queue: sequences that may wait beyond those that
    the engine runs at once. request_timeout_s: what a request may take; None for as long as it does. drain_s: what
    running requests may still take when the server is told to stop. log_prompts: write what people say to the model
    into the log. dtype: of the model; None for the checkpoint's own, `engine` leaves it open. reasoning_parser,
    tool_call_parser: the format's name or "none"; None for what the model's template says.
    """

    model: Path | None
    host: str
    port: int
    names: tuple[str, ...] | None
    api_keys: tuple[str, ...]
    http_workers: int
    load_format: LoadFormat
    dtype: DType | None
    chat_template: str | None
    reasoning_parser: str | None
    tool_call_parser: str | None
    max_queue: int
    max_body_bytes: int
    request_timeout_s: float | None
    drain_s: float
    log_format: LogFormat
    log_level: str
    log_prompts: bool
    engine: EngineConfig


def read_template(given: str) -> str:
    """A chat template: `given` itself if it looks like one, else what is in the file of that name.

    Raises SettingsError.
    """
    if any(character in given for character in "{}\n"):
        return given
    return _read(Path(given), "the chat template")


def read_keys(path: Path) -> tuple[str, ...]:
    """The API keys in a file, one a line; empty lines and those that begin with # are none. Raises SettingsError."""
    lines = [line.strip() for line in _read(path, "the API keys in").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise SettingsError(f"{path} has no API key: write one a line")
    return keys


def check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The same. Raises SettingsError, which shows none, when one of them can't come in a header."""
    if not all(key.isascii() and key.isprintable() and key == key.strip() != "" for key in keys):
        raise SettingsError("an API key must be printable ASCII, not empty, and without spaces around it")
    return keys


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"can't read {what} {path}: {error}") from error


def sampling_defaults(model: Path) -> SamplingDefaults:
    """The defaults that `generation_config.json` in the model's directory advises. Raises SettingsError."""
    path = model / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        values = cast(JSON, orjson.loads(path.read_bytes()))
    except orjson.JSONDecodeError as error:
        raise SettingsError(f"{path} is not valid JSON: {error}") from error
    advice = values if isinstance(values, dict) else {}

    def number(name: str, default: float) -> float:
        value = advice.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SettingsError(f"{path}: {name} must be a number")
        return float(value)

    fallback = SamplingDefaults()
    greedy = advice.get("do_sample") is False
    defaults = SamplingDefaults(
        temperature=0.0 if greedy else number("temperature", fallback.temperature),
        top_p=number("top_p", fallback.top_p),
        top_k=int(number("top_k", fallback.top_k)),
        min_p=number("min_p", fallback.min_p),
        repetition_penalty=number("repetition_penalty", fallback.repetition_penalty),
    )
    try:
        SamplingParams(
            temperature=defaults.temperature,
            top_p=defaults.top_p,
            top_k=defaults.top_k,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        ).validate(vocab_size=0)  # it names no tokens
    except RequestError as error:
        raise SettingsError(f"{path}: {error}") from error
    return defaults

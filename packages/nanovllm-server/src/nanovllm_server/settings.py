"""The server's settings, and the sampling parameters that a model recommends."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import orjson

from nanovllm_core.config import EngineConfig
from nanovllm_core.errors import RequestError
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_server.observability.logs import LogFormat
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.request import SamplingDefaults

if TYPE_CHECKING:
    from nanovllm_server.observability.metrics import MetricsPrefix

LoadFormat = Literal["auto", "dummy"]
Role = Literal["prefill", "decode"]

# Maximum number of connections per worker that the worker has not accepted yet.
BACKLOG = 2048


class SettingsError(ValueError):
    """A setting is invalid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """How this server shares the computation of prompts with other engines.

    role: the phase that this server computes for a router; None: requests may not have `kv_transfer_params`.
    advertised_host: the value of `remote_host` in the answers of a prefill server; None without the role "prefill".
    has_prefill_engine: this server starts a second engine, which computes long prompts.
    prefill_gpus, decode_gpus: CUDA_VISIBLE_DEVICES of the second and the first engine; None: unchanged.
    """

    role: Role | None = None
    advertised_host: str | None = None
    has_prefill_engine: bool = False
    prefill_gpus: str | None = None
    decode_gpus: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings from the command line and the environment.

    model: a directory, or a repository of the Hugging Face Hub; None for the default model.
    draft_model: like `model`, but None if there is no draft model.
    model_names: names that requests may use for the model; None for the name of the directory or repository.
    api_keys: accepted API keys; if there are none, requests need no key.
    admin_api_key: key for the administration routes; None: these routes do not exist.
    allowed_hosts: names that the Host header may have, besides addresses and names such as localhost; `*`: all names.
    allowed_origins: origins whose pages may read answers; `*`: all origins.
    chat_template: a Jinja template, or the path of a file with a template; None for the model's template.
    reasoning_parser, tool_call_parser: name of a format, or "none"; None: detect the format from the template.
    load_format: "dummy" for random weights instead of the model's weights.
    max_queue: maximum number of waiting sequences, in addition to running sequences.
    body_memory_bytes: maximum memory of all large request bodies in each worker.
    request_timeout_s: maximum time of a request; None for no limit.
    drain_timeout_s: time for running requests to end when the server stops.
    worker_timeout_s: time after which an HTTP worker that does not respond is replaced.
    """

    model: str | None
    draft_model: str | None
    host: str
    port: int
    model_names: tuple[str, ...] | None
    api_keys: tuple[str, ...]
    admin_api_key: str | None
    allowed_hosts: tuple[str, ...]
    allowed_origins: tuple[str, ...]
    http_workers: int
    load_format: LoadFormat
    chat_template: str | None
    reasoning_parser: str | None
    tool_call_parser: str | None
    max_queue: int
    max_body_bytes: int
    body_memory_bytes: int
    request_timeout_s: float | None
    drain_timeout_s: float
    worker_timeout_s: float
    log_format: LogFormat
    log_level: str
    log_prompts: bool
    metrics_prefix: "MetricsPrefix"
    allow_priority: bool
    transfer: TransferSettings
    engine_config: EngineConfig


def read_template(template_or_path: str) -> str:
    """Returns `template_or_path` if it has a brace or line break, else the text of that file. Raises SettingsError."""
    if any(character in template_or_path for character in "{}\n"):
        return template_or_path
    return _read_text(Path(template_or_path), "the chat template")


def read_keys(path: Path) -> tuple[str, ...]:
    """Reads one API key per line. Skips empty lines and lines that begin with #. Raises SettingsError."""
    lines = [line.strip() for line in _read_text(path, "the API keys in").splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise SettingsError(f"{path} has no API key: write one per line")
    return keys


def check_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Returns `keys`. Raises SettingsError if an HTTP header can't contain one of the keys."""
    if not all(key.isascii() and key.isprintable() and key == key.strip() != "" for key in keys):
        raise SettingsError("an API key must be printable ASCII, not empty, and without spaces around it")
    return keys


def check_admin_key(key: str | None, api_keys: tuple[str, ...]) -> str | None:
    """Returns `key`. Raises SettingsError if `key` is invalid or is one of `api_keys`."""
    if key is not None and key in check_keys((key, *api_keys))[1:]:
        raise SettingsError(
            "--admin-api-key must differ from all API keys, because users of API keys are not administrators"
        )
    return key


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
    if recommended.get("do_sample") is False:
        recommended["temperature"] = 0.0
    defaults: dict[str, Any] = asdict(SamplingDefaults())
    for name in defaults:
        value = recommended.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SettingsError(f"{path}: {name} must be a number")
        defaults[name] = int(value) if name == "top_k" else float(value)
    try:
        SamplingParams(**defaults).validate(vocab_size=0)  # The defaults contain no token ids.
    except RequestError as error:
        raise SettingsError(f"{path}: {error}") from error
    return SamplingDefaults(**defaults)

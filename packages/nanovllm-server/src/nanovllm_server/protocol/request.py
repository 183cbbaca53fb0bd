"""What a chat completion request may say: the body in, a `ChatRequest` or an `ApiError` out.

The one place where a request is validated; inside, its types are trusted. This room must not know tokens, templates
or the engine's state: it gets the limits as numbers.
"""

from dataclasses import dataclass
from typing import cast

import orjson

from nanovllm_core.request import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, SamplingParams
from nanovllm_server.protocol.answer import Answer, parse_answer
from nanovllm_server.protocol.error import ApiError, bad_field
from nanovllm_server.protocol.fields import Fields, is_number
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.messages import Message, parse_messages
from nanovllm_server.protocol.tools import Toolbox, parse_tools
from nanovllm_server.protocol.unsupported import refuse_unsupported

INT64 = 1 << 63
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_ID_LENGTH = 256
EFFORTS = ("none", "minimal", "low", "medium", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a request that leaves these out gets: the model's own advice, where it gives any."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model and the engine allow: tokens of prompt and output together, token ids, sequences at once."""

    max_model_len: int
    vocab_size: int
    max_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat completion request that holds what its types say.

    tools: what the model may call; None for nothing. answer: what it is to say otherwise; None for free text.
    max_reasoning_tokens: after how many tokens reasoning is closed. template_values: further names for the template.
    max_tokens_field: the name under which `sampling.max_tokens` came, for refusals. request_id: the client's own.
    unknown: paths of fields that nobody knows.
    """

    model: str
    messages: tuple[Message, ...]
    tools: Toolbox | None
    answer: Answer | None
    max_reasoning_tokens: int | None
    template_values: dict[str, JSON]
    include_reasoning: bool
    sampling: SamplingParams
    n: int
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    max_tokens_field: str
    priority: int
    cache_salt: str
    request_id: str | None
    unknown: tuple[str, ...]


def parse_chat_request(data: bytes, limits: Limits, defaults: SamplingDefaults) -> ChatRequest:
    """Read the body of a request. Raises ApiError (400), which names the field."""
    body = _body(data)
    model = body.text("model")
    if not model:
        raise body.wrong("model", "the name of a model")
    messages, unknown = parse_messages(body)
    refuse_unsupported(body)
    _accept_unused(body)
    n = body.integer("n", 1, min(MAX_CHOICES, limits.max_sequences))
    stream = body.boolean("stream") or False
    sampling, max_tokens_field = _sampling(body, limits, defaults)
    return ChatRequest(
        model=model,
        messages=messages,
        tools=parse_tools(body),
        answer=parse_answer(body),
        max_reasoning_tokens=body.integer("max_reasoning_tokens", 0),
        template_values=_template_values(body),
        include_reasoning=body.boolean("include_reasoning") is not False,
        sampling=sampling,
        n=1 if n is None else n,
        stop=_stop(body),
        stream=stream,
        include_usage=_include_usage(body, stream),
        max_tokens_field=max_tokens_field,
        priority=body.integer("priority", -(1 << 31), (1 << 31) - 1) or 0,
        cache_salt=body.text("cache_salt", MAX_ID_LENGTH) or "",
        request_id=_request_id(body),
        # Last, when every field that means something has been read.
        unknown=(*body.unknown(), *unknown),
    )


def _body(data: bytes) -> Fields:
    try:
        body = cast(JSON, orjson.loads(data))
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return Fields(body)


def _accept_unused(body: Fields) -> None:
    """Fields that are part of the contract but change nothing here: looked at, so that mistakes are still named."""
    body.text("user")
    body.child("metadata")
    body.boolean("store")
    body.text("service_tier")
    body.text("prompt_cache_key")


def _template_values(body: Fields) -> dict[str, JSON]:
    effort = body.one_of("reasoning_effort", EFFORTS)
    values: dict[str, JSON] = {}
    if effort is not None:
        # Templates know one or the other.
        values = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    own = body.raw("chat_template_kwargs")
    if own is not None and not isinstance(own, dict):
        raise body.wrong("chat_template_kwargs", "an object")
    return {**values, **(own or {})}


def _sampling(body: Fields, limits: Limits, defaults: SamplingDefaults) -> tuple[SamplingParams, str]:
    max_tokens, max_tokens_field = _max_tokens(body)
    min_tokens = body.integer("min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise body.wrong("min_tokens", f"an integer from 0 to {max_tokens_field} ({max_tokens})")
    temperature = body.number("temperature", 0, 2)
    top_p = body.number("top_p", 0, 1, above_low=True)
    top_k = body.integer("top_k", -1)
    min_p = body.number("min_p", 0, 1)
    repetition_penalty = body.number("repetition_penalty", 0, 100, above_low=True)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        # Both -1 and 0 mean all tokens to somebody's client.
        top_k=defaults.top_k if top_k is None else min(max(top_k, 0), limits.vocab_size),
        min_p=defaults.min_p if min_p is None else min_p,
        seed=body.integer("seed", -INT64, INT64 - 1),
        presence_penalty=body.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=body.number("frequency_penalty", -2, 2) or 0.0,
        repetition_penalty=defaults.repetition_penalty if repetition_penalty is None else repetition_penalty,
        logit_bias=_logit_bias(body, limits.vocab_size),
        min_tokens=min_tokens,
        ignore_eos=body.boolean("ignore_eos") or False,
        stop_token_ids=_stop_token_ids(body, limits.vocab_size),
        logprobs=_logprobs(body),
    )
    return sampling, max_tokens_field


def _max_tokens(body: Fields) -> tuple[int | None, str]:
    older, newer = body.integer("max_tokens", 1), body.integer("max_completion_tokens", 1)
    if newer is None:
        return older, "max_tokens"
    if older is not None and older != newer:
        raise body.wrong("max_tokens", f"left out or the same as max_completion_tokens ({newer})")
    return newer, "max_completion_tokens"


def _logprobs(body: Fields) -> int | None:
    wanted = body.boolean("logprobs") or False
    top = body.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if top and not wanted:
        raise body.wrong("top_logprobs", "left out when logprobs is not true")
    return top if wanted else None


def _logit_bias(body: Fields, vocab_size: int) -> dict[int, float]:
    right = f"an object of at most {MAX_LOGIT_BIAS} token ids"
    values = body.raw("logit_bias")
    if values is None:
        return {}
    if not isinstance(values, dict) or len(values) > MAX_LOGIT_BIAS:
        raise body.wrong("logit_bias", right)
    biases: dict[int, float] = {}
    for key, bias in values.items():
        path = body.path("logit_bias")
        # int() would take "+1", "1_0" and other alphabets' digits.
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise ApiError(
                400,
                f'{path} must have token ids from 0 to {vocab_size - 1} as keys, not "{key[:40]}"',
                param=path,
                code="invalid_value",
            )
        if not is_number(bias, -100, 100):
            raise bad_field(f"{path}.{key}", "a number from -100 to 100", bias)
        biases[int(key)] = float(bias)
    return biases


def _stop(body: Fields) -> tuple[str, ...]:
    right = f"a non-empty string or an array of at most {MAX_STOPS}, each of at most {MAX_STOP_LENGTH} characters"
    value = body.raw("stop")
    if value is None:
        return ()
    stops = value if isinstance(value, list) else [value]
    if len(stops) > MAX_STOPS:
        raise body.wrong("stop", right)
    checked: list[str] = []
    for index, stop in enumerate(stops):
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            path = f"stop[{index}]" if isinstance(value, list) else "stop"
            raise bad_field(path, right if path == "stop" else f"a string of 1 to {MAX_STOP_LENGTH} characters", stop)
        checked.append(stop)
    return tuple(checked)


def _stop_token_ids(body: Fields, vocab_size: int) -> tuple[int, ...]:
    right = f"an array of at most {MAX_STOP_TOKENS} token ids"
    values = body.array("stop_token_ids", right, MAX_STOP_TOKENS) or []
    tokens: list[int] = []
    for index, token in enumerate(values):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise bad_field(f"stop_token_ids[{index}]", f"a token id from 0 to {vocab_size - 1}", token)
        tokens.append(token)
    return tuple(tokens)


def _request_id(body: Fields) -> str | None:
    value = body.text("request_id")
    # It goes back in a header.
    if value is not None and not (value.isascii() and value.isprintable() and 0 < len(value) <= MAX_ID_LENGTH):
        raise body.wrong("request_id", f"a string of 1 to {MAX_ID_LENGTH} printable ASCII characters")
    return value


def _include_usage(body: Fields, stream: bool) -> bool:
    options = body.child("stream_options")
    if options is None:
        return False
    if not stream:
        raise body.wrong("stream_options", "left out when stream is not true")
    options.boolean("include_obfuscation")
    return options.boolean("include_usage") or False

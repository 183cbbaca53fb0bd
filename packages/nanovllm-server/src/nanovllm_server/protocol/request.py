"""Validates the body of a chat completion request."""

from dataclasses import dataclass, replace

from nanovllm_core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    SamplingParams,
)
from nanovllm_server.protocol.answer import AnswerRule, parse_answer_rule
from nanovllm_server.protocol.body import parse_body
from nanovllm_server.protocol.error import ApiError, bad_field
from nanovllm_server.protocol.field_reader import FieldReader, as_integer, is_number
from nanovllm_server.protocol.json import JSON
from nanovllm_server.protocol.messages import Message, parse_messages, read_content
from nanovllm_server.protocol.reasoning import ReasoningOptions, parse_reasoning
from nanovllm_server.protocol.template import TemplateOptions, parse_template_options
from nanovllm_server.protocol.tools import Toolbox, parse_tools
from nanovllm_server.protocol.transfer_params import TransferParams, parse_transfer_params
from nanovllm_server.protocol.unsupported import refuse_unsupported

INT64_MAX = (1 << 63) - 1
# Limits of request fields. Lengths are in characters.
MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_ID_LENGTH = 256
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
MAX_TIMEOUT_S = 86400


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values for fields that a request leaves out. The values below apply if the model recommends no other values."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the model and the engine.

    max_model_len: maximum number of tokens of prompt and output together.
    max_sequences: maximum number of sequences in the server at once.
    """

    max_model_len: int
    vocab_size: int
    max_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A valid chat completion request.

    model: requested model name; None for the served model.
    tools: None if tool calls are not allowed.
    answer_rule: constraint on the answer; None for free text.
    prediction: text that the answer probably contains; None if the request has no prediction.
    include_stop: the answer's text includes the stop string or stop token.
    truncate_prompt_tokens: number of tokens to keep at the prompt's end; -1: as many as the context holds; None: all.
    writes_token_ids: in log-probabilities, a token is written "token_id:ID" instead of as text.
    timeout_s: maximum time from the request's arrival to the end of the answer; None for no limit.
    has_continuous_usage: every chunk of a stream has the usage so far.
    max_tokens_field: name of the request's field that sets `sampling.max_tokens`, for errors.
    priority: requests with a lower number are served first.
    transfer_params: tells where to fetch the prompt's KV cache, or that another server will fetch it; None: neither.
    num_body_bytes: size of the request's body.
    """

    model: str | None
    messages: tuple[Message, ...]
    tools: Toolbox | None
    answer_rule: AnswerRule | None
    prediction: str | None
    reasoning: ReasoningOptions
    template: TemplateOptions
    sampling: SamplingParams
    n: int
    stop_strings: tuple[str, ...]
    include_stop: bool
    bad_words: tuple[str, ...]
    skip_special_tokens: bool
    truncate_prompt_tokens: int | None
    return_token_ids: bool
    writes_token_ids: bool
    timeout_s: float | None
    stream: bool
    include_usage: bool
    has_continuous_usage: bool
    max_tokens_field: str
    priority: int
    cache_salt: str
    request_id: str | None
    transfer_params: TransferParams | None
    unknown_fields: tuple[str, ...]
    num_body_bytes: int = 0

    def without_contents(self) -> "ChatRequest":
        """Returns a copy that holds nothing whose size is limited only by the size of the body."""
        return replace(
            self,
            messages=(),
            tools=None,
            answer_rule=None,
            prediction=None,
            template=TemplateOptions(),
            unknown_fields=(),
        )


def parse_chat_request(data: bytes | bytearray, limits: Limits, defaults: SamplingDefaults) -> ChatRequest:
    """Parses and validates the body of a request. Raises ApiError (400)."""
    chat = read_chat_request(FieldReader(parse_body(data)), limits, defaults)
    return replace(chat, num_body_bytes=len(data))


def read_chat_request(body: FieldReader, limits: Limits, defaults: SamplingDefaults) -> ChatRequest:
    """Validates the fields of a request's body. Raises ApiError (400), which names the field."""
    messages = parse_messages(body)
    refuse_unsupported(body)
    _check_ignored_fields(body)
    n = body.integer("n", 1, min(MAX_CHOICES, limits.max_sequences))
    stream = body.boolean("stream") or False
    sampling, max_tokens_field = _read_sampling(body, limits, defaults)
    reasoning = parse_reasoning(body)
    include_usage, has_continuous_usage = _read_stream_options(body, stream)
    return ChatRequest(
        model=body.text("model") or None,
        messages=messages,
        tools=parse_tools(body),
        answer_rule=parse_answer_rule(body),
        prediction=_read_prediction(body),
        reasoning=reasoning,
        template=parse_template_options(body, reasoning),
        sampling=sampling,
        n=1 if n is None else n,
        stop_strings=_read_stop_strings(body),
        include_stop=body.boolean("include_stop_str_in_output") or False,
        bad_words=_read_bad_words(body),
        skip_special_tokens=body.boolean("skip_special_tokens") is not False,
        truncate_prompt_tokens=_read_truncate_prompt_tokens(body, limits),
        return_token_ids=body.boolean("return_token_ids") or False,
        writes_token_ids=body.boolean("return_tokens_as_token_ids") or False,
        timeout_s=body.number("timeout", 0, MAX_TIMEOUT_S, above_low=True),
        stream=stream,
        include_usage=include_usage,
        has_continuous_usage=has_continuous_usage,
        max_tokens_field=max_tokens_field,
        priority=body.integer("priority", -(1 << 31), (1 << 31) - 1) or 0,
        cache_salt=body.text("cache_salt", MAX_ID_LENGTH) or "",
        request_id=_read_request_id(body),
        transfer_params=parse_transfer_params(body),
        # Must come last: a field is unknown if no line above reads the field.
        unknown_fields=tuple(body.unknown_paths()),
    )


def _check_ignored_fields(body: FieldReader) -> None:
    """Checks the types of ignored fields."""
    body.text("user")
    body.mapping("metadata")
    body.boolean("store")
    body.text("service_tier")
    body.text("prompt_cache_key")
    # This field has no effect, because the server adds no spaces between tokens.
    body.boolean("spaces_between_special_tokens")


def _read_prediction(body: FieldReader) -> str | None:
    fields = body.child("prediction")
    if fields is None:
        return None
    if fields.one_of("type", ("content",)) is None:
        raise fields.wrong("type", '"content"')
    return read_content(fields, is_from_assistant=False)


def _read_sampling(body: FieldReader, limits: Limits, defaults: SamplingDefaults) -> tuple[SamplingParams, str]:
    max_tokens, max_tokens_field = _read_max_tokens(body)
    min_tokens = body.integer("min_tokens", 0) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise body.wrong("min_tokens", f"an integer from 0 to {max_tokens_field} ({max_tokens})")
    temperature = body.number("temperature", 0, 2)
    top_p = body.number("top_p", 0, 1)
    top_k = body.integer("top_k", -1)
    min_p = body.number("min_p", 0, 1)
    repetition_penalty = body.number("repetition_penalty", 0, 100, above_low=True)
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=defaults.temperature if temperature is None else temperature,
        top_p=defaults.top_p if top_p is None else top_p,
        # In requests, -1 and 0 mean all tokens. `SamplingParams` knows only 0.
        top_k=defaults.top_k if top_k is None else min(max(top_k, 0), limits.vocab_size),
        min_p=defaults.min_p if min_p is None else min_p,
        seed=body.integer("seed", -INT64_MAX - 1, INT64_MAX),
        presence_penalty=body.number("presence_penalty", -2, 2) or 0.0,
        frequency_penalty=body.number("frequency_penalty", -2, 2) or 0.0,
        repetition_penalty=defaults.repetition_penalty if repetition_penalty is None else repetition_penalty,
        logit_bias=_read_logit_bias(body, limits.vocab_size),
        min_tokens=min_tokens,
        ignore_eos=body.boolean("ignore_eos") or False,
        stop_token_ids=_read_token_ids(body, "stop_token_ids", MAX_STOP_TOKENS, limits.vocab_size),
        allowed_token_ids=_read_allowed_token_ids(body, limits.vocab_size),
        logprobs=_read_logprobs(body),
        prompt_logprobs=_read_prompt_logprobs(body),
    )
    return sampling, max_tokens_field


def _read_max_tokens(body: FieldReader) -> tuple[int | None, str]:
    """Returns (maximum number of output tokens, name of the field that sets it)."""
    max_tokens, max_completion_tokens = body.integer("max_tokens", 1), body.integer("max_completion_tokens", 1)
    if max_completion_tokens is None:
        return max_tokens, "max_tokens"
    if max_tokens not in (None, max_completion_tokens):
        raise body.wrong("max_tokens", f"left out or the same as max_completion_tokens ({max_completion_tokens})")
    return max_completion_tokens, "max_completion_tokens"


def _read_logprobs(body: FieldReader) -> int | None:
    is_requested = body.boolean("logprobs") or False
    num_top_tokens = body.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if num_top_tokens and not is_requested:
        raise body.wrong("top_logprobs", "left out when logprobs is not true")
    return num_top_tokens if is_requested else None


def _read_prompt_logprobs(body: FieldReader) -> int | None:
    num_top_tokens = body.integer("prompt_logprobs", 0, MAX_TOP_LOGPROBS)
    # Chunks of a stream have no field for log-probabilities of the prompt.
    if num_top_tokens is not None and body.boolean("stream"):
        raise body.wrong("prompt_logprobs", "left out when stream is true")
    return num_top_tokens


def _read_logit_bias(body: FieldReader, vocab_size: int) -> dict[int, float]:
    documented_schema: dict[str, JSON] = {
        "type": "object",
        "maxProperties": MAX_LOGIT_BIAS_ENTRIES,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    }
    values = body.raw("logit_bias", documented_schema)
    if values is None:
        return {}
    if not isinstance(values, dict) or len(values) > MAX_LOGIT_BIAS_ENTRIES:
        raise body.wrong("logit_bias", f"an object of at most {MAX_LOGIT_BIAS_ENTRIES} token ids")
    biases: dict[int, float] = {}
    for key, bias in values.items():
        path = body.path("logit_bias")
        # int() alone would accept "+1", "1_0" and non-ASCII digits.
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            message = f'{path} must have token ids from 0 to {vocab_size - 1} as keys, not "{key[:40]}"'
            raise ApiError(400, message, param=path, code="invalid_value")
        if not is_number(bias, -100, 100):
            raise bad_field(f"{path}.{key}", "a number from -100 to 100", bias)
        biases[int(key)] = float(bias)
    return biases


def _read_stop_strings(body: FieldReader) -> tuple[str, ...]:
    expected = (
        f"a non-empty string or an array of at most {MAX_STOP_STRINGS}, each of at most {MAX_STOP_LENGTH} characters"
    )
    schema: dict[str, JSON] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}
    value = body.raw("stop", {"anyOf": [schema, {"type": "array", "items": schema, "maxItems": MAX_STOP_STRINGS}]})
    if value is None:
        return ()
    stop_strings = value if isinstance(value, list) else [value]
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise body.wrong("stop", expected)
    checked_strings: list[str] = []
    for index, stop in enumerate(stop_strings):
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            if not isinstance(value, list):
                raise body.wrong("stop", expected)
            raise bad_field(f"stop[{index}]", f"a string of 1 to {MAX_STOP_LENGTH} characters", stop)
        checked_strings.append(stop)
    return tuple(checked_strings)


def _read_bad_words(body: FieldReader) -> tuple[str, ...]:
    expected = f"an array of at most {MAX_BAD_WORDS} strings"
    schema: dict[str, JSON] = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_LENGTH, "pattern": "\\S"}
    words: list[str] = []
    for index, word in enumerate(body.array("bad_words", expected, MAX_BAD_WORDS, schema) or []):
        if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
            expected = f"a string of 1 to {MAX_BAD_WORD_LENGTH} characters that are not all whitespace"
            raise bad_field(f"bad_words[{index}]", expected, word)
        words.append(word)
    return tuple(words)


def _read_truncate_prompt_tokens(body: FieldReader, limits: Limits) -> int | None:
    value = body.integer("truncate_prompt_tokens", -1, limits.max_model_len - 1)
    if value == 0:
        raise body.wrong("truncate_prompt_tokens", f"an integer from 1 to {limits.max_model_len - 1}, or -1")
    return value


def _read_allowed_token_ids(body: FieldReader, vocab_size: int) -> tuple[int, ...]:
    token_ids = _read_token_ids(body, "allowed_token_ids", MAX_ALLOWED_TOKEN_IDS, vocab_size)
    if body.raw("allowed_token_ids") is not None and not token_ids:
        raise body.wrong("allowed_token_ids", f"left out or an array of 1 to {MAX_ALLOWED_TOKEN_IDS} token ids")
    return token_ids


def _read_token_ids(body: FieldReader, name: str, max_ids: int, vocab_size: int) -> tuple[int, ...]:
    expected = f"an array of at most {max_ids} token ids"
    id_schema: dict[str, JSON] = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    token_ids: list[int] = []
    for index, value in enumerate(body.array(name, expected, max_ids, id_schema) or []):
        token_id = as_integer(value)
        if token_id is None or not 0 <= token_id < vocab_size:
            raise bad_field(f"{name}[{index}]", f"a token id from 0 to {vocab_size - 1}", value)
        token_ids.append(token_id)
    return tuple(token_ids)


def _read_request_id(body: FieldReader) -> str | None:
    value = body.text("request_id", documented_schema={"pattern": f"^[ -~]{{1,{MAX_ID_LENGTH}}}$"})
    # The id must fit into a header of the response.
    if value is not None and not (value.isascii() and value.isprintable() and 0 < len(value) <= MAX_ID_LENGTH):
        raise body.wrong("request_id", f"a string of 1 to {MAX_ID_LENGTH} printable ASCII characters")
    return value


def _read_stream_options(body: FieldReader, stream: bool) -> tuple[bool, bool]:
    """Returns (include_usage, has_continuous_usage)."""
    options = body.child("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise body.wrong("stream_options", "left out when stream is not true")
    options.boolean("include_obfuscation")
    include_usage = options.boolean("include_usage") or False
    # As in vLLM, `continuous_usage_stats` has no effect without `include_usage`.
    return include_usage, (options.boolean("continuous_usage_stats") or False) and include_usage

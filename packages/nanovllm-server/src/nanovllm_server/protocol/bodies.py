"""The bodies of answers, as types: what builds them is checked against these, and the API's description shows them.

Names and shapes are those of OpenAI's API; what is added to it says so. This room must not know how anything is made.
"""

from typing import Literal, NotRequired, TypedDict

Finish = Literal["stop", "length", "tool_calls"]


class FunctionCall(TypedDict):
    """The function that is called. `arguments` is JSON as the model wrote it: check it."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """A call that the model makes."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class TopLogprob(TypedDict):
    """A token and its log-probability. bytes: the token's own, null for special tokens."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token that was generated, and the likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(TypedDict):
    """Log-probabilities of generated tokens, in order."""

    content: list[TokenLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    """A token at one place of the prompt: its log-probability, its place among all tokens, 1 for the likeliest, and its
    text. Beyond OpenAI's API.
    """

    logprob: float
    rank: int
    decoded_token: str


class AnswerMessage(TypedDict):
    """What the model said. reasoning, and the same as reasoning_content, are beyond OpenAI's API."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class Choice(TypedDict):
    """One answer. stop_reason, the stop string or token id that ended it, and token_ids, on request, are beyond
    OpenAI's API.
    """

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Finish
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class PromptTokensDetails(TypedDict):
    """Tokens of the prompt found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Tokens of the output spent on reasoning."""

    reasoning_tokens: int


class CompletionUsage(TypedDict):
    """Tokens of a request; those of the output are summed over its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class ChatCompletion(TypedDict):
    """A whole answer. prompt_token_ids and prompt_logprobs, on request, are beyond OpenAI's API. prompt_logprobs: for
    each token of the prompt, by token id, what is known of it and of the likeliest in its place; null for the first.
    """

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: CompletionUsage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[dict[str, PromptLogprob] | None]]


class FunctionCallDelta(TypedDict):
    """More of a call; the name comes with its first delta."""

    arguments: str
    name: NotRequired[str]


class ToolCallDelta(TypedDict):
    """More of the `index`-th call; id and type come with its first delta."""

    index: int
    function: FunctionCallDelta
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]


class ChoiceDelta(TypedDict, total=False):
    """What a chunk adds to a choice. The role comes first, and once."""

    role: Literal["assistant"]
    content: str | None
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChunkChoice(TypedDict):
    """One choice's part of a chunk. stop_reason comes with the finish reason, token_ids on request."""

    index: int
    delta: ChoiceDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: Finish | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(TypedDict):
    """An event of a streamed answer. usage is there when asked for, and null but in the last, which has no choices;
    prompt_token_ids, on request, in the first.
    """

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: NotRequired[CompletionUsage | None]
    prompt_token_ids: NotRequired[list[int]]


class ErrorDetails(TypedDict):
    """What went wrong, for people (message) and programs (type, param: the field, code)."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(TypedDict):
    """Every answer other than success."""

    error: ErrorDetails


class Model(TypedDict):
    """A model under one of its names. root, its first name, and max_model_len are beyond OpenAI's API."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(TypedDict):
    """All there is."""

    object: Literal["list"]
    data: list[Model]


class Health(TypedDict):
    """Whether requests can be served, and if not why."""

    status: Literal["ok", "unavailable"]
    reason: NotRequired[str]

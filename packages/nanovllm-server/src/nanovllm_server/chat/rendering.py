"""Renders messages to a prompt with the chat template and the tokenizer."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nanovllm_models import Tokenizer
from nanovllm_models.chat_formats import ReasoningFormat, ToolCallFormat
from nanovllm_models.errors import TemplateError, TemplateValueError
from nanovllm_server.chat.parallel_calls import split_parallel_calls
from nanovllm_server.chat.tool_prompt import TemplateMessage, write_past_calls_as_text, write_tools_as_text
from nanovllm_server.protocol.body import MAX_VALUES, has_too_many_values
from nanovllm_server.protocol.error import ApiError, bad_field, prediction_too_long, prompt_too_long
from nanovllm_server.protocol.field_reader import exceeds_depth
from nanovllm_server.protocol.messages import Message, PastToolCall
from nanovllm_server.protocol.template import TemplateOptions

NUM_THREADS = 2  # for requests smaller than MIN_LARGE_SIZE
# One more thread renders requests of at least this size (bytes or characters). Smaller requests do not wait for it.
MIN_LARGE_SIZE = 1 << 18
# Arguments of calls that are nested more deeply stay text: templates and `orjson` write them recursively.
MAX_ARGUMENT_DEPTH = 100
# Digits of an integer that may be beyond 64 bits.
LONG_NUMBER = re.compile("[0-9]{19}")
DEFAULT_OPTIONS = TemplateOptions()
ToolDefinitions = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt as text and as tokens.

    continued_text: text of the last message if the answer continues this message. Reasoning has its opening tag.
    """

    text: str
    token_ids: NDArray[np.int32]
    continued_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSupport:
    """How the template writes the calls of earlier answers.

    shows_calls: whether the prompt contains calls.
    shows_parallel_calls: whether the prompt contains all calls of a message with several calls.
    needs_text_arguments: whether arguments must be JSON text.
    needs_object_arguments: whether arguments must be an object: the template refuses text.
    """

    shows_calls: bool
    shows_parallel_calls: bool
    needs_text_arguments: bool
    needs_object_arguments: bool


class Renderer:
    """Renders conversations for one model, in threads.

    call_format: format of the model's tool calls; None if unknown. If the template omits tools or tool calls, the
        renderer writes them in this format.
    reasoning_format: format of the model's reasoning; None if the model writes no reasoning.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        call_format: ToolCallFormat | None = None,
        reasoning_format: ReasoningFormat | None = None,
    ):
        """Tests the template. Raises TemplateError if the template can't render a short message."""
        self._tokenizer = tokenizer
        self._call_format = call_format
        self._reasoning_format = reasoning_format
        try:
            tokenizer.render_chat([{"role": "user", "content": "hi"}])
        except TemplateError as error:
            raise TemplateError(f"set a template that accepts a user message with --chat-template: {error}") from error
        self._developer_role = "developer" if self._supports_developer_role() else "system"
        self._call_support = self._test_call_support()
        self._shows_system_messages = self._can_show_system_messages()
        self._shows_tools = self._can_show_tools()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "nanovllm-render")
        self._large_prompt_pool = ThreadPoolExecutor(1, "nanovllm-render-large")

    async def render(
        self,
        messages: Sequence[Message],
        tools: ToolDefinitions | None = None,
        options: TemplateOptions = DEFAULT_OPTIONS,
        *,
        max_tokens: int | None = None,
        num_body_bytes: int = 0,
    ) -> Prompt:
        """Renders and encodes a conversation.

        max_tokens: maximum number of prompt tokens; None for no limit. Before encoding, this method only checks the
            smallest number of tokens that the text can have. The returned prompt may therefore be too long, and the
            caller must check its length. The tokens of a prompt that is too long are not cached.
        num_body_bytes: size of the request's body, which limits the length of what the template gets.
        Raises ApiError (400) if the template refuses the conversation, or if the check before encoding fails.
        """
        pool = self._choose_pool(num_body_bytes)
        return await asyncio.get_running_loop().run_in_executor(
            pool, self._render, messages, tools, options, max_tokens
        )

    async def encode_prediction(self, text: str, max_tokens: int) -> NDArray[np.int32]:
        """Returns the token ids of a predicted answer. Raises ApiError (400) above `max_tokens` tokens."""
        pool = self._choose_pool(len(text))
        return await asyncio.get_running_loop().run_in_executor(pool, self._encode_prediction, text, max_tokens)

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Encodes each word twice: at the beginning of a text, and after a space. Returns the distinct encodings."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode_words, words)

    async def extend(self, prompt: Prompt, text: str) -> Prompt:
        """Appends `text` to a prompt."""
        pool = self._choose_pool(len(prompt.text))
        return await asyncio.get_running_loop().run_in_executor(pool, self._encode, prompt.text + text)

    def find_omitted_content(self) -> list[str]:
        """Returns names of messages whose content the template leaves out of the prompt without an error."""
        question = Message(role="user", content=".")
        system_message = Message(role="system", content="any_text")
        call = PastToolCall("call_0", "f", "{}")
        call_message = Message(role="assistant", content="any_text", tool_calls=(call,))
        result = Message(role="tool", content=".", tool_call_id=call.id)
        conversations = {
            "all but one system message, if other messages separate them": (system_message, question) * 2,
            "assistant's messages with tool_calls": (question, call_message, result),
        }
        return [name for name, messages in conversations.items() if self._omits_content(messages)]

    def close(self) -> None:
        """Ends the threads after their current work."""
        for pool in (self._pool, self._large_prompt_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _choose_pool(self, size: int) -> ThreadPoolExecutor:
        return self._large_prompt_pool if size >= MIN_LARGE_SIZE else self._pool

    def _try_render(self, *messages: Mapping[str, Any], tools: ToolDefinitions | None = None) -> str | None:
        try:
            return self._tokenizer.render_chat(messages, tools=tools)
        except TemplateError:
            return None

    def _supports_developer_role(self) -> bool:
        # Some templates write the name of any role into the prompt. If an unknown role gives the same prompt except for
        # its name, the template does not really support "developer".
        user = {"role": "user", "content": "."}
        developer_prompt = self._try_render({"role": "developer", "content": "."}, user)
        unknown_role_prompt = self._try_render({"role": "unknown", "content": "."}, user)
        return developer_prompt is not None and (
            unknown_role_prompt is None or developer_prompt != unknown_role_prompt.replace("unknown", "developer")
        )

    def _can_show_tools(self) -> bool:
        function = {"name": "any_tool", "description": ".", "parameters": {"type": "object", "properties": {}}}
        tool = {"type": "function", "function": function}
        rendered = self._try_render({"role": "user", "content": "."}, tools=[tool])
        return rendered is not None and "any_tool" in rendered

    def _can_show_system_messages(self) -> bool:
        system_message = {"role": "system", "content": "any_text"}
        rendered = self._try_render(system_message, system_message, {"role": "user", "content": "."})
        return rendered is not None and rendered.count("any_text") == 2

    def _test_call_support(self) -> CallSupport:
        prompt_with_text, prompt_with_object = (self._try_render_calls(1, as_text=as_text) for as_text in (True, False))
        shows_text, shows_object = (
            prompt is not None and "any_value" in prompt for prompt in (prompt_with_text, prompt_with_object)
        )
        needs_text = shows_text and not shows_object
        prompt_with_two_calls = self._try_render_calls(2, as_text=needs_text)
        return CallSupport(
            shows_calls=shows_text or shows_object,
            shows_parallel_calls=prompt_with_two_calls is not None and prompt_with_two_calls.count("any_value") == 2,
            needs_text_arguments=needs_text,
            needs_object_arguments=shows_object and prompt_with_text is None,
        )

    def _try_render_calls(self, num_calls: int, *, as_text: bool) -> str | None:
        """Renders a message with calls, whose arguments contain "any_value", and a result of each call."""
        past_calls = [PastToolCall(f"call_{index}", "f", '{"key": "any_value"}') for index in range(num_calls)]
        calls = [_to_template_call(call, as_text=as_text) for call in past_calls]
        return self._try_render(
            {"role": "user", "content": "."},
            {"role": "assistant", "content": "", "tool_calls": calls},
            *({"role": "tool", "content": ".", "tool_call_id": call["id"]} for call in calls),
        )

    def _omits_content(self, messages: Sequence[Message]) -> bool:
        """Whether the prompt lacks a message with the content "any_text". False if the template refuses messages."""
        num_messages = sum(message.content == "any_text" for message in messages)
        try:
            return self._render_text(messages, None, DEFAULT_OPTIONS).count("any_text") < num_messages
        except ApiError:
            return False

    def _render(
        self,
        messages: Sequence[Message],
        tools: ToolDefinitions | None,
        options: TemplateOptions,
        max_tokens: int | None,
    ) -> Prompt:
        last_message = messages[-1]
        continued_text = ""
        if options.continue_final_message and last_message.has_only_reasoning:
            text, continued_text = self._render_continued_reasoning(messages, tools, options)
        else:
            text = self._render_text(messages, tools, options)
            if options.continue_final_message:
                continued_text = last_message.content or ""
        if max_tokens is not None and (min_num_tokens := self._tokenizer.min_num_tokens(text)) > max_tokens:
            raise prompt_too_long(max_tokens, f"at least {min_num_tokens}")
        return replace(self._encode(text, max_tokens), continued_text=continued_text)

    def _render_continued_reasoning(
        self, messages: Sequence[Message], tools: ToolDefinitions | None, options: TemplateOptions
    ) -> tuple[str, str]:
        """Returns (prompt that ends with the reasoning of the last message, this reasoning with its opening tag)."""
        reasoning_format, reasoning = self._reasoning_format, messages[-1].reasoning
        path = f"messages[{len(messages) - 1}].reasoning"
        if reasoning_format is None:
            message = f"{path} can't be continued: this model has no reasoning; send the text to continue as content"
            raise ApiError(400, message, param=path, code="invalid_value")
        # Templates close the reasoning of earlier messages or leave it out, so the reasoning follows the beginning of
        # a new turn, where the model writes it.
        options = replace(options, add_generation_prompt=True, continue_final_message=False)
        text = self._render_text(messages[:-1], tools, options)
        if text.rstrip().endswith(reasoning_format.end):
            message = f"{path} can't be continued: reasoning is turned off for this request; turn it on"
            raise ApiError(400, message, param=path, code="invalid_value")
        if not text.rstrip().endswith(reasoning_format.begin):
            text += reasoning_format.begin
        if text.endswith(reasoning_format.begin):
            text += "\n"
        return f"{text}{reasoning}", f"{reasoning_format.begin}\n{reasoning}"

    def _render_text(self, messages: Sequence[Message], tools: ToolDefinitions | None, options: TemplateOptions) -> str:
        template_messages = [self._to_template_message(message) for message in messages]
        if not self._shows_system_messages:
            template_messages = _join_first_system_messages(template_messages)
        if self._call_format is not None and not self._call_support.shows_calls:
            template_messages = write_past_calls_as_text(template_messages, self._call_format)
        if self._call_support.shows_calls and not self._call_support.shows_parallel_calls:
            template_messages = split_parallel_calls(template_messages)
        if self._call_format is not None and tools is not None and not self._shows_tools:
            template_messages, tools = write_tools_as_text(template_messages, tools, self._call_format), None
        try:
            return self._tokenizer.render_chat(
                template_messages,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                tools=tools,
                documents=options.documents,
                template_values=options.variables,
            )
        except TemplateValueError as error:
            message = f"chat_template_kwargs: {error}"
            raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value") from error
        except TemplateError as error:
            raise ApiError(400, f"messages: {error}", param="messages", code="template_error") from error

    def _encode_prediction(self, text: str, max_tokens: int) -> NDArray[np.int32]:
        if (min_num_tokens := self._tokenizer.min_num_tokens(text)) > max_tokens:
            raise prediction_too_long(max_tokens, f"at least {min_num_tokens}")
        token_ids = self._encode_uncached(text)
        if len(token_ids) > max_tokens:
            raise prediction_too_long(max_tokens, str(len(token_ids)))
        return token_ids

    def _encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        variants = [variant for word in words for variant in (word.lstrip(), " " + word.lstrip())]
        return tuple(dict.fromkeys(tuple(self._encode_uncached(variant).tolist()) for variant in variants))

    def _encode_uncached(self, text: str) -> NDArray[np.int32]:
        # The cache of encoded texts is for conversations, which grow from request to request.
        return self._tokenizer.encode(text, add_special_tokens=False, max_cached_tokens=0)

    def _encode(self, text: str, max_cached_tokens: int | None = None) -> Prompt:
        # The template has already written the special tokens.
        token_ids = self._tokenizer.encode(text, add_special_tokens=False, max_cached_tokens=max_cached_tokens)
        return Prompt(text, token_ids)

    def _to_template_message(self, message: Message) -> dict[str, Any]:
        role = self._developer_role if message.role == "developer" else message.role
        # Some templates fail if content is None.
        fields: dict[str, Any] = {"role": role, "content": message.content or ""}
        if message.name is not None:
            fields["name"] = message.name
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        if message.reasoning is not None:
            # Some templates read `reasoning`, others `reasoning_content`.
            fields["reasoning"] = fields["reasoning_content"] = message.reasoning
        if message.tool_calls:
            fields["tool_calls"] = [self._to_checked_template_call(call) for call in message.tool_calls]
        return fields

    def _to_checked_template_call(self, call: PastToolCall) -> dict[str, Any]:
        template_call = _to_template_call(call, as_text=self._call_support.needs_text_arguments)
        if self._call_support.needs_object_arguments and not isinstance(template_call["function"]["arguments"], dict):
            # Arguments are no object if the call was cut off, or if they are too deep or too large to be decoded.
            expected = f"a JSON object as text, with at most {MAX_ARGUMENT_DEPTH} levels and {MAX_VALUES} values"
            raise bad_field(call.arguments_path, expected, call.arguments)
        return template_call


def _join_first_system_messages(messages: list[TemplateMessage]) -> list[TemplateMessage]:
    """Joins several system messages at the beginning, for templates that refuse them or write only one of them."""
    contents = [message["content"] for message in takewhile(lambda message: message["role"] == "system", messages)]
    if len(contents) < 2:
        return messages
    return [{**messages[0], "content": "\n\n".join(contents)}, *messages[len(contents) :]]


def _to_template_call(call: PastToolCall, *, as_text: bool) -> dict[str, Any]:
    # Clients also send "", whitespace and "null" for a call without arguments.
    arguments: Any = "{}" if call.arguments.strip() in ("", "null") else call.arguments
    if not as_text:
        arguments = _decode_arguments(arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _decode_arguments(text: str) -> Any:
    """Decodes the arguments of a call. Returns `text` if it is not JSON because the call was cut off, or too large."""
    if has_too_many_values(text.encode()):
        return text
    try:
        arguments = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if exceeds_depth(arguments, MAX_ARGUMENT_DEPTH):
        return text
    # `orjson` turns integers beyond 64 bits into floats, and takes no number of more than 309 digits. `json` decodes
    # integers of any length, but takes more time.
    return json.loads(text) if LONG_NUMBER.search(text) else arguments

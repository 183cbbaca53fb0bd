"""Renders messages to a prompt with the chat template and the tokenizer, in threads beside the event loop."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from nanovllm_models import Tokenizer
from nanovllm_models.chat_formats import ToolCallFormat
from nanovllm_models.errors import TemplateError, TemplateValueError
from nanovllm_server.chat.tool_prompt import with_history_as_text, with_tools
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.messages import Message, PastToolCall
from nanovllm_server.protocol.template import TemplateOptions

NUM_THREADS = 2
# Conversations of at least this many characters use a separate thread, so that they don't delay shorter ones.
LARGE_CHARACTERS = 1 << 18
PLAIN = TemplateOptions()
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A prompt as text and as tokens. token_ids: read-only."""

    text: str
    token_ids: NDArray[np.int32]


class Renderer:
    """Renders conversations for one model. Raises TemplateError if the template can't render a short message.

    calls: format of the model's calls, for tools that its template does not show; None if unknown.
    """

    def __init__(self, tokenizer: Tokenizer, calls: ToolCallFormat | None = None):
        self._tokenizer = tokenizer
        self._calls = calls
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
        self._developer_role = "developer" if self._supports_developer_role() else "system"
        self._needs_text_arguments, self._shows_calls = self._probe_calls()
        self._shows_tools = self._probe_tools()
        self._pool = ThreadPoolExecutor(NUM_THREADS, "nanovllm-render")
        self._large_pool = ThreadPoolExecutor(1, "nanovllm-render-large")

    async def render(
        self, messages: Sequence[Message], tools: Tools | None = None, options: TemplateOptions = PLAIN
    ) -> Prompt:
        """The prompt of a conversation. tools: as requests define them.

        Raises ApiError (400) if the template refuses the conversation.
        """
        large = sum(len(message.content or "") + 1 for message in messages) >= LARGE_CHARACTERS
        pool = self._large_pool if large else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, self._render, messages, tools, options)

    def tokens_of_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word, at the beginning of a text and after a space."""
        spellings = (spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip()))
        found = (tuple(self._tokenizer.encode(spelling, add_special_tokens=False).tolist()) for spelling in spellings)
        return tuple(dict.fromkeys(found))

    async def extend(self, prompt: Prompt, text: str) -> Prompt:
        """The prompt with `text` appended."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._encoded, prompt.text + text)

    def close(self) -> None:
        """Ends the threads after their current work."""
        for pool in (self._pool, self._large_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def _rendered(self, *messages: Mapping[str, Any], tools: Tools | None = None) -> str | None:
        try:
            return self._tokenizer.render_chat(messages, tools=tools)
        except TemplateError:
            return None

    def _supports_developer_role(self) -> bool:
        # A template that writes any role's name into the prompt does not support the role in particular.
        user = {"role": "user", "content": "."}
        as_developer = self._rendered({"role": "developer", "content": "."}, user)
        as_nobody = self._rendered({"role": "nobody", "content": "."}, user)
        return as_developer is not None and (
            as_nobody is None or as_developer != as_nobody.replace("nobody", "developer")
        )

    def _probe_tools(self) -> bool:
        function = {"name": "any_tool", "description": ".", "parameters": {"type": "object", "properties": {}}}
        tool = {"type": "function", "function": function}
        rendered = self._rendered({"role": "user", "content": "."}, tools=[tool])
        return rendered is not None and "any_tool" in rendered

    def _probe_calls(self) -> tuple[bool, bool]:
        """Whether the template needs arguments as text, and whether it shows calls at all."""

        # Most templates format arguments themselves; some insert them as text.
        def written(*, as_text: bool) -> bool:
            call = _plain_call(PastToolCall("call_0", "f", '{"key": "valued"}'), as_text=as_text)
            rendered = self._rendered(
                {"role": "user", "content": "."},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": ".", "tool_call_id": "call_0"},
            )
            return rendered is not None and "valued" in rendered

        as_text, as_value = written(as_text=True), written(as_text=False)
        return as_text and not as_value, as_text or as_value

    def _render(self, messages: Sequence[Message], tools: Tools | None, options: TemplateOptions) -> Prompt:
        plain = [self._plain(message) for message in messages]
        if self._calls is not None and not self._shows_calls:
            plain = with_history_as_text(plain, self._calls)
        if self._calls is not None and tools is not None and not self._shows_tools:
            plain, tools = with_tools(plain, tools, self._calls), None
        try:
            text = self._tokenizer.render_chat(
                plain,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                tools=tools,
                documents=options.documents,
                template_values=options.values,
            )
        except TemplateValueError as error:
            message = f"chat_template_kwargs: {error}"
            raise ApiError(400, message, param="chat_template_kwargs", code="invalid_value") from error
        except TemplateError as error:
            raise ApiError(400, f"messages: {error}", param="messages", code="template_error") from error
        return self._encoded(text)

    def _encoded(self, text: str) -> Prompt:
        # The template writes the special tokens itself.
        return Prompt(text, self._tokenizer.encode(text, add_special_tokens=False))

    def _plain(self, message: Message) -> dict[str, Any]:
        role = self._developer_role if message.role == "developer" else message.role
        # Some templates fail if content is None.
        plain: dict[str, Any] = {"role": role, "content": message.content or ""}
        if message.name is not None:
            plain["name"] = message.name
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.reasoning is not None:
            # A template uses one name or the other.
            plain["reasoning"] = plain["reasoning_content"] = message.reasoning
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call, as_text=self._needs_text_arguments) for call in message.tool_calls]
        return plain


def _plain_call(call: PastToolCall, *, as_text: bool) -> dict[str, Any]:
    # Some clients send "" for a call without arguments.
    arguments: Any = call.arguments or "{}"
    if not as_text:
        # Arguments that are not JSON, as in a call that was cut off, stay text.
        with suppress(orjson.JSONDecodeError):
            arguments = orjson.loads(arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

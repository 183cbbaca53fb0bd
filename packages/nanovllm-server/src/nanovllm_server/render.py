"""Messages in, prompt token ids out: the chat template and the tokenizer, off the event loop.

This room must not know HTTP, engines or what becomes of the prompt.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import orjson

from nanovllm_models.errors import TemplateError
from nanovllm_server.protocol.error import ApiError
from nanovllm_server.protocol.messages import Message, ToolCall

# Two, so that one enormous prompt doesn't hold up the others.
NUM_THREADS = 2


class ChatTokenizer(Protocol):
    """What is asked of a tokenizer here; `nanovllm_models.Tokenizer` has it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to token ids."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Messages to the text of a prompt. Raises TemplateError."""
        ...


class Renderer:
    """Renders conversations for one model. Raises TemplateError when the model's template takes not even one word."""

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
        self._developer_role = "developer" if self._knows_developers() else "system"
        self._pool = ThreadPoolExecutor(NUM_THREADS, "nanovllm-render")

    async def render(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of a conversation. Raises ApiError (400) when the template refuses it."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._render, messages)

    def close(self) -> None:
        """End the threads, once they are done with what they are at."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _knows_developers(self) -> bool:
        # A template that writes any role's name into the prompt doesn't know the role, and neither does its model.
        def rendered(role: str) -> str | None:
            try:
                return self._tokenizer.render_chat([{"role": role, "content": "."}, {"role": "user", "content": "."}])
            except TemplateError:
                return None

        as_developer, as_nobody = rendered("developer"), rendered("nobody")
        return as_developer is not None and (
            as_nobody is None or as_developer != as_nobody.replace("nobody", "developer")
        )

    def _render(self, messages: Sequence[Message]) -> list[int]:
        plain = [self._plain(message) for message in messages]
        try:
            text = self._tokenizer.render_chat(plain, add_generation_prompt=True)
        except TemplateError as error:
            raise ApiError(400, f"messages: {error}", param="messages", code="template_error") from error
        # The template writes the special tokens itself.
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _plain(self, message: Message) -> dict[str, Any]:
        role = self._developer_role if message.role == "developer" else message.role
        plain: dict[str, Any] = {"role": role, "content": message.content}
        if message.name is not None:
            plain["name"] = message.name
        if message.tool_call_id is not None:
            plain["tool_call_id"] = message.tool_call_id
        if message.reasoning is not None:
            # Templates know one name or the other.
            plain["reasoning"] = plain["reasoning_content"] = message.reasoning
        if message.tool_calls:
            plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
        return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    # Templates write arguments as JSON themselves. What is no JSON, as of a call that was cut off, goes in as it is.
    try:
        arguments = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        arguments = call.arguments
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}

"""Sends the requests of a case to one server, or in turn to several replicas of a server."""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanovllm_server.bench.client import Endpoint, ExchangeError, TimedAnswer, chat_request, list_models, stream_chat
from nanovllm_server.bench.report import BenchError, InvalidSettingsError
from nanovllm_server.bench.server_cases.prompt_texts import Message, PromptTokenCosts, measure_token_costs


@dataclass(frozen=True, slots=True)
class ServerUnderTest:
    """A server to measure. label: the server's name in tables. prompt_token_costs: from `measure_token_costs`.

    endpoints: the server's replicas, usually one. Each request goes to the next replica.
    """

    label: str
    endpoints: Sequence[Endpoint]
    model: str
    prompt_token_costs: PromptTokenCosts

    def require_one_replica(self, case: str) -> None:
        """Raises InvalidSettingsError if the server has several replicas, which `case` can't measure."""
        if len(self.endpoints) > 1:
            raise InvalidSettingsError(
                f"{case}: a conversation's turns would go to different replicas: give one URL, or leave this case out"
            )


class CaseClient:
    """Sends the requests of one case to one server, and records the error of each request that fails."""

    def __init__(self, endpoints: Sequence[Endpoint], model: str, temperature: float, timeout_s: float):
        self.timeout_s = timeout_s
        self.num_sent = 0
        self.errors: list[str] = []
        self._next_endpoints = itertools.cycle(endpoints)
        self._model = model
        self._temperature = temperature

    async def send(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        *,
        delay_s: float = 0.0,
        on_piece: Callable[[float], None] | None = None,
        has_timeout: bool = True,
    ) -> TimedAnswer | None:
        """Sends a request after `delay_s`. Returns None if the request failed.

        on_piece: called with the arrival time of each piece (a delta with content).
        has_timeout: whether the request fails after `timeout_s`.
        """
        await asyncio.sleep(delay_s)
        self.num_sent += 1
        body = chat_request(self._model, messages, max_tokens, self._temperature)
        try:
            async with asyncio.timeout(self.timeout_s if has_timeout else None):
                return await stream_chat(next(self._next_endpoints), body, on_piece)
        except ExchangeError as error:
            self.errors.append(str(error))
        except TimeoutError:
            self.errors.append(f"no whole answer within {self.timeout_s:g} s: raise --timeout")
        return None


async def prepare_server(
    label: str, endpoints: Sequence[Endpoint], model: str | None, temperature: float, timeout_s: float
) -> ServerUnderTest:
    """Chooses the model, and measures a prompt's token costs. Raises BenchError if the server does not answer."""
    try:
        async with asyncio.timeout(timeout_s):
            model_name = model or (await list_models(endpoints[0]))[0]

            async def count_tokens(messages: list[Message]) -> int:
                body = chat_request(model_name, messages, 4, temperature)
                return (await stream_chat(endpoints[0], body)).prompt_tokens

            return ServerUnderTest(label, endpoints, model_name, await measure_token_costs(count_tokens))
    except (ExchangeError, TimeoutError, LookupError) as error:
        raise BenchError(f"{label}: the server doesn't answer: {error or type(error).__name__}") from error

"""The dependencies of the routes, and the preparation of a chat completion up to its `Generation`."""

import time
import uuid
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nanovllm_core import Budget, Engine, GrammarError, Request, RequestError, SamplingParams
from nanovllm_core.request import ParameterTypes
from nanovllm_server.chat.detokenizing import TextVocabulary
from nanovllm_server.chat.generation import Generation
from nanovllm_server.chat.model_format import ModelFormat
from nanovllm_server.chat.output_assembler import ChoiceOptions, OutputAssembler
from nanovllm_server.chat.rendering import Prompt, Renderer
from nanovllm_server.constraint.answer_constraint import AnswerConstraint, constrain
from nanovllm_server.http.admission import AdmissionControl
from nanovllm_server.observability.exchange import Exchange
from nanovllm_server.observability.logs import Logger
from nanovllm_server.observability.metrics import Metrics
from nanovllm_server.protocol.error import ApiError, invalid_grammar, unavailable, unsupported
from nanovllm_server.protocol.json import show
from nanovllm_server.protocol.request import ChatRequest, Limits, SamplingDefaults
from nanovllm_server.protocol.response import Clock
from nanovllm_server.protocol.schema import refused_grammar

MAX_NAME_SHOWN = 80
INT64_MAX = (1 << 63) - 1


@dataclass(slots=True)
class Service:
    """One model, its engine, and everything that serves it. names: names that requests may use for the model."""

    engine: Engine
    renderer: Renderer
    vocabulary: TextVocabulary
    model_format: ModelFormat
    names: tuple[str, ...]
    admission: AdmissionControl
    metrics: Metrics
    logger: Logger
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    request_timeout_s: float | None = None
    log_prompts: bool = False
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    clock: Clock = field(default_factory=Clock)
    running: set[Generation] = field(default_factory=set[Generation])

    @property
    def limits(self) -> Limits:
        """The limits that requests are checked against."""
        info = self.engine.info
        return Limits(info.max_model_len, info.vocab_size, self.admission.capacity)

    def unhealthy(self) -> str | None:
        """The reason why the server can't serve; None if it can."""
        return f"the engine is dead: {self.engine.dead}" if self.engine.dead is not None else self.admission.closed

    async def begin(self, chat: ChatRequest, exchange: Exchange) -> Generation:
        """Admits a request and prepares it for the engine. `exchange.on_end` releases everything that it holds.

        Raises ApiError.
        """
        if chat.unknown:
            shown = [name[:MAX_NAME_SHOWN] for name in chat.unknown[:20]]
            self.logger.debug("unknown fields ignored", fields=shown, request_id=exchange.request_id)
        if chat.model not in self.names:
            raise ApiError(
                404,
                f"the model {show(chat.model)} does not exist; this server has {', '.join(self.names)}",
                param="model",
                code="model_not_found",
            )
        if self.engine.dead is not None:
            raise unavailable(f"the engine is dead: {self.engine.dead}", "engine_dead")
        if chat.tools is not None and not self.model_format.has_calls:
            raise unsupported(
                "tools",
                "tools are not supported: the format of this model's tool calls is unknown; start the server with "
                "--tool-call-parser to name it",
            )
        exchange.on_end.append(self.admission.admit(chat.n))
        definitions = None if chat.tools is None else chat.tools.definitions
        prompt = await self.renderer.render(chat.messages, definitions, chat.template)
        prompt, budget = await self._reasoning_budget(chat, prompt)
        if self.log_prompts:
            self.logger.info("prompt", request_id=exchange.request_id, text=prompt.text)
        constraint = constrain(chat.answer, chat.tools, self.model_format, self.model_format.opening(prompt.text))
        grammar = None if constraint is None else constraint.spec
        sampling = replace(chat.sampling, grammar=grammar, budget=budget)
        requests = self._requests(chat, self._truncated(chat, prompt.token_ids), sampling, exchange.arrival)
        timeout_s = self._timeout(chat)
        if constraint is None:
            assemblers = self._assemblers(chat, prompt, {}, calls_only_at_start=False)
            generation = Generation(self.engine, requests, assemblers, self.metrics, timeout_s=timeout_s)
        else:
            types = await self._compile(constraint)
            assemblers = self._assemblers(chat, prompt, types, calls_only_at_start=constraint.calls_only_at_start)
            refuse = partial(invalid_grammar, constraint.path)
            generation = Generation(self.engine, requests, assemblers, self.metrics, timeout_s=timeout_s, refuse=refuse)
        self.running.add(generation)
        exchange.on_end.append(lambda: self._end(generation, exchange))
        self.metrics.queue_time.observe_since(exchange.arrival)
        exchange.facts["queue_seconds"] = round(time.monotonic() - exchange.arrival, 4)
        return generation

    def _timeout(self, chat: ChatRequest) -> float | None:
        given = [seconds for seconds in (chat.timeout_s, self.request_timeout_s) if seconds is not None]
        return min(given, default=None)

    def _truncated(self, chat: ChatRequest, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        keep = chat.truncate_prompt_tokens
        if keep is None:
            return token_ids
        if keep < 0:
            keep = max(self.engine.info.max_model_len - (chat.sampling.max_tokens or 1), 1)
        return token_ids[-keep:]

    async def _reasoning_budget(self, chat: ChatRequest, prompt: Prompt) -> tuple[Prompt, Budget | None]:
        """The prompt, and the budget that closes the reasoning; None for no budget.

        A budget requires that the model reasons, so the prompt then opens the reasoning.
        """
        form, opening = self.model_format.chat_format.reasoning, self.model_format.opening(prompt.text)
        if chat.max_reasoning_tokens is None or form is None or opening == "over":
            return prompt, None
        end = self.model_format.reasoning_end
        if end is None:
            raise unsupported(
                "max_reasoning_tokens",
                f"max_reasoning_tokens is not supported: {form.end} is not a single token of this model",
            )
        if opening == "free":
            prompt = await self.renderer.extend(prompt, f"{form.begin}\n")
        # The client's integer may be too large for the engine; no answer is longer than the context.
        return prompt, Budget(min(chat.max_reasoning_tokens, self.engine.info.max_model_len), (end,))

    async def _compile(self, constraint: AnswerConstraint) -> ParameterTypes:
        """Compiles the grammar of a request. Raises ApiError (400), which names the field that caused the failure."""
        for path, spec in constraint.unused_fields:
            try:
                await self.engine.compile(spec)
            except GrammarError as error:
                raise refused_grammar(path, error) from error
        try:
            return await self.engine.compile(constraint.spec)
        except GrammarError as error:
            raise await self._blamed(constraint, error) from error

    async def _blamed(self, constraint: AnswerConstraint, error: GrammarError) -> ApiError:
        is_unknown = error.place is None and len(constraint.fields) > 1
        for path, spec in constraint.fields if is_unknown else ():
            try:
                await self.engine.compile(spec)
            except GrammarError as own:
                return refused_grammar(path, own)
        return refused_grammar(constraint.path, error)

    def _end(self, generation: Generation, exchange: Exchange) -> None:
        self.running.discard(generation)
        generation.close()
        if generation.first_token_s is not None:
            exchange.facts["ttft_seconds"] = round(generation.first_token_s, 4)
        usage = generation.usage
        exchange.facts.update(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=",".join(generation.finish_reasons),
        )

    def _assemblers(
        self, chat: ChatRequest, prompt: Prompt, parameter_types: ParameterTypes, *, calls_only_at_start: bool
    ) -> list[OutputAssembler]:
        tools = None if chat.tools is None else chat.tools.type_schemas(parameter_types)
        options = ChoiceOptions(
            stops=chat.stop,
            include_stop=chat.include_stop,
            tags=self.model_format.tags(tools) if chat.skip_special_tokens else self.vocabulary.specials,
            include_reasoning=chat.include_reasoning,
            parallel_calls=chat.tools is None or chat.tools.parallel,
            token_ids=chat.return_token_ids,
            named=chat.tools is not None and chat.tools.mode == "named",
        )
        parsers = [
            self.model_format.parser(prompt.text, tools, calls_only_at_start=calls_only_at_start) for _ in range(chat.n)
        ]
        return [
            OutputAssembler(index, self.vocabulary, chat.sampling, parser, options)
            for index, parser in enumerate(parsers)
        ]

    def _requests(
        self, chat: ChatRequest, token_ids: NDArray[np.int32], sampling: SamplingParams, arrival: float
    ) -> list[Request]:
        self._check_context_length(chat, len(token_ids))
        if chat.bad_words:
            sampling = replace(sampling, forbidden=self.renderer.tokens_of_words(chat.bad_words))
        # Not the client's id: two clients may choose the same.
        base = uuid.uuid4().hex
        requests = [
            Request(
                id=f"{base}-{index}",
                token_ids=token_ids,
                sampling=_for_choice(sampling, index),
                cache_salt=chat.cache_salt,
                priority=chat.priority,
                arrival_time=arrival,
            )
            for index in range(chat.n)
        ]
        try:
            self.engine.check(requests[0])
        except RequestError as error:
            names = {"prompt": "messages", "max_tokens": chat.max_tokens_field, "forbidden": "bad_words"}
            param = names.get(error.field, error.field)
            message = str(error) if param in str(error) else f"{param}: {error}"
            raise ApiError(400, message, param=param, code="invalid_value") from error
        return requests

    def _check_context_length(self, chat: ChatRequest, num_tokens: int) -> None:
        context = self.engine.info.max_model_len
        if num_tokens >= context:
            # Some clients recognise these words of OpenAI's, and then shorten the conversation or change the model.
            raise ApiError(
                400,
                f"Input tokens exceed the configured limit: this model's maximum context length is {context} tokens, "
                f"of which at least one is for the answer, and the messages are {num_tokens} tokens long: shorten them",
                param="messages",
                code="context_length_exceeded",
            )
        most_tokens = context - num_tokens
        for name, value in (
            (chat.max_tokens_field, chat.sampling.max_tokens),
            ("min_tokens", chat.sampling.min_tokens),
        ):
            if value is not None and value > most_tokens:
                raise ApiError(
                    400,
                    f"{name} must be at most {most_tokens}, not {value}: the context holds {context} tokens, and the "
                    f"messages take {num_tokens}",
                    param=name,
                    code="context_length_exceeded",
                )


def _for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    if index == 0:
        return sampling
    # All choices have the same prompt: only the first one returns its log-probabilities.
    sampling = replace(sampling, prompt_logprobs=None)
    if sampling.seed is None:
        return sampling
    seed = sampling.seed + index
    return replace(sampling, seed=seed if seed <= INT64_MAX else seed - (1 << 64))

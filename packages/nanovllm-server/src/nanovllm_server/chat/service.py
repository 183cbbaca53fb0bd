"""Prepares chat completions for the engine. `Service` also holds what all HTTP routes need."""

import asyncio
import time
import uuid
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from nanovllm_core import Engine, GrammarError, ReasoningBudget, Request, RequestError, SamplingParams
from nanovllm_core.grammar_types import ParameterTypes
from nanovllm_server.chat.admission import AdmissionControl
from nanovllm_server.chat.generation import Generation
from nanovllm_server.chat.output_assembler import ChoiceOptions, OutputAssembler
from nanovllm_server.chat.prompt_transfer import HOST_FIELD, describe_prompt, find_prefix_peer
from nanovllm_server.chat.rendering import Prompt, Renderer
from nanovllm_server.constraint.answer_constraint import AnswerConstraint, constrain
from nanovllm_server.observability.http_exchange import HttpExchange
from nanovllm_server.observability.logs import Logger
from nanovllm_server.observability.metrics import Metrics
from nanovllm_server.parsing.detokenizing import TextVocabulary
from nanovllm_server.parsing.model_format import ModelFormat, ReasoningState
from nanovllm_server.protocol.bodies import KVTransferParams
from nanovllm_server.protocol.error import (
    ApiError,
    invalid_grammar,
    prompt_too_long,
    timed_out,
    unavailable,
    unsupported,
)
from nanovllm_server.protocol.json import describe_value
from nanovllm_server.protocol.request import ChatRequest, Limits, SamplingDefaults
from nanovllm_server.protocol.response import Clock
from nanovllm_server.protocol.schema import refused_grammar
from nanovllm_server.settings import TransferSettings

# The log shows this many unknown fields of a request, and this many characters of each field's name.
MAX_LOGGED_FIELDS = 20
MAX_LOGGED_NAME_LENGTH = 80
INT64_MAX = (1 << 63) - 1


@dataclass(slots=True)
class Service:
    """Prepares chat completions, and holds what all HTTP routes need.

    allowed_hosts: names that the Host header may have besides local and private names.
    allowed_origins: origins whose pages may read the server's answers.
    body_memory_bytes: maximum memory of all bodies of more than 64 KiB in this worker.
    defaults: values for sampling parameters that a request does not set.
    """

    engine: Engine
    renderer: Renderer
    vocabulary: TextVocabulary
    model_format: ModelFormat
    model_names: tuple[str, ...]
    admission: AdmissionControl
    metrics: Metrics
    logger: Logger
    api_keys: tuple[str, ...] = ()
    admin_api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 << 20
    body_memory_bytes: int = 32 << 20
    request_timeout_s: float | None = None
    log_prompts: bool = False
    allow_priority: bool = False
    transfer: TransferSettings = field(default_factory=TransferSettings)
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    clock: Clock = field(default_factory=Clock)
    running: set[Generation] = field(default_factory=set[Generation])

    @property
    def limits(self) -> Limits:
        """The limits of valid requests."""
        info = self.engine.info
        return Limits(info.max_model_len, info.vocab_size, self.admission.capacity)

    def engine_failure(self) -> str | None:
        """Returns why the engine is dead; None while the engine lives."""
        return None if self.engine.death_reason is None else f"the engine is dead: {self.engine.death_reason}"

    def unavailable_reason(self) -> str | None:
        """Returns why the server refuses requests; None if the server accepts requests."""
        return self.engine_failure() or self.admission.shutdown_reason

    def require_model(self, name: str) -> None:
        """Raises ApiError (404) if no served model has this name."""
        if name not in self.model_names:
            raise ApiError(
                404,
                f"the model {describe_value(name)} does not exist; this server has {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )

    async def start_generation(self, chat: ChatRequest, exchange: HttpExchange) -> Generation:
        """Admits a request and prepares its generation, which ends when `exchange` ends. Raises ApiError."""
        if chat.unknown_fields:
            fields = [name[:MAX_LOGGED_NAME_LENGTH] for name in chat.unknown_fields[:MAX_LOGGED_FIELDS]]
            self.logger.debug("unknown fields ignored", fields=fields, request_id=exchange.request_id)
        if chat.model is not None:
            self.require_model(chat.model)
        if (failure := self.engine_failure()) is not None:
            raise unavailable(failure, "engine_dead")
        if chat.tools is not None and not self.model_format.has_tool_calls:
            raise unsupported(
                "tools",
                "tools are not supported: the format of this model's tool calls is unknown; start the server with "
                "--tool-call-parser to name it",
            )
        if chat.priority and not self.allow_priority:
            raise unsupported(
                "priority",
                f"priority must be 0 or absent, not {chat.priority}: this server does not let clients set priorities; "
                "start the server with --allow-priority to allow them",
            )
        prefix_peer = find_prefix_peer(chat.transfer_params, self.transfer.role, self.engine.info)
        if prefix_peer:
            exchange.log_fields["prefix_peer"] = prefix_peer
        elif chat.transfer_params is not None and chat.transfer_params.do_remote_decode:
            exchange.log_fields["remote_decode"] = True
        exchange.on_end_callbacks.append(self.admission.admit(chat.n))
        tool_definitions = None if chat.tools is None else chat.tools.definitions
        max_prompt_tokens = self.engine.info.max_model_len if chat.truncate_prompt_tokens is None else None
        prompt = await self.renderer.render(
            chat.messages,
            tool_definitions,
            chat.template,
            max_tokens=max_prompt_tokens,
            num_body_bytes=chat.num_body_bytes,
        )
        prompt, reasoning_state, reasoning_budget = await self._prepare_reasoning(chat, prompt)
        if self.log_prompts:
            self.logger.info("prompt", request_id=exchange.request_id, text=prompt.text)
        constraint = constrain(chat.answer_rule, chat.tools, self.model_format, reasoning_state)
        grammar = None if constraint is None else constraint.spec
        sampling = replace(chat.sampling, grammar=grammar, reasoning_budget=reasoning_budget)
        if chat.bad_words:
            sampling = replace(sampling, forbidden_sequences=await self.renderer.encode_words(chat.bad_words))
        prediction_ids = await self._encode_prediction(chat)
        token_ids = self._truncate(chat, prompt.token_ids)
        requests = self._make_requests(chat, token_ids, prediction_ids, sampling, exchange, prefix_peer=prefix_peer)
        timeout_s = self._shortest_timeout(chat)
        parameter_types: ParameterTypes = {}
        make_grammar_error = GrammarError
        if constraint is not None:
            parameter_types = await self._compile_in_time(constraint, exchange.arrival, timeout_s)
            make_grammar_error = partial(invalid_grammar, constraint.path)
        assemblers = self._make_assemblers(
            chat,
            reasoning_state,
            parameter_types,
            calls_only_at_start=constraint is not None and constraint.calls_only_at_start,
        )
        generation = Generation(
            self.engine, requests, assemblers, self.metrics, timeout_s=timeout_s, make_grammar_error=make_grammar_error
        )
        self.running.add(generation)
        exchange.on_end_callbacks.append(lambda: self._finish(generation, exchange))
        exchange.log_fields["queue_seconds"] = round(time.monotonic() - exchange.arrival, 4)
        return generation

    def describe_prompt(self, chat: ChatRequest, response_id: str, num_tokens: int) -> KVTransferParams | None:
        """Returns where decode servers can fetch the prompt of a request; None if the request does not ask for this."""
        params, host = chat.transfer_params, self.transfer.advertised_host
        if params is None or not params.do_remote_decode or host is None:
            return None
        return describe_prompt(self.engine.info, host, response_id, num_tokens)

    def _shortest_timeout(self, chat: ChatRequest) -> float | None:
        limits = [seconds for seconds in (chat.timeout_s, self.request_timeout_s) if seconds is not None]
        return min(limits, default=None)

    def _truncate(self, chat: ChatRequest, token_ids: NDArray[np.int32]) -> NDArray[np.int32]:
        num_kept_tokens = chat.truncate_prompt_tokens
        if num_kept_tokens is None:
            return token_ids
        if num_kept_tokens < 0:
            num_kept_tokens = max(self.engine.info.max_model_len - (chat.sampling.max_tokens or 1), 1)
        return token_ids[-num_kept_tokens:]

    async def _encode_prediction(self, chat: ChatRequest) -> NDArray[np.int32]:
        if chat.prediction is None or self.engine.info.draft_method is None:
            return np.empty(0, np.int32)
        return await self.renderer.encode_prediction(chat.prediction, self.engine.info.max_model_len)

    async def _prepare_reasoning(
        self, chat: ChatRequest, prompt: Prompt
    ) -> tuple[Prompt, ReasoningState, ReasoningBudget | None]:
        """Returns (prompt, state at its end, budget or None). With a budget, the prompt ends within reasoning."""
        reasoning = self.model_format.chat_format.reasoning
        state = self.model_format.reasoning_state(prompt.text, prompt.continued_text)
        max_tokens, field_path = chat.reasoning.max_tokens, chat.reasoning.max_tokens_field
        if max_tokens is None or reasoning is None or state == "closed":
            return prompt, state, None
        end_id = self.model_format.reasoning_end_id
        if end_id is None:
            raise unsupported(
                field_path, f"{field_path} is not supported: {reasoning.end} is not a single token of this model"
            )
        if state == "undecided":
            prompt, state = await self.renderer.extend(prompt, f"{reasoning.begin}\n"), "open"
        # The client's integer may be too large for the engine.
        return prompt, state, ReasoningBudget(min(max_tokens, self.engine.info.max_model_len), (end_id,))

    async def _compile_in_time(
        self, constraint: AnswerConstraint, arrival: float, timeout_s: float | None
    ) -> ParameterTypes:
        """Calls `_compile`. Raises ApiError (504) `timeout_s` seconds after the request's arrival. None: no limit."""
        if timeout_s is None:
            return await self._compile(constraint)
        try:
            async with asyncio.timeout(arrival + timeout_s - time.monotonic()):
                return await self._compile(constraint)
        except TimeoutError as error:
            raise timed_out(timeout_s) from error

    async def _compile(self, constraint: AnswerConstraint) -> ParameterTypes:
        """Compiles the grammars of a request. Raises ApiError (400), which names the field at fault."""
        for path, spec in constraint.unused_grammars:
            try:
                await self.engine.compile_grammar(spec)
            except GrammarError as error:
                raise refused_grammar(path, error) from error
        try:
            return await self.engine.compile_grammar(constraint.spec)
        except GrammarError as error:
            raise await self._locate_grammar_error(constraint, error) from error

    async def _locate_grammar_error(self, constraint: AnswerConstraint, error: GrammarError) -> ApiError:
        """Makes the ApiError that names the field at fault.

        `error.place` names this field. If it is None, the first field whose own grammar does not compile is at fault.
        """
        is_field_unknown = error.place is None and len(constraint.field_grammars) > 1
        for path, spec in constraint.field_grammars if is_field_unknown else ():
            try:
                await self.engine.compile_grammar(spec)
            except GrammarError as field_error:
                return refused_grammar(path, field_error)
        return refused_grammar(constraint.path, error)

    def _finish(self, generation: Generation, exchange: HttpExchange) -> None:
        self.running.discard(generation)
        generation.close()
        if generation.first_token_s is not None:
            exchange.log_fields["ttft_seconds"] = round(generation.first_token_s, 4)
        usage = generation.usage
        exchange.log_fields.update(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=",".join(generation.finish_reasons),
        )

    def _make_assemblers(
        self,
        chat: ChatRequest,
        reasoning_state: ReasoningState,
        parameter_types: ParameterTypes,
        *,
        calls_only_at_start: bool,
    ) -> list[OutputAssembler]:
        tools = None if chat.tools is None else chat.tools.type_schemas(parameter_types)
        options = ChoiceOptions(
            stop_strings=chat.stop_strings,
            include_stop=chat.include_stop,
            tag_ids=self.model_format.tag_ids(tools) if chat.skip_special_tokens else self.vocabulary.special_ids,
            include_reasoning=chat.reasoning.is_included,
            allows_parallel_calls=chat.tools is None or chat.tools.allows_parallel_calls,
            include_token_ids=chat.return_token_ids,
            writes_token_ids=chat.writes_token_ids,
            is_call_required=chat.tools is not None and chat.tools.mode != "auto",
            is_function_named=chat.tools is not None and chat.tools.mode == "named",
        )
        make_parser = partial(
            self.model_format.make_parser,
            reasoning_state,
            tools,
            calls_only_at_start=calls_only_at_start,
            is_content_constrained=chat.answer_rule is not None,
        )
        return [
            OutputAssembler(index, self.vocabulary, chat.sampling, make_parser(), options) for index in range(chat.n)
        ]

    def _make_requests(
        self,
        chat: ChatRequest,
        token_ids: NDArray[np.int32],
        prediction_ids: NDArray[np.int32],
        sampling: SamplingParams,
        exchange: HttpExchange,
        *,
        prefix_peer: str,
    ) -> list[Request]:
        self._check_prompt_length(chat, len(token_ids))
        # Make a new id, because clients may use the same request id twice.
        id_prefix = uuid.uuid4().hex
        requests = [
            Request(
                id=f"{id_prefix}-{index}",
                token_ids=token_ids,
                sampling=_make_choice_sampling(sampling, index),
                # Clients with different API keys share no cached prompts: the salt begins with the key's digest.
                cache_salt=exchange.key_digest + chat.cache_salt,
                priority=chat.priority,
                arrival_time=exchange.arrival,
                prediction=prediction_ids,
                # The other choices start after the first choice's first token, and find the prompt in the prefix cache.
                prefix_peer=prefix_peer if index == 0 else "",
            )
            for index in range(chat.n)
        ]
        try:
            self.engine.check(requests[0])
        except RequestError as error:
            field_names = {
                "prompt": "messages",
                "max_tokens": chat.max_tokens_field,
                "forbidden_sequences": "bad_words",
                "prefix_peer": HOST_FIELD,
            }
            param = field_names.get(error.field, error.field)
            message = str(error) if param in str(error) else f"{param}: {error}"
            raise ApiError(400, message, param=param, code="invalid_value") from error
        return requests

    def _check_prompt_length(self, chat: ChatRequest, num_tokens: int) -> None:
        max_model_len = self.engine.info.max_model_len
        if num_tokens >= max_model_len:
            raise prompt_too_long(max_model_len, str(num_tokens))
        max_new_tokens = max_model_len - num_tokens
        for name, value in (
            (chat.max_tokens_field, chat.sampling.max_tokens),
            ("min_tokens", chat.sampling.min_tokens),
        ):
            if value is not None and value > max_new_tokens:
                raise ApiError(
                    400,
                    f"{name} must be at most {max_new_tokens}, not {value}: the context holds {max_model_len} tokens, "
                    f"and the messages take {num_tokens}",
                    param=name,
                    code="context_length_exceeded",
                )


def _make_choice_sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    if index == 0:
        return sampling
    # Only the first choice returns the log-probabilities of the common prompt.
    sampling = replace(sampling, prompt_logprobs=None)
    if sampling.seed is None:
        return sampling
    seed = sampling.seed + index
    return replace(sampling, seed=seed if seed <= INT64_MAX else seed - (1 << 64))

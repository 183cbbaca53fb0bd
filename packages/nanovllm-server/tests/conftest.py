"""Fixtures: the real server with a scripted engine."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
from contract import ObservedResponse, check_response
from hypercorn.typing import ASGIFramework
from numpy.typing import NDArray
from quart import Quart
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanovllm_core.engine.interface import Engine
from nanovllm_core.engine.status import EngineInfo
from nanovllm_core.errors import EngineDeadError, GrammarError
from nanovllm_core.grammar.schema_enforcement import convert_grammar
from nanovllm_core.grammar_types import GrammarSpec, ParameterTypes
from nanovllm_core.outputs import DraftTotals, PromptLogprobs, RequestFinish, StepOutputs, TokenLogprobs
from nanovllm_core.request import Request
from nanovllm_models import ChatFormat
from nanovllm_models.errors import TemplateError
from nanovllm_models.length_bound import find_length_bound
from nanovllm_models.token_bytes import BYTE_BY_CHARACTER
from nanovllm_server.chat.admission import AdmissionControl
from nanovllm_server.chat.rendering import Renderer
from nanovllm_server.chat.service import Service
from nanovllm_server.http import app as app_module
from nanovllm_server.http.app import create_app
from nanovllm_server.http.connections import serve
from nanovllm_server.observability.logs import configure_logs, get_logger
from nanovllm_server.observability.metrics import Metrics
from nanovllm_server.observability.shared_counters import SharedCounters, allocate_counters
from nanovllm_server.parsing.detokenizing import TextVocabulary
from nanovllm_server.parsing.model_format import ModelFormat
from nanovllm_server.processes.server import bind
from nanovllm_server.processes.worker import make_hypercorn_config

EOS = 259
VOCAB_SIZE = 320
MAX_MODEL_LEN = 512


def make_backend() -> Tokenizer:
    vocab = dict(BYTE_BY_CHARACTER)
    vocab["he"] = 256
    vocab["Ġt"] = 257
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "t")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    return tokenizer


@dataclass
class ScriptedTokenizer:
    backend: Tokenizer
    rendered: list[list[dict[str, Any]]] = field(default_factory=list)
    given: list[tuple[Any, Any]] = field(default_factory=list)
    turn_options: list[tuple[bool, bool, Any]] = field(default_factory=list)

    def encode(self, text: str, *, add_special_tokens: bool, max_cached_tokens: int | None = None) -> NDArray[np.int32]:
        return np.array(self.backend.encode(text, add_special_tokens=add_special_tokens).ids, np.int32)

    def min_num_tokens(self, text: str) -> int:
        bound = find_length_bound(self.backend)
        assert bound is not None
        return bound.min_num_tokens(text)

    def render_chat(
        self,
        messages,
        *,
        add_generation_prompt=True,
        continue_final_message=False,
        tools=None,
        documents=None,
        template_values=None,
    ) -> str:
        self.rendered.append(list(messages))
        self.given.append((tools, template_values))
        self.turn_options.append((add_generation_prompt, continue_final_message, documents))
        if any(message["role"] == "tool" for message in messages):
            raise TemplateError("this template has no tools")
        turns = "".join(f"<|start|>{message['role']}:{message['content']}" for message in messages)
        return turns + (template_values or {}).get("opening", "")


class ScriptedEngine(Engine):
    """Answers every request with the token ids `reply`. Each output has up to `burst` tokens.

    endless: repeats `reply` up to the request's max_tokens, also beyond the context. Without max_tokens, only an abort
        ends the answer.
    """

    def __init__(self) -> None:
        super().__init__(
            EngineInfo(
                model="scripted",
                device="cpu",
                dtype="float32",
                vocab_size=VOCAB_SIZE,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=4,
                max_num_batched_tokens=64,
                block_size=16,
                num_blocks=64,
                kv_cache_dtype="float32",
                kv_cache_bytes=1 << 20,
                prefix_caching=True,
                attention_backend="torch",
                supports_grammars=True,
            )
        )
        self.reply: list[int] = [*b"Hello"]
        self.burst = 1
        self.delay = 0.0
        self.num_cached_tokens = 8
        # Accepted and rejected drafts of each request.
        self.num_drafts = (0, 0)
        # Time at which all requests leave the queue. None: the time of a request's first token.
        self.scheduled_time: float | None = None
        self.endless = False
        self.crash: Exception | None = None
        self.compiling_s = 0.0
        # Error messages by texts in the source of a grammar.
        self.grammar_errors: dict[str, str] = {}
        self.compiled: list[GrammarSpec] = []
        self.num_compiling = 0
        self.num_resets = 0
        self.requests: list[Request] = []
        self.keys: list[int] = []
        self.aborted: list[int] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}

    @property
    def num_active(self) -> int:
        return len(self._tasks)

    def die(self, reason: str) -> None:
        self._die(reason)

    async def stop(self) -> None:
        self._die("stopped")

    def _submit(self, key: int, request: Request) -> None:
        if self.crash is not None:
            raise self.crash
        self.requests.append(request)
        self.keys.append(key)
        task = asyncio.get_running_loop().create_task(self._run(key, request))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def compile_grammar(self, spec: GrammarSpec) -> ParameterTypes:
        self.num_compiling += 1
        try:
            await asyncio.sleep(self.compiling_s)
        finally:
            self.num_compiling -= 1
        for text, reason in self.grammar_errors.items():
            if text in spec.source:
                raise GrammarError(reason)
        enforceable = convert_grammar(spec)
        self.compiled.append(spec)
        return enforceable.parameter_types

    def count_cached_tokens(self, request: Request) -> int:
        return self.num_cached_tokens

    async def reset_prefix_cache(self) -> None:
        if self.death_reason is not None:
            raise EngineDeadError(self.death_reason)
        self.num_resets += 1

    def refuse_grammar(self, key: int, reason: str) -> None:
        self._output_buffers.dispatch(StepOutputs(failures=[(key, reason)]))

    def _abort(self, key: int) -> None:
        self.aborted.append(key)
        if key in self._tasks:
            self._tasks[key].cancel()

    def _prompt_logprobs(self, key: int, request: Request) -> list[tuple[int, PromptLogprobs]]:
        """Each prompt token has rank 2. The likeliest token has the next id."""
        num_top = request.sampling.prompt_logprobs
        if num_top is None:
            return []
        tokens = request.prompt_ids[1:]
        top_ids = tokens[:, None] + np.array([1, 0, *range(2, 20)], np.int32)[:num_top]
        top_logprobs = np.broadcast_to(np.float32([-0.5, -1.5, *range(-3, -21, -1)])[:num_top], top_ids.shape)
        own_columns = np.full_like(tokens, -1.5, np.float32), np.full_like(tokens, 2)
        return [(key, PromptLogprobs(num_top, *(array.tobytes() for array in (*own_columns, top_ids, top_logprobs))))]

    async def _run(self, key: int, request: Request) -> None:
        sampling = request.sampling
        tokens = itertools.cycle(self.reply) if self.endless else iter([*self.reply, EOS])
        limit = sampling.max_tokens or (10**9 if self.endless else MAX_MODEL_LEN - request.num_prompt_tokens)
        num_cached_tokens = self.count_cached_tokens(request)
        num_generated = 0
        while num_generated < limit:
            if self.delay or num_generated % 50 == 49:
                await asyncio.sleep(self.delay)
            new_tokens = list(itertools.islice(tokens, min(self.burst, limit - num_generated)))
            num_generated += len(new_tokens)
            stop = next((token for token in new_tokens if token == EOS or token in sampling.stop_token_ids), None)
            if stop is not None:
                num_generated -= len(new_tokens) - new_tokens.index(stop) - 1
                new_tokens = new_tokens[: new_tokens.index(stop) + 1]
            reason = "stop" if stop is not None else "length" if num_generated >= limit else None
            num_top, scheduled_time = sampling.logprobs, self.scheduled_time or time.monotonic()
            self._output_buffers.dispatch(
                StepOutputs(
                    keys=[key] * len(new_tokens),
                    tokens=new_tokens,
                    logprobs=[]
                    if num_top is None
                    else [
                        (key, TokenLogprobs(-0.5, tuple((token + step, -0.5 - step) for step in range(num_top))))
                        for token in new_tokens
                    ],
                    starts=[(key, num_cached_tokens, scheduled_time)] if num_generated == len(new_tokens) else [],
                    finishes=[RequestFinish(key, reason, stop)] if reason is not None else [],
                    draft_totals=[DraftTotals(key, *self.num_drafts)],
                    prompt_logprobs=self._prompt_logprobs(key, request) if num_generated == len(new_tokens) else [],
                )
            )
            if reason is not None:
                return


@pytest.fixture(scope="session", autouse=True)
def logs() -> None:
    configure_logs("text", "error")


@pytest.fixture(scope="session")
def tokenizer_backend() -> Tokenizer:
    return make_backend()


@pytest.fixture(scope="session")
def vocabulary(tokenizer_backend: Tokenizer) -> TextVocabulary:
    return TextVocabulary(tokenizer_backend)


@pytest.fixture
async def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def tokenizer(tokenizer_backend: Tokenizer) -> ScriptedTokenizer:
    return ScriptedTokenizer(tokenizer_backend)


@pytest.fixture
def service(engine: ScriptedEngine, tokenizer: ScriptedTokenizer, vocabulary: TextVocabulary) -> Iterator[Service]:
    counters = SharedCounters(allocate_counters(1))
    service = Service(
        engine=engine,
        renderer=Renderer(tokenizer),
        vocabulary=vocabulary,
        model_format=ModelFormat(ChatFormat(None, None), vocabulary),
        model_names=("scripted", "alias"),
        admission=AdmissionControl(8, counters),
        metrics=Metrics("scripted", engine.info, lambda: engine.stats, counters),
        logger=get_logger("nanovllm"),
    )
    yield service
    service.renderer.close()


class ResponseRecorder:
    def __init__(self, app: ASGIFramework):
        self._app = app
        self.exchanges: list[ObservedResponse] = []

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, content_type, body, is_complete = 0, "", bytearray(), False

        async def send_and_record(event) -> None:
            nonlocal status, content_type, is_complete
            if event["type"] == "http.response.start":
                status = event["status"]
                content_type = dict(event["headers"]).get(b"content-type", b"").decode()
            elif event["type"] == "http.response.body":
                body.extend(event.get("body", b""))
                is_complete = not event.get("more_body", False)
            await send(event)

        try:
            await self._app(scope, receive, send_and_record)
        finally:
            if status:
                self.exchanges.append(
                    ObservedResponse(scope["method"], scope["path"], status, content_type, bytes(body), is_complete)
                )


@pytest.fixture(scope="session", autouse=True)
def cached_openapi_document() -> Iterator[None]:
    """Most of the time of `create_app` is the time to build the OpenAPI document."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "openapi_document", cache(app_module.openapi_document))
        yield


@pytest.fixture
def app(service: Service) -> Iterator[Quart]:
    app = create_app(service)
    recorder = ResponseRecorder(app.asgi_app)
    app.asgi_app = recorder
    yield app
    for exchange in recorder.exchanges:
        check_response(exchange)


@pytest.fixture
def client(app: Quart):
    return app.test_client()


@pytest.fixture
def post(client) -> Callable[..., Any]:
    async def post(headers: dict[str, str] | None = None, **fields: Any):
        body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await client.post("/v1/chat/completions", json=body, headers=headers)

    return post


@contextlib.asynccontextmanager
async def serve_on_socket(app: Quart, *, keep_alive_s: float = 75, write_timeout_s: float = 60) -> AsyncIterator[str]:
    (listener,) = bind("127.0.0.1", 0, 1)
    port = listener.getsockname()[1]
    config = make_hypercorn_config()
    config.graceful_timeout = 1
    config.keep_alive_timeout = keep_alive_s
    closing = asyncio.Event()
    task = asyncio.create_task(serve(app, listener, config, closing.wait, write_timeout_s=write_timeout_s))
    await asyncio.sleep(0)
    yield f"http://127.0.0.1:{port}"
    closing.set()
    async with asyncio.timeout(30):
        await task


@pytest.fixture
async def url(app: Quart) -> AsyncIterator[str]:
    async with serve_on_socket(app) as url:
        yield url


@pytest.fixture
def serve_at() -> Callable[..., contextlib.AbstractAsyncContextManager[str]]:
    return serve_on_socket

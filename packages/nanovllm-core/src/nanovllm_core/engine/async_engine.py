"""An engine whose loop runs in this process."""

import asyncio
import logging

from nanovllm_core.config import EngineConfig
from nanovllm_core.engine.build import build_loop
from nanovllm_core.engine.interface import Engine
from nanovllm_core.engine.loop import EngineLoop
from nanovllm_core.engine.status import EngineStats
from nanovllm_core.errors import EngineDeadError, GrammarError
from nanovllm_core.grammar_types import GrammarSpec, ParameterTypes
from nanovllm_core.model import ModelSpec
from nanovllm_core.outputs import StepOutputs
from nanovllm_core.request import Request

_log = logging.getLogger(__name__)


class AsyncEngine(Engine):
    """An engine in this process. `start` creates an engine."""

    def __init__(self, loop: EngineLoop):
        super().__init__(loop.info)
        self._loop = loop
        self._loop_task = asyncio.create_task(self._run())

    @classmethod
    async def start(cls, spec: ModelSpec, config: EngineConfig | None = None) -> "AsyncEngine":
        """Load the model and start the engine. Raises ConfigError and the exceptions of `spec.build`."""
        return cls(await build_loop(spec, config or EngineConfig()))

    async def compile_grammar(self, spec: GrammarSpec) -> ParameterTypes:
        """See `Engine.compile_grammar`."""
        if self.death_reason is not None:
            raise EngineDeadError(self.death_reason)
        try:
            return await self._loop.compile_grammar(spec)
        except GrammarError:
            # If the engine died during the compilation, the GrammarError is only a consequence of the death.
            if self.death_reason is not None:
                raise EngineDeadError(self.death_reason) from None
            raise

    async def reset_prefix_cache(self) -> None:
        """See `Engine.reset_prefix_cache`."""
        reset_task = asyncio.ensure_future(self._loop.reset_prefix_cache())
        await asyncio.wait((reset_task, self._loop_task), return_when=asyncio.FIRST_COMPLETED)
        if self.death_reason is not None:
            reset_task.cancel()
            raise EngineDeadError(self.death_reason)

    async def stop(self) -> None:
        """Stop once the steps in flight have finished. Open requests fail with EngineDeadError."""
        self._loop.stop()
        # If this call is cancelled, `wait` does not cancel the task.
        await asyncio.wait((self._loop_task,))

    async def _run(self) -> None:
        reason = "the engine was stopped"
        try:
            await self._loop.run(self._emit)
        except Exception as error:  # noqa: BLE001 (raised to all readers)
            _log.exception("the engine failed")
            reason = f"the engine failed: {type(error).__name__}: {error}"
        finally:
            self._die(reason)

    def _emit(self, outputs: StepOutputs, stats: EngineStats | None) -> None:
        if stats is not None:
            self.stats = stats
        self._output_buffers.dispatch(outputs)

    def _submit(self, key: int, request: Request) -> None:
        self._loop.submit(key, request)

    def _abort(self, key: int) -> None:
        self._loop.abort(key)

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nanovllm_models
from nanovllm_core.cache.memory import token_shape
from nanovllm_core.model import BuildContext, CausalLM, ForwardContext, MLASpec, ModelSpec, StateCache, StateSpec
from nanovllm_core.parallel import ParallelContext
from nanovllm_kernels.attention import plan_batch
from nanovllm_kernels.attention.mla import plan_latent_batch
from nanovllm_kernels.linear_attention import StateBatch, plan_states

BLOCK_SIZE = 16
# Request i has its recurrent state in slot i + 1, and its saved state in slot i + SAVED_SLOT_OFFSET.
SAVED_SLOT_OFFSET = 8
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class Session:
    """One model with one paged cache. saves: the position at which each request's state is saved."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 32,
        *,
        compiled: bool = False,
        uses_mtp: bool = False,
    ):
        build = BuildContext(torch.device("cpu"), dtype, ParallelContext(), compiled, uses_mtp)
        self.model: CausalLM = spec.build(build)
        self._free_blocks = list(range(num_blocks))
        specs = self.model.cache_specs()
        self._paged = [spec for spec in specs if not isinstance(spec, StateSpec)]
        self._caches = tuple(
            torch.full((num_blocks, BLOCK_SIZE, *token_shape(spec)), torch.nan, dtype=dtype) for spec in self._paged
        )
        self._state_caches = tuple(
            StateCache(
                torch.full((2 * SAVED_SLOT_OFFSET, *spec.recurrent), torch.nan),
                torch.full((2 * SAVED_SLOT_OFFSET, *spec.conv_inputs), torch.nan, dtype=dtype),
            )
            for spec in specs
            if isinstance(spec, StateSpec)
        )
        self.saves: dict[int, int] = {}
        self._blocks: list[list[int]] = []
        self._lengths: list[int] = []

    @torch.inference_mode()
    def step(self, tokens: list[list[int]]) -> list[Tensor]:
        """Return the logits of each request's new tokens. Requests with one token must come first."""
        hidden, *_ = self._forward(tokens)
        return list(self.model.compute_logits(hidden).split([len(new_tokens) for new_tokens in tokens]))

    @torch.inference_mode()
    def predict(self, tokens: list[list[int]], next_tokens: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        """Return states and logits of the MTP head for each request. next_tokens: input tokens of the head."""
        hidden, positions, ctx = self._forward(tokens)
        head = self.model.mtp_head()
        ids = torch.tensor([token for request in next_tokens for token in request], dtype=torch.int32)
        hidden = head.forward(ids, positions, hidden, ctx)
        counts = [len(new_tokens) for new_tokens in tokens]
        return list(zip(hidden.split(counts), head.compute_logits(hidden).split(counts), strict=True))

    def _forward(self, tokens: list[list[int]]) -> tuple[Tensor, Tensor, ForwardContext]:
        while len(self._lengths) < len(tokens):
            self._blocks.append([])
            self._lengths.append(0)
        positions, slots = [], []
        for request, new_tokens in enumerate(tokens):
            for position in range(self._lengths[request], self._lengths[request] + len(new_tokens)):
                if position % BLOCK_SIZE == 0:
                    self._blocks[request].append(self._free_blocks.pop())
                positions.append(position)
                slots.append(self._blocks[request][-1] * BLOCK_SIZE + position % BLOCK_SIZE)
            self._lengths[request] += len(new_tokens)
        width = max(len(blocks) for blocks in self._blocks)
        counts = [len(new_tokens) for new_tokens in tokens]
        spec = self._paged[0]
        plan = plan_latent_batch if isinstance(spec, MLASpec) else plan_batch
        attention = plan(
            torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in self._blocks], dtype=torch.int32),
            torch.tensor(self._lengths, dtype=torch.int32),
            torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            num_decodes=counts.count(1),
            max_query_len=max(counts),
            max_seq_len=max(self._lengths),
            num_heads=spec.num_heads,
            kv_cache=self._caches[0],
            backend="torch",
        )
        state_batch = self._plan_states(counts) if self._state_caches else None
        ctx = ForwardContext(
            attention, torch.tensor(slots), self._caches, state_caches=self._state_caches, state_batch=state_batch
        )
        ids = torch.tensor([token for new_tokens in tokens for token in new_tokens], dtype=torch.int32)
        return self.model.forward(ids, torch.tensor(positions), ctx), torch.tensor(positions), ctx

    def _plan_states(self, counts: list[int]) -> StateBatch:
        requests = range(len(counts))
        return plan_states(
            torch.tensor([request + 1 for request in requests], dtype=torch.int32),
            torch.tensor(
                [[(self.saves.get(request, 0), SAVED_SLOT_OFFSET + request)] for request in requests], dtype=torch.int32
            ),
            torch.tensor(self._lengths, dtype=torch.int32),
            torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
            num_decodes=counts.count(1),
            max_query_len=max(counts),
            num_tokens=sum(counts),
            backend="torch",
        )

    def rewind(self, request: int) -> None:
        length = self.saves[request]
        self._lengths[request] = length
        num_kept_blocks = -(-length // BLOCK_SIZE)
        self._free_blocks.extend(self._blocks[request][num_kept_blocks:])
        del self._blocks[request][num_kept_blocks:]
        for cache in self._state_caches:
            for states in cache:
                states[request + 1] = states[SAVED_SLOT_OFFSET + request]


@pytest.fixture
def session_class() -> type[Session]:
    return Session


@pytest.fixture
def write_config(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes config.json and returns its directory. A change to None removes a field."""

    def write(**changes: object) -> Path:
        fields = {name: value for name, value in (TINY | changes).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return tmp_path

    return write


@pytest.fixture(scope="session")
def default_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOVLLM_CACHE", str(tmp_path_factory.mktemp("cache")))
        return nanovllm_models.default_model_path(show_progress=False)

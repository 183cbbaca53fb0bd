"""The toy model with a recurrent layer after its attention, and an oracle without cached states."""

import torch
from torch import Tensor
from torch.nn import functional
from toy_model import EOS, HIDDEN, LONGEST, VOCAB, ToyLM, dense_hidden

from nanovllm_core import BuildContext, CacheSpec, ForwardContext, ModelSpec, ParallelContext, StateSpec
from nanovllm_kernels.linear_attention import DeltaWeights, gated_delta_net, plan_states

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS, EPS = 2, 4, 8, 16, 4, 1e-6
PER_KEY_HEAD = 2 * KEY_DIM + VALUE_HEADS // KEY_HEADS * VALUE_DIM
CHANNELS = KEY_HEADS * PER_KEY_HEAD
VALUES = VALUE_HEADS * VALUE_DIM


class RecurrentLM(ToyLM):
    def __init__(self, build: BuildContext):
        super().__init__(build)
        generator = torch.Generator().manual_seed(1)

        def normal(std: float, *shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) * std).to(build.device)

        self.delta = DeltaWeights(
            conv=normal(0.5, TAPS, CHANNELS),
            decay_rate=normal(1.0, VALUE_HEADS).abs() * 0.1,
            dt_bias=normal(0.5, VALUE_HEADS),
            norm=1 + normal(0.1, VALUE_DIM),
            eps=EPS,
        )
        self.qkvz, self.ba = normal(0.2, CHANNELS + VALUES, HIDDEN), normal(0.2, 2 * VALUE_HEADS, HIDDEN)
        self.out = normal(0.3, HIDDEN, VALUES)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        x = super().forward(input_ids, positions, ctx)
        (cache,) = ctx.state_caches
        qkvz, ba = functional.linear(x, self.qkvz), functional.linear(x, self.ba)
        delta_output = gated_delta_net(qkvz, ba, self.delta, cache.recurrent, cache.conv_inputs, ctx.state_batch)
        return x + functional.linear(delta_output, self.out)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return *super().cache_specs(), StateSpec((VALUE_HEADS, VALUE_DIM, KEY_DIM), (TAPS, CHANNELS))


def build_recurrent(build: BuildContext) -> RecurrentLM:
    with torch.inference_mode():
        return RecurrentLM(build)


def recurrent_spec() -> ModelSpec:
    return ModelSpec("recurrent", VOCAB, LONGEST, (EOS,), torch.float32, build_recurrent)


class Oracle:
    def __init__(self):
        self._model = build_recurrent(BuildContext(torch.device("cpu"), torch.float32, ParallelContext()))

    @torch.inference_mode()
    def __call__(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(int(self._logits(tokens).argmax()))
        return tokens[len(prompt) :]

    def _logits(self, tokens: list[int]) -> Tensor:
        model, count = self._model, len(tokens)
        x = dense_hidden(model, tokens, fp8_cache=False)
        batch = plan_states(
            torch.tensor([1], dtype=torch.int32),
            torch.zeros((1, 1, 2), dtype=torch.int32),
            torch.tensor([count], dtype=torch.int32),
            torch.tensor([0, count], dtype=torch.int32),
            num_decodes=int(count == 1),
            max_query_len=count,
            num_tokens=count,
            backend="torch",
        )
        spec = model.cache_specs()[-1]
        states = [torch.full((2, *shape), torch.nan) for shape in spec]
        qkvz, ba = functional.linear(x, model.qkvz), functional.linear(x, model.ba)
        delta_output = gated_delta_net(qkvz, ba, model.delta, *states, batch)
        return functional.linear(x[-1] + functional.linear(delta_output[-1], model.out), model.head.weight)

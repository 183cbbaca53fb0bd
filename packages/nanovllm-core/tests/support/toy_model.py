"""A toy model of two layers, and an oracle that computes its logits without a cache, blocks or batches."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanovllm_core import BuildContext, CacheSpec, ForwardContext, ModelSpec, ParallelContext, Vocabulary
from nanovllm_core.layers.attention import HeadLayout, attend, qkv_parts
from nanovllm_core.layers.embedding import LMHead, VocabEmbedding
from nanovllm_core.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.rotary import RotaryConfig, RotaryEmbedding
from nanovllm_core.layers.weights import load_weights

VOCAB, HIDDEN, LONGEST, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 97, 64, 256, 4, 2, 16, 2
# Context of the kind "long", whose longest requests do not end within a test.
LONG_CONTEXT = 1 << 16
EOS = 5
# Words that grammars contain, as tokens.
WORDS = (b'{"', b'": ', b'", "', b"true", b"null", b"  ", b"ab", b"</t", b"hink>", b"\xc3", b"\xa9")


def toy_vocabulary() -> Vocabulary:
    characters = [bytes([code]) for code in (10, *range(32, 127)) if chr(code) not in "`^~|$%&;@#="]
    texts = [*WORDS, *characters]
    return Vocabulary([*texts[:EOS], b"", *texts[EOS:]], (EOS,))


class ToyLayer(nn.Module):
    def __init__(self, build: BuildContext, kv_heads: int):
        super().__init__()
        self.norm = RMSNorm(HIDDEN, 1e-6, build)
        build = build.for_attention()
        self.qkv_proj = ColumnParallelLinear(HIDDEN, qkv_parts(HEADS, kv_heads, HEAD_DIM, bias=False), build)
        self.o_proj = RowParallelLinear(HEADS * HEAD_DIM, HIDDEN, build)


def toy_weights(num_layers: int, kv_heads: int) -> Iterator[tuple[str, Tensor]]:
    """The weights are large, so that the next token depends on attention to all tokens."""
    generator = torch.Generator().manual_seed(0)

    def normal(std: float, *shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    yield "embed.weight", normal(1.0, VOCAB, HIDDEN)
    yield "head.weight", normal(0.1, VOCAB, HIDDEN)
    for index in range(num_layers):
        yield f"layers.{index}.norm.weight", torch.ones(HIDDEN)
        yield f"layers.{index}.q_proj.weight", normal(0.2, HEADS * HEAD_DIM, HIDDEN)
        yield f"layers.{index}.k_proj.weight", normal(0.2, kv_heads * HEAD_DIM, HIDDEN)
        yield f"layers.{index}.v_proj.weight", normal(0.2, kv_heads * HEAD_DIM, HIDDEN)
        yield f"layers.{index}.o_proj.weight", normal(0.3, HIDDEN, HEADS * HEAD_DIM)


class ToyLM(nn.Module):
    num_layers, kv_heads, max_position = LAYERS, KV_HEADS, LONGEST

    def __init__(self, build: BuildContext):
        super().__init__()
        self.parallel = build.parallel
        self.heads = HeadLayout.for_rank(HEADS, self.kv_heads, HEAD_DIM, build.for_attention().parallel)
        self.embed = VocabEmbedding(VOCAB, HIDDEN, build)
        self.layers = nn.ModuleList(ToyLayer(build, self.kv_heads) for _ in range(self.num_layers))
        self.head = LMHead(VOCAB, HIDDEN, build)
        self.rotary = RotaryEmbedding(RotaryConfig(theta=100.0), HEAD_DIM, self.max_position, build.device)
        load_weights(self, toy_weights(self.num_layers, self.kv_heads))

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        rotation = self.rotary.plan(positions)
        stream = ResidualStream(self.embed(input_ids))
        for index, layer in enumerate(self.layers):
            x, rows, norm = layer.norm.add_partials(stream)
            qkv = self.heads.view_heads(layer.qkv_proj(rows, norm))
            stream = layer.o_proj(attend(qkv, rotation, ctx, index), ResidualStream(x))
        return stream.complete(self.parallel)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return (self.heads.cache_spec,) * self.num_layers


class SmallLM(ToyLM):
    num_layers, kv_heads = 1, 4


class LongLM(ToyLM):
    max_position = LONG_CONTEXT


class HeadedLM(ToyLM):
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return (self.heads.cache_spec,) * (self.num_layers + 1)

    def mtp_head(self) -> "ToyHead":
        return ToyHead(self)


class ToyHead:
    def __init__(self, model: ToyLM):
        self.model = model
        self.compute_logits = model.compute_logits

    def forward(self, input_ids: Tensor, positions: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        model, layer = self.model, self.model.layers[0]
        x, rows, norm = layer.norm.add_partials(ResidualStream(model.embed(input_ids) + 0.1 * hidden))
        qkv = model.heads.view_heads(layer.qkv_proj(rows, norm))
        attended = attend(qkv, model.rotary.plan(positions), ctx, model.num_layers)
        return layer.o_proj(attended, ResidualStream(x)).complete(model.parallel)


class FailingLM(ToyLM):
    POISON = 96

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        if bool(((input_ids == self.POISON) & (positions == 0)).any()):
            raise RuntimeError("a poisoned token")
        return super().forward(input_ids, positions, ctx)


class DisagreeingLM(ToyLM):
    TRIGGER = 95

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        hidden = super().forward(input_ids, positions, ctx)
        is_triggered = ((input_ids == self.TRIGGER) & (positions == 0)).any()
        return hidden + 1e-6 * self.parallel.rank * is_triggered


class FailingRankLM(ToyLM):
    TRIGGER = 94

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        if self.parallel.rank == 1 and bool(((input_ids == self.TRIGGER) & (positions == 0)).any()):
            # The report does not fit into the buffer of a pipe.
            raise ValueError("a wrong value " * 10_000)
        return super().forward(input_ids, positions, ctx)


def refuse(build: BuildContext) -> ToyLM:
    raise ValueError("this model can't be built")


BUILDERS = {
    "toy": ToyLM,
    "small": SmallLM,
    "long": LongLM,
    "headed": HeadedLM,
    "failing": FailingLM,
    "disagreeing": DisagreeingLM,
    "failing rank": FailingRankLM,
    "refusing": refuse,
}


def build_toy(kind: str, build: BuildContext) -> ToyLM:
    with torch.inference_mode():
        return BUILDERS[kind](build)


def toy_spec(kind: str = "toy") -> ModelSpec:
    return ModelSpec(
        name="toy",
        vocab_size=VOCAB,
        max_position=LONG_CONTEXT if kind == "long" else LONGEST,
        eos_token_ids=(EOS,),
        dtype=torch.float32,
        build=partial(build_toy, kind),
        vocabulary=toy_vocabulary,
    )


def in_fp8(heads: Tensor) -> Tensor:
    """Round heads [T, n, D] like an FP8 cache: to e4m3, with one power of two as scale per token and head."""
    scales = 2 ** (heads.double().abs().amax(-1, keepdim=True) / 448).log2().ceil()
    return ((heads / scales).to(torch.float8_e4m3fn).double() * scales).float()


def dense_logits(model: ToyLM, tokens: list[int], *, fp8_cache: bool) -> Tensor:
    return functional.linear(dense_hidden(model, tokens, fp8_cache=fp8_cache), model.head.weight)


def dense_hidden(model: ToyLM, tokens: list[int], *, fp8_cache: bool) -> Tensor:
    x = model.embed.weight[torch.tensor(tokens)]
    angles = torch.arange(len(tokens))[:, None] / 100.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(vectors: Tensor) -> Tensor:
        first, second = vectors.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    for layer in model.layers:
        normed = functional.rms_norm(x, (HIDDEN,), layer.norm.weight, 1e-6)
        qkv = functional.linear(normed, layer.qkv_proj.weight.data).view(len(tokens), -1, HEAD_DIM)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        k = rotate(k)
        if fp8_cache:
            k, v = in_fp8(k), in_fp8(v)
        q, k, v = (t.transpose(0, 1) for t in (rotate(q), k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + functional.linear(out.transpose(0, 1).reshape(len(tokens), -1), layer.o_proj.weight.data)
    return x


def make_oracle(*, fp8_cache: bool = False) -> Callable[[list[int], int], list[int]]:
    model = build_toy("toy", BuildContext(torch.device("cpu"), torch.float32, ParallelContext()))

    def generate(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(dense_logits(model, tokens, fp8_cache=fp8_cache)[-1].argmax()))
        return tokens[len(prompt) :]

    return generate


def make_prompt_oracle() -> Callable[[list[int]], Tensor]:
    """Returns a function from n prompt tokens to log-probabilities [n - 1, vocab]: row i is for prompt token i + 1."""
    model = build_toy("toy", BuildContext(torch.device("cpu"), torch.float32, ParallelContext()))
    return lambda prompt: dense_logits(model, prompt, fp8_cache=False)[:-1].log_softmax(-1)

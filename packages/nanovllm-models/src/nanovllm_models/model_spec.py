"""Code that all families share: makes the output head of a model, and the ModelSpec of a checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from nanovllm_core.layers.embedding import LMHead
from nanovllm_core.model import BuildContext, CausalLM, ForwardContext, ModelSpec
from nanovllm_models.config_file import parse_dtype, parse_eos_token_ids
from nanovllm_models.fields import JsonFields
from nanovllm_models.vocabulary import read_vocabulary


class SizedConfig(Protocol):
    """The fields that every family's config has."""

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        ...

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state."""
        ...

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the output head uses the table of the token embedding."""
        ...

    @property
    def max_position(self) -> int:
        """Maximum length of a sequence, in tokens."""
        ...


class DecoderWithHead(nn.Module):
    """A decoder and its output head. A subclass adds `cache_specs` to implement `nanovllm_core.model.CausalLM`.

    model: the decoder, with the token embedding as attribute `embed_tokens`.
    """

    def __init__(self, model: nn.Module, config: SizedConfig, build: BuildContext):
        super().__init__()
        self.model = model
        tied_embedding = model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, build, tied_embedding)

    def forward(self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden states [T, hidden] of the T tokens of a step."""
        return self.model.forward(input_ids, positions, ctx)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits, float32 [n, vocab_size], of hidden states [n, hidden]."""
        return self.lm_head.forward(hidden)


def make_model_spec(
    path: Path, fields: JsonFields, config: SizedConfig, name: str, build: Callable[[BuildContext], CausalLM]
) -> ModelSpec:
    """Return the spec of the checkpoint in `path`. Raises ModelError.

    fields: fields of config.json. config: the family's config, parsed from `fields`.
    build: builds the model; must be picklable.
    """
    eos_token_ids = parse_eos_token_ids(path, fields, config.vocab_size)
    return ModelSpec(
        name=name,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        eos_token_ids=eos_token_ids,
        dtype=parse_dtype(fields),
        build=build,
        vocabulary=partial(read_vocabulary, path, eos_token_ids),
    )

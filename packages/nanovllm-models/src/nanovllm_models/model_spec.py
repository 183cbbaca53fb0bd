"""Makes a checkpoint's ModelSpec from fields that all families share."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from nanovllm_core.model import BuildContext, CausalLM, ModelSpec
from nanovllm_models.config_file import parse_dtype, parse_eos_token_ids
from nanovllm_models.fields import JsonFields
from nanovllm_models.vocabulary import read_vocabulary


class SizedConfig(Protocol):
    """The fields of a family's config that a spec needs."""

    @property
    def vocab_size(self) -> int:
        """Number of logits per token."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """Maximum length of a sequence, in tokens."""
        ...


def make_model_spec(
    path: Path, fields: JsonFields, config: SizedConfig, name: str, build: Callable[[BuildContext], CausalLM]
) -> ModelSpec:
    """Return the spec of the checkpoint in `path`. Raises ModelError.

    fields: fields of config.json.
    config: the family's config, parsed from `fields`.
    name: name of the model.
    build: builds the model; must be picklable.
    """
    eos_token_ids = parse_eos_token_ids(path, fields)
    return ModelSpec(
        name=name,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        eos_token_ids=eos_token_ids,
        dtype=parse_dtype(fields),
        build=build,
        vocabulary=partial(read_vocabulary, path, eos_token_ids),
    )

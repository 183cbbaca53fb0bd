"""Makes the ModelSpec of a model directory, using the family (such as `llama`) that implements its architecture."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch

from nanovllm_core.model import BuildContext, CausalLM, ModelSpec
from nanovllm_models import deepseek_v3, llama, minimax_m2, qwen2, qwen3, qwen3_moe, qwen3_next
from nanovllm_models.checkpoint import RandomWeights, WeightSource, find_checkpoint
from nanovllm_models.default_model import is_default_model
from nanovllm_models.errors import ModelError
from nanovllm_models.fields import JsonFields, read_fields
from nanovllm_models.hub import ModelDirectory, check_has_config
from nanovllm_models.vocabulary import check_same_tokens

LoadFormat = Literal["auto", "dummy"]


class SpecBuilder(Protocol):
    """A family's function that makes the ModelSpec of a directory."""

    def __call__(self, path: Path, fields: JsonFields, *, name: str, weights: WeightSource) -> ModelSpec:
        """Return the spec of the checkpoint in `path`, whose config.json is `fields`. Raises ModelError."""
        ...


# Maps a name in the field `architectures` of config.json to the function of its family.
FAMILIES: dict[str, SpecBuilder] = {
    "LlamaForCausalLM": llama.build_spec,
    "Qwen2ForCausalLM": qwen2.build_spec,
    "Qwen3ForCausalLM": qwen3.build_spec,
    "Qwen3MoeForCausalLM": qwen3_moe.build_spec,
    "Qwen3NextForCausalLM": qwen3_next.build_spec,
    "MiniMaxM2ForCausalLM": minimax_m2.build_spec,
    "DeepseekV3ForCausalLM": deepseek_v3.build_spec,
}


def load(
    path: Path | str,
    *,
    load_format: LoadFormat = "auto",
    seed: int = 0,
    served_name: str | None = None,
    show_progress: bool | None = None,
    draft: ModelDirectory | None = None,
) -> ModelSpec:
    """Return the spec of the model in a Hugging Face directory, without reading the weights.

    Raises ModelError if the directory holds no supported model, or if the draft model has other tokens.

    load_format: "dummy" makes random weights; the directory then needs only config.json.
    served_name: name of the model; None for the directory's name.
    show_progress: whether to show a progress bar while weights are read; None: show it if stderr is a terminal.
    draft: the draft model for speculative decoding, loaded like the model; None for no draft model.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelError(
            f"{path} is not a directory: pass a directory with config.json and safetensors files; `find_model` "
            "downloads repositories of the Hugging Face Hub"
        )
    check_has_config(path)
    fields = read_fields(path / "config.json")
    architectures = fields.texts("architectures")
    supported = f"supported: {', '.join(FAMILIES)}"
    if not architectures:
        raise ModelError(f"{fields.source} names no architecture ({supported})")
    build_spec = FAMILIES.get(architectures[0])
    if build_spec is None:
        raise ModelError(f"architecture {architectures[0]} of {fields.source} is not supported ({supported})")
    weights = RandomWeights(seed) if load_format == "dummy" else find_checkpoint(path, show_progress)
    spec = build_spec(path, fields, name=served_name or path.resolve().name, weights=weights)
    spec = replace(spec, fingerprint=_make_fingerprint(path, load_format, seed))
    # The default model's two largest logits often differ by only 0.1. Rounding changes a logit by 0.06 in bf16 and by
    # 0.008 in float16. float16 does not overflow: the residual stream is float32, and other values are at most 24,900.
    spec = replace(spec, cuda_dtype=torch.float16) if is_default_model(path) else spec
    if draft is None:
        return spec
    draft_spec = load(
        draft.path, load_format=load_format, seed=seed, served_name=draft.name, show_progress=show_progress
    )
    # If the vocabulary sizes differ, the engine raises the error.
    if draft_spec.vocab_size == spec.vocab_size:
        check_same_tokens(path, draft.path)
    return replace(spec, draft=replace(draft_spec, build=partial(_build_draft, draft_spec)))


def _build_draft(spec: ModelSpec, context: BuildContext) -> CausalLM:
    try:
        return spec.build(context)
    except ValueError as error:
        raise ModelError(f"the draft model {spec.name} can't be built: {error}") from error


# Number and size of the pieces of each weight file from which the fingerprint is computed.
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096


def _make_fingerprint(path: Path, load_format: LoadFormat, seed: int) -> str:
    """Return text that identifies a config and samples of the weights. Equal copies of a model give equal text."""
    config = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    if load_format == "dummy":
        return f"{config} random {seed}"
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        try:
            digest.update(f"{file.name} {file.stat().st_size} ".encode())
            _sample_file(file, digest.update)
        except OSError as error:
            raise ModelError(f"can't read {file}: {error.strerror}") from error
    return f"{config} {digest.hexdigest()}"


def _sample_file(path: Path, update: Callable[[bytes], None]) -> None:
    """Pass evenly spaced pieces of a file to `update`."""
    with path.open("rb") as file:
        num_bytes = file.seek(0, os.SEEK_END)
        for index in range(_NUM_SAMPLES):
            file.seek(index * max(num_bytes - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1))
            update(file.read(_SAMPLE_BYTES))

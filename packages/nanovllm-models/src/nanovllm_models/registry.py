"""From a model directory to a ModelSpec: which family reads which architecture.

This room must not know what any family does.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import torch

from nanovllm_core.model import ModelSpec
from nanovllm_models import deepseek_v3, llama, minimax_m2, qwen2, qwen3, qwen3_moe, qwen3_next
from nanovllm_models.checkpoint import RandomWeights, WeightSource, find_checkpoint
from nanovllm_models.default_model import is_default_model
from nanovllm_models.errors import ModelError
from nanovllm_models.fields import Fields, read_fields

LoadFormat = Literal["auto", "dummy"]


class BuildSpec(Protocol):
    """What every family offers: the ModelSpec of a directory and its config.json. Raises ModelError."""

    def __call__(self, path: Path, fields: Fields, *, name: str, weights: WeightSource) -> ModelSpec:
        """Make the spec."""
        ...


FAMILIES: dict[str, BuildSpec] = {
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
    progress: bool | None = None,
) -> ModelSpec:
    """The spec of the model in a directory, as Hugging Face lays it out; weights are read when the spec is built.

    load_format: "dummy" draws random weights from `seed`, for which config.json suffices.
    served_name: what the model is called; by default the directory's name.
    progress: show a bar while weights are read; by default when stderr is a terminal.
    Raises ModelError, of one line, when there is no such model or none that is supported.
    """
    path = Path(path)
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory: a model is given as a directory with config.json and safetensors")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json: it is not a Hugging Face model directory")
    fields = read_fields(path / "config.json")
    architectures = fields.texts("architectures")
    supported = f"supported: {', '.join(FAMILIES)}"
    if not architectures:
        raise ModelError(f"{fields.where} names no architecture ({supported})")
    family = FAMILIES.get(architectures[0])
    if family is None:
        raise ModelError(f"architecture {architectures[0]} of {fields.where} is not supported ({supported})")
    weights = RandomWeights(seed) if load_format == "dummy" else find_checkpoint(path, progress)
    spec = family(path, fields, name=served_name or path.resolve().name, weights=weights)
    # So small a model's words hang on little: of the capital of France it says "The" rather than "L'Étoile" by 0.1 in
    # the logits, where bf16 errs by 0.06 and float16 by 0.008. float16 ends at 65,504; outside its residual stream,
    # which is float32 there, this model's largest number is 24,900 (of a chat's first token, in a feed-forward layer).
    return replace(spec, cuda_dtype=torch.float16) if is_default_model(path) else spec

"""What tests across packages share: devices, the default model, and transformers' answers to the same prompts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanovllm_models import default_model_path

Generate = Callable[[PreTrainedModel, list[int], int], list[int]]


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


@pytest.fixture(scope="session")
def default_model() -> Path:
    return default_model_path(progress=False)


@pytest.fixture(scope="session")
def load_reference() -> Callable[[Path, torch.dtype, str], PreTrainedModel]:
    def load(path: Path, dtype: torch.dtype, device: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).to(device).eval()

    return load


@pytest.fixture(scope="session")
def reference_generate() -> Generate:
    """Greedy tokens by transformers' own loop, alone in its batch; only the length ends it."""

    def generate(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
        ids = torch.tensor([prompt], device=model.device)
        model.generation_config.eos_token_id = None
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
            )
        return output[0, len(prompt) :].tolist()

    return generate

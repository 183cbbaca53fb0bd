from dataclasses import replace

import pytest
import torch
from toy_model import ToyLM, toy_spec

from nanovllm_core.config import EngineConfig
from nanovllm_core.config_resolution import resolve
from nanovllm_core.execution.runner import start_runner
from nanovllm_core.model import MLASpec


class MixedAttentionLM(ToyLM):
    def cache_specs(self):
        return self.heads.cache_spec, MLASpec(latent_dim=32, rope_dim=8, num_heads=4)


class MixedHeadDimLM(ToyLM):
    def cache_specs(self):
        return self.heads.cache_spec, self.heads.cache_spec._replace(head_dim=32)


@pytest.mark.parametrize("build", [MixedAttentionLM, MixedHeadDimLM])
def test_different_attention_layers_are_refused(build):
    spec = replace(toy_spec(), build=build)
    config = resolve(EngineConfig(device="cpu"), max_position=64, model_dtype=torch.float32, has_cuda=False)
    with pytest.raises(ValueError, match=r"gives both PagedSpec\(.* attention layers of a model must be alike"):
        start_runner(spec, config)

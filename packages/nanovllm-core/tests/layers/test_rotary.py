import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from nanovllm_core.layers.rotary import Llama3Scaling, RotaryConfig, YarnScaling, rotary_table, yarn_mscale

CPU = torch.device("cpu")


def test_the_table_holds_cosines_then_sines_of_the_angles():
    table = rotary_table(RotaryConfig(theta=100.0), 4, 50, CPU)
    assert table.shape == (50, 4)
    assert table.dtype == torch.float32
    for position in (0, 1, 49):
        # theta ** -(0 / 4) and theta ** -(2 / 4).
        angles = [position * 1.0, position * 0.1]
        expected = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        assert table[position].tolist() == pytest.approx(expected, abs=1e-5)


def test_llama3_scaling_slows_slow_frequencies_only():
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
    # The wavelengths are 6, 63 and 628 positions: fast, in between and slow.
    dim, theta = 6, 1000.0
    plain = rotary_table(RotaryConfig(theta), dim, 2, CPU)[1]
    scaled = rotary_table(RotaryConfig(theta, scaling), dim, 2, CPU)[1]
    angles, scaled_angles = plain[3:].asin(), scaled[3:].asin()
    assert plain[3:].tolist() == pytest.approx([math.sin(1.0), math.sin(0.1), math.sin(0.01)], abs=1e-6)
    assert scaled_angles[0] == angles[0]
    assert scaled_angles[2].item() == pytest.approx(0.01 / 8, rel=1e-4)
    smooth = (64 * 0.1 / (2 * math.pi) - 1.0) / 3.0
    assert scaled_angles[1].item() == pytest.approx(0.1 * (smooth + (1 - smooth) / 8), rel=1e-4)


@pytest.mark.parametrize(
    ("dim", "theta", "scaling"),
    [
        # The settings of DeepSeek-V3.
        (64, 10000.0, YarnScaling(40.0, 4096, 1.0, beta_fast=32.0, beta_slow=1.0)),
        (16, 500.0, YarnScaling(4.0, 64, 1.2, beta_fast=8.0, beta_slow=0.5)),
        (16, 500.0, YarnScaling(4.0, 64, 1.0, truncate=False)),
        (4, 10.0, YarnScaling(2.0, 8, 1.0, beta_fast=4.0, beta_slow=4.0)),
    ],
)
def test_yarn_table_equals_that_of_transformers(dim, theta, scaling):
    rope = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": scaling.factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "attention_factor": scaling.attention_factor,
        "truncate": scaling.truncate,
        "original_max_position_embeddings": scaling.original_max_position,
    }
    config = LlamaConfig(head_dim=dim, max_position_embeddings=512, rope_parameters=rope)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    angles = torch.arange(300)[:, None] * frequencies
    expected = torch.cat((angles.cos(), angles.sin()), -1) * factor
    found = rotary_table(RotaryConfig(theta, scaling), dim, 300, CPU)
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=0)


def test_mscale_is_one_without_context_extension():
    assert yarn_mscale(1.0, 3.0) == 1.0
    assert yarn_mscale(40.0) == pytest.approx(0.1 * math.log(40) + 1)
    assert yarn_mscale(40.0, 0.0) == 1.0

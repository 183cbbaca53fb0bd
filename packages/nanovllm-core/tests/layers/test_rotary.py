import math

import pytest
import torch

from nanovllm_core.layers.rotary import Llama3Scaling, RotaryConfig, rotary_table

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
    # One radian a position is fast (wavelength 6 < 64 / 4), a hundredth is slow (628 > 64), a tenth between (62.8).
    dim, theta = 6, 1000.0
    plain = rotary_table(RotaryConfig(theta), dim, 2, CPU)[1]
    scaled = rotary_table(RotaryConfig(theta, scaling), dim, 2, CPU)[1]
    angles, scaled_angles = plain[3:].asin(), scaled[3:].asin()
    assert plain[3:].tolist() == pytest.approx([math.sin(1.0), math.sin(0.1), math.sin(0.01)], abs=1e-6)
    assert scaled_angles[0] == angles[0]
    assert scaled_angles[2].item() == pytest.approx(0.01 / 8, rel=1e-4)
    smooth = (64 * 0.1 / (2 * math.pi) - 1.0) / 3.0
    assert scaled_angles[1].item() == pytest.approx(0.1 * (smooth + (1 - smooth) / 8), rel=1e-4)

"""Tests the collectives of ranks on a CPU. `collective_checks` has the checks, which run in the ranks' processes."""

import pytest
from collective_checks import check_on_cpu

from nanovllm_kernels.ladder.ranks import run_ranks


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_cpu_ranks(size):
    run_ranks(check_on_cpu, size, "cpu")

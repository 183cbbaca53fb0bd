"""Tests the kernels of the collectives on two GPUs, or in Triton's interpreter with a CPU process per rank."""

import os

import pytest
import torch

from nanovllm_kernels.benchmarks.ranks import run_ranks

TIMEOUT_S = 500
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize(("num_ranks", "dtypes"), [(2, FLOATS), (3, (torch.bfloat16,))])
def test_kernels_send_and_sum_in_the_interpreter(num_ranks, dtypes, tmp_path):
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter")
    from interpreted_peers import check_interpreted

    run_ranks(check_interpreted, num_ranks, "cpu", tmp_path, dtypes, timeout_s=TIMEOUT_S)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "check",
    [
        "check_sums_on_gpus",
        "check_norms_on_gpus",
        "check_two_shots_on_gpus",
        "check_copies_on_gpus",
        "check_graphs_on_gpus",
    ],
)
def test_collectives_are_correct_on_two_gpus(check):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    import collective_checks

    run_ranks(vars(collective_checks)[check], 2, "cuda", timeout_s=TIMEOUT_S)

import pytest
import torch

from nanovllm_kernels import elementwise, gemm, linear_attention, moe, request_tables, sampling
from nanovllm_kernels.attention import gqa, mla
from nanovllm_kernels.attention.plan import flash_requests, work_list

MODULES = (
    gqa,
    mla,
    work_list,
    flash_requests,
    request_tables,
    elementwise,
    gemm,
    gemm.block_fp8,
    linear_attention,
    moe,
    sampling,
)


def integers(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def arguments():
    rows, starts = integers([1, 0]), integers([0, 1, 3])
    tokens, computed = torch.ones((3, 32), dtype=torch.int32), integers([3, 4, 5])
    qkv, kv_cache, weight = torch.randn(3, 4, 16), torch.randn(4, 16, 2, 16), torch.randn(16)
    positions, slots = integers([0, 1, 2], torch.int64), integers([16, 17, 18], torch.int64)
    logits, ones = torch.randn(2, 20), torch.ones(2)
    draw_settings = (ones, integers([0, 5]), ones * 0.9, ones * 0, integers([1, 2], torch.int64), integers([3, 4]))
    table = integers([[1, 2], [3, 0]])
    float16_rows = torch.randn(64, 2048).half()
    latents, lengths = torch.randn(4, 16, 1, 24), (integers([7, 2]), starts)
    queries = (torch.randn(4, 3, 16), torch.randn(3, 4, 8))
    # The work list has one decode and two parts. The second part is empty.
    decodes = [integers([0, 1, 1], torch.int64), integers([[0, 0], [0, 0]])]
    decodes.append(integers([[0, 0], [1, 1], [1, 1]], torch.int64))
    return {
        "rms_norm": (torch.randn(3, 16), torch.randn(16), 1e-5),
        "silu_and_mul": (torch.randn(3, 16),),
        "sigmoid_and_mul": (torch.randn(3, 16), torch.randn(3, 16)),
        "norm_parts": (torch.randn(3, 24), [16, 4], torch.randn(16), torch.randn(4), 1e-5),
        "route": (torch.randn(3, 9), torch.randn(8), 2, "sigmoid", True, 4, 2, 1.5, "gated"),
        "fused_experts": (
            *(torch.randn(3, 16), torch.randn(4, 8, 16), torch.randn(4, 16, 4), None, None),
            *(torch.zeros(1, dtype=torch.int32), 2, 8, torch.rand(3, 2), integers([[2, 3], [4, 3], [5, 0]])),
            torch.randn(3, 16),
        ),
        "rope_and_cache": (qkv, torch.randn(8, 16), positions, slots, kv_cache, None, weight, weight, 1e-5, True),
        "paged_attention": (
            *(qkv[:, :2], kv_cache, None, None, table, integers([7, 9]), starts, [], None, None, []),
            *(decodes, [], 0.25, 2),
        ),
        "latent_rope_and_cache": (
            *(torch.randn(3, 4, 20), torch.randn(3, 24), weight, 1e-5, torch.randn(8, 8), positions, slots),
            *(latents, None),
        ),
        "latent_attention": (*queries, latents, None, table, *lengths, decodes, [], 0.25),
        "project_heads": (torch.randn(3, 4, 16), torch.randn(4, 16, 8), integers([2]), torch.zeros(3, 4, 8)),
        "copy_k_rope_to_heads": (latents.view(-1, 24)[:3, 16:], torch.zeros(3, 4, 16)),
        "gather_latents": (latents, None, table, *lengths, 3, 16, torch.float32),
        "attend_whole_prompts": (
            *(torch.randn(3, 4, 16), torch.randn(3, 4, 16), latents.view(-1, 24)[:3, 16:], *lengths),
            *(0.25, torch.zeros(3, 4, 8)),
        ),
        "project_few_rows": (
            torch.randn(3, 16),
            weight,
            1e-5,
            torch.randn(8, 16),
            None,
            torch.randn(3, 4),
            True,
            False,
        ),
        "project_split_k": (
            float16_rows[:9],
            float16_rows,
            None,
            torch.randn(9, 64).half(),
            torch.zeros(64, dtype=torch.int32),
        ),
        "gated_delta_net": (
            *(torch.randn(3, 16), torch.randn(3, 4), torch.randn(2, 12), ones, ones, torch.ones(2), 1e-6),
            *(torch.zeros(3, 2, 2, 4), torch.zeros(3, 2, 12), integers([1, 2]), torch.zeros((2, 1, 2)).int()),
            *(integers([1, 2]), starts, None, 1, 2, False),
        ),
        "copy_states": (torch.randn(2, 4, 3, 5), integers([1, 2], torch.int64), integers([3, 1], torch.int64)),
        "quantize_groups": (torch.randn(3, 200),),
        "block_fp8_linear": (
            *(torch.randn(3, 200), torch.ones(200), 1e-5, torch.ones(16, 200).to(torch.float8_e4m3fn)),
            *(torch.ones(1, 2), 128, None, None, None, True),
        ),
        "build_inputs": (rows, starts, tokens, computed, torch.ones((3, 2), dtype=torch.int32), 16, 3, 2),
        "plan_work": (integers([7, 9]), starts, 3, 4, 4, 64, 2, 1, 2, 512, 0, 32),
        "gather_requests": (integers([0, 2]), integers([7, 9]), starts, table, 3, 16),
        "commit_tokens": (rows, starts, integers([7, 8]), integers([0, 1]), tokens, computed, None),
        "verify_drafts": (rows, starts, integers([7, 8, 9]), tokens, computed, torch.ones((3, 20), dtype=torch.int32)),
        "propose_ngrams": (rows, integers([0, 1]), tokens, computed, 3, 1, 4),
        "apply_penalties": (logits, rows, torch.ones((3, 20), dtype=torch.int32), ones, ones, ones),
        "apply_bias": (logits, rows, integers([3, 4]), integers([[1], [2]]), torch.ones(2, 1), integers([[9], [9]])),
        "apply_masks": (logits, integers([1]), integers([[5]])),
        "forbid_sequences": (
            logits,
            rows,
            integers([3, 4]),
            tokens,
            integers([1, 1, 1]),
            integers([[[1, 2]], [[-1, 3]]]),
        ),
        "sample": (logits, *draw_settings, False, True),
        "logprobs": (logits, integers([3, 4]), 2),
    }


def moved_to(device, value):
    if isinstance(value, list):
        return [moved_to(device, each) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", list(arguments()))
def test_operator_has_valid_schema_and_fake(device, name):
    moved = [moved_to(device, value) for value in arguments()[name]]
    (operator,) = {vars(module)[f"_{name}_op"] for module in MODULES if f"_{name}_op" in vars(module)}
    # The schema check multiplies the arguments. Torch cannot multiply FP8 tensors on a CPU.
    has_fp8 = any(isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn for value in moved)
    tests = ("test_faketensor",) if has_fp8 else ("test_schema", "test_faketensor")
    torch.library.opcheck(operator, moved, test_utils=tests)


@pytest.mark.gpu
def test_compiled_layer_matches_eager_layer(device):
    # The layer has no matrix product, because the compiler may choose another kernel for a product.
    def layer(x, residual, weight):
        return elementwise.silu_and_mul(elementwise.rms_norm(x, weight, 1e-5)) + residual, residual

    arguments = [torch.randn(shape, device=device) for shape in [(4, 128), (4, 64), (128,)]]
    compiled = torch.compile(layer, fullgraph=True)
    for actual, expected in zip(compiled(*arguments), layer(*arguments), strict=True):
        torch.testing.assert_close(actual, expected)

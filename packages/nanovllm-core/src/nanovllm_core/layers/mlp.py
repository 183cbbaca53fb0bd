"""Implements the gated feed-forward layer (SwiGLU, Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from torch import Tensor, nn

from nanovllm_core.layers.linear import ColumnParallelLinear, LinearPart, RowParallelLinear
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8
from nanovllm_core.model import BuildContext
from nanovllm_kernels.elementwise import silu_and_mul
from nanovllm_kernels.gemm import norm_gate_up


class GatedMLP(nn.Module):
    """Computes down(silu(gate(x)) * up(x)), with gate and up in one matmul.

    quantization: format of the weights; None for the model's dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        build: BuildContext,
        *,
        bias: bool = False,
        quantization: BlockFP8 | None = None,
    ):
        super().__init__()
        parts = (LinearPart("gate_proj", intermediate_size, bias), LinearPart("up_proj", intermediate_size, bias))
        self.gate_up_proj = ColumnParallelLinear(hidden_size, parts, build, quantization=quantization)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, build, bias=bias, quantization=quantization)

    def forward(self, x: Tensor, residual: Tensor | None = None, norm: RMSNorm | None = None) -> Tensor:
        """Apply the layer to norm(x) and add `residual`, which may be overwritten. x: [T, hidden_size]."""
        gate_up = self.gate_up_proj
        if norm is None:
            hidden = silu_and_mul(gate_up.forward(x))
        else:
            hidden = norm_gate_up(x, norm.packed_weight, norm.eps, gate_up.weight, gate_up.bias)
        return self.down_proj.forward(hidden, residual)

"""Implements the gated feed-forward layer (SwiGLU, Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from torch import Tensor, nn

from nanovllm_core.layers.linear import ColumnParallelLinear, LinearPart, RowParallelLinear
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.quantization import BlockFP8
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.model import BuildContext
from nanovllm_kernels.elementwise import silu_and_mul
from nanovllm_kernels.gemm import norm_gate_up


class GatedMLP(nn.Module):
    """Computes down(silu(gate(x)) * up(x)), with gate and up in one matmul.

    Raises ValueError if the ranks can't share the intermediate size or its FP8 blocks evenly.

    size_name: field of config.json that gives `intermediate_size`, for the error.
    quantization: format of the weights; None for the model's dtype.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        build: BuildContext,
        *,
        size_name: str = "intermediate_size",
        bias: bool = False,
        quantization: BlockFP8 | None = None,
    ):
        super().__init__()
        build.parallel.split_evenly(intermediate_size, size_name)
        parts = (LinearPart("gate_proj", intermediate_size, bias), LinearPart("up_proj", intermediate_size, bias))
        self.gate_up_proj = ColumnParallelLinear(hidden_size, parts, build, quantization=quantization)
        self.down_proj = RowParallelLinear(
            intermediate_size, hidden_size, build, name="down_proj", bias=bias, quantization=quantization
        )

    def forward(self, x: Tensor, stream: ResidualStream, norm: RMSNorm | None = None) -> ResidualStream:
        """Apply the layer to norm(x) [T, hidden_size], and add the result to `stream`. norm: None for no norm."""
        return self.down_proj.forward(self._compute_hidden(x, norm), stream)

    def compute_partial(self, x: Tensor) -> Tensor:
        """Return this rank's part of the result for x: [T, hidden_size] -> [T, hidden_size]."""
        return self.down_proj.add_partial(self._compute_hidden(x, None))

    def _compute_hidden(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        gate_up = self.gate_up_proj
        if norm is None:
            return silu_and_mul(gate_up.forward(x))
        return norm_gate_up(x, norm.packed_weight, norm.eps, gate_up.weight, gate_up.bias)

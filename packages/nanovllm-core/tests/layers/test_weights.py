import re

import pytest
import torch
from torch import nn

from nanovllm_core.layers.linear import ColumnParallelLinear, LinearPart, RowParallelLinear
from nanovllm_core.layers.mlp import GatedMLP
from nanovllm_core.layers.norm import RMSNorm
from nanovllm_core.layers.residual import ResidualStream
from nanovllm_core.layers.weights import WeightError, fill_random, load_weights


@pytest.fixture
def model(build) -> nn.Module:
    return nn.ModuleDict({"mlp": GatedMLP(4, 6, build), "norm": RMSNorm(4, 1e-6, build)})


def make_tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "mlp.gate_proj.weight": torch.randn(6, 4),
        "mlp.up_proj.weight": torch.randn(6, 4),
        "mlp.down_proj.weight": torch.randn(4, 6),
        "norm.weight": torch.randn(4),
    }


def test_every_weight_is_copied_to_its_layer(model):
    tensors = make_tensors()
    load_weights(model, reversed(tensors.items()))
    x = torch.randn(3, 4)
    gate, up, down, norm = tensors.values()
    mlp, expected = model["mlp"], (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(mlp.compute_partial(x), expected)
    stream = mlp(x, ResidualStream(x.clone()), model["norm"])
    torch.testing.assert_close(stream.residual, mlp.compute_partial(model["norm"](x)) + x)
    assert torch.equal(model["norm"].weight, norm)


def test_weights_are_converted_to_the_dtype_of_the_model(model):
    load_weights(model, ((name, tensor.bfloat16()) for name, tensor in make_tensors().items()))
    assert model["norm"].weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "the checkpoint lacks 1 of 4 tensors: norm.weight [4]"),
        (lambda t: t.clear(), "the checkpoint lacks 4 of 4 tensors: mlp.gate_proj.weight [6, 4], .* and 1 more"),
        (
            lambda t: t.update({"mlp.up_proj.weight": torch.ones(4, 6)}),
            "tensor mlp.up_proj.weight has shape [4, 6], but the model expects [6, 4]",
        ),
        (
            lambda t: t.update({"mlp.up_proj.bias": torch.ones(6)}),
            "tensor mlp.up_proj.bias [6] is in the checkpoint, but the model has no such weight",
        ),
    ],
    ids=["missing", "many missing", "misshapen", "extra"],
)
def test_checkpoint_of_another_model_is_refused_with_a_one_line_message(model, change, message):
    tensors = make_tensors()
    change(tensors)
    with pytest.raises(WeightError) as caught:
        load_weights(model, tensors.items())
    assert re.fullmatch(re.escape(message).replace(r"\.\*", ".*"), str(caught.value))


def test_a_tensor_that_comes_twice_is_refused(model):
    pairs = [*make_tensors().items(), ("norm.weight", torch.ones(4))]
    with pytest.raises(WeightError, match=r"norm\.weight is in the checkpoint twice"):
        load_weights(model, pairs)


def test_extra_tensor_is_an_error_unless_ignored(model):
    extra = {"old.inv_freq": torch.ones(2)}
    load_weights(model, (make_tensors() | extra).items(), lambda name: name.endswith("inv_freq"))
    with pytest.raises(WeightError, match="extra"):
        load_weights(model, (make_tensors() | {"extra": torch.ones(1)}).items(), lambda name: name.endswith("inv_freq"))


def test_random_weights_depend_on_the_seed_alone(build):
    def make_weights(seed: int) -> tuple[torch.Tensor, torch.Tensor, RMSNorm]:
        column = ColumnParallelLinear(64, (LinearPart("a", 32), LinearPart("b", 32, bias=True)), build)
        row, norm = RowParallelLinear(64, 64, build, bias=True), RMSNorm(64, 1e-6, build)
        fill_random(nn.ModuleList([column, row, norm]), seed)
        assert not column.bias.any()
        assert not row.bias.any()
        return column.weight.data, row.weight.data, norm

    column, row, norm = make_weights(1)
    assert torch.equal(column, make_weights(1)[0])
    assert not torch.equal(column, make_weights(2)[0])
    assert not torch.equal(column, row)
    assert norm.weight.eq(1).all()
    assert 0.018 < column.std() < 0.022

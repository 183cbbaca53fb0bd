"""Tests that loading a checkpoint takes memory for the model and one weight file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanovllm_core.layers.weights import WeightedModule
from nanovllm_core.model import BuildContext
from nanovllm_core.parallel import ParallelContext
from nanovllm_models import llama
from nanovllm_models.fields import read_fields

SHARDS = 6
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}
# Bytes that loading may take in addition to the model and one file.
SLACK = 24 << 20
LOAD = """
import sys
from pathlib import Path
import torch
import nanovllm_models
from nanovllm_core.model import BuildContext
from nanovllm_core.parallel import ParallelContext

def memory(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10

# Float16 weights have no packed copy on a CPU.
build = BuildContext(torch.device("cpu"), torch.float16, ParallelContext())
spec = nanovllm_models.load(sys.argv[1], show_progress=False)
before = memory("VmRSS")
model = spec.build(build)
print(memory("VmHWM") - before, memory("VmRSS") - before)
"""


def write_large_checkpoint(path: Path) -> tuple[int, int]:
    """Return the sizes of the model and of the largest file in bytes."""
    (path / "config.json").write_text(json.dumps(CONFIG))
    build = BuildContext(torch.device("cpu"), torch.float16, ParallelContext())
    module = llama.LlamaForCausalLM(llama.parse_config(read_fields(path / "config.json")), build)
    slots = {}
    for name, part in module.named_modules():
        if isinstance(part, WeightedModule):
            slots |= dict(part.weight_slots(name))
    tensors = {name: torch.zeros(slot.shape, dtype=slot.dtype or torch.bfloat16) for name, slot in slots.items()}
    names = list(tensors)
    weight_map, largest = {}, 0
    for shard in range(SHARDS):
        part = {name: tensors[name] for name in names[shard::SHARDS]}
        file = f"model-{shard}.safetensors"
        save_file(part, path / file)
        weight_map |= dict.fromkeys(part, file)
        largest = max(largest, (path / file).stat().st_size)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(tensor.nbytes for tensor in tensors.values()), largest


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_needs_memory_for_the_model_and_one_file(tmp_path):
    model_bytes, shard_bytes = write_large_checkpoint(tmp_path)
    # Otherwise a second copy of the model in memory would pass the test.
    assert model_bytes > 2 * (shard_bytes + SLACK)
    command = [sys.executable, "-c", LOAD, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert output.returncode == 0, output.stderr
    peak_bytes, kept_bytes = map(int, output.stdout.split())
    assert model_bytes - SLACK < kept_bytes < model_bytes + SLACK
    assert peak_bytes < model_bytes + shard_bytes + SLACK

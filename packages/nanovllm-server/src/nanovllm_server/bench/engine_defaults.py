"""Tells which device and which dtype an engine uses."""

from nanovllm_core import EngineConfig, ModelSpec
from nanovllm_core.config import Device
from nanovllm_kernels.platform import has_cuda


def find_device_and_dtype(spec: ModelSpec, config: EngineConfig) -> tuple[Device, str]:
    """Returns the device and the name of the dtype, such as "bfloat16". An engine chooses both if `config` does not."""
    device: Device = config.device or ("cuda" if has_cuda() else "cpu")
    default_dtype = (spec.cuda_dtype if device == "cuda" else None) or spec.dtype
    return device, str(config.dtype or default_dtype).removeprefix("torch.")

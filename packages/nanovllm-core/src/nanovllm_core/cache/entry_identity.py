"""Makes the identity that two engines compare before they share cache entries."""

from nanovllm_core.cache.memory import CacheLayout
from nanovllm_core.config import ResolvedConfig
from nanovllm_core.errors import ConfigError
from nanovllm_core.model import ModelSpec

# Change this number whenever the bytes of an entry change their meaning.
LAYOUT_VERSION = 1


def make_entry_identity(spec: ModelSpec, config: ResolvedConfig, layout: CacheLayout) -> dict[str, str]:
    """The settings, by name, that determine an entry's bytes besides tokens and salts. Raises ConfigError."""
    fingerprints = [model.fingerprint for model in (spec, spec.draft) if model is not None]
    if not all(fingerprints):
        raise ConfigError(
            "kv_offload_dir and transfers need a model with a fingerprint, which tells models apart: set "
            "ModelSpec.fingerprint, or leave out kv_offload_dir, transfer_listen and transfer_peers"
        )
    # `layout` has the dtypes of the caches. `dtype` is needed too: the dtype of the weights changes the cached values.
    setting_names = ("device", "dtype", "kv_cache_dtype", "speculate", "tensor_parallel_size", "dp_attention")
    return {
        "layout version": str(LAYOUT_VERSION),
        "model": ", ".join(map(str, fingerprints)),
        **{name: str(getattr(config, name)) for name in setting_names},
        "block_size": str(layout.block_size),
        "cache layout": repr(layout),
    }

"""Finds the heads for multi-token prediction (MTP), with which a model can predict several tokens in one step."""

import logging

from nanovllm_models.checkpoint import RandomWeights, WeightSource

_log = logging.getLogger(__name__)


def has_mtp_heads(weights: WeightSource, prefixes: tuple[str, ...], num_declared: int) -> bool:
    """Return whether the weights include MTP heads. Raises ModelError if a file can't be read.

    prefixes: beginnings of the names of the heads' tensors.
    num_declared: number of heads that config.json declares. If the weights lack these heads, the function logs that.
    """
    if isinstance(weights, RandomWeights):
        return num_declared > 0
    if not prefixes:
        return False
    has_heads = any(name.startswith(prefixes) for name in weights.names())
    if num_declared and not has_heads:
        _log.info(
            "config.json declares %d heads for multi-token prediction, but the checkpoint has no weights for them: "
            "`--speculate mtp` is not available",
            num_declared,
        )
    return has_heads

"""Compares engines of several ranks with an engine of one rank: `python rank_matrix.py [--ranks N ...] [--device D]`.

The program runs every setting with every tiny model, unless flags select some. test_ranks.py runs a sample.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

import torch
from tiny_checkpoints import write_checkpoint
from tiny_models import (
    AMPLE_CACHE,
    COMMON,
    NUM_PROMPTS,
    SCARCE_CACHE,
    TIERED_CACHE,
    TINY_MODELS,
    TinyModel,
    generate,
    make_model,
)

BLOCK_SIZE = 16  # the engine's default
HEAD_SIZE = 16

# Values of RANK_SETTINGS: settings of both engines, then settings of only the engine with several ranks.
SPLIT_EXPERTS = {"expert_parallel": False}
WHOLE_EXPERTS = {"expert_parallel": True}
OWN_REQUESTS = {"dp_attention": True}
RANK_SETTINGS = {
    "all at once": (AMPLE_CACHE, SPLIT_EXPERTS),
    "whole experts, chunked": ({"max_num_batched_tokens": 40, **AMPLE_CACHE}, WHOLE_EXPERTS),
    "preempted, chunked, depth 1": ({"max_num_batched_tokens": 40, "depth": 1, **SCARCE_CACHE}, SPLIT_EXPERTS),
    "whole experts, FP8 cache": ({"kv_cache_dtype": "fp8", **AMPLE_CACHE}, WHOLE_EXPERTS),
    "FP8 cache, chunked, no prefix cache": (
        {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 40, "prefix_caching": False, **AMPLE_CACHE},
        SPLIT_EXPERTS,
    ),
    "whole experts, preempted": (SCARCE_CACHE, WHOLE_EXPERTS),
    "preempted, from host memory": (TIERED_CACHE, SPLIT_EXPERTS),
    "FP8 cache, preempted, from host memory": ({"kv_cache_dtype": "fp8", **TIERED_CACHE}, WHOLE_EXPERTS),
    "own requests, preempted, from host memory": (TIERED_CACHE, OWN_REQUESTS),
    "own requests, whole experts, preempted": (SCARCE_CACHE, {**OWN_REQUESTS, **WHOLE_EXPERTS}),
    "own requests, preempted, chunked": ({"max_num_batched_tokens": 48, **SCARCE_CACHE}, OWN_REQUESTS),
    "own requests, chunked, depth 2": (
        {"max_num_batched_tokens": 48, "depth": 2, **AMPLE_CACHE},
        OWN_REQUESTS,
    ),
    "own requests": (AMPLE_CACHE, OWN_REQUESTS),
    "own requests, whole experts, FP8 cache": (
        {"kv_cache_dtype": "fp8", **AMPLE_CACHE},
        {**OWN_REQUESTS, **WHOLE_EXPERTS},
    ),
}


def write_tiny_checkpoint(name: str, path: Path, num_ranks: int = 2) -> None:
    torch.manual_seed(list(TINY_MODELS).index(name))
    write_checkpoint(path, make_model(add_heads(TINY_MODELS[name], num_ranks)), mtp=TINY_MODELS[name].has_mtp)


def add_heads(tiny: TinyModel, num_ranks: int) -> TinyModel:
    """Returns a model with at least one head per rank. For one or two ranks, the model is unchanged."""
    fields = dict(tiny.fields)
    if num_ranks > COMMON["num_attention_heads"]:
        fields |= {"num_attention_heads": num_ranks, "hidden_size": HEAD_SIZE * num_ranks}
        if tiny.family == "DeepseekV3":
            fields["num_key_value_heads"] = num_ranks
    if num_ranks > fields.get("linear_num_key_heads", num_ranks):
        fields |= {"linear_num_key_heads": num_ranks, "linear_num_value_heads": 2 * num_ranks}
    return tiny._replace(fields=fields)


async def compare(path: Path, device: str, setting: str, num_ranks: int = 2) -> None:
    settings, rank_settings = RANK_SETTINGS[setting]
    is_preempted = "preempted" in setting
    if is_preempted and rank_settings.get("dp_attention") and num_ranks > 4:
        raise ValueError("the requests of each rank fit into its cache, so none is preempted")
    expected = await generate(path, device, settings, is_preempted=is_preempted)
    settings = {"tensor_parallel_size": num_ranks, **rank_settings, **settings}
    if rank_settings.get("dp_attention") and "max_num_batched_tokens" in settings:
        # The smallest budget that the engine accepts
        settings["max_num_batched_tokens"] = NUM_PROMPTS + num_ranks * BLOCK_SIZE
    assert await generate(path, device, settings, is_preempted=is_preempted) == expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", default=list(TINY_MODELS), choices=TINY_MODELS)
    parser.add_argument("--settings", nargs="+", default=list(RANK_SETTINGS), choices=RANK_SETTINGS)
    arguments = parser.parse_args()
    num_failures = 0
    for name in arguments.models:
        for num_ranks in arguments.ranks:
            with tempfile.TemporaryDirectory() as directory:
                write_tiny_checkpoint(name, Path(directory), num_ranks)
                for setting in arguments.settings:
                    result = "equal"
                    try:
                        asyncio.run(compare(Path(directory), arguments.device, setting, num_ranks))
                    except AssertionError:
                        result = "DIFFERENT"
                    except ValueError as error:
                        # The ranks can't share the heads or experts of some tiny models.
                        result = f"refused: {error}"
                    num_failures += result == "DIFFERENT"
                    print(f"{name} | {num_ranks} ranks | {setting} | {result}", flush=True)
    raise SystemExit(f"{num_failures} settings gave other tokens" if num_failures else 0)


if __name__ == "__main__":
    main()

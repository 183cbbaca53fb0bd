"""vLLM's `LLM` class, with vLLM's own choices wherever the job leaves one and they lead to a run that can be compared.

It tells no times but its own, of the whole. Where that of the first token matters, the same requests run for one token
before they run in full.
"""

import importlib.util
import os
import time
from collections.abc import Iterator
from typing import Any

import vllm  # pyright: ignore[reportMissingImports] (not installed here)

LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")


def measure(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The version, and then a line a run."""
    options = {limit: job[limit] for limit in LIMITS if job[limit] is not None}
    if job["device"] == "cuda":
        options["gpu_memory_utilization"] = job["gpu_memory_utilization"]
        if importlib.util.find_spec("flashinfer") is None:
            # Which 0.26 takes for Gated DeltaNet's prompts on Hopper without asking whether it is there.
            options["additional_config"] = {"gdn_prefill_backend": "triton"}
    if job["load_format"] == "dummy":
        # Its dummy weights are next to nothing, so that a bias alone chooses, and the same few experts for every token.
        os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    llm: Any = vllm.LLM(
        model=job["model"],
        # Token ids in, token ids out, for which config.json suffices.
        skip_tokenizer_init=True,
        load_format=job["load_format"],
        dtype=job["dtype"],
        enable_prefix_caching=job["prefix_caching"],
        # Left to itself, 0.26 keeps those of Qwen3-Next in bf16.
        mamba_ssm_cache_dtype=job["state_dtype"],
        seed=0,
        **options,
    )
    yield {"version": vllm.__version__}
    for case, works in enumerate(job["cases"]):
        _generate(llm, works, job, f"{case} warm-up", job["warm_up_tokens"])
        for repetition in range(job["repeat"]):
            salt = f"{case} {repetition}"
            first = _generate(llm, works, job, f"{salt} first", 1)[1] if job["needs_first"] else None
            made, last = _generate(llm, works, job, salt, None)
            yield {"num_tokens": made, "first": first, "last": last}


def _generate(
    llm: Any, works: list[dict[str, Any]], job: dict[str, Any], salt: str, at_most: int | None
) -> tuple[int, float]:
    """Tokens made, and the seconds it took; `at_most` cuts every request's output."""
    # Where there is a prefix cache, a run finds in it what its own prompts share, and nothing of the run before it.
    extra = {"cache_salt": salt} if job["prefix_caching"] else {}
    prompts = [{"prompt_token_ids": work["prompt"], **extra} for work in works]
    limits = [min(work["max_tokens"], at_most or work["max_tokens"]) for work in works]
    sampling = [
        vllm.SamplingParams(temperature=job["temperature"], max_tokens=limit, ignore_eos=True, detokenize=False)
        for limit in limits
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    if made != sum(limits):
        raise RuntimeError(f"vLLM made {made} tokens, not {sum(limits)}")
    return made, seconds

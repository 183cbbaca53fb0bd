"""Measures vLLM's `LLM` class, with vLLM's defaults unless they make the run incomparable.

`LLM` reports only the whole time. For the time of first tokens, the same requests run for one token first.
"""

import importlib.util
import os
import time
from collections.abc import Iterator
from typing import Any

import vllm  # pyright: ignore[reportMissingImports] (not installed here)

LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")


def measure(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the version, then the result of each run."""
    options = {limit: job[limit] for limit in LIMITS if job[limit] is not None}
    if job["device"] == "cuda":
        options["gpu_memory_utilization"] = job["gpu_memory_utilization"]
        if importlib.util.find_spec("flashinfer") is None:
            # vLLM 0.26 uses FlashInfer for Gated DeltaNet's prompts on Hopper even if it is not installed.
            options["additional_config"] = {"gdn_prefill_backend": "triton"}
    if job["load_format"] == "dummy":
        # vLLM's dummy weights are almost zero, so that a bias would select the same few experts for every token.
        os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
    llm: Any = vllm.LLM(
        model=job["model"],
        # The job has token ids; without a tokenizer, config.json suffices.
        skip_tokenizer_init=True,
        load_format=job["load_format"],
        dtype=job["dtype"],
        enable_prefix_caching=job["prefix_caching"],
        # By default, vLLM 0.26 stores Qwen3-Next's states in bf16.
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
    """Returns the number of tokens and the seconds. at_most: most tokens per request; None for each one's own limit."""
    # With a prefix cache, a run can find its own shared prefix, but nothing of earlier runs.
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

"""Measures vLLM's `LLM` class, with vLLM's defaults unless they make the run incomparable.

`LLM` reports only the time of a whole run. The time of first tokens is that of an extra run for one token per request.
"""

import importlib.util
import os
import time
from collections.abc import Iterator
from typing import Any

import vllm  # pyright: ignore[reportMissingImports] (not installed here)

JOB_LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")


def measure(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the version, then the result of each run."""
    options = {limit: job[limit] for limit in JOB_LIMITS if job[limit] is not None}
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
    for case_index, requests in enumerate(job["cases"]):
        _generate(llm, requests, job, f"{case_index} warm-up", job["warm_up_tokens"])
        for repetition in range(job["repeat"]):
            salt = f"{case_index} {repetition}"
            first_tokens_s = None
            if job["times_first_tokens"]:
                _, first_tokens_s = _generate(llm, requests, job, f"{salt} first", 1)
            num_tokens, last_token_s = _generate(llm, requests, job, salt, None)
            yield {"num_tokens": num_tokens, "first_tokens_s": first_tokens_s, "last_token_s": last_token_s}


def _generate(
    llm: Any, requests: list[dict[str, Any]], job: dict[str, Any], salt: str, max_tokens: int | None
) -> tuple[int, float]:
    """Returns the number of tokens and the seconds. max_tokens: further limit of each request, or None."""
    # With a prefix cache, a run can find its own shared prefix, but nothing of earlier runs.
    salt_field = {"cache_salt": salt} if job["prefix_caching"] else {}
    prompts = [{"prompt_token_ids": request["prompt"], **salt_field} for request in requests]
    limits = [min(request["max_tokens"], max_tokens or request["max_tokens"]) for request in requests]
    sampling_params = [
        vllm.SamplingParams(temperature=job["temperature"], max_tokens=limit, ignore_eos=True, detokenize=False)
        for limit in limits
    ]
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
    duration_s = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    if num_tokens != sum(limits):
        raise RuntimeError(f"vLLM generated {num_tokens} tokens, not {sum(limits)}")
    return num_tokens, duration_s

"""Measures vLLM's `LLM` class, with vLLM's defaults unless a default makes the comparison unfair."""

import importlib.util
import os
import time
from typing import Any

import vllm  # pyright: ignore[reportMissingImports] (not installed here)

JOB_LIMITS = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")


class VllmPeer:
    """vLLM's `LLM`. vLLM forms its own batches."""

    version = vllm.__version__
    max_batch_size = None
    # `LLM` reports only the time of a whole run.
    can_time_first_tokens = False

    def __init__(self, job: dict[str, Any]):
        self._job = job
        options = {limit: job[limit] for limit in JOB_LIMITS if job[limit] is not None}
        if job["device"] == "cuda":
            options["gpu_memory_utilization"] = job["gpu_memory_utilization"]
            if importlib.util.find_spec("flashinfer") is None:
                # On Hopper, vLLM 0.26 selects FlashInfer for Gated DeltaNet's prompts, even if FlashInfer is missing.
                options["additional_config"] = {"gdn_prefill_backend": "triton"}
        if job["load_format"] == "dummy":
            # vLLM's dummy weights are almost zero: a router's bias would select the same few experts for every token.
            os.environ.setdefault("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")
        if job["draft_heads"] is not None:
            options["speculative_config"] = _make_speculative_config(**job["draft_heads"])
        self._llm: Any = vllm.LLM(
            model=job["model"],
            # The job has token ids, so vLLM needs no tokenizer. With dummy weights, it needs only config.json.
            skip_tokenizer_init=True,
            load_format=job["load_format"],
            dtype=job["dtype"],
            enable_prefix_caching=job["prefix_caching"],
            # Without this option, vLLM 0.26 stores Qwen3-Next's states in bf16.
            mamba_ssm_cache_dtype=job["state_dtype"],
            tensor_parallel_size=job["tensor_parallel_size"],
            enable_expert_parallel=job["expert_parallel"],
            seed=0,
            **options,
        )

    def start_case(self, batches: list[list[dict[str, Any]]]) -> None:
        """Does nothing: vLLM needs no preparation for a case."""

    def generate(self, requests: list[dict[str, Any]], output_lens: list[int], salt: str) -> tuple[float, float]:
        """Returns (0.0, seconds until the last token). 0.0 stands for the unknown time until the first tokens.

        output_lens: number of output tokens of each request.
        salt: only runs with the same salt share cached prefixes.
        """
        salt_field = {"cache_salt": salt} if self._job["prefix_caching"] else {}
        prompts = [{"prompt_token_ids": request["prompt"], **salt_field} for request in requests]
        temperature = self._job["temperature"]
        sampling_params = [
            vllm.SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in output_lens
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, sampling_params, use_tqdm=False)
        duration_s = time.perf_counter() - start
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if num_tokens != sum(output_lens):
            raise RuntimeError(f"vLLM generated {num_tokens} tokens, not {sum(output_lens)}")
        return 0.0, duration_s


def _make_speculative_config(num_drafts: int, acceptance_length: float | None) -> dict[str, Any]:
    config: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": num_drafts}
    if acceptance_length is not None:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": acceptance_length}
    return config

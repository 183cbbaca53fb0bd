"""Measures transformers' `generate`, which runs a case as one padded batch or as batches of `max_num_seqs`.

Prompts are padded on the left; finished requests are padded until the longest one has finished.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteriaList


def measure(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the version, then the result of each run."""
    model = _load(job)
    yield {"version": transformers.__version__}
    sampling: dict[str, Any] = {"do_sample": False}
    if job["temperature"] > 0:
        sampling = {"do_sample": True, "temperature": job["temperature"], "top_k": 0, "top_p": 1.0}
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, use_cache=True, **sampling)
    with torch.inference_mode():
        for requests in job["cases"]:
            batch_size = job["max_num_seqs"] or len(requests)
            batches = [requests[start : start + batch_size] for start in range(0, len(requests), batch_size)]
            for batch in batches:
                _generate(model, batch, job["warm_up_tokens"])
            for _ in range(job["repeat"]):
                start = time.perf_counter()
                step_times = [_generate(model, batch, None) for batch in batches]
                last_token_s = step_times[-1][-1] - start
                # The time of the prompts of all batches, like a separate run for one token per request.
                first_tokens_s = last_token_s - sum(times[-1] - times[0] for times in step_times)
                num_tokens = sum(request["max_tokens"] for request in requests)
                yield {"num_tokens": num_tokens, "first_tokens_s": first_tokens_s, "last_token_s": last_token_s}


def _load(job: dict[str, Any]) -> Any:
    dtype = getattr(torch, job["dtype"])
    if job["load_format"] == "dummy":
        config = AutoConfig.from_pretrained(job["model"])
        with torch.device(job["device"]):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    return model.to(job["device"]).eval()


def _generate(model: Any, requests: list[dict[str, Any]], max_tokens: int | None) -> list[float]:
    """Returns the time at the end of each step. max_tokens: further limit of each request, or None."""
    longest = max(len(request["prompt"]) for request in requests)
    limits = torch.tensor([min(request["max_tokens"], max_tokens or request["max_tokens"]) for request in requests])
    num_steps = int(limits.max())
    limits = limits.to(model.device)
    input_ids = torch.zeros(len(requests), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, request in enumerate(requests):
        start = longest - len(request["prompt"])
        input_ids[row, start:] = torch.tensor(request["prompt"])
        attention_mask[row, start:] = 1
    times: list[float] = []

    def record_time_and_stop_finished(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        return limits <= ids.shape[1] - longest

    model.generate(
        input_ids=input_ids.to(model.device),
        attention_mask=attention_mask.to(model.device),
        max_new_tokens=num_steps,
        stopping_criteria=StoppingCriteriaList([record_time_and_stop_finished]),
    )
    if len(times) != num_steps:
        raise RuntimeError(f"transformers took {len(times)} steps, not {num_steps}")
    return times

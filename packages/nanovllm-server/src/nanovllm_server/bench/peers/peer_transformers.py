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
        for works in job["cases"]:
            size = job["max_num_seqs"] or len(works)
            batches = [works[start : start + size] for start in range(0, len(works), size)]
            for batch in batches:
                _generate(model, batch, job["warm_up_tokens"])
            for _ in range(job["repeat"]):
                start = time.perf_counter()
                times = [_generate(model, batch, None) for batch in batches]
                last = times[-1][-1] - start
                # The time of the prompts of all batches, like a separate run for one token per request.
                first = last - sum(steps[-1] - steps[0] for steps in times)
                made = sum(work["max_tokens"] for work in works)
                yield {"num_tokens": made, "first": first, "last": last}


def _load(job: dict[str, Any]) -> Any:
    dtype = getattr(torch, job["dtype"])
    if job["load_format"] == "dummy":
        config = AutoConfig.from_pretrained(job["model"])
        with torch.device(job["device"]):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    return model.to(job["device"]).eval()


def _generate(model: Any, works: list[dict[str, Any]], at_most: int | None) -> list[float]:
    """Returns the time of each step. at_most: most tokens per request; None for each request's own limit."""
    longest = max(len(work["prompt"]) for work in works)
    limits = torch.tensor([min(work["max_tokens"], at_most or work["max_tokens"]) for work in works])
    steps = int(limits.max())
    limits = limits.to(model.device)
    ids = torch.zeros(len(works), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, work in enumerate(works):
        ids[row, longest - len(work["prompt"]) :] = torch.tensor(work["prompt"])
        mask[row, longest - len(work["prompt"]) :] = 1
    times: list[float] = []

    def note(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        return limits <= input_ids.shape[1] - longest

    model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=steps,
        stopping_criteria=StoppingCriteriaList([note]),
    )
    if len(times) != steps:
        raise RuntimeError(f"transformers took {len(times)} steps, not {steps}")
    return times

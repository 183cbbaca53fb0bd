"""Measures transformers' `generate`, which runs each batch of requests as one padded tensor.

Prompts are padded on the left. Requests that finish early are padded until the last request has finished.
"""

import time
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteriaList


class TransformersPeer:
    """A model of transformers."""

    version = transformers.__version__
    can_time_first_tokens = True

    def __init__(self, job: dict[str, Any]):
        self.max_batch_size: int | None = job["max_num_seqs"]
        self._model = _load(job)
        sampling: dict[str, Any] = {"do_sample": False}
        if job["temperature"] > 0:
            sampling = {"do_sample": True, "temperature": job["temperature"], "top_k": 0, "top_p": 1.0}
        self._model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=None, use_cache=True, **sampling)

    def start_case(self, batches: list[list[dict[str, Any]]]) -> None:
        """Does nothing: transformers needs no preparation for a case."""

    @torch.inference_mode()
    def generate(self, requests: list[dict[str, Any]], output_lens: list[int], _salt: str) -> tuple[float, float]:
        """Returns (seconds until all first tokens, seconds until the last token). output_lens: tokens per request."""
        start = time.perf_counter()
        model, num_steps = self._model, max(output_lens)
        max_prompt_len = max(len(request["prompt"]) for request in requests)
        device_lens = torch.tensor(output_lens, device=model.device)
        input_ids = torch.zeros(len(requests), max_prompt_len, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, request in enumerate(requests):
            num_padding = max_prompt_len - len(request["prompt"])
            input_ids[row, num_padding:] = torch.tensor(request["prompt"])
            attention_mask[row, num_padding:] = 1
        step_times: list[float] = []

        def record_time_and_stop_finished(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            if ids.is_cuda:
                torch.cuda.synchronize()
            step_times.append(time.perf_counter())
            return device_lens <= ids.shape[1] - max_prompt_len

        model.generate(
            input_ids=input_ids.to(model.device),
            attention_mask=attention_mask.to(model.device),
            max_new_tokens=num_steps,
            stopping_criteria=StoppingCriteriaList([record_time_and_stop_finished]),
        )
        if len(step_times) != num_steps:
            raise RuntimeError(f"transformers took {len(step_times)} steps, not {num_steps}")
        return step_times[0] - start, step_times[-1] - start


def _load(job: dict[str, Any]) -> Any:
    dtype = getattr(torch, job["dtype"])
    if job["load_format"] == "dummy":
        config = AutoConfig.from_pretrained(job["model"])
        with torch.device(job["device"]):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype)
    return model.to(job["device"]).eval()

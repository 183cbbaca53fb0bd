"""Greedy decoding by transformers' own `generate`, as a program of its own, so that its threads are alone.

Reads a job as JSON on stdin, writes decode rates as JSON on stdout: what each repetition of each batch size made
between its first and its last token, in tokens a second.
"""

import sys
import time
from typing import Any

import orjson
import torch
from transformers import AutoModelForCausalLM, StoppingCriteriaList


def measure(job: dict[str, Any]) -> dict[str, list[float]]:
    """Decode rates by batch size."""
    model: Any = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    model.to(job["device"]).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    rates: dict[str, list[float]] = {}
    with torch.inference_mode():
        for batch in job["batches"]:
            prompts = torch.tensor(job["prompts"][:batch], device=job["device"])
            _generate(model, prompts, 4)
            rates[str(batch)] = [
                batch * (job["output_len"] - 1) / _generate(model, prompts, job["output_len"])
                for _ in range(job["repeat"])
            ]
    return rates


def _generate(model: Any, prompts: torch.Tensor, output_len: int) -> float:
    times: list[float] = []

    def note(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if input_ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter())
        # Nothing stops.
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    out = model.generate(
        input_ids=prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=output_len,
        do_sample=False,
        use_cache=True,
        stopping_criteria=StoppingCriteriaList([note]),
    )
    if out.shape[1] != prompts.shape[1] + output_len:
        raise RuntimeError(f"transformers made {out.shape[1] - prompts.shape[1]} tokens, not {output_len}")
    return times[-1] - times[0]


if __name__ == "__main__":
    sys.stdout.buffer.write(orjson.dumps(measure(orjson.loads(sys.stdin.buffer.read()))))

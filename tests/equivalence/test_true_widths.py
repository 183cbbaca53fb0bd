"""Log-probabilities of bf16 engines with two layers of published width are near those of float32 transformers.

CPU tests use reduced widths.
"""

import asyncio
import gc
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from observed_runs import NUM_TOP, OUTPUT_LEN, Observation, observe
from tiny_checkpoints import write_checkpoint
from torch import Tensor
from transformers import PreTrainedModel
from wide_families import LOGIT_STD, PUBLISHED, make_wide_model

from nanovllm_core import EngineConfig

MAX_NUM_SEQS, BLOCK_SIZE = 8, 16
LAST_TOKEN = 5
# Maximum ratio of the engine's error to the error of transformers, both in bf16.
MAX_ERROR_RATIO_BY_QUANTILE = {0.5: 1.5, 0.9: 1.5, 0.99: 2.0}
ERROR_FLOOR = 0.002  # nats
MIN_ERRORS_BEYOND = 20
# Relative to the spread of the logits. Two layers round about 24 times by at most 2^-9. Sharp attention doubles errors.
MAX_RELATIVE_ERROR = 2 * 24**0.5 * 2**-9
MIN_AGREEMENT = 0.9


@dataclass(frozen=True)
class Scale:
    """whole, large_chunk, small_chunk: maximum tokens of a step. `Setting.budget` names one of these fields."""

    device: str
    reduced: bool
    long_lengths: tuple[int, ...]
    num_short: int
    longest_short: int
    whole: int
    large_chunk: int
    small_chunk: int
    long_context: int


REDUCED_SCALE = Scale("cpu", True, (300, 210, 130, 100), 26, 40, 320, 100, 32, 128)
TRUE_SCALE = Scale("cuda", False, (4000, 3000, 2100, 1500, 1200, 1000, 700, 400), 56, 200, 4096, 512, 100, 1000)


class Setting(NamedTuple):
    """budget: name of the field of Scale with the maximum tokens of a step."""

    budget: str
    options: dict[str, object]

    @property
    def caches_prefixes(self) -> bool:
        return self.options.get("prefix_caching") is not False

    @property
    def replays_graphs(self) -> bool:
        return self.options.get("graph_mode") != "none"


EAGER = {"graph_mode": "none", "compile": False}
CAPTURED = {"graph_mode": "full", "compile": False}
BASELINE = Setting("whole", {"max_num_seqs": 1, "depth": 1, "prefix_caching": False, **EAGER})
SETTINGS = {
    "alone, whole, eager": BASELINE,
    "alone, whole, from graphs": Setting("whole", {"max_num_seqs": 1, **CAPTURED}),
    "batched, whole, eager, no prefix cache": Setting("whole", {"prefix_caching": False, **EAGER}),
    "batched, small chunks, eager": Setting("small_chunk", EAGER),
    "batched, large chunks, from graphs": Setting("large_chunk", CAPTURED),
    "batched, large chunks, compiled, from graphs, automatic block size": Setting("large_chunk", {"block_size": None}),
}
CACHING_SETTINGS = [name for name, setting in SETTINGS.items() if setting.caches_prefixes]


def make_config(scale: Scale, setting: Setting, prompts: list[list[int]]) -> EngineConfig:
    options = setting.options
    if scale.device == "cpu":
        # A CPU has no graphs, compiles nothing, and always chooses blocks of BLOCK_SIZE.
        options = {name: value for name, value in options.items() if name not in (*EAGER, "block_size")}
    num_blocks = sum(-(-(len(prompt) + OUTPUT_LEN) // BLOCK_SIZE) for prompt in prompts)
    return EngineConfig(
        device=scale.device,
        dtype="bfloat16",
        max_model_len=scale.whole,
        max_num_batched_tokens=getattr(scale, setting.budget),
        num_blocks=num_blocks + 1,
        num_state_slots=256,
        watermark=0,
        forbid_sync=scale.device == "cuda",
        **{"max_num_seqs": MAX_NUM_SEQS, "depth": 2, "block_size": BLOCK_SIZE, **options},
    )


def make_prompts(scale: Scale, vocab_size: int) -> list[list[int]]:
    """Half of the prompts begin alike, and all prompts end with the same token."""
    rng = random.Random(2)
    shared = [rng.randrange(3, vocab_size) for _ in range(max(scale.long_lengths))]
    lengths = [*scale.long_lengths, *range(1, 4), BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE]
    while len(lengths) < len(scale.long_lengths) + scale.num_short:
        lengths.append(rng.randrange(2, scale.longest_short))
    prompts = []
    for index, length in enumerate(lengths):
        start = shared[: length // 2] if index % 2 == 0 else []
        prompts.append(start + [rng.randrange(3, vocab_size) for _ in range(length - len(start) - 1)] + [LAST_TOKEN])
    rng.shuffle(prompts)
    return prompts


@torch.inference_mode()
def reference_logprobs(model: PreTrainedModel, sequences: list[list[int]]) -> list[Tensor]:
    """transformers' log-probabilities after each token of each sequence: float32 [length, vocabulary]."""
    found = []
    # By default cuDNN rounds the inputs of float32 convolutions to TF32.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for sequence in sequences:
            logits = model(torch.tensor([sequence], device=model.device), use_cache=False).logits[0]
            found.append(logits.float().log_softmax(-1))
    return found


@dataclass
class Case:
    """exact, rounded: transformers' log-probabilities in float32 and in bf16, one tensor per prompt.

    Each tensor also covers the baseline answer: float32 [len(prompt) + OUTPUT_LEN - 1, vocabulary].
    """

    path: Path
    scale: Scale
    prompts: list[list[int]]
    observations: dict[EngineConfig, Observation] = field(default_factory=dict)
    exact: list[Tensor] = field(default_factory=list)
    rounded: list[Tensor] = field(default_factory=list)

    def observe(self, name: str) -> Observation:
        config = make_config(self.scale, SETTINGS[name], self.prompts)
        if config not in self.observations:
            self.observations[config] = asyncio.run(observe(self.path, config, self.prompts))
            gc.collect()
            torch.cuda.empty_cache()
        return self.observations[config]

    @property
    def answers(self) -> list[list[int]]:
        return self.observe(next(iter(SETTINGS))).first.answers

    @cached_property
    def max_gap(self) -> float:
        """Accepted change of the difference between the logits of two likely tokens, from rounding to bf16."""
        errors = []
        for exact, rounded in zip(self.exact, self.rounded, strict=True):
            likeliest, others = exact.topk(NUM_TOP).indices.split((1, NUM_TOP - 1), 1)
            change = rounded - exact
            errors.append((change.gather(1, others) - change.gather(1, likeliest)).abs().flatten().cpu().numpy())
        return 1.5 * float(np.quantile(np.concatenate(errors), 0.999))


CASES = {
    f"{family}, {widths} widths": (family, scale)
    for widths, scale in (("reduced", REDUCED_SCALE), ("true", TRUE_SCALE))
    for family in PUBLISHED
}


def case_marks(family: str, scale: Scale) -> list[pytest.MarkDecorator]:
    if scale is TRUE_SCALE:
        return [pytest.mark.gpu]
    return [] if family == "llama" else [pytest.mark.slow]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=case_marks(*family_scale)) for name, family_scale in CASES.items()]
)
def case(request, tmp_path_factory) -> Iterator[Case]:
    family, scale = CASES[request.param]
    path = tmp_path_factory.mktemp(family)
    model = make_wide_model(family, reduced=scale.reduced, device=scale.device, dtype=torch.bfloat16)
    write_checkpoint(path, model, dtype=torch.bfloat16, old_config=True)
    case = Case(path, scale, make_prompts(scale, model.config.vocab_size))
    sequences = [prompt + answer[:-1] for prompt, answer in zip(case.prompts, case.answers, strict=True)]
    case.rounded = reference_logprobs(model, sequences)
    case.exact = reference_logprobs(model.float(), sequences)
    del model
    yield case
    # pytest would keep these gigabytes for three sessions.
    shutil.rmtree(path)


def common_length(tokens: list[int], others: list[int]) -> int:
    return next(
        (index for index, pair in enumerate(zip(tokens, others, strict=True)) if pair[0] != pair[1]), OUTPUT_LEN
    )


def require_same_answers(case: Case, found: list[list[int]]) -> None:
    """Where an answer first differs from the baseline, the two float32 logits must be at most `case.max_gap` apart."""
    num_equal = 0
    for index, (tokens, expected) in enumerate(zip(found, case.answers, strict=True)):
        common = common_length(tokens, expected)
        if common == OUTPUT_LEN:
            num_equal += 1
            continue
        prompt_length = len(case.prompts[index])
        logprobs = case.exact[index][prompt_length - 1 + common]
        gap = float((logprobs[tokens[common]] - logprobs[expected[common]]).abs())
        place = f"token {common} after a prompt of {prompt_length}"
        assert gap <= case.max_gap, f"{place}: {tokens} instead of {expected}, whose float32 logits are {gap:.3f} apart"
    assert num_equal >= MIN_AGREEMENT * len(found), f"only {num_equal} of {len(found)} answers are the same"


def score_errors(case: Case, observation: Observation) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns absolute errors of the engine and of bf16 transformers against float32, by group of positions.

    Positions after an answer's first difference from the baseline have no reference and are left out.
    """
    found: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, run in (
        ("after cached prefixes", observation.repeated),
        ("after whole prompts", observation.prompt_scored),
    ):
        for index, (start, ids, logprobs) in enumerate(run.scores):
            answer_start = len(case.prompts[index]) - 1
            end = answer_start + min(common_length(run.answers[index], case.answers[index]) + 1, OUTPUT_LEN)
            exact, rounded = case.exact[index][start:end], case.rounded[index][start:end]
            ids, logprobs = ids[: end - start].to(exact.device), logprobs[: end - start].to(exact.device)
            expected = exact.gather(1, ids)
            own_errors, transformers_errors = (logprobs - expected).abs(), (rounded.gather(1, ids) - expected).abs()
            positions = torch.arange(start, end, device=exact.device)
            is_answer, is_long = positions >= answer_start, positions >= case.scale.long_context
            masks_by_group = {
                "prompts, short contexts": ~is_answer & ~is_long,
                "prompts, long contexts": ~is_answer & is_long,
                f"answers {name}, short contexts": is_answer & ~is_long,
                f"answers {name}, long contexts": is_answer & is_long,
            }
            for group, is_in_group in masks_by_group.items():
                found.setdefault(group, []).append(
                    (own_errors[is_in_group].flatten(), transformers_errors[is_in_group].flatten())
                )
    return {
        group: tuple(torch.cat(errors).cpu().numpy() for errors in zip(*pairs, strict=True))
        for group, pairs in found.items()
    }


def test_answers_depend_on_prompts_and_bf16_decides_few_tokens(case):
    assert len({tuple(answer) for answer in case.answers}) > len(case.prompts) // 4
    logprobs = torch.cat([exact[-OUTPUT_LEN:] for exact in case.exact])
    assert logprobs.std(-1).mean() > LOGIT_STD
    likeliest = logprobs.topk(2).values
    margins = likeliest[:, 0] - likeliest[:, 1]
    assert margins.median() > case.max_gap


def test_baseline_tokens_are_the_likeliest_in_float32(case):
    num_likeliest = 0
    for answer, exact in zip(case.answers, case.exact, strict=True):
        logprobs = exact[-OUTPUT_LEN:]
        tokens = torch.tensor(answer, device=logprobs.device)
        gaps = logprobs.amax(-1) - logprobs.gather(1, tokens[:, None])[:, 0]
        assert gaps.max() <= case.max_gap
        num_likeliest += int((gaps == 0).sum())
    assert num_likeliest >= MIN_AGREEMENT * OUTPUT_LEN * len(case.prompts)


@pytest.mark.parametrize("name", SETTINGS)
def test_logprobs_are_as_near_to_float32_as_those_of_transformers(case, name):
    spread = float(torch.cat([exact[-OUTPUT_LEN:] for exact in case.exact]).std(-1).mean())
    for group, (own_errors, transformers_errors) in score_errors(case, case.observe(name)).items():
        assert own_errors.mean() < MAX_RELATIVE_ERROR * spread, group
        for quantile, max_ratio in MAX_ERROR_RATIO_BY_QUANTILE.items():
            if own_errors.size * (1 - quantile) < MIN_ERRORS_BEYOND:
                continue
            max_error = max_ratio * np.quantile(transformers_errors, quantile) + ERROR_FLOOR
            assert np.quantile(own_errors, quantile) <= max_error, f"{group}, quantile {quantile}"


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_those_of_the_baseline(case, name):
    observation = case.observe(name)
    require_same_answers(case, observation.first.answers)
    if case.scale is TRUE_SCALE:
        replayed = {kind for mode, kind, count in observation.stats.graph_steps if mode != "none" and count}
        assert replayed == ({"decode", "prompt"} if SETTINGS[name].replays_graphs else set())


@pytest.mark.parametrize("name", CACHING_SETTINGS)
def test_answers_after_cached_prefixes_are_those_of_the_baseline(case, name):
    observation = case.observe(name)
    assert sum(observation.repeated.num_cached) > sum(map(len, case.prompts)) // 2
    require_same_answers(case, observation.repeated.answers)

"""Measures the engine on real text, with and without drafts (proposed tokens), by prompt and by kind of prompt."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median

from nanovllm_core import EngineConfig, ModelSpec
from nanovllm_models import Tokenizer
from nanovllm_server.bench.engine_defaults import find_device_and_dtype
from nanovllm_server.bench.report import BenchError, OutputFiles, Table, report
from nanovllm_server.bench.speculation.paired_runs import PromptRuns, run_pairs
from nanovllm_server.bench.speculation.prompt_files import Prompt, read_prompts
from nanovllm_server.protocol.json import JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationOptions:
    """Options of a run. config: for the engine with drafts. max_per_kind: prompts of each kind; None for all."""

    config: EngineConfig
    max_per_kind: int | None
    num_rounds: int
    output_len: int
    files: OutputFiles


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Figures of one prompt. Rates and the ratio are medians over the rounds.

    plain_rate, drafted_rate: decoded tokens per second without and with drafts.
    ratio: median of the rounds' ratios (rate with drafts / rate without drafts, of two consecutive runs).
    num_output_tokens, num_accepted, num_verified: sums over all rounds with drafts. Verified drafts are the accepted
        and the rejected drafts.
    num_steps: number of steps of the engine with drafts, in all rounds, that gave at least one token.
    """

    prompt: Prompt
    num_prompt_tokens: int
    num_output_tokens: int
    plain_rate: float
    drafted_rate: float
    ratio: float
    num_accepted: int
    num_verified: int
    num_steps: int
    runs: PromptRuns

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a step of the engine with drafts gives."""
        return self.num_output_tokens / self.num_steps

    @property
    def is_equal(self) -> bool:
        """Whether drafts changed no token in any round."""
        return not self.runs.differences


@dataclass(frozen=True, slots=True)
class KindResult:
    """The figures of all prompts of a kind.

    median_ratio, min_ratio, max_ratio: median, minimum and maximum of the prompts' ratios.
    acceptance: accepted drafts / verified drafts; 0 if there were no drafts.
    num_equal: number of prompts whose answers are equal in all rounds.
    """

    kind: str
    num_prompts: int
    median_ratio: float
    min_ratio: float
    max_ratio: float
    acceptance: float
    tokens_per_step: float
    num_equal: int


def run(options: SpeculationOptions, spec: ModelSpec, tokenizer: Tokenizer) -> None:
    """Measures and reports all prompts. Then raises BenchError if drafts changed an answer.

    Also raises the errors of `run_pairs`, and TemplateError if the model has no chat template.
    """
    prompts = read_prompts(options.max_per_kind)
    token_ids = [_encode_prompt(tokenizer, prompt) for prompt in prompts]
    kinds = [prompt.kind for prompt in prompts]
    runs = asyncio.run(
        run_pairs(
            spec,
            options.config,
            token_ids,
            [kinds.index(kind) for kind in dict.fromkeys(kinds)],  # The first prompt of each kind.
            options.num_rounds,
            options.output_len,
        )
    )
    results = [
        summarize_prompt(prompt, len(ids), prompt_runs)
        for prompt, ids, prompt_runs in zip(prompts, token_ids, runs, strict=True)
    ]
    device, dtype = find_device_and_dtype(spec, options.config)
    report(
        "speculation",
        f"speculation: {spec.name} in {dtype} on {device}; one request at a time, greedy, up to {options.output_len} "
        f"tokens, at most {options.config.num_speculative_tokens} drafts ({options.config.speculate}), median of "
        f"{options.num_rounds}",
        make_tables(results),
        {
            "model": spec.name,
            "dtype": dtype,
            "device": device,
            "method": options.config.speculate,
            "num_speculative_tokens": options.config.num_speculative_tokens,
            "output_len": options.output_len,
            "rounds": options.num_rounds,
            "kinds": [*map(asdict, summarize_kinds(results))],
            "prompts": [_prompt_figures(result) for result in results],
        },
        options.files,
    )
    changed_prompt_names = [result.prompt.name for result in results if not result.is_equal]
    if changed_prompt_names:
        raise BenchError(f"answers with and without drafts differ: {', '.join(changed_prompt_names)}")


def summarize_prompt(prompt: Prompt, num_prompt_tokens: int, runs: PromptRuns) -> PromptResult:
    """Combines the rounds of one prompt."""
    drafted_runs = [pair.drafted for pair in runs.pairs]
    num_output_tokens = sum(len(run.token_ids) for run in drafted_runs)
    num_accepted = sum(run.num_accepted for run in drafted_runs)
    return PromptResult(
        prompt,
        num_prompt_tokens,
        num_output_tokens,
        median(pair.plain.tokens_per_s for pair in runs.pairs),
        median(run.tokens_per_s for run in drafted_runs),
        median(pair.ratio for pair in runs.pairs),
        num_accepted,
        num_accepted + sum(run.num_rejected for run in drafted_runs),
        num_output_tokens - num_accepted,
        runs,
    )


def summarize_kinds(results: Sequence[PromptResult]) -> list[KindResult]:
    """Combines the prompts of each kind."""
    summaries: list[KindResult] = []
    for kind in dict.fromkeys(result.prompt.kind for result in results):
        results_of_kind = [result for result in results if result.prompt.kind == kind]
        ratios = [result.ratio for result in results_of_kind]
        num_verified = sum(result.num_verified for result in results_of_kind)
        summaries.append(
            KindResult(
                kind,
                len(results_of_kind),
                median(ratios),
                min(ratios),
                max(ratios),
                sum(result.num_accepted for result in results_of_kind) / max(num_verified, 1),
                sum(result.num_output_tokens for result in results_of_kind)
                / sum(result.num_steps for result in results_of_kind),
                sum(result.is_equal for result in results_of_kind),
            )
        )
    return summaries


def make_tables(results: Sequence[PromptResult]) -> list[Table]:
    """Makes a table of the prompts, a table of the kinds, and a table of the differences if there are any."""
    shared_header = ["tok/s without", "with", "ratio", "accepted", "verified", "tok/step", "equal"]
    prompt_rows = [
        [
            result.prompt.kind,
            result.prompt.name,
            str(result.num_prompt_tokens),
            f"{result.num_output_tokens / len(result.runs.pairs):.0f}",
            f"{result.plain_rate:.1f}",
            f"{result.drafted_rate:.1f}",
            f"{result.ratio:.3f}",
            str(result.num_accepted),
            str(result.num_verified),
            f"{result.tokens_per_step:.2f}",
            "yes" if result.is_equal else "no",
        ]
        for result in results
    ]
    kind_rows = [
        [
            kind.kind,
            str(kind.num_prompts),
            *(f"{ratio:.3f}" for ratio in (kind.median_ratio, kind.min_ratio, kind.max_ratio)),
            f"{100 * kind.acceptance:.1f}%",
            f"{kind.tokens_per_step:.2f}",
            f"{kind.num_equal} of {kind.num_prompts}",
        ]
        for kind in summarize_kinds(results)
    ]
    tables: list[Table] = [
        [["kind", "prompt", "tokens in", "out", *shared_header], *prompt_rows],
        [["kind", "prompts", "median ratio", "min", "max", "acceptance", "tok/step", "equal"], *kind_rows],
    ]
    if not all(result.is_equal for result in results):
        tables.append(_make_difference_table(results))
    return tables


def _make_difference_table(results: Sequence[PromptResult]) -> Table:
    header = [
        "prompt with different answers",
        "round",
        "position",
        "token without drafts",
        "token with drafts",
        "log-probability of the first minus the second",
    ]
    rows = [
        [
            result.prompt.name,
            str(difference.round_index + 1),
            str(difference.position),
            str(difference.token_without_drafts),
            str(difference.token_with_drafts),
            "unknown" if difference.margin is None else f"{difference.margin:.6f}",
        ]
        for result in results
        for difference in result.runs.differences
    ]
    return [header, *rows]


def _encode_prompt(tokenizer: Tokenizer, prompt: Prompt) -> tuple[int, ...]:
    text = tokenizer.render_chat([{"role": "user", "content": prompt.text}])
    return tuple(tokenizer.encode(text, add_special_tokens=False).tolist())


def _prompt_figures(result: PromptResult) -> dict[str, JSON]:
    return {
        "kind": result.prompt.kind,
        "name": result.prompt.name,
        "prompt_tokens": result.num_prompt_tokens,
        "plain_rate": result.plain_rate,
        "drafted_rate": result.drafted_rate,
        "ratio": result.ratio,
        "accepted": result.num_accepted,
        "verified": result.num_verified,
        "tokens_per_step": result.tokens_per_step,
        "rounds": [
            {
                "output_tokens": len(pair.plain.token_ids),
                "plain_rate": pair.plain.tokens_per_s,
                "drafted_rate": pair.drafted.tokens_per_s,
                "accepted": pair.drafted.num_accepted,
                "rejected": pair.drafted.num_rejected,
            }
            for pair in result.runs.pairs
        ],
        "differences": [asdict(difference) for difference in result.runs.differences],
    }

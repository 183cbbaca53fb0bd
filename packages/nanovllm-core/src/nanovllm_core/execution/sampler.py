"""From logits to tokens, and from the device's tensors to the host's answers.

This room must not know which request a row belongs to.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanovllm_core.execution.inputs import to_device
from nanovllm_core.execution.landing import Place
from nanovllm_core.execution.request_table import Needs, RequestTable
from nanovllm_core.request import PromptLogprobs, TokenLogprobs
from nanovllm_core.scheduling.plan import StepTokens
from nanovllm_kernels.sampling import apply_bias_, apply_masks_, apply_penalties, forbid_, logprobs, ranks, sample

# What changes logits before the draw, besides penalties.
ADJUSTMENTS = int(Needs.BIAS | Needs.FORBID | Needs.MASK)
# Of a prompt, logits of so many tokens are there at once: of 150,000 in float32, 80 MB.
SCORED_AT_ONCE = 128


class Sampled(NamedTuple):
    """Tokens int32 [n], and log-probabilities of the m rows that asked, None when nobody did: chosen float32 [m], top
    int32 and float32 [m, k].
    """

    tokens: Tensor
    chosen: Tensor | None
    top_ids: Tensor | None
    top_logprobs: Tensor | None


class Scored(NamedTuple):
    """Log-probabilities of n tokens of a prompt, as `PromptLogprobs` has them: logprobs float32 [n]; ranks int32 [n];
    top_ids int32, top_logprobs float32 [n, num_top].
    """

    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class Masks(NamedTuple):
    """Which tokens may be drawn in some of a step's rows: `which` and `masks` of `apply_masks_`."""

    which: Tensor
    bits: Tensor


Gather = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]


def gather(rows: Tensor, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Of each of `columns` [R] what it says of `rows` int32 [n]: [n] each."""
    return tuple(column.index_select(0, rows) for column in columns)


def draw(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    table: RequestTable,
    needs: int,
    gather_settings: Gather,
    masks: Masks | None = None,
) -> Tensor:
    """Choose a token for each row of `logits` [n, vocab], of the requests in `rows` int32 [n]: int32 [n].

    positions: int32 [n], which the tokens will have. needs: `Needs` of all rows together; more than the rows need gives
    the same tokens. gather_settings: `gather`, or what was compiled of it. masks: what some may not choose, whatever
    else they ask for; None unless `needs` has MASK.
    """
    if needs & Needs.PENALTY:
        penalties = table.repetition, table.presence, table.frequency
        logits = apply_penalties(logits, rows, table.counts, *penalties)
    elif needs & ADJUSTMENTS:
        # A copy: log-probabilities are of the model's own logits.
        logits = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if needs & Needs.BIAS:
        apply_bias_(logits, rows, positions, table.bias_ids, table.bias_values, table.bias_until)
    if needs & Needs.FORBID:
        forbid_(logits, rows, positions, table.tokens, table.num_prompt, table.forbidden)
    if masks is not None:
        apply_masks_(logits, masks.which, masks.bits)
    settings = (table.temperature, table.top_k, table.top_p, table.min_p, table.seeds)
    if needs & Needs.RANDOM:
        settings = gather_settings(rows, settings)
    temperature, top_k, top_p, min_p, seeds = settings
    all_greedy, any_filter = not needs & Needs.RANDOM, bool(needs & Needs.FILTER)
    return sample(
        logits, temperature, top_k, top_p, min_p, seeds, positions, all_greedy=all_greedy, any_filter=any_filter
    )


def with_logprobs(
    tokens: Tensor, logits: Tensor, which: NDArray[np.int64], num_logprobs: NDArray[np.int64], most: int
) -> Sampled:
    """`tokens` [n] with log-probabilities, for those that asked, of the model's own distributions [n, vocab].

    which: the rows that sample. num_logprobs: how many likeliest tokens each of them wants beside its own, -1 for
    nothing; `most` is the largest of these.
    """
    if most < 0:
        return Sampled(tokens, None, None, None)
    asked, of_asked = which[num_logprobs >= 0], tokens
    if asked.size < len(tokens):
        rows = to_device(asked.astype(np.int32), tokens.device).to(tokens.device, non_blocking=True)
        of_asked, logits = tokens.index_select(0, rows), logits.index_select(0, rows)
    found = logprobs(logits, of_asked, most)
    return Sampled(tokens, found.chosen, found.top_ids, found.top_logprobs)


def score(hidden: Tensor, tokens: Tensor, num_top: int, compute_logits: Callable[[Tensor], Tensor]) -> Scored:
    """Log-probabilities of `tokens` int32 [n], each after the one whose hidden state is that of `hidden` [n, size], and
    of the `num_top` likeliest in their places. Logits are made and dropped piece by piece.
    """

    def piece(hidden: Tensor, tokens: Tensor) -> Scored:
        logits = compute_logits(hidden)
        found = logprobs(logits, tokens, num_top)
        return Scored(found.chosen, ranks(logits, tokens), found.top_ids, found.top_logprobs)

    pieces = map(piece, hidden.split(SCORED_AT_ONCE), tokens.split(SCORED_AT_ONCE))
    return Scored(*map(torch.cat, zip(*pieces, strict=True)))


class StepHandle:
    """A step in flight: its tokens are on their way to the host.

    sampled: of every request of the step and perhaps of padding behind them, None when none samples. which: int64, the
    requests that do, rising. num_logprobs: int64, of each. place: on CUDA, where the tokens are to land; it is this
    step's until `depth` others have begun, so that they must have been read by then. failed: which of the requests that
    sample have no token, and why. scored: of each part of a prompt that the step was to tell of.

    Every step on CUDA ends with a recorded event, a step that samples nothing too: `wait` bounds the steps in flight,
    and copies on other streams wait for it.
    """

    def __init__(
        self,
        sampled: Sampled | None,
        which: NDArray[np.int64],
        num_logprobs: NDArray[np.int64],
        place: Place | None,
        failed: Sequence[tuple[int, str]] = (),
        scored: Sequence[Scored] = (),
    ):
        self._failed = failed
        self._which = which
        self._num_logprobs = num_logprobs
        self._numbers = np.zeros(0, np.int32)
        if sampled is not None:
            tokens, *rest = sampled
            if place is None:
                self._numbers = tokens.numpy()
            else:
                self._numbers = place.numbers
                place.first(len(tokens)).copy_(tokens, non_blocking=True)
                sampled = Sampled(tokens, *(None if tensor is None else _to_host(tensor) for tensor in rest))
        if place is not None:
            scored = [Scored(*map(_to_host, each)) for each in scored]
        self._place = place
        if place is not None:
            place.end.record(place.stream)
        self._sampled = sampled
        self._scored = scored
        # What the host took to launch the step; on a CPU that is to compute it.
        self.launch_s = 0.0

    @property
    def ready(self) -> bool:
        """Whether the device has ended the step."""
        return self._place is None or self._place.end.query()

    def wait(self) -> None:
        """Wait until the device has ended the step."""
        if self._place is not None:
            self._place.end.synchronize()

    @property
    def events(self) -> tuple[torch.cuda.Event, torch.cuda.Event] | None:
        """When a GPU began the step and ended it; None on a CPU."""
        return None if self._place is None else (self._place.begin, self._place.end)

    @property
    def seconds(self) -> float:
        """What the step took on the device; to be read when the step has ended."""
        if self._place is None:
            return self.launch_s
        return self._place.begin.elapsed_time(self._place.end) / 1e3

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """The tokens alone, of the requests that sample; to be called when the step has ended."""
        return self._numbers[self._which]

    def tokens(self) -> StepTokens:
        """What was sampled, and found of prompts; to be called when the step has ended."""
        sampled, tokens = self._sampled, self.token_ids
        scored = [_packed(each) for each in self._scored]
        if sampled is None or sampled.chosen is None or sampled.top_ids is None or sampled.top_logprobs is None:
            return StepTokens(tokens, (), self._failed, scored)
        chosen, ids, values = sampled.chosen.tolist(), sampled.top_ids.tolist(), sampled.top_logprobs.tolist()
        counts = self._num_logprobs.tolist()
        asked = [index for index, count in enumerate(counts) if count >= 0]
        return StepTokens(
            tokens,
            [
                (index, TokenLogprobs(chosen[at], tuple(zip(ids[at], values[at], strict=True))[: counts[index]]))
                for at, index in enumerate(asked)
            ],
            self._failed,
            scored,
        )


def _packed(scored: Scored) -> PromptLogprobs:
    return PromptLogprobs(scored.top_ids.shape[1], *(tensor.numpy().tobytes() for tensor in scored))


def _to_host(tensor: Tensor) -> Tensor:
    # On the stream of the step: a few microseconds, and the next step, queued behind, may overwrite the source.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

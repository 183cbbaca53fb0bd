"""Tests that drafts change no bit of the states of Gated DeltaNet, in plain torch."""

import pytest
import torch
from draft_traces import NUM_TAPS, LayerCache, LayerShape, make_tokens, make_weights
from torch import Tensor

from nanovllm_kernels.linear_attention import CHECKPOINT_INTERVAL, conv_state_shape

SHAPE = LayerShape()
MAX_DRAFTS = 3
NUM_TRACES, NUM_STEPS = 1000, 11
# Each trace begins after one of these numbers of tokens. The decode after 63 tokens saves a checkpoint.
PROMPT_LENS = (0, CHECKPOINT_INTERVAL - 1, CHECKPOINT_INTERVAL, 2 * CHECKPOINT_INTERVAL + 2)


class Traces:
    """Random traces of drafts, and the states of the same tokens without drafts.

    Slots: traces, then prompts, then one checkpoint per trace (used after a prompt of 63 tokens), then checkpoints of
    the prompts at 64 tokens.
    """

    def __init__(self, seed: int, state_dtype: torch.dtype):
        self.generator = torch.Generator().manual_seed(seed)
        self.traces = torch.arange(NUM_TRACES)
        num_prompts = len(PROMPT_LENS)
        self.saved_slots = NUM_TRACES + num_prompts + 1 + self.traces
        self.shared_slots = 2 * NUM_TRACES + num_prompts + 1 + torch.arange(num_prompts)
        weights = make_weights(SHAPE, self.generator)
        self.plain, self.drafted = (
            LayerCache(
                SHAPE,
                weights,
                NUM_TRACES + num_prompts,
                2 * (NUM_TRACES + num_prompts) + 1,
                max_drafts=max_drafts,
                state_dtype=state_dtype,
            )
            for max_drafts in (None, MAX_DRAFTS)
        )
        kinds = torch.randint(0, num_prompts, (NUM_TRACES,), generator=self.generator)
        self.first_positions = torch.tensor(PROMPT_LENS)[kinds]
        prompt = make_tokens(SHAPE, (max(PROMPT_LENS),), self.generator)
        for cache in (self.plain, self.drafted):
            self.start(cache, prompt, kinds)
        assert torch.equal(self.plain.states[self.shared_slots[2:]], self.drafted.states[self.shared_slots[2:]])
        self.tokens = make_tokens(SHAPE, (NUM_TRACES, NUM_STEPS * (1 + MAX_DRAFTS)), self.generator)
        self.compute_expected()

    def draw_counts(self, largest: Tensor) -> Tensor:
        """Draw a number in 0..largest for each element."""
        return (torch.rand(len(largest), generator=self.generator) * (largest + 1)).long()

    def start(self, cache: LayerCache, prompt: Tensor, kinds: Tensor) -> None:
        """Compute the prompts in chunks, and start each trace from a copy of a prompt's state."""
        for kind, length in enumerate(PROMPT_LENS):
            request = torch.tensor([NUM_TRACES + kind])
            pairs = torch.tensor([[[CHECKPOINT_INTERVAL, self.shared_slots[kind]]]], dtype=torch.int32)
            for chunk in prompt[:length].split(50):
                cache.run(request, chunk, torch.tensor([len(chunk)]), num_decodes=0, checkpoints=pairs)
        cache.copy(NUM_TRACES + 1 + kinds, 1 + self.traces)
        cache.num_computed[self.traces] = self.first_positions.int()

    def compute_expected(self) -> None:
        """Compute one token per trace and step with caches that have no drafts."""
        outs, states = [], []
        ones = torch.ones(NUM_TRACES, dtype=torch.long)
        for index in range(self.tokens.shape[1]):
            pairs = self.checkpoints(self.traces)
            tokens = self.tokens[:, index]
            out = self.plain.run(self.traces, tokens, ones, num_decodes=NUM_TRACES, checkpoints=pairs)
            outs.append(out)
            states.append(self.plain.states[1 + self.traces])
        self.expected_outs, self.expected_states = torch.stack(outs), torch.stack(states)

    def checkpoints(self, traces: Tensor) -> Tensor:
        position = torch.full_like(traces, CHECKPOINT_INTERVAL)
        return torch.stack((position, self.saved_slots[traces]), 1).int().unsqueeze(1)

    def step(self, *, has_drafts: bool) -> tuple[int, int]:
        """Run a step of about 90 % of the traces, and check results and states of their tokens.

        A step without drafts also has a chunk of a prompt. Returns: numbers of drafts and of accepted drafts.
        """
        traces = self.traces[torch.rand(NUM_TRACES, generator=self.generator) < 0.9]
        query_lens = torch.ones_like(traces)
        if has_drafts:
            query_lens += self.draw_counts(torch.full_like(traces, MAX_DRAFTS))
        num_accepted = self.draw_counts(query_lens - 1)
        num_done = (self.drafted.num_computed[traces] - self.first_positions[traces]).long()
        owners = traces.repeat_interleave(query_lens)
        offsets = torch.arange(len(owners)) - (query_lens.cumsum(0) - query_lens).repeat_interleave(query_lens)
        is_right = offsets <= num_accepted.repeat_interleave(query_lens)
        indices = num_done.repeat_interleave(query_lens) + offsets
        wrong_tokens = make_tokens(SHAPE, (len(owners),), self.generator)
        tokens = torch.where(is_right.unsqueeze(1), self.tokens[owners, indices], wrong_tokens)
        if has_drafts:
            out = self.drafted.run(traces, tokens, query_lens, has_drafts=True)
            self.drafted.reject(traces, query_lens, num_accepted)
        else:
            out = self.run_with_prompt(traces, tokens)[: len(tokens)]
        assert torch.equal(out[is_right], self.expected_outs[indices[is_right], owners[is_right]])
        assert torch.equal(self.drafted.states[1 + traces], self.expected_states[num_done, traces])
        return int(query_lens.sum() - len(traces)), int(num_accepted.sum())

    def run_with_prompt(self, traces: Tensor, tokens: Tensor) -> Tensor:
        """Run one token of each trace together with a chunk of the last prompt, and check the prompt's state."""
        prompt = torch.tensor([NUM_TRACES + len(PROMPT_LENS) - 1])
        chunk = make_tokens(SHAPE, (MAX_DRAFTS,), self.generator)
        chunk_len = torch.tensor([len(chunk)])
        self.plain.run(prompt, chunk, chunk_len, num_decodes=0)
        out = self.drafted.run(
            torch.cat((traces, prompt)),
            torch.cat((tokens, chunk)),
            torch.cat((torch.ones_like(traces), chunk_len)),
            num_decodes=len(traces),
            checkpoints=torch.cat((self.checkpoints(traces), torch.zeros(1, 1, 2, dtype=torch.int32))),
        )
        assert torch.equal(self.drafted.states[1 + prompt], self.plain.states[1 + prompt])
        return out

    def restart_some(self) -> int:
        """Start some traces again from the checkpoints that their decodes have saved. Returns the number of traces."""
        traces = self.traces[torch.rand(NUM_TRACES, generator=self.generator) < 0.2]
        has_checkpoint = ~self.drafted.states[self.saved_slots[traces]].isnan().flatten(1).any(1)
        traces = traces[has_checkpoint]
        slots = self.saved_slots[traces]
        assert torch.equal(self.drafted.states[slots], self.plain.states[slots])
        position = torch.full_like(traces, CHECKPOINT_INTERVAL)
        assert torch.equal(self.drafted.conv_inputs(slots, position), self.plain.conv_inputs(slots, position))
        self.drafted.copy(slots, 1 + traces)
        self.drafted.num_computed[traces] = CHECKPOINT_INTERVAL
        self.drafted.num_pending[traces] = 0
        return len(traces)


@pytest.mark.parametrize("seed", range(10))
def test_drafts_change_no_bit_of_states_and_results(seed):
    """All seeds together have 10,000 traces of 11 steps each."""
    traces = Traces(seed, torch.float32 if seed % 2 == 0 else torch.bfloat16)
    # The first step has no drafts, so that decodes save checkpoints at 64 tokens.
    num_drafts, num_accepted = traces.step(has_drafts=False)
    num_restarts = 0
    for has_drafts in (True, True, False, True, True, True, False, False, True, True):
        counts = traces.step(has_drafts=has_drafts)
        num_drafts, num_accepted = num_drafts + counts[0], num_accepted + counts[1]
        num_restarts += traces.restart_some()
    assert num_drafts > num_accepted > 4 * NUM_TRACES
    assert num_restarts > NUM_TRACES / 10


def run_once(cache: LayerCache, query_len: int, **options) -> None:
    tokens = make_tokens(SHAPE, (query_len,), torch.Generator().manual_seed(0))
    cache.run(torch.tensor([0]), tokens, torch.tensor([query_len]), **options)


def make_cache(max_drafts: int | None) -> LayerCache:
    return LayerCache(SHAPE, make_weights(SHAPE, torch.Generator().manual_seed(0)), 1, 2, max_drafts=max_drafts)


def test_caches_without_drafts_have_one_row_per_tap():
    assert conv_state_shape(NUM_TAPS, 48, 1, 0) == (NUM_TAPS, 48)
    assert conv_state_shape(NUM_TAPS, 48, 1, 3) == (NUM_TAPS + 6, 50)


def test_wrong_caches_and_too_many_drafts_are_rejected():
    with pytest.raises(ValueError, match="has_drafts is set, but num_pending is None"):
        run_once(make_cache(None), 2, has_drafts=True)
    cache = make_cache(MAX_DRAFTS)
    run_once(cache, 1 + MAX_DRAFTS, has_drafts=True)
    with pytest.raises(ValueError, match="5 tokens of a request, but the caches are for at most 3 drafts"):
        run_once(cache, 2 + MAX_DRAFTS, has_drafts=True)
    cache.has_ring = False
    with pytest.raises(ValueError, match="num_pending is None, but conv_states has 10 rows for 4 taps"):
        run_once(cache, 1, num_decodes=1)
    cache = make_cache(None)
    cache.has_ring = True
    with pytest.raises(ValueError, match="num_pending is set, but conv_states has 4 rows for 4 taps"):
        run_once(cache, 1, num_decodes=1)

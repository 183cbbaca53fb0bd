"""Loads of checkpoints of recurrent layers, on a simulated device that checks the state of each slot that it reads."""

import random

from simulated_device import VOCAB, Device, SimulatedHost, run_plan

from nanovllm_core.cache.host_memory import Direction, HostLayout
from nanovllm_core.cache.manager import CacheManager
from nanovllm_core.cache.state_pool import StatePool
from nanovllm_core.cache.tiers import HostTier
from nanovllm_core.request import Request
from nanovllm_core.request_state import RequestState
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.scheduling.budget import StepLimits
from nanovllm_core.scheduling.scheduler import Scheduler

BLOCK_SIZE = 16


class ImmediateHost(SimulatedHost):
    """Host memory whose copies end at once."""

    def advance(self) -> None:
        for direction in Direction:
            while self.pending[direction]:
                for part in self.pending[direction].popleft():
                    self.copy(direction, part)
                self.done[direction] += 1


class RecurrentEngine:
    def __init__(self, num_state_slots: int, max_num_seqs: int):
        self.rng = random.Random(0)
        self.max_num_seqs = max_num_seqs
        self.device = Device(BLOCK_SIZE, 0, states={})
        self.host = ImmediateHost(HostLayout(1, 1, (1, 1), (400, 40)), [self.device], self.rng, failure_rate=0)
        tier = HostTier(self.host, BLOCK_SIZE, lambda *_: 1e9, None)
        state_pool = StatePool(num_state_slots, max_num_seqs, BLOCK_SIZE)
        cache = CacheManager(
            400, BLOCK_SIZE, prefix_caching=True, hash_algorithm="sha256", watermark=0, state_pool=state_pool, tier=tier
        )
        self.scheduler = Scheduler(
            [cache],
            max_num_seqs=max_num_seqs,
            limits=StepLimits(4000),
            max_model_len=1000,
            eos_token_ids=[1],
            tier=tier,
        )
        self.num_requests = self.num_loads = 0

    def random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(2, VOCAB) for _ in range(count)]

    def submit(self, prompt: list[int]) -> None:
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        request = Request(f"r{self.num_requests}", prompt, sampling, arrival_time=float(self.num_requests))
        self.scheduler.add(RequestState(self.num_requests, request))
        self.num_requests += 1

    def run(self, *prompts: list[int]) -> None:
        """Serve prompts that arrive at once."""
        for prompt in prompts:
            self.submit(prompt)
        # The last steps store the entries of the last requests.
        for _ in range(20):
            self.num_loads += len(self.scheduler.complete_copies())
            self.copy(has_plan=False)
            step = self.scheduler.schedule()
            self.copy(has_plan=step is not None)
            if step is not None:
                self.scheduler.complete(step, run_plan([self.device], self.max_num_seqs, step.plan))
        assert self.scheduler.num_waiting == self.scheduler.rows.num_running == 0

    def copy(self, *, has_plan: bool) -> None:
        self.host.launch(self.scheduler.take_copies(has_plan=has_plan))
        self.host.advance()


def test_a_load_does_not_overwrite_the_checkpoint_from_which_a_planned_request_starts():
    engine = RecurrentEngine(num_state_slots=4, max_num_seqs=2)
    first, second, third = (engine.random_tokens(200) for _ in range(3))
    for prompt in (second[:70], second[:134], first[:70], second[:64] + engine.random_tokens(5), third[:70]):
        engine.run(prompt)
    for prefix in (second, first):
        engine.run(prefix[:64] + engine.random_tokens(5))
    # The slot of the first prompt's checkpoint is the only free slot for the state that the second prompt loads.
    engine.run(first[:64] + engine.random_tokens(66), second[:128] + engine.random_tokens(80))
    assert engine.num_loads > 0


def test_loads_leave_a_state_slot_for_each_request_that_may_start():
    engine = RecurrentEngine(num_state_slots=5, max_num_seqs=3)
    prompts = [engine.random_tokens(134) for _ in range(2)]
    for prompt in prompts:
        engine.run(prompt)
    # To load its blocks, a prompt would have to hold its checkpoint, which is still in the cache.
    engine.scheduler.caches[0].pool.forget_hashes()
    engine.run(*prompts, engine.random_tokens(10))
    # With free slots, the prompts load their blocks.
    engine = RecurrentEngine(num_state_slots=9, max_num_seqs=3)
    for prompt in prompts:
        engine.run(prompt)
    engine.scheduler.caches[0].pool.forget_hashes()
    engine.run(*prompts)
    assert engine.num_loads > 0

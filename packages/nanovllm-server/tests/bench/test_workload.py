"""The requests of benchmarks are reproducible and have the given shape."""

from nanovllm_server.bench.workload import (
    SINGLE_TOKEN_WORDS,
    IntegerRange,
    WorkloadShape,
    arrival_times,
    random_prompts,
    random_requests,
    random_text_requests,
)

SHAPE = WorkloadShape(50, IntegerRange(3, 9), IntegerRange(2, 5), prefix_len=4)


def test_benchmark_of_nano_vllm_has_133966_output_tokens():
    requests = random_requests(WorkloadShape(256, IntegerRange(100, 1024), IntegerRange(100, 1024)), vocab_size=151_936)
    assert sum(request.max_tokens for request in requests) == 133_966
    assert max(max(request.prompt) for request in requests) == 10_000


def test_requests_have_the_given_shape():
    requests = random_requests(SHAPE, vocab_size=20)
    assert requests == random_requests(SHAPE, vocab_size=20)
    assert len({request.prompt[:4] for request in requests}) == 1
    assert {len(request.prompt) for request in requests} == set(range(7, 14))
    assert {request.max_tokens for request in requests} == {2, 3, 4, 5}
    assert max(max(request.prompt) for request in requests) == 19


def test_prompts_use_the_whole_vocabulary():
    prompts = random_prompts(20, 30, vocab_size=7)
    assert {token for prompt in prompts for token in prompt} == set(range(7))
    assert len(set(prompts)) == 20


def test_another_seed_changes_words_and_not_lengths():
    requests, other_requests = random_text_requests(SHAPE, "1"), random_text_requests(SHAPE, "2")
    assert requests == random_text_requests(SHAPE, "1")
    assert not {request.text for request in requests} & {request.text for request in other_requests}
    lengths = [(len(request.text.split()), request.max_tokens) for request in requests]
    assert lengths == [(len(request.text.split()), request.max_tokens) for request in other_requests]
    assert {num_words for num_words, _ in lengths} == set(range(7, 14))
    assert len({tuple(request.text.split()[:4]) for request in requests}) == 1


def test_words_are_distinct():
    assert len(set(SINGLE_TOKEN_WORDS)) == len(SINGLE_TOKEN_WORDS)


def test_arrivals_come_at_their_rate_or_at_once():
    assert arrival_times(3, None) == [0.0, 0.0, 0.0]
    times = arrival_times(2000, 4.0)
    assert times == sorted(times)
    assert times[0] == 0.0
    assert 450 < times[-1] < 550

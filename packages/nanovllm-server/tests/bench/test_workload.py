"""The requests of benchmarks are reproducible and have the given shape."""

from nanovllm_server.bench.workload import (
    WORDS,
    Lengths,
    WorkloadShape,
    arrivals,
    random_chats,
    random_prompts,
    random_works,
)

SHAPE = WorkloadShape(50, Lengths(3, 9), Lengths(2, 5), prefix=4)


def test_nano_bench_has_133966_output_tokens():
    works = random_works(WorkloadShape(256, Lengths(100, 1024), Lengths(100, 1024)), vocab_size=151_936)
    assert sum(work.max_tokens for work in works) == 133_966
    assert max(max(work.prompt) for work in works) == 10_000


def test_requests_have_the_given_shape():
    works = random_works(SHAPE, vocab_size=20)
    assert works == random_works(SHAPE, vocab_size=20)
    assert len({work.prompt[:4] for work in works}) == 1
    assert {len(work.prompt) for work in works} == set(range(7, 14))
    assert {work.max_tokens for work in works} == {2, 3, 4, 5}
    assert max(max(work.prompt) for work in works) == 19


def test_prompts_use_the_vocabulary():
    prompts = random_prompts(20, 30, vocab_size=7)
    assert {token for prompt in prompts for token in prompt} == set(range(7))
    assert len(set(prompts)) == 20


def test_another_seed_changes_words_and_not_lengths():
    one, other = random_chats(SHAPE, "1"), random_chats(SHAPE, "2")
    assert one == random_chats(SHAPE, "1")
    assert not {chat.text for chat in one} & {chat.text for chat in other}
    lengths = [[(len(chat.text.split()), chat.max_tokens) for chat in chats] for chats in (one, other)]
    assert lengths[0] == lengths[1]
    assert {count for count, _ in lengths[0]} == set(range(7, 14))
    assert len({tuple(chat.text.split()[:4]) for chat in one}) == 1


def test_words_are_distinct():
    assert len(set(WORDS)) == len(WORDS)


def test_arrivals_come_at_their_rate_or_at_once():
    assert arrivals(3, None) == [0.0, 0.0, 0.0]
    times = arrivals(2000, 4.0)
    assert times == sorted(times)
    assert times[0] == 0.0
    assert 450 < times[-1] < 550

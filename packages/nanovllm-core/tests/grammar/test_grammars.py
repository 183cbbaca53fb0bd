import asyncio
import threading

import pytest
import toy_model
from grammars import JSON, REGEX

from nanovllm_core import GrammarError, GrammarSpec, Vocabulary
from nanovllm_core.grammar import grammars
from nanovllm_core.grammar.compiler import Compiler
from nanovllm_core.grammar.grammars import Grammars
from nanovllm_core.grammar.schema_enforcement import convert_grammar
from nanovllm_core.grammar_types import ParameterTypes


@pytest.fixture
async def grammar_cache(vetter, monkeypatch):
    vetter.use(monkeypatch)
    grammar_cache = Grammars(toy_model.toy_vocabulary, toy_model.VOCAB, (toy_model.EOS,))
    yield grammar_cache
    grammar_cache.close()


@pytest.fixture
def compiled_specs(monkeypatch) -> list[GrammarSpec]:
    specs: list[GrammarSpec] = []
    compile_one = Compiler.compile

    def record_spec(compiler: Compiler, spec: GrammarSpec, parameter_types: ParameterTypes, rules: str | None):
        specs.append(spec)
        return compile_one(compiler, spec, parameter_types, rules)

    monkeypatch.setattr(Compiler, "compile", record_spec)
    return specs


def converted(*specs: GrammarSpec) -> list[GrammarSpec]:
    return [convert_grammar(spec).spec for spec in specs]


async def test_grammar_is_compiled_once_for_concurrent_and_cancelled_callers(grammar_cache, compiled_specs):
    waiting = [asyncio.create_task(grammar_cache.compile(REGEX)) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    found = await asyncio.gather(*waiting[1:])
    assert len(set(map(id, found))) == 1
    assert await grammar_cache.compile(GrammarSpec(REGEX.kind, REGEX.source)) is found[0]
    assert grammar_cache.get(REGEX) is found[0]
    assert compiled_specs == converted(REGEX)


async def test_a_compilation_without_callers_never_begins(vetter, compiled_specs, monkeypatch):
    vetter.use(monkeypatch)
    monkeypatch.setattr(grammars, "NUM_COMPILE_THREADS", 1)
    grammar_cache = Grammars(toy_model.toy_vocabulary, toy_model.VOCAB, (toy_model.EOS,))
    has_begun, may_go_on = threading.Event(), threading.Event()
    compile_spec = grammar_cache._vetting_compiler.compile

    def compile_later(spec: GrammarSpec):
        has_begun.set()
        may_go_on.wait(60)
        return compile_spec(spec)

    monkeypatch.setattr(grammar_cache._vetting_compiler, "compile", compile_later)
    begun, abandoned, kept = (GrammarSpec("regex", source) for source in "abc")
    specs = (begun, abandoned, kept)
    callers = {spec: [asyncio.create_task(grammar_cache.compile(spec)) for _ in range(2)] for spec in specs}
    await asyncio.to_thread(has_begun.wait, 60)
    cancelled = [*callers[begun], *callers[abandoned], callers[kept][0]]
    for caller in cancelled:
        caller.cancel()
    await asyncio.wait(cancelled)
    may_go_on.set()
    assert await callers[kept][1] is grammar_cache.get(kept)
    assert compiled_specs == converted(begun, kept)
    assert grammar_cache.get(begun) is not None
    # A later caller starts the compilation again.
    assert await grammar_cache.compile(abandoned) is grammar_cache.get(abandoned)
    grammar_cache.close()


async def test_a_failure_reaches_all_callers_and_is_not_cached(grammar_cache):
    bad = GrammarSpec("regex", "((")
    failures = await asyncio.gather(*(grammar_cache.compile(bad) for _ in range(3)), return_exceptions=True)
    assert [type(failure) for failure in failures] == [GrammarError] * 3
    assert grammar_cache.get(bad) is None
    assert grammar_cache.num_cached == 0


async def test_the_least_recently_used_grammar_is_evicted(grammar_cache, compiled_specs, monkeypatch):
    specs = [GrammarSpec("regex", f"[ab]{{{count}}}") for count in range(1, 5)]
    sizes = [(await grammar_cache.compile(spec)).num_bytes + len(spec.source) for spec in specs[:3]]
    monkeypatch.setattr(grammars, "MAX_CACHE_BYTES", sum(sizes) + max(sizes) // 2)
    assert grammar_cache.get(specs[0]) is not None
    await grammar_cache.compile(specs[3])
    assert [grammar_cache.get(spec) is not None for spec in specs] == [True, False, True, True]
    await grammar_cache.compile(specs[1])
    assert compiled_specs == converted(*specs, specs[1])


async def test_errors_name_the_exceeded_limit(grammar_cache, monkeypatch):
    monkeypatch.setattr(grammars, "MAX_SOURCE_LENGTH", 50)
    with pytest.raises(GrammarError, match="has 51 characters, but may have at most 50"):
        await grammar_cache.compile(GrammarSpec("regex", "a" * 51))
    monkeypatch.setattr(grammars, "MAX_SOURCE_LENGTH", 1000)
    monkeypatch.setattr(grammars, "MAX_GRAMMAR_BYTES", 1000)
    with pytest.raises(GrammarError, match="MiB when compiled, but may take at most"):
        await grammar_cache.compile(JSON)


async def test_unreadable_vocabulary_is_raised_and_logged(caplog):
    def fail() -> Vocabulary:
        raise OSError("no such file")

    grammar_cache = Grammars(fail, toy_model.VOCAB, (toy_model.EOS,))
    with pytest.raises(GrammarError, match="^grammars can't be compiled now: OSError: no such file$"):
        await grammar_cache.compile(REGEX)
    assert "no such file" in caplog.text
    grammar_cache.close()


async def test_close_fails_waiting_callers(grammar_cache):
    waiting = asyncio.create_task(grammar_cache.compile(REGEX))
    await asyncio.sleep(0)
    grammar_cache.close()
    with pytest.raises(GrammarError, match="the engine was stopped"):
        await waiting
    with pytest.raises(GrammarError, match="can't be compiled now: cannot schedule"):
        await grammar_cache.compile(REGEX)


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (lambda: Vocabulary([b"a"], ()), "end_ids of the model's vocabulary are \\[\\], but must be"),
        (
            lambda: Vocabulary([b"a"], (0,)),
            "end_ids of the model's vocabulary are \\[0\\], but must be some of .* \\[5\\]",
        ),
    ],
)
async def test_a_vocabulary_with_other_end_tokens_than_the_model_is_refused(vocabulary, message):
    grammar_cache = Grammars(vocabulary, toy_model.VOCAB, (toy_model.EOS,))
    with pytest.raises(GrammarError, match=message):
        await grammar_cache.compile(REGEX)
    grammar_cache.close()

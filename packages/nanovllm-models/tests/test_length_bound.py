import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nanovllm_models.length_bound import find_length_bound
from nanovllm_models.token_bytes import BYTE_BY_CHARACTER


def make_backend(normalizer=None, missing=(), **added_token_options):
    """Return a byte-level tokenizer. missing: bytes without a token."""
    names = [name for name, byte in BYTE_BY_CHARACTER.items() if byte not in missing]
    merges = [("a", "b"), ("ab", "ab"), ("abab", "abab")]
    vocabulary = {name: index for index, name in enumerate([*names, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<tag>", **added_token_options)])
    return backend


BACKENDS = [make_backend(), make_backend(normalizers.NFC()), make_backend(missing=(4, 6, 0xC0, 0xF1))]
TEXTS = st.lists(st.sampled_from(["ab", "abababab", "<tag>", "\x04", "e\u0301", "\u1100\u1161\u11a8"]) | st.text()).map(
    "".join
)


@given(text=TEXTS, index=st.integers(0, len(BACKENDS) - 1))
def test_no_text_has_fewer_tokens_than_the_bound(text, index):
    bound = find_length_bound(BACKENDS[index])
    assert bound is not None
    assert bound.min_num_tokens(text) <= len(BACKENDS[index].encode(text, add_special_tokens=False).ids)


def test_bound_is_exact_for_a_text_of_longest_tokens():
    bound = find_length_bound(BACKENDS[0])
    assert bound is not None
    assert bound.min_num_tokens("abababab" * 1000) == 1000


@pytest.mark.parametrize(
    "backend",
    [
        make_backend(normalizers.Strip()),
        make_backend(missing=(0x81,)),
        make_backend(lstrip=True),
        Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    ],
    ids=["normalizer drops spaces", "no token for a continuation byte", "added token strips spaces", "not byte-level"],
)
def test_unsupported_tokenizer_has_no_bound(backend):
    assert find_length_bound(backend) is None

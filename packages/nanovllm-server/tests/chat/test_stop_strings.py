"""Stop strings are found wherever the text is cut into pieces, and are never returned."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from nanovllm_server.chat.stop_strings import StopMatcher

TEXT = st.text(alphabet=st.sampled_from("abé😀 \n"), max_size=30)
STOPS = st.lists(st.text(alphabet=st.sampled_from("ab😀"), min_size=1, max_size=4), min_size=1, max_size=3)


def first_stop(text, stops):
    """Returns the position and the text of the stop string that ends first."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end - len(stop), stop
    return None


@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 30), max_size=5))
def test_stop_strings_are_found_in_any_pieces(text, stops, cuts):
    matcher = StopMatcher(tuple(stops))
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    returned_text = ""
    for start, end in itertools.pairwise(bounds):
        returned_text += matcher.push(text[start:end])
        assert text.startswith(returned_text)
        if matcher.matched_stop:
            break
    expected = first_stop(text, stops)
    if expected is None:
        assert matcher.matched_stop is None
        assert returned_text + matcher.flush() == text
    else:
        assert (returned_text, matcher.matched_stop) == (text[: expected[0]], expected[1])


@given(text=TEXT, stops=STOPS)
def test_stop_strings_are_found_by_single_characters(text, stops):
    test_stop_strings_are_found_in_any_pieces.hypothesis.inner_test(text, stops, list(range(len(text))))


def test_held_text_is_returned_when_it_cannot_be_a_stop_string():
    matcher = StopMatcher(("abc",))
    assert [matcher.push(character) for character in "xababdc"] == ["x", "", "", "ab", "", "abd", "c"]


def test_flush_returns_partial_stop_strings():
    matcher = StopMatcher(("abc",))
    assert [matcher.push("ab"), matcher.flush(), matcher.push("cab")] == ["", "ab", "c"]
    assert [matcher.matched_stop, matcher.flush()] == [None, "ab"]

from array import array

import numpy as np
import pytest

from nanovllm_core import Request, RequestError
from nanovllm_core.engine import wire
from nanovllm_core.request_state import RequestState
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.token_ids import as_token_ids


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1, 2],
        (3, 1, 2),
        array("q", [3, 1, 2]),
        np.array([3, 1, 2]),
        np.array([3, 1, 2], np.uint16),
        np.array([[3, 0], [1, 0], [2, 0]], np.int32)[:, 0],
    ],
)
def test_any_sequence_of_integers_becomes_a_read_only_int32_array(ids):
    found = as_token_ids(ids)
    assert (found.tolist(), found.dtype, found.flags.writeable) == ([3, 1, 2], np.int32, False)
    assert found.tobytes() == np.array([3, 1, 2], np.int32).tobytes()


def test_an_empty_sequence_becomes_an_empty_int32_array():
    assert (as_token_ids([]).tolist(), as_token_ids([]).dtype) == ([], np.int32)


@pytest.mark.parametrize(
    "ids", [[1.0], [True], ["a"], "12", [None], [[1, 2]], 5, [1 << 31], [-(1 << 31) - 1], [1 << 70], np.array([1.5])]
)
def test_values_that_are_not_int32_token_ids_are_refused(ids):
    with pytest.raises(RequestError) as caught:
        Request("r", ids)
    assert caught.value.field == "prompt"
    assert "prompt" in str(caught.value)
    with pytest.raises(RequestError, match="the prediction must be token ids") as caught:
        Request("r", [1], prediction=ids)
    assert caught.value.field == "prediction"


def test_a_read_only_array_is_shared_and_a_writeable_one_copied():
    ids = np.array([1, 2, 3], np.int32)
    request = Request("a", ids)
    ids[0] = 9
    assert request.prompt_ids.tolist() == [1, 2, 3]
    assert Request("b", request.prompt_ids).prompt_ids is request.prompt_ids
    assert np.shares_memory(Request("c", request.prompt_ids[1:]).prompt_ids, request.prompt_ids)


def test_token_ids_are_the_prompt_and_then_the_outputs():
    request = RequestState(0, Request("a", [1, 2, 3]))
    assert request.token_ids() is request.prompt_ids
    request.output_ids += [4, 5]
    assert (request.num_prompt_tokens, request.num_tokens) == (3, 5)
    assert (request.token_ids().tolist(), request.token_ids().dtype) == ([1, 2, 3, 4, 5], np.int32)


def test_the_prediction_of_a_request_is_an_array_of_token_ids():
    assert Request("a", [1], prediction=(7, 8)).prediction_ids.tolist() == [7, 8]
    assert Request("a", [1]).prediction_ids.tolist() == []


def test_a_request_travels_with_its_prompt_as_bytes():
    sent = Request("a", range(1000), SamplingParams(max_tokens=7, seed=3), "salt", 2, 1.5, [5, 6])
    payload = wire.encode(wire.Submit.from_request(11, sent))
    assert np.arange(1000, dtype=np.int32).tobytes() in payload
    message = wire.decode_to_engine(payload)
    assert isinstance(message, wire.Submit)
    received = message.to_request()
    assert received.prompt_ids.tolist() == [*range(1000)]
    assert (
        message.key,
        received.id,
        received.sampling,
        received.cache_salt,
        received.priority,
        received.arrival_time,
    ) == (
        *(11, "a", sent.sampling),
        *("salt", 2, 1.5),
    )
    assert not received.prompt_ids.flags.writeable
    assert received.prediction_ids.tolist() == [5, 6]

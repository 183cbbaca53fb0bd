import json
from pathlib import Path

import pytest
from toy_model import toy_spec

from nanovllm_core import AsyncEngine, ConfigError, EngineConfig, Request, SamplingParams
from nanovllm_core.engine.trace import TRACK_IDS


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
async def test_every_step_has_a_span_per_track(tmp_path, device):
    file = tmp_path / "trace.json"
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(device=device, num_blocks=32, trace=file))
    request = Request("r", [1, 2, 3], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))
    async for _ in engine.generate(request):
        pass
    await engine.stop()
    # Chrome's array format may end without its bracket.
    events = json.loads(file.read_text().rstrip().rstrip(",") + "]")
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans = [(tracks[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]
    for step in range(5):
        for track in ["launch", "output", *(["device"] if device == "cuda" else [])]:
            assert spans.count((track, f"step {step}")) == 1
        assert (("plan", f"step {step}")) in spans
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


async def test_an_unwritable_trace_path_is_refused_before_the_model_is_loaded(tmp_path):
    file = tmp_path / "none" / "trace.json"
    # Loading this model would raise another error.
    with pytest.raises(ConfigError, match=r"trace is '.*trace\.json', which can't be written \(No such file"):
        await AsyncEngine.start(toy_spec("refusing"), EngineConfig(device="cpu", trace=file))


async def test_requests_are_served_if_the_trace_can_not_be_written(caplog):
    engine = await AsyncEngine.start(toy_spec(), EngineConfig(device="cpu", num_blocks=32, trace=Path("/dev/full")))
    request = Request("r", [1, 2, 3], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    assert sum([len(output.new_token_ids) async for output in engine.generate(request)]) == 200
    await engine.stop()
    (record,) = caplog.records
    assert record.message == "the trace /dev/full ends here, because it can't be written: No space left on device"


async def test_a_trace_is_closed_when_loading_fails(tmp_path):
    """An open file would cause a ResourceWarning, which fails the test."""
    file = tmp_path / "trace.json"
    with pytest.raises(ValueError, match="this model can't be built"):
        await AsyncEngine.start(toy_spec("refusing"), EngineConfig(device="cpu", trace=file))
    assert file.read_text().count("thread_name") == len(TRACK_IDS)

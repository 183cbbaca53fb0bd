"""A request as the client sends it."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

from numpy.typing import NDArray

from nanovllm_core.errors import RequestError
from nanovllm_core.sampling_params import SamplingParams
from nanovllm_core.token_ids import TokenIds, as_token_ids


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt with options for its output. Requests are immutable.

    id: unique among the client's open requests.
    token_ids: the prompt; stored as `prompt_ids`.
    cache_salt: requests with different salts never share cached blocks.
    priority: requests with lower numbers run first. Requests with equal numbers run in order of arrival.
    arrival_time: in seconds, on any clock that all requests of the engine share.
    prediction: token ids that the output probably contains; stored as `prediction_ids`. Speculative decoding may use
        them as drafts; without speculation, they have no effect. They never change the output.
    prefix_peer: address of another engine that has computed the prompt, one of `EngineConfig.transfer_peers`; "" if no
        engine is known to have computed it.
    """

    id: str
    token_ids: InitVar[Sequence[int] | NDArray[Any]]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    priority: int = 0
    arrival_time: float = 0.0
    prediction: InitVar[Sequence[int] | NDArray[Any]] = ()
    prefix_peer: str = ""
    prompt_ids: TokenIds = field(init=False)
    prediction_ids: TokenIds = field(init=False)

    def __post_init__(self, token_ids: Sequence[int] | NDArray[Any], prediction: Sequence[int] | NDArray[Any]) -> None:
        for field_name, ids in (("prompt", token_ids), ("prediction", prediction)):
            try:
                array = as_token_ids(ids)
            except ValueError as error:
                raise RequestError(field_name, f"the {field_name} must be token ids: {error}") from error
            object.__setattr__(self, f"{field_name}_ids", array)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

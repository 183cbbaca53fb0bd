"""Sort keys for the orders in which requests are admitted, served and preempted."""

from nanovllm_core.request_state import RequestState

SortKey = tuple[int, int, float]


def request_class(request: RequestState) -> tuple[int, int]:
    """The class of a request: preempted before new, then by priority. Lower classes are served first."""
    return (0 if request.num_preemptions else 1, request.client_request.priority)


def admission_order(request: RequestState) -> SortKey:
    """Requests without a row, lowest key first: by class, then by arrival."""
    return (*request_class(request), request.client_request.arrival_time)


def urgency_order(request: RequestState) -> tuple[int, float]:
    """Running requests, lowest key first: by priority, then by arrival."""
    return (request.client_request.priority, request.client_request.arrival_time)


def preemption_order(request: RequestState, *, is_prefilling: bool) -> SortKey:
    """Running requests; the one with the highest key is preempted: unfinished prefills before decodes, then the least
    urgent.
    """
    return (int(is_prefilling), *urgency_order(request))

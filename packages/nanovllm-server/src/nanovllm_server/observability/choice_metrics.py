"""Records the times of one choice (one of the `n` answers to a request): queue, prefill, decode."""

import time

from nanovllm_core import Request, RequestOutput
from nanovllm_server.observability.metrics import Metrics


class ChoiceMetrics:
    """Records the latencies of one choice. Records phases and end-to-end latency only if the choice is not aborted.

    first_token_s: seconds from the request's arrival to the first token; None before the first token.
    is_finished: whether the choice has ended without being aborted.
    """

    def __init__(self, metrics: Metrics, request: Request):
        self.num_cached_tokens = 0
        self.num_accepted_drafts = self.num_rejected_drafts = 0
        self.first_token_s: float | None = None
        self.is_finished = False
        self._metrics = metrics
        self._arrival_time = request.arrival_time
        # Seconds of `time.monotonic`.
        self._submission_time = self._scheduled_time = self._first_token_time = self._last_token_time = 0.0

    def record_submission(self) -> None:
        """Records the time at which the engine gets the request."""
        self._submission_time = time.monotonic()

    def record_output(self, output: RequestOutput) -> None:
        """Records the times of new tokens, and the numbers of accepted and rejected drafts."""
        self.num_accepted_drafts, self.num_rejected_drafts = output.num_accepted_drafts, output.num_rejected_drafts
        now, num_tokens = time.monotonic(), len(output.new_token_ids)
        if not num_tokens:
            return
        if self.first_token_s is None:
            self.num_cached_tokens, self._scheduled_time = output.num_cached_tokens, output.scheduled_time
            self.first_token_s = now - self._arrival_time
            self._metrics.time_to_first_token.observe(self.first_token_s)
            self._first_token_time = now
        else:
            self._metrics.inter_token_latency.observe((now - self._last_token_time) / num_tokens, num_tokens)
        self._last_token_time = now

    def record_finish(self, num_tokens: int) -> None:
        """Records the phases of a choice that was not aborted. num_tokens: number of output tokens."""
        self.is_finished = True
        decode_s = self._last_token_time - self._first_token_time
        self._metrics.queue_time.observe(max(self._scheduled_time - self._submission_time, 0.0))
        self._metrics.prefill_time.observe(self._first_token_time - self._scheduled_time)
        self._metrics.decode_time.observe(decode_s)
        self._metrics.inference_time.observe(self._last_token_time - self._scheduled_time)
        self._metrics.e2e_latency.observe(self._last_token_time - self._arrival_time)
        self._metrics.generation_tokens.observe(num_tokens)
        if num_tokens > 1:
            self._metrics.time_per_output_token.observe(decode_s / (num_tokens - 1))

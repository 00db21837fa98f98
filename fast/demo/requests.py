"""Data classes of the serving loop: a request, the report of a step, and the error if another rank does not answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from reference.interfaces import GroupError


@dataclass(eq=False)
class Request:
    """One prompt and the state of its generation.

    Attributes:
        request_id: number in the order of arrival, unique within the loop.
        prompt_ids: tokens of the prompt.
        max_new_tokens: upper bound of the generated tokens.
        generated_ids: tokens generated so far, including an end-of-sequence token.
        num_computed: number of leading tokens that are in the cache.
        blocks: ids of the cache blocks of the `num_computed` tokens, in order.
        num_preemptions: how often the loop took the blocks of this request for another request.
        finished: True when the generation has ended.
    """

    request_id: int
    prompt_ids: list[int]
    max_new_tokens: int
    generated_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    finished: bool = False

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens and generated tokens together."""
        return len(self.prompt_ids) + len(self.generated_ids)

    @property
    def num_pending(self) -> int:
        """Number of tokens that are not in the cache: 1 during decoding, all `num_tokens` after a preemption."""
        return self.num_tokens - self.num_computed

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the tokens with indices [start, end); the generated tokens follow the tokens of the prompt."""
        return (self.prompt_ids + self.generated_ids)[start:end]


@dataclass(frozen=True)
class StepReport:
    """Counts of one step.

    Attributes:
        num_tokens: tokens that the model computed.
        num_decodes: requests on the absorbed path.
        num_prefills: requests on the expanded path.
        num_context_chunks: chunks of cached context that the prefills expanded.
        num_generated: tokens that were sampled.
        preempted: ids of requests whose blocks the loop took for other requests.
        finished: ids of requests that finished.
        num_running: requests that are running after the step.
        num_waiting: requests that are waiting after the step.
        cache_bytes: bytes of the cache blocks that requests own during the step.
    """

    num_tokens: int
    num_decodes: int
    num_prefills: int
    num_context_chunks: int
    num_generated: int
    preempted: tuple[int, ...]
    finished: tuple[int, ...]
    num_running: int
    num_waiting: int
    cache_bytes: int


class StepLost(GroupError):
    """Error of a step in which another rank did not answer.

    Args:
        error: error of the failed exchange; its text names the group of ranks and the operation.
        request_ids: ids of the requests of this step, in batch order. The requests got no tokens in this step.
    """

    def __init__(self, error: GroupError, request_ids: tuple[int, ...]):
        super().__init__(f"{error}; requests in flight: {', '.join(map(str, request_ids))}")
        self.error, self.request_ids = error, request_ids

    def __reduce__(self) -> tuple:
        return type(self), (self.error, self.request_ids)

"""Records of the serving loop: a request, the report of a step, the error of a step that a rank did not finish."""

from __future__ import annotations

from dataclasses import dataclass, field

from reference.interfaces import GroupError


@dataclass(eq=False)
class Request:
    """One prompt and what has become of it.

    Attributes:
        request_id: position in the order of arrival; no other request of the loop ever has it.
        prompt_ids: the prompt's tokens.
        max_new_tokens: most tokens to generate.
        generated_ids: tokens generated so far; an end-of-sequence token is kept.
        num_computed: leading tokens whose cache entries stand.
        blocks: the blocks that hold them, in order.
        num_preemptions: how often the request lost its blocks.
        finished: nothing more will be generated.
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
        """Tokens known: prompt and generated."""
        return len(self.prompt_ids) + len(self.generated_ids)

    @property
    def num_pending(self) -> int:
        """Tokens known but not in the cache: 1 while decoding; after a preemption, all of them."""
        return self.num_tokens - self.num_computed

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and generated together."""
        return (self.prompt_ids + self.generated_ids)[start:end]


@dataclass(frozen=True)
class StepReport:
    """What one step did.

    Attributes:
        num_tokens: tokens that ran through the model.
        num_decodes: requests on the absorbed path.
        num_prefills: requests on the expanded path.
        num_context_chunks: pieces that the prefills' cached context was cut into.
        num_generated: tokens sampled.
        preempted: ids of requests that lost their blocks.
        finished: ids of requests that finished.
        num_running: requests running after the step.
        num_waiting: requests waiting after the step.
        cache_bytes: resident bytes of latent cache while the step ran.
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
    """A step that another rank did not finish.

    Args:
        error: which group and operation failed, and how.
        request_ids: of the step, in its order; their new tokens are not booked.
    """

    def __init__(self, error: GroupError, request_ids: tuple[int, ...]):
        super().__init__(f"{error}; requests in flight: {', '.join(map(str, request_ids))}")
        self.error, self.request_ids = error, request_ids

    def __reduce__(self) -> tuple:
        return type(self), (self.error, self.request_ids)

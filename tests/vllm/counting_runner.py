"""Stands in for vLLM's model runner: counts tokens, and samples those that can be known beforehand."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

VOCABULARY = 4096


def token_at(request_id: str, position: int) -> int:
    """Returns the token that the counting runner samples for that position of a request's text."""
    return 2 + zlib.crc32(f"{request_id}:{position}".encode()) % (VOCABULARY - 2)


@dataclass(slots=True)
class Text:
    """What the runner knows of a request: its tokens, and how many of them are computed."""

    tokens: list[int]
    computed: int


class CountingRunner:
    """Stands in for the model runner: executes batches in order and samples where a text has been computed in full.

    It knows only what the scheduler tells it and what it sampled itself, as a worker does, and asserts that the two
    agree: chunks follow each other without a gap or an overlap, none goes beyond the text, and the scheduler's own copy
    of a text is a beginning of the runner's.

    Attributes:
        texts: what it knows, by request id.
    """

    def __init__(self) -> None:
        self.texts: dict[str, Text] = {}

    def execute(self, batch: Any) -> Any:
        """Returns the `ModelRunnerOutput` of one `SchedulerOutput`."""
        for request_id in batch.finished_req_ids:
            self.texts.pop(request_id, None)
        self._take_new(batch.scheduled_new_reqs)
        self._take_known(batch.scheduled_cached_reqs)
        ids = list(batch.num_scheduled_tokens)
        assert sum(batch.num_scheduled_tokens.values()) == batch.total_num_scheduled_tokens
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(ids)},
            sampled_token_ids=[self._advance(name, count) for name, count in batch.num_scheduled_tokens.items()],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _take_new(self, requests: Sequence[Any]) -> None:
        for new in requests:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            old = self.texts.get(new.req_id)
            if old is not None:  # resumed after preemption, where runners keep no state of preempted requests
                assert old.tokens[: len(tokens)] == tokens, f"{new.req_id} is resumed with another text"
            self.texts[new.req_id] = Text(tokens, new.num_computed_tokens)

    def _take_known(self, cached: Any) -> None:
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            text = self.texts[request_id]
            sent = cached.all_token_ids.get(request_id)
            if sent is not None:
                assert text.tokens[: len(sent)] == list(sent), f"{request_id}: the scheduler has another text"
            if request_id in cached.resumed_req_ids:
                text.computed = computed
                if sent is not None:  # what was in flight may have been thrown away, and is sampled again
                    del text.tokens[len(sent) :]
            assert text.computed == computed, f"{request_id}: {text.computed} computed, the scheduler says {computed}"

    def _advance(self, request_id: str, count: int) -> list[int]:
        text = self.texts[request_id]
        assert count > 0
        text.computed += count
        assert text.computed <= len(text.tokens), f"{request_id}: {text.computed} of {len(text.tokens)} tokens"
        if text.computed < len(text.tokens):
            return []
        sampled = token_at(request_id, len(text.tokens))
        text.tokens.append(sampled)
        return [sampled]

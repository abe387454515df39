"""A worker of vLLM that computes nothing, but knows what is in each block, and checks all that attention would read.

What a token leaves in a block depends on all tokens before it: here it is a number that stands for all of them. Within
a step copies are made first, from sources as they were before; then all requests write; then all read.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

_JUNK = -1
"""What a rejected draft leaves."""


class _Row:
    """A request as the worker has it: its tokens with all that was sampled, its block table, what is computed."""

    def __init__(self, request: Any, blocks: list[int], computed: int) -> None:
        self.tokens, self.blocks, self.computed = list(request._all_token_ids), list(blocks), computed
        embedded = request.prompt_embeds
        self.embedded = [] if embedded is None else [tuple(each) for each in embedded.tolist()]
        self.chain = [hash((request.cache_salt, request.lora_request and request.lora_request.lora_path))]

    def content(self, position: int) -> int:
        """What its token at a position leaves."""
        while len(self.chain) <= position + 1:
            at = len(self.chain) - 1
            self.chain.append(hash((self.chain[-1], self.tokens[at], *self.embedded[at : at + 1])))
        return self.chain[position + 1]


class CheckingWorker:
    """Call it with each step, in the order of execution."""

    def __init__(self, block_size: int) -> None:
        self._size, self._rows = block_size, dict[str, _Row]()
        self._blocks: dict[int, list[int | None]] = defaultdict(lambda: [None] * block_size)
        self.seen = Counter[str]()

    def __call__(self, scheduler: Any, scheduled: Any, sampled: Any) -> None:
        """Execute a step."""
        self._update(scheduler, scheduled)
        self._copy(scheduled.kv_cache_block_copies or ())
        reads = [
            (name, self._write(self._rows[name], count, sampled.sampled_token_ids[at]))
            for at, (name, count) in enumerate(scheduled.num_scheduled_tokens.items())
        ]
        for name, stop in reads:
            row = self._rows[name]
            for position in range(stop):
                found = self._blocks[row.blocks[position // self._size]][position % self._size]
                assert found == row.content(position), (
                    name,
                    position,
                    row.blocks[position // self._size],
                    found,
                )
            self.seen["reads"] += stop

    def _update(self, scheduler: Any, scheduled: Any) -> None:
        for name in scheduled.finished_req_ids:
            self._rows.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self._admit(scheduler, new.req_id, new.block_ids, new.num_computed_tokens)
        cached = scheduled.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self._admit(scheduler, name, blocks, computed)
                self.seen["resumed"] += 1
                continue
            row = self._rows[name]
            # Ahead of outputs the scheduler does not know yet which drafts are right.
            assert row.computed <= computed
            self.seen["ahead of drafts"] += row.computed < computed
            row.blocks += blocks[0] if blocks is not None else []

    def _admit(self, scheduler: Any, name: str, blocks: Any, computed: int) -> None:
        self._rows[name] = _Row(scheduler.requests[name], blocks[0], computed)
        self.seen["reused within a block"] += computed % self._size > 0

    def _copy(self, copies: Any) -> None:
        assert len({each.dst_block_id for each in copies}) == len(copies)
        contents = [list(self._blocks[each.src_block_id]) for each in copies]
        for each, content in zip(copies, contents, strict=True):
            self._blocks[each.dst_block_id] = content
        self.seen["copies"] += len(copies)

    def _write(self, row: _Row, count: int, sampled: list[int]) -> int:
        """Write what is scheduled; returns up to where what is there is right."""
        begin, row.tokens = row.computed, row.tokens + sampled
        stop = min(begin + count, len(row.tokens) - bool(sampled))
        for position in range(begin, begin + count):
            block = self._blocks[row.blocks[position // self._size]]
            block[position % self._size] = row.content(position) if position < stop else _JUNK
        row.computed = stop
        return stop

"""The sequences of one call of ``generate``: admitted together, computed pass by pass, and ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch

from cuda_ops.attention import PagedKV
from kvcache.errors import (
    CapacityError,
    ComputationLost,
    ManagerBusy,
    ManagerClosed,
    UnknownRequest,
    Unsupported,
    UsageError,
    WrongThread,
)
from kvcache.inputs import Request
from kvcache.integrations.transformers.rows import Rows
from kvcache.integrations.transformers.step import Span, Step
from kvcache.manager import KVCacheManager
from kvcache.pools import Pools

TENSORS = frozenset(("input_ids", "attention_mask", "position_ids", "cache_position", "logits_to_keep"))
"""Arguments of a forward pass that K and V depend on as the cache expects, or not at all."""


class Copies:
    """Copies between host memory and the device for all requests of a cache, and the requests affected by a failed one:
    one `poll` returns those of all.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._lost = set[object]()

    def start(self) -> None:
        """Start the requested copies; later work on the current stream of the device waits for them."""
        ticket = self._manager.start_transfers()
        if ticket is not None:
            ticket.wait_on()

    def refuse_lost(self, names: Iterable[str]) -> None:
        """Raise `ComputationLost` if a failed copy took tokens that one of these had reused or computed."""
        self._lost.update(name for name, _ in self._manager.poll().invalidated)
        for name in names:
            if name in self._lost:
                raise ComputationLost(name, 0, stuck=True)

    def forget(self, names: Iterable[str]) -> None:
        """Forget ended requests."""
        self._lost.difference_update(names)


class Batch:
    """Rows of a batch, each a sequence of the manager, all computed up to the same column."""

    def __init__(self, manager: KVCacheManager, pools: Pools, copies: Copies, name: str, rows: Rows) -> None:
        self.manager, self.rows, self._copies, self._name = manager, rows, copies, name
        self.names = [f"{name}/{row}" for row in range(len(rows.columns))]
        self._given = len(self.names)
        """Number of names so far."""
        self._kv = {
            layer: (group.window, PagedKV(*pools.kv(layer), manager.config.kv_layout))
            for group in pools.layout.groups
            for layer in group.layers
        }
        self.past = 0
        """Number of present columns."""
        self.computed: list[int] = []
        """Number of tokens with K and V of each row."""
        self._promised = 0
        """Number of tokens to come that have slots."""
        self.step: Step | None = None
        """Forward pass that has begun, and has not been completed."""
        self.closed = self.abandoned = False

    # -- begin and end

    def admit(self, promised: int, options: Mapping[str, Any]) -> None:
        """Admit all rows or none, with slots for `promised` more tokens each. Raises as `add_sequences` does."""
        prompts = self.rows.prompts()
        requests = [Request(*each, **options) for each in zip(self.names, prompts, strict=True)]
        admitted = self.manager.add_sequences(requests)
        try:
            self._promised = promised
            self._reserve()
        except CapacityError:
            self.close()
            raise
        self.computed = [each.reused_tokens for each in admitted]
        # A row that reuses more than others recomputes some tokens, which are not written.
        self.past = min(pad + reused for pad, reused in zip(self.rows.pads, self.computed, strict=True))

    def _reserve(self) -> None:
        if self._promised > 0:
            self.manager.reserve(self.names, [self._promised] * len(self.names))

    def close(self) -> None:
        """End the sequences: computed blocks stay reusable. Twice is harmless."""
        if self.closed:
            return
        with suppress(ManagerClosed):  # it has released them
            self._remove(self.names, "finished" if self.step is None else "aborted")
            self.closed = True
            self.manager.flush()
        self.closed = True

    def _remove(self, names: list[str], why: str) -> None:
        for name in names:
            with suppress(UnknownRequest):  # removed through the manager
                self.manager.remove_sequence(name, why=why)
        self._copies.forget(names)

    def abandon(self) -> None:
        """Close now if possible, or else let the cache do it: the request was dropped."""
        self.abandoned = True
        with suppress(ManagerBusy, WrongThread):
            self.close()

    # -- a forward pass

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Begin a forward pass: reserve slots for it, and start copies. Raises before anything is computed.

        `arguments` are the model's. A pass that failed can be tried again: none of it counts as computed. Raises
        `OutOfBlocks`, `PromptTooLong`, and `UsageError` for a pass that is not of these rows.
        """
        self._refuse_ended()
        _refuse_gradients()
        _refuse_other_inputs(arguments)
        if arguments.get("use_cache") is False:
            raise UsageError(
                "use_cache is False, in the call or in the model's generation_config, so a forward pass "
                "would recompute all columns: pass use_cache=True, or no request"
            )
        fed = arguments.get("input_ids")
        if not isinstance(fed, torch.Tensor) or fed.ndim != 2:
            raise Unsupported(
                "a forward pass without input_ids", "pass the token ids, which K and V are found by"
            )
        if len(fed) != len(self.names):
            raise UsageError(
                f"the batch has {len(fed)} rows, but the request {len(self.names)}: for num_beams or "
                "num_return_sequences pass copies, as in cache.request(..., copies=num_beams)"
            )
        stop = self.past + fed.shape[1]
        columns: list[list[int]] = fed.tolist()
        self._refuse_other_tokens(columns, self.past)
        self._refuse_other_places(arguments, stop)
        self._copies.start()  # requested by admission or forks: tokens come after it
        self._append([row[max(self.rows.width - self.past, 0) :] for row in columns])
        self._copies.start()
        self._copies.refuse_lost(self.names)
        ends = [max(stop - pad, done) for pad, done in zip(self.rows.pads, self.computed, strict=True)]
        self.step = Step(
            self.manager, self.names, self.rows, Span(self.past, stop, list(self.computed), ends)
        )

    def _append(self, columns: list[list[int]]) -> None:
        """Append tokens after the prompt: sampled ones, or those of a next turn."""
        count = len(columns[0])
        if not count:
            return
        # All but the last one count as computed, so several are a draft until they are.
        self.manager.add_tokens(
            self.names, [token for row in columns for token in row], [count] * len(columns), draft=count > 1
        )
        self.rows.append(columns)
        self._promised -= count
        self._reserve()

    def begun(self) -> Step:
        """Return the forward pass in progress. Raises `UsageError` if there is none."""
        if self.step is None:
            raise UsageError(
                "a forward pass bypassed the cache: call the model that the cache was created for, "
                "not a part of it and not its forward() (as generate(prefill_chunk_size=...) does in Transformers 4)"
            )
        return self.step

    def exchange(
        self, layer: int, first_column: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's K and V of the pass to the cache, and return those of all columns from `first_column` on."""
        step = self.begun()
        window, kv = self._kv[layer]
        places = step.places(window, first_column, kv.key.device)
        return step.exchange(layer, kv, places, key, value)

    def complete(self) -> None:
        """Complete the forward pass: computed blocks become reusable."""
        step = self.step
        assert step is not None
        step.refuse_incomplete(len(self._kv))
        self._copies.refuse_lost(self.names)  # before any of it counts as computed
        for name, before, end in zip(self.names, self.computed, step.span.ends, strict=True):
            if end > before:
                self.manager.store_context_blocks(name, end)
        self.computed, self.past, self.step = list(step.span.ends), step.span.stop, None
        self.manager.flush()

    def select(self, chosen: list[int]) -> None:
        """Continue with these rows in place of all, some of them several times, as beam search does.

        Raises `OutOfBlocks`, which ends the request.
        """
        self._refuse_ended()
        if chosen == list(range(len(self.names))):
            return
        parents = [self.names[row] for row in chosen]
        self._remove(
            [name for name in self.names if name not in parents], "aborted"
        )  # first, for their blocks
        self.names = []
        try:
            for parent in parents:
                self.names.append(self._branch(parent) if parent in self.names else parent)
            self._reserve()
        except CapacityError:
            self.names += [name for name in dict.fromkeys(parents) if name not in self.names]
            self.close()
            raise
        self.computed = [self.computed[row] for row in chosen]
        self.rows.select(chosen)

    def _branch(self, parent: str) -> str:
        name = f"{self._name}/{self._given}"
        self.manager.fork(parent, name)
        self._given += 1
        return name

    # -- refusals

    def _refuse_ended(self) -> None:
        if self.closed:
            raise UsageError("this request has ended: create a new one with cache.request()")

    def refuse_other_prompts(self, ids: Any, mask: Any) -> None:
        """Raise `UsageError` if ``generate`` is about to begin with other tokens than the rows have.

        `ids` are all columns, or the last ones where `mask` has more. Anything else is compared in the forward pass.
        """
        self._refuse_ended()
        if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or not len(ids):
            return
        whole = isinstance(mask, torch.Tensor) and mask.ndim == 2
        stop = max(ids.shape[1], mask.shape[1]) if whole else ids.shape[1]
        if stop <= self.past >= self.rows.width:
            raise UsageError(
                f"this request was used before: it has {self.past} columns, and generate was given {stop}; "
                "create one per call with cache.request(), or pass all previous output and more tokens"
            )
        if stop < self.rows.width:
            self._refuse_tokens()
        copies, other = divmod(len(self.names), len(ids))
        if not other:
            columns = [row for row in ids.tolist() for _ in range(copies)]
            self._refuse_other_tokens(columns, stop - ids.shape[1])

    def _refuse_other_tokens(self, columns: list[list[int]], start: int) -> None:
        """Compare the columns from `start` on with the known ones."""
        for row, pad, fed in zip(self.rows.columns, self.rows.pads, columns, strict=True):
            first = max(pad - start, 0)
            known = row[start + first : start + len(fed)]
            if fed[first : first + len(known)] != known:
                self._refuse_tokens()

    def _refuse_tokens(self) -> NoReturn:
        raise UsageError(
            "the tokens passed to the model differ from those of the request: call cache.request() with the "
            "same input_ids and attention_mask as generate"
        )

    def _refuse_other_places(self, arguments: Mapping[str, Any], stop: int) -> None:
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        padded = any(self.rows.pads)
        whole = isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] == stop
        if (mask is None and padded) or (mask is not None and not (whole and self.rows.agree(mask))):
            raise UsageError(
                "the attention_mask passed to the model differs from that of the request: it must be 2D, "
                f"cover all {stop} columns, {self.past} of which are cached, and mask only padding on the left"
            )
        expected = self.rows.positions(self.past, stop)
        real = expected >= 0
        if positions is None:
            wrong = padded
        else:
            fits = positions.ndim == 2 and positions.shape[1] == expected.shape[1]
            wrong = not fits or bool((positions.cpu().expand_as(expected)[real] != expected[real]).any())
        if wrong:
            raise UsageError(
                "position_ids must count the tokens of each row from 0, without padding, here up to column "
                f"{stop}; if generate made them, the request has other or more tokens: create one per call. "
                "Prompts of unequal length cannot share a batch with a model that takes no position_ids"
            )


def _refuse_gradients() -> None:
    if torch.is_grad_enabled():
        raise UsageError(
            "the cache does not support gradients: run the model in torch.no_grad() or torch.inference_mode()"
        )


def _refuse_other_inputs(arguments: Mapping[str, Any]) -> None:
    others = [
        name for name, value in arguments.items() if isinstance(value, torch.Tensor) and name not in TENSORS
    ]
    if others:
        raise Unsupported(
            f"a forward pass with {', '.join(others)}",
            "K and V are found by token ids, so they must not depend on anything else",
        )

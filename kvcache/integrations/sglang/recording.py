"""Conversion of the actions of SGLang's scheduler and prefix cache to calls of a `Recorder`.

A block of the log is a page of SGLang's, by default one token. SGLang caches a request's pages when a chunk of its
prompt is computed and when it ends, keeps one copy of equal pages, and gives the request that copy. Pages for tokens to
come are seen in the request's row at the next call of any kind; evictions for them are recorded before.

With a hierarchical cache a page can be on the device and in host memory at once. In the log it is in one level: on the
device while it is there.

Layers with sliding windows are a group of their own in the log (`windows.py`). Where their pages were lost and are
computed again, SGLang may take a request's pages of full attention for the cached ones, which it frees.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from events.types import PRIMARY
from kvcache import Recorder
from kvcache.errors import Unsupported
from kvcache.integrations.attachment import request_name
from kvcache.integrations.sglang.windows import SLIDING, WindowPages

_FULL = 0
"""Number of SGLang's component for full attention."""


class _SGLangRequest:
    """Recorded part of a running request."""

    def __init__(self, req: Any, name: str, pages: list[int]) -> None:
        self.req, self.name = req, name
        self.pages, self.stored = pages, len(pages)
        """Pages of the request, and the number of cached ones."""
        self.recorded = len(req.output_ids)
        """Number of recorded sampled tokens."""
        self.prompt = len(req.origin_input_ids) + self.recorded
        """Tokens at its admission, until all of them are being computed."""


class SGLangRecording:
    """Recording of SGLang. After any error its recorder must not be used any further."""

    def __init__(self, recorder: Recorder, cache: Any) -> None:
        self.recorder = recorder
        self._cache, self._size = cache, recorder.config.tokens_per_block
        self._rows = cache.req_to_token_pool
        self._cached = bytearray(recorder.state.groups[0].levels[PRIMARY].size + 1)
        """Flag for each page on the device: 1 if it is recorded as cached."""
        self._below: set[int] = set()
        """Pages in host memory that are recorded as cached."""
        self._running: dict[str, _SGLangRequest] = {}
        self._happened: list[tuple[Any, Any]] = []
        """Changes to record at the next call: indices of tokens on the device and in host memory, of which the second
        are copies of the first; or those that left the device, or host memory, with None for the other."""
        self._host_of: dict[int, int] = {}
        """Page in host memory by the page on the device with the same content."""
        self._device_of: dict[int, int] = {}
        """Page on the device by the page in host memory with the same content."""
        self._windows = WindowPages(recorder, cache) if recorder.state.positional else None
        self._replaced: list[int] = []
        """Pages that the tree has freed as it took others for their content, since the last call."""

    # -- called by SGLang: the result first, then the arguments

    def extended(self, _: None, req: Any) -> None:
        """`maybe_hand_to_session` has returned, the last call for each request of a batch of prompts."""
        if req.beam_group is not None:
            raise Unsupported("beam search", "disable it to record")
        running = self._running.get(req.rid)
        if running is None:
            self._admit(req)
        else:
            self._settle()
        running = self._running[req.rid]
        if running.prompt:
            self.recorder.computed(running.name, req.extend_end)
            if req.extend_end == running.prompt:
                running.prompt = 0

    def inserting(self, *_: Any, **__: Any) -> None:
        """`checkpoint_into_tree` is called, which may put other pages into a request's row."""
        self._settle()

    def inserted(self, _: None, req: Any, **__: Any) -> None:
        """`checkpoint_into_tree` has returned: the computed part of a request is cached, in its own pages or others."""
        running = self._running.get(req.rid)
        if running is None:
            return
        self._append([running])
        last = req.kv.cache_protected_len // self._size
        if last <= running.stored:
            return
        first, there = running.stored, self._row(req, running.stored, last)
        is_own = [page == own for page, own in zip(there, running.pages[first:last], strict=True)]
        running.pages[first:last] = there
        for own, row in groupby(is_own):
            end = running.stored + len(list(row))
            if own:
                self._store(running, end)
            else:
                self.recorder.replaced(running.name, running.stored, running.pages[running.stored : end])
                running.stored = end
        self._record_replaced()
        if self._windows is not None:
            self._windows.store(running.name, req, first, running.pages[:last])

    def released(self, req: Any, **__: Any) -> None:
        """`on_release` is called: a request has finished, was aborted, or makes room and returns later."""
        running = self._running.get(req.rid)
        if running is None:
            return
        self._settle()
        self._append([running])
        del self._running[req.rid]
        if self._windows is not None:
            self._windows.end(running.name)
        aborted = any(type(why).__name__ == "FINISH_ABORT" for why in (req.finished_reason, req.to_finish))
        why = "aborted" if aborted else "finished" if req.finished() else "preempted"
        self.recorder.ended(running.name, why)  # type: ignore[arg-type]
        if not self._running:
            # There may be no further step for long.
            self.recorder.flush()

    def freed(self, device: Any, host: Any) -> None:
        """`_free_values` is called, with the values that have left the tree, by component."""
        # Pages in host memory only continue pages on the device.
        self._happened += [(None, each) for each in host.get(_FULL, ())]
        self._happened += [(each, None) for each in device.get(_FULL, ())]
        if self._windows is not None:
            self._windows.freed(device.get(SLIDING, ()))

    def acting(self, action: Any) -> None:
        """`_apply_cache_action` is called, by which the tree may free pages whose content it has in others now."""
        if type(action).__name__ == "FreeDeviceKVFullOnly":
            self._replaced += [page for indices in action.indices for page in self._pages(indices)]

    def backed_up(self, host: Any, _: Any, device: Any, *__: Any) -> None:
        """`_execute_kv_backup` has returned: pages on the device are copied to host memory."""
        if host is not None:
            self._happened.append((device, host))

    def loading(self, _: Any, device: Any, transfer: Any, *__: Any) -> None:
        """`commit_load_back` is called: pages in host memory are copied to the device."""
        self._happened.append((device, transfer.host_indices))

    def reset(self, *_: Any) -> None:
        """`reset` has returned: nothing is cached any more."""
        self._happened.clear()
        self._host_of.clear()
        self._device_of.clear()
        self._below.clear()
        self._cached = bytearray(len(self._cached))
        if self._windows is not None:
            self._windows.reset()
        self.recorder.cleared()
        self.recorder.flush()

    def stepped(self, *_: Any) -> None:
        """`process_batch_result` has returned, at the end of each step."""
        self._settle()
        self._append(list(self._running.values()))
        self.recorder.flush()

    def refused(self, req: Any) -> None:
        """A request was refused for lack of room."""
        if req.rid not in self._running:
            allocator, size = self._cache.token_to_kv_pool_allocator, self._size
            needed = -(-(len(req.full_untruncated_fill_ids) - req.prefix_len) // size)
            evictable = self._cache.full_evictable_size()
            if self._windows is not None:
                evictable = min(evictable, self._cache.swa_evictable_size())
            room = allocator.available_size() + evictable
            self.recorder.refused(request_name(req.rid), needed, room // size)

    # -- recording

    def _admit(self, req: Any) -> None:
        name, size = request_name(req.rid), self._size
        if self.recorder.config.secondary_blocks:
            # The pages that it has found may be loaded to where other content was until now.
            self._settle()
        hit = self._row(req, 0, req.prefix_len // size)
        cached, host_of = self._cached, self._host_of
        reused = next((at for at, page in enumerate(hit) if not cached[page]), len(hit))
        loaded = reused
        while loaded < len(hit) and host_of.get(hit[loaded]) in self._below:
            loaded += 1
        lower = [host_of[page] for page in hit[reused:loaded]]
        self.recorder.admitted(
            name,
            req.origin_input_ids + req.output_ids,
            hit[:reused],
            onboarded=lower,
            onto=hit[reused:loaded],
            lora_name=req.lora_id,
            cache_salt=_salt(req),
            resumed=req.retraction_count > 0,
            external=(len(hit) - loaded) * size,
        )
        self._below.difference_update(lower)
        self._note_cached(hit[reused:loaded])
        self._running[req.rid] = running = _SGLangRequest(req, name, hit[:loaded])
        if self._windows is not None:
            self._windows.admit(name, hit[:loaded])
        self._settle()
        if loaded < len(hit):
            # They are in the tree, where other requests of this step may have found them, too.
            self._store(running, len(hit))

    def _store(self, running: _SGLangRequest, last: int) -> None:
        for page, copy in self.recorder.stored(running.name, last):
            # SGLang still has the copy in host memory.
            self._host_of[page], self._device_of[copy] = copy, page
            self._below.discard(copy)
        self._note_cached(running.pages[running.stored : last])
        running.stored = last

    def _note_cached(self, pages: list[int]) -> None:
        for page in pages:
            self._cached[page] = 1

    def _record_replaced(self) -> None:
        gone = [page for page in self._replaced if self._cached[page]]
        self._replaced.clear()
        for page in gone:
            self._cached[page] = 0
        if gone:
            # Copies of them, which were stored just now, stay.
            self.recorder.evicted(gone)

    def _settle(self) -> None:
        """Record evictions, and pages given to requests, since the last call."""
        size, by_one, by_more = self._size, list[_SGLangRequest](), list[_SGLangRequest]()
        new = list[tuple[str, int, list[int]]]()
        for running in self._running.values():
            count = -(-running.req.kv.kv_allocated_len // size) - len(running.pages)
            if count > 0:
                (by_one if count == 1 else by_more).append(running)
        needed_by = next((each.name for each in (*by_more, *by_one)), None)
        if self._windows is not None:
            self._windows.settle([(each.name, each.req) for each in self._running.values()], needed_by)
        if self._happened:
            self._record_gone(needed_by)
        for running in by_more:
            have, need = len(running.pages), -(-running.req.kv.kv_allocated_len // size)
            pages = self._row(running.req, have, need)
            self.recorder.allocated(running.name, pages)
            running.pages += pages
            new.append((running.name, have, pages))
        if by_one:
            rows = [running.req.kv.req_pool_idx for running in by_one]
            places = [len(running.pages) * size for running in by_one]
            pages = [index // size for index in self._rows.req_to_token[rows, places].tolist()]
            self.recorder.grown([each.name for each in by_one], pages)
            for running, page in zip(by_one, pages, strict=True):
                running.pages.append(page)
                new.append((running.name, len(running.pages) - 1, [page]))
        if self._windows is not None and new:
            self._windows.allocate(new)

    def _record_gone(self, needed_by: str | None) -> None:
        """Record everything that has left the device and host memory, perhaps for a request."""
        happened, self._happened = self._happened, []
        for what, rows in groupby(self._one_by_one(happened), lambda row: row[0]):
            _, pages, copies = map(list, zip(*rows, strict=True))
            if what == "moved":
                self.recorder.moved(pages, copies, needed_by)
            else:
                self.recorder.evicted(pages, needed_by, level=what)

    def _one_by_one(self, happened: list[tuple[Any, Any]]) -> Iterator[tuple[str, int, int]]:
        """Yield the change of each page: the level that it left, or "moved" and the target page."""
        for device, host in happened:
            if device is not None and host is not None:
                for page, copy in zip(self._pages(device), self._pages(host), strict=True):
                    self._host_of[page], self._device_of[copy] = copy, page
            elif device is not None:
                for page in reversed(self._pages(device)):
                    copy = self._host_of.pop(page, -1)
                    self._device_of.pop(copy, None)
                    if self._cached[page]:
                        self._cached[page] = 0
                        if copy >= 0:
                            self._below.add(copy)
                        yield "primary" if copy < 0 else "moved", page, copy
            else:
                for copy in reversed(self._pages(host)):
                    self._host_of.pop(self._device_of.pop(copy, -1), None)
                    if copy in self._below:
                        self._below.remove(copy)
                        yield "secondary", copy, -1

    def _append(self, requests: list[_SGLangRequest]) -> None:
        """Record the new tokens of these requests."""
        names, tokens, counts = list[str](), array("q"), list[int]()
        for running in requests:
            new = running.req.output_ids[running.recorded :]
            if new:
                names.append(running.name)
                tokens.extend(new)
                counts.append(len(new))
                running.recorded += len(new)
        if names:
            self.recorder.appended(names, tokens, None if len(tokens) == len(names) else counts)

    def _row(self, req: Any, first: int, last: int) -> list[int]:
        """Return the pages of a request at these places."""
        size = self._size
        return self._pages(self._rows.req_to_token[req.kv.req_pool_idx, first * size : last * size])

    def _pages(self, indices: Any) -> list[int]:
        size = self._size
        return [index // size for index in indices[::size].tolist()]


def _salt(req: Any) -> str | None:
    """Return the key that separates a request's pages from others, except for its LoRA adapter."""
    key = (req.extra_key or "").removesuffix(req.lora_id or "")
    return repr((key, req.cache_salt)) if key else req.cache_salt

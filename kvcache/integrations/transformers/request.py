"""The ``past_key_values`` of a call of ``generate``."""

from __future__ import annotations

from functools import update_wrapper
from inspect import signature
from threading import RLock
from typing import Any, NoReturn, Self, SupportsIndex

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from kvcache.errors import Unsupported, UsageError
from kvcache.integrations.transformers.batch import Batch


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a request. Keeps nothing itself.

    `torch.compile` leaves its methods, and the hooks, to Python: they depend on the cached part.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, batch: Batch, number: int, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._batch, self._number, self._window = batch, number, window
        self.is_sliding = window is not None
        self.is_initialized = True

    def lazy_initialization(self, *_: Any) -> None:
        """Do nothing."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of the columns of a forward pass; returns those of all columns that the layer's mask covers."""
        return self._batch.exchange(self._number, self._first_column(), key_states, value_states)

    def _first_column(self) -> int:
        """First column that a query may see; the mask begins with it."""
        return 0 if self._window is None else max(self._batch.past - self._window + 1, 0)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Return the number of columns that `update` will return, and the first of them. `query`: the number of new
        ones, or these.
        """
        new = query.shape[0] if isinstance(query, torch.Tensor) else int(query)
        self._batch.begun()  # masks come before layers: errors are raised before anything is computed
        first = self._first_column()
        return self._batch.past + new - first, first

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def get_seq_length(self, *_: Any) -> int:
        """Number of present columns: reused ones before the first forward pass."""
        return self._batch.past

    def get_max_length(self) -> int:
        """Return no length: longer sequences are refused before a forward pass."""
        return -1 if self._window is None else self._window

    get_max_cache_shape = get_max_length  # its name in Transformers 4

    def _refuse(self, what: str) -> NoReturn:
        raise Unsupported(what, "create a new request, or use the default cache of Transformers")

    def crop(self, tokens: int) -> None:
        """Raise `Unsupported`: nothing is taken back."""
        if tokens:
            self._refuse("taking tokens back (assisted generation, prompt lookup)")

    def activate_past_recording(self) -> None:
        """Raise `Unsupported`: it announces that tokens will be taken back."""
        self._refuse("taking tokens back (assisted generation, prompt lookup)")

    def reset(self) -> None:
        """Raise `Unsupported`: a request is used once."""
        self._refuse("resetting a request")


class PagedRequest(Cache):
    """The rows of one batch in a `PagedCache`, for one call of ``generate``, or forward passes of one's own.

    Closed when it is dropped, by `close`, or as a context manager; blocks computed until then stay reusable. A forward
    pass that fails keeps nothing of its own.
    """

    def __init__(self, model: nn.Module, batch: Batch, windows: tuple[int | None, ...]) -> None:
        super().__init__(layers=[PagedLayer(batch, *each) for each in enumerate(windows)])
        self._batch = batch
        # They refer to the batch alone: a dropped request shall be collected at once.
        self._hooks = (
            model.register_forward_pre_hook(_begin(batch), with_kwargs=True),
            model.register_forward_hook(_complete(batch), with_kwargs=True),
            _Generate.of(model),
        )

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Request ids of the rows, as in the manager and the events."""
        return tuple(self._batch.names)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Continue with these rows in place of all, as beam search does. Raises `OutOfBlocks`."""
        rows = torch.arange(len(self._batch.names))
        self._batch.select(rows[torch.as_tensor(beam_idx).cpu()].tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Continue with these rows in place of all, as `reorder_cache`."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue with each row several times. Raises `OutOfBlocks`."""
        rows = range(len(self._batch.names))
        self._batch.select([row for row in rows for _ in range(repeats)])

    def __copy__(self) -> NoReturn:
        """Raise `Unsupported`."""
        raise Unsupported(
            "copying a request", "create another request with the same tokens: it reuses what is computed"
        )

    def __deepcopy__(self, _: Any) -> NoReturn:
        """Raise `Unsupported`, and so does pickling: the cache would be copied with it."""
        self.__copy__()

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        self.__copy__()

    def close(self) -> None:
        """End the sequences. Twice is harmless."""
        self._batch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Also for a partly constructed one.
        if hasattr(self, "_hooks"):
            for hook in self._hooks:
                if hook is not None:
                    hook.remove()
            self._batch.abandon()


class _Generate:
    """Wrapper of a model's ``generate``, which compares its prompts with those of the request that it is given.

    It replaces the model's own while a request exists: forward passes see only the columns that are not cached, and the
    cache no tokens at all.
    """

    _lock = RLock()  # requests may be dropped in any thread, also by a collection in between

    def __init__(self, model: Any) -> None:
        self._model, self._generate = model, model.generate
        self._replaced = "generate" in vars(model)
        self._users = 0
        # Without its attributes: anything wrapped around another one of these (functools.wraps) has that one's.
        update_wrapper(self, self._generate, updated=())

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """Return the existing wrapper, or a new one; None for a model without ``generate``. `remove` it once."""
        with cls._lock:
            if not hasattr(model, "generate"):
                return None
            if not isinstance(vars(model).get("generate"), cls):
                model.generate = cls(model)
            found: Self = model.generate
            found._users += 1
            return found

    def remove(self) -> None:
        """Remove one of its users."""
        with self._lock:
            self._users -= 1
            if self._users or vars(self._model).get("generate") is not self:
                return
            if self._replaced:
                self._model.generate = self._generate
            else:
                del self._model.generate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = _named(self._generate, args, kwargs)
        request = _request(given)
        if request is not None:
            ids = given.get("inputs")
            request._batch.refuse_other_prompts(
                given.get("input_ids") if ids is None else ids, given.get("attention_mask")
            )
        return self._generate(*args, **kwargs)


def _named(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by their names."""
    return {**dict(zip(signature(call).parameters, args, strict=False)), **kwargs} if args else kwargs


def _request(arguments: dict[str, Any]) -> PagedRequest | None:
    # From 5.24 on the argument has another name.
    for name in ("cache", "past_key_values"):
        if isinstance(past := arguments.get(name), PagedRequest):
            return past
    return None


def _of(batch: Batch, arguments: dict[str, Any]) -> bool:
    request = _request(arguments)
    return request is not None and request._batch is batch


def _begin(batch: Batch) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = _named(model.forward, args, kwargs)
        if not _of(batch, arguments):
            return
        if model.training:
            raise UsageError(
                "the model is in training mode, in which K and V may be random: call model.eval()"
            )
        batch.begin(arguments)

    return before_forward


def _complete(batch: Batch) -> Any:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        if _of(batch, _named(model.forward, args, kwargs)):
            batch.complete()

    return after_forward

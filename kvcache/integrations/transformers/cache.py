"""The cache of one model, with the lifetime of the model."""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from transformers import PreTrainedModel

from events.closing import Closing
from events.types import PRIMARY
from kvcache.errors import UsageError
from kvcache.inputs import checked_natural
from kvcache.integrations.transformers.batch import Batch, Copies
from kvcache.integrations.transformers.request import PagedRequest
from kvcache.integrations.transformers.rows import Rows
from kvcache.integrations.transformers.shape import ModelShape, plain
from kvcache.layout import Layout
from kvcache.manager import KVCacheManager
from kvcache.pools import Pools, sized

if TYPE_CHECKING:
    from kvcache.record.outputs import LogTarget
    from sinks import Sink, SinkRunner


class PagedCache(Closing):
    """K and V of one model's prompts and answers, in the blocks of a `KVCacheManager`, for all calls of ``generate``.

    `for_model` makes it. `manager` is for queries of its content (`stats`, `match`), not for commands: the requests are
    the cache's. All of it belongs to the thread that made it.
    """

    def __init__(self, model: PreTrainedModel, manager: KVCacheManager, pools: Pools) -> None:
        """Create a cache on an own manager and its pools. Raises `ConfigError` if the model needs others."""
        model = plain(model)
        shape = ModelShape.of(model)
        shape.refuse_other(manager.config)
        shape.refuse_cut(manager.layout)
        if pools.layout != manager.layout:
            raise UsageError("pools must be those that the manager was created with")
        self._model, self.manager, self._pools = model, manager, pools
        self._windows = shape.windows
        self._copies = Copies(manager)
        self._numbers = count()
        self._open: list[Batch] = []

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        *,
        log: LogTarget = None,
        sinks: Items[str | Sink | SinkRunner] = (),
        **settings: Any,
    ) -> Self:
        """Create a cache on the model's device, with the layers, heads, windows and type of the model.

        `settings` are those of `KVCacheConfig` for the size of the cache and the like: `primary_bytes`,
        `host_cache_size`, `tokens_per_block`, ... `max_sequence_length` is by default the number of positions of the
        model. `log` and `sinks` are those of `KVCacheManager`. Raises `ConfigError`, `NotEnoughMemory`, and
        `Unsupported` for models that keep anything other than K and V of all tokens, or of a window.
        """
        shape = ModelShape.of(plain(model))
        config = sized(shape.settings(settings), shape.device)
        shape.refuse_other(config)
        layout = Layout.of(config)
        shape.refuse_cut(layout)
        pools = Pools(layout, shape.device, config.secondary_path)
        return cls(model, KVCacheManager(config, pools=pools, log=log, sinks=sinks), pools)

    def request(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        max_new_tokens: int | None = None,
        copies: int = 1,
        **options: Any,
    ) -> PagedRequest:
        """Return the ``past_key_values`` for ``generate`` with these prompts, which reuse their cached part.

        `input_ids` and `attention_mask` are those of ``generate``, padded on the left. `copies` is the number of rows
        per prompt: its ``num_beams`` or ``num_return_sequences``. With `max_new_tokens` there are slots for all of the
        answers, or `OutOfBlocks` is raised here; without, slots are taken token by token, and a forward pass without
        enough raises it before it begins. `options` are those of `kvcache.Request` (`cache_salt`, `lora_name`,
        `retention`, ...), for all rows. Raises `PromptTooLong`, and `UsageError` for what cannot be a batch of prompts.
        """
        self._sweep()
        if options.get("reserve_tokens") is not None:
            raise UsageError("omit reserve_tokens: a request has slots for its whole prompt")
        rows = Rows(input_ids, attention_mask)
        number = checked_natural(copies, "copies")
        if not number:
            raise UsageError("copies must be at least 1")
        blocks = min(group.num_blocks[PRIMARY] for group in self.manager.layout.groups)
        if number * len(rows.columns) > blocks:
            raise UsageError(
                f"each answer needs a block of its own, and the cache has only {blocks:,}: pass fewer copies"
            )
        rows.select([row for row in range(len(rows.columns)) for _ in range(number)])
        # The last token of an answer is sampled, but never computed.
        promised = 0 if max_new_tokens is None else checked_natural(max_new_tokens, "max_new_tokens") - 1
        batch = Batch(self.manager, self._pools, self._copies, str(next(self._numbers)), rows)
        batch.admit(promised, options)
        self._open.append(batch)
        return PagedRequest(self._model, batch, self._windows)

    def _sweep(self) -> None:
        """Close dropped requests that could not be closed at once, as in another thread."""
        for batch in self._open:
            if batch.abandoned:
                batch.close()
        self._open = [batch for batch in self._open if not batch.closed]

    def close(self) -> None:
        """End all requests, and close the manager with its log and sinks. Twice is harmless."""
        for batch in self._open:
            batch.close()
        self._open = []
        self.manager.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            # First attribute that `generate` reads, if it is given this instead of a request.
            raise AttributeError(
                f"PagedCache has no {name}: pass past_key_values=cache.request(input_ids, attention_mask) to "
                "generate"
            )

"""Transformers' `generate` with our cache, beside the same with the one that it makes itself."""

from __future__ import annotations

import gc
import os
import threading
import tomllib
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cuda_ops import attention
from kvcache import KVCacheManager, Layout
from kvcache.errors import (
    ComputationLost,
    ConfigError,
    OutOfBlocks,
    PromptTooLong,
    Unsupported,
    UsageError,
)
from kvcache.pools import Pools
from kvcache.replay import replay
from tests.support.engines.simulated import FailingCopier, LateCopier
from tests.support.engines.transformers_models import (
    MODELS,
    WINDOW,
    answered,
    cache_for,
    converse,
    for_model,
    model,
    padded,
    prompt,
    shape_of,
    with_manager,
)
from tests.support.examples import load
from tests.support.places import ROOT
from tests.support.releases import TESTED

if TYPE_CHECKING:
    from kvcache.integrations.transformers import PagedCache

FEW, MANY = 5, 50
MUTANT_SEEDS = 13
"""How many conversations a mistake may survive."""
RELEASE = tuple(int(part) for part in version("transformers").split(".")[:2])


def test_release() -> None:
    """These tests are of the release that they are meant to be of, if somebody says which."""
    import transformers

    assert transformers.__version__ == os.environ.get("EXPECTED_TRANSFORMERS", transformers.__version__)


def test_stated_releases_are_those_that_are_tested() -> None:
    """The documentation names them, and no older one is accepted or installed."""
    from kvcache.integrations.transformers import OLDEST

    releases = list(TESTED)
    text = (ROOT / "docs" / "how-to" / "transformers.md").read_text(encoding="utf-8")
    assert f"Transformers {', '.join(releases[:-1])} and {releases[-1]}" in text
    assert releases[0].startswith(".".join(map(str, OLDEST)))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    assert f"transformers>={'.'.join(map(str, OLDEST))}" in extras["transformers"]


def nothing_held(kept: PagedCache) -> bool:
    """No sequence runs, and the state is sound."""
    kept.manager.check()
    return kept.manager.num_sequences == 0


@pytest.mark.parametrize("name", MODELS)
def test_conversations(name: str) -> None:
    """Several turns, batches of unequal prompts, greedy or sampled: the same tokens as without the cache."""
    with cache_for(name, primary_blocks=40) as kept:
        found = [converse(name, kept, seed) for seed in range(FEW)]
        assert nothing_held(kept)
    assert sum(turns[-1] > 0 for turns in found) >= FEW - 1


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_many_conversations(name: str) -> None:
    """The same, 50 of them."""
    with cache_for(name, primary_blocks=40, debug_fill_blank=True) as kept:
        found = [converse(name, kept, seed, turns=4) for seed in range(1000, 1000 + MANY)]
        assert nothing_held(kept)
        stats = kept.manager.stats()
    assert sum(turns[-1] > 0 for turns in found) > MANY * 0.9
    assert stats.blocks_offloaded > 0
    assert stats.blocks_onboarded > 0


def shifted(*of: Any, **how: Any) -> torch.Tensor:
    """Block tables whose entries have moved on by one place."""
    tables: Any = TABLES(*of, **how)
    return torch.as_tensor(tables).roll(1, dims=-1)


TABLES, WRITE, GATHER = KVCacheManager.block_tables, attention.write, attention.gather


def last_unwritten(kv: Any, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """K and V of the last token of a prompt are not written."""
    kept = slice(None, -1 if len(slots) > 3 else None)
    WRITE(kv, slots[kept], key[kept], value[kept])


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("kvcache.integrations.transformers.step.write", last_unwritten),
        ("kvcache.KVCacheManager.block_tables", shifted),
        ("kvcache.integrations.transformers.step.gather", lambda kv, slots: GATHER(kv, slots)[::-1]),
    ],
    ids=["skip a write", "shift a table", "swap K and V"],
)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_what_is_wrong_shows(name: str, what: str, wrong: Any, monkeypatch: Any) -> None:
    """Each of these changes an answer: the conversations notice."""
    monkeypatch.setattr(what, wrong)
    with cache_for(name) as kept:
        assert any(differ(name, kept, seed) for seed in range(MUTANT_SEEDS))


def differ(name: str, kept: PagedCache, seed: int) -> bool:
    """Whether a conversation goes another way with the cache."""
    try:
        converse(name, kept, seed)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_one_block_too_many_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that takes a block for reused that is not changes the answer."""
    from kvcache.integrations.transformers.batch import Batch

    ids, mask = padded([prompt(1, 60)[0].tolist()])
    admit = Batch.admit

    def too_much(batch: Any, *of: Any) -> None:
        admit(batch, *of)
        batch.past += 8
        batch.computed = [each + 8 for each in batch.computed]

    with cache_for(name) as kept:
        answered(name, ids[:, :40], mask[:, :40], kept.request(ids[:, :40]))
        monkeypatch.setattr(Batch, "admit", too_much)
        request = kept.request(ids, mask)
        assert request.get_seq_length() == 48
        assert not torch.equal(answered(name, ids, mask), answered(name, ids, mask, request))


def test_a_repeated_prompt_is_computed_once() -> None:
    """Of a prompt that was answered before, with its answer, only the last token is computed."""
    ids, mask = padded([prompt(1, 50)[0].tolist()])
    with cache_for("llama") as kept:
        first = answered("llama", ids, mask, kept.request(ids, mask), max_new_tokens=9)
        assert first.shape[1] == 59
        with kept.request(ids, mask) as request:
            assert request.get_seq_length() == 49
        with kept.request(first) as request:
            # The last token was sampled, and never computed.
            assert request.get_seq_length() == 58
        assert kept.manager.match(first[0].tolist()).reused_tokens == 58


def test_rows_of_unequal_reuse() -> None:
    """The rows are computed from where the one with the least reuse ends; the others lose nothing of theirs."""
    known, new = prompt(1, 60)[0].tolist(), prompt(2, 33)[0].tolist()
    for name in MODELS:
        with cache_for(name) as kept:
            one, its_mask = padded([known])
            answered(name, one, its_mask, kept.request(one, its_mask))
            ids, mask = padded([known, new])
            request = kept.request(ids, mask)
            assert request.get_seq_length() == 27  # the padding of the shorter one
            cached = answered(name, ids, mask, request)
            assert torch.equal(cached, answered(name, ids, mask))
            del request
            with kept.request(ids, mask) as request:
                assert request.get_seq_length() == 59
            assert nothing_held(kept)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "how", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}, {"do_sample": True}]
)
def test_several_answers(name: str, how: dict[str, Any]) -> None:
    """Beams branch, and drawn answers to one prompt are rows of their own."""
    ids, mask = padded([prompt(1, 30)[0].tolist(), prompt(2, 41)[0].tolist()])
    how = {"num_return_sequences": 3, **how} if "do_sample" in how else how
    rows = max(how.get("num_beams", 1), how.get("num_return_sequences", 1))
    alone = answered(name, ids, mask, max_new_tokens=10, **how)
    with cache_for(name) as kept:
        for _ in range(2):
            request = kept.request(ids, mask, copies=rows)
            assert torch.equal(alone, answered(name, ids, mask, request, max_new_tokens=10, **how))
            del request
            assert nothing_held(kept)


def test_offloaded_and_back() -> None:
    """A prompt that moved to host memory meanwhile is answered as before, also if copies end late."""
    ids, mask = padded([prompt(1, 100)[0].tolist()])
    for name in MODELS:
        with small_cache(name, lambda copier: LateCopier(copier, 3)) as kept:
            first = answered(name, ids, mask, kept.request(ids, mask))
            for seed in (2, 3):
                other, its_mask = padded([prompt(seed, 100)[0].tolist()])
                answered(name, other, its_mask, kept.request(other, its_mask))
            request = kept.request(ids, mask)
            assert request.get_seq_length() >= 96
            assert torch.equal(first, answered(name, ids, mask, request))
            assert torch.equal(first, answered(name, ids, mask))
            del request
            assert kept.manager.stats().blocks_onboarded > 0
            assert nothing_held(kept)


def small_cache(name: str, wrap: Callable[[Any], Any]) -> PagedCache:
    """A cache with room for one prompt of 100 tokens on the device, and another copier."""
    given = {"tokens_per_block": 8, "primary_blocks": 16, "secondary_blocks": 64, "max_sequence_length": 128}
    config = shape_of(model(name)).settings(given)
    pools = Pools(Layout.of(config), "cpu")
    manager = KVCacheManager(config, pools=pools, copier=wrap(pools.copier()))
    return with_manager(model(name), manager, pools)


def test_a_failed_copy_fails_the_call() -> None:
    """Nothing is answered from bytes that did not arrive; the next call computes all anew."""
    ids, mask = padded([prompt(1, 100)[0].tolist()])
    other, its_mask = padded([prompt(2, 100)[0].tolist()])
    copier: Any = None

    def failing(inner: Any) -> Any:
        nonlocal copier
        copier = FailingCopier(inner, set())
        return copier

    with small_cache("llama", failing) as kept:
        first = answered("llama", ids, mask, kept.request(ids, mask))
        answered("llama", other, its_mask, kept.request(other, its_mask))
        copier.which = range(1000)
        with pytest.raises(ComputationLost):
            answered("llama", ids, mask, kept.request(ids, mask))
        copier.which = set()
        gc.collect()
        request = kept.request(ids, mask)
        assert request.get_seq_length() == 0
        assert torch.equal(first, answered("llama", ids, mask, request))
        del request
        assert nothing_held(kept)


class Broken(Exception):
    """Raised by a layer."""


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("call", [0, 2])
def test_a_failing_forward_pass(name: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed before is kept, nothing of the pass that failed, and the call after it answers right."""
    ids, mask = padded([prompt(1, 30)[0].tolist(), prompt(2, 41)[0].tolist()])
    layers: Any = model(name)
    layers, passes = layers.model.layers, 0
    forward = layers[1].mlp.forward

    def broken(*of: Any, **how: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == call + 1:
            raise Broken
        return forward(*of, **how)

    with cache_for(name) as kept:
        with monkeypatch.context() as patch:
            patch.setattr(layers[1].mlp, "forward", broken)
            with pytest.raises(Broken):
                answered(name, ids, mask, kept.request(ids, mask))
        assert nothing_held(kept)
        with kept.request(ids, mask) as request:
            assert request.get_seq_length() == (40 if call else 0)
        assert torch.equal(answered(name, ids, mask), answered(name, ids, mask, kept.request(ids, mask)))
        assert nothing_held(kept)


def test_a_failed_pass_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loop of one's own a forward pass that failed can be repeated."""
    any_model: Any = model("mistral")
    ids = prompt(1, 50)
    layer, failures = any_model.model.layers[1].mlp, [Broken(), None]
    forward = layer.forward

    def once(*of: Any, **how: Any) -> Any:
        if (failure := failures.pop(0) if failures else None) is not None:
            raise failure
        return forward(*of, **how)

    with cache_for("mistral") as kept, torch.no_grad(), kept.request(ids) as request:
        monkeypatch.setattr(layer, "forward", once)
        with pytest.raises(Broken):
            any_model(ids, past_key_values=request)
        found = any_model(ids, past_key_values=request).logits
        more = any_model(prompt(2, 5), past_key_values=request).logits
        assert request.get_seq_length() == 55
        whole = any_model(torch.cat([ids, prompt(2, 5)], 1)).logits
        torch.testing.assert_close(torch.cat([found, more], 1), whole)


def test_chunked_prefill() -> None:
    """`generate` may compute a prompt in chunks, here of 7 tokens. Transformers 4 does so behind the model's back."""
    from transformers import DynamicCache

    ids, mask = padded([prompt(1, 50)[0].tolist(), prompt(2, 21)[0].tolist()])
    for name in MODELS:
        with cache_for(name, debug_fill_blank=True) as kept:
            if RELEASE < (5, 0):
                with pytest.raises(UsageError, match="bypassed the cache"):
                    answered(name, ids, mask, kept.request(ids, mask), prefill_chunk_size=7)
                continue
            own = DynamicCache(config=model(name).config)
            # Beside the same with a cache of its own: Mistral's answers change by chunks in 5.0.0.
            alone = answered(name, ids, mask, own, prefill_chunk_size=7)
            assert torch.equal(
                alone, answered(name, ids, mask, kept.request(ids, mask), prefill_chunk_size=7)
            )
            assert nothing_held(kept)


@pytest.mark.skipif(RELEASE < (5, 23), reason="prompts are chunked from their beginning, whatever is cached")
def test_chunks_after_what_is_reused() -> None:
    """The first chunk begins where reuse ends."""
    ids, mask = padded([prompt(1, 50)[0].tolist(), prompt(2, 41)[0].tolist()])
    for name in MODELS:
        with cache_for(name, debug_fill_blank=True) as kept:
            first, its_mask = ids[:, :30], mask[:, :30]
            answered(name, first, its_mask, kept.request(first, its_mask))
            request = kept.request(ids, mask)
            assert request.get_seq_length() == 30
            cached = answered(name, ids, mask, request, prefill_chunk_size=7)
            assert torch.equal(cached, answered(name, ids, mask))


def test_bfloat16() -> None:
    """Blocks of bfloat16: the same bits for the same cut, so the same logits, and close to those of another cut."""
    any_model: Any = model("llama", torch.bfloat16)
    ids = prompt(1, 60)
    with (
        for_model(any_model, tokens_per_block=8, primary_blocks=64) as kept,
        torch.inference_mode(),
    ):
        own = any_model(ids[:, :40], use_cache=True).past_key_values
        without = any_model(ids[:, 40:], past_key_values=own).logits
        with kept.request(ids[:, :41]) as request:
            any_model(ids[:, :40], past_key_values=request)
        with kept.request(ids) as request:
            assert request.get_seq_length() == 40
            cached = any_model(ids[:, 40:], past_key_values=request).logits
            assert cached.dtype == torch.bfloat16
        assert torch.equal(without, cached)
        torch.testing.assert_close(cached, any_model(ids).logits[:, 40:], rtol=0.1, atol=0.15)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts(layout: str) -> None:
    """Both orders inside a block."""
    with cache_for("gemma3", kv_layout=layout) as kept:
        converse("gemma3", kept, 5)


class TestRoom:
    """Slots are had before a forward pass, or nothing happens."""

    def test_prompt_that_does_not_fit(self) -> None:
        """It is refused at the request."""
        with cache_for("llama", primary_blocks=4, secondary_blocks=0) as kept:
            with kept.request(prompt(1, 20)), pytest.raises(OutOfBlocks):
                kept.request(prompt(2, 20))
            with pytest.raises(PromptTooLong):
                kept.request(prompt(2, 33))
            assert nothing_held(kept)

    def test_answer_that_does_not_fit(self) -> None:
        """With `max_new_tokens` it is refused at the request."""
        with cache_for("llama", primary_blocks=4, secondary_blocks=0) as kept:
            with kept.request(prompt(1, 16)), pytest.raises(OutOfBlocks):
                kept.request(prompt(2, 10), max_new_tokens=8)
            ids, mask = padded([prompt(2, 25)[0].tolist()])
            request = kept.request(ids, mask, max_new_tokens=8)
            with pytest.raises(OutOfBlocks):
                kept.request(prompt(3, 2))
            cached = answered("llama", ids, mask, request, max_new_tokens=8)
            assert torch.equal(cached, answered("llama", ids, mask, max_new_tokens=8))

    def test_answer_that_grows_too_long(self) -> None:
        """Without, the forward pass that has no slot does not begin, and what was computed stays reusable."""
        ids, mask = padded([prompt(1, 12)[0].tolist(), prompt(2, 10)[0].tolist()])
        with cache_for("llama", primary_blocks=4, secondary_blocks=0) as kept:
            passes, any_model = 0, model("llama")

            def counted(*_: Any) -> None:
                nonlocal passes
                passes += 1

            hook = any_model.get_submodule("model").register_forward_pre_hook(counted)
            with pytest.raises(OutOfBlocks):
                answered("llama", ids, mask, kept.request(ids, mask), max_new_tokens=20)
            hook.remove()
            assert passes == 5  # 12 tokens of the prompt, and 4 of the answer, fill two blocks
            assert nothing_held(kept)
            assert kept.manager.match(prompt(1, 12)[0].tolist()).reused_tokens == 11

    def test_beams_that_do_not_fit(self) -> None:
        """The branch that has no block ends the request."""
        ids, mask = padded([prompt(1, 12)[0].tolist()])
        with cache_for("llama", primary_blocks=5, secondary_blocks=0) as kept:
            with pytest.raises(OutOfBlocks):
                answered(
                    "llama", ids, mask, kept.request(ids, mask, copies=4), num_beams=4, max_new_tokens=20
                )
            assert nothing_held(kept)


class TestWhatIsRefused:
    """Errors come before anything is computed, and say what to do."""

    @pytest.mark.parametrize(
        ("ids", "mask", "text"),
        [
            (torch.ones(3, dtype=torch.int64), None, "a tensor of integers"),
            ([[1, 2]], None, "a tensor of integers"),
            (torch.ones(1, 3), None, "a tensor of integers"),
            (torch.ones(0, 3, dtype=torch.int64), None, "a tensor of integers"),
            (prompt(1, 3), torch.ones(1, 4, dtype=torch.int64), "the shape of input_ids"),
            (prompt(1, 3), torch.tensor([[1, 1, 0]]), "padding_side='left'"),
            (prompt(1, 3), torch.tensor([[1, 0, 1]]), "padding_side='left'"),
            (prompt(1, 3), torch.tensor([[0, 0, 0]]), "a prompt is empty"),
        ],
    )
    def test_no_batch_of_prompts(self, ids: Any, mask: Any, text: str) -> None:
        """Anything but token ids that are padded on the left."""
        with cache_for("llama") as kept:
            with pytest.raises(UsageError, match=text):
                kept.request(ids, mask)
            assert nothing_held(kept)

    @pytest.mark.parametrize(
        ("how", "text"),
        [
            ({"input_ids": prompt(2, 20)}, "the tokens passed to the model differ"),
            ({"num_beams": 2}, "copies=num_beams"),
            ({"num_return_sequences": 2, "do_sample": True}, "copies=num_beams"),
            ({"prompt_lookup_num_tokens": 3}, "taking tokens back"),
            (
                {"attention_mask": torch.tensor([[0] * 2 + [1] * 18])},
                "the attention_mask passed to the model differs",
            ),
            ({"position_ids": torch.arange(5, 25)[None]}, "position_ids must count"),
        ],
    )
    def test_calls_that_are_not_of_the_request(self, how: dict[str, Any], text: str) -> None:
        """What K and V depend on must be what the request was made with."""
        ids = prompt(1, 20)
        any_model: Any = model("gemma3")
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 3, **how}
        with cache_for("gemma3") as kept:
            request = kept.request(ids)
            with pytest.raises((UsageError, Unsupported), match=text):
                any_model.generate(**given, past_key_values=request)
            del request
            assert nothing_held(kept)

    @pytest.mark.parametrize("changed", [3, 0, 18], ids=["inside what is reused", "first", "before the last"])
    @pytest.mark.parametrize(
        "how", [{}, {"max_new_tokens": 1}, {"num_beams": 2}], ids=["greedy", "one", "beams"]
    )
    def test_other_tokens_where_all_is_reused(self, changed: int, how: dict[str, Any]) -> None:
        """Every token of the prompt is compared, though only the last one is computed; nothing stays on the model."""
        ids = prompt(1, 20)
        mask, other = torch.ones_like(ids), ids.clone()
        other[0, changed] = 2 + (other[0, changed] - 1) % 80
        with cache_for("llama") as kept:
            answered("llama", ids, mask, kept.request(ids, mask))
            copies = how.get("num_beams", 1)
            request = kept.request(ids, mask, copies=copies)
            assert request.get_seq_length() == 19
            with pytest.raises(UsageError, match="the tokens passed to the model differ"):
                answered("llama", other, mask, request, **how)
            # The request can still be used as it is meant.
            assert torch.equal(
                answered("llama", ids, mask, request, **how), answered("llama", ids, mask, **how)
            )
            assert "generate" in vars(model("llama"))
            del request
            assert "generate" not in vars(model("llama"))
            assert nothing_held(kept)

    def test_generate_that_was_wrapped_meanwhile(self) -> None:
        """By somebody who copies its attributes: it is called, and is what the model has afterwards."""
        any_model: Any = model("llama")
        ids, calls = prompt(1, 20), list[int]()
        mask = torch.ones_like(ids)
        with cache_for("llama") as kept:
            first = kept.request(ids, mask)
            inner = any_model.generate

            @wraps(inner)
            def counting(*args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return inner(*args, **kwargs)

            any_model.generate = counting
            try:
                second = kept.request(ids, mask)
                answered("llama", ids, mask, second)
                assert calls == [1]
                del second
                assert any_model.generate is counting
                del first
                assert any_model.generate is counting
            finally:
                del any_model.generate

    def test_a_prompt_cut_and_arguments_without_names(self) -> None:
        """A part of the prompt is another prompt; `generate` may get it by its place, or by either name."""
        import transformers

        ids, mask = padded([prompt(1, 30)[0].tolist(), prompt(2, 21)[0].tolist()])
        any_model: Any = model("qwen2")
        with cache_for("qwen2") as kept, kept.request(ids, mask) as request, kept.request(ids, mask):
            for given in ({"inputs": ids[:, :29]}, {"input_ids": ids[:, 1:]}, {"inputs": ids.flip(0)}):
                with pytest.raises(UsageError, match="the tokens passed to the model differ"):
                    any_model.generate(**given, past_key_values=request)
            made: Any = transformers.GenerationConfig
            options = made(max_new_tokens=6, eos_token_id=1, pad_token_id=0)
            cached = any_model.generate(ids, options, attention_mask=mask, past_key_values=request)
            assert torch.equal(cached, answered("qwen2", ids, mask))

    def test_beams_go_on_with_what_they_wrote(self) -> None:
        """After beam search a request has K and V of all beams, and the best one's tokens are not the others'."""
        ids, mask = padded([prompt(1, 20)[0].tolist()])
        with cache_for("llama") as kept, kept.request(ids, mask, copies=3) as request:
            best = answered("llama", ids, mask, request, num_beams=3)
            longer = torch.cat([best, prompt(2, 5)], 1)
            with pytest.raises(UsageError, match="the tokens passed to the model differ"):
                answered("llama", longer, torch.ones_like(longer), request, num_beams=3)

    @pytest.mark.parametrize("reported", ["in the call", "in the config"])
    def test_without_the_cache(self, reported: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """`use_cache=False`, which some models have in their configs, gives all columns to each forward pass."""
        ids, mask = padded([prompt(1, 20)[0].tolist()])
        any_model: Any = model("llama")
        if reported == "in the config":
            monkeypatch.setattr(any_model.generation_config, "use_cache", False)
        how = {"use_cache": False} if reported == "in the call" else {}
        with cache_for("llama") as kept:
            with pytest.raises(UsageError, match="pass use_cache=True, or no request"):
                answered("llama", ids, mask, kept.request(ids, mask), **how)
            assert nothing_held(kept)

    def test_passes_of_ones_own(self) -> None:
        """Gradients, embeddings, padding without positions, another model, and part of one."""
        any_model: Any = model("llama")
        ids, mask = padded([[5, 6, 7], [8, 9]])
        with cache_for("llama") as kept, kept.request(ids, mask) as request:
            with pytest.raises(UsageError, match="does not support gradients"):
                any_model(ids, attention_mask=mask, past_key_values=request)
            with torch.no_grad():
                for how, text in (
                    ({"inputs_embeds": torch.zeros(2, 3, 32)}, "inputs_embeds"),
                    ({"input_ids": ids, "token_type_ids": ids}, "with token_type_ids is not"),
                    ({"input_ids": ids}, "the attention_mask passed to the model differs"),
                    (
                        {"input_ids": ids, "attention_mask": mask[:, :2]},
                        "the attention_mask passed to the model differs",
                    ),
                    ({"input_ids": ids, "attention_mask": mask}, "position_ids must count"),
                ):
                    with pytest.raises(UsageError, match=text):
                        any_model(**how, past_key_values=request)
                with pytest.raises(UsageError, match="call the model that"):
                    any_model.model(ids, attention_mask=mask, past_key_values=request)
            assert request.get_seq_length() == 0

    def test_a_pass_that_leaves_out_layers(self) -> None:
        """Nothing of it is kept."""
        any_model: Any = model("llama")
        layers = any_model.model.layers
        with cache_for("llama") as kept, torch.no_grad(), kept.request(prompt(1, 20)) as request:
            any_model.model.layers = layers[:1]
            any_model.model.config.num_hidden_layers = 1
            try:
                with pytest.raises(UsageError, match="only 1 of 2 layers"):
                    any_model(prompt(1, 20), past_key_values=request)
            finally:
                any_model.model.layers = layers
                any_model.model.config.num_hidden_layers = 2
            assert request.get_seq_length() == 0

    def test_requests_that_have_ended(self) -> None:
        """A closed one is used no more; nor is one reset or cropped."""
        with cache_for("llama") as kept:
            with kept.request(prompt(1, 20)) as request:
                request.crop(0)
                for call in (lambda: request.crop(-1), request.reset):
                    with pytest.raises(Unsupported):
                        call()
            request.close()
            with pytest.raises(UsageError, match="has ended"):
                answered("llama", prompt(1, 20), torch.ones(1, 20, dtype=torch.int64), request)

    def test_settings_of_the_model(self) -> None:
        """What the model decides is not given, and a window must fit."""
        with pytest.raises(ConfigError, match="num_kv_heads: determined by the model"):
            cache_for("llama", num_kv_heads=2)
        with pytest.raises(ConfigError, match="layers that attend"):
            cache_for("mistral", primary_blocks=2, secondary_blocks=0)
        with pytest.raises(ConfigError, match="primary_bytes"):
            for_model(model("llama"))

    def test_models(self) -> None:
        """Those that keep something else than K and V of tokens, or in a type that blocks have not."""
        from transformers import T5Config, T5ForConditionalGeneration

        tiny: dict[str, Any] = {
            "d_model": 8,
            "d_kv": 4,
            "d_ff": 8,
            "num_layers": 1,
            "num_heads": 2,
            "vocab_size": 9,
        }
        with pytest.raises(Unsupported, match="an encoder"):
            for_model(T5ForConditionalGeneration(T5Config(**tiny)), primary_blocks=8)
        with pytest.raises(Unsupported, match="float64"):
            for_model(model("llama", torch.float64), primary_blocks=8)
        wrong: Any = "llama"
        with pytest.raises(UsageError, match="not str"):
            for_model(wrong, primary_blocks=8)

    @pytest.mark.parametrize("version", ["4.55.4", "3.0", "4.9.1"])
    def test_old_releases(self, version: str) -> None:
        """They are named, with what to do."""
        from kvcache.integrations import transformers as integration

        with pytest.raises(Unsupported, match=r"transformers>=4\.56"):
            integration.refuse_old(version)


class TestHowRequestsEnd:
    """At the latest when nobody has them any more."""

    def test_in_another_thread(self) -> None:
        """The manager is told with the next call of its own thread."""
        with cache_for("llama") as kept:
            holder = [kept.request(prompt(1, 20))]
            thread = threading.Thread(target=holder.clear)
            thread.start()
            thread.join()
            assert kept.manager.num_sequences == 1
            with kept.request(prompt(2, 20)):
                assert kept.manager.num_sequences == 1
            assert nothing_held(kept)

    def test_after_the_cache(self) -> None:
        """A request that outlives its cache ends silently, and leaves nothing on the model."""
        any_model: Any = model("llama")
        before = len(any_model._forward_pre_hooks), len(any_model._forward_hooks)
        kept = cache_for("llama")
        request = kept.request(prompt(1, 20))
        assert len(any_model._forward_pre_hooks) == before[0] + 1
        kept.close()
        request.close()
        del request
        assert (len(any_model._forward_pre_hooks), len(any_model._forward_hooks)) == before

    def test_next_turn_in_the_same_request(self) -> None:
        """`generate` goes on with what it has given back, as with its own cache."""
        ids, mask = padded([prompt(1, 20)[0].tolist()])
        with cache_for("mistral") as kept, kept.request(ids, mask) as request:
            first = answered("mistral", ids, mask, request)
            assert torch.equal(first, answered("mistral", ids, mask))
            longer = torch.cat([first, prompt(2, 30)], 1)
            whole = torch.ones_like(longer)
            second = answered("mistral", longer, whole, request)
            assert torch.equal(second, answered("mistral", longer, whole))
            assert len(request.request_ids) == kept.manager.num_sequences == 1


def test_salts_part_and_logs_replay(tmp_path: Any) -> None:
    """Options of requests reach the manager; the log of it all replays to the same state."""
    ids = prompt(1, 30)
    with cache_for("gemma3", log=tmp_path / "log") as kept:
        mask = torch.ones_like(ids)
        answered("gemma3", ids, mask, kept.request(ids, mask, cache_salt="a"))
        with kept.request(ids) as other, kept.request(ids, cache_salt="a") as same:
            assert (other.get_seq_length(), same.get_seq_length()) == (0, 29)
        fingerprint = kept.manager.fingerprint()
    assert replay(tmp_path / "log").fingerprint == fingerprint


def test_windows_are_those_of_the_model() -> None:
    """Layers of a window have blocks of their own."""
    with cache_for("gemma3") as kept:
        assert [group.window for group in kept.manager.layout.groups] == [WINDOW, 256]
        assert [group.layers for group in kept.manager.layout.groups] == [(0, 2), (1,)]


@pytest.mark.long
def test_time_to_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    """The example's prompt of 2,000 tokens is answered at least five times faster when it is cached, and alike."""
    load("transformers_chat").main()
    first, *turns = capsys.readouterr().out.splitlines()
    assert int(first.rpartition(": ")[2].split()[0]) >= 5
    assert len(turns) == 3
    assert all(turn.endswith("as without the cache: True") for turn in turns)

"""Models and calls of Transformers that are out of the ordinary: answered as without the cache, or refused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from kvcache import KVCacheConfig, KVCacheManager, Layout
from kvcache.errors import ConfigError, Unsupported, UsageError
from kvcache.pools import Pools
from tests.support.engines.transformers_models import (
    SHAPE,
    answered,
    cache_for,
    for_model,
    model,
    padded,
    prompt,
    shape_of,
    with_manager,
)

SIZES: dict[str, Any] = {"tokens_per_block": 16, "primary_blocks": 64}


def generated(any_model: Any, ids: torch.Tensor, mask: torch.Tensor, past: Any = None) -> torch.Tensor:
    """Six more tokens."""
    given = {} if past is None else {"past_key_values": past}
    found = any_model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **given)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("window", [2, 3, 15])
def test_windows_smaller_than_a_block(window: int) -> None:
    """A row that reuses more than another has columns whose blocks its window has left: nothing is read for them.

    With blocks that are overwritten with NaN this shows, as it would where a request before had infinite values.
    """
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(7)
    sliding: Any = MistralForCausalLM(MistralConfig(**SHAPE, num_hidden_layers=2, sliding_window=window))
    sliding.eval()
    first, second = prompt(1, 25)[0].tolist(), prompt(2, 52)[0].tolist()
    with for_model(sliding, **SIZES, debug_fill_blank=True) as kept:
        for known in (first, second[:33]):
            generated(sliding, *padded([known]), kept.request(*padded([known])))
        ids, mask = padded([first, second])
        request = kept.request(ids, mask)
        assert request.get_seq_length() == 33
        assert torch.equal(generated(sliding, ids, mask, request), generated(sliding, ids, mask))


def length_dependent(kind: str, at: int) -> Any:
    """A Llama whose rotary embedding changes behind so many tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    long = {"short_factor": [1.0] * 4, "long_factor": [9.0] * 4, "original_max_position_embeddings": at}
    rope = {"rope_type": kind, "factor": 4.0, "rope_theta": 10_000.0, **(long if kind == "longrope" else {})}
    positions = at if kind == "dynamic" else 256
    config: Any = LlamaConfig(**{**SHAPE, "max_position_embeddings": positions, "eos_token_id": None})
    setattr(config, "rope_parameters" if hasattr(config, "rope_parameters") else "rope_scaling", rope)
    config.original_max_position_embeddings = at
    torch.manual_seed(7)
    return LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_that_depend_on_length(kind: str) -> None:
    """Up to where they change all is as usual; longer sequences would find K that is turned otherwise."""
    roped = length_dependent(kind, 60)
    with pytest.raises(ConfigError, match="max_sequence_length: given 61; accepted: at most 60"):
        for_model(roped, **SIZES, max_sequence_length=61)
    with for_model(roped, **SIZES) as kept:
        assert kept.manager.max_tokens == 60
        for length in (30, 54):
            ids, mask = padded([prompt(1, 54)[0, :length].tolist()])
            cached = generated(roped, ids, mask, kept.request(ids, mask))
            assert torch.equal(cached, generated(roped, ids, mask))
        assert kept.manager.stats().reused_tokens == 30


def test_models_without_such_keys_and_values() -> None:
    """State spaces, and memories of layers."""
    from transformers import MambaConfig, MambaForCausalLM, XLNetConfig, XLNetLMHeadModel

    mamba = MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, state_size=2)
    xlnet = XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8)
    for each in (MambaForCausalLM(mamba), XLNetLMHeadModel(xlnet)):
        with pytest.raises(Unsupported):
            for_model(each, **SIZES)


def test_layers_of_unequal_heads() -> None:
    """Gemma 4 has larger heads in some layers; a config may also have a list."""
    from transformers import LlamaConfig, LlamaForCausalLM

    gemma: Any = pytest.importorskip("transformers", minversion="5.23.0")
    few = {**SHAPE, "num_hidden_layers": 6, "head_dim": 16, "vocab_size_per_layer_input": 89}
    config = gemma.Gemma4TextConfig(**few)
    with pytest.raises(Unsupported, match="a model whose layers differ in head_dim"):
        for_model(gemma.Gemma4ForCausalLM(config), **SIZES)
    listed = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=1))
    vars(listed.config)["num_key_value_heads"] = [2]
    with pytest.raises(Unsupported, match="a model whose layers differ in num_key_value_heads"):
        for_model(listed, **SIZES)


@pytest.mark.parametrize(
    ("how", "heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": False}, 4),
        ({"new_decoder_architecture": True, "num_kv_heads": 2}, 4),
    ],
)
def test_heads_of_falcon(how: dict[str, Any], heads: int) -> None:
    """One for all queries, of which the config has no number; or, with few of its own, those of the queries."""
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {key: SHAPE[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "eos_token_id")}
    torch.manual_seed(7)
    falcon: Any = FalconForCausalLM(FalconConfig(**sizes, bos_token_id=2, num_hidden_layers=1, **how))
    falcon.eval()
    assert shape_of(falcon).num_kv_heads == heads
    ids, mask = padded([prompt(1, 30)[0].tolist()])
    with for_model(falcon, **SIZES) as kept:
        for _ in range(2):
            cached = generated(falcon, ids, mask, kept.request(ids, mask))
            assert torch.equal(cached, generated(falcon, ids, mask))


@pytest.mark.long
@pytest.mark.parametrize("how", ["forward", "a layer", "in place", "wrapped"])
def test_compiled_models(how: str) -> None:
    """`torch.compile` leaves what the cache does to Python, and compiles the rest: the answers stay the same."""
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    if how in ("forward", "in place") and transformers.__version__ < "5":
        pytest.skip("there its masks cannot be compiled apart from the pass")
    torch.compiler.reset()
    torch.manual_seed(7)
    compiled: Any = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=1))
    compiled.eval()
    ids, mask = padded([prompt(1, 30)[0].tolist()])
    alone = generated(compiled, ids, mask)
    if how == "in place":
        compiled.compile(backend="eager")
    elif how == "wrapped":
        compiled = torch.compile(compiled, backend="eager")
    else:
        part = compiled if how == "forward" else compiled.model.layers[0]
        part.forward = torch.compile(part.forward, backend="eager")
    with for_model(compiled, **SIZES) as kept:
        for reused in (0, 29):
            request = kept.request(ids, mask)
            assert request.get_seq_length() == reused
            assert torch.equal(alone, generated(compiled, ids, mask, request))
            del request
        if how == "wrapped":
            with torch.no_grad(), kept.request(ids, mask) as request:
                compiled(ids[:, -1:], past_key_values=request)
                assert request.get_seq_length() == 30


def test_a_window_of_no_token() -> None:
    """Transformers 5 has such layers; releases before take it for none at all."""
    from transformers import DynamicCache, MistralConfig, MistralForCausalLM

    config = MistralConfig(**SHAPE, num_hidden_layers=1, sliding_window=0)
    if getattr(DynamicCache(config=config).layers[0], "sliding_window", None) is not None:
        with pytest.raises(Unsupported, match="an empty sliding window"):
            for_model(MistralForCausalLM(config), **SIZES)


@pytest.mark.parametrize(
    "other",
    [
        {"num_layers": 3},
        {"num_kv_heads": 4},
        {"head_dim": 16},
        {"dtype": "bfloat16"},
        {"kv_factor": 1},
        {"max_attention_window": (16, 128)},
        {"num_kv_heads": (2, 2)},
        {},
    ],
)
def test_a_manager_of_ones_own(other: dict[str, Any]) -> None:
    """It must keep what the model computes, or it is refused before anything is computed."""
    shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    config = KVCacheConfig(max_sequence_length=128, **{**SIZES, **shape, **other})
    pools = Pools(Layout.of(config), "cpu")
    with KVCacheManager(config, pools=pools) as manager:
        if not other or isinstance(other.get("num_kv_heads"), tuple):
            kept = with_manager(model("llama"), manager, pools)
            ids, mask = padded([prompt(1, 30)[0].tolist()])
            assert torch.equal(
                answered("llama", ids, mask, kept.request(ids, mask)), answered("llama", ids, mask)
            )
            return
        with pytest.raises(ConfigError, match=r"the model needs|layers that attend to all"):
            with_manager(model("llama"), manager, pools)


def test_pools_of_another_manager() -> None:
    """Nothing would be where the tables say."""
    configs = [shape_of(model("llama")).settings({**SIZES, "primary_blocks": count}) for count in (8, 9)]
    pools = [Pools(Layout.of(config), "cpu") for config in configs]
    with (
        KVCacheManager(configs[0], pools=pools[0]) as manager,
        pytest.raises(UsageError, match="those that the manager was created with"),
    ):
        with_manager(model("llama"), manager, pools[1])


def test_arguments_without_names() -> None:
    """A pass may be given its arguments by their places; they are looked at as well."""
    any_model: Any = model("llama")
    ids, mask = padded([[5, 6, 7], [8, 9]])
    with cache_for("llama") as kept, torch.no_grad(), kept.request(ids[:1]) as request:
        assert any_model(ids[:1], mask[:1], None, request).logits.shape == (1, 3, SHAPE["vocab_size"])
        assert request.get_seq_length() == 3
        with (
            kept.request(ids) as unpadded,
            pytest.raises(UsageError, match="the attention_mask passed to the model differs"),
        ):
            any_model(ids, mask, past_key_values=unpadded)


def test_training_mode() -> None:
    """K and V with dropout would be found by others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config: Any = LlamaConfig(**SHAPE, num_hidden_layers=1, attention_dropout=0.5)
    training: Any = LlamaForCausalLM(config)
    ids, mask = padded([prompt(1, 30)[0].tolist()])
    with for_model(training.train(), **SIZES) as kept:
        with pytest.raises(UsageError, match=r"call model\.eval"):
            generated(training, ids, mask, kept.request(ids, mask))
        training.eval()
        for _ in range(2):
            cached = generated(training, ids, mask, kept.request(ids, mask))
            assert torch.equal(cached, generated(training, ids, mask))


def test_copies_of_a_request() -> None:
    """A copy would be a second owner of the same sequences, or a second cache."""
    ids, mask = padded([prompt(1, 30)[0].tolist()])
    calls: tuple[Any, ...] = (copy.copy, copy.deepcopy, pickle.dumps)
    with cache_for("llama") as kept, kept.request(ids, mask) as request:
        for call in calls:
            with pytest.raises(Unsupported, match="create another request"):
                call(request)
        assert torch.equal(answered("llama", ids, mask, request), answered("llama", ids, mask))


def test_a_mask_of_rows() -> None:
    """Rows may be selected as tensors are indexed."""
    with cache_for("llama") as kept, kept.request(*padded([[5, 6], [7, 8], [9]])) as request:
        names = request.request_ids
        request.batch_select_indices(torch.tensor([False, True, True]))
        assert request.request_ids == names[1:]
        request.reorder_cache(torch.tensor([-1]))
        assert request.request_ids == names[2:]
        with pytest.raises(IndexError):
            request.reorder_cache(torch.tensor([1]))
        assert kept.manager.num_sequences == 1


def test_a_sequence_that_somebody_else_has_ended() -> None:
    """Its request fails; later ones do not."""
    ids, mask = padded([prompt(1, 30)[0].tolist()])
    with cache_for("llama") as kept:
        request = kept.request(ids, mask)
        kept.manager.remove_sequence(request.request_ids[0])
        with pytest.raises(UsageError):
            answered("llama", ids, mask, request)
        del request
        assert torch.equal(
            answered("llama", ids, mask, kept.request(ids, mask)), answered("llama", ids, mask)
        )
        assert kept.manager.num_sequences == 0


def test_what_newcomers_forget() -> None:
    """The cache instead of a request; one request for two calls; slots for a part of the prompt."""
    ids, mask = padded([prompt(1, 30)[0].tolist()])
    with cache_for("llama") as kept:
        with pytest.raises(AttributeError, match=r"past_key_values=cache\.request"):
            answered("llama", ids, mask, kept)
        request = kept.request(ids, mask)
        answered("llama", ids, mask, request)
        with pytest.raises(UsageError, match="used before: it has 35 columns, and generate was given 30"):
            answered("llama", ids, mask, request)
        with pytest.raises(UsageError, match="omit reserve_tokens"):
            kept.request(ids, mask, reserve_tokens=8)


def test_more_answers_than_blocks_are_refused_at_once() -> None:
    """Before a list is made of them."""
    with cache_for("llama") as kept, pytest.raises(UsageError, match="pass fewer copies"):
        kept.request(prompt(1, 4), copies=10**9)

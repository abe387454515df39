"""Bytes of K and V by a model's config.json: published models, and what cannot be understood."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcache.audit.kv_shape import KVShape, ModelNotUnderstood

KIB = 1024
LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
LLAMA |= {"num_key_value_heads": 8, "torch_dtype": "bfloat16"}
LLAMA_70B = LLAMA | {"num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}
QWEN = {"model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "hidden_size": 3584}
QWEN |= {"num_key_value_heads": 4, "torch_dtype": "bfloat16", "max_window_layers": 28}
QWEN |= {"sliding_window": 131072, "use_sliding_window": False, "max_position_embeddings": 32768}
DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128}
DEEPSEEK |= {"num_key_value_heads": 128, "hidden_size": 7168, "v_head_dim": 128, "qk_nope_head_dim": 128}
DEEPSEEK |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}
GEMMA = {"hidden_size": 5376, "model_type": "gemma3_text", "num_attention_heads": 32, "head_dim": 128}
GEMMA |= {"num_hidden_layers": 62, "num_key_value_heads": 16, "sliding_window": 1024}
GEMMA_27B = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": GEMMA, "vision_config": {}}
GEMMA_4B_TEXT = {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34}
GEMMA_4B = GEMMA_27B | {"text_config": GEMMA_4B_TEXT | {"sliding_window": 1024}}
GPT_OSS = {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_attention_heads": 64, "head_dim": 64}
GPT_OSS |= {"num_key_value_heads": 8, "hidden_size": 2880, "sliding_window": 128, "torch_dtype": "bfloat16"}
GPT_OSS |= {"layer_types": ["sliding_attention", "full_attention"] * 12}
QWEN_NEXT = {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "head_dim": 256}
QWEN_NEXT |= {
    "num_key_value_heads": 2,
    "hidden_size": 2048,
    "full_attention_interval": 4,
    "dtype": "bfloat16",
}
QWEN_NEXT |= {"linear_conv_kernel_dim": 4}
NEMOTRON = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-ME", "num_hidden_layers": 7}
NEMOTRON |= {"num_attention_heads": 32, "num_key_value_heads": 8, "attention_head_dim": 128}
NEMOTRON |= {"torch_dtype": "bfloat16"}
JAMBA = LLAMA | {"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16}
FALCON = {"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}
FALCON |= {"multi_query": True, "num_kv_heads": 71, "torch_dtype": "bfloat16"}
STARCODER = {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144, "multi_query": True}
STARCODER |= {"torch_dtype": "float16"}
LLAMA_4 = {"model_type": "llama4_text", "num_hidden_layers": 48, "num_attention_heads": 40, "head_dim": 128}
LLAMA_4 |= {"num_key_value_heads": 8, "attention_chunk_size": 8192, "torch_dtype": "bfloat16"}
GEMMA_3N = GEMMA | {"model_type": "gemma3n_text", "num_hidden_layers": 5, "num_kv_shared_layers": 2}
GEMMA_3N |= {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 3, "dtype": "bfloat16"}
GLM_4 = {"model_type": "chatglm", "num_layers": 40, "num_attention_heads": 32, "hidden_size": 4096}
GLM_4 |= {"kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2}
GLM_4 |= {"torch_dtype": "bfloat16", "post_layer_norm": True, "padded_vocab_size": 151552}
STEP_3 = {"model_type": "step3_text", "num_hidden_layers": 61, "num_attention_heads": 64, "head_dim": 256}
STEP_3 |= {"hidden_size": 7168, "num_attention_groups": 1, "share_q_dim": 2048, "torch_dtype": "bfloat16"}
FALCON_40B = {"model_type": "RefinedWeb", "n_layer": 60, "n_head": 128, "n_head_kv": 8, "hidden_size": 8192}
FALCON_40B |= {"torch_dtype": "bfloat16"}
HUNYUAN_A13B = {"model_type": "hunyuan_v1_moe", "num_hidden_layers": 32, "num_attention_heads": 32}
HUNYUAN_A13B |= {"hidden_size": 4096, "num_key_value_heads": 8, "attention_head_dim": 128, "use_cla": False}
HUNYUAN_A13B |= {"cla_share_factor": 2, "use_mla": False, "kv_lora_rank": 512, "torch_dtype": "bfloat16"}
JETMOE = {"model_type": "jetmoe", "num_hidden_layers": 24, "num_attention_heads": 32, "hidden_size": 2048}
JETMOE |= {"num_key_value_heads": 16, "kv_channels": 128, "torch_dtype": "bfloat16"}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}


def shape(tmp_path: Path, given: Any, **more: Any) -> KVShape:
    path = tmp_path / "config.json"
    path.write_text(given if isinstance(given, str) else json.dumps(given))
    return KVShape.read(path, **more)


@pytest.mark.parametrize(
    ("given", "num_bytes", "layers", "sliding"),
    [
        (LLAMA, 128 * KIB, 32, ()),
        (LLAMA_70B, 320 * KIB, 80, ()),
        (QWEN, 56 * KIB, 28, ()),
        (DEEPSEEK, 70_272, 61, ()),
        # Every sixth of 62 layers: 10, of 2 · 16 · 128 elements of 2 bytes.
        (GEMMA_27B, 10 * 8 * KIB, 10, ((1024, 52, 52 * 8 * KIB),)),
        # What Google's file leaves out: 8 heads, 4 of them for K and V, of 256.
        (GEMMA_4B, 5 * 4 * KIB, 5, ((1024, 29, 29 * 4 * KIB),)),
        (GPT_OSS, 24 * KIB, 12, ((128, 12, 24 * KIB),)),
        (FALCON, 32 * 2 * 64 * 2, 32, ()),
        (STARCODER, 40 * 2 * 128 * 2, 40, ()),
        (LLAMA_4, 12 * 4 * KIB, 12, ((8192, 36, 36 * 4 * KIB),)),
        (GEMMA_3N, 8 * KIB, 1, ((1024, 2, 16 * KIB),)),
        (GLM_4, 40 * KIB, 40, ()),
        (GLM_4 | {"multi_query_attention": False}, 16 * 40 * KIB, 40, ()),
        (STEP_3, 61 * 2 * 256 * 2, 61, ()),
        (FALCON_40B, 60 * 2 * 8 * 64 * 2, 60, ()),
        (HUNYUAN_A13B, 128 * KIB, 32, ()),
        (JETMOE, 24 * 2 * 16 * 128 * 2, 24, ()),
    ],
    ids=lambda each: each.get("model_type") if isinstance(each, dict) else None,
)
def test_published_models(
    tmp_path: Path, given: dict[str, Any], num_bytes: int, layers: int, sliding: tuple[tuple[int, ...], ...]
) -> None:
    """As their makers and others give them, or worked out by hand from what they publish."""
    found = shape(tmp_path, given)
    assert (found.bytes_per_token, found.layers, found.sliding) == (num_bytes, layers, sliding)
    assert (found.window, found.without) == (0, {})


@pytest.mark.parametrize(
    ("given", "num_bytes", "without"),
    [
        (QWEN_NEXT, 12 * 2 * 2 * 256 * 2, {"linear_attention": 36}),
        (NEMOTRON, 4 * KIB, {"mamba": 3, "mlp": 2, "moe": 1}),
        (JAMBA, 4 * 4 * KIB, {"mamba": 28}),
    ],
    ids=lambda each: each.get("model_type") if isinstance(each, dict) else None,
)
def test_layers_without_k_and_v(
    tmp_path: Path, given: dict[str, Any], num_bytes: int, without: dict[str, int]
) -> None:
    """They take nothing for a token, and it is said how many there are."""
    found = shape(tmp_path, given)
    assert (found.bytes_per_token, found.without) == (num_bytes, without)


def test_where_all_layers_slide_they_count(tmp_path: Path) -> None:
    """Blocks are theirs then; a window as long as the model's context is none."""
    found = shape(tmp_path, MISTRAL)
    assert (found.bytes_per_token, found.window, found.layers, found.sliding) == (128 * KIB, 4096, 32, ())
    found = shape(tmp_path, MISTRAL | {"max_position_embeddings": 4096})
    assert (found.bytes_per_token, found.window) == (128 * KIB, 0)
    half = shape(
        tmp_path, QWEN | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 14}
    )
    assert (half.bytes_per_token, half.sliding) == (28 * KIB, ((4096, 14, 28 * KIB),))


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "int8"])
def test_another_type_of_elements(tmp_path: Path, dtype: str) -> None:
    """A cache of eight bits takes half."""
    found = shape(tmp_path, LLAMA, dtype=dtype)
    assert (found.bytes_per_token, found.dtype) == (64 * KIB, dtype)
    assert shape(tmp_path, DEEPSEEK, dtype=dtype).bytes_per_token == 35_136


@pytest.mark.parametrize(("gpus", "num_bytes"), [(2, 64), (8, 16), (16, 16), (32, 16)])
def test_heads_are_divided_over_gpus(tmp_path: Path, gpus: int, num_bytes: int) -> None:
    """Each GPU has at least one of the 8; a latent vector is on all of them."""
    assert shape(tmp_path, LLAMA, tensor_parallel=gpus).bytes_per_token == num_bytes * KIB
    assert shape(tmp_path, DEEPSEEK, tensor_parallel=gpus).bytes_per_token == 70_272


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[]", "it is not a JSON object"),
        ("{", "it is not a JSON object"),
        ("{}", "dtype: given nothing; accepted: bf16,"),
        (LLAMA | {"torch_dtype": "nf4"}, "dtype: given 'nf4'; accepted: bf16"),
        ({"dtype": "bfloat16"}, "num_hidden_layers is missing"),
        (LLAMA | {"num_attention_heads": None}, "num_attention_heads is missing"),
        (
            LLAMA | {"num_attention_heads": 0},
            "num_attention_heads: given 0; accepted: an integer from 1 to 2,147,483,647",
        ),
        (LLAMA | {"num_key_value_heads": "8"}, "num_key_value_heads: given '8'"),
        (LLAMA | {"num_attention_heads": 31}, "head_dim is missing, and hidden_size 4096"),
        (GPT_OSS | {"num_hidden_layers": 36}, "layer_types: given 24; accepted: one of each of 36"),
        (LLAMA | {"layer_types": ["odd"] * 32}, "layer_types: given 'odd'; accepted: full_attention"),
        (LLAMA | {"layer_types": ["mamba"] * 32}, "no layer has K and V"),
        (GPT_OSS | {"sliding_window": None}, "sliding_window is missing"),
        (
            LLAMA | {"model_type": "zamba", "mamba_d_state": 16},
            "mamba_d_state is given without layer_types",
        ),
        (
            DEEPSEEK | {"index_head_dim": 128},
            "index_head_dim: the index of sparse attention cannot be counted",
        ),
        (
            LLAMA | {"is_encoder_decoder": True},
            "is_encoder_decoder: given true; accepted: decoder-only models",
        ),
        (DEEPSEEK | {"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        (GLM_4 | {"multi_query_group_num": None}, "multi_query_group_num is missing"),
        (
            STEP_3 | {"attention_other_setting": {"head_dim": 64}},
            "attention_other_setting: heads that differ",
        ),
        (
            LLAMA | {"num_key_value_heads_per_layer": [4] * 32},
            "num_key_value_heads_per_layer: the effect of this field",
        ),
        (HUNYUAN_A13B | {"use_cla": True}, "use_cla: layers that share K and V cannot be counted"),
        (
            DEEPSEEK | {"model_type": "longcat_flash", "num_layers": 28},
            "zero_expert_num: layers that attend twice cannot",
        ),
        (DEEPSEEK | {"attention_method": "MLA"}, "attention_method: layers that attend twice cannot"),
        (LLAMA | {"model_type": "recurrent_gemma"}, "attention_window_size: the effect of this field"),
        (LLAMA | {"block_types": ["recurrent", "attention"]}, "block_types: layers that differ cannot"),
        (LLAMA | {"num_query_groups": 4}, "num_query_groups: the effect of this field is unknown"),
        (LLAMA | {"share_kv_every": 2}, "share_kv_every: the effect of this field is unknown"),
        (LLAMA | {"layer_group_size": 5}, "layer_group_size is given without layer_types"),
        (
            GEMMA_3N | {"num_kv_shared_layers": 6},
            "num_kv_shared_layers: given 6; accepted: an integer from 0 to 5",
        ),
        (GEMMA_3N | {"num_kv_shared_layers": 5}, "no layer has K and V"),
        (
            GPT_OSS | {"layer_types": "full_attention"},
            "layer_types: given 'full_attention'; accepted: a list",
        ),
        (GPT_OSS | {"layer_types": {"0": "full_attention"}}, "layer_types: given {'0': 'full_attention'}"),
        (JAMBA | {"layers_block_type": "mamba"}, "layers_block_type: given 'mamba'; accepted: a list"),
        (LLAMA | {"attn_layer_indices": 3}, "attn_layer_indices: given 3; accepted: a list"),
        (
            LLAMA | {"num_hidden_layers": 300_000_000},
            "num_hidden_layers: given 300000000; accepted: an integer from 1 to 10,000",
        ),
    ],
)
def test_what_is_not_understood(tmp_path: Path, given: Any, said: str) -> None:
    """The message names the file and the field."""
    with pytest.raises(ModelNotUnderstood) as error:
        shape(tmp_path, given)
    assert str(error.value).startswith(
        f"{tmp_path / 'config.json'} does not determine the size of K and V: {said}"
    )


@pytest.mark.parametrize("value", [None, False, 0, []])
def test_what_says_that_there_is_nothing_changes_nothing(tmp_path: Path, value: Any) -> None:
    """A field that is not known, but off."""
    found = shape(tmp_path, LLAMA | {"kv_sharing_period": value, "use_cla": value, "attention_window": value})
    assert found == shape(tmp_path, LLAMA)


def test_heads_that_cannot_be_divided(tmp_path: Path) -> None:
    """Engines refuse it, too."""
    with pytest.raises(ModelNotUnderstood, match="8 heads cannot be divided over 3 GPUs"):
        shape(tmp_path, LLAMA, tensor_parallel=3)

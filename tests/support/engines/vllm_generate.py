"""A whole vLLM that generates with random weights.

    python -m tests.support.engines.vllm_generate MODEL [SETTINGS]

prints what it gave and counted, as a line of JSON. `SETTINGS` are those of `vllm.LLM`, in JSON, and `hybrid`: whether
every other layer has a sliding window. Whether it is recorded, the environment says.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

from tests.support.engines.vllm_model import write_model

TURNS, CHATS, BLOCK = 2, 6, 32
HYBRID = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 32,
    "num_hidden_layers": 4,
    "sliding_window": 2 * BLOCK,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def serve(model: str, **settings: Any) -> dict[str, Any]:
    """Chats of a few turns each that begin with one of two system prompts, in a cache that does not hold them all."""
    rng = random.Random(0)
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=1024,
        block_size=BLOCK,
        max_num_seqs=4,
        enforce_eager=True,
        disable_log_stats=False,
        **settings,
    )
    systems = [[rng.randrange(3, 500) for _ in range(2 * BLOCK + 5)] for _ in range(2)]
    chats = [[*systems[chat % 2], *(rng.randrange(3, 500) for _ in range(40))] for chat in range(CHATS)]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, detokenize=False)
    answers = []
    for _ in range(TURNS):
        for chat, given in zip(
            chats, llm.generate([{"prompt_token_ids": each} for each in chats], params), strict=True
        ):
            answer = list(given.outputs[0].token_ids)
            answers.append(answer)
            chat += [*answer, *(rng.randrange(3, 500) for _ in range(20))]
    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {
        "answers": answers,
        "hits": int(counted["vllm:prefix_cache_hits"]),
        "queries": int(counted["vllm:prefix_cache_queries"]),
    }


if __name__ == "__main__":
    given = {"num_gpu_blocks_override": 48, **json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}")}
    model = write_model(Path(sys.argv[1]), **(HYBRID if given.pop("hybrid", False) else {}))
    print(json.dumps(serve(str(model), **given)))

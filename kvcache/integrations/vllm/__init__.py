"""A log of what a stock vLLM decides about its KV cache, made by a plugin that vLLM finds by itself.

    KVCACHE_LOG=DIR vllm serve MODEL

Nothing here is to be called; docs/vllm.md says how to use it. This module is imported in all of vLLM's processes, so
it imports nothing.
"""

"""A log of the KV cache decisions of a stock vLLM, made by a plugin that vLLM finds by itself.

    KVCACHE_LOG=DIR vllm serve MODEL

Nothing here is to be called (docs/how-to/vllm.md). This module is imported in all of vLLM's processes, so
it imports nothing.
"""

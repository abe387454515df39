"""A log of what a stock SGLang decides about its KV cache, made by a plugin that SGLang finds by itself.

    KVCACHE_LOG=DIR python -m sglang.launch_server --model-path MODEL

Nothing here is to be called; docs/sglang.md says how to use it. All of SGLang's processes import this module, so
it imports nothing.
"""

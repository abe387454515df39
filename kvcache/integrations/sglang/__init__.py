"""A log of the KV cache decisions of a stock SGLang, made by a plugin that SGLang finds by itself.

    KVCACHE_LOG=DIR python -m sglang.launch_server --model-path MODEL

Nothing here is to be called; see docs/sglang.md for its use. All of SGLang's processes import this module, so it
imports nothing.
"""

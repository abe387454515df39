"""Cases of TensorRT-LLM, by their ids: what is reused, what is free, what survives. Block ids need not agree."""

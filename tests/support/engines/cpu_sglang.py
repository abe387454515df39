"""Lets SGLang's wheel run on a CPU: import this before anything of SGLang's.

SGLang runs on a CPU without kernels of its own; packages that it imports on the way, and that are for GPUs, are
answered by modules in which nothing happens.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from contextlib import suppress
from typing import Any

_ABSENT = (
    *("torchvision", "torchaudio", "torchcodec", "sgl_kernel", "flashinfer", "deep_gemm", "flash_attn"),
    *("compressed_tensors", "xgrammar", "outlines", "llguidance", "tilelang", "quack", "cutlass", "torchao"),
    *("decord", "av", "soundfile", "timm", "gguf", "modelscope", "openai", "anthropic", "openai_harmony"),
    *(
        "mistral_common",
        "torch_memory_saver",
        "deep_ep",
        "mooncake",
        "nixl",
        "datasets",
        "kernels",
        "uvicorn",
    ),
    *("tiktoken", "easydict", "cuda", "pynvml", "blobfile", "distro", "smg_grpc_servicer", "watchfiles"),
    *("scipy", "peft", "multipart"),
)


class _AnyClass(type):
    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class _Nothing(types.ModuleType):
    """A module in which there is whatever is asked for: classes, and functions that return what they decorate."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        found: Any = _Nothing(full)
        if name[:1].isupper():
            schema = classmethod(lambda *_, **__: {"type": "any"})
            found = _AnyClass(name, (), {"__module__": self.__name__, "__get_pydantic_core_schema__": schema})
        setattr(self, name, found)
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return lambda function=None, *_, **__: function


class _Finder:
    def __init__(self, names: set[str]) -> None:
        self._names = names

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        """Find what is absent."""
        if name.split(".", maxsplit=1)[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Make it."""
        return _Nothing(spec.name)

    def exec_module(self, _: types.ModuleType) -> None:
        """Nothing happens."""


def prepare() -> None:
    """Do it, once."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", SGLANG_USE_CPU_ENGINE="1")
    absent = {name for name in _ABSENT if importlib.util.find_spec(name) is None}
    # Transformers is to know that they are absent before they seem to be there.
    known = importlib.import_module("transformers.utils.import_utils")
    for name in dir(known):
        if name.startswith("is_") and name.endswith("_available"):
            with suppress(Exception):
                getattr(known, name)()
    sys.meta_path.append(_Finder(absent))


prepare()

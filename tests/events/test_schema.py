"""The schemas in the docs: as the types are now, and what is written is as they say.

`python -m tests.events.test_schema` writes them anew.
"""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from events.codec import encode_batch, to_json
from events.types import EventBatch
from kvcache import KVCacheManager
from tests.support.engines import strategies
from tests.support.feeds.sinks import KEY_BYTES, SAMPLES
from tests.support.feeds.strict import Engine
from tests.support.places import ROOT
from tests.support.schema import json_schema, msgpack_schema
from tests.support.seeds import seeds

FILES: dict[str, Callable[[], dict[str, Any]]] = {
    "events.schema.json": json_schema,
    "events.msgpack.schema.json": msgpack_schema,
}


def text_of(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=1) + "\n"


def strict(schema: Any) -> Any:
    """The schema, with nothing allowed that it does not name."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    return found | {"additionalProperties": False} if "properties" in schema else found


JSON = Draft202012Validator(strict(json_schema()))
MSGPACK = Draft202012Validator(msgpack_schema())


def as_json_knows_it(value: Any) -> Any:
    """A decoded msgpack value, with bytes as the schema has them."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [as_json_knows_it(each) for each in value] if isinstance(value, list) else value


def check(batch: EventBatch) -> None:
    for tokens in (True, False):
        JSON.validate(json.loads(to_json(batch, KEY_BYTES, tokens=tokens)))
    MSGPACK.validate(as_json_knows_it(msgspec.msgpack.decode(encode_batch(batch))))


@pytest.mark.parametrize("name", FILES)
def test_docs_have_the_schema_of_the_types(name: str) -> None:
    """If not: `python -m tests.events.test_schema`."""
    assert (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8") == text_of(FILES[name]())


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: type(event).__name__)
def test_each_type_of_event(event: Any) -> None:
    """Of each there is one that is as its schema says, in JSON and in msgpack."""
    check(EventBatch(0, 1, (event,)))


@pytest.mark.parametrize("windows", [None, (6, strategies.LIMIT)])
def test_lines_of_a_random_run(tmp_path: Path, windows: Any) -> None:
    """All that a sink writes, of a cache with images, extra ids, salts, two levels and windows that slide."""
    path = tmp_path / "e.jsonl"
    settings = strategies.config(
        max_attention_window=windows, num_layers=2, secondary_blocks=4, primary_blocks=12
    )
    with KVCacheManager(settings, log=tmp_path / "log", sinks=[f"file:{path}?tokens=1"]) as manager:
        engine = Engine(manager, random.Random(3))
        for _ in range(80):
            engine.step()
            manager.flush()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        JSON.validate(line)
    seen = {event["type"] for line in lines for event in line["events"]}
    assert {"StateExported", "BlocksMoved", "SymbolsInterned", "BlocksStored"} <= seen


@pytest.mark.parametrize("part", seeds(range(4), quick=1))
@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: type(event).__name__)
def test_other_things_are_refused(event: Any, part: int) -> None:
    """A field that is missing, one too many, a value of another type: no schema that takes everything."""
    line = json.loads(to_json(EventBatch(0, 1, (event,)), KEY_BYTES))
    (spelled,) = line["events"]
    broken = []
    for name in spelled:
        fields = copy.deepcopy(spelled)
        del fields[name]
        broken += [fields, spelled | {name: {"other": 1.5}} if name not in ("config", "more") else fields]
    for fields in [*broken[part::4], spelled | {"surplus": 1}]:
        assert not JSON.is_valid(line | {"events": [fields]}), fields


if __name__ == "__main__":
    for name, made in FILES.items():
        (ROOT / "docs" / "reference" / name).write_text(text_of(made()), encoding="utf-8")

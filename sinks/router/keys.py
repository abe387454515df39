"""The keys that a ``zmq+pub:`` URL names, and whether what leaves this machine is encrypted.

- ``curve_key``: this feed's own pair, ``NAME.key_secret`` (`events.sockets.curve` on the format).
- ``curve_clients``: a directory with the public keys, ``NAME.key``, of those that may connect: where the feed
  binds, and for its replay.
- ``curve_server``: where the feed connects, the router's public key.
"""

from __future__ import annotations

from events.sockets.curve import Curve, CurveUnavailable, KeyFileError
from sinks.base import SinkURL, SinkURLError
from sinks.router.options import ZMQOptions
from sinks.router.places import Place


def curve_of(url: SinkURL, options: ZMQOptions, place: Place, replay: Place | None) -> Curve | None:
    """The keys; None: nothing is encrypted, and needs not be. Raises SinkURLError."""
    binds = not place.connects or replay is not None
    needed = ["curve_key", *["curve_clients"] * binds, *["curve_server"] * place.connects]
    given = [
        name for name in ("curve_key", "curve_clients", "curve_server") if getattr(options, name) is not None
    ]
    if not given:
        _refuse_clear(url, options, needed, place, replay)
        return None
    if options.insecure:
        raise SinkURLError(str(url), "it is encrypted, so insecure= would change nothing: leave it out")
    if sorted(given) != sorted(needed):
        role = "connects" if place.connects else "binds"
        with_replay = " with a replay" if place.connects and replay is not None else ""
        reason = f"a feed that {role}{with_replay} is encrypted by {', '.join(needed)}; given is {', '.join(given)}"
        raise SinkURLError(str(url), reason)
    paths = [getattr(options, name) for name in ("curve_key", "curve_server", "curve_clients")]
    key, server, clients = (None if path is None else url.file_path(path) for path in paths)
    assert key is not None
    try:
        return Curve.read(key, server=server, clients=clients)
    except (KeyFileError, CurveUnavailable) as error:
        raise SinkURLError(str(url), str(error)) from None


def _refuse_clear(
    url: SinkURL, options: ZMQOptions, needed: list[str], place: Place, replay: Place | None
) -> None:
    far = next((each for each in (place, replay) if each is not None and not each.is_near), None)
    if far is not None and not options.insecure:
        files = " and ".join(f"{name}=" for name in needed)
        reason = (
            f"what it sends are prompts, and {far.address} lies beyond this machine: encrypt it with {files} "
            "(`kvcache docs settings`), or say insecure=1 where the network itself keeps others out"
        )
        raise SinkURLError(str(url), reason)

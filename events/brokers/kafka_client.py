"""What writers to Kafka and readers share: how its client is set up, and what its errors mean."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from events.brokers.address import BrokerAddress, BrokerError, BrokerUnavailable

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

TAG = "record"
"""The header with a record's tag. The key is the worker, by which Kafka chooses the partition."""
MAX_BYTES = 16 << 20
"""Of a message, as far as the client is concerned."""
_SILENT = logging.getLogger("kvcache.kafka")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False
_SILENT.setLevel(logging.CRITICAL + 1)  # each call tells its own


def client_settings(address: BrokerAddress) -> dict[str, Any]:
    """The settings of any client of this broker. Raises BrokerError."""
    access = address.access
    address.tls_context()  # raises, and says which files are wrong
    host = f"[{address.host}]" if ":" in address.host else address.host
    settings: dict[str, Any] = {
        "bootstrap.servers": f"{host}:{address.port}",
        "logger": _SILENT,
        "reconnect.backoff.max.ms": 1000,
    }
    protocol = "SSL" if access.tls else "PLAINTEXT"
    if address.user is not None:
        protocol = f"SASL_{protocol}"
        settings |= {
            "sasl.mechanisms": "PLAIN",
            "sasl.username": address.user,
            "sasl.password": address.secret or "",
        }
    tls = {"ssl.ca.location": access.cafile, "ssl.certificate.location": access.certfile}
    tls["ssl.key.location"] = access.keyfile
    settings["security.protocol"] = protocol
    return settings | {name: value for name, value in tls.items() if value is not None}


def told(address: BrokerAddress, error: KafkaError | None) -> BrokerError:
    """What an error of the client is for us."""
    where = str(address)
    if error is None:
        return BrokerUnavailable(where, "it does not answer")
    name = error.name()
    if name in ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED", "TOPIC_AUTHORIZATION_FAILED"):
        return BrokerError(where, "user or password is wrong, or has no right to this")
    if name == "MSG_SIZE_TOO_LARGE":
        reason = "a batch is more than it takes in one message (message.max.bytes in its configuration)"
        return BrokerError(where, reason)
    if name in ("_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART"):
        reason = f"there is no topic {address.stream}: make one, with a retention.ms of three times restate or more"
        return BrokerUnavailable(where, reason)
    if name in ("_TRANSPORT", "_ALL_BROKERS_DOWN"):
        return BrokerUnavailable(where, "it cannot be reached")
    return BrokerUnavailable(where, name.strip("_").replace("_", " ").lower())

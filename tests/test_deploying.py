"""The manifests are what Kubernetes takes, and name options, ports and files that there are."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from textwrap import indent
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from kvcache.cli.parser import build_parser
from sinks.base import SinkURL
from sinks.router.zmq import ZMQOptions

DEPLOY = Path(__file__).parents[1] / "docs" / "deploy"
WORKER = list(yaml.safe_load_all((DEPLOY / "worker.yaml").read_text()))


MONITOR = DEPLOY / "monitor.yaml"
ALERTS = DEPLOY.parent / "monitoring" / "alerts.yml"
_RULE = """---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvcache
spec:
"""


def monitor() -> str:
    """The monitor, with the alert rules as they are now."""
    scraping = MONITOR.read_text().partition("---\n")[0]
    rules = ALERTS.read_text()
    return scraping + _RULE + indent(rules[rules.index("groups:") :], "  ")


def named(kind: str) -> dict[str, Any]:
    [found] = [each for each in WORKER if each["kind"] == kind]
    assert isinstance(found, dict)
    return found


def container(name: str) -> dict[str, Any]:
    [found] = [
        each
        for each in named("StatefulSet")["spec"]["template"]["spec"]["containers"]
        if each["name"] == name
    ]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("manifest", WORKER, ids=lambda each: str(each["kind"]))
def test_kubernetes_takes_the_manifests(manifest: dict[str, Any]) -> None:
    """By its own schemas, with nothing that they do not know."""
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    """The check above can fail."""
    broken = named("Service") | {"spec": {"ports": [{"prot": 1}]}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, kubernetes_validate.latest_version(), strict=True)


def test_the_sidecars_command_is_one() -> None:
    """Its arguments parse, and its sink's options exist."""
    args = container("kv-events")["args"]
    argv = [arg.replace("$(POD_IP)", "10.0.0.7") for arg in args]
    parsed = build_parser(argv).parse_args(argv)
    assert str(parsed.log) == "/data/log"
    [url] = parsed.sinks
    options = SinkURL.parse(url).read_options(ZMQOptions)
    assert (options.replay, options.topic) == ("5558", "kv@10.0.0.7:8000@MODEL")


def test_ports_volumes_and_labels_belong_together() -> None:
    """What one manifest opens or mounts, another one has."""
    spec = named("StatefulSet")["spec"]
    pod = spec["template"]["spec"]
    opened = {port["containerPort"] for each in pod["containers"] for port in each["ports"]}
    served = {port["port"] for port in named("Service")["spec"]["ports"]}
    allowed = {port["port"] for rule in named("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]}
    assert opened == served == allowed
    mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
    volumes = {each["name"] for each in pod["volumes"]}
    claims = {each["metadata"]["name"] for each in spec["volumeClaimTemplates"]}
    assert mounted == volumes | claims
    label = spec["selector"]["matchLabels"]
    scraping, _ = yaml.safe_load_all(MONITOR.read_text())
    assert label == named("Service")["spec"]["selector"] == scraping["spec"]["selector"]["matchLabels"]
    assert label == named("NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    ports = {port["name"] for port in named("Service")["spec"]["ports"]}
    assert {each["port"] for each in scraping["spec"]["endpoints"]} <= ports


def test_the_image_has_the_extras_that_the_sidecar_needs() -> None:
    """Those of pyproject.toml, by their names."""
    text = (DEPLOY / "Containerfile").read_text()
    [default] = re.findall(r"^ARG EXTRAS=(\S+)$", text, re.MULTILINE)
    assert text.count("[$EXTRAS]") == 2
    extras = set(default.split(","))
    project = (DEPLOY.parents[1] / "pyproject.toml").read_text()
    assert extras == {"cli", "hash", "prometheus"}
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in extras)
    [entry] = re.findall(r"ENTRYPOINT (\[.*\])", text)
    assert shlex.split(entry.strip("[]")) == ["kvcache"]


def test_the_operator_has_all_alerts() -> None:
    """The rule is the file of alerts, and nothing else."""
    _, rule = yaml.safe_load_all(MONITOR.read_text())
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    assert MONITOR.read_text() == monitor(), "run: python -m tests.test_deploying"


def test_one_name_of_the_image() -> None:
    """What is built is what is deployed, and the image has what it is built from."""
    built = (DEPLOY / "Containerfile").read_text()
    [tag] = set(re.findall(r"-t (\S+)", built + (DEPLOY.parent / "how-to" / "deploying.md").read_text()))
    assert container("kv-events")["image"] == tag
    ignored = (DEPLOY.parents[1] / ".containerignore").read_text().splitlines()
    project = tomllib.loads((DEPLOY.parents[1] / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert {f"!{name}" for name in packages} <= set(ignored)


if __name__ == "__main__":
    MONITOR.write_text(monitor())

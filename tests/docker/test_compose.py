"""The compose file: it keeps to the Compose Specification, and everything in it is wired to something that is there."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema_rs
import pytest
import yaml

from gateway.config import load
from tests.docker.files import DOCKER, compose, stages

SPEC = DOCKER.parent / "tests" / "docker" / "compose-spec" / "compose-spec.json"
SERVICES: dict[str, Any] = compose()["services"]


def faults(file: dict[str, Any]) -> list[str]:
    """What the specification's schema finds wrong. It is a little older than the `name` of a project."""
    schema = json.loads(SPEC.read_text())
    schema["properties"]["name"] = {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"}
    found = jsonschema_rs.validator_for(schema).iter_errors(file)
    return [f"{'.'.join(map(str, one.instance_path))}: {one.message}" for one in found]


@pytest.mark.parametrize("file", sorted(DOCKER.glob("compose*.yaml")), ids=lambda file: file.name)
def test_it_keeps_to_the_specification(file: Path) -> None:
    assert faults(yaml.safe_load(file.read_text())) == []


@pytest.mark.parametrize("wrong", [{"prots": []}, {"ports": 8080}, {"depends_on": {"redis": {"condition": "up"}}}])
def test_the_schema_would_find_a_fault(wrong: dict[str, Any]) -> None:
    file = compose()
    file["services"]["gateway"] |= wrong
    assert len(faults(file)) == 1


def test_there_is_what_was_promised() -> None:
    assert SERVICES.keys() == {"gateway", "redis", "jaeger", "prometheus", "grafana"}


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_pinned_hardened_and_on_loopback_only(name: str) -> None:
    service = SERVICES[name]
    if "build" in service:
        assert service["build"]["target"] in stages()
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).resolve().exists()
    else:
        assert re.search(r":v?\d+\.\d+\.\d+(-\w+)?$", service["image"]), f"{service['image']} is not pinned"
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert not service.get("privileged")


def test_what_is_mounted_is_there() -> None:
    named = compose()["volumes"].keys()
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            assert target.startswith("/")
            if source.startswith("."):
                assert (DOCKER / source).exists(), source
                assert mode == ["ro"]
            else:
                assert source in named


def test_everyone_finds_everyone() -> None:
    """Each address in a configuration is a service of the file, at a port that it listens on."""
    listens = {"gateway": 8080, "redis": 6379, "prometheus": 9090, "jaeger": 16686}
    assert config().telemetry.otlp_url == "grpc://jaeger:4317", "Jaeger's image listens there"
    addresses = [config().store.url]
    scrapes = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    for job in scrapes:
        addresses += [f"http://{target}" for group in job["static_configs"] for target in group["targets"]]
    sources = DOCKER / "grafana" / "provisioning" / "datasources" / "sources.yaml"
    addresses += [source["url"] for source in yaml.safe_load(sources.read_text())["datasources"]]
    found = {urlsplit(address).hostname: urlsplit(address).port for address in addresses}
    assert found.pop("localhost") == 9090, "Prometheus itself"
    assert found == listens
    for name in listens.keys() & {name for name, service in SERVICES.items() if "ports" in service}:
        assert SERVICES[name]["ports"][0].endswith(f":{listens[name]}")


def config() -> Any:
    return load(DOCKER / "config.toml")


def test_the_gateway_gets_its_key_from_the_environment() -> None:
    (tenant,) = config().tenants
    assert tenant.key_env in SERVICES["gateway"]["environment"]
    assert SERVICES["gateway"]["environment"][tenant.key_env].startswith(f"${{{tenant.key_env}:?")


def test_it_is_given_the_time_to_drain() -> None:
    grace = re.fullmatch(r"(\d+)s", SERVICES["gateway"]["stop_grace_period"])
    assert grace is not None
    assert int(grace[1]) > config().server.drain_s


def test_grafana_finds_the_dashboards_and_they_their_source() -> None:
    provider = yaml.safe_load((DOCKER / "grafana/provisioning/dashboards/signalbox.yaml").read_text())["providers"][0]
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]
    sources = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/sources.yaml").read_text())["datasources"]
    for file in (DOCKER / "grafana" / "dashboards").glob("*.json"):
        board = json.loads(file.read_text())
        picker = next(each for each in board["templating"]["list"] if each["type"] == "datasource")
        assert picker["query"] in {source["type"] for source in sources}
        assert picker["current"]["value"] in {source["uid"] for source in sources}

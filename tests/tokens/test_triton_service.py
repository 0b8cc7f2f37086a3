"""The Triton service for compose: its files agree with each other, and the gateway's configuration is right."""

import subprocess
from pathlib import Path
from typing import Any

import yaml

from backends.triton import Triton
from gateway.config import decode

DOCKER = Path(__file__).parents[2] / "docker"
SERVICES: dict[str, Any] = yaml.safe_load((DOCKER / "compose.triton.yaml").read_text(encoding="utf-8"))["services"]


def mounts(service: str) -> dict[str, str]:
    """By the folder in the container: what is mounted there."""
    found = {}
    for one in SERVICES[service]["volumes"]:
        source, target, mode = one.rsplit(":", 2)
        assert mode == "ro"
        found[target] = source
    return found


def test_the_gateway_is_configured_for_the_service() -> None:
    config = decode((DOCKER / "triton" / "config.toml").read_bytes())
    (backend,) = config.pools[0].backends
    assert isinstance(backend, Triton)
    assert backend.url == "grpc://triton:8001"
    assert "triton" in SERVICES
    assert backend.tokenizer in mounts("gateway")
    assert Path(backend.engine_config).parent.as_posix() in mounts("gateway")
    assert mounts("gateway")["/etc/signalbox/config.toml"] == "./triton/config.toml"


def test_the_server_serves_what_is_mounted() -> None:
    service = SERVICES["triton"]
    assert service["profiles"] == ["gpu"]
    assert "--model-repository=/repository" in service["command"]
    assert mounts("triton").keys() == {"/repository", "/models/engine", "/models/tokenizer"}
    assert "ports" not in service
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_the_filling_script_names_the_same_folders(tmp_path: Path) -> None:
    """Run with stand-ins for the image's templates and its filling tool: which models it writes, and with what."""
    script = (DOCKER / "triton" / "fill.sh").read_text(encoding="utf-8")
    templates, out, tool = tmp_path / "all", tmp_path / "repository", tmp_path / "fill.py"
    for name in ("tensorrt_llm", "preprocessing", "postprocessing", "ensemble", "tensorrt_llm_bls"):
        (templates / name).mkdir(parents=True)
        (templates / name / "config.pbtxt").write_text("template")
    out.mkdir()
    tool.write_text(
        "import pathlib, sys\nassert sys.argv[1] == '-i'\npathlib.Path(sys.argv[2]).write_text(sys.argv[3])\n"
    )
    for was, now in (
        ("/app/all_models/inflight_batcher_llm", templates),
        ("/app/tools/fill_template.py", tool),
        ("OUT=/repository", f"OUT={out}"),
    ):
        assert was in script
        script = script.replace(was, str(now))
    subprocess.run(["sh", "-c", script, "fill.sh"], check=True)
    assert [one.name for one in out.iterdir()] == ["tensorrt_llm"]
    filled = dict(one.split(":", 1) for one in (out / "tensorrt_llm" / "config.pbtxt").read_text().split(","))
    assert filled["decoupled_mode"] == "True"
    assert filled["engine_dir"] in mounts("triton")
    assert filled["logits_datatype"] == "TYPE_FP32"
    subprocess.run(["sh", "-c", script, "fill.sh", "ensemble"], check=True)
    assert {one.name for one in out.iterdir()} == {"tensorrt_llm", "preprocessing", "postprocessing", "ensemble"}
    filled = dict(one.split(":", 1) for one in (out / "preprocessing" / "config.pbtxt").read_text().split(","))
    assert filled["tokenizer_dir"] in mounts("triton")

"""What a release promises: one version, licenses, oldest versions, and no word to anyone."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import bundled
import pytest

import selftask
import tiny
from release import oldest, sbom

NO_NETWORK = """
import socket, sys

def refuse(self, address, *rest):
    if self.family != socket.AF_UNIX:  # data workers talk to their parent
        print(f"CONNECTS TO {address}", file=sys.stderr, flush=True)
        raise OSError("no network in this test")
    return original(self, address, *rest)

def unknown(host, *rest, **more):
    print(f"LOOKS UP {host}", file=sys.stderr, flush=True)
    raise OSError("no network in this test")

original = socket.socket.connect
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = socket.gethostbyname = unknown
"""


def run_without_network(words: list[str], folder: Path) -> str:
    """Run selftask in a process that cannot reach anything; return all that it prints."""
    blocked = folder / "blocked"
    blocked.mkdir(exist_ok=True)
    (blocked / "sitecustomize.py").write_text(NO_NETWORK)
    path = os.pathsep.join([str(blocked), tiny.environment()["PYTHONPATH"]])
    done = tiny.run(words, folder, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_version_stands_in_one_place() -> None:
    places = [
        path
        for path in (*tiny.ROOT.glob("*.*"), *(tiny.ROOT / "ssl").rglob("*.py"))
        if path.is_file()
        and re.search(rf"version.*[\"\']{re.escape(selftask.__version__)}[\"\']", path.read_text())
    ]
    assert [str(path.relative_to(tiny.ROOT)) for path in places] == ["ssl/selftask/__init__.py"]


def test_the_oldest_versions_are_those_of_setup() -> None:
    expected = [oldest.HEADER, *oldest.oldest(oldest.requirements())]
    assert oldest.FILE.read_text().splitlines() == expected
    names = {line.partition("==")[0].partition("[")[0] for line in expected}
    assert {"torch", "h5py", "tokenizers", "onnx"} <= names and not {"pytest", "ruff"} & names
    with pytest.raises(ValueError, match="no lower bound"):
        oldest.oldest(["numpy"])


def test_no_core_dependency_is_copyleft() -> None:
    packages = sbom.core_packages()
    assert {"torch", "hydra-core", "antlr4-python3-runtime", "numpy"} <= set(packages)
    assert not {"pytest", "wandb", "ruff"} & set(packages)
    assert sbom.problems(packages) == []


def test_copyleft_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    licenses = {"a": "GPL-3.0-only", "b": "GNU Lesser General Public License v3 (LGPLv3)", "c": ""}
    monkeypatch.setattr(sbom, "license", {**licenses, "d": "MIT License"}.get)
    monkeypatch.setattr(bundled, "parts", lambda package: [])
    assert [line.partition(": ")[2].partition(":")[0] for line in sbom.problems([*"abcd"])] == [
        "copyleft",
        "copyleft",
        "unknown license",
    ]


def test_the_block_is_seen(tmp_path: Path) -> None:
    code = "import socket\ntry: socket.create_connection(('127.0.0.1', 9))\nexcept OSError: pass"
    assert "LOOKS UP 127.0.0.1" in run_without_network([sys.executable, "-c", code], tmp_path)


@pytest.mark.parametrize("words", [["list"], ["config", "simclr"], ["env"]], ids=" ".join)
def test_no_telemetry(words: list[str], tmp_path: Path) -> None:
    said = run_without_network([sys.executable, "-m", "selftask", *words], tmp_path)
    assert "CONNECTS TO" not in said and "LOOKS UP" not in said


@pytest.mark.slow
def test_training_tells_nobody(tmp_path: Path) -> None:
    words = tiny.command("simclr", tmp_path, "run", "train.max_steps=2", "data.num_workers=1")
    said = run_without_network(words, tmp_path)
    assert "RUN finished: 2 steps" in said
    assert "CONNECTS TO" not in said and "LOOKS UP" not in said


def test_what_the_wheels_contain_is_read_from_the_wheels() -> None:
    opencv = {part.name: part.license for part in bundled.parts("opencv-python-headless")}
    assert opencv["FFmpeg"] == "LGPL" and opencv["libcrypto and libssl"] == "OpenSSL"
    assert not [name for name in opencv if name.startswith("Qt")]  # of wheels with windows
    libraries = bundled.shared_libraries("opencv-python-headless")
    named = {name.partition("-")[0] for name in libraries}
    assert not libraries or {"libavcodec", "libcrypto"} <= named  # macOS has another layout
    assert [p.license for p in bundled.parts("numpy") if p.name == "libquadmath"] in (
        ["LGPL-2.1-or-later"],
        [],  # of a Python distribution that builds NumPy itself
    )


def test_copyleft_inside_a_wheel_is_seen() -> None:
    rule = "\n" + "-" * 80 + "\n"
    text = rule.join(
        (
            "a is redistributed within all packages.\n\nGNU LESSER GENERAL PUBLIC LICENSE",
            "b is redistributed within all Linux packages.\n\nGNU GENERAL PUBLIC LICENSE",
            "c is redistributed within macOS packages.\n\nGNU GENERAL PUBLIC LICENSE",
            "Name: d\nFiles: d.so\nLicense: GPL-3.0-or-later WITH GCC-exception-3.1",
            "Name: e\nFiles: e.so\nDescription: library\nLicense: GPL-2.0-only",
        )
    )
    problems = bundled.problems("wheel", bundled.parts_of(text, "linux"))
    assert problems == [
        "wheel: contains b: copyleft: GPL",
        "wheel: contains e: copyleft: GPL-2.0-only",
    ]
    assert "contains c" in bundled.problems("wheel", bundled.parts_of(text, "darwin"))[0]


@pytest.mark.slow
def test_the_bill_of_materials(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx_py", reason="of the extra `release`")
    pytest.importorskip("piplicenses", reason="of the extra `release`")
    sbom.write_sbom(tmp_path / "sbom.json", sbom.core_packages())
    content = json.loads((tmp_path / "sbom.json").read_text())
    assert content["bomFormat"] == "CycloneDX"
    names = {component["name"].lower() for component in content["components"]}
    assert {"selftask", "torch", "numpy"} <= names and "pytest" not in names
    refs = {component["bom-ref"] for component in content["components"]}
    assert {ref for d in content["dependencies"] for ref in d["dependsOn"]} <= refs
    sbom.write_licenses(tmp_path / "licenses.md", ["numpy", "rich"])
    table = (tmp_path / "licenses.md").read_text()
    assert "| numpy" in table and "| rich" in table
    assert "| numpy | OpenBLAS |" in table

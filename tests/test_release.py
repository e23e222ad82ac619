"""A release can be built and used: wheel, metadata, workflow, and an empty environment."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tools import smoke, versions
from tools.versions import ENVIRONMENTS
from tools.wheel import effect_on, wheels_for
from torchrelay.version import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
BUILD_SECONDS = 300
INSTALL_SECONDS = 900
RUN_SECONDS = 200


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# Quick: what is written down agrees


def test_one_version_everywhere() -> None:
    assert PROJECT["version"] == __version__
    assert f"## [{__version__}]" in text_of("CHANGELOG.md")
    assert f"| {__version__.rpartition('.')[0]}.x |" in text_of("SECURITY.md")


def test_extras_are_named_as_they_are_everywhere() -> None:
    """`torchrelay[NAME]` names an extra that exists, and a command quotes it for every shell."""
    paths = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    paths += [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for found in re.finditer(r"(pip install )?('?)torchrelay\[([\w,]+)\]", text):
            where = f"{found[0]} in {path.relative_to(ROOT)}"
            assert set(found[3].split(",")) <= EXTRAS, where
            assert not found[1] or found[2], where


def test_every_extra_is_described_once() -> None:
    page = ROOT / "docs" / "install.md"
    if not page.is_file():
        pytest.skip("docs/install.md is not in this tree")
    rows = re.findall(r"^\| (`[^|]+) \|", page.read_text(encoding="utf-8"), re.M)
    described = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(described) == sorted(EXTRAS - {"dev", "docs"})


def test_the_workflow_runs_what_developers_run() -> None:
    workflow = text_of(".github/workflows/test.yml")
    assert "run: make test\n" in workflow and "run: make package\n" in workflow
    listed = re.findall(r'"(3\.\d+)"', workflow.split("matrix:")[1].split("steps:")[0])
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d", c)]
    assert listed == named


def test_the_workflow_has_the_environments_that_developers_make() -> None:
    workflow = text_of(".github/workflows/test.yml")
    listed = re.findall(r'python: "([\d.]+)", torch: "([\d.]+)"', workflow)
    made = [each for name, each in ENVIRONMENTS.items() if name != "pinned"]
    assert listed == [(each.python.removeprefix("python"), each.torch) for each in made]
    pinned = re.search(r"^torch==(\S+)$", text_of("constraints.txt"), re.M)
    makefile = re.search(r"^TORCH := (\S+)$", text_of("Makefile"), re.M)
    assert pinned and makefile
    assert pinned[1] == makefile[1] == ENVIRONMENTS["pinned"].torch


def test_results_of_versions_count_every_outcome(tmp_path: Path) -> None:
    place = tmp_path / "found.xml"
    place.write_text(
        '<testsuites><testsuite tests="9" failures="1" errors="1" skipped="3"/></testsuites>'
    )
    found = versions.counts(place)
    assert (found["passed"], found["failed"], found["skipped"]) == (4, 2, 3)
    assert versions.versions(Path(sys.executable))["python"] == platform.python_version()


def test_every_dependency_has_a_lower_bound_alone() -> None:
    """Without an upper bound: an installation leaves what is newer as it is."""
    lowest = versions.floors()
    for name in ("torch", "numpy", "msgspec", "xxhash", "rich", "typer", "obstore"):
        assert re.fullmatch(r"\d+(\.\d+)+", lowest[name]), name
    listed = text_of("docs/install.md")
    for name, low in lowest.items():
        assert f"{name} {low}" in listed, f"docs/install.md does not say {name} {low}"


def test_the_oldest_environment_has_the_lower_bounds() -> None:
    oldest = ENVIRONMENTS["oldest"]
    lowest = versions.floors()
    assert oldest.floors and oldest.torch.startswith(lowest["torch"])
    pinned = versions.with_floors(text_of("constraints.txt"), lowest).splitlines()
    for name, low in lowest.items():
        assert [line for line in pinned if re.match(rf"{name}\b", line)] == [f"{name}=={low}"]
    assert versions.lowest_pins().splitlines() == pinned
    assert 'torch: "2.11.0", pins: floors.txt}' in text_of(".github/workflows/test.yml")
    kept = [line for line in text_of("constraints.txt").splitlines() if line.startswith("pytest")]
    assert kept and set(kept) <= set(pinned)


def test_a_dependency_without_a_lower_bound_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_of("pyproject.toml")
    for wrong in ('"numpy"', '"numpy>=1.24,<3"', '"numpy==1.24"'):
        changed = tmp_path / "pyproject.toml"
        changed.write_text(re.sub(r'"numpy>=[^"]+"', wrong, text), encoding="utf-8")
        monkeypatch.setattr(versions, "PROJECT", changed)
        with pytest.raises(ValueError, match="numpy"):
            versions.floors()


def test_versions_are_tested_with_the_other_torch_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "PLACE", tmp_path)
    assert versions.other("newest") == {}
    for name in ("pinned", "newest"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.touch()
    found = {name: versions.other(name)["TORCHRELAY_OTHER_PYTHON"] for name in ENVIRONMENTS}
    assert found.pop("pinned") == str(tmp_path / "newest" / "bin" / "python")
    assert set(found.values()) == {str(tmp_path / "pinned" / "bin" / "python")}


def test_hooks_use_the_formatter_of_the_tests() -> None:
    version = re.search(r"^ruff==(\S+)$", text_of("constraints.txt"), re.M)
    assert version and f"rev: v{version[1]}\n" in text_of(".pre-commit-config.yaml")


def test_the_demo_installs_no_test_tools() -> None:
    makefile = text_of("Makefile")
    rules = dict(re.findall(r"^(\S+): (.*?)$", makefile, re.M))
    assert rules["demo"] == "$(LIBRARY)"
    recipe = makefile.split("$(LIBRARY): ", 1)[1].split("\n\n", 1)[0]
    assert "'.[cli]'" in recipe and "dev" not in recipe


def test_the_citation_is_that_of_the_project() -> None:
    facts = dict(re.findall(r"^([\w-]+): (.+)$", text_of("CITATION.cff"), re.M))
    assert facts["cff-version"] == "1.2.0" and facts["title"] == PROJECT["name"]
    assert facts["version"] == __version__ and facts["license"] == PROJECT["license"]
    assert "message" in facts and "authors:" in text_of("CITATION.cff")


def test_what_is_published_was_tried_on_old_and_new_pythons() -> None:
    workflow = text_of(".github/workflows/publish.yml")
    jobs = workflow.split("\njobs:\n", 1)[1]
    names = re.findall(r"^  (\w+):$", jobs, re.M)
    assert names == ["build", "smoke", "publish"]
    assert "run: make package\n" in jobs and "run: python -m tools.smoke\n" in jobs
    assert re.findall(r"needs: (\w+)", jobs) == ["build", "smoke"]
    tried = re.findall(r'"(3\.\d+)"', jobs.split("matrix:")[1].split("steps:")[0])
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d", c)]
    assert tried[0] == named[0] and tried[-1] == named[-1] and set(tried) <= set(named)
    assert (
        "id-token: write" in jobs.split("  publish:")[1]
        and "id-token" not in jobs.split("  publish:")[0]
    )


def test_only_a_wheel_and_a_source_archive_are_tried(tmp_path: Path) -> None:
    wheel, archive = tmp_path / "a-1.whl", tmp_path / "a-1.tar.gz"
    with pytest.raises(smoke.SmokeError, match="make package"):
        smoke.archives(tmp_path)
    wheel.touch()
    with pytest.raises(smoke.SmokeError):
        smoke.archives(tmp_path)
    archive.touch()
    assert smoke.archives(tmp_path) == [wheel, archive]
    (tmp_path / "b-2.whl").touch()
    with pytest.raises(smoke.SmokeError):
        smoke.archives(tmp_path)


def test_a_step_that_fails_shows_its_output(tmp_path: Path) -> None:
    say = [sys.executable, "-c", "print('why'); raise SystemExit(3)"]
    assert smoke.run(say, tmp_path, code=3) == "why\n"
    with pytest.raises(smoke.SmokeError, match="status 3\nwhy"):
        smoke.run(say, tmp_path)
    with pytest.raises(smoke.SmokeError):
        smoke.run([str(tmp_path / "nothing")], tmp_path)


# Slow: built, installed, tried


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a wheel and a source archive of this tree, built from a copy of it."""
    for tool in ("build", "twine"):
        if find_spec(tool) is None:
            pytest.skip(f"{tool} is not installed: pip install -e '.[dev]'")
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    run([sys.executable, "-m", "build", "--outdir", "dist", "."], copy, BUILD_SECONDS)
    return copy / "dist"


def run(command: list[str], folder: Path, seconds: float, code: int = 0) -> str:
    inherited = dict(os.environ)
    if not command[0].startswith(sys.prefix):  # nothing of this tree reaches the new environment
        inherited.pop("PYTHONPATH", None)
    done = subprocess.run(
        command,
        cwd=folder,
        env=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == code, f"{command}\n{done.stdout}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS + 60)
def test_wheel_and_archive_are_complete(built: Path) -> None:
    archives = sorted(map(str, built.iterdir()))
    assert len(archives) == 2
    run([sys.executable, "-m", "twine", "check", "--strict", *archives], built, 60)
    wheel = next(built.glob("*.whl"))
    assert wheel.name == f"torchrelay-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        facts = HeaderParser().parsestr(
            opened.read(f"torchrelay-{__version__}.dist-info/METADATA").decode()
        )
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / "torchrelay").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= names, sorted(wanted - names)
    assert all(name.startswith(("torchrelay/", "torchrelay-")) for name in names)
    assert set(facts.get_all("Provides-Extra", [])) == EXTRAS
    assert f"torchrelay-{__version__}.dist-info/licenses/LICENSE" in names


NEWEST = {"torch": "2.15.0", "numpy": "2.5.5", "msgspec": "0.22.0", "xxhash": "4.1.0"}
OLDEST = {name: versions.floors()[name] for name in NEWEST}


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS + 2 * RUN_SECONDS)
@pytest.mark.parametrize("there", [NEWEST, OLDEST], ids=["newest", "oldest"])
def test_the_wheel_changes_no_installed_version(
    built: Path, tmp_path: Path, there: dict[str, str]
) -> None:
    """In an environment that says it has these releases: their metadata are all that pip reads."""
    run([sys.executable, "-m", "venv", "--without-pip", "env"], tmp_path, 120)
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    for name, version in there.items():
        facts = packages / f"{name}-{version}.dist-info"
        facts.mkdir()
        written = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (facts / "METADATA").write_text(written, encoding="utf-8")
    wheel, python = next(built.glob("*.whl")), str(tmp_path / "env" / "bin" / "python")
    found = effect_on(python, wheel, "--no-index")
    assert found.changed == {} and found.added == {"torchrelay": __version__}
    # Where a release is too old, it is seen.
    last = f"torch-{there['torch']}.dist-info"
    (packages / last).rename(packages / "torch-2.9.0.dist-info")
    (packages / "torch-2.9.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n", encoding="utf-8"
    )
    with pytest.raises(RuntimeError, match="torch"):
        effect_on(python, wheel, "--no-index")


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_SECONDS)
@pytest.mark.parametrize("version", ["3.10", "3.14"])
def test_every_dependency_has_a_wheel(version: str) -> None:
    lowest = versions.floors()
    found = wheels_for(version, [f"{name}>={low}" for name, low in lowest.items()])
    assert found.keys() == lowest.keys()


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_SECONDS + 3 * RUN_SECONDS)
def test_a_new_user_with_the_wheel_in_an_empty_environment(built: Path, tmp_path: Path) -> None:
    """A plain installation runs the README's scripts; the extra brings the command and the demo."""
    assert smoke.scripts()
    pins = ("-c", str(ROOT / "constraints.txt"))
    smoke.try_archive(sys.executable, next(built.glob("*.whl")), tmp_path, pins)

"""The documentation holds: its code runs, its links lead somewhere, its tables are the code's.

How a fenced block is run is told by its info string:

    python                a script if it has a `__main__` part, else a snippet run right here, with
                          `folder` (an empty directory), `tr` and `torch` at hand
    python ranks=2        on each rank of a gloo group of that size, with `rank`, `group`, `relay`
                          and the same `folder` on all ranks at hand too
    python safetensors    a snippet that is skipped where that library cannot be imported
    python s3             a snippet with a bucket `s3://bucket`: moto's server on loopback
    python ranks=2 torchft   the same; skipped where torchft cannot be imported
    python torchrun       a script that torchrun starts, with two ranks and one restart
    python norun          needs what a test has not (a torchft lighthouse); compiled only
    hex NAME              bytes, with remarks after three spaces
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

import torchrelay as tr
from tests.support.commands import command
from tests.support.forks import Done, run_program
from tests.support.ranks import run_ranks
from tests.support.s3 import S3
from tests.support.torchft_files import find_torchft
from torchrelay import dcp, dropin, errors, steps
from torchrelay.describing.snapshot import capture
from torchrelay.dropin import stock_dcp
from torchrelay.dropin.conversion import convert
from torchrelay.endpoint.front import Endpoint
from torchrelay.geometry import boxes
from torchrelay.geometry.chunks import MAX_CHUNK_BYTES
from torchrelay.memory.gpu.kernels import digest_of
from torchrelay.progress import Progress
from torchrelay.record import dtypes, encoding, manifest, meshes, probing, rank_reads, typed
from torchrelay.record import schema as record_schema
from torchrelay.record.checks import images as image_checks
from torchrelay.record.checks import rows as row_checks
from torchrelay.record.checks import tree as tree_checks
from torchrelay.record.values import MAX_NESTED
from torchrelay.results import Attempt, Outcome, Traffic
from torchrelay.shares import layout
from torchrelay.stores import listing, safetensors
from torchrelay.stores.objects.step import with_folder
from torchrelay.transports.meeting import directory
from torchrelay.transports.protocol import sender_machine
from torchrelay.transports.protocol.peers import Stage
from torchrelay.transports.routes import choice, cuda_ipc, group, memory, reading, tcp
from torchrelay.transports.routes.cuda import handles
from torchrelay.transports.streams import chunk_sender, sockets
from torchrelay.transports.wire import handshake, messages
from torchrelay.weights.subscription import Subscription

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPT_SECONDS = 100
RELAY_SECONDS = 30
RANKS = (2, 3, 4)


class Block(NamedTuple):
    """One fenced block of a page."""

    page: str
    line: int
    info: tuple[str, ...]
    source: str

    @property
    def ranks(self) -> int:
        return next((int(word[6:]) for word in self.info if word.startswith("ranks=")), 0)

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    def compiled(self) -> types.CodeType:
        # Blank lines in front, so that a traceback has the line of the page.
        # A keeper is found by its name: not that of another run of this test.
        source = self.source.replace("docs-page", f"docs-{os.getpid()}")
        return compile("\n" * self.line + source, self.page, "exec", dont_inherit=True)


def blocks_of(page: str, text: str) -> list[Block]:
    fences = re.compile(r"^```(\S[^\n]*)\n(.*?)^```$", re.M | re.S)
    return [
        Block(page, text.count("\n", 0, m.start()) + 1, tuple(m[1].split()), m[2])
        for m in fences.finditer(text)
    ]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


BLOCKS = [block for path in PAGES for block in blocks_of(name_of(path), path.read_text("utf-8"))]
PYTHON = [block for block in BLOCKS if block.info[0] == "python" and "norun" not in block.info]
LAUNCHED = [b for b in PYTHON if "torchrun" in b.info]
SCRIPTS = [b for b in PYTHON if not b.ranks and "__main__" in b.source]
SNIPPETS = [
    block
    for block in PYTHON
    if not block.ranks and "__main__" not in block.source and not {"s3", "torchrun"} & {*block.info}
]
ON_S3 = [b for b in PYTHON if "s3" in b.info]
NOT_RUN = [block for block in BLOCKS if "norun" in block.info]


# Code


@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: block.where)
def test_script_runs(block: Block, tmp_path: Path) -> None:
    script = str(written(block, tmp_path))
    check_script(block, run_program(script, folder=tmp_path, seconds=SCRIPT_SECONDS))


@pytest.mark.parametrize("block", LAUNCHED, ids=lambda block: block.where)
def test_script_runs_under_torchs_agent(block: Block, tmp_path: Path) -> None:
    """The agent that torchrun runs, with workers that are forked."""
    agent, script = ROOT / "tests" / "support" / "agent.py", written(block, tmp_path)
    done = run_program(str(agent), str(script), folder=tmp_path, seconds=SCRIPT_SECONDS)
    check_script(block, done)


@pytest.mark.slow
@pytest.mark.parametrize("block", SCRIPTS, ids=lambda block: block.where)
def test_script_runs_as_a_user_starts_it(block: Block, tmp_path: Path) -> None:
    check_script(block, run([sys.executable, str(written(block, tmp_path))], tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("block", LAUNCHED, ids=lambda block: block.where)
def test_script_runs_under_torchrun(block: Block, tmp_path: Path) -> None:
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    check_script(block, run([*command, str(written(block, tmp_path))], tmp_path))


def written(block: Block, folder: Path) -> Path:
    script = folder / "script.py"
    script.write_text(block.source, encoding="utf-8")
    return script


def run(command: list[str], folder: Path) -> Done:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SCRIPT_SECONDS,
        cwd=folder,
        check=False,
    )
    return Done(done.returncode, done.stdout)


def check_script(block: Block, done: Done) -> None:
    assert done.code == 0, f"{block.where}\n{done.output}"
    checksums = re.findall(r"checksum (-?[\d.]+)", done.output)
    assert len(set(checksums)) <= 1, f"{block.where}: ranks differ\n{done.output}"


@pytest.mark.parametrize("block", SNIPPETS, ids=lambda block: block.where)
def test_snippet_runs(block: Block, tmp_path: Path) -> None:
    if "safetensors" in block.info:
        pytest.importorskip("safetensors")
    exec(block.compiled(), {"torch": torch, "tr": tr, "folder": tmp_path})


@pytest.mark.parametrize("block", ON_S3, ids=lambda block: block.where)
def test_snippet_runs_on_s3(block: Block, s3: S3, tmp_path: Path) -> None:
    exec(block.compiled(), {"torch": torch, "tr": tr, "folder": tmp_path})


def run_blocks(rank: int, group: Any, blocks: list[Block], folder: Path) -> list[str]:
    """Run the blocks of a page one after the other; what was skipped comes back."""
    skipped = []
    for number, block in enumerate(blocks):
        if "torchft" in block.info and not find_torchft():
            skipped.append(block.where)
            continue
        with tr.Relay(group, timeout=RELAY_SECONDS) as relay:
            names = {"rank": rank, "group": group, "relay": relay, "tr": tr, "torch": torch}
            exec(block.compiled(), {**names, "folder": folder / str(number)})
        torch.distributed.barrier(group)
    return skipped


@pytest.mark.parametrize(
    ("ranks", "page"), sorted({(block.ranks, block.page) for block in PYTHON if block.ranks})
)
def test_ranks_run(page: str, ranks: int, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    blocks = [block for block in PYTHON if block.page == page and block.ranks == ranks]
    if any("use_local_synchronization" in block.source for block in blocks):
        # New processes: it hangs on ranks that are in unequal numbers of groups.
        skipped = run_ranks(run_blocks, ranks, blocks, tmp_path)[0]
    else:
        pool = request.getfixturevalue(f"pool{ranks}")
        skipped = pool.run(run_blocks, blocks, tmp_path, timeout=60, fresh_group=True)[0]
    if len(skipped) == len(blocks):
        pytest.skip("torchft is not at hand")


def test_every_python_block_is_run() -> None:
    assert {block.ranks for block in PYTHON} <= {0, *RANKS}
    # A vLLM server and an SGLang server; torchft's native part; torchtitan's models.
    guides = ["docs/guides/torchft.md", "docs/guides/torchtitan.md"]
    assert [block.page for block in NOT_RUN] == ["docs/frameworks.md"] * 2 + guides
    for block in NOT_RUN:
        block.compiled()
        for node in ast.walk(ast.parse(block.source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torchrelay"):
                source = text_of(f"src/{(node.module or '').replace('.', '/')}.py")
                assert all(f"class {alias.name}" in source for alias in node.names)


# Links and claims


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub makes of headings."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", without_code(text), re.M):
        kept = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(kept.replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    text = without_code(path.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{target} in {name_of(path)}"
        if anchor:
            headings = anchors_of(there.read_text(encoding="utf-8"))
            assert anchor in headings, f"{target} in {name_of(path)}: no such heading"


@pytest.mark.parametrize("heading", ["## Live transfers", "## Checkpoints"])
def test_each_guarantee_has_its_test(heading: str) -> None:
    section = text_of("docs/guarantees.md").split(f"{heading}\n", 1)[1].split("\n## ", 1)[0]
    link = r"\| \[`([\w/]+\.py)::(\w+)`\]\(\.\./tests/([\w/]+\.py)\) \|$"
    rows = re.findall(rf"^\| (?!what happens).*{link}", section, re.M)
    assert len(rows) == section.count("\n| ") - 1, "a row names no test"
    for file, name, linked in rows:
        tree = ast.parse(text_of(f"tests/{file}"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions and file == linked, f"{file} has no {name}"


# Reference


def shown(name: str, thing: Any) -> str:
    """A signature as the reference shows it: without annotations."""
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(thing).parameters.values()
        if parameter.name != "self"
    ]
    # Members of an enum by their names, as one writes them.
    return re.sub(r"<\w+\.(\w+): \d+>", r"\1", f"{name}{inspect.Signature(parameters)}")


def methods_of(kind: type) -> list[tuple[str, Any]]:
    return [(n, f) for n, f in vars(kind).items() if inspect.isfunction(f) and n[0] != "_"]


PUBLIC = {
    "Relay": tr.Relay,
    "Relay.send": tr.Relay.send,
    "Relay.recv": tr.Relay.recv,
    "Relay.share": tr.Relay.share,
    "Relay.peer": tr.Relay.peer,
    "Relay.close": tr.Relay.close,
    "register": tr.register,
    "PGTransport": dropin.PGTransport,
    "PGTransport.send_checkpoint": dropin.PGTransport.send_checkpoint,
    "PGTransport.recv_checkpoint": dropin.PGTransport.recv_checkpoint,
    "Checkpointer": tr.Checkpointer,
    **{f"Checkpointer.{name}": method for name, method in methods_of(tr.Checkpointer)},
    **{f"Pending.{name}": getattr(tr.Pending, name) for name in ("result", "exception")},
    "serve": tr.serve,
    **{f"Endpoint.{name}": method for name, method in methods_of(Endpoint)},
    "pull": tr.pull,
    "subscribe": tr.subscribe,
    **{f"Subscription.{name}": method for name, method in methods_of(Subscription)},
    "KeepLast": tr.KeepLast,
    "KeepEvery": tr.KeepEvery,
    "dcp.Writer": dcp.Writer,
    "dcp.Reader": dcp.Reader,
    "dropin.Checkpointer": dropin.Checkpointer,
    **{f"dropin.Checkpointer.{name}": method for name, method in methods_of(dropin.Checkpointer)},
    "convert": convert,
    **{name: getattr(stock_dcp, name) for name in stock_dcp.__all__},
}


@pytest.mark.parametrize("name", PUBLIC)
def test_reference_has_the_signature(name: str) -> None:
    assert f"### `{shown(name, PUBLIC[name])}`" in text_of("docs/reference.md")


def test_reference_has_every_name() -> None:
    text = text_of("docs/reference.md")
    names = [*tr.__all__, *dropin.__all__, *tr.Report.__dataclass_fields__]
    names += [*Outcome._fields, *Attempt._fields, *Traffic._fields, *Progress._fields]
    names += [name for name, value in vars(tr.Report).items() if isinstance(value, property)]
    names += [*tr.Loaded.__dataclass_fields__, "url", "skipped"]
    missing = [name for name in names if not re.search(rf"`{name}\b", text)]
    assert not missing, missing


def test_reference_has_every_error() -> None:
    text = text_of("docs/reference.md")
    found = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.RelayError)
    }
    for name in found:
        assert re.search(rf"^\| `{name}` \| \S", text, re.M), f"{name} has no row"
        assert re.search(rf"^(RelayError|[│ ]*[├└]── {name})\b", text, re.M), f"{name} in the tree"
        assert re.search(rf"^\| `{name}` \| \S", text_of("docs/operations.md"), re.M), name


def test_reference_has_every_command() -> None:
    shown = command("--help").stdout.partition("Commands:")[2]
    commands = re.findall(r"^  ([a-z-]+)  ", shown, flags=re.M)
    assert "pull" in commands
    for name in commands:
        assert f"`torchrelay {name} " in text_of("docs/reference.md"), name


def test_the_list_of_modules_has_every_module() -> None:
    text = text_of("docs/module-list.md")
    source = ROOT / "src" / "torchrelay"
    for path in sorted(source.rglob("*.py")):
        if path.name not in ("__init__.py", "__main__.py"):
            assert f"`{path.relative_to(source).as_posix()}`" in text, path.name


def test_pages_say_what_their_snippets_are_given() -> None:
    for path in PAGES:
        text = path.read_text("utf-8")
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        blocks = [b for b in blocks_of(name_of(path), text) if b.info[0] == "python"]
        for name in ("rank", "relay", "folder"):
            used = [b for b in blocks if _is_given(name, b.source)]
            assert not used or f"`{name}`" in prose, f"{used[0].where} has {name} from nowhere"


def _is_given(name: str, source: str) -> bool:
    """Whether a snippet uses a name that it does not define."""
    nodes = list(ast.walk(ast.parse(source)))
    uses = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    defines = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return name in uses - defines - {n.arg for n in nodes if isinstance(n, ast.arg)}


def test_blocks_that_are_not_run_say_so() -> None:
    for block in NOT_RUN:
        text = text_of(block.page)
        before = text.splitlines()[: block.line - 1]
        paragraph = " ".join(before[-6:])
        assert "not run" in paragraph, f"{block.where} does not say that it is not run"


# Wire format

WIRE = text_of("docs/wire-format.md")


def rows_under(heading: str, page: str = WIRE) -> list[list[str]]:
    """Cells of the first table under a heading, without its two head rows."""
    section = page.split(f"\n{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", section, re.M)
    assert table is not None and "\n#" not in section[: table.start()], heading
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]
    ]


def records(*modules: types.ModuleType) -> list[type[msgspec.Struct]]:
    return [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and not kind.__name__.startswith("_")
        and kind.__module__ == module.__name__
    ]


def check_record(record: type[msgspec.Struct], page: str) -> None:
    """A record's table: number, field, type, meaning; without a number for a JSON object."""
    tag = record.__struct_config__.tag
    rows = rows_under(f"### {record.__name__}" + (f" `{tag}`" if tag else ""), page)
    if record.__struct_config__.array_like:
        first = 1 if tag else 0
        assert [int(row[0]) for row in rows] == list(range(first, first + len(rows)))
        rows = [row[1:] for row in rows]
    assert [row[0].strip("`") for row in rows] == list(record.__struct_fields__)
    for row, field in zip(rows, msgspec.structs.fields(record), strict=True):
        plain = {int: "int", str: "str", bool: "bool", bytes: "bytes"}.get(field.type)
        assert plain is None or row[1] == plain, f"{record.__name__}.{field.name} is {field.type}"


@pytest.mark.parametrize(
    "record", records(manifest, record_schema, rank_reads), ids=lambda record: record.__name__
)
def test_record_is_as_described(record: type[msgspec.Struct]) -> None:
    check_record(record, WIRE)


PARTS_OF_MESSAGES = [kind for kind in records(messages) if kind not in messages.MESSAGES]
ROUTE_RECORDS = records(directory, cuda_ipc, group, handles, memory, reading, tcp)


@pytest.mark.parametrize(
    "record",
    [kind for kind in (*PARTS_OF_MESSAGES, *ROUTE_RECORDS) if kind.__struct_fields__],
    ids=lambda record: record.__name__,
)
def test_record_of_a_message_is_as_described(record: type[msgspec.Struct]) -> None:
    check_record(record, WIRE)


def test_wire_version_is_as_described() -> None:
    assert WIRE.startswith(f"# Wire format, version {handshake.VERSION}\n")


def test_messages_are_as_described() -> None:
    rows = rows_under("## Messages")
    assert [row[1].strip("`") for row in rows] == [kind.__name__ for kind in messages.MESSAGES]
    for number, (row, kind) in enumerate(zip(rows, messages.MESSAGES, strict=True)):
        assert int(row[0]) == number
        assert re.findall(r"`(\w+): ", row[3]) == list(kind.__struct_fields__), kind
        assert (row[4] == "large") == (kind.most_bytes > 1 << 16), kind


def test_stages_of_a_receiver_are_as_described() -> None:
    """On the page and in the module that has the same table."""
    rows = rows_under("## The sender, per receiver")
    named = {word for row in rows for word in re.split(r", | ", row[0])}
    reached = {row[3] for row in rows}
    stages = {stage.value for stage in Stage}
    assert stages - {"done", "refused", "failed", "unknown"} <= named
    assert reached == stages - {"expected"}
    table = sender_machine.__doc__ or ""
    assert {row.upper() for row in reached} == set(re.findall(r"\| ([A-Z]+) +\|$", table, re.M))


def test_routes_are_as_described() -> None:
    routes = [row[0].strip("`") for row in rows_under("## Routes")]
    assert routes == list(choice.BY_NAME)


def test_the_handshake_is_as_described() -> None:
    assert [int(row[1]) for row in rows_under("## Handshake")] == [
        handshake.CHALLENGE_BYTES,
        handshake.HELLO_BYTES,
        handshake.WELCOME_BYTES,
    ]
    assert f"`{sockets.END:#X}`".replace("0X", "0x") in WIRE


def test_flags_and_dtypes_are_as_described() -> None:
    for name in ("REQUIRES_GRAD", "PARAMETER", "COALESCED", "META", "ON_DEVICE"):
        assert f"| `{name}` | {getattr(manifest, name)} |" in WIRE
    sizes = {
        name: int(row[0])
        for row in rows_under("### Dtypes")
        for name in row[1].strip("`").split("` `")
    }
    assert sizes == dtypes.ITEM_SIZES


def test_limits_are_as_described() -> None:
    caps = dict(rows_under("## Limits"))
    assert messages.Offer.most_bytes == manifest.MAX_ENCODED_BYTES == 1 << 30
    assert caps["control message, encoded record"] == "2^30 bytes"
    assert (caps["leaves"], manifest.MAX_LEAVES) == ("2^24", 1 << 24)
    assert (caps["depth of the tree"], manifest.MAX_DEPTH) == ("128", 128)
    assert (caps["stream"], manifest.MAX_STREAM_BYTES) == ("2^50 bytes", 1 << 50)
    assert (caps["chunk"], MAX_CHUNK_BYTES) == ("2^28 bytes", 1 << 28)
    assert (caps["dimensions of a tensor"], manifest.MAX_DIMS) == ("64", 64)
    assert (caps["data connections of a transfer"], chunk_sender.MAX_CONNECTIONS) == ("16", 16)
    assert (caps["dimensions of a mesh"], manifest.MAX_MESH_DIMS) == ("16", 16)
    different = caps["dimensions of all different meshes, and 1 for each"]
    assert (different, meshes.MAX_MESH_WORK) == ("2^12", 1 << 12)
    assert (caps["ranks of all different meshes"], meshes.MAX_MESH_RANKS) == ("2^22", 1 << 22)
    more = caps["dimensions of all tensors, beyond 8 of each"]
    assert (more, row_checks.MAX_MORE_DIMS) == ("2^19", 1 << 19)
    assert caps["keys of a dict that are not text"].startswith("2^8, or as many as")
    assert probing.FEW == 1 << 8
    tries = caps["tries for a slot, for each key of a dict; for each member of a set"]
    assert (tries, probing.TRIES) == ("2^7; 2^8", 1 << 7)
    assert (caps["tuples in tuples, in a key or a value"], MAX_NESTED) == ("128", 128)
    assert (caps["bits of a number of a Fraction"], typed.MAX_FRACTION_BITS) == ("2^16", 1 << 16)


def hex_of(name: str) -> bytes:
    block = next(b for b in BLOCKS if b.info == ("hex", name))
    digits = [re.split(r" {3,}", line.strip())[0] for line in block.source.splitlines()]
    return bytes.fromhex(" ".join(digits))


def test_worked_example_matches_the_code() -> None:
    snapshot = capture({"w": torch.tensor([1.0, -2.0]), "lr": 0.5}, step=7)
    encoded = snapshot.encoded()
    assert hex_of("record") == encoded
    assert f"The record, {len(encoded)} bytes" in WIRE
    assert encoding.encode(encoding.decode(hex_of("record"))) == encoded
    chunk = torch.empty(16, dtype=torch.uint8)
    snapshot.read(0, chunk)
    assert hex_of("stream") == chunk.numpy().tobytes()
    assert hex_of("digest") == digest_of(chunk)
    assert hex_of("join") == messages.encode(messages.Join(7))


# Checkpoint format

FORMAT = text_of("docs/checkpoint-format.md")


def test_fields_of_a_step_are_those_of_the_record() -> None:
    rows = rows_under("## Commit record", FORMAT)
    named = [name.strip("`") for row in rows for name in row[0].split(", ")]
    assert sorted(named) == sorted(record_schema.Record.__struct_fields__)


def test_format_version_is_as_described() -> None:
    major, minor = record_schema.VERSION
    assert FORMAT.startswith(f"# Checkpoint format, version {major}.{minor}\n")
    assert f"has more than {encoding.READABLE:,}" in FORMAT


def test_safetensors_dtypes_are_as_described() -> None:
    shown = {row[0].strip("`"): row[1].strip("`") for row in rows_under("## Dtypes", FORMAT)}
    assert shown == safetensors.DTYPES


def test_checkpoint_limits_are_as_described() -> None:
    caps = dict(rows_under("## Limits", FORMAT))
    assert (caps["commit record"], listing.MAX_MANIFEST_BYTES) == ("2^31 bytes", 1 << 31)
    compared = caps["comparisons of boxes, beyond 64 for each and for each dimension"]
    assert (compared, boxes.MAX_COMPARISONS) == ("2^20 in all", 1 << 20)
    named = caps["classes of namedtuples in a tree, fields of all of them"]
    assert named == "512, 2^14"
    assert (tree_checks.MAX_CLASSES, tree_checks.MAX_FIELDS) == (512, 1 << 14)
    assert (caps["dimensions of a mesh"], manifest.MAX_MESH_DIMS) == ("16", 16)
    assert steps.MAX_STEP == (1 << 63) - 1 and "below 2^63" in FORMAT
    assert caps["file name"] == f"`{image_checks.FILE_NAME.pattern}`"
    assert layout.CHUNK_BYTES == (4 << 10, 1 << 20) and "1 MiB" in FORMAT and "4 KiB" in FORMAT
    assert layout.CHUNKS == (256, 4096) and "256 chunks" in FORMAT and "4,096 chunks" in FORMAT
    assert layout.FILE_BYTES == 1 << 30 and "`file_bytes`, 1 GiB" in FORMAT
    assert with_folder(b'{"record":', "host-4711-9f2c01ab").decode() in FORMAT

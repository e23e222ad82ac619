"""What looks like a step in a place without steps: a job that took it for empty would start at 0.

`explain` gets the names below a place, as relative paths; those of directories end in a slash.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torchrelay.stores.listing import DATA_NAME, MANIFEST

DEPTH = 4  # levels of names below a place that are looked at
MOST = 2000  # names that are looked at

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
_WORD = "(?:global|step|steps|checkpoint|ckpt|iter|iteration|epoch)"
_SUFFIX = "(?:ckpt|pt|pth|bin|tar|safetensors|distcp)"
# checkpoint-500, global_step100, step_003, iter_0000100, epoch=3-step=100.ckpt
_NUMBERED = re.compile(
    rf"(?:[a-z]+[-_])?(?:{_WORD}[-_=.]?)+\d+(?:[-_](?:{_WORD}[-_=.]?)?\d+)*(?:\.{_SUFFIX})*",
    re.IGNORECASE,
)
_FILE = re.compile(rf"[^.].*\.{_SUFFIX}", re.IGNORECASE)
# Files that checkpoints of other tools have.
_MARKS = {
    ".metadata": "torch.distributed.checkpoint",
    "trainer_state.json": "transformers",
    "_CHECKPOINT_METADATA": "Orbax",
    "latest_checkpointed_iteration.txt": "Megatron",
}
_CONVERT = "torchrelay convert brings other checkpoints here"


def explain(url: str, names: Iterable[str]) -> str:
    """Which of the names looks like a step, and the path that was probably meant; "" if none."""
    url = url.rstrip("/")
    found = [one for name in names if (one := _evidence(url, name)) is not None]
    return min(found)[1] if found else ""


def _evidence(url: str, name: str) -> tuple[int, str] | None:
    """The evidence in one name; a lower number is surer."""
    is_directory, parts = name.endswith("/"), name.rstrip("/").split("/")
    last, above = parts[-1], parts[-2] if len(parts) > 1 else ""
    folder = "/".join([url, *parts[:-1]])
    if last == MANIFEST:
        return _record(url, folder, above, parts)
    if last in _MARKS:
        kind = f"a checkpoint of {_MARKS[last]} (it has {last})"
        return 3, f"{folder} is {kind}, not of torchrelay: {_CONVERT}"
    if is_directory and _STEP.fullmatch(last) and len(parts) == 1:
        why = f"it has no {MANIFEST}: it was damaged, or was written by another tool"
        return 5, f"{url}/{last} has the name of a step, but {why}; restore it or move it away"
    if len(parts) <= 2 and _NUMBERED.fullmatch(last) and not _STEP.fullmatch(last):
        return 4, f"{url}/{'/'.join(parts)} looks like a step of another tool: {_CONVERT}"
    if len(parts) == 1 and not is_directory and _FILE.fullmatch(last):
        kind = "a data file of a step" if DATA_NAME.fullmatch(last) else "a checkpoint"
        return 6, f"{url}/{last} looks like {kind}: name the directory that has step-N directories"
    return None


def _record(url: str, folder: str, above: str, parts: list[str]) -> tuple[int, str] | None:
    """The same of a commit record in the directory `above`, which is below `url`."""
    if len(parts) == 1:
        parent, _, own = url.rpartition("/")
        if _STEP.fullmatch(own):
            return 0, f"{url} is a step itself: did you mean {parent}?"
        return 1, f"{url} has the {MANIFEST} of a step itself: name the directory above its step-N"
    if _STEP.fullmatch(above) and len(parts) > 2:
        return 0, f"{folder} is a step: did you mean {folder.rpartition('/')[0]}?"
    if number := re.search(r"\d+$", above):
        renamed = f"step-{int(number[0])}"
        return 2, f"{folder} looks like a step that was renamed: did you mean {renamed}?"
    return 2, f"{folder} has the {MANIFEST} of a step, and is not named step-N: rename it"

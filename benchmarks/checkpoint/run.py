"""The rows, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.checkpoint.background import asynchronous, memory
from benchmarks.checkpoint.blocking import one_process, two_ranks
from benchmarks.checkpoint.crew import Crew, Options
from benchmarks.checkpoint.rows import Row
from benchmarks.harness import Ranks


def run(options: Options) -> Iterator[Row]:
    with ExitStack() as shared:
        few: dict[int, Ranks] = {}
        if options.small:  # not for its figures: saves the start of more processes
            few = {count: shared.enter_context(Ranks(count, parents=True)) for count in (1, 2)}

        def crew(own: ExitStack, count: int) -> Crew:
            # New processes for each part: a heap that has grown would make memory look cheap.
            if not options.small:
                return Crew(own.enter_context(Ranks(count, parents=True)), count)
            if few[count].failed:  # ranks of which one has failed end
                few[count] = shared.enter_context(Ranks(count, parents=True))
            return Crew(few[count], count)

        for part, count in ((one_process, 1), (two_ranks, 2)):
            with ExitStack() as own:
                yield from part(options, crew(own, count), crew(own, count))
        yield from asynchronous(options, crew)
        yield memory(options, crew)

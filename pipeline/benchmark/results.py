"""All that a benchmark has found, run by run, and what follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.benchmark.breakdown import Breakdown
from pipeline.benchmark.runs import Run, compare, medians, speedup
from pipeline.benchmark.workload import Workload

REFERENCE = "hf/plain/1"  # the contender whose tokens are the right ones


@dataclass
class Results:
    """What is known so far.

    `names`: of all contenders, in the order of the table. `baselines`: those among them that the
    others are compared with. `runs`: by contender.
    """

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    workload: Workload
    names: Sequence[str]
    baselines: Sequence[str]
    runs: dict[str, list[Run]] = field(default_factory=dict)
    failures: list[dict[str, str]] = field(default_factory=list)
    breakdowns: list[Breakdown] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs = {name: [] for name in self.names}

    def to_json(self) -> dict[str, Any]:
        """For the file, and for the tables."""
        return {
            "machine": self.machine,
            "settings": self.settings,
            "workload": {
                "rows": len(self.workload.prompts),
                "prompt_tokens": self.workload.num_prompt_tokens,
            },
            "baselines": self.baselines,
            "contenders": [self._contender(name) for name in self.names],
            "failures": self.failures,
            "breakdown": [asdict(one) for one in self.breakdowns],
        }

    def _contender(self, name: str) -> dict[str, Any]:
        runs = self.runs[name]
        return {
            "name": name,
            "median": medians(runs),
            "speedup": {base: self._speedups(runs, base) for base in self.baselines},
            "runs": [{**run.figures(), "agreement": self._agreement(run)} for run in runs],
        }

    def _speedups(self, runs: Sequence[Run], baseline: str) -> dict[str, float | None]:
        base = self.runs[baseline]
        return {
            "total": speedup(runs, base, "total_seconds"),
            "decode": speedup(runs, base, "decode_seconds"),
        }

    def _agreement(self, run: Run) -> dict[str, Any] | None:
        reference = self.runs.get(REFERENCE)
        return asdict(compare(run.tokens, reference[0].tokens)) if reference else None

"""Training on an object store, a rank killed in the middle of an upload, and nothing lost.

Trains a small transformer on two ranks, with a checkpoint every few steps; kills one rank with SIGKILL
while it uploads; starts the job again from the newest checkpoint; and loads the result on 1, 2 and 4 ranks.
Then it trains with a fast place on two hosts, one for each rank, kills both ranks, removes the directory of one
host, and kills both once more. It compares
every loss and all logits, to the last bit, with a run that nothing interrupted. Exits with 1 where anything
differs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import cloudckpt
from cloudckpt.stores import open_store

from . import summary
from .launch import RunTimedOutError, torchrun
from .place import place_for
from .ranks import read_record

NUM_RANKS = 2
RANK_TO_KILL = 1
PARTS_BEFORE_DEATH = 2
NUM_SAVES = 4
FATAL_SAVE = 3
OTHER_NUM_RANKS = (1, 4)
RUN_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """One demonstration: where it writes, what it trains, and what it found wrong."""

    uri: str
    records: Path
    num_steps: int
    seed: int
    problems: list[str] = field(default_factory=list)

    @property
    def save_every(self) -> int:
        """Steps from one checkpoint to the next."""
        return self.num_steps // NUM_SAVES

    @property
    def fatal_step(self) -> int:
        """The step whose checkpoint is never finished."""
        return FATAL_SAVE * self.save_every

    @property
    def last_good_step(self) -> int:
        """The step that the second start has to find."""
        return self.fatal_step - self.save_every

    def check(self, holds: bool, problem: str) -> None:  # noqa: FBT001 - reads as a sentence
        """Note `problem`, unless what was expected holds."""
        if not holds:
            self.problems.append(problem)
            print(f"    PROBLEM: {problem}", flush=True)

    def run(self, module: str, *arguments: str, name: str, num_ranks: int, device: str) -> int:
        """Run one of the demo's programs under torchrun and return the exit status."""
        return torchrun(
            [
                *("--module", f"examples.demo.{module}", "--name", name),
                *("--records", str(self.records), "--device", device, *arguments),
            ],
            num_ranks=num_ranks,
            log=self.log(name),
            timeout_s=RUN_TIMEOUT_S,
        )

    def train(self, name: str, *arguments: str) -> int:
        """Run the training job."""
        return self.run(
            "train",
            *("--uri", self.uri, "--steps", str(self.num_steps), "--seed", str(self.seed)),
            *arguments,
            name=name,
            num_ranks=NUM_RANKS,
            device=_device_type(NUM_RANKS),
        )

    def log(self, name: str) -> Path:
        """Return the file to which the ranks of a run write their errors."""
        return self.records / f"{name}.log"

    def expect_success(self, name: str, status: int) -> None:
        """Note a problem, with what the ranks said, where a run failed that should not have."""
        self.check(status == 0, f"{name} run: exit status {status}; its log begins with")
        if status != 0:
            print("\n".join(self.log(name).read_text(errors="replace").splitlines()[:40]), flush=True)


def _device_type(num_ranks: int) -> str:
    return "cuda" if torch.cuda.device_count() >= num_ranks else "cpu"


def names_by_device() -> dict[str, list[str]]:
    """Runs whose logits must be equal: those on one kind of device, since CPU and GPU round differently."""
    names: dict[str, list[str]] = defaultdict(list)
    names[_device_type(NUM_RANKS)] += ["undisturbed", "resumed", "host-back"]
    names[_device_type(max(OTHER_NUM_RANKS))] += [f"logits-{n}" for n in OTHER_NUM_RANKS]
    return names


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _heading(text: str) -> None:
    print(f"\n{text}", flush=True)


def train_undisturbed(demo: Demo) -> None:
    """The run that all others are held against. It saves nothing: saving must not change the training."""
    _heading(f"1. For comparison: {demo.num_steps} steps that nothing interrupts, without checkpoints")
    demo.expect_success("undisturbed", demo.train("undisturbed"))


def train_until_killed(demo: Demo) -> None:
    """The same run with checkpoints; one rank dies in the middle of uploading the third."""
    _heading(
        f"2. The same, with a checkpoint every {demo.save_every} steps; "
        f"rank {RANK_TO_KILL} dies while it uploads the {FATAL_SAVE}rd"
    )
    status = demo.train(
        "killed",
        *("--save-every", str(demo.save_every)),
        *("--die-on-rank", str(RANK_TO_KILL), "--die-at-step", str(demo.fatal_step)),
        *("--die-after-parts", str(PARTS_BEFORE_DEATH)),
    )
    demo.check(status != 0, "the run in which a rank dies ended well")
    deaths = read_record(demo.records / f"killed-{RANK_TO_KILL}.jsonl", "killed")
    demo.check(len(deaths) == 1, "no rank was killed in the middle of an upload")
    for death in deaths:
        print(
            f"    rank {RANK_TO_KILL} was killed (SIGKILL) after part {PARTS_BEFORE_DEATH} of "
            f"step-{demo.fatal_step}/{death['key']}"
        )


def look_at_store(demo: Demo) -> None:
    """List the whole checkpoints after the crash, and the save that no reader sees."""
    _heading("3. What lies on the store now")
    committed = cloudckpt.list_checkpoints(demo.uri)
    for info in committed:
        print(f"    {info.name:<8} committed at {info.committed_at:%H:%M:%S}")
    half_written = f"step-{demo.fatal_step}"
    left = open_store(f"{demo.uri}/{half_written}", cloudckpt.Options())
    objects, num_uploads = [info.key for info in left.list()], len(list(left.list_uploads()))
    print(
        f"    {half_written:<8} not a checkpoint: no manifest, "
        f"{_counted(num_uploads, 'unfinished upload')}, {_counted(len(objects), 'finished object')}"
    )
    for death in read_record(demo.records / f"killed-{RANK_TO_KILL}.jsonl", "killed"):
        demo.check(death["key"] not in objects, f"{death['key']} is whole, though its writer died on the way")
    expected = [f"step-{step}" for step in range(demo.save_every, demo.fatal_step, demo.save_every)]
    found = [info.name for info in committed]
    demo.check(found == expected, f"the committed checkpoints are {found}, not {expected}")


def train_again(demo: Demo) -> None:
    """A second start of the same job, which finds its way by itself."""
    _heading("4. The job is started again")
    demo.expect_success("resumed", demo.train("resumed", "--save-every", str(demo.save_every)))
    for rank in range(NUM_RANKS):
        loads = read_record(demo.records / f"resumed-{rank}.jsonl", "loaded")
        found = [load["num_steps_done"] for load in loads]
        demo.check(
            found == [demo.last_good_step],
            f"rank {rank} resumed from steps {found}, not from {demo.last_good_step}",
        )


def load_elsewhere(demo: Demo) -> None:
    """The last checkpoint, resharded by loading it on other numbers of ranks."""
    _heading(
        f"5. The last checkpoint, saved on {NUM_RANKS} ranks, is loaded on "
        + " and on ".join(map(str, OTHER_NUM_RANKS))
    )
    newest = cloudckpt.latest(demo.uri)
    demo.check(newest is not None, "there is no checkpoint to load")
    if newest is None:
        return
    for num_ranks in OTHER_NUM_RANKS:
        # Other weights to begin with: only the checkpoint can make the logits equal.
        seed = demo.seed + num_ranks
        status = demo.run(
            *("logits", "--uri", newest.uri, "--seed", str(seed)),
            name=f"logits-{num_ranks}",
            num_ranks=num_ranks,
            device=_device_type(max(OTHER_NUM_RANKS)),
        )
        demo.expect_success(f"logits-{num_ranks}", status)
        print(f"    {newest.name} on {_counted(num_ranks, 'rank')}", flush=True)


def lose_a_host(demo: Demo) -> None:
    """The same job with a fast place of each host: both ranks die, one host's directory is lost, and both die again."""
    _heading(
        f"6. The same as on two hosts: each rank saves to its own directory every {_counted(demo.save_every, 'step')}, "
        "and sends its part to the store every second time"
    )
    root, fast = f"{demo.uri}/behind-a-fast-place", demo.records / "fast"
    arguments = ("--uri", root, "--fast", str(fast), "--save-every", str(demo.save_every))
    fatal = ("--die-after-save", str(demo.fatal_step))
    for name, expected, die, heading in (
        ("both-killed", [], fatal, f"both ranks are killed after step {demo.fatal_step}"),
        ("disk-lost", [(demo.last_good_step, True)], fatal, "host 1's directory is removed, and the job started again"),
        ("host-back", [(demo.fatal_step, False)], (), "killed again, and started again: both directories are there"),
    ):
        print(f"    {heading}", flush=True)
        if name == "disk-lost":
            shutil.rmtree(fast / "host-1")
        status = demo.train(name, *arguments, *die)
        demo.check((status != 0) == bool(die), f"{name} run: exit status {status}; see {demo.log(name)}")
        lines = read_record(demo.records / f"{name}-1.jsonl", "restored")
        found = [(line["step"], line["num_of_root"] > 0) for line in lines]
        demo.check(found == expected, f"the {name} run resumed from {found}, not from {expected}")


def demonstrate(demo: Demo) -> int:
    """Run all of it, print the table, and return the exit status."""
    began_s = time.perf_counter()
    devices = f"{NUM_RANKS} ranks on {_device_type(NUM_RANKS)}"
    print(f"cloudckpt {cloudckpt.__version__}, torch {torch.__version__}, {devices}, at {demo.uri}")
    try:
        for act in (train_undisturbed, train_until_killed, look_at_store, train_again, load_elsewhere, lose_a_host):
            act(demo)
            if demo.problems:
                break
        else:
            _heading("7. Compared, to the last bit")
            for names in (("killed", "resumed"), ("both-killed", "disk-lost", "host-back")):
                summary.compare_losses(demo.records, names=names, num_steps=demo.num_steps, check=demo.check)
            for names in names_by_device().values():
                summary.compare_logits(demo.records, names=names, check=demo.check)
            summary.print_table(demo.records, num_ranks=NUM_RANKS, other_num_ranks=OTHER_NUM_RANKS)
    except RunTimedOutError as error:
        demo.check(holds=False, problem=str(error))
    elapsed_s = time.perf_counter() - began_s
    if demo.problems:
        print(f"\nFAILED after {elapsed_s:.0f} s: " + "; ".join(demo.problems))
        return 1
    print(f"\nAll equal, in {elapsed_s:.0f} s.")
    return 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--uri",
        help="where to write, under a fresh name: s3://bucket/prefix, gs://…, a path; "
        "without it, an S3 server is started for the demo",
    )
    parser.add_argument("--steps", type=int, default=24, help=f"steps to train, at least {NUM_SAVES} (24)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (0)")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints at --uri, and the logs")
    parsed = parser.parse_args(arguments)
    if parsed.steps < NUM_SAVES:
        parser.error(f"--steps must be at least {NUM_SAVES}, so that there are {NUM_SAVES} checkpoints")
    return parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    args = parse_arguments(arguments)
    records = Path(tempfile.mkdtemp(prefix="cloudckpt-demo-"))
    try:
        with place_for(args.uri, keep=args.keep) as uri:
            return demonstrate(Demo(uri=uri, records=records, num_steps=args.steps, seed=args.seed))
    except cloudckpt.CloudckptError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        if args.keep:
            print(f"The logs stay at {records}")
        else:
            shutil.rmtree(records)


if __name__ == "__main__":
    sys.exit(main())

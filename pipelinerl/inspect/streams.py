"""Looks into a run's streams from outside and does not change them.

python -m pipelinerl.streams tail results/x actor            the last 10 records as JSON, one per line
python -m pipelinerl.streams tail results/x actor --from 0 --follow
python -m pipelinerl.streams tail results/x actor --text     as conversations instead of token ids
python -m pipelinerl.streams stats results/x                 streams, lengths, positions, bytes
python -m pipelinerl.streams verify results/x                damage and whom it matters to. Exit code 1 = damage
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.errors import StreamError, visible
from pipelinerl.inspect.decode import text_or_numbers
from pipelinerl.inspect.reading import look_into, natural
from pipelinerl.inspect.rollouts import rendered, warn_of_numbers
from pipelinerl.inspect.samples import EVALUATED, seen_group
from pipelinerl.inspect.verify import damage_lines
from pipelinerl.inspect.verify import verify as find_damage
from pipelinerl.records import ActorRecord, GroupDropped, OrderResumed
from pipelinerl.records.topics import ACTOR, ACTOR_TEST
from pipelinerl.streams.api import TopicReader, get_streams_backend, open_reader
from pipelinerl.streams.base import StreamStats
from pipelinerl.streams.codec import jsonable
from pipelinerl.streams.spec import SingleStreamSpec

_FOLLOW_S = 0.5
"""Longest wait for a record of one stream while the others are not read."""

Show = Callable[[SingleStreamSpec, int, Any], str]
"""Formats a record, given its stream and its offset, for printing."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    code: int | None = None
    with contextlib.suppress(KeyboardInterrupt), look_into(args.run):
        code = args.command(args)
    return code or 0


def tail(args: argparse.Namespace) -> None:
    """Prints records, with ``--follow`` until interrupted."""
    specs = _matching(args.run, args.topic)
    if not specs and args.follow:
        specs = [_parse_topic(args.run, args.topic) or SingleStreamSpec(args.run, args.topic)]
    if not specs:
        known = ", ".join(map(str, get_streams_backend().specs(args.run))) or "none"
        raise StreamError(f"{args.run} has no stream {args.topic!r}; its streams: {known}")
    show = _text_of_records(args.run, specs) if args.text else _json_of_record
    readers = [_open_at(spec, args.first, args.last, ActorRecord if args.text else Any) for spec in specs]
    try:
        while _print_new(readers, _FOLLOW_S / len(readers) if args.follow else 0.0, show) or args.follow:
            pass
    finally:
        for reader in readers:
            reader.close()


def stats(args: argparse.Namespace) -> None:
    """Prints one row per stream."""
    backend = get_streams_backend()
    found = [backend.stats(spec) for spec in backend.specs(args.run)]
    if args.json:
        print(json.dumps([_as_dict(row) for row in found], indent=2))
        return
    rows = [("stream", "first", "next", "stored", "bytes", "readers: position (behind)"), *map(_as_row, found)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in range(1, 5)), row[5]]
        print("  ".join(cells).rstrip())


def show_damage(args: argparse.Namespace) -> int:
    """Describes damage and whom it matters to, with exit code 1 if there is any."""
    damaged = find_damage(args.run)
    for line in damage_lines(damaged, args.run):
        print(line)
    return 1 if damaged else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pipelinerl streams", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="tail | stats | verify")

    def add(name: str, command: Callable[[argparse.Namespace], int | None]) -> argparse.ArgumentParser:
        subparser = commands.add_parser(name, help=(command.__doc__ or "").rstrip("."))
        subparser.add_argument("run", type=Path, help="the run folder")
        subparser.set_defaults(command=command)
        return subparser

    tail_parser = add("tail", tail)
    tail_parser.add_argument("topic", help="a topic (actor) or one stream of it (training_data/0/1)")
    tail_parser.add_argument("--last", type=natural, default=10, metavar="N", help="records to begin with (10)")
    tail_parser.add_argument(
        "--from", type=natural, dest="first", metavar="OFFSET", help="begin at this record instead"
    )
    tail_parser.add_argument("--text", action="store_true", help="rollouts as conversations (actor, actor_test)")
    tail_parser.add_argument("--follow", "-f", action="store_true", help="go on with new records until interrupted")
    add("stats", stats).add_argument("--json", action="store_true", help="as JSON")
    add("verify", show_damage)
    return parser


def _matching(run_dir: Path, topic: str) -> list[SingleStreamSpec]:
    return [spec for spec in get_streams_backend().specs(run_dir) if topic in (spec.topic, str(spec))]


def _parse_topic(run_dir: Path, text: str) -> SingleStreamSpec | None:
    """Parse `topic/instance/partition`. None if the text has another form."""
    match text.split("/"):
        case [topic, instance, partition] if instance.isdecimal() and partition.isdecimal():
            return SingleStreamSpec(run_dir, topic, int(instance), int(partition))
    return None


def _open_at(spec: SingleStreamSpec, first: int | None, last: int, record_type: Any) -> TopicReader[Any]:
    stored = get_streams_backend().stats(spec)
    wanted = stored.next_offset - max(last, 0) if first is None else first
    return open_reader(spec, record_type, name=None, start=max(stored.first_offset, wanted))


def _json_of_record(spec: SingleStreamSpec, offset: int, record: Any) -> str:
    return json.dumps({"stream": str(spec), "offset": offset, "record": jsonable(record)})


def _text_of_records(run_dir: Path, specs: Sequence[SingleStreamSpec]) -> Show:
    """Return a function that shows groups as conversations, and dropped groups as the reason of the drop."""
    other = next((spec.topic for spec in specs if spec.topic not in (ACTOR, ACTOR_TEST)), None)
    if other is not None:
        raise StreamError(f"--text shows rollouts, which topics {ACTOR} and {ACTOR_TEST} hold, not {other}")
    text = text_or_numbers(run_dir, warn_of_numbers)

    def show(spec: SingleStreamSpec, offset: int, record: Any) -> str:
        if isinstance(record, OrderResumed):
            return f"── new streams from step {record.step} on"
        if isinstance(record, GroupDropped):
            return visible(f"── {record.group_id} dropped: {record.reason}: {record.detail}")
        outcome = EVALUATED if spec.topic == ACTOR_TEST else "published"
        return "\n".join(rendered(seen, text).plain.rstrip("\n") for seen in seen_group(record, outcome))

    return show


def _print_new(readers: list[TopicReader[Any]], timeout_s: float, show: Show) -> bool:
    """Print the new records of each reader. Returns whether there were any."""
    printed = False
    for reader in readers:
        for offset, record in reader.poll(timeout_s):
            print(show(reader.spec, offset, record))
            printed = True
    if printed:
        sys.stdout.flush()
    return printed


def _as_dict(row: StreamStats) -> dict[str, Any]:
    return {
        "stream": str(row.spec),
        "first_offset": row.first_offset,
        "next_offset": row.next_offset,
        "size_bytes": row.size_bytes,
        "positions": row.positions,
    }


def _as_row(row: StreamStats) -> tuple[str, ...]:
    readers = (f"{name}: {position} ({row.next_offset - position})" for name, position in row.positions.items())
    numbers = (row.first_offset, row.next_offset, row.next_offset - row.first_offset, row.size_bytes)
    return (str(row.spec), *(f"{number:,}" for number in numbers), ", ".join(readers))

"""Exports a run's metrics to Prometheus on one port: `python -m pipelinerl.inspect.exporter RUN [--port 9400]`.

Reads the run folder when it is scraped. `--scrape-config` and `--dashboard` print the documents for Prometheus and
Grafana.

    pipelinerl_<role>_<metric>                    the newest value
    pipelinerl_<role>_<metric>{metric}            the same, where other characters than a-z, A-Z, 0-9 and _ are written
                                                  as _. The label has the metric's own name
    pipelinerl_heartbeat_age_seconds{job}         since the role's last sign of life
    pipelinerl_waiting_seconds{job,on}            how long the role has waited, for whom
    pipelinerl_member{name,state}                 1 for every lease
"""

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from pipelinerl.config.load import load_run
from pipelinerl.config.paths import METRICS
from pipelinerl.errors import told_in_one_line
from pipelinerl.inspect.reading import port_number
from pipelinerl.inspect.report import read_metrics_tail
from pipelinerl.membership.address import address_of, open_store
from pipelinerl.membership.stores import LeaseStore, StoreAwayError
from pipelinerl.observability.catalogue import STEP, TIME, ActorMetric, Metric, PreprocessorMetric, TrainerMetric
from pipelinerl.observability.status import read_statuses

PREFIX = "pipelinerl"
NOT_VALUES = (STEP, TIME)
PANELS: tuple[tuple[str, str, tuple[Metric | str, ...]], ...] = (
    ("Success and reward", "none", (ActorMetric.SUCCESS, ActorMetric.REWARD, ActorMetric.EVAL_SUCCESS)),
    ("Tokens per second", "none", (ActorMetric.TOKENS_GENERATED_PER_S, PreprocessorMetric.TOKENS_PER_S)),
    ("Lag in steps", "none", (TrainerMetric.LAG_MEAN, TrainerMetric.LAG_MAX)),
    ("Where the trainer's time goes", "s", (TrainerMetric.STEP_S, TrainerMetric.WAIT_S, TrainerMetric.PUSH_WAIT_S)),
    ("Pause of decoding per update", "ms", (TrainerMetric.PAUSE_MS,)),
    ("Loss, gradient norm, entropy", "none", (TrainerMetric.LOSS, TrainerMetric.GRAD_NORM, TrainerMetric.ENTROPY)),
    ("Rollouts under way", "none", (ActorMetric.ROLLOUTS_UNDER_WAY,)),
    ("Who waits, and how long", "s", ("waiting_seconds",)),
    ("Sign of life, seconds ago", "s", ("heartbeat_age_seconds",)),
    ("Members", "none", ("member",)),
)
"""Title, unit and what each panel shows: metrics of roles, and gauges of this exporter without their prefix."""


class RunCollector(Collector):
    """Collects the metrics, statuses and leases of one run at the time of the scrape."""

    def __init__(self, run_dir: Path, store: LeaseStore):
        self._run_dir, self._store = run_dir, store

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield from self._metrics()
        yield from self._roles()
        yield self._members()

    def _metrics(self) -> Iterator[GaugeMetricFamily]:
        for path in sorted((self._run_dir / METRICS).glob("*.jsonl")):
            point = read_metrics_tail(self._run_dir, path.stem) or {}
            given = {name: value for name, value in point.items() if is_value(name, value)}
            families: dict[str, GaugeMetricFamily] = {}
            for name, value in sorted((given | {STEP: point.get(STEP, 0)}).items()):
                exported = metric_name(path.stem, name)
                family = families.setdefault(exported, GaugeMetricFamily(exported, "docs/metrics.md"))
                family.add_sample(exported, {} if exported.endswith(f"_{name}") else {"metric": name}, float(value))
            yield from families.values()

    def _roles(self) -> Iterator[GaugeMetricFamily]:
        now, statuses = time.time(), read_statuses(self._run_dir)
        ages = GaugeMetricFamily(f"{PREFIX}_heartbeat_age_seconds", "since the last sign of life", labels=["job"])
        waits = GaugeMetricFamily(f"{PREFIX}_waiting_seconds", "length of the oldest wait", labels=["job", "on"])
        for name, status in statuses.items():
            if status.state == "running":
                ages.add_metric([name], now - status.heartbeat)
                if status.waits:
                    waits.add_metric([name, status.waits[0].on or ""], now - status.waits[0].since)
        yield from (ages, waits)

    def _members(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{PREFIX}_member", "1 for every lease", labels=["name", "state"])
        try:
            leases = self._store.leases()
        except StoreAwayError:
            leases = {}
        for lease in leases.values():
            family.add_metric([lease.name, lease.state], 1.0)
        return family


def metric_name(role: str, name: str) -> str:
    """Return a metric's name in the characters that Prometheus allows."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", f"{PREFIX}_{role}_{name}")


def gauge(shown: Metric | str) -> str:
    """Return the exported name of what a panel shows."""
    return metric_name(shown.role, shown) if isinstance(shown, Metric) else f"{PREFIX}_{shown}"


def is_value(name: str, value: Any) -> bool:
    return name not in NOT_VALUES and isinstance(value, int | float)


def scrape_config(port: int, run: str) -> str:
    """Return the job for `scrape_configs` of Prometheus as YAML. `run` is the value of the job's label."""
    import yaml

    target = {"targets": [f"localhost:{port}"], "labels": {"run": run}}
    job = {"job_name": PREFIX, "scrape_interval": "10s", "static_configs": [target]}
    return yaml.safe_dump({"scrape_configs": [job]}, sort_keys=False)


def dashboard() -> str:
    """Return the dashboard for Grafana's import as JSON."""
    panels = [
        {
            "id": index + 1,
            "type": "timeseries",
            "title": title,
            "gridPos": {"h": 8, "w": 12, "x": 12 * (index % 2), "y": 8 * (index // 2)},
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + place), "expr": f'{gauge(shown)}{{run=~"$run"}}'}
                for place, shown in enumerate(contents)
            ],
        }
        for index, (title, unit, contents) in enumerate(PANELS)
    ]
    choices = [
        {"name": "source", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${source}"},
            "query": f"label_values({PREFIX}_heartbeat_age_seconds, run)",
            "includeAll": True,
            "multi": True,
        },
    ]
    document = {
        "title": "PipelineRL",
        "uid": PREFIX,
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": choices},
        "panels": panels,
    }
    return json.dumps(document, indent=2) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pipelinerl exporter", description="A run's figures for Prometheus, until interrupted."
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--port", type=port_number, default=9400, help="on --host (default: %(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--scrape-config", action="store_true", help="print what Prometheus is given, and end")
    parser.add_argument("--dashboard", action="store_true", help="print the dashboard for Grafana, and end")
    args = parser.parse_args(argv)
    run_dir = args.run.resolve()
    if args.scrape_config or args.dashboard:
        print(scrape_config(args.port, run_dir.name) if args.scrape_config else dashboard(), end="")
        return 0
    store = open_store(address_of(load_run(run_dir), run_dir))
    registry = CollectorRegistry()
    registry.register(RunCollector(run_dir, store))
    server, thread = start_http_server(args.port, args.host, registry)
    print(f"http://{args.host}:{server.server_port}/metrics", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        server.shutdown()
        thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(told_in_one_line(main))

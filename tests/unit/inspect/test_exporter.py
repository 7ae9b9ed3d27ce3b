"""What Prometheus scrapes, and what it and Grafana are given."""

import json
import time
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from pipelinerl.inspect.exporter import PANELS, RunCollector, dashboard, gauge, main
from pipelinerl.membership.lease import Lease
from pipelinerl.membership.stores import FolderStore
from pipelinerl.observability.status import StatusRecord, Wait, write_status


def scrape(run_dir: Path) -> dict[str, dict[tuple[str, ...], float]]:
    """Metric → label values → value, through a real scrape."""
    registry = CollectorRegistry()
    registry.register(RunCollector(run_dir, FolderStore(run_dir)))
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    return {family.name: {tuple(s.labels.values()): s.value for s in family.samples} for family in families}


def test_scrape_has_the_newest_point_of_every_role_the_waits_and_the_members(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    points = [{"step": 6, "loss": 0.5}, {"step": 7, "loss": 0.25, "time": 1.0, "name": "text"}]
    (tmp_path / "metrics" / "finetune.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    (tmp_path / "metrics" / "actor.jsonl").write_text(json.dumps({"step": 7, "eval/success": 0.75}) + "\n")
    now = time.time()
    (tmp_path / "status").mkdir()
    status = StatusRecord(
        job="actor_0",
        state="running",
        pid=1,
        hostname="h",
        started=now,
        heartbeat=now - 5,
        progress_at=now,
        progress_count=0,
        waits=(Wait(what="weights", on="finetune_0", since=now - 9),),
        fields={},
    )
    write_status(tmp_path / "status" / "actor_0.json", status)
    FolderStore(tmp_path).overwrite(Lease(name="actor_llm_3", incarnation="x", ttl_s=9, state="draining"))
    found = scrape(tmp_path)
    assert found["pipelinerl_finetune_loss"] == {(): 0.25}
    assert found["pipelinerl_finetune_step"] == {(): 7.0}
    assert found["pipelinerl_actor_eval_success"] == {("eval/success",): 0.75}
    assert found["pipelinerl_heartbeat_age_seconds"][("actor_0",)] == pytest.approx(5, abs=3)
    assert found["pipelinerl_waiting_seconds"][("actor_0", "finetune_0")] == pytest.approx(9, abs=3)
    assert found["pipelinerl_member"] == {("actor_llm_3", "draining"): 1.0}
    assert not [name for name in found if name.endswith(("_time", "_name"))]


def test_data_sets_that_prometheus_would_write_alike_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    names = ["eval/a-b/success", "eval/a.b/success", "eval/a/b/success", "eval/a_b/success", 'eval/a"\\/success']
    names += ["数学/success", "物理/success"]
    point = {"step": 1} | {name: float(place) for place, name in enumerate(names)}
    (tmp_path / "metrics" / "actor.jsonl").write_text(json.dumps(point) + "\n")
    found = scrape(tmp_path)
    assert found["pipelinerl_actor_eval_a_b_success"] == {(name,): float(names.index(name)) for name in names[:4]}
    assert found["pipelinerl_actor_eval_a___success"] == {(names[4],): 4.0}
    assert found["pipelinerl_actor____success"] == {("数学/success",): 5.0, ("物理/success",): 6.0}


def test_run_that_has_said_nothing_yet_can_be_scraped(tmp_path: Path) -> None:
    assert all(not samples for samples in scrape(tmp_path).values())


def test_dashboard_shows_the_names_that_are_exported() -> None:
    shown = [gauge(content) for _, _, contents in PANELS for content in contents]
    assert {"pipelinerl_actor_eval_success", "pipelinerl_finetune_lag_mean", "pipelinerl_member"} <= set(shown)
    assert all(f'"expr": "{name}{{run' in dashboard() for name in shown)


def test_prometheus_and_grafana_documents_are_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["/runs/guess", "--scrape-config", "--port", "9401"]) == 0
    (job,) = yaml.safe_load(capsys.readouterr().out)["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:9401"], "labels": {"run": "guess"}}]
    assert main(["/runs/guess", "--dashboard"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [panel["title"] for panel in document["panels"]] == [title for title, _, _ in PANELS]
    assert len({panel["id"] for panel in document["panels"]}) == len(PANELS)

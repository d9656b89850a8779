"""The doctor: what is well, what is missing, what will fail, each with its way out."""

from __future__ import annotations

import http.server
import sys
import threading

import pytest

from adaptive_platform.cli import main
from adaptive_platform.cluster import doctor
from adaptive_platform.cluster.doctor import Finding, examine


def found(address=None, out="runs") -> dict[str, Finding]:
    return {finding.what: finding for finding in examine(address, out)}


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No cluster, token or service of this machine's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_PROMETHEUS_HOST", "http://127.0.0.1:9")
    monkeypatch.setenv("RAY_GRAFANA_HOST", "http://127.0.0.1:9")


def test_a_healthy_machine_leaves_nothing_behind(tmp_path):
    findings = found()
    assert [f for f in findings.values() if f.state == "bad"] == []
    assert "torch" in findings["torch"].found
    assert "Ray 2" in findings["Ray"].found
    assert "GiB free" in findings["run directory"].found
    assert findings["Prometheus"].state == "note"
    assert "RAY_PROMETHEUS_HOST" in findings["Prometheus"].fix
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_does_not_answer():
    finding = found(address="127.0.0.1:9")["cluster"]
    assert finding.state == "bad"
    assert "nobody answers" in finding.found
    assert "ray start --head" in finding.fix


def test_a_directory_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    finding = found(out=f"{tmp_path}/file/runs")["run directory"]
    assert finding.state == "bad"
    assert "out=DIR" in finding.fix
    assert found(out="nowhere://x")["run directory"].state == "bad"


@pytest.mark.parametrize(
    ("mode", "token", "state"),
    [("token", "", "bad"), ("token", "secret", "ok"), ("disabled", "", "note"), ("", "", "note")],
)
def test_authentication(mode, token, state, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    assert found()["authentication"].state == state


def test_a_host_name_that_does_not_resolve(monkeypatch):
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "no.such.host.invalid")
    finding = found()["host name"]
    assert finding.state == "bad"
    assert "/etc/hosts" in finding.fix


def test_a_service_that_answers(monkeypatch):
    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/-/ready" else 404)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("RAY_PROMETHEUS_HOST", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("RAY_GRAFANA_HOST", f"http://127.0.0.1:{server.server_port}/")
    findings = found()
    server.shutdown()
    assert findings["Prometheus"].state == "ok"
    assert "answers 404" in findings["Grafana"].found


def test_the_command_ends_with_1_where_runs_will_fail(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys, "argv", ["adaptive-platform", "doctor", "--out", "file/runs"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    said = capsys.readouterr().out
    assert "bad  run directory" in said
    assert "→ choose another with out=DIR" in said

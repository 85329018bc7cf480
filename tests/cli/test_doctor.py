"""`jfsdp doctor`: what is printed, and the exit status."""

import json

import pytest

from jfsdp.cli import main
from tests.cli.refused import refused
from tests.refusals import check_facts


@pytest.fixture(autouse=True)
def in_order(monkeypatch):
    """A machine that nobody would object to, wherever the tests run; the tests' own XLA flags are notes."""
    monkeypatch.setattr("jfsdp.plan.cluster.doctor.has_nvidia_driver", lambda: False)
    monkeypatch.setattr("jfsdp.plan.cluster.doctor.has_infiniband", lambda: False)
    for name in ("NCCL_P2P_DISABLE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


def test_notes_alone_leave_the_status_at_zero(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["doctor"]) == 0
    check_facts(capsys.readouterr().out, "OK  for CPU: 0 problems", "jaxlib", "cpu: 8 x cpu", "\nnote: ")


def test_a_problem_is_status_one_with_its_remedy(monkeypatch, capsys):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert main(["doctor"]) == 1
    check_facts(
        out := capsys.readouterr().out, "NOT OK  for CPU: 1 problem,", "\nproblem: ", "NCCL_P2P_DISABLE", "unset it"
    )
    assert out.count("\nproblem: ") == 1


def test_flags_that_end_jax_do_not_end_the_doctor(monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "--xla_no_such_flag=1" in report["findings"][0]["text"]
    assert report["backend"] == "cpu"


def test_one_process_alone_is_examined_as_a_run_of_several(capsys, tmp_path):
    assert main(["doctor", "--processes", "--mesh", "replica=2,fsdp=4", "--run-dir", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(link["axis"], link["size"], link["crosses"]) for link in found["links"]] == [
        ("replica", 2, "nothing"),
        ("fsdp", 4, "nothing"),
    ]
    assert main(["doctor", "--processes", "--mesh", "fsdp=3"]) == 2 and "3" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--mesh", "fsdp=8"], ["--run-dir", "."], ["--timeout", "60"]])
def test_what_is_for_several_processes_is_refused_without_them(option, capsys):
    check_facts(refused(capsys, "doctor", *option), option[0], "--processes")

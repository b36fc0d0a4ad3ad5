"""Provenance: what is named, which variables are kept, and what nvidia-smi's answer becomes."""

import subprocess
from types import SimpleNamespace

import torch

from validate import machine
from validate.machine import GPU_FIELDS, GpuReading


def test_a_cpu_names_libraries_and_only_the_variables_that_matter(monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("SOME_PASSWORD", "x")
    found = machine.machine(torch.device("cpu"))
    assert found["torch"] == torch.__version__
    assert found["environment"]["NCCL_P2P_DISABLE"] == "1"
    assert "SOME_PASSWORD" not in found["environment"]
    assert not {"gpu", "cuda", "nccl"} & set(found)


def read(monkeypatch, start):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(machine.subprocess, "Popen", start)
    return GpuReading(torch.device("cuda")).values()


def test_readings_are_named_by_their_fields(monkeypatch):
    values = ["580.1", "1980", "3201", "1980", "650.5", "700.00", "45"]
    popen = subprocess.Popen
    asked = []

    def start(command, **options):
        asked.append(command)
        return popen(["echo", ", ".join(values)], **options)

    assert read(monkeypatch, start) == dict(zip(GPU_FIELDS, values, strict=True))
    assert asked[0][-2:] == ["-i", "GPU-1-2"]


def test_without_an_answer_there_are_no_readings(monkeypatch):
    popen = subprocess.Popen

    def missing(command, **options):
        raise FileNotFoundError

    assert read(monkeypatch, missing) == {}
    assert read(monkeypatch, lambda command, **options: popen(["false"], **options)) == {}

"""The recorded CUDA steps as operations, arguments flat as they were recorded."""

import gzip
import json
from pathlib import Path

from perfmodel.trace.operation import Operation, TensorSpec
from tests.places import TESTS

STEPS = sorted((TESTS / "data" / "cuda_steps").glob("*.json.gz"))
HOST_ONLY = frozenset(
    [
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "detach",
        "alias",
        "expand",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "split",
        "as_strided",
        "as_strided_",
        "permute",
        "lift_fresh",
        "empty",
        "_local_scalar_dense",
    ]
)


def _argument(value: object) -> object:
    if isinstance(value, dict):
        return TensorSpec(tuple(value["shape"]), tuple(value["stride"]), value["dtype"], value["device"])
    return value


def recorded_operations(path: Path) -> list[Operation]:
    """Every operator of the step that launches kernels."""
    rows = json.loads(gzip.decompress(path.read_bytes()))["ops"]
    operations = [
        Operation(row["op"], tuple(map(_argument, row["in"])), (), tuple(map(_argument, row["out"])))
        for row in rows
        if row["op"].startswith("aten.") and row["op"].split(".")[1] not in HOST_ONLY
    ]
    return [op for op in operations if not op.input_tensors() or any(t.device == "cuda" for t in op.input_tensors())]

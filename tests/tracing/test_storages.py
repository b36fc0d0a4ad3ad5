"""The ledger of storages: births, deaths and what they hold."""

import gc

import pytest
import torch

from perfmodel.trace.trace import EventKind, Storage, StorageKind
from perfmodel.tracing.storages import StorageLedger, Touches, has_one_owner, is_dense, touched_bytes


@pytest.fixture
def ledger():
    events = []
    gc.disable()
    made = StorageLedger(lambda kind, a, b=0: events.append((kind, a, b)))
    made.events = events
    yield made
    made.close()
    gc.enable()


def test_a_storage_is_allocated_once_and_freed_with_its_last_view(ledger):
    tensor = torch.zeros(10)
    ledger.note_output(tensor, in_forward=True)
    view = tensor[2:]
    ledger.note_output(view, in_forward=True)
    del tensor
    assert ledger.events == [(EventKind.ALLOC, 0, 40)]
    del view
    assert ledger.events == [(EventKind.ALLOC, 0, 40), (EventKind.FREE, 0, 0)]


def test_empty_storages_are_no_allocations(ledger):
    ledger.note_output(torch.zeros(0), in_forward=False)
    assert ledger.events == []


def test_persistent_storages_are_numbered_once(ledger):
    weight, labels = torch.zeros(4), torch.zeros(2, dtype=torch.int64)
    assert ledger.add_persistent(weight, StorageKind.PARAMETER) == 0
    assert ledger.add_persistent(weight.view(2, 2), StorageKind.PARAMETER) == 0
    assert ledger.add_persistent(labels, StorageKind.INPUT) == 1
    assert ledger.persistent == [Storage(0, 16, StorageKind.PARAMETER), Storage(1, 16, StorageKind.INPUT)]
    assert ledger.events == []


def test_what_forward_leaves_is_an_activation(ledger):
    kept, freed, later = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    ledger.note_output(kept, in_forward=True)
    ledger.note_output(freed, in_forward=True)
    del freed
    ledger.end_forward()
    ledger.note_output(later, in_forward=False)
    assert ledger.kinds == {0: StorageKind.ACTIVATION, 1: StorageKind.TEMPORARY, 2: StorageKind.TEMPORARY}
    ledger.mark(later, StorageKind.GRADIENT)
    assert ledger.kinds[2] == StorageKind.GRADIENT


def test_one_owner():
    tensor = torch.zeros(4)
    assert has_one_owner(tensor)
    view = tensor[1:]
    assert not has_one_owner(tensor)
    del view
    assert has_one_owner(tensor)


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(2, 3)[:, :2], False),
        (torch.zeros(3).expand(2, 3), False),
        (torch.zeros(2, 1, 3).transpose(0, 2), True),
        (torch.zeros(()), True),
    ],
)
def test_density(tensor, dense):
    assert is_dense(tensor) == dense


def test_touched_bytes_by_storage(ledger):
    table, other, unknown = torch.zeros(10, 4), torch.zeros(3), torch.zeros(5)
    ledger.add_persistent(table, StorageKind.PARAMETER)
    ledger.add_persistent(other, StorageKind.PARAMETER)
    rows, columns = table[2:4], table[:, :2]
    expanded = other[:1].expand(100, 1)
    assert touched_bytes([expanded, unknown, rows, rows, table[2:4]], ledger.find) == {1: 4, 0: 32}
    assert touched_bytes([rows, columns], ledger.find) == {0: 32 + 80}
    assert touched_bytes([table, table.t(), columns], ledger.find) == {0: 160}  # never more than there is


def test_touches_as_columns():
    touches = Touches()
    touches.add(1, {7: 40, 3: 8})
    touches.add(4, {})
    touches.add(5, {7: 4})
    offsets, storages, sizes = touches.columns(7)
    assert (offsets.tolist(), storages.tolist(), sizes.tolist()) == ([0, 0, 2, 2, 2, 2, 3, 3], [7, 3, 7], [40, 8, 4])

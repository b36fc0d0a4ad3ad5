"""What is too large to be predicted is refused with its number, before it is simulated."""

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.hardware.profile import find_profile, load_profile
from perfmodel.prediction.predict import predict
from perfmodel.program import size
from perfmodel.program.program import single_device_program
from perfmodel.program.ranks import rank_programs
from perfmodel.program.size import size_of, within_limits
from perfmodel.scenario.scenario import Scenario
from perfmodel.scenario.yaml_file import load_question
from perfmodel.trace.trace import EventKind
from tests.places import ROOT

SHIPPED = ROOT / "scenarios"


def refusal(name, *assignments):
    asked = load_question(SHIPPED / f"{name}.yaml", assignments)
    with pytest.raises(PerfModelError) as caught:
        predict(*asked)
    return str(caught.value)


def test_a_repeated_segment_counts_as_often_as_it_runs():
    scenario, _ = load_question(SHIPPED / "bert-large-accumulation.yaml")
    (ranks,) = rank_programs(scenario)
    instructions = ranks.program.instructions
    is_made = instructions.kind == EventKind.ALLOC
    assert size_of(ranks.program) == (len(instructions.launches), int(instructions.b[is_made].sum()))
    trace = ranks.program.trace
    counts = [size_of(single_device_program(trace, count)).operators for count in (2, 3, 4)]
    assert counts[2] - counts[1] == counts[1] - counts[0] > 0


def test_many_micro_batches_are_refused_before_they_are_simulated(monkeypatch):
    monkeypatch.setattr("perfmodel.prediction.simulated_step.costed_ranks", None)
    monkeypatch.setattr(size, "MOST_OPERATORS", 4_000_000)
    text = refusal("bert-large-accumulation", "training.gradient_accumulation=1024")
    assert "at most 4,000,000 operators" in text and "fewer micro-batches" in text


def test_ranks_that_differ_count_together(monkeypatch):
    scenario, _ = load_question(SHIPPED / "gpt2.7b-1f1b.yaml")
    first, second = (size_of(each.program).operators for each in rank_programs(scenario))
    monkeypatch.setattr(size, "MOST_OPERATORS", first + second - 1)
    with pytest.raises(PerfModelError, match=f"got {first + second:,} in the programs of 2 ranks"):
        rank_programs(scenario)
    monkeypatch.setattr(size, "MOST_OPERATORS", first + second)
    assert len(rank_programs(scenario)) == 2


def test_one_program_too_large_ends_the_rest(monkeypatch):
    monkeypatch.setattr(size, "MOST_OPERATORS", 4_000_000)
    (ranks,) = rank_programs(load_question(SHIPPED / "bert-large-accumulation.yaml")[0])

    def programs():
        yield single_device_program(ranks.program.trace, 1024)
        raise AssertionError("the second is not asked for")

    with pytest.raises(PerfModelError, match="operators"):
        within_limits(programs())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 10**6}, "model.layers must be at most 1,024 (got 1,000,000)"),
        ({"width": 10**7, "ffn_width": 10**7, "vocabulary": 10**7}, "at most 1e+13 parameters"),
    ],
)
def test_models_beyond_any_device(changes, said):
    model = {"family": "gpt", "layers": 1, "width": 64, "heads": 1, "ffn_width": 64, "vocabulary": 100, **changes}
    data = {"model": model, "batch": {"size": 1, "sequence_length": 8}, "hardware": {"profile": "h200-sxm-x4"}}
    with pytest.raises(PerfModelError) as caught:
        predict(Scenario.model_validate(data), load_profile(find_profile("h200-sxm-x4")))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("size_of_batch", "length", "said"),
    [(16, 10**7, "bytes in all"), (10**7, 10**7, "smaller than 2^63 bytes")],
)
def test_tensors_beyond_any_device(size_of_batch, length, said):
    model = {"family": "gpt", "layers": 1, "width": 1024, "heads": 1024, "ffn_width": 64, "vocabulary": 10**7}
    batch = {"size": size_of_batch, "sequence_length": length}
    data = {"model": model, "batch": batch, "hardware": {"profile": "h200-sxm-x4"}}
    with pytest.raises(PerfModelError) as caught:
        predict(Scenario.model_validate(data), load_profile(find_profile("h200-sxm-x4")))
    assert said in str(caught.value)


def test_large_models_are_no_question_too_large():
    """96 layers, 64 micro-batches, three kinds of ranks: twelve times what the 24 layers of a shipped trace run."""
    (ranks,) = rank_programs(load_question(SHIPPED / "bert-large-accumulation.yaml")[0])
    assert 10**6 < 12 * size_of(single_device_program(ranks.program.trace, 64)).operators < size.MOST_OPERATORS

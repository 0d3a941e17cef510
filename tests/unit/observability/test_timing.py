import pytest

from megatron_dapo.observability.timing import PhaseTimer


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_and_other_sum_to_the_step() -> None:
    clock = FakeClock()
    timer = PhaseTimer(clock)
    for phase, inside, outside in [("gen", 6.0, 0.5), ("update_actor", 3.0, 0.25), ("gen", 2.0, 0)]:
        with timer.phase(phase):
            clock.now += inside
        clock.now += outside
    assert timer.values() == {
        "timing_s/gen": 8.0,
        "timing_s/update_actor": 3.0,
        "timing_s/other": 0.75,
        "timing_s/step": 11.75,
    }


def test_a_phase_that_fails_is_counted_and_ended() -> None:
    clock = FakeClock()
    timer = PhaseTimer(clock)
    with pytest.raises(ValueError, match="broken"), timer.phase("gen"):
        clock.now += 2.0
        raise ValueError("broken")
    with timer.phase("gen"):
        clock.now += 1.0
    assert timer.phases() == {"timing_s/gen": 3.0}


def test_nested_phases_are_refused_so_that_no_second_counts_twice() -> None:
    timer = PhaseTimer(FakeClock())
    with (
        timer.phase("gen"),
        pytest.raises(AssertionError, match="'reward' starts inside phase 'gen'"),
        timer.phase("reward"),
    ):
        pass


def test_the_real_clock_adds_up() -> None:
    timer = PhaseTimer()
    with timer.phase("gen"):
        sum(range(100_000))
    values = timer.values()
    assert 0 < values["timing_s/gen"] <= values["timing_s/step"]
    assert values["timing_s/gen"] + values["timing_s/other"] == pytest.approx(
        values["timing_s/step"], rel=1e-6
    )

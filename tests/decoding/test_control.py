import pytest

from pipeline.decoding.control import Bucket, ControlClock, bucket_of, count_buckets


def test_buckets_grow_by_half_an_octave() -> None:
    assert bucket_of(1, 512) == bucket_of(1, 724) == (1, 18)
    assert bucket_of(1, 725) == bucket_of(1, 1023) == (1, 19)
    assert bucket_of(2, 512) != bucket_of(1, 512)
    assert [bucket_of(n, 1).occupancy for n in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert bucket_of(1, 1) == bucket_of(1, 0) == (1, 0)
    assert count_buckets(1022, 4) == {(1, 19): 2, (1, 20): 2}
    assert count_buckets(10, 0) == {}


def test_too_little_evidence_is_unknown() -> None:
    clock, bucket = ControlClock(), bucket_of(1, 100)
    for seconds in (1.0, 2.0):
        clock.record_control(bucket, seconds)
        assert clock.plain_seconds(bucket, 1) is None
    clock.record_control(bucket, 6.0)
    assert clock.plain_seconds(bucket, 1) == 3.0
    assert clock.plain_row_seconds({bucket: 10}, {}) == 30.0
    assert clock.plain_row_seconds({bucket: 10, bucket_of(1, 900): 1}, {}) is None
    assert clock.plain_row_seconds({}, {}) == 0.0


def test_a_rows_own_control_steps_count_as_they_were() -> None:
    clock, bucket = ControlClock(), bucket_of(1, 100)
    for seconds in (1.0, 2.0, 3.0, 6.0):
        clock.record_control(bucket, seconds)
    assert clock.plain_row_seconds({bucket: 2}, {bucket: [1.0, 6.0]}) == 7.0
    assert clock.plain_row_seconds({bucket: 5}, {bucket: [1.0, 6.0]}) == 7.0 + 3 * 3.0


def test_a_rows_share_of_a_step_is_by_occupancy() -> None:
    clock, bucket = ControlClock(), bucket_of(4, 100)
    for _ in range(3):
        clock.record_control(bucket, 2.0, occupancy=4)
    clock.record_control(bucket_of(3, 100), 1.5, occupancy=3)
    assert clock.plain_seconds(bucket, 4) == 0.5


@pytest.mark.parametrize(("own", "expected"), [(0, 1.0), (32, 1.0), (64, 2.0)])
def test_recent_steps_count_and_all_of_the_rows_own(own: int, expected: float) -> None:
    clock, bucket = ControlClock(), bucket_of(1, 100)
    for seconds in [99.0] + [3.0] * 32 + [1.0] * 32:
        clock.record_control(bucket, seconds)
    assert clock.plain_seconds(bucket, own) == expected


def test_control_steps_are_rare_once_known_and_spread_before() -> None:
    clock, bucket, other = ControlClock(), bucket_of(1, 100), bucket_of(1, 200)

    def controls(here: Bucket, count: int) -> list[int]:
        """Which of `count` steps in a bucket are control steps."""
        found = []
        for step in range(1, count + 1):
            if clock.wants_control(here):
                clock.record_control(here, 1.0)
                found.append(step)
            else:
                clock.record_drafted(here, 1, 1.0)
        return found

    assert controls(bucket, 80) == [4, 8, 12, 44, 76]
    assert controls(other, 40) == [1, 5, 9]  # four drafted steps lie before the first


def test_steps_that_happen_to_have_no_drafts_are_evidence_too() -> None:
    clock, bucket = ControlClock(), bucket_of(1, 100)
    for _ in range(3):
        clock.record_control(bucket, 1.0)
    for _ in range(30):
        clock.record_drafted(bucket, 1, 1.0)
    clock.record_control(bucket, 1.0)  # nothing found to draft
    assert not clock.wants_control(bucket)


def test_control_steps_cost_a_hundredth_at_most() -> None:
    """The better the drafts, the dearer a step without: such steps become rarer."""
    clock, bucket = ControlClock(), bucket_of(1, 100)
    seconds = lost = 0.0
    for step in range(4_000):
        if clock.wants_control(bucket):
            clock.record_control(bucket, 1.0)
            seconds += 1.0
            if step > 12:  # the first three are needed to know anything
                lost += 1.0 - 1.0 / 5
        else:
            clock.record_drafted(bucket, 5, 1.0)
            seconds += 1.0
    assert 0.008 * seconds < lost <= 0.01 * seconds + 1

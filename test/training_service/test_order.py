"""Requests in order, and jobs that are done together."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrl_agents.training_service.device_thread import DeviceJob, DeviceThread
from torchrl_agents.training_service.errors import RefusedRequest
from torchrl_agents.training_service.in_order import InOrder


@given(st.permutations(range(1, 8)))
def test_whatever_the_order_in_which_they_come(numbers):
    in_order, done = InOrder(), []
    for count, number in enumerate(numbers, 1):
        in_order(number, lambda number=number: done.append(number))
        came = set(numbers[:count])
        expected = next(n for n in range(1, 9) if n not in came) - 1
        assert done == list(range(1, expected + 1))


def test_a_number_is_given_once():
    in_order = InOrder()
    in_order(1, lambda: None)
    in_order(3, lambda: None)
    for number in (1, 3):
        with pytest.raises(
            RefusedRequest, match=f"seq_id {number} was given before; the next is 2"
        ):
            in_order(number, lambda: None)


class Recorder:
    """A device whose first job waits until it is let go."""

    def __init__(self, max_together):
        self.device = DeviceThread(max_together)
        self.runs, self.begin = [], threading.Event()
        self.submit("first", None)

    def submit(self, name, together, size=1):
        def run(jobs):
            self.begin.wait()
            self.runs.append([job.payload for job in jobs])
            return [
                ValueError(job.payload) if job.payload == "bad" else job.payload for job in jobs
            ]

        job = DeviceJob(run, payload=name, together=together, size=size)
        self.device.submit(job)
        return job

    def finish(self):
        self.begin.set()
        self.device.close()
        return self.runs


def test_jobs_that_go_together_are_done_at_once_within_the_bound():
    recorder = Recorder(max_together=4)
    jobs = [recorder.submit(*args) for args in (("a", "x", 2), ("train", None), ("b", "x", 3))]
    jobs += [recorder.submit(*args) for args in (("c", "x", 2), ("d", "y"), ("bad", "y"))]
    jobs[4].cancel()
    recorder.begin.set()
    told = [job.result.result(10) for job in jobs[:4]]
    with pytest.raises(ValueError, match="bad"):
        jobs[5].result.result(10)
    assert told == ["a", "train", "b", "c"]
    # b would be too much beside a, c fits; "d" was cancelled.
    assert recorder.finish() == [["first"], ["a", "c"], ["train"], ["b"], ["bad"]]


def test_an_error_is_of_all_that_were_done_at_once_and_the_thread_goes_on():
    device = DeviceThread(8)

    def fail(jobs):
        raise OSError("the device is gone")

    first = DeviceJob(fail)
    device.submit(first)
    second = DeviceJob(lambda jobs: [len(jobs)])
    device.submit(second)
    with pytest.raises(OSError, match="gone"):
        first.result.result(10)
    assert second.result.result(10) == 1
    device.close()
    with pytest.raises(RuntimeError, match="about to end"):
        device.submit(DeviceJob(fail))

"""The pretended device counts what makes a host wait for a real one, and nothing else."""

import pytest
import torch


def test_what_reads_a_value_waits(device_waits):
    with device_waits.DeviceWaits() as waits:
        x = torch.arange(4.0).to(device_waits.FAR, non_blocking=True)
        y = (2 * x)[1:].cumsum(0)
        assert y.device == device_waits.FAR
        assert waits.num_waits == 0
        assert y.tolist() == [2.0, 6.0, 12.0]
        assert y[0].item() == 2.0
        assert bool(y.isfinite().all())
        assert y.cpu().device.type == "cpu"
        assert waits.waits == {"read": 2, "item": 2}


@pytest.mark.parametrize(
    ("kind", "compute"),
    [
        ("nonzero", lambda x, _: (x > 1).nonzero()),
        ("mask as index", lambda x, _: x[x > 1]),
        ("unique", lambda x, _: x.unique()),
        ("repeat_interleave", lambda x, _: x.repeat_interleave(x.long())),
        ("equal", lambda x, _: torch.equal(x, x)),
        ("index of the host", lambda x, _: x[[0, 1]]),
        ("copy to the device", lambda x, _: x.new_tensor([1.0])),
        ("copy to the device", lambda _, far: torch.tensor([1.0], device=far)),
        ("copy to the device", lambda _, far: torch.ones(2).to(far)),
    ],
)
def test_what_takes_its_shape_or_its_values_from_the_other_side_waits(device_waits, kind, compute):
    with device_waits.DeviceWaits() as waits:
        x = torch.arange(4.0).to(device_waits.FAR, non_blocking=True)
        compute(x, device_waits.FAR)
        assert waits.waits == {kind: 1}


def test_what_the_device_does_alone_does_not_wait(device_waits):
    with device_waits.DeviceWaits() as waits:
        x = torch.arange(4.0).to(device_waits.FAR, non_blocking=True).requires_grad_()
        y = x.new_zeros(4)
        y[x > 1] = 0.5
        y = torch.where(x > 1, x, y)[torch.arange(2, device=device_waits.FAR)]
        torch.zeros(3, device=y.device).index_add_(0, torch.zeros_like(y).long(), y.detach())
        x.repeat_interleave(2)
        y.sum().backward()
        assert not waits.waits
        assert x.grad.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_tensors_of_both_sides_do_not_go_together(device_waits):
    with device_waits.DeviceWaits():
        x = torch.ones(4).to(device_waits.FAR)
        with pytest.raises(RuntimeError, match="both the host and the device"):
            x + torch.ones(4)

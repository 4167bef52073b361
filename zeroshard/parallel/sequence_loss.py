"""The loss of a sequence whose parts are on several ranks, each with another number of labels.

    rank 0   mean 2.0 of 3 labels      rank 1   mean 1.0 of 1 label      both get (2.0 x 3 + 1.0 x 1) / 4 = 1.75

An engine averages gradients over all ranks, so the gradient of a rank's own mean is multiplied with its share of the
labels, and with the number of ranks. Rejected: torch's differentiable all_gather, whose backward is another exchange,
and fails on gloo in all groups but that of rank 0.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeroshard.parallel.sequence_loader import IGNORED


def mean_over_sequence(loss: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The mean over the labels of all ranks of `group`, with its gradient; called by all of them.

    Args:
        loss: the mean over this rank's labels; whatever it is where there are none.
        labels: this rank's, `shift_labels`; -100 where there is none.
    """
    own = (labels != IGNORED).sum()
    loss = torch.where(own > 0, loss, torch.zeros_like(loss))
    sums = torch.stack([loss.detach().double() * own, own.double()])
    dist.all_reduce(sums, group=group)
    labels_of_all = sums[1].clamp(min=1)
    share = loss * (own * group.size() / labels_of_all).to(loss.dtype)
    return share + ((sums[0] / labels_of_all).to(loss.dtype) - share).detach()

"""KL between two distributions that are known at a few token ids and, as one number, everywhere else (torch).

p are the student's, t the teacher's probabilities on a set of ids; log-probabilities come from log-softmaxes over the
whole vocabulary (or over the kept set, where sampling cut it), and the student's carries the gradient. `reverse` is
KL(p‖t) = Σ p (log p − log t), `forward` is KL(t‖p). What lies outside the set:

- `none`: left out; the value may be negative, and its gradient is not that of a KL;
- `renormalise`: both distributions are conditioned on the set;
- `bucket`: the rest of the vocabulary counts as one outcome, which makes the value a lower bound of the KL and 0 where
  the distributions agree.
"""

from __future__ import annotations

from typing import Literal

import torch

Direction = Literal["reverse", "forward"]
Tail = Literal["none", "renormalise", "bucket"]

#: Stands for the log of a probability of exactly 0 (an id outside the kept set; a rest that is empty), finite so that
#: no column and no output of a model is refused for it.
ABSENT = -1e30


def is_absent(log_probability: torch.Tensor) -> torch.Tensor:
    """bool: where the probability is exactly 0."""
    return log_probability <= ABSENT / 2


def set_kl(
    student: torch.Tensor,
    teacher: torch.Tensor,
    *,
    direction: Direction,
    tail: Tail,
    student_rest: torch.Tensor | None = None,
    teacher_rest: torch.Tensor | None = None,
    repeated: torch.Tensor | None = None,
) -> torch.Tensor:
    """[units, k] log-probabilities at the same ids -> [units].

    `student_rest`, `teacher_rest` [units] are the logs of the mass outside the set, for `bucket`. `repeated` bool
    [units, k] marks ids that stand earlier in their row already: they count once. A gradient reaches `student` and
    `student_rest` only. Raises `ValueError` where `bucket` has no rests.
    """
    teacher = teacher.detach()
    if repeated is not None:
        student, teacher = student.masked_fill(repeated, ABSENT), teacher.masked_fill(repeated, ABSENT)
    if tail == "renormalise":
        student = student - torch.logsumexp(student, -1, keepdim=True)
        teacher = teacher - torch.logsumexp(teacher, -1, keepdim=True)
        if repeated is not None:
            student, teacher = student.masked_fill(repeated, ABSENT), teacher.masked_fill(repeated, ABSENT)
    value = _summands(student, teacher, direction).sum(-1)
    if tail == "bucket":
        if student_rest is None or teacher_rest is None:
            raise ValueError("tail is 'bucket', and the mass outside the set was not given")
        value = value + _summands(student_rest, teacher_rest.detach(), direction)
    return value


def _summands(student: torch.Tensor, teacher: torch.Tensor, direction: Direction) -> torch.Tensor:
    """p (log p − log t), or t (log t − log p); 0 where the student cannot go: there the teacher may not either."""
    gone = is_absent(student)
    student, teacher = student.masked_fill(gone, 0.0), teacher.masked_fill(gone, 0.0)
    if direction == "reverse":
        return student.exp() * (student - teacher)
    return teacher.exp() * (teacher - student)


def rest_of(log_probabilities: torch.Tensor, floor: float = 1e-7) -> torch.Tensor:
    """[units, k] -> [units]: log(1 − Σ p), for a teacher that tells its top k only.

    The sum of float32 log-probabilities cannot say a rest below about 1e-7: `floor` is the smallest that is returned.
    """
    mass = log_probabilities.double().exp().sum(-1)
    return (1.0 - mass).clamp(min=floor).log().to(log_probabilities.dtype)

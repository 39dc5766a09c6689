"""The term `topk_kl` (torch): KL between student and teacher over a set of tokens at each position, with its gradient.

The gradient goes through the student's log-softmax at ids that were fixed before the update. It is that of the
divergence itself: at a position it does not depend on which token was sampled there.
"""

from __future__ import annotations

from miles_algo_opd.config import Support, Tail, TopkKlConfig
from miles_core.contracts.learning import LOGPROBS, Output, Tensor, TermLevel, TermMask, TermOutput, View
from miles_core.numerics.distill import rest_of, set_kl

ROLE = "teacher"


class TopkKl:
    """See `numerics.distill.set_kl` for the formula.

    The set holds the k most likely tokens of the student (at the proximal pass), of the teacher, or of both. With
    `chosen_by_scorer` the teacher is a scorer or an engine, which tells its own top k only: the mass of its rest is
    then 1 − Σ t, exact to about 1e-7. Metrics: `student_mass` and `teacher_mass` on the set.
    """

    level: TermLevel = "unit"
    mask: TermMask = "kept"
    weighted = False
    aggregation: str | None = None

    def __init__(self, config: TopkKlConfig, *, chosen_by_scorer: bool = False) -> None:
        self._config = config
        k, bucket = config.k, config.tail is Tail.bucket
        own = Output(name="topk_ids", k=k)
        theirs = Output(name="topk_ids", role=ROLE, k=k)
        ids = {Support.student: (own,), Support.teacher: (theirs,), Support.union: (own, theirs)}[config.support]
        names = tuple(output.column for output in ids)
        self._ids = names
        self._student = Output(name="token_logprobs", inputs=names, grad=True)
        self._student_rest = Output(name="rest_logprobs", inputs=names, grad=True) if bucket else None
        if config.support is Support.teacher:
            teacher = Output(name="topk_logprobs", role=ROLE, k=k)
            rest = Output(name="rest_logprobs", role=ROLE, k=k)
        else:
            teacher = Output(name="token_logprobs", role=ROLE, inputs=names)
            rest = Output(name="rest_logprobs", role=ROLE, inputs=names)
        self._teacher = teacher.column
        self._teacher_rest = rest.column if bucket and not chosen_by_scorer else None
        scored = [*ids, teacher, *([rest] if self._teacher_rest else [])]
        self.scores = {output.column: output for output in scored}
        self.needs = frozenset(self.scores)
        # The sampled token's own log-probability has no part in the value; core compares it with the engine's.
        self.outputs = (LOGPROBS, self._student, *([self._student_rest] if self._student_rest else []))

    def __call__(self, view: View) -> TermOutput:
        m = view["trainable"]
        student = view.out(self._student).masked_fill(~m[:, None], 0.0)
        teacher = view[self._teacher].to(student.dtype).masked_fill(~m[:, None], 0.0)
        rests: tuple[Tensor | None, Tensor | None] = (None, None)
        if self._student_rest is not None:
            rest = view[self._teacher_rest].to(student.dtype) if self._teacher_rest else rest_of(teacher)
            rests = (view.out(self._student_rest).masked_fill(~m, 0.0), rest.masked_fill(~m, 0.0))
        repeated = None
        if len(self._ids) == 2:
            own, theirs = view[self._ids[0]], view[self._ids[1]]
            again = (theirs[:, :, None] == own[:, None, :]).any(-1)
            repeated = student.new_zeros(student.shape).bool()
            repeated[:, own.shape[1] :] = again
        value = set_kl(
            student,
            teacher,
            direction=self._config.direction.value,
            tail=self._config.tail.value,
            student_rest=rests[0],
            teacher_rest=rests[1],
            repeated=repeated,
        )
        view.out(LOGPROBS)
        once = student.new_ones(student.shape) if repeated is None else (~repeated).to(student.dtype)
        masses = {"student_mass": student, "teacher_mass": teacher}
        return TermOutput(
            value=value.masked_fill(~m, 0.0),
            metrics={name: (x.detach().exp() * once).sum(-1).masked_fill(~m, 0.0) for name, x in masses.items()},
        )

"""Random sequences of propose, verify, commit and rewind on a runtime, against a plain reference of every prefix."""

from __future__ import annotations

import pytest
import torch
from amount import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lowering import random_path
from models import small

from selfspec.basics.errors import BusyError
from selfspec.models.low_precision import fake
from selfspec.runtime.forward import LeanRuntime
from selfspec.speculation.drafts import Draft
from selfspec.speculation.tree_batch import PlacedDraft, lay_out

VOCABULARY, LAYERS, SLOTS = 11, 3, 120
MODEL = small(VOCABULARY, LAYERS, seed=2)
REFERENCE = LeanRuntime(MODEL)  # of its own: knows only whole prefixes
tokens = st.integers(0, VOCABULARY - 1)


def logits_after(prefix):
    """From one full pass over the whole prefix."""
    with REFERENCE.session(len(prefix)):
        return REFERENCE.forward(torch.tensor([prefix]), 0, logits="last").logits[0, -1]


class Steps(RuleBasedStateMachine):
    """The committed tokens are what `cache.length` says; the last of them has no keys yet."""

    @initialize(prompt=st.lists(tokens, min_size=1, max_size=6))
    def begin(self, prompt):
        self.runtime = LeanRuntime(MODEL, kernel=fake)
        self.session = self.runtime.session(SLOTS)
        self.session.__enter__()
        self.committed = list(prompt)
        if len(prompt) > 1:
            self.runtime.forward(torch.tensor([prompt[:-1]]), 0, logits=None)
            self.runtime.cache.commit(0, range(len(prompt) - 2))

    def room(self):
        return len(self.committed) < 40

    @rule(seed=st.integers(0, 99), depth=st.integers(1, 4))
    def draft(self, seed, depth):
        """Scratch slots are written, with any sub-layers skipped or in few bits; nothing is committed."""
        last, place = self.committed[-1], len(self.committed) - 1
        path = self.runtime.compile(random_path(seed, LAYERS, words=VOCABULARY))
        for step in range(depth):
            out = self.runtime.forward(torch.tensor([[last]]), place + step, path=path)
            last = int(out.logits[0, -1].argmax())

    @precondition(room)
    @rule(data=st.data())
    def verify_and_commit(self, data):
        """Any tree, each of whose rows sees its own path; then any path of it is committed, and a further token."""
        parents, drafted = [], []
        for node in range(data.draw(st.integers(0, 6), label="nodes")):
            parents.append(data.draw(st.integers(-1, node - 1), label="parent"))
            drafted.append(data.draw(tokens, label="token"))
        draft = Draft(tuple(drafted), tuple(parents), None, (-1,) * len(parents))
        place = len(self.committed) - 1
        laid = lay_out([PlacedDraft(0, self.committed[-1], place, draft)], spare=SLOTS, device=self.runtime.device)
        step = self.runtime.forward(laid.tokens, laid.positions, slots=laid.slots, mask=laid.mask)
        for row, prefix in enumerate(draft.prefixes(self.committed)):
            torch.testing.assert_close(step.logits[0, row], logits_after(prefix), atol=1e-9, rtol=1e-9)
        path = draft.path_to(data.draw(st.integers(-1, len(draft) - 1), label="accepted"))
        self.runtime.cache.commit(0, path)
        self.committed += [*(drafted[node] for node in path), data.draw(tokens, label="next")]

    @precondition(lambda self: len(self.committed) > 1)
    @rule(data=st.data())
    def rewind(self, data):
        """To any earlier length: what lies beyond is forgotten."""
        kept = data.draw(st.integers(1, len(self.committed)), label="kept")
        self.committed = self.committed[:kept]
        self.runtime.cache.length[0] = kept - 1

    @rule()
    def a_second_session_is_refused(self):
        with pytest.raises(BusyError), self.runtime.session(1):
            pass

    @precondition(room)
    @rule(following=tokens)
    def plain_step(self, following):
        place = len(self.committed) - 1
        step = self.runtime.forward(torch.tensor([self.committed[-1:]]), place)
        torch.testing.assert_close(step.logits[0, 0], logits_after(self.committed), atol=1e-9, rtol=1e-9)
        self.runtime.cache.commit(0, ())
        self.committed.append(following)

    @invariant()
    def the_length_is_what_was_committed(self):
        assert self.runtime.cache.length[0] == len(self.committed) - 1

    def teardown(self):
        if hasattr(self, "session"):
            self.session.__exit__(None, None, None)


Steps.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestSteps = Steps.TestCase

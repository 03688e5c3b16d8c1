"""Online refinement of a draft path between prompts, from the model's verified distributions (after DVI, 2510.05421).

Opt-in: drafts then depend on earlier prompts. The generated text does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from selfspec.basics.errors import SelfspecError
from selfspec.draft_modules.module_files import write_part
from selfspec.llm.llm import LLM
from selfspec.llm.stream import Generation
from selfspec.profile.module_files_spec import sha256_of
from selfspec.profile.reading import read_profile, write_profile
from selfspec.profile.schema import Profile
from selfspec.text.prompt_template import Prompt
from selfspec.training.fit import check_folder
from selfspec.training.options import Loss
from selfspec.training.path_learner import PathLearner
from selfspec.training.path_training import RANK, ProfilePath
from selfspec.training.texts import TrainingText

RATE = 3e-4
LONGEST = 512  # most tokens of a text in a training step: the last tokens


class Refiner:
    """Generates text with an adapter on a profile's draft path, and takes a training step on every text.

    A step distils the model's distribution at every token of the text into the path. `adapter.safetensors` and
    `adapter.yaml` in `out` are written after each text, and can be resumed from: `Refiner(llm, read_profile(out /
    "adapter.yaml"), out=out)`. A step costs about three passes of the whole model over the text, and quantises the
    path's weights anew. Raises `SelfspecError` for a profile without a quantised draft path, and for an `out` that is
    not a writable folder.
    """

    def __init__(
        self,
        llm: LLM,
        profile: Profile,
        *,
        out: Path,
        rank: int = RANK,
        loss: Loss = "forward-kl",
        rate: float = RATE,
    ) -> None:
        check_folder(out)
        self._llm, self._file = llm, out / "adapter.safetensors"
        self._own = ProfilePath.from_profile(llm.runtime, profile, "adapter")
        self._learner = PathLearner(llm.runtime, self._own.path, self._own.trained, rank=rank, loss=loss, seed=0)
        self._optimizer = torch.optim.AdamW(self._learner.net.parameters(), lr=rate, weight_decay=0.01)
        self._drafter = llm.drafter_for(profile)
        self._sha256: str | None = None
        self.losses: list[float] = []

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Generate as `LLM.generate`, then take a training step on the text.

        Raises `SelfspecError` for an option `seed`, and as `LLM.generate` does.
        """
        if options.get("seed") is not None:
            raise SelfspecError("drafts that depend on earlier prompts have no seed; leave it out")
        ids = self._llm.encode(prompt)
        generation = self._llm.generate(ids, drafter=self._drafter, **options)
        self.learn([*ids, *generation.tokens])
        return generation

    def learn(self, tokens: list[int]) -> None:
        """Take a training step on the tokens of a text that the model wrote; later calls draft with the result."""
        tokens = tokens[-LONGEST:]
        if len(tokens) <= self._learner.depth:
            return
        loss = self._learner.loss([TrainingText(torch.tensor(tokens), torch.empty(0), 0)])
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._optimizer.step()
        self.losses.append(float(loss.detach()))
        write_part(self._file, self._learner.part())
        place = self._file.with_suffix(".yaml")
        write_profile(self._own.with_part(self._file), place)
        before, after = self._sha256, sha256_of(self._file)
        self._drafter, self._sha256 = self._llm.drafter_for(read_profile(place)), after
        if before not in (None, after):
            self._llm.runtime.unregister_trained(before)

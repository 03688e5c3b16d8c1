"""Draft heads without attention, which draft from the model's last stream by a few products for each token.

They are Medusa (Cai et al. 2401.10774), Hydra (Ankner et al. 2402.05109) and MLPSpeculator (Wertheimer et al.
2404.19124). Each is one module; training runs it over full texts, drafting from one pair on.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.draft_modules.heads import Head, LinearFactory, normed

EPS = 1e-6  # epsilon of MLPSpeculator's norms


class Steps(nn.Module):
    """A draft network with one step for each of `places` tokens; a head over the vocabulary reads its outputs."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places = places

    @abstractmethod
    def begin(self, stream: Tensor) -> Tensor:
        """Return the state before the first step, from the model's normalised stream `[.., D]`."""

    @abstractmethod
    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state after step k, and the step's output `[.., D or the state's width]`.

        `tokens` `[..]` and `embedded` `[.., D]` are those k tokens after the pair's own token.
        """

    def forward(self, tokens: Tensor, embedded: Tensor, streams: Tensor, depth: int) -> list[Tensor]:
        """Return the outputs `[B, n, D]` of the first `depth` steps, from each of n pairs on.

        `tokens` `[B, n + depth - 1]` are those of the pairs and those after them; `embedded` are their embeddings, and
        `streams` `[B, n, D]` the pairs' streams.
        """
        state, out, n = self.begin(streams), list[Tensor](), streams.shape[1]
        for k in range(depth):
            state, output = self.step(k, state, tokens[:, k : k + n], embedded[:, k : k + n])
            out.append(output)
        return out


class ResidualBlock(nn.Module):
    """Medusa's block x + silu(W x + b); if `inputs` differs from `outputs` (Hydra), x is mapped to `outputs` first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.short = nn.Linear(inputs, outputs) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[.., inputs]` to `[.., outputs]`."""
        return (x if self.short is None else self.short(x)) + F.silu(self.linear(x))


class Medusa(Steps):
    """Medusa: a head for each drafted token, all from the same stream and independent of the other drafted tokens."""

    def __init__(self, hidden: int, places: int, blocks: int = 1) -> None:
        super().__init__(places)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden, hidden) for _ in range(blocks))) for _ in range(places)
        )

    def begin(self, stream: Tensor) -> Tensor:
        """Return the stream itself."""
        return stream

    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unchanged state, and the output of head k, whatever tokens were drafted."""
        return state, self.heads[k](state)


class Hydra(Steps):
    """Hydra: a head for each drafted token, which also reads the embeddings of the tokens drafted before it."""

    def __init__(self, hidden: int, places: int, blocks: int = 1) -> None:
        super().__init__(places)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden * (k + 2) if not i else hidden, hidden) for i in range(blocks)))
            for k in range(places)
        )

    def begin(self, stream: Tensor) -> Tensor:
        """Return the stream itself."""
        return stream

    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stream and embeddings so far, side by side, and the output of head k."""
        state = torch.cat((state, embedded), -1)
        return state, self.heads[k](state)


class MlpSpeculatorNet(Steps):
    """MLPSpeculator: a state to which each step adds a token's embedding.

    `inner` is the width of the state. `tied`: all steps share one map, norm and embedding table, except that the first
    step has a map of its own. `tables` is the number of tokens of its own embedding tables; 0: the model's embeddings,
    mapped to the state's width. `scaled`: whether the stream is normalised without weights first.
    """

    def __init__(
        self, hidden: int, places: int, inner: int, *, tied: bool = False, tables: int = 0, scaled: bool = False
    ) -> None:
        super().__init__(places)
        self.scaled = scaled
        state = 0.5 ** (0.5 / places)
        self.alpha = math.sqrt((1 - state**2) * inner / 2) / state
        self.proj, self.emb, self.ln = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for k in range(places):
            again = tied and k
            into = nn.Linear(inner if k else hidden, inner, bias=False)
            self.proj.append(self.proj[1] if tied and k > 1 else into)
            table: nn.Module = nn.Embedding(tables, inner) if tables else nn.Linear(hidden, inner, bias=False)
            self.emb.append(self.emb[0] if again else table)
            self.ln.append(self.ln[0] if again else ScaleShift(inner))

    def begin(self, stream: Tensor) -> Tensor:
        """Return the stream, normalised and divided by sqrt(2) if `scaled`; the first step maps it to the state."""
        return F.rms_norm(stream, stream.shape[-1:], None, EPS) / math.sqrt(2) if self.scaled else stream

    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mapped state plus the token's scaled embedding, after norm and GELU, as state and output."""
        table = self.emb[k]
        added = table(tokens if isinstance(table, nn.Embedding) else embedded)
        state = F.gelu(self.ln[k](torch.add(self.proj[k](state), added, alpha=self.alpha)))
        return state, state


class ScaleShift(nn.Module):
    """RMSNorm with a shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised and shifted `x` `[.., width]`."""
        return normed(x, self.weight, EPS) + self.bias


class Map(nn.Module):
    """A linear map at inference, int8 if the head is quantised."""

    def __init__(self, linear: nn.Linear, make: LinearFactory) -> None:
        super().__init__()
        self.product = make.linear(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[n, inputs]` to `[n, outputs]`."""
        return self.product(x)


class StepsHead(Head):
    """A draft head that runs a `Steps` network.

    Its settings are the arguments of `net`; its tensors the network's, and `given_norm.weight` for the stream.
    """

    net: ClassVar[type[Steps]]

    def _begin(self, settings: Any, tensors: dict[str, Tensor]) -> None:
        self._eps, self._norm = float(settings["eps"]), tensors.pop("given_norm.weight")
        with torch.device("meta"):
            made = self.net(**settings["net"])
        name_by_id: dict[int, str] = {}
        for name, parameter in made.state_dict(keep_vars=True).items():  # a tied tensor is in the part once
            tensors[name] = tensors[name_by_id.setdefault(id(parameter), name)]
        made.load_state_dict(tensors, assign=True)
        self.steps = made.eval().requires_grad_(False)
        maps = {module: Map(module, self._linears) for module in made.modules() if isinstance(module, nn.Linear)}
        for name, module in list(made.named_modules(remove_duplicate=False)):  # a tied module has several names
            if module in maps:
                made.set_submodule(name, maps[module])
        self._linears.bytes += sum(p.numel() * p.element_size() for p in made.parameters())
        self.places = made.places

    def _read(self, row: int, start: int, tokens: Tensor, embedded: Tensor, streams: Tensor) -> tuple[Tensor, Any]:
        stream = normed(streams[-1:], self._norm, self._eps)
        state, out = self.steps.step(0, self.steps.begin(stream), tokens[-1:], embedded[-1:])
        return out, state

    def _draft_step(
        self, row: int, start: int, place: int, tokens: Tensor, embedded: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        state, out = self.steps.step(place, state, tokens, embedded)
        return out, state


class MedusaHead(StepsHead):
    """A Medusa draft head."""

    kind, net = "medusa", Medusa


class HydraHead(StepsHead):
    """A Hydra draft head."""

    kind, net = "hydra", Hydra


class MlpHead(StepsHead):
    """An MLPSpeculator draft head."""

    kind, net = "mlp", MlpSpeculatorNet

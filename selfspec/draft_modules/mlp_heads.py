"""Heads without attention: from the model's last stream, a few products for each further token.

Medusa (Cai et al. 2401.10774), Hydra (Ankner et al. 2402.05109) and MLPSpeculator (Wertheimer et al. 2404.19124). Each
is one module, which training runs over whole texts, and drafting from one pair on.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.draft_modules.heads import Head, Products, normed

EPS = 1e-6  # of MLPSpeculator's norms


class Steps(nn.Module):
    """One step for each of `places` further tokens. What steps give, `[.., D]`, the head over the vocabulary reads."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places = places

    @abstractmethod
    def begin(self, stream: Tensor) -> Tensor:
        """What the first step goes on from, by the model's stream `[.., D]`, normed."""

    @abstractmethod
    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """What the next step goes on from, and what this one gives.

        `tokens` `[..]` and `embedded` `[.., D]`: the token that is k tokens after the pair's.
        """

    def forward(self, tokens: Tensor, embedded: Tensor, streams: Tensor, depth: int) -> list[Tensor]:
        """What each of `depth` steps gives `[B, n, D]`, from each pair on.

        `tokens` `[B, n + depth - 1]`: the pairs', and those after them; `embedded` likewise; `streams` `[B, n, D]`.
        """
        state, out, n = self.begin(streams), list[Tensor](), streams.shape[1]
        for k in range(depth):
            state, given = self.step(k, state, tokens[:, k : k + n], embedded[:, k : k + n])
            out.append(given)
        return out


class ResidualBlock(nn.Module):
    """x + silu(W x + b), as Medusa's; the first of Hydra's is wider, and brings x to `outputs` by another map."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.short = nn.Linear(inputs, outputs) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        """`[.., inputs]` to `[.., outputs]`."""
        return (x if self.short is None else self.short(x)) + F.silu(self.linear(x))


class Medusa(Steps):
    """A head for each further token, all from the same stream; none knows what the others said."""

    def __init__(self, hidden: int, places: int, blocks: int = 1) -> None:
        super().__init__(places)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden, hidden) for _ in range(blocks))) for _ in range(places)
        )

    def begin(self, stream: Tensor) -> Tensor:
        """The stream itself."""
        return stream

    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """The k-th head, whatever was drafted."""
        return state, self.heads[k](state)


class Hydra(Steps):
    """A head for each further token, which also reads the embeddings of the tokens drafted before it."""

    def __init__(self, hidden: int, places: int, blocks: int = 1) -> None:
        super().__init__(places)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden * (k + 2) if not i else hidden, hidden) for i in range(blocks)))
            for k in range(places)
        )

    def begin(self, stream: Tensor) -> Tensor:
        """The stream itself."""
        return stream

    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """The stream and the embeddings so far, side by side."""
        state = torch.cat((state, embedded), -1)
        return state, self.heads[k](state)


class MlpSpeculatorNet(Steps):
    """MLPSpeculator: one state, to which each token's embedding is added on the way.

    `inner`: width of the state. `tied`: one map, one norm and one table for all tokens but the first map. `tables`:
    embeddings of its own over so many tokens; 0: the model's, by a map to the state's width. `scaled`: whether the
    stream is normed without weights first.
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
        """The stream, which the first step maps to the state."""
        return F.rms_norm(stream, stream.shape[-1:], None, EPS) / math.sqrt(2) if self.scaled else stream

    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """The state, mapped, with the token added."""
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
        """`[.., width]`."""
        return normed(x, self.weight, EPS) + self.bias


class Map(nn.Module):
    """A linear map at work, in 8 bits where heads are."""

    def __init__(self, linear: nn.Linear, make: Products) -> None:
        super().__init__()
        self.product = make.of(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, inputs]` to `[n, outputs]`."""
        return self.product(x)


class StepsHead(Head):
    """Steps at work. Settings: what `net` is made with; tensors: its own, and `given_norm.weight`, for the stream."""

    net: ClassVar[type[Steps]]

    def _begin(self, settings: Any, tensors: dict[str, Tensor]) -> None:
        self._eps, self._norm = float(settings["eps"]), tensors.pop("given_norm.weight")
        with torch.device("meta"):
            made = self.net(**settings["net"])
        given: dict[int, str] = {}
        for name, parameter in made.state_dict(keep_vars=True).items():  # what is tied has one of its names in the part
            tensors[name] = tensors[given.setdefault(id(parameter), name)]
        made.load_state_dict(tensors, assign=True)
        self.steps = made.eval().requires_grad_(False)
        maps = {module: Map(module, self._make) for module in made.modules() if isinstance(module, nn.Linear)}
        for name, module in list(made.named_modules(remove_duplicate=False)):  # what is tied has several names
            if module in maps:
                made.set_submodule(name, maps[module])
        self._make.bytes += sum(p.numel() * p.element_size() for p in made.parameters())
        self.places = made.places

    def _read(self, row: int, start: int, tokens: Tensor, embedded: Tensor, streams: Tensor) -> tuple[Tensor, Any]:
        stream = normed(streams[-1:], self._norm, self._eps)
        state, out = self.steps.step(0, self.steps.begin(stream), tokens[-1:], embedded[-1:])
        return out, state

    def _go_on(
        self, row: int, start: int, place: int, tokens: Tensor, embedded: Tensor, state: Any
    ) -> tuple[Tensor, Any]:
        state, out = self.steps.step(place, state, tokens, embedded)
        return out, state


class MedusaHead(StepsHead):
    """Medusa at work."""

    kind, net = "medusa", Medusa


class HydraHead(StepsHead):
    """Hydra at work."""

    kind, net = "hydra", Hydra


class MlpHead(StepsHead):
    """MLPSpeculator at work."""

    kind, net = "mlp", MlpSpeculatorNet

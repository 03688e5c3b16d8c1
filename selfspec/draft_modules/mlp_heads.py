"""Draft heads without attention, which draft from the model's last hidden state by a few linear layers for each token.

They are Medusa (Cai et al. 2401.10774), Hydra (Ankner et al. 2402.05109) and MLPSpeculator (Wertheimer et al.
2404.19124). Each head is one `nn.Module`: training runs it over whole texts, drafting runs it from one (token, hidden
state) pair.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from selfspec.basics.errors import SelfspecError, short
from selfspec.draft_modules.heads import Head, LinearFactory, normed
from selfspec.types.methods import WIDEST_DRAFT

EPS = 1e-6  # epsilon of MLPSpeculator's norms


class Steps(nn.Module):
    """A draft network with one step for each of `places` drafted tokens; an output head reads each step's output."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.places = places

    @abstractmethod
    def begin(self, stream: Tensor) -> Tensor:
        """Return the state before the first step, from the model's normed hidden states `[.., D]`."""

    @abstractmethod
    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state after step k, and the step's output `[.., D or the state's width]`.

        `tokens` `[..]` are the tokens k positions after the pairs' tokens, and `embedded` `[.., D]` their embeddings.
        """

    def forward(self, tokens: Tensor, embedded: Tensor, streams: Tensor, depth: int) -> list[Tensor]:
        """Return the outputs `[B, n, D]` of the first `depth` steps, for drafts that start at each of n pairs.

        `tokens` `[B, n + depth - 1]` are the tokens of the pairs and the `depth` - 1 tokens after them, `embedded` the
        embeddings of `tokens`, and `streams` `[B, n, D]` the hidden states of the pairs.
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
    """Medusa (2401.10774): a head for each drafted token; all read the same hidden state, and none a drafted token."""

    def __init__(self, hidden: int, places: int, blocks: int = 1) -> None:
        super().__init__(places)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(hidden, hidden) for _ in range(blocks))) for _ in range(places)
        )

    def begin(self, stream: Tensor) -> Tensor:
        """Return the hidden states `[.., D]` themselves as the state."""
        return stream

    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the unchanged state, and head k's output `[.., D]`, which does not depend on drafted tokens."""
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
        """Return the hidden states `[.., D]` themselves as the state."""
        return stream

    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state with the embeddings concatenated, and the output `[.., D]` of head k.

        The state is `[.., (k + 1) * D]` before step k and `[.., (k + 2) * D]` after it.
        """
        state = torch.cat((state, embedded), -1)
        return state, self.heads[k](state)


class MlpSpeculatorNet(Steps):
    """MLPSpeculator: a state to which each step adds a token's embedding.

    `inner`: the width of the state. `tied`: all steps share one norm and one embedding table, and all steps but the
    first share one map of the state. `tables`: the number of tokens in the embedding tables of the head (0: no tables,
    the model's embeddings are mapped to the state's width). `scaled`: whether the model's hidden state is first normed,
    without weights.
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
        """Return the state before step 0: the hidden states, normed and divided by sqrt(2) if `scaled`."""
        return F.rms_norm(stream, stream.shape[-1:], None, EPS) / math.sqrt(2) if self.scaled else stream

    def step(self, k: int, state: Tensor, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return GELU(norm(mapped state + alpha * embedding of the token)), as both the new state and the output."""
        table = self.emb[k]
        added = table(tokens if isinstance(table, nn.Embedding) else embedded)
        state = F.gelu(self.ln[k](torch.add(self.proj[k](state), added, alpha=self.alpha)))
        return state, state


class ScaleShift(nn.Module):
    """RMSNorm with a weight and an added bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` `[.., width]`, normed, times `weight`, plus `bias`."""
        return normed(x, self.weight, EPS) + self.bias


class Map(nn.Module):
    """A linear layer at inference, int8 if the head is quantised."""

    def __init__(self, linear: nn.Linear, make: LinearFactory) -> None:
        super().__init__()
        self.product = make.linear(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[n, inputs]` to `[n, outputs]`."""
        return self.product(x)


class StepsHead(Head):
    """A draft head that runs a `Steps` network.

    Its part file holds the arguments of the network class as the setting `net`, the tensors of the network, and
    `given_norm.weight`, the weight of the norm of the model's hidden states.
    """

    net: ClassVar[type[Steps]]

    def _begin(self, settings: Any, tensors: dict[str, Tensor]) -> None:
        self._eps, self._norm = float(settings["eps"]), tensors.pop("given_norm.weight")
        for name in ("places", "blocks"):  # whose modules are made one by one
            if not 1 <= settings["net"].get(name, 1) <= WIDEST_DRAFT:
                raise SelfspecError(f"a head of {short(settings['net'][name])} {name}; expected 1 to {WIDEST_DRAFT}")
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

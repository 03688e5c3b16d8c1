"""The command `selfspec serve`."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from selfspec.basics.errors import SelfspecError
from selfspec.cli.common import SEARCH_HINT, checked_profile, model_for, quiet, set_threads, stderr
from selfspec.cli.devices import SharedDeviceOptions
from selfspec.cli.serve_options import ServeCommand
from selfspec.profile.schema import Profile
from selfspec.proposers.store import Store

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.server.settings import Settings

_NEEDED = ("fastapi", "prometheus_client", "uvicorn")


def run(given: ServeCommand) -> int:
    """Validate the options, bind the port, load a replica per device, and serve; return the exit code."""
    if any(find_spec(name) is None for name in _NEEDED):
        raise SelfspecError('serving needs more packages; install them with: pip install "selfspec[serve]"')
    quiet()
    places = replicas(given)
    if given.api_key is not None and (not given.api_key.isascii() or not given.api_key.strip()):
        raise SelfspecError("--api-key: expected at least one character, all of ASCII")
    profile: str | Profile = given.profile if given.profile in ("auto", "none") else checked_profile(given.profile)
    model = model_for(given.model, profile if isinstance(profile, Profile) else None)
    if given.store is not None:
        Store(given.store)
    adapters = _adapters(given.adapter or ())
    set_threads(given.where.threads)

    from selfspec.server.server import bound

    if given.where.follows:
        _load(given, given.where, model, profile)
    with bound(given.host, given.port) as at:
        llms = [_load(given, where, model, profile, adapters) for where in places]
        if llms[0].profile is None and given.profile == "auto":
            stderr().print(SEARCH_HINT.format(model=model), markup=False, soft_wrap=True)
        _serve(given, llms, at)
    return 0


def _load(
    given: ServeCommand,
    where: SharedDeviceOptions,
    model: str,
    profile: str | Profile,
    adapters: Mapping[str, str] | None = None,
) -> LLM:
    """Load a replica's model; does not return in a tensor-parallel process other than the first."""
    from selfspec.llm.llm import load

    return load(
        model,
        profile=profile,
        store=given.store,
        device=where.place,
        dtype=where.dtype,
        tensor_parallel=where.tensor_parallel,
        adapters=adapters,
    )


def _serve(given: ServeCommand, llms: list[LLM], at: socket.socket) -> None:
    from selfspec.llm.batch import Batch
    from selfspec.models.dispatch import device_of
    from selfspec.server.server import serve, url
    from selfspec.server.service import Service
    from selfspec.server.worker import Replica
    from selfspec.server.worker_pool import WorkerPool

    limits = given.limits
    made = []
    for llm in llms:
        batch = Batch(llm, rows=limits.rows, memory=limits.memory)
        made.append(Replica(batch, str(device_of(llm.model.get_input_embeddings()))))
    pool = WorkerPool(made, rows=limits.rows, queue=limits.queue)
    settings = _settings(given, llms[0].name)
    many = f"{len(made)} replicas of {limits.rows} rows" if len(made) > 1 else f"{limits.rows} rows"
    with Service(llms[0], pool, settings) as service:
        stderr().print(f"serving {settings.names[0]} at {url(at)} ({many})", markup=False, soft_wrap=True)
        serve(service, at)


def _adapters(given: Sequence[str]) -> dict[str, str]:
    """Parse adapters as folders by name. Raises `SelfspecError`."""
    found: dict[str, str] = {}
    for text in given:
        name, _, folder = text.partition("=")
        if not name or not folder or name in found:
            raise SelfspecError(f"--adapter {text}: expected NAME=FOLDER, each name once")
        found[name] = folder
    return found


def _settings(given: ServeCommand, name: str) -> Settings:
    from selfspec.server.settings import Settings

    limits = given.limits
    return Settings(
        names=(*(given.served_model_name or [name]), *_adapters(given.adapter or ())),
        api_key=given.api_key,
        rows=limits.rows,
        queue=limits.queue,
        max_tokens=limits.max_tokens,
        max_body=limits.max_body,
        timeout=limits.timeout,
        reading=limits.read_timeout,
        grace=limits.grace,
    )


def replicas(given: ServeCommand) -> list[SharedDeviceOptions]:
    """Return the device options of each replica. Raises `SelfspecError`."""
    if given.devices is None:
        return [given.where]
    if given.where.device != "auto" or given.where.device_map is not None or given.where.tensor_parallel:
        raise SelfspecError(
            "--devices says where each replica runs; expected it without --device, --device-map and --tensor-parallel"
        )
    names = [name.strip() for name in given.devices.split(",")]
    if not all(names):
        raise SelfspecError(f"--devices {given.devices}: expected devices separated by commas, such as cuda:0,cuda:1")
    return [replace(given.where, device=name) for name in names]

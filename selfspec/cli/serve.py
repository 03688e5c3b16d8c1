"""The command `selfspec serve`."""

from __future__ import annotations

import gc
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from ipaddress import ip_address
from typing import TYPE_CHECKING

from selfspec.basics.errors import SelfspecError
from selfspec.cli.command_options import ServeCommand
from selfspec.cli.common import (
    check_named_method,
    held_note,
    model_for,
    peak_note,
    profile_named,
    quiet,
    search_hint,
    stderr,
)
from selfspec.cli.input_options import SharedDeviceOptions
from selfspec.profile.schema import Profile
from selfspec.proposers.store import Store

if TYPE_CHECKING:
    from selfspec.llm.llm import LLM
    from selfspec.server.protocol import Settings

_NEEDED = ("fastapi", "prometheus_client", "uvicorn")


def run(command: ServeCommand) -> int:
    """Validate the options, bind the port, load a replica per device, and serve; return the exit code."""
    if any(find_spec(name) is None for name in _NEEDED):
        raise SelfspecError(
            "serving needs packages; install them with: pip install fastapi uvicorn prometheus-client "
            '(in a clone: pip install -c constraints.txt ".[serve]")'
        )
    quiet()
    replica_devices, _ = replicas(command), command.limits.rows
    if command.api_key is not None and (not command.api_key.isascii() or not command.api_key.strip()):
        raise SelfspecError("--api-key: the key is blank or not ASCII; expected at least one ASCII character")
    _check_origins(command.cors_origin or ())
    named = profile_named(command.profile)
    model, profile = model_for(command.model, named), named or command.profile
    check_named_method(command.method)
    if command.store is not None:
        Store(command.store)
    adapters = _adapters(command.adapter or ())
    if shared := adapters.keys() & set(command.served_model_name or [model]):
        raise SelfspecError(f"--adapter {min(shared)}: is the name of the model, too; expected another name")
    if adapters and command.device_options.tensor_parallel:
        raise SelfspecError("--adapter and --tensor-parallel: one process would switch alone; expected one of them")
    command.device_options.set_threads()

    from selfspec.server.server import bind_socket

    if command.device_options.is_worker:
        _load(command, command.device_options, model, profile)
    with bind_socket(command.host, command.port) as sock:
        if (console := stderr()).is_terminal:
            console.print(f"loading {model} ...", markup=False, soft_wrap=True)
        llms = [_load(command, where, model, profile, adapters) for where in replica_devices]
        if llms[0].has_default_profile:
            stderr().print(search_hint(llms[0]), markup=False, soft_wrap=True)
        _serve(command, llms, sock)
    return 0


def _load(
    command: ServeCommand,
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
        store=command.store,
        method=command.method,
        device=where.placement,
        dtype=where.dtype,
        tensor_parallel=where.tensor_parallel,
        adapters=adapters,
        extra_memory=command.extra_memory,
    )


def _serve(command: ServeCommand, llms: list[LLM], sock: socket.socket) -> None:
    from selfspec.llm.batch import Batch
    from selfspec.models.dispatch import device_of
    from selfspec.server.server import serve, url
    from selfspec.server.service import Service
    from selfspec.server.worker_pool import Replica, WorkerPool

    limits = command.limits
    workers = []
    for llm in llms:
        batch = Batch(llm, rows=limits.rows, memory=limits.memory, longest=limits.max_model_len)
        workers.append(Replica(batch, str(device_of(llm.model.get_input_embeddings()))))
    pool = WorkerPool(workers, rows=limits.rows, queue=limits.queue)
    settings = _settings(command, llms[0].name, sock.getsockname()[0])
    many = f"{len(workers)} replicas of {limits.rows} sequences" if len(workers) > 1 else f"{limits.rows} sequences"
    with Service(llms[0], pool, settings) as service:
        gc.collect()
        gc.freeze()  # what was loaded stays: collections while requests run need not look at it
        line = f"serving {settings.names[0]} at {url(sock)} ({many}){held_note(llms[0].held)}{peak_note()}"
        serve(service, sock, ready=lambda: stderr().print(line, markup=False, soft_wrap=True))


def _adapters(specs: Sequence[str]) -> dict[str, str]:
    """Parse adapters as folders by name. Raises `SelfspecError`."""
    folders: dict[str, str] = {}
    for text in specs:
        name, _, folder = text.partition("=")
        if not name or not folder or name in folders:
            raise SelfspecError(f"--adapter {text}: expected NAME=FOLDER, each name once")
        folders[name] = folder
    return folders


def _check_origins(origins: Sequence[str]) -> None:
    """Raise `SelfspecError` for an origin that no browser sends; they send scheme, host and port, without a path."""
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#]+", origin):
            raise SelfspecError(
                f"--cors-origin {origin}: expected scheme and host without a path, such as https://app.example, or *"
            )


def _hosts(command: ServeCommand, address: str) -> tuple[str, ...]:
    """Return the `Host` headers to answer: without a key on a loopback `address`, this machine's; else any (none)."""
    if command.api_key is not None or not ip_address(address).is_loopback:
        return ()
    names = (command.host, address)
    return ("localhost", "127.0.0.1", *names, *(f"[{name}]" for name in ("::1", *names)))


def _settings(command: ServeCommand, name: str, address: str) -> Settings:
    from selfspec.server.protocol import Settings

    limits = command.limits
    return Settings(
        names=(*(command.served_model_name or [name]), *_adapters(command.adapter or ())),
        api_key=None if command.api_key is None else command.api_key.strip(),
        cors_origins=tuple(command.cors_origin or ()),
        hosts=_hosts(command, address),
        rows=limits.rows,
        queue=limits.queue,
        max_tokens=limits.max_tokens,
        max_model_len=limits.max_model_len,
        max_body=limits.max_body,
        timeout=limits.timeout,
        reading=limits.read_timeout,
        grace=limits.grace,
    )


def replicas(command: ServeCommand) -> list[SharedDeviceOptions]:
    """Return the device options of each replica. Raises `SelfspecError`."""
    if command.devices is None:
        return [command.device_options]
    if (
        command.device_options.device != "auto"
        or command.device_options.device_map is not None
        or command.device_options.tensor_parallel
    ):
        raise SelfspecError(
            "--devices says where each replica runs; expected it without --device, --device-map and --tensor-parallel"
        )
    names = [name.strip() for name in command.devices.split(",")]
    if not all(names):
        raise SelfspecError(f"--devices {command.devices}: expected devices separated by commas, such as cuda:0,cuda:1")
    return [replace(command.device_options, device=name) for name in names]

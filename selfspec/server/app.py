"""The server's routes, and the web page for trying a model; `Service` answers the requests."""

from __future__ import annotations

import logging
import time
from html import escape
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from selfspec.server.middleware import NOTES, AuthMiddleware, refusal
from selfspec.server.request_schemas import ApiError
from selfspec.server.service import Service
from selfspec.show.markup import LOOKS
from selfspec.types.events import Origin

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def page() -> str:
    """Return the page's HTML, with the colours and explanations of token origins that notebooks show too."""
    styles = "\n".join(f".{_name(origin)} {{ {look.css} }}" for origin, look in LOOKS.items())
    legend = " ".join(
        f'<span class="{_name(origin)}" title="{escape(origin.meaning)}">{escape(origin)}</span>' for origin in Origin
    )
    text = files("selfspec.server").joinpath("page.html").read_text(encoding="utf-8")
    return text.replace("/* looks */", styles).replace("<!-- legend -->", legend)


def _name(origin: Origin) -> str:
    return origin.replace(" ", "-")


def make_app(service: Service) -> FastAPI:
    """Return the app of a service, whose worker pool must be running when requests arrive."""
    app = FastAPI(title="selfspec", openapi_url=None)
    app.add_middleware(AuthMiddleware, api_key=service.settings.api_key, hosts=service.settings.hosts, log=service.log)
    if origins := service.settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(HTTPException, _no_such)
    app.add_exception_handler(Exception, _failed)
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", service.completion, methods=["POST"], response_model=None)
    _add_looks(app, service)
    return app


def _add_looks(app: FastAPI, service: Service) -> None:
    """Add the read-only routes: models, health, metrics and the web page."""
    started, shown = int(time.time()), page()

    def model(name: str) -> dict[str, Any]:
        reader = service.reader
        own = {"context": reader.max_model_len, "chat": reader.has_chat_template}
        named = {"id": name, "object": "model", "created": started, "owned_by": "selfspec"}
        return {**named, "max_model_len": reader.max_model_len, "selfspec": own}

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model(name) for name in service.settings.names]})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        service.reader.check_model(name)
        return JSONResponse(model(name))

    @app.get("/health")
    async def health() -> Response:
        pool = service.pool
        state = "ending" if service.draining else "ok" if pool.alive else "dead"
        counts = {"running": pool.running, "waiting": pool.waiting}
        return JSONResponse({"status": state, **counts}, 200 if state == "ok" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/")
    async def look() -> Response:
        return HTMLResponse(shown, headers={"content-security-policy": POLICY})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope.get(NOTES, {})["error"] = error.message
    return refusal(error)


async def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = {404: "no such path", 405: f"{request.method} is not allowed here"}.get(error.status_code, error.detail)
    served = "served: POST /v1/chat/completions, /v1/completions; GET /v1/models, /health, /metrics, /"
    return await _refused(
        request, ApiError(error.status_code, f"{problem}; {served}", headers=dict(error.headers or {}))
    )


async def _failed(request: Request, error: Exception) -> Response:
    request.scope.get(NOTES, {})["error"] = type(error).__name__
    logging.getLogger(__name__).error("a request failed: %s", type(error).__name__)
    return refusal(ApiError(500, "the server failed; its log says how"))
